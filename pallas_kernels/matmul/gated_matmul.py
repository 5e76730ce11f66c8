"""Grouped matmul with two matrices for each group, and a gating function in the epilogue.

The kernel is a `grouped_matmul.Product` with one left and two right operands. It reads the rows
once, holds a tile of both products in the accumulators side by side, and applies the gating
function to both when it stores the tile. In this diagram, `part` is the number of columns of a tile
that a compute warpgroup computes, and `block_m` the largest number of rows of a tile:

  rows of a tile --> times matrix 0 --> accumulators [part, block_m] \\
                                                                      gating --> hidden
                 --> times matrix 1 --> accumulators [part, block_m] /

If there are biases, the kernel adds them to the products before it applies the gating function.
With `keep` the kernel also stores the two products, which the gradients need.
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

from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul import register_tiles
from pallas_kernels.matmul.chosen_groups import ChosenGroups, output_rows
from pallas_kernels.matmul.grouped_matmul import (
    Computer,
    Product,
    Tiles,
    parts,
    passed_at_once,
)
from pallas_kernels.matmul.kernel import CHUNK, STEP, launch, transposed
from pallas_kernels.matmul.quantized_tiles import Scaled
from pallas_kernels.matmul.row_tiles import table_of
from pallas_kernels.matmul.store import Position


def gated_product(
    lhs: jax.Array,
    rhs: tuple[jax.Array, jax.Array] | tuple[Scaled, Scaled],
    groups: jax.Array | ChosenGroups,
    gating: Elementwise,
    *,
    keep: bool,
    tiles: Tiles,
    num_blocks: int,
    num_waves: int = 1,
    biases: tuple[jax.Array, jax.Array] | None = None,
    zero_unused: bool = True,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes gating(lhs @ rhs[0][group], lhs @ rhs[1][group]) for the rows of each group.

    `group` stands for the group of a row. The products are rounded to lhs's dtype, and converted
    back to float32 for `gating`. With `biases`, biases[i][group] is added to the converted product
    lhs @ rhs[i][group].

    Args:
      lhs: [R, K] bfloat16 or float16; R is a multiple of 8, K of 64.
      rhs: two arrays [L, K, N] of lhs's dtype; N is a multiple of tiles.part. For bfloat16 rows,
        they may instead be the transposes of two such arrays in MXFP4.
      groups: [L] int32, the number of rows of each group, in order; or chosen groups, whose height
        is R and the only one of `tiles.heights`.
      gating: an elementwise function of the two products.
      keep: whether to return the two products, too.
      tiles: tile sizes of an output, and numbers of pipeline stages and of store buffers.
      num_blocks: number of thread blocks that run at the same time.
      num_waves: number of waves of thread blocks; see `kernel.Kernel.walk`.
      biases: None, or two arrays [L, N] floating.
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
        has_biases=biases is not None,
        is_quantized=is_quantized,
        num_waves=num_waves,
    )
    table = table_of(groups, tiles.heights, num_rows, interpreted=bool(interpret))
    *products, hidden = launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        [jax.ShapeDtypeStruct((num_rows, width), lhs.dtype)] * kernel.outputs,
        f"grouped_matmul_gated{'_mxfp4' if is_quantized else ''}",
        interpret,
    )(lhs, *(part for each in rhs for part in parts(each)), *(biases or ()), table)
    return hidden, *products


@dataclasses.dataclass(frozen=True)
class _GatedProduct(Product):
    """The kernel of `gated_product`.

    Its outputs are the two products, if `keep` is set, and last the gated product.
    """

    gating: Elementwise
    keep: bool
    has_biases: bool

    @property
    def num_matrices(self) -> int:
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
            shape = self.tiles.part, passed_at_once(self.tiles.block_m)
            types["passed"] = Passed(plgpu.SMEM(shape, dtype), plgpu.Barrier(), plgpu.Barrier())
        return types

    @property
    def num_biases(self) -> int:
        return self.num_matrices if self.has_biases else 0

    def computer(self, *work: Any, passed: Passed | None = None) -> Computer:
        if passed is None:
            return Computer(self, *work)
        return _OneProduct(self, *work, passed)  # type: ignore[call-arg]

    def results(
        self,
        total: jax.Array,
        biases: Sequence[jax.Array],
        dtype: Any,
        columns: slice,
        rows: slice,
    ) -> tuple[jax.Array, ...]:
        block_m = self.tiles.block_m
        products = tuple(
            total[columns, i * block_m + rows.start : i * block_m + rows.stop].astype(dtype)
            for i in range(self.num_matrices)
        )
        return self.gated([bias[columns] for bias in biases], *products)

    def gated(self, biases: Sequence[jax.Array], *products: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the elements of the outputs for elements of the two products, rounded already.

        `biases` are those of the products' columns, if there are any.
        """
        wide = [product.astype(jnp.float32) for product in products]
        for i, bias in enumerate(biases):
            wide[i] += lax.broadcast_in_dim(bias, wide[i].shape, (0,))
        hidden = self.gating(*wide, interpreted=self.interpreted).astype(products[0].dtype)
        return (*products, hidden) if self.keep else (hidden,)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["product", "full", "answered"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Passed:
    """Shared memory through which compute warpgroups pass parts of their products to each other.

    Outside the kernel's body, the attributes are types of scratch; inside, references to it.

    Attributes:
      product: [64, rows] of the outputs' dtype: some rows of a tile of a product, transposed. On a
        GPU, its elements have the order of `register_tiles.write_registers`.
      full: the barrier at which warpgroup 1 arrives when it has written rows of its product.
      answered: the barrier at which warpgroup 0 arrives when it has read these rows and, if it
        passes rows of its product, too, has written them in their position.
    """

    product: Any
    full: Any
    answered: Any


@dataclasses.dataclass(frozen=True)
class _OneProduct(Computer):
    """The work of a compute warpgroup for tiles of 64 columns: it computes one of the two products.

    A token in decoding has few tiles of 128 columns, on fewer multiprocessors than it takes to use
    the memory's bandwidth. With 64 columns, there are twice as many. Matrices in MXFP4 are decoded
    once for each tile of rows, so tiles of 64 columns by up to 256 rows decode them fewer times.

    The gating function needs both products. Warpgroup 1 passes the first rows of its product
    through shared memory to warpgroup 0, which applies the gating function to these rows, and
    stores the results. If a tile has more than 128 rows, warpgroup 0 passes the other half of the
    rows of its product to warpgroup 1, which does the same with them.
    """

    kernel: _GatedProduct
    passed: Passed

    def run(self) -> None:
        total = self.row_tiles.count * self.kernel.tile_columns
        used = self.kernel.walk(total, self._look_up, self._compute_tile, jnp.int32(0))
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
    def _encoded_parts(self) -> list[tuple[tuple[int, int], tuple[int, Any, Any]]]:
        pieces = range(self.kernel.tiles.step // STEP)
        return [((0, 0), (piece, self.number, 0)) for piece in pieces]

    @property
    def _running(self) -> int:
        return 1 if self.decoder is None else super()._running

    def _compute_tile(
        self, tile: tuple[Position, jax.Array, jax.Array], _: Any, used: jax.Array
    ) -> jax.Array:
        position, height_index, group = tile
        biases = self._load_biases(group, position.left_edge)
        steps = self.kernel.steps
        total = self._sum_up(used, steps, self._shape, height_index)
        product = total.astype(self._dtype)
        count = self.passed.product.shape[1]
        # Mosaic has no arrays without elements, so there is no rest if all rows are passed at once.
        first, rest = product[:, :count], product[:, count:] if self._both_store else product

        @pl.when(self.number == 1)
        def _pass():
            if not self._both_store:
                pl.when(used > 0)(lambda: plgpu.barrier_wait(self.passed.answered))
            self._write(first)
            plgpu.barrier_arrive(self.passed.full)
            if self._both_store:
                plgpu.barrier_wait(self.passed.answered)
                self._store(
                    position._replace(top=position.top + count), biases, self._loaded(), rest
                )

        @pl.when(self.number == 0)
        def _answer():
            plgpu.barrier_wait(self.passed.full)
            other = self._loaded()
            if self._both_store:
                self._write(rest)
            plgpu.barrier_arrive(self.passed.answered)
            self._store(position, biases, first, other)

        return used + steps

    def _store(self, position: Position, biases: Sequence[jax.Array], *products: jax.Array) -> None:
        """Stores the gated product of some rows of a tile, from their two products, transposed.

        `position` is the position in the outputs of a tile that begins with these rows.
        """

        def results(columns: slice, rows: slice) -> tuple[jax.Array, ...]:
            own = [bias[columns] for bias in biases]
            return self.kernel.gated(own, *(product[columns, rows] for product in products))

        count = products[0].shape[1]
        # A chunk that reaches past these rows must not be stored as a whole.
        position = position._replace(end=jnp.minimum(position.end, position.top + count))
        store = dataclasses.replace(self.store, block_m=count)
        store.chunks(0, store.num_chunks, position, results)

    def _write(self, product: jax.Array) -> None:
        if self.kernel.interpreted:
            self.passed.product[...] = product
        else:
            register_tiles.write_registers(self.passed.product, product)

    def _loaded(self) -> jax.Array:
        room = self.passed.product
        return room[...] if self.kernel.interpreted else register_tiles.read_registers(room)

    def _staged_columns(self, stage: jax.Array) -> list[Any]:
        matrix = self.ring.right.at[stage, self.number]
        return [matrix if self.kernel.transpose_rhs else transposed(matrix)]
