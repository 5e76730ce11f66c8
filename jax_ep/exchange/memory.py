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
# Within one rank, between the rank-major and the expert-major layout: nothing crosses the wire.
LOCAL: tuple[Operation, ...] = ("group_by_expert", "sum_by_token")

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

    Not counted are the caller's arrays: x and topk_idx, y and the weights, `Dispatched.tokens`,
    the result of `combine`, cotangents and gradients. The routes are counted for the dispatch that
    makes them, and live as long as its handle; all other buffers are freed when the call returns.
    Also not counted is the heap of symmetric memory that "pallas" keeps on every GPU while the
    process lives. A host is taken to have as many GPUs as ranks; more leave less room in the heap.

    For "xla" the counts are of the arrays that the program names. XLA may need less, since it fuses
    operations and lets arrays share memory; or more where it does not fuse: up to K arrays
    [N, T, H] of the terms of a sum over a token's choices.

    Args:
      operation: a function of this library; or "dispatch_grad", the gradient of a dispatch; or
        "combine_grad", the gradient of a combine, which is weighted in the expert-major layout.
      implementation: "pallas" or "xla".
      num_tokens: T, per rank.
      hidden: H.
      num_experts: E.
      top_k: K.
      num_ranks: N.
      num_hosts: M, which divides N. Above 1, these are the buffers of the exchange of two levels,
        and `implementation` is what runs inside each host.
      host_capacity: as given to `dispatch`.
      dtype: the dtype of the rows.
      capacity: R, as given to `dispatch` or `group_by_expert`, which are dropless by default. Not
        used in the rank-major layout, which has N·T rows.
      expert_alignment: as given there; without a capacity, R includes the padding it may need.
      layout: the layout of `dispatch`; "rank" for group_by_expert and sum_by_token.
      wire_dtype: the wire_dtype of the operation; for a gradient, its grad_wire_dtype.
      output: the output of a dispatch with a wire_dtype; "pallas" writes quantized rows without a
        buffer of their own.

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
    """Returns the rows that an operation gives its caller: name -> bytes per rank.

    The arguments are those of `workspace_bytes`. Counts of rows and routes are left out: they are
    small, or part of the workspace.
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
        "sum_by_token": ("sums by token", shape.num_tokens),  # of all ranks: see `_checked`
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
    wire_dtype = quantization.checked("hidden", jax.ShapeDtypeStruct((hidden,), dtype), wire_dtype)
    quantization.check_output(output, wire_dtype)
    if output == "quantized" and operation != "dispatch":
        raise ValueError(f'output="quantized" is of a dispatch, but the operation is {operation}.')
    if wire_dtype is not None and operation in LOCAL:
        raise ValueError(f"wire_dtype must be None for {operation}, which sends nothing.")
    num_local = num_experts // num_ranks
    if operation in LOCAL:  # an exchange among one rank
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
        wire_dtype,
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
    wire_dtype: jnp.dtype | None
    quantized: bool  # whether a dispatch returns float8 rows

    @property
    def pairs(self) -> int:
        """The number of (source rank, token) pairs."""
        return self.num_ranks * self.num_tokens

    def rows(self, count: int) -> int:
        return count * self.hidden * self.dtype.itemsize

    def sent_rows(self, count: int) -> int:
        """Returns the bytes of `count` rows as they are sent."""
        return count * quantization.row_bytes(self.hidden, self.dtype, self.wire_dtype)

    def quantized_rows(self, count: int) -> int:
        """Returns the bytes of `count` quantized rows; 0 without a wire_dtype."""
        return 0 if self.wire_dtype is None else self.sent_rows(count)

    def gathered(self, size: int) -> int:
        """Returns `size`, the bytes gathered from all ranks; 0 for one rank."""
        return size if self.num_ranks > 1 else 0

    def routes(self) -> int:
        """Returns the bytes of the routes.

        They are a row, or in the rank-major layout a local expert, for each choice; and in the
        expert-major layout the counts.
        """
        counts = 0 if self.by_rank else self.num_ranks * self.num_experts
        return _WORD * (self.pairs * self.top_k + counts)

    @property
    def padded_hidden(self) -> int:
        """H and the padding that the kernels need."""
        return plans.padded_hidden(self.hidden, self.dtype, self.wire_dtype)

    @property
    def row(self) -> plans.Row:
        """A padded row, for the kernels' plans."""
        return plans.Row(self.padded_hidden, self.dtype, self.wire_dtype)

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
        """The plan of the kernels over the low-latency protocol, if they take such rows."""
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
    if shape.padded_hidden == shape.hidden and (shape.wire_dtype is None or shape.quantized):
        received = 0  # the kernel writes them to the result
    return held | {
        "padded rows": shape.padded_rows(shape.num_tokens),
        "received rows": received,
    }


