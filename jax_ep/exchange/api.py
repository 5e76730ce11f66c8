"""Dispatch and combine: the two collectives of expert parallelism, with their gradients.

Start reading here. Terms: N ranks along `axis_name`, E experts, L = E / N local experts, T tokens
per rank, K choices per token, hidden size H, capacity R (the rows of a receive buffer). A call
passes through these modules:

  gradients                  defines the custom VJPs, for both layouts
  primitives                 defines the JAX primitives; lowering selects an implementation
  xla, pallas or two_level   move the rows; two_level calls xla or pallas inside each host, and
                             `rail` between hosts
"""

from __future__ import annotations

from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange import gradients, interface, routes
from jax_ep.exchange.interface import (
    Config,
    Dispatched,
    Handle,
    Implementation,
    RankDispatched,
    RankHandle,
)
from jax_ep.exchange.primitives import check_implementation
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
        tuple defines the order of the ranks, and must equal the order in the specs: ("b", "a") with
        specs of ("a", "b") gives wrong results silently.
      capacity: R, the rows of the receive buffer. Rows that do not fit are dropped and counted.
        None: enough rows for any routing, N·T·K and the blocks' padding.
      expert_alignment: each expert's block starts at a multiple of this many rows.
      overflow: the rows to drop where R is too small. "tail" drops the rows past R in row order.
        "fair" lets each expert of a rank keep its first q rows, with the largest q at which all
        blocks and their padding fit in R.
      host_capacity: the most tokens that this rank sends to each other host, the first that chose
        experts there; None: all T. Later tokens' choices of that host's experts are dropped, and
        counted in `num_dropped` on the ranks of these experts. A router that limits each token to k
        of M hosts sends a host T·k / M of a rank's tokens on average: choose a larger value.
      wire_dtype: None, or `jnp.float8_e4m3fn`: rows are sent as float8 values with one float32
        scale per 128 values (`jax_ep.formats`); H must be a multiple of 128.
      grad_wire_dtype: the wire_dtype of the `combine` that computes the gradient of x. None, the
        usual choice in training, sends cotangents without quantization.
      output: for a wire_dtype: "dequantized" returns rows of x's dtype; "quantized" returns a
        `jax_ep.QuantizedArray` of the received float8 rows, for a float8 matmul.
      layout: "expert", one row for each (token, choice), grouped by expert; or "rank", one row for
        each (source rank, token), which has no capacity and no alignment.
      topk_weights: [T, K] floating, only with layout="rank": weights to send with the rows, so that
        the experts' rank can multiply its outputs by them. Differentiable.
      zero_unused: with layout="expert", whether the unused rows past the last expert's block are
        zero, in the received rows and in the gradient of a combine's y. False leaves them undefined
        (they may be NaN), and saves "pallas" the time to write them. No result of `grouped_matmul`,
        `routed_experts` or `combine` depends on unused rows.
      implementation: "pallas" (GPU kernels), "xla" (any backend), "two_level" (ranks on several
        hosts: a token crosses to each host once), or None for the best that runs. The devices of
        the mesh determine which ranks share a host.

    Returns:
      A `Dispatched`, or for layout="rank" a `RankDispatched`. The gradient of x is a `combine`
      without weights, in reverse mode only (`jax.grad`, `jax.vjp`), and treats quantization as the
      identity (straight-through). Quantized rows have no gradient: differentiating them raises
      TypeError. In a `jax.custom_vjp` around the dispatch, pass their cotangent to `combine`.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    axis_name = checks.as_axes(axis_name)
    _check_choices(x, topk_idx)
    num_experts = _check_num_experts(num_experts, axis_name)
    interface.check_output(output, interface.wire_format(wire_dtype))
    if layout not in ("expert", "rank"):
        raise ValueError(f'layout must be "expert" or "rank", but is {layout!r}.')
    if layout == "rank":
        checks.check_bool("zero_unused", zero_unused)
        for name, value, default in (
            ("capacity", capacity, None),
            ("expert_alignment", expert_alignment, 1),
            ("overflow", overflow, "tail"),
            ("host_capacity", host_capacity, None),
            ("zero_unused", zero_unused, True),
        ):
            if value != default:
                raise ValueError(
                    f'{name} must be {default!r} for layout="rank", which has a row for each '
                    f"(source rank, token), but is {value!r}. See group_by_expert."
                )
        if topk_weights is not None:
            check_weights(topk_weights, topk_idx.shape)
        layout_options: dict[str, Any] = dict(layout="rank")
    else:
        if topk_weights is not None:
            raise ValueError(
                'topk_weights is an argument of dispatch only with layout="rank"; with "expert", '
                "give the weights to combine."
            )
        most = checks.MAX_INT32
        expert_alignment = checks.check_integer("expert_alignment", expert_alignment, most=most)
        if host_capacity is not None:
            host_capacity = checks.check_integer("host_capacity", host_capacity, most=most)
            interface.check_is_between_hosts("host_capacity", host_capacity, implementation)
        checks.check_name("overflow", overflow, get_args(Overflow))
        checks.check_bool("zero_unused", zero_unused)
        num_ranks = checks.num_ranks(axis_name)
        layout_options = dict(
            host_capacity=host_capacity,
            capacity=_checked_capacity(
                capacity,
                expert_alignment,
                num_choices=num_ranks * topk_idx.shape[0] * topk_idx.shape[1],
                num_local_experts=num_experts // num_ranks,
            ),
            expert_alignment=expert_alignment,
            # Without a capacity, the buffer fits all rows, so both rules give the same result.
            overflow="tail" if capacity is None else overflow,
            zero_unused=bool(zero_unused),
        )
    config = _configure(
        "x",
        x,
        axis_name=axis_name,
        num_experts=num_experts,
        list_words=topk_idx.shape[1] * (1 if topk_weights is None else 2),
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        quantized=output == "quantized",
        implementation=implementation,
        **layout_options,
    )
    weights = None if topk_weights is None else topk_weights.astype(jnp.float32)
    x, weights = gradients.match((x, weights), axis_name)
    topk_idx = routes.expert_ids(topk_idx, num_experts)
    tokens, route, groups_or_weights = gradients.dispatch_with_vjp(config, x, topk_idx, weights)
    if layout == "rank":
        received_weights = groups_or_weights
        if topk_weights is not None:
            received_weights = received_weights.astype(topk_weights.dtype)
        rank_handle = RankHandle(route, axis_name, num_experts)
        return RankDispatched(tokens, route.local_topk_idx, received_weights, rank_handle)
    handle = Handle.of(route, config)
    return Dispatched(tokens, **groups_or_weights._asdict(), handle=handle)


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
    there in float32, and the sum is rounded once, to y's dtype or the wire_dtype, and sent. These
    sums are added in float32, in rank order; with "two_level", one sum per host, in the order of
    the hosts. A dropped or masked choice counts as zero.

    Args:
      y: [R, H] floating: one row for each row of `Dispatched.tokens`. In the rank-major layout,
        [N, T, H]: for each (source rank, token), the weighted sum over the experts of this rank.
        Rows of tokens that chose no expert of this rank are never read.
      handle: the handle of the dispatch.
      topk_weights: [T, K] floating, or None for a plain sum. Must be None in the rank-major layout.
      wire_dtype: the dtype in which sums are sent: None for y's dtype, or `jnp.float8_e4m3fn` with
        scales, as in `dispatch`. With "two_level", only sums between hosts are quantized. The
        rounding errors of a token's up to N sums add up: measure your model first.
      grad_wire_dtype: the wire_dtype of the dispatch that sends the cotangent of the result to the
        experts' ranks in the backward pass.
      implementation: as in `dispatch`.

    Returns:
      [T, H], y's dtype. Differentiable in y and topk_weights, in reverse mode only. The gradient of
      y is zero in the padding rows between experts' blocks, and in the unused rows past the last
      block unless the dispatch had `zero_unused=False`. It treats the rounding of a wire_dtype as
      the identity (straight-through).

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    _check_handle(handle)
    if isinstance(handle, RankHandle):
        _check_partial_sums(y, handle, topk_weights)
    else:
        checks.check_array("y", y, 2, jnp.floating, "[R, H]")
        rows = f"one row for each row of Dispatched.tokens, {handle.capacity} rows"
        checks.check_shape("y", y, (handle.capacity, y.shape[1]), rows)
    if y.shape[-1] == 0:
        raise ValueError(
            f"y must be [R, H] or [N, T, H] with at least one column, but has shape {y.shape}."
        )
    config = _configure(
        "y",
        y,
        **_options_of(handle),
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        implementation=implementation,
    )
    weights = None
    if topk_weights is not None:
        check_weights(topk_weights, handle.shape[1:])
        weights = topk_weights.astype(jnp.float32)
    y, weights = gradients.match((y, weights), handle.axis_name)
    return gradients.combine_with_vjp(config, y, weights, handle.routes)


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
      wire_dtype, grad_wire_dtype, output, implementation: as in `dispatch`.

    Returns:
      [R, H'], or [N, T, H'] in the rank-major layout: x's dtype or a `QuantizedArray`, in the row
      order of `Dispatched.tokens`, with zeros in the same rows.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    interface.check_output(output, interface.wire_format(wire_dtype))
    _check_handle(handle)
    checks.check_array("x", x, 2, jnp.floating, "[T, H]")
    num_tokens = handle.shape[1]
    if x.shape[0] != num_tokens or x.shape[1] == 0:
        raise ValueError(
            f"x must have one row for each of the {num_tokens} tokens of the handle's dispatch and "
            f"at least one column, but has shape {x.shape}."
        )
    config = _configure(
        "x",
        x,
        **_options_of(handle),
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        quantized=output == "quantized",
        implementation=implementation,
    )
    (x,) = gradients.match((x,), handle.axis_name)
    return gradients.dispatch_like_with_vjp(config, x, handle.routes)


