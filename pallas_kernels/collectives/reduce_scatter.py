"""Reduce-scatter: rank r reads shard r of every rank's input, and sums the shards.

x[r] of every rank ==== link ====> registers of rank r --> sum in rank order --> out of rank r
"""

from __future__ import annotations

import jax

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import FlatTiles, TilePlan
from pallas_kernels.fabric import fabric as fb


def reduce_scatter(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sums x over N ranks, and returns shard r of the sum, [S], on rank r.

    x is [N, S] floating: N shards of S elements. The sum is computed in float32, in rank order, and
    rounded once to x's dtype. S elements must be a whole number of 16-byte vectors, and at least
    one tile of `plan`. If all ranks are simulated on one device (`fabric.stacked`), x is [N, N, S]
    and the result [N, S].
    """
    (size,) = x.shape[-1:]

    def body(x_ref, out_ref):
        rank = fabric.rank()

        def reduce_tile(_, where):
            total = tiles.sum_of_ranks(fabric, x_ref, rank, where)
            tiles.store(fabric, fabric.mine(out_ref).at[where], total.astype(x.dtype))

        FlatTiles(size, x.dtype, plan).each(reduce_tile)

    out_type = jax.ShapeDtypeStruct((size,), x.dtype)
    return tiles.call(fabric, body, plan, [x], out_type, name="ep_reduce_scatter", reads=True)
