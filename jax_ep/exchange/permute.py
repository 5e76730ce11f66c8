"""From the rank layout to `grouped_matmul` and back: one local gather each way.

A grouped matmul reads each expert's rows next to each other, and the rank layout has one row for
all of a token's experts here, so the rows must be gathered once. That is a dispatch among one rank,
over the axes (): no communication, and on GPUs the same kernels. Its row order is that of the
expert layout, so everything computed from it agrees with the expert layout bit for bit.

    received = dispatch(x, topk_idx, ..., layout="rank", topk_weights=topk_weights)
    grouped = group_by_expert(received)
    y = grouped_matmul(grouped.tokens, w, grouped.group_sizes)
    out = combine(sum_by_token(y, grouped, received), received.handle)
"""

from __future__ import annotations

import dataclasses

import jax

from jax_ep import checks
from jax_ep.exchange.api import Dispatched, combine, dispatch, dispatch_like
from jax_ep.exchange.interface import Implementation
from jax_ep.exchange.rank_major import RankDispatched


def group_by_expert(
    received: RankDispatched,
    *,
    capacity: int | None = None,
    expert_alignment: int = 1,
    implementation: Implementation = None,
) -> Dispatched:
    """Gathers [N, T, H] into the blocks of the local experts: what `dispatch` would have given.

    Args:
      received: of a `dispatch(layout="rank")`.
      capacity, expert_alignment, implementation: as in `dispatch`. float8 rows take "xla".

    Returns:
      A `Dispatched`, bit for bit that of the expert layout; but its handle is local, for
      `sum_by_token`. Differentiable in `received.tokens`, unless they are quantized.

    Raises:
      TypeError: `received` is not of the rank layout.
      ValueError: as `dispatch` does.
    """
    _check_received(received)
    num_ranks, num_tokens, top_k = received.handle.shape
    flat = (num_ranks * num_tokens, -1)
    grouped = dispatch(
        received.tokens.reshape(flat),
        received.local_topk_idx.reshape(flat),
        num_experts=received.handle.num_experts // num_ranks,
        axis_name=(),
        capacity=capacity,
        expert_alignment=expert_alignment,
        implementation=implementation,
    )
    if received.scales is None:
        return grouped
    scales = dispatch_like(
        received.scales.reshape(flat), grouped.handle, implementation=implementation
    )
    return dataclasses.replace(grouped, scales=scales)


def sum_by_token(
    y: jax.Array,
    grouped: Dispatched,
    received: RankDispatched,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """The partial sums that `combine` takes in the rank layout.

    Args:
      y: [R, H'] floating: one row for each row of `grouped.tokens`.
      grouped: of `group_by_expert(received)`.
      received: weighs with `received.topk_weights`, or sums plainly if there are none.
      implementation: as in `combine`.

    Returns:
      [N, T, H'], y's dtype, summed in float32 in the order of the choices and rounded once.
      Differentiable in y and the weights.

    Raises:
      TypeError: `received` is not of the rank layout, or `grouped` of no dispatch.
      ValueError: `grouped` is not of `received`, or as `combine` does.
    """
    _check_received(received)
    if not isinstance(grouped, Dispatched):
        raise TypeError(
            "grouped must be what group_by_expert makes of received, a Dispatched, but is "
            f"{checks.described(grouped)}."
        )
    num_ranks, num_tokens, top_k = received.handle.shape
    rows, expected = grouped.handle.routes.rows, (1, num_ranks * num_tokens, top_k)
    if grouped.handle.axis_name or rows.shape != expected:
        raise ValueError(
            f"grouped must be what group_by_expert makes of received, with routes of shape "
            f"{expected} over no axis, but has {rows.shape} over {grouped.handle.axis_name}."
        )
    weights = received.topk_weights
    if weights is not None:
        weights = weights.reshape(-1, top_k)
    sums = combine(y, grouped.handle, weights, implementation=implementation)
    return sums.reshape(num_ranks, num_tokens, y.shape[1])


def _check_received(received: RankDispatched) -> None:
    if not isinstance(received, RankDispatched):
        raise TypeError(
            'received must be of a dispatch(layout="rank"), a RankDispatched, but is '
            f"{checks.described(received)}."
        )
