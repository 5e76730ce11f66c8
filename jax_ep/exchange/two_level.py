"""Exchanges rows between ranks on several hosts: over the network once, then inside each host.

The N ranks are on M hosts, G consecutive ranks on each. The M ranks with the same number within
their hosts are a *rail*. Dispatch sends each rank's T rows to the other ranks of its rail, so every
token crosses to a host once, however many of its experts are there. An exchange among the ranks of
that host, by XLA or by the kernels, then forwards the token to the ranks of its experts. Combine
does the reverse: the exchange inside a host sums the rows of each (token, host), and one row per
(token, host) returns along the rail. DeepEP (github.com/deepseek-ai/DeepEP) does the same.

In a dispatch and in a combine, each rank receives (M - 1)·T rows from other hosts. If the
host_capacity is C, it receives (M - 1)·C rows: a dispatch then sends only tokens that chose experts
of the destination host. Received rows and their counts equal those of an exchange in one level, bit
for bit, except for the choices that host_capacity drops.

**Rounding of a combine.** The rows that a token has on one host are summed in float32: first those
of each rank in the order of the choices, then the sums of the ranks in rank order. The ranks of a
host therefore send each other float32 sums. The host's sum is rounded once, to y's dtype or to the
format of the wire, and returned. The sums of the hosts are added in float32, in the order of the
hosts, and rounded to y's dtype.

**Order.** An exchange handles one remote host after the other, so that memory holds the rows of a
few hosts only, and the kernels inside a host overlap with the network. A dispatch forwards one
host's rows while the next host's rows arrive; it begins with the rows of its own host. A combine
computes the sums for one host while the sums for the previous host are sent; it ends with the sums
for its own host. With few tokens per rank, one call of the kernels instead takes the tokens of all
hosts, after all have arrived. On hosts with one rank each, XLA computes the sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import quantization
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.call_sizes import CallSizes
from jax_ep.exchange.interface import Config, ExchangeInParts, Received
from jax_ep.exchange.rail import Rail, Source
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups, count_experts, counts_here
from jax_ep.exchange.rows import Rows
from pallas_kernels.exchange.plan import FEW_TOKENS, ROW_BYTES
from pallas_kernels.fabric.hardware import WARPGROUP, WORD_BYTES, align_up
from pallas_kernels.formats import PLAIN, RowFormat

_FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """The exchange among ranks on M hosts, which implements the protocol `Exchange`.

    Attributes:
      num_hosts: M, a divisor of the number of ranks.
      kernels: whether the Pallas kernels run among the ranks of a host.
    """

    num_hosts: int
    kernels: bool

    def dispatch(
        self, x: jax.Array, topk_idx: jax.Array, config: Config
    ) -> tuple[Received, Routes, RowGroups]:
        """Computes each choice's receive-buffer row and sends x there; see `Exchange.dispatch`."""
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
        """Sends x [T, H] to the rows of an earlier dispatch; see `Exchange.dispatch_like`."""
        words, dtype = _words(x, config.wire)
        rail, exchange = self._of_call(config, words, routes.topk_idx, dtype)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None

        def add(source: Source | None, rows: jax.Array, received: Any) -> jax.Array:
            if not rail.kernels:
                # The barrier makes XLA move the tokens of one host after the other. Otherwise XLA
                # may hold the gathered tokens of all hosts at once.
                rows, received = lax.optimization_barrier((rows, received))
            into = None if received is None else (lax.bitcast_convert_type(received, dtype),)
            rows = lax.bitcast_convert_type(rows, dtype)
            known = self._routes(rail, routes, source, choices)
            (received,) = exchange.dispatch_like(rows, known, rail.inside, into)
            return quantization.bits(received)

        received = rail.each_host(words, add)
        return _from_words(received, x, config.wire)

    def combine(
        self, y: jax.Array, topk_weights: jax.Array | None, routes: Routes, config: Config
    ) -> jax.Array:
        """Sums each token's rows of y [R, H] and sends the sums back; see `Exchange.combine`."""
        # Ranks of one host send each other float32 sums, so that only their total is rounded.
        several = lax.axis_size(config.axis_name) > self.num_hosts
        sum_dtype = _FLOAT32 if several or config.wire.quantized else None
        rail, exchange = self._of_call(config, y, routes.topk_idx, sum_dtype, sums=True)
        inside = dataclasses.replace(rail.inside, sum_dtype=sum_dtype)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None
        weights = None if topk_weights is None else (topk_weights, rail.send(topk_weights))

        def sums(source: Source | None) -> jax.Array:
            theirs = None if weights is None else rail.rows(*weights, source)
            known = self._routes(rail, routes, source, choices)
            return _on_the_wire(exchange.combine(y, theirs, known, inside), y, config)

        return _add(rail.sums_of_hosts(sums), y, config.wire)

    def combine_grad(
        self, g: jax.Array, topk_weights: jax.Array, y: jax.Array, routes: Routes, config: Config
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the gradients of a weighted combine; see `Exchange.combine_grad`.

        If `config.wire` is a quantized format, the rows of g are quantized only to cross between
        hosts. They are converted back to g's dtype before the exchange inside a host forwards them.
        """
        words, _ = _words(g, config.wire)
        rail, exchange = self._of_call(config, y, routes.topk_idx)
        choices = self._choices(rail, routes.topk_idx) if rail.kernels else None
        weights = rail.send(topk_weights)

        def add(source: Source | None, rows: jax.Array, grads: Any) -> Any:
            dy, dweights_so_far = grads or (None, [])
            if not rail.kernels:
                # The barrier makes XLA handle the tokens of one host after the other. Otherwise XLA
                # may hold an array of dy's size for each host at once.
                rows, dy = lax.optimization_barrier((rows, dy))
            into = None if dy is None else lax.bitcast_convert_type(dy, y.dtype)
            parts = _from_words(rows, g, config.wire)
            dy, dweights = exchange.combine_grad(
                config.wire.decode(parts, g.dtype),
                rail.rows(topk_weights, weights, source),
                y,
                self._routes(rail, routes, source, choices),
                rail.inside,
                into,
            )
            return quantization.bits(dy), [*dweights_so_far, dweights]

        dy, dweights = rail.each_host(words, add)
        dy = lax.bitcast_convert_type(dy, y.dtype)
        own, others = rail.split(dweights)
        # Only the host of a choice's expert adds a term that is not zero, so the sum is exact.
        return dy, functools.reduce(jnp.add, rail.send_back(others, own))

    def rank_dispatch(
        self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, config: Config
    ) -> tuple[Received, RankRoutes, jax.Array | None]:
        """Sends tokens x [T, H] to their experts' ranks; see `Exchange.rank_dispatch`."""
        words, dtype = _words(x, config.wire)
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
            rows = quantization.bits(rows)
            parts = [rows, lists.local_topk_idx, *([] if theirs is None else [theirs])]
            if source is None:
                # The exchange inside the host returned arrays [G, M·T, ...]: first by the source
                # rank's number within its host, then by host and token. They are reordered to
                # [M, G, T, ...], with the source host first.
                shape = rail.ranks_per_host, rail.num_hosts, -1
                return [part.reshape(*shape, *part.shape[2:]).swapaxes(0, 1) for part in parts]
            return [
                _place(whole, part, source.host, rail.num_hosts)
                for whole, part in zip(received or [None] * len(parts), parts, strict=True)
            ]

        # `each_host` returns arrays [M, G, T, ...], by source host and rank of the host. This
        # reshapes each of them to [N, T, ...], by source rank.
        tokens, *lists = (
            whole.reshape(rail.num_ranks, *whole.shape[2:]) for whole in rail.each_host(words, add)
        )
        received = _from_words(tokens, x, config.wire)
        return received, RankRoutes(topk_idx, lists[0]), lists[1] if lists[1:] else None

    def rank_combine(self, y: jax.Array, routes: RankRoutes, config: Config) -> jax.Array:
        """Sends sums y [N, T, H] to tokens' ranks and adds them; see `Exchange.rank_combine`."""
        sum_dtype = _FLOAT32 if config.wire.quantized else None
        rail, exchange = self._of_call(config, y, routes.topk_idx, sum_dtype, sums=True)
        inside = dataclasses.replace(rail.inside, sum_dtype=sum_dtype)
        choices = self._choices(rail, routes.topk_idx)

        def sums(source: Source | None) -> jax.Array:
            lists = rail.by_rank(routes.local_topk_idx, source)
            known = RankRoutes(rail.rows(*choices, source), lists)
            part = exchange.rank_combine(rail.by_rank(y, source), known, inside)
            return _on_the_wire(part, y, config)

        return _add(rail.sums_of_hosts(sums), y, config.wire)

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
        """Makes the `Rail` of a call, and selects the exchange among the ranks of a host.

        Args:
          config: the configuration of the exchange among all ranks.
          rows: the rows that the exchange inside a host moves.
          topk_idx: [T, K] int32: the choices of this rank's tokens.
          dtype: the dtype in which the exchange inside a host moves rows; None: that of `rows`.
          list_words: the 4-byte words that describe a token's choices: K, or 2 K if weights are
            sent with the choices. None: K.
          sums: whether the call is a combine. On hosts with one rank each, XLA then computes the
            sums, since it is faster at this than the kernels.
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
        """Returns the choices of this rank's tokens, and of the tokens that it gets from each host.

        The experts of this host get the ids 0 to E / M - 1. An id outside this range stands for
        another host's expert or for no expert.

        Returns:
          The choices of this rank's tokens, [T, K]; and the choices of the tokens from each host,
          [M, T, K], or [M, C, K] with a host_capacity of C.
        """
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
        """Returns the routes by which the exchange inside this host moves the tokens of one host.

        Args:
          rail: the `Rail` of the call, which selects the tokens of the source.
          routes: the routes of the dispatch among all ranks.
          source: the host whose tokens are moved; None: all hosts.
          choices: the result of `_choices`, which kernels need; None for XLA's exchange.
        """
        rows = rail.by_rank(routes.rows, source)
        if choices is None:
            # XLA's exchange reads only `Routes.rows`; the other fields stay those of all hosts.
            return Routes(routes.topk_idx, rows, routes.counts)
        # The kernels write zeros after an expert's last row. To find that row, they need the
        # counts of the rows from all hosts. Entry g of `counts` is the sum over the ranks, one on
        # each host, that have the number g within their hosts.
        mine = lax.dynamic_slice_in_dim(
            routes.counts, rail.host * rail.inside.num_experts, rail.inside.num_experts, axis=1
        )
        counts = jnp.sum(
            mine.reshape(rail.num_hosts, rail.ranks_per_host, -1), axis=0, dtype=jnp.int32
        )
        return Routes(rail.rows(*choices, source), rows, counts)


def _add(returned: Iterable[jax.Array], y: jax.Array, wire: RowFormat) -> jax.Array:
    """Decodes the packed rows [T, ...] that each host returned, and adds them in float32.

    y has the width and dtype of the rows before packing; its values are not read. Returns the sum
    [T, H] in y's dtype.
    """
    total: Any = None
    for bits in returned:
        parts = quantization.parts(bits, y, wire)
        rows = wire.decode(parts, jnp.float32).astype(jnp.float32)
        total = rows if total is None else total + rows
    return total.astype(y.dtype)


def _on_the_wire(sums: jax.Array, y: jax.Array, config: Config) -> jax.Array:
    """Rounds sums [T, H] to y's dtype, or quantizes them for `config.wire`; returns the bits."""
    return quantization.bits(sums.astype(config.wire.sum_dtype(y.dtype)), config.wire)


def _place(
    whole: jax.Array | None, part: jax.Array, index: jax.Array | int, count: int
) -> jax.Array:
    """Returns `whole` [count, ...] (None: zeros) with `part` [...] written to entry `index`."""
    if whole is None:
        whole = jnp.full_like(part, 0, shape=(count, *part.shape))
    return lax.dynamic_update_index_in_dim(whole, part, index, axis=0)


def _words(x: jax.Array, wire: RowFormat) -> tuple[jax.Array, jnp.dtype]:
    """Packs rows x [T, H] as unsigned words to send between hosts.

    XLA may change the payload of a NaN while it moves floats; it leaves unsigned words as they are.

    Returns:
      (words, dtype). For unquantized rows, `words` are uints [T, H] as wide as x's dtype; for
      quantized rows, uint32. Inside a host, the words are moved as bits of the float type `dtype`:
      x's dtype, or float32 for quantized rows.
    """
    bits = quantization.bits(x, wire)
    if not wire.quantized:
        return bits, x.dtype
    # Rows are padded here, since the kernels would otherwise make padded copies of them.
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % ROW_BYTES)))
    words = bits.reshape(*bits.shape[:-1], -1, 4)
    return lax.bitcast_convert_type(words, jnp.uint32), jnp.dtype(jnp.float32)


