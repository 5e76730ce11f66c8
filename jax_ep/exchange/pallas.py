"""The fast exchange, on the Pallas kernels: same functions and shapes as `xla_exchange`.

It pads payloads as the kernels need them, and asks `pallas_kernels.exchange.plan` how a kernel is
spread over thread blocks and shared memory.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import routes
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.routes import Layout, RankRoutes, Routes
from jax_ep.runtime import processes
from pallas_kernels.exchange import combine as combine_kernel
from pallas_kernels.exchange import combine_grad as combine_grad_kernel
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.exchange import plan as plans
from pallas_kernels.exchange import rank_dispatch as rank_dispatch_kernel
from pallas_kernels.exchange.quantize import BLOCK
from pallas_kernels.exchange.sender import Payload
from pallas_kernels.fabric.fabric import Mesh
from pallas_kernels.fabric.plan import Plan

AxisName = tuple[str, ...]

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def unavailable_reason(
    hidden: int,
    dtype: jax.typing.DTypeLike,
    num_ranks: int,
    top_k: int,
    num_experts: int,
    wire_dtype: jnp.dtype | None = None,
) -> str | None:
    """Why such an exchange cannot go through the kernels, or None if it can."""
    if dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        return f"its dtype is {jnp.dtype(dtype).name}, not one of {names}"
    hidden = plans.padded_hidden(hidden, dtype, wire_dtype)
    row = plans.Row(hidden, dtype, wire_dtype)
    if not plans.fits_shared_memory(row, num_ranks=num_ranks, top_k=top_k, num_experts=num_experts):
        return (
            f"a row of {hidden} {jnp.dtype(dtype).name} is too long for shared memory, which also "
            f"holds the routes of {num_experts} experts and {top_k} choices"
        )
    return None


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity: int,
    expert_alignment: int,
    wire_dtype: jnp.dtype | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, Layout]:
    """Routes [T, K] and sends [T, H].

    Returns what arrives, rows [N, T, K], counts [N, E], and how the first is laid out. What arrives
    is tokens [R, H]; or with a wire_dtype two arrays, rows and scales [R, H / 128].
    """
    hidden = x.shape[1]
    x = _pad_hidden(x, wire_dtype)
    fabric = mesh_fabric(axis_name)
    plan = plans.dispatch(
        plans.Row(x.shape[1], x.dtype, wire_dtype),
        num_tokens=x.shape[0],
        num_ranks=fabric.num_ranks,
        top_k=topk_idx.shape[1],
        num_experts=num_experts,
        num_blocks=forced_num_blocks(),
    )
    received, rows, counts, group_sizes, expert_counts, *totals = dispatch_kernel.dispatch(
        x,
        topk_idx,
        routes.count_experts(topk_idx, num_experts),
        fabric=fabric,
        plan=plan,
        capacity=capacity,
        expert_alignment=expert_alignment,
        wire_dtype=wire_dtype,
    )
    layout = Layout(group_sizes, expert_counts, *(total.reshape(()) for total in totals))
    return _unpadded(received, hidden), rows, counts, layout


def dispatch_like(
    x: jax.Array,
    route: Routes,
    *,
    axis_name: AxisName,
    capacity: int,
    expert_alignment: int,
    wire_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """Sends [T, H] along known routes: what arrives, as in `dispatch`."""
    hidden = x.shape[1]
    x = _pad_hidden(x, wire_dtype)
    num_ranks, num_tokens, top_k = route.rows.shape
    plan = plans.dispatch(
        plans.Row(x.shape[1], x.dtype, wire_dtype),
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        top_k=top_k,
        num_experts=route.counts.shape[1],
        num_blocks=forced_num_blocks(),
    )
    tokens = dispatch_kernel.dispatch_like(
        x,
        route.rows,
        route.counts,
        fabric=mesh_fabric(axis_name),
        plan=plan,
        capacity=capacity,
        expert_alignment=expert_alignment,
        wire_dtype=wire_dtype,
    )
    return _unpadded(tokens, hidden)


def combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    route: Routes,
    *,
    axis_name: AxisName,
    wire_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Weighs, sums and returns [R, H] to the tokens' owners: [T, H]."""
    hidden = y.shape[1]
    y = _pad_hidden(y, wire_dtype)
    out = combine_kernel.combine(
        y,
        topk_weights,
        route.topk_idx,
        route.rows,
        fabric=mesh_fabric(axis_name),
        plan=_combine_plan(y, route.rows, wire_dtype),
        num_experts=route.counts.shape[1],
        wire_dtype=wire_dtype,
    )
    return out[:, :hidden]


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    route: Routes,
    *,
    axis_name: AxisName,
    expert_alignment: int,
    wire_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of a weighted combine: of y [R, H], and of the weights [T, K] float32.

    `g` [T, H] is the cotangent of the result. With a wire_dtype it is dispatched in it, and what
    becomes of the rows that arrive is XLA's.
    """
    if wire_dtype is not None:
        return xla_exchange.combine_grad(
            g,
            topk_weights,
            y,
            route,
            axis_name=axis_name,
            expert_alignment=expert_alignment,
            wire_dtype=wire_dtype,
            send=dispatch_like,
        )
    hidden = y.shape[1]
    g, y = _pad_hidden(g), _pad_hidden(y)
    num_ranks, num_tokens, top_k = route.rows.shape
    plan = plans.combine_grad(
        plans.Row(y.shape[1], y.dtype),
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        top_k=top_k,
        num_experts=route.counts.shape[1],
        num_blocks=forced_num_blocks(),
    )
    dy, dweights = combine_grad_kernel.combine_grad(
        g,
        topk_weights,
        y,
        *route,
        fabric=mesh_fabric(axis_name),
        plan=plan,
        expert_alignment=expert_alignment,
    )
    return dy[:, :hidden], dweights


def rank_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    axis_name: AxisName,
    wire_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """Sends [T, H]: what arrives, local_topk_idx [N, T, K] and, if given, the weights there.

    What arrives is tokens [N, T, H]; or with a wire_dtype rows and scales [N, T, H / 128].
    """
    num_tokens, hidden = x.shape
    x = _pad_hidden(x, wire_dtype)
    fabric = mesh_fabric(axis_name)
    plan = plans.rank_dispatch(
        plans.Row(x.shape[1], x.dtype, wire_dtype),
        num_tokens=num_tokens,
        num_ranks=fabric.num_ranks,
        list_words=topk_idx.shape[1] * (1 if topk_weights is None else 2),
        num_blocks=forced_num_blocks(),
    )
    tokens, local_topk_idx, weights = rank_dispatch_kernel.rank_dispatch(
        x,
        topk_idx,
        topk_weights,
        num_experts=num_experts,
        fabric=fabric,
        plan=plan,
        wire_dtype=wire_dtype,
    )
    parts = [part.reshape(-1, num_tokens, part.shape[1]) for part in _unpadded(tokens, hidden)]
    return (*parts, local_topk_idx) if weights is None else (*parts, local_topk_idx, weights)


def rank_combine(
    y: jax.Array,
    route: RankRoutes,
    *,
    num_experts: int,
    axis_name: AxisName,
    wire_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns the sums [N, T, H] to the tokens' owners and adds them: [T, H]."""
    hidden = y.shape[-1]
    y = _pad_hidden(y.reshape(-1, hidden), wire_dtype)
    out = combine_kernel.combine(
        y,
        None,
        route.topk_idx,
        route.local_topk_idx,
        fabric=mesh_fabric(axis_name),
        plan=_combine_plan(y, route.local_topk_idx, wire_dtype),
        num_experts=num_experts,
        by_rank=True,
        wire_dtype=wire_dtype,
    )
    return out[:, :hidden]


