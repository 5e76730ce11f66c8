"""What communication holds in memory: bytes per rank beside the caller's inputs and outputs.

Counted from shapes, so it answers for machines that are not here. What XLA's own memory analysis
says of the portable exchange is compared with it in the tests, and so are the buffers that the
kernels' calls are lowered with.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from jax_ep import checks, pallas_exchange, routes, wire
from pallas_kernels.plan import LANES, Tiling, Window, align_up

Operation = Literal["dispatch", "combine"]
OPERATIONS: tuple[Operation, ...] = ("dispatch", "combine")
IMPLEMENTATIONS = ("pallas", "xla")
LAYOUTS = ("expert", "rank")

_WORD = 4  # bytes of an int32 or a float32


def workspace_bytes(
    operation: Operation,
    implementation: Literal["pallas", "xla"],
    *,
    num_tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    capacity: int | None = None,
    layout: Literal["expert", "rank"] = "expert",
    wire_dtype: jax.typing.DTypeLike | None = None,
    output: Literal["dequantized", "quantized"] = "dequantized",
) -> dict[str, int]:
    """The buffers that one call of an operation holds: name -> bytes per rank.

    x and topk_idx, y and the weights, `Dispatched.tokens` and the result of `combine` are the
    caller's and not counted. The routes are, though they live as long as the handle does;
    everything else is freed when the call returns, and two calls never hold theirs at once unless
    XLA runs them at once.

    For "xla" these are the arrays the program names. XLA may fuse some of them away, or hold more
    where it does not fuse: up to K arrays [N, T, H] of the terms of a sum over a token's choices,
    and a few of float32 rows around their quantization.

    Args:
      operation: "dispatch" or "combine".
      implementation: "pallas" or "xla".
      num_tokens: T, per rank.
      hidden: H.
      num_experts: E.
      top_k: K.
      num_ranks: N.
      dtype: of the rows.
      capacity: R, as given to `dispatch`; of no matter in the rank layout, which has N·T rows.
      layout: of `dispatch`.
      wire_dtype: of the operation.
      output: of a dispatch with a wire_dtype; "pallas" writes a quantized one where it belongs.

    Raises:
      ValueError: an argument does not fit; the message names it.
    """
    _check(operation, implementation, layout, num_experts, num_ranks)
    sizes = dict(num_tokens=num_tokens, hidden=hidden, top_k=top_k)
    for name, size in sizes.items():
        checks.check_integer(name, size)
    if layout == "rank":
        capacity = num_ranks * num_tokens
    if capacity is None:
        capacity = routes.dropless_capacity(
            num_ranks, num_tokens, top_k, num_experts // num_ranks, 1
        )
    row = jax.ShapeDtypeStruct((hidden,), dtype)
    wire_dtype = wire.checked("hidden", row, wire_dtype)
    wire.check_output(output, wire_dtype)
    shape = _Shape(
        num_tokens,
        hidden,
        num_experts,
        top_k,
        num_ranks,
        jnp.dtype(dtype),
        capacity,
        layout == "rank",
        wire_dtype,
        output == "quantized",
    )
    count = _COUNTS[operation, implementation]
    return {name: size for name, size in count(shape).items() if size}


def other_libraries(
    *, num_tokens: int, hidden: int, num_experts: int, top_k: int, num_ranks: int
) -> dict[str, int]:
    """What the low-latency buffers of DeepEP and NCCL EP hold, by library, in bytes per rank.

    With B = num_tokens, a message of P bytes for each row and everything twice, because odd and
    even calls alternate between two sets of buffers:

      DeepEP V1            2 (E·B·P sent + E·B·P received), `LowLatencyLayout` of its
                           csrc/config.hpp; P is a combine message, the larger one: bfloat16 row
                           and a pair of bfloat16 for every 128 values. NCCL EP began with the same.
      NCCL EP              dispatch receives one message per (rank, token) with the routes in its
                           header, N·B·P; combine receives K·B·P (arXiv:2603.13606, section IV.D;
                           NVIDIA/nccl pull request 2040). What combine sends is E·B·P as long as
                           the experts' output is expert-major, and N·B·P once it is rank-major.
      NVLink alone         of that design: nothing to send from, because peers are written
                           directly: 2 max(N, K)·B·P.
    """
    message = 2 * hidden + hidden // 128 * 4
    rows = num_tokens * message
    received = max(num_ranks, top_k) * rows
    flags = align_up(num_experts * _WORD, 128)
    return {
        "DeepEP V1": 2 * (2 * num_experts * rows + flags),
        "NCCL EP, before": 2 * (2 * num_experts * rows + flags),
        "NCCL EP, expert-major": 2 * (num_experts * rows + received + flags),
        "NCCL EP, rank-major": 2 * (num_ranks * rows + received + flags),
        "NCCL EP, NVLink alone": 2 * received,
    }


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The sizes of one call."""

    num_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    num_ranks: int
    dtype: jnp.dtype
    capacity: int
    by_rank: bool
    wire_dtype: jnp.dtype | None
    quantized: bool  # what a dispatch hands out

    @property
    def pairs(self) -> int:
        """(source rank, token) pairs."""
        return self.num_ranks * self.num_tokens

    def rows(self, count: int) -> int:
        return count * self.hidden * self.dtype.itemsize

    def sent_rows(self, count: int) -> int:
        """Rows as they are on their way."""
        return count * wire.row_bytes(self.hidden, self.dtype, self.wire_dtype)

    def quantized_rows(self, count: int) -> int:
        """Rows before or after their way, if that takes others than the caller's."""
        return 0 if self.wire_dtype is None else self.sent_rows(count)

    def routes(self) -> int:
        """Rows or local experts of every choice; and counts, unless ranks own rows."""
        counts = 0 if self.by_rank else self.num_ranks * self.num_experts
        return _WORD * (self.pairs * self.top_k + counts)

    @property
    def padded_hidden(self) -> int:
        """H as the kernels see it."""
        return pallas_exchange.padded_hidden(self.hidden, self.dtype, self.wire_dtype)

    def padded_rows(self, count: int) -> int:
        """Copies of the caller's rows that the kernels need where they want longer ones."""
        padded = self.padded_hidden
        return 0 if padded == self.hidden else count * padded * self.dtype.itemsize


