"""Dispatch and combine: the two collectives of expert parallelism, with their gradients.

Start reading here. Terms: N ranks along `axis_name`, E experts, L = E / N local experts, T tokens
per rank, K choices per token, H hidden, R = capacity, the rows of a receive buffer.

Everything is called inside `jax.shard_map` over `axis_name`. The row order of a receive buffer is
part of the contract: local expert, then source rank, then source token, then choice. That is the
"expert" layout; of the other one, "rank", see `jax_ep.exchange.rank_major`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, overload

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange import primitives, quantization, rank_major, routes
from jax_ep.exchange.config import Exchange
from jax_ep.exchange.primitives import Implementation
from jax_ep.exchange.rank_major import RankDispatched, RankHandle
from jax_ep.exchange.routes import Layout, Routes
from jax_ep.runtime.jax_compat import match_varying

Output = Literal["dequantized", "quantized"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["routes"],
    meta_fields=["axis_name", "capacity", "num_experts", "expert_alignment"],
)
@dataclasses.dataclass(frozen=True)
class Handle:
    """The routes of one dispatch: a pytree that may cross jit, scan and checkpoint boundaries.

    Attributes:
      routes: where each (source rank, token, choice) goes; see `jax_ep.routes.Routes`.
      axis_name: the mesh axis names of the dispatch.
      capacity: R.
      num_experts: E.
      expert_alignment: the alignment of each expert's block, in rows.
    """

    routes: Routes
    axis_name: tuple[str, ...]
    capacity: int
    num_experts: int
    expert_alignment: int

    @property
    def rows(self) -> jax.Array:
        """[N, T, K] int32: the row here of each (source rank, token, choice).

        -1 where the choice is of another rank or of no expert, R or more if it did not fit.
        """
        return self.routes.rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens", "group_sizes", "expert_counts", "num_dropped", "rows_needed", "handle", "scales",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What a rank received; a pytree.

    Attributes:
      tokens: [R, H], x's dtype: received rows, grouped by local expert; every other row is zero.
      group_sizes: [L] int32: rows of each expert's block, padding included; their sum is <= R.
      expert_counts: [L] int32: real rows in each block; they stand first in it.
      num_dropped: [] int32: (token, choice) pairs meant for this rank that did not fit in R.
      rows_needed: [] int32: the R that would have dropped nothing on this rank.
      handle: the routes, for `combine` and `dispatch_like`.
      scales: [R, H / 128] float32 where `output="quantized"` was asked for, else None: each row's
        values are tokens · scale, block by block; zero where the row is.
    """

    tokens: jax.Array
    group_sizes: jax.Array
    expert_counts: jax.Array
    num_dropped: jax.Array
    rows_needed: jax.Array
    handle: Handle
    scales: jax.Array | None = None


