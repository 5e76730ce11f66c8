"""Sends rows between ranks on several hosts, for `jax_ep.exchange.two_level`.

A *rail* is the set of ranks with the same number in their hosts; ranks of different hosts exchange
rows only along a rail. Hosts take turns. In turn i, a rank receives the rows of the host that is i
places after its own (dispatch), or sends sums to it (combine); meanwhile the kernels inside the
host move the rows of another turn. With a `host_capacity` of C, a rank sends C rows to each other
host instead of all T: the tokens that chose experts there, in order.
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
    """The host whose tokens an exchange inside this host moves; `None` means all hosts.

    Attributes:
      turn: how many places after this host it is; 0 for this host itself.
      host: [] int32: its number.
    """

    turn: int
    host: jax.Array


@dataclasses.dataclass(frozen=True)
class Rail:
    """The rail of this rank, and what is sent along it.

    Attributes:
      config: the configuration of the exchange among all ranks.
      num_hosts: M.
      ranks_per_host: G, the ranks of a host.
      host: [] int32: the number of this host.
      kernels: whether the kernels move rows inside this host.
      at_once: whether an exchange inside this host takes the tokens of all hosts in one call.
      sent_tokens: [M, C] int32: the tokens that this rank sends to each host, padded with T; None
        where each host gets all T tokens.
      received_tokens: [G, M, C] int32: the tokens that each rank of this host receives from each
        host, padded with T; None where `sent_tokens` is None.
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
        """Makes a rail on which each host gets all T rows."""
        ranks_per_host = lax.axis_size(config.axis_name) // num_hosts
        return cls(
            config, num_hosts, ranks_per_host, lax.axis_index(config.axis_name) // ranks_per_host
        )

    def of_tokens(self, topk_idx: jax.Array, kernels: bool) -> Rail:
        """Returns this rail with the tokens that it sends for the choices [T, K].

        `kernels` says whether kernels run inside a host. If they do and T is small, one call takes
        the tokens of all hosts, since each call costs a fixed time.
        """
        at_once = kernels and topk_idx.shape[0] <= FEW_TOKENS
        rail = dataclasses.replace(self, kernels=kernels, at_once=at_once)
        return rail._with_tokens(topk_idx)

    def _with_tokens(self, topk_idx: jax.Array) -> Rail:
        num_tokens = topk_idx.shape[0]
        if not self.drops(num_tokens):
            return self
        chosen, place = self._places(topk_idx)
        place = jnp.where(chosen, place, num_tokens)  # this index is out of bounds, so dropped
        tokens = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], place.shape)
        sent_tokens = jnp.full_like(place, num_tokens, shape=(self.num_hosts, self._capacity))
        sent_tokens = sent_tokens.at[jnp.arange(self.num_hosts), place].set(tokens, mode="drop")
        received_tokens = xla_exchange.stack_ranks(self._exchange(sent_tokens), self.inside)
        return dataclasses.replace(self, sent_tokens=sent_tokens, received_tokens=received_tokens)

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def inside(self) -> Config:
        """The configuration of the exchange inside a host; the wire there is plain."""
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
        """Returns whether a host may get fewer than all `num_tokens` tokens of a rank."""
        return self.config.host_capacity is not None and self.config.host_capacity < num_tokens

    def kept(self, topk_idx: jax.Array) -> jax.Array:
        """Replaces the choices [T, K] that exceed the host_capacity by -1."""
        if not self.drops(topk_idx.shape[0]):
            return topk_idx
        _, place = self._places(topk_idx)
        host = self._host_of(topk_idx)
        sent = jnp.take_along_axis(place, jnp.clip(host, 0, self.num_hosts - 1), axis=1)
        past = (host >= 0) & (host != self.host) & (sent >= self._capacity)
        return jnp.where(past, -1, topk_idx)

    def _places(self, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns whether each token chose each other host, and how many earlier tokens chose it.

        Both are [T, M].
        """
        hosts = jnp.arange(self.num_hosts, dtype=jnp.int32)[None]
        chosen = jnp.any(self._host_of(topk_idx)[:, :, None] == hosts[None], axis=1)
        chosen &= hosts != self.host
        numbers = chosen.astype(jnp.int32)
        return chosen, jnp.cumsum(numbers, axis=0, dtype=jnp.int32) - numbers

    def _host_of(self, topk_idx: jax.Array) -> jax.Array:
        """Returns the host of each choice, [T, K]; -1 for a choice of no expert."""
        valid = (topk_idx >= 0) & (topk_idx < self.config.num_experts)
        return jnp.where(valid, topk_idx // self.inside.num_experts, -1)

    # ----------------------------------------------------------------------- over the network

    @property
    def _groups(self) -> list[list[int]]:
        """The ranks of each rail, as `axis_index_groups` for JAX's collectives."""
        return [
            list(range(number, self.num_ranks, self.ranks_per_host))
            for number in range(self.ranks_per_host)
        ]

    def gather(self, x: jax.Array) -> jax.Array:
        """Gathers x [...] from the rail's rank on every host; returns [M, ...], by host."""
        bits = quantization.bits(x)
        bits = lax.all_gather(
            bits[None], self.config.axis_name, axis=0, tiled=True, axis_index_groups=self._groups
        )
        return lax.bitcast_convert_type(bits, x.dtype)

    def send(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """Sends x [T, ...] along the rail; returns what was received, by source host, [M, T, ...].

        With a host_capacity of C returns [M, C, ...], padded with `fill`.
        """
        if self.sent_tokens is None:
            return self.gather(x)
        return self._exchange(_picked(x, self.sent_tokens, fill))

    def _exchange(self, x: jax.Array) -> jax.Array:
        """Sends x [M, ...] by destination host; returns [M, ...] by source host."""
        return lax.all_to_all(
            x, self.config.axis_name, 0, 0, tiled=True, axis_index_groups=self._groups
        )

    def _shift(self, x: jax.Array, distance: int) -> jax.Array:
        """Sends x [...] to the host that is `distance` places after this one."""
        # XLA's default schedule for GPUs overlaps permutations, but not gathers, with kernels. A
        # permutation takes the axes in the mesh's order only.
        axes, in_mesh = _in_mesh_order(self.config.axis_name)
        ranks = np.arange(self.num_ranks)
        there = (ranks + distance * self.ranks_per_host) % self.num_ranks
        pairs = [(int(in_mesh[a]), int(in_mesh[b])) for a, b in zip(ranks, there, strict=True)]
        bits = lax.ppermute(quantization.bits(x), axes, pairs)
        return lax.bitcast_convert_type(bits, x.dtype)

    def send_back(self, others: jax.Array, own: jax.Array) -> Iterator[jax.Array]:
        """Sends back the results for received rows; yields, by host, results for own tokens.

        Each host's results for this rank's tokens are [T, ...].

        Args:
          others: [M, T, ...], or [M, C, ...] with a host_capacity: results by the rows' host.
          own: [T, ...]: this host's results for its own tokens.
        """
        returned = self._exchange(others)
        for host in range(self.num_hosts):
            part = self._by_token(returned[host], host, own)
            yield jnp.where(self.host == host, own, part)

    def _by_token(self, part: jax.Array, host: jax.Array | int, like: jax.Array) -> jax.Array:
        """Scatters the [C, ...] results that a host returned to their tokens; returns [T, ...]."""
        if self.sent_tokens is None:
            return part
        return jnp.zeros_like(like).at[self.sent_tokens[host]].set(part, mode="drop")

    # --------------------------------------------------------------------------- host by host

    def each_host(self, x: jax.Array, add: Callable[[Source | None, jax.Array, Any], Any]) -> Any:
        """Sends rows x [T, ...] along the rail; calls `add(source, rows, state)` for each host.

        Begins with this host's own rows. `add` returns the new state, which is None at first and
        which `each_host` returns at the end. With `at_once`, calls `add` once, for all hosts.
        """
        if self.at_once:
            return add(None, self.rows(x, self.send(x), None), None)
        rows, state = x, None
        for turn in range(1, self.num_hosts):
            arriving = self._shift(self._for_host(x, self.host - turn), -turn)
            state = add(self._source(turn - 1, self.host), rows, state)
            # Without this barrier XLA sends all rows first, and only the last kernel overlaps.
            if self.kernels:
                x, arriving, state = lax.optimization_barrier((x, arriving, state))
            rows = arriving
        return add(self._source(self.num_hosts - 1, self.host), rows, state)

    def _for_host(self, x: jax.Array, host: jax.Array) -> jax.Array:
        """Picks the rows of x [T, ...] to send to host `host` % M: all, or [C, ...]."""
        if self.sent_tokens is None:
            return x
        return _picked(x, self.sent_tokens[host % self.num_hosts], fill=0)

    def sums_of_hosts(self, sums: Callable[[Source | None], jax.Array]) -> Iterator[jax.Array]:
        """Computes `sums(source)` for each host and sends them to it; yields [T, ...] by host.

        While the sums for one host are sent, the sums for the next host are computed; this host's
        own sums are computed last. With `at_once`, one call computes all sums.
        """
        if self.at_once:
            own, others = self.split([sums(None)])
            yield from self.send_back(others, own)
            return
        here = self.host
        returned: list[jax.Array] = []
        for turn in range(1, self.num_hosts):
            # The barriers run the turns in order. XLA drops operands of a barrier whose results are
            # not used, so `here` is taken from the barrier.
            part, here = lax.optimization_barrier((sums(self._source(turn, here)), here))
            if returned:
                part, returned[-1] = lax.optimization_barrier((part, returned[-1]))
            returned.append(self._shift(part, turn))
        # The barrier keeps XLA from fusing these sums with the sum over hosts, which has to wait
        # for the network.
        own = lax.optimization_barrier(sums(self._source(0, here)))
        parts = [own]
        for turn, part in enumerate(returned, 1):  # `part` is from the host `turn` places earlier
            parts.append(self._by_token(part, (self.host - turn) % self.num_hosts, own))
        for host in range(self.num_hosts):
            yield lax.select_n((self.host - host) % self.num_hosts, *parts)

    def _source(self, turn: int, here: jax.Array) -> Source:
        return Source(turn, (here + turn) % self.num_hosts)

    def rows(self, own: jax.Array, sent: jax.Array, source: Source | None) -> jax.Array:
        """Selects the rows of a source, [T, ...], from `own` and the result `sent` of `send`.

        For all hosts returns [M·T, ...]; with a host_capacity of C, this host's own rows and then
        the rows of each host, [T + M·C, ...].
        """
        if source is None:
            others = sent.reshape(-1, *sent.shape[2:])
            return others if self.sent_tokens is None else jnp.concatenate([own, others])
        if source.turn == 0:
            return own
        return lax.dynamic_index_in_dim(sent, source.host, axis=0, keepdims=False)

    def by_rank(self, by_rank: jax.Array, source: Source | None) -> jax.Array:
        """Selects the entries of a source's tokens from the entries of all ranks, [N, T, K].

        Returns [G, tokens, K], by the number that a token's rank has in its host. The tokens are
        those that `rows` selects, in the same order. Entries of padding are -1.
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
        """Selects, from a host's entries [G, T, K], those of the tokens that it sends here."""
        if self.received_tokens is None:
            return picked
        tokens = self.received_tokens[:, host, :, None]
        return jnp.take_along_axis(picked, tokens, axis=1, mode="fill", fill_value=-1)

    def split(self, parts: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Splits results into those for this host's own tokens and those for other hosts' tokens.

        `parts` has the results of each turn, or with `at_once` one entry for all hosts. Returns
        [T, ...], and [M, T, ...] by host, or [M, C, ...] with a host_capacity of C.
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
    """Picks the rows of x [T, ...] that `tokens` [..., C] names; token T gives a row of `fill`."""
    bits = quantization.bits(x)
    none: Any = np.asarray(fill).astype(bits.dtype)[()]
    picked = jnp.take(bits, tokens, axis=0, mode="fill", fill_value=none)
    return lax.bitcast_convert_type(picked, x.dtype)


def _in_mesh_order(axis_name: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Sorts axes in the order of the enclosing `shard_map`'s mesh.

    Returns the sorted axes, and for each rank, numbered along `axis_name`, its number along the
    sorted axes, [N].
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    order = sorted(range(len(axis_name)), key=lambda i: names.index(axis_name[i]))
    sizes = [lax.axis_size(name) for name in axis_name]
    ranks = np.arange(np.prod(sizes)).reshape(sizes).transpose(order).reshape(-1)
    return tuple(axis_name[i] for i in order), np.argsort(ranks)
