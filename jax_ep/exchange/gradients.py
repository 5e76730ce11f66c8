"""Defines the gradients of the exchange, for both layouts.

A dispatch and an unweighted combine are each other's transposes, so the gradient of each is a call
of the other over the same routes. The gradient of a weighted combine is a separate operation,
`combine_grad`, since the weights have a gradient too. A dispatch is rank-major where
`Config.capacity` is None; other functions take the layout from the type of the routes. Gradients
are in reverse mode only: JAX refuses `jax.jvp` and `jax.jacfwd` of a function with a custom VJP.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep.exchange import primitives, quantization, xla
from jax_ep.exchange.interface import Config, Implementation
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups
from jax_ep.formats import Format, QuantizedArray
from jax_ep.runtime.jax_compat import match_varying, replicated

AnyRoutes = Routes | RankRoutes


def configure(
    name: Literal["x", "y"],
    rows: jax.Array,
    *,
    list_words: int,
    wire_dtype: jax.typing.DTypeLike | None,
    grad_wire_dtype: jax.typing.DTypeLike | None,
    implementation: Implementation,
    **arguments: Any,
) -> Config:
    """Makes and checks the `Config` of an exchange of `rows`.

    Errors call the rows `name`, as the caller's argument. `list_words` is the number of words that
    describe a token's choices, which kernels hold in shared memory: K, or 2 K if weights are sent
    with them. `arguments` are further fields of `Config`. Raises ValueError or TypeError if a wire
    dtype or the named implementation does not support the rows.
    """
    config = Config(
        wire=quantization.checked(name, rows, wire_dtype),
        grad_wire=quantization.checked(name, rows, grad_wire_dtype, "grad_wire_dtype"),
        implementation=implementation,
        **arguments,
    )
    primitives.check_implementation(config, rows, list_words)
    return config


def match(operands: tuple[jax.Array, ...], axis_name: tuple[str, ...]) -> list[jax.Array]:
    """Casts operands to the types of their gradients, as a custom VJP requires.

    The operands then vary over the ranks' axes, and are replicated over the Explicit axes that the
    enclosing `shard_map` leaves out.
    """
    return match_varying([replicated(operand) for operand in operands], axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(
    config: Config, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None
) -> tuple[jax.Array | QuantizedArray, Any, Any]:
    """Sends each token to the ranks of its experts, in the layout given by `config`.

    Args:
      config: the static arguments; rank-major where its capacity is None.
      x: [T, H], this rank's tokens.
      topk_idx: [T, K] int32, the experts of each token.
      topk_weights: [T, K] float32, sent with the choices in the rank-major layout; or None.

    Returns:
      Three results: the received rows, [R, H] or [N, T, H], as a `QuantizedArray` if
      `config.quantized`; the routes, `Routes` or `RankRoutes`; and the `RowGroups` of expert-major
      rows, or the received weights [N, T, K] of rank-major rows (None without weights).
    """
    routes: AnyRoutes
    rest: RowGroups | jax.Array | None
    if config.layout == "rank":
        received, routes, rest = primitives.rank_dispatch(x, topk_idx, topk_weights, config=config)
    else:
        received, routes, rest = primitives.dispatch(x, topk_idx, config=config)
    return _received(config, received, x.dtype), routes, rest


def _dispatch_fwd(config, x, topk_idx, topk_weights):
    results = dispatch(config, x, topk_idx, topk_weights)
    return results, (results[1], topk_weights is not None)


def _dispatch_bwd(config, residuals, cotangents):
    routes, weights_were_sent = residuals
    if config.quantized:
        raise TypeError(quantization.no_gradient(config.wire))
    g, _, g_weights = cotangents
    dx = combine(config.of_cotangents, g, None, routes)
    if not weights_were_sent:
        return dx, None, None
    g_weights, *arrays = match_varying((g_weights, *routes), config.axis_name)
    return dx, None, xla.return_weights(g_weights, RankRoutes(*arrays), config)


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_like(config: Config, x: jax.Array, routes: AnyRoutes) -> jax.Array | QuantizedArray:
    """Sends x [T, H] along the routes of a dispatch.

    Returns the received rows in x's dtype, or as a `QuantizedArray` if `config.quantized`.
    """
    if isinstance(routes, RankRoutes):
        received, _, _ = primitives.rank_dispatch(x, routes.topk_idx, None, config=config)
    else:
        received = primitives.dispatch_like(x, routes, config=config)
    return _received(config, received, x.dtype)


def _received(
    config: Config, received: tuple[jax.Array, ...], dtype: Any
) -> jax.Array | QuantizedArray:
    if not config.quantized:
        return config.wire.decode(received, dtype)
    assert isinstance(config.wire, Format)
    values, scales = received
    return QuantizedArray(values, scales, config.wire, dtype)


def _dispatch_like_bwd(config, routes, g):
    if config.quantized:
        raise TypeError(quantization.no_gradient(config.wire))
    return _stand_in_bwd(config, routes, g)


def _stand_in_bwd(config, routes, g):
    return combine(config.of_cotangents, g, None, routes), None  # type: ignore


dispatch_like.defvjp(
    lambda config, x, routes: (dispatch_like(config, x, routes), routes), _dispatch_like_bwd
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stand_in_rows(config: Config, x: jax.Array, routes: Routes) -> jax.Array:
    """Returns zeros [R, H] in place of the rows of x [T, H], with the gradient of a dispatch.

    Received rows that stay quantized have no gradient of their own. A function of them takes these
    rows too, computes nothing from them, and returns the rows' gradient as theirs.
    """
    assert config.capacity is not None
    zeros = jnp.zeros((config.capacity, x.shape[1]), x.dtype)
    return match_varying((zeros, x), ())[0]


stand_in_rows.defvjp(
    lambda config, x, routes: (stand_in_rows(config, x, routes), routes), _stand_in_bwd
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(
    config: Config, y: jax.Array, topk_weights: jax.Array | None, routes: AnyRoutes
) -> jax.Array:
    """Sums the rows of each token, and sends the sums, [T, H], to the tokens' ranks.

    y is [R, H], or partial sums [N, T, H] in the rank-major layout. topk_weights [T, K] float32
    multiply the rows, unless they are None.
    """
    if isinstance(routes, RankRoutes):
        return primitives.rank_combine(y, routes, config=config)
    return primitives.combine(y, topk_weights, routes, config=config)


def _combine_fwd(config, y, topk_weights, routes):
    saved = None if topk_weights is None else (y, topk_weights)
    return combine(config, y, topk_weights, routes), (saved, routes)


def _combine_bwd(config, residuals, g):
    saved, routes = residuals
    if saved is None:
        return dispatch_like(config.of_cotangents, g, routes), None, None
    y, topk_weights = saved
    return *combine_grad(config.of_cotangents, g, topk_weights, y, routes), None


combine.defvjp(_combine_fwd, _combine_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_grad(
    config: Config, g: jax.Array, topk_weights: jax.Array, y: jax.Array, routes: Routes
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of a weighted combine from the cotangent g [T, H] of its result.

    Returns dy = w * g, [R, H], and dweights = <g, y>, [T, K] float32. Both are linear in each of g,
    w and y, so the gradient of this function is computed by `combine` and by itself.
    """
    return primitives.combine_grad(g, topk_weights, y, routes, config=config)


def _combine_grad_fwd(config, g, topk_weights, y, routes):
    return combine_grad(config, g, topk_weights, y, routes), (g, topk_weights, y, routes)


def _combine_grad_bwd(config, residuals, cotangents):
    g, topk_weights, y, routes = residuals
    ddy, ddweights = cotangents
    config = config.of_cotangents
    dg = combine(config, ddy, topk_weights, routes) + combine(config, y, ddweights, routes)
    dy, dweights = combine_grad(config, g, ddweights, ddy, routes)
    return dg, dweights, dy, None


combine_grad.defvjp(_combine_grad_fwd, _combine_grad_bwd)
