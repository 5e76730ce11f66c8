"""All-reduce by two algorithms, each of which gives every rank the same bits.

  one_shot  every rank reads all ranks' inputs and sums them; N - 1 times the input crosses its
            link, in one trip;
  two_shot  every rank sums its own shard of all inputs and writes the sum into all ranks' outputs;
            2 (N - 1) / N times the input crosses its link, half of it reads.

    one_shot   x of every rank ==== link ====> registers --> sum in rank order --> out
    two_shot   x[r] of every rank == link ===> registers of rank r --> sum == link ==> out[r] of all

One-shot and two-shot are the names that vLLM and TensorRT-LLM use for these.
"""

from __future__ import annotations

import jax

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import FlatTiles, TilePlan
from pallas_kernels.fabric import fabric as fb


def one_shot(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sums x [S] floating over ranks in one shot, in float32 and rounded once.

    S is a whole number of vectors of 16 bytes and at least one tile. With stacked ranks, [N, S]
    becomes [N, S].
    """
    (size,) = x.shape[-1:]

    def body(x_ref, out_ref):
        def reduce_tile(_, where):
            total = tiles.sum_of_ranks(fabric, x_ref, where)
            tiles.store(fabric, fabric.mine(out_ref).at[where], total.astype(x.dtype))

        FlatTiles(size, x.dtype, plan).each(reduce_tile)

    out_type = jax.ShapeDtypeStruct((size,), x.dtype)
    return tiles.call(fabric, body, plan, [x], out_type, name="ep_all_reduce_one_shot", reads=True)


def two_shot(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sums x [N, S] floating over ranks in two shots, in float32 and rounded once.

    Rank r sums shard r. S is a whole number of vectors of 16 bytes and at least one tile. With
    stacked ranks, [N, N, S] becomes [N, N, S].
    """
    num_shards, size = x.shape[-2:]

    def body(x_ref, out_ref):
        rank = fabric.rank()

        def reduce_tile(_, where):
            total = tiles.sum_of_ranks(fabric, x_ref, rank, where)
            tiles.put(fabric, out_ref, (rank, where), total.astype(x.dtype))

        FlatTiles(size, x.dtype, plan).each(reduce_tile)

    out_type = jax.ShapeDtypeStruct((num_shards, size), x.dtype)
    name = "ep_all_reduce_two_shot"
    return tiles.call(fabric, body, plan, [x], out_type, name=name, reads=True, puts=True)
