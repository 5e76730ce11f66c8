"""Kernel for the gradients of a grouped matmul's matrices: lhs^T @ grad over each group's rows.

In this diagram the groups are a, b and c, and each row of letters stands for rows of one group:

  lhs [R, K]   grad [R, N]      output [L, K, N], a box is an output tile
                                a's          b's
  a a a a      a a a            +---+---+    +---+---+
  a a a a  T   a a a     --->   |   |   |    |   |   |
  b b b b      b b b            +---+---+    +---+---+   ...
  c c c c      c c c            |   |   |    |   |   |
                                +---+---+    +---+---+

One call may take several arrays `grad` for one `lhs`. The output tiles of all of them at one
position are computed one after the other, so that all but the first read `lhs` from the caches.

A thread block has a loader warpgroup, which copies operands into a ring of stages in shared memory,
and two compute warpgroups, which multiply them (see `pallas_kernels.matmul.kernel`). The sum over a
group's rows is cut into steps of 64 rows; a stage of the ring holds one step. A group's first and
last step may hold rows of another group. The loader *clears* such a step: it zeroes these rows in
shared memory before they are multiplied. So a NaN in another group's row, or past the last group,
never enters an accumulator.

A stage of the ring passes between the warpgroups by three barriers:

  full     the copies into the stage have arrived. All warpgroups wait for it at every step.
  cleared  other groups' rows in the stage are zero. It is used only at a step that has such rows:
           the loader arrives, and the compute warpgroups wait.
  empty    the compute warpgroups have multiplied the stage's operands. The loader waits for it.

The loader does not clear a step right after it has started the step's copies. It first starts the
copies of the next `num_stages` - 2 steps, so that these run while it clears. To start one copy more
before it clears would be a deadlock: this copy needs a stage that the compute warpgroups release
only after they have started to multiply the step that is not cleared yet.
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

from pallas_kernels.fabric.hardware import ROW_ALIGNMENT, SHARED_MEMORY_BYTES
from pallas_kernels.matmul import register_tiles
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    OTHER_BYTES,
    STEP,
    Kernel,
    OperandRing,
    TileSource,
    aligned,
    check_buffers,
    launch_into,
    quotient_and_rest,
    run_one,
    store_or_add,
    swizzled,
    transposed,
    zeros,
)
from pallas_kernels.matmul.row_blocks import row_ranges

# The number of rows of an output tile. Each compute warpgroup computes half of them.
BLOCK_M = COMPUTERS * CHUNK


@dataclasses.dataclass(frozen=True)
class DrhsTiles:
    """The tile sizes of `drhs_of_each`, and the depth of its ring in shared memory.

    Attributes:
      block_n: columns of an output tile, a multiple of 64 up to 256.
      num_stages: number of pipeline stages in the ring, at least 2. A stage holds operand tiles of
        64 rows.
      band: number of columns of output tiles in a band. A band is some adjacent columns of tiles,
        over the whole height of a group's output. The thread blocks compute a group's output band
        by band, and within a band row of tiles by row of tiles.
    """

    block_n: int
    num_stages: int
    band: int = 1

    @classmethod
    def fitting(cls, block_n: int, band: int = 1) -> DrhsTiles:
        """Returns tile sizes with as many pipeline stages as fit into shared memory, at most 6."""
        chunks = 2 * BLOCK_M * CHUNK
        stage = 2 * STEP * (BLOCK_M + block_n)
        stages = (SHARED_MEMORY_BYTES - OTHER_BYTES - chunks) // stage
        return cls(block_n, min(stages, 6), band)

    def __post_init__(self) -> None:
        check_buffers(self)
        if not 64 <= self.block_n <= 256 or self.block_n % CHUNK:
            raise ValueError(f"block_n must be 64, 128, 192 or 256, but the tile sizes are {self}.")


def drhs_of_each(
    lhs: jax.Array,
    grads: Sequence[jax.Array],
    group_sizes: jax.Array,
    sums: Sequence[jax.Array] | None = None,
    *,
    tiles: DrhsTiles,
    num_blocks: int,
    num_waves: int = 1,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes the gradient of a grouped matmul's matrices: each group's lhs^T @ grad.

    Args:
      lhs: [R, K] bfloat16 or float16, the rows that the grouped matmul multiplied; R is a multiple
        of 8, K of 64.
      grads: one or more gradients of the grouped matmul's output, [R, N] of lhs's dtype; N is a
        multiple of tiles.block_n.
      group_sizes: [L] int32, the number of rows of each group, in order.
      sums: None, or for each grad an array [L, K, N] of lhs's dtype, to which the gradient is added
        in place, rounded to this dtype before and after the addition.
      tiles: tile sizes, and number of pipeline stages.
      num_blocks: number of thread blocks that run at the same time.
      num_waves: number of waves of thread blocks; see `kernel.Kernel.walk`.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      For each grad, [L, K, N] of lhs's dtype, summed in float32. An empty group's matrix is zero.
      With `sums`, these arrays plus the gradients.
    """
    num_groups, width = group_sizes.shape[0], grads[0].shape[1]
    shape = num_groups, lhs.shape[1], width
    kernel = _Drhs(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        *shape[:2],
        len(grads),
        adds=sums is not None,
        num_waves=num_waves,
    )
    return launch_into(
        kernel,
        kernel.scratch_types(lhs.dtype),
        [jax.ShapeDtypeStruct(shape, lhs.dtype)] * len(grads),
        "grouped_matmul_drhs",
        interpret,
        sums,
    )(lhs, *grads, _group_steps(group_sizes, lhs.shape[0]))


