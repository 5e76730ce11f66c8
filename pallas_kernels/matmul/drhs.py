"""Kernel for the gradients of a grouped matmul's matrices: lhs^T @ grad over each group's rows.

  lhs [R, K]   grad [R, N]      output [L, K, N], a box is an output tile
                                a's          b's
  a a a a      a a a            +---+---+    +---+---+
  a a a a  T   a a a     --->   |   |   |    |   |   |
  b b b b      b b b            +---+---+    +---+---+   ...
  c c c c      c c c            |   |   |    |   |   |
                                +---+---+    +---+---+

One call may take several grads for one lhs. The blocks compute the output tiles of all grads at one
position in succession, so that all but the first read lhs from the caches.

A thread block has a loader warpgroup, which copies operands into a ring of stages in shared memory,
and two computer warpgroups, which multiply them (see `pallas_kernels.matmul.kernel`). The
sum over a group's rows is cut into steps of 64 rows, one for each stage. A group's first and last
step may hold rows of another group. The loader zeroes these rows in shared memory before the
computers multiply. So a NaN in another group's row, or past the last group, never enters an
accumulator.

A stage of the ring passes between the warpgroups by three barriers:

  full     the copies have arrived. Computers and loader wait for it at every step.
  cleared  other groups' rows in the stage are zero. The loader arrives and the computers wait only
           at a step that has rows of other groups.
  empty    the computers have multiplied the stage's operands. The loader waits for it.

The loader clears a step after it has started the copies of the next `num_stages` - 2 steps, so that
these copies run meanwhile. One more copy before the clearing would cause a deadlock: it needs a
stage that the computers release only after they have started the step that is to be cleared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    STEP,
    Choice,
    Kernel,
    Ring,
    aligned,
    check_buffers,
    launch,
    quotient_and_rest,
    run_one,
    swizzled,
    transposed,
    zeros,
)
from pallas_kernels.matmul.row_blocks import row_ranges
from pallas_kernels.matmul.row_tiles import ROW_ALIGNMENT

# An output tile has this many rows. Each computer warpgroup computes half of them.
BLOCK_M = COMPUTERS * CHUNK


@dataclasses.dataclass(frozen=True)
class DrhsTiles:
    """The tile sizes of `drhs_of_each`, and the depth of its ring in shared memory.

    Attributes:
      block_n: columns of an output tile, a multiple of 64 up to 256.
      num_stages: number of pipeline stages in the ring, at least 2. A stage holds operand tiles of
        64 rows.
      band: number of columns of tiles in a band. The blocks compute the output band by band, and a
        band row by row.
    """

    block_n: int
    num_stages: int
    band: int = 1

    @classmethod
    def fitting(cls, block_n: int, band: int = 1) -> DrhsTiles:
        """Returns tiles with as many stages as fit into shared memory, at most 6."""
        chunks = 2 * BLOCK_M * CHUNK
        stage = 2 * STEP * (BLOCK_M + block_n)
        stages = (SHARED_MEMORY_BYTES - OTHER_BYTES - chunks) // stage
        return cls(block_n, min(stages, 6), band)

    def __post_init__(self) -> None:
        check_buffers(self)
        if not 64 <= self.block_n <= 256 or self.block_n % CHUNK:
            raise ValueError(f"a tile is of columns in multiples of 64 up to 256, not {self}.")


def drhs_of_each(
    lhs: jax.Array,
    grads: Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    tiles: DrhsTiles,
    num_blocks: int,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes the gradient of a grouped matmul's matrices: each group's lhs^T @ grad.

    Args:
      lhs: [R, K] bfloat16 or float16, the rows that the grouped matmul multiplied; R is a multiple
        of 8, K of 64.
      grads: one or more gradients of the grouped matmul's output, [R, N] of lhs's dtype; N is a
        multiple of tiles.block_n.
      group_sizes: [L] int32, the number of rows of each group, in order.
      tiles: tile sizes, and number of pipeline stages.
      num_blocks: number of thread blocks to launch.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      For each grad, [L, K, N] of lhs's dtype, summed in float32. An empty group's matrix is zero.
    """
    num_groups, width = group_sizes.shape[0], grads[0].shape[1]
    shape = num_groups, lhs.shape[1], width
    kernel = _Drhs(tiles, num_blocks, bool(interpret), width, *shape[:2], len(grads))
    return tuple(
        launch(
            kernel,
            kernel.scratch_types(lhs.dtype),
            [jax.ShapeDtypeStruct(shape, lhs.dtype)] * len(grads),
            "grouped_matmul_drhs",
            interpret,
        )(lhs, *grads, _group_steps(group_sizes, lhs.shape[0]))
    )


