"""All-gather: every rank writes its part straight into all ranks' outputs.

x of rank r --> registers ==== link ====> out[r] of every rank
"""

from __future__ import annotations

import jax

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import FlatTiles, TilePlan
from pallas_kernels.fabric import fabric as fb


def all_gather(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Gathers x [S] from every rank into [N, S]: entry r is rank r's x.

    With stacked ranks, [N, S] becomes [N, N, S].
    """
    (size,) = x.shape[-1:]

    def body(x_ref, out_ref):
        def put_tile(_, where):
            tile = tiles.load(fabric, fabric.mine(x_ref).at[where])
            tiles.put(fabric, out_ref, (fabric.rank(), where), tile)

        FlatTiles(size, x.dtype, plan).each(put_tile)

    out_type = jax.ShapeDtypeStruct((fabric.num_ranks, size), x.dtype)
    return tiles.call(fabric, body, plan, [x], out_type, name="ep_all_gather", puts=True)
