"""The portable exchange, on XLA's own collectives: any backend, any number of hosts.

Dispatch is an all-gather of the tokens followed by a local gather into the expert blocks; combine
is a local partial sum per (token, rank) followed by an all-to-all and a sum in rank order. So one
row per (token, rank) crosses the wire, and every sum has one fixed order.

The functions run inside `shard_map` over `axis_name` and share their shapes with the primitives
in `primitives.py`, whose default lowering they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import quantization, routes
from jax_ep.exchange.routes import Layout, RankRoutes, Routes

AxisName = tuple[str, ...]


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity: int,
    expert_alignment: int,
    wire_dtype: jnp.dtype | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, Layout]:
    """Routes [T, K] and sends [T, H].

    Returns what arrives, rows [N, T, K], counts [N, E], and how the first is laid out. What arrives
    is tokens [R, H]; or with a wire_dtype two arrays, rows and scales [R, H / 128].
    """
    rank = lax.axis_index(axis_name)
    counts, places = routes.count_choices(topk_idx, num_experts)
    message = jnp.concatenate([topk_idx.reshape(-1), places.reshape(-1), counts])
    messages = _stack_ranks(message, axis_name)  # the only exchange besides the payload
    all_topk_idx, all_places, all_counts = jnp.split(
        messages, [topk_idx.size, 2 * topk_idx.size], axis=1
    )
    recv_counts = routes.counts_here(all_counts, rank)
    rows = routes.receive_rows(
        all_topk_idx.reshape(-1, *topk_idx.shape),
        all_places.reshape(-1, *topk_idx.shape),
        recv_counts,
        rank,
        expert_alignment,
    )
    route = Routes(topk_idx, rows, all_counts)
    received = dispatch_like(
        x,
        route,
        axis_name=axis_name,
        capacity=capacity,
        expert_alignment=expert_alignment,
        wire_dtype=wire_dtype,
    )
    return received, rows, all_counts, routes.layout(recv_counts, capacity, expert_alignment)


def dispatch_like(
    x: jax.Array,
    route: Routes,
    *,
    axis_name: AxisName,
    capacity: int,
    expert_alignment: int,
    wire_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """Sends [T, H] along known routes: what arrives, as in `dispatch`."""
    del expert_alignment  # the rows know
    all_bits = _gather_ranks(quantization.bits(x, wire_dtype), axis_name)
    sent = _fill(all_bits, _choice_of_row(route.rows, capacity) // route.rows.shape[2])
    return quantization.parts(sent, x, wire_dtype)


def combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    route: Routes,
    *,
    axis_name: AxisName,
    wire_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Weighs, sums and returns [R, H] to the tokens' owners: [T, H]."""
    rows = route.rows
    weights = None if topk_weights is None else _stack_ranks(topk_weights, axis_name)
    if weights is not None:  # no weight of another rank's choice may meet the zero it has here
        weights = jnp.where((rows >= 0) & (rows < y.shape[0]), weights, 0)
    num_ranks, num_tokens, top_k = rows.shape
    partial_sum = jnp.zeros((num_ranks, num_tokens, y.shape[1]), jnp.float32)
    for choice in range(top_k):
        row = _fill(y, rows[:, :, choice]).astype(jnp.float32)
        partial_sum += row if weights is None else row * weights[:, :, choice, None]
    if wire_dtype is None:
        partial_sum = partial_sum.astype(y.dtype)
    return _add_ranks(partial_sum, axis_name, wire_dtype).astype(y.dtype)


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    route: Routes,
    *,
    axis_name: AxisName,
    expert_alignment: int,
    wire_dtype: jnp.dtype | None = None,
    send: Callable[..., tuple[jax.Array, ...]] = dispatch_like,
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of a weighted combine: of y [R, H], and of the weights [T, K] float32.

    `g` [T, H] is the cotangent of the result, `wire_dtype` what it is sent as, and `send` the
    `dispatch_like` of either exchange.
    """
    received = send(
        g,
        route,
        axis_name=axis_name,
        capacity=y.shape[0],
        expert_alignment=expert_alignment,
        wire_dtype=wire_dtype,
    )
    g_rows, _ = quantization.handed_out(received, g.dtype, False)
    row_weights = choices_to_rows(topk_weights, route, axis_name=axis_name, capacity=y.shape[0])
    g_rows = g_rows.astype(jnp.float32)
    dy = (g_rows * row_weights[:, None]).astype(y.dtype)
    products = jnp.sum(g_rows * y.astype(jnp.float32), axis=1)
    return dy, rows_to_choices(products, route, axis_name=axis_name)


def choices_to_rows(
    values: jax.Array, route: Routes, *, axis_name: AxisName, capacity: int
) -> jax.Array:
    """A number for each choice, [T, K], sent to the choice's row: [R], zero in every other row."""
    all_values = _stack_ranks(values, axis_name)
    return _fill(all_values.reshape(-1), _choice_of_row(route.rows, capacity))