def _group_steps(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns a table of the steps of 64 rows over which each group's sum runs, [L, 4] int32.

    A group's entry is its number of steps (at least one), the first row of its first step (a
    multiple of 8), and the range [begin, end) of the group's rows.
    """
    starts, ends = row_ranges(group_sizes, num_rows)
    first = jnp.minimum(starts, num_rows - ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps = jnp.maximum(-((first - ends) // STEP), 1)
    return jnp.stack([steps, first, starts, ends], axis=1)


@dataclasses.dataclass(frozen=True)
class _Drhs(Kernel):
    """The kernel of `drhs_of_each`.

    Attributes:
      num_groups: L, the number of groups.
      height: K, the rows of a group's output.
      num_grads: number of grads, and of outputs.
    """

    num_groups: int
    height: int
    num_grads: int

    def __post_init__(self) -> None:
        if self.width % self.tiles.block_n:
            raise ValueError(
                f"the output's {self.width} columns are not whole tiles of {self.tiles.block_n}."
            )

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        left, right = (STEP, BLOCK_M), (STEP, self.tiles.block_n)
        chunks = (COMPUTERS, CHUNK, CHUNK)
        return dict(
            ring=Ring.types(dtype, self.tiles.num_stages, left, right),
            cleared=plgpu.Barrier(num_arrivals=1, num_barriers=self.tiles.num_stages),
            chunks=plgpu.SMEM(chunks, dtype, transforms=swizzled(dtype)),
        )

    def __call__(self, lhs: Any, *refs: Any, ring: Ring, cleared: Any, chunks: Any) -> None:
        grads, table, outs = refs[: self.num_grads], refs[self.num_grads], refs[-self.num_grads :]
        loader = _Loader(self, ring, cleared, table, lhs, grads)

        def compute(number: jax.Array) -> None:
            _Computer(self, ring, cleared, table, outs, chunks.at[number], number).run()

        self.take_roles(loader.run, compute)

    @property
    def _tile_rows(self) -> int:
        """Returns the number of output tiles that cover the K rows of a group's output.

        The last tile may reach past K. Its copies read zeros there, and it stores no row past K.
        """
        return -(-self.height // BLOCK_M)

    @property
    def num_tiles(self) -> jax.Array:
        tiles = self.num_grads * self.num_groups * self._tile_rows * self.tile_columns
        return jnp.int32(tiles)

    def look_up(self, table: Any, index: jax.Array) -> _Tile:
        # The tiles of all grads at one position have consecutive indices, since they read the same
        # tiles of lhs.
        index, which = quotient_and_rest(index, jnp.int32(self.num_grads))
        group, rest = quotient_and_rest(index, jnp.int32(self._tile_rows * self.tile_columns))
        row, left_edge = self.place(rest, jnp.int32(self._tile_rows))
        steps = (table[group, i] for i in range(4))
        return _Tile(which, group, row * BLOCK_M, left_edge, *steps)


class _Tile(NamedTuple):
    """An output tile, and the rows of lhs and grad that its sum runs over; all int32.

    Attributes:
      which: the index of the tile's grad, and of its output.
      group, top, left_edge: the tile's group, and its first row and column in the group's output.
      steps: the number of steps of 64 rows in the sum.
      first: the first row of the first step, a multiple of 8.
      begin, end: the range [begin, end) of the group's rows.
    """

    which: jax.Array
    group: jax.Array
    top: jax.Array
    left_edge: jax.Array
    steps: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array

    def rows_of_group(self, step: jax.Array) -> _Range:
        """Returns the range of the rows of a step that belong to the tile's group."""
        row = self.first + step * STEP
        return _Range(self.begin - row, self.end - row)


