"""Gradients of the matrices of a grouped matmul, from float8 operands on Hopper's tensor cores.

The gradient of a group's matrix is lhs^T @ grad over the rows of the group. The tensor cores
require of float8 operands that the contraction dimension, here the rows, lies innermost. So both
operands are given transposed, with each group's rows padded to blocks of 128:

    lhs [K, P]                   grad [N, P]                       out [L, K, N]
    128 of K x 128 rows  times   2 x [128 of N x 128 rows]    =    2 x [128 of K x 128 of N]

A step multiplies the rows of one block. `pallas_kernels.matmul.float8` describes how a thread block
multiplies and sums; here a block of 128 rows by 128 columns of an operand shares one scale. A tile
is stored by bulk copies while the next one is multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.float8 import HALVES, ROWS, Float8Kernel, Float8Tiles
from pallas_kernels.matmul.kernel import COMPUTERS, launch_into, store_or_add, swizzled
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# The number of parts of a tile for which a compute warpgroup has buffers in shared memory.
_COPY_BUFFERS = 2


def drhs_of_each(
    lhs: TransposedRows,
    grads: Sequence[TransposedRows],
    group_blocks: jax.Array,
    sums: Sequence[jax.Array] | None = None,
    *,
    dtype: Any,
    num_blocks: int,
    num_waves: int = 1,
    tiles: Float8Tiles | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes the gradient of a grouped matmul's matrices: each group's lhs^T @ grad.

    P is the number of rows with zeros as padding, in which each group starts at a multiple of 128.

    Args:
      lhs: the transposed rows that the grouped matmul multiplied: values [K, P], scales
        [P / 128, K / 128].
      grads: one or two gradients of the grouped matmul's output, transposed: values [N, P], scales
        [P / 128, N / 128].
      group_blocks: [L, 2] int32, each group's first block of 128 rows and number of blocks: the
        second result of `row_blocks.row_blocks`.
      sums: None, or for each grad an array [L, K, N] of `dtype`, to which the gradient is added in
        place, rounded to this dtype before and after the addition.
      dtype: the dtype of the results: bfloat16, float16 or float32.
      num_blocks: number of thread blocks that run at the same time.
      num_waves: number of waves of thread blocks; see `kernel.Kernel.walk`.
      tiles: number of pipeline stages and order of tiles, or None for the default.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      For each grad, [L, K, N] of `dtype`. An empty group's matrix is zero. With `sums`, these
      arrays plus the gradients.
    """
    (height, padded), width = lhs.values.shape, grads[0].values.shape[0]
    num_groups = group_blocks.shape[0]
    tiles = dataclasses.replace(tiles or Float8Tiles(), block_n=HALVES * BLOCK // len(grads))
    kernel = _Drhs(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        (padded,),
        jnp.dtype(lhs.values.dtype),
        jnp.dtype(dtype),
        shared_rows=False,
        height=height,
        num_groups=num_groups,
        num_grads=len(grads),
        adds=sums is not None,
        num_waves=num_waves,
    )
    shape = num_groups * height, width
    results = launch_into(
        kernel,
        kernel.scratch_types(),
        [jax.ShapeDtypeStruct(shape, dtype)] * len(grads),
        "grouped_matmul_float8_drhs",
        interpret,
        None if sums is None else [each.reshape(shape) for each in sums],
    )(*lhs, *(array for grad in grads for array in grad), group_blocks)
    return tuple(result.reshape(num_groups, height, width) for result in results)


@dataclasses.dataclass(frozen=True)
class _Drhs(Float8Kernel):
    """The kernel of `drhs_of_each`: an output tile is 128 rows by 2 halves of 128 columns.

    If there is one output, the halves of a tile are adjacent columns of it. If there are two, the
    halves are the same columns of both. The sum runs over the blocks of 128 rows of a group.

    Attributes:
      height: K, the number of rows of the gradient of a group's matrix.
      num_groups: L, the number of groups.
      num_grads: number of arrays `grad`, and of outputs, 1 or 2.
      adds: whether the results are added to what the outputs hold.
    """

    height: int
    num_groups: int
    num_grads: int
    adds: bool

    rows_have_scales: ClassVar[bool] = False

    def scratch_types(self) -> dict[str, Any]:
        # Bulk copies read swizzled buffers, in place of the array "staged" of the other kernels.
        shape = COMPUTERS, _COPY_BUFFERS, ROWS, self.chunk
        copied = plgpu.SMEM(shape, self.out_dtype, transforms=swizzled(self.out_dtype))
        types = super().scratch_types()
        del types["staged"]
        return types | dict(copied=copied)

    @property
    def num_matrices(self) -> int:
        return self.num_grads

    @property
    def rows_of_tiles(self) -> int:
        return self.height // BLOCK

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        num_operands = 2 * (1 + self.num_grads)
        operands, (group_blocks, *outs) = refs[:num_operands], refs[num_operands:]
        total_tiles = jnp.int32(self.num_groups * self.rows_of_tiles * self.tile_columns)

        def look_up(index):
            row, left_edge = self.tile_position(index, self.num_groups * self.rows_of_tiles)
            group = lax.div(row, jnp.int32(self.rows_of_tiles))
            return group, row * BLOCK, left_edge, group_blocks[group, 0], group_blocks[group, 1]

        self.walk_tiles(total_tiles, look_up, operands, outs, scratch)

    def load_tile(self, tile, used, operands, scratch) -> jax.Array:
        group, top, left_edge, first, count = tile
        values, scales, *grads = operands
        rows = pl.ds(pl.multiple_of(top - group * self.height, BLOCK), BLOCK)

        def step(i, used):
            block, columns = first + i, self.columns_of(left_edge)
            inner = pl.ds(block * BLOCK, BLOCK)
            return self.fill_stage(
                scratch,
                used,
                values.at[rows, inner],
                scales.at[block, lax.div(top - group * self.height, jnp.int32(BLOCK))],
                [grad.at[columns, inner] for grad in grads[::2]],
                self.block_scales(
                    grads[1::2], left_edge, lambda scales, column: scales.at[block, column]
                ),
            )

        return lax.fori_loop(0, count, step, used)

    def compute_tile(self, computer, tile, used, outs, scratch) -> jax.Array:
        _, top, left_edge, _, count = tile
        row = pl.multiple_of(computer * ROWS, ROWS)
        totals = self.accumulate_halves(used, row, 0, HALVES, count, scratch)
        # The copies of the previous tile have read the buffers while this tile was multiplied.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, total in enumerate(totals):
            out, left = self.out_of(half, outs, left_edge)
            buffers, first = scratch["copied"].at[computer], half * BLOCK // self.chunk

            @pl.when(left < self.width)
            def _(total=total, out=out, left=left, buffers=buffers, first=first):
                self.copy_half(total, out, buffers, first, top + row, left)

        return used + count

    def copy_half(
        self, total: jax.Array, out: Any, buffers: Any, first: int, top: Any, left: Any
    ) -> None:
        """Copies this warpgroup's part of a half of a tile, `total`, to `out`, from (top, left) on.

        The part is converted to the dtype of the output, and copied `self.chunk` columns at a time
        by bulk copies, which go on while the next tile is multiplied. `buffers` are used in turns,
        and `first` says how many chunks of the tile were copied before.
        """
        rows = pl.ds(pl.multiple_of(top, ROWS), ROWS)
        for i in range(BLOCK // self.chunk):
            if first + i >= _COPY_BUFFERS:
                plgpu.wait_smem_to_gmem(_COPY_BUFFERS - 1, wait_read_only=True)
            buffer = buffers.at[(first + i) % _COPY_BUFFERS]
            start = i * self.chunk
            buffer[...] = total[:, start : start + self.chunk].astype(self.out_dtype)
            columns = pl.ds(pl.multiple_of(left + start, self.chunk), self.chunk)
            destination = out.at[rows, columns]
            store_or_add(buffer, destination, adds=self.adds, interpreted=self.interpreted)

    def out_of(self, half: int, outs: Sequence[Any], left_edge: Any) -> tuple[Any, Any]:
        """Returns the output to which a half of a tile belongs, and the first column of the half.

        `half` is the index of the half, 0 or 1, and `left_edge` the first column of the tile.
        """
        if self.num_grads > 1:
            return outs[half], left_edge
        return outs[0], left_edge + half * BLOCK
