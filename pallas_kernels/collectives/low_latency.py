"""The collectives over the low-latency protocol, for payloads of up to a few megabytes.

Each collective has the same name as in `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
and returns the same bits. In those modules ranks wait for each other's signals. In the low-latency
protocol, which `fabric.low_latency` describes, a receiver polls the payload itself. For small
payloads this is faster.

In each collective, `mesh_index` is [1] int32, the index of this GPU in the mesh in row-major order,
`channels` is the protocol's memory, by which ranks reach each other, and `plan` gives the number of
blocks and of warpgroups per block. S, the number of elements of an input or of a shard, is a whole
number of 16-byte vectors and at least one tile, the part of an array that a warpgroup sends at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import TilePlan, tile_length
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.low_latency import Channels, Endpoint
from pallas_kernels.fabric.memory_map import MAX_WORKERS, tiles_of_channel


def one_shot(
    mesh_index: jax.Array, x: jax.Array, *, channels: Channels, plan: TilePlan
) -> jax.Array:
    """All-reduces x over the low-latency protocol; returns the sum on every rank.

    x and the sum are 1D arrays of S floating elements. In one shot, every rank sends its whole
    input to all ranks, and sums all inputs.
    """

    def body(endpoint: Endpoint, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, tile in enumerate(where):
            endpoint.send(index, [tiles.load(channels, x_ref.at[tile])] * len(endpoint.peers))
        endpoint.delay_point(1)
        for index, tile in enumerate(where):
            total = endpoint.sum(index, tiles.load(channels, x_ref.at[tile]))
            tiles.store(channels, out_ref.at[tile], total)

    return _call(body, mesh_index, x, x.shape[-1:], channels, plan, 1, "ep_all_reduce_one_shot_ll")


def two_shot(
    mesh_index: jax.Array, x: jax.Array, *, channels: Channels, plan: TilePlan
) -> jax.Array:
    """All-reduces x over the low-latency protocol; returns the sum on every rank.

    x and the sum are [N, S] floating: a shard of S elements for each of the N ranks. In two shots,
    rank r receives shard x[r] of all ranks, sums these shards, and sends the sum to all ranks.
    """

    def body(endpoint: Endpoint, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, (tile, total) in enumerate(_sums_of_shard(endpoint, where, x_ref)):
            endpoint.send(len(where) + index, [total] * len(endpoint.peers))
            tiles.store(channels, out_ref.at[endpoint.rank, tile], total)
        for index, tile in enumerate(where):
            totals = endpoint.receive(len(where) + index, (tile.size,), x.dtype)
            for peer, total in zip(endpoint.peers, totals, strict=True):
                tiles.store(channels, out_ref.at[peer, tile], total)

    return _call(body, mesh_index, x, x.shape[-2:], channels, plan, 2, "ep_all_reduce_two_shot_ll")


def all_gather(
    mesh_index: jax.Array, x: jax.Array, *, channels: Channels, plan: TilePlan
) -> jax.Array:
    """Gathers x [S] from all N ranks into [N, S]: every rank sends its x to all ranks."""

    def body(endpoint: Endpoint, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, tile in enumerate(where):
            part = tiles.load(channels, x_ref.at[tile])
            endpoint.send(index, [part] * len(endpoint.peers), exact=True)
            tiles.store(channels, out_ref.at[endpoint.rank, tile], part)
        endpoint.delay_point(1)
        _store_what_arrives(endpoint, where, x, out_ref)

    shape = (channels.num_ranks, x.shape[-1])
    return _call(body, mesh_index, x, shape, channels, plan, 1, "ep_all_gather_ll")


def reduce_scatter(
    mesh_index: jax.Array, x: jax.Array, *, channels: Channels, plan: TilePlan
) -> jax.Array:
    """Reduce-scatters x [N, S]: rank r receives shard x[r] of all N ranks; returns the sum, [S]."""

    def body(endpoint: Endpoint, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for tile, total in _sums_of_shard(endpoint, where, x_ref):
            tiles.store(channels, out_ref.at[tile], total)

    return _call(body, mesh_index, x, x.shape[-1:], channels, plan, 1, "ep_reduce_scatter_ll")


def all_to_all(
    mesh_index: jax.Array, x: jax.Array, *, channels: Channels, plan: TilePlan
) -> jax.Array:
    """Sends shard x[r] of x [N, S] to rank r; returns what arrives, [N, S] by source rank."""

    def body(endpoint: Endpoint, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, tile in enumerate(where):
            parts = [tiles.load(channels, x_ref.at[peer, tile]) for peer in endpoint.peers]
            endpoint.send(index, parts, exact=True)
            mine = tiles.load(channels, x_ref.at[endpoint.rank, tile])
            tiles.store(channels, out_ref.at[endpoint.rank, tile], mine)
        endpoint.delay_point(1)
        _store_what_arrives(endpoint, where, x, out_ref)

    return _call(body, mesh_index, x, x.shape[-2:], channels, plan, 1, "ep_all_to_all_ll")


def _sums_of_shard(
    endpoint: Endpoint, where: Sequence[Any], x_ref: Any
) -> Iterator[tuple[Any, jax.Array]]:
    """Sends each peer r the shard x[r], and sums the shards that this rank receives.

    Each warpgroup, called a worker, sends and sums its own tiles. `where` has this worker's tiles,
    as slices of a shard. `x_ref` refers to this rank's x, [N, S]: a shard for each of the N ranks.
    Yields a pair for each tile: the slice, and the sum over ranks of this rank's shard in it.
    """
    for index, tile in enumerate(where):
        endpoint.send(
            index, [tiles.load(endpoint.channels, x_ref.at[peer, tile]) for peer in endpoint.peers]
        )
    endpoint.delay_point(1)
    for index, tile in enumerate(where):
        yield (
            tile,
            endpoint.sum(index, tiles.load(endpoint.channels, x_ref.at[endpoint.rank, tile])),
        )


def _store_what_arrives(
    endpoint: Endpoint, where: Sequence[Any], x: jax.Array, out_ref: Any
) -> None:
    """Receives this worker's tiles from each peer, and stores them to out_ref[peer].

    A worker is a warpgroup, and `where` has its tiles, as slices of the last axis of `out_ref`.
    `out_ref` refers to this rank's output, [N, S], where N is the number of ranks. Only the dtype
    of `x` is used.
    """
    for index, tile in enumerate(where):
        parts = endpoint.receive(index, (tile.size,), x.dtype, exact=True)
        for peer, part in zip(endpoint.peers, parts, strict=True):
            tiles.store(endpoint.channels, out_ref.at[peer, tile], part)


def _call(
    body: Callable[[Endpoint, Sequence[Any], Any, Any], None],
    mesh_index: jax.Array,
    x: jax.Array,
    shape: tuple[int, ...],
    channels: Channels,
    plan: TilePlan,
    sends_per_tile: int,
    name: str,
) -> jax.Array:
    """Runs the kernel of a collective over the low-latency protocol, and returns its result.

    The last axes of x and of the result have the same size, S, and are cut into tiles of the same
    length. Every warpgroup, called a worker, gets the same number of tiles. The last tile is moved
    back until it ends with the axis, so it may overlap the tile before. If there are too few tiles,
    several workers have the last tile, and write the same values to it.

    Args:
      body: called with a worker's `Endpoint`, the worker's tiles as slices of the last axis, and
        references to x and the result.
      mesh_index: [1] int32, the index of this GPU in the mesh in row-major order.
      x: [..., S]; S is a whole number of 16-byte vectors and at least one tile.
      shape: the result's shape, [..., S].
      channels: the protocol's memory, by which ranks reach each other.
      plan: the number of blocks, and of warpgroups per block.
      sends_per_tile: how many tiles `body` sends to each peer for each of the worker's tiles.
      name: the kernel's name in profiles and messages.
    """
    size, tile = shape[-1], tile_length(x.dtype)
    num_tiles = pl.cdiv(pl.cdiv(size, tile), plan.num_workers)

    def run(endpoint: Endpoint, x_ref: Any, out_ref: Any) -> None:
        starts = [(plan.worker() + i * plan.num_workers) * tile for i in range(num_tiles)]
        where = [pl.ds(jnp.minimum(start, size - tile), tile) for start in starts]
        body(endpoint, where, x_ref, out_ref)

    (out,) = call(
        run,
        mesh_index,
        [x],
        [jax.ShapeDtypeStruct(shape, x.dtype)],
        channels=channels,
        plan=plan,
        num_sends=num_tiles * sends_per_tile,
        name=name,
    )
    return out


def call(
    body: Callable[..., None],
    mesh_index: jax.Array,
    operands: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    channels: Channels,
    plan: TilePlan,
    num_sends: int,
    name: str,
    scratch_types: dict[str, Any] | None = None,
) -> list[jax.Array]:
    """Runs a kernel over the low-latency protocol.

    Args:
      body: the kernel's body, called in every warpgroup with the warpgroup's `Endpoint` (its
        connection to its peers), with references to the operands and results in this rank's memory,
        and with shared memory as keyword arguments.
      mesh_index: [1] int32, the index of this GPU in the mesh in row-major order.
      operands: the kernel's inputs.
      out_type: the shape and dtype of each result on one rank.
      channels: the protocol's memory, by which ranks reach each other.
      plan: the number of blocks, and of warpgroups per block.
      num_sends: the number of tiles that `body` sends to each peer in each warpgroup. A warpgroup
        receives as many tiles from each peer.
      name: the kernel's name in profiles and messages.
      scratch_types: the types of the shared memory that `body` takes, by keyword.

    Returns:
      The kernel's results, as `out_type` describes them.

    Raises:
      ValueError: the protocol has no room for so many warpgroups on a rank, or for so many tiles
        from a warpgroup to a peer.
    """
    room = tiles_of_channel(channels.memory.num_gpus)
    if plan.num_workers > MAX_WORKERS or num_sends > room:
        raise ValueError(
            f"the low-latency protocol has room for {MAX_WORKERS} worker warpgroups that send "
            f"{room} tiles each, but {name} with {plan} has {plan.num_workers} that send "
            f"{num_sends}."
        )

    def run(mesh_index_ref: Any, *refs: Any, **scratch: Any) -> None:
        endpoint = Endpoint(channels, channels.mesh_index(mesh_index_ref), plan.worker(), name)
        endpoint.delay_point(0)
        body(endpoint, *(channels.mine(ref) for ref in refs), **scratch)
        endpoint.delay_point(2)
        endpoint.close()

    return fb.kernel(
        channels,
        run,
        name=name,
        num_blocks=plan.num_blocks,
        num_warpgroups=plan.num_warpgroups,
        out_type=out_type,
        scratch_types=scratch_types or {},
    )(mesh_index, *operands)
