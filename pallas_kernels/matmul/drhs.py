"""The gradient of a grouped matmul's matrices: the outer products of each group's rows, summed.

The kernel is built like the others (`pallas_kernels.matmul.kernel`). It cuts the sum over a group's
rows into steps, and clears, in shared memory, the rows of its first and last step that belong to
another group. So a NaN in another group's row, or past the last group, never enters an accumulator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.fabric import drain
from pallas_kernels.fabric.plan import SHARED_MEMORY_BYTES
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    LOADER,
    OTHER_BYTES,
    Kernel,
    aligned,
    launch,
    quotient_and_rest,
    set_registers,
    transposed,
)
from pallas_kernels.matmul.row_tiles import ROW_ALIGNMENT

BLOCK_M = COMPUTERS * CHUNK  # rows of a block's output tile; each computer takes half of them


@dataclasses.dataclass(frozen=True)
class DrhsTiles:
    """The tile sizes of `drhs`, and the depth of its buffers in shared memory.

    Attributes:
      block_n: width of a block's output tile, a multiple of 64.
      num_slots: depth of the ring, in operand tiles of 64 rows.
      num_staged: 64 x 64 chunks of its results that a computer may stage on their way to memory, a
        divisor of block_n / 64.
      band: how many columns of tiles the blocks sweep together, from the first row to the last.
    """

    block_n: int
    num_slots: int
    num_staged: int
    band: int = 1

    @classmethod
    def fitting(cls, block_n: int, band: int = 1) -> DrhsTiles:
        """Returns tiles with room for a whole output tile, and the deepest ring that then fits."""
        staging = 2 * BLOCK_M * block_n
        slot = 2 * CHUNK * (BLOCK_M + block_n)
        slots = (SHARED_MEMORY_BYTES - OTHER_BYTES - staging) // slot
        return cls(block_n, min(slots, 6), block_n // CHUNK, band)

    def __post_init__(self) -> None:
        if self.block_n % (CHUNK * self.num_staged):
            raise ValueError(
                "a tile is of columns in multiples of 64, which are staged in equal parts, not "
                f"{self}."
            )


def drhs(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    tiles: DrhsTiles,
    num_blocks: int,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies each group's rows of lhs, transposed, by its rows of grad: the gradient of rhs.

    Args:
      lhs: [R, K] bfloat16 or float16; R is a multiple of 8, K of 64.
      grad: [R, N] of lhs's dtype; N is a multiple of tiles.block_n.
      group_sizes: [L] int32, rows of each group, in order.
      tiles: tile sizes, and depth of buffers.
      num_blocks: thread blocks to use.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      [L, K, N] of the operands' dtype, zero for an empty group. Sums are float32.
    """
    num_groups = group_sizes.shape[0]
    shape = num_groups, lhs.shape[1], grad.shape[1]
    kernel = _Drhs(tiles, num_blocks, bool(interpret), grad.shape[1], *shape[:2])
    return launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        jax.ShapeDtypeStruct(shape, lhs.dtype),
        "grouped_matmul_drhs",
        interpret,
    )(lhs, grad, _group_steps(group_sizes, lhs.shape[0]))


