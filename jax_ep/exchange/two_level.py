"""The exchange of ranks on several hosts: over the network once, then inside each host.

The N ranks are on M hosts, G neighbours on each. The ranks with the same number in their hosts are
a *rail*. Dispatch sends each rank's T rows along its rail, so every token crosses to a host once,
however many of its experts are there; then an exchange among the ranks of that host, by XLA or by
the kernels, sends it on. Combine goes the other way: the exchange inside a host sums the rows of
each (token, host), and one row for each returns along the rail. DeepEP
(github.com/deepseek-ai/DeepEP) forwards rows in this way.

Each rank receives (M - 1)·T rows from other hosts in either direction, and the routes of its rail.
With a host_capacity of C it receives (M - 1)·C, those of the tokens that chose experts of its
host. Rows, drops and counts are those of one level, bit for bit, since the exchange inside a host
follows the routes that it is given.

**Rounding of a combine.** The sum over the rows that a token has on one host is taken in float32,
over those of a rank in the order of the choices, then over ranks in rank order. It is rounded once,
to y's dtype or to the wire_dtype, and returned. The sum over hosts is taken in float32, in the
order of the hosts, and rounded to y's dtype. So sums are sent as float32 inside a host, unless the
host has only one rank.

**Order.** Hosts take turns, so that rows of all N ranks are never in memory together, and what
kernels do inside a host overlaps with the network. A dispatch places this host's own rows while the
next host's arrive, and those while the rows of the one after arrive. A combine computes the sums
for one host while those for the one before are sent, and this host's own last. Kernels with few
tokens instead take those of all hosts in one call, once all have arrived. A rank that is alone on
its host sums by XLA.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import quantization
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config, ExchangeInParts, Received
from jax_ep.exchange.rail import Rail, Source
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups, count_experts, counts_here
from jax_ep.exchange.selection import Rows
from pallas_kernels.exchange.plan import ROW_BYTES

_FLOAT32 = jnp.dtype(jnp.float32)


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
    ) -> tuple[Received, Routes, RowGroups]:
        """Computes routes and sends x [T, H] along them, as `Exchange.dispatch` says."""
        rail = Rail.of(self.num_hosts, config)
        kept, inside = rail.kept(topk_idx), rail.inside
        message = xla_exchange.message_of_choices(_experts_or_none(kept, config), config)
        num_words = message.size
        if rail.drops(topk_idx.shape[0]):
            counts = [count_experts(each, config.num_experts) for each in (topk_idx, kept)]
            message = jnp.concatenate([message, counts[0] - counts[1]])
        most = max(config.num_experts, topk_idx.size)
        of_host = xla_exchange.stack_ranks(rail.gather(_narrow(message, most)), inside)
        messages = of_host.swapaxes(0, 1).reshape(rail.num_ranks, -1).astype(jnp.int32)
        routes, groups = xla_exchange.read_messages(messages[:, :num_words], kept, config)
        if rail.drops(topk_idx.shape[0]):
            dropped = counts_here(messages[:, num_words:], config.rank())
            dropped_counts = groups.dropped_counts + jnp.sum(dropped, axis=0, dtype=jnp.int32)
            groups = groups._replace(
                num_dropped=jnp.sum(dropped_counts, dtype=jnp.int32), dropped_counts=dropped_counts
            )
        return self.dispatch_like(x, routes, config), routes, groups

    def dispatch_like(self, x: jax.Array, routes: Routes, config: Config) -> Received:
        """Sends x [T, H] along known routes, as `Exchange.dispatch_like` says."""
        words, dtype = _words(x, config.wire_dtype)
        rail, exchange = self._of_call(config, words, routes.topk_idx, dtype)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None

        def add(source: Source | None, rows: jax.Array, received: Any) -> jax.Array:
            if not rail.kernels:  # one after the other: XLA holds the rows of G ranks for each
                rows, received = lax.optimization_barrier((rows, received))
            into = None if received is None else (lax.bitcast_convert_type(received, dtype),)
            rows = lax.bitcast_convert_type(rows, dtype)
            known = self._routes(rail, routes, source, choices)
            (received,) = exchange.dispatch_like(rows, known, rail.inside, into)
            return quantization.bits(received, None)

        received = rail.each_host(words, add)
        return _from_words(received, x, config.wire_dtype)

    def combine(
        self, y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
    ) -> jax.Array:
        """Sums y [R, H] by token and returns the sums to their owners: `Exchange.combine`."""
        # No rounding before the host's sum is complete.
        several = lax.axis_size(config.axis_name) > self.num_hosts
        sum_dtype = _FLOAT32 if several or config.wire_dtype is not None else None
        rail, exchange = self._of_call(config, y, routes.topk_idx, sum_dtype, sums=True)
        inside = dataclasses.replace(rail.inside, sum_dtype=sum_dtype)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None
        weights = None if topk_weights is None else (topk_weights, rail.send(topk_weights))

        def sums(source: Source | None) -> jax.Array:
            theirs = None if weights is None else rail.rows(*weights, source)
            known = self._routes(rail, routes, source, choices)
            return _on_the_wire(exchange.combine(y, theirs, known, inside), y, config)

        return _add(rail.sums_of_hosts(sums), y, config.wire_dtype)

    def combine_grad(
        self, g: jax.Array, topk_weights: jax.Array, y: jax.Array, routes: Routes, config: Config
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the gradients of a weighted combine, as `Exchange.combine_grad` says.

        Rows received in a wire_dtype are converted to g's dtype before they are sent on inside a
        host.
        """
        words, _ = _words(g, config.wire_dtype)
        rail, exchange = self._of_call(config, y, routes.topk_idx)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None
        weights = rail.send(topk_weights)

        def add(source: Source | None, rows: jax.Array, grads: Any) -> Any:
            dy, dweights_so_far = grads or (None, [])
            if not rail.kernels:  # one after the other: XLA holds an array of dy's size for each
                rows, dy = lax.optimization_barrier((rows, dy))
            into = None if dy is None else lax.bitcast_convert_type(dy, y.dtype)
            parts = _from_words(rows, g, config.wire_dtype)
            dy, dweights = exchange.combine_grad(
                quantization.dequantized(parts, g.dtype),
                rail.rows(topk_weights, weights, source),
                y,
                self._routes(rail, routes, source, choices),
                rail.inside,
                into,
            )
            return quantization.bits(dy, None), [*dweights_so_far, dweights]

        dy, dweights = rail.each_host(words, add)
        dy = lax.bitcast_convert_type(dy, y.dtype)
        own, others = rail.split(dweights)
        # At most one host's term is not zero: the sum is exact.
        return dy, functools.reduce(jnp.add, rail.send_back(others, own))

    def rank_dispatch(
        self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
    ) -> tuple[Received, RankRoutes, jax.Array | None]:
        """Sends x [T, H] to the rank-major layout, as `Exchange.rank_dispatch` says."""
        words, dtype = _words(x, config.wire_dtype)
        list_words = topk_idx.shape[1] * (1 if topk_weights is None else 2)
        rail, exchange = self._of_call(config, words, topk_idx, dtype, list_words=list_words)
        choices = self._choices(rail, topk_idx)
        weights = None if topk_weights is None else (topk_weights, rail.send(topk_weights))

        def add(source: Source | None, rows: jax.Array, received: Any) -> Any:
            theirs = None if weights is None else rail.rows(*weights, source)
            (rows,), lists, theirs = exchange.rank_dispatch(
                lax.bitcast_convert_type(rows, dtype),
                rail.rows(*choices, source),
                theirs,
                rail.inside,
            )
            rows = quantization.bits(rows, None)
            parts = [rows, lists.local_topk_idx, *([] if theirs is None else [theirs])]
            if source is None:  # [G, M·T, ...] -> [M, G, T, ...]
                shape = rail.ranks_per_host, rail.num_hosts, -1
                return [part.reshape(*shape, *part.shape[2:]).swapaxes(0, 1) for part in parts]
            return [
                _place(whole, part, source.host, rail.num_hosts)
                for whole, part in zip(received or [None] * len(parts), parts, strict=True)
            ]

        tokens, *lists = (  # [M, G, T, ...] -> [N, T, ...]
            whole.reshape(rail.num_ranks, *whole.shape[2:]) for whole in rail.each_host(words, add)
        )
        received = _from_words(tokens, x, config.wire_dtype)
        return received, RankRoutes(topk_idx, lists[0]), lists[1] if lists[1:] else None

    def rank_combine(self, y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
        """Returns sums y [N, T, H] to their owners and adds them: `Exchange.rank_combine`."""
        sum_dtype = None if config.wire_dtype is None else _FLOAT32
        rail, exchange = self._of_call(config, y, routes.topk_idx, sum_dtype, sums=True)
        inside = dataclasses.replace(rail.inside, sum_dtype=sum_dtype)
        choices = self._choices(rail, routes.topk_idx)

        def sums(source: Source | None) -> jax.Array:
            lists = rail.by_rank(routes.local_topk_idx, source)
            known = RankRoutes(rail.rows(*choices, source), lists)
            part = exchange.rank_combine(rail.by_rank(y, source), known, inside)
            return _on_the_wire(part, y, config)

        return _add(rail.sums_of_hosts(sums), y, config.wire_dtype)

    def _of_call(
        self,
        config: Config,
        rows: jax.Array,
        topk_idx: jax.Array,
        dtype: jnp.dtype | None = None,
        *,
        list_words: int | None = None,
        sums: bool = False,
    ) -> tuple[Rail, ExchangeInParts]:
        """Returns the rail for tokens of the choices [T, K], and the exchange inside a host.

        Args:
          config: that of the exchange among all ranks.
          rows: rows that the exchange inside a host moves.
          topk_idx: [T, K] int32.
          dtype: in which it carries the rows; None: their own.
          list_words: words that describe a token's choices; None: K.
          sums: whether it only sums rows, which XLA does faster, in one kernel, for a rank alone on
            its host.
        """
        rail = Rail.of(self.num_hosts, config)
        inside = Rows(
            hidden=rows.shape[-1],
            dtype=dtype or rows.dtype,
            num_ranks=rail.ranks_per_host,
            list_words=list_words or topk_idx.shape[1],
            num_experts=rail.inside.num_experts,
        )
        alone = sums and rail.ranks_per_host == 1
        kernels = self.kernels and not alone and inside.unavailable_reason() is None
        rail = rail.of_tokens(topk_idx, kernels)
        if not rail.kernels:
            return rail, xla_exchange
        from jax_ep.exchange import pallas as pallas_exchange

        return rail, pallas_exchange

    def _choices(self, rail: Rail, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns own choices [T, K] and those sent along the rail, as experts of this host."""
        narrow = _narrow(_experts_or_none(topk_idx, rail.config), rail.config.num_experts)
        first = rail.host * rail.inside.num_experts
        sent = rail.send(narrow, fill=-1).astype(jnp.int32) - first
        return topk_idx - first, sent

    def _routes(
        self,
        rail: Rail,
        routes: Routes,
        source: Source | None,
        choices: tuple[jax.Array, jax.Array] | None,
    ) -> Routes:
        """Returns the routes inside this host of the tokens of a source.

        `choices` are those of `_choices`, which kernels need; None for XLA's exchange.
        """
        rows = rail.by_rank(routes.rows, source)
        if choices is None:  # XLA's exchange follows the rows alone
            return Routes(routes.topk_idx, rows, routes.counts)
        # The kernels write zeros where no row is sent, which they know from the sums of counts.
        mine = lax.dynamic_slice_in_dim(
            routes.counts, rail.host * rail.inside.num_experts, rail.inside.num_experts, axis=1
        )
        counts = jnp.sum(
            mine.reshape(rail.num_hosts, rail.ranks_per_host, -1), axis=0, dtype=jnp.int32
        )
        return Routes(rail.rows(*choices, source), rows, counts)


def _add(returned: Iterable[jax.Array], y: jax.Array, wire_dtype: jnp.dtype | None) -> jax.Array:
    """Adds what each host returned, bits of [T, ...], in float32; returns the sum in y's dtype."""
    total: Any = None
    for bits in returned:
        parts = quantization.parts(bits, y, wire_dtype)
        rows = quantization.dequantized(parts, jnp.float32).astype(jnp.float32)
        total = rows if total is None else total + rows
    return total.astype(y.dtype)


def _on_the_wire(sums: jax.Array, y: jax.Array, config: Config) -> jax.Array:
    """Rounds sums [T, H] to y's dtype or the wire_dtype; returns their bits."""
    sums = sums.astype(y.dtype) if config.wire_dtype is None else sums
    return quantization.bits(sums, config.wire_dtype)


def _place(
    whole: jax.Array | None, part: jax.Array, index: jax.Array | int, count: int
) -> jax.Array:
    """Writes `part` [...] to its place in `whole` [count, ...]; None stands for zeros."""
    if whole is None:
        whole = jnp.full_like(part, 0, shape=(count, *part.shape))
    return lax.dynamic_update_index_in_dim(whole, part, index, axis=0)


def _words(x: jax.Array, wire_dtype: jnp.dtype | None) -> tuple[jax.Array, jnp.dtype]:
    """Returns rows as they are sent, as unsigned words, and the dtype in which kernels carry these.

    XLA may convert floats to another dtype, in loops too, and so change the payload of a NaN. It
    does not convert words.
    """
    bits = quantization.bits(x, wire_dtype)
    if wire_dtype is None:
        return bits, x.dtype
    # Whole lines, of which kernels need no padded copies.
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % ROW_BYTES)))
    words = bits.reshape(*bits.shape[:-1], -1, 4)
    return lax.bitcast_convert_type(words, jnp.uint32), jnp.dtype(jnp.float32)


def _from_words(words: jax.Array, x: jax.Array, wire_dtype: jnp.dtype | None) -> Received:
    """Unpacks the words that `_words` made of x: `Received`."""
    if wire_dtype is not None:
        words = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
        words = words[..., : quantization.row_bytes(x.shape[-1], x.dtype, wire_dtype)]
    return quantization.parts(words, x, wire_dtype)


def _experts_or_none(topk_idx: jax.Array, config: Config) -> jax.Array:
    """Replaces choices of no expert by -1."""
    return jnp.where((topk_idx >= 0) & (topk_idx < config.num_experts), topk_idx, -1)


def _narrow(numbers: jax.Array, most: int) -> jax.Array:
    """Converts integers from -1 to `most` to 16 bits if they fit; -1 is then above all others."""
    return numbers.astype(jnp.uint16) if most < 2**16 - 1 else numbers