@overload
def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity: int | None = None,
    expert_alignment: int = 1,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    output: Output = "dequantized",
    layout: Literal["expert"] = "expert",
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
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    output: Output = "dequantized",
    layout: Literal["expert", "rank"] = "expert",
    topk_weights: jax.Array | None = None,
    implementation: Implementation = None,
) -> Dispatched | RankDispatched:
    """Sends each token to the ranks that own its experts. Call it inside `jax.shard_map`.

    Args:
      x: [T, H] floating: this rank's tokens.
      topk_idx: [T, K] integer: global expert ids. A value outside [0, E), such as -1, is a choice
        of no expert. One token may choose an expert more than once and gets a row each time.
      num_experts: E, a multiple of the number of ranks N. Rank r owns experts [r·L, (r+1)·L).
      axis_name: the mesh axis, or tuple of axes, that the experts are spread over.
      capacity: R, the rows of the receive buffer. Rows past it, in row order, are dropped and
        counted. None: enough rows for any routing, N·T·K and the blocks' padding.
      expert_alignment: each expert's block starts at a multiple of this many rows.
      wire_dtype: None, or `jnp.float8_e4m3fn`: each row crosses the wire as float8 values with one
        float32 scale per 128 of them; H must be a multiple of 128. What that costs, and what
        becomes of NaN and of the largest and smallest values: see `jax_ep.exchange.quantization`.
      grad_wire_dtype: None; or `jnp.float8_e4m3fn`, in which the cotangents' sums go back, as in
        `combine(wire_dtype=...)`. Most training wants None: they travel in their own dtype.
      output: with a wire_dtype, "dequantized" hands out rows of x's dtype, and "quantized" the
        float8 rows as they came with their `Dispatched.scales`, for a float8 matmul.
      layout: "expert", one row for each (token, choice), grouped by expert; or "rank", one row for
        each (source rank, token), which has no capacity and no alignment.
      topk_weights: [T, K] floating, in the rank layout only: sent along, for the experts' side to
        weigh with. Differentiable.
      implementation: "pallas" (GPU kernels), "xla" (portable), or None for the best one that
        serves here.

    Returns:
      A `Dispatched`, or for layout="rank" a `RankDispatched`. The gradient with respect to x is the
      plain-sum `combine`. Quantization is passed straight through: the cotangent of dequantized
      rows travels in x's dtype, unless there is a grad_wire_dtype. Quantized rows have no gradient,
      and asking for one raises TypeError; whoever computes with them has the cotangent in a wider
      dtype, and gives it to `combine` in a `jax.custom_vjp`.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    axis_name = checks.as_axes(axis_name)
    num_ranks = checks.num_ranks(axis_name)
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
    num_experts = checks.check_integer("num_experts", num_experts, most=checks.MAX_INT32)
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of the {num_ranks} ranks along "
            f"{axis_name}, but is {num_experts}."
        )
    quantization.check_output(output, wire_dtype)
    if layout not in ("expert", "rank"):
        raise ValueError(f'layout must be "expert" or "rank", but is {layout!r}.')
    if layout == "rank":
        if capacity is not None or expert_alignment != 1:
            raise ValueError(
                'layout="rank" has a row for each (source rank, token) and takes no capacity or '
                f"expert_alignment, but they are {capacity} and {expert_alignment}."
            )
        return rank_major.dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts=num_experts,
            axis_name=axis_name,
            wire_dtype=wire_dtype,
            grad_wire_dtype=grad_wire_dtype,
            quantized=output == "quantized",
            implementation=implementation,
        )
    if topk_weights is not None:
        raise ValueError(
            'topk_weights is an argument of dispatch only with layout="rank"; with "expert", give '
            "the weights to combine."
        )
    expert_alignment = checks.check_integer("expert_alignment", expert_alignment)
    if capacity is None:
        num_tokens, top_k = topk_idx.shape
        capacity = routes.dropless_capacity(
            num_ranks, num_tokens, top_k, num_experts // num_ranks, expert_alignment
        )
        if capacity > checks.MAX_INT32:
            raise ValueError(
                f"capacity must be given, and be at most {checks.MAX_INT32}, since any routing of "
                f"topk_idx {topk_idx.shape} on {num_ranks} ranks needs {capacity} rows."
            )
    capacity = checks.check_integer("capacity", capacity, most=checks.MAX_INT32)
    config = _Exchange.of(
        "x",
        x,
        top_k=topk_idx.shape[1],
        axis_name=axis_name,
        num_experts=num_experts,
        capacity=capacity,
        expert_alignment=expert_alignment,
        implementation=implementation,
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        quantized=output == "quantized",
    )
    (x,) = match_varying((x,), axis_name)
    tokens, scales, route, blocks = _dispatch(config, x, routes.expert_ids(topk_idx, num_experts))
    handle = Handle(route, axis_name, config.capacity, config.num_experts, config.expert_alignment)
    return Dispatched(tokens, *blocks, handle, scales)


def combine(
    y: jax.Array,
    handle: Handle | RankHandle,
    topk_weights: jax.Array | None = None,
    *,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Brings the experts' outputs back to the tokens' owners and sums them.

    `out[t] = sum_k topk_weights[t, k] * y[row of (t, k)]`. The sum over one rank's rows is taken
    in float32 next to the experts and rounded once, to y's dtype or the wire_dtype, to cross the
    wire; the sum over ranks is taken in float32, in rank order. A dropped or masked choice counts
    as zero.

    Args:
      y: [R, H] floating: one row for each row of `Dispatched.tokens`. In the rank layout,
        [N, T, H]: the sum, weighted already, over the experts here of each (source rank, token);
        a row with no expert here is never read.
      handle: the handle of that dispatch.
      topk_weights: [T, K] floating, or None for a plain sum; None in the rank layout.
      wire_dtype: None, or `jnp.float8_e4m3fn`: the sums over each rank's rows cross the wire in
        it, as in `dispatch`, instead of in y's dtype. Each of up to N of them is off by what
        `jax_ep.exchange.quantization` says, which grows with the largest sum of its block; the
        sum over ranks is off by no more than these errors together.
      grad_wire_dtype: as wire_dtype, of the cotangent of the result, which is sent as a dispatch
        sends rows.
      implementation: as in `dispatch`.

    Returns:
      [T, H], y's dtype. Differentiable in y and topk_weights; the rounding of a wire_dtype is
      passed straight through, and cotangents travel in y's dtype or the grad_wire_dtype.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    if isinstance(handle, RankHandle):
        return rank_major.combine(
            y,
            handle,
            topk_weights,
            wire_dtype=wire_dtype,
            grad_wire_dtype=grad_wire_dtype,
            implementation=implementation,
        )
    _check_handle(handle)
    checks.check_array("y", y, 2, jnp.floating, "[R, H]")
    if y.shape[0] != handle.capacity:
        raise ValueError(
            "y must have one row for each row of Dispatched.tokens: the handle's capacity is "
            f"{handle.capacity}, but y has shape {y.shape}."
        )
    config = _along(handle, "y", y, implementation, wire_dtype, grad_wire_dtype)
    if topk_weights is None:
        (y,) = match_varying((y,), handle.axis_name)
        return _combine(config, y, handle.routes)
    checks.check_array("topk_weights", topk_weights, 2, jnp.floating, "[T, K]")
    if topk_weights.shape != handle.rows.shape[1:]:
        raise ValueError(
            f"topk_weights must have topk_idx's shape {handle.rows.shape[1:]}, "
            f"but has shape {topk_weights.shape}."
        )
    weights = topk_weights.astype(jnp.float32)
    y, weights = match_varying((y, weights), handle.axis_name)
    return _weighted_combine(config, y, weights, handle.routes)


def dispatch_like(
    x: jax.Array,
    handle: Handle | RankHandle,
    *,
    wire_dtype: jax.typing.DTypeLike | None = None,
    grad_wire_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Sends another payload along the routes of an earlier dispatch.

    Args:
      x: [T, H'] floating: one row for each token of that dispatch; H' is free.
      handle: the handle of that dispatch.
      wire_dtype, grad_wire_dtype: as in `dispatch`.
      implementation: as in `dispatch`.

    Returns:
      [R, H'], x's dtype, in the row order of `Dispatched.tokens`; every other row is zero. In the
      rank layout, [N, T, H'].

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """
    if isinstance(handle, RankHandle):
        return rank_major.dispatch_like(
            x,
            handle,
            wire_dtype=wire_dtype,
            grad_wire_dtype=grad_wire_dtype,
            implementation=implementation,
        )
    _check_handle(handle)
    checks.check_array("x", x, 2, jnp.floating, "[T, H]")
    if x.shape[0] != handle.rows.shape[1] or x.shape[1] == 0:
        raise ValueError(
            f"x must have one row for each of the {handle.rows.shape[1]} tokens of the handle's "
            f"dispatch and at least one column, but has shape {x.shape}."
        )
    config = _along(handle, "x", x, implementation, wire_dtype, grad_wire_dtype)
    (x,) = match_varying((x,), handle.axis_name)
    return _dispatch_like(config, x, handle.routes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange(Exchange):
    capacity: int
    expert_alignment: int


def _along(
    handle: Handle,
    name: Literal["x", "y"],
    rows: jax.Array,
    implementation: Implementation,
    wire_dtype: jax.typing.DTypeLike | None,
    grad_wire_dtype: jax.typing.DTypeLike | None,
) -> _Exchange:
    """The exchange of other rows along the routes of a dispatch: see `Exchange.of`."""
    return _Exchange.of(
        name,
        rows,
        top_k=handle.rows.shape[2],
        axis_name=handle.axis_name,
        num_experts=handle.num_experts,
        capacity=handle.capacity,
        expert_alignment=handle.expert_alignment,
        implementation=implementation,
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
    )


# The custom gradients. dispatch and combine are each other's transposes, so each one's backward
# pass is a call of the other over the same routes; that of a weighted combine is a call of its own,
# as the weights have a gradient too.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(
    config: _Exchange, x: jax.Array, topk_idx: jax.Array
) -> tuple[jax.Array, jax.Array | None, Routes, Layout]:
    received, route, blocks = primitives.dispatch(
        x, topk_idx, wire_dtype=config.wire_dtype, **config.parameters
    )
    return *quantization.handed_out(received, x.dtype, config.quantized), route, blocks


