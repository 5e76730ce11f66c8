"""The fast exchange, on the Pallas kernels: same functions and shapes as `xla_exchange`.

What is here is policy: how a payload is padded for the kernels, and how a kernel is spread over
thread blocks and shared memory. The kernels themselves are in `pallas_kernels`.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import routes, xla_exchange
from jax_ep.routes import Routes
from pallas_kernels import combine as combine_kernel
from pallas_kernels import dispatch as dispatch_kernel
from pallas_kernels.fabric import Mesh
from pallas_kernels.plan import SHARED_MEMORY_BYTES, Plan, Tiling

AxisName = tuple[str, ...]

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_ROW_BYTES = 128  # a row must be whole 128-byte lines
_RESERVED_BYTES = 24 * 1024  # of shared memory, for routes and bookkeeping
_TIMEOUT_SECONDS = 100.0  # of a wait for a peer; JAX_EP_TIMEOUT_SECONDS overrides it
_MIN_SLOTS = 3
_MAX_SLOTS = 16


def payload_unavailable_reason(hidden: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why rows of this kind cannot go through the kernels, or None if they can."""
    if dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        return f"its dtype is {jnp.dtype(dtype).name}, not one of {names}"
    if _combine_slots(_padded_hidden(hidden, dtype), dtype) < _MIN_SLOTS:
        return f"a row of {hidden} {jnp.dtype(dtype).name} is too long for shared memory"
    return None


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity: int,
    expert_alignment: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routes [T, K] and sends [T, H]; returns tokens [R, H], rows [N, T, K], counts [N, E]."""
    hidden = x.shape[1]
    x = _pad_hidden(x)
    plan = _dispatch_plan(x)
    counts, counts_before = routes.count_by_block(
        topk_idx, num_experts, plan.tokens_per_block(x.shape[0]), plan.num_blocks
    )
    tokens, rows, all_counts = dispatch_kernel.dispatch(
        x,
        topk_idx,
        counts,
        counts_before,
        fabric=mesh_fabric(axis_name),
        plan=plan,
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    return tokens[:, :hidden], rows, all_counts


def dispatch_like(
    x: jax.Array, route: Routes, *, axis_name: AxisName, capacity: int, expert_alignment: int
) -> jax.Array:
    """Sends [T, H] along known routes: [R, H]."""
    hidden = x.shape[1]
    x = _pad_hidden(x)
    tokens = dispatch_kernel.dispatch_like(
        x,
        route.rows,
        route.counts,
        fabric=mesh_fabric(axis_name),
        plan=_dispatch_plan(x),
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    return tokens[:, :hidden]


def combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    route: Routes,
    *,
    axis_name: AxisName,
) -> jax.Array:
    """Weighs, sums and returns [R, H] to the tokens' owners: [T, H]."""
    hidden = y.shape[1]
    y = _pad_hidden(y)
    out = combine_kernel.combine(
        y,
        topk_weights,
        route.topk_idx,
        route.rows,
        fabric=mesh_fabric(axis_name),
        plan=_combine_plan(y, route.topk_idx.shape[0]),
        num_experts=route.counts.shape[1],
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
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of a weighted combine: of y [R, H], and of the weights [T, K] float32."""
    g_rows = dispatch_like(
        g, route, axis_name=axis_name, capacity=y.shape[0], expert_alignment=expert_alignment
    )
    return xla_exchange.combine_grad_of_rows(g_rows, topk_weights, y, route, axis_name=axis_name)


def mesh_fabric(axis_name: AxisName) -> Mesh:
    """The ranks of the enclosing `shard_map`, as the kernels see them."""
    timeout_s = float(os.environ.get("JAX_EP_TIMEOUT_SECONDS", _TIMEOUT_SECONDS))
    return Mesh(axis_name, tuple(lax.axis_size(name) for name in axis_name), timeout_s)


def _padded_hidden(hidden: int, dtype: jax.typing.DTypeLike) -> int:
    multiple = _ROW_BYTES // jnp.dtype(dtype).itemsize
    return -(-hidden // multiple) * multiple


def _pad_hidden(x: jax.Array) -> jax.Array:
    padding = _padded_hidden(x.shape[1], x.dtype) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding))) if padding else x


def _dispatch_plan(x: jax.Array) -> Plan:
    num_tokens, row_bytes = x.shape[0], x.shape[1] * x.dtype.itemsize
    rows = (SHARED_MEMORY_BYTES - _RESERVED_BYTES) // row_bytes - 1  # one is zeros
    num_copy_slots = max(1, min(4, rows // 3))
    num_slots = min(_MAX_SLOTS, rows - num_copy_slots)
    return Plan(
        num_blocks=min(64 if num_tokens <= 256 else 128, num_tokens),
        num_slots=num_slots,
        store_lag=num_slots // 2,
        num_copy_slots=num_copy_slots,
        step_tokens=1 if num_tokens <= 256 else 2,
    )


def _combine_slots(hidden: int, dtype: jax.typing.DTypeLike) -> int:
    itemsize = jnp.dtype(dtype).itemsize
    columns = Tiling.of(hidden, dtype).padded
    room = SHARED_MEMORY_BYTES - _RESERVED_BYTES - columns * (4 + itemsize)
    return min(_MAX_SLOTS, room // (columns * itemsize))


def _combine_plan(y: jax.Array, num_tokens: int) -> Plan:
    slots = _combine_slots(y.shape[1], y.dtype)
    return Plan(
        num_blocks=min(128, num_tokens),
        num_slots=slots,
        store_lag=max(1, slots // 3),
        step_tokens=1,
        mailbox_steps=4,
    )
