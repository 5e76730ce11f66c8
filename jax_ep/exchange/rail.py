"""Sends rows between ranks on several hosts, for `jax_ep.exchange.two_level`.

A rank exchanges with the ranks of its own number on the other hosts, its *rail*. With a
`host_capacity` of C it sends C rows to each of them instead of all T: the tokens that chose experts
there, in order, each in a *slot*.

What a rank receives over its rail are its *arrivals*, [A, ...]: one for each host in order, its own
included, as XLA's all-gather and all-to-all return them. Two hosts that swap have one arrival, the
other host's.
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


class Source(NamedTuple):
    """A host whose tokens an exchange inside this host moves; None in its place is all hosts.

    Attributes:
      host: [] int32, or an int: the number of that host.
      own: whether it is this host.
    """

    host: jax.Array | int
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Rail:
    """The ranks with this rank's number, one on each host, and what is sent between them.

    Attributes:
      config: the configuration of the exchange among all ranks.
      num_hosts: M.
      group_size: G, the ranks of a host.
      host: [] int32: the number of this host.
      kernels: whether the kernels move rows inside this host.
      at_once: whether an exchange inside this host takes the tokens of all hosts in one call.
      slots: [A, C] int32, by destination host: the token that this rank sends in each slot, T for
        an empty slot; None where each host gets all T tokens. A is `num_arrivals`.
      slots_here: [G, A, C] int32, by source host: the tokens that each rank of this host receives
        in its slots, T for an empty slot; None where `slots` is None.
    """

    config: Config
    num_hosts: int
    group_size: int
    host: jax.Array
    kernels: bool = False
    at_once: bool = False
    slots: jax.Array | None = None
    slots_here: jax.Array | None = None

    @classmethod
    def of(cls, num_hosts: int, config: Config) -> Rail:
        """Makes a rail on which each host gets all T rows."""
        group_size = lax.axis_size(config.axis_name) // num_hosts
        return cls(config, num_hosts, group_size, lax.axis_index(config.axis_name) // group_size)

    def of_tokens(self, topk_idx: jax.Array, kernels: bool) -> Rail:
        """Returns this rail with slots for the choices [T, K], none past the host_capacity.

        `kernels` says that kernels run inside a host. With few tokens they take those of all hosts
        in one call, since each call costs a fixed time.
        """
        at_once = kernels and topk_idx.shape[0] <= FEW_TOKENS
        rail = dataclasses.replace(self, kernels=kernels, at_once=at_once)
        return rail._with_slots(topk_idx)

    def _with_slots(self, topk_idx: jax.Array) -> Rail:
        num_tokens = topk_idx.shape[0]
        if not self.drops(num_tokens):
            return self
        chosen, place = self._places(topk_idx)
        place = jnp.where(chosen, place, num_tokens)  # past every slot
        tokens = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], place.shape)
        slots = jnp.full_like(place, num_tokens, shape=(self.num_hosts, self._capacity))
        slots = slots.at[jnp.arange(self.num_hosts), place].set(tokens, mode="drop")
        if self.swaps:
            slots = lax.dynamic_slice_in_dim(slots, 1 - self.host, 1, axis=0)
        slots_here = xla_exchange.stack_ranks(self._swap(slots), self.inside)
        return dataclasses.replace(self, slots=slots, slots_here=slots_here)

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.group_size

    @property
    def swaps(self) -> bool:
        """Whether two hosts swap rows, so that this host's own are not among the arrivals."""
        return self.num_hosts == 2 and not self.at_once

    @property
    def num_arrivals(self) -> int:
        return 1 if self.swaps else self.num_hosts

    def arrival(self, source: Source) -> jax.Array | int:
        """Returns the index of what a host sent among the arrivals."""
        return 0 if self.swaps else source.host

    @property
    def inside(self) -> Config:
        """The configuration of the exchange inside a host, which has no wire_dtype."""
        return dataclasses.replace(
            self.config,
            group_size=self.group_size,
            num_experts=self.config.num_experts // self.num_hosts,
            wire_dtype=None,
        )

    @property
    def _capacity(self) -> int:
        assert self.config.host_capacity is not None
        return self.config.host_capacity

    def drops(self, num_tokens: int) -> bool:
        """Returns whether a host may get fewer than all `num_tokens` tokens of a rank."""
        return self.config.host_capacity is not None and self.config.host_capacity < num_tokens

    def kept(self, topk_idx: jax.Array) -> jax.Array:
        """Replaces those of the choices [T, K] that are past the host_capacity by -1."""
        if not self.drops(topk_idx.shape[0]):
            return topk_idx
        _, place = self._places(topk_idx)
        host = self._host_of(topk_idx)
        sent = jnp.take_along_axis(place, jnp.clip(host, 0, self.num_hosts - 1), axis=1)
        past = (host >= 0) & (host != self.host) & (sent >= self._capacity)
        return jnp.where(past, -1, topk_idx)

    def _places(self, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns which other hosts each token chose, and how many earlier tokens did: [T, M]."""
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
        """The ranks of every rail."""
        return [
            list(range(number, self.num_ranks, self.group_size))
            for number in range(self.group_size)
        ]

    def gather(self, x: jax.Array) -> jax.Array:
        """Gathers x [...] of every host of the rail: [M, ...], in their order."""
        bits = quantization.bits(x, None)
        bits = lax.all_gather(
            bits[None], self.config.axis_name, axis=0, tiled=True, axis_index_groups=self._groups
        )
        return lax.bitcast_convert_type(bits, x.dtype)

    def send(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """Sends x [T, ...] along the rail; returns the arrivals: [A, T, ...].

        With slots they are [A, C, ...], and slots of no token hold `fill`.
        """
        if self.slots is None:
            return self._swap(x[None]) if self.swaps else self.gather(x)
        bits = quantization.bits(x, None)
        none: Any = np.asarray(fill).astype(bits.dtype)[()]
        sent = jnp.take(bits, self.slots, axis=0, mode="fill", fill_value=none)
        return lax.bitcast_convert_type(self._swap(sent), x.dtype)

    def _swap(self, x: jax.Array) -> jax.Array:
        """Sends x [A, ...] by destination host; returns [A, ...] by source host."""
        if not self.swaps:
            return lax.all_to_all(
                x, self.config.axis_name, 0, 0, tiled=True, axis_index_groups=self._groups
            )
        # NCCL gathers few rows in less time than it permutes them. And JAX numbers the ranks of a
        # permutation by the mesh's axes, in their order.
        if x.shape[1] <= FEW_TOKENS or not _in_mesh_order(self.config.axis_name):
            both = self.gather(x[0])
            return lax.dynamic_slice_in_dim(both, 1 - self.host, 1, axis=0)
        ranks = range(self.num_ranks)
        there = [(rank, (rank + self.group_size) % self.num_ranks) for rank in ranks]
        bits = lax.ppermute(quantization.bits(x, None), self.config.axis_name, there)
        return lax.bitcast_convert_type(bits, x.dtype)

    def send_back(self, others: jax.Array, own: jax.Array) -> Iterator[jax.Array]:
        """Sends results for rows of `send` back to their owners: [T, ...] of each host, in order.

        Args:
          others: [A, T, ...], or [A, C, ...] in slots.
          own: [T, ...], of this host itself.
        """
        returned = self._swap(others)
        for host in range(self.num_hosts):
            arrival = self.arrival(Source(host))
            part = returned[arrival]
            if self.slots is not None:
                part = jnp.zeros_like(own).at[self.slots[arrival]].set(part, mode="drop")
            yield jnp.where(self.host == host, own, part)

    # --------------------------------------------------------------------------- host by host

    def each_host(self, add: Callable[[Source | None, Any], Any]) -> Any:
        """Calls `add(source, state)` for each host, this one first; returns the last state.

        The state is what `add` returned for the host before, None at first. With `at_once`,
        `add(None, None)` is called once, for all hosts.
        """
        if self.at_once:
            return add(None, None)
        state = add(Source(self.host, own=True), None)
        return self._loop(1, lambda i, s: add(self._after(i), s), state)

    def sums_of_hosts(self, sums: Callable[[Source | None], jax.Array]) -> Iterator[jax.Array]:
        """Sends the sums of each source back to it: [T, ...] of every host, in their order.

        This host's own sums are computed last, while the others are sent. With `at_once`, all are
        computed in one call.
        """
        if self.at_once:
            own, others = self.split(sums(None))
            return self.send_back(others, own)

        def add(i: Any, others: Any) -> jax.Array:
            source = self._after(i)
            return place(others, sums(source), self.arrival(source), self.num_arrivals)

        others = self._loop(2, add, add(1, None))
        _, host = lax.optimization_barrier((others, self.host))
        # Not one kernel with the sum over hosts, which waits for the network.
        return self.send_back(others, lax.optimization_barrier(sums(Source(host, own=True))))

    def _loop(self, first: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """Applies `step(i, state)` for i from `first` to M - 1.

        One step is called without a loop, so that XLA can schedule it among what is around it.
        """
        if first == self.num_hosts - 1:
            return step(first, state)
        return lax.fori_loop(first, self.num_hosts, step, state)

    def _after(self, i: Any) -> Source:
        """Returns the host that is i after this one."""
        return Source((self.host + i) % self.num_hosts)

    def rows(self, own: jax.Array, sent: jax.Array, source: Source | None) -> jax.Array:
        """Returns the rows of a source: `own` [T, ...], or its [T, ...] of `sent` [A, T, ...].

        For all hosts that is [M·T, ...]; with slots [T + M·C, ...], this host's own rows first.
        """
        if source is None:
            others = sent.reshape(-1, *sent.shape[2:])
            return others if self.slots is None else jnp.concatenate([own, others])
        if source.own:
            return own
        return lax.dynamic_index_in_dim(sent, self.arrival(source), axis=0, keepdims=False)

    def by_rank(self, by_rank: jax.Array, source: Source | None) -> jax.Array:
        """Selects the part of a source's tokens from [N, T, K] by source rank: [G, T, K].

        The tokens are those of `rows`, in its order; slots of no token hold -1.
        """
        by_host = by_rank.reshape(self.num_hosts, self.group_size, *by_rank.shape[1:])
        if source is None and self.slots is None:
            return by_host.swapaxes(0, 1).reshape(self.group_size, -1, *by_rank.shape[2:])
        if source is None:
            sources = [Source(self.host, own=True)]
            sources += [Source(host) for host in range(self.num_hosts)]
            return jnp.concatenate([self.by_rank(by_rank, each) for each in sources], axis=1)
        picked = lax.dynamic_index_in_dim(by_host, source.host, axis=0, keepdims=False)
        if source.own or self.slots_here is None:
            return picked
        arrival = self.arrival(source)
        slots = lax.dynamic_index_in_dim(self.slots_here, arrival, axis=1, keepdims=False)
        return jnp.take_along_axis(picked, slots[:, :, None], axis=1, mode="fill", fill_value=-1)

    def split(self, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Splits rows of all hosts, in the order of `rows`: this host's, and [M, ...] by host."""
        if self.slots is None:
            by_host = part.reshape(self.num_hosts, -1, *part.shape[1:])
            return lax.dynamic_index_in_dim(by_host, self.host, axis=0, keepdims=False), by_host
        num_others = self.slots.size
        own, others = part[:-num_others], part[-num_others:]
        return own, others.reshape(*self.slots.shape, *part.shape[1:])


def _in_mesh_order(axis_name: Sequence[str]) -> bool:
    """Returns whether axes are in the order in which the enclosing `shard_map`'s mesh has them."""
    names = jax.sharding.get_abstract_mesh().axis_names
    places = [names.index(name) if name in names else -1 for name in axis_name]
    return -1 not in places and places == sorted(places)


def place(
    whole: jax.Array | None, part: jax.Array, index: jax.Array | int, count: int
) -> jax.Array:
    """Writes `part` [...] to its place in `whole` [count, ...]; None stands for zeros."""
    if whole is None:
        whole = jnp.full_like(part, 0, shape=(count, *part.shape))
    return lax.dynamic_update_index_in_dim(whole, part, index, axis=0)