def rows_to_choices(values: jax.Array, route: Routes, *, axis_name: AxisName) -> jax.Array:
    """A number for each row, [R], sent to its choice: [T, K], zero where there is no row.

    The transpose of `choices_to_rows`.
    """
    by_rank = _swap_ranks(_fill(values, route.rows), axis_name)
    return jnp.sum(by_rank, axis=0)  # at most one rank's term is not zero: the sum is exact


def rank_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: AxisName,
    wire_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """Sends [T, H]: what arrives, local_topk_idx [N, T, K] and, if given, the weights there.

    What arrives is tokens [N, T, H]; or with a wire_dtype rows and scales [N, T, H / 128].
    """
    all_topk_idx = _stack_ranks(topk_idx, axis_name)
    num_local_experts = num_experts // all_topk_idx.shape[0]
    local = all_topk_idx - lax.axis_index(axis_name) * num_local_experts
    here = (all_topk_idx >= 0) & (all_topk_idx < num_experts)  # else the difference may wrap
    here &= (local >= 0) & (local < num_local_experts)
    all_bits = _stack_ranks(quantization.bits(x, wire_dtype), axis_name)
    received = jnp.where(jnp.any(here, axis=-1, keepdims=True), all_bits, 0)
    results = *quantization.parts(received, x, wire_dtype), jnp.where(here, local, -1)
    if topk_weights is None:
        return results
    return *results, jnp.where(here, _stack_ranks(topk_weights, axis_name), 0)


def rank_combine(
    y: jax.Array,
    route: RankRoutes,
    *,
    num_experts: int,
    axis_name: AxisName,
    wire_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns the sums [N, T, H] to the tokens' owners and adds them: [T, H]."""
    del num_experts  # the routes know
    sent = jnp.any(route.local_topk_idx >= 0, axis=-1, keepdims=True)
    return _add_ranks(jnp.where(sent, y, 0), axis_name, wire_dtype).astype(y.dtype)


def return_weights(g: jax.Array, route: RankRoutes, *, axis_name: AxisName) -> jax.Array:
    """The cotangent of weights that a rank dispatch sent, of [N, T, K]: [T, K]."""
    returned = _swap_ranks(jnp.where(route.local_topk_idx >= 0, g, 0), axis_name)
    return jnp.sum(returned, axis=0)  # at most one rank's term is not zero: the sum is exact


def _add_ranks(sums: jax.Array, axis_name: AxisName, wire_dtype: jnp.dtype | None) -> jax.Array:
    """Sends [N, T, H] by owner, as they are or quantized; adds what comes in: [T, H] float32."""
    if wire_dtype is None:
        sums = _swap_ranks(sums, axis_name)
    else:
        sent = _swap_ranks(quantization.bits(sums, wire_dtype), axis_name)
        rows, scales = quantization.parts(sent, sums, wire_dtype)
        sums = quantization.dequantize(rows, scales, jnp.float32)
    in_rank_order = (sums[rank].astype(jnp.float32) for rank in range(sums.shape[0]))
    return functools.reduce(jnp.add, in_rank_order)


def _gather_ranks(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """[T, ...] -> [N * T, ...]. No axes at all are one rank, here and below."""
    return lax.all_gather(x, axis_name, axis=0, tiled=True)


def _stack_ranks(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """[...] -> [N, ...]."""
    return lax.all_gather(x[None], axis_name, axis=0, tiled=True)


def _swap_ranks(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """[N, ...] by destination -> [N, ...] by source."""
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True) if axis_name else x


def _fill(array: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `array`, and zeros where `index` is outside it (a negative one too)."""
    index = jnp.where(index < 0, array.shape[0], index)
    return jnp.take(array, index, axis=0, mode="fill", fill_value=0)


def _choice_of_row(rows: jax.Array, capacity: int) -> jax.Array:
    """[N, T, K] rows -> [R]: the flat (source, token, choice) that fills each row, or -1."""
    flat = rows.reshape(-1)
    slots = jnp.where((flat >= 0) & (flat < capacity), flat, capacity)
    nothing = jnp.full_like(flat, -1, shape=(capacity,))
    return nothing.at[slots].set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")
