"""Dispatch and combine: the two collectives of expert parallelism, with their gradients.

Start reading here. Terms: N ranks along `axis_name`, E experts, L = E / N local experts, T tokens
per rank, K choices per token, H hidden, R = capacity, the rows of a receive buffer.

Everything is called inside `jax.shard_map` over `axis_name`. What follows a call, in this order:

  expert_major or rank_major   checks the arguments of a layout, and makes its pytrees
  gradients                    the custom gradients, one set for both layouts
  primitives                   the JAX primitives: shapes, and which exchange runs where
  xla, pallas or two_level     the three exchanges, typed in `interface`; two_level is made of one
                               of the others inside each host, and of rail between hosts
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange import expert_major, quantization, rank_major
from jax_ep.exchange.expert_major import Dispatched, Handle
from jax_ep.exchange.interface import Implementation
from jax_ep.exchange.rank_major import RankDispatched, RankHandle
from jax_ep.exchange.routes import Overflow

Output = Literal["dequantized", "quantized"]


@overload
def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity: int | None = None,
    expert_alignment: int = 1,
    overflow: Overflow = "tail",
    host_capacity: int | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    output: Output = "dequantized",
    layout: Literal["expert"] = "expert",
    zero_unused: bool = True,
    implementation: Implementation = None,
) -> Dispatched: ...


@overload
def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    output: Output = "dequantized",
    layout: Literal["rank"],
    topk_weights: jax.Array | None = None,
    implementation: Implementation = None,
) -> RankDispatched: ...


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity: int | None = None,
    expert_alignment: int = 1,
    overflow: Overflow = "tail",
    host_capacity: int | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    output: Output = "dequantized",
    layout: Literal["expert", "rank"] = "expert",
    topk_weights: jax.Array | None = None,
    zero_unused: bool = True,
    implementation: Implementation = None,
) -> Dispatched | RankDispatched:
    """Sends each token to the ranks that own its experts. Call it inside `jax.shard_map`.

    Args:
      x: [T, H] floating: this rank's tokens.
      topk_idx: [T, K] integer: global expert ids. A value outside [0, E), such as -1, is a choice
        of no expert. One token may choose an expert more than once and gets a row each time.
      num_experts: E, a multiple of the number of ranks N. Rank r owns experts [r·L, (r+1)·L).
      axis_name: the mesh axis, or tuple of axes, that the experts are spread over. The order of a
        tuple defines the order of the ranks, as in a `jax.sharding.PartitionSpec`: it must be that
        of the specs. ("b", "a") where the specs say ("a", "b") is another order, and no error.
      capacity: R, the rows of the receive buffer. Rows that do not fit are dropped and counted.
        None: enough rows for any routing, N·T·K and the blocks' padding.
      expert_alignment: each expert's block starts at a multiple of this many rows.
      overflow: which rows are dropped where R is too small. "tail": those past R in row order, so
        that a rank's last experts lose theirs first. "fair": an expert of c rows keeps its first
        min(c, q), in row order, with the largest q, one for the rank, at which all blocks and their
        padding fit in R; no expert loses rows while another has more than it keeps.
      host_capacity: the most rows that this rank sends to each other host, where ranks are on
        several hosts; None: all T, which any routing fits in. The choices on a host of all later
        tokens are dropped as if they were -1, and counted by the ranks of these experts. With a
        router that keeps each token to k of M hosts, T·k / M of a rank's tokens choose a host on
        average; give more than that, such as 0.6·T for DeepSeek-V3's 4 of 8 hosts.
      wire_dtype: None, or `jnp.float8_e4m3fn`: each row crosses the wire as float8 values with one
        float32 scale per 128 of them; H must be a multiple of 128. `jax_ep.formats` gives the
        errors, and what becomes of NaN and of the largest and smallest values.
      grad_wire_dtype: None, or `jnp.float8_e4m3fn`: the dtype in which the sums of cotangents are
        returned, as in `combine(wire_dtype=...)`. None, which most training wants: their own.
      output: with a wire_dtype, "dequantized" returns rows of x's dtype, and "quantized" a
        `jax_ep.QuantizedArray` of the float8 rows as they are received, for a float8 matmul.
      layout: "expert", one row for each (token, choice), grouped by expert; or "rank", one row for
        each (source rank, token), which has no capacity and no alignment.
      topk_weights: [T, K] floating, in the rank-major layout only: sent with the rows, for the
        experts' rank to weight its outputs. Differentiable.
      zero_unused: whether the rows past the last expert's block are zero, in the expert-major
        layout. False lets them hold anything, NaN too, here and in gradients of rows, which saves
        "pallas" the time to write them. A buffer for any routing is mostly of such rows; no result
        of `grouped_matmul`, `routed_experts` or `combine` depends on them.
      implementation: "pallas" (GPU kernels), "xla" (any backend), "two_level" (ranks on several
        hosts: a token crosses to each host once, see `jax_ep.exchange.two_level`), or None for the
        best that runs. Which ranks share a host is read from the devices of the mesh.

    Returns:
      A `Dispatched`, or for layout="rank" a `RankDispatched`. The gradient with respect to x is the
      plain-sum `combine`, in reverse mode only (`jax.grad`, `jax.vjp`): JAX refuses `jax.jvp`.
      Quantization is passed straight through: the cotangent of dequantized rows is sent in x's
      dtype, unless there is a grad_wire_dtype. Quantized rows have no gradient, and asking for one
      raises TypeError; give the cotangent in a wider dtype to `combine`, in a `jax.custom_vjp`.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    axis_name = checks.as_axes(axis_name)
    _check_choices(x, topk_idx)
    num_experts = _check_num_experts(num_experts, axis_name)
    quantization.check_output(output, quantization.wire_format(wire_dtype))
    shared: dict[str, Any] = dict(
        num_experts=num_experts,
        axis_name=axis_name,
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        quantized=output == "quantized",
        implementation=implementation,
    )
    if layout == "rank":
        if host_capacity is not None:
            raise ValueError(
                f'layout="rank" takes no host_capacity, but it is {host_capacity}; a host gets the '
                "rows of all tokens."
            )
        if capacity is not None or expert_alignment != 1 or overflow != "tail":
            raise ValueError(
                'layout="rank" has a row for each (source rank, token) and takes no capacity, '
                f"expert_alignment or overflow, but they are {capacity}, {expert_alignment} and "
                f"{overflow!r}; give them to group_by_expert."
            )
        checks.check_bool("zero_unused", zero_unused)
        if not zero_unused:
            raise ValueError(f'zero_unused is of layout="expert" alone, but is {zero_unused!r}.')
        return rank_major.dispatch(x, topk_idx, topk_weights, **shared)
    if layout != "expert":
        raise ValueError(f'layout must be "expert" or "rank", but is {layout!r}.')
    if topk_weights is not None:
        raise ValueError(
            'topk_weights is an argument of dispatch only with layout="rank"; with "expert", give '
            "the weights to combine."
        )
    return expert_major.dispatch(
        x,
        topk_idx,
        capacity=capacity,
        expert_alignment=expert_alignment,
        overflow=overflow,
        host_capacity=host_capacity,
        zero_unused=zero_unused,
        **shared,
    )


