"""Implements the exchange with Pallas kernels: the functions of `interface.Exchange`.

Each function pads rows to the width that the kernels need, and runs a kernel. The kernel's *plan*,
from `pallas_kernels.exchange.plan`, states the number of thread blocks and the sizes of buffers.
Importing this module imports Mosaic.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config, Received
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups, counts_here
from jax_ep.runtime import settings
from jax_ep.runtime.fabric import channels_of, num_gpus, of_axis
from pallas_kernels.exchange import combine as combine_kernel
from pallas_kernels.exchange import combine_grad as combine_grad_kernel
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.exchange import (
    low_latency_combine,
    low_latency_combine_grad,
    low_latency_dispatch,
)
from pallas_kernels.exchange import plan as plans
from pallas_kernels.exchange import rank_dispatch as rank_dispatch_kernel
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric.symmetric import Gpus


def dispatch(
    x: jax.Array, topk_idx: jax.Array, config: Config
) -> tuple[Received, Routes, RowGroups]:
    """Computes each choice's destination row and sends x [T, H] there; see `Exchange.dispatch`."""
    padded = _pad_hidden(x, config)
    fabric = of_axis(config.axis_name, padded, config.ranks_per_host)
    sizes = (fabric.num_ranks, *topk_idx.shape)
    options = dict(_group_options(fabric, config), capacity=config.capacity)
    if low_latency := _low_latency_plan(fabric, padded, sizes, config):
        received, rows, counts, *sizes_of_groups = low_latency_dispatch.dispatch(
            padded, topk_idx, channels=channels_of(fabric), plan=low_latency, **options
        )
    else:
        received, rows, counts, *sizes_of_groups = dispatch_kernel.dispatch(
            padded,
            topk_idx,
            num_experts=config.num_experts,
            plan=_dispatch_plan(padded, sizes, config),
            wire=config.wire,
            **options,
        )
    group_sizes, expert_counts, num_dropped, rows_needed = sizes_of_groups
    recv_counts = counts_here(counts, config.rank())
    dropped_counts = jnp.sum(recv_counts, axis=0, dtype=jnp.int32) - expert_counts
    totals = num_dropped.reshape(()), rows_needed.reshape(())
    groups = RowGroups(group_sizes, expert_counts, *totals, dropped_counts)
    return _unpadded(received, x, config), Routes(topk_idx, rows, counts), groups


def dispatch_like(
    x: jax.Array, routes: Routes, config: Config, into: Received | None = None
) -> Received:
    """Sends x [T, H] to the rows of an earlier dispatch; see `ExchangeInParts.dispatch_like`."""
    padded = _pad_hidden(x, config)
    fabric = of_axis(config.axis_name, padded, config.ranks_per_host)
    options = dict(_group_options(fabric, config), capacity=config.capacity)
    sizes = routes.rows.shape
    if into is None and (low_latency := _low_latency_plan(fabric, padded, sizes, config)):
        received = low_latency_dispatch.dispatch_like(
            padded, *routes, channels=channels_of(fabric), plan=low_latency, **options
        )
    else:
        received = dispatch_kernel.dispatch_like(
            padded,
            routes.rows,
            routes.counts,
            plan=_dispatch_plan(padded, sizes, config),
            wire=config.wire,
            into=None if into is None else [_pad_hidden(into[0], config)],
            **options,
        )
    return _unpadded(received, x, config)


def combine(
    y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
) -> jax.Array:
    """Sums each token's rows of y [R, H] and sends the sums back; see `Exchange.combine`."""
    padded = _pad_hidden(y.astype(config.sum_dtype or y.dtype), config)
    out = _combine(padded, topk_weights, routes.topk_idx, routes.rows, config)
    return out[:, : y.shape[1]]


