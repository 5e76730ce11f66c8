"""Dispatch into the expert-major layout: every rank puts its rows into their final places at peers.

Block b of every rank handles the same range of tokens, with three warpgroups:

  sender    receives how often each rank chose each expert, which block 0 of that rank counts;
            computes the rows of each token, and puts the token into the first of its rows at every
            rank that gets it, with a list of all its rows there;
  receiver  waits for each step of tokens, and copies a token that several experts of this rank get
            from its first row to its other rows;
  filler    writes zeros to the rows of this rank's output that receive no token.

    rank s, sender                     rank d                                     rank d, receiver
    x[t] --> ring -------- link -----> tokens[first row of t] --> ring ---------> tokens[other rows]
    rows of t at d ------- link -----> rows[s, t]             --> which rows ---^
    signal: a step is there ---------> block b

So a row crosses the link once per (token, rank) and is fanned out in local memory, with no staging
buffer. A rank ends only after the last rows sent to it have arrived. What a peer reads of this
rank's inputs, it reads before its own last signal, so that memory is free when the kernel ends.

`dispatch` computes routes; `dispatch_like` sends other rows along the routes of an earlier call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange import short_copies
from pallas_kernels.exchange.expert_rows import ExpertRows, ExpertScratch
from pallas_kernels.exchange.plan import Plan, Row, pad_last
from pallas_kernels.exchange.sender import PUT, List, Sender, SenderRefs, SenderScratch
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import LANES
from pallas_kernels.formats import PLAIN, RowFormat

_COUNTED_AT_ONCE = 8192  # the choices that are loaded before the first of them is counted


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
    fair: bool = False,
    zero_unused: bool = True,
    wire: RowFormat = PLAIN,
) -> tuple[Any, ...]:
    """Computes the routes of a dispatch and sends the rows, in one kernel.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      topk_idx: [T, K] int32.
      num_experts: E.
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the rings.
      capacity: R.
      expert_alignment: the rows of each expert start at a multiple of this.
      fair: whether a rank whose rows do not fit in R keeps equally many of each expert, and the
        others have the row R; else it keeps those before R.
      zero_unused: whether rows past the last expert's rows are zero; else undefined.
      wire: the format in which rows are sent and received. H is a multiple of 512 if it is
        quantized.

    Returns:
      A tuple of seven: tokens ([R, H],), or with a quantized wire ([R, H], scales [R, H / 128]);
      rows [N, T, K] int32, the row on this rank of each choice of each source rank, and -1 where
      the choice is of another rank's expert; counts [N, E] int32 of all ranks; group_sizes [L]
      int32, rows of each local expert's group with padding; expert_counts [L] int32, without
      padding; num_dropped [1] int32, rows that did not fit; rows_needed [1] int32, the capacity
      that would hold all.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks, per_rank = x.shape[:-2], fabric.num_ranks, num_experts // fabric.num_ranks
    row = Row(x.shape[-1], x.dtype, wire)
    kernel = _Dispatch(
        Sender(fabric, plan, num_tokens, row, num_words=top_k),
        ExpertRows(
            fabric,
            plan.num_blocks,
            num_experts,
            capacity,
            expert_alignment,
            row.parts,
            fair=fair,
            zero_unused=zero_unused,
            count_arrivals=1,
        ),
    )
    words, width, num_parts = kernel.sender.window, kernel.experts.count_width, len(row.parts)
    results = fb.kernel(
        fabric,
        kernel,
        name="ep_dispatch",
        num_blocks=plan.num_blocks,
        num_warpgroups=3,
        out_type=[
            *(jax.ShapeDtypeStruct((capacity, columns), t) for columns, t in row.parts),
            jax.ShapeDtypeStruct((num_ranks, words.total), jnp.int32),
            jax.ShapeDtypeStruct((num_ranks, width), jnp.int32),
            *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (per_rank, per_rank, 1, 1)),
        ],
        scratch_types=dict(scratch=kernel.scratch()),
        shared=tuple(range(2, 2 + num_parts + 1)),  # peers write the received rows and the lists
    )(x, words.pad(topk_idx.reshape(*lead, num_tokens * top_k), fb.NOWHERE))
    parts, (rows, all_counts, *groups) = results[:num_parts], results[num_parts:]
    rows = rows[..., : num_tokens * top_k].reshape(*lead, num_ranks, num_tokens, top_k)
    return tuple(parts), rows, all_counts[..., :num_experts], *groups


