"""Exchanges rows in the rank-major layout: one row per (source rank, token).

`dispatch(layout="rank")` returns [N, T, H], the smallest buffer that fits any routing, and each
row's local experts. `combine` takes one partial sum per row. `jax_ep.exchange.permute` permutes
rows to the expert-major layout that `grouped_matmul` needs, and back.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange import gradients, routes
from jax_ep.exchange.routes import RankRoutes
from jax_ep.runtime.jax_compat import register_for_export


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["routes"],
    meta_fields=["axis_name", "num_experts"],
)
@dataclasses.dataclass(frozen=True)
class RankHandle:
    """The routes of one dispatch in the rank-major layout, for `combine`; a pytree.

    Attributes:
      routes: the experts that each rank's tokens chose; see `jax_ep.exchange.routes.RankRoutes`.
      axis_name: the mesh axes of the dispatch.
      num_experts: E, the experts of all ranks.
    """

    routes: RankRoutes
    axis_name: tuple[str, ...]
    num_experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes (N, T, K) of the dispatch: ranks, tokens per rank, choices per token."""
        num_ranks, num_tokens, top_k = self.routes.local_topk_idx.shape
        return num_ranks, num_tokens, top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankDispatched:
    """The rows that a rank received in the rank-major layout, and their experts; a pytree.

    Attributes:
      tokens: [N, T, H] of x's dtype: row (s, t) is token t of rank s if the token chose any expert
        of this rank, and zero if not. With `output="quantized"`, tokens is a
        `jax_ep.QuantizedArray`, and neither tokens nor topk_weights have a gradient.
      local_topk_idx: [N, T, K] int32: each token's choices as local expert ids in [0, L); -1 where
        the choice names another rank's expert or no expert.
      topk_weights: [N, T, K], in the dtype that was sent: the weight of each choice, zero where
        local_topk_idx is -1; None if the dispatch was given no weights.
      handle: the routes, for `combine` and `dispatch_like`.
    """

    tokens: Any
    local_topk_idx: jax.Array
    topk_weights: jax.Array | None
    handle: RankHandle


register_for_export(RankHandle)
register_for_export(RankDispatched)


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: tuple[str, ...],
    **options: Any,
) -> RankDispatched:
    """Dispatches x [T, H] in the rank-major layout, for `api.dispatch(layout="rank")`.

    `api.dispatch` has checked the arguments that both layouts share. `options` are further
    arguments of `gradients.configure`.
    """
    if topk_weights is not None:
        checks.check_array("topk_weights", topk_weights, 2, jnp.floating, "[T, K]")
        if topk_weights.shape != topk_idx.shape:
            raise ValueError(
                f"topk_weights must have topk_idx's shape {topk_idx.shape}, but has shape "
                f"{topk_weights.shape}."
            )
    config = gradients.configure(
        "x",
        x,
        axis_name=axis_name,
        num_experts=num_experts,
        layout="rank",
        list_words=topk_idx.shape[1] * (1 if topk_weights is None else 2),
        **options,
    )
    weights = None
    if topk_weights is None:
        (x,) = gradients.match((x,), axis_name)
    else:
        x, weights = gradients.match((x, topk_weights.astype(jnp.float32)), axis_name)
    topk_idx = routes.expert_ids(topk_idx, num_experts)
    tokens, route, weights = gradients.dispatch(config, x, topk_idx, weights)
    if weights is not None and topk_weights is not None:
        weights = weights.astype(topk_weights.dtype)
    handle = RankHandle(route, axis_name, num_experts)
    return RankDispatched(tokens, route.local_topk_idx, weights, handle)


def combine(
    y: jax.Array, handle: RankHandle, topk_weights: jax.Array | None, **options: Any
) -> jax.Array:
    """Sends rank-major partial sums y [N, T, H] to the tokens' ranks and adds them: [T, H].

    `api.combine` calls this function. topk_weights must be None, since y is summed over choices
    already. `options` are further arguments of `gradients.configure`.
    """
    check_handle(handle)
    checks.check_array("y", y, 3, jnp.floating, "[N, T, H]", may_be_empty=False)
    if y.shape[:2] != handle.shape[:2]:
        raise ValueError(
            f"y must have one row for each (source rank, token), {handle.shape[:2]}, but has shape "
            f"{y.shape}."
        )
    if topk_weights is not None:
        raise ValueError(
            "topk_weights must be None in the rank-major layout, where y is already summed over a "
            "token's choices: give them to dispatch, and multiply by RankDispatched.topk_weights."
        )
    config = gradients.configure("y", y, **_options_of(handle), **options)
    (y,) = gradients.match((y,), handle.axis_name)
    return gradients.combine(config, y, None, handle.routes)


def dispatch_like(x: jax.Array, handle: RankHandle, **options: Any) -> Any:
    """Sends rows x [T, H'] to the ranks to which a rank-major dispatch sent its tokens.

    `api.dispatch_like` calls this function. Returns [N, T, H']. `options` are further arguments of
    `gradients.configure`.
    """
    check_handle(handle)
    checks.check_rows_of_tokens(x, handle.shape[1])
    config = gradients.configure("x", x, **_options_of(handle), **options)
    (x,) = gradients.match((x,), handle.axis_name)
    return gradients.dispatch_like(config, x, handle.routes)


def check_handle(handle: RankHandle) -> None:
    """Raises ValueError unless the handle's routes are for all N ranks along its mesh axes."""
    num_ranks = checks.num_ranks(handle.axis_name)
    if len(handle.routes.local_topk_idx.shape) != 3 or handle.shape[0] != num_ranks:
        raise ValueError(
            f"handle.routes.local_topk_idx must have shape [{num_ranks}, T, K], one plane for each "
            f"rank along {handle.axis_name}, but has shape {handle.routes.local_topk_idx.shape}."
        )


def _options_of(handle: RankHandle) -> dict[str, Any]:
    """Returns the options of a dispatch that its handle holds, as arguments of `configure`."""
    return dict(
        axis_name=handle.axis_name,
        num_experts=handle.num_experts,
        layout="rank",
        list_words=handle.shape[2],
    )
