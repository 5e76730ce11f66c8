"""Implements the exchange with XLA's collectives, for any backend and any number of hosts.

A dispatch gathers the tokens of all ranks on every rank, and then takes from them the rows of the
local experts' blocks. A combine sums the rows of each (token, rank) locally, sends the sums by an
all-to-all, and adds them in rank order, so that results are deterministic.

The other implementations, `jax_ep.exchange.pallas` and `jax_ep.exchange.two_level`, have the same
five functions: dispatch_by_choices, dispatch_like, combine, rank_dispatch and rank_combine. All
follow the contract in `jax_ep.reference`, so each accepts routes that another one computed.

A `dispatch_like` may be divided into calls for some of the tokens each: `routes.rows` has the rows
of that call's tokens only, `routes.counts` those of the whole dispatch. The first call also writes
the zeros between and after the blocks. A later call takes the result of the call before as `into`,
and changes only the rows of its own tokens. `config.wire` must not quantize rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.dtypes import not_folded
from jax_ep.exchange.interface import Config, Received
from jax_ep.exchange.routes import (
    RankRoutes,
    Routes,
    RowGroups,
    count_choices,
    counts_here,
    receive_rows,
    row_groups,
)
from pallas_kernels.formats import PLAIN, RowFormat


def dispatch_by_choices(
    x: jax.Array, topk_idx: jax.Array, config: Config
) -> tuple[Received, Routes, RowGroups]:
    """Computes the routes of topk_idx [T, K] int32, and sends x [T, H] along them: [R, H]."""
    # One all-gather brings all that the routes are computed from: each rank's choices and counts.
    messages = stack_ranks(message_of_choices(topk_idx, config), config)
    routes, groups = read_messages(messages, topk_idx, config)
    return dispatch_like(x, routes, config), routes, groups


def message_of_choices(topk_idx: jax.Array, config: Config) -> jax.Array:
    """Packs this rank's choices, their positions and its counts, [2 T·K + E] int32."""
    counts, positions = count_choices(topk_idx, config.num_experts)
    return jnp.concatenate([topk_idx.reshape(-1), positions.reshape(-1), counts])


def read_messages(
    messages: jax.Array, topk_idx: jax.Array, config: Config
) -> tuple[Routes, RowGroups]:
    """Computes this rank's routes and blocks from all ranks' messages [N, 2 T·K + E]."""
    rank = config.rank()
    all_topk_idx, all_positions, all_counts = jnp.split(
        messages, [topk_idx.size, 2 * topk_idx.size], axis=1
    )
    recv_counts = counts_here(all_counts, rank)
    groups = row_groups(recv_counts, config.capacity, config.expert_alignment, config.overflow)
    rows = receive_rows(
        all_topk_idx.reshape(-1, *topk_idx.shape),
        all_positions.reshape(-1, *topk_idx.shape),
        recv_counts,
        rank,
        config.capacity,
        config.expert_alignment,
        groups.expert_counts if config.overflow == "fair" else None,
    )
    return Routes(topk_idx, rows, all_counts), groups


def dispatch_like(
    x: jax.Array, routes: Routes, config: Config, into: Received | None = None
) -> Received:
    """Sends x [T, H] to the rows of an earlier dispatch; returns the receive buffer [R, H]."""
    all_bits = stack_ranks(pack(x, config.wire), config)
    all_bits = all_bits.reshape(-1, all_bits.shape[2])  # [N·T, ...]
    # The flat index of each row's choice, [R]; -1 for an empty row.
    indices = row_indices(routes.rows, config.capacity)
    choices = jnp.full_like(indices, -1, shape=(config.capacity,))
    choices = choices.at[indices].set(jnp.arange(indices.size, dtype=jnp.int32), mode="drop")
    # An index of a choice, divided by K, is the index of its token among all ranks' N·T tokens. For
    # an empty row, the quotient is -1, too, and `take_rows` gives zeros.
    tokens = choices // routes.rows.shape[2]
    received = unpack(take_rows(all_bits, tokens), x, config.wire)
    if into is None:
        return received
    # Rows that this call does not send are zeros in `received`, so the OR keeps those of `into`.
    return tuple(
        lax.bitcast_convert_type(pack(before) | pack(part), part.dtype)
        for before, part in zip(into, received, strict=True)
    )


