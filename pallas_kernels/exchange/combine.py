"""Combine: sums rows next to the experts, and sends one row per (token, rank) to the token's owner.

The owner of a token is the rank whose token it is. Block b of every rank handles the same range of
tokens of every owner, a step of a few tokens at a time, with three warpgroups:

  scout    finds the rows of each (owner, token) and fetches them into a ring in shared memory;
  summer   sums these rows in float32, weighted, and puts the sum into the owner's receive buffer,
           rounded to the rows' dtype, or quantized with a scale for every 128 values;
  owner    waits until every rank has put the sums of a step for this rank's tokens, adds them in
           rank order, and writes the result.

The receive buffer is a ring of steps: a summer may put step i into a peer's receive buffer once the
peer's owner warpgroup has read step i - plan.receive_steps. A rank ends only after the last sums
sent to it have arrived, and peers send nothing that is not waited for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange import quantized_rows
from pallas_kernels.exchange.plan import Parts, Row, combine_receive_buffer
from pallas_kernels.exchange.quantize import BLOCK
from pallas_kernels.exchange.ring import Ring
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.plan import Plan, Tiling, Window

# Bits of the kind of a slot: the first and the last row of a sum (a sum of one row is both), a sum
# without a row, and the end of a step.
_FIRST, _LAST, _NO_ROW, _END_OF_STEP = 1, 2, 4, 8

_PUT, _READ = 0, 1  # channels: a step's sums are in the receive buffer; a step's sums are read


def combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    topk_idx: jax.Array,
    rows: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    num_experts: int,
    by_rank: bool = False,
    wire_dtype: Any = None,
) -> jax.Array:
    """Multiplies rows by their weights, sums them by token, and returns the sums to their owners.

    With stacked ranks, every array has a leading axis of N.

    Args:
      y: [R, H]; H · itemsize a multiple of 128 bytes.
      topk_weights: [T, K] float32, or None for a sum without weights.
      topk_idx: [T, K] int32.
      rows: [N, T, K] int32, a result of the dispatch: the row of each choice or, with `by_rank`,
        its local expert; less than 0 where the choice is of another rank's expert.
      fabric: how ranks reach each other.
      plan: number of blocks, depth of the ring and of the receive buffer.
      num_experts: E.
      by_rank: whether y is rank-major, with one row for each (owner, token), at owner · T + token.
      wire_dtype: None; or float8_e4m3fn, in which sums are sent, with a scale for every 128
        values; then H is a multiple of 512.

    Returns:
      The sum of each of this rank's tokens, [T, H] of y's dtype.
    """
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    lead = rows.shape[:-3]
    window = Window.of(plan.window_tokens, plan, num_tokens, top_k)
    call = _Combine(
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        hidden=y.shape[-1],
        top_k=top_k,
        num_local_experts=num_experts // num_ranks,
        capacity=y.shape[-2],
        dtype=y.dtype,
        weighted=topk_weights is not None,
        by_rank=by_rank,
        fabric=fabric,
        plan=plan,
        window=window,
        tiling=Tiling.of(y.shape[-1], y.dtype),
        wire_dtype=wire_dtype,
    )
    operands = [
        y,
        topk_idx.reshape(*lead, num_tokens * top_k),
        window.pad(rows.reshape(*lead, num_ranks, num_tokens * top_k), -1),
    ]
    if topk_weights is not None:
        operands.append(window.pad(topk_weights.reshape(*lead, num_tokens * top_k), 0))
    out, *_ = fb.kernel(
        fabric,
        call,
        name="ep_combine",
        num_blocks=plan.num_blocks,
        num_warpgroups=3,
        out_type=[jax.ShapeDtypeStruct((num_tokens, y.shape[-1]), y.dtype), *call.receive_types],
        scratch_types=call.scratch_types(),
        shared=call.shared,
    )(*operands)
    return out


@dataclasses.dataclass(frozen=True)
class _Combine:
    """The kernel of `combine`: its static arguments, and the warpgroups' code."""

    num_ranks: int
    num_tokens: int
    hidden: int
    top_k: int
    num_local_experts: int
    capacity: int
    dtype: Any
    weighted: bool
    by_rank: bool
    fabric: fb.Fabric
    plan: Plan
    window: Window
    tiling: Tiling
    wire_dtype: Any = None

    @property
    def steps_per_block(self) -> int:
        return self.plan.steps_per_block(self.num_tokens)

    @property
    def receive_steps(self) -> int:
        return min(self.plan.receive_steps, self.steps_per_block)

    @property
    def row(self) -> Row:
        return Row(self.hidden, self.dtype, self.wire_dtype)

    @property
    def shared(self) -> tuple[int, ...]:
        """The indices of the buffers that peers reach: weights, if any, and the receive buffer."""
        num_operands = 4 if self.weighted else 3
        received = range(num_operands + 1, num_operands + 1 + len(self.parts))
        return (*((3,) if self.weighted else ()), *received)

    @property
    def parts(self) -> Parts:
        return self.row.parts

    @property
    def receive_types(self) -> list[jax.ShapeDtypeStruct]:
        return combine_receive_buffer(
            self.plan, self.row, num_tokens=self.num_tokens, num_ranks=self.num_ranks
        )

    def scratch_types(self) -> dict[str, Any]:
        slots = self.plan.num_slots
        types: dict[str, Any] = dict(
            window_rows=plgpu.SMEM((self.num_ranks, self.window.width), jnp.int32),
            window_weights=plgpu.SMEM((self.num_ranks, self.window.width), jnp.float32),
            slots=plgpu.SMEM((slots, self.tiling.padded), self.dtype),
            slot_notes=plgpu.SMEM((slots, 3), jnp.int32),  # kind, owner, token of the step
            slot_weights=plgpu.SMEM((slots,), jnp.float32),
            sums=plgpu.SMEM((self.tiling.padded,), jnp.float32),
            out_row=plgpu.SMEM((self.tiling.padded,), self.dtype),
            full=plgpu.Barrier(num_barriers=(slots,)),
            empty=plgpu.Barrier(num_barriers=(slots,)),
        )
        if self.wire_dtype is not None:  # a ring of its own for the quantized sums under way
            ring = self.plan.store_lag + 1
            types["sent"] = [plgpu.SMEM((ring, columns), dtype) for columns, dtype in self.parts]
        return types

    def __call__(
        self, *refs: Any, slots: Any, slot_notes: Any, full: Any, empty: Any,
        **scratch: Any,
    ) -> None:  # fmt: skip
        y, topk_idx, rows, *rest = refs
        ring = Ring(slots, full, empty, slot_notes)
        weights = rest.pop(0) if self.weighted else None
        out, *received = rest
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _scout():
            self.fabric.stage(0)
            if self.weighted:
                self.fabric.connect()
            self._scout(y, rows, weights, ring, **scratch)

        @pl.when(warpgroup == 1)
        def _summer():
            self.fabric.connect()
            self._sum_and_put(received, ring, **scratch)

        @pl.when(warpgroup == 2)
        def _owner():
            self._receive(topk_idx, received, out, **scratch)

    def _range(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns this block's first token, the end of its tokens, and the number of its steps."""
        first, count = self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)
        step_tokens = jnp.int32(self.plan.step_tokens)
        return first, first + count, lax.div(count + (step_tokens - 1), step_tokens)

    def _scout(self, y, rows, weights, ring, *, window_rows, window_weights, slot_weights, **_):
        fabric, window, top_k, num_ranks = self.fabric, self.window, self.top_k, self.num_ranks
        step_tokens = self.plan.step_tokens
        first_token, end_token = self._range()[:2]
        offset = fb.first_peer(fabric)
        owners = [lax.rem(i + offset, jnp.int32(num_ranks)) for i in range(num_ranks)]

        def scout_window(index, used):
            window_token = first_token + index * window.tokens
            held: list[Any] = [
                (window_rows, ((owner, fabric.mine(rows), owner) for owner in owners))
            ]
            if self.weighted:
                their_weights = ((owner, fabric.peer(weights, owner)) for owner in owners)
                held.append((window_weights, their_weights))
            start = open_window(fabric, window, window_token * top_k, *held)

            def scout_token(i, used):
                token = window_token + i
                entry = token * top_k - start
                step_token = lax.rem(token - first_token, step_tokens)

                def scout_pair(j, used):
                    owner = lax.rem(j + offset, jnp.int32(num_ranks))
                    places = [window_rows[owner, entry + choice] for choice in range(top_k)]
                    if self.by_rank:
                        place = owner * self.num_tokens + token
                        places = [jnp.where(fb.any_of(places), place, fb.NOWHERE)]
                    held = [(place >= 0) & (place < self.capacity) for place in places]
                    num_held = sum(h.astype(jnp.int32) for h in held)
                    sent = fb.any_of(places)

                    seen = jnp.int32(0)
                    for choice in range(len(places)):
                        kind = jnp.where(seen == 0, _FIRST, 0)
                        kind = kind + jnp.where(seen == num_held - 1, _LAST, 0)

                        def fetch(used, choice=choice, kind=kind):
                            slot = ring.open(used, kind, owner, step_token)
                            if self.weighted:
                                slot_weights[slot] = window_weights[owner, entry + choice]
                            ring.fetch(slot, fabric.mine(y).at[places[choice]])
                            return used + 1

                        used = lax.cond(held[choice], fetch, lambda used: used, used)
                        seen = seen + held[choice].astype(jnp.int32)

                    def put_zeros(used):  # the owner waits for a sum, but all its rows were dropped
                        slot = ring.open(used, _FIRST | _LAST | _NO_ROW, owner, step_token)
                        plgpu.barrier_arrive(ring.full.at[slot])
                        return used + 1

                    return lax.cond(sent & (num_held == 0), put_zeros, lambda used: used, used)

                used = lax.fori_loop(0, num_ranks, scout_pair, used)

                def end_step(used):
                    slot = ring.open(used, _END_OF_STEP, 0, 0)
                    plgpu.barrier_arrive(ring.full.at[slot])
                    return used + 1

                last = (step_token == step_tokens - 1) | (token == end_token - 1)
                return lax.cond(last, end_step, lambda used: used, used)

            num_tokens = jnp.clip(end_token - window_token, 0, window.tokens)
            return lax.fori_loop(0, num_tokens, scout_token, used)

        num_tokens = end_token - first_token
        num_windows = lax.div(num_tokens + (window.tokens - 1), jnp.int32(window.tokens))
        used = lax.fori_loop(0, num_windows, scout_window, jnp.int32(0))
        fb.drain(ring.empty, used, self.plan.num_slots)

    def _sum_and_put(self, received, ring, *, slot_weights, sums, sent=None, **_):
        fabric, lag = self.fabric, self.plan.store_lag
        held = lag if sent is None else 0  # slots that puts may still be reading
        rank, block = fabric.rank(), lax.axis_index("block")
        num_steps = self._range()[2]

        def take_slot(state):
            used, step, _ = state
            slot = ring.slot(used)
            plgpu.barrier_wait(ring.full.at[slot])
            kind, owner, token = (ring.notes[slot, i] for i in range(3))
            no_row, end = (kind & _NO_ROW) != 0, (kind & _END_OF_STEP) != 0

            @pl.when(no_row)
            def _():
                ring.rows[slot] = jnp.zeros((self.tiling.padded,), self.dtype)
                plgpu.commit_smem()

            as_it_is = no_row | end
            if not self.weighted:  # a sum of one row is that row
                as_it_is = as_it_is | (kind == (_FIRST | _LAST))

            @pl.when(~as_it_is)
            def _():
                weight = slot_weights[slot] if self.weighted else None
                self._add(ring.rows, slot, kind, weight, sums, quantized_next=sent is not None)
                plgpu.commit_smem()

            @pl.when((kind & _LAST) != 0)
            def _():
                if sent is None:
                    parts = [ring.rows.at[slot, pl.ds(0, self.hidden)]]
                else:
                    # No put reads this place of the ring of quantized sums any more.
                    place = lax.rem(used, jnp.int32(lag + 1))
                    parts = self._quantized(ring.rows, slot, sums, sent, place, as_it_is)
                for part, ref, (columns, _) in zip(parts, received, self.parts, strict=True):
                    their_row = fabric.peer(ref, owner).at[
                        block, lax.rem(step, self.receive_steps), rank, token, pl.ds(0, columns)
                    ]
                    plgpu.copy_smem_to_gmem(part, their_row, commit_group=False)

            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            ring.free(used, held)
            return used + 1, step, ~end

        def put_step(step, used):
            if self.steps_per_block > self.receive_steps:
                fabric.wait(_READ, jnp.maximum(step + 1 - self.receive_steps, 0), "combine")
            used_after, _, _ = lax.while_loop(
                lambda state: state[2], take_slot, (used, step, jnp.bool_(True))
            )

            # Once only puts of this step are under way, the sums of the step before have arrived.
            @pl.when(step > 0)
            def _():
                lax.cond(
                    used_after - used >= lag,
                    lambda: plgpu.wait_smem_to_gmem(lag),
                    lambda: plgpu.wait_smem_to_gmem(0),
                )
                fabric.stage(1)
                fabric.signal(_PUT, step)

            return used_after

        used = lax.fori_loop(0, num_steps, put_step, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

        @pl.when(num_steps > 0)
        def _():
            fabric.stage(1)
            fabric.signal(_PUT, num_steps)

        ring.free_last(used, held)

    def _add(self, slots, slot, kind, weight, sums, *, quantized_next):
        """Adds weight * slots[slot] to `sums`, or begins a new sum if the row is its first.

        A sum's last row leaves the sum in `sums` if it is quantized next, and else in the slot.
        """
        fabric, tiling = self.fabric, self.tiling

        def add_tile(i, _):
            tile = pl.ds(i * tiling.tile, tiling.tile)
            row = fb.load(fabric, slots.at[slot, tile], tiling.vector).astype(jnp.float32)
            if self.weighted:
                row = row * weight

            def first():
                return row

            def later():
                return fb.load(fabric, sums.at[tile], tiling.vector) + row

            value = lax.cond((kind & _FIRST) != 0, first, later)
            if quantized_next:
                sums[tile] = value
                return _

            @pl.when((kind & _LAST) != 0)
            def _():
                slots[slot, tile] = value.astype(self.dtype)

            @pl.when((kind & _LAST) == 0)
            def _():
                sums[tile] = value

            return _

        lax.fori_loop(0, tiling.num_tiles, add_tile, None)

    def _quantized(self, slots, slot, sums, sent, place, as_it_is):
        """Quantizes a sum into the ring `sent` at `place`, and returns its parts there.

        The sum is the slot's row if that is sent as it is, and else `sums`.
        """
        fabric = self.fabric
        columns, parts = pl.ds(0, self.hidden), [part.at[place] for part in sent]
        lax.cond(
            as_it_is,
            lambda: quantized_rows.quantize_row(fabric, slots.at[slot, columns], *parts),
            lambda: quantized_rows.quantize_row(fabric, sums.at[columns], *parts),
        )
        plgpu.commit_smem()  # all threads have read the row or the sum; puts see the parts
        return parts

    def _receive(self, topk_idx, received, out, *, out_row, **_):
        fabric, tiling, top_k = self.fabric, self.tiling, self.top_k
        block = lax.axis_index("block")
        first_token, end_token, num_steps = self._range()
        step_tokens = self.plan.step_tokens

        def receive_step(step, _):
            fabric.wait(_PUT, step + 1, "combine")
            fabric.stage(2)
            slot = lax.rem(step, self.receive_steps)

            def receive_token(i, _):
                token = first_token + step * step_tokens + i
                experts = [fabric.mine(topk_idx)[token * top_k + choice] for choice in range(top_k)]
                sent = []
                for source in range(self.num_ranks):
                    low = source * self.num_local_experts
                    chosen = [(e >= low) & (e < low + self.num_local_experts) for e in experts]
                    any_chosen = chosen[0]
                    for c in chosen[1:]:
                        any_chosen = any_chosen | c
                    sent.append(any_chosen)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                def add_tile(j, _):
                    tile = pl.ds(j * tiling.tile, tiling.tile)

                    def sums_of(ref, columns):
                        mine = fabric.mine(ref)
                        return [
                            mine.at[block, slot, source, i, columns]
                            for source in range(self.num_ranks)
                        ]

                    if self.wire_dtype is None:
                        rows = sums_of(received[0], tile)
                        parts = [fb.load(fabric, row, tiling.vector) for row in rows]
                        total = jnp.float32(0)  # so that no sum is -0.0
                        for part, was_sent in zip(parts, sent, strict=True):
                            part = part.astype(jnp.float32)
                            total = total + jnp.where(was_sent, part, jnp.zeros_like(part))
                    else:
                        num_blocks = tiling.tile // BLOCK
                        of_tile = tile, pl.ds(j * num_blocks, num_blocks)
                        values, scales = map(sums_of, received, of_tile)
                        total = quantized_rows.add_rows(fabric, values, scales, sent, self.dtype)
                    out_row[tile] = total.astype(self.dtype)
                    return _

                lax.fori_loop(0, tiling.num_tiles, add_tile, None)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    out_row.at[pl.ds(0, self.hidden)], fabric.mine(out).at[token]
                )
                return _

            tokens = jnp.minimum(end_token - first_token - step * step_tokens, step_tokens)
            lax.fori_loop(0, tokens, receive_token, None)

            # Signal only if peers will wait for it: they put step `step + receive_steps` here next.
            @pl.when(step + self.receive_steps < num_steps)
            def _():
                fabric.signal(_READ, step + 1)

            return _

        lax.fori_loop(0, num_steps, receive_step, None)
        plgpu.wait_smem_to_gmem(0)
