"""Kernel that quantizes rows to float8, and also transposes them, in one memory pass.

Tensor cores require float8 operands whose contraction dimension is innermost. A grouped matmul
contracts the columns of the rows. The gradient of the matrices needs the rows and their gradients
transposed, with scales that are shared by 128 rows. `pallas_kernels.matmul.transpose` transposes
rows that are already quantized, and `pallas_kernels.matmul.quantize_matrices` quantizes matrices.

A thread block of 16 warps handles a tile of 128 rows by 128 columns. The diagram shows the patches
of 4 x 4 elements that the 32 threads of a warp handle in one step:

            16 columns                   A warp handles 32 rows by 32 columns, in 2 steps of 16
         +--+--+--+--+                   columns. In each step a thread handles 4 x 4 elements:
    32   |  |  |  |  |  x 2              it stores 4 bytes at a time, to rows of the values and
    rows +--+--+--+--+                   to rows of the transposed values. A warp's stores to
         |  |  |  |  |                   transposed values fill whole sectors of 32 bytes.

In the transposed array each group starts at a multiple of 128, so that each sum of 128 products
belongs to one group. The padding between groups is zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.matmul.quantized_tiles import (
    Scaled,
    Tile,
    max_of,
    on_tiles,
    past,
    pointer_to,
    rounded_word,
    scale_of,
    share,
    shared_numbers,
    with_shuffled,
    word_at,
)
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# In each step, a thread handles a patch of 4 rows by 4 columns.
_PATCH = 4
# In a step, the patches of a warp's 32 threads lie 4 side by side and 8 above each other.
_ACROSS = 4
# The number of columns that a warp handles in a step.
_STEP = _PATCH * _ACROSS
# A tile of 128 x 128 has _STRIPS strips of 32 rows. _SIDES warps, side by side, handle a strip.
_STRIPS = BLOCK // WARP
_SIDES = 4
# The number of columns of a tile that a warp handles in total. It takes `_WALKS` steps for them.
_WIDTH = BLOCK // _SIDES
_WALKS = _WIDTH // _STEP
_WARPS = _STRIPS * _SIDES


def quantize_rows(
    rows: jax.Array,
    blocks: jax.Array,
    *,
    keep_order: bool,
) -> tuple[Scaled | None, TransposedRows]:
    """Quantizes rows to float8_e4m3fn, and transposes them.

    Args:
      rows: [R, K] bfloat16, float16 or float32; K is a multiple of 128.
      blocks: [P / 128, 2] int32, each block's first row and number of rows: the first result of
        `row_blocks`. P is the number of rows with padding, in which each group starts at a
        multiple of 128.
      keep_order: whether to return the quantized rows also without the transposition, with a scale
        for each 128 columns of a row.

    Returns:
      (quantized rows [R, K], or None without `keep_order`; transposed rows [K, P]). Past the last
      group, the contents of both are undefined.
    """
    num_rows, width = rows.shape
    num_blocks = blocks.shape[0]
    job = _Job(
        width=width,
        num_blocks=num_blocks,
        by_row=keep_order,
    )
    values = jax.ShapeDtypeStruct((num_rows, width), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((num_rows, width // BLOCK), jnp.float32)
    out_type = [
        *([values, scales] if keep_order else []),
        jax.ShapeDtypeStruct((width, num_blocks * BLOCK), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((num_blocks, width // BLOCK), jnp.float32),
    ]
    results = job.run(out_type, rows, blocks)
    *kept, values, scales = results
    return Scaled(*kept) if keep_order else None, TransposedRows(values, scales)


@dataclasses.dataclass(frozen=True)
class _Job:
    """The kernel that quantizes and transposes. Its blocks handle tiles of 128 rows by 128 columns.

    Attributes:
      width: number of columns of the input.
      num_blocks: number of blocks of 128 rows. There are num_blocks x (width / 128) tiles.
      by_row: whether the kernel also stores the values without the transposition, with a scale for
        each 128 columns of a row.
    """

    width: int
    num_blocks: int
    by_row: bool

    def run(self, out_type: Any, rows: jax.Array, blocks: jax.Array) -> Any:
        return on_tiles(
            "quantize_tiles",
            [rows],
            blocks,
            out_type,
            self.emit,
            width=self.width,
            num_warps=_WARPS,
            num_shared=_SIDES * BLOCK + _WARPS,
        )

    def emit(
        self, memrefs: list[Any], block: Value, column: Value, first: Value, count: Value
    ) -> None:
        """Emits the code by which a thread quantizes its elements of a tile.

        `memrefs` are the input, the outputs, and shared memory. The other arguments are the
        attributes of `_Tile` with the same names.
        """
        source, *outs, shared = memrefs
        i32 = mosaic.i32
        warp, lane = (op(mosaic.thread(), i32(WARP)) for op in (arith.divui, arith.remui))
        strip, side = arith.remui(warp, i32(_STRIPS)), arith.divui(warp, i32(_STRIPS))
        row = arith.addi(
            arith.muli(strip, i32(WARP)), arith.muli(arith.divui(lane, i32(_ACROSS)), i32(_PATCH))
        )
        place = arith.addi(
            arith.muli(side, i32(_WIDTH)), arith.muli(arith.remui(lane, i32(_ACROSS)), i32(_PATCH))
        )
        left = arith.muli(column, i32(BLOCK))
        tile = _Tile(block, column, first, count, self, row, place, left)
        # numbers[step][row][column] are the thread's elements: for each step, a patch of 4 rows by
        # 4 columns.
        numbers = tile.load(source)

        # Each warp finds the largest magnitude of all its elements, and with `by_row` also of each
        # of its rows. Several warps have elements with the same scale, so they exchange these
        # magnitudes through shared memory.
        rows = []
        for i in range(_PATCH):
            sizes: list[Value] = []
            for patch in numbers:
                checked = [_checked(number) for number in patch[i]]
                patch[i] = [number for number, _ in checked]
                sizes += (size for _, size in checked)
            rows.append(max_of(sizes))
        total = mosaic.warp_max(max_of(rows))
        if self.by_row:
            for distance in (1, 2):
                rows = with_shuffled(rows, distance)
            with mosaic.when(mosaic.equal(arith.remui(lane, i32(_ACROSS)), i32(0))):
                share(shared, arith.addi(arith.muli(side, i32(BLOCK)), row), rows)
        with mosaic.when(mosaic.equal(lane, i32(0))):
            share(shared, arith.addi(warp, i32(_SIDES * BLOCK)), [total])
        mosaic.block_barrier()

        # With `by_row`, one thread for each row computes the row's scale, and overwrites one of the
        # row's magnitudes in shared memory with 1 / scale. One warp does so for the block's scale.
        of_block = i32(_SIDES * BLOCK)
        if self.by_row:
            with mosaic.when(mosaic.below(mosaic.thread(), i32(BLOCK))):
                tile.finish_row(shared, outs[1], mosaic.thread())
        with mosaic.when(mosaic.equal(warp, i32(_WARPS - 1))):
            at = arith.addi(of_block, arith.remui(lane, i32(_WARPS)))
            largest = mosaic.warp_max(word_at(shared, at))
            with mosaic.when(mosaic.equal(lane, i32(0))):
                scale, factor = scale_of(largest)
                share(shared, of_block, [arith.bitcast(mosaic.integer_type(32), factor)])
                llvm.store(scale, pointer_to(outs[-1], block, self.width // BLOCK, column, 4))
        mosaic.block_barrier()

        if self.by_row:
            of_rows = shared_numbers(shared, row, _PATCH)
            tile.store_rows(outs[0], numbers, [[[f] * _PATCH for f in of_rows]] * _WALKS)
        (factor,) = shared_numbers(shared, of_block, 1)
        factors = [[factor] * _PATCH] * _WALKS
        tile.store_transposed(outs[-2], numbers, factors)


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """A tile of 128 rows by 128 columns, and the position of this thread's elements in it.

    In each step the thread handles a patch of 4 rows by 4 columns.

    Attributes:
      job: the kernel.
      row: the first row of the thread's patches, counted in the tile.
      place: the first column of the thread's patch in the first step, counted in the tile. The
        patch of the next step begins 16 columns further.
      left: the tile's first column in the input.
    """

    job: _Job
    row: Value
    place: Value
    left: Value

    def load(self, source: Any) -> list[list[list[Value]]]:
        """Loads the thread's elements of the tile, and converts them to float32.

        Elements in rows past the block's `count` are 0.

        Returns:
          numbers[step][row][column]: for each step, the elements of the thread's 4 x 4 patch.
        """
        i32 = mosaic.i32
        element = mosaic.element_of(source)
        size = mosaic.bytes_of(element)
        zero = mosaic.f32(0.0)
        numbers: list[list[list[Value]]] = [[] for _ in range(_WALKS)]
        for i in range(_PATCH):
            row = arith.addi(self.row, i32(i))
            exists, row = self.find(row)
            start = pointer_to(source, row, self.job.width, self.column_of_thread, size)
            for walk in range(_WALKS):
                four = _load_four(past(start, walk * _STEP * size), element, size)
                four = [arith.select(exists, value, zero) for value in four]
                numbers[walk].append(four)
        return numbers

    @property
    def column_of_thread(self) -> Value:
        return arith.addi(self.left, self.place)

    def finish_row(self, shared: Any, scales: Any, row: Value) -> None:
        """Computes the scale of row `row` of the tile from the magnitudes in `shared`.

        Stores 1 / scale to shared[row]. Stores the scale to the array `scales`, unless the row is
        past the last row of the tile's block.
        """
        i32 = mosaic.i32
        sides = [arith.addi(row, i32(side * BLOCK)) for side in range(_SIDES)]
        scale, factor = scale_of(max_of(word_at(shared, at) for at in sides))
        share(shared, row, [arith.bitcast(mosaic.integer_type(32), factor)])
        with mosaic.when(mosaic.below(row, self.count)):
            row = arith.addi(self.first, row)
            start = pointer_to(scales, row, self.job.width // BLOCK, self.column, 4)
            llvm.store(scale, start)

    def store_rows(self, out: Any, numbers: Any, factors: Any) -> None:
        row = arith.addi(self.first, self.row)
        start = pointer_to(out, row, self.job.width, self.column_of_thread, 1)
        for i in range(_PATCH):
            row = arith.addi(self.row, mosaic.i32(i))
            with mosaic.when(mosaic.below(row, self.count)):
                for walk in range(_WALKS):
                    four = rounded_word(numbers[walk][i], factors[walk][i])
                    at = past(start, i * self.job.width + walk * _STEP)
                    llvm.store(four, at, alignment=_PATCH)

    def store_transposed(self, out: Any, numbers: Any, factors: list[list[Value]]) -> None:
        height = self.job.num_blocks * BLOCK
        row = arith.addi(arith.muli(self.block, mosaic.i32(BLOCK)), self.row)
        start = pointer_to(out, self.column_of_thread, height, row, 1)
        for walk in range(_WALKS):
            for j in range(_PATCH):
                column = [numbers[walk][i][j] for i in range(_PATCH)]
                four = rounded_word(column, [factors[walk][j]] * _PATCH)
                llvm.store(four, past(start, (walk * _STEP + j) * height), alignment=_PATCH)


def _load_four(pointer: Value, element: Any, size: int) -> list[Value]:
    """Loads four adjacent elements, and converts them to float32.

    `element` is the MLIR type of an element, and `size` its number of bytes.
    """
    loaded = llvm.load(mosaic.vector_type(_PATCH, element), pointer, alignment=size * _PATCH)
    numbers = [vector.extract(loaded, [], [j]) for j in range(_PATCH)]
    if size == 4:
        return numbers
    return [arith.extf(mosaic.float_type(), number) for number in numbers]


def _checked(number: Value) -> tuple[Value, Value]:
    """Returns (number, bits of its magnitude), or (NaN, 0) if the number is not finite."""
    is_finite, size = float8.magnitude(number)
    return float8.or_nan(number, is_finite), size