def _dispatch_fwd(config, x, topk_idx):
    results = _dispatch(config, x, topk_idx)
    return results, results[2]


def _dispatch_bwd(config, route, cotangents):
    if config.quantized:
        raise TypeError(quantization.no_gradient(config.wire_dtype))
    return _combine(config.of_cotangents, cotangents[0], route), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch_like(config: _Exchange, x: jax.Array, route: Routes) -> jax.Array:
    received = primitives.dispatch_like(x, route, wire_dtype=config.wire_dtype, **config.parameters)
    return quantization.handed_out(received, x.dtype, False)[0]


_dispatch_like.defvjp(
    lambda config, x, route: (_dispatch_like(config, x, route), route),
    lambda config, route, g: (_combine(config.of_cotangents, g, route), None),  # type: ignore
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(config: _Exchange, y: jax.Array, route: Routes) -> jax.Array:
    return primitives.combine(y, None, route, wire_dtype=config.wire_dtype, **config.parameters)


_combine.defvjp(
    lambda config, y, route: (_combine(config, y, route), route),
    lambda config, route, g: (_dispatch_like(config.of_cotangents, g, route), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_combine(
    config: _Exchange, y: jax.Array, weights: jax.Array, route: Routes
) -> jax.Array:
    return primitives.combine(y, weights, route, wire_dtype=config.wire_dtype, **config.parameters)


def _weighted_combine_fwd(config, y, weights, route):
    return _weighted_combine(config, y, weights, route), (y, weights, route)


def _weighted_combine_bwd(config, residuals, g):
    y, weights, route = residuals
    return *_weighted_combine_grad(config.of_cotangents, g, weights, y, route), None


_weighted_combine.defvjp(_weighted_combine_fwd, _weighted_combine_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_combine_grad(
    config: _Exchange, g: jax.Array, weights: jax.Array, y: jax.Array, route: Routes
) -> tuple[jax.Array, jax.Array]:
    """dy = w g and dweights = <g, y>: linear in each, so its gradient is made of the same."""
    return primitives.combine_grad(
        g, weights, y, route, wire_dtype=config.wire_dtype, **config.parameters
    )


def _weighted_combine_grad_fwd(config, g, weights, y, route):
    return _weighted_combine_grad(config, g, weights, y, route), (g, weights, y, route)


def _weighted_combine_grad_bwd(config, residuals, cotangents):
    g, weights, y, route = residuals
    ddy, ddweights = cotangents
    config = config.of_cotangents
    dg = _weighted_combine(config, ddy, weights, route)
    dg += _weighted_combine(config, y, ddweights, route)
    dy, dweights = _weighted_combine_grad(config, g, ddweights, ddy, route)
    return dg, dweights, dy, None


_weighted_combine_grad.defvjp(_weighted_combine_grad_fwd, _weighted_combine_grad_bwd)


def _check_handle(handle: Handle) -> None:
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
    num_ranks = checks.num_ranks(handle.axis_name)
    if handle.rows.ndim != 3 or handle.rows.shape[0] != num_ranks:
        raise ValueError(
            f"handle.rows must have shape [{num_ranks}, T, K], one plane for each rank along "
            f"{handle.axis_name}, but has shape {handle.rows.shape}."
        )