class _Range(NamedTuple):
    """A range [begin, end) of rows, counted from the first of a step's 64 rows.

    `begin` may be negative and `end` may exceed 64, if the group's rows go on past the step.
    """

    begin: jax.Array
    end: jax.Array

    @property
    def leaves_rows_out(self) -> jax.Array:
        return (self.begin > 0) | (self.end < STEP)


@dataclasses.dataclass(frozen=True)
class _Loader:
    """The loader warpgroup's work: fills stages, and zeroes other groups' rows `_lag` steps later.

    `table` is a reference to the result of `_group_steps`.
    """

    kernel: _Drhs
    ring: Ring
    cleared: Any
    table: Any
    lhs: Any
    grads: Sequence[Any]

    @property
    def _lag(self) -> int:
        """Returns how many more steps are filled before a filled step is cleared."""
        return self.ring.num_stages - 2

    def run(self) -> None:
        all_rows = _Range(jnp.int32(0), jnp.int32(STEP))
        look_up = functools.partial(self.kernel.look_up, self.table)
        # The carry holds the number of steps filled so far, and the ranges of the group's rows in
        # the last `_lag` steps, which are filled but not yet cleared.
        carry = jnp.int32(0), (all_rows,) * self._lag
        used, uncleared = self.kernel.walk(self.kernel.num_tiles, look_up, self._load_tile, carry)

        def clear_rest(i: jax.Array, uncleared: Any) -> Any:
            return self._clear_oldest(used - self._lag + i, uncleared, all_rows)

        lax.fori_loop(0, self._lag, clear_rest, uncleared)
        self.ring.drain(used)

    def _load_tile(self, tile: _Tile, _: Any, carry: Any) -> Any:
        return lax.fori_loop(0, tile.steps, functools.partial(self._load_step, tile), carry)

    def _load_step(self, tile: _Tile, i: jax.Array, carry: Any) -> Any:
        used, uncleared = carry
        inner = pl.ds(aligned(tile.first + i * STEP), STEP)
        rows = pl.ds(pl.multiple_of(tile.top, CHUNK), BLOCK_M)
        columns = pl.ds(pl.multiple_of(tile.left_edge, CHUNK), self.kernel.tiles.block_n)
        right = Choice([grad.at[inner, columns] for grad in self.grads], tile.which)
        used = self.ring.fill(used, Choice([self.lhs.at[inner, rows]]), [right])
        return used, self._clear_oldest(used - 1 - self._lag, uncleared, tile.rows_of_group(i))

    def _clear_oldest(
        self, step: jax.Array, uncleared: tuple[_Range, ...], newest: _Range
    ) -> tuple[_Range, ...]:
        """Clears the oldest uncleared step; returns the row ranges of the steps after it.

        Args:
          step: the number of the oldest uncleared step; nothing is cleared if it is negative.
          uncleared: the group's rows in each uncleared step, from the oldest on.
          newest: the group's rows in the step that has just been filled.
        """
        oldest, *others = (*uncleared, newest)
        pl.when(step >= 0)(functools.partial(self._clear, step, oldest))
        return tuple(others)

    def _clear(self, step: jax.Array, rows: _Range) -> None:
        """Waits until the operand tiles of `step` have arrived, and zeroes other groups' rows.

        `rows` is the range of the step's rows that belong to the group.
        """
        stage = self.ring.stage_of(step)
        plgpu.barrier_wait(self.ring.full.at[stage])

        @pl.when(rows.leaves_rows_out)
        def _():
            for operand in (self.ring.left, self.ring.right):
                self._clear_operand(operand.at[stage], rows)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.cleared.at[stage])

    def _clear_operand(self, operand: Any, rows: _Range) -> None:
        if self.kernel.interpreted:
            row = lax.broadcasted_iota(jnp.int32, operand.shape, 0)
            inside = (row >= rows.begin) & (row < rows.end)
            operand[...] = jnp.where(inside, operand[...], 0)
        else:
            mosaic.zero_rows_outside(operand, *rows, swizzled(operand.dtype))


