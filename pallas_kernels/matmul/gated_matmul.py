"""Grouped matmul with two matrices for each group, and a gating function in the epilogue.

The kernel is a `grouped_matmul.Product` with one left and two right operands. It reads the rows
once, and holds a tile of both products in the accumulators side by side:

  rows of a tile --> times matrix 0 --> accumulators [part, block_m] \\
                                                                      gating --> hidden
                 --> times matrix 1 --> accumulators [part, block_m] /

With `keep` the kernel also stores the two products, which the gradients need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul import register_tiles
from pallas_kernels.matmul.chosen_groups import Groups, output_rows
from pallas_kernels.matmul.grouped_matmul import (
    Computer,
    Matrices,
    Product,
    Starts,
    Tiles,
    passed_at_once,
)
from pallas_kernels.matmul.kernel import CHUNK
from pallas_kernels.matmul.operand_ring import Feed, Steps
from pallas_kernels.matmul.store import Position


def gated_matmul(
    lhs: jax.Array,
    rhs: tuple[jax.Array, jax.Array] | tuple[Scaled, Scaled],
    groups: Groups,
    gating: Elementwise,
    *,
    keep: bool,
    tiles: Tiles,
    num_blocks: int,
    num_waves: int = 1,
    biases: tuple[jax.Array, jax.Array] | None = None,
    zero_unused: bool = True,
) -> tuple[jax.Array, ...]:
    """Computes gating(lhs @ rhs[0][group], lhs @ rhs[1][group]) for the rows of each group.

    The products are rounded to lhs's dtype, and converted back to float32 for `gating`. With
    `biases`, biases[i][group] is added to the converted product lhs @ rhs[i][group].

    Args:
      lhs: [R, K] bfloat16 or float16; R is a multiple of 8, K of 64.
      rhs: two arrays [L, K, N] of lhs's dtype; N is a multiple of tiles.part. For bfloat16 rows,
        they may instead be the transposes of two such arrays in MXFP4.
      groups: [L] int32, the number of rows of each group, in order; or chosen groups, whose height
        is R and the only one of `tiles.heights`.
      gating: an elementwise function of the two products.
      keep: whether to return the two products, too.
      biases: None, or two arrays [L, N] floating.
      num_blocks, num_waves, zero_unused: as for `grouped_matmul.grouped_matmul`.

    Returns:
      The gated product, [R, N] of lhs's dtype, or [S * height, N] for S chosen groups; with `keep`
      also the two products, of the same shape.
    """
    num_rows = output_rows(groups, lhs.shape[0])
    is_quantized = isinstance(rhs[0], Scaled)
    format = Matrices
    if is_quantized:
        from pallas_kernels.matmul.mxfp4_matmul import Mxfp4Matrices

        format = Mxfp4Matrices
    matrices = [part for each in rhs for part in format.operands_of(each)]
    kernel = _GatedProduct(
        tiles=tiles,
        num_blocks=num_blocks,
        width=matrices[0].shape[1 if is_quantized else 2],
        depths=(lhs.shape[1],),
        dtype=lhs.dtype,
        matrices=format,
        transpose_rhs=is_quantized,
        zero_unused=zero_unused,
        shared_rows=lhs.shape[0] < num_rows,
        gating=gating,
        keep=keep,
        has_biases=biases is not None,
        num_waves=num_waves,
    )
    operands = [lhs, *matrices, *(biases or ())]
    name = f"grouped_matmul_gated{format.suffix}"
    *products, hidden = kernel.run(operands, groups, num_rows, name)
    return hidden, *products


@dataclasses.dataclass(frozen=True)
class _GatedProduct(Product):
    """The kernel of `gated_matmul`; the gated product is its last output."""

    gating: Elementwise
    keep: bool  # whether the two products are outputs, too
    has_biases: bool

    num_matrices = 2

    @property
    def accumulators(self) -> int:
        return super().accumulators // (2 if self.is_narrow else 1)

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return 3 if self.keep else 1

    @property
    def holds(self) -> bool:
        # With `keep` there are three results to hold, and `_OneProduct` stores a tile at once.
        return not self.keep and not self.is_narrow

    @property
    def is_narrow(self) -> bool:
        """Whether a tile has only 64 columns, so that a compute warpgroup computes one product."""
        return self.tiles.block_n == CHUNK

    def scratch_types(self) -> dict[str, Any]:
        types = super().scratch_types()
        if self.is_narrow:
            shape = self.tiles.part, passed_at_once(self.tiles.block_m)
            types["passed"] = Passed(
                plgpu.SMEM(shape, self.dtype), plgpu.Barrier(), plgpu.Barrier()
            )
        return types

    @property
    def num_biases(self) -> int:  # type: ignore[override]
        return self.num_matrices if self.has_biases else 0

    def computer(self, *work: Any, passed: Passed | None = None) -> Computer:
        if passed is None:
            return Computer(self, *work)
        return _OneProduct(self, *work, passed)  # type: ignore[call-arg]

    def results(
        self, total: jax.Array, biases: Sequence[jax.Array], columns: slice, rows: slice
    ) -> tuple[jax.Array, ...]:
        block_m = self.tiles.block_m
        # The transposed products are side by side, `block_m` rows of the tile each.
        products = tuple(
            total[columns, i * block_m + rows.start : i * block_m + rows.stop].astype(self.dtype)
            for i in range(self.num_matrices)
        )
        return self.gated([bias[columns] for bias in biases], *products)

    def gated(self, biases: Sequence[jax.Array], *products: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the outputs, [columns, rows] like the products; the biases are [columns]."""
        wide = [product.astype(jnp.float32) for product in products]
        for i, bias in enumerate(biases):
            wide[i] += lax.broadcast_in_dim(bias, wide[i].shape, (0,))
        hidden = self.gating(*wide).astype(self.dtype)
        return (*products, hidden) if self.keep else (hidden,)


