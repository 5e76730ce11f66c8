"""Dispatch: every rank puts its rows straight into their final places at the peers.

Each block serves a range of tokens, the same on every rank, with three warpgroups:

  sender    reads the peers' counts, works out where the rows of a step of tokens go, puts the
            lists of these places, then each row into its first place at every rank that gets it;
  receiver  lists, while the rows are under way, those that several experts here are to get, and
            copies them, once they have arrived, from their first place to the others;
  filler    writes zeros to the rows of this rank's receive buffer that receive nothing.

So a row crosses the link once per (token, rank) and is fanned out in local memory; there is no
staging buffer. No rank leaves early: its last wait is for the last rows meant for it, and what a
peer reads of its inputs is read before that peer's last signal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fabric as fb
from pallas_kernels import quantize, short_copies
from pallas_kernels.plan import LANES, Plan, Tiling, Window, align_up, pad_last

_NOWHERE = -1
_PUT = 0  # channel, signalled after each step and at the end: see _Dispatch._send

Payload = jax.Array | tuple[jax.Array, ...]


def payload(parts: Sequence[jax.Array]) -> Payload:
    """What arrived: rows, or rows and their scales."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    counts: jax.Array,
    counts_before: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
    wire_dtype: Any = None,
    stage: str = "all",
) -> tuple[Payload, jax.Array, jax.Array]:
    """Routes and moves the rows. With a stacked fabric every array has a leading rank axis.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      topk_idx: [T, K] int32.
      counts: [E] int32: this rank's choices of each expert.
      counts_before: [B, E] int32: those of the tokens before each block's.
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the rings.
      capacity: R.
      expert_alignment: each expert's block starts at a multiple of this.
      wire_dtype: None; or float8_e4m3fn, in which the rows travel and arrive, with a scale for
        every 128 values; then H is a multiple of 512.
      stage: "all"; or, where ranks are stacked, "put", which leaves out the copies of `fan_out`.

    Returns:
      tokens [R, H], or with a wire_dtype two of them, (rows [R, H], scales [R, H / 128]);
      rows [N, T, K] int32, counts [N, E] int32 of all ranks.
    """
    (num_tokens, top_k), num_experts = topk_idx.shape[-2:], counts.shape[-1]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    kernel = _Dispatch.of(
        x, (num_ranks, num_tokens, top_k), num_experts, capacity, expert_alignment, fabric, plan,
        routes_known=False, stage=stage, wire_dtype=wire_dtype,
    )  # fmt: skip
    flat = (*lead, num_tokens * top_k)
    *tokens, rows, all_counts = kernel.call(
        x,
        kernel.window.pad(topk_idx.reshape(flat), _NOWHERE),
        pad_last(counts, kernel.count_width - num_experts),
        pad_last(counts_before, kernel.count_width - num_experts),
    )
    rows = rows[..., : num_tokens * top_k].reshape(*lead, num_ranks, num_tokens, top_k)
    return payload(tokens), rows, all_counts[..., :num_experts]


def dispatch_like(
    x: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
    wire_dtype: Any = None,
    stage: str = "all",
) -> Payload:
    """Moves [T, H] along known routes (rows [N, T, K], counts [N, E]) to tokens [R, H]."""
    kernel = _Dispatch.of(
        x, rows.shape[-3:], counts.shape[-1], capacity, expert_alignment, fabric, plan,
        routes_known=True, stage=stage, wire_dtype=wire_dtype,
    )  # fmt: skip
    tokens = kernel.call(
        x,
        kernel.window.pad(rows.reshape(*rows.shape[:-2], -1), _NOWHERE),
        pad_last(counts, kernel.count_width - counts.shape[-1]),
    )
    return payload(tokens)


