"""Kernels that quantize rows or matrices to float8, and also transpose them, in one memory pass.

Tensor cores require float8 operands whose contraction dimension is innermost. The gradient of the
rows needs the matrices transposed, and the gradient of the matrices the rows and their gradients.
Tensor cores add 128 products before the sum is multiplied by a scale, so 128 of these rows share a
scale. `transpose_rows` rounds quantized values again, with the largest of their scales.

A thread block handles a tile of 128 rows by 128 columns, and a thread a patch of 8 columns, and 8
rows of 16-bit elements, or 4 of float32:

            4 patches                    A warp handles 32 columns, and 64 or 32 rows. It stores 32
         +--+--+--+--+                   bytes of each row: each thread 8 bytes. Of each column it
    8    |  |  |  |  |                   stores 64 or 32 bytes. Until the scales are known, the
  patches+--+--+--+--+                   elements stay as they were loaded. They are rounded before
         |  |  |  |  |                   the transposition, which then only moves bytes.

In the transposed rows each group starts at a multiple of 128, so that each sum of 128 products
belongs to one group. The padding between groups is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.formats import FLOAT8_ROWS, Scaled
from pallas_kernels.matmul.quantized_tiles import (
    PER_WORD,
    PTX_TYPE,
    Packed,
    Tile,
    load_words,
    max_of,
    on_tiles,
    past,
    pointer_to,
    rounded_words,
    scale_of,
    share,
    shared_numbers,
    shared_words,
    with_shuffled,
    word_at,
)
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# The patches of a warp's 32 threads lie 4 side by side and 8 above each other.
_ACROSS = 4
_DOWN = WARP // _ACROSS
# A thread's patch has 8 columns, and as many rows as 32 registers can hold.
_COLUMNS = 8
_REGISTERS = 32
# A thread's patch of rows that are quantized already.
_QUANTIZED_ROWS, _QUANTIZED_COLUMNS = 8, 16
# The number of warps that cover 128 columns.
_SIDES = BLOCK // (_COLUMNS * _ACROSS)


def quantize_rows(
    rows: jax.Array, blocks: jax.Array, *, return_rows: bool
) -> tuple[Scaled | None, TransposedRows]:
    """Quantizes floating rows [R, K] to float8_e4m3fn, and transposes them; K is a multiple of 128.

    `blocks` are the first result of `row_blocks`. Returns rows [R, K], or None without
    `return_rows`, and transposed rows [K, P]. Past the last group, both are undefined.
    """
    (num_rows, width), num_row_blocks = rows.shape, blocks.shape[0]
    packed = Packed(rows.dtype)
    tiles = width // BLOCK
    row_types = [
        jax.ShapeDtypeStruct((num_rows, width), jnp.float8_e4m3fn),
        # A matmul takes the scales of rows transposed.
        jax.ShapeDtypeStruct((tiles, num_rows), jnp.float32),
    ]

    def emit(memrefs: Any, tile: Tile) -> None:
        # `row_outs` are the quantized rows and their scales with `return_rows`, else nothing.
        source, *row_outs, transposed, scales, shared = memrefs
        patch = _Patch(tile, packed, width)
        rows = patch.load(source)
        largest = [packed.largest(words) for words in rows]
        patch.share_largest(shared, max_of(largest))
        if return_rows:
            patch.share_largest_of_rows(shared, largest)
        mosaic.block_barrier()
        scale, factor = patch.scale_of_tile(shared)
        with mosaic.when(mosaic.equal(patch.place.thread, 0)):
            llvm.store(scale, pointer_to(scales, tile.block, tiles, tile.column, size=4))
        if return_rows:
            # The rows themselves get a scale for each row, the transposed rows one for the tile.
            out, out_scales = row_outs
            patch.finish_rows(shared, out_scales, num_rows)
            mosaic.block_barrier()
            patch.store_rows(out, patch.rounded(rows, patch.factors_of_rows(shared)))
        top = mosaic.add(mosaic.mul(tile.block, BLOCK), patch.place.row)
        height = num_row_blocks * BLOCK
        start = pointer_to(transposed, patch.left, height, top, size=1)
        patch.store_transposed(start, height, patch.rounded(rows, [factor] * len(rows)))

    *row_results, values, scales = on_tiles(
        "quantize_rows",
        [rows],
        blocks,
        [
            *(row_types if return_rows else []),
            jax.ShapeDtypeStruct((width, num_row_blocks * BLOCK), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_row_blocks, tiles), jnp.float32),
        ],
        emit,
        width=width,
        num_warps=_num_warps(_patch_rows(packed), _COLUMNS),
        num_shared=_SIDES * BLOCK + _num_warps(_patch_rows(packed), _COLUMNS),
    )
    quantized = Scaled(row_results[0], row_results[1].T) if return_rows else None
    return quantized, TransposedRows(values, scales)


def quantize_matrices(matrices: jax.Array) -> tuple[Scaled, Scaled]:
    """Quantizes floating matrices [L, K, N] to float8_e4m3fn; returns them and their transposes.

    K and N are multiples of 128. The transposes, [L, N, K], have the same values and scales.
    """
    num_matrices, height, width = matrices.shape
    packed = Packed(matrices.dtype)
    tile_columns, tile_rows = width // BLOCK, height // BLOCK

    def emit(memrefs: Any, tile: Tile) -> None:
        source, values, transposed, scales, transposed_scales, shared = memrefs
        patch = _Patch(tile, packed, width, is_full=True)
        rows = patch.load(source)
        patch.share_largest(shared, packed.largest([word for words in rows for word in words]))
        mosaic.block_barrier()
        scale, factor = patch.scale_of_tile(shared)
        # The tile is in row `tile_row` of the tiles of its matrix.
        matrix, tile_row = mosaic.divided(tile.block, tile_rows)
        with mosaic.when(mosaic.equal(patch.place.thread, 0)):
            llvm.store(scale, pointer_to(scales, tile.block, tile_columns, tile.column, size=4))
            scale_row = mosaic.add(mosaic.mul(matrix, tile_columns), tile.column)
            llvm.store(scale, pointer_to(transposed_scales, scale_row, tile_rows, tile_row, size=4))
        rounded = patch.rounded(rows, [factor] * len(rows))
        patch.store_rows(values, rounded)
        column = mosaic.add(mosaic.mul(matrix, width), patch.left)
        row = mosaic.add(mosaic.mul(tile_row, BLOCK), patch.place.row)
        patch.store_transposed(pointer_to(transposed, column, height, row, size=1), height, rounded)

    results = on_tiles(
        "quantize_matrices",
        [matrices.reshape(-1, width)],
        blocks=None,
        out_type=[
            jax.ShapeDtypeStruct((num_matrices * height, width), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_matrices * width, height), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_matrices * tile_rows, tile_columns), jnp.float32),
            jax.ShapeDtypeStruct((num_matrices * tile_columns, tile_rows), jnp.float32),
        ],
        emit=emit,
        width=width,
        num_warps=_num_warps(_patch_rows(packed), _COLUMNS),
        num_shared=_SIDES * BLOCK + _num_warps(_patch_rows(packed), _COLUMNS),
    )
    # The rows of all matrices follow each other in a result.
    values, transposed, scales, transposed_scales = (
        result.reshape(num_matrices, -1, result.shape[1]) for result in results
    )
    return Scaled(values, scales), Scaled(transposed, transposed_scales)


def _patch_rows(packed: Packed) -> int:
    return _REGISTERS * 4 // (packed.size * _COLUMNS)


class _Place(NamedTuple):
    """Where a thread's patch lies in a tile; i32."""

    thread: Value
    warp: Value
    lane: Value
    # The index of the warp's columns: warps lie side by side, and then above each other.
    side: Value
    # The first row and column of the patch, counted in the tile.
    row: Value
    column: Value


