"""Exchanges rows in the expert-major layout: one row per (token, choice), grouped by expert.

The rows of a receive buffer are sorted by local expert, then source rank, then source token, then
choice; callers may rely on this order. Users call the functions of `jax_ep.exchange.api`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange import gradients, routes
from jax_ep.exchange.interface import Config
from jax_ep.exchange.routes import Overflow, Routes
from jax_ep.runtime.jax_compat import register_for_export


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["routes"],
    meta_fields=[
        "axis_name",
        "capacity",
        "num_experts",
        "expert_alignment",
        "overflow",
        "host_capacity",
        "zero_unused",
    ],
)
@dataclasses.dataclass(frozen=True)
class Handle:
    """The routes of one dispatch; a pytree that may cross jit, scan and checkpoint boundaries.

    Attributes:
      routes: the row of each (source rank, token, choice); see `jax_ep.exchange.routes.Routes`.
      axis_name: the mesh axis names of the dispatch.
      capacity: R, the rows of the receive buffer.
      num_experts: E, the experts of all ranks.
      expert_alignment: each expert's block of rows starts at a multiple of this many rows.
      overflow: the rule for dropping rows; see `jax_ep.exchange.routes.Overflow`.
      host_capacity: the most tokens that a rank sends to each other host; None: all its tokens.
      zero_unused: whether the rows past the last expert's block are zero; False: undefined.
    """

    routes: Routes
    axis_name: tuple[str, ...]
    capacity: int
    num_experts: int
    expert_alignment: int
    overflow: Overflow = "tail"
    host_capacity: int | None = None
    zero_unused: bool = True

    @property
    def rows(self) -> jax.Array:
        """The row of this rank's buffer for each (source rank, token, choice), [N, T, K] int32.

        The row is -1 where the choice names another rank's expert or no expert, and R or more where
        the row is dropped.
        """
        return self.routes.rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that a rank received in the expert-major layout, and their counts; a pytree.

    Attributes:
      tokens: [R, H], x's dtype: the received rows, grouped by local expert. Padding rows are zero.
        Unused rows at the end are zero, too, unless the dispatch had `zero_unused=False`. With
        `output="quantized"`, tokens is a `jax_ep.QuantizedArray`; its zero rows have zero scales.
      group_sizes: [L] int32: the number of rows of each expert's block, padding included; their
        sum is <= R.
      expert_counts: [L] int32: how many rows each expert received. They come first in its block.
      num_dropped: [] int32: the (token, choice) pairs of this rank's experts that were dropped.
      rows_needed: [] int32: the least R at which all rows sent to this rank fit.
      dropped_counts: [L] int32: the dropped (token, choice) pairs of each local expert.
      handle: the routes, for `combine` and `dispatch_like`.
    """

    tokens: Any
    group_sizes: jax.Array
    expert_counts: jax.Array
    num_dropped: jax.Array
    rows_needed: jax.Array
    dropped_counts: jax.Array
    handle: Handle


register_for_export(Handle)
register_for_export(Dispatched)


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: tuple[str, ...],
    capacity: int | None,
    expert_alignment: int,
    overflow: Overflow,
    host_capacity: int | None,
    zero_unused: bool,
    **options: Any,
) -> Dispatched:
    """Dispatches x [T, H] in the expert-major layout, for `api.dispatch(layout="expert")`.

    `api.dispatch` has checked the arguments that both layouts share. `options` are further
    arguments of `gradients.configure`.
    """
    expert_alignment = checks.check_integer(
        "expert_alignment", expert_alignment, most=checks.MAX_INT32
    )
    checks.check_name("overflow", overflow, get_args(Overflow))
    checks.check_bool("zero_unused", zero_unused)
    zero_unused = bool(zero_unused)
    if capacity is None:
        # Without a capacity, the buffer fits all rows, so both overflow rules give the same result.
        overflow = "tail"
    if host_capacity is not None:
        host_capacity = checks.check_integer("host_capacity", host_capacity, most=checks.MAX_INT32)
        if options["implementation"] in ("pallas", "xla"):
            raise ValueError(
                'host_capacity needs implementation="two_level" or None, since only the exchange '
                f"between hosts has it, but is {host_capacity} with implementation="
                f"{options['implementation']!r}."
            )
    num_tokens, top_k = topk_idx.shape
    config = gradients.configure(
        "x",
        x,
        axis_name=axis_name,
        num_experts=num_experts,
        capacity=_capacity(
            capacity,
            expert_alignment,
            num_choices=checks.num_ranks(axis_name) * num_tokens * top_k,
            num_local_experts=num_experts // checks.num_ranks(axis_name),
        ),
        expert_alignment=expert_alignment,
        overflow=overflow,
        host_capacity=host_capacity,
        zero_unused=zero_unused,
        list_words=top_k,
        **options,
    )
    (x,) = gradients.match((x,), axis_name)
    topk_idx = routes.expert_ids(topk_idx, num_experts)
    groups: routes.RowGroups
    tokens, route, groups = gradients.dispatch(config, x, topk_idx, None)
    handle = Handle(
        route,
        axis_name,
        config.capacity,
        num_experts,
        expert_alignment,
        overflow,
        host_capacity,
        zero_unused,
    )
    return Dispatched(tokens, *groups, handle)