class _Held(NamedTuple):
    """A computer warpgroup's half of an output tile, held in registers until it is stored.

    Attributes:
      which: the index of the output.
      group, top, left_edge: the group, and the first row and column of `values` in its output.
      values: [64, block_n] of the output's dtype.
    """

    which: jax.Array
    group: jax.Array
    top: jax.Array
    left_edge: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True)
class _Computer:
    """The work of computer warpgroup `number`: computes and stores half of each output tile's rows.

    `table` is a reference to the result of `_group_steps`. `chunk` is this warpgroup's [64, 64]
    buffer in shared memory, through which it stores 64 columns at a time.
    """

    kernel: _Drhs
    ring: Ring
    cleared: Any
    table: Any
    outs: Sequence[Any]
    chunk: Any
    number: jax.Array

    def run(self) -> None:
        kernel, zero = self.kernel, jnp.int32(0)
        values = zeros(self._shape, self._dtype, plgpu.Layout.WGMMA, kernel.interpreted)
        nothing = _Held(zero, zero, jnp.int32(kernel.height), zero, values)
        look_up = functools.partial(kernel.look_up, self.table)
        _, last = kernel.walk(kernel.num_tiles, look_up, self._compute_tile, (zero, nothing))
        self._store_from(last, 0)

    @property
    def _dtype(self) -> Any:
        return self.outs[0].dtype

    @property
    def _shape(self) -> tuple[int, int]:
        return CHUNK, self.kernel.tiles.block_n

    def _compute_tile(self, tile: _Tile, _: Any, carry: tuple[jax.Array, _Held]) -> Any:
        """Computes an output tile, and meanwhile stores the previous one.

        `carry` is the number of steps multiplied so far, and the previous tile. Returns the next
        carry.
        """
        used, before = carry
        multiply = functools.partial(self._multiply, tile)
        store_before = functools.partial(self._store, before)
        total = self.ring.accumulate(used, tile.steps, self._shape, multiply, store_before)
        self._store_from(before, tile.steps)
        top = tile.top + self.number * CHUNK
        held = _Held(tile.which, tile.group, top, tile.left_edge, total.astype(self._dtype))
        return used + tile.steps, held

    def _multiply(self, tile: _Tile, accumulator: Any, stage: jax.Array, i: jax.Array) -> None:
        left, right = self.ring.left.at[stage], self.ring.right.at[stage]

        @pl.when(tile.rows_of_group(i).leaves_rows_out)
        def _():
            plgpu.barrier_wait(self.cleared.at[stage])

        mine = left.at[:, pl.ds(self.number * CHUNK, CHUNK)]
        plgpu.wgmma(accumulator, transposed(mine), right)

    def _store_from(self, held: _Held, chunk: Any) -> None:
        """Stores the held tile's chunks of 64 columns, from chunk number `chunk` to the last."""
        left = jnp.maximum(len(self._columns) - chunk, 0)
        lax.fori_loop(0, left, lambda i, _: self._store(held, chunk + i), None)

    @property
    def _columns(self) -> range:
        """The first column of each chunk of 64 columns in an output tile."""
        return range(0, self.kernel.tiles.block_n, CHUNK)

    def _store(self, held: _Held, chunk: jax.Array) -> None:
        """Stores chunk number `chunk`, 64 columns, of the held tile, if the tile has that many."""

        def write(first: int) -> None:
            self.chunk[...] = held.values[:, first : first + CHUNK]

        @pl.when((held.top < self.kernel.height) & (chunk < len(self._columns)))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            run_one([functools.partial(write, first) for first in self._columns], chunk)
            plgpu.commit_smem()
            rows = pl.ds(pl.multiple_of(held.top, CHUNK), CHUNK)
            columns = pl.ds(pl.multiple_of(held.left_edge + chunk * CHUNK, CHUNK), CHUNK)
            copy = functools.partial(plgpu.copy_smem_to_gmem, self.chunk)
            places = [out.at[held.group, rows, columns] for out in self.outs]
            lax.switch(held.which, [functools.partial(copy, place) for place in places])
