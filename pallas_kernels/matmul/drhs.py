"""The gradients of a grouped matmul's matrices: the outer products of each group's rows, summed.

There may be several, of the same rows of lhs. Their tiles at one place follow each other, so that
lhs is read from the caches.

The kernel is built like the others (`pallas_kernels.matmul.kernel`). It cuts the sum over a group's
rows into steps of 64. The first and last step of a group may hold rows of another group. The loader
sets these rows to zero in shared memory, ahead of the computers. So a NaN in another group's row,
or past the last group, never enters an accumulator.

A stage of the ring passes between the warpgroups by three barriers:

  full     the copies are in the stage. Computers and loader wait for it at every step.
  cleared  other groups' rows in the stage are zero. The loader arrives, and the computers wait,
           at a step with such rows, and at no other.
  empty    the computers have multiplied the stage's operands. The loader waits for it.

The loader clears a step once it has filled the stages of the next `num_stages` - 2 steps, whose
copies are under way meanwhile. To fill one more stage first would be a deadlock: the computers
release that stage only once they have started the step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    row_numbers,
    run_one,
    transposed,
    zeros,
)
from pallas_kernels.matmul.row_tiles import ROW_ALIGNMENT, row_ranges

BLOCK_M = COMPUTERS * CHUNK  # rows of a block's output tile; each computer takes half of them


@dataclasses.dataclass(frozen=True)
class DrhsTiles:
    """The tile sizes of `drhs_of_each`, and the depth of its buffers in shared memory.

    Attributes:
      block_n: width of a block's output tile, a multiple of 64 up to 256.
      num_stages: depth of the ring, in operand tiles of 64 rows, at least 2.
      band: how many columns of tiles the blocks sweep together, from the first row to the last.
    """

    block_n: int
    num_stages: int
    band: int = 1

    @classmethod
    def fitting(cls, block_n: int, band: int = 1) -> DrhsTiles:
        """Returns tiles with the deepest ring that fits, of at most 6 stages."""
        staged = 2 * BLOCK_M * CHUNK
        stage = 2 * CHUNK * (BLOCK_M + block_n)
        stages = (SHARED_MEMORY_BYTES - OTHER_BYTES - staged) // stage
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
    """Multiplies each group's rows of lhs, transposed, by its rows of a grad: the gradient of rhs.

    Args:
      lhs: [R, K] bfloat16 or float16; R is a multiple of 8, K of 64.
      grads: one or more, [R, N] of lhs's dtype; N is a multiple of tiles.block_n.
      group_sizes: [L] int32, rows of each group, in order.
      tiles: tile sizes, and depth of buffers.
      num_blocks: thread blocks to use.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      For each grad [L, K, N] of the operands' dtype, zero for an empty group. Sums are float32.
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
    """Returns how the rows of each group are cut into steps of 64, [L, 4] int32.

    An entry is the number of steps (at least one), the first row of the first step (a multiple of
    8), and the range [begin, end) of the group's rows.
    """
    starts, ends = row_ranges(group_sizes, num_rows)
    first = jnp.minimum(starts, num_rows - ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps = jnp.maximum(-((first - ends) // CHUNK), 1)
    return jnp.stack([steps, first, starts, ends], axis=1)


@dataclasses.dataclass(frozen=True)
class _Drhs(Kernel):
    """The kernel of `drhs_of_each`."""

    num_groups: int
    height: int  # rows of the output of a group, K
    num_grads: int

    def __post_init__(self) -> None:
        if self.width % self.tiles.block_n:
            raise ValueError(
                f"the output's {self.width} columns are not whole tiles of {self.tiles.block_n}."
            )

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        left, right = (CHUNK, BLOCK_M), (CHUNK, tiles.block_n)
        return self.ring(dtype, left, right, (1, CHUNK)) | dict(
            cleared=plgpu.Barrier(num_arrivals=1, num_barriers=tiles.num_stages),
        )

    def __call__(self, lhs: Any, *refs: Any, **scratch: Any) -> None:
        grads, table, outs = refs[: self.num_grads], refs[self.num_grads], refs[-self.num_grads :]
        tiles = self.tiles
        # The last tile may reach past K. What it reads there is zero, and is not stored.
        tile_rows = -(-self.height // BLOCK_M)
        num_tiles = jnp.int32(self.num_grads * self.num_groups * tile_rows * self.tile_columns)

        def look_up(index):
            # Tiles at one place, of all gradients, follow each other: they read the same of lhs.
            index, which = quotient_and_rest(index, jnp.int32(self.num_grads))
            group, rest = quotient_and_rest(index, jnp.int32(tile_rows * self.tile_columns))
            row, left_edge = self.place(rest, jnp.int32(tile_rows))
            steps = tuple(table[group, i] for i in range(4))
            return which, group, row * BLOCK_M, left_edge, *steps

        def load():
            def clear_oldest(step, uncleared, newest):
                uncleared = (*uncleared, newest)
                self._clear(scratch, step, *uncleared[0])
                return uncleared[1:]

            def one_tile(tile, carry):
                which, _, top, left_edge, steps, first, begin, end = tile

                def step(i, carry, grad):
                    used, uncleared = carry
                    row = first + i * CHUNK
                    inner = pl.ds(aligned(row), CHUNK)
                    used = self.fill(
                        scratch,
                        used,
                        [lhs.at[inner, pl.ds(pl.multiple_of(top, CHUNK), BLOCK_M)]],
                        0,
                        [grad.at[inner, pl.ds(pl.multiple_of(left_edge, CHUNK), tiles.block_n)]],
                    )
                    mine = begin - row, end - row
                    return used, clear_oldest(used - 1 - lag, uncleared, mine)

                def all_steps(grad, carry):
                    return lax.fori_loop(0, steps, functools.partial(step, grad=grad), carry)

                of_grads = [functools.partial(all_steps, grad) for grad in grads]
                return lax.switch(which, of_grads, carry)

            # Of each of the last `lag` steps, not yet cleared: which rows are the group's.
            lag = tiles.num_stages - 2
            all_rows = jnp.int32(0), jnp.int32(CHUNK)
            carry = jnp.int32(0), (all_rows,) * lag
            used, uncleared = self.each_of(num_tiles, look_up, one_tile, carry)

            def clear_rest(i, uncleared):
                return clear_oldest(used - lag + i, uncleared, all_rows)

            lax.fori_loop(0, lag, clear_rest, uncleared)
            return used

        def compute(computer):
            staged, dtype = scratch["staged"].at[computer, 0], outs[0].dtype
            shape, columns = (CHUNK, tiles.block_n), range(0, tiles.block_n, CHUNK)

            def store(tile, chunk):
                """Stores a chunk of columns of this computer's part of a tile, if there is one."""
                (which, group, top, left_edge), values = tile

                def stage(first):
                    staged[...] = values[:, first : first + CHUNK]

                @pl.when((top < self.height) & (chunk < len(columns)))
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    run_one([functools.partial(stage, first) for first in columns], chunk)
                    plgpu.commit_smem()
                    rows = pl.ds(pl.multiple_of(top, CHUNK), CHUNK)
                    cols = pl.ds(pl.multiple_of(left_edge + chunk * CHUNK, CHUNK), CHUNK)
                    copies = [
                        functools.partial(
                            plgpu.copy_smem_to_gmem, staged, out.at[group, rows, cols]
                        )
                        for out in outs
                    ]
                    lax.switch(which, copies)

            def store_from(tile, chunk):
                left = jnp.maximum(len(columns) - chunk, 0)
                lax.fori_loop(0, left, lambda i, _: store(tile, chunk + i), None)

            def one_tile(tile, carry):
                used, before = carry
                which, group, top, left_edge, steps, first, begin, end = tile

                def multiply(accumulator, stage, i):
                    left, right = scratch["left"].at[stage], scratch["right"].at[stage]

                    @pl.when(_is_edge(begin - first - i * CHUNK, end - first - i * CHUNK))
                    def _():
                        plgpu.barrier_wait(scratch["cleared"].at[stage])

                    mine = left.at[:, pl.ds(computer * CHUNK, CHUNK)]
                    plgpu.wgmma(accumulator, transposed(mine), right)

                store_before = functools.partial(store, before)
                total = self.accumulate(scratch, used, steps, shape, multiply, store_before)
                store_from(before, steps)
                place = which, group, top + computer * CHUNK, left_edge
                return used + steps, (place, total.astype(dtype))

            zero = jnp.int32(0)
            nowhere = zero, zero, jnp.int32(self.height), zero
            nothing = nowhere, zeros(shape, dtype, plgpu.Layout.WGMMA, self.interpreted)
            _, last = self.each_of(num_tiles, look_up, one_tile, (zero, nothing))
            store_from(last, 0)

        self.take_roles(scratch, load, compute)

    def _clear(self, scratch: Any, step: jax.Array, begin: jax.Array, end: jax.Array) -> None:
        """Sets the rows of a block's step outside [begin, end) to zero, once they are there."""

        @pl.when(step >= 0)
        def _():
            stage = lax.rem(step, jnp.int32(self.tiles.num_stages))
            plgpu.barrier_wait(scratch["full"].at[stage])

            @pl.when(_is_edge(begin, end))
            def _():
                for operand in ("left", "right"):
                    self._clear_operand(scratch[operand].at[stage], begin, end)
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch["cleared"].at[stage])

    def _clear_operand(self, operand: Any, begin: jax.Array, end: jax.Array) -> None:
        """Sets the rows of an operand tile outside [begin, end) to zero.

        It writes whole groups of 8 rows. Only the first may lie before `begin` (`_group_steps`).
        """
        columns = operand.shape[1]

        def clear_part_of(eight: Any) -> None:
            part = operand.at[pl.ds(eight, ROW_ALIGNMENT)]
            row = eight + row_numbers((ROW_ALIGNMENT, columns), EIGHT_ROWS, self.interpreted)
            values = part[...] if self.interpreted else plgpu.load(part, layout=EIGHT_ROWS)
            in_group = (row >= begin) & (row < end)
            part[...] = jnp.where(in_group, values, jnp.zeros_like(values))

        @pl.when(begin > 0)
        def _():
            clear_part_of(0)

        @pl.when(end < CHUNK)
        def _():
            eight = end // ROW_ALIGNMENT * ROW_ALIGNMENT
            clear_part_of(eight)
            # All rows from the next multiple of 8 on, in at most three parts.
            row = eight + ROW_ALIGNMENT
            for height in (8, 16, 32):

                @pl.when(row & height != 0)
                def _(row=row, height=height):
                    operand.at[pl.ds(row, height)][...] = zeros(
                        (height, columns), operand.dtype, EIGHT_ROWS, self.interpreted
                    )

                row += row & height


def _is_edge(begin: jax.Array, end: jax.Array) -> jax.Array:
    """Returns whether a step, of whose rows [begin, end) are the group's, has others too."""
    return (begin > 0) | (end < CHUNK)
