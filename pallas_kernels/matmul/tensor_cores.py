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


class _Form(NamedTuple):
    """The types of the operands in PTX, and whether the computers start products in turns."""

    left: str
    right: str
    in_turns: bool


class StartedProduct(NamedTuple):
    """A product of float8 tiles, to which the tensor cores may still write."""

    # [64, 128] float32, in the layout `plgpu.Layout.WGMMA`.
    product: jax.Array
    # Both tiles, as operands of `mosaic.inline`, and their offsets in 16 bytes.
    operands: list[Any]
    form: _Form


def start_float8_product(
    left: Any, right: Any, stage: jax.Array, row: Any, first: Any, in_turns: bool
) -> StartedProduct:
    """Starts to multiply 64 rows of a float8 tile by a *block*: 128 rows of another, transposed.

    Args:
      left: [stages, rows, 128] float8 in shared memory, in swizzled tiles of 8 rows of 128 bytes.
      right: [stages, 128 * blocks, 128] float8 in shared memory, swizzled like `left`.
      row: the first of the 64 rows of left[stage], a multiple of 8.
      first: the block of right[stage] to multiply by.
      in_turns: whether the computer waits for its turn before it starts a product.
    """
    tile = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))
    # In units of 16 bytes: a row of a tile has 8.
    offsets = [
        jnp.int32(stage * (ref.shape[1] * 8) + begin * 8)
        for ref, begin in ((left, row), (right, first * _COLUMNS))
    ]
    operands = [(left, tile), (right, tile), *offsets]
    left_type, right_type = (float8.PTX_TYPES[jnp.dtype(ref.dtype)] for ref in (left, right))
    form = _Form(left_type, right_type, in_turns)
    emit = functools.partial(_emit_start_of_float8_product, form)
    return StartedProduct(mosaic.inline(emit, operands, _PRODUCT), operands, form)


def add_float8_product(
    total: jax.Array,
    started: StartedProduct,
    index: int,
    count: Any,
    row_scales: jax.Array | None,
    block_scale: Any,
) -> tuple[jax.Array, StartedProduct]:
    """Adds a scaled product of 64 rows of a float8 tile and a block of another one to a total.

    Waits until the product is complete. Then each thread multiplies its elements by their scales,
    adds them, and starts the product with the next block, if there is one.

    Args:
      total: [64, 128] float32, in the layout `plgpu.Layout.WGMMA`.
      started: the product with block `index`, counted from the first that was started.
      count: how many blocks to multiply by, at least 1, at most those from the first started on.
        If `index` is not below it, nothing is added or started.
      row_scales: [64] float32 in the layout `plgpu.Layout.WGMMA.reduce(1)`; None if they are 1.
      block_scale: the float32 scale of the block.

    Returns:
      The new total, and the product with the next block; undefined if there is none.
    """
    layout = plgpu.Layout.WGMMA
    last = started.operands[1][0].shape[1] // _COLUMNS - 1
    emit = functools.partial(_emit_float8_product, started.form, index, last)
    operands = [*started.operands, (started.product, layout), jnp.int32(count)]
    operands += [(total, layout), block_scale]
    if row_scales is not None:
        operands.append((row_scales, layout.reduce(1)))
    total, product = mosaic.inline(emit, operands, [_PRODUCT] * 2)
    return total, started._replace(product=product)


def wait_for_turn() -> None:
    """Waits until the other computer has given this one the turn to start a product."""
    mosaic.inline(lambda: mosaic.asm(_WAIT_FOR_TURN, "~{memory}"), [])


def give_turn() -> None:
    mosaic.inline(lambda: mosaic.asm(_GIVE_TURN, "~{memory}"), [])


# Computer c waits at barrier 8 + c. Mosaic uses 0 and one barrier for each warpgroup, from 1 on.
# `decoder` uses 8, too, in kernels without turns.
_TURN = "{{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; {}add.u32 t, t, 8; bar.{} t, 256; }}"
_WAIT_FOR_TURN, _GIVE_TURN = _TURN.format("", "sync"), _TURN.format("xor.b32 t, t, 1; ", "arrive")


def _emit_start_of_float8_product(
    form: _Form, left_ref: Value, right_ref: Value, left_offset: Array, right_offset: Array
) -> Array:
    """Emits `start_float8_product` for one thread."""
    # The operands of the PTX: the product's registers, and both descriptors.
    registers = [f"${i}" for i in range(_PER_PRODUCT)]
    left, right = (f"${_PER_PRODUCT + i}" for i in range(2))
    text = _multiply(form, registers, left, right)
    values = _inline_asm(
        _PER_PRODUCT,
        [_descriptor(left_ref, left_offset), _descriptor(right_ref, right_offset)],
        " ".join(["{ .reg .b64 a, b; .reg .pred nothing, more;", *text, "}"]),
        [*["=f"] * _PER_PRODUCT, "l", "l"],
    )
    return _products_of(values)[0]