def _group_steps(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns how the rows of each group are cut into steps of 64, [L, 4] int32.

    An entry is the number of steps (at least one), the first row of the first step (a multiple of
    8), and the range [begin, end) of the group's rows.
    """
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    first = jnp.minimum(starts, num_rows - ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps = jnp.maximum(-((first - ends) // CHUNK), 1)
    return jnp.stack([steps, first, starts, ends], axis=1)


@dataclasses.dataclass(frozen=True)
class _Drhs(Kernel):
    """The kernel of `drhs`."""

    num_groups: int
    height: int  # rows of the output of a group, K

    def __post_init__(self) -> None:
        if self.width % self.tiles.block_n:
            raise ValueError(
                f"the output's {self.width} columns are not whole tiles of {self.tiles.block_n}."
            )

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        left, right = (CHUNK, BLOCK_M), (CHUNK, tiles.block_n)
        return self.ring(dtype, left, right, (tiles.num_staged, CHUNK)) | dict(
            cleared=plgpu.Barrier(num_arrivals=COMPUTERS),
        )

    def __call__(self, lhs: Any, grad: Any, table: Any, out: Any, **scratch: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        tiles = self.tiles
        # The last tile may reach past K. What it reads there is zero, and is not stored.
        rows, columns = -(-self.height // BLOCK_M), self.width // tiles.block_n
        total = jnp.int32(self.num_groups * rows * columns)

        def look_up(index):
            group, rest = quotient_and_rest(index, jnp.int32(rows * columns))
            row, left_edge = self.place(rest, jnp.int32(rows))
            steps = tuple(table[group, i] for i in range(4))
            return group, row * BLOCK_M, left_edge, *steps

        @pl.when(warpgroup == LOADER)
        def _load():
            set_registers(40, "decrease", self.interpreted)

            def one_tile(tile, used):
                _, top, left_edge, steps, first, _, _ = tile

                def step(i, used):
                    inner = pl.ds(aligned(first + i * CHUNK), CHUNK)
                    return self.fill(
                        scratch,
                        used,
                        lhs.at[inner, pl.ds(pl.multiple_of(top, CHUNK), BLOCK_M)],
                        grad.at[inner, pl.ds(pl.multiple_of(left_edge, CHUNK), tiles.block_n)],
                    )

                return lax.fori_loop(0, steps, step, used)

            used = self.each_of(total, look_up, one_tile, jnp.int32(0))
            drain(scratch["empty"], used, self.tiles.num_slots)

        @pl.when(warpgroup != LOADER)
        def _compute():
            set_registers(232, "increase", self.interpreted)

            def one_tile(tile, used):
                group, top, left_edge, steps, first, begin, end = tile

                def multiply(accumulator, slot, i):
                    left, right = scratch["left"].at[slot], scratch["right"].at[slot]
                    row = first + i * CHUNK

                    @pl.when((row < begin) | (row + CHUNK > end))
                    def _():
                        # Each computer clears part of what both of them will read.
                        for operand in (left, right):
                            self._clear(operand, begin - row, end - row, warpgroup)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(scratch["cleared"])
                        plgpu.barrier_wait(scratch["cleared"])

                    mine = left.at[:, pl.ds(warpgroup * CHUNK, CHUNK)]
                    plgpu.wgmma(accumulator, transposed(mine), right)
                    return 1

                total = self.accumulate(scratch, used, steps, (CHUNK, tiles.block_n), multiply)
                top += warpgroup * CHUNK

                @pl.when(top < self.height)
                def _():
                    rows = pl.ds(pl.multiple_of(top, CHUNK), CHUNK)
                    cols = pl.ds(pl.multiple_of(left_edge, CHUNK), tiles.block_n)
                    self._store(total, out.at[group, rows, cols], scratch["staged"].at[warpgroup])

                return used + steps

            self.each_of(total, look_up, one_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _clear(self, operand: Any, begin: jax.Array, end: jax.Array, computer: jax.Array) -> None:
        """Sets the rows of an operand outside [begin, end) to zero, by chunks of columns.

        The two computers take turns at the chunks.
        """
        row = _rows_of_chunk(self.interpreted)
        mine = (row >= begin) & (row < end)

        def clear(column: Any) -> None:
            part = operand.at[:, pl.ds(column, CHUNK)]
            values = part[...]
            part[...] = jnp.where(mine, values, jnp.zeros_like(values))

        columns = operand.shape[1] // CHUNK
        for pair in range(columns // COMPUTERS):
            clear((pair * COMPUTERS + computer) * CHUNK)
        if columns % COMPUTERS:

            @pl.when(computer == 0)
            def _():
                clear((columns - 1) * CHUNK)

    def _store(self, total: jax.Array, place: Any, staged: Any) -> None:
        """Stores a computer's part of a tile, as many chunks at a time as it may stage."""
        together = self.tiles.num_staged
        for first in range(0, self.tiles.block_n // CHUNK, together):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            columns = [slice((first + i) * CHUNK, (first + i + 1) * CHUNK) for i in range(together)]
            for i, column in enumerate(columns):
                staged.at[i][...] = total[:, column].astype(place.dtype)
            plgpu.commit_smem()
            for i, column in enumerate(columns):
                plgpu.copy_smem_to_gmem(staged.at[i], place.at[:, column])


def _rows_of_chunk(interpreted: bool) -> jax.Array:
    shape = (CHUNK, CHUNK)
    if interpreted:
        return lax.broadcasted_iota(jnp.int32, shape, 0)
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
