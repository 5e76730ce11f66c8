"""Cuts flat arrays into tiles and sums them over ranks, for the kernels of the collectives.

A thread moves 16 bytes with each instruction, directly between registers and any rank's memory. A
block ends only after the block of the same index on every other rank has made its last access to
another rank's memory. So when the kernel has ended, no rank accesses this rank's arrays any more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import WARPGROUP, vector_length

# The kind of signal that a block sends after its last access to its peers' memory.
_DONE = 0


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """The choices that a collective's kernel is compiled with."""

    num_blocks: int
    num_warpgroups: int = 4
    num_vectors: int = 1  # 16-byte vectors that each thread holds of a tile

    @property
    def num_workers(self) -> int:
        return self.num_blocks * self.num_warpgroups

    def worker(self) -> jax.Array:
        return lax.axis_index("block") * self.num_warpgroups + lax.axis_index("warpgroup")


def tile_length(dtype: jax.typing.DTypeLike, num_vectors: int = 1) -> int:
    """Returns the number of elements of a tile of `num_vectors` 16-byte vectors per thread."""
    return WARPGROUP * num_vectors * vector_length(dtype)


def load(ref: Any) -> jax.Array:
    return vectors.load(ref, vector_length(ref.dtype))


def store(ref: Any, tile: jax.Array) -> None:
    vectors.store([ref], tile, vector_length(ref.dtype))


def sum_of_ranks(fabric: fb.Fabric, ref: Any, *indices: Any) -> jax.Array:
    """Sums the tiles ref[indices] of every rank in rank order, in float32."""
    # With more than two ranks, each reads its own tile first, to spread the load over links.
    num_ranks = fabric.num_ranks
    stagger = num_ranks > 2
    first = fabric.rank() if stagger else jnp.int32(0)
    peers = [lax.rem(first + i, jnp.int32(num_ranks)) if stagger else i for i in range(num_ranks)]
    parts = [load(fabric.peer(ref, peer).at[indices]) for peer in peers]
    if stagger:
        # Begin with the tile of rank 0, so that all ranks sum in the same order.
        parts = vectors.rotate(parts, first, vector_length(ref.dtype))
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def put(fabric: fb.Fabric, ref: Any, indices: Any, tile: jax.Array) -> None:
    """Stores a tile from registers to ref[indices] in the global memory of every rank."""
    # Each rank begins with its own memory, so that ranks do not all write to the same rank at once.
    num_ranks = jnp.int32(fabric.num_ranks)
    peers = [lax.rem(fabric.rank() + i, num_ranks) for i in range(fabric.num_ranks)]
    parts = [fabric.peer(ref, peer).at[indices] for peer in peers]
    vectors.store(parts, tile, vector_length(ref.dtype))


def call(
    fabric: fb.Fabric,
    plan: TilePlan,
    x: jax.Array,
    shape: tuple[int, ...],
    compute: Callable[[Any, Any, Any, Any], None],
    *,
    name: str,
    num_shards: int = 1,
    reads: bool = False,
    puts: bool = False,
) -> jax.Array:
    """Runs the kernel of a collective of x [..., S], with a result of `shape` on each rank.

    `compute(x_ref, out_ref, shard, where)` computes a tile: the slice `where` of shard number
    `shard` of `num_shards`. The last tile of a shard is moved back until it ends with the shard,
    and may overlap the tile before. Both must then store the same values to the overlap. `reads`
    and `puts` are whether other ranks' inputs are read, and their outputs written.
    """
    size, tile = x.shape[-1], tile_length(x.dtype, plan.num_vectors)
    workers, num_tiles = plan.num_workers, num_shards * pl.cdiv(size, tile)

    # A block's warpgroups arrive at the barrier `finished` when they have computed their tiles.
    def run(x_ref: Any, out_ref: Any, *, finished: Any) -> None:
        fabric.delay_point(0)
        fabric.connect()
        worker = plan.worker()

        def compute_tile(i: jax.Array, _: None) -> None:
            # Neighbouring warpgroups take different shards, to spread the load over the links.
            index = worker + i * workers
            shard = lax.rem(index, jnp.int32(num_shards))
            start = lax.div(index, jnp.int32(num_shards)) * tile
            compute(x_ref, out_ref, shard, pl.ds(jnp.minimum(start, size - tile), tile))

        count = lax.div(num_tiles - worker + (workers - 1), jnp.int32(workers))
        lax.fori_loop(0, jnp.maximum(count, 0), compute_tile, None)
        fabric.delay_point(1)
        plgpu.barrier_arrive(finished)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def wait_for_peers() -> None:
            plgpu.barrier_wait(finished)
            fabric.signal(_DONE, 1, release=puts)
            fabric.wait(_DONE, 1, name)
            fabric.delay_point(2)

    (out,) = fb.kernel(
        fabric,
        run,
        name=name,
        num_blocks=plan.num_blocks,
        num_warpgroups=plan.num_warpgroups,
        out_type=[jax.ShapeDtypeStruct(shape, x.dtype)],
        scratch_types=dict(finished=plgpu.Barrier(num_arrivals=plan.num_warpgroups)),
        shared=(*([0] if reads else []), *([1] if puts else [])),
    )(x)
    return out