def combine(
    y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
) -> jax.Array:
    """Sums each token's rows of y [R, H], times the weights [T, K] float32; returns [T, H]."""
    rows = routes.rows
    weights = None if topk_weights is None else stack_ranks(topk_weights, config)
    partial_sums = sum_of_choices(y, rows, weights)  # [N, T, H], by the tokens' rank
    partial_sums = partial_sums.astype(config.wire.sum_dtype(config.sum_dtype or y.dtype))
    if config.sum_dtype is not None:
        # "two_level" sets `sum_dtype`. Without the barrier, XLA may repeat the sums for each rank.
        partial_sums = lax.optimization_barrier(partial_sums)
    return _add_ranks(partial_sums, config).astype(config.sum_dtype or y.dtype)


def sum_of_choices(y: jax.Array, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Sums rows of y [R, H], weighted: rows[..., k] times weights[..., k], in the order of k.

    `rows` is [..., K] int32 and `weights` [..., K] or None, for weights of 1. A choice whose row is
    outside of [0, R) adds zero. Returns [..., H] float32.
    """
    if weights is not None:
        # The weight of a choice without a row is set to 0, since NaN * 0 is NaN.
        weights = jnp.where((rows >= 0) & (rows < y.shape[0]), weights, 0)
    total = jnp.zeros((*rows.shape[:-1], y.shape[1]), jnp.float32)
    for choice in range(rows.shape[-1]):
        row = take_rows(y, rows[..., choice]).astype(jnp.float32)
        total += row if weights is None else row * weights[..., choice, None]
    return total


def rank_dispatch(
    x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
) -> tuple[Received, RankRoutes, jax.Array | None]:
    """Sends x [T, H] to the ranks that own an expert of the token: [N, T, H], zeros for others.

    The weights, if given, arrive as [N, T, K], 0 for experts of other ranks.
    """
    all_topk_idx = stack_ranks(topk_idx, config)
    num_local_experts = config.num_experts // all_topk_idx.shape[0]
    local = all_topk_idx - config.rank() * num_local_experts
    here = (local >= 0) & (local < num_local_experts)
    all_bits = stack_ranks(pack(x, config.wire), config)
    sent = jnp.where(jnp.any(here, axis=-1, keepdims=True), all_bits, 0)
    received = unpack(sent, x, config.wire)
    weights = None
    if topk_weights is not None:
        weights = jnp.where(here, stack_ranks(topk_weights, config), 0)
    return received, RankRoutes(topk_idx, jnp.where(here, local, -1)), weights


def rank_combine(y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
    """Sends partial sums y [N, T, H] to the tokens' ranks and adds them there: [T, H]."""
    # Where a token chose no expert of this rank, y may hold anything.
    was_received = jnp.any(routes.local_topk_idx >= 0, axis=-1, keepdims=True)
    return _add_ranks(jnp.where(was_received, y, 0), config).astype(config.sum_dtype or y.dtype)


def return_weights(g: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
    """Sends g [N, T, K], the cotangent of the received weights, to the tokens' ranks: [T, K]."""
    returned = _swap_ranks(jnp.where(routes.local_topk_idx >= 0, g, 0), config)
    # Only the rank of a choice's expert adds a term that is not zero, so the sum is exact.
    return jnp.sum(returned, axis=0)


def _add_ranks(sums: jax.Array, config: Config) -> jax.Array:
    """Sends sums [N, T, H] to the tokens' ranks, and adds them in rank order: [T, H] float32."""
    if not config.wire.quantized:
        # XLA for CPUs fuses more operations if sums are sent as floats, not as uints.
        sums = _swap_ranks(sums, config)
    else:
        sent = _swap_ranks(pack(sums, config.wire), config)
        sums = config.wire.decode(unpack(sent, sums, config.wire), jnp.float32)
    in_rank_order = (sums[rank].astype(jnp.float32) for rank in range(sums.shape[0]))
    return functools.reduce(jnp.add, in_rank_order)


def stack_ranks(x: jax.Array, config: Config) -> jax.Array:
    """Gathers x [...] of all ranks, stacked in rank order: [N, ...]."""
    if _is_alone(config):
        return x[None]
    return lax.all_gather(
        x[None], config.axis_name, axis=0, tiled=True, axis_index_groups=config.ranks_of_hosts
    )


def _swap_ranks(x: jax.Array, config: Config) -> jax.Array:
    """Sends entry r of x [N, ...] to rank r; returns [N, ...] by source rank (an all-to-all)."""
    if _is_alone(config):
        return x
    return lax.all_to_all(
        x, config.axis_name, 0, 0, tiled=True, axis_index_groups=config.ranks_of_hosts
    )


def _is_alone(config: Config) -> bool:
    return config.ranks_per_host == 1 or lax.axis_size(config.axis_name) == 1


def take_rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """Takes the rows of `array` at `index`; negative and out-of-bounds indices give zeros."""
    if array.shape[0] == 0:  # `jnp.take` ignores the shape of `index`
        return jnp.zeros_like(array, shape=(*index.shape, *array.shape[1:]))
    index = jnp.where(index < 0, array.shape[0], index)
    return jnp.take(array, index, axis=0, mode="fill", fill_value=0)


def row_indices(rows: jax.Array, capacity: int) -> jax.Array:
    """Flattens rows [N, T, K]; dropped and other ranks' rows become `capacity`."""
    flat = rows.reshape(-1)
    return jnp.where((flat >= 0) & (flat < capacity), flat, capacity)


def pack(x: jax.Array, wire: RowFormat = PLAIN) -> jax.Array:
    """Packs rows x [..., H] as unsigned integers, which XLA moves unchanged, unlike NaNs."""
    # They are as wide as x's dtype; of quantized rows, uint8: a row's values, then its scales.
    if not wire.quantized:
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    bytes_of_parts = (_to_bytes(part) for part in wire.encode(not_folded(x)))
    return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in bytes_of_parts], axis=-1)


