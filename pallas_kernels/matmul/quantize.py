"""Kernels that quantize rows or matrices to float8, and also transpose them, in one memory pass.

Tensor cores require float8 operands whose contraction dimension is innermost. A grouped matmul
contracts the columns of the rows. The gradient of the rows needs the matrices transposed. The
gradient of the matrices needs the rows and their gradients transposed, with scales that are shared
by 128 rows. `pallas_kernels.matmul.transpose` transposes rows that are already quantized.

A thread block handles a tile of 128 rows by 128 columns, and a thread a patch of 8 columns. The
patch has 8 rows of 16-bit elements, or 4 of float32:

            4 patches                    A warp handles 32 columns, and 64 or 32 rows. It stores 32
         +--+--+--+--+                   bytes of each row: each thread 8 bytes. Of each column it
    8    |  |  |  |  |                   stores 64 or 32 bytes. Until the scales are known, the
  patches+--+--+--+--+                   elements stay as they were loaded, two 16-bit numbers in
         |  |  |  |  |                   a word. They are rounded before the transposition, which
                                         then only moves bytes.

In the transposed rows each group starts at a multiple of 128, so that each sum of 128 products
belongs to one group. The padding between groups is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.matmul.packed import Packed
from pallas_kernels.matmul.quantized_tiles import (
    ACROSS,
    Place,
    Scaled,
    Tile,
    max_of,
    on_tiles,
    past,
    place_of,
    pointer_to,
    rounded_word,
    scale_of,
    share,
    shared_numbers,
    shared_words,
    sides_of,
    store_words,
    transposed_bytes,
    warps_of,
    with_shuffled,
    word_at,
)
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# A thread's patch has 8 columns, and as many rows as 32 registers can hold. Four float8 values make
# a 32-bit word.
_COLUMNS = 8
_REGISTERS = 32
_WORD = 4
# The number of warps that cover 128 columns.
_SIDES = sides_of(_COLUMNS)


def quantize_rows(
    rows: jax.Array, blocks: jax.Array, *, return_rows: bool
) -> tuple[Scaled | None, TransposedRows]:
    """Quantizes rows to float8_e4m3fn, and transposes them.

    Args:
      rows: [R, K] bfloat16, float16 or float32; K is a multiple of 128.
      blocks: [P / 128, 2] int32, each block's first row and number of rows: the first result of
        `row_blocks`. P is the number of rows with padding, in which each group starts at a
        multiple of 128.
      return_rows: whether to return the quantized rows also without the transposition, with a scale
        for each 128 columns of a row.

    Returns:
      (quantized rows [R, K], or None without `return_rows`; transposed rows [K, P]). Past the last
      group, the contents of both are undefined.
    """
    (num_rows, width), num_row_blocks = rows.shape, blocks.shape[0]
    packed, tiles = Packed(rows.dtype), width // BLOCK
    kept_types = [
        jax.ShapeDtypeStruct((num_rows, width), jnp.float8_e4m3fn),
        # A matmul takes the scales of rows transposed.
        jax.ShapeDtypeStruct((tiles, num_rows), jnp.float32),
    ]

    def emit(memrefs: Any, *of_tile: Value) -> None:
        source, *kept, transposed, scales, shared = memrefs
        patch = _Patch.of_thread(packed, width, *of_tile)
        rows = patch.load(source)
        largest = [packed.largest(words) for words in rows]
        patch.share_largest(shared, max_of(largest))
        if kept:
            patch.share_largest_of_rows(shared, largest)
        mosaic.block_barrier()
        scale, factor = patch.scale_of_tile(shared)
        with mosaic.when(mosaic.equal(patch.place.thread, mosaic.i32(0))):
            llvm.store(scale, pointer_to(scales, patch.block, tiles, patch.column, 4))
        if kept:
            patch.finish_rows(shared, kept[1], num_rows)
            mosaic.block_barrier()
            patch.store_rows(kept[0], patch.rounded(rows, patch.factors_of_rows(shared)))
        top = arith.addi(arith.muli(patch.block, mosaic.i32(BLOCK)), patch.place.row)
        height = num_row_blocks * BLOCK
        start = pointer_to(transposed, patch.left, height, top, 1)
        patch.store_transposed(start, height, patch.rounded(rows, [factor] * len(rows)))

    *kept, values, scales = on_tiles(
        "quantize_rows",
        [rows],
        blocks,
        [
            *(kept_types if return_rows else []),
            jax.ShapeDtypeStruct((width, num_row_blocks * BLOCK), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_row_blocks, tiles), jnp.float32),
        ],
        emit,
        width=width,
        num_warps=_warps_of(packed),
        num_shared=_SIDES * BLOCK + _warps_of(packed),
    )
    in_order = Scaled(kept[0], kept[1].T) if return_rows else None
    return in_order, TransposedRows(values, scales)


def quantize_matrices(matrices: jax.Array) -> tuple[Scaled, Scaled]:
    """Quantizes matrices to float8_e4m3fn; returns the quantized matrices and their transposes.

    A scale belongs to a block of 128 rows by 128 columns. So a matrix and its transpose have the
    same float8 values and scales.

    Args:
      matrices: [L, K, N] bfloat16, float16 or float32; K and N are multiples of 128.

    Returns:
      (matrices [L, K, N], transposed matrices [L, N, K]).
    """
    num_matrices, height, width = matrices.shape
    packed, tile_columns, tile_rows = Packed(matrices.dtype), width // BLOCK, height // BLOCK

    def emit(memrefs: Any, *of_tile: Value) -> None:
        i32 = mosaic.i32
        source, values, transposed, scales, scales_turned, shared = memrefs
        patch = _Patch.of_thread(packed, width, *of_tile, is_full=True)
        rows = patch.load(source)
        patch.share_largest(shared, packed.largest([word for words in rows for word in words]))
        mosaic.block_barrier()
        scale, factor = patch.scale_of_tile(shared)
        # The tile is in row `tile_row` of the tiles of its matrix.
        matrix, tile_row = (op(patch.block, i32(tile_rows)) for op in (arith.divui, arith.remui))
        with mosaic.when(mosaic.equal(patch.place.thread, i32(0))):
            llvm.store(scale, pointer_to(scales, patch.block, tile_columns, patch.column, 4))
            turned_row = arith.addi(arith.muli(matrix, i32(tile_columns)), patch.column)
            llvm.store(scale, pointer_to(scales_turned, turned_row, tile_rows, tile_row, 4))
        rounded = patch.rounded(rows, [factor] * len(rows))
        patch.store_rows(values, rounded)
        column = arith.addi(arith.muli(matrix, i32(width)), patch.left)
        row = arith.addi(arith.muli(tile_row, i32(BLOCK)), patch.place.row)
        patch.store_transposed(pointer_to(transposed, column, height, row, 1), height, rounded)

    values, transposed, scales, turned = on_tiles(
        "quantize_matrices",
        [matrices.reshape(-1, width)],
        None,
        [
            jax.ShapeDtypeStruct((num_matrices * height, width), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_matrices * width, height), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_matrices * tile_rows, tile_columns), jnp.float32),
            jax.ShapeDtypeStruct((num_matrices * tile_columns, tile_rows), jnp.float32),
        ],
        emit,
        width=width,
        num_warps=_warps_of(packed),
        num_shared=_SIDES * BLOCK + _warps_of(packed),
    )
    return (
        Scaled(
            values.reshape(matrices.shape),
            scales.reshape(num_matrices, tile_rows, tile_columns),
        ),
        Scaled(
            transposed.reshape(num_matrices, width, height),
            turned.reshape(num_matrices, tile_columns, tile_rows),
        ),
    )


def _rows_of(packed: Packed) -> int:
    """Returns the number of rows of a thread's patch."""
    return _REGISTERS * 4 // (packed.size * _COLUMNS)


