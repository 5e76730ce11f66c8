"""Counts what communication holds in memory, in bytes per rank.

The caller's inputs and outputs are not counted. The counts follow from shapes, so they need no
machine with that many ranks. The tests compare the counts of "xla" with XLA's own memory analysis,
and those of "pallas" with the buffers that the kernels' calls are lowered with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange import quantization, routes, selection
from jax_ep.runtime import settings
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric.hardware import LANES, align_up
from pallas_kernels.formats import PLAIN, RowFormat

Operation = Literal[
    "dispatch",
    "combine",
    "dispatch_grad",
    "combine_grad",
    "dispatch_like",
    "group_by_expert",
    "sum_by_token",
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
IMPLEMENTATIONS = ("pallas", "xla")
LAYOUTS = ("expert", "rank")
# Operations between the rank-major and the expert-major layout, which communicate nothing.
LOCAL: tuple[Operation, ...] = ("group_by_expert", "sum_by_token")

_WORD = 4  # an int32 or a float32 has 4 bytes


def workspace_bytes(
    operation: Operation,
    implementation: Literal["pallas", "xla"],
    *,
    num_tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    num_hosts: int = 1,
    host_capacity: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    capacity: int | None = None,
    expert_alignment: int = 1,
    layout: Literal["expert", "rank"] = "expert",
    wire_dtype: jax.typing.DTypeLike | None = None,
    output: Literal["dequantized", "quantized"] = "dequantized",
) -> dict[str, int]:
    """Returns the buffers that one call of an operation holds: name -> bytes per rank.

    The counts leave out the caller's arrays: x and topk_idx, y and the weights,
    `Dispatched.tokens`, the result of `combine`, cotangents and gradients. They also leave out the
    heap of symmetric memory that "pallas" keeps on every GPU while the process lives. The routes
    are counted for the dispatch that makes them, and live as long as its handle; all other buffers
    are freed when the call returns. A host is assumed to have as many GPUs as ranks; with more GPUs
    there is less room in the heap.

    For "xla" the arrays of the program are counted. XLA may need less, since it fuses operations
    and lets arrays share memory. It needs more where it does not fuse a sum over a token's choices:
    up to K arrays [N, T, H] of terms.

    Args:
      operation: the name of a function of this library; or "dispatch_grad" or "combine_grad", their
        gradients ("combine_grad" has weights in the expert-major layout).
      implementation: "pallas" or "xla".
      num_tokens: T, per rank.
      hidden: H.
      num_experts: E.
      top_k: K.
      num_ranks: N.
      num_hosts: M, which divides N. Above 1, counts the buffers of "two_level", and
        `implementation` is the exchange inside each host.
      host_capacity: as given to `dispatch`.
      dtype: the dtype of the rows.
      capacity: R, as given to `dispatch` or `group_by_expert`, which are dropless by default. Not
        used in the rank-major layout, which has N·T rows.
      expert_alignment: as given there; without a capacity, R includes the padding it may need.
      layout: the layout of `dispatch`; "rank" for group_by_expert and sum_by_token.
      wire_dtype: the wire_dtype of the operation; for a gradient, its grad_wire_dtype.
      output: the `output` of a dispatch with a wire_dtype; "pallas" writes "quantized" rows
        directly into the result.

    Raises:
      ValueError, TypeError: an argument does not fit, or "pallas" cannot run at these sizes; the
        message names it.
    """
    shape = _checked(
        operation,
        implementation,
        num_tokens=num_tokens,
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        host_capacity=host_capacity,
        dtype=dtype,
        capacity=capacity,
        expert_alignment=expert_alignment,
        layout=layout,
        wire_dtype=wire_dtype,
        output=output,
    )
    if num_hosts > 1 and operation not in LOCAL:
        most = num_tokens if host_capacity is None or layout == "rank" else host_capacity
        sent_rows = min(num_tokens, most)
        held = _between_hosts(operation, implementation, shape, num_hosts, sent_rows)
    else:
        held = _of_one_level(operation, implementation, shape)
    return {name: size for name, size in held.items() if size}


def result_bytes(
    operation: Operation, implementation: Literal["pallas", "xla"], **sizes: Any
) -> dict[str, int]:
    """Returns the bytes of the rows in an operation's result: name -> bytes per rank.

    The arguments are those of `workspace_bytes`. `group_sizes` and other counts are left out, since
    they are small, and routes, since `workspace_bytes` counts them.
    """
    shape = _checked(operation, implementation, **sizes)
    if operation == "dispatch" and shape.quantized:
        values = shape.capacity * shape.hidden
        return {"received tokens": values, "scales": shape.sent_rows(shape.capacity) - values}
    if operation == "combine_grad":
        weights = 0 if shape.by_rank else _WORD * shape.num_tokens * shape.top_k
        found = {"gradient of y": shape.rows(shape.capacity), "gradient of the weights": weights}
        return {name: size for name, size in found.items() if size}
    name, count = {
        "dispatch": ("received tokens", shape.capacity),
        "dispatch_like": ("received tokens", shape.capacity),
        "group_by_expert": ("grouped tokens", shape.capacity),
        "combine": ("combined tokens", shape.num_tokens),
        "dispatch_grad": ("gradient of x", shape.num_tokens),
        "sum_by_token": ("sums by token", shape.num_tokens),  # `_checked` has made this N * T
    }[operation]
    return {name: shape.rows(count)}


def _checked(
    operation: Operation,
    implementation: Literal["pallas", "xla"],
    *,
    num_tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    num_hosts: int = 1,
    host_capacity: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    capacity: int | None = None,
    expert_alignment: int = 1,
    layout: Literal["expert", "rank"] = "expert",
    wire_dtype: jax.typing.DTypeLike | None = None,
    output: Literal["dequantized", "quantized"] = "dequantized",
) -> _Shape:
    """Checks the arguments of `workspace_bytes`; returns the sizes of the call they describe."""
    checks.check_name("operation", operation, OPERATIONS)
    checks.check_name("implementation", implementation, IMPLEMENTATIONS)
    checks.check_name("layout", layout, LAYOUTS)
    checks.check_sizes(
        num_tokens=num_tokens,
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        expert_alignment=expert_alignment,
        **({} if capacity is None else dict(capacity=capacity)),
        **({} if host_capacity is None else dict(host_capacity=host_capacity)),
    )
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of num_ranks, but is {num_experts} for "
            f"{num_ranks} ranks."
        )
    if num_ranks % num_hosts:
        raise ValueError(f"num_hosts must divide the {num_ranks} ranks, but is {num_hosts}.")
    dtype = checks.as_floating("dtype", dtype)
    if operation in LOCAL and layout != "rank":
        raise ValueError(f'layout must be "rank" for {operation}, but is {layout!r}.')
    wire = quantization.checked("hidden", jax.ShapeDtypeStruct((hidden,), dtype), wire_dtype)
    quantization.check_output(output, wire)
    if output == "quantized" and operation != "dispatch":
        raise ValueError(f'output="quantized" is of a dispatch, but the operation is {operation}.')
    if wire.quantized and operation in LOCAL:
        raise ValueError(f"wire_dtype must be None for {operation}, which sends nothing.")
    num_local = num_experts // num_ranks
    if operation in LOCAL:  # counted as the exchange of a single rank with N * T tokens
        num_ranks, num_tokens, num_experts = 1, num_ranks * num_tokens, num_local
        layout = "expert"
    if layout == "rank":
        capacity = num_ranks * num_tokens
    if capacity is None:
        choices = num_ranks * num_tokens * top_k
        capacity = routes.dropless_capacity(choices, num_local, expert_alignment)
    return _Shape(
        num_tokens,
        hidden,
        num_experts,
        top_k,
        num_ranks,
        jnp.dtype(dtype),
        capacity,
        layout == "rank",
        wire,
        output == "quantized",
    )


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The sizes of one call of an exchange."""

    num_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    num_ranks: int
    dtype: jnp.dtype
    capacity: int
    by_rank: bool
    wire: RowFormat
    quantized: bool  # whether a dispatch returns float8 rows

    @property
    def pairs(self) -> int:
        """The number of (source rank, token) pairs."""
        return self.num_ranks * self.num_tokens

    def rows(self, count: int) -> int:
        return count * self.hidden * self.dtype.itemsize

    def sent_rows(self, count: int) -> int:
        """Returns the bytes of `count` rows as they are sent."""
        return count * self.wire.row_bytes(self.hidden, self.dtype)

    def quantized_rows(self, count: int) -> int:
        """Returns the bytes of `count` quantized rows; 0 on a plain wire."""
        return self.sent_rows(count) if self.wire.quantized else 0

    def gathered(self, size: int) -> int:
        """Returns `size`, the bytes gathered from all ranks; 0 for one rank."""
        return size if self.num_ranks > 1 else 0

    def routes(self) -> int:
        """Returns the bytes of the routes.

        The routes hold one word for each choice of all ranks, and in the expert-major layout also
        the counts.
        """
        counts = 0 if self.by_rank else self.num_ranks * self.num_experts
        return _WORD * (self.pairs * self.top_k + counts)

    @property
    def padded_hidden(self) -> int:
        """H, padded as the kernels need it."""
        return plans.padded_hidden(self.hidden, self.dtype, self.wire)

    @property
    def row(self) -> plans.Row:
        """The size of a padded row, for the kernels' plans."""
        return plans.Row(self.padded_hidden, self.dtype, self.wire)

    @property
    def sizes(self) -> plans.Sizes:
        return plans.Sizes(
            num_tokens=self.num_tokens,
            num_ranks=self.num_ranks,
            top_k=self.top_k,
            num_experts=self.num_experts,
        )

    @property
    def low_latency(self) -> plans.LowLatencyPlan | None:
        """The plan of the low-latency kernels; None if they do not support such rows."""
        return plans.for_low_latency(self.row, self.sizes, self.num_ranks, settings.num_blocks())

    def padded_rows(self, count: int) -> int:
        """Returns the bytes of padded copies of `count` rows; 0 where rows need no padding."""
        padded = self.padded_hidden
        return 0 if padded == self.hidden else count * padded * self.dtype.itemsize


