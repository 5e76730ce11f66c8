"""The exchange of ranks on several hosts: over the network once, then inside each host.

The N ranks are M hosts of G neighbours. Ranks of one number in their hosts are a *rail*. Dispatch
sends each rank's T rows along its rail, so every token crosses to a host once, whatever number of
its experts are there; an exchange among the ranks of that host, which is one of the other modules,
sends it on. Combine goes the other way: the exchange inside sums the rows of a (token, host), and
one row of each returns along the rail. (DeepEP, github.com/deepseek-ai/DeepEP, forwards so.)

Per rank, (M - 1)·T rows come from other hosts in either direction, besides the routes of the rail.
Rows, drops and counts are those of one level, bit for bit, since the exchange inside follows the
routes that it is given.

**Rounding of a combine.** The sum over the rows that a token has on one host is taken in float32,
over those of a rank in the order of the choices, then over ranks in rank order. It is rounded once,
to y's dtype or to the wire_dtype, and returned. The sum over hosts is taken in float32, in the
order of the hosts, and rounded to y's dtype. So inside a host sums travel as float32, unless there
is only one rank.

**Order.** With XLA's collectives inside, hosts take turns: what is done for this one's own tokens
does not wait for the network, and no rows of all N ranks lie in memory together. The kernels take
the rows of all hosts in one call, once these have come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import quantization
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config, Exchange, Received
from jax_ep.exchange.routes import Layout, RankRoutes, Routes
from jax_ep.runtime import availability

# Whose tokens a call of the exchange inside is for: those of this rank's rail on one host, which is
# a traced number; or None, on all hosts.
_Source = jax.Array | None


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """An `Exchange` among ranks on M hosts.

    Attributes:
      num_hosts: M, which divides the number of ranks along the axes of a `Config`.
      kernels: whether the Pallas kernels run among the ranks of a host.
    """

    num_hosts: int
    kernels: bool

    def dispatch(
        self, x: jax.Array, topk_idx: jax.Array, config: Config
    ) -> tuple[Received, Routes, Layout]:
        """`Exchange.dispatch`."""
        rail = _Rail.of(self.num_hosts, config)
        message = xla_exchange.message_of_choices(_experts_or_none(topk_idx, config), config)
        most = max(config.num_experts, topk_idx.size)
        of_host = xla_exchange.stack_ranks(rail.gather(_narrow(message, most)), rail.inside.ranks)
        messages = of_host.swapaxes(0, 1).reshape(rail.num_ranks, -1).astype(jnp.int32)
        routes, layout = xla_exchange.read_messages(messages, topk_idx, config)
        return self.dispatch_like(x, routes, config), routes, layout

    def dispatch_like(self, x: jax.Array, routes: Routes, config: Config) -> Received:
        """`Exchange.dispatch_like`."""
        rail, carried = _Rail.of(self.num_hosts, config), _carried(x, config.wire_dtype)
        exchange, at_once = self._inside(rail, carried, routes.topk_idx.shape[1])
        sent = rail.gather(carried)

        def add(source: _Source, received: Any) -> jax.Array:
            rows, known = rail.rows(carried, sent, source), self._routes(rail, routes, source)
            return _union(received, *exchange.dispatch_like(rows, known, rail.inside))

        received = rail.each_host(add, at_once)
        return _uncarried(received, x, config.wire_dtype)

    def combine(
        self, y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
    ) -> jax.Array:
        """`Exchange.combine`."""
        rail = _Rail.of(self.num_hosts, config)
        inside = rail.inside
        if rail.group_size > 1 or config.wire_dtype is not None:
            inside = rail.inside_float32  # no rounding before the host's sum is complete
        exchange, at_once = self._inside(rail, y, routes.topk_idx.shape[1], inside.sum_dtype)
        weights = None if topk_weights is None else rail.gather(topk_weights)

        def sums(source: _Source) -> jax.Array:
            theirs = None if weights is None else rail.rows(topk_weights, weights, source)
            known = self._routes(rail, routes, source)
            return _on_the_wire(exchange.combine(y, theirs, known, inside), y, config)

        return _add(rail.return_to_hosts(sums, at_once), y, config.wire_dtype)

    def combine_grad(
        self, g: jax.Array, topk_weights: jax.Array, y: jax.Array, routes: Routes, config: Config
    ) -> tuple[jax.Array, jax.Array]:
        """`Exchange.combine_grad`. Rows of a wire_dtype are widened when they come to the host."""
        rail, carried = _Rail.of(self.num_hosts, config), _carried(g, config.wire_dtype)
        exchange, at_once = self._inside(rail, y, routes.topk_idx.shape[1])
        sent, weights = rail.gather(carried), rail.gather(topk_weights)

        def add(source: _Source, grads: Any) -> tuple[jax.Array, jax.Array]:
            dy, dweights = grads or (None, None)
            rows = _uncarried(rail.rows(carried, sent, source), g, config.wire_dtype)
            part, dpart = exchange.combine_grad(
                quantization.handed_out(rows, g.dtype, False)[0],
                rail.rows(topk_weights, weights, source),
                y,
                self._routes(rail, routes, source),
                rail.inside,
            )
            return _union(dy, part), rail.place(dweights, dpart, source)

        dy, dweights = rail.each_host(add, at_once)
        # At most one host's term is not zero: the sum is exact.
        return dy, jnp.sum(rail.send_back(dweights), axis=0)

    def rank_dispatch(
        self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
    ) -> tuple[Received, RankRoutes, jax.Array | None]:
        """`Exchange.rank_dispatch`."""
        rail, carried = _Rail.of(self.num_hosts, config), _carried(x, config.wire_dtype)
        list_words = topk_idx.shape[1] * (1 if topk_weights is None else 2)
        exchange, at_once = self._inside(rail, carried, list_words)
        sent, choices = rail.gather(carried), self._choices(rail, topk_idx)
        weights = None if topk_weights is None else rail.gather(topk_weights)

        def add(source: _Source, received: Any) -> Any:
            theirs = None if weights is None else rail.rows(topk_weights, weights, source)
            (rows,), lists, theirs = exchange.rank_dispatch(
                rail.rows(carried, sent, source),
                rail.rows(None, choices, source),
                theirs,
                rail.inside,
            )
            parts = [rows, lists.local_topk_idx, *([] if theirs is None else [theirs])]
            if source is None:
                parts = [rail.by_host(part) for part in parts]
            return [
                rail.place(whole, part, source)
                for whole, part in zip(received or [None] * len(parts), parts, strict=True)
            ]

        tokens, *lists = (  # [M, G, T, ...] -> [N, T, ...]
            whole.reshape(rail.num_ranks, *whole.shape[2:])
            for whole in rail.each_host(add, at_once)
        )
        received = _uncarried(tokens, x, config.wire_dtype)
        return received, RankRoutes(topk_idx, lists[0]), lists[1] if lists[1:] else None

    def rank_combine(self, y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
        """`Exchange.rank_combine`."""
        rail = _Rail.of(self.num_hosts, config)
        inside = rail.inside if config.wire_dtype is None else rail.inside_float32
        exchange, at_once = self._inside(rail, y, routes.topk_idx.shape[1], inside.sum_dtype)
        choices = self._choices(rail, routes.topk_idx)

        def sums(source: _Source) -> jax.Array:
            lists = rail.by_rank(routes.local_topk_idx, source)
            known = RankRoutes(rail.rows(None, choices, source), lists)
            part = exchange.rank_combine(rail.by_rank(y, source), known, inside)
            return _on_the_wire(part, y, config)

        return _add(rail.return_to_hosts(sums, at_once), y, config.wire_dtype)

    def _inside(
        self, rail: _Rail, rows: jax.Array, top_k: int, dtype: jnp.dtype | None = None
    ) -> tuple[Exchange, bool]:
        """The exchange inside a host that carries such rows, and whether it takes all at once.

        `dtype`: that it carries them in; None is their own.
        """
        reason = availability.exchange_unavailable_reason(
            rows.shape[-1],
            dtype or rows.dtype,
            num_ranks=rail.group_size,
            top_k=top_k,
            num_experts=rail.inside.num_experts,
        )
        if not self.kernels or reason is not None:
            return xla_exchange, False
        from jax_ep.exchange import pallas as pallas_exchange

        return pallas_exchange, True

    def _choices(self, rail: _Rail, topk_idx: jax.Array) -> jax.Array:
        """The choices [M, T, K] of this rank's rail, as numbers of experts of this host."""
        narrow = _narrow(_experts_or_none(topk_idx, rail.config), rail.config.num_experts)
        return rail.gather(narrow).astype(jnp.int32) - rail.host * rail.inside.num_experts

    def _routes(self, rail: _Rail, routes: Routes, source: _Source) -> Routes:
        """The routes inside this host of the tokens of a source."""
        rows = rail.by_rank(routes.rows, source)
        if source is not None:  # XLA's exchange follows the rows alone
            return Routes(routes.topk_idx, rows, routes.counts)
        # The kernels fill what no row is sent to, which the sums of counts tell them.
        mine = lax.dynamic_slice_in_dim(
            routes.counts, rail.host * rail.inside.num_experts, rail.inside.num_experts, axis=1
        )
        counts = jnp.sum(mine.reshape(rail.num_hosts, rail.group_size, -1), axis=0, dtype=jnp.int32)
        return Routes(rail.rows(None, self._choices(rail, routes.topk_idx), None), rows, counts)


