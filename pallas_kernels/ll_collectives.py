"""The collectives by LL, which are the faster ones for payloads of up to some megabytes.

Their operands and results are those of the functions of the modules named after each, and their
sums the same bits. A payload that is only moved keeps its bits but for NaNs that are all ones,
whose sign is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import ll, tiles
from pallas_kernels.ll import Channels, Mail
from pallas_kernels.tiles import Plan


def one_shot(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """All-reduce: [S] -> [S]. Every rank sends all of its input to all ranks and sums."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            mail.post(slot, [tiles.load(channels, x_ref.at[tile])] * len(mail.peers))
        mail.stage(1)
        for slot, tile in enumerate(where):
            total = mail.sum(slot, tiles.load(channels, x_ref.at[tile]))
            tiles.store(channels, out_ref.at[tile], total)

    return ll.call(body, place, x, x.shape[-1:], channels, plan, 1, "ep_all_reduce_one_shot_ll")


def two_shot(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """All-reduce: [N, S] -> [N, S]. Every rank sums the shard that all send it, and sends it on."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            mail.post(slot, [tiles.load(channels, x_ref.at[peer, tile]) for peer in mail.peers])
        mail.stage(1)
        for slot, tile in enumerate(where):
            total = mail.sum(slot, tiles.load(channels, x_ref.at[mail.rank, tile]))
            mail.post(len(where) + slot, [total] * len(mail.peers))
            tiles.store(channels, out_ref.at[mail.rank, tile], total)
        for slot, tile in enumerate(where):
            totals = mail.collect(len(where) + slot, (tile.size,), x.dtype)
            for peer, total in zip(mail.peers, totals, strict=True):
                tiles.store(channels, out_ref.at[peer, tile], total)

    return ll.call(body, place, x, x.shape[-2:], channels, plan, 2, "ep_all_reduce_two_shot_ll")


def all_gather(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """[S] -> [N, S]."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            part = tiles.load(channels, x_ref.at[tile])
            mail.post(slot, [part] * len(mail.peers))
            tiles.store(channels, out_ref.at[mail.rank, tile], part)
        mail.stage(1)
        _store_what_arrives(mail, where, x, out_ref)

    shape = (channels.num_ranks, x.shape[-1])
    return ll.call(body, place, x, shape, channels, plan, 1, "ep_all_gather_ll")


def reduce_scatter(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """[N, S] -> [S]."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            mail.post(slot, [tiles.load(channels, x_ref.at[peer, tile]) for peer in mail.peers])
        mail.stage(1)
        for slot, tile in enumerate(where):
            total = mail.sum(slot, tiles.load(channels, x_ref.at[mail.rank, tile]))
            tiles.store(channels, out_ref.at[tile], total)

    return ll.call(body, place, x, x.shape[-1:], channels, plan, 1, "ep_reduce_scatter_ll")


def all_to_all(place: jax.Array, x: jax.Array, *, channels: Channels, plan: Plan) -> jax.Array:
    """[N, S] by destination -> [N, S] by source."""

    def body(mail: Mail, where: Sequence[Any], x_ref: Any, out_ref: Any) -> None:
        for slot, tile in enumerate(where):
            mail.post(slot, [tiles.load(channels, x_ref.at[peer, tile]) for peer in mail.peers])
            mine = tiles.load(channels, x_ref.at[mail.rank, tile])
            tiles.store(channels, out_ref.at[mail.rank, tile], mine)
        mail.stage(1)
        _store_what_arrives(mail, where, x, out_ref)

    return ll.call(body, place, x, x.shape[-2:], channels, plan, 1, "ep_all_to_all_ll")


def _store_what_arrives(mail: Mail, where: Sequence[Any], x: jax.Array, out_ref: Any) -> None:
    """At the place of who has sent it."""
    for slot, tile in enumerate(where):
        parts = mail.collect(slot, (tile.size,), x.dtype)
        for peer, part in zip(mail.peers, parts, strict=True):
            tiles.store(mail.channels, out_ref.at[peer, tile], part)
