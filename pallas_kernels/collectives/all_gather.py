"""All-gather: every rank writes its input directly to the outputs of all ranks.

x of rank r --> registers ==== link ====> out[r] of every rank
"""

from __future__ import annotations

import jax

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import FlatTiles, TilePlan
from pallas_kernels.fabric import fabric as fb


def all_gather(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Gathers x [S] from all N ranks into [N, S]: row r is rank r's x.

    S elements must be a whole number of 16-byte vectors, and at least one tile of `plan`. If all
    ranks are simulated on one device (`fabric.stacked`), x is [N, S] and the result [N, N, S].
    """
    (size,) = x.shape[-1:]

    def body(x_ref, out_ref):
        def put_tile(_, where):
            tile = tiles.load(fabric, fabric.mine(x_ref).at[where])
            tiles.put(fabric, out_ref, (fabric.rank(), where), tile)

        FlatTiles(size, x.dtype, plan).each(put_tile)

    out_type = jax.ShapeDtypeStruct((fabric.num_ranks, size), x.dtype)
    return tiles.call(fabric, body, plan, [x], out_type, name="ep_all_gather", puts=True)
