"""Computes how much memory a communication call needs for buffers, in bytes per rank.

The caller's inputs and outputs are not counted. All sizes follow from shapes, so that no machine
with N ranks is needed to compute them. For kernels, `pallas_kernels.exchange.plan` states the
allocated buffers; `jax_ep.exchange.xla` and `two_level` state their own. Tests compare the counts
of "xla" with XLA's analysis of the compiled program (`compiled.memory_analysis()`), and the counts
of "pallas" with the buffers in the lowered kernels' calls.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange import quantization, routes, two_level, xla
from jax_ep.exchange.call_sizes import CallSizes
from jax_ep.exchange.rows import Rows
from jax_ep.runtime import settings
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric.hardware import WORD_BYTES

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
# These operations permute rows between the layouts on one rank, without communication.
LOCAL: tuple[Operation, ...] = ("group_by_expert", "sum_by_token")
# Maps each operation of LOCAL to the operation of the exchange that computes it on one rank.
_CROSSING = {"group_by_expert": "dispatch", "sum_by_token": "combine"}


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
    are freed when the call returns. Each host is assumed to have one GPU for each of its ranks. The
    number of GPUs determines which calls fit in the heap, and so which kernels "pallas" selects.

    For "xla" the arrays of the program are counted. XLA may need less, since it fuses operations
    and lets arrays share memory. It needs up to K more arrays [N, T, H] where it does not fuse the
    sum over a token's choices.

    Args:
      operation: the name of a function of this library; or "dispatch_grad" or "combine_grad", the
        gradient of a dispatch or a combine. In the expert-major layout, "combine_grad" is the
        gradient of a combine with weights.
      implementation: "pallas" or "xla".
      num_tokens: T, the tokens per rank.
      hidden: H, the columns of a row.
      num_experts: E, the experts of all ranks.
      top_k: K, the choices per token.
      num_ranks: N, the number of ranks.
      num_hosts: M, which divides N. Above 1, counts the buffers of "two_level", and
        `implementation` is the exchange inside each host.
      host_capacity: the host_capacity of `dispatch`: the most tokens from a rank to another host.
      dtype: the dtype of the rows.
      capacity: R, as given to `dispatch` or `group_by_expert`; None: enough rows for any routing.
        Not used in the rank-major layout, which has N·T rows.
      expert_alignment: as given to `dispatch` or `group_by_expert`. If `capacity` is None, R
        includes the rows that aligning each expert's block may add.
      layout: the layout of `dispatch`; "rank" for group_by_expert and sum_by_token.
      wire_dtype: the wire_dtype of the operation; for a gradient, its grad_wire_dtype.
      output: the `output` of a dispatch with a wire_dtype; "pallas" writes "quantized" rows
        directly into the result.

    Raises:
      ValueError, TypeError: an argument does not fit, or "pallas" cannot run at these sizes; the
        message names it.
    """
    sizes = _checked(types.SimpleNamespace(**locals()))
    name = _CROSSING.get(operation, operation)
    if num_hosts > 1 and operation not in LOCAL:
        most = num_tokens if host_capacity is None or layout == "rank" else host_capacity
        kernels, rows_to_host = implementation == "pallas", min(num_tokens, most)
        held = two_level.workspace(name, kernels, sizes, num_hosts, rows_to_host, _of_one_level)
    else:
        held = _of_one_level(name, implementation == "pallas", sizes)
    return {name: size for name, size in held.items() if size}


def result_bytes(
    operation: Operation, implementation: Literal["pallas", "xla"], **sizes: Any
) -> dict[str, int]:
    """Returns the bytes of the rows that an operation returns: name -> bytes per rank.

    The arguments are those of `workspace_bytes`. Not counted are `group_sizes` and other counts,
    because they are small, and the routes, because `workspace_bytes` counts them.
    """
    given = inspect.signature(workspace_bytes).bind(operation, implementation, **sizes)
    given.apply_defaults()
    shape = _checked(types.SimpleNamespace(**given.arguments))
    if operation == "dispatch" and shape.quantized:
        values = shape.capacity * shape.hidden
        return {"received tokens": values, "scales": shape.sent_rows(shape.capacity) - values}
    if operation == "combine_grad":
        weights = 0 if shape.by_rank else WORD_BYTES * shape.num_tokens * shape.top_k
        found = {"gradient of y": shape.rows(shape.capacity), "gradient of the weights": weights}
        return {name: size for name, size in found.items() if size}
    name, count = {
        "dispatch": ("received tokens", shape.capacity),
        "dispatch_like": ("received tokens", shape.capacity),
        "group_by_expert": ("grouped tokens", shape.capacity),
        "combine": ("combined tokens", shape.num_tokens),
        "dispatch_grad": ("gradient of x", shape.num_tokens),
        # For this local operation, `_checked` has replaced the tokens per rank, T, by N * T.
        "sum_by_token": ("sums by token", shape.num_tokens),
    }[operation]
    return {name: shape.rows(count)}


