"""Kernel for the gradients of a grouped matmul's matrices: lhs^T @ grad over each group's rows.

The groups are a, b and c, and each row of letters stands for rows of one group:

  lhs [R, K]   grad [R, N]      output [L, K, N], a box is an output tile
                                a's          b's
  a a a a      a a a            +---+---+    +---+---+
  a a a a  T   a a a     --->   |   |   |    |   |   |
  b b b b      b b b            +---+---+    +---+---+   ...
  c c c c      c c c            |   |   |    |   |   |
                                +---+---+    +---+---+

One call may take several arrays `grad` for one `lhs`. The output tiles of all of them at one
position are computed one after the other, so that all but the first read `lhs` from the caches.

The sum over a group's rows is cut into steps of 64 rows; a stage of the ring (`operand_ring`) holds
one step. A group's first and last step may hold rows of another group. Such a step is *cleared*
before it is multiplied: these rows are zeroed in shared memory. So a NaN in another group's row, or
past the last group, never enters an accumulator.

Where there is a loader warpgroup, it clears a step after it has started the copies of the next
`num_stages` - 2 steps, which run meanwhile. One copy more would be a deadlock: it needs a stage
that the compute warpgroups release only after they have started to multiply the uncleared step.
Without a loader, the compute warpgroups clear a step while the one before is multiplied.
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

from pallas_kernels.fabric.fabric import drain
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT, SHARED_MEMORY_BYTES
from pallas_kernels.matmul import operand_ring, register_tiles
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    OTHER_BYTES,
    STEP,
    Kernel,
    even_bands,
    quotient_and_rest,
    run_into,
    run_one,
    store_or_add,
    swizzled,
    transposed,
    zeros,
)
from pallas_kernels.matmul.operand_ring import Feed, Feeder, Loader, OperandRing, Steps, TileSource
from pallas_kernels.matmul.row_blocks import row_ranges

# The number of rows of an output tile. Each compute warpgroup computes half of them.
BLOCK_M = COMPUTERS * CHUNK
# The most columns of a tile whose sums leave registers for a loader.
MOST_BESIDE_LOADER = 128


@dataclasses.dataclass(frozen=True)
class DrhsTiles:
    """The tile sizes of `drhs_of_each`, and the depth of its ring in shared memory."""

    block_n: int  # columns of an output tile, a multiple of 64 up to 256
    num_stages: int  # of 64 rows each; at least 3, and an even number without a loader
    band: int = 1  # columns of output tiles in a band; see `Kernel.tile_position`

    @classmethod
    def fitting(cls, block_n: int, width: int) -> DrhsTiles:
        """Returns sizes with the most stages that fit, up to 6; an even number without a loader."""
        # Of the kernel's `buffers`, and of a stage of the ring.
        buffer_bytes = 2 * BLOCK_M * CHUNK
        stage_bytes = 2 * STEP * (BLOCK_M + block_n)
        stages = min((SHARED_MEMORY_BYTES - OTHER_BYTES - buffer_bytes) // stage_bytes, 6)
        return cls(block_n, stages // 2 * 2, even_bands(width, block_n, most=16))


def drhs_of_each(
    lhs: jax.Array,
    grads: Sequence[jax.Array],
    group_sizes: jax.Array,
    sums: Sequence[jax.Array] | None = None,
    *,
    tiles: DrhsTiles,
    num_blocks: int,
    num_waves: int = 1,
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
      num_blocks, num_waves: as for `grouped_matmul.grouped_matmul`.

    Returns:
      For each grad, [L, K, N] of lhs's dtype, summed in float32, 0 for an empty group; or the sums.
    """
    num_groups, width = group_sizes.shape[0], grads[0].shape[1]
    shape = num_groups, lhs.shape[1], width
    kernel = _Drhs(
        tiles=tiles,
        num_blocks=num_blocks,
        width=width,
        dtype=lhs.dtype,
        num_groups=num_groups,
        height=lhs.shape[1],
        num_grads=len(grads),
        adds=sums is not None,
        num_waves=num_waves,
    )
    out_type = [jax.ShapeDtypeStruct(shape, lhs.dtype)] * len(grads)
    operands = [lhs, *grads, _group_steps(group_sizes, lhs.shape[0])]
    scratch_types = kernel.scratch_types()
    return run_into(sums, operands, kernel, scratch_types, out_type, "grouped_matmul_drhs")


