"""Implements the exchange with Pallas kernels: the functions that `jax_ep.exchange.xla` documents.

Importing this module imports Mosaic. Functions import the kernels that they run, since a program
uses only a few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.exchange.interface import Config, Received
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups, counts_here
from jax_ep.runtime import environment
from jax_ep.runtime.fabric import channels_of, num_gpus, of_axis
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric.symmetric import Gpus


def dispatch_by_choices(
    x: jax.Array, topk_idx: jax.Array, config: Config
) -> tuple[Received, Routes, RowGroups]:
    padded = _pad_hidden(x, config)
    fabric = of_axis(config.axis_name, padded, config.ranks_per_host)
    sizes = (fabric.num_ranks, *topk_idx.shape)  # (N, T, K)
    options: dict[str, Any] = dict(fabric=fabric, buffer=_receive_buffer(config))
    if low_latency := _low_latency_plan(fabric, padded, sizes, config):
        from pallas_kernels.exchange import low_latency_dispatch

        received, rows, counts, *sizes_of_groups = low_latency_dispatch.low_latency_dispatch(
            padded, topk_idx, channels=channels_of(fabric), plan=low_latency, **options
        )
    else:
        from pallas_kernels.exchange import dispatch as dispatch_kernels

        received, rows, counts, *sizes_of_groups = dispatch_kernels.expert_dispatch(
            padded,
            topk_idx,
            num_experts=config.num_experts,
            plan=_plan(plans.for_dispatch, padded, sizes, config),
            wire=config.wire,
            **options,
        )
    group_sizes, expert_counts, num_dropped, rows_needed = sizes_of_groups
    recv_counts = counts_here(counts, config.rank())
    dropped_counts = jnp.sum(recv_counts, axis=0, dtype=jnp.int32) - expert_counts
    groups = RowGroups(
        group_sizes=group_sizes,
        expert_counts=expert_counts,
        num_dropped=num_dropped.reshape(()),
        rows_needed=rows_needed.reshape(()),
        dropped_counts=dropped_counts,
    )
    return _unpadded(received, x, config), Routes(topk_idx, rows, counts), groups


def dispatch_like(
    x: jax.Array, routes: Routes, config: Config, into: Received | None = None
) -> Received:
    padded = _pad_hidden(x, config)
    fabric = of_axis(config.axis_name, padded, config.ranks_per_host)
    options: dict[str, Any] = dict(fabric=fabric, buffer=_receive_buffer(config))
    sizes = routes.rows.shape  # (N, T, K)
    # The low-latency kernels only write a whole receive buffer, and take no `into`.
    if into is None and (low_latency := _low_latency_plan(fabric, padded, sizes, config)):
        from pallas_kernels.exchange import low_latency_dispatch

        received = low_latency_dispatch.dispatch_like(
            padded,
            routes.topk_idx,
            routes.rows,
            routes.counts,
            channels=channels_of(fabric),
            plan=low_latency,
            **options,
        )
    else:
        from pallas_kernels.exchange import dispatch as dispatch_kernels

        received = dispatch_kernels.dispatch_like(
            padded,
            routes.rows,
            routes.counts,
            plan=_plan(plans.for_dispatch, padded, sizes, config),
            wire=config.wire,
            # `into` is one array: calls with `into` do not quantize rows.
            into=None if into is None else [_pad_hidden(into[0], config)],
            **options,
        )
    return _unpadded(received, x, config)


def combine(
    y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
) -> jax.Array:
    return _combine(y, topk_weights, routes.topk_idx, routes.rows, config)


def _combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    topk_idx: jax.Array,
    rows: jax.Array,
    config: Config,
    *,
    by_rank: bool = False,
) -> jax.Array:
    """Sums rows y [R, H], or [N·T, H] if `by_rank`, and sends the sums: [T, H]."""
    # `rows` [N, T, K] int32 has the row of y of each choice; if `by_rank`, its local expert.
    padded = _pad_hidden(y.astype(config.sum_dtype or y.dtype), config)
    fabric = of_axis(config.axis_name, padded, config.ranks_per_host)
    operands = padded, topk_weights, topk_idx, rows
    options: Any = dict(fabric=fabric, by_rank=by_rank)
    if low_latency := _low_latency_plan(fabric, padded, rows.shape, config):
        from pallas_kernels.exchange import low_latency_combine

        out = low_latency_combine.combine(
            *operands, channels=channels_of(fabric), plan=low_latency, **options
        )
    else:
        from pallas_kernels.exchange import combine as combine_kernel

        out = combine_kernel.combine(
            *operands,
            plan=_plan(plans.for_combine, padded, rows.shape, config),
            num_experts=config.num_experts,
            wire=config.wire,
            **options,
        )
    return out[:, : y.shape[1]]


def rank_dispatch(
    x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
) -> tuple[Received, RankRoutes, jax.Array | None]:
    from pallas_kernels.exchange import rank_dispatch as rank_dispatch_kernel

    num_tokens = x.shape[0]
    padded = _pad_hidden(x, config)
    fabric = of_axis(config.axis_name, padded, config.ranks_per_host)
    sizes = (fabric.num_ranks, *topk_idx.shape)  # (N, T, K)
    is_weighted = topk_weights is not None
    plan = _plan(plans.for_rank_dispatch, padded, sizes, config, weighted=is_weighted)
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
    rows = y.reshape(-1, y.shape[-1])
    return _combine(rows, None, routes.topk_idx, routes.local_topk_idx, config, by_rank=True)


def _receive_buffer(config: Config) -> plans.ReceiveBuffer:
    fair = config.overflow == "fair"
    return plans.ReceiveBuffer(config.capacity, config.expert_alignment, fair, config.zero_unused)


def _low_latency_plan(
    fabric: Gpus, x: jax.Array, sizes: tuple[int, ...], config: Config
) -> plans.LowLatencyPlan | None:
    """Returns the low-latency kernels' plan for padded x and sizes (N, T, K); None: unsupported."""
    return _plan(plans.for_low_latency, x, sizes, config, num_gpus=num_gpus(fabric))


def _plan(
    make: Callable[..., Any], x: jax.Array, sizes: tuple[int, ...], config: Config, **options: Any
) -> Any:
    """Calls `make`, such as `plans.for_dispatch`, for padded rows x and sizes (N, T, K)."""
    num_ranks, num_tokens, top_k = sizes
    row = plans.Row(x.shape[1], x.dtype, config.wire)
    call_sizes = plans.Sizes(
        num_tokens=num_tokens, num_ranks=num_ranks, top_k=top_k, num_experts=config.num_experts
    )
    # The environment may limit the number of thread blocks.
    return make(row, call_sizes, num_blocks=environment.num_blocks(), **options)


def _pad_hidden(x: jax.Array, config: Config) -> jax.Array:
    padding = plans.padded_hidden(x.shape[1], x.dtype, config.wire) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding))) if padding else x


def _unpadded(received: Received, x: jax.Array, config: Config) -> Received:
    parts = config.wire.row_parts(x.shape[1], x.dtype)
    return tuple(part[:, :columns] for part, (columns, _) in zip(received, parts, strict=True))
