"""Dispatch: every rank puts its rows straight into their final places at the peers.

Each block serves a range of tokens, the same on every rank, with three warpgroups:

  sender    reads the peers' counts, works out where the rows of each token go, puts it into its
            first place at every rank that gets it, and the list of all its places beside it;
  receiver  copies the rows of a step of tokens that several experts here are to get, once they
            have arrived, from their first place to the others;
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

_PUT = 0  # channel, signalled once for each step, and once where there is none
_COUNTED = 1024  # choices that a block counts at a time

Payload = jax.Array | tuple[jax.Array, ...]


def payload(parts: Sequence[jax.Array]) -> Payload:
    """What arrived: rows, or rows and their scales."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
    wire_dtype: Any = None,
    stage: str = "all",
) -> tuple[Any, ...]:
    """Routes and moves the rows. With a stacked fabric every array has a leading rank axis.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      topk_idx: [T, K] int32.
      counts: [E]: this rank's choices of each expert, of a type that holds T * K. All blocks of all
        ranks read them at once, so a small type is soon there.
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the rings.
      capacity: R.
      expert_alignment: each expert's block starts at a multiple of this.
      wire_dtype: None; or float8_e4m3fn, in which the rows travel and arrive, with a scale for
        every 128 values; then H is a multiple of 512.
      stage: "all"; or, where ranks are stacked, "put", which leaves out the copies of `fan_out`.

    Returns:
      tokens [R, H], or with a wire_dtype two of them, (rows [R, H], scales [R, H / 128]);
      rows [N, T, K] int32, counts [N, E] int32 of all ranks, and the layout of tokens, all int32:
      group_sizes [L], expert_counts [L], num_dropped [1], rows_needed [1].
    """
    (num_tokens, top_k), num_experts = topk_idx.shape[-2:], counts.shape[-1]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    kernel = _Dispatch.of(
        x, (num_ranks, num_tokens, top_k), num_experts, capacity, expert_alignment, fabric, plan,
        count_dtype=counts.dtype, routes_known=False, stage=stage, wire_dtype=wire_dtype,
    )  # fmt: skip
    flat = (*lead, num_tokens * top_k)
    results = kernel.call(
        x,
        kernel.window.pad(topk_idx.reshape(flat), fb.NOWHERE),
        pad_last(counts, kernel.count_width - num_experts),
    )
    parts, (rows, all_counts, *layout) = kernel.split(results)
    rows = rows[..., : num_tokens * top_k].reshape(*lead, num_ranks, num_tokens, top_k)
    return payload(parts), rows, all_counts[..., :num_experts], *layout


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
        count_dtype=counts.dtype, routes_known=True, stage=stage, wire_dtype=wire_dtype,
    )  # fmt: skip
    tokens = kernel.call(
        x,
        kernel.window.pad(rows.reshape(*rows.shape[:-2], -1), fb.NOWHERE),
        pad_last(counts, kernel.count_width - counts.shape[-1]),
    )
    return payload(tokens)