def _pallas_dispatch(shape: _Shape) -> dict[str, int]:
    held: dict[str, int]
    if shape.low_latency and not shape.by_rank:
        held = shape.low_latency.dispatch_workspace()
    elif shape.by_rank:
        plan = plans.for_rank_dispatch(shape.row, shape.sizes, settings.num_blocks())
        held = plans.rank_dispatch_workspace(plan, shape.sizes)
    else:
        plan = plans.for_dispatch(shape.row, shape.sizes, settings.num_blocks())
        held = plans.dispatch_workspace(plan, shape.sizes)
    received = shape.capacity * shape.row.sent_bytes
    if shape.padded_hidden == shape.hidden and (shape.quantized or not shape.wire.quantized):
        received = 0  # the kernel writes the rows directly into the result
    return held | {
        "padded rows": shape.padded_rows(shape.num_tokens),
        "received rows": received,
    }


def _pallas_dispatch_like(shape: _Shape) -> dict[str, int]:
    if shape.by_rank:  # the kernel computes the local experts again, as a dispatch does
        return _pallas_dispatch(shape)
    held = _pallas_dispatch(shape)
    return {name: held[name] for name in ("padded rows", "received rows")}


def _pallas_combine(shape: _Shape) -> dict[str, int]:
    padded = {"padded rows": shape.padded_rows(shape.num_tokens + shape.capacity)}
    if shape.low_latency:  # the sums arrive in symmetric memory, which is not counted
        return padded
    plan = plans.for_combine(shape.row, shape.sizes, settings.num_blocks())
    return plans.combine_workspace(plan, shape.row, shape.sizes) | padded


