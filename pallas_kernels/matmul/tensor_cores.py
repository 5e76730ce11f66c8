"""Emits instructions of the tensor cores that Pallas lacks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.fabric.mosaic import Array, Value, arith, llvm, vector

# The columns of a product of float8 tiles, and the registers in which a thread holds the product.
_COLUMNS = 128
_PER_PRODUCT = 64 * _COLUMNS // WARPGROUP
_PRODUCT = plgpu.ShapeDtypeStruct((64, _COLUMNS), jnp.float32, layout=plgpu.Layout.WGMMA)


def add_warp_product(
    left: Sequence[Value], right: Sequence[Value], sums: Sequence[Value], dtype: Any
) -> list[Value]:
    """Multiplies 16 rows by 8 columns, 16 numbers each, and adds the products to `sums`.

    A thread has four words of the rows, `left`, and two of the columns, `right`, with two numbers
    of `dtype` in each, and four float32 sums; see PTX ISA, "Matrix fragments for mma.m16n8k16".
    """
    f32 = mosaic.float_type()
    of_dtype = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}[jnp.dtype(dtype)]
    new_sums = llvm.inline_asm(
        mosaic.struct_type([f32] * 4),
        [*left, *right, *sums],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{of_dtype}.{of_dtype}.f32 {{$0, $1, $2, $3}}, "
        "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
        has_side_effects=True,  # LLVM must not move it to a branch, where only some threads are
    )
    return [llvm.extractvalue(f32, new_sums, [i]) for i in range(4)]


class StartedProduct(NamedTuple):
    """A product of float8 tiles, to which the tensor cores may still write."""

    # [64, 128] float32, in the layout `plgpu.Layout.WGMMA`.
    product: jax.Array
    # Both tiles, as operands of `mosaic.inline`, their offsets in 16 bytes, and their types in PTX.
    operands: list[Any]
    kinds: list[str]


def start_float8_product(
    left: Any, right: Any, stage: jax.Array, row: Any, first: Any
) -> StartedProduct:
    """Starts to multiply 64 rows of a float8 tile by a *block*: 128 rows of another, transposed.

    Args:
      left: [stages, rows, 128] float8 in shared memory, in swizzled tiles of 8 rows of 128 bytes.
      right: [stages, 128 * blocks, 128] float8 in shared memory, swizzled like `left`.
      row: the first of the 64 rows of left[stage], a multiple of 8.
      first: the block of right[stage] to multiply by.
    """
    tile = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))
    # In units of 16 bytes: a row of a tile has 8.
    offsets = [
        jnp.int32(stage * (ref.shape[1] * 8) + begin * 8)
        for ref, begin in ((left, row), (right, first * _COLUMNS))
    ]
    operands = [(left, tile), (right, tile), *offsets]
    kinds = [float8.PTX_TYPES[jnp.dtype(ref.dtype)] for ref in (left, right)]
    emit = functools.partial(_emit_start_of_float8_product, kinds)
    return StartedProduct(mosaic.inline(emit, operands, _PRODUCT), operands, kinds)


def add_float8_products(
    totals: Sequence[jax.Array],
    started: StartedProduct,
    count: Any,
    row_scales: jax.Array | None,
    block_scales: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """Adds scaled products of 64 rows of a float8 tile and the blocks of another one to totals.

    The tensor cores compute the product with one block after the other. Each thread waits until it
    is complete, multiplies its elements of the product by their scales, and adds them.

    Args:
      totals: for each block, [64, 128] float32, in the layout `plgpu.Layout.WGMMA`.
      started: the product with the first block.
      count: how many blocks to multiply by, from the first on: at least 1, at most one a total.
      row_scales: [64] float32 in the layout `plgpu.Layout.WGMMA.reduce(1)`; None if they are 1.
      block_scales: for each total, the float32 scale of its block.

    Returns:
      The new totals. Those of blocks below `count` grew by the products times both scales.
    """
    num, layout = len(totals), plgpu.Layout.WGMMA
    emit = functools.partial(_emit_float8_products, num, started.kinds)
    operands = [*started.operands, (started.product, layout), jnp.int32(count)]
    operands += [*((total, layout) for total in totals), *block_scales]
    if row_scales is not None:
        operands.append((row_scales, layout.reduce(1)))
    return tuple(mosaic.inline(emit, operands, [_PRODUCT] * num))


def _emit_start_of_float8_product(
    kinds: Sequence[str], left_ref: Value, right_ref: Value, left_offset: Array, right_offset: Array
) -> Array:
    """Emits `start_float8_product` for one thread."""
    # The operands of the PTX: the product's registers, and both descriptors.
    registers = [f"${i}" for i in range(_PER_PRODUCT)]
    left, right = (f"${_PER_PRODUCT + i}" for i in range(2))
    text = _multiply(kinds, registers, left, right)
    values = _inline_asm(
        _PER_PRODUCT,
        [_descriptor(left_ref, left_offset), _descriptor(right_ref, right_offset)],
        " ".join(["{ .reg .b64 a, b; .reg .pred nothing, more;", *text, "}"]),
        [*["=f"] * _PER_PRODUCT, "l", "l"],
    )
    return _products_of(values)[0]


def _emit_float8_products(
    num_blocks: int,
    kinds: Sequence[str],
    left_ref: Value,
    right_ref: Value,
    left_offset: Array,
    right_offset: Array,
    product: Array,
    count: Array,
    *arrays: Array,
) -> list[Array]:
    """Emits `add_float8_products` for one thread."""
    # All of this is one piece of PTX, in which all products use the same registers. If LLVM saw the
    # products as values, ptxas would assign registers of its own to each, and spill the totals.
    num_results = (num_blocks + 1) * _PER_PRODUCT
    count = mosaic.scalar(count)
    # `arrays` are the totals, the scales of blocks and, unless they are 1, the scales of rows.
    old_totals, scales = arrays[:num_blocks], arrays[num_blocks:]
    block_scales = [mosaic.scalar(each) for each in scales[:num_blocks]]
    row_scales = scales[num_blocks:]
    # A thread holds elements of two rows.
    thread_row_scales = [None, None]
    if row_scales:
        registers = mosaic.registers(row_scales[0])
        thread_row_scales = [vector.extract(each, [], [0]) for each in registers]
    factors = [
        scale if row_scale is None else arith.mulf(row_scale, scale)
        for scale in block_scales
        for row_scale in thread_row_scales
    ]
    operands = [_descriptor(left_ref, left_offset), _descriptor(right_ref, right_offset)]
    operands += [count, *factors]
    inputs = [
        vector.extract(register, [], [i])
        for array in (*old_totals, product)
        for register in mosaic.registers(array)
        for i in range(2)
    ]
    # The new totals are in the registers of the old ones, and all products in those of the first:
    # LLVM's constraint "0" puts an input in the register of result 0, "1" in that of result 1.
    constraints = (
        *["=f"] * num_results,
        *map(str, range(num_results)),
        *["l", "l", "r"],  # the types of `operands`
        *["f"] * len(factors),
    )
    text = _text_of_float8_products(num_blocks, kinds)
    values = _inline_asm(num_results, [*inputs, *operands], text, constraints)
    return _products_of(values)[:num_blocks]


def _inline_asm(
    num: int, operands: Sequence[Value], text: str, constraints: Sequence[str]
) -> list[Value]:
    """Emits PTX with `num` float32 results."""
    results = llvm.inline_asm(
        mosaic.struct_type([mosaic.float_type()] * num),
        operands,
        text,
        ",".join(constraints),
        has_side_effects=True,  # keeps its place among waits and arrivals
    )
    return [llvm.extractvalue(mosaic.float_type(), results, [i]) for i in range(num)]


def _products_of(values: Sequence[Value]) -> list[Array]:
    """Returns the arrays [64, 128] whose elements in this thread are `values`."""
    f32 = mosaic.float_type()
    pairs = [
        vector.from_elements(mosaic.vector_type(2, f32), values[i : i + 2])
        for i in range(0, len(values), 2)
    ]
    num_pairs = _PER_PRODUCT // 2
    return [
        mosaic.tensor_core_array(pairs[i : i + num_pairs], (64, _COLUMNS), f32)
        for i in range(0, len(pairs), num_pairs)
    ]


def _descriptor(ref: Value, offset: Array) -> Value:
    """Returns the descriptor of wgmma's operand at `offset`, in units of 16 bytes, of `ref`."""
    # A block's shared memory ends before 256 KiB, so the address takes the descriptor's low 14
    # bits. What does not depend on the step comes first, since it is computed once.
    #
    # Addresses count 16 bytes: tiles of 8 rows, 1024 bytes apart (64 << 32), swizzled (1 << 62).
    # The tensor cores ignore the other distance (1 << 16), as the contraction is contiguous.
    start = arith.shrui(mosaic.narrow(mosaic.address(ref)), mosaic.i32(4))
    low = mosaic.add(mosaic.add(start, 1 << 16), mosaic.scalar(offset))
    wide = arith.extui(mosaic.integer_type(64), low)
    return arith.ori(wide, mosaic.i64(1 << 62 | 64 << 32))