def _combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    topk_idx: jax.Array,
    rows: jax.Array,
    config: Config,
    *,
    by_rank: bool = False,
) -> jax.Array:
    """Sums padded rows y by token and sends the sums to the tokens' ranks; returns [T, H].

    Args:
      y: [R, H], or rank-major [N·T, H] if `by_rank`. H includes the columns of zeros that
        `_pad_hidden` has appended.
      topk_weights: [T, K], the routing weights by which rows are multiplied before they are summed;
        None: rows are summed without weights. It is None if `by_rank`.
      topk_idx: [T, K] int32, the experts that this rank's tokens choose.
      rows: [N, T, K] int32: for choice k of rank s's token t, entry [s, t, k] is the row of y with
        the expert's output, R or more if that row was dropped. If `by_rank`, it is the expert's
        index among this rank's experts. In both cases it is -1 if the expert is on another rank.
      config: the static arguments of the exchange.
      by_rank: whether y is rank-major: row s·T + t is for token t of rank s.
    """
    fabric = of_axis(config.axis_name, y, config.ranks_per_host)
    operands = y, topk_weights, topk_idx, rows
    options: Any = dict(fabric=fabric, by_rank=by_rank)
    if low_latency := _low_latency_plan(fabric, y, rows.shape, config):
        return low_latency_combine.combine(
            *operands, channels=channels_of(fabric), plan=low_latency, **options
        )
    return combine_kernel.combine(
        *operands,
        plan=plans.for_combine(_row(y, config), _sizes(rows.shape, config), settings.num_blocks()),
        num_experts=config.num_experts,
        wire=config.wire,
        **options,
    )


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    routes: Routes,
    config: Config,
    into: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of a weighted combine; see `ExchangeInParts.combine_grad`.

    If `config.wire` quantizes rows, `dispatch_like` sends the cotangents g, and XLA multiplies the
    received rows by the weights.
    """
    if config.wire.quantized:
        return xla_exchange.combine_grad(
            g, topk_weights, y, routes, config, into, send=dispatch_like
        )
    hidden = y.shape[1]
    g, y = _pad_hidden(g, config), _pad_hidden(y, config)
    fabric = of_axis(config.axis_name, g, config.ranks_per_host)
    operands = g, topk_weights, y, *routes
    options = _group_options(fabric, config)
    sizes = routes.rows.shape
    if into is None and (low_latency := _low_latency_plan(fabric, y, sizes, config)):
        dy, dweights = low_latency_combine_grad.combine_grad(
            *operands, channels=channels_of(fabric), plan=low_latency, **options
        )
        return dy[:, :hidden], dweights
    plan = plans.for_combine_grad(_row(y, config), _sizes(sizes, config), settings.num_blocks())
    into = None if into is None else _pad_hidden(into, config)
    dy, dweights = combine_grad_kernel.combine_grad(*operands, plan=plan, into=into, **options)
    return dy[:, :hidden], dweights


def rank_dispatch(
    x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
) -> tuple[Received, RankRoutes, jax.Array | None]:
    """Sends tokens x [T, H] to their experts' ranks; see `Exchange.rank_dispatch`."""
    num_tokens = x.shape[0]
    padded = _pad_hidden(x, config)
    fabric = of_axis(config.axis_name, padded, config.ranks_per_host)
    plan = plans.for_rank_dispatch(
        _row(padded, config),
        _sizes((fabric.num_ranks, *topk_idx.shape), config),
        settings.num_blocks(),
        weighted=topk_weights is not None,
    )
    received, local_topk_idx, weights = rank_dispatch_kernel.rank_dispatch(
        padded,
        topk_idx,
        topk_weights,
        num_experts=config.num_experts,
        fabric=fabric,
        plan=plan,
        wire=config.wire,
    )
    parts = (part.reshape(-1, num_tokens, part.shape[1]) for part in _unpadded(received, x, config))
    return tuple(parts), RankRoutes(topk_idx, local_topk_idx), weights


def rank_combine(y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
    """Sends sums y [N, T, H] to the tokens' ranks and adds them; see `Exchange.rank_combine`."""
    hidden = y.shape[-1]
    y = _pad_hidden(y.reshape(-1, hidden).astype(config.sum_dtype or y.dtype), config)
    out = _combine(y, None, routes.topk_idx, routes.local_topk_idx, config, by_rank=True)
    return out[:, :hidden]


def _group_options(fabric: Gpus, config: Config) -> dict[str, Any]:
    """Returns keyword arguments that the kernels of expert-major calls share."""
    return dict(
        fabric=fabric,
        expert_alignment=config.expert_alignment,
        fair=config.overflow == "fair",
        zero_unused=config.zero_unused,
    )


def _low_latency_plan(
    fabric: Gpus, x: jax.Array, sizes: tuple[int, ...], config: Config
) -> plans.LowLatencyPlan | None:
    """Returns the low-latency kernels' plan for padded rows x [.., H] and sizes (N, T, K).

    A plan states the numbers of thread blocks and the sizes of buffers. Returns None if these
    kernels do not support the rows.
    """
    return plans.for_low_latency(
        _row(x, config), _sizes(sizes, config), num_gpus(fabric), settings.num_blocks()
    )


def _dispatch_plan(x: jax.Array, sizes: tuple[int, ...], config: Config) -> Plan:
    """Returns the `Plan` of the dispatch kernel for padded rows x [T, H] and sizes (N, T, K)."""
    return plans.for_dispatch(_row(x, config), _sizes(sizes, config), settings.num_blocks())


def _sizes(sizes: tuple[int, ...], config: Config) -> plans.Sizes:
    """Returns the `Sizes` from which plans are made; `sizes` are (N, T, K), `config` gives E."""
    num_ranks, num_tokens, top_k = sizes
    return plans.Sizes(
        num_tokens=num_tokens, num_ranks=num_ranks, top_k=top_k, num_experts=config.num_experts
    )


def _row(x: jax.Array, config: Config) -> plans.Row:
    return plans.Row(x.shape[1], x.dtype, config.wire)


def _pad_hidden(x: jax.Array, config: Config) -> jax.Array:
    """Pads rows x [.., H] with columns of zeros to the width that the kernels need."""
    padding = plans.padded_hidden(x.shape[1], x.dtype, config.wire) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding))) if padding else x


def _unpadded(received: Received, x: jax.Array, config: Config) -> Received:
    """Removes the padding columns from received rows; x [T, H] has the rows' unpadded width."""
    parts = config.wire.row_parts(x.shape[1], x.dtype)
    return tuple(part[:, :columns] for part, (columns, _) in zip(received, parts, strict=True))
