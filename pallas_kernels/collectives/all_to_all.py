"""All-to-all: every rank writes each of its shards straight into the output of its rank.

x[d] of rank s --> registers ==== link ====> out[s] of rank d
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import FlatTiles, TilePlan
from pallas_kernels.fabric import fabric as fb


def all_to_all(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sends shard r of x [N, S] to rank r; returns the shards received, [N, S] by source rank.

    With stacked ranks, [N, N, S] becomes [N, N, S].
    """
    num_ranks, size = x.shape[-2:]

    def body(x_ref, out_ref):
        rank = fabric.rank()

        def put_tile(shard, where):
            peer = lax.rem(rank + shard, jnp.int32(num_ranks))  # ranks begin with different peers
            tile = tiles.load(fabric, fabric.mine(x_ref).at[peer, where])
            tiles.store(fabric, fabric.peer(out_ref, peer).at[rank, where], tile)

        FlatTiles(size, x.dtype, plan, num_ranks).each(put_tile)

    out_type = jax.ShapeDtypeStruct((num_ranks, size), x.dtype)
    return tiles.call(fabric, body, plan, [x], out_type, name="ep_all_to_all", puts=True)
