"""The collectives with signals: kernels that read and write other ranks' memory.

S, the number of elements of an input or of a shard, is a whole number of 16-byte vectors and at
least one tile of the plan. Sums are computed in float32, in rank order, and rounded once to x's
dtype. Arrays of stacked ranks have a leading axis of N.

An all-reduce has two algorithms, named as in vLLM and TensorRT-LLM. Each gives every rank the same
bits.

- one_shot: every rank reads the inputs of all ranks and sums them; a rank receives N - 1 times the
  size of the input, in one trip over the link.
- two_shot: rank r sums shard r of all inputs and writes the sum to the outputs of all ranks; a rank
  receives 2 (N - 1) / N times the size of the input, half by its own reads and half by other ranks'
  writes.

  one_shot        x of every rank ==== link ====> registers --> sum in rank order --> out
  two_shot        x[r] of every rank == link ===> sum in rank r == link ==> out[r] of every rank
  all_gather      x of rank r --> registers ==== link ====> out[r] of every rank
  reduce_scatter  x[r] of every rank == link ===> sum in rank r --> out of rank r
  all_to_all      x[d] of rank s --> registers ==== link ====> out[s] of rank d
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import TilePlan
from pallas_kernels.fabric import fabric as fb


def one_shot(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sums x [S] floating over N ranks by the one-shot algorithm; returns [S] on every rank."""

    def reduce_tile(x_ref: Any, out_ref: Any, _shard: Any, where: Any) -> None:
        total = tiles.sum_of_ranks(fabric, x_ref, where)
        tiles.store(fabric.mine(out_ref).at[where], total.astype(x.dtype))

    name = "ep_all_reduce_one_shot"
    return tiles.call(fabric, plan, x, x.shape[-1:], reduce_tile, name=name, reads=True)


def two_shot(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sums x [N, S] like `one_shot`, by the two-shot algorithm; returns [N, S] on every rank."""

    def reduce_tile(x_ref: Any, out_ref: Any, _shard: Any, where: Any) -> None:
        total = tiles.sum_of_ranks(fabric, x_ref, fabric.rank(), where)
        tiles.put(fabric, out_ref, (fabric.rank(), where), total.astype(x.dtype))

    name = "ep_all_reduce_two_shot"
    return tiles.call(fabric, plan, x, x.shape[-2:], reduce_tile, name=name, reads=True, puts=True)


def all_gather(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Gathers x [S] from all N ranks into [N, S]."""

    def put_tile(x_ref: Any, out_ref: Any, _shard: Any, where: Any) -> None:
        tile = tiles.load(fabric.mine(x_ref).at[where])
        tiles.put(fabric, out_ref, (fabric.rank(), where), tile)

    shape = fabric.num_ranks, x.shape[-1]
    return tiles.call(fabric, plan, x, shape, put_tile, name="ep_all_gather", puts=True)


def reduce_scatter(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sums x [N, S] over N ranks; returns shard r of the sum, [S], on rank r."""

    def reduce_tile(x_ref: Any, out_ref: Any, _shard: Any, where: Any) -> None:
        total = tiles.sum_of_ranks(fabric, x_ref, fabric.rank(), where)
        tiles.store(fabric.mine(out_ref).at[where], total.astype(x.dtype))

    name = "ep_reduce_scatter"
    return tiles.call(fabric, plan, x, x.shape[-1:], reduce_tile, name=name, reads=True)


def all_to_all(x: jax.Array, *, fabric: fb.Fabric, plan: TilePlan) -> jax.Array:
    """Sends shard x[r] of x [N, S] to rank r; returns [N, S] by source rank."""
    num_ranks = x.shape[-2]

    def put_tile(x_ref: Any, out_ref: Any, shard: Any, where: Any) -> None:
        # Ranks begin with different peers, to spread the load over the links.
        peer = lax.rem(fabric.rank() + shard, jnp.int32(num_ranks))
        tile = tiles.load(fabric.mine(x_ref).at[peer, where])
        tiles.store(fabric.peer(out_ref, peer).at[fabric.rank(), where], tile)

    name = "ep_all_to_all"
    shape = x.shape[-2:]
    return tiles.call(fabric, plan, x, shape, put_tile, name=name, num_shards=num_ranks, puts=True)
