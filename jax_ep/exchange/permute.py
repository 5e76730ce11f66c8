"""Permutes rank-major rows to the expert-major layout of `grouped_matmul`, and unpermutes results.

In the rank-major layout, all experts that a token chose on a rank share one row, so the rank must
gather the rows of each expert. This gather is a `dispatch` over no mesh axes, axis_name=(): the
rank sends rows only to itself.

    received = dispatch(x, topk_idx, ..., layout="rank", topk_weights=topk_weights)
    grouped = group_by_expert(received)
    y = grouped_matmul(grouped.tokens, w, grouped.group_sizes)
    out = combine(sum_by_token(y, grouped, received), received.handle)
"""

from __future__ import annotations

import dataclasses

import jax

from jax_ep import checks
from jax_ep.exchange.api import combine, dispatch, dispatch_like
from jax_ep.exchange.interface import Dispatched, Implementation, RankDispatched
from jax_ep.exchange.routes import Overflow


def group_by_expert(
    received: RankDispatched,
    *,
    capacity: int | None = None,
    expert_alignment: int = 1,
    overflow: Overflow = "tail",
    implementation: Implementation = None,
) -> Dispatched:
    """Permutes received rank-major rows [N, T, H] to the expert-major layout, [R, H].

    Args:
      received: the result of `dispatch(layout="rank")`.
      capacity, expert_alignment, overflow: as in an expert-major `dispatch`.
      implementation: "pallas", "xla", or None for the best that runs here. float8 rows need "xla".

    Returns:
      The `Dispatched` of an expert-major dispatch, but with a handle for `sum_by_token`.
      Differentiable in `received.tokens`, unless these rows are quantized.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    _check_received(received)
    num_ranks, num_tokens, top_k = received.handle.shape
    num_rows = num_ranks * num_tokens
    # The leaves are the array of rows; or, for a QuantizedArray, its values and its scales. The
    # dispatch permutes the values, and dispatch_like permutes the scales in the same way.
    leaves, tree = jax.tree.flatten(received.tokens)
    values, *scales = (leaf.reshape(num_rows, leaf.shape[-1]) for leaf in leaves)
    grouped = dispatch(
        values,
        received.local_topk_idx.reshape(num_rows, top_k),
        num_experts=received.handle.num_experts // num_ranks,
        axis_name=(),
        capacity=capacity,
        expert_alignment=expert_alignment,
        overflow=overflow,
        implementation=implementation,
    )
    rows = [
        grouped.tokens,
        *(dispatch_like(x, grouped.handle, implementation=implementation) for x in scales),
    ]
    return dataclasses.replace(grouped, tokens=jax.tree.unflatten(tree, rows))


def sum_by_token(
    y: jax.Array,
    grouped: Dispatched,
    received: RankDispatched,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Sums the expert-major rows of each token on this rank, for a rank-major `combine`.

    Args:
      y: [R, H'] floating: one row for each row of `grouped.tokens`.
      grouped: the result of `group_by_expert(received)`.
      received: the result of `dispatch(layout="rank")`. Rows are multiplied by
        `received.topk_weights`, if the dispatch had weights.
      implementation: "pallas", "xla", or None for the best that runs here.

    Returns:
      [N, T, H'] of y's dtype: one sum for each (source rank, token), computed in float32 in the
      order of the choices and rounded once. Differentiable in y and the weights.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    _check_received(received)
    if not isinstance(grouped, Dispatched):
        raise TypeError(
            "grouped must be the Dispatched that group_by_expert(received) returned, but is "
            f"{checks.described(grouped)}."
        )
    num_ranks, num_tokens, top_k = received.handle.shape
    rows = grouped.handle.routes.rows
    expected = (1, num_ranks * num_tokens, top_k)
    if grouped.handle.axis_name or rows.shape != expected:
        raise ValueError(
            "grouped must be the Dispatched that group_by_expert(received) returned, with routes "
            f"of shape {expected} over no axis, but has {rows.shape} over "
            f"{grouped.handle.axis_name}."
        )
    weights = received.topk_weights
    if weights is not None:
        weights = weights.reshape(-1, top_k)
    sums = combine(y, grouped.handle, weights, implementation=implementation)
    return sums.reshape(num_ranks, num_tokens, y.shape[1])


def _check_received(received: RankDispatched) -> None:
    if not isinstance(received, RankDispatched):
        raise TypeError(
            'received must be the RankDispatched of a dispatch(layout="rank"), but is '
            f"{checks.described(received)}."
        )
