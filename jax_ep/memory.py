"""What communication holds in memory: bytes per rank beside the caller's inputs and outputs.

Counted from shapes, so it answers for machines that are not here. What XLA's own memory analysis
says of the portable exchange is compared with it in the tests, and so are the buffers that the
kernels' calls are lowered with.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from jax_ep import pallas_exchange, routes
from pallas_kernels.plan import LANES, Tiling, Window, align_up

Operation = Literal["dispatch", "combine"]
OPERATIONS: tuple[Operation, ...] = ("dispatch", "combine")
IMPLEMENTATIONS = ("pallas", "xla")

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
) -> dict[str, int]:
    """The buffers that one call of an operation holds: name -> bytes per rank.

    x and topk_idx, y and the weights, `Dispatched.tokens` and the result of `combine` are the
    caller's and not counted. The routes are, though they live as long as the handle does;
    everything else is freed when the call returns, and two calls never hold theirs at once unless
    XLA runs them at once.

    For "xla" these are the arrays the program names. XLA may fuse some of them away, or hold up to
    K more [N, T, H] arrays where it does not fuse the sum over a token's choices.

    Args:
      operation: "dispatch" or "combine".
      implementation: "pallas" or "xla".
      num_tokens: T, per rank.
      hidden: H.
      num_experts: E.
      top_k: K.
      num_ranks: N.
      dtype: of the rows.
      capacity: R, as given to `dispatch`.

    Raises:
      ValueError: an argument does not fit; the message names it.
    """
    _check(operation, implementation, num_experts, num_ranks)
    if capacity is None:
        capacity = routes.dropless_capacity(
            num_ranks, num_tokens, top_k, num_experts // num_ranks, 1
        )
    shape = _Shape(num_tokens, hidden, num_experts, top_k, num_ranks, jnp.dtype(dtype), capacity)
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

    @property
    def pairs(self) -> int:
        """(source rank, token) pairs."""
        return self.num_ranks * self.num_tokens

    def rows(self, count: int) -> int:
        return count * self.hidden * self.dtype.itemsize

    def routes(self) -> int:
        return _WORD * (self.pairs * self.top_k + self.num_ranks * self.num_experts)

    def padded_rows(self, *counts: int) -> int:
        """Copies of rows that the kernels need where a row is not whole 128-byte lines."""
        padded = pallas_exchange.padded_hidden(self.hidden, self.dtype)
        return 0 if padded == self.hidden else sum(counts) * padded * self.dtype.itemsize


def _pallas_dispatch(shape: _Shape) -> dict[str, int]:
    hidden = pallas_exchange.padded_hidden(shape.hidden, shape.dtype)
    plan = pallas_exchange.dispatch_plan(
        jax.ShapeDtypeStruct((shape.num_tokens, hidden), shape.dtype),
        shape.num_ranks,
        shape.top_k,
        shape.num_experts,
    )
    counts = align_up(shape.num_experts, LANES)
    entries = max(
        Window.of(tokens, plan, shape.num_tokens, shape.top_k).total
        for tokens in (plan.window_tokens, plan.step_tokens)
    )
    return {
        "routes": _WORD * shape.num_ranks * (entries + counts),
        "counts before each block": _WORD * (plan.num_blocks + 1) * counts,
        "semaphores": _WORD * plan.num_blocks * shape.num_ranks,
        "padded rows": shape.padded_rows(shape.num_tokens, shape.capacity),
    }


def _pallas_combine(shape: _Shape) -> dict[str, int]:
    hidden = pallas_exchange.padded_hidden(shape.hidden, shape.dtype)
    plan = pallas_exchange.combine_plan(
        jax.ShapeDtypeStruct((shape.capacity, hidden), shape.dtype),
        shape.num_ranks,
        shape.num_tokens,
        shape.top_k,
    )
    steps = math.ceil(plan.tokens_per_block(shape.num_tokens) / plan.step_tokens)
    row_bytes = Tiling.of(hidden, shape.dtype).padded * shape.dtype.itemsize
    mailbox_rows = min(plan.mailbox_steps, steps) * shape.num_ranks * plan.step_tokens
    return {
        "mailbox": plan.num_blocks * mailbox_rows * row_bytes,
        "semaphores": _WORD * plan.num_blocks * 2 * shape.num_ranks,
        "padded rows": shape.padded_rows(shape.num_tokens, shape.capacity),
    }


def _xla_dispatch(shape: _Shape) -> dict[str, int]:
    choices = shape.num_tokens * shape.top_k
    return {
        "gathered tokens": shape.rows(shape.pairs),
        "gathered choices": _WORD * shape.num_ranks * (2 * choices + shape.num_experts),
        "counting choices": _WORD * align_up(choices, LANES) * shape.num_experts,
        "routes": shape.routes(),
        "choice of each row": _WORD * shape.capacity,
    }


def _xla_combine(shape: _Shape) -> dict[str, int]:
    sums = shape.pairs * shape.hidden * _WORD
    rounded = shape.rows(shape.pairs)
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


def _check(operation: str, implementation: str, num_experts: int, num_ranks: int) -> None:
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
