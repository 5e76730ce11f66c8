"""Defines the gradients of the exchange: dispatch and combine are each other's transposes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.collectives.api import all_gather, all_to_all
from jax_ep.exchange import primitives, xla
from jax_ep.exchange.interface import Config, Handle, Implementation, algorithm_next_to
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups
from jax_ep.formats import Format, QuantizedArray, RowFormat
from jax_ep.runtime.jax_compat import match_varying, replicated, replicated_over_explicit_axes

AnyRoutes = Routes | RankRoutes


def match(operands: tuple[Any, ...], axis_name: tuple[str, ...]) -> tuple[Any, ...]:
    """Casts arrays (or None) to the types that their gradients will have, for a custom VJP."""
    # They vary over the mesh axes `axis_name` (vma), and are replicated over the Explicit mesh axes
    # that the enclosing `shard_map` leaves out.
    return match_varying(jax.tree.map(replicated, operands), axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_with_vjp(
    config: Config, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None
) -> tuple[jax.Array | QuantizedArray, Any, Any]:
    """Returns the received rows, their routes, and the `RowGroups`, or rank-major weights."""
    # In the expert-major layout, `topk_weights` is None, and `combine` gets the weights.
    routes: AnyRoutes
    rest: RowGroups | jax.Array | None
    if config.layout == "rank":
        received, routes, rest = primitives.rank_dispatch(x, topk_idx, topk_weights, config=config)
    else:
        received, routes, rest = primitives.dispatch(x, topk_idx, config=config)
    return _received(config, received, x.dtype), routes, rest


def _dispatch_fwd(config, x, topk_idx, topk_weights):
    received, routes, rest = dispatch_with_vjp(config, x, topk_idx, topk_weights)
    return (received, routes, rest), (routes, topk_weights is not None)


def _dispatch_bwd(config, residuals, cotangents):
    routes, weights_were_sent = residuals
    if config.quantized:
        raise TypeError(_no_gradient(config.wire))
    g, _, g_weights = cotangents  # of the received rows, of routes, and of rank-major weights
    dx = combine_with_vjp(config.of_cotangents, g, None, routes)
    if not weights_were_sent:
        return dx, None, None
    g_weights, routes = match_varying((g_weights, routes), config.axis_name)  # as in `match`
    return dx, None, xla.return_weights(g_weights, routes, config)


dispatch_with_vjp.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_like_with_vjp(
    config: Config, x: jax.Array, routes: AnyRoutes
) -> jax.Array | QuantizedArray:
    """Sends x [T, H] along the `routes` of an earlier dispatch, to the same receive-buffer rows."""
    if isinstance(routes, RankRoutes):
        received, _, _ = primitives.rank_dispatch(x, routes.topk_idx, None, config=config)
    else:
        received = primitives.dispatch_like(x, routes, config=config)
    return _received(config, received, x.dtype)


def _received(
    config: Config, received: tuple[jax.Array, ...], dtype: Any
) -> jax.Array | QuantizedArray:
    """Decodes received rows to `dtype`; if `config.quantized`, makes a `QuantizedArray` instead."""
    if not config.quantized:
        return config.wire.decode(received, dtype)
    assert isinstance(config.wire, Format)
    values, scales = received
    return QuantizedArray(values, scales, config.wire, dtype)


def _dispatch_like_bwd(config, routes, g):
    if config.quantized:
        raise TypeError(_no_gradient(config.wire))
    return combine_with_vjp(config.of_cotangents, g, None, routes), None


dispatch_like_with_vjp.defvjp(
    lambda config, x, routes: (dispatch_like_with_vjp(config, x, routes), routes),
    _dispatch_like_bwd,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_with_vjp(
    config: Config, y: jax.Array, topk_weights: jax.Array | None, routes: AnyRoutes
) -> jax.Array:
    """Sums y [R, H] by token, or adds rank-major partial sums y [N, T, H]; returns [T, H]."""
    if isinstance(routes, RankRoutes):  # then y is already weighted, and `topk_weights` is None
        return primitives.rank_combine(y, routes, config=config)
    return primitives.combine(y, topk_weights, routes, config=config)


def _combine_fwd(config, y, topk_weights, routes):
    saved = None if topk_weights is None else (y, topk_weights)
    return combine_with_vjp(config, y, topk_weights, routes), (saved, routes)


def _combine_bwd(config, residuals, g):
    saved, routes = residuals
    if saved is None:
        return dispatch_like_with_vjp(config.of_cotangents, g, routes), None, None
    y, topk_weights = saved
    handle = Handle.of(routes, config)
    sent: Any = dispatch_like_with_vjp(config.of_cotangents, g, routes)
    rows = sent.astype(jnp.float32)  # [R, H]: g of each row's token
    weights = choices_to_rows(topk_weights, handle, config.implementation)
    products = jnp.sum(rows * y.astype(jnp.float32), axis=1)  # [R]: the weights' gradient, by row
    dy = (rows * weights[:, None]).astype(y.dtype)
    return dy, rows_to_choices(products, handle, config.implementation), None


combine_with_vjp.defvjp(_combine_fwd, _combine_bwd)


def choices_to_rows(values: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Sends values [T, K], such as weights, to the choices' rows: [R], zero without a choice."""

    def send(values: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros_like(values, shape=(handle.capacity,))
        gathered = all_gather(values[None], **_collective(handle, implementation)).reshape(-1)
        # A row has at most one choice. Only the index R repeats, and it is out of bounds.
        indices = xla.row_indices(rows, handle.capacity)
        return zeros.at[indices].set(gathered, mode="drop", unique_indices=True)

    operands = match_varying((values, handle.rows), handle.axis_name)
    return replicated_over_explicit_axes(send, *operands)


def rows_to_choices(values: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Sends values [R] back to the choices: [T, K]; the transpose of `choices_to_rows`."""

    def send(values: jax.Array, rows: jax.Array) -> jax.Array:
        sent = xla.take_rows(values, rows)
        # A choice has a row on at most one rank. The other ranks add zeros, so the sum is exact.
        return jnp.sum(all_to_all(sent, **_collective(handle, implementation)), axis=0)

    operands = match_varying((values, handle.rows), handle.axis_name)
    return replicated_over_explicit_axes(send, *operands)


def _collective(handle: Handle, implementation: Implementation) -> dict[str, Any]:
    return dict(axis_name=handle.axis_name, algorithm=algorithm_next_to(implementation))


def _no_gradient(wire: RowFormat) -> str:
    return (
        f'dispatch(output="quantized") has no gradient: the cotangent of {wire.name} rows would be '
        f'{wire.name}. Use output="dequantized", or give the cotangent of the rows to combine in a '
        "jax.custom_vjp around the dispatch and the matmul."
    )