def _combine_plan(y: jax.Array, rows: jax.Array, wire_dtype: jnp.dtype | None) -> Plan:
    """For rows, or local experts, [N, T, K]."""
    num_ranks, num_tokens, top_k = rows.shape
    return plans.combine(
        plans.Row(y.shape[1], y.dtype, wire_dtype),
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        top_k=top_k,
        num_blocks=forced_num_blocks(),
    )


def mesh_fabric(axis_name: AxisName) -> Mesh:
    """The ranks of the enclosing `shard_map`, as the kernels see them."""
    sizes = tuple(lax.axis_size(name) for name in axis_name)
    return Mesh(axis_name, sizes, processes.timeout_seconds())


def forced_num_blocks() -> int | None:
    """JAX_EP_NUM_BLOCKS: the most thread blocks of a kernel; None for those measured to be fastest.

    It may leave part of the GPU to a kernel that runs at the same time.
    """
    if "JAX_EP_NUM_BLOCKS" not in os.environ:
        return None
    return int(_positive("JAX_EP_NUM_BLOCKS", 0, int))


def _positive(variable: str, default: float, kind: type) -> float:
    """The value of an environment variable, which must be positive."""
    text = os.environ.get(variable, default)
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise ValueError(f"{variable} must be a positive {kind.__name__}, but is {text!r}.")
    return value


def _pad_hidden(x: jax.Array, wire_dtype: jnp.dtype | None = None) -> jax.Array:
    padding = plans.padded_hidden(x.shape[1], x.dtype, wire_dtype) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding))) if padding else x


def _unpadded(received: Payload, hidden: int) -> tuple[jax.Array, ...]:
    """Rows, or rows and their scales, as rows of `hidden` columns have them."""
    if not isinstance(received, tuple):
        return (received[:, :hidden],)
    rows, scales = received
    return rows[:, :hidden], scales[:, : hidden // BLOCK]
