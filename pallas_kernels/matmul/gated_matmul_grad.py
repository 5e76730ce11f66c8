"""Grouped matmul by transposed matrices, and from it the gradient of a gate of two products.

The kernel is `grouped_matmul.product`. Its result is the gradient of what the gate gave, which it
does not store: a tile of it stays in registers, and while the next tile is multiplied, the gate's
gradient is computed from it, chunk by chunk. The chunks of the two products are read into shared
memory, some steps ahead, where the chunks of their gradients take their place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul.grouped_matmul import STORED_ROWS, Product, Tiles
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    aligned,
    launch,
    quotient_and_rest,
    swizzled,
)
from pallas_kernels.matmul.row_tiles import row_tiles

OUTPUTS = 3
SETS = 2  # of rooms for a chunk: one is computed on while another one is copied
PIECE = 16  # rows of a chunk that are computed at a time
SUMMED = 16  # columns of which the weights' gradient has a sum each: those of a warp


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
    zero_unused: bool = True,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Applies `gradient` to two products and to grad @ transposed rhs, by groups.

    A prototype, to be measured. `gradient` is of (product, product, grad @ transposed rhs), and of
    the rows' weights if there are any, to the hidden values and the gradients of its other
    arguments. Operands are those of `grouped_matmul.product`; products are [R, N], weights [R].
    """
    num_rows, depth = grad.shape
    width = rhs.shape[1]
    kernel = _GatedProductGrad(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        (depth,),
        num_rows,
        transpose_rhs=True,
        zero_unused=zero_unused,
        gradient=gradient,
    )
    table = row_tiles(group_sizes, tiles.heights, num_rows, interpreted=bool(interpret))
    out_types = [jax.ShapeDtypeStruct((num_rows, width), grad.dtype)] * OUTPUTS
    others = ()
    if weights is not None:
        others = (weights,)
        out_types.append(jax.ShapeDtypeStruct((width // SUMMED, num_rows), jnp.float32))
    results = launch(
        kernel, kernel.scratch_types(grad.dtype), out_types, "grouped_matmul_gated_grad", interpret
    )(grad, rhs, *products, *others, table)
    if weights is None:
        return tuple(results)
    *results, sums = results
    dweights = jnp.sum(sums, axis=0)
    if zero_unused:
        live = jnp.arange(num_rows, dtype=jnp.int32) < table[-1, 1]
        dweights = jnp.where(live, dweights, 0)
    return (*results, dweights)


@dataclasses.dataclass(frozen=True)
class _GatedProductGrad(Product):
    """The kernel of `gated_product_grad`."""

    gradient: Elementwise

    @property
    def outputs(self) -> int:
        return OUTPUTS

    @property
    def weighted(self) -> bool:
        return self.gradient.arity > 3

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        types = super().scratch_types(dtype) | dict(
            arrived=plgpu.Barrier(
                num_arrivals=3 if self.weighted else 2, num_barriers=COMPUTERS * SETS
            )
        )
        if self.weighted:
            types["row_weights"] = plgpu.SMEM((COMPUTERS, SETS, STORED_ROWS), jnp.float32)
            if self.interpreted:
                shape = COMPUTERS, CHUNK // SUMMED, PIECE
                types["plain_sums"] = plgpu.SMEM(shape, jnp.float32)
        return types

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        grad, rhs, gate, up, *others = refs
        if self.weighted:
            weights, *others, sums = others
            scratch |= dict(weights=weights, sums=sums)
        super().__call__(grad, rhs, *others, products=(gate, up), **scratch)

    def own(self, scratch: dict[str, Any], computer: jax.Array) -> dict[str, Any]:
        of_computers = "row_weights", "plain_sums"
        return (
            super().own(scratch, computer)
            | {name: scratch[name].at[computer] for name in of_computers if name in scratch}
            | {name: scratch[name] for name in ("products", "weights", "sums") if name in scratch}
            | dict(arrived=scratch["arrived"], first=computer * SETS)
        )

    @property
    def num_pieces(self) -> int:
        return self.tiles.block_m // PIECE

    def start_storing(self, place: Any, own: Any) -> None:
        self._fetch(jnp.int32(0), place, own)

    def store_some(
        self, step: jax.Array, steps: int, place: Any, held: Any, outs: Any, own: Any
    ) -> None:
        apart = max(steps // self.num_pieces, 1)
        at_a_step = -(-self.num_pieces // steps)
        turn, rest = lax.div(step, jnp.int32(apart)), lax.rem(step, jnp.int32(apart))

        @pl.when(rest == 0)
        def _():
            for i in range(at_a_step):
                piece = turn * at_a_step + i

                @pl.when(piece < self.num_pieces)
                def _(piece=piece):
                    self._store_piece(piece, place, held, outs, own)

    def store_all(self, place: Any, held: Any, outs: Any, own: Any) -> None:
        def one(piece, _):
            self._store_piece(piece, place, held, outs, own)

        lax.fori_loop(0, self.num_pieces, one, None)

    def _fetch(self, chunk: jax.Array, place: Any, own: dict[str, Any]) -> None:
        """Starts the copies of a chunk of both products, and of its rows' weights."""
        top, _, end, left_edge = place
        top += chunk * STORED_ROWS

        @pl.when((top < end) & (left_edge < self.width))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            this = lax.rem(chunk, jnp.int32(SETS))
            arrived = own["arrived"].at[own["first"] + this]
            rows = pl.ds(aligned(top), STORED_ROWS)
            at = rows, pl.ds(pl.multiple_of(left_edge, CHUNK), CHUNK)
            for i, product in enumerate(own["products"]):
                plgpu.copy_gmem_to_smem(
                    product.at[at], own["staged"].at[this * OUTPUTS + i], arrived
                )
            if self.weighted:
                room = own["row_weights"].at[this]
                plgpu.copy_gmem_to_smem(own["weights"].at[rows], room, arrived)

    def _store_piece(
        self, piece: jax.Array, place: Any, held: Any, outs: Any, own: dict[str, Any]
    ) -> None:
        """Computes the results of a piece; stores them, or the chunk that it completes."""
        top, begin, end, left_edge = place
        chunk, number = quotient_and_rest(piece, jnp.int32(STORED_ROWS // PIECE))
        this = lax.rem(chunk, jnp.int32(SETS))
        top += chunk * STORED_ROWS
        whole = (begin <= top) & (top + STORED_ROWS <= end)
        rooms = [own["staged"].at[this * OUTPUTS + i] for i in range(OUTPUTS)]

        @pl.when((top < end) & (left_edge < self.width))
        def _():
            @pl.when(number == 0)
            def _():
                plgpu.barrier_wait(own["arrived"].at[own["first"] + this])

            @pl.when(number == 1)
            def _():
                self._fetch(chunk + 1, place, own)

            results = self._results(piece, number, this, held, rooms, own)
            row = number * PIECE
            first = jnp.clip(begin - top - row, 0, PIECE)
            stop = jnp.clip(end - top - row, 0, PIECE)
            if self.weighted:
                self._store_sums(results[OUTPUTS], top + row, left_edge, first, stop, own)

            @pl.when(whole)
            def _():
                for room, values in zip(rooms, results, strict=False):
                    part = room.at[pl.ds(row, PIECE)]
                    if self.interpreted:
                        part[...] = values.T
                    else:
                        mosaic.store_transposed(part, values, swizzled(values.dtype))

            @pl.when(jnp.logical_not(whole))
            def _():
                for out, values in zip(outs, results, strict=False):
                    self._store_rows(out, values, top + row, left_edge, first, stop, own)

            @pl.when(number == STORED_ROWS // PIECE - 1)
            def _():
                plgpu.commit_smem()  # and all threads have read the chunk

                @pl.when(whole)
                def _():
                    rows = pl.ds(aligned(top), STORED_ROWS)
                    at = rows, pl.ds(pl.multiple_of(left_edge, CHUNK), CHUNK)
                    for room, out in zip(rooms, outs, strict=True):
                        plgpu.copy_smem_to_gmem(room, out.at[at])

    def _results(
        self, piece: Any, number: Any, this: Any, held: Any, rooms: Any, own: Any
    ) -> list[jax.Array]:
        dtype = held[0].dtype
        cuts = [
            lambda row=row: held[0][:, row : row + PIECE]
            for row in range(0, self.tiles.block_m, PIECE)
        ]
        dhidden = lax.switch(piece, cuts)
        rows = pl.ds(pl.multiple_of(number * PIECE, PIECE), PIECE)
        parts = [room.at[rows] for room in rooms[:2]]
        if self.interpreted:
            inputs = [*(part[...].T for part in parts), dhidden]
        else:
            dhidden = plgpu.layout_cast(dhidden, mosaic.TRANSPOSED)
            inputs = [*map(mosaic.load_transposed, parts), dhidden]
        wide = [values.astype(jnp.float32) for values in inputs]
        if self.weighted:
            weights = own["row_weights"].at[this, rows]
            wide.append(
                jnp.broadcast_to(weights[...][None], (CHUNK, PIECE))
                if self.interpreted
                else mosaic.load_of_rows(weights, CHUNK)
            )
        results = self.gradient(*wide, interpreted=self.interpreted, layout=mosaic.TRANSPOSED)
        return [*(values.astype(dtype) for values in results[:OUTPUTS]), *results[OUTPUTS:]]

    def _store_sums(
        self,
        values: jax.Array,
        top: jax.Array,
        left_edge: jax.Array,
        begin: jax.Array,
        end: jax.Array,
        own: dict[str, Any],
    ) -> None:
        """Stores the sums over each `SUMMED` columns of rows [begin, end) of a piece."""
        line = lax.div(left_edge, jnp.int32(SUMMED))
        if not self.interpreted:
            for i in range(0, PIECE, 8):
                part = values[:, i : i + 8]
                mosaic.store_sums(own["sums"], part, line, top + i, begin - i, end - i)
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plain = own["plain_sums"]
        plain[...] = jnp.sum(values.reshape(CHUNK // SUMMED, SUMMED, PIECE), axis=1)
        plgpu.commit_smem()
        for i in range(CHUNK // SUMMED):
            count, height, first = end - begin, PIECE, begin
            while height:

                @pl.when((count & height) != 0)
                def _(height=height, first=first):
                    plgpu.copy_smem_to_gmem(
                        plain.at[i, pl.ds(first, height)],
                        own["sums"].at[line + i, pl.ds(top + first, height)],
                    )

                first += count & height
                height //= 2
