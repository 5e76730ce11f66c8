"""Stores a computer warpgroup's half of an output tile from registers to global memory.

A tile in registers is [columns, rows], as the tensor cores compute it. It is stored in chunks of 64
columns by 32 rows. A chunk is transposed into a buffer in shared memory, and copied to the output:

  registers             buffer        output
  chunk of the tile --> [32, 64] -->  if all 32 rows belong to the group: one bulk copy (TMA)
                                 -->  else: each thread stores its elements of the group's rows

A warpgroup uses its buffers cyclically. A buffer is rewritten only after the bulk copies from it
have read it.
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

from pallas_kernels.fabric import mosaic
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
from pallas_kernels.matmul.row_tiles import ROW_ALIGNMENT

# A computer warpgroup stores this many rows of a tile at a time.
STORED_ROWS = 32

# A function of a slice of a tile's columns and a slice of its rows. Returns the elements there,
# [columns, rows], for each output.
Results = Callable[[slice, slice], tuple[jax.Array, ...]]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["chunks", "plain"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Buffers:
    """Shared memory buffers through which chunks of a tile are stored.

    The attributes are scratch types outside the kernel's body, and references inside it. `of`
    returns buffers without the axis of computers.

    Attributes:
      chunks: [computers, buffers, 32, 64] of the outputs' dtype, swizzled.
      plain: [computers, 32, 64], not swizzled, in an interpreted kernel; else None. The interpreter
        copies single rows from this buffer, since it can't copy them from a swizzled one.
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
        """Returns the buffers of one computer warpgroup, without the axis of computers."""
        plain = None if self.plain is None else self.plain.at[computer]
        return Buffers(self.chunks.at[computer], plain)


class Place(NamedTuple):
    """The position of a tile in the output; all int32.

    Attributes:
      top: the tile's first row.
      begin, end: the range [begin, end) of output rows that the tile has of its group.
      left_edge: the tile's first column.
    """

    top: jax.Array
    begin: jax.Array
    end: jax.Array
    left_edge: jax.Array


@dataclasses.dataclass(frozen=True)
class Store:
    """Stores the output tiles of one computer warpgroup.

    Attributes:
      outs: references to the outputs, [R, N], all of one dtype.
      buffers: the buffers of this warpgroup in shared memory.
      block_m: the largest number of rows in a tile.
      part: number of columns of a tile that this warpgroup computes.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
    """

    outs: Sequence[Any]
    buffers: Buffers
    block_m: int
    part: int
    interpreted: bool

    @property
    def num_chunks(self) -> int:
        """Returns the number of 32 x 64 chunks in this warpgroup's part of a tile."""
        return len(self._chunks())

    def _chunks(self) -> list[tuple[int, int]]:
        """Returns the first (row, column) of each 32 x 64 chunk, counted from the tile's first."""
        rows = range(0, self.block_m, STORED_ROWS)
        return [(row, column) for row in rows for column in range(0, self.part, CHUNK)]

    def chunks(self, first: Any, count: int, place: Place, results: Results) -> None:
        """Stores `count` chunks of a tile to the outputs, from chunk number `first` on.

        `place` is the tile's position in the outputs, and `results` returns the tile's elements.
        Chunk numbers past the tile's last chunk are ignored.
        """
        lax.fori_loop(0, count, lambda i, _: self._chunk(first + i, place, results), None)

    def _chunk(self, number: jax.Array, place: Place, results: Results) -> None:
        """Stores the rows of a tile's chunk `number` that belong to the tile's group.

        Registers can only be selected by constant indices, so each chunk has its own code that
        writes it to a buffer. The code that copies the buffer to the output is shared.
        """
        chunks, num_buffers = self._chunks(), self.buffers.chunks.shape[0]
        row, column = quotient_and_rest(number, jnp.int32(self.part // CHUNK))
        inside = (place.left_edge < self.outs[0].shape[1]) & (number < len(chunks))
        top, left_edge = place.top + row * STORED_ROWS, place.left_edge + column * CHUNK
        first = jnp.clip(place.begin - top, 0, STORED_ROWS)
        stop = jnp.where(inside, jnp.clip(place.end - top, 0, STORED_ROWS), first)
        buffers = [
            self.buffers.chunks.at[lax.rem(number * len(self.outs) + i, jnp.int32(num_buffers))]
            for i in range(len(self.outs))
        ]

        @pl.when(number == 0)
        def _():
            # Wait until the bulk copies of the previous tile have read their buffers.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(first < stop)
        def _():
            plgpu.wait_smem_to_gmem(num_buffers - len(self.outs), wait_read_only=True)
            write = functools.partial(self._write_each, buffers, results)
            run_one([functools.partial(write, *chunk) for chunk in chunks], number)
            plgpu.commit_smem()
            self._copy(buffers, top, left_edge, first, stop)

    def _write_each(self, buffers: Sequence[Any], results: Results, row: int, column: int) -> None:
        """Writes the chunk that starts at (row, column) of each output's tile to a buffer."""
        height = min(STORED_ROWS, self.block_m - row)
        values = results(slice(column, column + CHUNK), slice(row, row + height))
        for buffer, part in zip(buffers, values, strict=True):
            self._write(buffer.at[:height], part)

    def _write(self, buffer: Any, values: jax.Array) -> None:
        """Writes values [columns, rows], transposed, to a buffer in shared memory.

        The caller must call `commit_smem` before the buffer is read.
        """
        if self.interpreted:
            buffer[...] = values.T
        else:
            mosaic.store_transposed(buffer, values)

    def _copy(
        self,
        buffers: Sequence[Any],
        top: jax.Array,
        left_edge: jax.Array,
        begin: jax.Array,
        end: jax.Array,
    ) -> None:
        """Copies rows [begin, end) of each buffer to its output.

        Row 0 and column 0 of a buffer belong to row `top` and column `left_edge` of the output.
        """
        # A tile's last chunk has fewer than 32 rows if block_m is not a multiple of 32.
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
        """Copies rows [begin, end) of a buffer to `out`; `begin` need not be a multiple of 8.

        Row 0 and column 0 of the buffer belong to row `top` and column `left_edge` of `out`.
        """
        if self.interpreted:
            self._copy_rows_in_parts(buffer, out, top, left_edge, begin, end)
            return

        def eight_rows(i: jax.Array, _: None) -> None:
            row = i * ROW_ALIGNMENT
            values = plgpu.load(buffer.at[pl.ds(row, ROW_ALIGNMENT)], layout=EIGHT_ROWS)
            mosaic.store_rows(out, values, top + row, left_edge, begin - row, end - row, EIGHT_ROWS)

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
        """Copies rows [begin, end) of a buffer to `out`, as `_copy_rows`, in the interpreter.

        A copy has a static height. So the rows are copied in parts whose heights are powers of two:
        the binary digits of end - begin.
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
        """Zeroes this computer warpgroup's share of the outputs' rows from `start` to the last.

        The rows' chunks are shared among `num_workers` warpgroups; `worker` is the index of this
        one.
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
        """Zeroes 64 columns of the outputs' rows [top + begin, top + end), from `left_edge` on.

        `buffer` is [32, 64] in shared memory, and holds zeros.
        """
        buffers = [buffer] * len(self.outs)

        @pl.when(end - begin == STORED_ROWS)
        def _whole():
            self._copy_whole(buffers, top, left_edge, STORED_ROWS)

        @pl.when(end - begin < STORED_ROWS)
        def _some():
            for out in self.outs:
                self._copy_rows(buffer, out, top, left_edge, begin, end)