def dispatch_like(
    x: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
    fair: bool = False,
    zero_unused: bool = True,
    wire: RowFormat = PLAIN,
    into: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Sends x [T, H] along the routes of an earlier dispatch, and returns the received rows.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      rows: [N, T, K] int32, the result of `dispatch`.
      counts: [N, E] int32, the result of `dispatch`.
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the rings.
      capacity: R, as in `dispatch`.
      expert_alignment: as in `dispatch`.
      fair: as in `dispatch`.
      zero_unused: as in `dispatch`.
      wire: the format in which rows are sent and received. H is a multiple of 512 if it is
        quantized.
      into: the rows of an earlier call with the same counts. The rows of this call's tokens are
        written into them; all others are kept, and none is filled with zeros.

    Returns:
      tokens ([R, H],), or with a quantized wire ([R, H], scales [R, H / 128]).
    """
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    row = Row(x.shape[-1], x.dtype, wire)
    kernel = _DispatchLike(
        Sender(fabric, plan, num_tokens, row, num_words=top_k, num_sources=num_ranks),
        ExpertRows(
            fabric,
            plan.num_blocks,
            counts.shape[-1],
            capacity,
            expert_alignment,
            row.parts,
            fair=fair,
            zero_unused=zero_unused,
            adds=into is not None,
        ),
    )
    tokens = [jax.ShapeDtypeStruct((capacity, columns), t) for columns, t in row.parts]
    call = fb.kernel(
        fabric,
        kernel,
        name="ep_dispatch_like",
        num_blocks=plan.num_blocks,
        num_warpgroups=3,
        out_type=tokens if into is None else [],
        scratch_types=dict(scratch=kernel.scratch()),
        shared=(1, *range(3, 3 + len(row.parts))),  # peers read the routes and write the tokens
    )
    operands = (
        x,
        kernel.sender.window.pad(rows.reshape(*rows.shape[:-2], -1), fb.NOWHERE),
        pad_last(counts, kernel.experts.count_width - counts.shape[-1]),
    )
    if into is None:
        return tuple(call(*operands))
    return fb.update_in_place(into, lambda refs: call(*operands, *refs))[0]


class _Scratch(NamedTuple):
    """The shared memory of both kernels; C stages hold rows that the receiver copies."""

    sender: SenderScratch
    experts: ExpertScratch
    step_rows: Any  # [N, window] int32: the lists of a step, by source rank
    step_copies: Any  # [tokens of a step · N, K] int32: a token's rows, copied from its first
    copies: Sequence[Any]  # for each part of a row, [C, columns]
    copy_full: Any  # [C] barriers: a row has arrived in its stage
    groups_known: Any  # barrier: the sender has found the groups of the experts' rows
    next_rows: Any = None  # [E + spare] int32: the next free row of each expert, in `dispatch`
    connected: Any = None  # barrier: the receiver has connected, in `dispatch`


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The common base of the kernels of both dispatches: receiver, filler and memory."""

    sender: Sender
    experts: ExpertRows

    @property
    def fabric(self) -> fb.Fabric:
        return self.sender.fabric

    @property
    def top_k(self) -> int:
        return self.sender.num_words

    def scratch(self) -> _Scratch:
        """Returns the types of the scratch."""
        ranks, copies = self.fabric.num_ranks, self.sender.plan.num_copy_stages
        step_rows = self.sender.step_tokens * ranks
        return _Scratch(
            sender=self.sender.scratch(),
            experts=self.experts.scratch(),
            step_rows=plgpu.SMEM((ranks, self.sender.step_window.width), jnp.int32),
            step_copies=plgpu.SMEM((step_rows, self.top_k), jnp.int32),
            copies=[plgpu.SMEM((copies, columns), t) for columns, t in self.sender.row.parts],
            copy_full=plgpu.Barrier(num_barriers=(copies,)),
            groups_known=plgpu.Barrier(),
        )

    def kept(self, row: jax.Array) -> jax.Array:
        """Returns whether `row` is a row of the receive buffer, and not dropped or NOWHERE."""
        return (row >= 0) & (row < self.experts.capacity)

    def receive(self, rows: Any, tokens: Sequence[Any], scratch: _Scratch) -> None:
        """Copies the tokens of peers that have several rows here to their further rows.

        Args:
          rows: [N, T·K] int32, the lists that arrive.
          tokens: the parts of received rows.
          scratch: the kernel's shared memory.
        """
        first_token, num_tokens = self.sender.range()

        def receive_step(step: jax.Array, begun: jax.Array) -> jax.Array:
            """Receives a step; adds the tokens that it copies to their number so far, `begun`."""
            self.fabric.wait(PUT, step + 1, "dispatch")
            self.fabric.delay_point(2)
            self.fabric.async_fence()
            count = self._list_copies(step, first_token, num_tokens, rows, scratch)
            self._copy_listed(begun, count, tokens, scratch)
            return begun + count

        lax.fori_loop(0, self.sender.num_steps(), receive_step, jnp.int32(0))

        @pl.when(num_tokens == 0)
        def wait_for_peers() -> None:  # peers may still read this rank's known rows
            self.fabric.wait(PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)

    def _list_copies(
        self,
        step: jax.Array,
        first_token: jax.Array,
        num_tokens: jax.Array,
        rows: Any,
        scratch: _Scratch,
    ) -> jax.Array:
        """Lists the tokens of peers that have several rows on this rank; returns their count.

        step_copies[:count, :K] becomes the rows of each token, NOWHERE for choices without a row. A
        token's first row has already been received. The sender puts this rank's own tokens to all
        their rows. The block handles `num_tokens` tokens of every source rank, from `first_token`
        on.
        """
        fabric, num_ranks, top_k = self.fabric, self.fabric.num_ranks, self.top_k
        step_tokens = self.sender.step_tokens
        step_token = first_token + step * step_tokens
        others = [lax.rem(fabric.rank() + i, jnp.int32(num_ranks)) for i in range(1, num_ranks)]
        if not others:
            return jnp.int32(0)
        sources = [(source, fabric.mine(rows), source) for source in others]
        window = self.sender.step_window
        start = open_window(fabric, window, step_token * top_k, (scratch.step_rows, sources))

        def list_token(i: jax.Array, count: jax.Array) -> jax.Array:
            for source in others:
                places, held = [], jnp.int32(0)
                for choice in range(top_k):
                    row = scratch.step_rows[source, (step_token + i) * top_k - start + choice]
                    kept = self.kept(row)
                    places.append(jnp.where(kept, row, fb.NOWHERE))
                    held = held + kept.astype(jnp.int32)
                for choice, place in enumerate(places):
                    # The next token overwrites these unless `count` is raised below.
                    scratch.step_copies[count, choice] = place
                count = count + (held > 1).astype(jnp.int32)
            return count

        tokens_of_step = jnp.minimum(num_tokens - step * step_tokens, step_tokens)
        count = lax.fori_loop(0, tokens_of_step, list_token, jnp.int32(0))
        fabric.barrier()
        return count

    def _copy_listed(
        self, begun: jax.Array, count: jax.Array, tokens: Sequence[Any], scratch: _Scratch
    ) -> None:
        """Copies the `count` listed tokens from their first rows to their others.

        `begun` rows were copied in earlier steps; the first takes stage `begun` modulo C.
        """
        num_copies = self.sender.plan.num_copy_stages

        def begin_copy(i: jax.Array, _: None) -> None:
            self._begin_copy(i, begun, tokens, scratch)

        def copy_row(i: jax.Array, _: None) -> None:
            self._finish_copy(i, begun, count, tokens, scratch)

            @pl.when(i + num_copies < count)
            def begin_next() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._begin_copy(i + num_copies, begun, tokens, scratch)

        lax.fori_loop(0, jnp.minimum(count, num_copies), begin_copy, None)
        lax.fori_loop(0, count, copy_row, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _begin_copy(
        self, i: jax.Array, begun: jax.Array, tokens: Sequence[Any], scratch: _Scratch
    ) -> None:
        """Starts to copy the first row of the i-th listed token to its stage."""
        fabric, num_copies = self.fabric, self.sender.plan.num_copy_stages
        first = jnp.int32(fb.NOWHERE)
        for choice in reversed(range(self.top_k)):
            place = scratch.step_copies[i, choice]
            first = jnp.where(place >= 0, place, first)
        stage = lax.rem(begun + i, jnp.int32(num_copies))
        plgpu.copy_gmem_to_smem(
            fabric.mine(tokens[0]).at[first],
            scratch.copies[0].at[stage],
            scratch.copy_full.at[stage],
            oob_mode=fb.IN_BOUNDS,
        )
        for scales, ring in zip(tokens[1:], scratch.copies[1:], strict=True):
            short_copies.begin(fabric, fabric.mine(scales).at[first], ring.at[stage])
            short_copies.commit_group(fabric)

    def _finish_copy(
        self,
        i: jax.Array,
        begun: jax.Array,
        count: jax.Array,
        tokens: Sequence[Any],
        scratch: _Scratch,
    ) -> None:
        """Puts the i-th of `count` listed tokens from its stage to all its rows but the first."""
        fabric, num_copies = self.fabric, self.sender.plan.num_copy_stages
        stage = lax.rem(begun + i, jnp.int32(num_copies))
        plgpu.barrier_wait(scratch.copy_full.at[stage])
        if len(tokens) > 1:
            lax.cond(
                i + num_copies <= count,  # num_copies - 1 copies were begun after this one
                lambda: short_copies.wait(fabric, num_copies - 1),
                lambda: short_copies.wait(fabric, 0),
            )
        copied_from = scratch.step_copies[i, 0] >= 0
        for choice in range(1, self.top_k):
            place = scratch.step_copies[i, choice]
            further = copied_from & (place >= 0)
            for part, ref in zip(scratch.copies, tokens, strict=True):
                fb.put_if(fabric, further, part.at[stage], fabric.mine(ref).at[place])
            copied_from = copied_from | (place >= 0)
        plgpu.commit_smem_to_gmem_group()


class _DispatchLike(_Kernel):
    """The kernel of `dispatch_like`."""

    def __call__(self, *refs: Any, scratch: _Scratch) -> None:
        x, rows, counts, *tokens = refs
        fabric, warpgroup = self.fabric, lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def send() -> None:
            routes = _KnownRoutes(self, scratch, rows)
            fabric.delay_point(0)
            self.experts.fetch_counts(counts, scratch.experts)
            self.sender.fetch_first(x, scratch.sender)
            fabric.connect()
            self.sender.open_window(routes, 0, scratch.sender)
            self.sender.make_ready(x, 0, scratch.sender)
            self.experts.find_groups(scratch.experts)
            plgpu.barrier_arrive(scratch.groups_known)
            self.sender.send(SenderRefs(x, tokens, lists=None), routes, scratch.sender)

        @pl.when(warpgroup == 2)
        def fill() -> None:
            plgpu.barrier_wait(scratch.groups_known)
            fabric.delay_point(3)
            self.experts.fill(tokens, scratch.experts)

        @pl.when(warpgroup == 1)
        def receive() -> None:
            self.receive(rows, tokens, scratch)


class _Dispatch(_Kernel):
    """The kernel of `dispatch`."""

    def scratch(self) -> _Scratch:
        # The entries after those of the experts are for choices of no expert.
        next_rows = plgpu.SMEM((self.experts.count_width + LANES,), jnp.int32)
        return super().scratch()._replace(next_rows=next_rows, connected=plgpu.Barrier())

    def __call__(self, *refs: Any, scratch: _Scratch) -> None:
        x, choices, *results = refs
        num_parts = len(self.sender.row.parts)
        tokens, (rows, all_counts, *groups) = results[:num_parts], results[num_parts:]
        fabric, warpgroup = self.fabric, lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def send() -> None:
            routes = _NewRoutes(self, scratch, choices)
            fabric.delay_point(0)
            self._send_counts(choices, scratch)
            self.sender.fetch_first(x, scratch.sender)
            self.sender.open_window(routes, 0, scratch.sender)
            self._count_earlier(choices, scratch)
            self.experts.receive_counts(scratch.experts)
            self.sender.make_ready(x, 0, scratch.sender)
            self.experts.find_groups(
                scratch.experts, next_rows=scratch.next_rows, all_counts_ref=all_counts
            )
            plgpu.barrier_arrive(scratch.groups_known)
            plgpu.barrier_wait(scratch.connected)
            self.sender.send(SenderRefs(x, tokens, rows), routes, scratch.sender)

        @pl.when(warpgroup == 2)
        def fill() -> None:
            plgpu.barrier_wait(scratch.groups_known)
            fabric.delay_point(3)
            self.experts.describe(scratch.experts, *groups)
            self.experts.fill(tokens, scratch.experts)

        @pl.when(warpgroup == 1)
        def receive() -> None:  # the receiver connects, to relieve the sender
            fabric.connect()
            plgpu.barrier_arrive(scratch.connected)
            self.receive(rows, tokens, scratch)

    def _send_counts(self, choices: Any, scratch: _Scratch) -> None:
        """Counts this rank's choices of each expert, and sends the counts to every rank.

        Only block 0 does so, since every GPU starts it first.
        """
        fabric, width = self.fabric, self.experts.count_width

        @pl.when(lax.axis_index("block") == 0)
        def count_and_send() -> None:
            fb.clear(scratch.next_rows, width)
            fabric.barrier()
            self._count(choices, self.sender.num_tokens * self.top_k, scratch.next_rows)
            fabric.barrier()
            fabric.send_values(scratch.next_rows.at[pl.ds(0, width)], 0)
            fabric.barrier()

    def _count_earlier(self, choices: Any, scratch: _Scratch) -> None:
        """Counts in `next_rows` how often the tokens of earlier blocks choose each expert."""
        fb.clear(scratch.next_rows, self.experts.count_width)
        self.fabric.barrier()
        end = jnp.minimum(self.sender.range()[0], self.sender.num_tokens) * self.top_k
        self._count(choices, end, scratch.next_rows)
        self.fabric.barrier()

    def _count(self, choices: Any, end: Any, bins: Any) -> None:
        """Adds the first `end` of this rank's choices to `bins`, which counts them by expert."""
        fabric, num_choices = self.fabric, self.sender.window.total
        width = min(_COUNTED_AT_ONCE, num_choices // LANES * LANES)

        def count(i: jax.Array, _: None) -> None:
            start = jnp.minimum(i * width, num_choices - width)
            entries = start + fb.iota(fabric, width)
            experts = fb.load(fabric, fabric.mine(choices).at[pl.ds(start, width)], 1)
            new = (entries >= i * width) & (entries < end)
            experts = jnp.where(new, experts, fb.NOWHERE)
            fb.count(fabric, bins, experts, self.experts.num_experts)

        lax.fori_loop(0, lax.div(end + (width - 1), jnp.int32(width)), count, None)


@dataclasses.dataclass(frozen=True)
class _Routes:
    """Reads a token's rows from its list; implements two methods of `sender.Routes`."""

    kernel: _Kernel
    scratch: _Scratch

    def row(self, words: List, i: jax.Array) -> jax.Array:
        """Returns the first of a token's rows at a peer that is not dropped, or NOWHERE."""
        del i
        place = jnp.int32(fb.NOWHERE)
        for row in reversed(words):
            place = jnp.where(self.kernel.kept(row), row, place)
        return place

    def further_rows(self, words: List) -> list[jax.Array]:
        """Returns a token's kept rows after the first one, and NOWHERE for all other choices."""
        found, places = jnp.bool_(False), []
        for row in words:
            kept = self.kernel.kept(row)
            places.append(jnp.where(kept & found, row, fb.NOWHERE))
            found = found | kept
        return places[1:]


@dataclasses.dataclass(frozen=True)
class _KnownRoutes(_Routes):
    """The routes of an earlier dispatch, which are read from every peer."""

    rows: Any  # [N, T·K] int32 at each rank, by source rank

    def sources(self) -> list[Any]:
        """Returns each peer's rows of this rank's tokens."""
        fabric = self.kernel.fabric
        return [fabric.peer(self.rows, peer).at[fabric.rank()] for peer in range(fabric.num_ranks)]

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> list[List]:
        """Reads the row of each choice of a token at each rank."""
        entries = [entry + choice for choice in range(self.kernel.top_k)]
        return [[self.scratch.sender.words[rank, e] for e in entries] for rank in ranks]


@dataclasses.dataclass(frozen=True)
class _NewRoutes(_Routes):
    """Computes the routes of new choices, one token after the other."""

    choices: Any  # [T·K] int32

    def sources(self) -> list[Any]:
        """Returns this rank's choices of experts."""
        return [self.kernel.fabric.mine(self.choices)]

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> list[List]:
        """Computes the row of each choice of a token at each rank; advances `next_rows`."""
        of_experts, scratch = self.kernel.experts, self.scratch
        experts = [scratch.sender.words[0, entry + choice] for choice in range(self.kernel.top_k)]
        valid = [(e >= 0) & (e < of_experts.num_experts) for e in experts]
        experts = [
            jnp.where(v, e, of_experts.count_width) for e, v in zip(experts, valid, strict=True)
        ]
        found = of_experts.take_rows(experts, scratch.next_rows, scratch.experts)
        owners = [
            jnp.where(v, lax.div(e, jnp.int32(of_experts.num_local_experts)), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]
        return [
            [
                jnp.where(owner == rank, row, fb.NOWHERE)
                for owner, row in zip(owners, found, strict=True)
            ]
            for rank in ranks
        ]
