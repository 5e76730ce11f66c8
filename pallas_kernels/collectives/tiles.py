"""Cuts flat arrays into tiles and sums them over ranks, for the kernels of the collectives.

A collective's payload is a flat array, cut into tiles that are distributed over the warpgroups of
all blocks. A thread moves 16 bytes with each instruction, directly between registers and any rank's
memory, without shared memory. The link's latency is hidden by many threads with a few loads each.

After `fabric.connect`, which waits for the addresses of all ranks' buffers, a kernel may read the
inputs of all ranks. A block ends only after the block of the same index on every other rank has
made its last access to another rank's memory. So when the kernel has ended, no rank reads this
rank's input or writes to its output any more.
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
from pallas_kernels.fabric.hardware import WARPGROUP, vector_length

# The kind of signal by which a block says that it has made its last access to its peers' memory.
_DONE = 0


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """The choices that a collective's kernel is compiled with, such as its number of blocks.

    Attributes:
      num_blocks: the number of thread blocks per rank.
      num_warpgroups: the number of warpgroups per block.
      num_vectors: the number of 16-byte vectors that each thread holds of a tile. A tile is the
        part of an array that a warpgroup loads, sums or stores at a time.
    """

    num_blocks: int
    num_warpgroups: int = 4
    num_vectors: int = 1

    @property
    def num_workers(self) -> int:
        """The number of workers: the warpgroups of all thread blocks of a rank."""
        return self.num_blocks * self.num_warpgroups

    def worker(self) -> jax.Array:
        """Returns the index of this warpgroup among those of all blocks of the kernel, int32."""
        return lax.axis_index("block") * self.num_warpgroups + lax.axis_index("warpgroup")


def tile_length(dtype: jax.typing.DTypeLike, num_vectors: int = 1) -> int:
    """Returns the number of elements of a tile, which a warpgroup holds in registers at a time.

    `num_vectors` is the number of 16-byte vectors of a tile that each thread holds.
    """
    return WARPGROUP * num_vectors * vector_length(dtype)


@dataclasses.dataclass(frozen=True)
class FlatTiles:
    """Distributes the tiles of `num_shards` shards of equal size over a kernel's warpgroups.

    A shard is a flat array, cut into tiles of the same length. A shard need not be a whole number
    of tiles: its last tile is moved back until it ends with the shard, and may overlap the tile
    before. Both must then store the same values to the overlap. A shard must be a whole number of
    16-byte vectors, and at least one tile.
    """

    # The number of elements of a shard.
    size: int
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
        """Calls `body(shard, where)` for every tile that this warpgroup handles.

        `shard` is the index of the tile's shard, and `where` the tile, as a slice of the shard.
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
    """Loads a tile into registers from `ref`, contiguous, 1D and in any rank's global memory."""
    return vectors.load(fabric, ref, vector_length(ref.dtype))


def store(fabric: fb.Ranks, ref: Any, tile: jax.Array) -> None:
    """Stores a tile from registers to `ref`, contiguous, 1D and in any rank's global memory."""
    vectors.store(fabric, [ref], tile, vector_length(ref.dtype))


def sum_of_ranks(fabric: fb.Fabric, ref: Any, *indices: Any) -> jax.Array:
    """Loads the tile ref[indices] from the memory of every rank, and sums the tiles in rank order.

    `ref` is this rank's reference to a buffer that every rank has. The last of `indices` is a slice
    as long as a tile. Returns the float32 sum in registers, with the same bits on every rank.
    Ranks begin to read at different peers, to spread the load over the links.
    """
    num_ranks = fabric.num_ranks
    stagger = num_ranks > 2 and not fabric.interpret
    first = fabric.rank() if stagger else jnp.int32(0)
    peers = [lax.rem(first + i, jnp.int32(num_ranks)) if stagger else i for i in range(num_ranks)]
    parts = [load(fabric, fabric.peer(ref, peer).at[indices]) for peer in peers]
    if stagger:
        # `parts` begins with the tile of rank `first`. It is rotated to begin with the tile of rank
        # 0, so that all ranks sum in the same order.
        parts = vectors.rotate(fabric, parts, first, vector_length(ref.dtype))
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def put(fabric: fb.Fabric, ref: Any, indices: Any, tile: jax.Array) -> None:
    """Stores a tile from registers to ref[indices] in the global memory of every rank.

    `ref` is this rank's reference to a buffer that every rank has. Each rank begins with its own
    memory, so that ranks do not all write to the same rank at once.
    """
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
    """Runs the kernel of a collective, and returns its result.

    A block ends only after its peers have made their last access to other ranks' memory.

    Args:
      fabric: the ranks, and how they reach each other.
      body: called in every warpgroup with references to the operands and the output.
      plan: the number of blocks, and of warpgroups per block.
      operands: the kernel's inputs.
      out_type: the shape and dtype of the output on one rank.
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