def _pallas_combine_grad(shape: _Shape) -> dict[str, int]:
    if shape.by_rank:
        return _pallas_dispatch_like(shape)
    if shape.wire.quantized:  # XLA multiplies received quantized rows by the weights
        return _pallas_dispatch_like(shape) | _xla_grad_of_rows(shape)
    # g has T rows, y and dy have R rows each.
    return {"padded rows": shape.padded_rows(shape.num_tokens + 2 * shape.capacity)}


def _xla_dispatch(shape: _Shape) -> dict[str, int]:
    choices = shape.num_tokens * shape.top_k
    if shape.by_rank:
        return {
            "gathered tokens": shape.gathered(shape.sent_rows(shape.pairs)),
            "quantized rows": shape.quantized_rows(shape.num_tokens),
            "gathered choices": shape.gathered(_WORD * shape.pairs * shape.top_k),
            "routes": shape.routes(),
        }
    counts = shape.num_ranks * (2 * choices + shape.num_experts)
    return {
        "gathered choices": _WORD * counts,
        "counting choices": _WORD * align_up(choices, LANES) * shape.num_experts,
        "routes": shape.routes(),
        **_xla_dispatch_like(shape),
    }


def _xla_dispatch_like(shape: _Shape) -> dict[str, int]:
    if shape.by_rank:
        return _xla_dispatch(shape)
    return {
        "gathered tokens": shape.gathered(shape.sent_rows(shape.pairs)),
        "quantized rows": shape.quantized_rows(shape.num_tokens),
        "received rows": shape.quantized_rows(shape.capacity),
        "choice of each row": _WORD * (shape.capacity + 2 * shape.pairs * shape.top_k),
    }