def combine(
    y: jax.Array, handle: Handle, topk_weights: jax.Array | None, **options: Any
) -> jax.Array:
    """Sums expert-major rows y [R, H] by token, and sends the sums to the tokens' ranks: [T, H].

    `api.combine` calls this function. `options` are further arguments of `gradients.configure`.
    """
    check_handle(handle)
    checks.check_array("y", y, 2, jnp.floating, "[R, H]", may_be_empty=False)
    if y.shape[0] != handle.capacity:
        raise ValueError(
            "y must have one row for each row of Dispatched.tokens: the handle's capacity is "
            f"{handle.capacity}, but y has shape {y.shape}."
        )
    config = gradients.configure("y", y, **_options_of(handle), **options)
    if topk_weights is None:
        (y,) = gradients.match((y,), handle.axis_name)
        return gradients.combine(config, y, None, handle.routes)
    check_weights(topk_weights, handle)
    y, weights = gradients.match((y, topk_weights.astype(jnp.float32)), handle.axis_name)
    return gradients.combine(config, y, weights, handle.routes)


def dispatch_like(x: jax.Array, handle: Handle, **options: Any) -> Any:
    """Sends x [T, H'] to the receive-buffer rows of a dispatch, for `api.dispatch_like`.

    Returns [R, H']. `options` are further arguments of `gradients.configure`.
    """
    config, x = _config_like(x, handle, options)
    return gradients.dispatch_like(config, x, handle.routes)


def stand_in_rows(x: jax.Array, handle: Handle, **options: Any) -> jax.Array:
    """Returns zeros [R, H] through which the gradient of quantized received rows reaches x [T, H].

    Quantized rows have no gradient. A function of them therefore takes the zeros as one more
    operand, and returns the rows' cotangent as the cotangent of the zeros. `options` are further
    arguments of `gradients.configure`.
    """
    config, x = _config_like(x, handle, options)
    return gradients.stand_in_rows(config, x, handle.routes)


def _config_like(x: jax.Array, handle: Handle, options: dict[str, Any]) -> tuple[Config, jax.Array]:
    check_handle(handle)
    checks.check_rows_of_tokens(x, handle.rows.shape[1])
    config = gradients.configure("x", x, **_options_of(handle), **options)
    (x,) = gradients.match((x,), handle.axis_name)
    return config, x


def check_handle(handle: Handle) -> None:
    """Raises ValueError unless the handle's routes are for all N ranks along its mesh axes."""
    num_ranks = checks.num_ranks(handle.axis_name)
    if handle.rows.ndim != 3 or handle.rows.shape[0] != num_ranks:
        raise ValueError(
            f"handle.rows must have shape [{num_ranks}, T, K], one plane for each rank along "
            f"{handle.axis_name}, but has shape {handle.rows.shape}."
        )


def check_weights(topk_weights: jax.Array, handle: Handle) -> None:
    """Raises TypeError or ValueError unless topk_weights is floating and has the shape [T, K]."""
    checks.check_array("topk_weights", topk_weights, 2, jnp.floating, "[T, K]")
    if topk_weights.shape != handle.rows.shape[1:]:
        raise ValueError(
            f"topk_weights must have topk_idx's shape {handle.rows.shape[1:]}, "
            f"but has shape {topk_weights.shape}."
        )


def _options_of(handle: Handle) -> dict[str, Any]:
    """Returns the options of a dispatch that its handle holds, as arguments of `configure`.

    A `combine` or `dispatch_like` with the handle uses the same options.
    """
    return dict(
        axis_name=handle.axis_name,
        num_experts=handle.num_experts,
        capacity=handle.capacity,
        expert_alignment=handle.expert_alignment,
        overflow=handle.overflow,
        host_capacity=handle.host_capacity,
        zero_unused=handle.zero_unused,
        list_words=handle.rows.shape[2],
    )


def _capacity(
    capacity: int | None, expert_alignment: int, *, num_choices: int, num_local_experts: int
) -> int:
    """Returns the checked capacity R; for None, enough rows for any routing (dropless).

    Args:
      capacity: R, or None.
      expert_alignment: each expert's block of rows starts at a multiple of this many rows.
      num_choices: N·T·K, the choices of all ranks.
      num_local_experts: L, the experts of this rank.

    Raises:
      ValueError: some routing needs more rows than an int32 can count. With a given `capacity`,
        this is an error only if the blocks' padding is the cause.
    """
    rows = routes.dropless_capacity(num_choices, num_local_experts, expert_alignment)
    if not checks.is_symbolic(rows) and rows > checks.MAX_INT32:
        unpadded = routes.dropless_capacity(num_choices, num_local_experts, 1)
        if unpadded <= checks.MAX_INT32:
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
