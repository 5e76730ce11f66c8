"""The rank layout: a rank receives one row for each (source rank, token) that chose it.

`dispatch(layout="rank")` hands out [N, T, H], the smallest buffer that any routing fits in, with
the local experts that each row is for, and `combine` takes back one partial sum for each row.
`jax_ep.exchange.permute` turns rows into the blocks of `grouped_matmul`, and back.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange import primitives, quantization, routes
from jax_ep.exchange.config import Exchange
from jax_ep.exchange.primitives import Implementation
from jax_ep.exchange.routes import RankRoutes
from jax_ep.runtime.jax_compat import match_varying


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["routes"],
    meta_fields=["axis_name", "num_experts"],
)
@dataclasses.dataclass(frozen=True)
class RankHandle:
    """The routes of one dispatch into the rank layout; a pytree, as `Handle` is.

    Attributes:
      routes: which experts each rank's tokens chose; see `jax_ep.routes.RankRoutes`.
      axis_name: the mesh axis names of the dispatch.
      num_experts: E.
    """

    routes: RankRoutes
    axis_name: tuple[str, ...]
    num_experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, T, K."""
        num_ranks, num_tokens, top_k = self.routes.local_topk_idx.shape
        return num_ranks, num_tokens, top_k


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "local_topk_idx", "topk_weights", "handle", "scales"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class RankDispatched:
    """What a rank received, by source rank and token; a pytree.

    Attributes:
      tokens: [N, T, H], x's dtype: row (s, t) is token t of rank s if it chose any expert of this
        rank, and zero if not.
      local_topk_idx: [N, T, K] int32: its choices, as local expert ids in [0, L); -1 where a choice
        is of another rank or of no expert.
      topk_weights: [N, T, K], the dtype they were given in: their weights, zero where
        local_topk_idx is -1; None if none were given.
      handle: the routes, for `combine` and `dispatch_like`.
      scales: [N, T, H / 128] float32 where `output="quantized"` was asked for, else None. With it
        neither tokens nor topk_weights have a gradient.
    """

    tokens: jax.Array
    local_topk_idx: jax.Array
    topk_weights: jax.Array | None
    handle: RankHandle
    scales: jax.Array | None = None


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: tuple[str, ...],
    wire_dtype: jax.typing.DTypeLike | None,
    grad_wire_dtype: jax.typing.DTypeLike | None,
    quantized: bool,
    implementation: Implementation,
) -> RankDispatched:
    """`expert_parallel.dispatch(layout="rank")`, which has checked what both layouts share."""
    weights = None
    if topk_weights is not None:
        checks.check_array("topk_weights", topk_weights, 2, jnp.floating, "[T, K]")
        if topk_weights.shape != topk_idx.shape:
            raise ValueError(
                f"topk_weights must have topk_idx's shape {topk_idx.shape}, but has shape "
                f"{topk_weights.shape}."
            )
        weights = topk_weights.astype(jnp.float32)
        x, weights = match_varying((x, weights), axis_name)
    else:
        (x,) = match_varying((x,), axis_name)
    config = Exchange.of(
        "x",
        x,
        top_k=topk_idx.shape[1] * (1 if weights is None else 2),  # words of a token's list
        axis_name=axis_name,
        num_experts=num_experts,
        implementation=implementation,
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        quantized=quantized,
    )
    topk_idx = routes.expert_ids(topk_idx, num_experts)
    tokens, scales, route, weights = _dispatch(config, x, topk_idx, weights)
    if weights is not None and topk_weights is not None:
        weights = weights.astype(topk_weights.dtype)
    handle = RankHandle(route, axis_name, num_experts)
    return RankDispatched(tokens, route.local_topk_idx, weights, handle, scales)


def combine(
    y: jax.Array,
    handle: RankHandle,
    topk_weights: jax.Array | None,
    *,
    wire_dtype: jax.typing.DTypeLike | None,
    grad_wire_dtype: jax.typing.DTypeLike | None,
    implementation: Implementation,
) -> jax.Array:
    """`expert_parallel.combine` of partial sums [N, T, H]."""
    _check_handle(handle)
    checks.check_array("y", y, 3, jnp.floating, "[N, T, H]")
    if y.shape[:2] != handle.shape[:2]:
        raise ValueError(
            f"y must have one row for each (source rank, token), {handle.shape[:2]}, but has shape "
            f"{y.shape}."
        )
    if topk_weights is not None:
        raise ValueError(
            "topk_weights must be None in the rank layout, whose y is summed over a token's "
            "choices already: give them to dispatch, and weigh with RankDispatched.topk_weights."
        )
    config = _along(handle, "y", y, implementation, wire_dtype, grad_wire_dtype)
    (y,) = match_varying((y,), handle.axis_name)
    return _combine(config, y, handle.routes)


