"""Defines the gradients of the exchange, for both layouts.

A dispatch and an unweighted combine are each other's transposes, so the gradient of each is a call
of the other over the same routes. The gradient of a weighted combine is a separate operation,
`combine_grad`, since the weights have a gradient too. `dispatch` takes the layout from
`Config.layout`; the other functions take it from the type of the routes. Gradients are in reverse
mode only: JAX refuses `jax.jvp` and `jax.jacfwd` of a function with a custom VJP.
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

    Args:
      name: the caller's name for `rows`, for errors.
      rows: [..., H]: the rows that the exchange sends, or the rows whose sums it sends.
      list_words: the 4-byte words per token that kernels hold in shared memory for its choices: K,
        or 2 K if weights are sent with the choices.
      wire_dtype: the dtype in which rows or sums are sent; None: their own.
      grad_wire_dtype: the wire_dtype of the gradient's exchange.
      implementation: the implementation to run; None for the best that runs.
      **arguments: further fields of `Config`.

    Raises:
      ValueError, TypeError: a wire dtype or the named implementation does not support the rows.
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
    """Casts operands to the types that their gradients will have, as a custom VJP requires.

    The results vary over the mesh axes `axis_name` (vma), and are replicated over the Explicit mesh
    axes that the enclosing `shard_map` leaves out.
    """
    return match_varying([replicated(operand) for operand in operands], axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(
    config: Config, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None
) -> tuple[jax.Array | QuantizedArray, Any, Any]:
    """Sends each token to the ranks of its experts, in the layout given by `config`.

    Args:
      config: the static arguments; its `layout` selects expert-major or rank-major rows.
      x: [T, H], this rank's tokens.
      topk_idx: [T, K] int32, the experts of each token.
      topk_weights: [T, K] float32, sent with the choices in the rank-major layout; or None.

    Returns:
      Three results. The first is the received rows, [R, H] or rank-major [N, T, H], as a
      `QuantizedArray` if `config.quantized`. The second is the `Routes` or `RankRoutes`. The third
      is, in the expert-major layout, the `RowGroups` (the sizes of the experts' blocks); in the
      rank-major layout, the received weights, [N, T, K] float32, or None if none were sent.
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
    """Sends x [T, H] along the `routes` of an earlier dispatch, to the same receive-buffer rows.

    Returns the received rows, [R, H] or rank-major [N, T, H], in x's dtype, or as a
    `QuantizedArray` if `config.quantized`.
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
    """Returns zeros [R, H] through which the gradient of quantized received rows reaches x [T, H].

    Received rows that stay quantized have no gradient. A function of these rows, such as a float8
    matmul, therefore takes the zeros as another operand. The function ignores the values of the
    zeros, and returns the cotangent of the rows as the cotangent of the zeros. That cotangent is
    sent back to the ranks of the tokens as if the zeros were dispatched rows of x.
    """
    zeros = jnp.zeros((config.capacity, x.shape[1]), x.dtype)
    return match_varying((zeros, x), ())[0]


stand_in_rows.defvjp(
    lambda config, x, routes: (stand_in_rows(config, x, routes), routes), _stand_in_bwd
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(
    config: Config, y: jax.Array, topk_weights: jax.Array | None, routes: AnyRoutes
) -> jax.Array:
    """Sums the rows of each token, and sends the sums to the tokens' ranks; returns [T, H].

    Args:
      config: the static arguments of the exchange.
      y: [R, H], expert-major rows; or [N, T, H], partial sums in the rank-major layout.
      topk_weights: [T, K] float32, by which rows are multiplied; None for a plain sum.
      routes: the routes of the dispatch; their type selects the layout.
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

    Returns dy [R, H], where each row is the token's g times the choice's weight, and dweights
    [T, K] float32, the inner product of the token's g and the choice's row of y. dy is linear in g
    and the weights, and dweights in g and y, so the gradient of this function consists of calls of
    `combine` and `combine_grad`.
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