def _configure(
    name: Literal["x", "y"],
    rows: jax.Array,
    *,
    list_words: int,
    wire_dtype: jax.typing.DTypeLike | None,
    grad_wire_dtype: jax.typing.DTypeLike | None,
    **arguments: Any,
) -> Config:
    """Makes and checks the `Config` that moves `rows`; `arguments` are its other fields."""
    # Kernels hold `list_words` 4-byte words per token in shared memory for its choices: K, or 2 K
    # if weights are sent with the choices.
    config = Config(
        wire=interface.checked_wire(name, rows, wire_dtype),
        grad_wire=interface.checked_wire(name, rows, grad_wire_dtype, "grad_wire_dtype"),
        **arguments,
    )
    check_implementation(config, rows, list_words)
    return config


def _options_of(handle: Handle | RankHandle) -> dict[str, Any]:
    options = {name: getattr(handle, name) for name in interface.static_fields(handle)}
    layout = "rank" if isinstance(handle, RankHandle) else "expert"
    return options | {"list_words": handle.shape[2], "layout": layout}


def _check_choices(x: Any, topk_idx: Any) -> None:
    checks.check_array("x", x, 2, jnp.floating, "[T, H]")
    checks.check_array("topk_idx", topk_idx, 2, jnp.integer, "[T, K]")
    shape = x.shape[0], topk_idx.shape[1]
    checks.check_shape("topk_idx", topk_idx, shape, f"one row for each row of x {x.shape}")
    if x.shape[1] == 0 or topk_idx.shape[1] == 0:
        raise ValueError(
            "x and topk_idx must have at least one column, but have shapes "
            f"{x.shape} and {topk_idx.shape}."
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
    if not isinstance(handle, (Handle, RankHandle)):
        raise TypeError(
            "handle must be the handle of a dispatch, such as received.handle, but is "
            f"{checks.described(handle)}."
        )
    num_ranks, shape = checks.num_ranks(handle.axis_name), handle.shape
    if len(shape) != 3 or shape[0] != num_ranks:
        name = "routes.local_topk_idx" if isinstance(handle, RankHandle) else "rows"
        raise ValueError(
            f"handle.{name} must have shape [{num_ranks}, T, K], one plane for each rank along "
            f"{handle.axis_name}, but has shape {shape}."
        )


def _check_partial_sums(y: Any, handle: RankHandle, topk_weights: Any) -> None:
    checks.check_array("y", y, 3, jnp.floating, "[N, T, H]")
    rows = f"one row for each (source rank, token), {handle.shape[:2]}"
    checks.check_shape("y", y, (*handle.shape[:2], y.shape[2]), rows)
    if topk_weights is not None:
        raise ValueError(
            "topk_weights must be None in the rank-major layout, where y is already summed over a "
            "token's choices: give them to dispatch, and multiply by RankDispatched.topk_weights."
        )


def check_weights(topk_weights: jax.Array, shape: tuple[int, ...]) -> None:
    checks.check_array("topk_weights", topk_weights, 2, jnp.floating, "[T, K]")
    checks.check_shape("topk_weights", topk_weights, shape, f"topk_idx's shape {shape}")


def _checked_capacity(
    capacity: int | None, expert_alignment: int, *, num_choices: int, num_local_experts: int
) -> int:
    """Returns the checked capacity R; for None, one for any routing of all ranks' `num_choices`."""
    rows = routes.dropless_capacity(num_choices, num_local_experts, expert_alignment)
    # Blocks start at int32 rows, which are computed before rows past the capacity are dropped. So
    # padding must not need more rows, also if a smaller capacity is given.
    if not checks.is_symbolic(rows) and rows > checks.MAX_INT32:
        unpadded = routes.dropless_capacity(num_choices, num_local_experts, 1)
        if unpadded <= checks.MAX_INT32:
            # With alignment a, the padding of `blocks` blocks and the rounding up of their sum take
            # at most (blocks + 1) * (a - 1) rows.
            blocks = min(num_local_experts, num_choices)
            most = 1 + (checks.MAX_INT32 - num_choices) // (blocks + 1)
            raise ValueError(
                f"expert_alignment must be at most {most}, so that the {num_local_experts} experts "
                f"of a rank need at most {checks.MAX_INT32} rows for {num_choices} choices, but is "
                f"{expert_alignment}."
            )
        if capacity is None:
            raise ValueError(
                f"capacity must be given, and be at most {checks.MAX_INT32}, since any routing of "
                f"the {num_choices} choices of all ranks needs {rows} rows."
            )
    if capacity is None:
        return rows
    return checks.check_integer("capacity", capacity, most=checks.MAX_INT32)
