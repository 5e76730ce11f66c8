"""Kernel that quantizes matrices to float8, and also transposes them, in one memory pass.

Tensor cores require float8 operands whose contraction dimension is innermost. A grouped matmul
contracts one dimension of the matrices, and the gradient of its rows the other one. So both orders
are needed. A scale belongs to a block of 128 rows by 128 columns, so a matrix and its transpose
have the same float8 values and scales.

A thread block of 8 warps handles a tile of 128 rows by 128 columns, and a thread a patch of 8 x 8
elements:

            4 patches                    A warp handles 64 rows by 32 columns. It stores 32 bytes of
         +--+--+--+--+                   each row and 64 of each column: each thread 8 bytes. The
    8    |  |  |  |  |                   elements stay as they were loaded, two bfloat16 numbers in
  patches+--+--+--+--+                   a word, until the scale is known. Each is rounded once, and
         |  |  |  |  |                   the transposed words are put together from rounded bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.matmul.packed import Packed
from pallas_kernels.matmul.quantized_tiles import (
    PTX_TYPE,
    Scaled,
    max_of,
    on_tiles,
    past,
    pointer_to,
    scale_of,
    share,
    shared_words,
)
from pallas_kernels.matmul.row_blocks import BLOCK

# A thread handles a patch of 8 columns, and of as many rows as 32 registers can hold. Four float8
# values make a 32-bit word.
_COLUMNS = 8
_REGISTERS = 32
_WORD = 4
# The patches of a warp's 32 threads lie 4 side by side and 8 above each other.
_ACROSS = 4
_DOWN = WARP // _ACROSS
# The number of warps that cover 128 columns.
_SIDES = BLOCK // (_COLUMNS * _ACROSS)


def _rows_of(packed: Packed) -> int:
    """Returns the number of rows of a thread's patch."""
    return _REGISTERS * 4 // (packed.size * _COLUMNS)


def _warps_of(packed: Packed) -> int:
    """Returns the number of warps that cover a tile."""
    return _SIDES * BLOCK // (_rows_of(packed) * _DOWN)


