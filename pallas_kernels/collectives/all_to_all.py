"""All-to-all: every rank writes shard d of its input directly to the output of rank d.

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
    """Sends shard x[r] of x [N, S] to rank r; returns the shards received, [N, S] by source rank.

    N is the number of ranks. S elements must be a whole number of 16-byte vectors, and at least one
    tile of `plan`. If all ranks are simulated on one device (`fabric.stacked`), x and the result
    are [N, N, S].
    """
    num_ranks, size = x.shape[-2:]

    def body(x_ref, out_ref):
        rank = fabric.rank()

        def put_tile(shard, where):
            # Ranks begin with different peers, to spread the load over the links.
            peer = lax.rem(rank + shard, jnp.int32(num_ranks))
            tile = tiles.load(fabric, fabric.mine(x_ref).at[peer, where])
            tiles.store(fabric, fabric.peer(out_ref, peer).at[rank, where], tile)

        FlatTiles(size, x.dtype, plan, num_ranks).each(put_tile)

    out_type = jax.ShapeDtypeStruct((num_ranks, size), x.dtype)
    return tiles.call(fabric, body, plan, [x], out_type, name="ep_all_to_all", puts=True)
