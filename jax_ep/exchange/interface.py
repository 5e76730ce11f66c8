"""Defines the interface of an exchange: six functions of arrays and a `Config`.

The modules `jax_ep.exchange.xla` and `jax_ep.exchange.pallas` implement it. For ranks on several
hosts, `jax_ep.exchange.two_level` implements it with several calls of one of these modules, each
for some of the tokens. All implementations follow the contract in `jax_ep.reference`, so each
accepts routes that another one computed. Call all functions inside `jax.shard_map`.
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
    """Returns the `algorithm` for collectives that run while a program's exchange does.

    `implementation` is the argument of the exchange. For "pallas" or None, the result is None,
    which lets a function of `jax_ep.collectives` select Pallas kernels, too. For "xla" and
    "two_level" the result is "xla". The ranks of "two_level" are on several hosts, between which
    Pallas collectives cannot run.
    """
    return None if implementation in (None, "pallas") else "xla"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The static arguments of an exchange and of its gradient, which is an exchange too.

    Attributes:
      axis_name: the mesh axes along which ranks are numbered.
      ranks_per_host: G, if only the G consecutive ranks of each host exchange rows with each other;
        None if all ranks exchange rows.
      num_experts: E, the experts of all ranks that exchange rows with each other.
      layout: whether received rows are expert-major, [R, H], or rank-major, [N, T, H].
      capacity: R, the rows of an expert-major receive buffer; 0 in the rank-major layout.
      expert_alignment: each expert's block starts at a multiple of this many rows.
      overflow: the rule for dropping rows; see `jax_ep.exchange.routes.Overflow`.
      host_capacity: the most tokens that a rank sends to each other host; None: all its tokens.
      zero_unused: whether the rows past the last expert's block are zero; False: undefined.
      implementation: the name of the implementation to run; None for the best that runs here.
      wire: the format in which rows, or sums of rows, are sent.
      sum_dtype: the dtype of a combine's result, and of the sums it sends unless `wire` quantizes
        them; None for the rows' dtype.
      grad_wire: the `wire` of the exchange that computes the gradient.
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
        """The groups of ranks that exchange rows, for the `axis_index_groups` of JAX's collectives.

        They are the ranks of each host; or None if all ranks exchange rows with each other.
        """
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
        """The configuration of the exchange that computes the gradient of this exchange.

        That exchange sends cotangents in the format `grad_wire`. The exchange that computes its own
        gradient, in turn, sends rows unquantized.
        """
        return dataclasses.replace(self, wire=self.grad_wire, grad_wire=PLAIN, quantized=False)


class Exchange(Protocol):
    """The six functions that each implementation of the exchange provides, to move rows of tokens.

    Shapes: N ranks, T tokens per rank, K choices per token, H columns, and R rows of a receive
    buffer. `Received` rows are encoded in the format `config.wire`.
    """

    def dispatch(
        self, x: jax.Array, topk_idx: jax.Array, config: Config
    ) -> tuple[Received, Routes, RowGroups]:
        """Computes the routes of choices topk_idx [T, K] int32, and sends x [T, H] along them.

        Returns the received rows [R, H], the routes, and the sizes of the experts' blocks of rows.
        """
        ...

    def dispatch_like(self, x: jax.Array, routes: Routes, config: Config) -> Received:
        """Sends x [T, H] to the rows of an earlier dispatch; returns the receive buffer [R, H]."""
        ...

    def combine(
        self, y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
    ) -> jax.Array:
        """Sums each token's rows of y [R, H]; sends the sums [T, H] back to the tokens' ranks.

        `topk_weights` [T, K] float32 multiply the rows; None: a plain sum.
        """
        ...

    def combine_grad(
        self, g: jax.Array, topk_weights: jax.Array, y: jax.Array, routes: Routes, config: Config
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the gradients of a weighted `combine` from the cotangent g [T, H] of its result.

        Returns the gradients of y, [R, H], and of the weights, [T, K] float32.
        """
        ...

    def rank_dispatch(
        self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
    ) -> tuple[Received, RankRoutes, jax.Array | None]:
        """Sends x [T, H] to every rank that owns an expert of the token, in the rank-major layout.

        Returns received rows [N, T, H], the routes, and the received weights [N, T, K] float32, or
        None if topk_weights is None. Rows of tokens that chose no expert of this rank are zero.
        """
        ...

    def rank_combine(self, y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
        """Sends partial sums y [N, T, H] to the tokens' ranks and adds them there: [T, H]."""
        ...


class ExchangeInParts(Exchange, Protocol):
    """An `Exchange` that can divide the tokens of one dispatch among several calls.

    In each call, `routes.rows` has the rows of that call's tokens only, and `routes.counts` has the
    counts of the whole dispatch. The first call writes zeros to the rows that pad experts' blocks
    and, if `config.zero_unused`, to the unused rows after the last block. A later call takes the
    result of the previous call as `into`, writes the rows of its own tokens there, and keeps all
    other rows. `config.wire` must not quantize rows.
    """

    def dispatch_like(
        self, x: jax.Array, routes: Routes, config: Config, into: Received | None = None
    ) -> Received:
        """Sends x [T, H], some of a dispatch's tokens, to their receive-buffer rows.

        Returns the receive buffer, [R, H]. `into` is the receive buffer that the previous call
        returned; this call writes the rows of its tokens there. `into` is None in the first call.
        """
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
        """Computes the gradients of a weighted `combine` from the cotangents g of some tokens.

        Returns the gradient of y, [R, H], and the gradient of these tokens' weights, [T, K]
        float32. `into` is the gradient of y that the previous call returned; this call writes the
        rows of its tokens there. `into` is None in the first call.
        """
        ...
