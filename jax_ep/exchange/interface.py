"""What an exchange is: six functions of arrays and a `Config`, called inside `jax.shard_map`.

The modules `jax_ep.exchange.xla` and `jax_ep.exchange.pallas` are exchanges among ranks that reach
each other in the same way. `jax_ep.exchange.two_level` is made of one of them, called in parts, for
ranks on several hosts. All follow the contract in `jax_ep.reference`, so each takes the routes of
any other.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.routes import Overflow, RankRoutes, Routes, RowGroups

Implementation = Literal["pallas", "xla", "two_level"] | None
Received = tuple[jax.Array, ...]
"""Rows; or with a wire_dtype, rows in it and their float32 scales, one for every 128 columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The static arguments of an exchange and of its gradient, which is an exchange too.

    Attributes:
      axis_name: the mesh axes that ranks are numbered along.
      ranks_per_host: G, if each host is an exchange of its own, of G neighbouring ranks; None if
        all ranks exchange.
      num_experts: E.
      layout: whether received rows are expert-major, [R, H], or rank-major, [N, T, H].
      capacity: R, the rows of an expert-major receive buffer.
      expert_alignment: each expert's block starts at a multiple of this many rows.
      overflow: which rows a receive buffer of R rows keeps; see `jax_ep.exchange.routes.Overflow`.
      host_capacity: the most rows that a rank sends to another host; None: all that it has.
      zero_unused: whether rows past the last expert's block are zero, or may hold anything.
      implementation: the exchange to run; None for the best that runs here.
      wire_dtype: the dtype that rows, or sums of rows, are sent in; None for their own dtype.
      sum_dtype: the dtype that a combine returns, and sends its sums in where there is no
        wire_dtype; None for the rows' own dtype.
      grad_wire_dtype: the wire_dtype of the exchange that the gradient makes.
      quantized: whether a dispatch returns rows and scales as they arrive.
    """

    axis_name: tuple[str, ...]
    ranks_per_host: int | None = None
    num_experts: int
    layout: Literal["expert", "rank"] = "expert"
    capacity: int = 0
    expert_alignment: int = 1
    overflow: Overflow = "tail"
    host_capacity: int | None = None
    zero_unused: bool = True
    implementation: Implementation = None
    wire_dtype: jnp.dtype | None = None
    sum_dtype: jnp.dtype | None = None
    grad_wire_dtype: jnp.dtype | None = None
    quantized: bool = False

    @property
    def ranks_of_hosts(self) -> list[list[int]] | None:
        """The ranks of each exchange, as `axis_index_groups` of JAX's collectives takes them."""
        if self.ranks_per_host is None:
            return None
        starts = range(0, lax.axis_size(self.axis_name), self.ranks_per_host)
        return [list(range(start, start + self.ranks_per_host)) for start in starts]

    def rank(self) -> jax.Array:
        """Returns this rank's number in its exchange, [] int32."""
        index = lax.axis_index(self.axis_name)
        return index if self.ranks_per_host is None else index % self.ranks_per_host

    @property
    def of_cotangents(self) -> Self:
        """The configuration of the exchange that the gradient makes.

        The gradient of that exchange has no wire_dtype.
        """
        return dataclasses.replace(
            self, wire_dtype=self.grad_wire_dtype, grad_wire_dtype=None, quantized=False
        )


class Exchange(Protocol):
    """Moves rows between ranks: the functions that each exchange implements.

    N ranks, T tokens per rank, K choices per token, H columns, R rows of a receive buffer.
    """

    def dispatch(
        self, x: jax.Array, topk_idx: jax.Array, config: Config
    ) -> tuple[Received, Routes, RowGroups]:
        """Routes topk_idx [T, K] int32 and sends x [T, H]: received [R, H], routes, groups."""
        ...

    def dispatch_like(self, x: jax.Array, routes: Routes, config: Config) -> Received:
        """Sends x [T, H] along the routes of a dispatch: received [R, H]."""
        ...

    def combine(
        self, y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
    ) -> jax.Array:
        """Sums y [R, H], weighted by [T, K] float32, by token and returns the sums: [T, H]."""
        ...

    def combine_grad(
        self, g: jax.Array, topk_weights: jax.Array, y: jax.Array, routes: Routes, config: Config
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the cotangents of y [R, H] and of the weights [T, K] float32, for g [T, H]."""
        ...

    def rank_dispatch(
        self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
    ) -> tuple[Received, RankRoutes, jax.Array | None]:
        """Sends x [T, H] to each rank of its choices: received [N, T, H], routes and weights.

        The weights are [N, T, K] float32, or None if topk_weights is None.
        """
        ...

    def rank_combine(self, y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
        """Returns the sums y [N, T, H] to the tokens' owners and adds them: [T, H]."""
        ...


class ExchangeInParts(Exchange, Protocol):
    """An `Exchange` that can send the tokens of one dispatch in several calls, some in each.

    The routes' rows are those of the call's tokens; the counts are of the whole dispatch. The first
    call writes zeros where no row will be, as the config says. `into` is what the call before
    returned: a call writes its tokens' rows there and keeps the others. Without a wire_dtype only.
    """

    def dispatch_like(
        self, x: jax.Array, routes: Routes, config: Config, into: Received | None = None
    ) -> Received:
        """Sends x [T, H], some of the tokens of a dispatch, along their routes: received [R, H]."""
        ...

    def combine_grad(
        self,
        g: jax.Array,
        topk_weights: jax.Array,
        y: jax.Array,
        routes: Routes,
        config: Config,
        into: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the cotangents of some tokens: of y [R, H] in their rows, of their weights."""
        ...
