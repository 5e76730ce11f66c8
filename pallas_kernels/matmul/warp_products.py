"""Multiplies a few rows by MXFP4 matrices, by tensor core instructions of single warps.

Where groups have few rows, a grouped matmul by MXFP4 matrices does little besides decoding them. A
warpgroup waits for each of its instructions before it may write to its registers again. So the
warps multiply by `mma.sync` (PTX ISA, "Matrix fragments for mma.m16n8k16"), which is complete when
it returns. It multiplies 16 columns by 8 rows, and sums over 16 of K.

The order in which an instruction sums over K is chosen such that each thread finds its numbers side
by side. Let q be the index of a thread in its quad, lane mod 4. Of each column, the thread holds 8
neighbouring numbers of a block of 32, and of each row the 8 numbers at the same places in K. They
are the operands of two instructions:

  places in a block of 32     0 .. 7     8 .. 15    16 .. 23   24 .. 31
  thread of the quad          q = 0      q = 1      q = 2      q = 3
  its numbers                 1 word of a column, 4 words of a row

The two instructions of a block sum over numbers that have the same scale. Each thread multiplies
its sums of a block by this scale, and adds them to its totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT, VECTOR_BYTES, WARP, WORD_BYTES
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.formats import MXFP4
from pallas_kernels.matmul import tensor_cores
from pallas_kernels.matmul.decoder import (
    APART,
    BYTE_0,
    NUMBER_BYTES,
    Decoder,
    look_up,
    own_table,
    place_of_vector,
    transforms_of_numbers,
)
from pallas_kernels.matmul.kernel import STEP
from pallas_kernels.matmul.quantized_tiles import BFLOAT16

# The most rows of a tile that warps multiply.
MOST_ROWS = 32
# The numbers of a block, which have the same scale; and the blocks of a piece, 64 of K.
_BLOCK = MXFP4.block[1]
_BLOCKS = STEP // _BLOCK
# An instruction multiplies this many rows.
_ROWS = ROW_ALIGNMENT
# A thread holds 8 numbers of a column's block: 4 bytes, in one word.
_COLUMN_BYTES = WORD_BYTES
# Rows are stored as swizzled tiles of 8 rows by 32 of K: 8 threads load 16 bytes from all banks.
_TILE_ROW_BYTES = 2 * _BLOCK
_TILE_BYTES = _ROWS * _TILE_ROW_BYTES
ROW_TRANSFORMS = plgpu.TilingTransform((_ROWS, _BLOCK)), plgpu.SwizzleTransform(_TILE_ROW_BYTES)


def add_products(
    totals: jax.Array,
    left: Any,
    stage: jax.Array,
    decoder: Decoder,
    parts: Sequence[Sequence[Any]],
    height: int,
) -> jax.Array:
    """Multiplies the first `height` rows in a stage by columns; adds the products to totals.

    Args:
      totals: float32 in the layout `plgpu.Layout.WGMMA`: the transposed products of rows and parts,
        [64, block_m] for each part, side by side or below each other.
      left: [stages, block_m, step] bfloat16 in shared memory, stored by `ROW_TRANSFORMS`.
      parts: for each part in `totals`, from left to right and then from top to bottom, the index of
        the matrix, and the first of its 64 columns in the tile.
    """
    block_m, pieces, totals_shape = left.shape[1], decoder.pieces, totals.shape

    def emit(values: Any, scales: Any, table: Any, rows: Any, stage: Any, *arrays: Any) -> Any:
        # The sums stay in registers from the first piece to the last one of the step.
        *first_columns, totals = arrays
        thread = _Thread(decoder, (values, scales, table, rows), mosaic.scalar(stage), block_m)
        registers = mosaic.registers(totals)
        numbers = [vector.extract(each, [], [i]) for each in registers for i in range(2)]
        # The sums of a thread for each part and, in it, each tile of 8 rows: rows 2q and 2q + 1 of
        # the thread's first column, and then of its second, 8 later.
        sums = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
        tiles, tiles_of_part = range(height // _ROWS), block_m // _ROWS
        # The thread's first column in each part.
        columns = [mosaic.add(mosaic.scalar(c), mosaic.tensor_core_row()) for c in first_columns]
        for piece in range(pieces):
            # part_scales[part][i][block] is the scale of a block of column i of the thread's two.
            part_scales = [thread.load_scales(column, piece) for column in columns]
            for block in range(_BLOCKS):
                row_words = [thread.load_rows(tile, piece, block) for tile in tiles]
                for part, column in enumerate(columns):
                    column_pairs = [thread.load_pairs(column, piece, block, i) for i in range(2)]
                    block_scales = [part_scales[part][i][block] for i in range(2)]
                    for tile, words in enumerate(row_words):
                        at = part * tiles_of_part + tile
                        sums[at] = _plus_products(sums[at], column_pairs, words, block_scales)
        two = mosaic.vector_type(2, mosaic.float_type())
        pairs = [
            vector.from_elements(two, each[i : i + 2]) for each in sums for i in range(0, 4, 2)
        ]
        return mosaic.tensor_core_array(pairs, totals_shape, mosaic.float_type())

    # Each part's first column, counted in a stage, through the tiles of all matrices.
    first_columns = [jnp.int32(matrix * decoder.block_n + first) for matrix, first in parts]
    operands = [
        (decoder.values, plgpu.RefType(transforms_of_numbers(pieces))),
        *(decoder.scales, decoder.staged.table),
        (left, plgpu.RefType(ROW_TRANSFORMS)),
        *(stage, *first_columns),
        (totals, plgpu.Layout.WGMMA),
    ]
    result = plgpu.ShapeDtypeStruct(totals_shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    return mosaic.inline(emit, operands, result)


class _Thread:
    """A thread's loads from a stage and the table; columns are counted through all matrices."""

    def __init__(self, decoder: Decoder, memrefs: Sequence[Value], stage: Value, block_m: int):
        # `values` are [stages, stage_columns, pieces * 32] uint8, `scales` [stages, pieces,
        # stage_columns] words of two bfloat16, and `rows` [stages, block_m, pieces * 64] bfloat16.
        values, scales, table, rows = memrefs
        self.pieces, self.stage_columns = decoder.pieces, decoder.stage_columns
        self.column_bytes = self.pieces * NUMBER_BYTES
        self.stage = stage
        lane = arith.andi(mosaic.warpgroup_thread(), mosaic.i32(WARP - 1))
        # The thread has row number `quad` of 8, and column number `quad` of the warp's first 8.
        self.quad = arith.shrui(lane, mosaic.i32(2))
        q = arith.andi(lane, mosaic.i32(3))
        # Where the thread's word is in a block of a column, in bytes.
        self.word_offset = mosaic.mul(q, WORD_BYTES)
        self.values_address = mosaic.address(values, 32)
        self.scales_address = mosaic.address(scales, 32)
        self.table = own_table(table)  # the address of the lane's copy of it
        # The swizzle of `ROW_TRANSFORMS`: row r of a tile has its 16-byte part p at p XOR (r / 2).
        place = arith.xori(q, arith.shrui(self.quad, mosaic.i32(1)))
        # The number of tiles of rows side by side in a stage.
        self.tiles_across = self.pieces * _BLOCKS
        # The address of the thread's 16 bytes in the stage's first tile of rows.
        self.rows_address = mosaic.add(
            mosaic.address(rows, 32),
            mosaic.mul(stage, block_m // _ROWS * self.tiles_across * _TILE_BYTES),
            mosaic.mul(self.quad, _TILE_ROW_BYTES),
            mosaic.mul(place, VECTOR_BYTES),
        )

    def load_rows(self, tile: int, piece: int, block: int) -> list[Value]:
        """Loads the thread's 8 numbers of a row of tile `tile` in a block: four words of two."""
        offset = (tile * self.tiles_across + piece * _BLOCKS + block) * _TILE_BYTES
        return _load(self.rows_address, offset, count=4)

    def load_scales(self, column: Value, piece: int) -> list[list[Value]]:
        """Loads a piece's two scales, as float32, of columns `column` and `column` + 8 each."""
        piece_of_ring = mosaic.add(mosaic.mul(self.stage, self.pieces), mosaic.i32(piece))
        index = mosaic.add(mosaic.mul(piece_of_ring, self.stage_columns), column)
        start = mosaic.add(self.scales_address, mosaic.mul(index, WORD_BYTES))
        loaded = [_load(start, i * APART * WORD_BYTES, count=1)[0] for i in range(2)]
        return [BFLOAT16.numbers([word]) for word in loaded]

    def load_pairs(self, column: Value, piece: int, block: int, i: int) -> list[Value]:
        """Loads this thread's numbers of a block of column `column + 8 * i`: four pairs."""
        column_of_ring = mosaic.add(mosaic.mul(self.stage, self.stage_columns), column)
        offset = mosaic.mul(column_of_ring, self.column_bytes)
        start = mosaic.add(self.values_address, offset, self.word_offset)
        # A block of a column is a vector of 16 bytes.
        place = place_of_vector(piece * _BLOCKS + block, self.quad, self.pieces)
        start = mosaic.add(start, mosaic.mul(place, VECTOR_BYTES))
        (word,) = _load(start, i * APART * self.column_bytes, count=1)
        # The table maps a byte to the pair of numbers in it.
        return [look_up(self.table, word, mosaic.i32(BYTE_0 + j)) for j in range(_COLUMN_BYTES)]


def _load(address: Value, offset: int, count: int) -> list[Value]:
    """Loads `count` words of shared memory from byte `offset` past `address` on."""
    word = mosaic.integer_type(32)
    pointer = mosaic.shared_pointer(mosaic.add(address, mosaic.i32(offset)) if offset else address)
    if count == 1:
        return [llvm.load(word, pointer, alignment=WORD_BYTES)]
    return mosaic.load_numbers(pointer, count)


def _plus_products(
    totals: Sequence[Value],
    pairs: Sequence[Sequence[Value]],
    rows: Sequence[Value],
    scales: Sequence[Value],
) -> list[Value]:
    """Returns four sums of a thread plus a block's products of two columns and rows, scaled."""
    # `pairs` has four words of each column, and `scales` the scale of each; `rows` are four words.
    sums = [mosaic.f32(0.0)] * 4
    for i in range(0, _COLUMN_BYTES, 2):
        # In the instruction's order: numbers of both columns, then further ones of both.
        four = [pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]]
        sums = tensor_cores.add_warp_product(four, rows[i : i + 2], sums, jnp.bfloat16)
    return [
        llvm.intr_fma(each, scales[i // 2], total)
        for i, (each, total) in enumerate(zip(sums, totals, strict=True))
    ]
