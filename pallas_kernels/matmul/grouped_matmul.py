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
from collections.abc import Callable, Sequence
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
    EIGHT_ROWS,
    OTHER_BYTES,
    Kernel,
    aligned,
    check_buffers,
    launch,
    quotient_and_rest,
    run_one,
    transposed,
    zeros,
)
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP, ROW_ALIGNMENT, row_tiles

STORED_ROWS = 32  # rows that a computer stores at a time
_STAGING = "staged", "plain"  # scratch of each computer's own; the second if interpreted


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile sizes of a `product`, and the depth of its buffers in shared memory.

    Attributes:
      heights: the numbers of rows that a block's output tile may have, in rising order: multiples
        of 8 up to 256, as one instruction of the tensor cores multiplies.
      block_n: width of a block's output tile, 128 or 256; each computer takes half of it.
      num_stages: depth of the ring, in operand tiles of 64 along the summed dimension.
      num_staged: 32 x 64 chunks of its results that a computer may stage on their way to memory.
      band: how many columns of tiles the blocks sweep together, from the first row to the last.
    """

    heights: tuple[int, ...]
    block_n: int
    num_stages: int
    num_staged: int
    band: int = 1

    @classmethod
    def fitting(
        cls, heights: tuple[int, ...], block_n: int, band: int = 1, *, matrices: int = 1
    ) -> Tiles:
        """Returns tiles with the deepest ring that fits, of at most 6 stages, and staging.

        A stage holds tiles of as many `matrices` of a group.
        """
        operand, chunk = 2 * CHUNK, 2 * CHUNK * STORED_ROWS
        room = SHARED_MEMORY_BYTES - OTHER_BYTES
        stage = operand * (heights[-1] + matrices * block_n)
        stages = min((room - COMPUTERS * (1 + matrices) * chunk) // stage, 6)
        staged = min((room - stages * stage) // (COMPUTERS * chunk), 8)
        return cls(heights, block_n, stages, staged, band)

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
        if self.num_staged < 1:
            raise ValueError(f"num_staged must be positive, not {self}.")
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
    an instruction is then free in steps of 8, and a tile is as high as its rows need.
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

    @property
    def _num_staged(self) -> int:
        """Returns how many chunks a computer stages: of each output one at least."""
        return max(self.tiles.num_staged, self.outputs)

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        right: tuple[int, ...] = tiles.block_n, CHUNK
        if not self.transpose_rhs:
            right = right[::-1]
        if self.matrices > 1:
            right = self.matrices, *right
        left, staged = (tiles.block_m, CHUNK), (self._num_staged, STORED_ROWS)
        ring = self.ring(dtype, left, right, staged)
        if self.interpreted:  # to store single rows, which a swizzled tile does not allow
            ring["plain"] = plgpu.SMEM((COMPUTERS, STORED_ROWS, CHUNK), dtype)
        return ring

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        *operands, table = refs[: -self.outputs]
        outs = refs[-self.outputs :]
        last = table.shape[0] - 1
        num_tiles, num_live_rows = table[last, 0], table[last, 1]
        total_tiles = num_tiles * self.tile_columns

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
                for k, depth in enumerate(self.depths):
                    lhs, *rhs = operands[k * together : (k + 1) * together]

                    def step(i, used, lhs=lhs, rhs=rhs):
                        inner = pl.ds(i * CHUNK, CHUNK)
                        place = (cols, inner) if self.transpose_rhs else (inner, cols)
                        lefts = [
                            lhs.at[pl.ds(aligned(first), height), inner]
                            for height in self.tiles.heights
                        ]
                        right = [matrix.at[group, *place] for matrix in rhs]
                        return self.fill(scratch, used, lefts, kind, right)

                    used = lax.fori_loop(0, depth // CHUNK, step, used)
                return used

            return self.each_of(total_tiles, look_up, one_tile, jnp.int32(0))

        def compute(computer):
            own = {name: scratch[name].at[computer] for name in _STAGING if name in scratch}
            steps = sum(self.depths) // CHUNK
            num_chunks = len(self._chunks())
            at_a_step = -(-num_chunks // steps)
            dtype, shape = outs[0].dtype, (self.tiles.part, self.tiles.block_m)

            def store(first, count, place, results):
                """Stores `count` chunks of a tile, from the chunk of number `first` on."""

                def one(i, _):
                    self._store(first + i, place, results, outs, own)

                lax.fori_loop(0, count, one, None)

            def look_up(index):
                tile, left_edge = self.place(index, num_tiles)
                left_edge += computer * self.tiles.part
                rows = (table[tile, column] for column in (FIRST, BEGIN, END))
                return *rows, left_edge, kind_of(tile)

            def one_tile(tile, exists, carry):
                used, (place_before, held) = carry
                *place, kind = tile
                own_steps = jnp.where(exists, steps, 0)

                def multiply(accumulator, stage, _):
                    of_heights = [
                        functools.partial(
                            self._multiply, scratch, computer, height, accumulator, stage
                        )
                        for height in self.tiles.heights
                    ]
                    lax.switch(kind, of_heights)

                def store_held(step):
                    results = functools.partial(_cut, held)
                    store(step * at_a_step, at_a_step, place_before, results)

                total = self.accumulate(
                    scratch,
                    used,
                    own_steps,
                    (self.tiles.part, self.matrices * self.tiles.block_m),
                    multiply,
                    store_held if self.holds else None,
                    steps if self.holds else 0,
                )
                results = functools.partial(self.results, total, dtype)
                if self.holds:
                    held = results(*(slice(0, size) for size in shape))
                else:
                    store(0, num_chunks, place, results)
                return used + own_steps, (place, held)

            nothing = zeros(shape, dtype, plgpu.Layout.WGMMA, self.interpreted)
            held = (nothing,) * self.outputs if self.holds else ()
            carry = jnp.int32(0), ([jnp.int32(0)] * 4, held)
            if self.holds:
                self.each_and_store(total_tiles, look_up, one_tile, carry)
            else:
                self.each_of(
                    total_tiles, look_up, lambda tile, carry: one_tile(tile, True, carry), carry
                )
            if self.zero_unused:
                self._zero_tail(outs, num_live_rows, computer, own)

        self.take_roles(scratch, load, compute)

    def _multiply(
        self, scratch: Any, computer: jax.Array, height: int, accumulator: Any, stage: Any
    ) -> None:
        """Starts the matmuls of a stage's tiles: of this computer's columns by `height` rows."""
        right = scratch["right"].at[stage]
        mine = pl.ds(computer * self.tiles.part, self.tiles.part)
        rows = transposed(scratch["left"].at[stage, :height])
        for i in range(self.matrices):
            matrix = right if self.matrices == 1 else right.at[i]
            columns = matrix.at[mine] if self.transpose_rhs else transposed(matrix.at[:, mine])
            first = i * self.tiles.block_m
            plgpu.wgmma(accumulator.at[:, first : first + height], columns, rows)

    @property
    def holds(self) -> bool:
        """Returns whether registers have room for a tile's results beside the accumulators.

        Then a tile is stored while the next one is multiplied.
        """
        return True

    def results(
        self, total: jax.Array, dtype: Any, columns: slice, rows: slice
    ) -> tuple[jax.Array, ...]:
        """Returns the elements at some columns and rows of each output, [columns, rows].

        `total` are the accumulators, [part, block_m] for each of `matrices`, side by side.
        """
        return (total[columns, rows].astype(dtype),)

    def _chunks(self) -> list[tuple[int, int]]:
        """Returns the first row and column of each chunk of a computer's part of a tile."""
        rows = range(0, self.tiles.block_m, STORED_ROWS)
        return [(row, column) for row in rows for column in range(0, self.tiles.part, CHUNK)]

    def _store(
        self,
        number: jax.Array,
        place: Sequence[jax.Array],
        results: Callable[[slice, slice], tuple[jax.Array, ...]],
        outs: Sequence[Any],
        own: dict[str, Any],
    ) -> None:
        """Stores the rows of a chunk, `number` in its tile, that are of the tile's group.

        `place` has the tile's first row, the range [begin, end) of the group's, and the column.
        Registers are known by constant indices alone, so each chunk needs code of its own that
        stages it in shared memory. What follows is the same for all.
        """
        chunks, staged = self._chunks(), self._num_staged
        top, begin, end, left_edge = place
        row, column = quotient_and_rest(number, jnp.int32(self.tiles.part // CHUNK))
        inside = (left_edge < self.width) & (number < len(chunks))
        top, left_edge = top + row * STORED_ROWS, left_edge + column * CHUNK
        first = jnp.clip(begin - top, 0, STORED_ROWS)
        stop = jnp.where(inside, jnp.clip(end - top, 0, STORED_ROWS), first)
        rooms = [
            own["staged"].at[lax.rem(number * self.outputs + i, jnp.int32(staged))]
            for i in range(self.outputs)
        ]

        def stage(row, column):
            height = min(STORED_ROWS, self.tiles.block_m - row)
            values = results(slice(column, column + CHUNK), slice(row, row + height))
            for room, part in zip(rooms, values, strict=True):
                self._stage(room.at[:height], part)

        @pl.when(number == 0)
        def _():  # what was staged of the tile before has been read
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(first < stop)
        def _():
            plgpu.wait_smem_to_gmem(staged - self.outputs, wait_read_only=True)
            run_one([functools.partial(stage, *chunk) for chunk in chunks], number)
            plgpu.commit_smem()
            # The last chunk of a tile may be lower than the others.
            heights = {STORED_ROWS, self.tiles.block_m % STORED_ROWS or STORED_ROWS}
            at_once = [(first == 0) & (stop == height) for height in heights]
            for height, whole in zip(heights, at_once, strict=True):

                @pl.when(whole)
                def _(height=height):
                    at = pl.ds(aligned(top), height), pl.ds(pl.multiple_of(left_edge, CHUNK), CHUNK)
                    for room, out in zip(rooms, outs, strict=True):
                        plgpu.copy_smem_to_gmem(room.at[:height], out.at[at])

            @pl.when(jnp.logical_not(functools.reduce(jnp.logical_or, at_once)))
            def _():
                for room, out in zip(rooms, outs, strict=True):
                    self._store_rows(out, room, top, left_edge, first, stop, own)

    def _stage(self, room: Any, values: jax.Array) -> None:
        """Writes a chunk to shared memory; what reads it there waits for `commit_smem`."""
        if self.interpreted:
            room[...] = values.T
        else:
            mosaic.store_transposed(room, values)

    def _store_rows(
        self,
        out: Any,
        room: Any,
        top: jax.Array,
        left_edge: jax.Array,
        begin: jax.Array,
        end: jax.Array,
        own: dict[str, Any],
    ) -> None:
        """Stores rows [begin, end) of the chunk staged in `room` to `out` at (top, left_edge)."""
        if not self.interpreted:

            def eight_rows(i, _):
                row = i * ROW_ALIGNMENT
                values = plgpu.load(room.at[pl.ds(row, ROW_ALIGNMENT)], layout=EIGHT_ROWS)
                mosaic.store_rows(
                    out, values, top + row, left_edge, begin - row, end - row, EIGHT_ROWS
                )

            stop = lax.div(end + (ROW_ALIGNMENT - 1), jnp.int32(ROW_ALIGNMENT))
            lax.fori_loop(lax.div(begin, jnp.int32(ROW_ALIGNMENT)), stop, eight_rows, None)
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plain = own["plain"]
        plain[...] = room[...]
        plgpu.commit_smem()
        # A copy has a static height, so there is one for each power of two in the number of rows.
        count, height = end - begin, STORED_ROWS // 2
        while height:

            @pl.when((count & height) != 0)
            def _(height=height, begin=begin):
                rows, columns = pl.ds(top + begin, height), pl.ds(left_edge, CHUNK)
                plgpu.copy_smem_to_gmem(plain.at[pl.ds(begin, height)], out.at[rows, columns])

            begin += count & height
            height //= 2

    def _zero_tail(
        self, outs: Sequence[Any], start: jax.Array, computer: jax.Array, own: dict[str, Any]
    ) -> None:
        """Writes zeros to the rows of `outs` from `start` on; all blocks' computers share them."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shape, room = (CHUNK, STORED_ROWS), own["staged"].at[0]
        values = zeros(shape, outs[0].dtype, plgpu.Layout.WGMMA, self.interpreted)
        self._stage(room, values)
        plgpu.commit_smem()
        columns = jnp.int32(self.width // CHUNK)
        first_chunk = lax.div(start, jnp.int32(STORED_ROWS))
        chunks = -(-self.num_rows // STORED_ROWS) - first_chunk
        workers = jnp.int32(self.num_blocks * COMPUTERS)
        me = lax.axis_index("block") * COMPUTERS + computer

        def one_chunk(i, _):
            row, column = quotient_and_rest(me + i * workers, columns)
            top = (first_chunk + row) * STORED_ROWS
            left_edge = pl.multiple_of(column * CHUNK, CHUNK)
            begin = jnp.maximum(start - top, 0)
            end = jnp.minimum(self.num_rows - top, STORED_ROWS)

            @pl.when(end - begin == STORED_ROWS)
            def _whole():
                at = pl.ds(aligned(top), STORED_ROWS), pl.ds(left_edge, CHUNK)
                for out in outs:
                    plgpu.copy_smem_to_gmem(room, out.at[at])

            @pl.when(end - begin < STORED_ROWS)
            def _some():
                for out in outs:
                    self._store_rows(out, room, top, left_edge, begin, end, own)

        lax.fori_loop(0, lax.div(chunks * columns - me + (workers - 1), workers), one_chunk, None)


def _cut(arrays: Sequence[jax.Array], columns: slice, rows: slice) -> tuple[jax.Array, ...]:
    return tuple(array[columns, rows] for array in arrays)