def unpack(sent: jax.Array, x: jax.Array, wire: RowFormat = PLAIN) -> tuple[jax.Array, ...]:
    """Unpacks rows of `pack`: (rows,), or (values, scales); x has the width and the dtype."""
    if not wire.quantized:
        return (lax.bitcast_convert_type(sent, x.dtype),)
    unpacked = []
    start = 0
    for columns, dtype in wire.row_parts(x.shape[-1], x.dtype):
        size = jnp.dtype(dtype).itemsize
        part = sent[..., start : start + columns * size]
        unpacked.append(_from_bytes(part.reshape(*sent.shape[:-1], columns, size), dtype))
        start += columns * size
    return tuple(unpacked)


# A program of `jax.export` with symbolic shapes cannot run a bitcast between numbers of different
# widths. So the two functions below bitcast only between a number and an unsigned integer of the
# same width, and convert that integer from and to bytes by shifts.


def _to_bytes(x: jax.Array) -> jax.Array:
    """Splits each number of x [...] into its `size` bytes, lowest first: [..., size] uint8."""
    size = x.dtype.itemsize
    words = lax.bitcast_convert_type(x, f"uint{8 * size}")
    return jnp.stack([(words >> (8 * i)).astype(jnp.uint8) for i in range(size)], axis=-1)


def _from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
    """Joins the bytes x [..., size] uint8, lowest first, to numbers [...] of `dtype`."""
    size = x.shape[-1]
    words = [x[..., i].astype(f"uint{8 * size}") << (8 * i) for i in range(size)]
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, words), dtype)
