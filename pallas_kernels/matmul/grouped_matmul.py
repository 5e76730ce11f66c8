"""Grouped matmul on Hopper's tensor cores: rows in groups, one matrix for each group.

The kernel is built like the others (`pallas_kernels.matmul.kernel`). It cuts the rows of every
group into tiles of its own. No tile covers rows past the last group; those output rows are filled
with zeros, or left as they are.

Tiles start at a multiple of 8 rows, the height of the tensor cores' shared-memory tiles, so a
tile may hold up to 7 rows of the group before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    OTHER_BYTES,
    Kernel,
    aligned,
    check_buffers,
    launch,
    quotient_and_rest,
    transposed,
    zeros,
)
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP, row_tiles

STORED_ROWS = 32  # rows that a computer stores at a time


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile sizes of a `product`, and the depth of its buffers in shared memory.

    Attributes:
      heights: the numbers of rows that a block's output tile may have, in rising order: multiples
        of 8 up to 256, as one instruction of the tensor cores multiplies.
      block_n: width of a block's output tile, 128 or 256; each computer takes half of it.
      num_slots: depth of the ring, in operand tiles of 64 along the summed dimension.
      num_staged: 32 x 64 chunks of its results that a computer may stage on their way to memory.
      band: how many columns of tiles the blocks sweep together, from the first row to the last.
    """

    heights: tuple[int, ...]
    block_n: int
    num_slots: int
    num_staged: int
    band: int = 1

    @classmethod
    def fitting(
        cls, heights: tuple[int, ...], block_n: int, band: int = 1, *, matrices: int = 1
    ) -> Tiles:
        """Returns tiles with the deepest ring that fits, of at most 6 slots, and staging.

        A slot holds tiles of as many `matrices` of a group.
        """
        operand, chunk = 2 * CHUNK, 2 * CHUNK * STORED_ROWS
        room = SHARED_MEMORY_BYTES - OTHER_BYTES - COMPUTERS * 2 * CHUNK * CHUNK  # zeros
        slot = operand * (heights[-1] + matrices * block_n)
        slots = min((room - COMPUTERS * 2 * chunk) // slot, 6)
        staged = min((room - slots * slot) // (COMPUTERS * chunk), 8)
        return cls(heights, block_n, slots, staged, band)

    @property
    def block_m(self) -> int:
        """The most rows of a block's output tile."""
        return self.heights[-1]

    @property
    def part(self) -> int:
        """Columns of a computer's part of an output tile."""
        return self.block_n // COMPUTERS

    def __post_init__(self) -> None:
        rising = list(self.heights) == sorted(set(self.heights))
        whole = all(height % 8 == 0 and 8 <= height <= 256 for height in self.heights)
        if not self.heights or not rising or not whole or self.block_n not in (128, 256):
            raise ValueError(
                "a tile is of rows in multiples of 8 up to 256, heights in rising order, and of "
                f"128 or 256 columns, not {self}."
            )
        check_buffers(self)


def product(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    tiles: Tiles,
    num_blocks: int,
    zero_unused: bool = True,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies each row by its group's matrix, and sums the products of all pairs.

    Args:
      pairs: (lhs [R, K], rhs [L, K, N]) pairs of bfloat16 or float16, all of one dtype; rhs is
        [L, N, K] with `transpose_rhs`. R is a multiple of 8, K of 64, N of tiles.part.
      group_sizes: [L] int32, rows of each group, in order.
      transpose_rhs: whether the matrices are given transposed.
      tiles: tile sizes, and depth of buffers.
      num_blocks: thread blocks to use.
      zero_unused: whether rows past the last group are zero, or what is in memory.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      [R, N] of the operands' dtype. Sums are float32, in the same accumulators for all pairs, and
      are rounded once. The kernel reads rows past the last group no further than the last group's
      last tile.
    """
    lhs, rhs = pairs[0]
    num_rows, width = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    depths = tuple(lhs.shape[1] for lhs, _ in pairs)
    kernel = Product(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        depths,
        num_rows,
        transpose_rhs=transpose_rhs,
        zero_unused=zero_unused,
    )
    table = row_tiles(group_sizes, tiles.heights, num_rows, interpreted=bool(interpret))
    return launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        jax.ShapeDtypeStruct((num_rows, width), lhs.dtype),
        "grouped_matmul",
        interpret,
    )(*(operand for pair in pairs for operand in pair), table)


@dataclasses.dataclass(frozen=True)
class Product(Kernel):
    """The kernel of `product`: sums over pairs of the given depths, K.

    The tensor cores compute tiles transposed, columns of the output by rows: the number of rows of
    an instruction is then free in steps of 8, and a tile is as high as its rows need. Each height
    has a loop of its own.
    """

    depths: tuple[int, ...]
    num_rows: int
    transpose_rhs: bool
    zero_unused: bool

    @property
    def outputs(self) -> int:
        return 1

    def __post_init__(self) -> None:
        if self.width % self.tiles.part:
            raise ValueError(
                f"the output's {self.width} columns are not whole parts of {self.tiles.part}, half "
                f"a tile's."
            )

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        right: tuple[int, ...] = tiles.block_n, CHUNK
        if not self.transpose_rhs:
            right = right[::-1]
        if self.matrices > 1:
            right = self.matrices, *right
        left, staged = (tiles.block_m, CHUNK), (tiles.num_staged, STORED_ROWS)
        return self.ring(dtype, left, right, staged) | dict(
            # Zeros, to store by single rows, which a swizzled tile does not allow. Interpreted
            # kernels store the rows of a group's ends from here, too.
            plain=plgpu.SMEM((COMPUTERS, CHUNK, CHUNK), dtype),
        )

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        *operands, table = refs[: -self.outputs]
        outs = refs[-self.outputs :]
        last = table.shape[0] - 1
        num_tiles, num_live_rows = table[last, 0], table[last, 1]
        total = num_tiles * self.tile_columns

        def kind_of(tile):
            """Returns the index in `tiles.heights` of the lowest that holds the tile's rows."""
            rows = table[tile, END] - table[tile, FIRST]
            lower = (rows > height for height in self.tiles.heights[:-1])
            return sum((each.astype(jnp.int32) for each in lower), jnp.int32(0))

        def load():
            def look_up(index):
                tile, left_edge = self.place(index, num_tiles)
                return table[tile, GROUP], table[tile, FIRST], left_edge, kind_of(tile)

            def one_tile(tile, used):
                group, first, left_edge, kind = tile
                cols = pl.ds(pl.multiple_of(left_edge, CHUNK), self.tiles.block_n)
                together = 1 + self.matrices  # operands that are loaded together

                def load_all(height, used):
                    rows = pl.ds(aligned(first), height)
                    for k, depth in enumerate(self.depths):
                        lhs, *rhs = operands[k * together : (k + 1) * together]

                        def step(i, used, lhs=lhs, rhs=rhs):
                            inner = pl.ds(i * CHUNK, CHUNK)
                            place = (cols, inner) if self.transpose_rhs else (inner, cols)
                            right = (matrix.at[group, *place] for matrix in rhs)
                            return self.fill(scratch, used, lhs.at[rows, inner], *right)

                        used = lax.fori_loop(0, depth // CHUNK, step, used)
                    return used

                loads = [functools.partial(load_all, height) for height in self.tiles.heights]
                return lax.switch(kind, loads, used)

            return self.each_of(total, look_up, one_tile, jnp.int32(0))

        def compute(computer):
            def look_up(index):
                tile, left_edge = self.place(index, num_tiles)
                left_edge += computer * self.tiles.part
                rows = (table[tile, column] for column in (FIRST, BEGIN, END))
                return *rows, left_edge, kind_of(tile)

            def one_tile(tile, used):
                top, begin, end, left_edge, kind = tile
                steps = sum(self.depths) // CHUNK

                def multiply_all(height, used):
                    return self.accumulate(
                        scratch,
                        used,
                        steps,
                        (self.tiles.part, self.matrices * self.tiles.block_m),
                        functools.partial(self._multiply, scratch, computer, height),
                    )

                products = [
                    functools.partial(multiply_all, height) for height in self.tiles.heights
                ]
                results = lax.switch(kind, products, used)

                @pl.when(left_edge < self.width)
                def _():
                    self._store(results, outs, top, begin, end, left_edge, computer, scratch)

                return used + steps

            self.each_of(total, look_up, one_tile, jnp.int32(0))
            if self.zero_unused:
                self._zero_tail(outs, num_live_rows, computer, scratch["plain"].at[computer])

        self.take_roles(scratch, load, compute)

    def _multiply(
        self, scratch: Any, computer: jax.Array, height: int, accumulator: Any, slot: Any, _: Any
    ) -> None:
        """Starts the matmuls of a slot's tiles: of this computer's columns by `height` rows."""
        right = scratch["right"].at[slot]
        mine = pl.ds(computer * self.tiles.part, self.tiles.part)
        rows = transposed(scratch["left"].at[slot, :height])
        for i in range(self.matrices):
            matrix = right if self.matrices == 1 else right.at[i]
            columns = matrix.at[mine] if self.transpose_rhs else transposed(matrix.at[:, mine])
            first = i * self.tiles.block_m
            plgpu.wgmma(accumulator.at[:, first : first + height], columns, rows)

    def results(
        self, total: jax.Array, columns: slice, rows: slice, dtype: Any
    ) -> Iterator[jax.Array]:
        """Yields the elements at some columns and rows of each output, [columns, rows].

        `total` are the accumulators, [part, block_m] for each of `matrices`, side by side.
        """
        yield total[columns, rows].astype(dtype)

    def _store(
        self,
        total: jax.Array,
        outs: Sequence[Any],
        top: jax.Array,
        begin: jax.Array,
        end: jax.Array,
        left_edge: jax.Array,
        computer: jax.Array,
        scratch: Any,
    ) -> None:
        """Stores rows [begin, end) of a computer's part of the tile at (top, left_edge)."""
        staged, plain = scratch["staged"].at[computer], scratch["plain"].at[computer]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        count = 0
        for row in range(0, self.tiles.block_m, STORED_ROWS):
            height = min(STORED_ROWS, self.tiles.block_m - row)
            first = jnp.clip(begin - top - row, 0, height)
            stop = jnp.clip(end - top - row, 0, height)
            rows = slice(row, row + height)
            for column in range(0, self.tiles.part, CHUNK):
                columns = slice(column, column + CHUNK)
                place = top + row, left_edge + column

                @pl.when(stop - first == height)
                def _whole(height=height, rows=rows, columns=columns, place=place, count=count):
                    at = (
                        pl.ds(aligned(place[0]), height),
                        pl.ds(pl.multiple_of(place[1], CHUNK), CHUNK),
                    )
                    chunks = self.results(total, columns, rows, outs[0].dtype)
                    for i, (out, values) in enumerate(zip(outs, chunks, strict=True), count):
                        if i >= self.tiles.num_staged:  # what was staged here has been read
                            plgpu.wait_smem_to_gmem(self.tiles.num_staged - 1, wait_read_only=True)
                        room = staged.at[i % self.tiles.num_staged, :height]
                        if self.interpreted:
                            room[...] = values.T
                        else:
                            mosaic.store_transposed(room, values)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(room, out.at[at])

                @pl.when((first < stop) & (stop - first < height))
                def _some(
                    height=height, rows=rows, columns=columns, place=place, first=first, stop=stop
                ):
                    chunks = self.results(total, columns, rows, outs[0].dtype)
                    for out, values in zip(outs, chunks, strict=True):
                        if not self.interpreted:
                            mosaic.store_rows(out, values, place[0], place[1], first, stop)
                            continue
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plain.at[:height][...] = values.T
                        plgpu.commit_smem()
                        cols = pl.ds(place[1], CHUNK)
                        _store_rows(plain, first, stop, out, place[0], cols)

                count += self.outputs

    def _zero_tail(
        self, outs: Sequence[Any], start: jax.Array, computer: jax.Array, plain: Any
    ) -> None:
        """Writes zeros to the rows of `outs` from `start` on; all blocks' computers share them."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        values = zeros((CHUNK, CHUNK), outs[0].dtype, plgpu.Layout.WGMMA, self.interpreted)
        mosaic.store_plain(plain, values)
        plgpu.commit_smem()
        columns = jnp.int32(self.width // CHUNK)
        first_chunk = lax.div(start, jnp.int32(CHUNK))
        chunks = -(-self.num_rows // CHUNK) - first_chunk
        workers = jnp.int32(self.num_blocks * COMPUTERS)
        me = lax.axis_index("block") * COMPUTERS + computer

        def one_chunk(i, _):
            row, column = quotient_and_rest(me + i * workers, columns)
            first = (first_chunk + row) * CHUNK
            begin = jnp.maximum(start - first, 0)
            end = jnp.minimum(self.num_rows - first, CHUNK)
            cols = pl.ds(column * CHUNK, CHUNK)
            for out in outs:
                _store_rows(plain, begin, end, out, first, cols)

        lax.fori_loop(0, lax.div(chunks * columns - me + (workers - 1), workers), one_chunk, None)


def _store_rows(
    source: Any, begin: jax.Array, end: jax.Array, out: Any, first: jax.Array, cols: Any
) -> None:
    """Stores rows [begin, end) of an unswizzled chunk to the rows of `out` from first + begin on.

    A copy has a static height, so there is one copy for each power of two in the number of rows.
    """
    count, height = end - begin, CHUNK
    while height:

        @pl.when((count & height) != 0)
        def _(height=height, begin=begin):
            plgpu.copy_smem_to_gmem(
                source.at[pl.ds(begin, height)], out.at[pl.ds(first + begin, height), cols]
            )

        begin += count & height
        height //= 2
