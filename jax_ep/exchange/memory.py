"""Computes how much memory a communication call needs for buffers, in bytes per rank."""

from __future__ import annotations

import inspect
import types
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange import interface, routes, workspace
from jax_ep.exchange.workspace import CallSizes
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
_SIZES = ("num_tokens", "hidden", "num_experts", "top_k", "num_ranks", "num_hosts")
# Maps an operation to the one as which it runs: those of LOCAL run as an exchange of one rank.
_COMPUTED_BY = {
    "group_by_expert": "dispatch",
    "sum_by_token": "combine",
    "combine_grad": "dispatch_like",
}


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

    The counts leave out the caller's arrays, results and gradients, and the heap of symmetric
    memory that "pallas" keeps on every GPU. The routes of a dispatch live as long as its handle;
    all other buffers are freed when the call returns. Each host is assumed to have one GPU per
    rank.

    For "xla" the arrays of the program are counted. XLA may need less, since it fuses operations
    and shares memory, or up to K more arrays [N, T, H] for the sum over a token's choices.

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
      dtype: the dtype of the rows.
      capacity, expert_alignment, host_capacity, layout, output: as given to `dispatch` or
        `group_by_expert`; layout is "rank" for group_by_expert and sum_by_token.
      wire_dtype: the wire_dtype of the operation; for a gradient, its grad_wire_dtype.

    Raises:
      ValueError, TypeError: an argument does not fit, or "pallas" cannot run at these sizes; the
        message names it.
    """
    sizes = _checked(types.SimpleNamespace(**locals()))  # the local variables are the arguments
    computed_by = _COMPUTED_BY.get(operation, operation)
    held = workspace.of_call(computed_by, implementation == "pallas", sizes)
    if operation == "combine_grad" and not sizes.by_rank:
        held |= workspace.gradients_of_rows(sizes)
    return {name: size for name, size in held.items() if size}


def result_bytes(
    operation: Operation, implementation: Literal["pallas", "xla"], **sizes: Any
) -> dict[str, int]:
    """Returns the bytes of the returned rows, for arguments of `workspace_bytes`."""
    bound = inspect.signature(workspace_bytes).bind(operation, implementation, **sizes)
    bound.apply_defaults()
    call = _checked(types.SimpleNamespace(**bound.arguments))
    if operation == "dispatch" and call.quantized:
        values = call.capacity * call.hidden  # of one byte each
        return {"received tokens": values, "scales": call.sent_rows(call.capacity) - values}
    # A rank-major combine takes no weights.
    if operation == "combine_grad":
        weights = 0 if call.by_rank else WORD_BYTES * call.num_tokens * call.top_k
        results = {"gradient of y": call.rows(call.capacity), "gradient of the weights": weights}
        return {name: size for name, size in results.items() if size}
    name, num_rows = {
        "dispatch": ("received tokens", call.capacity),
        "dispatch_like": ("received tokens", call.capacity),
        "group_by_expert": ("grouped tokens", call.capacity),
        "combine": ("combined tokens", call.num_tokens),
        "dispatch_grad": ("gradient of x", call.num_tokens),
        # For this local operation, `_checked` has replaced the tokens per rank, T, by N * T.
        "sum_by_token": ("sums by token", call.num_tokens),
    }[operation]
    return {name: call.rows(num_rows)}


def _checked(given: Any) -> CallSizes:
    """Checks `workspace_bytes`' arguments, attributes of `given`; returns the call's sizes."""
    operation, layout, output = given.operation, given.layout, given.output
    num_tokens, num_ranks, num_experts = given.num_tokens, given.num_ranks, given.num_experts
    checks.check_name("operation", operation, OPERATIONS)
    checks.check_name("implementation", given.implementation, IMPLEMENTATIONS)
    checks.check_name("layout", layout, LAYOUTS)
    for name in (*_SIZES, "expert_alignment"):
        checks.check_integer(name, getattr(given, name))
    for name in ("capacity", "host_capacity"):
        if (size := getattr(given, name)) is not None:
            checks.check_integer(name, size)
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
    wire = interface.checked_wire("hidden", row, given.wire_dtype)
    interface.check_output(output, wire)
    if output == "quantized" and operation != "dispatch":
        raise ValueError(
            f'output must be "dequantized" for {operation}: only a dispatch returns quantized rows.'
        )
    if wire.quantized and operation in LOCAL:
        raise ValueError(f"wire_dtype must be None for {operation}, which sends nothing.")
    num_local_experts, num_hosts = num_experts // num_ranks, given.num_hosts
    if operation in LOCAL:
        # It runs as an exchange of one rank, which has the N * T rows and experts of this rank.
        num_tokens, num_experts = num_ranks * num_tokens, num_local_experts
        num_ranks, num_hosts, layout = 1, 1, "expert"
    capacity, host_capacity = given.capacity, given.host_capacity
    if layout == "rank":  # whose buffer has a row for each (source rank, token)
        capacity, host_capacity = num_ranks * num_tokens, None
    if capacity is None:
        choices = num_ranks * num_tokens * given.top_k
        capacity = routes.dropless_capacity(choices, num_local_experts, given.expert_alignment)
    return CallSizes(
        num_tokens=num_tokens,
        hidden=given.hidden,
        num_experts=num_experts,
        top_k=given.top_k,
        num_ranks=num_ranks,
        dtype=jnp.dtype(dtype),
        capacity=capacity,
        by_rank=layout == "rank",
        wire=wire,
        quantized=output == "quantized",
        num_hosts=num_hosts,
        rows_to_host=num_tokens if host_capacity is None else min(num_tokens, host_capacity),
    )