def _group_steps(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns how the sum over each group's rows is cut into steps of 64 rows, [L, 4] int32.

    For each group it has the number of steps (at least one), the first row of the first step (a
    multiple of 8), and the range [begin, end) of the group's rows. `num_rows` is the number of rows
    of the operands.
    """
    starts, ends = row_ranges(group_sizes, num_rows)
    first = jnp.minimum(starts, num_rows - ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps = jnp.maximum(-((first - ends) // STEP), 1)
    return jnp.stack([steps, first, starts, ends], axis=1)


@dataclasses.dataclass(frozen=True)
class _Drhs(Kernel):
    """The kernel of `drhs_of_each`: lhs[rows].T @ grad[rows] for each group's rows and each grad.

    Attributes:
      num_groups: L, the number of groups.
      height: K, the number of columns of lhs. Each group's result is a matrix [K, N].
      num_grads: the number of arrays `grad`. Each of them has one output, [L, K, N].
      adds: whether the results are added to what the outputs hold.
    """

    num_groups: int
    height: int
    num_grads: int
    adds: bool

    def __post_init__(self) -> None:
        if self.width % self.tiles.block_n:
            raise ValueError(
                f"the output must have a multiple of block_n={self.tiles.block_n} columns, but has "
                f"{self.width}."
            )

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        left, right = (STEP, BLOCK_M), (STEP, self.tiles.block_n)
        chunks = (COMPUTERS, CHUNK, CHUNK)
        return dict(
            ring=OperandRing.types(dtype, self.tiles.num_stages, left, right),
            cleared=plgpu.Barrier(num_arrivals=1, num_barriers=self.tiles.num_stages),
            chunks=plgpu.SMEM(chunks, dtype, transforms=swizzled(dtype)),
        )

    def __call__(self, lhs: Any, *refs: Any, ring: OperandRing, cleared: Any, chunks: Any) -> None:
        grads, table, outs = refs[: self.num_grads], refs[self.num_grads], refs[-self.num_grads :]
        loader = _Loader(self, ring, cleared, table, lhs, grads)

        def compute(number: jax.Array) -> None:
            _Computer(self, ring, cleared, table, outs, chunks.at[number], number).run()

        self.take_roles(loader.run, compute)

    @property
    def _tile_rows(self) -> int:
        """Returns how many output tiles, one below the other, cover the K rows of a group's output.

        The last tile may reach past row K. There, copies of lhs read zeros, and nothing is stored.
        """
        return -(-self.height // BLOCK_M)

    @property
    def num_tiles(self) -> jax.Array:
        tiles = self.num_grads * self.num_groups * self._tile_rows * self.tile_columns
        return jnp.int32(tiles)

    def look_up(self, table: Any, index: jax.Array) -> _Tile:
        # The tiles at one position of all outputs have consecutive indices. They read the same rows
        # and columns of lhs, so all but the first find them in the caches.
        index, which = quotient_and_rest(index, jnp.int32(self.num_grads))
        group, rest = quotient_and_rest(index, jnp.int32(self._tile_rows * self.tile_columns))
        row, left_edge = self.tile_position(rest, jnp.int32(self._tile_rows))
        steps = (table[group, i] for i in range(4))
        return _Tile(which, group, row * BLOCK_M, left_edge, *steps)


class _Tile(NamedTuple):
    """An output tile, and the rows of lhs and grad over which its sum runs. All are int32.

    Attributes:
      which: the index of the array `grad` to multiply, and of the output that has the tile.
      group: the group to whose output matrix the tile belongs.
      top, left_edge: the tile's first row and first column in this matrix.
      steps: the number of steps of 64 rows in the sum.
      first: the first row of the first step, a multiple of 8.
      begin, end: the group's rows are [begin, end).
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
        """Returns which of the 64 rows of step number `step` belong to the tile's group."""
        row = self.first + step * STEP
        return _Range(self.begin - row, self.end - row)


class _Range(NamedTuple):
    """The rows [begin, end) of a group, counted from the first of a step's 64 rows.

    If the group begins before the step's rows, `begin` is negative. If the group ends after them,
    `end` exceeds 64.
    """

    begin: jax.Array
    end: jax.Array

    @property
    def leaves_rows_out(self) -> jax.Array:
        return (self.begin > 0) | (self.end < STEP)


@dataclasses.dataclass(frozen=True)
class _Loader:
    """The loader warpgroup's work: fills the ring's stages, and later clears them.

    To clear a stage is to zero its rows that belong to other groups than the output tile. `cleared`
    has a barrier for each stage, at which the loader arrives when it has cleared the stage. `table`
    refers to the result of `_group_steps`, and `lhs` and `grads` refer to the operands.
    """

    kernel: _Drhs
    ring: OperandRing
    cleared: Any
    table: Any
    lhs: Any
    grads: Sequence[Any]

    @property
    def _lag(self) -> int:
        """Returns how many later steps the loader fills before it clears a filled step."""
        return self.ring.num_stages - 2

    def run(self) -> None:
        all_rows = _Range(jnp.int32(0), jnp.int32(STEP))
        look_up = functools.partial(self.kernel.look_up, self.table)
        # The last `_lag` steps are filled but not yet cleared. The carry is (the number of steps
        # filled so far, for each uncleared step the range of rows that belong to its group).
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
        right = TileSource([grad.at[inner, columns] for grad in self.grads], tile.which)
        used = self.ring.fill(used, TileSource([self.lhs.at[inner, rows]]), [right])
        return used, self._clear_oldest(used - 1 - self._lag, uncleared, tile.rows_of_group(i))

    def _clear_oldest(
        self, step: jax.Array, uncleared: tuple[_Range, ...], newest: _Range
    ) -> tuple[_Range, ...]:
        """Clears the oldest uncleared step: zeroes its rows that belong to other groups.

        A step is 64 rows of both operands in one stage of the ring. A step is uncleared if its
        stage has been filled, and its rows of other groups have not been zeroed yet.

        Args:
          step: the number of the oldest step. If it is negative, nothing is cleared.
          uncleared: for each uncleared step but the newest, from the oldest on, the range of the
            step's rows that belong to its group.
          newest: this range for the newest step, which was filled last.

        Returns:
          The ranges of the steps that are still uncleared.
        """
        oldest, *others = (*uncleared, newest)
        pl.when(step >= 0)(functools.partial(self._clear, step, oldest))
        return tuple(others)

    def _clear(self, step: jax.Array, rows: _Range) -> None:
        """Waits for the operand tiles of step number `step`, and zeroes rows of other groups.

        `rows` is the range of the step's rows that belong to its group, and are kept.
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
            register_tiles.zero_rows_outside(operand, *rows, swizzled(operand.dtype))


class _Held(NamedTuple):
    """A compute warpgroup's half of a finished output tile, in registers until it is stored.

    Attributes:
      which: the index of the output to which the tile belongs.
      group: the group to whose matrix in the output the tile belongs.
      top, left_edge: the row and the column of values[0, 0] in this matrix.
      values: [64, block_n] of the output's dtype.
    """

    which: jax.Array
    group: jax.Array
    top: jax.Array
    left_edge: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True)
class _Computer:
    """The work of a compute warpgroup: computes and stores half of the rows of each output tile.

    `number` is the index of the warpgroup, 0 or 1. `cleared` are the barriers at which it waits
    until the loader has zeroed a stage's rows of other groups. `table` is a reference to the result
    of `_group_steps`. `chunk` is this warpgroup's [64, 64] buffer in shared memory, through which
    it stores 64 columns at a time.
    """

    kernel: _Drhs
    ring: OperandRing
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
        """Computes this warpgroup's half of an output tile, and meanwhile stores the previous one.

        `carry` is (the number of steps that this warpgroup has multiplied so far, its half of the
        previous tile). Returns the carry for the next tile.
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
        """Stores the half tile `held` to its output, except the chunks before number `chunk`.

        A chunk is 64 columns.
        """
        left = jnp.maximum(len(self._columns) - chunk, 0)
        lax.fori_loop(0, left, lambda i, _: self._store(held, chunk + i), None)

    @property
    def _columns(self) -> range:
        """The first column of each chunk of 64 columns that an output tile consists of."""
        return range(0, self.kernel.tiles.block_n, CHUNK)

    def _store(self, held: _Held, chunk: jax.Array) -> None:
        """Stores chunk number `chunk` of the half tile `held` to its output; a chunk is 64 columns.

        Does nothing if the half tile has no such chunk.
        """

        kernel = self.kernel

        def write(first: int) -> None:
            self.chunk[...] = held.values[:, first : first + CHUNK]

        @pl.when((held.top < kernel.height) & (chunk < len(self._columns)))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            run_one([functools.partial(write, first) for first in self._columns], chunk)
            rows = pl.ds(pl.multiple_of(held.top, CHUNK), CHUNK)
            columns = pl.ds(pl.multiple_of(held.left_edge + chunk * CHUNK, CHUNK), CHUNK)
            copy = functools.partial(
                store_or_add, self.chunk, adds=kernel.adds, interpreted=kernel.interpreted
            )
            destinations = [out.at[held.group, rows, columns] for out in self.outs]
            lax.switch(held.which, [functools.partial(copy, each) for each in destinations])
