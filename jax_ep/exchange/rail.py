"""Sends rows between ranks on several hosts, for `jax_ep.exchange.two_level`.

There are M hosts with G ranks each. A *rail* is the M ranks, one per host, that have the same
number within their hosts. Rows cross between hosts only along a rail, in M turns. Turn 0 is for the
rank's own host. In turn i, a rank receives the rows of the host i places after its own (dispatch),
or sends sums to it (combine), while kernels inside the host move the rows of another turn.
With host_capacity=C, a rank sends only C rows to each other host: its first C tokens that chose
experts of that host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config
from pallas_kernels.exchange.plan import FEW_TOKENS
from pallas_kernels.formats import PLAIN


class Source(NamedTuple):
    """The host from which tokens come, in one call inside this host; `None`: all hosts."""

    turn: int  # the distance from this host to the source host, modulo M; 0: this host
    host: jax.Array  # [] int32: the number of the source host


@dataclasses.dataclass(frozen=True)
class Rail:
    """This rank and its *counterparts* on the other hosts; sends and selects their rows."""

    config: Config  # of the exchange among all ranks
    num_hosts: int  # M
    ranks_per_host: int  # G
    host: jax.Array  # [] int32: this host's number
    kernels: bool = False  # whether Pallas kernels move rows inside this host
    at_once: bool = False  # whether one call inside this host moves the tokens of all hosts
    # [M, C] int32: the tokens that this rank sends to each host, padded with T; None: all.
    sent_tokens: jax.Array | None = None
    # [G, M, C] int32: the source ranks' indices of the tokens that each rank of this host
    # receives from each host, padded with T.
    received_tokens: jax.Array | None = None

    @classmethod
    def of(cls, num_hosts: int, config: Config) -> Rail:
        """Makes a `Rail` that sends all tokens; `of_tokens` adds the host_capacity."""
        ranks_per_host = lax.axis_size(config.axis_name) // num_hosts
        host = lax.axis_index(config.axis_name) // ranks_per_host
        return cls(config, num_hosts, ranks_per_host, host)

    def of_tokens(self, topk_idx: jax.Array, kernels: bool) -> Rail:
        """Returns a copy of this `Rail` for an exchange of tokens with choices topk_idx [T, K]."""
        num_tokens = topk_idx.shape[0]
        # Each call of a kernel costs a fixed time, so if T is small, one call moves all tokens.
        at_once = kernels and num_tokens <= FEW_TOKENS
        rail = dataclasses.replace(self, kernels=kernels, at_once=at_once)
        if (capacity := self.limit(num_tokens)) is None:
            return rail
        sent_tokens = self._tokens_to_send(topk_idx, capacity)
        received_tokens = xla_exchange.stack_ranks(self._exchange(sent_tokens), self.inside)
        return dataclasses.replace(rail, sent_tokens=sent_tokens, received_tokens=received_tokens)

    def _tokens_to_send(self, topk_idx: jax.Array, capacity: int) -> jax.Array:
        """Returns `sent_tokens`: the first `capacity` tokens that chose experts of each host."""
        num_tokens = topk_idx.shape[0]
        chosen, position = self._positions(topk_idx)
        # Tokens that did not choose a host get position T. The scatter drops all >= `capacity`.
        position = jnp.where(chosen, position, num_tokens)
        tokens = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], position.shape)
        sent_tokens = jnp.full_like(position, num_tokens, shape=(self.num_hosts, capacity))
        return sent_tokens.at[jnp.arange(self.num_hosts), position].set(tokens, mode="drop")

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def inside(self) -> Config:
        """The `Config` of an exchange among this host's ranks, which does not quantize rows."""
        return dataclasses.replace(
            self.config,
            ranks_per_host=self.ranks_per_host,
            num_experts=self.config.num_experts // self.num_hosts,
            wire=PLAIN,
        )

    def limit(self, num_tokens: int) -> int | None:
        """Returns the host_capacity, or None if it drops none of a rank's `num_tokens`."""
        capacity = self.config.host_capacity
        return capacity if capacity is not None and capacity < num_tokens else None

    def kept(self, topk_idx: jax.Array) -> jax.Array:
        """Returns topk_idx [T, K] with -1 in place of each choice that the host_capacity drops."""
        if (capacity := self.limit(topk_idx.shape[0])) is None:
            return topk_idx
        _, position = self._positions(topk_idx)
        host = self._host_of(topk_idx)
        # For each choice [T, K]: how many earlier tokens chose its host. A choice of no expert has
        # the host -1, for which host 0 is read; it is never dropped.
        earlier_tokens = jnp.take_along_axis(position, jnp.maximum(host, 0), axis=1)
        is_dropped = (host >= 0) & (host != self.host) & (earlier_tokens >= capacity)
        return jnp.where(is_dropped, -1, topk_idx)

    def _positions(self, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns two [T, M]: whether token t chose another host m; how many before it did."""
        hosts = jnp.arange(self.num_hosts, dtype=jnp.int32)[None]
        chosen = jnp.any(self._host_of(topk_idx)[:, :, None] == hosts[None], axis=1)
        chosen &= hosts != self.host
        numbers = chosen.astype(jnp.int32)
        return chosen, jnp.cumsum(numbers, axis=0, dtype=jnp.int32) - numbers

    def _host_of(self, topk_idx: jax.Array) -> jax.Array:
        """Returns the host of each choice's expert, [T, K]; -1 for a choice of no expert."""
        valid = (topk_idx >= 0) & (topk_idx < self.config.num_experts)
        return jnp.where(valid, topk_idx // self.inside.num_experts, -1)

    @property
    def _groups(self) -> list[list[int]]:
        """The ranks of each rail, as `axis_index_groups` of a collective."""
        step = self.ranks_per_host
        return [list(range(number, self.num_ranks, step)) for number in range(step)]

    def gather(self, x: jax.Array) -> jax.Array:
        """Gathers x [...] from this rank and its counterparts; returns [M, ...], by host."""
        bits = xla_exchange.pack(x)[None]
        gathered = lax.all_gather(
            bits, self.config.axis_name, axis=0, tiled=True, axis_index_groups=self._groups
        )
        return lax.bitcast_convert_type(gathered, x.dtype)

    def send(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """Sends rows x [T, ...] to this rank's counterparts; returns their rows, [M, T, ...]."""
        # With a host_capacity of C below T, the result is [M, C, ...], padded with `fill`.
        if self.sent_tokens is None:
            return self.gather(x)
        return self._exchange(_picked(x, self.sent_tokens, fill))

    def _exchange(self, x: jax.Array) -> jax.Array:
        """Sends x[h] of x [M, ...] to the counterpart on host h; returns [M, ...], by source."""
        return lax.all_to_all(
            x, self.config.axis_name, 0, 0, tiled=True, axis_index_groups=self._groups
        )

    def _shift(self, x: jax.Array, distance: int) -> jax.Array:
        """Sends x [...] to the host `distance` places after this one; returns what arrives."""
        # A ppermute is used because XLA for GPUs, by default, overlaps it with kernels, but does
        # not overlap an all_gather. It needs the axes in the mesh's order, so ranks are renumbered.
        axes, number_in_mesh = _in_mesh_order(self.config.axis_name)
        sources = np.arange(self.num_ranks)
        receivers = (sources + distance * self.ranks_per_host) % self.num_ranks
        pairs = [
            (int(number_in_mesh[source]), int(number_in_mesh[receiver]))
            for source, receiver in zip(sources, receivers, strict=True)
        ]
        bits = lax.ppermute(xla_exchange.pack(x), axes, pairs)
        return lax.bitcast_convert_type(bits, x.dtype)

    def _by_token(self, part: jax.Array, host: jax.Array | int, like: jax.Array) -> jax.Array:
        """Scatters `part` [C, ...] to the tokens sent to `host`, into zeros shaped like `like`."""
        if self.sent_tokens is None:  # then `part` is [T, ...], by token already
            return part
        return jnp.zeros_like(like).at[self.sent_tokens[host]].set(part, mode="drop")

    def each_host(self, x: jax.Array, add: Callable[[Source | None, jax.Array, Any], Any]) -> Any:
        """Sends rows x [T, ...] to each host; calls `add(source, rows, state)` for each source.

        `state` is the previous call's result, None at first; the last one is returned. The first
        call has own rows; the next host's arrive during it. If `at_once`, one call has all rows.
        """
        if self.at_once:
            return add(None, self.rows(x, self.send(x), None), None)
        rows, state = x, None
        for turn in range(1, self.num_hosts):
            # Sends the rows for the host `turn` places before this one.
            sent = x
            if self.sent_tokens is not None:
                host = (self.host - turn) % self.num_hosts
                sent = _picked(x, self.sent_tokens[host], fill=0)
            arriving = self._shift(sent, -turn)
            state = add(self._source(turn - 1, self.host), rows, state)
            # Without this barrier, XLA sends the rows of all turns first. Only the last of these
            # transfers then overlaps with a kernel.
            if self.kernels:
                x, arriving, state = lax.optimization_barrier((x, arriving, state))
            rows = arriving
        return add(self._source(self.num_hosts - 1, self.host), rows, state)

    def sums_of_hosts(self, sums: Callable[[Source | None], jax.Array]) -> Iterator[jax.Array]:
        """Yields each host's sums [T, ...] for own tokens; `sums` computes those of this host."""
        if not self.at_once:
            yield from self._sums_in_turns(sums)
            return
        own, others = self._split(sums(None))
        returned = self._exchange(others)
        for host in range(self.num_hosts):
            yield jnp.where(self.host == host, own, self._by_token(returned[host], host, own))

    def _sums_in_turns(self, sums: Callable[[Source], jax.Array]) -> Iterator[jax.Array]:
        """Computes sums for one host while the previous host's are sent; for this host last."""
        here = self.host
        shifted: list[jax.Array] = []
        for turn in range(1, self.num_hosts):
            # The barriers make XLA run the turns in order. XLA ignores a barrier whose results are
            # unused, so each turn uses the host number `here` from the previous turn's barrier.
            part, here = lax.optimization_barrier((sums(self._source(turn, here)), here))
            if shifted:
                part, shifted[-1] = lax.optimization_barrier((part, shifted[-1]))
            shifted.append(self._shift(part, turn))
        # The barrier keeps XLA from fusing the computation of `own` with the sum over hosts. That
        # sum waits for the network, so `own` would be computed too late.
        own = lax.optimization_barrier(sums(self._source(0, here)))
        parts = [own]
        for turn, part in enumerate(shifted, 1):
            # The sums in `part` arrived from the host numbered this host - `turn`, modulo M.
            parts.append(self._by_token(part, (self.host - turn) % self.num_hosts, own))
        for host in range(self.num_hosts):
            # parts[turn] came from the host `turn` places before this one; parts[0] is this host's.
            yield lax.select_n((self.host - host) % self.num_hosts, *parts)

    def _source(self, turn: int, here: jax.Array) -> Source:
        return Source(turn, (here + turn) % self.num_hosts)

    def rows(self, own: jax.Array, received: jax.Array, source: Source | None) -> jax.Array:
        """Selects the rows of `source` from this rank's own and from those that `send` returned."""
        # One host's are [T, ...] or [C, ...]. All hosts' are [M·T, ...], in the order of the hosts,
        # or with a host_capacity [T + M·C, ...], this rank's own first.
        if source is None:
            others = received.reshape(-1, *received.shape[2:])
            return others if self.sent_tokens is None else jnp.concatenate([own, others])
        if source.turn == 0:
            return own
        return lax.dynamic_index_in_dim(received, source.host, axis=0, keepdims=False)

    def by_rank(self, entries: jax.Array, source: Source | None) -> jax.Array:
        """Selects the entries of the tokens that `rows` returns on each of this host's G ranks.

        `entries` [N, T, ...] are by source rank. Returns [G, tokens, ...], padded with -1.
        """
        by_host = entries.reshape(self.num_hosts, self.ranks_per_host, *entries.shape[1:])
        if source is None and self.sent_tokens is None:
            return by_host.swapaxes(0, 1).reshape(self.ranks_per_host, -1, *entries.shape[2:])
        if source is None:
            own = lax.dynamic_index_in_dim(by_host, self.host, axis=0, keepdims=False)
            others = [self._received_of(by_host[host], host) for host in range(self.num_hosts)]
            return jnp.concatenate([own, *others], axis=1)
        host_entries = lax.dynamic_index_in_dim(by_host, source.host, axis=0, keepdims=False)
        return host_entries if source.turn == 0 else self._received_of(host_entries, source.host)

    def _received_of(self, entries: jax.Array, host: jax.Array | int) -> jax.Array:
        """Selects, of the entries [G, T, ...] of `host`, those of tokens sent to this host."""
        if self.received_tokens is None:
            return entries
        tokens = self.received_tokens[:, host, :, None]
        return jnp.take_along_axis(entries, tokens, axis=1, mode="fill", fill_value=-1)

    def _split(self, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Splits results in the order of `rows`: of own tokens [T, ...], and of others [M, ...]."""
        if self.sent_tokens is None:
            by_host = part.reshape(self.num_hosts, -1, *part.shape[1:])
            return lax.dynamic_index_in_dim(by_host, self.host, axis=0, keepdims=False), by_host
        num_others = self.sent_tokens.size
        own, others = part[:-num_others], part[-num_others:]
        return own, others.reshape(*self.sent_tokens.shape, *part.shape[1:])


def _picked(x: jax.Array, tokens: jax.Array, fill: int) -> jax.Array:
    """Picks the rows of x [T, ...] at `tokens` [..., C]; index T gives rows of `fill`."""
    # Rows are picked as unsigned integers, which XLA moves unchanged, unlike NaNs. The cast wraps a
    # `fill` of -1 to the integer with the bits of -1.
    bits = xla_exchange.pack(x)
    fill_bits: Any = np.asarray(fill).astype(bits.dtype)[()]
    picked = jnp.take(bits, tokens, axis=0, mode="fill", fill_value=fill_bits)
    return lax.bitcast_convert_type(picked, x.dtype)


def _in_mesh_order(axis_name: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Sorts axes in the order of the enclosing mesh; also returns the number along them by rank."""
    axes_of_mesh = jax.sharding.get_abstract_mesh().axis_names
    order = sorted(range(len(axis_name)), key=lambda i: axes_of_mesh.index(axis_name[i]))
    sizes = [lax.axis_size(name) for name in axis_name]
    rank_by_number = np.arange(np.prod(sizes)).reshape(sizes).transpose(order).reshape(-1)
    # The argsort of a permutation is its inverse.
    return tuple(axis_name[i] for i in order), np.argsort(rank_by_number)