def _xla_combine(shape: _Shape, weighted: bool = True) -> dict[str, int]:
    sums = shape.pairs * shape.hidden * _WORD
    rounded = shape.sent_rows(shape.pairs)
    received = {
        "received sums": shape.gathered(rounded),
        "widened sums": sums if shape.wire.quantized else 0,
    }
    if shape.by_rank:
        return {"sent sums": rounded, **received}
    return {
        "partial sums": sums,
        "rounded sums": 0 if rounded == sums else shape.gathered(rounded),
        **received,
        "gathered weights": shape.gathered(_WORD * shape.pairs * shape.top_k) if weighted else 0,
    }


def _xla_combine_grad(shape: _Shape) -> dict[str, int]:
    if shape.by_rank:
        return _xla_dispatch_like(shape)
    return _xla_dispatch_like(shape) | _xla_grad_of_rows(shape)


def _xla_grad_of_rows(shape: _Shape) -> dict[str, int]:
    """Returns the buffers in which XLA computes the gradients of y and the weights."""
    numbers = _WORD * shape.pairs * shape.top_k
    return {
        "g in the rows": shape.rows(shape.capacity),
        "products with y": _WORD * shape.capacity * shape.hidden,
        "gathered weights": shape.gathered(numbers),
        "weights and their gradient by row": 2 * _WORD * shape.capacity,
        "weights' gradient by rank": numbers + shape.gathered(numbers),
    }


_COUNTS: dict[tuple[str, str], Callable[[_Shape], dict[str, int]]] = {
    ("dispatch", "pallas"): _pallas_dispatch,
    ("dispatch", "xla"): _xla_dispatch,
    ("combine", "pallas"): _pallas_combine,
    ("combine", "xla"): _xla_combine,
    ("dispatch_grad", "pallas"): _pallas_combine,
    ("dispatch_grad", "xla"): functools.partial(_xla_combine, weighted=False),
    ("combine_grad", "pallas"): _pallas_combine_grad,
    ("combine_grad", "xla"): _xla_combine_grad,
    ("dispatch_like", "pallas"): _pallas_dispatch_like,
    ("dispatch_like", "xla"): _xla_dispatch_like,
    ("group_by_expert", "pallas"): _pallas_dispatch,
    ("group_by_expert", "xla"): _xla_dispatch,
    ("sum_by_token", "pallas"): _pallas_combine,
    ("sum_by_token", "xla"): _xla_combine,
}


def _of_one_level(
    operation: Operation, implementation: Literal["pallas", "xla"], shape: _Shape
) -> dict[str, int]:
    if implementation == "pallas":
        _check_kernels_run(shape)
    return _COUNTS[operation, implementation](shape)