def _num_warps(num_rows: int, num_columns: int) -> int:
    """Returns how many warps cover a tile, if a thread's patch has `num_rows` by `num_columns`."""
    return BLOCK * BLOCK // (num_rows * num_columns * WARP)


def _place_of(num_rows: int, num_columns: int) -> _Place:
    """Returns where the patch of this thread lies, if it has `num_rows` by `num_columns`."""
    thread = mosaic.thread()
    warp, lane = mosaic.divided(thread, WARP)
    strip, side = mosaic.divided(warp, BLOCK // (num_columns * _ACROSS))
    down, across = mosaic.divided(lane, _ACROSS)
    row = mosaic.mul(mosaic.add(mosaic.mul(strip, _DOWN), down), num_rows)
    column = mosaic.add(mosaic.mul(side, _ACROSS), across)
    return _Place(thread, warp, lane, side, row, mosaic.mul(column, num_columns))


class _Patch:
    """A thread's patch of a tile. Its methods emit code of one thread.

    Magnitudes are float32 bits. The array `shared` has, for each side (the columns of a warp), the
    largest magnitude of each row, [_SIDES, 128], later replaced by 1 / scale of the row in the
    first side; and then the largest magnitude of each warp.
    """

    def __init__(self, tile: Tile, packed: Packed, width: int, *, is_full: bool = False) -> None:
        # `is_full` is whether the tile has 128 rows in any case.
        self.tile, self.packed, self.width, self.is_full = tile, packed, width, is_full
        self.place = _place_of(_patch_rows(packed), _COLUMNS)
        # The first column of the patch, counted in the input.
        self.left = mosaic.add(mosaic.mul(tile.column, BLOCK), self.place.column)

    def load(self, source: Any) -> list[list[Value]]:
        """Loads the words of each row, with NaN for infinities, and zeros past the tile's rows."""
        rows = []
        for i in range(_patch_rows(self.packed)):
            row = mosaic.add(self.place.row, i)
            if self.is_full:
                exists, source_row = None, mosaic.add(self.tile.first, row)
            else:
                exists, source_row = self.tile.find(row)
            at = pointer_to(source, source_row, self.width, self.left, self.packed.size)
            words = self.packed.load(at, _COLUMNS)
            if exists is not None:
                words = [arith.select(exists, word, mosaic.i32(0)) for word in words]
            rows.append(words)
        return [self.packed.without_infinities(words) for words in rows]

    def share_largest(self, shared: Any, largest: Value) -> None:
        largest = mosaic.warp_max(largest)
        with mosaic.when(mosaic.equal(self.place.lane, 0)):
            share(shared, mosaic.add(self.place.warp, _SIDES * BLOCK), [largest])

    def scale_of_tile(self, shared: Any) -> tuple[Value, Value]:
        """Returns the tile's scale and 1 / scale, from the largest magnitudes of all warps."""
        starts = (
            _SIDES * BLOCK + i for i in range(0, _num_warps(_patch_rows(self.packed), _COLUMNS), 4)
        )
        fours = [shared_words(shared, mosaic.i32(start), count=4) for start in starts]
        return scale_of(max_of(size for four in fours for size in four))

    def share_largest_of_rows(self, shared: Any, largest: list[Value]) -> None:
        """Stores each row's largest magnitude in the warp's columns; `largest` has the patch's."""
        # The `_ACROSS` = 4 threads that have the same rows are neighbours.
        for distance in (1, 2):
            largest = with_shuffled(largest, distance)
        at = mosaic.add(mosaic.mul(self.place.side, BLOCK), self.place.row)
        with mosaic.when(mosaic.equal(arith.remui(self.place.lane, mosaic.i32(_ACROSS)), 0)):
            for i in range(0, len(largest), 4):
                share(shared, mosaic.add(at, i), largest[i : i + 4])

    def finish_rows(self, shared: Any, scales: Any, num_rows: int) -> None:
        """Stores the scale of each row to `scales`, [K / 128, R], and 1 / scale to `shared`."""
        # Thread i finishes row i of the tile.
        with mosaic.when(mosaic.below(self.place.thread, BLOCK)):
            sides = [mosaic.add(self.place.thread, side * BLOCK) for side in range(_SIDES)]
            scale, factor = scale_of(max_of(word_at(shared, at) for at in sides))
            share(shared, self.place.thread, [arith.bitcast(mosaic.integer_type(32), factor)])
            with mosaic.when(mosaic.below(self.place.thread, self.tile.count)):
                row = mosaic.add(self.tile.first, self.place.thread)
                llvm.store(scale, pointer_to(scales, self.tile.column, num_rows, row, size=4))

    def factors_of_rows(self, shared: Any) -> list[Value]:
        """Loads 1 / scale of each of the patch's rows, which `finish_rows` has stored."""
        return [
            factor
            for i in range(0, _patch_rows(self.packed), 4)
            for factor in shared_numbers(shared, mosaic.add(self.place.row, i), count=4)
        ]

    def rounded(self, rows: list[list[Value]], factors: Sequence[Value]) -> list[list[Value]]:
        """Multiplies each row by its factor, and rounds it to float8; returns words of rows."""
        return [
            rounded_words(self.packed.numbers(words), [factor] * _COLUMNS)
            for words, factor in zip(rows, factors, strict=True)
        ]

    def store_rows(self, out: Any, rounded: list[list[Value]]) -> None:
        """Stores the patch's rounded rows, as far as the tile has them."""
        row = mosaic.add(self.tile.first, self.place.row)
        start = pointer_to(out, row, self.width, self.left, size=1)
        for i, words in enumerate(rounded):
            at = past(start, i * self.width)
            if self.is_full:
                mosaic.store_numbers(words, at)
                continue
            with mosaic.when(mosaic.below(mosaic.add(self.place.row, i), self.tile.count)):
                mosaic.store_numbers(words, at)

    def store_transposed(self, start: Value, height: int, rounded: list[list[Value]]) -> None:
        """Stores the patch's columns as rows of `height` bytes; the first begins at `start`."""
        for j in range(_COLUMNS // PER_WORD):
            _store_columns([words[j] for words in rounded], start, height, j * PER_WORD)


def _store_columns(words: Sequence[Value], start: Value, height: int, first: int) -> None:
    """Stores four columns of a patch, given a word of each row; `start` is that of column 0."""
    squares = [_transposed_bytes(words[i : i + PER_WORD]) for i in range(0, len(words), PER_WORD)]
    for i, words_of_column in enumerate(zip(*squares, strict=True)):
        mosaic.store_numbers(words_of_column, past(start, (first + i) * height))


def _transposed_bytes(rows: Sequence[Value]) -> list[Value]:
    """Transposes 4 x 4 bytes: takes a word for each row, and returns one for each column."""
    a, b, c, d = rows
    chosen = mosaic.chosen_bytes
    # The first two columns of rows a and b, byte by byte, and those of c and d; then the last two.
    pairs = [
        (chosen(a, b, order), chosen(c, d, order))
        for order in [mosaic.i32(0x5140), mosaic.i32(0x7362)]
    ]
    orders = mosaic.i32(0x5410), mosaic.i32(0x7632)
    return [chosen(upper, lower, order) for upper, lower in pairs for order in orders]


def transpose_rows(rows: Scaled, blocks: jax.Array) -> TransposedRows:
    """Transposes float8_e4m3fn rows [R, K]; rounds them again, to a scale for each 128 x 128.

    `blocks` are the first result of `row_blocks`, P / 128 of them. Returns values [K, P] and scales
    [P / 128, K / 128]. Past the rows of a block, numbers are zero; blocks without rows undefined.
    """
    width, num_row_blocks = rows.values.shape[1], blocks.shape[0]

    def emit(memrefs: Any, tile: Tile) -> None:
        _Transposed(**vars(tile), width=width, height=num_row_blocks * BLOCK).emit(*memrefs)

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
        num_warps=_num_warps(_QUANTIZED_ROWS, _QUANTIZED_COLUMNS),
        num_shared=BLOCK,
    )
    return TransposedRows(*results)


@dataclasses.dataclass(frozen=True)
class _Transposed(Tile):
    """A tile that a thread block transposes, from `width` columns to rows of `height` columns."""

    width: int
    height: int

    def emit(self, values: Any, scales: Any, out: Any, out_scales: Any, shared: Any) -> None:
        """Emits the code of one thread: rounds its patch again, with the tile's scale."""
        f32 = mosaic.float_type()
        place = _place_of(_QUANTIZED_ROWS, _QUANTIZED_COLUMNS)
        left = mosaic.add(mosaic.mul(self.column, BLOCK), place.column)
        patch = [
            self.load_words(values, mosaic.add(place.row, i), left) for i in range(_QUANTIZED_ROWS)
        ]
        # The rows' scales lie far from each other in memory: each of 128 threads loads one.
        row_scale = self.load_scale(scales, place.thread)
        share(shared, place.thread, [arith.bitcast(mosaic.integer_type(32), row_scale)])
        mosaic.block_barrier()
        # Each warp finds the largest scale. Positive float32 numbers compare like their bits.
        scales_of_lane = [word_at(shared, mosaic.add(place.lane, i)) for i in range(0, BLOCK, WARP)]
        bits = mosaic.warp_max(max_of(scales_of_lane))
        largest = arith.maximumf(arith.bitcast(f32, bits), mosaic.f32(FLOAT8_ROWS.least_scale))
        inverse = float8.reciprocal(largest)
        # A number times its row's scale, divided by the tile's.
        factors = [
            arith.mulf(scale, inverse)
            for i in range(0, _QUANTIZED_ROWS, 4)
            for scale in shared_numbers(shared, mosaic.add(place.row, i), count=4)
        ]
        with mosaic.when(mosaic.equal(place.thread, 0)):
            at = pointer_to(out_scales, self.block, self.width // BLOCK, self.column, size=4)
            llvm.store(largest, at)

        row_of_out = mosaic.add(mosaic.mul(self.block, BLOCK), place.row)
        start = pointer_to(out, left, self.height, row_of_out, size=1)
        for j in range(_QUANTIZED_COLUMNS // PER_WORD):
            rounded = [
                rounded_words(float8.widened(PTX_TYPE, words[j]), [factor] * PER_WORD)[0]
                for words, factor in zip(patch, factors, strict=True)
            ]
            _store_columns(rounded, start, self.height, j * PER_WORD)

    def load_words(self, values: Any, row: Value, left: Value) -> list[Value]:
        """Loads 16 float8 values of a row, from column `left` on; zeros past the block."""
        exists, source_row = self.find(row)
        start = pointer_to(values, source_row, self.width, left, size=1)
        words = load_words(start, _QUANTIZED_COLUMNS // PER_WORD)
        return [arith.select(exists, word, mosaic.i32(0)) for word in words]

    def load_scale(self, scales: Any, row: Value) -> Value:
        """Loads the scale of the tile's row `row`, or 0 past the block."""
        exists, source_row = self.find(row)
        at = pointer_to(scales, source_row, self.width // BLOCK, self.column, size=4)
        return arith.select(exists, llvm.load(mosaic.float_type(), at), mosaic.f32(0.0))
