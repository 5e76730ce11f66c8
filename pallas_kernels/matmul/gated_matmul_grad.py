"""Grouped matmul by transposed matrices, and from it the gradient of a gate of two products.

The kernel is `grouped_matmul.product`, whose result is the gradient of what the gating function
gave. It is used where it is, in the accumulators: chunk by chunk, as the tile is stored. Each
computer reads the chunks of the two products, of which the gate was made, ahead into shared memory:
the first ones while the matmuls of the tile run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.plan import LANES, WARP
from pallas_kernels.matmul.grouped_matmul import STORED_ROWS, Product, Tiles, store_plain_rows
from pallas_kernels.matmul.kernel import CHUNK, COMPUTERS, aligned, launch, swizzled
from pallas_kernels.matmul.row_tiles import row_tiles

OUTPUTS = 3
_WARPS = LANES // WARP


def fitting_tiles(heights: tuple[int, ...], band: int = 1, *, ahead: int = 2) -> Tiles:
    """Returns tiles 128 wide with the deepest ring that fits, reading so many chunks `ahead`."""
    chunks = 2 * 2 * CHUNK * STORED_ROWS
    weights_and_sums = 4096  # with their alignment
    return Tiles.fitting(
        heights,
        COMPUTERS * CHUNK,
        band,
        staged=OUTPUTS,
        ahead=ahead,
        ahead_bytes=COMPUTERS * ahead * chunks + weights_and_sums,
    )


def gated_product_grad(
    grad: jax.Array,
    rhs: jax.Array,
    products: tuple[jax.Array, jax.Array],
    weights: jax.Array | None,
    group_sizes: jax.Array,
    gradient: Elementwise,
    *,
    tiles: Tiles,
    num_blocks: int,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Applies `gradient` to two products and to grad @ transposed rhs, by groups.

    `gradient` is an elementwise function of (product, product, grad @ transposed rhs), and of the
    rows' weights if there are any. Its results are the hidden values and the gradients of its other
    arguments, the two products and the weights. It gets the products, and grad @ transposed rhs
    rounded to the operands' dtype, as float32.

    Args:
      grad: [R, K] bfloat16 or float16; R is a multiple of 8, K of 64.
      rhs: [L, N, K] of grad's dtype; N is a multiple of tiles.part.
      products: two [R, N] of grad's dtype.
      weights: [R] float32, or None.
      group_sizes: [L] int32, rows of each group, in order.
      gradient: of 3 arguments and results, or of 4 with weights.
      tiles: tile sizes, and depth of buffers.
      num_blocks: thread blocks to use.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      The hidden values and the gradients of both products, [R, N] of the operands' dtype, and with
      weights their gradient, [R] float32. Rows past the last group are zero, whatever the operands
      hold there.
    """
    num_rows, depth = grad.shape
    width = rhs.shape[1]
    kernel = _GatedProductGrad(
        tiles, num_blocks, bool(interpret), width, (depth,), num_rows, True, gradient
    )
    table = row_tiles(group_sizes, tiles.heights, num_rows, interpreted=bool(interpret))
    out_types = [jax.ShapeDtypeStruct((num_rows, width), grad.dtype)] * OUTPUTS
    if weights is not None:
        out_types.append(jax.ShapeDtypeStruct((width // CHUNK, num_rows), jnp.float32))
    results = launch(
        kernel, kernel.scratch_types(grad.dtype), out_types, "grouped_matmul_gated_grad", interpret
    )(grad, rhs, *products, *(() if weights is None else (weights,)), table)
    if weights is None:
        return tuple(results)
    *results, sums = results
    live = jnp.arange(num_rows, dtype=jnp.int32) < table[-1, 1]
    return (*results, jnp.where(live, jnp.sum(sums, axis=0), 0))


@dataclasses.dataclass(frozen=True)
class _GatedProductGrad(Product):
    """The kernel of `gated_product_grad`."""

    gradient: Elementwise

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiles.num_ahead < 1 or self.tiles.num_staged < OUTPUTS:
            raise ValueError(
                f"at least one chunk is read ahead and {OUTPUTS} are staged, not {self.tiles}."
            )

    @property
    def outputs(self) -> int:
        return OUTPUTS

    @property
    def weighted(self) -> bool:
        return self.gradient.arity > 3

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        ahead = self.tiles.num_ahead
        chunk = STORED_ROWS, CHUNK
        types = super().scratch_types(dtype) | dict(
            chunks=plgpu.SMEM((COMPUTERS, ahead, 2, *chunk), dtype, transforms=swizzled(dtype)),
            # Of a computer's chunk, as its number in the order of `_chunks` says.
            arrived=plgpu.Barrier(
                num_arrivals=3 if self.weighted else 2, num_barriers=COMPUTERS * ahead
            ),
        )
        if self.weighted:
            types |= dict(
                chunk_weights=plgpu.SMEM((COMPUTERS, ahead, STORED_ROWS), jnp.float32),
                # A warp's sums of a chunk; the next chunk has others.
                sums=plgpu.SMEM((COMPUTERS, 2, _WARPS, STORED_ROWS), jnp.float32),
            )
        return types

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        grad, rhs, gate, up, *others = refs
        if self.weighted:
            weights, *others, sums_out = others
            scratch |= dict(weights=weights, sums_out=sums_out)
        super().__call__(grad, rhs, *others, products=(gate, up), **scratch)

    def _chunks(self) -> Iterator[tuple[int, int, int]]:
        """Yields the row, column and height of each chunk of a computer's part of a tile."""
        for row in range(0, self.tiles.block_m, STORED_ROWS):
            for column in range(0, self.tiles.part, CHUNK):
                yield row, column, min(STORED_ROWS, self.tiles.block_m - row)

    def start_tile(
        self,
        top: jax.Array,
        end: jax.Array,
        left_edge: jax.Array,
        computer: jax.Array,
        scratch: Any,
    ) -> None:
        @pl.when(left_edge < self.width)
        def _():
            for number in range(self.tiles.num_ahead):
                self._fetch(number, top, end, left_edge, computer, scratch)

    def _fetch(
        self,
        number: int,
        top: jax.Array,
        end: jax.Array,
        left_edge: jax.Array,
        computer: jax.Array,
        scratch: Any,
    ) -> None:
        """Starts the copies of a chunk of both products, and of its rows' weights.

        A chunk beyond the tile's last row is left out. So is one that there is not.
        """
        chunks = list(self._chunks())
        if number >= len(chunks):
            return
        row, column, height = chunks[number]
        slot = number % self.tiles.num_ahead

        @pl.when(top + row < end)
        def _():
            arrived = scratch["arrived"].at[computer * self.tiles.num_ahead + slot]
            rows = pl.ds(aligned(top + row), height)
            cols = pl.ds(pl.multiple_of(left_edge + column, CHUNK), CHUNK)
            for i, product in enumerate(scratch["products"]):
                room = scratch["chunks"].at[computer, slot, i, :height]
                plgpu.copy_gmem_to_smem(product.at[rows, cols], room, arrived)
            if self.weighted:
                # Of a low chunk as many: a copy is of 128 bytes at least.
                rows = pl.ds(aligned(top + row), STORED_ROWS)
                room = scratch["chunk_weights"].at[computer, slot]
                plgpu.copy_gmem_to_smem(scratch["weights"].at[rows], room, arrived)

    def _store(
        self,
        total: jax.Array,
        outs: Any,
        top: jax.Array,
        begin: jax.Array,
        end: jax.Array,
        left_edge: jax.Array,
        computer: jax.Array,
        scratch: Any,
    ) -> None:
        staged, plain = scratch["staged"].at[computer], scratch["plain"].at[computer]
        ahead, num_staged = self.tiles.num_ahead, self.tiles.num_staged
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, (row, column, height) in enumerate(self._chunks()):
            first = jnp.clip(begin - top - row, 0, height)
            stop = jnp.clip(end - top - row, 0, height)
            chunk = total[column : column + CHUNK, row : row + height]
            place = top + row, left_edge + column

            @pl.when(top + row < end)
            def _chunk(
                number=number, height=height, first=first, stop=stop, chunk=chunk, place=place
            ):
                slot = number % ahead
                plgpu.barrier_wait(scratch["arrived"].at[computer * ahead + slot])
                results, products = self._gradients(chunk, slot, computer, outs[0].dtype, scratch)
                self._sum(products, number % 2, computer, scratch)

                @pl.when(stop - first == height)
                def _whole():
                    used = number * OUTPUTS
                    if used + OUTPUTS > num_staged:  # what was staged there has been read
                        plgpu.wait_smem_to_gmem(num_staged - OUTPUTS, wait_read_only=True)
                    rooms = [staged.at[(used + i) % num_staged, :height] for i in range(OUTPUTS)]
                    for room, values in zip(rooms, results, strict=True):
                        self.stage(room, values)
                    plgpu.commit_smem()
                    at = (
                        pl.ds(aligned(place[0]), height),
                        pl.ds(pl.multiple_of(place[1], CHUNK), CHUNK),
                    )
                    for room, out in zip(rooms, outs, strict=True):
                        plgpu.copy_smem_to_gmem(room, out.at[at])

                @pl.when(stop - first < height)
                def _some():
                    for out, values in zip(outs, results, strict=True):
                        self.store_some(out, values, place, first, stop, plain)
                    plgpu.commit_smem()

                # All threads have read the chunk and stored their sums: they have met.
                self._store_sums(number % 2, place, first, stop, computer, scratch)
                self._fetch(number + ahead, top, end, left_edge, computer, scratch)

    def _gradients(
        self, chunk: jax.Array, slot: int, computer: jax.Array, dtype: Any, scratch: Any
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """Returns a chunk of each output, [columns, rows], and of what the weights' gradient sums.

        The latter is float32, or None without weights.
        """
        height = chunk.shape[1]
        rooms = [scratch["chunks"].at[computer, slot, i, :height] for i in range(2)]
        weights = scratch["chunk_weights"].at[computer, slot] if self.weighted else None
        grad = chunk.astype(dtype)
        if self.interpreted:
            inputs = [*(room[...].T for room in rooms), grad]
        else:
            grad = plgpu.layout_cast(grad, mosaic.TRANSPOSED)
            inputs = [*map(mosaic.load_transposed, rooms), grad]
        wide = [values.astype(jnp.float32) for values in inputs]
        if weights is not None:
            wide.append(
                jnp.broadcast_to(weights.at[:height][...][None], chunk.shape)
                if self.interpreted
                else mosaic.load_of_rows(weights, wide[0])
            )
        results = self.gradient(*wide, interpreted=self.interpreted, layout=mosaic.TRANSPOSED)
        rounded = [values.astype(dtype) for values in results[:OUTPUTS]]
        return rounded, results[OUTPUTS] if self.weighted else None

    def _sum(self, products: Any, parity: int, computer: jax.Array, scratch: Any) -> None:
        """Sums a chunk's columns into shared memory, each warp its own."""
        if not self.weighted:
            return
        sums = scratch["sums"].at[computer, parity]
        if self.interpreted:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            sums.at[0, : products.shape[1]][...] = jnp.sum(products, axis=0)
        else:
            mosaic.sum_columns(sums, products)

    def _store_sums(
        self,
        parity: int,
        place: tuple[jax.Array, jax.Array],
        first: jax.Array,
        stop: jax.Array,
        computer: jax.Array,
        scratch: Any,
    ) -> None:
        """Stores the sums of rows [first, stop) of a chunk."""
        if not self.weighted:
            return
        sums, out = scratch["sums"].at[computer, parity], scratch["sums_out"]
        line = jax.lax.div(place[1], jnp.int32(CHUNK))
        if self.interpreted:
            store_plain_rows(sums.at[0], first, stop, out.at[line], place[0])
        else:
            mosaic.store_sums(out, sums, line, place[0], first, stop)
