"""Defines what the modules of the exchange pass to each other, and what a dispatch returns.

In the expert-major layout, a receive buffer has one row per (token, choice), sorted by local
expert, then source rank, then source token, then choice; callers may rely on this order. In the
rank-major layout, it has one row per (source rank, token).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.routes import Overflow, RankRoutes, Routes
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import register_for_export
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric import memory_map
from pallas_kernels.formats import FLOAT8_ROWS, PLAIN, Format, RowFormat

Implementation = Literal["pallas", "xla", "two_level"] | None
Received = tuple[jax.Array, ...]  # rows as the wire's format encodes them: values, and any scales

WIRE_FORMATS: tuple[Format, ...] = (FLOAT8_ROWS,)
WIRE_DTYPES = tuple(format.dtype for format in WIRE_FORMATS)


def algorithm_next_to(implementation: Implementation) -> str | None:
    """Returns the `algorithm` for collectives between an exchange's ranks: None (best) or "xla"."""
    # The ranks of "two_level" are on several hosts, between which no Pallas collective runs.
    return None if implementation in (None, "pallas") else "xla"


def check_is_between_hosts(name: str, value: Any, implementation: Implementation) -> None:
    """Raises ValueError if `implementation` has no option `name`, which the caller has set."""
    if implementation in ("pallas", "xla"):
        raise ValueError(
            f'{name} needs implementation="two_level" or None, since only the exchange between '
            f"hosts has it, but is {value} with implementation={implementation!r}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one exchange; the static parameter of its primitives."""

    axis_name: tuple[str, ...]
    # G, if only a host's G consecutive ranks exchange rows; None: all ranks do
    ranks_per_host: int | None = None
    num_experts: int  # E, the experts of all ranks that exchange rows with each other
    layout: Literal["expert", "rank"] = "expert"  # whether received rows are [R, H] or [N, T, H]
    capacity: int = 0  # R; 0 in the rank-major layout
    expert_alignment: int = 1  # each expert's block starts at a multiple of this many rows
    overflow: Overflow = "tail"
    host_capacity: int | None = None  # the most tokens to each other host; None: all
    zero_unused: bool = True  # False: the rows past the last expert's block are undefined
    implementation: Implementation = None
    wire: RowFormat = PLAIN  # the format in which rows, or sums of rows, are sent
    # The dtype of a combine's result, and of the sums it sends unless `wire` quantizes them;
    # None: the rows' dtype.
    sum_dtype: jnp.dtype | None = None
    grad_wire: RowFormat = PLAIN  # the `wire` of the exchange that computes the gradient
    quantized: bool = False  # whether a dispatch returns received values and scales undecoded

    @property
    def ranks_of_hosts(self) -> list[list[int]] | None:
        """The ranks of each host, as `axis_index_groups` of a collective; None: one group."""
        if self.ranks_per_host is None:
            return None
        starts = range(0, lax.axis_size(self.axis_name), self.ranks_per_host)
        return [list(range(start, start + self.ranks_per_host)) for start in starts]

    def rank(self) -> jax.Array:
        """Returns this rank's number among the ranks that it exchanges rows with, [] int32."""
        index = lax.axis_index(self.axis_name)
        return index if self.ranks_per_host is None else index % self.ranks_per_host

    @property
    def of_cotangents(self) -> Self:
        """The options of the exchange that sends the cotangents of this one's result."""
        return dataclasses.replace(self, wire=self.grad_wire, grad_wire=PLAIN, quantized=False)


def wire_format(wire_dtype: jax.typing.DTypeLike | None, argument: str = "wire_dtype") -> RowFormat:
    if wire_dtype is None:
        return PLAIN
    try:
        return WIRE_FORMATS[WIRE_DTYPES.index(jnp.dtype(wire_dtype))]
    except (TypeError, ValueError):
        names = ", ".join(dtype.name for dtype in WIRE_DTYPES)
        raise ValueError(f"{argument} must be None or {names}, but is {wire_dtype!r}.") from None


def checked_wire(
    name: str,
    rows: jax.Array | jax.ShapeDtypeStruct,
    wire_dtype: jax.typing.DTypeLike | None,
    argument: str = "wire_dtype",
) -> RowFormat:
    """Returns the format that encodes `rows` [..., H]; `name` and `argument` are for errors."""
    wire = wire_format(wire_dtype, argument)
    if not wire.quantized:
        return wire
    columns = wire.row_block
    if rows.shape[-1] % columns:
        raise ValueError(
            f"{argument}={wire.name} needs rows of whole blocks of {columns} values, but {name} "
            f"has {rows.shape[-1]} columns; pad them."
        )
    if rows.dtype.itemsize < 2:
        raise TypeError(
            f"{name} must have a dtype of 16 bits or more to be sent as {wire.name}, but has dtype "
            f"{rows.dtype}; leave {argument} at None."
        )
    return wire


def check_output(output: str, wire: RowFormat) -> None:
    if output not in ("dequantized", "quantized"):
        raise ValueError(f'output must be "dequantized" or "quantized", but is {output!r}.')
    if output == "quantized" and not wire.quantized:
        raise ValueError('output="quantized" needs a wire_dtype, such as jnp.float8_e4m3fn.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of an exchange and the sizes of their routes, for which kernels need room."""

    hidden: int
    dtype: jax.typing.DTypeLike
    num_ranks: int
    list_words: int  # 4-byte words that describe a token's choices: K, or 2 K with weights
    num_experts: int  # of all ranks
    wire: RowFormat = PLAIN

    def unavailable_reason(self) -> str | None:
        """Returns why the kernels cannot exchange such rows, or None if they can."""
        if reason := availability.dtype_unavailable_reason("the dtype of the rows", self.dtype):
            return reason
        # A rank sends its counts of experts to each peer at once, padded to whole warpgroups. The
        # peer has room for MAX_VALUES of them.
        if plans.count_width(self.num_experts) > memory_map.MAX_VALUES:
            return f"it supports at most {memory_map.MAX_VALUES} experts, not {self.num_experts}"
        hidden = plans.padded_hidden(self.hidden, self.dtype, self.wire)
        if plans.fits_shared_memory(
            plans.Row(hidden, self.dtype, self.wire),
            num_ranks=self.num_ranks,
            top_k=self.list_words,  # a weight takes the memory of one more choice
            num_experts=self.num_experts,
        ):
            return None
        return (
            f"a row of {hidden} {jnp.dtype(self.dtype).name} is too long for shared memory, which "
            f"also holds the routes of {self.num_experts} experts and {self.list_words} choices"
        )


def _static(**default: Any) -> Any:
    """A field of a pytree that is not an array, and so is static under `jax.jit`."""
    return dataclasses.field(metadata={"static": True}, **default)


def static_fields(handle: Any) -> list[str]:
    """Lists the fields of a `Handle` or `RankHandle` but the routes; `Config` has them, too."""
    return [field.name for field in dataclasses.fields(handle) if field.metadata.get("static")]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """The routes of one dispatch; a pytree that may cross jit, scan and checkpoint boundaries.

    Attributes:
      routes: the row of each (source rank, token, choice); see `jax_ep.exchange.routes.Routes`.
      axis_name, capacity, num_experts, expert_alignment, overflow, host_capacity, zero_unused: the
        arguments of the dispatch; `capacity` is R even if it was None.
    """

    routes: Routes
    axis_name: tuple[str, ...] = _static()
    capacity: int = _static()
    num_experts: int = _static()
    expert_alignment: int = _static()
    overflow: Overflow = _static(default="tail")
    host_capacity: int | None = _static(default=None)
    zero_unused: bool = _static(default=True)

    @classmethod
    def of(cls, routes: Routes, config: Config) -> Handle:
        return cls(routes, **{name: getattr(config, name) for name in static_fields(cls)})

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes (N, T, K) of the dispatch: ranks, tokens per rank, choices per token."""
        return self.routes.rows.shape

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
      tokens: [R, H], x's dtype: the received rows, grouped by local expert. Padding rows are zero,
        and so are the unused rows at the end, unless the dispatch had `zero_unused=False`. With
        `output="quantized"`, a `jax_ep.QuantizedArray`; its zero rows have zero scales.
      group_sizes: [L] int32: the rows of each expert's block, padding included; their sum is <= R.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankHandle:
    """The routes of one dispatch in the rank-major layout, for `combine`; a pytree.

    Attributes:
      routes: the experts that each rank's tokens chose; see `jax_ep.exchange.routes.RankRoutes`.
      axis_name, num_experts: the arguments of the dispatch.
    """

    routes: RankRoutes
    axis_name: tuple[str, ...] = _static()
    num_experts: int = _static()

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes (N, T, K) of the dispatch: ranks, tokens per rank, choices per token."""
        return self.routes.local_topk_idx.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankDispatched:
    """The rows that a rank received in the rank-major layout, and their experts; a pytree.

    Attributes:
      tokens: [N, T, H] of x's dtype: row (s, t) is token t of rank s if the token chose any expert
        of this rank, and zero if not. With `output="quantized"`, tokens is a
        `jax_ep.QuantizedArray`, and neither tokens nor topk_weights have a gradient.
      local_topk_idx: [N, T, K] int32: each token's choices as local expert ids in [0, L); -1 where
        the choice names another rank's expert or no expert.
      topk_weights: [N, T, K], in the dtype that was sent: the weight of each choice, zero where
        local_topk_idx is -1; None if the dispatch was given no weights.
      handle: the routes, for `combine` and `dispatch_like`.
    """

    tokens: Any
    local_topk_idx: jax.Array
    topk_weights: jax.Array | None
    handle: RankHandle


for kind in (Handle, Dispatched, RankHandle, RankDispatched):
    register_for_export(kind)
