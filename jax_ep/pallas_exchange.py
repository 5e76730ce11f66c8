"""The fast exchange, on the Pallas kernels: same functions and shapes as `xla_exchange`.

What is here is policy: how a payload is padded for the kernels, and how a kernel is spread over
thread blocks and shared memory. The kernels themselves are in `pallas_kernels`.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import routes
from jax_ep.routes import Layout, Routes
from pallas_kernels import combine as combine_kernel
from pallas_kernels import dispatch as dispatch_kernel
from pallas_kernels.fabric import Mesh
from pallas_kernels.plan import LANES, SHARED_MEMORY_BYTES, Plan, Tiling, align_up

AxisName = tuple[str, ...]

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_ROW_BYTES = 128  # a row must be whole 128-byte lines
_PADDING_BYTES = 16 * 1024  # of shared memory: what its pieces are aligned to, and barriers
_WINDOW_TOKENS = 16
_TIMEOUT_SECONDS = 100.0  # of a wait for a peer; JAX_EP_TIMEOUT_SECONDS overrides it
_MAX_SLOTS = 16

# The two regimes: up to this many tokens every microsecond counts, beyond it the link's bandwidth.
_FEW_TOKENS = 256
# Thread blocks by (op, whether tokens are few), measured on 8 H200s; JAX_EP_NUM_BLOCKS overrides
# it, say to leave part of the GPU to a kernel that runs beside.
_NUM_BLOCKS = {
    ("dispatch", True): 64,
    ("dispatch", False): 128,
    ("combine", True): 128,
    ("combine", False): 128,
}


def unavailable_reason(
    hidden: int,
    dtype: jax.typing.DTypeLike,
    num_ranks: int,
    top_k: int,
    num_experts: int,
) -> str | None:
    """Why such an exchange cannot go through the kernels, or None if it can."""
    if dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        return f"its dtype is {jnp.dtype(dtype).name}, not one of {names}"
    hidden = padded_hidden(hidden, dtype)
    rows = _dispatch_rows(hidden, dtype, num_ranks, top_k, num_experts)
    if rows < 3 or _combine_slots(hidden, dtype, num_ranks, top_k) < 3:
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
) -> tuple[jax.Array, jax.Array, jax.Array, Layout]:
    """Routes [T, K] and sends [T, H].

    Returns tokens [R, H], rows [N, T, K], counts [N, E], and how tokens is laid out.
    """
    hidden = x.shape[1]
    x = _pad_hidden(x)
    fabric = mesh_fabric(axis_name)
    plan = dispatch_plan(x, fabric.num_ranks, topk_idx.shape[1], num_experts)
    tokens, rows, counts, group_sizes, expert_counts, *totals = dispatch_kernel.dispatch(
        x,
        topk_idx,
        routes.count_experts(topk_idx, num_experts),
        fabric=fabric,
        plan=plan,
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    layout = Layout(group_sizes, expert_counts, *(total.reshape(()) for total in totals))
    return tokens[:, :hidden], rows, counts, layout


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
        plan=dispatch_plan(x, route.rows.shape[0], route.rows.shape[2], route.counts.shape[1]),
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
        plan=combine_plan(y, *route.rows.shape),
        num_experts=route.counts.shape[1],
    )
    return out[:, :hidden]


def mesh_fabric(axis_name: AxisName) -> Mesh:
    """The ranks of the enclosing `shard_map`, as the kernels see them."""
    timeout_s = _positive("JAX_EP_TIMEOUT_SECONDS", _TIMEOUT_SECONDS, float)
    return Mesh(axis_name, tuple(lax.axis_size(name) for name in axis_name), timeout_s)


def _num_blocks(op: str, num_tokens: int) -> int:
    num_blocks = _NUM_BLOCKS[op, num_tokens <= _FEW_TOKENS]
    return min(int(_positive("JAX_EP_NUM_BLOCKS", num_blocks, int)), num_tokens)


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


def padded_hidden(hidden: int, dtype: jax.typing.DTypeLike) -> int:
    """H as the kernels see it: rows of whole 128-byte lines."""
    multiple = _ROW_BYTES // jnp.dtype(dtype).itemsize
    return -(-hidden // multiple) * multiple


def _pad_hidden(x: jax.Array) -> jax.Array:
    padding = padded_hidden(x.shape[1], x.dtype) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding))) if padding else x


def _dispatch_rows(
    hidden: int, dtype: jax.typing.DTypeLike, num_ranks: int, top_k: int, num_experts: int
) -> int:
    """Rows that shared memory has room for in a dispatch, beside a row of zeros."""
    choices = num_ranks * (align_up(_WINDOW_TOKENS * top_k, LANES) + align_up(2 * top_k, LANES))
    lists = (_MAX_SLOTS + 2) * num_ranks * top_k
    counts = (5 + num_ranks) * align_up(num_experts, LANES) + LANES
    reserved = 4 * (counts + choices + lists) + _PADDING_BYTES
    zeros = Tiling.of(hidden, dtype).padded * jnp.dtype(dtype).itemsize
    return (SHARED_MEMORY_BYTES - reserved - zeros) // (hidden * jnp.dtype(dtype).itemsize)


def dispatch_plan(
    x: jax.Array | jax.ShapeDtypeStruct, num_ranks: int, top_k: int, num_experts: int
) -> Plan:
    """How a dispatch of x [T, H], its rows padded, is spread over blocks and shared memory."""
    num_tokens, hidden = x.shape
    rows = _dispatch_rows(hidden, x.dtype, num_ranks, top_k, num_experts)
    few = num_tokens <= _FEW_TOKENS
    num_copy_slots = min(8, 2 * rows // 3) if few else max(1, min(4, rows // 3))
    num_slots = min(_MAX_SLOTS, rows - num_copy_slots)
    return Plan(
        num_blocks=_num_blocks("dispatch", num_tokens),
        num_slots=num_slots,
        store_lag=num_slots // 2,
        window_tokens=_WINDOW_TOKENS,
        num_copy_slots=num_copy_slots,
        step_tokens=2,
    )


def _combine_slots(hidden: int, dtype: jax.typing.DTypeLike, num_ranks: int, top_k: int) -> int:
    """Rows that shared memory has room for in a combine, beside a sum and a result."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = Tiling.of(hidden, dtype).padded
    reserved = 8 * num_ranks * align_up(_WINDOW_TOKENS * top_k, LANES) + _PADDING_BYTES
    room = SHARED_MEMORY_BYTES - reserved - columns * (4 + itemsize)
    return min(_MAX_SLOTS, room // (columns * itemsize))


def combine_plan(
    y: jax.Array | jax.ShapeDtypeStruct, num_ranks: int, num_tokens: int, top_k: int
) -> Plan:
    """How a combine of y [R, H], its rows padded, is spread over blocks and shared memory."""
    slots = _combine_slots(y.shape[1], y.dtype, num_ranks, top_k)
    return Plan(
        num_blocks=_num_blocks("combine", num_tokens),
        num_slots=slots,
        store_lag=slots // 3,
        window_tokens=_WINDOW_TOKENS,
        step_tokens=1,
        mailbox_steps=4,
    )
