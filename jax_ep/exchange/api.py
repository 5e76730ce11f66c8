"""Dispatch and combine: the two collectives of expert parallelism, with their gradients.

Start reading here. Terms: N ranks along `axis_name`, E experts, L = E / N local experts, T tokens
per rank, K choices per token, hidden size H, capacity R (the rows of a receive buffer).

Call everything inside `jax.shard_map` over `axis_name`. A call passes through these modules:

  expert_major or rank_major   check the arguments, and return the Handle and Dispatched pytrees
  gradients                    defines the custom VJPs, for both layouts
  primitives                   defines the JAX primitives; lowering selects an implementation
  xla, pallas or two_level     implement `interface.Exchange`, which moves the rows; two_level
                               calls xla or pallas inside each host, and `rail` between hosts
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
      topk_idx: [T, K] integer: global expert ids. A value outside [0, E), such as -1, chooses no
        expert. A token may choose an expert more than once, and gets a row each time.
      num_experts: E, a multiple of the number of ranks N. Rank r owns experts [r·L, (r+1)·L).
      axis_name: the mesh axis, or tuple of axes, that the experts are spread over. The order of a
        tuple defines the order of the ranks, as in a `jax.sharding.PartitionSpec`, and must equal
        the order in the specs: ("b", "a") with specs of ("a", "b") gives wrong results silently.
      capacity: R, the rows of the receive buffer. Rows that do not fit are dropped and counted.
        None: enough rows for any routing, N·T·K and the blocks' padding.
      expert_alignment: each expert's block starts at a multiple of this many rows.
      overflow: selects the rows to drop where R is too small. "tail" drops the rows past R in row
        order, so a rank's last experts lose rows first. "fair" lets each expert of a rank keep at
        most q rows, its first in row order; q is the largest number at which all blocks and their
        padding fit in R, so the experts with most rows lose rows first.
      host_capacity: the most tokens that this rank sends to each other host, where ranks are on
        several hosts; None: all T. The first tokens that chose experts on a host, up to this many,
        are sent there. In later tokens, the choices of experts on that host are dropped; the ranks
        of these experts count them in `num_dropped`. If a router limits each token to k of M hosts,
        T·k / M of a rank's tokens choose a given host on average. Set host_capacity above this
        average, such as to 0.6·T for DeepSeek-V3, whose tokens choose 4 of 8 hosts.
      wire_dtype: None, or `jnp.float8_e4m3fn`: rows are sent as float8 values with one float32
        scale per 128 values; H must be a multiple of 128. `jax_ep.formats` states the rounding
        errors, and how NaN and the largest and smallest values are encoded.
      grad_wire_dtype: None, or `jnp.float8_e4m3fn`: the dtype in which the gradient of x is sent,
        as the wire_dtype of a `combine`. None, the usual choice in training, sends cotangents
        without quantization.
      output: for a wire_dtype: "dequantized" returns rows of x's dtype; "quantized" returns a
        `jax_ep.QuantizedArray` of the received float8 rows, for a float8 matmul.
      layout: "expert", one row for each (token, choice), grouped by expert; or "rank", one row for
        each (source rank, token), which has no capacity and no alignment.
      topk_weights: [T, K] floating, in the rank-major layout only: weights to send with the rows,
        so that the experts' rank can multiply its outputs by them. Differentiable.
      zero_unused: in the expert-major layout, whether the unused rows past the last expert's block
        are zero, both in the received rows and in the gradient of a combine's y. False leaves them
        undefined (they may be NaN), and saves "pallas" the time to write them. If `capacity` is
        None, most rows are unused. No result of `grouped_matmul`, `routed_experts` or `combine`
        depends on unused rows.
      implementation: "pallas" (GPU kernels), "xla" (any backend), "two_level" (ranks on several
        hosts: a token crosses to each host once, see `jax_ep.exchange.two_level`), or None for the
        best that runs. The devices of the mesh determine which ranks share a host.

    Returns:
      A `Dispatched`, or for layout="rank" a `RankDispatched`. The gradient of x is a `combine`
      without weights, in reverse mode only (`jax.grad`, `jax.vjp`): JAX refuses `jax.jvp`. This
      gradient treats quantization as the identity (straight-through), and sends the cotangents of
      dequantized rows in x's dtype, unless there is a grad_wire_dtype. Quantized rows have no
      gradient: differentiating them raises TypeError. Define a `jax.custom_vjp` around the dispatch
      instead, and in it pass the rows' cotangent in a wider dtype to `combine`.

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
            raise ValueError(f'zero_unused must be True for layout="rank", but is {zero_unused!r}.')
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
    """Sends the experts' outputs back to the tokens' ranks and sums them.

    `out[t] = sum_k topk_weights[t, k] * y[row of (t, k)]`. A token's rows on one rank are summed
    there in float32, and the sum is rounded once, to y's dtype or the wire_dtype, and sent. The
    sums of the ranks are added in float32, in rank order. With "two_level" (ranks on several
    hosts), each host instead sends one sum per token, rounded once, and the sums of the hosts are
    added in float32, in the order of the hosts. A dropped or masked choice counts as zero.

    Args:
      y: [R, H] floating: one row for each row of `Dispatched.tokens`. In the rank-major layout,
        [N, T, H]: for each (source rank, token), the weighted sum over the experts of this rank.
        Rows of tokens that chose no expert of this rank are never read.
      handle: the handle of the dispatch.
      topk_weights: [T, K] floating, or None for a plain sum. Must be None in the rank-major layout.
      wire_dtype: the dtype in which sums are sent: None for y's dtype, or `jnp.float8_e4m3fn` with
        scales, as in `dispatch`. With "two_level", only sums between hosts are quantized. Each of
        up to N float8 sums of a token has the rounding error that `jax_ep.formats` states, which
        grows with the largest value of its block of 128; the errors add up. Warning: float8 sums
        cost accuracy. Others report a gsm8k score of 0.920 with float8 sums, and of 0.957 without.
        DeepEP offers no float8 sums. Measure your model before you choose them.
      grad_wire_dtype: the dtype in which the backward pass sends the cotangent of the result to the
        experts' ranks, by a dispatch; as the wire_dtype of `dispatch`.
      implementation: as in `dispatch`.

    Returns:
      [T, H], y's dtype. Differentiable in y and topk_weights, in reverse mode only. The gradient of
      y is zero in the padding rows between experts' blocks. It is also zero in the unused rows past
      the last block, unless the dispatch had `zero_unused=False`. The gradient treats the rounding
      of a wire_dtype as the identity (straight-through), and sends cotangents in y's dtype or the
      grad_wire_dtype.

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
    """Sends another array of token rows to the receive-buffer rows of an earlier dispatch.

    Args:
      x: [T, H'] floating: one row for each token of the dispatch; any H'.
      handle: the handle of the dispatch.
      wire_dtype, grad_wire_dtype, output: as in `dispatch`.
      implementation: as in `dispatch`.

    Returns:
      [R, H'], x's dtype or a `QuantizedArray`, in the row order of `Dispatched.tokens`. Padding
      rows are zero; unused rows are zero, too, unless the dispatch had `zero_unused=False`. In the
      rank-major layout, the result has shape [N, T, H'].

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
