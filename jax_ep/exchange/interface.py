"""Defines the interface of an exchange: six functions of arrays and a `Config`.

The modules `jax_ep.exchange.xla` and `jax_ep.exchange.pallas` are exchanges. For ranks on several
hosts, `jax_ep.exchange.two_level` calls one of them several times, with a part of the tokens each
time. All follow the contract in `jax_ep.reference`, so each accepts routes that another made. Call
all functions inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.routes import Overflow, RankRoutes, Routes, RowGroups
from pallas_kernels.formats import PLAIN, RowFormat

Implementation = Literal["pallas", "xla", "two_level"] | None
Received = tuple[jax.Array, ...]
"""Rows as the format of the wire encodes them: values, and scales if it has any."""


def algorithm_next_to(implementation: Implementation) -> str | None:
    """Returns the `algorithm` of collectives in a program with an exchange.

    The library's collectives are kernels too: they run where the exchange may be kernels.
    """
    return None if implementation in (None, "pallas") else "xla"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The static arguments of an exchange and of its gradient, which is an exchange too.

    Attributes:
      axis_name: the mesh axes that ranks are numbered along.
      ranks_per_host: G, if only the G consecutive ranks of each host exchange rows with each other;
        None if all ranks do.
      num_experts: E.
      layout: whether received rows are expert-major, [R, H], or rank-major, [N, T, H].
      capacity: R, the rows of an expert-major receive buffer.
      expert_alignment: each expert's block starts at a multiple of this many rows.
      overflow: the rule for dropping rows; see `jax_ep.exchange.routes.Overflow`.
      host_capacity: the most tokens that a rank sends to each other host; None: all its tokens.
      zero_unused: whether the rows past the last expert's block are zero; else undefined.
      implementation: the exchange to run; None for the best that runs here.
      wire: the format in which rows, or sums of rows, are sent.
      sum_dtype: the dtype in which a combine returns its sums, and sends them if the wire is plain;
        None for the rows' dtype.
      grad_wire: the wire of the gradient's exchange.
      quantized: whether a dispatch returns the received rows and scales without decoding them.
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
    wire: RowFormat = PLAIN
    sum_dtype: jnp.dtype | None = None
    grad_wire: RowFormat = PLAIN
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
        """The configuration of the gradient's exchange.

        The wire of higher gradients is plain.
        """
        return dataclasses.replace(self, wire=self.grad_wire, grad_wire=PLAIN, quantized=False)


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
        """Sums the rows y [R, H] of each token, and returns the sums [T, H] to the tokens' ranks.

        `topk_weights` are [T, K] float32; None: the rows are not weighted.
        """
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
        """Sends the partial sums y [N, T, H] to the tokens' ranks and adds them there: [T, H]."""
        ...


class ExchangeInParts(Exchange, Protocol):
    """An `Exchange` that can divide the tokens of one dispatch among several calls.

    In the `routes` of a call, `rows` are those of the call's tokens, and `counts` those of the
    whole dispatch. The first call writes zeros to padding and, if `config.zero_unused`, to unused
    rows. A later call gets the result of the previous call as `into`. It writes its tokens' rows
    there, and keeps all other rows. The wire must be plain.
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
        """Computes the cotangents of y [R, H] and of the weights for some of the tokens."""
        ...
