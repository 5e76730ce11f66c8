"""The JAX primitives of the exchange: shapes, varying-axes types, and which kernel serves where.

Six primitives, all without effects, all called inside `shard_map` over `axis_name`:

  ep_dispatch       x [T, H], topk_idx [T, K]      -> tokens [R, H], rows [N, T, K], counts [N, E],
                                                     *layout
  ep_dispatch_like  x [T, H], *routes              -> tokens [R, H]
  ep_combine        y [R, H], *routes, weights?    -> out [T, H]
  ep_combine_grad   g [T, H], *routes, weights, y  -> dy [R, H], dweights [T, K]
  ep_rank_dispatch  x [T, H], topk_idx, weights?   -> tokens [N, T, H], local_topk_idx [N, T, K],
                                                      weights [N, T, K]?
  ep_rank_combine   y [N, T, H], *rank routes      -> out [T, H]

With a `wire_dtype`, what a dispatch gives for tokens is two arrays: rows in it, and their scales
(`jax_ep.exchange.quantization`); a combine rounds the sums that it sends. `routes` and `layout` are
the arrays of their namesakes in `jax_ep.exchange.routes`, rank routes those of `RankRoutes`;
weights are float32. Each primitive lowers to the Pallas kernels on the GPUs they serve, and to
XLA's collectives everywhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import pallas as pallas_exchange
from jax_ep.exchange import quantization
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.routes import Layout, RankRoutes, Routes
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import (
    Primitive,
    Program,
    define_primitive,
    match_varying,
    result_type,
)

Implementation = Literal["pallas", "xla"] | None
IMPLEMENTATIONS = ("pallas", "xla")
Received = tuple[jax.Array, ...]  # rows; or with a wire_dtype, rows in it and their scales


def choose_implementation(
    implementation: Implementation,
    payload: jax.Array | jax.ShapeDtypeStruct,
    *,
    num_ranks: int,
    top_k: int,
    num_experts: int,
    wire_dtype: jnp.dtype | None = None,
) -> Implementation:
    """What to bind: "xla" where only it is sure to serve, else None, or the name that was given.

    `wire_dtype` is what a dispatch sends its rows in, or a combine its sums; None is the dtype of
    `payload`.

    Raises ValueError, with the reason, if a named implementation is sure not to serve. What this
    cannot know yet is decided when the program is lowered.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, but is {implementation!r}."
        )
    if implementation == "xla":
        return "xla"
    reason = availability.tracing_unavailable_reason()
    if implementation == "pallas":  # by None too, but for the machine that it is lowered for
        reason = reason or availability.traced_devices_unavailable_reason()
    reason = reason or pallas_exchange.unavailable_reason(
        payload.shape[-1], payload.dtype, num_ranks, top_k, num_experts, wire_dtype
    )
    if implementation is None:
        return None if reason is None else "xla"
    if reason is None:
        return implementation
    raise _refusal(reason)


def _refusal(reason: str) -> ValueError:
    return ValueError(
        f'implementation="pallas" cannot serve here: {reason}. '
        "implementation=None picks one that does."
    )


def choose_implementations(
    implementation: Implementation,
    rows: jax.Array,
    *,
    axis_name: tuple[str, ...],
    top_k: int,
    num_experts: int,
    wire_dtypes: tuple[jnp.dtype | None, jnp.dtype | None],
) -> tuple[Implementation, Implementation]:
    """What to bind for rows, and for their cotangents; each has its own wire dtype."""
    choose = functools.partial(
        choose_implementation,
        implementation,
        rows,
        num_ranks=lax.axis_size(axis_name),
        top_k=top_k,
        num_experts=num_experts,
    )
    of_rows, of_cotangents = wire_dtypes
    return choose(wire_dtype=of_rows), choose(wire_dtype=of_cotangents)


def dispatch(x: jax.Array, topk_idx: jax.Array, **params: Any) -> tuple[Received, Routes, Layout]:
    """Binds `ep_dispatch`: this rank's choices become routes, and its tokens follow them."""
    x, topk_idx = match_varying((x, topk_idx), params["axis_name"])
    results = ep_dispatch_p.bind(x, topk_idx, **params)
    *received, rows, counts = results[: -len(Layout._fields)]
    layout = Layout(*results[-len(Layout._fields) :])
    return tuple(received), Routes(topk_idx, rows, counts), layout


