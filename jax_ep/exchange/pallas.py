"""The fast exchange, on the Pallas kernels: same functions and shapes as `xla_exchange`.

What is here is policy: how a payload is padded for the kernels, and how a kernel is spread over
thread blocks and shared memory. The kernels themselves are in `pallas_kernels`.
"""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import quantization, routes
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.routes import Layout, RankRoutes, Routes
from pallas_kernels.exchange import combine as combine_kernel
from pallas_kernels.exchange import combine_grad as combine_grad_kernel
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.exchange import rank_dispatch as rank_dispatch_kernel
from pallas_kernels.exchange.quantize import BLOCK, ROW_MULTIPLE
from pallas_kernels.exchange.sender import Payload, parts_of_row
from pallas_kernels.fabric.fabric import Mesh
from pallas_kernels.fabric.plan import LANES, SHARED_MEMORY_BYTES, Plan, Tiling, align_up

AxisName = tuple[str, ...]
Array = jax.Array | jax.ShapeDtypeStruct

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_ROW_BYTES = 128  # a row must be whole 128-byte lines
_PADDING_BYTES = 16 * 1024  # of shared memory: what its pieces are aligned to, and barriers
_WINDOW_TOKENS = 16
_TIMEOUT_SECONDS = 100.0  # of a wait for a peer; JAX_EP_TIMEOUT_SECONDS overrides it
_MAX_SLOTS = 16

# The two regimes: up to this many tokens every microsecond counts, beyond it the link's bandwidth.
_FEW_TOKENS = 256
# Thread blocks by (op, whether tokens are few), measured on 4 and 8 H200s; JAX_EP_NUM_BLOCKS
# overrides it, say to leave part of the GPU to a kernel that runs beside.
_NUM_BLOCKS = {
    ("dispatch", True): 64,
    ("dispatch", False): 128,
    ("quantized_dispatch", True): 128,
    ("quantized_dispatch", False): 128,
    ("combine", True): 128,
    ("combine", False): 128,
    ("combine_grad", True): 128,
    ("combine_grad", False): 128,
}


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
    hidden = padded_hidden(hidden, dtype, wire_dtype)
    words = _dispatch_words(num_ranks, top_k, num_experts)
    rows = _Rows(hidden, dtype, wire_dtype)
    # A slot of a combine is free again once its row is summed, if sums have slots of their own.
    slots_of_combine = 3 if wire_dtype is None else 2
    if (
        rows.beside(words) < 3
        or _combine_slots(rows, num_ranks, top_k) < slots_of_combine
        or _combine_grad_slots(hidden, dtype, num_ranks, top_k, num_experts) < 3
    ):
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
    plan = dispatch_plan(x, fabric.num_ranks, topk_idx.shape[1], num_experts, wire_dtype)
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
    sizes = route.rows.shape[0], route.rows.shape[2], route.counts.shape[1]
    tokens = dispatch_kernel.dispatch_like(
        x,
        route.rows,
        route.counts,
        fabric=mesh_fabric(axis_name),
        plan=dispatch_plan(x, *sizes, wire_dtype),
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
        plan=combine_plan(y, *route.rows.shape, wire_dtype=wire_dtype),
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
    hidden, sizes = y.shape[1], (*route.rows.shape, route.counts.shape[1])
    g, y = _pad_hidden(g), _pad_hidden(y)
    dy, dweights = combine_grad_kernel.combine_grad(
        g,
        topk_weights,
        y,
        *route,
        fabric=mesh_fabric(axis_name),
        plan=combine_grad_plan(y, *sizes),
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
    list_words = topk_idx.shape[1] * (1 if topk_weights is None else 2)
    tokens, local_topk_idx, weights = rank_dispatch_kernel.rank_dispatch(
        x,
        topk_idx,
        topk_weights,
        num_experts=num_experts,
        fabric=fabric,
        plan=rank_dispatch_plan(x, fabric.num_ranks, list_words, wire_dtype),
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
        plan=combine_plan(y, *route.local_topk_idx.shape, wire_dtype=wire_dtype),
        num_experts=num_experts,
        by_rank=True,
        wire_dtype=wire_dtype,
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


def padded_hidden(
    hidden: int, dtype: jax.typing.DTypeLike, wire_dtype: jnp.dtype | None = None
) -> int:
    """H as the kernels see it: rows of whole 128-byte lines, and of whole parts if quantized."""
    columns = _ROW_BYTES // jnp.dtype(dtype).itemsize
    return align_up(hidden, columns if wire_dtype is None else ROW_MULTIPLE)


def _pad_hidden(x: jax.Array, wire_dtype: jnp.dtype | None = None) -> jax.Array:
    padding = padded_hidden(x.shape[1], x.dtype, wire_dtype) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding))) if padding else x


