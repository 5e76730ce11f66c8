"""The collectives over the low-latency protocol, for payloads of up to a few megabytes.

They return the bits of the kernels in `with_signals`. A receiver polls the payload itself (see
`fabric.low_latency`), which is faster for small payloads. What is moved and not summed is sent
`exact`, so that NaNs keep their bits. S, the number of elements of an input or of a shard, is a
whole number of 16-byte vectors and at least one tile.
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


def one_shot(x: jax.Array, *, channels: Channels, plan: TilePlan) -> jax.Array:
    """All-reduces x [S] floating; every rank sends its whole input to all ranks."""

    def body(endpoint: Endpoint, slices: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, where in enumerate(slices):
            endpoint.send(index, [tiles.load(x_ref.at[where])] * len(endpoint.peers))
        endpoint.delay_point(1)
        for index, where in enumerate(slices):
            total = endpoint.sum(index, tiles.load(x_ref.at[where]))
            tiles.store(out_ref.at[where], total)

    return _call(body, x, x.shape[-1:], channels, plan, name="ep_all_reduce_one_shot_ll")


def two_shot(x: jax.Array, *, channels: Channels, plan: TilePlan) -> jax.Array:
    """All-reduces x [N, S] floating; rank r sums shard x[r] and sends the sum to all."""

    def body(endpoint: Endpoint, slices: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, (where, total) in enumerate(_sums_of_shard(endpoint, slices, x_ref)):
            endpoint.send(len(slices) + index, [total] * len(endpoint.peers))
            tiles.store(out_ref.at[endpoint.rank, where], total)
        for index, where in enumerate(slices):
            totals = endpoint.receive(len(slices) + index, (where.size,), x.dtype)
            for peer, total in zip(endpoint.peers, totals, strict=True):
                tiles.store(out_ref.at[peer, where], total)

    name = "ep_all_reduce_two_shot_ll"
    return _call(body, x, x.shape[-2:], channels, plan, name=name, sends_per_tile=2)


def all_gather(x: jax.Array, *, channels: Channels, plan: TilePlan) -> jax.Array:
    """Gathers x [S] from all N ranks into [N, S]."""

    def body(endpoint: Endpoint, slices: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, where in enumerate(slices):
            part = tiles.load(x_ref.at[where])
            endpoint.send(index, [part] * len(endpoint.peers), exact=True)
            tiles.store(out_ref.at[endpoint.rank, where], part)
        endpoint.delay_point(1)
        _store_what_arrives(endpoint, slices, x, out_ref)

    shape = (channels.num_ranks, x.shape[-1])
    return _call(body, x, shape, channels, plan, name="ep_all_gather_ll")


def reduce_scatter(x: jax.Array, *, channels: Channels, plan: TilePlan) -> jax.Array:
    """Reduce-scatters x [N, S]: returns the sum of shard x[r] on rank r, [S]."""

    def body(endpoint: Endpoint, slices: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for where, total in _sums_of_shard(endpoint, slices, x_ref):
            tiles.store(out_ref.at[where], total)

    return _call(body, x, x.shape[-1:], channels, plan, name="ep_reduce_scatter_ll")


def all_to_all(x: jax.Array, *, channels: Channels, plan: TilePlan) -> jax.Array:
    """Sends shard x[r] of x [N, S] to rank r; returns what arrives, [N, S] by source rank."""

    def body(endpoint: Endpoint, slices: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for index, where in enumerate(slices):
            parts = [tiles.load(x_ref.at[peer, where]) for peer in endpoint.peers]
            endpoint.send(index, parts, exact=True)
            mine = tiles.load(x_ref.at[endpoint.rank, where])
            tiles.store(out_ref.at[endpoint.rank, where], mine)
        endpoint.delay_point(1)
        _store_what_arrives(endpoint, slices, x, out_ref)

    return _call(body, x, x.shape[-2:], channels, plan, name="ep_all_to_all_ll")


def _sums_of_shard(
    endpoint: Endpoint, slices: Sequence[Any], x_ref: Any
) -> Iterator[tuple[Any, jax.Array]]:
    """Sends shard x[r] to each peer r; yields (slice, sum of this rank's shard in it)."""
    for index, where in enumerate(slices):
        endpoint.send(index, [tiles.load(x_ref.at[peer, where]) for peer in endpoint.peers])
    endpoint.delay_point(1)
    for index, where in enumerate(slices):
        yield where, endpoint.sum(index, tiles.load(x_ref.at[endpoint.rank, where]))


def _store_what_arrives(
    endpoint: Endpoint, slices: Sequence[Any], x: jax.Array, out_ref: Any
) -> None:
    """Receives this warpgroup's tiles, of x's dtype, from each peer; stores to out_ref[peer]."""
    for index, where in enumerate(slices):
        parts = endpoint.receive(index, (where.size,), x.dtype, exact=True)
        for peer, part in zip(endpoint.peers, parts, strict=True):
            tiles.store(out_ref.at[peer, where], part)


def _call(
    body: Callable[[Endpoint, Sequence[Any], Any, Any], None],
    x: jax.Array,
    shape: tuple[int, ...],
    channels: Channels,
    plan: TilePlan,
    *,
    name: str,
    sends_per_tile: int = 1,
) -> jax.Array:
    """Runs the kernel of a collective with inputs [..., S] and results `shape`, [..., S]."""
    # `body` gets the slices of the last axis that its warpgroup handles, one for each tile, and
    # sends each peer `sends_per_tile` tiles for each. The last tile is moved back until it ends
    # with the axis. All warpgroups get equally many tiles: if there are too few, several have the
    # last one, and write the same values to it.
    size, tile = shape[-1], tile_length(x.dtype)
    num_tiles = pl.cdiv(pl.cdiv(size, tile), plan.num_workers)

    def run(endpoint: Endpoint, x_ref: Any, out_ref: Any) -> None:
        starts = [(plan.worker() + i * plan.num_workers) * tile for i in range(num_tiles)]
        slices = [pl.ds(jnp.minimum(start, size - tile), tile) for start in starts]
        body(endpoint, slices, x_ref, out_ref)

    (out,) = call(
        run,
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
      body: called in every warpgroup with its `Endpoint`, with references to the operands and
        results in this rank's memory, and with shared memory by keyword.
      num_sends: the number of tiles that each warpgroup sends to each peer, and receives from it.
    """
    # The protocol has no room for more, and callers refuse it with a message.
    assert plan.num_workers <= MAX_WORKERS, (name, plan)
    assert num_sends <= tiles_of_channel(channels.memory.num_gpus), (name, plan, num_sends)

    def run(mesh_index_ref: Any, *refs: Any, **scratch: Any) -> None:
        mesh_index = channels.mine(mesh_index_ref)[0]  # of this rank's device
        endpoint = Endpoint(channels, mesh_index, plan.worker(), name)
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
    )(channels.mesh_index, *operands)
