"""The collectives over the low-latency protocol: faster for payloads of up to some megabytes.

Each has the operands and results of the function of its name in the modules next to this one, bit
for bit. `fabric.low_latency` has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.fabric import low_latency as ll
from pallas_kernels.fabric import tiles
from pallas_kernels.fabric.low_latency import Channels, Mail
from pallas_kernels.fabric.tiles import Plan, tile_length


def one_shot(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """All-reduce: [S] -> [S]. Every rank sends all of its input to all ranks, and sums."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            mail.post(slot, [tiles.load(channels, x_ref.at[tile])] * len(mail.peers))
        mail.stage(1)
        for slot, tile in enumerate(where):
            total = mail.sum(slot, tiles.load(channels, x_ref.at[tile]))
            tiles.store(channels, out_ref.at[tile], total)

    return _call(body, place, x, x.shape[-1:], channels, plan, 1, "ep_all_reduce_one_shot_ll")


def two_shot(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """All-reduce: [N, S] -> [N, S]. Every rank sums the shard that all send it, sends the sum."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, (tile, total) in enumerate(_sums_of_shard(mail, where, x_ref)):
            mail.post(len(where) + slot, [total] * len(mail.peers))
            tiles.store(channels, out_ref.at[mail.rank, tile], total)
        for slot, tile in enumerate(where):
            totals = mail.collect(len(where) + slot, (tile.size,), x.dtype)
            for peer, total in zip(mail.peers, totals, strict=True):
                tiles.store(channels, out_ref.at[peer, tile], total)

    return _call(body, place, x, x.shape[-2:], channels, plan, 2, "ep_all_reduce_two_shot_ll")


def all_gather(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """Gathers [S] of every rank into [N, S]."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            part = tiles.load(channels, x_ref.at[tile])
            mail.post(slot, [part] * len(mail.peers), exact=True)
            tiles.store(channels, out_ref.at[mail.rank, tile], part)
        mail.stage(1)
        _store_what_arrives(mail, where, x, out_ref)

    shape = (channels.num_ranks, x.shape[-1])
    return _call(body, place, x, shape, channels, plan, 1, "ep_all_gather_ll")


def reduce_scatter(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """Sums shard r of [N, S] at rank r: [S]."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for tile, total in _sums_of_shard(mail, where, x_ref):
            tiles.store(channels, out_ref.at[tile], total)

    return _call(body, place, x, x.shape[-1:], channels, plan, 1, "ep_reduce_scatter_ll")


def all_to_all(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """Sends shard r of [N, S] to rank r; returns [N, S] by source."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            parts = [tiles.load(channels, x_ref.at[peer, tile]) for peer in mail.peers]
            mail.post(slot, parts, exact=True)
            mine = tiles.load(channels, x_ref.at[mail.rank, tile])
            tiles.store(channels, out_ref.at[mail.rank, tile], mine)
        mail.stage(1)
        _store_what_arrives(mail, where, x, out_ref)

    return _call(body, place, x, x.shape[-2:], channels, plan, 1, "ep_all_to_all_ll")


def _sums_of_shard(mail: Mail, where: Sequence[Any], x_ref: Any) -> Iterator[tuple[Any, jax.Array]]:
    """Sends every rank its shard; yields this rank's tiles and their sums as they arrive."""
    for slot, tile in enumerate(where):
        mail.post(slot, [tiles.load(mail.channels, x_ref.at[peer, tile]) for peer in mail.peers])
    mail.stage(1)
    for slot, tile in enumerate(where):
        yield tile, mail.sum(slot, tiles.load(mail.channels, x_ref.at[mail.rank, tile]))


def _store_what_arrives(mail: Mail, where: Sequence[Any], x: jax.Array, out_ref: Any) -> None:
    """Stores each peer's tiles at the index of that peer."""
    for slot, tile in enumerate(where):
        parts = mail.collect(slot, (tile.size,), x.dtype, exact=True)
        for peer, part in zip(mail.peers, parts, strict=True):
            tiles.store(mail.channels, out_ref.at[peer, tile], part)


def _call(
    body: Callable[[Mail, Sequence[Any], Any, Any], None],
    place: jax.Array,
    x: jax.Array,
    shape: tuple[int, ...],
    channels: Channels,
    plan: Plan,
    slots_per_tile: int,
    name: str,
) -> jax.Array:
    """Runs `body` on a worker's mail, its tiles of the last axis, and the refs of x and the result.

    The last axes of x and of `shape`, the result's, have the same size: whole vectors of 16 bytes,
    and at least one tile. Every worker has the same number of tiles: some share the last one, which
    is moved back to end with the axis, and write the same values.
    """
    size, tile = shape[-1], tile_length(x.dtype)
    num_tiles = pl.cdiv(pl.cdiv(size, tile), plan.num_workers)

    def run(mail: Mail, x_ref: Any, out_ref: Any) -> None:
        starts = [(plan.worker() + i * plan.num_workers) * tile for i in range(num_tiles)]
        where = [pl.ds(jnp.minimum(start, size - tile), tile) for start in starts]
        body(mail, where, x_ref, out_ref)

    (out,) = ll.call(
        run,
        place,
        [x],
        [jax.ShapeDtypeStruct(shape, x.dtype)],
        channels=channels,
        plan=plan,
        num_slots=num_tiles * slots_per_tile,
        name=name,
    )
    return out