def combine(
    y: jax.Array,
    handle: Handle | RankHandle,
    topk_weights: jax.Array | None = None,
    *,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Returns the experts' outputs to the tokens' owners and sums them.

    `out[t] = sum_k topk_weights[t, k] * y[row of (t, k)]`. The sum over one rank's rows is taken
    in float32 next to the experts and rounded once, to y's dtype or the wire_dtype, to cross the
    wire; the sum over ranks is taken in float32, in rank order. Where ranks are on several hosts
    and the implementation is "two_level", or None takes it, the sum over one host's rows is taken
    in float32 and rounded once instead, and the sum over hosts is taken in float32, in the order of
    the hosts. A dropped or masked choice counts as zero.

    Args:
      y: [R, H] floating: one row for each row of `Dispatched.tokens`. In the rank-major
        layout, [N, T, H]: the sum, weighted already, over the experts here of each (source rank,
        token); a row with no expert here is never read.
      handle: the handle of that dispatch.
      topk_weights: [T, K] floating, or None for a plain sum; None in the rank-major
        layout.
      wire_dtype: None, or `jnp.float8_e4m3fn`: the sums over each rank's rows, or between hosts
        over each host's, cross the wire in it, as in `dispatch`, instead of in y's dtype. Each of
        up to N of them is off by what `jax_ep.formats` says, which grows with the
        largest sum of its block; the sum over ranks is off by no more than these errors together.
        Warning: float8 sums cost accuracy. Others measured gsm8k at 0.920 instead of 0.957 with
        them, and DeepEP refuses them; measure your model before you choose them.
      grad_wire_dtype: as wire_dtype, of the cotangent of the result, which is sent as a dispatch
        sends rows.
      implementation: as in `dispatch`.

    Returns:
      [T, H], y's dtype. Differentiable in y and topk_weights, in reverse mode as `dispatch` is;
      in rows of no token, the gradient of y is zero unless the dispatch had `zero_unused=False`;
      the rounding of a wire_dtype is passed straight through, and cotangents are sent in y's dtype
      or the grad_wire_dtype.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    options: dict[str, Any] = dict(
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        implementation=implementation,
    )
    if isinstance(handle, RankHandle):
        return rank_major.combine(y, handle, topk_weights, **options)
    _check_handle(handle)
    return expert_major.combine(y, handle, topk_weights, **options)


def dispatch_like(
    x: jax.Array,
    handle: Handle | RankHandle,
    *,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    output: Output = "dequantized",
    implementation: Implementation = None,
) -> Any:
    """Sends another payload along the routes of an earlier dispatch.

    Args:
      x: [T, H'] floating: one row for each token of that dispatch; H' is free.
      handle: the handle of that dispatch.
      wire_dtype, grad_wire_dtype, output: as in `dispatch`.
      implementation: as in `dispatch`.

    Returns:
      [R, H'], x's dtype or a `QuantizedArray`, in the row order of `Dispatched.tokens`; every
      other row is zero, unless the dispatch had `zero_unused=False`. In the rank-major layout,
      [N, T, H'].

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    options: dict[str, Any] = dict(
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        quantized=output == "quantized",
        implementation=implementation,
    )
    quantization.check_output(output, quantization.wire_format(wire_dtype))
    if isinstance(handle, RankHandle):
        return rank_major.dispatch_like(x, handle, **options)
    _check_handle(handle)
    return expert_major.dispatch_like(x, handle, **options)


def _check_choices(x: Any, topk_idx: Any) -> None:
    checks.check_array("x", x, 2, jnp.floating, "[T, H]")
    checks.check_array("topk_idx", topk_idx, 2, jnp.integer, "[T, K]")
    if topk_idx.shape[0] != x.shape[0]:
        raise ValueError(
            "topk_idx must have one row for each row of x, but topk_idx has shape "
            f"{topk_idx.shape} and x has shape {x.shape}."
        )
    if 0 in x.shape or 0 in topk_idx.shape:
        raise ValueError(
            f"x and topk_idx must not be empty, but have shapes {x.shape} and {topk_idx.shape}; "
            "a rank with nothing to send passes rows of -1."
        )


def _check_num_experts(num_experts: int, axis_name: tuple[str, ...]) -> int:
    num_ranks = checks.num_ranks(axis_name)
    num_experts = checks.check_integer("num_experts", num_experts, most=checks.MAX_INT32)
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of the {num_ranks} ranks along "
            f"{axis_name}, but is {num_experts}."
        )
    return num_experts


def _check_handle(handle: Any) -> None:
    if isinstance(handle, (Dispatched, RankDispatched)):
        raise TypeError(
            "handle must be the handle of a dispatch, but is all that it returned, a "
            f"{type(handle).__name__}; pass received.handle."
        )
    if not isinstance(handle, Handle):
        raise TypeError(
            "handle must be the handle of a dispatch, such as received.handle, but is "
            f"{checks.described(handle)}."
        )