def dispatch_like(x: jax.Array, route: Routes, **params: Any) -> Received:
    """Binds `ep_dispatch_like`."""
    operands = match_varying((x, *route), params["axis_name"])
    return tuple(ep_dispatch_like_p.bind(*operands, **params))


def combine(
    y: jax.Array, topk_weights: jax.Array | None, route: Routes, **params: Any
) -> jax.Array:
    """Binds `ep_combine`."""
    operands = (y, *route) if topk_weights is None else (y, *route, topk_weights)
    (out,) = ep_combine_p.bind(*match_varying(operands, params["axis_name"]), **params)
    return out


def combine_grad(
    g: jax.Array, topk_weights: jax.Array, y: jax.Array, route: Routes, **params: Any
) -> tuple[jax.Array, jax.Array]:
    """Binds `ep_combine_grad`."""
    operands = match_varying((g, *route, topk_weights, y), params["axis_name"])
    dy, dweights = ep_combine_grad_p.bind(*operands, **params)
    return dy, dweights


def choices_to_rows(
    values: jax.Array, route: Routes, *, axis_name: tuple[str, ...], capacity: int
) -> jax.Array:
    """[T, K] numbers, one for each choice -> [R]; by XLA's collectives everywhere."""
    values, *routes = match_varying((values, *route), axis_name)
    return xla_exchange.choices_to_rows(
        values, Routes(*routes), axis_name=axis_name, capacity=capacity
    )


def rows_to_choices(values: jax.Array, route: Routes, *, axis_name: tuple[str, ...]) -> jax.Array:
    """[R] numbers, one for each row -> [T, K]; by XLA's collectives everywhere."""
    values, *routes = match_varying((values, *route), axis_name)
    return xla_exchange.rows_to_choices(values, Routes(*routes), axis_name=axis_name)


def rank_dispatch(
    x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, **params: Any
) -> tuple[Received, RankRoutes, jax.Array | None]:
    """Binds `ep_rank_dispatch`."""
    operands = (x, topk_idx) if topk_weights is None else (x, topk_idx, topk_weights)
    x, topk_idx, *rest = match_varying(operands, params["axis_name"])
    results = ep_rank_dispatch_p.bind(x, topk_idx, *rest, **params)
    weights = None if topk_weights is None else results.pop()
    *received, local_topk_idx = results
    return tuple(received), RankRoutes(topk_idx, local_topk_idx), weights


def rank_combine(y: jax.Array, route: RankRoutes, **params: Any) -> jax.Array:
    """Binds `ep_rank_combine`."""
    (out,) = ep_rank_combine_p.bind(*match_varying((y, *route), params["axis_name"]), **params)
    return out


def return_weights(g: jax.Array, route: RankRoutes, axis_name: tuple[str, ...]) -> jax.Array:
    """The cotangent of the weights of an `ep_rank_dispatch`: of [N, T, K], [T, K]."""
    g, *routes = match_varying((g, *route), axis_name)
    return xla_exchange.return_weights(g, RankRoutes(*routes), axis_name=axis_name)


# What each primitive computes, by exchange; `exchange` is one of the two modules.


def _run_dispatch(exchange, x, topk_idx, **params):
    received, rows, counts, layout = exchange.dispatch(x, topk_idx, **params)
    return *received, rows, counts, *layout


def _run_dispatch_like(exchange, x, *route, num_experts, **params):
    del num_experts
    return exchange.dispatch_like(x, Routes(*route), **params)


def _run_combine(exchange, y, topk_idx, rows, counts, weights=None, *, axis_name, wire_dtype, **_):
    route = Routes(topk_idx, rows, counts)
    return (exchange.combine(y, weights, route, axis_name=axis_name, wire_dtype=wire_dtype),)


def _run_combine_grad(
    exchange, g, topk_idx, rows, counts, weights, y, *, num_experts, capacity, **params
):
    del num_experts, capacity
    return exchange.combine_grad(g, weights, y, Routes(topk_idx, rows, counts), **params)


def _run_rank_dispatch(exchange, x, topk_idx, topk_weights=None, **params):
    return exchange.rank_dispatch(x, topk_idx, topk_weights, **params)


