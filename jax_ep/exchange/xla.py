"""Implements the exchange with XLA's collectives, for any backend and any number of hosts.

A dispatch gathers the tokens of all ranks on every rank, and then takes from them the rows of the
local experts' blocks. A combine sums the rows of each (token, rank) locally, sends the sums by an
all-to-all, and adds them in rank order, so that results are deterministic.

The functions of `jax_ep.exchange.interface.Exchange` come first; `Exchange` documents their shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import quantization
from jax_ep.exchange.call_sizes import CallSizes
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
from pallas_kernels.fabric.hardware import WARPGROUP, WORD_BYTES, align_up


def dispatch(
    x: jax.Array, topk_idx: jax.Array, config: Config
) -> tuple[Received, Routes, RowGroups]:
    """Computes each choice's destination row and sends x [T, H] there; see `Exchange.dispatch`."""
    # One all-gather brings all that the routes are computed from: each rank's choices and counts.
    messages = stack_ranks(message_of_choices(topk_idx, config), config)
    routes, groups = read_messages(messages, topk_idx, config)
    return dispatch_like(x, routes, config), routes, groups


def message_of_choices(topk_idx: jax.Array, config: Config) -> jax.Array:
    """Packs this rank's choices, positions and counts for an all-gather: [2 T·K + E] int32.

    The position of a choice is the number of earlier choices of the same expert on this rank; the
    counts are this rank's choices of each expert.
    """
    counts, positions = count_choices(topk_idx, config.num_experts)
    return jnp.concatenate([topk_idx.reshape(-1), positions.reshape(-1), counts])


def read_messages(
    messages: jax.Array, topk_idx: jax.Array, config: Config
) -> tuple[Routes, RowGroups]:
    """Computes this rank's routes, and its experts' blocks of rows, from the messages of all ranks.

    `messages` [N, 2 T·K + E] int32 are the gathered results of `message_of_choices`. topk_idx [T,
    K] are the choices of this rank.
    """
    rank = config.rank()
    all_topk_idx, all_positions, all_counts = jnp.split(
        messages, [topk_idx.size, 2 * topk_idx.size], axis=1
    )
    recv_counts = counts_here(all_counts, rank)
    rows = receive_rows(
        all_topk_idx.reshape(-1, *topk_idx.shape),
        all_positions.reshape(-1, *topk_idx.shape),
        recv_counts,
        rank,
        config.expert_alignment,
        fair_capacity=config.capacity if config.overflow == "fair" else None,
    )
    routes = Routes(topk_idx, rows, all_counts)
    groups = row_groups(recv_counts, config.capacity, config.expert_alignment, config.overflow)
    return routes, groups