def quantize_matrices(matrices: jax.Array) -> tuple[Scaled, Scaled]:
    """Quantizes matrices to float8_e4m3fn; returns the quantized matrices and their transposes.

    Args:
      matrices: [L, K, N] bfloat16, float16 or float32; K and N are multiples of 128.

    Returns:
      (matrices [L, K, N], transposed matrices [L, N, K]).
    """
    num_matrices, height, width = matrices.shape
    packed = Packed(matrices.dtype)

    def emit(memrefs: Any, block: Value, column: Value, first: Value, count: Value) -> None:
        _emit(memrefs, packed, height, width, block, column)

    tiles, rows = (num_matrices, height // BLOCK, width // BLOCK), num_matrices * height
    values, transposed, scales, turned = on_tiles(
        "quantize_matrices",
        [matrices.reshape(-1, width)],
        None,
        [
            jax.ShapeDtypeStruct((rows, width), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_matrices * width, height), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows // BLOCK, width // BLOCK), jnp.float32),
            jax.ShapeDtypeStruct((num_matrices * width // BLOCK, height // BLOCK), jnp.float32),
        ],
        emit,
        width=width,
        num_warps=_warps_of(packed),
        num_shared=_warps_of(packed),
    )
    turned = turned.reshape(num_matrices, tiles[2], tiles[1])
    return (
        Scaled(values.reshape(matrices.shape), scales.reshape(tiles)),
        Scaled(transposed.reshape(num_matrices, width, height), turned),
    )


def _emit(
    memrefs: Any, packed: Packed, height: int, width: int, block: Value, column: Value
) -> None:
    """Emits the code by which a thread quantizes its patch of a tile.

    Args:
      memrefs: those of the matrices, the results and shared memory.
      packed: the matrices' dtype.
      height: number of rows of a matrix.
      width: number of columns of a matrix.
      block: the index of the tile's block of 128 rows, counted over all matrices.
      column: the tile's columns begin at 128 * column.
    """
    source, values, transposed, scales, scales_turned, shared = memrefs
    i32 = mosaic.i32
    thread = mosaic.thread()
    warp, lane = (op(thread, i32(WARP)) for op in (arith.divui, arith.remui))
    strip, side = (op(warp, i32(_SIDES)) for op in (arith.divui, arith.remui))
    down, across = (op(lane, i32(_ACROSS)) for op in (arith.divui, arith.remui))
    num_rows = _rows_of(packed)
    row = arith.muli(arith.addi(arith.muli(strip, i32(_DOWN)), down), i32(num_rows))
    place = arith.muli(arith.addi(arith.muli(side, i32(_ACROSS)), across), i32(_COLUMNS))
    left = arith.addi(arith.muli(column, i32(BLOCK)), place)
    top = arith.muli(block, i32(BLOCK))

    # rows[i] are the words with the 8 elements of row i of the patch.
    start = pointer_to(source, arith.addi(top, row), width, left, packed.size)
    starts = [past(start, i * width * packed.size) for i in range(num_rows)]
    loaded = [packed.load(each, _COLUMNS) for each in starts]
    rows = [[packed.without_infinities(word) for word in words] for words in loaded]
    largest = packed.largest([word for words in rows for word in words])
    largest = mosaic.warp_max(largest)
    with mosaic.when(mosaic.equal(lane, i32(0))):
        share(shared, warp, [largest])
    mosaic.block_barrier()
    fours = (shared_words(shared, i32(i), 4) for i in range(0, _warps_of(packed), 4))
    scale, factor = scale_of(max_of(size for four in fours for size in four))
    wide, high = width // BLOCK, height // BLOCK
    matrix, above = (op(block, i32(high)) for op in (arith.divui, arith.remui))
    with mosaic.when(mosaic.equal(thread, i32(0))):
        llvm.store(scale, pointer_to(scales, block, wide, column, 4))
        first = arith.addi(arith.muli(matrix, i32(wide)), column)
        llvm.store(scale, pointer_to(scales_turned, first, high, above, 4))

    in_order = pointer_to(values, arith.addi(top, row), width, left, 1)
    first = arith.addi(arith.muli(matrix, i32(width)), left)
    above = arith.addi(arith.muli(above, i32(BLOCK)), row)
    turned = pointer_to(transposed, first, height, above, 1)

    rounded = []
    for i, words in enumerate(rows):
        numbers = [arith.mulf(n, factor) for word in words for n in packed.numbers(word)]
        rounded.append(
            [float8.packed(PTX_TYPE, numbers[j : j + _WORD]) for j in range(0, _COLUMNS, _WORD)]
        )
        _store(rounded[-1], past(in_order, i * width))
    for j in range(_COLUMNS // _WORD):
        squares = [
            _transposed([words[j] for words in rounded[i : i + _WORD]])
            for i in range(0, num_rows, _WORD)
        ]
        for k, of_column in enumerate(zip(*squares, strict=True)):
            _store(of_column, past(turned, (_WORD * j + k) * height))


def _store(words: Sequence[Value], pointer: Value) -> None:
    of_all = mosaic.vector_type(len(words), mosaic.integer_type(32))
    llvm.store(vector.from_elements(of_all, words), pointer, alignment=_WORD * len(words))


def _transposed(rows: list[Value]) -> list[Value]:
    """Transposes 4 x 4 bytes: takes a word for each row, and returns one for each column."""
    a, b, c, d = rows

    def chosen(low: Value, high: Value, bytes_of_both: int) -> Value:
        return mosaic.chosen_bytes(low, high, mosaic.i32(bytes_of_both))

    # The first two columns of rows a and b, byte by byte, and those of c and d; then the last two.
    pairs = [(chosen(a, b, order), chosen(c, d, order)) for order in (0x5140, 0x7362)]
    return [chosen(upper, lower, order) for upper, lower in pairs for order in (0x5410, 0x7632)]
