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
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul.chosen_groups import ChosenGroups, output_rows
from pallas_kernels.matmul.grouped_matmul import Computer, Product, Tiles, parts
from pallas_kernels.matmul.kernel import CHUNK, launch, transposed
from pallas_kernels.matmul.quantized_tiles import Scaled
from pallas_kernels.matmul.row_tiles import table_of
from pallas_kernels.matmul.store import Place


def gated_product(
    lhs: jax.Array,
    rhs: tuple[jax.Array, jax.Array] | tuple[Scaled, Scaled],
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
      rhs: two arrays [L, K, N] of lhs's dtype; N is a multiple of tiles.part. For bfloat16 rows,
        they may instead be the transposes of two such arrays in MXFP4.
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
    num_rows, depth = output_rows(groups, lhs.shape[0]), lhs.shape[1]
    is_quantized = isinstance(rhs[0], Scaled)
    width = rhs[0].values.shape[1] if isinstance(rhs[0], Scaled) else rhs[0].shape[2]
    kernel = _GatedProduct(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        (depth,),
        transpose_rhs=is_quantized,
        zero_unused=zero_unused,
        shared_rows=lhs.shape[0] < num_rows,
        gating=gating,
        keep=keep,
        is_quantized=is_quantized,
    )
    table = table_of(groups, tiles.heights, num_rows, interpreted=bool(interpret))
    *products, hidden = launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        [jax.ShapeDtypeStruct((num_rows, width), lhs.dtype)] * kernel.outputs,
        f"grouped_matmul_gated{'_mxfp4' if is_quantized else ''}",
        interpret,
    )(lhs, *(part for each in rhs for part in parts(each)), table)
    return hidden, *products


@dataclasses.dataclass(frozen=True)
class _GatedProduct(Product):
    """The kernel of `gated_product`.

    Its outputs are the two products, if `keep` is set, and last the gated product.
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
        return not self.keep and not self.is_narrow

    @property
    def is_narrow(self) -> bool:
        """Whether a tile has only 64 columns, so that a compute warpgroup computes one product."""
        return self.tiles.block_n == CHUNK

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        types = super().scratch_types(dtype)
        if self.is_narrow:
            shape = self.tiles.part, self.tiles.block_m
            types["passed"] = Passed(plgpu.SMEM(shape, dtype), plgpu.Barrier(), plgpu.Barrier())
        return types

    def computer(self, *work: Any, passed: Passed | None = None) -> Computer:
        if passed is None:
            return Computer(self, *work)
        return _OneProduct(self, *work, passed)  # type: ignore[call-arg]

    def results(
        self, total: jax.Array, dtype: Any, columns: slice, rows: slice
    ) -> tuple[jax.Array, ...]:
        block_m = self.tiles.block_m
        products = tuple(
            total[columns, i * block_m + rows.start : i * block_m + rows.stop].astype(dtype)
            for i in range(self.matrices)
        )
        return self.gated(*products)

    def gated(self, *products: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the elements of the outputs for elements of the two products, rounded already."""
        wide = (product.astype(jnp.float32) for product in products)
        hidden = self.gating(*wide, interpreted=self.interpreted).astype(products[0].dtype)
        return (*products, hidden) if self.keep else (hidden,)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["product", "full", "empty"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Passed:
    """Shared memory through which compute warpgroup 1 passes its product to warpgroup 0.

    Outside the kernel's body, the attributes are types of scratch; inside, references to it.

    Attributes:
      product: [64, block_m] of the outputs' dtype, a tile of a product, transposed.
      full: the barrier at which warpgroup 1 arrives when it has written a product.
      empty: the barrier at which warpgroup 0 arrives when it has read a product.
    """

    product: Any
    full: Any
    empty: Any


@dataclasses.dataclass(frozen=True)
class _OneProduct(Computer):
    """The work of a compute warpgroup for tiles of 64 columns: it computes one of the two products.

    A token in decoding has few tiles of 128 columns, on fewer multiprocessors than it takes to use
    the memory's bandwidth. With 64 columns, there are twice as many.

    Warpgroup 1 passes its product through shared memory to warpgroup 0, which applies the gating
    function and stores the results.
    """

    kernel: _GatedProduct
    passed: Passed

    def run(self) -> None:
        total = self.rows.count * self.kernel.tile_columns
        used = self.kernel.walk(total, self._look_up, self._compute_tile, jnp.int32(0))
        # Warpgroup 0 has arrived for the last product, too. Warpgroup 1 waits for this arrival, so
        # that none is left at the end.
        pl.when((self.number == 1) & (used > 0))(lambda: plgpu.barrier_wait(self.passed.empty))
        self._zero_unused()

    @property
    def _first_column(self) -> Any:
        # Both warpgroups compute all columns of a tile.
        return 0

    @property
    def _encoded_parts(self) -> list[tuple[tuple[int, int], Any, Any]]:
        return [((0, 0), self.number, 0)]

    def _compute_tile(self, tile: tuple[Place, jax.Array], _: Any, used: jax.Array) -> jax.Array:
        place, kind = tile
        steps = self.kernel.steps
        multiply = functools.partial(self._multiply, kind)
        total = self.ring.accumulate(used, steps, self._shape, multiply, matmuls=1)
        product = total.astype(self._dtype)

        @pl.when(self.number == 1)
        def _pass():
            pl.when(used > 0)(lambda: plgpu.barrier_wait(self.passed.empty))
            if self.kernel.interpreted:
                self.passed.product[...] = product
            else:
                mosaic.store_plain(self.passed.product, product)
            plgpu.barrier_arrive(self.passed.full)

        @pl.when(self.number == 0)
        def _store():
            plgpu.barrier_wait(self.passed.full)
            other = self._loaded()
            plgpu.barrier_arrive(self.passed.empty)

            def results(columns: slice, rows: slice) -> tuple[jax.Array, ...]:
                return self.kernel.gated(product[columns, rows], other[columns, rows])

            self.store.chunks(0, self.store.num_chunks, place, results)

        return used + steps

    def _loaded(self) -> jax.Array:
        if self.kernel.interpreted:
            return self.passed.product[...]
        return plgpu.load(self.passed.product, layout=plgpu.Layout.WGMMA, optimized=False)

    def _staged_columns(self, stage: jax.Array) -> list[Any]:
        matrix = self.ring.right.at[stage, self.number]
        return [matrix if self.kernel.transpose_rhs else transposed(matrix)]