def _emit_float8_product(
    form: _Form,
    index: int,
    last: int,
    left_ref: Value,
    right_ref: Value,
    left_offset: Array,
    right_offset: Array,
    product: Array,
    count: Array,
    total: Array,
    block_scale: Array,
    *row_scales: Array,
) -> list[Array]:
    """Emits `add_float8_product` for one thread."""
    # A thread holds elements of two rows.
    factors = [mosaic.scalar(block_scale)] * 2
    if row_scales:
        scales = [vector.extract(each, [], [0]) for each in mosaic.registers(row_scales[0])]
        factors = list(map(arith.mulf, scales, factors))
    operands = [_descriptor(left_ref, left_offset), _descriptor(right_ref, right_offset)]
    operands += [mosaic.scalar(count), *factors]
    inputs = [
        vector.extract(register, [], [i])
        for array in (total, product)
        for register in mosaic.registers(array)
        for i in range(2)
    ]
    # This is one piece of PTX, in which the next product uses the registers of the old one. If LLVM
    # saw the wait, ptxas would assign registers of its own to each, and spill the totals.
    # LLVM's constraint "0" puts an input in the register of result 0, "1" in that of result 1.
    num_results = 2 * _PER_PRODUCT
    constraints = (
        *["=f"] * num_results,
        *map(str, range(num_results)),
        *["l", "l", "r", "f", "f"],  # the types of `operands`
    )
    text = _text_of_float8_product(form, index, last)
    return _products_of(_inline_asm(num_results, [*inputs, *operands], text, constraints))


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


def _multiply(form: _Form, registers: Sequence[str], left: str, right: str) -> list[str]:
    """Returns the PTX that starts a product to `registers`; `left` and `right` are descriptors."""
    # The caller's PTX declares the registers a and b and the predicates. This text sets them all
    # itself, so that a caller need not know in which order it inserts products.
    names = "{" + ",".join(registers) + "}"
    text = ["setp.ne.b32 nothing, 0, 0; setp.eq.b32 more, 0, 0;"]  # false and true
    text.append(f"mov.b64 a, {left}; mov.b64 b, {right};")
    text += [_WAIT_FOR_TURN] if form.in_turns else []
    text.append("wgmma.fence.sync.aligned;")
    # An instruction sums over 32 of the 128 columns: 2 of the units of 16 bytes in a descriptor. It
    # adds to the registers if its predicate is true; the first one must overwrite them.
    for i in range(4):
        text.append(
            f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k32.f32.{form.left}.{form.right} "
            f"{names}, a, b, {'more' if i else 'nothing'}, 1, 1;"
        )
        if i < 3:
            text.append("add.s64 a, a, 2; add.s64 b, b, 2;")
    text += [_GIVE_TURN] if form.in_turns else []
    return [*text, "wgmma.commit_group.sync.aligned;"]


def _text_of_float8_product(form: _Form, index: int, last: int) -> str:
    """Returns the PTX of `add_float8_product`, with the operands of `_emit_float8_product`."""
    # Results are the total and the product. Inputs are these again, in the same registers, both
    # descriptors, the count, and the factors for two rows.
    totals, products = (
        [f"${first + i}" for i in range(_PER_PRODUCT)] for first in (0, _PER_PRODUCT)
    )
    left, right, count, *factors = (f"${4 * _PER_PRODUCT + i}" for i in range(5))
    text = ["{ .reg .b64 a, b, next; .reg .pred nothing, more, past;"]
    if index:
        text.append(f"setp.le.s32 past, {count}, {index}; @past bra.uni done;")
    text.append("wgmma.wait_group.sync.aligned 0;")
    for i, (total, element) in enumerate(zip(totals, products, strict=True)):
        # Of four neighbouring numbers, two belong to each of the thread's two rows.
        text.append(f"fma.rn.f32 {total}, {element}, {factors[i // 2 % 2]}, {total};")
    if index < last:
        text.append(f"setp.le.s32 past, {count}, {index + 1}; @past bra.uni done;")
        # Tiles of 128 rows of 128 bytes follow each other. A descriptor counts 16 bytes.
        text.append(f"add.s64 next, {right}, {(index + 1) * _COLUMNS * 128 // 16};")
        text += _multiply(form, products, left, "next")
    return " ".join([*text, "done: }"])