def dispatch_like(
    x: jax.Array, routes: Routes, config: Config, into: Received | None = None
) -> Received:
    """Sends x [T, H] to the rows of an earlier dispatch; see `ExchangeInParts.dispatch_like`."""
    all_bits = _gather_ranks(quantization.bits(x, config.wire), config)
    choices = _choice_of_row(routes.rows, config.capacity)
    sent = _fill(all_bits, choices // routes.rows.shape[2])
    received = quantization.parts(sent, x, config.wire)
    return received if into is None else tuple(map(_union, into, received))


def combine(
    y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
) -> jax.Array:
    """Sums each token's rows of y [R, H] and sends the sums back; see `Exchange.combine`."""
    rows = routes.rows
    weights = None if topk_weights is None else stack_ranks(topk_weights, config)
    partial_sum = sum_of_choices(y, rows, weights)
    partial_sum = partial_sum.astype(config.wire.sum_dtype(config.sum_dtype or y.dtype))
    if config.sum_dtype is not None:
        # Without the barrier, XLA may compute the partial sums again for each rank.
        partial_sum = lax.optimization_barrier(partial_sum)
    return _add_ranks(partial_sum, config).astype(config.sum_dtype or y.dtype)


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
        row = _fill(y, rows[..., choice]).astype(jnp.float32)
        total += row if weights is None else row * weights[..., choice, None]
    return total


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    routes: Routes,
    config: Config,
    into: jax.Array | None = None,
    *,
    send: Callable[[jax.Array, Routes, Config], Received] = dispatch_like,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of a weighted combine; see `ExchangeInParts.combine_grad`.

    `send` is the function that sends g to the receive-buffer rows: this module's `dispatch_like`,
    or that of the Pallas kernels.
    """
    g_rows = config.wire.decode(send(g, routes, config), g.dtype)
    stack, swap = (functools.partial(f, config=config) for f in (stack_ranks, _swap_ranks))
    row_weights = choices_to_rows(topk_weights, routes, stack=stack, capacity=y.shape[0])
    g_rows = g_rows.astype(jnp.float32)
    dy = (g_rows * row_weights[:, None]).astype(y.dtype)
    dy = dy if into is None else _union(into, dy)
    products = jnp.sum(g_rows * y.astype(jnp.float32), axis=1)
    return dy, rows_to_choices(products, routes, swap=swap)


def choices_to_rows(
    values: jax.Array,
    routes: Routes,
    *,
    stack: Callable[[jax.Array], jax.Array],
    capacity: int,
) -> jax.Array:
    """Sends values [T, K], one per choice, to the receive-buffer rows of the choices.

    Returns [R], one value per row; rows without a choice are zero. `capacity` is R. `stack` is an
    all-gather: it maps an array [...] on each rank to the stacked arrays of all ranks, [N, ...].
    """
    zeros, all_values = jnp.zeros_like(values, shape=(capacity,)), stack(values).reshape(-1)
    indices = _row_indices(routes.rows, capacity)
    return zeros.at[indices].set(all_values, mode="drop", unique_indices=True)


def rows_to_choices(
    values: jax.Array, routes: Routes, *, swap: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Sends values [R], one per receive-buffer row, back to the (token, choice) of each row.

    Returns [T, K]; choices without a row are zero. This function is the transpose of
    `choices_to_rows`. `swap` is an all-to-all: it sends entry r of an array [N, ...] to rank r, and
    returns the received entries, [N, ...], by source rank.
    """
    by_rank = swap(_fill(values, routes.rows))
    # A choice has a row on at most one rank. The other ranks add zeros, so the sum is exact.
    return jnp.sum(by_rank, axis=0)


def rank_dispatch(
    x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
) -> tuple[Received, RankRoutes, jax.Array | None]:
    """Sends tokens x [T, H] to their experts' ranks; see `Exchange.rank_dispatch`."""
    num_experts = config.num_experts
    all_topk_idx = stack_ranks(topk_idx, config)
    num_local_experts = num_experts // all_topk_idx.shape[0]
    local = all_topk_idx - config.rank() * num_local_experts
    # Ids outside [0, E) are excluded separately, since `local` may overflow to a local expert's id.
    here = (all_topk_idx >= 0) & (all_topk_idx < num_experts)
    here &= (local >= 0) & (local < num_local_experts)
    all_bits = stack_ranks(quantization.bits(x, config.wire), config)
    sent = jnp.where(jnp.any(here, axis=-1, keepdims=True), all_bits, 0)
    received = quantization.parts(sent, x, config.wire)
    weights = None
    if topk_weights is not None:
        weights = jnp.where(here, stack_ranks(topk_weights, config), 0)
    return received, RankRoutes(topk_idx, jnp.where(here, local, -1)), weights


def rank_combine(y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
    """Sends sums y [N, T, H] to the tokens' ranks and adds them; see `Exchange.rank_combine`."""
    sent = jnp.any(routes.local_topk_idx >= 0, axis=-1, keepdims=True)
    return _add_ranks(jnp.where(sent, y, 0), config).astype(config.sum_dtype or y.dtype)


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
        sent = _swap_ranks(quantization.bits(sums, config.wire), config)
        sums = config.wire.decode(quantization.parts(sent, sums, config.wire), jnp.float32)
    in_rank_order = (sums[rank].astype(jnp.float32) for rank in range(sums.shape[0]))
    return functools.reduce(jnp.add, in_rank_order)


def _gather_ranks(x: jax.Array, config: Config) -> jax.Array:
    """Gathers x [T, ...] of all ranks, concatenated in rank order: [N * T, ...]."""
    if _is_alone(config):
        return x
    return lax.all_gather(
        x, config.axis_name, axis=0, tiled=True, axis_index_groups=config.ranks_of_hosts
    )


def stack_ranks(x: jax.Array, config: Config) -> jax.Array:
    """Gathers x [...] of all ranks, stacked in rank order: [N, ...]."""
    return _gather_ranks(x[None], config)


def _swap_ranks(x: jax.Array, config: Config) -> jax.Array:
    """Sends entry r of x [N, ...] to rank r; returns [N, ...] by source rank (an all-to-all)."""
    if _is_alone(config):
        return x
    return lax.all_to_all(
        x, config.axis_name, 0, 0, tiled=True, axis_index_groups=config.ranks_of_hosts
    )


def _is_alone(config: Config) -> bool:
    """Returns whether each rank exchanges rows with itself only, and needs no collective."""
    return config.ranks_per_host == 1 or lax.axis_size(config.axis_name) == 1


def _fill(array: jax.Array, index: jax.Array) -> jax.Array:
    """Takes the rows of `array` at `index`; negative and out-of-bounds indices give zeros."""
    index = jnp.where(index < 0, array.shape[0], index)
    return jnp.take(array, index, axis=0, mode="fill", fill_value=0)


def _union(some: jax.Array, others: jax.Array) -> jax.Array:
    """Merges two arrays by the OR of their bits; at most one may be nonzero at each position."""
    bits = quantization.bits(some) | quantization.bits(others)
    return lax.bitcast_convert_type(bits, some.dtype)


def _choice_of_row(rows: jax.Array, capacity: int) -> jax.Array:
    """Returns the index s·T·K + t·K + k of each row's choice, [R] int32; -1 for an empty row.

    The index stands for choice k of token t of rank s. `rows` is [N, T, K] int32, the row number of
    each choice.
    """
    indices = _row_indices(rows, capacity)
    nothing = jnp.full_like(indices, -1, shape=(capacity,))
    return nothing.at[indices].set(jnp.arange(indices.size, dtype=jnp.int32), mode="drop")


def _row_indices(rows: jax.Array, capacity: int) -> jax.Array:
    """Returns the index for each choice in a scatter from choices to receive-buffer rows, [N·T·K].

    `rows` is [N, T, K] int32, the row number of each choice. A choice has no row if this number is
    outside [0, capacity). Its index is then `capacity`, so that a scatter to `capacity` rows with
    mode="drop" skips it.
    """
    flat = rows.reshape(-1)
    return jnp.where((flat >= 0) & (flat < capacity), flat, capacity)


# --------------------------------------------------------------- sizes of the buffers of a call


def workspace(operation: str, sizes: CallSizes) -> dict[str, int]:
    """Returns the arrays that the XLA program of one call holds as buffers: name -> bytes per rank.

    `operation` is one of `jax_ep.exchange.memory.OPERATIONS` that communicates between ranks.
    """
    if operation in ("combine", "dispatch_grad"):
        return _combine_workspace(sizes, weighted=operation == "combine")
    of_operation = {
        "dispatch": _dispatch_workspace,
        "dispatch_like": _dispatch_like_workspace,
        "combine_grad": _combine_grad_workspace,
    }
    return of_operation[operation](sizes)


def _dispatch_workspace(sizes: CallSizes) -> dict[str, int]:
    choices = sizes.num_tokens * sizes.top_k
    if sizes.by_rank:
        return {
            "gathered tokens": sizes.gathered(sizes.sent_rows(sizes.pairs)),
            "quantized rows": sizes.quantized_rows(sizes.num_tokens),
            "gathered choices": sizes.gathered(WORD_BYTES * sizes.pairs * sizes.top_k),
            "routes": sizes.routes(),
        }
    counts = sizes.num_ranks * (2 * choices + sizes.num_experts)
    return {
        "gathered choices": WORD_BYTES * counts,
        "counting choices": WORD_BYTES * align_up(choices, WARPGROUP) * sizes.num_experts,
        "routes": sizes.routes(),
        **_dispatch_like_workspace(sizes),
    }


def _dispatch_like_workspace(sizes: CallSizes) -> dict[str, int]:
    if sizes.by_rank:
        return _dispatch_workspace(sizes)
    return {
        "gathered tokens": sizes.gathered(sizes.sent_rows(sizes.pairs)),
        "quantized rows": sizes.quantized_rows(sizes.num_tokens),
        "received rows": sizes.quantized_rows(sizes.capacity),
        "choice of each row": WORD_BYTES * (sizes.capacity + 2 * sizes.pairs * sizes.top_k),
    }


def _combine_workspace(sizes: CallSizes, *, weighted: bool) -> dict[str, int]:
    sums = sizes.pairs * sizes.hidden * WORD_BYTES
    rounded = sizes.sent_rows(sizes.pairs)
    weights = sizes.gathered(WORD_BYTES * sizes.pairs * sizes.top_k)
    received = {
        "received sums": sizes.gathered(rounded),
        "widened sums": sums if sizes.wire.quantized else 0,
    }
    if sizes.by_rank:
        return {"sent sums": rounded, **received}
    return {
        "partial sums": sums,
        "rounded sums": 0 if rounded == sums else sizes.gathered(rounded),
        **received,
        "gathered weights": weights if weighted else 0,
    }


def _combine_grad_workspace(sizes: CallSizes) -> dict[str, int]:
    if sizes.by_rank:
        return _dispatch_like_workspace(sizes)
    return _dispatch_like_workspace(sizes) | grad_of_rows_workspace(sizes)


def grad_of_rows_workspace(sizes: CallSizes) -> dict[str, int]:
    """Returns the buffers in which XLA computes the gradients of y and weights: name -> bytes."""
    numbers = WORD_BYTES * sizes.pairs * sizes.top_k
    return {
        "g in the rows": sizes.rows(sizes.capacity),
        "products with y": WORD_BYTES * sizes.capacity * sizes.hidden,
        "gathered weights": sizes.gathered(numbers),
        "weights and their gradient by row": 2 * WORD_BYTES * sizes.capacity,
        "weights' gradient by rank": numbers + sizes.gathered(numbers),
    }
