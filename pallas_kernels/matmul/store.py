"""Stores a compute warpgroup's half of an output tile from registers to global memory.

A tile in registers is [columns, rows], as the tensor cores compute it. It is stored in chunks of 64
columns by 32 rows. A chunk is transposed into a buffer in shared memory, and copied from there to
the output. Rows of a tile that do not belong to the tile's group are not copied:

  registers             buffer        output
  chunk of the tile --> [32, 64] -->  if all 32 rows belong to the group: one bulk copy (TMA)
                                 -->  else: each thread stores its elements of the group's rows

A compute warpgroup uses its buffers in turn, each only once earlier copies from it have read it.
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

from pallas_kernels.fabric.hardware import ROW_ALIGNMENT
from pallas_kernels.matmul import register_tiles
from pallas_kernels.matmul.kernel import CHUNK, quotient_and_rest, run_one, zeros
from pallas_kernels.matmul.register_tiles import Target

# A compute warpgroup stores this many rows of an output tile at a time.
STORED_ROWS = 32

# A register layout of [8, 64]: a warp holds two rows, a thread four neighbouring values of a row.
_EIGHT_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((ROW_ALIGNMENT, CHUNK), (2, 4))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)

# Returns each output's elements [columns, rows] in slices of a finished tile's columns and rows.
Results = Callable[[slice, slice], tuple[jax.Array, ...]]


class Position(NamedTuple):
    """Where a tile is in the output, int32; rows [begin, end) belong to the tile's group."""

    top: jax.Array
    begin: jax.Array
    end: jax.Array
    left_edge: jax.Array


@dataclasses.dataclass(frozen=True)
class Store:
    """Stores what one compute warpgroup computes: half of the columns of each output tile."""

    outs: Sequence[Any]  # references to arrays [R, N]
    # [buffers, 32, 64] of the outputs' dtype, swizzled.
    buffers: Any
    # The most rows of a tile, and the columns of it that this warpgroup stores.
    block_m: int
    part: int

    @property
    def num_chunks(self) -> int:
        return len(self._chunks())

    def _chunks(self) -> list[tuple[int, int]]:
        """Returns the first (row, column) of each 32 x 64 chunk of this warpgroup's half tile."""
        rows = range(0, self.block_m, STORED_ROWS)
        return [(row, column) for row in rows for column in range(0, self.part, CHUNK)]

    def chunks(self, first: Any, count: int, position: Position, results: Results) -> None:
        """Stores `count` chunks from number `first` on, as far as the half tile has them."""
        lax.fori_loop(0, count, lambda i, _: self._chunk(first + i, position, results), None)

    def _chunk(self, number: jax.Array, position: Position, results: Results) -> None:
        """Stores those rows of a chunk of a tile that belong to the tile's group."""
        # Only constant indices can select registers, so the code that writes a chunk to a buffer is
        # emitted once for each chunk; the code that copies a buffer to the output once.
        chunks = self._chunks()
        num_buffers = self.buffers.shape[0]
        chunk_row, chunk_column = quotient_and_rest(number, jnp.int32(self.part // CHUNK))
        exists = (position.left_edge < self.outs[0].shape[1]) & (number < len(chunks))
        top = position.top + chunk_row * STORED_ROWS
        left_edge = position.left_edge + chunk_column * CHUNK
        # The chunk's rows to store, none if it does not exist.
        begin = jnp.clip(position.begin - top, 0, STORED_ROWS)
        end = jnp.where(exists, jnp.clip(position.end - top, 0, STORED_ROWS), begin)
        buffers = [
            self.buffers.at[lax.rem(number * len(self.outs) + i, jnp.int32(num_buffers))]
            for i in range(len(self.outs))
        ]

        def write(row: int, column: int) -> None:
            height = min(STORED_ROWS, self.block_m - row)
            values = results(slice(column, column + CHUNK), slice(row, row + height))
            for buffer, chunk in zip(buffers, values, strict=True):
                register_tiles.store_transposed(buffer.at[:height], chunk)

        @pl.when(number == 0)
        def _():
            # Wait until the bulk copies of the previous tile have read the buffers.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(begin < end)
        def _():
            # The copies that may still run read other buffers than this chunk's.
            plgpu.wait_smem_to_gmem(num_buffers - len(self.outs), wait_read_only=True)
            run_one([functools.partial(write, *chunk) for chunk in chunks], number)
            plgpu.commit_smem()
            self._copy(buffers, Target(top, left_edge, begin, end))

    def _copy(self, buffers: Sequence[Any], target: Target) -> None:
        """Copies each output's chunk from its buffer."""
        # The last chunks of a tile may have fewer rows. TMA copies a chunk if all rows are needed.
        heights = {STORED_ROWS, self.block_m % STORED_ROWS or STORED_ROWS}
        at_once = [(target.begin == 0) & (target.end == height) for height in heights]
        for height, whole in zip(heights, at_once, strict=True):
            pl.when(whole)(functools.partial(self._copy_whole, buffers, target, height))
        has_other_rows = jnp.logical_not(functools.reduce(jnp.logical_or, at_once))
        pl.when(has_other_rows)(lambda: self._copy_rows(buffers, target))

    def _copy_whole(self, buffers: Sequence[Any], target: Target, height: int) -> None:
        columns = pl.ds(target.left, CHUNK)
        rows = pl.ds(target.top, height)
        for buffer, out in zip(buffers, self.outs, strict=True):
            plgpu.copy_smem_to_gmem(buffer.at[:height], out.at[rows, columns])

    def _copy_rows(self, buffers: Sequence[Any], target: Target) -> None:
        """Copies rows of the buffers, which may begin and end anywhere, to the outputs."""
        top, left, begin, end = target

        def eight_rows(buffer: Any, out: Any, i: jax.Array, _: None) -> None:
            row = i * ROW_ALIGNMENT
            values = plgpu.load(buffer.at[pl.ds(row, ROW_ALIGNMENT)], layout=_EIGHT_ROWS)
            target_of_rows = Target(top + row, left, begin - row, end - row)
            register_tiles.store_rows(out, values, target_of_rows, _EIGHT_ROWS)

        for buffer, out in zip(buffers, self.outs, strict=True):
            stop = lax.div(end + (ROW_ALIGNMENT - 1), jnp.int32(ROW_ALIGNMENT))
            first = lax.div(begin, jnp.int32(ROW_ALIGNMENT))
            lax.fori_loop(first, stop, functools.partial(eight_rows, buffer, out), None)

    def zeros_from(self, start: jax.Array, worker: jax.Array, num_workers: int) -> None:
        """Zeroes the outputs' rows from `start` on: warpgroup `worker`'s share of `num_workers`."""
        # A buffer is zeroed once the copies from it are done. Each chunk is a copy of this buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out, buffer = self.outs[0], self.buffers.at[0]
        register_tiles.store_transposed(buffer, zeros((CHUNK, STORED_ROWS), out.dtype))
        plgpu.commit_smem()
        chunk_shape = STORED_ROWS, CHUNK
        zero = functools.partial(self._zero_chunk, buffer)
        register_tiles.each_zero_chunk(start, out.shape, chunk_shape, worker, num_workers, zero)

    def _zero_chunk(self, buffer: Any, target: Target) -> None:
        """Copies rows of a buffer of zeros to each output."""
        begin, end = jnp.maximum(target.begin, 0), jnp.minimum(target.end, STORED_ROWS)
        self._copy([buffer] * len(self.outs), target._replace(begin=begin, end=end))
