"""Exchanges rows between ranks on several hosts: over the network once, then inside each host.

The N ranks are on M hosts, G consecutive ranks on each. The M ranks with the same number within
their hosts are a *rail*. Dispatch sends each rank's T rows to the other ranks of its rail, so every
token crosses to a host once, however many of its experts are there. An exchange among the ranks of
that host, by XLA or by the kernels, then forwards the token to the ranks of its experts. Combine
does the reverse: the exchange inside a host sums the rows of each (token, host), and one row per
(token, host) returns along the rail. DeepEP (github.com/deepseek-ai/DeepEP) does the same.

Received rows and counts equal those of an exchange in one level, but for dropped choices.

**Order.** An exchange handles one remote host after the other, so that memory holds the rows of a
few hosts only, and the kernels inside a host overlap with the network. A dispatch begins with the
rows of its own host; a combine ends with the sums for its own host. With few tokens per rank, one
call takes the tokens of all hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config, Received, Rows
from jax_ep.exchange.rail import Rail, Source
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups, count_experts, counts_here
from pallas_kernels.exchange.plan import ROW_BYTES
from pallas_kernels.formats import RowFormat

_FLOAT32 = jnp.dtype(jnp.float32)
# The choices [T, K] of this rank's tokens, and those of its counterparts' tokens, from `Rail.send`.
_Choices = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """The exchange among ranks on `num_hosts` hosts, whose ranks use the kernels if `kernels`."""

    # The public methods are the functions that `jax_ep.exchange.xla` documents.

    num_hosts: int
    kernels: bool

    def dispatch_by_choices(
        self, x: jax.Array, topk_idx: jax.Array, config: Config
    ) -> tuple[Received, Routes, RowGroups]:
        rail = Rail.of(self.num_hosts, config)
        drops_choices = rail.limit(topk_idx.shape[0]) is not None
        kept = rail.kept(topk_idx)  # -1 replaces the choices that the host_capacity drops
        # What this rank sends to all: its choices, their positions and its counts, [2 T·K + E].
        message = xla_exchange.message_of_choices(_experts_or_none(kept, config), config)
        num_words = message.size
        if drops_choices:
            # How many choices of each expert the host_capacity drops, [E], ends the message.
            chosen = count_experts(topk_idx, config.num_experts)
            message = jnp.concatenate([message, chosen - count_experts(kept, config.num_experts)])
        largest = max(config.num_experts, topk_idx.size)  # of the expert ids, positions and counts
        # [G, M, words]: by the source rank's number within its host, then by its host.
        gathered = xla_exchange.stack_ranks(rail.gather(_narrow(message, largest)), rail.inside)
        messages = gathered.swapaxes(0, 1).reshape(rail.num_ranks, -1).astype(jnp.int32)
        routes, groups = xla_exchange.read_messages(messages[:, :num_words], kept, config)
        if drops_choices:
            dropped = counts_here(messages[:, num_words:], config.rank())
            dropped_counts = groups.dropped_counts + jnp.sum(dropped, axis=0, dtype=jnp.int32)
            groups = groups._replace(
                num_dropped=jnp.sum(dropped_counts, dtype=jnp.int32), dropped_counts=dropped_counts
            )
        return self.dispatch_like(x, routes, config), routes, groups

    def dispatch_like(self, x: jax.Array, routes: Routes, config: Config) -> Received:
        words, dtype = _words(x, config.wire)
        rail, exchange = self._select(config, words, routes.topk_idx, dtype)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None

        # Sends the rows of `source` (None: of all hosts, in one call) to the buffer `received`,
        # [R, words] (None: to a new one).
        def add(source: Source | None, rows: jax.Array, received: Any) -> jax.Array:
            if not rail.kernels:
                # The barrier makes XLA move the tokens of one host after the other. Otherwise XLA
                # may hold the gathered tokens of all hosts at once.
                rows, received = lax.optimization_barrier((rows, received))
            # Between the calls of `add`, rows are unsigned words; see `_words`.
            into = None if received is None else (lax.bitcast_convert_type(received, dtype),)
            rows = lax.bitcast_convert_type(rows, dtype)
            routes_here = self._routes(rail, routes, source, choices)
            (received,) = exchange.dispatch_like(rows, routes_here, rail.inside, into)
            return xla_exchange.pack(received)

        received = rail.each_host(words, add)
        return _from_words(received, x, config.wire)

    def combine(
        self, y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
    ) -> jax.Array:
        # If a host has several ranks, they send each other float32 sums; only the total is rounded.
        in_float32 = lax.axis_size(config.axis_name) > self.num_hosts
        rail, exchange, inside = self._select_for_sums(config, y, routes.topk_idx, in_float32)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None
        weights = None if topk_weights is None else (topk_weights, rail.send(topk_weights))

        def sums(source: Source | None) -> jax.Array:
            weights_here = None if weights is None else rail.rows(*weights, source)
            routes_here = self._routes(rail, routes, source, choices)
            return exchange.combine(y, weights_here, routes_here, inside)

        return _sum_of_hosts(rail, sums, y)

    def rank_dispatch(
        self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
    ) -> tuple[Received, RankRoutes, jax.Array | None]:
        words, dtype = _words(x, config.wire)
        list_words = topk_idx.shape[1] * (1 if topk_weights is None else 2)  # choices, weights
        rail, exchange = self._select(config, words, topk_idx, dtype, list_words=list_words)
        choices = self._choices(rail, topk_idx)
        weights = None if topk_weights is None else (topk_weights, rail.send(topk_weights))

        # Adds what `source` (None: all hosts, in one call) sends to `received`, None at first: by
        # source rank [M, G, T, ...], rows as words, choices and any weights.
        def add(source: Source | None, rows: jax.Array, received: Any) -> Any:
            weights_here = None if weights is None else rail.rows(*weights, source)
            (rows,), routes, weights_here = exchange.rank_dispatch(
                lax.bitcast_convert_type(rows, dtype),
                rail.rows(*choices, source),
                weights_here,
                rail.inside,
            )
            parts = [xla_exchange.pack(rows), routes.local_topk_idx]
            if weights_here is not None:
                parts.append(weights_here)
            if source is None:
                return [_by_source_host(part, rail) for part in parts]
            if received is None:
                received = [jnp.zeros_like(p, shape=(rail.num_hosts, *p.shape)) for p in parts]
            return [
                lax.dynamic_update_index_in_dim(whole, part, source.host, axis=0)
                for whole, part in zip(received, parts, strict=True)
            ]

        tokens, local_topk_idx, *weights_or_none = (
            whole.reshape(rail.num_ranks, *whole.shape[2:]) for whole in rail.each_host(words, add)
        )
        received = _from_words(tokens, x, config.wire)
        received_weights = None if weights is None else weights_or_none[0]
        return received, RankRoutes(topk_idx, local_topk_idx), received_weights

    def rank_combine(self, y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
        rail, exchange, inside = self._select_for_sums(config, y, routes.topk_idx)
        choices = self._choices(rail, routes.topk_idx)

        def sums(source: Source | None) -> jax.Array:
            local_topk_idx = rail.by_rank(routes.local_topk_idx, source)
            routes_here = RankRoutes(rail.rows(*choices, source), local_topk_idx)
            return exchange.rank_combine(rail.by_rank(y, source), routes_here, inside)

        return _sum_of_hosts(rail, sums, y)

    def _select_for_sums(
        self, config: Config, y: jax.Array, topk_idx: jax.Array, in_float32: bool = False
    ) -> tuple[Rail, Any, Config]:
        """Returns `_select` for a combine, and the `Config` for inside a host."""
        # If the wire quantizes a host's sums, or if `in_float32`, they are float32 inside the host,
        # so that the sum over the ranks of a host is rounded only once.
        sum_dtype = _FLOAT32 if in_float32 or config.wire.quantized else None
        rail, exchange = self._select(config, y, topk_idx, sum_dtype, sums=True)
        return rail, exchange, dataclasses.replace(rail.inside, sum_dtype=sum_dtype)

    def _select(
        self,
        config: Config,
        rows: jax.Array,
        topk_idx: jax.Array,
        dtype: jnp.dtype | None = None,  # in which rows move inside a host; None: their own
        *,
        list_words: int | None = None,  # 4-byte words of a token's list; None: one for a choice
        sums: bool = False,  # whether the call is a combine
    ) -> tuple[Rail, Any]:
        """Makes the `Rail` of a call; selects the module that moves `rows` inside a host."""
        rail = Rail.of(self.num_hosts, config)
        rows_inside = Rows(
            hidden=rows.shape[-1],
            dtype=dtype or rows.dtype,
            num_ranks=rail.ranks_per_host,
            list_words=list_words or topk_idx.shape[1],
            num_experts=rail.inside.num_experts,
        )
        # On hosts with one rank each, XLA computes sums faster than the kernels.
        xla_is_faster = sums and rail.ranks_per_host == 1
        can_run = self.kernels and rows_inside.unavailable_reason() is None
        rail = rail.of_tokens(topk_idx, kernels=can_run and not xla_is_faster)
        if not rail.kernels:
            return rail, xla_exchange
        from jax_ep.exchange import pallas as pallas_exchange

        return rail, pallas_exchange

    def _choices(self, rail: Rail, topk_idx: jax.Array) -> _Choices:
        """Makes the `_Choices` in which 0 is this host's first expert."""
        narrow = _narrow(_experts_or_none(topk_idx, rail.config), rail.config.num_experts)
        first_expert = rail.host * rail.inside.num_experts
        received = rail.send(narrow, fill=-1).astype(jnp.int32) - first_expert
        return topk_idx - first_expert, received

    def _routes(
        self, rail: Rail, routes: Routes, source: Source | None, choices: _Choices | None
    ) -> Routes:
        """Returns the routes inside this host; kernels need `choices`, the result of `_choices`."""
        rows = rail.by_rank(routes.rows, source)
        if choices is None:
            # XLA's exchange reads only `Routes.rows`; the other fields stay those of all hosts.
            return Routes(routes.topk_idx, rows, routes.counts)
        # The kernels write zeros after an expert's last row. To find that row, they need the
        # counts of the rows from all hosts. Entry g of `counts` is the sum over the ranks, one on
        # each host, that have the number g within their hosts.
        local_counts = lax.dynamic_slice_in_dim(
            routes.counts, rail.host * rail.inside.num_experts, rail.inside.num_experts, axis=1
        )
        by_host = local_counts.reshape(rail.num_hosts, rail.ranks_per_host, -1)
        counts = jnp.sum(by_host, axis=0, dtype=jnp.int32)
        return Routes(rail.rows(*choices, source), rows, counts)