def _pallas_dispatch_like(shape: _Shape) -> dict[str, int]:
    if shape.by_rank:  # the kernel makes the lists again
        return _pallas_dispatch(shape)
    held = _pallas_dispatch(shape)
    return {name: held[name] for name in ("padded rows", "received rows")}


def _pallas_combine(shape: _Shape) -> dict[str, int]:
    padded = {"padded rows": shape.padded_rows(shape.num_tokens + shape.capacity)}
    if shape.low_latency:  # sums are received in symmetric memory
        return padded
    plan = plans.for_combine(shape.row, shape.sizes, settings.num_blocks())
    return plans.combine_workspace(plan, shape.row, shape.sizes) | padded


def _pallas_combine_grad(shape: _Shape) -> dict[str, int]:
    if shape.by_rank:
        return _pallas_dispatch_like(shape)
    if shape.wire_dtype is not None:  # XLA weights rows received in a wire_dtype
        return _pallas_dispatch_like(shape) | _xla_grad_of_rows(shape)
    return {"padded rows": shape.padded_rows(shape.num_tokens + 2 * shape.capacity)}  # g, y and dy


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
        "widened sums": 0 if shape.wire_dtype is None else sums,
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
    """Returns what is held while the gradients of y and the weights are made from g in the rows."""
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
    """Returns what `jax_ep.exchange.two_level` holds, the exchange inside a host included.

    `sent_rows` is the number of rows that a rank sends to each host.
    """
    num_tokens, ranks_per_host = shape.num_tokens, shape.num_ranks // num_hosts
    sums = operation in ("combine", "dispatch_grad")
    if sums and ranks_per_host == 1:
        implementation = "xla"  # which sums for a rank alone on its host
    at_once = implementation == "pallas" and num_tokens <= plans.FEW_TOKENS
    tokens_of_call = num_tokens
    if at_once:
        tokens_of_call = num_hosts * sent_rows + (num_tokens if sent_rows < num_tokens else 0)
    # In turns rows of other hosts alone: with kernels those that come and those that are placed,
    # and of sums all that return and those that are sent.
    in_turns = min(2, num_hosts - 1) if implementation == "pallas" else num_hosts - 1
    arrivals, sums_held = (num_hosts, 2 * num_hosts) if at_once else (in_turns, num_hosts)
    inside = dataclasses.replace(
        shape,
        num_tokens=tokens_of_call,
        num_experts=shape.num_experts // num_hosts,
        num_ranks=ranks_per_host,
        capacity=ranks_per_host * tokens_of_call if shape.by_rank else shape.capacity,
        wire_dtype=None,
        quantized=False,
    )
    # With a wire_dtype rows are sent as whole lines, but not sums.
    sent_bytes = shape.sent_rows(1)
    if shape.wire_dtype is not None and not sums:
        sent_bytes = align_up(sent_bytes, plans.ROW_BYTES)
    rail = arrivals * sent_rows * sent_bytes
    weights = 0 if shape.by_rank else _WORD * num_hosts * sent_rows * shape.top_k
    # Of the kernels', in the order of ranks inside the host, copied to or from that of all ranks.
    by_kernels = shape.by_rank and implementation == "pallas"
    in_order = inside.rows(ranks_per_host * tokens_of_call) if by_kernels else 0
    if sums:
        if shape.wire_dtype is not None or (ranks_per_host > 1 and not shape.by_rank):
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
        "rows of the rail": rail if sent_rows == num_tokens else 2 * rail,  # picked, and received
        "rows inside a host": in_order,
        "quantized rows": shape.quantized_rows(num_tokens),
        "weights of the rail": weights if operation == "combine_grad" else 0,
    }
    received = {"received rows": shape.quantized_rows(shape.capacity)}
    if operation == "combine_grad" and not shape.by_rank:  # of rows as wide as they were
        dy = 0 if implementation == "pallas" else shape.rows(shape.capacity)
        held |= {"gradient of y, of all hosts so far": dy}
    elif shape.wire_dtype is not None:  # words of what is sent
        words = sent_bytes // _WORD
        inside = dataclasses.replace(inside, hidden=words, dtype=jnp.dtype(jnp.float32))
        held |= received
    parts = _of_one_level(
        operation if operation == "combine_grad" else "dispatch_like", implementation, inside
    )
    if "gathered tokens" in parts:  # of this host, and of another one
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
        wire_dtype=shape.wire_dtype,
    )
    if reason := rows.unavailable_reason():
        raise ValueError(f'implementation="pallas" cannot run: {reason}.')
