"""Kernel that quantizes rows or matrices to float8, and also transposes them, in one memory pass.

Tensor cores require float8 operands whose contraction dimension is innermost. A grouped matmul
contracts the columns of the rows. The gradient of the rows needs the matrices transposed. The
gradient of the matrices needs the rows and their gradients transposed, with scales that are shared
by 128 rows.

A thread block of 16 warps handles a tile of 128 rows by 128 columns. The diagram shows the patches
of 4 x 4 elements that the threads of a warp handle in one step:

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
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import LANES, WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.formats import FLOAT8_ROWS, Float8
from pallas_kernels.matmul.kernel import quotient_and_rest
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
# The number of columns of a tile that a warp handles in all, in `_WALKS` steps.
_WIDTH = BLOCK // _SIDES
_WALKS = _WIDTH // _STEP
_WARPS = _STRIPS * _SIDES
_PTX_TYPE = "e4m3"


class Scaled(NamedTuple):
    """Quantized rows or matrices: float8 values, and a float32 scale for each block of values.

    A value stands for a number: the value times the scale of its block. In rows, a block is 128
    columns of one row; in matrices, it is 128 rows by 128 columns.

    Attributes:
      values: [R, K] rows, or [L, N, K] matrices, float8; K and N are multiples of 128.
      scales: [R, K / 128] for rows, or [L, N / 128, K / 128] for matrices, float32.
    """

    values: Any
    scales: Any


def quantize_rows(
    rows: jax.Array | Scaled,
    blocks: jax.Array,
    *,
    keep_order: bool,
    by_column: bool,
    interpret: Any = None,
) -> tuple[Scaled | None, TransposedRows]:
    """Quantizes rows to float8_e4m3fn, and transposes them.

    Args:
      rows: [R, K] bfloat16, float16 or float32, or quantized rows; K is a multiple of 128.
      blocks: [P / 128, 2] int32, each block's first row and number of rows: the first result of
        `row_blocks`.
      keep_order: whether to return the quantized rows also without the transposition, with a scale
        for each 128 columns of a row.
      by_column: whether the transposed rows have a scale for each 128 rows of one column. If False,
        they have a scale for each 128 rows by 128 columns.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      (quantized rows [R, K], or None without `keep_order`; transposed rows [K, P]). Quantized rows
      past the last group hold anything.
    """
    num_rows, width = (rows.values if isinstance(rows, Scaled) else rows).shape
    num_blocks = blocks.shape[0]
    job = _Job(
        width=width,
        num_blocks=num_blocks,
        rows_of_matrix=num_blocks * BLOCK,
        by_row=keep_order,
        by_column=by_column,
        is_scaled=isinstance(rows, Scaled),
    )
    values = jax.ShapeDtypeStruct((num_rows, width), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((num_rows, width // BLOCK), jnp.float32)
    columns = width if by_column else width // BLOCK
    out_type = [
        *([values, scales] if keep_order else []),
        jax.ShapeDtypeStruct((width, num_blocks * BLOCK), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((num_blocks, columns), jnp.float32),
    ]
    operands = rows if isinstance(rows, Scaled) else (rows,)
    results = job.run(out_type, (*operands, blocks), interpret)
    *kept, values, scales = results
    return Scaled(*kept) if keep_order else None, TransposedRows(values, scales)


def quantize_matrices(matrices: jax.Array, *, interpret: Any = None) -> tuple[Scaled, Scaled]:
    """Quantizes matrices to float8_e4m3fn; returns the quantized matrices and their transposes.

    A scale belongs to a block of 128 rows by 128 columns. So a matrix and its transpose have the
    same float8 values and scales.

    Args:
      matrices: [L, K, N] bfloat16, float16 or float32; K and N are multiples of 128.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      (matrices [L, K, N], transposed matrices [L, N, K]).
    """
    num_matrices, height, width = matrices.shape
    num_blocks = num_matrices * height // BLOCK
    job = _Job(
        width=width,
        num_blocks=num_blocks,
        rows_of_matrix=height,
        by_row=False,
        by_column=False,
        whole=True,
    )
    first = jnp.arange(num_blocks, dtype=jnp.int32) * BLOCK
    blocks = jnp.stack([first, jnp.full_like(first, BLOCK)], axis=1)
    values, transposed, scales = job.run(
        [
            jax.ShapeDtypeStruct((num_blocks * BLOCK, width), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_matrices * width, height), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_blocks, width // BLOCK), jnp.float32),
        ],
        (matrices.reshape(-1, width), blocks),
        interpret,
    )
    scales = scales.reshape(num_matrices, height // BLOCK, width // BLOCK)
    return (
        Scaled(values.reshape(matrices.shape), scales),
        Scaled(transposed.reshape(num_matrices, width, height), jnp.swapaxes(scales, 1, 2)),
    )


@dataclasses.dataclass(frozen=True)
class _Job:
    """The kernel that quantizes and transposes. Its blocks handle tiles of 128 rows by 128 columns.

    Attributes:
      width: number of columns of the input.
      num_blocks: number of blocks of 128 rows. There are num_blocks x (width / 128) tiles.
      rows_of_matrix: number of rows of a matrix, a multiple of 128. Each matrix is transposed by
        itself. If the input is rows, they count as one matrix of P rows, the number of rows with
        each group padded to a multiple of 128.
      by_row: whether the kernel also stores the values without the transposition, with a scale for
        each 128 columns of a row.
      by_column: whether the transposed values have a scale for each 128 rows of one column. If
        False, they have a scale for each 128 rows by 128 columns.
      is_scaled: whether the input is quantized; its scales are then the second operand.
      whole: set for matrices: every block has 128 rows, and the kernel also stores the values
        without the transposition, with the same scales as the transposed values.
    """

    width: int
    num_blocks: int
    rows_of_matrix: int
    by_row: bool
    by_column: bool
    is_scaled: bool = False
    whole: bool = False

    def run(self, out_type: Any, operands: Any, interpret: Any) -> Any:
        num_operands = len(operands)

        def kernel(*refs: Any, largest: Any) -> None:
            blocks, tile = refs[num_operands - 1], lax.axis_index("tile")
            block, column = quotient_and_rest(tile, jnp.int32(self.width // BLOCK))
            numbers = [block, column, blocks[block, 0], blocks[block, 1]]
            arrays = [*refs[: num_operands - 1], *refs[num_operands:]]
            if interpret:
                self.interpreted(arrays, *numbers)
                return
            arrays.append(largest)

            def emit(*values: Any) -> None:
                *memrefs, block, column, first, count = values
                scalars = [mosaic.scalar(v) for v in (block, column, first, count)]
                self.emit(memrefs, scalars)

            layouts = [mosaic.REFERENCE] * len(arrays) + [mosaic.SCALAR] * len(numbers)
            mosaic.inline(emit, [*arrays, *numbers], layouts)

        return mosaic.kernel(
            kernel,
            out_type=out_type,
            scratch_types=dict(largest=plgpu.SMEM(((_SIDES + _STRIPS) * BLOCK,), jnp.float32)),
            num_threads=_WARPS * WARP // LANES,
            thread_name="warpgroup",
            grid=(self.num_blocks * (self.width // BLOCK),),
            grid_names=("tile",),
            auto_barriers=False,
            interpret=interpret,
            kernel_name="quantize_tiles",
        )(*operands)

    def interpreted(self, refs: list[Any], block: Any, column: Any, first: Any, count: Any) -> None:
        """Quantizes a tile by JAX operations in Pallas' interpreter, where `emit` cannot run.

        Args:
          refs: references to the input, its scales if it is quantized, and the outputs.
          block: the index of the tile's block of 128 rows.
          column: the tile's columns begin at 128 * column.
          first: the block's first row in the input.
          count: the number of rows that the block has; the rest of its 128 rows is padding.
        """
        source, *rest = refs
        source_scales = rest.pop(0) if self.is_scaled else None
        columns = pl.ds(column * BLOCK, BLOCK)

        def row_of(i: Any) -> Any:
            return first + jnp.where(i < count, i, 0)

        def load(i: Any, tile: Any) -> Any:
            row = source[row_of(i), columns].astype(jnp.float32)
            if source_scales is not None:
                row *= source_scales[row_of(i), column]
            return tile.at[i].set(jnp.where(i < count, row, 0))

        def store() -> None:
            tile = lax.fori_loop(0, BLOCK, load, jnp.zeros((BLOCK, BLOCK), jnp.float32))
            outs = list(rest)
            if self.by_row:
                self.store_kept(outs.pop(0), outs.pop(0), tile, first, count, column)
            if self.by_column:
                values, scales = FLOAT8_ROWS.encode(tile.T)
                outs[-1][block, columns] = scales[:, 0]
            else:
                values, scales = Float8.of(jnp.float8_e4m3fn, (BLOCK, BLOCK)).encode(tile)
                outs[-1][block, column] = scales[0, 0]
                if self.whole:
                    outs[0][pl.ds(block * BLOCK, BLOCK), columns] = values
                values = values.T
            matrix, row = quotient_and_rest(block * BLOCK, jnp.int32(self.rows_of_matrix))
            at = pl.ds(matrix * self.width + column * BLOCK, BLOCK), pl.ds(row, BLOCK)
            outs[-2][at] = values

        pl.when(lax.axis_index("warpgroup") == 0)(store)

    def store_kept(self, values_ref, scales_ref, tile, first, count, column):
        """Quantizes the first `count` rows of a tile, and stores them without a transposition.

        Runs only in Pallas' interpreter, as a part of `interpreted`. On a GPU, the code of `emit`
        stores these rows.

        Args:
          values_ref: [R, K] float8, gets the quantized rows from row `first` on, in the 128 columns
            that begin at 128 * `column`.
          scales_ref: [R, K / 128] float32, gets the scale of each of these rows, in `column`.
          tile: [128, 128] float32.
          first: the row of the outputs for row 0 of `tile`.
          count: the number of rows to store.
          column: the column of the tile among the tiles of 128 columns.
        """
        values, scales = FLOAT8_ROWS.encode(tile)

        def store(i: Any, _: Any) -> None:
            @pl.when(i < count)
            def _() -> None:
                values_ref[first + i, pl.ds(column * BLOCK, BLOCK)] = values[i]
                scales_ref[first + i, column] = scales[i, 0]

        lax.fori_loop(0, BLOCK, store, None)

    def emit(self, memrefs: list[Any], scalars: list[Value]) -> None:
        """Emits the code by which a thread quantizes its elements of a tile.

        Args:
          memrefs: the input, its scales if it is quantized, the outputs, and shared memory.
          scalars: the arguments `block`, `column`, `first` and `count` of `interpreted`.
        """
        source, *rest = memrefs
        source_scales = rest.pop(0) if self.is_scaled else None
        *outs, shared = rest
        i32 = mosaic.i32
        warp, lane = (op(mosaic.thread(), i32(WARP)) for op in (arith.divui, arith.remui))
        strip, side = arith.remui(warp, i32(_STRIPS)), arith.divui(warp, i32(_STRIPS))
        row = arith.addi(
            arith.muli(strip, i32(WARP)), arith.muli(arith.divui(lane, i32(_ACROSS)), i32(_PATCH))
        )
        place = arith.addi(
            arith.muli(side, i32(_WIDTH)), arith.muli(arith.remui(lane, i32(_ACROSS)), i32(_PATCH))
        )
        block, column, first, count = scalars
        left = arith.muli(column, i32(BLOCK))
        tile = _Tile(self, row, place, left, block, column, first, count)
        # numbers[walk][row][column] are the thread's elements: in each step, which the code calls a
        # walk, a patch of 4 rows by 4 columns.
        numbers = tile.load(source, source_scales)

        # Each warp finds the largest magnitude of each of its rows, and of each of its columns or
        # of all its elements, as the scales require. It writes these magnitudes to shared memory,
        # since a scale belongs to elements of several warps.
        sizes = [[[_size(x) for x in of_row] for of_row in walk] for walk in numbers]
        if self.by_row:
            rows = [_max(x for walk in sizes for x in walk[i]) for i in range(_PATCH)]
            for distance in (1, 2):
                rows = _with_shuffled(rows, distance)
            with mosaic.when(mosaic.equal(arith.remui(lane, i32(_ACROSS)), i32(0))):
                tile.share(shared, arith.addi(arith.muli(side, i32(BLOCK)), row), rows)
        of_columns = [
            arith.addi(i32(_SIDES * BLOCK + walk * _STEP), place) for walk in range(_WALKS)
        ]
        if self.by_column:
            columns = [
                [_max(walk[i][j] for i in range(_PATCH)) for j in range(_PATCH)] for walk in sizes
            ]
            for distance in (4, 8, 16):
                columns = [_with_shuffled(walk, distance) for walk in columns]
            with mosaic.when(mosaic.below(lane, i32(_ACROSS))):
                for at, four in zip(of_columns, columns, strict=True):
                    tile.share(shared, arith.addi(at, arith.muli(strip, i32(BLOCK))), four)
        else:
            total = mosaic.warp_max(_max(x for walk in sizes for of_row in walk for x in of_row))
            with mosaic.when(mosaic.equal(lane, i32(0))):
                tile.share(shared, arith.addi(warp, i32(_SIDES * BLOCK)), [total])
        mosaic.block_barrier()

        if self.by_row:
            halves = [
                tile.shared(shared, arith.addi(row, i32(side * BLOCK)), _PATCH)
                for side in range(_SIDES)
            ]
            of_rows = [_scale(_max(x)) for x in zip(*halves, strict=True)]
            with mosaic.when(mosaic.equal(place, i32(0))):
                tile.store_scales_of_rows(outs[1], [scale for scale, _ in of_rows])
            tile.store_rows(outs[0], numbers, [[[f] * _PATCH for _, f in of_rows]] * _WALKS)
        if self.by_column:
            of_strips = [
                [
                    tile.shared(shared, arith.addi(at, i32(strip * BLOCK)), _PATCH)
                    for strip in range(_STRIPS)
                ]
                for at in of_columns
            ]
            both = [[_scale(_max(x)) for x in zip(*of_walk, strict=True)] for of_walk in of_strips]
            factors = [[factor for _, factor in walk] for walk in both]
            with mosaic.when(
                arith.andi(mosaic.equal(strip, i32(0)), mosaic.below(lane, i32(_ACROSS)))
            ):
                tile.store_scales_of_columns(outs[-1], [[s for s, _ in walk] for walk in both])
        else:
            totals = tile.shared(shared, i32(_SIDES * BLOCK), _WARPS)
            scale, factor = _scale(_max(totals))
            factors = [[factor] * _PATCH] * _WALKS
            with mosaic.when(mosaic.equal(mosaic.thread(), i32(0))):
                at = arith.addi(arith.muli(block, i32(self.width // BLOCK)), column)
                llvm.store(scale, mosaic.element_pointer(mosaic.pointer(outs[-1]), at, scale.type))
        if self.whole:
            tile.store_rows(outs[0], numbers, [[four] * _PATCH for four in factors])
        tile.store_transposed(outs[1] if self.whole else outs[-2], numbers, factors)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of 128 rows by 128 columns, and which of its elements the running thread handles.

    In each step the thread handles a patch of 4 rows by 4 columns.

    Attributes:
      job: the kernel.
      row: the first row of the thread's patches, counted in the tile.
      place: the first column of the thread's patch in the first step, counted in the tile. The
        patch of the next step begins 16 columns further.
      left: the tile's first column in the input.
      block: the index of the tile's block of 128 rows.
      column: the index of the tile in its row of tiles: `left` / 128.
      first: the block's first row in the input.
      count: the number of rows that the block has; the rest of its 128 rows is padding.
    """

    job: _Job
    row: Value
    place: Value
    left: Value
    block: Value
    column: Value
    first: Value
    count: Value

    def load(self, source: Any, scales: Any) -> list[list[list[Value]]]:
        """Loads the thread's elements of the tile, and converts them to float32.

        Elements in rows past the block's `count` are 0. If the input is quantized, `scales` is the
        memref of its scales, by which the values are multiplied; else it is None.

        Returns:
          numbers[step][row][column]: for each step, the elements of the thread's 4 x 4 patch.
        """
        i32, f32 = mosaic.i32, mosaic.float_type()
        element = mosaic.element_of(source)
        size = mosaic.bytes_of(element)
        zero = mosaic.f32(0.0)
        numbers: list[list[list[Value]]] = [[] for _ in range(_WALKS)]
        for i in range(_PATCH):
            row = arith.addi(self.row, i32(i))
            exists = mosaic.below(row, self.count)
            if not self.job.whole:
                # Rows past the block's `count` may not exist in the input. Instead of them, the
                # block's first row is read.
                row = arith.select(exists, row, i32(0))
            row = arith.addi(self.first, row)
            start = self.pointer(source, row, self.job.width, self.column_of_thread, size)
            scale = None
            if scales is not None:
                at = self.pointer(scales, row, self.job.width // BLOCK, self.column, 4)
                scale = llvm.load(f32, at)
            for walk in range(_WALKS):
                four = _load_four(_past(start, walk * _STEP * size), element, size)
                if scale is not None:
                    four = [arith.mulf(value, scale) for value in four]
                if not self.job.whole:
                    four = [arith.select(exists, value, zero) for value in four]
                numbers[walk].append(four)
        return numbers

    @property
    def column_of_thread(self) -> Value:
        return arith.addi(self.left, self.place)

    def pointer(self, ref: Any, row: Value, width: int, column: Value, size: int) -> Value:
        """Returns a pointer to element (row, column) of `ref`, an array [rows, width].

        `size` is the number of bytes of an element.
        """
        wide = mosaic.integer_type(64)
        at = arith.muli(arith.extui(wide, row), mosaic.i64(width))
        at = arith.muli(arith.addi(at, arith.extui(wide, column)), mosaic.i64(size))
        return mosaic.element_pointer(mosaic.pointer(ref), at, mosaic.integer_type(8))

    def share(self, ref: Any, at: Value, numbers: list[Value]) -> None:
        """Stores 32-bit numbers to `ref` in shared memory: to consecutive elements from `at` on."""
        word = mosaic.integer_type(32)
        pointer = mosaic.element_pointer(mosaic.pointer(ref), at, word)
        of_all = mosaic.vector_type(len(numbers), word)
        llvm.store(vector.from_elements(of_all, numbers), pointer, alignment=4 * len(numbers))

    def shared(self, ref: Any, at: Value, count: int) -> list[Value]:
        """Loads `count` consecutive 32-bit numbers from `ref` in shared memory, from `at` on."""
        word = mosaic.integer_type(32)
        loaded = []
        for first in range(0, count, _PATCH):
            place = arith.addi(at, mosaic.i32(first))
            pointer = mosaic.element_pointer(mosaic.pointer(ref), place, word)
            four = llvm.load(mosaic.vector_type(_PATCH, word), pointer, alignment=4 * _PATCH)
            loaded += [vector.extract(four, [], [j]) for j in range(_PATCH)]
        return loaded

    def store_rows(self, out: Any, numbers: Any, factors: Any) -> None:
        row = arith.addi(self.first, self.row)
        start = self.pointer(out, row, self.job.width, self.column_of_thread, 1)
        for i in range(_PATCH):
            row = arith.addi(self.row, mosaic.i32(i))
            with mosaic.when(mosaic.below(row, self.count)):
                for walk in range(_WALKS):
                    four = _packed(numbers[walk][i], factors[walk][i])
                    at = _past(start, i * self.job.width + walk * _STEP)
                    llvm.store(four, at, alignment=_PATCH)

    def store_transposed(self, out: Any, numbers: Any, factors: list[list[Value]]) -> None:
        i32, height = mosaic.i32, self.job.rows_of_matrix
        top = arith.muli(self.block, i32(BLOCK))
        matrix, row = arith.divui(top, i32(height)), arith.remui(top, i32(height))
        first = arith.addi(arith.muli(matrix, i32(self.job.width)), self.column_of_thread)
        start = self.pointer(out, first, height, arith.addi(row, self.row), 1)
        for walk in range(_WALKS):
            for j in range(_PATCH):
                column = [numbers[walk][i][j] for i in range(_PATCH)]
                four = _packed(column, [factors[walk][j]] * _PATCH)
                llvm.store(four, _past(start, (walk * _STEP + j) * height), alignment=_PATCH)

    def store_scales_of_rows(self, out: Any, scales: list[Value]) -> None:
        i32 = mosaic.i32
        for i, scale in enumerate(scales):
            row = arith.addi(self.row, i32(i))
            with mosaic.when(mosaic.below(row, self.count)):
                at = arith.addi(
                    arith.muli(arith.addi(self.first, row), i32(self.job.width // BLOCK)),
                    self.column,
                )
                llvm.store(scale, mosaic.element_pointer(mosaic.pointer(out), at, scale.type))

    def store_scales_of_columns(self, out: Any, scales: list[list[Value]]) -> None:
        f32 = mosaic.float_type()
        for walk, four in enumerate(scales):
            at = arith.addi(
                arith.muli(self.block, mosaic.i32(self.job.width)),
                arith.addi(self.left, arith.addi(self.place, mosaic.i32(walk * _STEP))),
            )
            pointer = mosaic.element_pointer(mosaic.pointer(out), at, f32)
            of_four = mosaic.vector_type(_PATCH, f32)
            llvm.store(vector.from_elements(of_four, four), pointer, alignment=16)


def _past(pointer: Value, num_bytes: int) -> Value:
    return mosaic.element_pointer(pointer, mosaic.i64(num_bytes), mosaic.integer_type(8))


def _load_four(pointer: Value, element: Any, size: int) -> list[Value]:
    """Loads four adjacent elements, and converts them to float32.

    `element` is the MLIR type of an element, and `size` its number of bytes. Elements of 1 byte are
    float8.
    """
    if size == 1:
        word = llvm.load(mosaic.integer_type(32), pointer, alignment=_PATCH)
        return float8.widened(_PTX_TYPE, word)
    loaded = llvm.load(mosaic.vector_type(_PATCH, element), pointer, alignment=size * _PATCH)
    numbers = [vector.extract(loaded, [], [j]) for j in range(_PATCH)]
    if size == 4:
        return numbers
    return [arith.extf(mosaic.float_type(), number) for number in numbers]


def _size(number: Value) -> Value:
    return float8.magnitude(number)[1]


def _max(sizes: Any) -> Value:
    return functools.reduce(arith.maxui, sizes)


def _with_shuffled(sizes: list[Value], distance: int) -> list[Value]:
    """Returns the elementwise maximum of the magnitudes `sizes` of two lanes of a warp.

    The two are this lane, and the lane whose index is this lane's XOR `distance`.
    """
    return [arith.maxui(size, mosaic.shuffle(size, distance)) for size in sizes]


def _scale(largest: Value) -> tuple[Value, Value]:
    """Returns the scale of a quantization block, and 1 / scale.

    `largest` is the bits of the largest magnitude in the block. With `float8.branchless_reciprocal`
    instead of `float8.reciprocal`, some kernels would need more than 64 registers per thread. A
    multiprocessor would then run one thread block at a time instead of two.
    """
    scale = float8.scale(FLOAT8_ROWS, largest)
    return scale, float8.reciprocal(scale)


def _packed(numbers: Any, factors: Any) -> Value:
    """Multiplies four float32 numbers by their factors, rounds to float8, and packs the results.

    Returns a 32-bit word.
    """
    four = [
        float8.scaled(number, float8.magnitude(number)[0], factor)
        for number, factor in zip(numbers, factors, strict=True)
    ]
    return float8.packed(_PTX_TYPE, four)