def _sum_of_hosts(
    rail: Rail, sums: Callable[[Source | None], jax.Array], y: jax.Array
) -> jax.Array:
    """Sends the sums [T, H] of each host as y's dtype or the wire's, and adds them in float32."""
    wire = rail.config.wire

    def packed(source: Source | None) -> jax.Array:
        return xla_exchange.pack(sums(source).astype(wire.sum_dtype(y.dtype)), wire)

    total: Any = None
    for bits in rail.sums_of_hosts(packed):
        parts = xla_exchange.unpack(bits, y, wire)
        rows = wire.decode(parts, jnp.float32).astype(jnp.float32)
        total = rows if total is None else total + rows
    return total.astype(y.dtype)


def _by_source_host(part: jax.Array, rail: Rail) -> jax.Array:
    """Reorders what the ranks of this host sent for all hosts, [G, M·T, ...], to [M, G, T, ...]."""
    shape = rail.ranks_per_host, rail.num_hosts, -1, *part.shape[2:]
    return part.reshape(shape).swapaxes(0, 1)


def _words(x: jax.Array, wire: RowFormat) -> tuple[jax.Array, jnp.dtype]:
    """Packs rows x [T, H] as uints; also returns the float dtype in which a host moves them."""
    # XLA may change the payload of a NaN while it moves floats; unsigned words stay as they are.
    bits = xla_exchange.pack(x, wire)
    if not wire.quantized:
        return bits, x.dtype
    # Rows are padded here, since the kernels would otherwise make padded copies of them.
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % ROW_BYTES)))
    words = bits.reshape(*bits.shape[:-1], -1, 4)
    return lax.bitcast_convert_type(words, jnp.uint32), jnp.dtype(jnp.float32)


def _from_words(words: jax.Array, x: jax.Array, wire: RowFormat) -> Received:
    """Unpacks rows that `_words` packed, to x's width and dtype."""
    if wire.quantized:
        words = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
        words = words[..., : wire.row_bytes(x.shape[-1], x.dtype)]
    return xla_exchange.unpack(words, x, wire)


def _experts_or_none(topk_idx: jax.Array, config: Config) -> jax.Array:
    """Replaces ids in topk_idx [T, K] outside [0, num_experts), which name no expert, by -1."""
    return jnp.where((topk_idx >= 0) & (topk_idx < config.num_experts), topk_idx, -1)


def _narrow(numbers: jax.Array, most: int) -> jax.Array:
    """Converts integers in [-1, most] to uint16 if they fit; -1 becomes 65535, no expert's id."""
    return numbers.astype(jnp.uint16) if most < 2**16 - 1 else numbers
