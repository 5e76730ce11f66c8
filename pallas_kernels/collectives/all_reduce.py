"""All-reduce over N ranks by two algorithms, each of which gives every rank the same bits.

  one_shot  every rank reads the inputs of all ranks and sums them; a rank receives N - 1 times the
            size of the input, in one trip over the link;
  two_shot  rank r reads shard r of all inputs, sums it, and writes the sum to the outputs of all
            ranks; a rank receives 2 (N - 1) / N times the size of the input, half by its own reads
            and half by other ranks' writes.

    one_shot   x of every rank ==== link ====> registers --> sum in rank order --> out
    two_shot   x[r] of every rank == link ===> registers of rank r --> sum == link ==> out[r] of all

The names one-shot and two-shot are those of vLLM and TensorRT-LLM.
"""

from __future__ import annotations

import jax

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import FlatTiles, TilePlan
from pallas_kernels.fabric import fabric as fb


def one_shot(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sums x [S] floating over N ranks by the one-shot algorithm; returns [S] on every rank.

    Every rank reads all inputs. The sum is computed in float32 and rounded once to x's dtype. S
    elements must be a whole number of 16-byte vectors, and at least one tile of `plan`. If all
    ranks are simulated on one device (`fabric.stacked`), x and the result are [N, S].
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
    """Sums x [N, S] floating over N ranks by the two-shot algorithm; returns [N, S] on every rank.

    Rank r sums shard x[r] of all ranks, and writes the sum to all ranks. The sum is computed in
    float32 and rounded once to x's dtype. S elements must be a whole number of 16-byte vectors, and
    at least one tile of `plan`. If all ranks are simulated on one device (`fabric.stacked`), x and
    the result are [N, N, S].
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