def dispatch_like(
    x: jax.Array,
    handle: RankHandle,
    *,
    wire_dtype: jax.typing.DTypeLike | None,
    grad_wire_dtype: jax.typing.DTypeLike | None,
    implementation: Implementation,
) -> jax.Array:
    """`expert_parallel.dispatch_like`: [T, H'] -> [N, T, H']."""
    _check_handle(handle)
    checks.check_array("x", x, 2, jnp.floating, "[T, H]")
    if x.shape[0] != handle.shape[1] or x.shape[1] == 0:
        raise ValueError(
            f"x must have one row for each of the {handle.shape[1]} tokens of the handle's "
            f"dispatch and at least one column, but has shape {x.shape}."
        )
    config = _along(handle, "x", x, implementation, wire_dtype, grad_wire_dtype)
    (x,) = match_varying((x,), handle.axis_name)
    return _dispatch_like(config, x, handle.routes)


def _along(
    handle: RankHandle,
    name: Literal["x", "y"],
    rows: jax.Array,
    implementation: Implementation,
    wire_dtype: jax.typing.DTypeLike | None,
    grad_wire_dtype: jax.typing.DTypeLike | None,
) -> Exchange:
    """The exchange of other rows along the routes of a dispatch: see `Exchange.of`."""
    return Exchange.of(
        name,
        rows,
        top_k=handle.shape[2],
        axis_name=handle.axis_name,
        num_experts=handle.num_experts,
        implementation=implementation,
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
    )


# The custom gradients: as in `expert_parallel`, dispatch and combine are each other's transposes.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(
    config: Exchange, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, RankRoutes, jax.Array | None]:
    received, route, weights = primitives.rank_dispatch(
        x, topk_idx, topk_weights, wire_dtype=config.wire_dtype, **config.parameters
    )
    return *quantization.handed_out(received, x.dtype, config.quantized), route, weights


def _dispatch_fwd(config, x, topk_idx, topk_weights):
    results = _dispatch(config, x, topk_idx, topk_weights)
    return results, results[2]


def _dispatch_bwd(config, route, cotangents):
    if config.quantized:
        raise TypeError(quantization.no_gradient(config.wire_dtype))
    g, _, _, g_weights = cotangents
    dx = _combine(config.of_cotangents, g, route)
    if g_weights is None:
        return dx, None, None
    return dx, None, primitives.return_weights(g_weights, route, config.axis_name)


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch_like(config: Exchange, x: jax.Array, route: RankRoutes) -> jax.Array:
    received, _, _ = primitives.rank_dispatch(
        x, route.topk_idx, None, wire_dtype=config.wire_dtype, **config.parameters
    )
    return quantization.handed_out(received, x.dtype, False)[0]


_dispatch_like.defvjp(
    lambda config, x, route: (_dispatch_like(config, x, route), route),
    lambda config, route, g: (_combine(config.of_cotangents, g, route), None),  # type: ignore
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(config: Exchange, y: jax.Array, route: RankRoutes) -> jax.Array:
    return primitives.rank_combine(y, route, wire_dtype=config.wire_dtype, **config.parameters)


_combine.defvjp(
    lambda config, y, route: (_combine(config, y, route), route),
    lambda config, route, g: (_dispatch_like(config.of_cotangents, g, route), None),
)


def _check_handle(handle: RankHandle) -> None:
    num_ranks = checks.num_ranks(handle.axis_name)
    if len(handle.routes.local_topk_idx.shape) != 3 or handle.shape[0] != num_ranks:
        raise ValueError(
            f"handle.routes.local_topk_idx must have shape [{num_ranks}, T, K], one plane for each "
            f"rank along {handle.axis_name}, but has shape {handle.routes.local_topk_idx.shape}."
        )
