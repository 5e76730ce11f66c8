"""Sends rows between ranks on several hosts, for `jax_ep.exchange.two_level`.

There are M hosts with G ranks each. A *rail* is the M ranks, one per host, that have the same
number within their hosts. Rows cross between hosts only along a rail. An exchange takes M turns,
one for each host; turn 0 is for the rank's own host. In turn i > 0, a rank receives the rows of the
host that is i places after its own host (dispatch), or sends sums to that host (combine). Meanwhile
the kernels inside the host move the rows of another turn.
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

from jax_ep.exchange import quantization
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config
from pallas_kernels.exchange.plan import FEW_TOKENS
from pallas_kernels.formats import PLAIN


class Source(NamedTuple):
    """The host from which the tokens come, for one call of the exchange among this host's ranks.

    In place of a `Source`, `None` means that the tokens come from all hosts.

    Attributes:
      turn: the distance from this host to the source host, modulo M; 0 for this host itself.
      host: [] int32: the source host's number.
    """

    turn: int
    host: jax.Array


@dataclasses.dataclass(frozen=True)
class Rail:
    """The M ranks, one per host, that have the same number within their hosts as this rank.

    The methods send rows between this rank and the others, its *counterparts*, and select the rows
    that came from one host.

    Attributes:
      config: the configuration of the exchange among all ranks.
      num_hosts: M, the number of hosts.
      ranks_per_host: G, the ranks of a host.
      host: [] int32: the number of this host.
      kernels: whether Pallas kernels move rows inside this host.
      at_once: whether one call of the exchange inside this host moves the tokens of all hosts.
      sent_tokens: [M, C] int32, where C is the host_capacity: the indices of the tokens that this
        rank sends to each host, padded with T. None if each host gets all T tokens.
      received_tokens: [G, M, C] int32: the indices, on their source ranks, of the tokens that each
        rank of this host receives from each host, padded with T. None if `sent_tokens` is None.
    """

    config: Config
    num_hosts: int
    ranks_per_host: int
    host: jax.Array
    kernels: bool = False
    at_once: bool = False
    sent_tokens: jax.Array | None = None
    received_tokens: jax.Array | None = None

    @classmethod
    def of(cls, num_hosts: int, config: Config) -> Rail:
        """Makes the `Rail` of this rank, which sends all T tokens of the rank to every host.

        `of_tokens` returns a copy that sends at most `config.host_capacity` tokens to a host.
        """
        ranks_per_host = lax.axis_size(config.axis_name) // num_hosts
        return cls(
            config, num_hosts, ranks_per_host, lax.axis_index(config.axis_name) // ranks_per_host
        )

    def of_tokens(self, topk_idx: jax.Array, kernels: bool) -> Rail:
        """Returns a copy of this `Rail` for an exchange of T tokens with choices topk_idx [T, K].

        `kernels` says whether Pallas kernels move rows inside a host. If so, and if T is small, the
        copy has `at_once` set, since each call of a kernel costs a fixed time. If the host_capacity
        is below T, the copy has `sent_tokens` and `received_tokens`.
        """
        at_once = kernels and topk_idx.shape[0] <= FEW_TOKENS
        rail = dataclasses.replace(self, kernels=kernels, at_once=at_once)
        return rail._with_tokens(topk_idx)

    def _with_tokens(self, topk_idx: jax.Array) -> Rail:
        num_tokens = topk_idx.shape[0]
        if not self.drops(num_tokens):
            return self
        chosen, position = self._positions(topk_idx)
        # A token that chose no expert of a host gets the position T there. `sent_tokens` has only
        # host_capacity positions, fewer than T, so the scatter drops this token.
        position = jnp.where(chosen, position, num_tokens)
        tokens = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], position.shape)
        sent_tokens = jnp.full_like(position, num_tokens, shape=(self.num_hosts, self._capacity))
        sent_tokens = sent_tokens.at[jnp.arange(self.num_hosts), position].set(tokens, mode="drop")
        received_tokens = xla_exchange.stack_ranks(self._exchange(sent_tokens), self.inside)
        return dataclasses.replace(self, sent_tokens=sent_tokens, received_tokens=received_tokens)

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def inside(self) -> Config:
        """The configuration of the exchange among a host's ranks, which never quantizes rows."""
        return dataclasses.replace(
            self.config,
            ranks_per_host=self.ranks_per_host,
            num_experts=self.config.num_experts // self.num_hosts,
            wire=PLAIN,
        )

    @property
    def _capacity(self) -> int:
        assert self.config.host_capacity is not None
        return self.config.host_capacity

    def drops(self, num_tokens: int) -> bool:
        """Returns whether the host_capacity is below `num_tokens`: if so, tokens may be dropped."""
        return self.config.host_capacity is not None and self.config.host_capacity < num_tokens

    def kept(self, topk_idx: jax.Array) -> jax.Array:
        """Returns topk_idx [T, K] with -1 in place of each choice that the host_capacity drops."""
        if not self.drops(topk_idx.shape[0]):
            return topk_idx
        _, position = self._positions(topk_idx)
        host = self._host_of(topk_idx)
        on_host = jnp.take_along_axis(position, jnp.clip(host, 0, self.num_hosts - 1), axis=1)
        past = (host >= 0) & (host != self.host) & (on_host >= self._capacity)
        return jnp.where(past, -1, topk_idx)

    def _positions(self, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns whether each token chose an expert of each host, and the token's position there.

        Both arrays are [T, M], for token t and host m. The first is False if m is this rank's own
        host. The position is the number of earlier tokens that chose an expert of m. A token that
        chose an expert of m is sent to m only if its position is below the host_capacity.
        """
        hosts = jnp.arange(self.num_hosts, dtype=jnp.int32)[None]
        chosen = jnp.any(self._host_of(topk_idx)[:, :, None] == hosts[None], axis=1)
        chosen &= hosts != self.host
        numbers = chosen.astype(jnp.int32)
        return chosen, jnp.cumsum(numbers, axis=0, dtype=jnp.int32) - numbers

    def _host_of(self, topk_idx: jax.Array) -> jax.Array:
        """Returns the host of each choice's expert, [T, K]; -1 for a choice of no expert."""
        valid = (topk_idx >= 0) & (topk_idx < self.config.num_experts)
        return jnp.where(valid, topk_idx // self.inside.num_experts, -1)

    # ---------------------------------------------------------------- transfers between hosts

    @property
    def _groups(self) -> list[list[int]]:
        """The M ranks of each of the G rails, for the `axis_index_groups` of JAX's collectives."""
        return [
            list(range(number, self.num_ranks, self.ranks_per_host))
            for number in range(self.ranks_per_host)
        ]

    def gather(self, x: jax.Array) -> jax.Array:
        """Gathers x [...] from this rank and its counterparts; returns [M, ...], by host."""
        bits = quantization.bits(x)
        bits = lax.all_gather(
            bits[None], self.config.axis_name, axis=0, tiled=True, axis_index_groups=self._groups
        )
        return lax.bitcast_convert_type(bits, x.dtype)

    def send(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """Sends rows x [T, ...] to this rank's counterpart on each host; returns those received.

        The result is [M, T, ...], by source host. With a host_capacity of C below T, each host gets
        at most C of the rows. The result is then [M, C, ...], padded with the value `fill`.
        """
        if self.sent_tokens is None:
            return self.gather(x)
        return self._exchange(_picked(x, self.sent_tokens, fill))

    def _exchange(self, x: jax.Array) -> jax.Array:
        """Sends x[h] of x [M, ...] to the counterpart on host h; returns [M, ...], by source."""
        return lax.all_to_all(
            x, self.config.axis_name, 0, 0, tiled=True, axis_index_groups=self._groups
        )

    def _shift(self, x: jax.Array, distance: int) -> jax.Array:
        """Sends x [...] to the counterpart on the host numbered this host + `distance`, modulo M.

        Returns the x that arrives from the host numbered this host - `distance`, modulo M.
        """
        # A ppermute is used because XLA for GPUs, by default, overlaps it with kernels, but does
        # not overlap an all_gather. It needs the axes in the mesh's order, so ranks are renumbered.
        axes, in_mesh = _in_mesh_order(self.config.axis_name)
        ranks = np.arange(self.num_ranks)
        there = (ranks + distance * self.ranks_per_host) % self.num_ranks
        pairs = [(int(in_mesh[a]), int(in_mesh[b])) for a, b in zip(ranks, there, strict=True)]
        bits = lax.ppermute(quantization.bits(x), axes, pairs)
        return lax.bitcast_convert_type(bits, x.dtype)

    def send_back(self, others: jax.Array, own: jax.Array) -> Iterator[jax.Array]:
        """Sends results, one row for each token, back to the counterparts that sent the tokens.

        Args:
          others: [M, T, ...], or [M, C, ...] with a host_capacity: the results that this rank
            computed for the tokens that came from each of the M hosts.
          own: [T, ...]: the results that this rank computed for its own tokens.

        Yields:
          M arrays [T, ...]. The h-th has the results for this rank's tokens that were computed on
          host h, by the counterpart there. It is `own` if h is this rank's own host.
        """
        returned = self._exchange(others)
        for host in range(self.num_hosts):
            part = self._by_token(returned[host], host, own)
            yield jnp.where(self.host == host, own, part)

    def _by_token(self, part: jax.Array, host: jax.Array | int, like: jax.Array) -> jax.Array:
        """Scatters the results `part` [C, ...] to the tokens that were sent to `host`: [T, ...].

        The results of the other tokens are zero. `like` is an array of the result's shape and
        dtype. If all T tokens were sent (`sent_tokens` is None), returns `part` [T, ...] unchanged.
        """
        if self.sent_tokens is None:
            return part
        return jnp.zeros_like(like).at[self.sent_tokens[host]].set(part, mode="drop")

    def each_host(self, x: jax.Array, add: Callable[[Source | None, jax.Array, Any], Any]) -> Any:
        """Sends rows x [T, ...] to the counterpart on each host; calls `add` for each source host.

        The first call of `add` gets this rank's own rows. While a call handles the rows from one
        host, the rows from the next host arrive. If `at_once` is set, `add` is called only once,
        with the rows from all hosts.

        Args:
          x: [T, ...]: this rank's rows.
          add: called as `add(source, rows, state)`. `source` is the host from which `rows` came;
            None: all hosts. `state` is the result of the previous call; None in the first call.

        Returns:
          The result of the last call of `add`.
        """
        if self.at_once:
            return add(None, self.rows(x, self.send(x), None), None)
        rows, state = x, None
        for turn in range(1, self.num_hosts):
            arriving = self._shift(self._for_host(x, self.host - turn), -turn)
            state = add(self._source(turn - 1, self.host), rows, state)
            # Without this barrier, XLA sends the rows of all turns first. Only the last of these
            # transfers then overlaps with a kernel.
            if self.kernels:
                x, arriving, state = lax.optimization_barrier((x, arriving, state))
            rows = arriving
        return add(self._source(self.num_hosts - 1, self.host), rows, state)

    def _for_host(self, x: jax.Array, host: jax.Array) -> jax.Array:
        """Returns the rows of x [T, ...] that this rank sends to the host numbered `host` modulo M.

        They are [C, ...], padded with zeros, if a host_capacity of C limits them; otherwise x.
        """
        if self.sent_tokens is None:
            return x
        return _picked(x, self.sent_tokens[host % self.num_hosts], fill=0)

    def sums_of_hosts(self, sums: Callable[[Source | None], jax.Array]) -> Iterator[jax.Array]:
        """Computes sums for each host's tokens, and sends them to the counterpart on that host.

        While the sums for one host are sent, the sums for the next host are computed; the sums for
        this host's own tokens come last. If `at_once` is set, one call computes all sums.

        Args:
          sums: called as `sums(source)`; returns the sums for the tokens that came from the host
            `source`; for None, from all hosts.

        Yields:
          M arrays [T, ...]. The h-th has the sums for this rank's tokens that were computed on host
          h, by the counterpart there.
        """
        if self.at_once:
            own, others = self.split([sums(None)])
            yield from self.send_back(others, own)
            return
        here = self.host
        returned: list[jax.Array] = []
        for turn in range(1, self.num_hosts):
            # The barriers make XLA run the turns in order. XLA ignores a barrier whose results are
            # unused, so each turn uses the host number `here` from the previous turn's barrier.
            part, here = lax.optimization_barrier((sums(self._source(turn, here)), here))
            if returned:
                part, returned[-1] = lax.optimization_barrier((part, returned[-1]))
            returned.append(self._shift(part, turn))
        # The barrier keeps XLA from fusing the computation of `own` with the sum over hosts. That
        # sum waits for the network, so `own` would be computed too late.
        own = lax.optimization_barrier(sums(self._source(0, here)))
        parts = [own]
        for turn, part in enumerate(returned, 1):
            # The sums in `part` arrived from the host numbered this host - `turn`, modulo M.
            parts.append(self._by_token(part, (self.host - turn) % self.num_hosts, own))
        for host in range(self.num_hosts):
            yield lax.select_n((self.host - host) % self.num_hosts, *parts)

    def _source(self, turn: int, here: jax.Array) -> Source:
        return Source(turn, (here + turn) % self.num_hosts)

    def rows(self, own: jax.Array, sent: jax.Array, source: Source | None) -> jax.Array:
        """Selects the rows of one source host, from this rank's own rows and the received rows.

        Args:
          own: [T, ...]: this rank's rows.
          sent: [M, T, ...] or [M, C, ...]: the rows that `send` returned for `own`.
          source: the host whose rows to select; None: all hosts.

        Returns:
          [T, ...] or [C, ...] for one host. For all hosts [M·T, ...]; or, with a host_capacity of
          C, this rank's own rows followed by the C rows from each host, [T + M·C, ...].
        """
        if source is None:
            others = sent.reshape(-1, *sent.shape[2:])
            return others if self.sent_tokens is None else jnp.concatenate([own, others])
        if source.turn == 0:
            return own
        return lax.dynamic_index_in_dim(sent, source.host, axis=0, keepdims=False)

    def by_rank(self, by_rank: jax.Array, source: Source | None) -> jax.Array:
        """Selects the entries of one source host from an array with an entry for every token.

        Args:
          by_rank: [N, T, ...], such as routes: entries by source rank and token.
          source: the host whose tokens' entries to select; None: all hosts.

        Returns:
          [G, tokens, ...], where G is the number of ranks per host. Item g belongs to rank g of
          this host: it has the entries of the tokens whose rows `Rail.rows` selects on that rank,
          in the same order. The entries of padding rows are -1.
        """
        by_host = by_rank.reshape(self.num_hosts, self.ranks_per_host, *by_rank.shape[1:])
        if source is None and self.sent_tokens is None:
            return by_host.swapaxes(0, 1).reshape(self.ranks_per_host, -1, *by_rank.shape[2:])
        if source is None:
            own = lax.dynamic_index_in_dim(by_host, self.host, axis=0, keepdims=False)
            others = [self._received_of(by_host[host], host) for host in range(self.num_hosts)]
            return jnp.concatenate([own, *others], axis=1)
        picked = lax.dynamic_index_in_dim(by_host, source.host, axis=0, keepdims=False)
        return picked if source.turn == 0 else self._received_of(picked, source.host)

    def _received_of(self, picked: jax.Array, host: jax.Array | int) -> jax.Array:
        """Selects the entries of the tokens that the ranks of `host` send to this host.

        `picked` [G, T, ...] has an entry for each token of the G ranks of `host`. If a
        host_capacity limits the sent tokens to C, returns [G, C, ...], padded with -1 where a rank
        sends fewer. Otherwise all T tokens are sent, and the result is `picked`.
        """
        if self.received_tokens is None:
            return picked
        tokens = self.received_tokens[:, host, :, None]
        return jnp.take_along_axis(picked, tokens, axis=1, mode="fill", fill_value=-1)

    def split(self, parts: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Splits results into those for this rank's own tokens and those for other hosts' tokens.

        Args:
          parts: the results of the exchange inside this host, one row for each token. If `at_once`
            is set: a single array for the tokens of all hosts, in the order of `Rail.rows`.
            Otherwise: one array for each source host, this host first.

        Returns:
          The results for this rank's own tokens, [T, ...]; and the results for the tokens from each
          host, [M, T, ...], or [M, C, ...] with a host_capacity of C. In the second array, the
          entry of this host is unspecified.
        """
        if not self.at_once:
            by_turn = jnp.stack([jnp.zeros_like(parts[1]), *parts[1:]])
            return parts[0], jnp.roll(by_turn, self.host, axis=0)
        (part,) = parts
        if self.sent_tokens is None:
            by_host = part.reshape(self.num_hosts, -1, *part.shape[1:])
            return lax.dynamic_index_in_dim(by_host, self.host, axis=0, keepdims=False), by_host
        num_others = self.sent_tokens.size
        own, others = part[:-num_others], part[-num_others:]
        return own, others.reshape(*self.sent_tokens.shape, *part.shape[1:])


def _picked(x: jax.Array, tokens: jax.Array, fill: int) -> jax.Array:
    """Picks the rows of x [T, ...] at the indices `tokens` [..., C]; returns [..., C, ...].

    `tokens` may be padded with the index T, for which the result is a row of the value `fill`.
    """
    bits = quantization.bits(x)
    none: Any = np.asarray(fill).astype(bits.dtype)[()]
    picked = jnp.take(bits, tokens, axis=0, mode="fill", fill_value=none)
    return lax.bitcast_convert_type(picked, x.dtype)


def _in_mesh_order(axis_name: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Sorts the ranks' mesh axes in the order of the enclosing `shard_map`'s mesh.

    Returns the sorted axes and an array [N]: for each rank, numbered along `axis_name`, its number
    along the sorted axes.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    order = sorted(range(len(axis_name)), key=lambda i: names.index(axis_name[i]))
    sizes = [lax.axis_size(name) for name in axis_name]
    ranks = np.arange(np.prod(sizes)).reshape(sizes).transpose(order).reshape(-1)
    return tuple(axis_name[i] for i in order), np.argsort(ranks)
