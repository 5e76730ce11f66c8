"""Kernel that transposes quantized rows, for the gradient of a grouped matmul's matrices.

The gradient of a group's matrix is a sum over the rows of the group. In float8 operands, the tensor
cores require that the axis of a sum is the innermost one. Hence this kernel transposes the rows.

Before the transposition, each row has one scale for each 128 columns. A matmul adds the products of
128 rows before it multiplies their sum by a scale, so 128 rows must share a scale. The kernel
therefore gives each block of 128 rows by 128 columns one scale, the largest scale of its rows. Each
value is multiplied by its row's scale, divided by the block's scale, and rounded to float8 again.

A thread block handles a tile of 128 rows by 128 columns. Each thread handles a patch of 8 rows by
16 columns:

            4 patches                    A warp handles 64 rows by 64 columns. It loads 64 bytes of
         +--+--+--+--+                   each row: each thread 16 bytes. It stores 64 bytes of each
    8    |  |  |  |  |                   column: each thread 8 bytes.
  patches+--+--+--+--+
         |  |  |  |  |
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.formats import FLOAT8_ROWS
from pallas_kernels.matmul.quantized_tiles import (
    PTX_TYPE,
    Scaled,
    Tile,
    load_words,
    max_of,
    on_tiles,
    past,
    place_of,
    pointer_to,
    rounded_word,
    share,
    shared_numbers,
    store_words,
    transposed_bytes,
    warps_of,
    word_at,
)
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# A thread handles a patch of 8 rows by 16 columns. A row of the patch is four 32-bit words, of four
# float8 values each.
_ROWS, _COLUMNS = 8, 16
_WORD = 4


def transpose_rows(rows: Scaled, blocks: jax.Array) -> TransposedRows:
    """Transposes quantized rows, with one scale for each 128 rows by 128 columns.

    Args:
      rows: [R, K] float8_e4m3fn with scales; K is a multiple of 128.
      blocks: [P / 128, 2] int32, each block's first row and number of rows: the first result of
        `row_blocks`. P is the number of rows with padding, in which each group starts at a
        multiple of 128.

    Returns:
      The transposed rows, values [K, P] and scales [P / 128, K / 128]. If a block has fewer than
      128 rows, the others are zero. The contents of blocks without any rows are undefined.
    """
    width, num_row_blocks = rows.values.shape[1], blocks.shape[0]

    def emit(memrefs: Any, block: Value, column: Value, first: Value, count: Value) -> None:
        _Tile(block, column, first, count, width, num_row_blocks * BLOCK).emit(*memrefs)

    results = on_tiles(
        "transpose_rows",
        rows,
        blocks,
        [
            jax.ShapeDtypeStruct((width, num_row_blocks * BLOCK), rows.values.dtype),
            jax.ShapeDtypeStruct((num_row_blocks, width // BLOCK), jnp.float32),
        ],
        emit,
        width=width,
        num_warps=warps_of(_ROWS, _COLUMNS),
        num_shared=BLOCK,
    )
    return TransposedRows(*results)


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """A tile of 128 rows by 128 columns, which a thread block transposes.

    Attributes:
      width: number of columns of the rows before the transposition.
      height: number of columns after it: the number of rows, with each group padded to a multiple
        of 128.
    """

    width: int
    height: int

    def emit(self, values: Any, scales: Any, out: Any, out_scales: Any, shared: Any) -> None:
        """Emits the code by which a thread transposes its patch.

        Takes memrefs of all arrays, and of shared memory for the scales of the tile's rows.
        """
        i32, f32 = mosaic.i32, mosaic.float_type()
        thread, _, lane, _, row, place = place_of(_ROWS, _COLUMNS)
        left = arith.addi(arith.muli(self.column, i32(BLOCK)), place)

        # words[i] are four 32-bit words: the 16 float8 values of row i of the thread's patch.
        words = [self.load_words(values, arith.addi(row, i32(i)), left) for i in range(_ROWS)]
        # The scales of the tile's rows lie far from each other in memory, so each is loaded by one
        # of the 128 threads.
        own = self.load_scale(scales, thread)
        share(shared, thread, [arith.bitcast(mosaic.integer_type(32), own)])
        mosaic.block_barrier()
        # Each warp finds the largest scale of the tile's 128 rows. Positive float32 numbers compare
        # like their bits as integers, so the maximum is taken of the bits.
        of_lane = [word_at(shared, arith.addi(lane, i32(start))) for start in range(0, BLOCK, WARP)]
        bits = mosaic.warp_max(max_of(of_lane))
        largest = arith.maximumf(arith.bitcast(f32, bits), mosaic.f32(FLOAT8_ROWS.least_scale))
        inverse = float8.reciprocal(largest)
        factors = [
            arith.mulf(scale, inverse)
            for start in range(0, _ROWS, 4)
            for scale in shared_numbers(shared, arith.addi(row, i32(start)), 4)
        ]
        with mosaic.when(mosaic.equal(thread, i32(0))):
            at = pointer_to(out_scales, self.block, self.width // BLOCK, self.column, 4)
            llvm.store(largest, at)

        row_of_out = arith.addi(arith.muli(self.block, i32(BLOCK)), row)
        start = pointer_to(out, left, self.height, row_of_out, 1)
        for word in range(_COLUMNS // _WORD):
            rounded = [
                rounded_word(float8.widened(PTX_TYPE, words[i][word]), [factor] * _WORD)
                for i, factor in enumerate(factors)
            ]
            of_columns = zip(
                *(transposed_bytes(rounded[i : i + _WORD]) for i in range(0, _ROWS, _WORD)),
                strict=True,
            )
            for j, both in enumerate(of_columns):
                store_words(both, past(start, (word * _WORD + j) * self.height))

    def load_words(self, values: Any, row: Value, left: Value) -> list[Value]:
        """Loads 16 float8 values of a row, from column `left` of the input on, as 32-bit words.

        `row` is counted in the tile. If the tile's block has no such row, the values are zero.
        """
        exists, row = self.find(row)
        words = load_words(pointer_to(values, row, self.width, left, 1), _COLUMNS // _WORD)
        return [arith.select(exists, word, mosaic.i32(0)) for word in words]

    def load_scale(self, scales: Any, row: Value) -> Value:
        """Loads the scale of a row of the tile, or 0 if the tile's block has no such row."""
        exists, row = self.find(row)
        at = pointer_to(scales, row, self.width // BLOCK, self.column, 4)
        return arith.select(exists, llvm.load(mosaic.float_type(), at), mosaic.f32(0.0))