def _warps_of(packed: Packed) -> int:
    """Returns the number of warps that cover a tile."""
    return warps_of(_rows_of(packed), _COLUMNS)


@dataclasses.dataclass(frozen=True)
class _Patch(Tile):
    """A thread's patch of a tile. Its methods emit code of one thread.

    Shared memory holds two arrays of 32-bit numbers. The first has the largest magnitude of each
    row in the columns of each side of the tile, and later, for the first side, 1 / scale of the
    row. The second, from `_SIDES * BLOCK` on, has the largest magnitude of each warp.

    Attributes:
      packed: the dtype of the elements.
      width: the number of columns of the input.
      is_full: whether the tile has 128 rows in any case.
      place: where the patch lies in the tile.
      left: the first column of the patch, counted in the input.
    """

    packed: Packed
    width: int
    is_full: bool
    place: Place
    left: Value

    @classmethod
    def of_thread(
        cls,
        packed: Packed,
        width: int,
        block: Value,
        column: Value,
        first: Value,
        count: Value,
        *,
        is_full: bool = False,
    ) -> _Patch:
        """Computes where this thread's patch of a tile lies; see `Tile` and `_Patch`."""
        place = place_of(_rows_of(packed), _COLUMNS)
        left = arith.addi(arith.muli(column, mosaic.i32(BLOCK)), place.column)
        return cls(block, column, first, count, packed, width, is_full, place, left)

    def load(self, source: Any) -> list[list[Value]]:
        """Loads the patch: the words of each of its rows, with NaN in place of infinities.

        Rows that the tile does not have are zero.
        """
        rows, size = [], self.packed.size
        for i in range(_rows_of(self.packed)):
            row = arith.addi(self.place.row, mosaic.i32(i))
            if self.is_full:
                exists, row = None, arith.addi(self.first, row)
            else:
                exists, row = self.find(row)
            at = pointer_to(source, row, self.width, self.left, size)
            words = self.packed.load(at, _COLUMNS)
            if exists is not None:
                words = [arith.select(exists, word, mosaic.i32(0)) for word in words]
            rows.append(words)
        return [[self.packed.without_infinities(word) for word in words] for words in rows]

    def share_largest(self, shared: Any, largest: Value) -> None:
        """Stores the warp's largest magnitude in `shared`; `largest` is the thread's."""
        largest = mosaic.warp_max(largest)
        with mosaic.when(mosaic.equal(self.place.lane, mosaic.i32(0))):
            share(shared, arith.addi(self.place.warp, mosaic.i32(_SIDES * BLOCK)), [largest])

    def scale_of_tile(self, shared: Any) -> tuple[Value, Value]:
        """Returns the tile's scale and 1 / scale, from the largest magnitudes of all warps."""
        starts = (_SIDES * BLOCK + i for i in range(0, _warps_of(self.packed), 4))
        fours = [shared_words(shared, mosaic.i32(start), 4) for start in starts]
        return scale_of(max_of(size for four in fours for size in four))

    def share_largest_of_rows(self, shared: Any, largest: list[Value]) -> None:
        """Stores the largest magnitudes of rows in the warp's columns; `largest` is the patch's."""
        for distance in (1, 2):
            largest = with_shuffled(largest, distance)
        at = arith.addi(arith.muli(self.place.side, mosaic.i32(BLOCK)), self.place.row)
        with mosaic.when(
            mosaic.equal(arith.remui(self.place.lane, mosaic.i32(ACROSS)), mosaic.i32(0))
        ):
            for i in range(0, len(largest), 4):
                share(shared, arith.addi(at, mosaic.i32(i)), largest[i : i + 4])

    def finish_rows(self, shared: Any, scales: Any, num_rows: int) -> None:
        """Computes the scale of each row in one thread, and stores it to `scales`, [K / 128, R].

        1 / scale takes the place of one of the row's magnitudes in `shared`.
        """
        i32 = mosaic.i32
        with mosaic.when(mosaic.below(self.place.thread, i32(BLOCK))):
            sides = [arith.addi(self.place.thread, i32(side * BLOCK)) for side in range(_SIDES)]
            scale, factor = scale_of(max_of(word_at(shared, at) for at in sides))
            share(shared, self.place.thread, [arith.bitcast(mosaic.integer_type(32), factor)])
            with mosaic.when(mosaic.below(self.place.thread, self.count)):
                row = arith.addi(self.first, self.place.thread)
                llvm.store(scale, pointer_to(scales, self.column, num_rows, row, 4))

    def factors_of_rows(self, shared: Any) -> list[Value]:
        """Returns 1 / scale of each row of the patch."""
        return [
            factor
            for i in range(0, _rows_of(self.packed), 4)
            for factor in shared_numbers(shared, arith.addi(self.place.row, mosaic.i32(i)), 4)
        ]

    def rounded(self, rows: list[list[Value]], factors: Sequence[Value]) -> list[list[Value]]:
        """Multiplies each row by its factor, and rounds it to float8; returns words of rows."""
        found = []
        for words, factor in zip(rows, factors, strict=True):
            numbers = [number for word in words for number in self.packed.numbers(word)]
            fours = (numbers[i : i + _WORD] for i in range(0, _COLUMNS, _WORD))
            found.append([rounded_word(four, [factor] * _WORD) for four in fours])
        return found

    def store_rows(self, out: Any, rounded: list[list[Value]]) -> None:
        """Stores the patch's rounded rows, as far as the tile has them."""
        row = arith.addi(self.first, self.place.row)
        start = pointer_to(out, row, self.width, self.left, 1)
        for i, words in enumerate(rounded):
            at = past(start, i * self.width)
            if self.is_full:
                store_words(words, at)
                continue
            with mosaic.when(mosaic.below(arith.addi(self.place.row, mosaic.i32(i)), self.count)):
                store_words(words, at)

    def store_transposed(self, start: Value, height: int, rounded: list[list[Value]]) -> None:
        """Stores columns of the patch: the first at `start`, each `height` after the one before."""
        for j in range(_COLUMNS // _WORD):
            squares = [
                transposed_bytes([words[j] for words in rounded[i : i + _WORD]])
                for i in range(0, len(rounded), _WORD)
            ]
            for k, of_column in enumerate(zip(*squares, strict=True)):
                store_words(of_column, past(start, (_WORD * j + k) * height))
