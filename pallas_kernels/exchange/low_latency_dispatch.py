"""Dispatch into the expert-major layout over the low-latency protocol, for few tokens.

Block 0 of every rank sends the experts that its rank's tokens choose to all ranks. A rank sends its
tokens at once, before it knows the choices of other ranks. Block b of every rank handles the same
range of tokens of every rank: from the choices of all ranks it computes the rows that these tokens
get in this rank's receive buffer. A block has five warpgroups:

- movers (4): each handle some tiles of every row: send and receive tiles, count choices by expert,
  and store a tile from registers to all rows that its token has on this rank.
- planner: finds from the counts where each expert's group of rows starts and ends in the receive
  buffer, and writes zeros to rows that get no token.

  rank s, movers                           rank d, movers
  choices of all tokens -- values, link -> choices --> counts --> planner: groups --> rows of t
  x[t] == tiles, link ===================> tile buffers --> registers --> tokens[rows of t]

So a row crosses the link once per (token, rank), and no received row is read back from memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.expert_rows import ExpertRows
from pallas_kernels.exchange.low_latency import RowTransfer, hello, is_among, meet, wait_for_hellos
from pallas_kernels.exchange.plan import LowLatencyPlan, ReceiveBuffer, count_width, pad_last
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import WARPGROUP, align_up
from pallas_kernels.fabric.low_latency import Channels, Endpoint

# A warpgroup loads this many top-k choices into registers at a time, to count them by expert.
_COUNTED_AT_ONCE = 1024


def low_latency_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    fabric: fb.Fabric,
    channels: Channels,
    plan: LowLatencyPlan,
    buffer: ReceiveBuffer,
) -> tuple[Any, ...]:
    """Does what `expert_dispatch` does for rows sent unquantized, bit for bit.

    `plan` is one for the sizes of this call, for which `plan.fits()` is true.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    num_experts, per_rank = plan.num_experts, plan.num_experts // num_ranks
    rows_and_counts = [(num_ranks, num_tokens * top_k), (num_ranks, count_width(num_experts))]
    # group_sizes, expert_counts, num_dropped, rows_needed
    groups_shapes = [(per_rank,), (per_rank,), (1,), (1,)]
    tokens, rows, counts, *groups = _run(
        "ep_dispatch_ll",
        [x, topk_idx.reshape(*lead, num_tokens * top_k)],
        [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in rows_and_counts + groups_shapes],
        RowTransfer(fabric, channels, plan, "dispatch"),
        buffer,
        routes_known=False,
    )
    rows = rows.reshape(*lead, num_ranks, num_tokens, top_k)
    return (tokens,), rows, counts[..., :num_experts], *groups


def dispatch_like(
    x: jax.Array,
    topk_idx: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    channels: Channels,
    plan: LowLatencyPlan,
    buffer: ReceiveBuffer,
) -> tuple[jax.Array, ...]:
    """Does what `dispatch.dispatch_like` does without `wire` and `into`; returns ([R, H],).

    `topk_idx` and the other arguments are those of `low_latency_dispatch`.
    """
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    lead, num_experts = x.shape[:-2], counts.shape[-1]
    operands = [
        x,
        topk_idx.reshape(*lead, num_tokens * top_k),
        rows.reshape(*lead, num_ranks, num_tokens * top_k),
        pad_last(counts, count_width(num_experts) - num_experts),
    ]
    transfer = RowTransfer(fabric, channels, plan, "dispatch")
    return tuple(_run("ep_dispatch_like_ll", operands, [], transfer, buffer, routes_known=True))


def _run(
    name: str,
    operands: Sequence[jax.Array],
    more_results: Sequence[Any],
    transfer: RowTransfer,
    buffer: ReceiveBuffer,
    *,
    routes_known: bool,
) -> list[jax.Array]:
    """Runs the kernel; returns the receive buffer's values and then `more_results`."""
    fabric, plan = transfer.fabric, transfer.plan
    experts = ExpertRows(
        fabric,
        plan.num_blocks,
        plan.num_experts,
        buffer,
        parts=[(plan.hidden, plan.dtype)],
        count_arrivals=None if routes_known else plan.warpgroups,
    )
    kernel = _Dispatch(transfer, experts, routes_known)
    return fb.kernel(
        fabric,
        kernel,
        name=name,
        num_blocks=plan.num_blocks,
        num_warpgroups=plan.warpgroups + 1,
        out_type=[jax.ShapeDtypeStruct((buffer.capacity, plan.hidden), plan.dtype), *more_results],
        scratch_types=dict(scratch=kernel.scratch()),
    )(*operands)