def _checked(given: Any) -> CallSizes:
    """Checks the arguments of `workspace_bytes`, which `given` holds; returns the `CallSizes`."""
    operation, layout, capacity = given.operation, given.layout, given.capacity
    num_ranks, num_tokens, num_experts = given.num_ranks, given.num_tokens, given.num_experts
    checks.check_name("operation", operation, OPERATIONS)
    checks.check_name("implementation", given.implementation, IMPLEMENTATIONS)
    checks.check_name("layout", layout, LAYOUTS)
    optional = {name: getattr(given, name) for name in ("capacity", "host_capacity")}
    checks.check_sizes(
        num_tokens=num_tokens,
        hidden=given.hidden,
        num_experts=num_experts,
        top_k=given.top_k,
        num_ranks=num_ranks,
        num_hosts=given.num_hosts,
        expert_alignment=given.expert_alignment,
        **{name: size for name, size in optional.items() if size is not None},
    )
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of num_ranks, but is {num_experts} for "
            f"{num_ranks} ranks."
        )
    if num_ranks % given.num_hosts:
        raise ValueError(f"num_hosts must divide the {num_ranks} ranks, but is {given.num_hosts}.")
    dtype = checks.as_floating("dtype", given.dtype)
    if operation in LOCAL and layout != "rank":
        raise ValueError(f'layout must be "rank" for {operation}, but is {layout!r}.')
    row = jax.ShapeDtypeStruct((given.hidden,), dtype)
    wire = quantization.checked("hidden", row, given.wire_dtype)
    quantization.check_output(given.output, wire)
    if given.output == "quantized" and operation != "dispatch":
        raise ValueError(
            f'output must be "dequantized" for {operation}: only a dispatch returns quantized rows.'
        )
    if wire.quantized and operation in LOCAL:
        raise ValueError(f"wire_dtype must be None for {operation}, which sends nothing.")
    num_local = num_experts // num_ranks
    if operation in LOCAL:
        # A local operation runs as the exchange of a single rank with N * T tokens.
        num_ranks, num_tokens, num_experts = 1, num_ranks * num_tokens, num_local
        layout = "expert"
    if layout == "rank":
        capacity = num_ranks * num_tokens
    if capacity is None:
        choices = num_ranks * num_tokens * given.top_k
        capacity = routes.dropless_capacity(choices, num_local, given.expert_alignment)
    return CallSizes(
        num_tokens,
        given.hidden,
        num_experts,
        given.top_k,
        num_ranks,
        jnp.dtype(dtype),
        capacity,
        layout == "rank",
        wire,
        given.output == "quantized",
    )


def _pallas_dispatch(shape: CallSizes) -> dict[str, int]:
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


def _pallas_dispatch_like(shape: CallSizes) -> dict[str, int]:
    if shape.by_rank:
        # In the rank-major layout, dispatch_like runs the kernel of dispatch, with its buffers.
        return _pallas_dispatch(shape)
    held = _pallas_dispatch(shape)
    return {name: held[name] for name in ("padded rows", "received rows")}


def _pallas_combine(shape: CallSizes) -> dict[str, int]:
    padded = {"padded rows": shape.padded_rows(shape.num_tokens + shape.capacity)}
    if shape.low_latency:  # the sums arrive in symmetric memory, which is not counted
        return padded
    plan = plans.for_combine(shape.row, shape.sizes, settings.num_blocks())
    return plans.combine_workspace(plan, shape.row, shape.sizes) | padded


def _pallas_combine_grad(shape: CallSizes) -> dict[str, int]:
    if shape.by_rank:
        return _pallas_dispatch_like(shape)
    if shape.wire.quantized:  # XLA, not a kernel, multiplies the received rows by the weights
        return _pallas_dispatch_like(shape) | xla.grad_of_rows_workspace(shape)
    # The kernel takes padded copies of g (T rows), y and the gradient of y (R rows each).
    return {"padded rows": shape.padded_rows(shape.num_tokens + 2 * shape.capacity)}


_BY_KERNELS: dict[str, Callable[[CallSizes], dict[str, int]]] = {
    "dispatch": _pallas_dispatch,
    "dispatch_like": _pallas_dispatch_like,
    "dispatch_grad": _pallas_combine,
    "combine": _pallas_combine,
    "combine_grad": _pallas_combine_grad,
}


def _of_one_level(operation: str, kernels: bool, shape: CallSizes) -> dict[str, int]:
    if not kernels:
        return xla.workspace(operation, shape)
    _check_kernels_run(shape)
    return _BY_KERNELS[operation](shape)


def _check_kernels_run(shape: CallSizes) -> None:
    rows = Rows(
        hidden=shape.hidden,
        dtype=shape.dtype,
        num_ranks=shape.num_ranks,
        list_words=shape.top_k,
        num_experts=shape.num_experts,
        wire=shape.wire,
    )
    if reason := rows.unavailable_reason():
        raise ValueError(f'implementation="pallas" cannot run: {reason}.')