def _run_rank_combine(exchange, y, *route, **params):
    return (exchange.rank_combine(y, RankRoutes(*route), **params),)


# What each primitive returns: (shape, dtype) of every result.


def _received_shapes(lead, x, wire_dtype):
    """Rows [*lead, H], and if they come in a wire_dtype, their scales."""
    if wire_dtype is None:
        return [((*lead, x.shape[1]), x.dtype)]
    scales = (*lead, x.shape[1] // quantization.BLOCK), jnp.float32
    return [((*lead, x.shape[1]), wire_dtype), scales]


def _dispatch_shapes(x, topk_idx, *, num_experts, axis_name, capacity, wire_dtype, **_):
    num_ranks = lax.axis_size(axis_name)
    return [
        *_received_shapes((capacity,), x, wire_dtype),
        ((num_ranks, *topk_idx.shape), jnp.int32),
        ((num_ranks, num_experts), jnp.int32),
        ((num_experts // num_ranks,), jnp.int32),
        ((num_experts // num_ranks,), jnp.int32),
        ((), jnp.int32),
        ((), jnp.int32),
    ]


def _dispatch_like_shapes(x, *_, capacity, wire_dtype, **__):
    return _received_shapes((capacity,), x, wire_dtype)


def _combine_shapes(y, topk_idx, *_, **__):
    return [((topk_idx.shape[0], y.shape[1]), y.dtype)]


def _combine_grad_shapes(g, topk_idx, rows, counts, weights, y, **_):
    return [(y.shape, y.dtype), (weights.shape, jnp.float32)]


def _rank_dispatch_shapes(x, topk_idx, topk_weights=None, *, axis_name, wire_dtype, **_):
    num_ranks = lax.axis_size(axis_name)
    received = _received_shapes((num_ranks, x.shape[0]), x, wire_dtype)
    of_ranks = (num_ranks, *topk_idx.shape)
    weights = [] if topk_weights is None else [(of_ranks, topk_weights.dtype)]
    return [*received, (of_ranks, jnp.int32), *weights]


def _rank_combine_shapes(y, *_, **__):
    return [(y.shape[1:], y.dtype)]


def _primitive(name: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Primitive:
    def abstract_eval(*operands, **params):
        # The operands vary over the same axes, and so does every result.
        return [result_type(operands[0], *result) for result in shapes(*operands, **params)]

    def lower(program: Program, *operands, implementation, **params):
        reason = availability.program_unavailable_reason(program, params["axis_name"])
        function = functools.partial(run, _exchange_serving(implementation, reason))
        return program.lower_by_position(function, *operands, **params)

    def inline(*operands, implementation, **params):
        reason = availability.jax_unavailable_reason()
        return list(run(_exchange_serving(implementation, reason), *operands, **params))

    def no_batching(*_, **__):
        raise NotImplementedError(
            f"{name} cannot be batched by jax.vmap: each call is one exchange between ranks. "
            "Fold the batch axis into the tokens (x [B, T, H] -> [B * T, H]), or loop with "
            "jax.lax.map or jax.lax.scan."
        )

    return define_primitive(
        name, abstract_eval=abstract_eval, lower=lower, inline=inline, batch=no_batching
    )


def _exchange_serving(implementation: Implementation, reason: str | None) -> Any:
    """The exchange to lower to; `reason`: why the kernels cannot serve, or None if they can."""
    if implementation == "xla":
        return xla_exchange
    if reason is None:
        return pallas_exchange
    if implementation == "pallas":
        raise _refusal(reason)
    return xla_exchange


ep_dispatch_p = _primitive("ep_dispatch", _run_dispatch, _dispatch_shapes)
ep_dispatch_like_p = _primitive("ep_dispatch_like", _run_dispatch_like, _dispatch_like_shapes)
ep_combine_p = _primitive("ep_combine", _run_combine, _combine_shapes)
ep_combine_grad_p = _primitive("ep_combine_grad", _run_combine_grad, _combine_grad_shapes)
ep_rank_dispatch_p = _primitive("ep_rank_dispatch", _run_rank_dispatch, _rank_dispatch_shapes)
ep_rank_combine_p = _primitive("ep_rank_combine", _run_rank_combine, _rank_combine_shapes)