def _pallas_dispatch(shape: _Shape) -> dict[str, int]:
    hidden, wire_dtype = shape.padded_hidden, shape.wire_dtype
    rows = jax.ShapeDtypeStruct((shape.num_tokens, hidden), shape.dtype)
    sizes = (shape.num_ranks, shape.top_k)
    if shape.by_rank:
        plan = pallas_exchange.rank_dispatch_plan(rows, *sizes, wire_dtype)
    else:
        plan = pallas_exchange.dispatch_plan(rows, *sizes, shape.num_experts, wire_dtype)
    received = shape.capacity * wire.row_bytes(hidden, shape.dtype, wire_dtype)
    if hidden == shape.hidden and (wire_dtype is None or shape.quantized):
        received = 0  # they are the caller's
    counts = 0 if shape.by_rank else align_up(shape.num_experts, LANES)
    entries = max(
        Window.of(tokens, plan, shape.num_tokens, shape.top_k).total
        for tokens in (plan.window_tokens, plan.step_tokens)
    )
    return {
        "routes": _WORD * shape.num_ranks * (entries + counts),
        "choices of each expert": counts * _count_bytes(shape),
        "semaphores": _WORD * plan.num_blocks * shape.num_ranks,
        "padded rows": shape.padded_rows(shape.num_tokens),
        "received rows": received,
    }


def _count_bytes(shape: _Shape) -> int:
    """Of one of the counts that peers read."""
    topk_idx = jax.ShapeDtypeStruct((shape.num_tokens, shape.top_k), jnp.int32)
    count = functools.partial(routes.count_experts, num_experts=shape.num_experts)
    return jax.eval_shape(count, topk_idx).dtype.itemsize


def _pallas_combine(shape: _Shape) -> dict[str, int]:
    hidden = shape.padded_hidden
    plan = pallas_exchange.combine_plan(
        jax.ShapeDtypeStruct((shape.capacity, hidden), shape.dtype),
        shape.num_ranks,
        shape.num_tokens,
        shape.top_k,
        wire_dtype=shape.wire_dtype,
    )
    steps = math.ceil(plan.tokens_per_block(shape.num_tokens) / plan.step_tokens)
    columns = Tiling.of(hidden, shape.dtype).padded
    row_bytes = wire.row_bytes(columns, shape.dtype, shape.wire_dtype)
    mailbox_rows = min(plan.mailbox_steps, steps) * shape.num_ranks * plan.step_tokens
    return {
        "mailbox": plan.num_blocks * mailbox_rows * row_bytes,
        "semaphores": _WORD * plan.num_blocks * 2 * shape.num_ranks,
        "padded rows": shape.padded_rows(shape.num_tokens + shape.capacity),
    }


def _xla_dispatch(shape: _Shape) -> dict[str, int]:
    choices = shape.num_tokens * shape.top_k
    if shape.by_rank:
        return {
            "gathered tokens": shape.sent_rows(shape.pairs),
            "quantized rows": shape.quantized_rows(shape.num_tokens),
            "gathered choices": _WORD * shape.num_ranks * choices,
            "routes": shape.routes(),
        }
    return {
        "gathered tokens": shape.sent_rows(shape.pairs),
        "quantized rows": shape.quantized_rows(shape.num_tokens),
        "gathered choices": _WORD * shape.num_ranks * (2 * choices + shape.num_experts),
        "counting choices": _WORD * align_up(choices, LANES) * shape.num_experts,
        "routes": shape.routes(),
        "choice of each row": _WORD * shape.capacity,
    }


def _xla_combine(shape: _Shape) -> dict[str, int]:
    sums = shape.pairs * shape.hidden * _WORD
    rounded = shape.sent_rows(shape.pairs)
    if shape.by_rank:
        return {"sent sums": rounded, "received sums": rounded}
    return {
        "partial sums": sums,
        "rounded sums": 0 if rounded == sums else rounded,
        "received sums": rounded,
        "gathered weights": _WORD * shape.pairs * shape.top_k,
    }


_COUNTS = {
    ("dispatch", "pallas"): _pallas_dispatch,
    ("combine", "pallas"): _pallas_combine,
    ("dispatch", "xla"): _xla_dispatch,
    ("combine", "xla"): _xla_combine,
}


def _check(
    operation: str, implementation: str, layout: str, num_experts: int, num_ranks: int
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, but is {layout!r}.")
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {OPERATIONS}, but is {operation!r}.")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS}, but is {implementation!r}."
        )
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of num_ranks, but is {num_experts} for "
            f"{num_ranks} ranks."
        )
