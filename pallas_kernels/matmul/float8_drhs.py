"""Gradients of the matrices of a grouped matmul, from float8 operands on Hopper's tensor cores.

The gradient of a group's matrix is lhs^T @ grad over the rows of the group. The tensor cores
require of float8 operands that the contraction dimension, here the rows, lies innermost. So both
operands are given transposed, with each group's rows padded to blocks of 128:

  lhs [K, P]                   grad [N, P]                       out [L, K, N]
  128 of K x 128 rows  times   2 x [128 of N x 128 rows]    =    2 x [128 of K x 128 of N]

A step multiplies the rows of one block. `float8` describes how a thread block multiplies and sums;
here 128 rows by 128 columns of an operand share a scale. A tile is stored during the next one. Each
gradient has a kernel of its own: two in one would share the tiles of lhs, but leave no registers
for a loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import WORD_BYTES
from pallas_kernels.fabric.mosaic import Array, Value
from pallas_kernels.matmul.float8 import HALVES, ROWS, Float8Kernel, Float8Tiles, band_in_cache
from pallas_kernels.matmul.kernel import (
    COMPUTERS,
    quotient_and_rest,
    run_into,
    store_or_add,
    swizzled,
)
from pallas_kernels.matmul.operand_ring import Slot
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# The number of parts of a tile for which a compute warpgroup has buffers in shared memory.
_COPY_BUFFERS = 2
# The scales of a tile of at most this many steps are prefetched while the one before is loaded.
_FEW_STEPS = 4
# Tiles of two halves are faster from this many rows a group on. Measured with 256 to 16384.
_MANY_ROWS = 1024


def drhs(
    lhs: TransposedRows,
    grad: TransposedRows,
    group_blocks: jax.Array,
    total: jax.Array | None = None,
    *,
    dtype: Any,
    num_blocks: int,
    num_waves: int = 1,
    tiles: Float8Tiles | None = None,
) -> jax.Array:
    """Computes the gradient of a grouped matmul's matrices: each group's lhs^T @ grad.

    Args:
      lhs: the transposed rows that the grouped matmul multiplied: values [K, P], scales [P / 128, K
        / 128].
      grad: the gradient of the grouped matmul's output, transposed: values [N, P], scales [P / 128,
        N / 128].
      group_blocks: [L, 2] int32, the second result of `row_blocks.row_blocks`.
      total: None, or an array [L, K, N] of `dtype`, to which the gradient is added in place,
        rounded to this dtype before and after the addition.
      num_blocks, num_waves: as for `grouped_matmul.grouped_matmul`.
      tiles: None: those that are fastest for the number of rows.

    Returns:
      [L, K, N] of `dtype` (bfloat16, float16 or float32), 0 for an empty group; or the new total.
    """
    (height, padded), width = lhs.values.shape, grad.values.shape[0]
    num_groups = group_blocks.shape[0]
    kernel = _Drhs(
        tiles=tiles or _fastest_tiles(width, padded // num_groups),
        num_blocks=num_blocks,
        width=width,
        depths=(padded,),
        dtype=jnp.dtype(lhs.values.dtype),
        out_dtype=jnp.dtype(dtype),
        shared_rows=False,
        height=height,
        num_groups=num_groups,
        adds=total is not None,
        num_waves=num_waves,
    )
    shape = num_groups * height, width
    (result,) = run_into(
        None if total is None else [total.reshape(shape)],
        [*lhs, *grad, group_blocks],
        kernel,
        kernel.scratch_types(),
        [jax.ShapeDtypeStruct(shape, dtype)],
        "grouped_matmul_float8_drhs",
    )
    return result.reshape(num_groups, height, width)


def _fastest_tiles(width: int, rows_of_group: int) -> Float8Tiles:
    if rows_of_group < _MANY_ROWS:
        return Float8Tiles(num_stages=6, band=16)
    columns = HALVES * BLOCK
    return Float8Tiles(block_n=columns, band=min(band_in_cache(width, columns, rows_of_group), 8))


@dataclasses.dataclass(frozen=True)
class _Drhs(Float8Kernel):
    """The kernel: a tile's halves are adjacent columns of the output."""

    height: int  # K, the number of rows of the gradient of a group's matrix
    num_groups: int
    adds: bool  # whether the results are added to what the outputs hold

    num_matrices = 1
    rows_have_scales: ClassVar[bool] = False

    def scratch_types(self) -> dict[str, Any]:
        # Bulk copies read swizzled buffers, in place of the array "staged" of the other kernels.
        shape = COMPUTERS, _COPY_BUFFERS, ROWS, self.chunk
        copied = plgpu.SMEM(shape, self.out_dtype, transforms=swizzled(self.out_dtype))
        types = super().scratch_types()
        del types["staged"]
        return types | dict(copied=copied)

    @property
    def rows_of_tiles(self) -> int:
        return self.height // BLOCK

    def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the group of output tile number `index`, and its first row and column there."""
        row, left_edge = self.tile_position(index, self.num_groups * self.rows_of_tiles)
        group, row = quotient_and_rest(row, jnp.int32(self.rows_of_tiles))
        return group, row * BLOCK, left_edge

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        *operands, group_blocks, out = refs
        loader = _Loader(self, scratch, operands, group_blocks)

        def look_up(index):
            # The outputs have the K rows of each group below those of the group before.
            group, row, left_edge = self.place(index)
            return group * self.height + row, left_edge, group_blocks[group, 1]

        total = jnp.int32(self.num_groups * self.rows_of_tiles * self.tile_columns)
        self.walk_tiles(total, look_up, loader, [out], scratch)

    def compute_tile(self, computer, tile, used, feed):
        # The result of `look_up`, above.
        top, left_edge, steps = tile
        row = computer.number * ROWS
        totals, feed = self.accumulate_halves(computer, used, feed, row, 0, self.halves, steps)
        # The copies of the previous tile, which ran meanwhile, must have read the buffers.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, total in enumerate(totals):
            (out,), left = computer.outs, left_edge + half * BLOCK
            buffers = computer.scratch["copied"].at[computer.number]
            num_before = half * BLOCK // self.chunk

            @pl.when(left < self.width)
            def _copy() -> None:
                self.copy_half(total, out, buffers, num_before, top + row, left)

        return used + steps, feed

    def copy_half(
        self, total: jax.Array, out: Any, buffers: Any, num_before: int, top: Any, left: Any
    ) -> None:
        """Starts to copy `total`, a half's 64 rows, to (top, left) of `out`, chunk by chunk."""
        # `num_before` chunks of the tile came before. The chunks take turns at the buffers. Before
        # one is written to, the copy that read it last must be done; later copies may still run.
        rows = pl.ds(top, ROWS)
        for i in range(BLOCK // self.chunk):
            if num_before + i >= _COPY_BUFFERS:
                plgpu.wait_smem_to_gmem(_COPY_BUFFERS - 1, wait_read_only=True)
            buffer = buffers.at[(num_before + i) % _COPY_BUFFERS]
            start = i * self.chunk
            buffer[...] = total[:, start : start + self.chunk].astype(self.out_dtype)
            columns = pl.ds(left + start, self.chunk)
            store_or_add(buffer, out.at[rows, columns], self.adds)


class _Tile(NamedTuple):
    """An output tile, and the blocks of 128 rows over which its sum runs. All are int32."""

    first_block: jax.Array
    # The tile's first row and column in the group's matrix [K, N].
    row: jax.Array
    left_edge: jax.Array
    steps: jax.Array  # the number of blocks


def prefetch(ref: Any, row: jax.Array, column: jax.Array, num_rows: jax.Array) -> None:
    """Starts to bring `num_rows` numbers of a column of `ref` near; at most 128 in a warpgroup."""

    def emit(ref: Value, *scalars: Array) -> None:
        thread, (row, column, num_rows) = mosaic.warpgroup_thread(), map(mosaic.scalar, scalars)
        index = mosaic.add(mosaic.mul(mosaic.add(row, thread), ref.type.shape[1]), column)
        address = mosaic.address_at(mosaic.address(ref), 0, (index, WORD_BYTES))
        with mosaic.when(mosaic.below(thread, num_rows)):
            mosaic.asm("prefetch.global.L1 [$0];", "l,~{memory}", address)

    mosaic.inline(emit, [ref, row, column, num_rows])


@dataclasses.dataclass(frozen=True)
class _Loader:
    """An `operand_ring.Loader`: copies the operand tiles of a block of 128 rows in each step."""

    kernel: _Drhs
    scratch: Any
    operands: Sequence[Any]  # the values and scales of lhs, and then those of grad
    group_blocks: Any

    def find(self, index: jax.Array) -> _Tile:
        group, row, left_edge = self.kernel.place(index)
        first_block, steps = (self.group_blocks[group, i] for i in range(2))
        tile = _Tile(first_block, row, left_edge, steps)
        if self.kernel.has_loader:
            # In more steps, a loader has the time to wait for scales.
            num_blocks = jnp.where(steps <= _FEW_STEPS, steps, 0)
            for scales, edge in zip(self.operands[1::2], (row, left_edge), strict=True):
                prefetch(scales, first_block, lax.div(edge, jnp.int32(BLOCK)), num_blocks)
        return tile

    def steps_of(self, tile: _Tile) -> jax.Array:
        return tile.steps

    def read_ahead(self, tile: _Tile, step: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the scales of a step's blocks: of lhs, and of grad for each half."""
        lhs_scales, grad_scales = self.operands[1::2]
        # The step may be past the last one.
        block = jnp.minimum(tile.first_block + step, lhs_scales.shape[0] - 1)
        lhs_scale = lhs_scales[block, lax.div(tile.row, jnp.int32(BLOCK))]
        scales = self.kernel.block_scales(
            [grad_scales], tile.left_edge, lambda scales, column: scales.at[block, column]
        )
        # A multiplication here would wait for both.
        return lhs_scale, [scale[...] for scale in scales]

    def load(self, tile: _Tile, step: jax.Array, slot: Slot, ahead: Any) -> None:
        inner = pl.ds((tile.first_block + step) * BLOCK, BLOCK)
        columns = self.kernel.columns_of(tile.left_edge)
        lhs_scale, grad_scales = ahead
        self.kernel.fill_stage(
            self.scratch,
            slot,
            left=self.operands[0].at[pl.ds(tile.row, BLOCK), inner],
            left_scales=None,  # multiplied into the block scales
            rights=[self.operands[2].at[columns, inner]],
            block_scales=[scale * lhs_scale for scale in grad_scales],
        )