def _from_words(words: jax.Array, x: jax.Array, wire: RowFormat) -> Received:
    """Unpacks rows that `_words` packed; returns the arrays of the wire format.

    x has the width and dtype of the rows before packing; its values are not read.
    """
    if wire.quantized:
        words = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
        words = words[..., : wire.row_bytes(x.shape[-1], x.dtype)]
    return quantization.parts(words, x, wire)


def _experts_or_none(topk_idx: jax.Array, config: Config) -> jax.Array:
    """Replaces ids in topk_idx [T, K] outside [0, num_experts), which name no expert, by -1."""
    return jnp.where((topk_idx >= 0) & (topk_idx < config.num_experts), topk_idx, -1)


def _narrow(numbers: jax.Array, most: int) -> jax.Array:
    """Converts integers in [-1, most] to uint16, to halve the bytes that are sent.

    -1 becomes 65535. If `most` is 65535 or more, returns `numbers` unchanged.
    """
    return numbers.astype(jnp.uint16) if most < 2**16 - 1 else numbers


# --------------------------------------------------------------- sizes of the buffers of a call


def workspace(
    operation: str,
    kernels: bool,
    sizes: CallSizes,
    num_hosts: int,
    rows_to_host: int,
    inside: Callable[[str, bool, CallSizes], dict[str, int]],
) -> dict[str, int]:
    """Returns the buffers of a call, including those inside a host: name -> bytes per rank.

    Args:
      operation: one of `jax_ep.exchange.memory.OPERATIONS` that communicates between ranks.
      kernels: whether the Pallas kernels run inside a host.
      sizes: the sizes of the exchange among all ranks.
      num_hosts: M, the number of hosts.
      rows_to_host: the rows that a rank sends to each other host: T, or the host_capacity.
      inside: called as `inside(operation, kernels, sizes)`; returns the buffers of the exchange
        inside a host.
    """
    num_tokens, ranks_per_host = sizes.num_tokens, sizes.num_ranks // num_hosts
    sums = operation in ("combine", "dispatch_grad")
    # On hosts with one rank each, XLA computes the sums, as in `TwoLevel._of_call`.
    kernels = kernels and not (sums and ranks_per_host == 1)
    at_once = kernels and num_tokens <= FEW_TOKENS
    tokens_of_call = num_tokens
    if at_once:
        tokens_of_call = num_hosts * rows_to_host + (num_tokens if rows_to_host < num_tokens else 0)
    of_host = dataclasses.replace(
        sizes,
        num_tokens=tokens_of_call,
        num_experts=sizes.num_experts // num_hosts,
        num_ranks=ranks_per_host,
        capacity=ranks_per_host * tokens_of_call if sizes.by_rank else sizes.capacity,
        wire=PLAIN,
        quantized=False,
    )
    # The rank-major kernels of a host take and return rows sorted by the source rank's number
    # within its host. XLA copies rows between this order and the order of all N source ranks.
    in_order = of_host.rows(ranks_per_host * tokens_of_call) if sizes.by_rank and kernels else 0
    weights = 0 if sizes.by_rank else WORD_BYTES * num_hosts * rows_to_host * sizes.top_k
    held = {
        "weights of the rail": weights if operation in ("combine", "combine_grad") else 0,
        "rows inside a host": in_order,
    }
    if sums:
        held |= _sums_workspace(sizes, num_hosts, rows_to_host, at_once)
        if sizes.wire.quantized or (ranks_per_host > 1 and not sizes.by_rank):
            of_host = dataclasses.replace(of_host, dtype=_FLOAT32)
        if kernels and of_host.dtype != sizes.dtype:
            held["float32 rows and sums"] = of_host.rows(sizes.capacity + tokens_of_call)
        return held | inside(operation, kernels, of_host)
    # With kernels, memory holds the rows of at most two remote hosts: one host's rows arrive while
    # the other's are forwarded. If one call takes all hosts' tokens, memory holds all hosts' rows.
    # Without kernels, XLA may hold the rows of all remote hosts.
    arrivals = min(2, num_hosts - 1) if kernels and not at_once else num_hosts - (not at_once)
    sent_bytes = _sent_bytes(sizes)
    rail = arrivals * rows_to_host * sent_bytes
    # With a host_capacity, the rows to send are first picked from x into another buffer, which is
    # as large as the buffer of received rows.
    held["rows of the rail"] = rail if rows_to_host == num_tokens else 2 * rail
    held["quantized rows"] = sizes.quantized_rows(num_tokens)
    received = {"received rows": sizes.quantized_rows(sizes.capacity)}
    if operation == "combine_grad" and not sizes.by_rank:
        # The exchange inside a host moves cotangents after dequantization, in their own dtype.
        held["gradient of y, of all hosts so far"] = 0 if kernels else sizes.rows(sizes.capacity)
    elif sizes.wire.quantized:
        # The exchange inside a host forwards quantized rows as 32-bit words, typed as float32.
        of_host = dataclasses.replace(of_host, hidden=sent_bytes // WORD_BYTES, dtype=_FLOAT32)
        held |= received
    name = operation if operation == "combine_grad" else "dispatch_like"
    parts = inside(name, kernels, of_host)
    if "gathered tokens" in parts:
        # XLA gathers the tokens of one source host after the other. It holds at most those of this
        # host (T of each rank) and of one other host (rows_to_host of each rank).
        parts["gathered tokens"] += parts["gathered tokens"] * rows_to_host // num_tokens
    if operation == "dispatch" and not sizes.by_rank:
        held |= _routing_workspace(sizes, num_hosts)
    if sizes.by_rank or operation == "dispatch":
        parts["routes"] = sizes.routes()
    return held | {name: size for name, size in parts.items() if size}


def _sent_bytes(sizes: CallSizes) -> int:
    """Returns the bytes of a row that `_words` packed: if quantized, a multiple of ROW_BYTES."""
    sent = sizes.sent_rows(1)
    return align_up(sent, ROW_BYTES) if sizes.wire.quantized else sent


def _sums_workspace(
    sizes: CallSizes, num_hosts: int, rows_to_host: int, at_once: bool
) -> dict[str, int]:
    """Returns the buffers of the sums that a combine sends between hosts: name -> bytes per rank.

    The buffers hold this rank's sums for other hosts' tokens, the sums that other hosts return for
    this rank's tokens, and the sums that this host computes for this rank's tokens.

    Args:
      sizes: the sizes of the exchange among all ranks.
      num_hosts: M, the number of hosts.
      rows_to_host: the rows that a rank sends to each other host: T, or the host_capacity.
      at_once: whether one call computes the sums for the tokens of all hosts.
    """
    num_tokens, sum_bytes = sizes.num_tokens, sizes.sent_rows(1)
    held = 2 * num_hosts if at_once else num_hosts
    others = (num_hosts - 1) * num_tokens if rows_to_host < num_tokens else 0
    return {
        "sums for and of other hosts": held * rows_to_host * sum_bytes,
        "sums of this host": 0 if at_once else num_tokens * sum_bytes,
        "returned sums, by token": others * sum_bytes,
    }


def _routing_workspace(sizes: CallSizes, num_hosts: int) -> dict[str, int]:
    """Returns the buffers, name -> bytes, in which an expert-major dispatch computes its routes."""
    choices = sizes.num_tokens * sizes.top_k
    numbers = 2 * choices + sizes.num_experts
    narrow = 2 if max(choices, sizes.num_experts) < 2**16 - 1 else WORD_BYTES
    return {
        "choices of the rail": narrow * num_hosts * numbers,
        "gathered choices": (narrow + WORD_BYTES) * sizes.num_ranks * numbers,
        "counting choices": WORD_BYTES * align_up(choices, WARPGROUP) * sizes.num_experts,
    }