def _group_steps(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns how the sum over each group's rows is cut into steps of 64 rows, [L, 4] int32."""
    # The columns are the number of steps, the first row of the first step (a multiple of 8), the
    # group's first row, and the row after its last. An empty group has a step, too, whose rows are
    # all cleared, so that the group's matrix becomes zero. This step's first row must exist.
    starts, ends = row_ranges(group_sizes, num_rows)
    first = jnp.minimum(starts, num_rows - ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps = jnp.maximum(-((first - ends) // STEP), 1)  # rounded up
    return jnp.stack([steps, first, starts, ends], axis=1)


@dataclasses.dataclass(frozen=True)
class _Drhs(Kernel):
    """The kernel of `drhs_of_each`: lhs[rows].T @ grad[rows] for each group and each grad."""

    dtype: Any  # of all arrays
    num_groups: int
    height: int  # K, the number of columns of lhs
    num_grads: int
    adds: bool  # whether the results are added to what the outputs hold

    @property
    def has_loader(self) -> bool:
        return self.tiles.block_n <= MOST_BESIDE_LOADER

    @property
    def loads_in_one_warp(self) -> bool:
        return False  # the loader clears

    def scratch_types(self) -> dict[str, Any]:
        left, right = (STEP, BLOCK_M), (STEP, self.tiles.block_n)
        buffers = (COMPUTERS, CHUNK, CHUNK)
        clearing_warpgroups = 1 if self.has_loader else COMPUTERS
        return dict(
            ring=OperandRing.types(self.dtype, self.tiles.num_stages, left, right),
            cleared=plgpu.Barrier(
                num_arrivals=clearing_warpgroups, num_barriers=self.tiles.num_stages
            ),
            buffers=plgpu.SMEM(buffers, self.dtype, transforms=swizzled(self.dtype)),
        )

    def __call__(self, lhs: Any, *refs: Any, ring: OperandRing, cleared: Any, buffers: Any) -> None:
        grads, table, outs = refs[: self.num_grads], refs[self.num_grads], refs[-self.num_grads :]
        loader = _Loader(self, ring, cleared, table, lhs, grads)
        tiles = self.block_tiles(self.num_tiles)
        feeder = Feeder(loader, tiles, ring.empty, ring.num_stages, self.has_loader)

        def compute(number: jax.Array) -> None:
            _Computer(self, ring, cleared, table, outs, buffers.at[number], number, feeder).run()

        self.take_roles(lambda: loader.run(feeder), compute)

    @property
    def _tile_rows(self) -> int:
        # The last tile may reach past row K. Copies of lhs read zeros there; nothing is stored.
        return -(-self.height // BLOCK_M)

    @property
    def num_tiles(self) -> jax.Array:
        tiles = self.num_grads * self.num_groups * self._tile_rows * self.tile_columns
        return jnp.int32(tiles)

    def look_up(self, table: Any, index: jax.Array) -> _Tile:
        """Returns output tile number `index`, from the result of `_group_steps`."""
        # The tiles of all outputs at one position follow each other.
        position, grad_index = quotient_and_rest(index, jnp.int32(self.num_grads))
        tiles_of_group = jnp.int32(self._tile_rows * self.tile_columns)
        group, tile_of_group = quotient_and_rest(position, tiles_of_group)
        row, left_edge = self.tile_position(tile_of_group, jnp.int32(self._tile_rows))
        top = row * BLOCK_M
        steps, first, begin, end = (table[group, i] for i in range(4))
        return _Tile(grad_index, group, top, left_edge, steps, first, begin, end)


class _Tile(NamedTuple):
    """An output tile, and the rows of lhs and grad over which its sum runs. All are int32."""

    grad_index: jax.Array  # of the array `grad`, and of its output
    group: jax.Array
    # The tile's first row and column in the group's matrix [K, N].
    top: jax.Array
    left_edge: jax.Array
    # The number of steps of 64 rows, and the first row of the first step, a multiple of 8.
    steps: jax.Array
    first: jax.Array
    # The group's rows, [begin, end).
    begin: jax.Array
    end: jax.Array

    def rows_of_group(self, step: jax.Array) -> _Range:
        """Returns which of the 64 rows of step number `step` belong to the tile's group."""
        row = self.first + step * STEP
        return _Range(self.begin - row, self.end - row)


class _Range(NamedTuple):
    """The rows [begin, end) of a group, counted from the first of a step's 64 rows."""

    begin: jax.Array
    end: jax.Array

    @property
    def leaves_rows_out(self) -> jax.Array:
        return (self.begin > 0) | (self.end < STEP)


@dataclasses.dataclass(frozen=True)
class _Loader(Loader):
    """Copies the operand tiles of output tiles into the ring, step by step, and clears steps."""

    kernel: _Drhs
    ring: OperandRing
    cleared: Any  # [stages] barriers, at which a loader arrives when it has cleared a stage
    table: Any  # the result of `_group_steps`
    lhs: Any
    grads: Sequence[Any]

    def run(self, feeder: Feeder) -> None:
        """Does the work of a loader warpgroup: fills the ring's stages, and later clears them."""
        # Steps that do not exist, before the first and after the last, have no row to clear.
        all_rows = _Range(jnp.int32(0), jnp.int32(STEP))
        # How many later steps are filled before a step is cleared.
        lag = self.ring.num_stages - 2

        def load_tile(tile: _Tile, _: Any, carry: Any) -> Any:
            def load_step(i: jax.Array, carry: Any) -> Any:
                filled, uncleared = carry
                feeder.load_released(tile, i, operand_ring.Slot(filled), ahead=())
                return filled + 1, self._clear_oldest(
                    filled - lag, uncleared, tile.rows_of_group(i)
                )

            return lax.fori_loop(0, tile.steps, load_step, carry)

        # The carry: the number of steps filled so far, and the ranges of the uncleared steps.
        carry = jnp.int32(0), (all_rows,) * lag
        filled, uncleared = feeder.tiles.walk(self.find, load_tile, carry)

        def clear_rest(i: jax.Array, uncleared: Any) -> Any:
            return self._clear_oldest(filled - lag + i, uncleared, all_rows)

        lax.fori_loop(0, lag, clear_rest, uncleared)
        drain(self.ring.empty, filled, self.ring.num_stages)

    def _clear_oldest(
        self, step: jax.Array, uncleared: tuple[_Range, ...], newest: _Range
    ) -> tuple[_Range, ...]:
        """Clears step number `step`, the oldest uncleared one; does nothing if it is negative."""
        # `uncleared` has the ranges of uncleared steps, oldest first, but not yet that of the step
        # filled last, `newest`. Returns the ranges of the steps that stay uncleared.
        oldest, *others = (*uncleared, newest)

        @pl.when(step >= 0)
        def _() -> None:
            stage = self.ring.stage_of(step)
            plgpu.barrier_wait(self.ring.full.at[stage])

            # A computer waits for `cleared` only if the step holds rows outside of its group.
            @pl.when(oldest.leaves_rows_out)
            def _() -> None:
                clear(self.ring, stage, oldest)
                plgpu.barrier_arrive(self.cleared.at[stage])

        return tuple(others)

    def find(self, index: jax.Array) -> _Tile:
        return self.kernel.look_up(self.table, index)

    def steps_of(self, tile: _Tile) -> jax.Array:
        return tile.steps

    def load(self, tile: _Tile, step: jax.Array, slot: operand_ring.Slot, ahead: Any) -> None:
        # Only copies load, so nothing is read ahead.
        inner = pl.ds(tile.first + step * STEP, STEP)
        rows = pl.ds(tile.top, BLOCK_M)
        columns = pl.ds(tile.left_edge, self.kernel.tiles.block_n)
        right = TileSource([grad.at[inner, columns] for grad in self.grads], tile.grad_index)
        self.ring.fill(slot.number, TileSource([self.lhs.at[inner, rows]]), [right])


def clear(
    ring: OperandRing, stage: jax.Array, rows: _Range, worker: Any = 0, num_workers: int = 1
) -> None:
    """Zeroes all rows of a stage but `rows`: the share of warpgroup `worker` of `num_workers`."""
    for operands in (ring.left, ring.right):
        tile = operands.at[stage]
        swizzle = swizzled(tile.dtype)
        register_tiles.zero_rows_outside(tile, *rows, swizzle, worker, num_workers)
    plgpu.commit_smem()


class _Held(NamedTuple):
    """A compute warpgroup's half of a finished output tile, [64, block_n], until it is stored."""

    grad_index: jax.Array
    group: jax.Array
    top: jax.Array
    left_edge: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True)
class _Computer:
    """The work of a compute warpgroup: computes and stores half of the rows of each output tile."""

    kernel: _Drhs
    ring: OperandRing
    cleared: Any
    table: Any
    outs: Sequence[Any]
    # [64, 64] in shared memory, through which this warpgroup stores 64 columns, a chunk, at a time.
    buffer: Any
    number: jax.Array  # of the warpgroup, 0 or 1
    feeder: Feeder

    def run(self) -> None:
        zero = jnp.int32(0)
        values = zeros(self._shape, self.kernel.dtype)
        # The tile held at first lies below the output, so nothing of it is stored.
        below = jnp.int32(self.kernel.height)
        before_first = _Held(grad_index=zero, group=zero, top=below, left_edge=zero, values=values)
        feed, first, num_tiles = self.feeder.start(), self._look_up(zero), self.feeder.tiles.count
        if not self.kernel.has_loader:
            pl.when(num_tiles > 0)(lambda: self._clear(zero, first.rows_of_group(zero)))
        carry = first, zero, feed, before_first
        _, used, _, last = lax.fori_loop(0, num_tiles, self._compute_tile, carry)
        self._store_from(last, chunk=0)
        self.feeder.finish(used)

    @property
    def _shape(self) -> tuple[int, int]:
        return CHUNK, self.kernel.tiles.block_n

    def _look_up(self, turn: jax.Array) -> _Tile:
        return self.kernel.look_up(self.table, self.feeder.tiles.index(turn))

    def _compute_tile(
        self, turn: jax.Array, carry: tuple[_Tile, jax.Array, Feed | None, _Held]
    ) -> Any:
        """Computes a half tile, and stores the half tile computed before; returns the new carry."""
        tile, used, feed, before = carry
        following = self._look_up(turn + 1)

        def multiply(accumulator: Any, stage: jax.Array, step: jax.Array) -> None:
            self._multiply(tile.rows_of_group(step), accumulator, stage)
            if not self.kernel.has_loader:
                is_last = step + 1 == tile.steps
                rows = tile.rows_of_group(step + 1), following.rows_of_group(jnp.int32(0))
                rows_then = jax.tree.map(lambda own, others: jnp.where(is_last, others, own), *rows)
                stage_then = operand_ring.stage_after(stage, self.ring.num_stages)
                exists = ~is_last | (turn + 1 < self.feeder.tiles.count)
                pl.when(exists)(lambda: self._clear(stage_then, rows_then))

        # A chunk of `before` is stored in each step, and the rest after the last step.
        store_before = functools.partial(self._store, before)
        steps = Steps(used, tile.steps, self.feeder, feed, meanwhile=store_before)
        total, feed = self.ring.accumulate(steps, 1, self._shape, multiply)
        self._store_from(before, tile.steps)
        top = tile.top + self.number * CHUNK
        values = total.astype(self.kernel.dtype)
        held = _Held(tile.grad_index, tile.group, top, tile.left_edge, values)
        return following, used + tile.steps, feed, held

    def _multiply(self, rows: _Range, accumulator: Any, stage: jax.Array) -> None:
        """Starts the matmul of a step of a tile, once its stage is cleared if necessary."""
        left, right = self.ring.left.at[stage], self.ring.right.at[stage]
        # Without a loader, `_clear` has waited for the operands of a step that is cleared.
        is_cleared = rows.leaves_rows_out
        pl.when(~is_cleared | self.kernel.has_loader)(
            lambda: plgpu.barrier_wait(self.ring.full.at[stage])
        )
        pl.when(is_cleared)(lambda: plgpu.barrier_wait(self.cleared.at[stage]))
        columns = left.at[:, pl.ds(self.number * CHUNK, CHUNK)]
        plgpu.wgmma(accumulator, transposed(columns), right)

    def _clear(self, stage: jax.Array, rows: _Range) -> None:
        """Clears this warpgroup's share of a stage, once its operands are there, if necessary."""

        @pl.when(rows.leaves_rows_out)
        def _() -> None:
            plgpu.barrier_wait(self.ring.full.at[stage])
            clear(self.ring, stage, rows, self.number, COMPUTERS)
            plgpu.barrier_arrive(self.cleared.at[stage])

    def _store_from(self, held: _Held, chunk: Any) -> None:
        """Stores the half tile `held` to its output, except the chunks before number `chunk`."""
        num_left = jnp.maximum(len(self._first_columns) - chunk, 0)
        lax.fori_loop(0, num_left, lambda i, _: self._store(held, chunk + i), None)

    @property
    def _first_columns(self) -> range:  # of each chunk
        return range(0, self.kernel.tiles.block_n, CHUNK)

    def _store(self, held: _Held, chunk: jax.Array) -> None:
        """Stores chunk number `chunk` of the half tile `held`, if there is one in the output."""
        kernel = self.kernel

        def write_to_buffer(first_column: int) -> None:
            self.buffer[...] = held.values[:, first_column : first_column + CHUNK]

        @pl.when((held.top < kernel.height) & (chunk < len(self._first_columns)))
        def _():
            # The copy of the chunk before must have read the buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # Only constant indices can select registers, so each chunk has code of its own.
            run_one([functools.partial(write_to_buffer, i) for i in self._first_columns], chunk)
            rows = pl.ds(held.top, CHUNK)
            columns = pl.ds(held.left_edge + chunk * CHUNK, CHUNK)
            copy = functools.partial(store_or_add, self.buffer, adds=kernel.adds)
            destinations = [out.at[held.group, rows, columns] for out in self.outs]
            lax.switch(held.grad_index, [functools.partial(copy, each) for each in destinations])