def fan_out(tokens: jax.Array, rows: jax.Array, *, fabric: fb.Stacked, plan: Plan) -> jax.Array:
    """The receiver's stage alone, where ranks are stacked: only the rows it copies are written."""
    kernel = _Dispatch.of(
        tokens, rows.shape[-3:], fabric.num_ranks, tokens.shape[-2], 1, fabric, plan,
        count_dtype=jnp.int32, routes_known=True, stage="fan_out",
    )  # fmt: skip
    (out,) = kernel.call(tokens, kernel.window.pad(rows.reshape(*rows.shape[:-2], -1), fb.NOWHERE))
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
    count_dtype: Any
    routes_known: bool
    stage: str
    fabric: fb.Fabric
    plan: Plan
    window: Window  # the sender's
    step_window: Window  # the receiver's
    wire_dtype: Any = None

    @classmethod
    def of(
        cls, x, rows_shape, num_experts, capacity, alignment, fabric, plan, *, count_dtype,
        routes_known, stage, wire_dtype=None,
    ):  # fmt: skip
        num_ranks, num_tokens, top_k = rows_shape
        window = Window.of(plan.window_tokens, plan, num_tokens, top_k)
        step_window = Window.of(plan.step_tokens, plan, num_tokens, top_k)
        total = max(window.total, step_window.total)
        return cls(
            num_ranks, num_tokens, x.shape[-1], top_k, num_experts, capacity, alignment, x.dtype,
            count_dtype, routes_known, stage, fabric, plan,
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

    def split(self, results: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The parts of what arrives, and what comes beside them."""
        return results[: len(self.parts)], results[len(self.parts) :]

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
                *(
                    jax.ShapeDtypeStruct((size,), jnp.int32)
                    for size in (self.num_local_experts, self.num_local_experts, 1, 1)
                ),
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
            all_counts=plgpu.SMEM((ranks, width), self.count_dtype),
            scan=plgpu.SMEM((2 * width,), jnp.int32),
            # Where each expert's next row goes; one entry more, for choices of no expert.
            next_rows=plgpu.SMEM((width + LANES,), jnp.int32),
            block_ends=plgpu.SMEM((2, width), jnp.int32),  # of each expert's rows, and padded
            choices=plgpu.SMEM(
                (ranks if self.routes_known else 1, self.window.width), jnp.int32
            ),  # rows at each peer, or experts
            **self._row_types(),
            lists=plgpu.SMEM((slots, ranks, top_k), jnp.int32),
            step_rows=plgpu.SMEM((ranks, self.step_window.width), jnp.int32),
            step_copies=plgpu.SMEM((self.step_tokens * ranks, top_k), jnp.int32),
            copies=[plgpu.SMEM((copies, width), t) for width, t in self.parts],
            zeros=[plgpu.SMEM((Tiling.of(width, t).padded,), t) for width, t in self.parts],
            counts_full=plgpu.Barrier(num_arrivals=ranks),
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
        tokens: Any  # the parts of what arrives
        layout: Any = ()
        if self.stage == "fan_out":
            put_tokens, rows, tokens = refs[:1], refs[1], refs[2:]
        elif self.routes_known:
            x, rows, counts, *tokens = refs
            choices, all_counts_ref, put_tokens = rows, None, tokens
        else:
            x, choices, counts, *results = refs
            tokens, (rows, all_counts_ref, *layout) = self.split(results)
            put_tokens = tokens

        if self.stage != "fan_out":

            @pl.when(warpgroup == 0)
            def _sender():
                self.fabric.stage(0)
                self._fetch_counts(counts, **scratch)
                self._fetch_first(x, **scratch)
                self.fabric.touch(*tokens, *(() if self.routes_known else (rows,)))
                self._open_window(choices, 0, **scratch)
                if not self.routes_known:
                    self._count_earlier(choices, **scratch)
                self._make_ready(x, 0, **scratch)
                self._lay_out(all_counts_ref, **scratch)
                plgpu.barrier_arrive(laid_out)
                self._send(x, choices, tokens, rows, semaphores, **scratch)

            @pl.when(warpgroup == 2)
            def _filler():
                plgpu.barrier_wait(laid_out)
                self.fabric.stage(3)
                if not self.routes_known:
                    self._describe_layout(*layout, **scratch)
                self._fill(tokens, **scratch)

        if self.stage != "put":

            @pl.when(warpgroup == 1)
            def _receiver():
                self._receive(put_tokens, rows, tokens, semaphores, **scratch)

    def _range(self) -> tuple[jax.Array, jax.Array]:
        """This block's tokens, the same on every rank: first, and how many."""
        first = lax.axis_index("block") * self.tokens_per_block
        return first, jnp.clip(self.num_tokens - first, 0, self.tokens_per_block)

    def _peers(self) -> list[jax.Array]:
        """All ranks, in the order in which this block turns to them."""
        offset = self.plan.peer_offset(self.fabric.rank(), lax.axis_index("block"))
        return [lax.rem(i + offset, jnp.int32(self.num_ranks)) for i in range(self.num_ranks)]

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

    def _make_ready(self, x, i, *, slots, full, wide_slots=None, **_):
        """Waits until the i-th token's row is there, and quantizes it if it is to be."""
        first_token, num_tokens = self._range()
        slot = lax.rem(i, jnp.int32(self.plan.num_slots))

        @pl.when(i < num_tokens)
        def _():
            plgpu.barrier_wait(full.at[slot])
            if wide_slots is not None:
                parts = [part.at[slot] for part in slots]
                quantize.quantize_row(self.fabric, wide_slots.at[slot], *parts)
                plgpu.commit_smem()  # all have read the wide row, and the puts see the other
                ahead = i + self.plan.num_slots

                @pl.when(ahead < num_tokens)
                def _():
                    rings = dict(slots=slots, full=full, wide_slots=wide_slots)
                    self._fetch(x, first_token + ahead, ahead, **rings)

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

    def _fetch_counts(self, counts, *, all_counts, counts_full, **_):
        """Starts to load every rank's choices of each expert."""
        for peer in self._peers():
            if self.routes_known:
                source = self.fabric.mine(counts).at[peer]
            else:
                source = self.fabric.peer(counts, peer)
            plgpu.copy_gmem_to_smem(source, all_counts.at[peer], counts_full, oob_mode=fb.IN_BOUNDS)

    def _count_earlier(self, choices_ref, *, next_rows, **_):
        """next_rows: this rank's choices of each expert for the tokens of the blocks before."""
        fabric = self.fabric
        fb.clear(next_rows, self.count_width)
        fabric.barrier()
        end = jnp.minimum(self._range()[0], self.num_tokens) * self.top_k
        width = min(_COUNTED, self.window.total // LANES * LANES)

        def count(i, _):
            start = jnp.minimum(i * width, self.window.total - width)
            entries = start + fb.iota(fabric, width)
            experts = fb.load(fabric, fabric.mine(choices_ref).at[pl.ds(start, width)], 1)
            new = (entries >= i * width) & (entries < end)
            fb.count(fabric, next_rows, jnp.where(new, experts, fb.NOWHERE), self.num_experts)

        lax.fori_loop(0, lax.div(end + (width - 1), jnp.int32(width)), count, None)
        fabric.barrier()

    def _lay_out(
        self, all_counts_ref, *, all_counts, counts_full, scan, next_rows, block_ends, **_
    ):
        """Where each expert's block starts and ends at its rank, and this block's rows in it."""
        fabric, width, per_rank = self.fabric, self.count_width, self.num_local_experts
        rank = fabric.rank()
        plgpu.barrier_wait(counts_full)
        per_source = [
            fb.load(fabric, all_counts.at[source], 1).astype(jnp.int32)
            for source in range(self.num_ranks)
        ]
        total = sum(per_source[1:], per_source[0])
        sizes = total
        if self.alignment > 1:
            alignment = jnp.int32(self.alignment)
            sizes = lax.div(total + (alignment - 1), alignment) * alignment
        # An inclusive scan over each rank's experts: `scan` holds zeros, then the sums so far.
        local_expert = lax.rem(fb.iota(fabric, width), jnp.int32(per_rank))
        fb.clear(scan, width)
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
            row = starts + fb.load(fabric, next_rows.at[pl.ds(0, width)], 1)
            for source in range(self.num_ranks):
                counted = per_source[source]
                row = row + jnp.where(source < rank, counted, jnp.zeros_like(counted))
            next_rows[pl.ds(0, width)] = row
        block_ends[0] = starts + total
        block_ends[1] = ends
        fabric.barrier()
        if all_counts_ref is not None:

            @pl.when(lax.axis_index("block") == 0)
            def _():
                for source in range(self.num_ranks):
                    fabric.mine(all_counts_ref)[source] = per_source[source]

    def _send(
        self, x, choices_ref, tokens, rows, semaphores, *, choices, slots, lists, full,
        wide_slots=None, **bookkeeping,
    ):  # fmt: skip
        fabric, plan, window = self.fabric, self.plan, self.window
        top_k, lag = self.top_k, plan.store_lag
        num_slots, step_tokens = plan.num_slots, self.step_tokens
        rank, peers = fabric.rank(), self._peers()
        first_token, num_tokens = self._range()

        def put_lists(slot, entry, found):
            """Tells every peer the places of a token's choices there."""
            if top_k % 4:  # bulk copies are of whole 16 bytes
                for peer, peer_rows in zip(peers, found, strict=True):
                    for choice, row in enumerate(peer_rows):
                        fabric.peer(rows, peer)[rank, entry + choice] = row
                return
            for peer, peer_rows in zip(peers, found, strict=True):
                for choice, row in enumerate(peer_rows):
                    lists[slot, peer, choice] = row
            plgpu.commit_smem()
            for peer in peers:
                plgpu.copy_smem_to_gmem(
                    lists.at[slot, peer],
                    fabric.peer(rows, peer).at[rank, pl.ds(entry, top_k)],
                    commit_group=False,
                )

        def send_token(i, carry):
            in_window = lax.rem(i, jnp.int32(window.tokens))

            @pl.when((in_window == 0) & (i > 0))
            def _():
                self._open_window(choices_ref, i, choices=choices)

            slot, entry = lax.rem(i, jnp.int32(num_slots)), (first_token + i) * top_k
            in_choices = entry - window.start(entry - in_window * top_k)
            found = self._rows_at_peers(in_choices, peers, choices=choices, **bookkeeping)
            for peer, peer_rows in zip(peers, found, strict=True):
                place = self._place(peer_rows, i)
                for part, ref in zip(slots, tokens, strict=True):
                    fb.put_if(fabric, place >= 0, part.at[slot], fabric.peer(ref, peer).at[place])
            if not self.routes_known:
                put_lists(slot, entry, found)
            plgpu.commit_smem_to_gmem_group()

            # Once a slot's puts have read it, it takes the next token.
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            if wide_slots is None:
                ahead = i - lag + num_slots

                @pl.when((i >= lag) & (ahead < num_tokens))
                def _():
                    self._fetch(x, first_token + ahead, ahead, slots=slots, full=full)

            self._make_ready(x, i + 1, slots=slots, full=full, wide_slots=wide_slots)
            return carry

        def send_step(step, carry):
            begin = step * step_tokens
            end = jnp.minimum(begin + step_tokens, num_tokens)
            lax.fori_loop(begin, end, send_token, None)

            @pl.when(step > 0)
            def _():  # with only this step under way, the one before has arrived
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

    def _rows_at_peers(self, entry, peers, *, choices, next_rows, **_):
        """[N][K]: the row of each choice at each rank, in the order of `peers`."""
        if self.routes_known:
            entries = [entry + choice for choice in range(self.top_k)]
            return [[choices[peer, e] for e in entries] for peer in peers]
        # Read where each expert's next row goes, all threads, then count this token's choices.
        experts = [choices[0, entry + choice] for choice in range(self.top_k)]
        valid = [(e >= 0) & (e < self.num_experts) for e in experts]
        experts = [jnp.where(v, e, self.count_width) for e, v in zip(experts, valid, strict=True)]
        found = [next_rows[expert] for expert in experts]
        for choice in range(self.top_k):
            for earlier in range(choice):
                again = experts[earlier] == experts[choice]
                found[choice] = found[choice] + again.astype(jnp.int32)
        self.fabric.barrier()
        for expert, row in zip(experts, found, strict=True):
            next_rows[expert] = row + 1  # of the same expert, the last choice has the last row
        self.fabric.barrier()  # the next token reads what this one has counted
        owners = [
            jnp.where(v, lax.div(e, jnp.int32(self.num_local_experts)), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]
        return [
            [
                jnp.where(owner == peer, row, fb.NOWHERE)
                for owner, row in zip(owners, found, strict=True)
            ]
            for peer in peers
        ]

    def _place(self, rows, i):
        """Where the i-th token goes first at a peer, given its rows there; or nowhere."""
        del i
        place = jnp.int32(fb.NOWHERE)
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

            def list_token(i, count):
                for source in range(num_ranks):
                    places, held = [], jnp.int32(0)
                    for choice in range(top_k):
                        row = step_rows[source, (step_token + i) * top_k - start + choice]
                        here = (row >= 0) & (row < self.capacity)
                        places.append(jnp.where(here, row, fb.NOWHERE))
                        held = held + here.astype(jnp.int32)
                    for choice, place in enumerate(places):
                        step_copies[count, choice] = place  # stays if the next one is counted on
                    count = count + (held > 1).astype(jnp.int32)
                return count

            step_end = jnp.minimum(num_tokens - step * self.step_tokens, self.step_tokens)
            count = lax.fori_loop(0, step_end, list_token, jnp.int32(0))
            fabric.barrier()
            return count

        def begin(i, begun):
            first = jnp.int32(fb.NOWHERE)
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
            fabric.async_fence()
            count = list_copies(step)

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

    def _describe_layout(
        self, group_sizes, expert_counts, num_dropped, rows_needed, *, block_ends, **_
    ):
        """Writes the layout of this rank's rows: see `dispatch`."""
        fabric, per_rank = self.fabric, self.num_local_experts
        first_expert = fabric.rank() * per_rank

        @pl.when(lax.axis_index("block") == 0)
        def _():
            def describe(i, carry):
                start, dropped = carry
                end_of_rows, end = (block_ends[which, first_expert + i] for which in range(2))
                room = jnp.maximum(self.capacity - start, 0)
                kept = jnp.minimum(end_of_rows - start, room)
                fabric.mine(group_sizes)[i] = jnp.minimum(end - start, room)
                fabric.mine(expert_counts)[i] = kept
                return end, dropped + (end_of_rows - start - kept)

            zero = jnp.int32(0)
            end, dropped = lax.fori_loop(0, per_rank, describe, (zero, zero))
            fabric.mine(num_dropped)[0] = dropped
            fabric.mine(rows_needed)[0] = end

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