def _between_hosts(
    operation: Operation,
    implementation: Literal["pallas", "xla"],
    shape: _Shape,
    num_hosts: int,
    sent_rows: int,
) -> dict[str, int]:
    """Returns the buffers of `jax_ep.exchange.two_level`: name -> bytes per rank.

    The buffers of the exchange inside a host are included. `sent_rows` is the number of rows that a
    rank sends to each host.
    """
    num_tokens, ranks_per_host = shape.num_tokens, shape.num_ranks // num_hosts
    sums = operation in ("combine", "dispatch_grad")
    if sums and ranks_per_host == 1:
        implementation = "xla"  # on a host with one rank, XLA computes the sums
    at_once = implementation == "pallas" and num_tokens <= plans.FEW_TOKENS
    tokens_of_call = num_tokens
    if at_once:
        tokens_of_call = num_hosts * sent_rows + (num_tokens if sent_rows < num_tokens else 0)
    # With kernels, two remote hosts' rows are held: those arriving and those being placed. A
    # combine holds the returned sums of all other hosts and the outgoing sums of one.
    in_turns = min(2, num_hosts - 1) if implementation == "pallas" else num_hosts - 1
    arrivals, sums_held = (num_hosts, 2 * num_hosts) if at_once else (in_turns, num_hosts)
    inside = dataclasses.replace(
        shape,
        num_tokens=tokens_of_call,
        num_experts=shape.num_experts // num_hosts,
        num_ranks=ranks_per_host,
        capacity=ranks_per_host * tokens_of_call if shape.by_rank else shape.capacity,
        wire=PLAIN,
        quantized=False,
    )
    # Quantized rows are padded to whole lines of ROW_BYTES, but sums are not.
    sent_bytes = shape.sent_rows(1)
    if shape.wire.quantized and not sums:
        sent_bytes = align_up(sent_bytes, plans.ROW_BYTES)
    rail = arrivals * sent_rows * sent_bytes
    weights = 0 if shape.by_rank else _WORD * num_hosts * sent_rows * shape.top_k
    # Rank-major kernels use rows in the order of the host's ranks, which XLA copies from or to the
    # order of all ranks.
    by_kernels = shape.by_rank and implementation == "pallas"
    in_order = inside.rows(ranks_per_host * tokens_of_call) if by_kernels else 0
    if sums:
        if shape.wire.quantized or (ranks_per_host > 1 and not shape.by_rank):
            inside = dataclasses.replace(inside, dtype=jnp.dtype(jnp.float32))
        widened = implementation == "pallas" and inside.dtype != shape.dtype
        return {
            "sums for and of other hosts": sums_held * sent_rows * sent_bytes,
            "sums of this host": 0 if at_once else num_tokens * sent_bytes,
            "returned sums, by token": (
                (num_hosts - 1) * num_tokens * sent_bytes if sent_rows < num_tokens else 0
            ),
            "weights of the rail": weights if operation == "combine" else 0,
            "float32 rows and sums": inside.rows(shape.capacity + tokens_of_call) if widened else 0,
            "rows inside a host": in_order,
            **_of_one_level(operation, implementation, inside),
        }
    held = {
        # With a host_capacity, the rows to send are picked into a buffer first.
        "rows of the rail": rail if sent_rows == num_tokens else 2 * rail,
        "rows inside a host": in_order,
        "quantized rows": shape.quantized_rows(num_tokens),
        "weights of the rail": weights if operation == "combine_grad" else 0,
    }
    received = {"received rows": shape.quantized_rows(shape.capacity)}
    if operation == "combine_grad" and not shape.by_rank:  # rows inside a host keep their dtype
        dy = 0 if implementation == "pallas" else shape.rows(shape.capacity)
        held |= {"gradient of y, of all hosts so far": dy}
    elif shape.wire.quantized:  # a host forwards quantized rows as 32-bit words
        words = sent_bytes // _WORD
        inside = dataclasses.replace(inside, hidden=words, dtype=jnp.dtype(jnp.float32))
        held |= received
    parts = _of_one_level(
        operation if operation == "combine_grad" else "dispatch_like", implementation, inside
    )
    if "gathered tokens" in parts:  # XLA holds the tokens of this host and of another one
        parts["gathered tokens"] += parts["gathered tokens"] * sent_rows // num_tokens
    if operation == "dispatch" and not shape.by_rank:
        choices = num_tokens * shape.top_k
        numbers = 2 * choices + shape.num_experts
        narrow = 2 if max(choices, shape.num_experts) < 2**16 - 1 else _WORD
        held |= {
            "choices of the rail": narrow * num_hosts * numbers,
            "gathered choices": (narrow + _WORD) * shape.num_ranks * numbers,
            "counting choices": _WORD * align_up(choices, LANES) * shape.num_experts,
        }
    if shape.by_rank or operation == "dispatch":
        parts["routes"] = shape.routes()
    return held | {name: size for name, size in parts.items() if size}


def _check_kernels_run(shape: _Shape) -> None:
    rows = selection.Rows(
        hidden=shape.hidden,
        dtype=shape.dtype,
        num_ranks=shape.num_ranks,
        list_words=shape.top_k,
        num_experts=shape.num_experts,
        wire=shape.wire,
    )
    if reason := rows.unavailable_reason():
        raise ValueError(f'implementation="pallas" cannot run: {reason}.')