def fan_out(tokens: jax.Array, rows: jax.Array, *, fabric: fb.Stacked, plan: Plan) -> jax.Array:
    """The receiver's stage alone, where ranks are stacked: only the rows it copies are written."""
    kernel = _Dispatch.of(
        tokens, rows.shape[-3:], fabric.num_ranks, tokens.shape[-2], 1, fabric, plan,
        routes_known=True, stage="fan_out",
    )  # fmt: skip
    (out,) = kernel.call(tokens, kernel.window.pad(rows.reshape(*rows.shape[:-2], -1), _NOWHERE))
    return out


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """The kernel: its static arguments, and its body warpgroup by warpgroup."""

    num_ranks: int
    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    capacity: int
    alignment: int
    dtype: Any
    routes_known: bool
    stage: str
    fabric: fb.Fabric
    plan: Plan
    window: Window  # the sender's
    step_window: Window  # the receiver's
    wire_dtype: Any = None

    @classmethod
    def of(
        cls, x, rows_shape, num_experts, capacity, alignment, fabric, plan, *, routes_known, stage,
        wire_dtype=None,
    ):  # fmt: skip
        num_ranks, num_tokens, top_k = rows_shape
        window = Window.of(plan.window_tokens, plan, num_tokens, top_k)
        step_window = Window.of(plan.step_tokens, plan, num_tokens, top_k)
        total = max(window.total, step_window.total)
        return cls(
            num_ranks, num_tokens, x.shape[-1], top_k, num_experts, capacity, alignment, x.dtype,
            routes_known, stage, fabric, plan,
            window=dataclasses.replace(window, total=total),
            step_window=dataclasses.replace(step_window, total=total),
            wire_dtype=wire_dtype,
        )  # fmt: skip

    @property
    def parts(self) -> list[tuple[int, Any]]:
        """What a row consists of on its way and where it arrives: columns and dtype of each."""
        if self.wire_dtype is None:
            return [(self.hidden, self.dtype)]
        return [(self.hidden, self.wire_dtype), (self.hidden // quantize.BLOCK, jnp.float32)]

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def count_width(self) -> int:
        return align_up(self.num_experts, LANES)

    @property
    def tokens_per_block(self) -> int:
        return self.plan.tokens_per_block(self.num_tokens)

    @property
    def step_tokens(self) -> int:
        return min(self.plan.step_tokens, self.tokens_per_block)

    def call(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        out_type = [jax.ShapeDtypeStruct((self.capacity, width), t) for width, t in self.parts]
        if not self.routes_known:
            out_type += [
                jax.ShapeDtypeStruct((self.num_ranks, self.window.total), jnp.int32),
                jax.ShapeDtypeStruct((self.num_ranks, self.count_width), jnp.int32),
            ]
        return fb.kernel(
            self.fabric,
            self,
            name="ep_dispatch_like" if self.routes_known else "ep_dispatch",
            num_blocks=self.plan.num_blocks,
            num_warpgroups=3,
            out_type=out_type,
            scratch_types=self._scratch_types(),
            num_channels=1,
        )(*operands)

    def _scratch_types(self) -> dict[str, Any]:
        slots, copies, width = self.plan.num_slots, self.plan.num_copy_slots, self.count_width
        ranks, top_k = self.num_ranks, self.top_k
        return dict(
            scan=plgpu.SMEM((2 * width,), jnp.int32),
            next_rows=plgpu.SMEM((width,), jnp.int32),  # where each expert's next row goes
            block_ends=plgpu.SMEM((2, width), jnp.int32),  # of each expert's rows, and padded
            choices=plgpu.SMEM(
                (ranks if self.routes_known else 1, self.window.width), jnp.int32
            ),  # rows at each peer, or experts
            **self._row_types(),
            step_lists=plgpu.SMEM((self.step_tokens, ranks, top_k), jnp.int32),
            step_places=plgpu.SMEM((self.step_tokens, ranks), jnp.int32),
            step_rows=plgpu.SMEM((ranks, self.step_window.width), jnp.int32),
            step_copies=plgpu.SMEM((self.step_tokens * ranks, top_k), jnp.int32),
            copies=[plgpu.SMEM((copies, width), t) for width, t in self.parts],
            zeros=[plgpu.SMEM((Tiling.of(width, t).padded,), t) for width, t in self.parts],
            laid_out=plgpu.Barrier(),
            full=plgpu.Barrier(num_barriers=(slots,)),
            copy_full=plgpu.Barrier(num_barriers=(copies,)),
        )

    def _row_types(self) -> dict[str, Any]:
        """The sender's ring: rows as they leave and, if they are quantized first, as they are."""
        slots = self.plan.num_slots
        types: dict[str, Any] = dict(slots=[plgpu.SMEM((slots, w), t) for w, t in self.parts])
        if self.wire_dtype is not None:
            types["wide_slots"] = plgpu.SMEM((slots, self.hidden), self.dtype)
        return types

    def __call__(self, *refs: Any, semaphores: Any, laid_out: Any, **scratch: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        if self.stage == "fan_out":
            put_tokens, rows, tokens = refs
            put_tokens, tokens = [put_tokens], [tokens]
        elif self.routes_known:
            x, rows, counts, *tokens = refs
            choices, counts_before, all_counts, put_tokens = rows, None, None, tokens
        else:
            x, choices, counts, counts_before, *tokens, rows, all_counts = refs
            put_tokens = tokens

        if self.stage != "fan_out":

            @pl.when(warpgroup == 0)
            def _sender():
                self.fabric.stage(0)
                self._fetch_first(x, **scratch)
                per_source, earlier = self._read_counts(counts, counts_before)
                self.fabric.touch(*tokens, *(() if self.routes_known else (rows,)))
                self._open_window(choices, 0, **scratch)
                self._lay_out(per_source, earlier, all_counts, **scratch)
                plgpu.barrier_arrive(laid_out)
                self._send(x, choices, tokens, rows, semaphores, **scratch)

            @pl.when(warpgroup == 2)
            def _filler():
                plgpu.barrier_wait(laid_out)
                self.fabric.stage(3)
                self._fill(tokens, **scratch)

        if self.stage != "put":

            @pl.when(warpgroup == 1)
            def _receiver():
                self._receive(put_tokens, rows, tokens, semaphores, **scratch)

    def _range(self) -> tuple[jax.Array, jax.Array]:
        """This block's tokens, the same on every rank: first, and how many."""
        first = lax.axis_index("block") * self.tokens_per_block
        return first, jnp.clip(self.num_tokens - first, 0, self.tokens_per_block)

    def _num_steps(self) -> jax.Array:
        _, num_tokens = self._range()
        return lax.div(num_tokens + (self.step_tokens - 1), jnp.int32(self.step_tokens))

    def _fetch(self, x, token, i, *, slots, full, wide_slots=None, **_):
        slot = lax.rem(i, jnp.int32(self.plan.num_slots))
        (ring,) = slots if wide_slots is None else [wide_slots]
        plgpu.copy_gmem_to_smem(
            self.fabric.mine(x).at[token], ring.at[slot], full.at[slot], oob_mode=fb.IN_BOUNDS
        )

    def _fetch_first(self, x, **scratch):
        first, count = self._range()

        def fetch(i, _):
            self._fetch(x, first + i, i, **scratch)

        lax.fori_loop(0, jnp.minimum(count, self.plan.num_slots), fetch, None)

    def _open_window(self, choices_ref, i, *, choices, **_):
        """Loads the choices of this block's tokens from the i-th on."""
        fabric, window = self.fabric, self.window
        first_token = self._range()[0]
        if self.routes_known:
            peers = range(self.num_ranks)
            sources = [fabric.peer(choices_ref, r).at[fabric.rank()] for r in peers]
        else:
            sources = [fabric.mine(choices_ref)]
        entries = pl.ds(window.start((first_token + i) * self.top_k), window.width)
        values = [source.at[entries][...] for source in sources]
        fabric.barrier()  # the window before this one has been read
        for i, value in enumerate(values):
            choices[i] = value
        fabric.barrier()

    def _read_counts(self, counts, counts_before):
        """Every rank's choices of each expert, and this rank's before this block."""
        fabric, ranks = self.fabric, range(self.num_ranks)
        if self.routes_known:
            return [fb.load(fabric, fabric.mine(counts).at[rank], 1) for rank in ranks], None
        per_source = [fb.load(fabric, fabric.peer(counts, rank), 1) for rank in ranks]
        block = lax.axis_index("block")
        return per_source, fb.load(fabric, fabric.mine(counts_before).at[block], 1)

    def _lay_out(self, per_source, earlier, all_counts, *, scan, next_rows, block_ends, **_):
        """Where each expert's block starts and ends at its rank, and this block's rows in it."""
        fabric, width, per_rank = self.fabric, self.count_width, self.num_local_experts
        rank = fabric.rank()
        total = sum(per_source[1:], per_source[0])
        sizes = total
        if self.alignment > 1:
            alignment = jnp.int32(self.alignment)
            sizes = lax.div(total + (alignment - 1), alignment) * alignment
        # An inclusive scan over each rank's experts: `scan` holds zeros, then the sums so far.
        local_expert = lax.rem(fb.iota(fabric, width), jnp.int32(per_rank))
        scan[pl.ds(0, width)] = jnp.zeros((width,), jnp.int32)
        ends, shift = sizes, 1
        while shift < per_rank:
            scan[pl.ds(width, width)] = ends
            fabric.barrier()
            before = fb.load(fabric, scan.at[pl.ds(width - shift, width)], 1)
            fabric.barrier()
            ends = ends + jnp.where(local_expert >= shift, before, jnp.zeros_like(before))
            shift *= 2
        starts = ends - sizes
        if not self.routes_known:
            row = starts + earlier
            for source in range(self.num_ranks):
                counted = per_source[source]
                row = row + jnp.where(source < rank, counted, jnp.zeros_like(counted))
            next_rows[...] = row
        block_ends[0] = starts + total
        block_ends[1] = ends
        fabric.barrier()
        if all_counts is not None:

            @pl.when(lax.axis_index("block") == 0)
            def _():
                for source in range(self.num_ranks):
                    fabric.mine(all_counts)[source] = per_source[source]

    def _send(
        self, x, choices_ref, tokens, rows, semaphores, *, choices, slots, step_lists, step_places,
        full, wide_slots=None, **bookkeeping,
    ):  # fmt: skip
        fabric, plan, window = self.fabric, self.plan, self.window
        num_ranks, top_k, lag = self.num_ranks, self.top_k, plan.store_lag
        num_slots, step_tokens = plan.num_slots, self.step_tokens
        rank, block = fabric.rank(), lax.axis_index("block")
        first_token, num_tokens = self._range()
        peers = [lax.rem(i + plan.peer_offset(rank, block), num_ranks) for i in range(num_ranks)]

        def list_token(i, carry):
            """Notes the first place of a token at each peer, and tells the peer all of them."""
            in_window = lax.rem(i, jnp.int32(window.tokens))

            @pl.when((in_window == 0) & (i > 0))
            def _():
                self._open_window(choices_ref, i, choices=choices)

            entry = (first_token + i) * top_k
            in_choices = entry - window.start(entry - in_window * top_k)
            found = self._lists(in_choices, peers, choices=choices, **bookkeeping)
            in_step = lax.rem(i, jnp.int32(step_tokens))
            for peer, peer_rows in zip(peers, found, strict=True):
                step_places[in_step, peer] = self._place(peer_rows, i)
                if self.routes_known:
                    continue
                for choice, row in enumerate(peer_rows):
                    if top_k % 4:  # bulk copies are of whole 16 bytes
                        fabric.peer(rows, peer)[rank, entry + choice] = row
                    else:
                        step_lists[in_step, peer, choice] = row
            if not self.routes_known and top_k % 4 == 0:
                plgpu.commit_smem()
                for peer in peers:
                    plgpu.copy_smem_to_gmem(
                        step_lists.at[in_step, peer],
                        fabric.peer(rows, peer).at[rank, pl.ds(entry, top_k)],
                        commit_group=False,
                    )
            return carry

        def fetch_after(i):
            """Into the slot of the i-th token, if there is one, once it is free."""
            ahead = i + num_slots

            @pl.when((i >= 0) & (ahead < num_tokens))
            def _():
                self._fetch(
                    x, first_token + ahead, ahead, slots=slots, full=full, wide_slots=wide_slots
                )

        def send_token(i, carry):
            slot, in_step = lax.rem(i, jnp.int32(num_slots)), lax.rem(i, jnp.int32(step_tokens))
            plgpu.barrier_wait(full.at[slot])
            if wide_slots is not None:
                quantize.quantize_row(
                    fabric, wide_slots.at[slot], *(part.at[slot] for part in slots)
                )
                plgpu.commit_smem()  # all have read the wide row, and the puts see the other
                fetch_after(i)
            for peer in peers:
                place = step_places[in_step, peer]
                for part, ref in zip(slots, tokens, strict=True):
                    fb.put_if(fabric, place >= 0, part.at[slot], fabric.peer(ref, peer).at[place])
            plgpu.commit_smem_to_gmem_group()

            # Once a slot's puts have read it, it takes the next token.
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            if wide_slots is None:
                fetch_after(i - lag)
            return carry

        def send_step(step, carry):
            begin = step * step_tokens
            end = jnp.minimum(begin + step_tokens, num_tokens)
            lax.fori_loop(begin, end, list_token, None)
            plgpu.commit_smem_to_gmem_group()
            lax.fori_loop(begin, end, send_token, None)
            # With only this step's rows under way, its lists and the rows before have arrived.
            lax.cond(
                end - begin == step_tokens,
                lambda: plgpu.wait_smem_to_gmem(step_tokens),
                lambda: plgpu.wait_smem_to_gmem(0),
            )
            fabric.stage(1)
            fabric.signal(semaphores, _PUT)
            return carry

        lax.fori_loop(0, self._num_steps(), send_step, None)
        plgpu.wait_smem_to_gmem(0)
        fabric.stage(1)
        fabric.signal(semaphores, _PUT)

    def _lists(self, entry, peers, *, choices, next_rows, **_):
        """[N][K]: the row of each choice at each rank, in the order of `peers`."""
        if self.routes_known:
            entries = [entry + choice for choice in range(self.top_k)]
            return [[choices[peer, e] for e in entries] for peer in peers]
        # Read where each expert's next row goes, all threads, then count this token's choices.
        experts = [choices[0, entry + choice] for choice in range(self.top_k)]
        valid = [(e >= 0) & (e < self.num_experts) for e in experts]
        experts = [jnp.where(v, e, 0) for e, v in zip(experts, valid, strict=True)]
        found = [next_rows[expert] for expert in experts]
        for choice in range(self.top_k):
            for earlier in range(choice):
                again = valid[earlier] & (experts[earlier] == experts[choice])
                found[choice] = found[choice] + again.astype(jnp.int32)
        self.fabric.barrier()
        for choice, expert in enumerate(experts):

            @pl.when(valid[choice])
            def _():
                next_rows[expert] = found[choice] + 1

        self.fabric.barrier()  # the next token reads what this one has counted
        owners = [
            jnp.where(v, lax.div(e, jnp.int32(self.num_local_experts)), _NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]
        return [
            [
                jnp.where(owner == peer, row, _NOWHERE)
                for owner, row in zip(owners, found, strict=True)
            ]
            for peer in peers
        ]

    def _place(self, rows, i):
        """Where the i-th token goes first at a peer, given the list for it; or nowhere."""
        del i
        place = jnp.int32(_NOWHERE)
        for row in reversed(rows):
            place = jnp.where((row >= 0) & (row < self.capacity), row, place)
        return place

    def _receive(
        self,
        put_tokens,
        rows,
        tokens,
        semaphores,
        *,
        step_rows,
        step_copies,
        copies,
        copy_full,
        **_,
    ):
        fabric, plan, window = self.fabric, self.plan, self.step_window
        num_ranks, top_k, num_copies = self.num_ranks, self.top_k, plan.num_copy_slots
        first_token, num_tokens = self._range()

        def list_copies(step):
            """step_copies[:count]: the rows of this step that go to several places, and which."""
            step_token = first_token + step * self.step_tokens
            start = window.start(step_token * top_k)
            values = [
                fabric.mine(rows).at[source, pl.ds(start, window.width)][...]
                for source in range(num_ranks)
            ]
            fabric.barrier()  # the step before this one has been read
            for source, value in enumerate(values):
                step_rows[source] = value
            fabric.barrier()

            def list_pair(pair, count):
                source = lax.rem(pair, num_ranks)
                entry = (step_token + lax.div(pair, num_ranks)) * top_k - start
                places, held = [], jnp.int32(0)
                for choice in range(top_k):
                    row = step_rows[source, entry + choice]
                    here = (row >= 0) & (row < self.capacity)
                    places.append(jnp.where(here, row, _NOWHERE))
                    held = held + here.astype(jnp.int32)

                @pl.when(held > 1)
                def _():
                    for choice, place in enumerate(places):
                        step_copies[count, choice] = place

                return count + (held > 1).astype(jnp.int32)

            pairs = jnp.minimum(num_tokens - step * self.step_tokens, self.step_tokens) * num_ranks
            return lax.fori_loop(0, pairs, list_pair, jnp.int32(0))

        def begin(i, begun):
            first = jnp.int32(_NOWHERE)
            for choice in reversed(range(top_k)):
                place = step_copies[i, choice]
                first = jnp.where(place >= 0, place, first)
            slot = lax.rem(begun + i, jnp.int32(num_copies))
            plgpu.copy_gmem_to_smem(
                fabric.mine(put_tokens[0]).at[first],
                copies[0].at[slot],
                copy_full.at[slot],
                oob_mode=fb.IN_BOUNDS,
            )
            if self.wire_dtype is not None:
                scales, ring = put_tokens[1], copies[1]
                short_copies.begin(fabric, fabric.mine(scales).at[first], ring.at[slot])
                short_copies.commit_group(fabric)

        def finish(i, begun, count):
            slot = lax.rem(begun + i, jnp.int32(num_copies))
            plgpu.barrier_wait(copy_full.at[slot])
            if self.wire_dtype is not None:
                lax.cond(
                    i + num_copies <= count,  # as many were begun after this one, but for the last
                    lambda: short_copies.wait(fabric, num_copies - 1),
                    lambda: short_copies.wait(fabric, 0),
                )
            copied_from = step_copies[i, 0] >= 0
            for choice in range(1, top_k):
                place = step_copies[i, choice]
                for part, ref in zip(copies, tokens, strict=True):
                    fb.put_if(
                        fabric,
                        copied_from & (place >= 0),
                        part.at[slot],
                        fabric.mine(ref).at[place],
                    )
                copied_from = copied_from | (place >= 0)
            plgpu.commit_smem_to_gmem_group()

        def receive_step(step, begun):
            """`begun` copies have gone through the ring before this step's."""
            fabric.wait(semaphores, _PUT, step + 1, "dispatch")
            fabric.stage(2)
            count = list_copies(step)
            fabric.wait(semaphores, _PUT, step + 2, "dispatch")
            fabric.async_fence()

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

        lax.fori_loop(0, self._num_steps(), receive_step, jnp.int32(0))

        @pl.when(num_tokens == 0)
        def _():  # nothing comes, but peers may still be reading this rank's counts
            fabric.wait(semaphores, _PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)

    def _fill(self, tokens, *, zeros, block_ends, **_):
        plan, rank, per_rank = self.plan, self.fabric.rank(), self.num_local_experts
        block = lax.axis_index("block")
        for part in zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()

        def fill_gap(begin, end):
            end = jnp.minimum(end, self.capacity)
            num_blocks = jnp.int32(plan.num_blocks)
            count = lax.div(end - begin - block + (num_blocks - 1), num_blocks)

            def fill_row(i, carry):
                row = begin + block + i * num_blocks
                for part, ref, (width, _) in zip(zeros, tokens, self.parts, strict=True):
                    plgpu.copy_smem_to_gmem(part.at[pl.ds(0, width)], self.fabric.mine(ref).at[row])
                return carry

            lax.fori_loop(0, jnp.maximum(count, 0), fill_row, None)

        if self.alignment > 1:

            def fill_padding(expert, carry):
                fill_gap(block_ends[0, expert], block_ends[1, expert])
                return carry

            lax.fori_loop(rank * per_rank, (rank + 1) * per_rank, fill_padding, None)
        fill_gap(block_ends[1, (rank + 1) * per_rank - 1], self.capacity)
        plgpu.wait_smem_to_gmem(0)
