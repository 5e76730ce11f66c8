"""Stores a compute warpgroup's half of an output tile from registers to global memory.

A tile in registers is [columns, rows], as the tensor cores compute it. It is stored in chunks of 64
columns by 32 rows. A chunk is transposed into a buffer in shared memory, and copied from there to
the output. Rows of a tile that do not belong to the tile's group are not copied:

  registers             buffer        output
  chunk of the tile --> [32, 64] -->  if all 32 rows belong to the group: one bulk copy (TMA)
                                 -->  else: each thread stores its elements of the group's rows

A compute warpgroup uses its buffers cyclically. It writes to a buffer only after the earlier bulk
copies from this buffer have read it.
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
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    EIGHT_ROWS,
    aligned,
    quotient_and_rest,
    run_one,
    swizzled,
    zeros,
)

# A compute warpgroup stores this many rows of an output tile at a time.
STORED_ROWS = 32

# A function that returns some elements of a finished tile. Given a slice of the tile's columns and
# one of its rows, it returns for each output the elements there, [columns, rows].
Results = Callable[[slice, slice], tuple[jax.Array, ...]]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["chunks", "plain"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Buffers:
    """Buffers in shared memory through which the compute warpgroups store chunks of tiles.

    Outside the kernel's body the attributes are types of scratch, and inside it they are references
    to the scratch. Their first axis selects the compute warpgroup. The result of `of` lacks it.

    Attributes:
      chunks: [2, buffers, 32, 64] of the outputs' dtype, swizzled.
      plain: [2, 32, 64] of the outputs' dtype, not swizzled, in an interpreted kernel; else None.
        The interpreter copies single rows from it, which it cannot do from a swizzled buffer.
    """

    chunks: Any
    plain: Any

    @classmethod
    def types(cls, dtype: Any, num_buffers: int, interpreted: bool) -> Buffers:
        chunk = STORED_ROWS, CHUNK
        shape = COMPUTERS, num_buffers, *chunk
        plain = plgpu.SMEM((COMPUTERS, *chunk), dtype) if interpreted else None
        return cls(plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)), plain)

    def of(self, computer: jax.Array) -> Buffers:
        """Returns the buffers of the compute warpgroup with the index `computer`, 0 or 1."""
        plain = None if self.plain is None else self.plain.at[computer]
        return Buffers(self.chunks.at[computer], plain)


class Position(NamedTuple):
    """The position of a tile in the output. All attributes are int32.

    Attributes:
      top: the output row of the tile's first row.
      begin, end: only output rows [begin, end), which belong to the tile's group, are stored.
      left_edge: the output column of the tile's first column.
    """

    top: jax.Array
    begin: jax.Array
    end: jax.Array
    left_edge: jax.Array


@dataclasses.dataclass(frozen=True)
class Store:
    """Stores what one compute warpgroup computes: half of the columns of each output tile.

    Attributes:
      outs: references to the outputs, [R, N], all of one dtype.
      buffers: the buffers of this warpgroup in shared memory.
      block_m: the largest number of rows that a tile may have.
      part: number of columns of a tile that this warpgroup stores: half of them, or all if a tile
        has 64.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
    """

    outs: Sequence[Any]
    buffers: Buffers
    block_m: int
    part: int
    interpreted: bool

    @property
    def num_chunks(self) -> int:
        """Returns the number of 32 x 64 chunks in this warpgroup's half of a tile."""
        return len(self._chunks())

    def _chunks(self) -> list[tuple[int, int]]:
        """Returns the first (row, column) of each 32 x 64 chunk of this warpgroup's half tile."""
        rows = range(0, self.block_m, STORED_ROWS)
        return [(row, column) for row in rows for column in range(0, self.part, CHUNK)]

    def chunks(self, first: Any, count: int, position: Position, results: Results) -> None:
        """Stores `count` chunks of this warpgroup's half of a tile to the outputs.

        A chunk is 32 rows by 64 columns. The stored chunks are those with the indices `first` to
        `first` + `count` - 1 in `_chunks`; indices past the last chunk are ignored. `position` is
        that of the half in the outputs, and `results` returns elements of the half.
        """
        lax.fori_loop(0, count, lambda i, _: self._chunk(first + i, position, results), None)

    def _chunk(self, number: jax.Array, position: Position, results: Results) -> None:
        """Stores those rows of a chunk of a tile that belong to the tile's group.

        `number` is the chunk's index in `_chunks`. Only constant indices can select registers, so
        the code that writes a chunk to a buffer is emitted once for each chunk. The code that
        copies a buffer to the output is emitted once.
        """
        chunks, num_buffers = self._chunks(), self.buffers.chunks.shape[0]
        row, column = quotient_and_rest(number, jnp.int32(self.part // CHUNK))
        inside = (position.left_edge < self.outs[0].shape[1]) & (number < len(chunks))
        top, left_edge = position.top + row * STORED_ROWS, position.left_edge + column * CHUNK
        first = jnp.clip(position.begin - top, 0, STORED_ROWS)
        stop = jnp.where(inside, jnp.clip(position.end - top, 0, STORED_ROWS), first)
        buffers = [
            self.buffers.chunks.at[lax.rem(number * len(self.outs) + i, jnp.int32(num_buffers))]
            for i in range(len(self.outs))
        ]

        @pl.when(number == 0)
        def _():
            # Wait until the bulk copies of the previous tile have read the buffers.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(first < stop)
        def _():
            plgpu.wait_smem_to_gmem(num_buffers - len(self.outs), wait_read_only=True)
            write = functools.partial(self._write_each, buffers, results)
            run_one([functools.partial(write, *chunk) for chunk in chunks], number)
            plgpu.commit_smem()
            self._copy(buffers, top, left_edge, first, stop)

    def _write_each(self, buffers: Sequence[Any], results: Results, row: int, column: int) -> None:
        """Writes a chunk of a tile to shared memory: for each output to one of `buffers`.

        The chunk starts at (row, column) of this warpgroup's half of the tile. `results` returns
        the elements of the half.
        """
        height = min(STORED_ROWS, self.block_m - row)
        values = results(slice(column, column + CHUNK), slice(row, row + height))
        for buffer, part in zip(buffers, values, strict=True):
            self._write(buffer.at[:height], part)

    def _write(self, buffer: Any, values: jax.Array) -> None:
        """Writes the transpose of `values` [columns, rows] to a buffer in shared memory.

        The caller must call `plgpu.commit_smem` before the buffer is read.
        """
        if self.interpreted:
            buffer[...] = values.T
        else:
            register_tiles.store_transposed(buffer, values)

    def _copy(
        self,
        buffers: Sequence[Any],
        top: jax.Array,
        left_edge: jax.Array,
        begin: jax.Array,
        end: jax.Array,
    ) -> None:
        """Copies rows [begin, end) of each of `buffers`, one for each output, to its output.

        Element [0, 0] of a buffer belongs to row `top` and column `left_edge` of the output.
        """
        # A chunk has 32 rows. If block_m is not a multiple of 32, the last chunks of a tile have
        # fewer. TMA copies a chunk at once if all of its rows are to be copied.
        heights = {STORED_ROWS, self.block_m % STORED_ROWS or STORED_ROWS}
        at_once = [(begin == 0) & (end == height) for height in heights]
        for height, whole in zip(heights, at_once, strict=True):
            pl.when(whole)(functools.partial(self._copy_whole, buffers, top, left_edge, height))

        @pl.when(jnp.logical_not(functools.reduce(jnp.logical_or, at_once)))
        def _():
            for buffer, out in zip(buffers, self.outs, strict=True):
                self._copy_rows(buffer, out, top, left_edge, begin, end)

    def _copy_whole(
        self, buffers: Sequence[Any], top: jax.Array, left_edge: jax.Array, height: int
    ) -> None:
        at = pl.ds(aligned(top), height), pl.ds(pl.multiple_of(left_edge, CHUNK), CHUNK)
        for buffer, out in zip(buffers, self.outs, strict=True):
            plgpu.copy_smem_to_gmem(buffer.at[:height], out.at[at])

    def _copy_rows(
        self,
        buffer: Any,
        out: Any,
        top: jax.Array,
        left_edge: jax.Array,
        begin: jax.Array,
        end: jax.Array,
    ) -> None:
        """Copies rows [begin, end) of a buffer in shared memory to `out`, an output.

        Unlike the rows of a bulk copy, these may begin and end anywhere. Element [0, 0] of the
        buffer belongs to out[top, left_edge].
        """
        if self.interpreted:
            self._copy_rows_in_parts(buffer, out, top, left_edge, begin, end)
            return

        def eight_rows(i: jax.Array, _: None) -> None:
            row = i * ROW_ALIGNMENT
            values = plgpu.load(buffer.at[pl.ds(row, ROW_ALIGNMENT)], layout=EIGHT_ROWS)
            register_tiles.store_rows(
                out, values, top + row, left_edge, begin - row, end - row, EIGHT_ROWS
            )

        stop = lax.div(end + (ROW_ALIGNMENT - 1), jnp.int32(ROW_ALIGNMENT))
        lax.fori_loop(lax.div(begin, jnp.int32(ROW_ALIGNMENT)), stop, eight_rows, None)

    def _copy_rows_in_parts(
        self,
        buffer: Any,
        out: Any,
        top: jax.Array,
        left_edge: jax.Array,
        begin: jax.Array,
        end: jax.Array,
    ) -> None:
        """Copies rows of a chunk to the output, in place of `_copy_rows` in Pallas' interpreter.

        The number of rows of a copy must be static, but end - begin is not. So the rows are copied
        in parts of 16, 8, 4, 2 and 1 rows: a part for each binary digit of end - begin that is 1.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plain = self.buffers.plain
        plain[...] = buffer[...]
        plgpu.commit_smem()
        count, height = end - begin, STORED_ROWS // 2
        while height:

            @pl.when((count & height) != 0)
            def _(height=height, begin=begin):
                rows, columns = pl.ds(top + begin, height), pl.ds(left_edge, CHUNK)
                plgpu.copy_smem_to_gmem(plain.at[pl.ds(begin, height)], out.at[rows, columns])

            begin += count & height
            height //= 2

    def zeros_from(self, start: jax.Array, worker: jax.Array, num_workers: int) -> None:
        """Zeroes this warpgroup's share of the outputs' rows from `start` to the last.

        The rows are cut into chunks of 32 rows by 64 columns, which the compute warpgroups of all
        thread blocks share. There are `num_workers` such warpgroups, and `worker` is the index of
        this one.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        num_rows, width = self.outs[0].shape
        buffer, layout = self.buffers.chunks.at[0], plgpu.Layout.WGMMA
        dtype = self.outs[0].dtype
        self._write(buffer, zeros((CHUNK, STORED_ROWS), dtype, layout, self.interpreted))
        plgpu.commit_smem()
        columns, workers = jnp.int32(width // CHUNK), jnp.int32(num_workers)
        first_chunk = lax.div(start, jnp.int32(STORED_ROWS))
        chunks = -(-num_rows // STORED_ROWS) - first_chunk

        def one_chunk(i: jax.Array, _: None) -> None:
            row, column = quotient_and_rest(worker + i * workers, columns)
            top = (first_chunk + row) * STORED_ROWS
            begin = jnp.maximum(start - top, 0)
            end = jnp.minimum(num_rows - top, STORED_ROWS)
            self._zero_chunk(buffer, top, column * CHUNK, begin, end)

        own = lax.div(chunks * columns - worker + (workers - 1), workers)
        lax.fori_loop(0, own, one_chunk, None)

    def _zero_chunk(
        self, buffer: Any, top: jax.Array, left_edge: jax.Array, begin: jax.Array, end: jax.Array
    ) -> None:
        """Zeroes rows [top + begin, top + end) of the outputs, in 64 columns from `left_edge` on.

        `buffer`, [32, 64] in shared memory, holds the zeros that are copied there.
        """
        buffers = [buffer] * len(self.outs)

        @pl.when(end - begin == STORED_ROWS)
        def _whole():
            self._copy_whole(buffers, top, left_edge, STORED_ROWS)

        @pl.when(end - begin < STORED_ROWS)
        def _some():
            for out in self.outs:
                self._copy_rows(buffer, out, top, left_edge, begin, end)
