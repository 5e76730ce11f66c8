"""Grouped matmul with two matrices for each group, and a gating function in the epilogue.

The kernel is a `grouped_matmul.Product` with one left and two right operands. It reads the rows
once, holds a tile of both products in the accumulators side by side, and applies the gating
function to both when it stores the tile. In this diagram, `part` is the number of columns of a tile
that a compute warpgroup computes, and `block_m` the largest number of rows of a tile:

  rows of a tile --> times matrix 0 --> accumulators [part, block_m] \\
                                                                      gating --> hidden
                 --> times matrix 1 --> accumulators [part, block_m] /

With `keep` the kernel also stores the two products, which the gradients need.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul.chosen_groups import ChosenGroups, output_rows
from pallas_kernels.matmul.grouped_matmul import Product, Tiles
from pallas_kernels.matmul.kernel import launch
from pallas_kernels.matmul.row_tiles import table_of


def gated_product(
    lhs: jax.Array,
    rhs: tuple[jax.Array, jax.Array],
    groups: jax.Array | ChosenGroups,
    gating: Elementwise,
    *,
    keep: bool,
    tiles: Tiles,
    num_blocks: int,
    zero_unused: bool = True,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes gating(lhs @ rhs[0][group], lhs @ rhs[1][group]) for the rows of each group.

    `group` stands for the group of a row. The products are rounded to lhs's dtype, and converted
    back to float32 for `gating`.

    Args:
      lhs: [R, K] bfloat16 or float16; R is a multiple of 8, K of 64.
      rhs: two arrays [L, K, N] of lhs's dtype; N is a multiple of tiles.part.
      groups: [L] int32, the number of rows of each group, in order; or chosen groups, whose height
        is `tiles.heights` and R.
      gating: an elementwise function of the two products.
      keep: whether to return the two products, too.
      tiles: tile sizes of an output, and numbers of pipeline stages and of store buffers.
      num_blocks: number of thread blocks to launch.
      zero_unused: whether rows past the last group become zero; else they are not written.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      The gated product, [R, N] of lhs's dtype, or [S * height, N] for S chosen groups; with `keep`
      also the two products, of the same shape.
    """
    num_rows, depth, width = output_rows(groups, lhs.shape[0]), lhs.shape[1], rhs[0].shape[2]
    kernel = _GatedProduct(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        (depth,),
        transpose_rhs=False,
        zero_unused=zero_unused,
        shared_rows=lhs.shape[0] < num_rows,
        gating=gating,
        keep=keep,
    )
    table = table_of(groups, tiles.heights, num_rows, interpreted=bool(interpret))
    *products, hidden = launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        [jax.ShapeDtypeStruct((num_rows, width), lhs.dtype)] * kernel.outputs,
        "grouped_matmul_gated",
        interpret,
    )(lhs, *rhs, table)
    return hidden, *products


@dataclasses.dataclass(frozen=True)
class _GatedProduct(Product):
    """The kernel of `gated_product`.

    If `keep` is set, its outputs are the two products and then the gated product. Otherwise, the
    gated product is the only output.
    """

    gating: Elementwise
    keep: bool

    @property
    def matrices(self) -> int:
        return 2

    @property
    def outputs(self) -> int:
        return 3 if self.keep else 1

    @property
    def holds(self) -> bool:
        return not self.keep

    def results(
        self, total: jax.Array, dtype: Any, columns: slice, rows: slice
    ) -> tuple[jax.Array, ...]:
        block_m = self.tiles.block_m
        products = tuple(
            total[columns, i * block_m + rows.start : i * block_m + rows.stop].astype(dtype)
            for i in range(self.matrices)
        )
        wide = (product.astype(jnp.float32) for product in products)
        hidden = self.gating(*wide, interpreted=self.interpreted).astype(dtype)
        return (*products, hidden) if self.keep else (hidden,)