@dataclasses.dataclass(frozen=True)
class _Rail:
    """The ranks of this rank's number on every host, and what is sent between them.

    Attributes:
      config: of the exchange among all ranks.
      num_hosts: M.
      group_size: G, the ranks of a host.
      host: [] int32: the number of this one.
    """

    config: Config
    num_hosts: int
    group_size: int
    host: jax.Array

    @classmethod
    def of(cls, num_hosts: int, config: Config) -> _Rail:
        group_size = lax.axis_size(config.axis_name) // num_hosts
        return cls(config, num_hosts, group_size, lax.axis_index(config.axis_name) // group_size)

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.group_size

    @property
    def inside(self) -> Config:
        """The exchange among the ranks of a host, of rows as they are."""
        return dataclasses.replace(
            self.config,
            group_size=self.group_size,
            num_experts=self.config.num_experts // self.num_hosts,
            wire_dtype=None,
        )

    @property
    def inside_float32(self) -> Config:
        """`inside`, with sums that are float32."""
        return dataclasses.replace(self.inside, sum_dtype=jnp.dtype(jnp.float32))

    @property
    def _groups(self) -> list[list[int]]:
        """The ranks of every rail."""
        return [
            list(range(number, self.num_ranks, self.group_size))
            for number in range(self.group_size)
        ]

    # ---------------------------------------------------------------------- over the network

    def gather(self, x: jax.Array) -> jax.Array:
        """[...] -> [M, ...] of all hosts, in their order."""
        bits = quantization.bits(x, None)
        bits = lax.all_gather(
            bits[None], self.config.axis_name, axis=0, tiled=True, axis_index_groups=self._groups
        )
        return lax.bitcast_convert_type(bits, x.dtype)

    def send_back(self, x: jax.Array) -> jax.Array:
        """[M, ...] by the host that it is for -> [M, ...] by the host that it comes from."""
        return lax.all_to_all(
            x, self.config.axis_name, 0, 0, tiled=True, axis_index_groups=self._groups
        )

    # -------------------------------------------------------------------------- host by host

    def each_host(self, add: Callable[[_Source, Any], Any], at_once: bool) -> Any:
        """Gives `add` every source, and what it returned for the one before: None at first."""
        if at_once:
            return add(None, None)
        return lax.fori_loop(
            1,
            self.num_hosts,
            lambda i, state: add((self.host + i) % self.num_hosts, state),
            add(self.host, None),
        )

    def return_to_hosts(self, sums: Callable[[_Source], jax.Array], at_once: bool) -> jax.Array:
        """Returns sums [T, ...] to their source: those of every host, [M, T, ...].

        Those of this host's own tokens are made while the others are on their way.
        """
        if at_once:
            return self.send_back(self.place(None, sums(None), None))

        def add(i: Any, others: Any) -> jax.Array:
            source = (self.host + i) % self.num_hosts
            return self.place(others, sums(source), source)

        others = lax.fori_loop(2, self.num_hosts, add, add(1, None))
        _, host = lax.optimization_barrier((others, self.host))  # no memory for both at a time
        return self.place(self.send_back(others), sums(host), host)

    def rows(self, own: jax.Array | None, by_host: jax.Array, source: _Source) -> jax.Array:
        """[M, T, ...] -> [T, ...] of a source, or of all, [M·T, ...]; `own` are this host's."""
        if own is not None and source is self.host:
            return own
        picked = self._pick(by_host, source)
        return picked.reshape(-1, *picked.shape[2:])

    def by_rank(self, by_rank: jax.Array, source: _Source) -> jax.Array:
        """[N, T, ...] of all ranks -> [G, T, ...] of a source, or of all hosts, [G, M·T, ...]."""
        by_host = by_rank.reshape(self.num_hosts, self.group_size, *by_rank.shape[1:])
        picked = self._pick(by_host, source).swapaxes(0, 1)
        return picked.reshape(self.group_size, -1, *by_rank.shape[2:])

    def by_host(self, part: jax.Array) -> jax.Array:
        """[G, M·T, ...] -> [N, T, ...]."""
        parts = part.reshape(self.group_size, self.num_hosts, -1, *part.shape[2:]).swapaxes(0, 1)
        return parts.reshape(self.num_ranks, *parts.shape[2:])

    def place(self, whole: jax.Array | None, part: jax.Array, source: _Source) -> jax.Array:
        """Writes what is of a source, [T, ...], to its place in [M, T, ...]; None is zeros.

        What is of all hosts, [M·T, ...], is the whole.
        """
        if source is None:
            return part.reshape(self.num_hosts, -1, *part.shape[1:])
        if whole is None:
            whole = jnp.full_like(part, 0, shape=(self.num_hosts, *part.shape))
        return lax.dynamic_update_index_in_dim(whole, part, source, axis=0)

    def _pick(self, by_host: jax.Array, source: _Source) -> jax.Array:
        """[M, ...] -> [1, ...] of a source, or of all hosts."""
        return by_host if source is None else lax.dynamic_index_in_dim(by_host, source, axis=0)


def _add(returned: jax.Array, y: jax.Array, wire_dtype: jnp.dtype | None) -> jax.Array:
    """The sum over hosts of what they returned, [M, T, ...] bits, in y's dtype."""
    total: Any = None
    for bits in returned:
        rows, *scales = quantization.parts(bits, y, wire_dtype)
        rows = rows.astype(jnp.float32)
        if scales:
            rows = quantization.dequantize(rows, scales[0], jnp.float32)
        total = rows if total is None else total + rows
    return total.astype(y.dtype)


def _on_the_wire(sums: jax.Array, y: jax.Array, config: Config) -> jax.Array:
    """Sums [T, H] rounded to y's dtype or the wire_dtype, as bits."""
    sums = sums.astype(y.dtype) if config.wire_dtype is None else sums
    return quantization.bits(sums, config.wire_dtype)


def _carried(x: jax.Array, wire_dtype: jnp.dtype | None) -> jax.Array:
    """Rows in which every exchange sends x: with a wire_dtype, float32 words of the sent bytes."""
    if wire_dtype is None:
        return x
    sent = quantization.bits(x, wire_dtype)
    return lax.bitcast_convert_type(sent.reshape(*sent.shape[:-1], -1, 4), jnp.float32)


def _uncarried(rows: jax.Array, x: jax.Array, wire_dtype: jnp.dtype | None) -> Received:
    """What is received of x, of rows that `_carried` has made."""
    if wire_dtype is None:
        return (rows,)
    sent = lax.bitcast_convert_type(rows, jnp.uint8).reshape(*rows.shape[:-1], -1)
    return quantization.parts(sent, x, wire_dtype)


def _experts_or_none(topk_idx: jax.Array, config: Config) -> jax.Array:
    """Choices with -1 wherever they are of no expert."""
    return jnp.where((topk_idx >= 0) & (topk_idx < config.num_experts), topk_idx, -1)


def _narrow(numbers: jax.Array, most: int) -> jax.Array:
    """Integers from -1 to `most`, in 16 bits if they fit: -1 is then above all others."""
    return numbers.astype(jnp.uint16) if most < 2**16 - 1 else numbers


def _union(rows: jax.Array | None, more: jax.Array) -> jax.Array:
    """The rows of both, where at most one of them is not zeros."""
    if rows is None:
        return more
    both = quantization.bits(rows, None) | quantization.bits(more, None)
    return quantization.parts(both, more, None)[0]


def _flat(by_host: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B·T, ...]."""
    return by_host.reshape(-1, *by_host.shape[2:])