class _Refs(NamedTuple):
    x: Any
    topk_idx: Any  # [T·K]
    # [N, T·K] and [N, count_width], which `dispatch_like` reads, and else the kernel writes.
    rows: Any
    counts: Any
    tokens: Any
    # The four results that `ExpertRows.describe` writes; none in `dispatch_like`.
    groups: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """The kernel of `low_latency_dispatch` and, where `routes_known`, of `dispatch_like`."""

    transfer: RowTransfer
    experts: ExpertRows
    routes_known: bool

    @property
    def top_k(self) -> int:
        return self.transfer.plan.top_k

    @property
    def fabric(self) -> fb.Fabric:
        return self.transfer.fabric

    @property
    def num_choices(self) -> int:
        return self.transfer.plan.num_tokens * self.top_k

    def scratch(self) -> fb.Scratch:
        plan, ranks = self.transfer.plan, self.fabric.num_ranks
        width = self.experts.count_width
        if self.routes_known:
            return fb.Scratch(experts=self.experts.scratch())
        return fb.Scratch(
            experts=self.experts.scratch(),
            # For each source rank, the experts that its tokens choose.
            choices=plgpu.SMEM((ranks, align_up(self.num_choices, WARPGROUP)), jnp.int32),
            # For each source rank and expert, the receive-buffer row of the rank's next token that
            # chooses the expert. The entry at `width` is for choices of other ranks' experts.
            next_rows_from=plgpu.SMEM((ranks, width + WARPGROUP), jnp.int32),
            # The first row of each expert in the receive buffer of the expert's rank.
            group_starts=plgpu.SMEM((width,), jnp.int32),
            # The row here of each choice of the block's tokens of each source rank.
            token_rows=plgpu.SMEM((ranks, plan.tokens_per_block, self.top_k), jnp.int32),
            # The planner has found where each expert's rows are.
            groups_known=plgpu.Barrier(),
            # All movers have written their part of `token_rows`.
            together=plgpu.Barrier(num_arrivals=plan.warpgroups),
        )

    def __call__(self, *arrays: Any, scratch: fb.Scratch) -> None:
        if self.routes_known:
            refs = _Refs(*arrays)
        else:
            x, topk_idx, tokens, rows, counts, *groups = arrays
            refs = _Refs(x, topk_idx, rows, counts, tokens, groups)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < self.transfer.plan.warpgroups)
        def move() -> None:
            mover = dataclasses.replace(self, transfer=self.transfer.for_warpgroup(warpgroup))
            mover._move(refs, scratch)

        @pl.when(warpgroup == self.transfer.plan.warpgroups)
        def plan() -> None:
            self._plan(refs, scratch)

    def _plan(self, refs: _Refs, scratch: fb.Scratch) -> None:
        """Runs the planner: finds where each expert's rows are, and zeroes unused rows."""
        fabric, expert_rows = self.fabric, self.experts
        if self.routes_known:
            hello(fabric)
            expert_rows.fetch_counts(refs.counts, scratch.experts)
            expert_rows.find_groups(scratch.experts)
        else:
            expert_rows.find_groups(
                scratch.experts, group_starts=scratch.group_starts, all_counts_ref=refs.counts
            )
            plgpu.barrier_arrive(scratch.groups_known)
            expert_rows.describe(scratch.experts, refs.groups)
        fabric.delay_point(3)
        expert_rows.fill([refs.tokens], scratch.experts)
        if self.routes_known:
            wait_for_hellos(fabric, "dispatch")

    def _move(self, refs: _Refs, scratch: fb.Scratch) -> None:
        """Runs a mover: sends tiles of this rank's tokens, and stores tiles it receives."""
        fabric, transfer = self.fabric, self.transfer
        fabric.delay_point(0)
        endpoint = transfer.open()
        if not self.routes_known:
            self._send_choices(refs.topk_idx)
        sent = [transfer.load(fabric.mine(refs.x), token) for token, _ in transfer.tokens()]
        for i, (token, exists) in enumerate(transfer.tokens()):
            ranks = transfer.ranks_of(refs.topk_idx, token)
            for j, peer in enumerate(endpoint.peers):
                is_chosen = is_among(ranks, peer) & exists
                transfer.send(endpoint, j, i, sent[i], is_chosen, exact=True)
        fabric.delay_point(1)
        if not self.routes_known:
            self._find_rows(refs, scratch)
        for i, tiles in enumerate(sent):
            self._receive(endpoint, i, tiles, refs, scratch)
        fabric.delay_point(2)
        endpoint.close()

    def _receive(
        self, endpoint: Endpoint, i: int, sent: Sequence[Any], refs: _Refs, scratch: fb.Scratch
    ) -> None:
        """Stores the tiles of the block's i-th token of every rank; `sent` are this rank's."""
        token, exists = self.transfer.tokens()[i]
        sources = [endpoint.rank, *endpoint.peers]

        def places_of(j: int) -> list[jax.Array]:
            """Returns the row here of each choice of the token of sources[j]."""
            source, choices = sources[j], range(self.top_k)
            if self.routes_known:
                rows = self.fabric.mine(refs.rows)
                places = [rows[source, token * self.top_k + choice] for choice in choices]
            else:
                places = [scratch.token_rows[source, i, choice] for choice in choices]
            return [jnp.where(exists, place, fb.NOWHERE) for place in places]

        # Places in global memory are read once. Those in shared memory are read wherever they are
        # needed, since registers cannot hold those of all ranks.
        if self.routes_known:
            places_of = functools.cache(places_of)
        for number, tile in enumerate(sent):
            self._store(refs.tokens, number, tile, places_of(0))
        peer_sends = [fb.any_row(places_of(j)) for j in range(1, len(sources))]
        received = self.transfer.receive(endpoint, i, peer_sends, exact=True)
        for number, tile_of_peers in enumerate(received):
            for j, tile in enumerate(tile_of_peers, start=1):
                self._store(refs.tokens, number, tile, places_of(j))

    def _send_choices(self, topk_idx: Any) -> None:
        """Sends the experts that this rank's tokens choose to all ranks, from block 0."""
        # Two expert ids are sent as one 32-bit value. The last warpgroup's part is moved back until
        # it ends with the choices, and may overlap.
        pairs = -(-self.num_choices // 2)
        count = -(-pairs // self.transfer.plan.warpgroups)
        first = jnp.minimum(self.transfer.warpgroup * count, pairs - count)

        @pl.when(lax.axis_index("block") == 0)
        def send() -> None:
            self.fabric.send_halves(self.fabric.mine(topk_idx), first, count)

    def _store(self, tokens: Any, i: int, tile: jax.Array, places: Sequence[jax.Array]) -> None:
        """Stores this warpgroup's i-th tile of a row to each row of `tokens` in `places`."""
        for place in places:
            kept = (place >= 0) & (place < self.experts.buffer.capacity)
            self.transfer.store(self.fabric.mine(tokens), place, i, tile, kept)

    # The remaining methods compute the row of each choice, unless it is known. Each mover handles
    # the tokens of some of the source ranks.

    def _find_rows(self, refs: _Refs, scratch: fb.Scratch) -> None:
        """Writes the rows here of the block's tokens to `token_rows` and `refs.rows`."""
        plan = self.transfer.plan

        def each_source(function: Callable[[jax.Array], None]) -> None:
            """Calls `function` with each source rank whose tokens this mover handles."""
            for first in range(0, self.fabric.num_ranks, plan.warpgroups):
                source = first + self.transfer.warpgroup
                # Without a branch, unless there are too few sources left for all movers.
                all_exist = first + plan.warpgroups <= self.fabric.num_ranks
                is_source = True if all_exist else source < self.fabric.num_ranks
                pl.when(is_source)(functools.partial(function, source))

        each_source(lambda source: self._count(source, scratch))
        plgpu.barrier_arrive(scratch.experts.counts_full)
        plgpu.barrier_wait(scratch.groups_known)
        each_source(lambda source: self._rows_from(source, refs.rows, scratch))
        meet(self.fabric, scratch.together)

    def _count(self, source: jax.Array, scratch: fb.Scratch) -> None:
        """Receives the choices of rank `source`, and counts how many are of each expert."""
        # `all_counts` counts all choices, `next_rows` those of blocks with lower indices.
        fabric, expert_rows = self.fabric, self.experts
        width, num_choices = expert_rows.count_width, self.num_choices
        all_counts, next_rows = scratch.experts.all_counts, scratch.next_rows_from
        fb.clear(next_rows.at[source], width)
        fb.clear(all_counts.at[source], width)
        choices = scratch.choices.at[source, pl.ds(0, num_choices)]
        fabric.read_halves(source, choices, "dispatch")
        fabric.barrier()
        first_entry = lax.axis_index("block") * self.transfer.plan.tokens_per_block * self.top_k
        for start in range(0, num_choices, _COUNTED_AT_ONCE):
            size = min(_COUNTED_AT_ONCE, align_up(num_choices - start, WARPGROUP))
            experts = fb.load(scratch.choices.at[source, pl.ds(start, size)], 1)
            entries = start + fb.iota(size)
            if start + size > num_choices:
                experts = jnp.where(entries < num_choices, experts, fb.NOWHERE)
            fb.count(all_counts.at[source], experts, expert_rows.num_experts)
            experts = jnp.where(entries < first_entry, experts, fb.NOWHERE)
            bins = next_rows.at[source, pl.ds(0, width)]
            fb.count(bins, experts, expert_rows.num_experts)
        fabric.barrier()

    def _rows_from(self, source: jax.Array, rows: Any, scratch: fb.Scratch) -> None:
        """Writes the rows of `source`'s tokens of this block to `token_rows` and `rows`."""
        fabric, expert_rows, top_k = self.fabric, self.experts, self.top_k
        width, per_rank = expert_rows.count_width, expert_rows.num_local_experts
        self._find_next_rows(source, scratch)
        first_expert = fabric.rank() * per_rank
        for i, (token, exists) in enumerate(self.transfer.tokens()):
            experts = [scratch.choices[source, token * top_k + k] for k in range(top_k)]
            is_local = [(e >= first_expert) & (e < first_expert + per_rank) for e in experts]
            experts = [jnp.where(ok, e, width) for e, ok in zip(experts, is_local, strict=True)]
            last = i + 1 == self.transfer.plan.tokens_per_block
            found = expert_rows.take_rows(
                experts, scratch.next_rows_from, scratch.experts, leading=(source,), last=last
            )
            places = [
                jnp.where(ok, place, fb.NOWHERE) for ok, place in zip(is_local, found, strict=True)
            ]
            for choice, place in enumerate(places):
                scratch.token_rows[source, i, choice] = place

            @pl.when(exists)
            def write_rows(token: Any = token, places: Any = places) -> None:
                for choice, place in enumerate(places):
                    fabric.mine(rows)[source, token * top_k + choice] = place

    def _find_next_rows(self, source: jax.Array, scratch: fb.Scratch) -> None:
        """Turns the counts in `next_rows_from` into the rows of this block's first choices."""
        entries = pl.ds(0, self.experts.count_width)
        next_rows = fb.load(scratch.next_rows_from.at[source, entries], 1)
        next_rows = next_rows + fb.load(scratch.group_starts, 1)
        # The rows of a group are sorted by source rank, then by token. No source follows the last.
        for rank in range(self.fabric.num_ranks - 1):
            counted = fb.load(scratch.experts.all_counts.at[rank], 1)
            next_rows = next_rows + jnp.where(rank < source, counted, jnp.zeros_like(counted))
        scratch.next_rows_from[source, entries] = next_rows
        self.fabric.barrier()
