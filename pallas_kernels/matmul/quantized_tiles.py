"""Shared code of the kernels that quantize tiles of rows or matrices to float8.

Each of these kernels has a thread block for each tile of 128 rows by 128 columns. `on_tiles` runs
such a kernel. Most of the other functions emit code of one thread, which loads or stores elements
of a tile, or computes their scale.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.fabric import update_in_place
from pallas_kernels.fabric.hardware import WARP, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.formats import FLOAT8_ROWS
from pallas_kernels.matmul.kernel import quotient_and_rest
from pallas_kernels.matmul.row_blocks import BLOCK

PTX_TYPE = float8.PTX_TYPES[jnp.dtype(jnp.float8_e4m3fn)]
# The patches of a warp's 32 threads lie 4 side by side and 8 above each other.
ACROSS = 4
_DOWN = WARP // ACROSS
# The most words that one instruction loads.
_MOST_WORDS = 4


class Scaled(NamedTuple):
    """Quantized rows or matrices: float8 values, and a float32 scale for each block of values.

    A value stands for a number: the value times the scale of its block. In rows, a block is 128
    columns of one row; in matrices, it is 128 rows by 128 columns. Matrices may also be in MXFP4
    (`pallas_kernels.mxfp4`), which has other values, scales and blocks.

    Attributes:
      values: [R, K] rows, or [L, N, K] matrices, float8; K and N are multiples of 128. Or matrices
        in MXFP4, [L, N, K / 2] uint8.
      scales: [R, K / 128] for rows, or [L, N / 128, K / 128] for matrices, float32. Or those of
        MXFP4, [L, N, K / 32] float8_e8m0fnu.
    """

    values: Any
    scales: Any


def on_tiles(
    name: str,
    operands: Sequence[jax.Array],
    blocks: jax.Array | None,
    out_type: Sequence[jax.ShapeDtypeStruct],
    emit: Callable[..., None],
    *,
    width: int,
    num_warps: int,
    num_shared: int = 0,
    into: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Runs a kernel with a thread block for each tile of 128 rows by 128 columns.

    The rows come in blocks of up to 128. For a block without rows the kernel computes and writes
    nothing.

    Args:
      name: the kernel's name in profiles.
      operands: the kernel's operands, without `blocks`.
      blocks: [number of blocks, 2] int32, each block's first row and number of rows, at most 128;
        None: the rows of the first operand, 128 in each block.
      out_type: shapes and dtypes of the results.
      emit: `emit(memrefs, block, column, first, count)` emits the code of one thread. `memrefs` are
        the operands, the arrays `into`, the results and, with `num_shared`, the shared memory.
        `block` is the index of the tile's block of rows, and the tile's columns begin at
        128 * column. `first` and `count` are the block's first row and its number of rows.
      width: number of columns, a multiple of 128.
      num_warps: number of warps of a thread block.
      num_shared: number of 32-bit numbers in shared memory.
      into: arrays that the kernel updates in place. An array that is still used elsewhere is copied
        first.

    Returns:
      The updated arrays `into`, and then the results of the types `out_type`.
    """
    tiles, num_operands = width // BLOCK, len(operands)

    def emit_tile(*values: Any) -> None:
        *memrefs, block, column, first, count = values
        emit(memrefs, *(mosaic.scalar(each) for each in (block, column, first, count)))

    def kernel(*refs: Any, **scratch: Any) -> None:
        block, column = quotient_and_rest(lax.axis_index("tile"), jnp.int32(tiles))
        if blocks is None:
            numbers, arrays = [block, column, block * BLOCK, jnp.int32(BLOCK)], [*refs]
        else:
            of_blocks = refs[num_operands]
            numbers = [block, column, of_blocks[block, 0], of_blocks[block, 1]]
            arrays = [*refs[:num_operands], *refs[num_operands + 1 :]]

        def run() -> None:
            memrefs = [*arrays, *scratch.values()]
            layouts = [mosaic.REFERENCE] * len(memrefs) + [mosaic.SCALAR] * len(numbers)
            mosaic.inline(emit_tile, [*memrefs, *numbers], layouts)

        if blocks is None:
            run()
        else:
            # The condition also reads the first row, so that it is loaded together with the number
            # of rows, not after the branch.
            _, _, first, count = numbers
            pl.when((count > 0) & (first >= 0))(run)

    num_row_blocks = operands[0].shape[0] // BLOCK if blocks is None else blocks.shape[0]
    shared = dict(shared=plgpu.SMEM((num_shared,), jnp.float32)) if num_shared else {}
    call = mosaic.kernel(
        kernel,
        out_type=list(out_type),
        scratch_types=shared,
        num_threads=num_warps * WARP // WARPGROUP,
        thread_name="warpgroup",
        grid=(num_row_blocks * tiles,),
        grid_names=("tile",),
        auto_barriers=False,
        kernel_name=name,
    )
    arrays = [*operands, *(() if blocks is None else (blocks,))]
    updated, results = update_in_place(into, lambda refs: call(*arrays, *refs))
    return [*updated, *results]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of 128 rows by 128 columns that a thread block handles. All attributes are i32.

    Attributes:
      block: the index of the tile's block of rows.
      column: the tile's columns begin at 128 * column.
      first: the block's first row in the operands.
      count: the number of rows in the block, at most 128.
    """

    block: Value
    column: Value
    first: Value
    count: Value

    def find(self, row: Value) -> tuple[Value, Value]:
        """Returns whether the tile's block has row `row` of the tile (i1), and which row to read.

        The row to read is counted in the operands. A block may have fewer than 128 rows, and the
        operands may end after it. So past the block's last row, the row to read is its first row.
        """
        exists = mosaic.below(row, self.count)
        return exists, arith.addi(self.first, arith.select(exists, row, mosaic.i32(0)))


class Place(NamedTuple):
    """Where a thread's patch lies in a tile. All attributes are i32.

    Attributes:
      thread: the index of the thread.
      warp, lane: the index of its warp, and of the thread in the warp.
      side: the index of the warp's columns: warps lie side by side, and then above each other.
      row, column: the first row and column of the patch, counted in the tile.
    """

    thread: Value
    warp: Value
    lane: Value
    side: Value
    row: Value
    column: Value


def sides_of(num_columns: int) -> int:
    """Returns the number of warps, side by side, that cover a tile by patches of `num_columns`."""
    return BLOCK // (num_columns * ACROSS)


def warps_of(num_rows: int, num_columns: int) -> int:
    """Returns the number of warps that cover a tile by patches of `num_rows` by `num_columns`."""
    return sides_of(num_columns) * BLOCK // (num_rows * _DOWN)


def place_of(num_rows: int, num_columns: int) -> Place:
    """Returns where the patch of this thread lies, if it has `num_rows` by `num_columns`."""
    i32, thread = mosaic.i32, mosaic.thread()
    warp, lane = (op(thread, i32(WARP)) for op in (arith.divui, arith.remui))
    strip, side = (op(warp, i32(sides_of(num_columns))) for op in (arith.divui, arith.remui))
    down, across = (op(lane, i32(ACROSS)) for op in (arith.divui, arith.remui))
    row = arith.muli(arith.addi(arith.muli(strip, i32(_DOWN)), down), i32(num_rows))
    column = arith.addi(arith.muli(side, i32(ACROSS)), across)
    return Place(thread, warp, lane, side, row, arith.muli(column, i32(num_columns)))


def pointer_to(ref: Any, row: Value, width: int, column: Value, size: int) -> Value:
    """Returns a pointer to element (row, column) of `ref`, an array [rows, width].

    `size` is the number of bytes of an element.
    """
    wide = mosaic.integer_type(64)
    at = arith.muli(arith.extui(wide, row), mosaic.i64(width))
    at = arith.muli(arith.addi(at, arith.extui(wide, column)), mosaic.i64(size))
    return mosaic.element_pointer(mosaic.pointer(ref), at, mosaic.integer_type(8))


def past(pointer: Value, num_bytes: int) -> Value:
    return mosaic.element_pointer(pointer, mosaic.i64(num_bytes), mosaic.integer_type(8))


def word_at(ref: Any, at: Value) -> Value:
    word = mosaic.integer_type(32)
    return llvm.load(word, mosaic.element_pointer(mosaic.pointer(ref), at, word))


def share(ref: Any, at: Value, numbers: list[Value]) -> None:
    """Stores 32-bit numbers to `ref` in shared memory: to consecutive elements from `at` on."""
    word = mosaic.integer_type(32)
    pointer = mosaic.element_pointer(mosaic.pointer(ref), at, word)
    of_all = mosaic.vector_type(len(numbers), word)
    llvm.store(vector.from_elements(of_all, numbers), pointer, alignment=4 * len(numbers))


def shared_numbers(ref: Any, at: Value, count: int) -> list[Value]:
    """Loads up to 4 consecutive float32 numbers from `ref` in shared memory, from `at` on."""
    return _shared(ref, at, count, mosaic.float_type())


def shared_words(ref: Any, at: Value, count: int) -> list[Value]:
    """Loads up to 4 consecutive 32-bit words from `ref` in shared memory, from `at` on."""
    return _shared(ref, at, count, mosaic.integer_type(32))


def _shared(ref: Any, at: Value, count: int, element: Any) -> list[Value]:
    pointer = mosaic.element_pointer(mosaic.pointer(ref), at, element)
    loaded = llvm.load(mosaic.vector_type(count, element), pointer, alignment=4 * count)
    return [vector.extract(loaded, [], [j]) for j in range(count)]


def bits_of_e8m0(code: Value, fraction_bits: int) -> Value:
    """Returns the bits of the scale 2^(code - 127), or of NaN for code 255, as i32.

    They are those of a float dtype with 8 exponent bits, such as float32, and `fraction_bits`
    fraction bits. 2^-127, the scale with code 0, is a subnormal number.
    """
    half = 1 << (fraction_bits - 1)
    bits = arith.shli(code, mosaic.i32(fraction_bits))
    bits = arith.select(mosaic.equal(code, mosaic.i32(0)), mosaic.i32(half), bits)
    nan = mosaic.i32(255 << fraction_bits | half)
    return arith.select(mosaic.equal(code, mosaic.i32(255)), nan, bits)


def max_of(sizes: Any) -> Value:
    return functools.reduce(arith.maxui, sizes)


def with_shuffled(sizes: list[Value], distance: int) -> list[Value]:
    """Returns the elementwise maximum of the magnitudes `sizes` of this lane and another one.

    The other lane of the warp is the one whose index is this lane's index XOR `distance`.
    """
    return [arith.maxui(size, mosaic.shuffle(size, distance)) for size in sizes]


def scale_of(largest: Value) -> tuple[Value, Value]:
    """Returns the scale of a quantization block, and 1 / scale.

    `largest` is the bits of the largest magnitude in the block. The function uses
    `float8.reciprocal`, since with `float8.branchless_reciprocal` some kernels would need more than
    64 registers per thread. A multiprocessor would then run one thread block at a time, not two.
    """
    scale = float8.scale(FLOAT8_ROWS, largest)
    return scale, float8.reciprocal(scale)


def rounded_word(numbers: Any, factors: Any) -> Value:
    """Multiplies four float32 numbers by their factors, and packs them as float8 in a word."""
    four = [arith.mulf(number, factor) for number, factor in zip(numbers, factors, strict=True)]
    return float8.packed(PTX_TYPE, four)


def load_words(pointer: Value, count: int) -> list[Value]:
    """Loads adjacent 32-bit words: one, two, or a multiple of four."""
    at_once = min(count, _MOST_WORDS)
    of_all, found = mosaic.vector_type(at_once, mosaic.integer_type(32)), []
    for i in range(0, count, at_once):
        loaded = llvm.load(of_all, past(pointer, 4 * i), alignment=4 * at_once)
        found += [vector.extract(loaded, [], [j]) for j in range(at_once)]
    return found


def store_words(words: Sequence[Value], pointer: Value) -> None:
    """Stores adjacent 32-bit words."""
    of_all = mosaic.vector_type(len(words), mosaic.integer_type(32))
    llvm.store(vector.from_elements(of_all, words), pointer, alignment=4 * len(words))


def transposed_bytes(rows: list[Value]) -> list[Value]:
    """Transposes 4 x 4 bytes: takes a word for each row, and returns one for each column."""
    a, b, c, d = rows

    def chosen(low: Value, high: Value, bytes_of_both: int) -> Value:
        return mosaic.chosen_bytes(low, high, mosaic.i32(bytes_of_both))

    # The first two columns of rows a and b, byte by byte, and those of c and d; then the last two.
    pairs = [(chosen(a, b, order), chosen(c, d, order)) for order in (0x5140, 0x7362)]
    return [chosen(upper, lower, order) for upper, lower in pairs for order in (0x5410, 0x7632)]
