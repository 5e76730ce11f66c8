"""Emits instructions of the tensor cores that Pallas lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.fabric.mosaic import Array, Value, arith, llvm, vector

# The columns of a product of float8 tiles, and the registers in which a thread holds the product.
_COLUMNS = 128
_PER_PRODUCT = 64 * _COLUMNS // WARPGROUP


def add_warp_product(
    left: Sequence[Value], right: Sequence[Value], sums: Sequence[Value], dtype: Any
) -> list[Value]:
    """Multiplies 16 rows by 8 columns, 16 numbers each, and adds the products to sums.

    All threads of a warp execute the instruction, which is complete when it returns. A thread's
    places are in PTX ISA, "Matrix fragments for mma.m16n8k16".

    Args:
      left: a thread's four words of the rows, with two numbers in each.
      right: a thread's two words of the columns, with two numbers in each.
      sums: a thread's four sums, float32.
      dtype: the dtype of the numbers, bfloat16 or float16.
    """
    f32 = mosaic.float_type()
    of_dtype = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}[jnp.dtype(dtype)]
    found = llvm.inline_asm(
        mosaic.struct_type([f32] * 4),
        [*left, *right, *sums],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{of_dtype}.{of_dtype}.f32 {{$0, $1, $2, $3}}, "
        "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
    )
    return [llvm.extractvalue(f32, found, [i]) for i in range(4)]


def add_float8_products(
    totals: Sequence[jax.Array],
    left: Any,
    right: Any,
    stage: jax.Array,
    row: Any,
    first: Any,
    count: Any,
    row_scales: jax.Array | None,
    block_scales: Sequence[Any],
    *,
    interpreted: bool,
) -> tuple[jax.Array, ...]:
    """Multiplies 64 rows of a float8 tile by other tiles, and adds the scaled products to totals.

    A *block* is the transpose of 128 rows of `right`. The rows are multiplied by one block after
    the other. The tensor cores compute a product, this function waits until it is complete, and
    each thread then multiplies its elements of the product by their scales and adds them.

    All of this is one piece of PTX, in which all products use the same registers. If LLVM saw the
    products as values, ptxas would assign registers of its own to each, and spill the totals.

    Args:
      totals: for each block, [64, 128] float32, in the layout `plgpu.Layout.WGMMA`.
      left: [stages, rows, 128] float8 in shared memory, in swizzled tiles of 8 rows of 128 bytes.
      right: [stages, 128 * blocks, 128] float8 in shared memory, swizzled like `left`.
      stage: the index of the stage to multiply.
      row: the first of the 64 rows of left[stage], a multiple of 8.
      first: the index of the first block of right[stage] to multiply.
      count: the number of blocks to multiply, from 1 to the number of `totals`.
      row_scales: [64] float32, the scales of the rows, in the layout
        `plgpu.Layout.WGMMA.reduce(1)`; None if they are 1.
      block_scales: for each of the totals, the scale of the block that is multiplied for it.
      interpreted: whether Pallas' GPU interpreter runs the kernel.

    Returns:
      The new totals. totals[i] grew by left[stage, row : row + 64] @ block[first + i] times the
      scales of rows and block, if i < count.
    """
    if interpreted:
        rows, blocks = left[stage, pl.ds(row, 64)], right.at[stage]
        return _products_interpreted(totals, rows, blocks, first, count, row_scales, block_scales)
    kinds = [float8.PTX_TYPES[jnp.dtype(ref.dtype)] for ref in (left, right)]
    num = len(totals)
    num_totals = num * _PER_PRODUCT

    def emit(left_ref: Value, right_ref: Value, *arrays: Array) -> list[Array]:
        offsets, count, arrays = arrays[:2], mosaic.scalar(arrays[2]), arrays[3:]
        sums, of_blocks = arrays[:num], [mosaic.scalar(scale) for scale in arrays[num : 2 * num]]
        wide = mosaic.integer_type(64)
        # A thread holds elements of two rows.
        of_rows = [None, None]
        if row_scales is not None:
            of_rows = [vector.extract(each, [], [0]) for each in mosaic.registers(arrays[2 * num])]

        def descriptor(ref: Value, offset: Array) -> Value:
            place = arith.trunci(mosaic.integer_type(32), mosaic.address(ref))
            place = arith.addi(place, mosaic.scalar(offset))
            start = arith.shrui(arith.andi(place, mosaic.i32(0x3FFFF)), mosaic.i32(4))
            # The descriptor by which PTX's instruction wgmma finds an operand in shared memory. It
            # says that tiles of 8 rows are 1024 bytes apart, with a 128-byte swizzle.
            return arith.ori(arith.extui(wide, start), mosaic.i64(1 << 62 | 64 << 32 | 1 << 16))

        factors = [
            scale if of_row is None else arith.mulf(of_row, scale)
            for scale in of_blocks
            for of_row in of_rows
        ]
        operands = [descriptor(left_ref, offsets[0]), descriptor(right_ref, offsets[1])]
        operands += [count, *factors]
        inputs = [
            vector.extract(register, [], [i])
            for total in sums
            for register in mosaic.registers(total)
            for i in range(2)
        ]
        constraints = (
            *["=f"] * num_totals,
            *map(str, range(num_totals)),
            *["l", "l", "r"],
            *["f"] * len(factors),
        )
        added = llvm.inline_asm(
            mosaic.struct_type([mosaic.float_type()] * num_totals),
            [*inputs, *operands],
            _text_of_float8_products(num, kinds),
            ",".join(constraints),
            asm_dialect=0,
            has_side_effects=True,
        )
        values = [llvm.extractvalue(mosaic.float_type(), added, [i]) for i in range(num_totals)]
        pairs = [
            vector.from_elements(mosaic.vector_type(2, mosaic.float_type()), values[i : i + 2])
            for i in range(0, num_totals, 2)
        ]
        num_pairs = _PER_PRODUCT // 2
        return [
            mosaic.tensor_core_array(pairs[i : i + num_pairs], (64, _COLUMNS), mosaic.float_type())
            for i in range(0, num * num_pairs, num_pairs)
        ]

    offsets = [
        jnp.int32(stage * (ref.shape[1] * 128) + begin * 128)
        for ref, begin in ((left, row), (right, first * _COLUMNS))
    ]
    tile = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))
    layout = plgpu.Layout.WGMMA
    operands = [left, right, *offsets, jnp.int32(count), *totals, *block_scales]
    layouts = [tile, tile, *[mosaic.SCALAR] * 3, *[layout] * num, *[mosaic.SCALAR] * num]
    if row_scales is not None:
        operands.append(row_scales)
        layouts.append(layout.reduce(1))
    result = plgpu.ShapeDtypeStruct((64, _COLUMNS), jnp.float32, layout=layout)
    return tuple(mosaic.inline(emit, operands, layouts, [result] * num))


def _text_of_float8_products(num: int, kinds: Sequence[str]) -> str:
    """Returns the PTX of `add_float8_products` for `num` blocks.

    `kinds` are the names that PTX has for the float8 types of the left and the right operand. In
    the text, $0, $1 and so on are the new totals, then the old ones, then the other operands: the
    descriptors of left and right, the number of blocks to multiply, and for each block the scales
    of a thread's two rows.
    """
    names = "{" + ",".join(f"c{i}" for i in range(_PER_PRODUCT)) + "}"
    left, right, count, *factors = (f"${2 * num * _PER_PRODUCT + i}" for i in range(3 + 2 * num))
    text = [
        "{",
        f".reg .f32 c<{_PER_PRODUCT}>; .reg .b64 a, b; .reg .pred nothing, more, past;",
        "setp.ne.b32 nothing, 0, 0; setp.eq.b32 more, 0, 0;",
    ]
    for block in range(num):
        if block:
            text.append(f"setp.le.s32 past, {count}, {block}; @past bra.uni done;")
        text.append(f"mov.b64 a, {left};")
        # Tiles of 128 rows of 128 bytes follow each other. A descriptor counts 16 bytes.
        text.append(f"add.s64 b, {right}, {block * _COLUMNS * 128 // 16};")
        text.append("wgmma.fence.sync.aligned;")
        # An element of the product is a sum over 128 columns. An instruction sums over 32 of them,
        # so 4 instructions are needed. The first one adds to nothing.
        for i in range(4):
            text.append(
                f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k32.f32.{kinds[0]}.{kinds[1]} "
                f"{names}, a, b, {'more' if i else 'nothing'}, 1, 1;"
            )
            if i < 3:
                text.append("add.s64 a, a, 2; add.s64 b, b, 2;")
        text.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        for i in range(_PER_PRODUCT):
            total = f"${block * _PER_PRODUCT + i}"
            # Of four neighbouring numbers, two belong to each of the thread's two rows.
            factor = factors[2 * block + i // 2 % 2]
            text.append(f"fma.rn.f32 {total}, c{i}, {factor}, {total};")
    return " ".join([*text, "done: }"])


def _products_interpreted(
    totals: Sequence[jax.Array],
    rows: jax.Array,
    blocks: Any,
    first: Any,
    count: Any,
    row_scales: jax.Array | None,
    block_scales: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """Computes `add_float8_products` where Pallas' GPU interpreter runs the kernel.

    `rows` are the 64 rows to multiply, and `blocks` [128 * blocks, 128] is right[stage].
    """
    of_rows = 1.0 if row_scales is None else row_scales[:, None]
    sums = []
    for i, (total, scale) in enumerate(zip(totals, block_scales, strict=True)):
        block = jnp.minimum(first + i, blocks.shape[0] // _COLUMNS - 1)
        matrix = blocks[pl.ds(block * _COLUMNS, _COLUMNS)].astype(jnp.float32)
        product = jnp.dot(rows.astype(jnp.float32), matrix.T)
        sums.append(jnp.where(i < count, product * (of_rows * scale) + total, total))
    return tuple(sums)