def _unpadded(received: Payload, hidden: int) -> tuple[jax.Array, ...]:
    """Rows, or rows and their scales, as rows of `hidden` columns have them."""
    if not isinstance(received, tuple):
        return (received[:, :hidden],)
    rows, scales = received
    return rows[:, :hidden], scales[:, : hidden // BLOCK]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What rows, and what is sent of them, take of shared memory."""

    hidden: int
    dtype: jax.typing.DTypeLike
    wire_dtype: jnp.dtype | None

    @property
    def copy_bytes(self) -> int:
        """Of a row on its way."""
        return quantization.row_bytes(self.hidden, self.dtype, self.wire_dtype)

    @property
    def slot_bytes(self) -> int:
        """Of a row of the sender's ring, which may hold it before and after quantization."""
        wide = self.hidden * jnp.dtype(self.dtype).itemsize
        return wide if self.wire_dtype is None else wide + self.copy_bytes

    def room(self, words: int) -> int:
        """Bytes beside so many words, and a row of zeros."""
        parts = parts_of_row(self.hidden, self.dtype, self.wire_dtype)
        zeros = sum(Tiling.of(*part).padded * jnp.dtype(part[1]).itemsize for part in parts)
        return SHARED_MEMORY_BYTES - 4 * words - _PADDING_BYTES - zeros

    def beside(self, words: int) -> int:
        """Rows of the ring that there is room for beside so many words."""
        return self.room(words) // self.slot_bytes


def _dispatch_words(num_ranks: int, top_k: int, num_experts: int) -> int:
    """Of routes and lists that a dispatch holds in shared memory."""
    choices = num_ranks * (align_up(_WINDOW_TOKENS * top_k, LANES) + align_up(2 * top_k, LANES))
    lists = (_MAX_SLOTS + 2) * num_ranks * top_k
    counts = (5 + num_ranks) * align_up(num_experts, LANES) + LANES
    return counts + choices + lists


def dispatch_plan(
    x: Array, num_ranks: int, top_k: int, num_experts: int, wire_dtype: jnp.dtype | None = None
) -> Plan:
    """How a dispatch of x [T, H], its rows padded, is spread over blocks and shared memory."""
    num_tokens, hidden = x.shape
    rows = _Rows(hidden, x.dtype, wire_dtype)
    words = _dispatch_words(num_ranks, top_k, num_experts)
    in_ring = rows.beside(words)
    few = num_tokens <= _FEW_TOKENS
    num_copy_slots = min(8, 2 * in_ring // 3) if few else max(1, min(4, in_ring // 3))
    room = rows.room(words) - num_copy_slots * rows.copy_bytes
    num_slots = min(_MAX_SLOTS, room // rows.slot_bytes)
    return Plan(
        num_blocks=_num_blocks("quantized_dispatch" if wire_dtype else "dispatch", num_tokens),
        num_slots=num_slots,
        store_lag=num_slots // 2,
        window_tokens=_WINDOW_TOKENS,
        num_copy_slots=num_copy_slots,
        step_tokens=2,
    )


def rank_dispatch_plan(
    x: Array, num_ranks: int, list_words: int, wire_dtype: jnp.dtype | None = None
) -> Plan:
    """The same in the rank layout: nothing is copied, and a token's list may hold weights too."""
    num_tokens, hidden = x.shape
    choices = align_up(_WINDOW_TOKENS * list_words, LANES)
    choices += num_ranks * align_up(2 * list_words, LANES)
    lists = _MAX_SLOTS * num_ranks * list_words
    num_slots = min(_MAX_SLOTS, _Rows(hidden, x.dtype, wire_dtype).beside(choices + lists))
    return Plan(
        num_blocks=_num_blocks("quantized_dispatch" if wire_dtype else "dispatch", num_tokens),
        num_slots=num_slots,
        store_lag=num_slots // 2,
        window_tokens=_WINDOW_TOKENS,
        step_tokens=2,
    )


def _combine_slots(rows: _Rows, num_ranks: int, top_k: int) -> int:
    """Rows that shared memory has room for in a combine, beside a sum and a result.

    And, with a wire_dtype, beside the quantized sums under way: see `_sums_under_way`.
    """
    itemsize = jnp.dtype(rows.dtype).itemsize
    columns = Tiling.of(rows.hidden, rows.dtype).padded
    reserved = 8 * num_ranks * align_up(_WINDOW_TOKENS * top_k, LANES) + _PADDING_BYTES
    room = SHARED_MEMORY_BYTES - reserved - columns * (4 + itemsize)

    def size(slots: int) -> int:
        sums = 0 if rows.wire_dtype is None else (_sums_under_way(slots) + 1) * rows.copy_bytes
        return slots * columns * itemsize + sums

    return max((slots for slots in range(1, _MAX_SLOTS + 1) if size(slots) <= room), default=0)


def _sums_under_way(slots: int) -> int:
    """The puts of a combine that may be waiting to be read from shared memory."""
    return slots // 3


def combine_plan(
    y: Array, num_ranks: int, num_tokens: int, top_k: int, *, wire_dtype: jnp.dtype | None = None
) -> Plan:
    """How a combine of y [R, H], its rows padded, is spread over blocks and shared memory."""
    slots = _combine_slots(_Rows(y.shape[1], y.dtype, wire_dtype), num_ranks, top_k)
    return Plan(
        num_blocks=_num_blocks("combine", num_tokens),
        num_slots=slots,
        store_lag=_sums_under_way(slots),
        window_tokens=_WINDOW_TOKENS,
        step_tokens=1,
        mailbox_steps=4,
    )


def _combine_grad_slots(
    hidden: int, dtype: jax.typing.DTypeLike, num_ranks: int, top_k: int, num_experts: int
) -> int:
    """Rows that shared memory has room for in the gradient of a combine."""
    windows = 2 * num_ranks * align_up(_WINDOW_TOKENS * top_k, LANES)
    counts = (4 + num_ranks) * align_up(num_experts, LANES)
    row_bytes = combine_grad_kernel.padded_columns(hidden, dtype) * jnp.dtype(dtype).itemsize
    return _Rows(hidden, dtype, None).room(windows + counts) // row_bytes


def combine_grad_plan(
    y: Array, num_ranks: int, num_tokens: int, top_k: int, num_experts: int
) -> Plan:
    """How the gradient of a combine of y [R, H], its rows padded, is spread."""
    slots = _combine_grad_slots(y.shape[1], y.dtype, num_ranks, top_k, num_experts)
    num_g_slots = max(1, min(6, slots // 3))
    num_slots = min(_MAX_SLOTS, slots - num_g_slots)
    return Plan(
        num_blocks=_num_blocks("combine_grad", num_tokens),
        num_slots=num_slots,
        store_lag=num_slots // 3,
        window_tokens=_WINDOW_TOKENS,
        num_g_slots=num_g_slots,
    )