def _multiply(kinds: Sequence[str], registers: Sequence[str], left: str, right: str) -> list[str]:
    """Returns the PTX that starts a product to `registers`; `left` and `right` are descriptors."""
    # The caller's PTX declares the registers a and b and the predicates. This text sets them all
    # itself, so that a caller need not know in which order it inserts products.
    names = "{" + ",".join(registers) + "}"
    text = ["setp.ne.b32 nothing, 0, 0; setp.eq.b32 more, 0, 0;"]  # false and true
    text.append(f"mov.b64 a, {left}; mov.b64 b, {right};")
    text.append("wgmma.fence.sync.aligned;")
    # An instruction sums over 32 of the 128 columns: 2 of the units of 16 bytes in a descriptor. It
    # adds to the registers if its predicate is true; the first one must overwrite them.
    for i in range(4):
        text.append(
            f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k32.f32.{kinds[0]}.{kinds[1]} "
            f"{names}, a, b, {'more' if i else 'nothing'}, 1, 1;"
        )
        if i < 3:
            text.append("add.s64 a, a, 2; add.s64 b, b, 2;")
    return [*text, "wgmma.commit_group.sync.aligned;"]


def _text_of_float8_products(num_blocks: int, kinds: Sequence[str]) -> str:
    """Returns the PTX of `add_float8_products`, with the operands of `_emit_float8_products`."""
    # Results are the totals of all blocks and one product. Inputs are these again, in the same
    # registers, both descriptors, the count, and for each block its factor for two rows.
    num_results = (num_blocks + 1) * _PER_PRODUCT
    products = [f"${num_blocks * _PER_PRODUCT + i}" for i in range(_PER_PRODUCT)]
    operands = (f"${2 * num_results + i}" for i in range(3 + 2 * num_blocks))
    left, right, count, *factors = operands
    text = ["{ .reg .b64 a, b, next; .reg .pred nothing, more, past;"]
    for block in range(num_blocks):
        if block:
            # Past `count`, blocks are skipped, with the instructions for them.
            text.append(f"setp.le.s32 past, {count}, {block}; @past bra.uni done;")
            # Tiles of 128 rows of 128 bytes follow each other. A descriptor counts 16 bytes.
            text.append(f"add.s64 next, {right}, {block * _COLUMNS * 128 // 16};")
            text += _multiply(kinds, products, left, "next")
        text.append("wgmma.wait_group.sync.aligned 0;")
        for i, element in enumerate(products):
            total = f"${block * _PER_PRODUCT + i}"
            # Of four neighbouring numbers, two belong to each of the thread's two rows.
            factor = factors[2 * block + i // 2 % 2]
            text.append(f"fma.rn.f32 {total}, {element}, {factor}, {total};")
    return " ".join([*text, "done: }"])
