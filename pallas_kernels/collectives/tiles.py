"""Cuts flat arrays into tiles and sums them over ranks, for all kernels of the collectives.

A collective's payload is flat and cut into tiles, which the warpgroups share. A thread moves 16
bytes with each instruction, directly between registers and any rank's memory. Shared memory is not
used; many threads with a few loads each hide the link's latency.

After `fabric.connect`, all ranks' inputs are readable. A block ends only after the block of the
same index on every other rank has made its last access to another rank's memory. When the kernel
ends, no rank reads this rank's input or writes to its output any more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import LANES, vector_length

_DONE = 0  # the kind of signal: this block has made its last access to another rank's memory


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Static choices of one call of a collective's kernel.

    Attributes:
      num_blocks: thread blocks per rank.
      num_warpgroups: warpgroups per block.
      num_vectors: vectors of 16 bytes that each thread holds per rank at a time.
    """

    num_blocks: int
    num_warpgroups: int = 4
    num_vectors: int = 1

    @property
    def num_workers(self) -> int:
        """The number of warpgroups of all blocks; each is a worker."""
        return self.num_blocks * self.num_warpgroups

    def worker(self) -> jax.Array:
        """Returns, within a kernel, the index of this warpgroup among all blocks' warpgroups."""
        return lax.axis_index("block") * self.num_warpgroups + lax.axis_index("warpgroup")


def tile_length(dtype: jax.typing.DTypeLike, num_vectors: int = 1) -> int:
    """Returns the number of elements of a tile, which a warpgroup holds at a time."""
    return LANES * num_vectors * vector_length(dtype)


@dataclasses.dataclass(frozen=True)
class FlatTiles:
    """A flat array, or `num_shards` equal shards of one, cut into tiles for a kernel's warpgroups.

    The last tile of a shard is moved back so that it ends with the shard. It overlaps the previous
    tile, and both write the same values there. A shard may thus be any whole number of vectors of
    16 bytes, and at least one tile.
    """

    size: int  # the number of elements of a shard
    dtype: Any
    plan: TilePlan
    num_shards: int = 1

    def __post_init__(self) -> None:
        if self.size % vector_length(self.dtype) or self.size < self.tile:
            raise ValueError(
                f"a shard must be whole vectors of {vector_length(self.dtype)} elements and at "
                f"least a tile of {self.tile}, but has {self.size}."
            )

    @property
    def tile(self) -> int:
        return tile_length(self.dtype, self.plan.num_vectors)

    def each(self, body: Callable[[Any, Any], None]) -> None:
        """Calls body(shard, slice of that shard) for every tile of this warpgroup.

        Neighbouring warpgroups take different shards, to spread the load over the links.
        """
        workers, worker = self.plan.num_workers, self.plan.worker()
        num_tiles = self.num_shards * pl.cdiv(self.size, self.tile)

        def step(i: jax.Array, _: None) -> None:
            index = worker + i * workers
            shard = lax.rem(index, jnp.int32(self.num_shards))
            start = lax.div(index, jnp.int32(self.num_shards)) * self.tile
            body(shard, pl.ds(jnp.minimum(start, self.size - self.tile), self.tile))

        count = lax.div(num_tiles - worker + (workers - 1), jnp.int32(workers))
        lax.fori_loop(0, jnp.maximum(count, 0), step, None)


def load(fabric: fb.Ranks, ref: Any) -> jax.Array:
    """Loads a tile, a contiguous 1D part of any rank's memory, into registers."""
    return vectors.load(fabric, ref, vector_length(ref.dtype))


def store(fabric: fb.Ranks, ref: Any, tile: jax.Array) -> None:
    """Stores a tile in registers to any rank's memory."""
    vectors.store(fabric, [ref], tile, vector_length(ref.dtype))


def sum_of_ranks(fabric: fb.Fabric, ref: Any, *indices: Any) -> jax.Array:
    """Loads the tile at `indices` of every rank's `ref`, and sums them in float32 and rank order.

    Every rank gets the same bits. Each begins to read at a different peer, to spread the load over
    the links.
    """
    num_ranks = fabric.num_ranks
    stagger = num_ranks > 2 and not fabric.interpret
    first = fabric.rank() if stagger else jnp.int32(0)
    peers = [lax.rem(first + i, jnp.int32(num_ranks)) if stagger else i for i in range(num_ranks)]
    parts = [load(fabric, fabric.peer(ref, peer).at[indices]) for peer in peers]
    if stagger:  # rank r's part is at (r - first) % N
        parts = vectors.rotate(fabric, parts, first, vector_length(ref.dtype))
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def put(fabric: fb.Fabric, ref: Any, indices: Any, tile: jax.Array) -> None:
    """Stores a tile at `indices` of every rank's `ref`; each rank begins with itself."""
    num_ranks = jnp.int32(fabric.num_ranks)
    peers = [lax.rem(fabric.rank() + i, num_ranks) for i in range(fabric.num_ranks)]
    parts = [fabric.peer(ref, peer).at[indices] for peer in peers]
    vectors.store(fabric, parts, tile, vector_length(ref.dtype))


def call(
    fabric: fb.Fabric,
    body: Callable[..., None],
    plan: TilePlan,
    operands: Sequence[jax.Array],
    out_type: jax.ShapeDtypeStruct,
    *,
    name: str,
    reads: bool = False,
    puts: bool = False,
) -> jax.Array:
    """Runs a collective's kernel; a block ends when its peers have ended their accesses.

    Args:
      fabric: the ranks, and how they reach each other.
      body: called with references to the operands and the output.
      plan: number of blocks, and of warpgroups per block.
      operands: the kernel's inputs.
      out_type: shape and dtype of the output on one rank.
      name: the kernel's name in profiles and messages.
      reads: whether the body reads other ranks' inputs.
      puts: whether the body writes to other ranks' outputs.
    """

    def run(*refs: Any, finished: Any) -> None:
        fabric.delay_point(0)
        fabric.connect()
        body(*refs)
        fabric.delay_point(1)
        plgpu.barrier_arrive(finished)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
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
        out_type=[out_type],
        scratch_types=dict(finished=plgpu.Barrier(num_arrivals=plan.num_warpgroups)),
        shared=(*range(len(operands) if reads else 0), *([len(operands)] if puts else [])),
    )(*operands)
    return out