class Passed(NamedTuple):
    """Shared memory through which compute warpgroups pass parts of their products to each other.

    Outside the kernel's body, the attributes are types of scratch; inside, references to it.
    """

    # [64, rows] of the outputs' dtype: some rows of a tile of a product, transposed. On a GPU, its
    # elements have the order of `register_tiles.write_registers`.
    product: Any
    # Barriers: warpgroup 1 has written rows of its product; warpgroup 0 has read them and, if it
    # passes rows of its product, too, has written these in their place.
    full: Any
    answered: Any


@dataclasses.dataclass(frozen=True)
class _OneProduct(Computer):
    """The work of a compute warpgroup for tiles of 64 columns: it computes one of the two products.

    Warpgroup 1 passes the first rows of its product through shared memory to warpgroup 0, which
    applies the gating function to these rows, and stores the results. If a tile has more than 128
    rows, warpgroup 0 passes the other half of its product's rows to warpgroup 1 in turn.
    """

    kernel: _GatedProduct
    passed: Passed

    def run(self) -> None:
        carry = jnp.int32(0), self._begin()
        used, _ = self.feeder.tiles.walk(self._look_up, self._compute_tile, carry)
        self.feeder.finish(used)
        if not self._both_store:
            # Warpgroup 1 waits until its last rows are read, so that no arrival is left at the end.
            last = (self.number == 1) & (used > 0)
            pl.when(last)(lambda: plgpu.barrier_wait(self.passed.answered))
        self._zero_unused()

    @property
    def _both_store(self) -> bool:
        """Whether both warpgroups store results, each of half of the rows."""
        return self.passed.product.shape[1] < self.kernel.tiles.block_m

    @property
    def _first_column(self) -> Any:
        # Both warpgroups compute all columns of a tile.
        return 0

    @property
    def _starts(self) -> Starts:
        return [(self.number, 0)]

    def _compute_tile(
        self,
        tile: tuple[Position, jax.Array, jax.Array],
        _: Any,
        carry: tuple[jax.Array, Feed | None],
    ) -> tuple[jax.Array, Feed | None]:
        """Computes a product of a tile, passes rows of it, and stores its gated rows, if any."""
        used, feed = carry
        position, height_index, group = tile
        biases = self._load_biases(group, position.left_edge)
        steps = Steps(used, self.kernel.steps, self.feeder, feed)
        total, feed = self.matrices.sum_products(self._starts, height_index, self._shape, steps)
        product = total.astype(self.kernel.dtype)
        # The product is transposed: its columns are rows of the tile.
        num_first = self.passed.product.shape[1]
        first_rows = product[:, :num_first]
        # Mosaic has no arrays without elements. If all rows are passed at once, these are not used.
        other_rows = product[:, num_first:] if self._both_store else product

        @pl.when(self.number == 1)
        def _warpgroup_1():
            # Warpgroup 0 must have read the rows of the tile before, which these overwrite.
            if not self._both_store:
                pl.when(used > 0)(lambda: plgpu.barrier_wait(self.passed.answered))
            register_tiles.write_registers(self.passed.product, first_rows)
            plgpu.barrier_arrive(self.passed.full)
            if self._both_store:
                plgpu.barrier_wait(self.passed.answered)
                product_0 = register_tiles.read_registers(self.passed.product)
                below = position._replace(top=position.top + num_first)
                self._store(below, biases, product_0, other_rows)

        @pl.when(self.number == 0)
        def _warpgroup_0():
            plgpu.barrier_wait(self.passed.full)
            product_1 = register_tiles.read_registers(self.passed.product)
            if self._both_store:
                register_tiles.write_registers(self.passed.product, other_rows)
            plgpu.barrier_arrive(self.passed.answered)
            self._store(position, biases, first_rows, product_1)

        return used + self.kernel.steps, feed

    def _store(self, position: Position, biases: Sequence[jax.Array], *products: jax.Array) -> None:
        """Applies the gating function to rows of both products, and stores them at `position`."""

        def results(columns: slice, rows: slice) -> tuple[jax.Array, ...]:
            chunk_biases = [bias[columns] for bias in biases]
            chunk_products = (product[columns, rows] for product in products)
            return self.kernel.gated(chunk_biases, *chunk_products)

        count = products[0].shape[1]
        # A chunk that reaches past these rows must not be stored as a whole.
        position = position._replace(end=jnp.minimum(position.end, position.top + count))
        store = dataclasses.replace(self.store, block_m=count)
        store.chunks(0, store.num_chunks, position, results)
