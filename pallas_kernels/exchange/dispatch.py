"""Dispatch into the expert-major layout: every rank puts its rows into their final places at peers.

Block b of every rank handles the same range of tokens, with three warpgroups:

  sender    receives how often each rank chose each expert, which block 0 of that rank counts;
            computes the rows of each token, and puts the token into the first of its rows at every
            rank that gets it, with a list of all its rows there;
  receiver  waits for each step of tokens, and copies a token that several experts of this rank get
            from its first row to its other rows;
  filler    writes zeros to the rows of this rank's output that receive no token.

So a row crosses the link once per (token, rank) and is fanned out in local memory, with no staging
buffer. A rank ends only after the last rows sent to it have arrived. What a peer reads of this
rank's inputs, it reads before its own last signal, so that memory is free when the kernel ends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange import short_copies
from pallas_kernels.exchange.expert_rows import ExpertRows
from pallas_kernels.exchange.plan import Plan, Row, pad_last
from pallas_kernels.exchange.sender import PUT, Sender
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import LANES

_COUNTED_AT_ONCE = 8192  # choices, all loaded before the first is counted


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
    wire_dtype: Any = None,
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
      zero_unused: whether rows past the last expert's are zero, or what is in memory.
      wire_dtype: None; or float8_e4m3fn, in which rows are sent and received, with a scale for
        every 128 values; then H is a multiple of 512.

    Returns:
      A tuple of seven: tokens ([R, H],), or with a wire_dtype ([R, H], scales [R, H / 128]);
      rows [N, T, K] int32, the row on this rank of each choice of each source rank, and -1 where
      the choice is of another rank's expert; counts [N, E] int32 of all ranks; group_sizes [L]
      int32, rows of each local expert's group with padding; expert_counts [L] int32, without
      padding; num_dropped [1] int32, rows that did not fit; rows_needed [1] int32, the capacity
      that would hold all.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    kernel = _Dispatch.of(
        x, (num_ranks, num_tokens, top_k), num_experts, capacity, expert_alignment, fabric, plan,
        routes_known=False, fair=fair, zero_unused=zero_unused, wire_dtype=wire_dtype,
    )  # fmt: skip
    flat = (*lead, num_tokens * top_k)
    results = kernel.call(x, kernel.sender.window.pad(topk_idx.reshape(flat), fb.NOWHERE))
    parts, (rows, all_counts, *layout) = kernel.split(results)
    rows = rows[..., : num_tokens * top_k].reshape(*lead, num_ranks, num_tokens, top_k)
    return tuple(parts), rows, all_counts[..., :num_experts], *layout


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
    wire_dtype: Any = None,
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
      capacity: R, that of `dispatch`.
      expert_alignment: that of `dispatch`.
      fair: that of `dispatch`.
      zero_unused: that of `dispatch`.
      wire_dtype: None; or float8_e4m3fn, in which rows are sent and received, with a scale for
        every 128 values; then H is a multiple of 512.
      into: the rows of an earlier call with the same counts. The rows of this call's tokens are
        written into them; all others are kept, and none is filled with zeros.

    Returns:
      tokens ([R, H],), or with a wire_dtype ([R, H], scales [R, H / 128]).
    """
    kernel = _Dispatch.of(
        x, rows.shape[-3:], counts.shape[-1], capacity, expert_alignment, fabric, plan,
        routes_known=True, fair=fair, zero_unused=zero_unused, wire_dtype=wire_dtype,
        adds=into is not None,
    )  # fmt: skip
    operands = (
        x,
        kernel.sender.window.pad(rows.reshape(*rows.shape[:-2], -1), fb.NOWHERE),
        pad_last(counts, kernel.expert_rows.count_width - counts.shape[-1]),
    )
    if into is None:
        return tuple(kernel.call(*operands))
    return fb.update_in_place(into, lambda refs: kernel.call(*operands, *refs))[0]


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """The kernel of `dispatch` and `dispatch_like`: static arguments, and the warpgroups' code."""

    top_k: int
    routes_known: bool
    sender: Sender
    expert_rows: ExpertRows

    @classmethod
    def of(
        cls, x, rows_shape, num_experts, capacity, alignment, fabric, plan, *,
        routes_known, fair, zero_unused, wire_dtype, adds=False,
    ):  # fmt: skip
        num_ranks, num_tokens, top_k = rows_shape
        row = Row(x.shape[-1], x.dtype, wire_dtype)
        sources = num_ranks if routes_known else 1  # of rows, or of experts
        return cls(
            top_k,
            routes_known,
            Sender(fabric, plan, num_tokens, row, num_words=top_k, num_sources=sources),
            ExpertRows(
                fabric,
                plan.num_blocks,
                num_experts,
                capacity,
                alignment,
                row.parts,
                fair=fair,
                zero_unused=zero_unused,
                adds=adds,
                count_arrivals=None if routes_known else 1,
            ),
        )

    @property
    def fabric(self) -> fb.Fabric:
        return self.sender.fabric

    @property
    def plan(self) -> Plan:
        return self.sender.plan

    @property
    def shared(self) -> tuple[int, ...]:
        first = 3 if self.routes_known else 2  # after the operands
        tokens = range(first, first + len(self.sender.row.parts))
        return (1, *tokens) if self.routes_known else (*tokens, tokens.stop)

    @property
    def quantized(self) -> bool:
        return self.sender.row.wire_dtype is not None

    def split(self, results: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Splits the kernel's results into the parts of received rows, and all others."""
        num_parts = len(self.sender.row.parts)
        return results[:num_parts], results[num_parts:]

    def call(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        num_ranks, of_experts = self.fabric.num_ranks, self.expert_rows
        capacity, per_rank = of_experts.capacity, of_experts.num_local_experts
        parts = [] if of_experts.adds else self.sender.row.parts
        out_type = [jax.ShapeDtypeStruct((capacity, width), t) for width, t in parts]
        if not self.routes_known:
            out_type += [
                jax.ShapeDtypeStruct((num_ranks, self.sender.window.total), jnp.int32),
                jax.ShapeDtypeStruct((num_ranks, of_experts.count_width), jnp.int32),
                *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (per_rank, per_rank, 1, 1)),
            ]
        return fb.kernel(
            self.fabric,
            self,
            name="ep_dispatch_like" if self.routes_known else "ep_dispatch",
            num_blocks=self.plan.num_blocks,
            num_warpgroups=3,
            out_type=out_type,
            scratch_types=self._scratch_types(),
            shared=self.shared,
        )(*operands)

    def _scratch_types(self) -> dict[str, Any]:
        copies, ranks, sender = self.plan.num_copy_stages, self.fabric.num_ranks, self.sender
        types: dict[str, Any] = {}
        if not self.routes_known:
            # The next row of each expert. Entries after the last expert take choices of none.
            types["next_rows"] = plgpu.SMEM((self.expert_rows.count_width + LANES,), jnp.int32)
        return dict(
            **types,
            **sender.scratch_types(),
            **self.expert_rows.scratch_types(),
            step_rows=plgpu.SMEM((ranks, sender.step_window.width), jnp.int32),
            step_copies=plgpu.SMEM((sender.step_tokens * ranks, self.top_k), jnp.int32),
            copies=[plgpu.SMEM((copies, width), t) for width, t in sender.row.parts],
            laid_out=plgpu.Barrier(),
            connected=plgpu.Barrier(),
            copy_full=plgpu.Barrier(num_barriers=(copies,)),
        )

    def __call__(self, *refs: Any, laid_out: Any, connected: Any, **scratch: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        fabric, sender = self.fabric, self.sender
        tokens: Any  # the parts of the received rows
        layout: Any = ()
        if self.routes_known:
            x, rows, counts, *tokens = refs
            choices, all_counts_ref = rows, None
        else:
            x, choices, *results = refs
            tokens, (rows, all_counts_ref, *layout) = self.split(results)

        @pl.when(warpgroup == 0)
        def _sender():
            fabric.delay_point(0)
            if self.routes_known:
                self.expert_rows.fetch_counts(counts, **scratch)
            else:
                self._send_counts(choices, **scratch)
            sender.fetch_first(x, **scratch)
            sources = functools.partial(self._sources, choices)
            if self.routes_known:
                fabric.connect()
            sender.open_window(sources, 0, **scratch)
            if not self.routes_known:
                self._count_earlier(choices, **scratch)
                self.expert_rows.receive_counts(**scratch)
            sender.make_ready(x, 0, **scratch)
            self.expert_rows.lay_out(all_counts_ref, **scratch)
            plgpu.barrier_arrive(laid_out)
            if not self.routes_known:
                plgpu.barrier_wait(connected)
            find = self._known_rows if self.routes_known else self._new_rows
            sender.send(
                x,
                sources,
                tokens,
                None if self.routes_known else rows,
                lists_for=functools.partial(find, **scratch),
                place_of=self._first_place,
                further_of=self._further_places,
                **scratch,
            )

        @pl.when(warpgroup == 2)
        def _filler():
            plgpu.barrier_wait(laid_out)
            fabric.delay_point(3)
            if not self.routes_known:
                self.expert_rows.describe(*layout, **scratch)
            self.expert_rows.fill(tokens, **scratch)

        @pl.when(warpgroup == 1)
        def _receiver():
            if not self.routes_known:  # connects here, to leave the sender less to do
                fabric.connect()
                plgpu.barrier_arrive(connected)
            self._receive(rows, tokens, **scratch)

    def _send_counts(self, choices, /, *, next_rows, **_):
        """Counts this rank's choices of each expert, and sends the counts to every rank.

        Block 0 does, which every GPU starts first.
        """
        fabric, width = self.fabric, self.expert_rows.count_width

        @pl.when(lax.axis_index("block") == 0)
        def _():
            fb.clear(next_rows, width)
            fabric.barrier()
            self._count(choices, self.sender.num_tokens * self.top_k, next_rows)
            fabric.barrier()
            fabric.send_values(next_rows.at[pl.ds(0, width)], 0)
            fabric.barrier()

    def _sources(self, choices):
        """Returns what the sender reads routes from.

        With known routes these are each peer's rows of this rank's tokens, else this rank's choices
        of experts.
        """
        fabric = self.fabric
        if not self.routes_known:
            return [fabric.mine(choices)]
        return [fabric.peer(choices, peer).at[fabric.rank()] for peer in range(fabric.num_ranks)]

    def _count_earlier(self, choices, /, *, next_rows, **_):
        """Counts in `next_rows` how often the tokens of earlier blocks choose each expert."""
        fb.clear(next_rows, self.expert_rows.count_width)
        self.fabric.barrier()
        end = jnp.minimum(self.sender.range()[0], self.sender.num_tokens) * self.top_k
        self._count(choices, end, next_rows)
        self.fabric.barrier()

    def _count(self, choices, end, bins):
        """Adds the first `end` of this rank's choices to `bins`, which counts them by expert."""
        fabric, num_choices = self.fabric, self.sender.window.total
        width = min(_COUNTED_AT_ONCE, num_choices // LANES * LANES)

        def count(i, _):
            start = jnp.minimum(i * width, num_choices - width)
            entries = start + fb.iota(fabric, width)
            experts = fb.load(fabric, fabric.mine(choices).at[pl.ds(start, width)], 1)
            new = (entries >= i * width) & (entries < end)
            experts = jnp.where(new, experts, fb.NOWHERE)
            fb.count(fabric, bins, experts, self.expert_rows.num_experts)

        lax.fori_loop(0, lax.div(end + (width - 1), jnp.int32(width)), count, None)

    def _known_rows(self, entry, peers, *, choices, **_):
        """Reads, from known routes, the row of each choice of a token at each peer: [N][K]."""
        entries = [entry + choice for choice in range(self.top_k)]
        return [[choices[peer, e] for e in entries] for peer in peers]

    def _new_rows(self, entry, peers, *, choices, next_rows, block_ends, **_):
        """Computes the row of each choice of a token at each peer, [N][K]; advances `next_rows`."""
        of_experts = self.expert_rows
        experts = [choices[0, entry + choice] for choice in range(self.top_k)]
        valid = [(e >= 0) & (e < of_experts.num_experts) for e in experts]
        experts = [
            jnp.where(v, e, of_experts.count_width) for e, v in zip(experts, valid, strict=True)
        ]
        found = of_experts.take_rows(experts, next_rows, block_ends)
        owners = [
            jnp.where(v, lax.div(e, jnp.int32(of_experts.num_local_experts)), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]
        return [
            [
                jnp.where(owner == peer, row, fb.NOWHERE)
                for owner, row in zip(owners, found, strict=True)
            ]
            for peer in peers
        ]

    def _first_place(self, rows, i):
        """Returns the first of a token's rows at a peer that is not dropped, or NOWHERE."""
        del i
        place = jnp.int32(fb.NOWHERE)
        for row in reversed(rows):
            kept = (row >= 0) & (row < self.expert_rows.capacity)
            place = jnp.where(kept, row, place)
        return place

    def _further_places(self, rows):
        """Returns a token's rows that are kept, but for the first; NOWHERE for the others."""
        found, places = jnp.bool_(False), []
        for row in rows:
            kept = (row >= 0) & (row < self.expert_rows.capacity)
            places.append(jnp.where(kept & found, row, fb.NOWHERE))
            found = found | kept
        return places[1:]

    def _receive(self, rows, tokens, *, step_rows, step_copies, copies, copy_full, **_):
        fabric, num_copies = self.fabric, self.plan.num_copy_stages
        first_token, num_tokens = self.sender.range()

        def begin(i, begun):
            first = jnp.int32(fb.NOWHERE)
            for choice in reversed(range(self.top_k)):
                place = step_copies[i, choice]
                first = jnp.where(place >= 0, place, first)
            stage = lax.rem(begun + i, jnp.int32(num_copies))
            plgpu.copy_gmem_to_smem(
                fabric.mine(tokens[0]).at[first],
                copies[0].at[stage],
                copy_full.at[stage],
                oob_mode=fb.IN_BOUNDS,
            )
            if self.quantized:
                scales, ring = tokens[1], copies[1]
                short_copies.begin(fabric, fabric.mine(scales).at[first], ring.at[stage])
                short_copies.commit_group(fabric)

        def finish(i, begun, count):
            stage = lax.rem(begun + i, jnp.int32(num_copies))
            plgpu.barrier_wait(copy_full.at[stage])
            if self.quantized:
                lax.cond(
                    i + num_copies <= count,  # if so, num_copies - 1 copies were begun after this
                    lambda: short_copies.wait(fabric, num_copies - 1),
                    lambda: short_copies.wait(fabric, 0),
                )
            self._put_copies(i, stage, tokens, step_copies, copies)

        def receive_step(step, begun):
            """Copies a step's rows to their further places; returns how many have been copied.

            `begun` rows were copied in earlier steps; the next stage is `begun` modulo the stages.
            """
            fabric.wait(PUT, step + 1, "dispatch")
            fabric.delay_point(2)
            fabric.async_fence()
            count = self._list_copies(step, first_token, num_tokens, rows, step_rows, step_copies)

            def begin_next(i, carry):
                begin(i, begun)
                return carry

            def copy_row(i, carry):
                finish(i, begun, count)

                @pl.when(i + num_copies < count)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    begin(i + num_copies, begun)

                return carry

            lax.fori_loop(0, jnp.minimum(count, num_copies), begin_next, None)
            lax.fori_loop(0, count, copy_row, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return begun + count

        lax.fori_loop(0, self.sender.num_steps(), receive_step, jnp.int32(0))

        @pl.when(num_tokens == 0)
        def _():  # no token is received, but peers may still read this rank's rows, if known
            fabric.wait(PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)

    def _list_copies(self, step, first_token, num_tokens, rows, step_rows, step_copies):
        """Lists the tokens of peers that have several rows on this rank; returns their count.

        step_copies[:count, :K] becomes the rows of each, NOWHERE for choices without one. The first
        of them has already been received. This rank's own tokens are put to all their rows by the
        sender. The block handles `num_tokens` tokens of every source
        rank, from `first_token` on.
        """
        fabric, num_ranks, top_k = self.fabric, self.fabric.num_ranks, self.top_k
        step_tokens = self.sender.step_tokens
        step_token = first_token + step * step_tokens
        others = [lax.rem(fabric.rank() + i, jnp.int32(num_ranks)) for i in range(1, num_ranks)]
        if not others:
            return jnp.int32(0)
        sources = [(source, fabric.mine(rows), source) for source in others]
        window = self.sender.step_window
        start = open_window(fabric, window, step_token * top_k, (step_rows, sources))

        def list_token(i, count):
            for source in others:
                places, held = [], jnp.int32(0)
                for choice in range(top_k):
                    row = step_rows[source, (step_token + i) * top_k - start + choice]
                    here = (row >= 0) & (row < self.expert_rows.capacity)
                    places.append(jnp.where(here, row, fb.NOWHERE))
                    held = held + here.astype(jnp.int32)
                for choice, place in enumerate(places):
                    step_copies[count, choice] = place  # overwritten unless `count` is raised below
                count = count + (held > 1).astype(jnp.int32)
            return count

        tokens_of_step = jnp.minimum(num_tokens - step * step_tokens, step_tokens)
        count = lax.fori_loop(0, tokens_of_step, list_token, jnp.int32(0))
        fabric.barrier()
        return count

    def _put_copies(self, i, stage, tokens, step_copies, copies):
        """Copies the i-th listed token, which is in `stage`, to all of its rows but the first."""
        fabric = self.fabric
        copied_from = step_copies[i, 0] >= 0
        for choice in range(1, self.top_k):
            place = step_copies[i, choice]
            for part, ref in zip(copies, tokens, strict=True):
                fb.put_if(
                    fabric, copied_from & (place >= 0), part.at[stage], fabric.mine(ref).at[place]
                )
            copied_from = copied_from | (place >= 0)
        plgpu.commit_smem_to_gmem_group()
