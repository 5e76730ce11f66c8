"""The expert-major layout: a rank receives one row for each (token, choice), grouped by expert.

The row order of a receive buffer is part of the contract: local expert, then source rank, then
source token, then choice. `jax_ep.exchange.api` has the functions that users call.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange import gradients, routes
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
    """The routes of one dispatch: a pytree that may cross jit, scan and checkpoint boundaries.

    Attributes:
      routes: where each (source rank, token, choice) goes; see `jax_ep.exchange.routes.Routes`.
      axis_name: the mesh axis names of the dispatch.
      capacity: R.
      num_experts: E.
      expert_alignment: the alignment of each expert's block, in rows.
      overflow: which rows were kept where not all fit; see `jax_ep.exchange.routes.Overflow`.
      host_capacity: the most rows that a rank sent to each other host; None: all that it has.
      zero_unused: whether rows past the last expert's block are zero, or may hold anything.
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
        """The row here of each (source rank, token, choice), [N, T, K] int32.

        It is -1 where the choice is of another rank or of no expert, R or more if it did not fit.
        """
        return self.routes.rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that a rank received in the expert-major layout, and where they are; a pytree.

    Attributes:
      tokens: [R, H], x's dtype: received rows, grouped by local expert; every other row is zero,
        unless the dispatch had `zero_unused=False`.
      group_sizes: [L] int32: rows of each expert's block, padding included; their sum is <= R.
      expert_counts: [L] int32: real rows in each block; they stand first in it.
      num_dropped: [] int32: (token, choice) pairs meant for this rank that did not fit in R.
      rows_needed: [] int32: the R that would have dropped nothing on this rank.
      dropped_counts: [L] int32: `num_dropped`, by local expert.
      handle: the routes, for `combine` and `dispatch_like`.
      scales: [R, H / 128] float32 if the dispatch had `output="quantized"`, else None. A row's
        values are tokens · scale in each block of 128 columns; a zero row has zero scales, and
        unused rows are as `tokens` says.
    """

    tokens: jax.Array
    group_sizes: jax.Array
    expert_counts: jax.Array
    num_dropped: jax.Array
    rows_needed: jax.Array
    dropped_counts: jax.Array
    handle: Handle
    scales: jax.Array | None = None


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
    """Dispatches x [T, H] to the expert-major layout, for `api.dispatch(layout="expert")`.

    `api` has checked the arguments that both layouts share. `options` are further arguments of
    `gradients.configure`.
    """
    expert_alignment = checks.check_integer(
        "expert_alignment", expert_alignment, most=checks.MAX_INT32
    )
    checks.check_name("overflow", overflow, get_args(Overflow))
    checks.check_bool("zero_unused", zero_unused)
    zero_unused = bool(zero_unused)
    if capacity is None:
        overflow = "tail"  # nothing overflows: no rows to choose from
    if host_capacity is not None:
        host_capacity = checks.check_integer("host_capacity", host_capacity, most=checks.MAX_INT32)
        if options["implementation"] in ("pallas", "xla"):
            raise ValueError(
                'host_capacity is of the exchange between hosts, "two_level" or None, but is '
                f"{host_capacity} and the implementation {options['implementation']!r}."
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
    tokens, scales, route, groups = gradients.dispatch(config, x, topk_idx, None)
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
    return Dispatched(tokens, *groups, handle, scales)


def combine(
    y: jax.Array, handle: Handle, topk_weights: jax.Array | None, **options: Any
) -> jax.Array:
    """Combines expert-major rows y [R, H], for `api.combine`.

    `options` are further arguments of `gradients.configure`.
    """
    check_handle(handle)
    checks.check_array("y", y, 2, jnp.floating, "[R, H]", may_be_empty=False)
    if y.shape[0] != handle.capacity:
        raise ValueError(
            "y must have one row for each row of Dispatched.tokens: the handle's capacity is "
            f"{handle.capacity}, but y has shape {y.shape}."
        )
    config = gradients.configure("y", y, **_static(handle), **options)
    if topk_weights is None:
        (y,) = gradients.match((y,), handle.axis_name)
        return gradients.combine(config, y, None, handle.routes)
    check_weights(topk_weights, handle)
    y, weights = gradients.match((y, topk_weights.astype(jnp.float32)), handle.axis_name)
    return gradients.combine(config, y, weights, handle.routes)


def dispatch_like(x: jax.Array, handle: Handle, **options: Any) -> jax.Array:
    """Sends x [T, H'] along the routes of an expert-major dispatch, for `api.dispatch_like`.

    Returns [R, H']. `options` are further arguments of `gradients.configure`.
    """
    check_handle(handle)
    checks.check_rows_of_tokens(x, handle.rows.shape[1])
    config = gradients.configure("x", x, **_static(handle), **options)
    (x,) = gradients.match((x,), handle.axis_name)
    return gradients.dispatch_like(config, x, handle.routes)


def check_handle(handle: Handle) -> None:
    """Raises ValueError unless the handle's routes fit the number of ranks along its axes here."""
    num_ranks = checks.num_ranks(handle.axis_name)
    if handle.rows.ndim != 3 or handle.rows.shape[0] != num_ranks:
        raise ValueError(
            f"handle.rows must have shape [{num_ranks}, T, K], one plane for each rank along "
            f"{handle.axis_name}, but has shape {handle.rows.shape}."
        )


def check_weights(topk_weights: jax.Array, handle: Handle) -> None:
    """Raises TypeError or ValueError unless there is one floating weight for each choice."""
    checks.check_array("topk_weights", topk_weights, 2, jnp.floating, "[T, K]")
    if topk_weights.shape != handle.rows.shape[1:]:
        raise ValueError(
            f"topk_weights must have topk_idx's shape {handle.rows.shape[1:]}, "
            f"but has shape {topk_weights.shape}."
        )


def _static(handle: Handle) -> dict[str, Any]:
    """Returns the fields of a `Config` that follow from the handle of a dispatch."""
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
    """Returns R after checking it; for None, enough rows for any routing.

    Raises ValueError where rows, which are counted in int32, may be too many to count.
    """
    rows = routes.dropless_capacity(num_choices, num_local_experts, expert_alignment)
    if not checks.is_symbolic(rows) and rows > checks.MAX_INT32:
        unpadded = routes.dropless_capacity(num_choices, num_local_experts, 1)
        if unpadded <= checks.MAX_INT32:
            blocks = min(num_local_experts, num_choices)
            most = 1 + (checks.MAX_INT32 - num_choices) // (blocks + 1)
            raise ValueError(
                f"expert_alignment must be at most {most}, since {num_local_experts} experts of a "
                f"rank with {num_choices} choices may need {checks.MAX_INT32} rows then, but is "
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
