"""Dispatch: every rank pulls the rows that its experts chose straight into their final places.

Each block serves a range of tokens of every source rank with three warpgroups:

  scout   reads the peers' choices and fetches each row that any expert here is to get from its
          source's input into a slot of a ring in shared memory;
  layer   reads the peers' counts, lays the experts' blocks out, and writes zeros to the rows that
          receive nothing;
  writer  writes each slot to all its places in this rank's receive buffer.

So a row crosses the link once per (token, rank), is fanned out from shared memory, and no staging
buffer exists. Rows are under way before their places are known. The one rendezvous is at the end:
no rank leaves while a peer may still read its inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fabric as fb
from pallas_kernels.plan import LANES, Plan, Tiling, Window, align_up, pad_last

_END = -1  # for a slot's token: no more slots follow
_NOWHERE = -1


@dataclasses.dataclass(frozen=True)
class _Shapes:
    num_ranks: int
    num_tokens: int
    hidden: int
    top_k: int
    num_local_experts: int
    capacity: int
    alignment: int

    @property
    def count_width(self) -> int:
        """Local experts, padded to whole vectors; one is always left over for the tail."""
        return align_up(self.num_local_experts + 1, LANES)


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    places: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routes and moves the rows. With a stacked fabric every array has a leading rank axis.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      topk_idx: [T, K] int32.
      places: [T, K] int32: how many earlier choices of this rank picked the same expert.
      counts: [E] int32: this rank's choices of each expert.
      fabric: how ranks reach each other.
      plan: number of blocks and depth of the ring.
      capacity: R.
      expert_alignment: each expert's block starts at a multiple of this.

    Returns:
      tokens [R, H], rows [N, T, K] int32, recv_counts [N, L] int32.
    """
    num_ranks = fabric.num_ranks
    (num_tokens, hidden), top_k = x.shape[-2:], topk_idx.shape[-1]
    num_local_experts = counts.shape[-1] // num_ranks
    shapes = _Shapes(
        num_ranks, num_tokens, hidden, top_k, num_local_experts, capacity, expert_alignment
    )
    lead = x.shape[:-2]
    flat = (*lead, num_tokens * top_k)
    window = Window.of(plan, num_tokens, top_k)
    by_rank = pad_last(
        counts.reshape(*lead, num_ranks, num_local_experts),
        shapes.count_width - num_local_experts,
        0,
    )
    tokens, rows, recv_counts = _call(
        _Pull(shapes, plan, window, fabric, routes_known=False),
        x.dtype,
        x,
        window.pad(topk_idx.reshape(flat), _NOWHERE),
        window.pad(places.reshape(flat), 0),
        by_rank,
    )
    return (
        tokens,
        rows.reshape(*lead, num_ranks, num_tokens, top_k),
        recv_counts[..., :num_local_experts],
    )


def dispatch_like(
    x: jax.Array,
    rows: jax.Array,
    recv_counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
) -> jax.Array:
    """Moves [T, H] along known routes (rows [N, T, K], recv_counts [N, L]) to tokens [R, H]."""
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    num_local_experts = recv_counts.shape[-1]
    shapes = _Shapes(
        num_ranks, num_tokens, x.shape[-1], top_k, num_local_experts, capacity, expert_alignment
    )
    window = Window.of(plan, num_tokens, top_k)
    (tokens,) = _call(
        _Pull(shapes, plan, window, fabric, routes_known=True),
        x.dtype,
        x,
        window.pad(rows.reshape(*rows.shape[:-2], num_tokens * top_k), _NOWHERE),
        pad_last(recv_counts, shapes.count_width - num_local_experts, 0),
    )
    return tokens


@dataclasses.dataclass(frozen=True)
class _Pull:
    """The kernel: its static arguments, and its body warpgroup by warpgroup."""

    shapes: _Shapes
    plan: Plan
    window: Window
    fabric: fb.Fabric
    routes_known: bool

    def __call__(self, *refs: Any, semaphores: Any, laid_out: Any, **scratch: Any) -> None:
        if self.routes_known:
            x, rows, counts, tokens = refs
            routes, recv_counts = (rows,), None
        else:
            x, topk_idx, places, counts, tokens, rows, recv_counts = refs
            routes = (topk_idx, places)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _scout():
            self._scout(x, routes, rows, **scratch)

        @pl.when(warpgroup == 1)
        def _layer():
            self._lay_out_blocks(counts, recv_counts, **scratch)
            plgpu.barrier_arrive(laid_out)
            self._fill(tokens, **scratch)

        @pl.when(warpgroup == 2)
        def _writer():
            plgpu.barrier_wait(laid_out)
            self._write(tokens, rows, **scratch)
            if self.shapes.num_ranks > 1:  # no rank leaves while a peer may read its inputs
                self.fabric.signal(semaphores, 0)
                self.fabric.wait(semaphores, 0, 1, "dispatch")

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        shapes, slots = self.shapes, self.plan.num_slots
        width = shapes.count_width
        kinds = 1 if self.routes_known else 2
        return dict(
            scan=plgpu.SMEM((2 * width,), jnp.int32),
            first_rows=plgpu.SMEM((shapes.num_ranks, width), jnp.int32),
            gaps=plgpu.SMEM((2, width), jnp.int32),
            routes=plgpu.SMEM((kinds, shapes.num_ranks, self.window.width), jnp.int32),
            slots=plgpu.SMEM((slots, shapes.hidden), dtype),
            slot_pairs=plgpu.SMEM((slots, 2), jnp.int32),  # source, token
            slot_routes=plgpu.SMEM((slots, kinds, shapes.top_k), jnp.int32),
            zeros=plgpu.SMEM((Tiling.of(shapes.hidden, dtype).padded,), dtype),
            laid_out=plgpu.Barrier(),
            full=plgpu.Barrier(num_barriers=(slots, 2)),  # the row, and the notes on it
            empty=plgpu.Barrier(num_barriers=(slots,)),
        )

    def _lay_out_blocks(self, counts, recv_counts, *, scan, first_rows, gaps, **_):
        """first_rows[s, l]: where source s's rows of expert l start; gaps[:, l]: rows to zero."""
        shapes, fabric = self.shapes, self.fabric
        rank, width = fabric.rank(), shapes.count_width
        per_source = [
            fabric.mine(counts).at[source][...]
            if self.routes_known
            else fabric.peer(counts, source).at[rank][...]
            for source in range(shapes.num_ranks)
        ]
        sizes = sum(per_source[1:], per_source[0])
        if shapes.alignment > 1:
            alignment = jnp.int32(shapes.alignment)
            sizes = lax.div(sizes + (alignment - 1), alignment) * alignment
        # An inclusive scan over the experts: `scan` holds zeros, then the sums so far.
        scan[pl.ds(0, width)] = jnp.zeros((width,), jnp.int32)
        ends, shift = sizes, 1
        while shift < width:
            scan[pl.ds(width, width)] = ends
            fabric.barrier()
            ends = ends + fb.load(fabric, scan.at[pl.ds(width - shift, width)], 1)
            fabric.barrier()
            shift *= 2
        row = ends - sizes
        for source in range(shapes.num_ranks):
            first_rows[source] = row
            row = row + per_source[source]
        gaps[0] = row
        gaps[1] = ends
        fabric.barrier()
        gaps[1, width - 1] = jnp.int32(shapes.capacity)  # the last gap is the tail
        if recv_counts is not None:

            @pl.when(lax.axis_index("block") == 0)
            def _():
                for source in range(shapes.num_ranks):
                    fabric.mine(recv_counts)[source] = per_source[source]

    def _scout(
        self, x, route_refs, rows, *, routes, slots, slot_pairs, slot_routes, full, empty, **_
    ):
        shapes, plan, fabric, window = self.shapes, self.plan, self.fabric, self.window
        num_ranks, top_k, num_slots = shapes.num_ranks, shapes.top_k, plan.num_slots
        rank, block = fabric.rank(), lax.axis_index("block")
        tokens_per_block = plan.tokens_per_block(shapes.num_tokens)
        first_token = block * tokens_per_block
        end_token = jnp.minimum(first_token + tokens_per_block, shapes.num_tokens)

        def open_slot(used):
            slot = lax.rem(used, num_slots)

            @pl.when(used >= num_slots)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            return slot

        def scout_window(index, used):
            window_token = first_token + index * window.tokens
            start = window.start(window_token * top_k)
            values = [
                (fabric.mine(ref).at[source] if self.routes_known else fabric.peer(ref, source))
                .at[pl.ds(start, window.width)][...]
                for ref in route_refs
                for source in range(num_ranks)
            ]
            fabric.barrier()  # the window before this one has been read
            for i, value in enumerate(values):
                routes[i // num_ranks, i % num_ranks] = value
            fabric.barrier()

            num_tokens = jnp.clip(end_token - window_token, 0, window.tokens)

            def scout_pair(pair, used):
                turn, i = plan.turn(pair, num_tokens, num_ranks)
                source = lax.rem(turn + plan.peer_offset(rank, block), num_ranks)
                token = window_token + i
                entry = token * top_k - start
                notes = [routes[0, source, entry + choice] for choice in range(top_k)]
                if self.routes_known:
                    here = [(row >= 0) & (row < shapes.capacity) for row in notes]
                else:
                    notes = [expert - rank * shapes.num_local_experts for expert in notes]
                    here = [(e >= 0) & (e < shapes.num_local_experts) for e in notes]
                wanted = here[0]
                for h in here[1:]:
                    wanted = wanted | h

                def fetch(used):
                    slot = open_slot(used)
                    plgpu.copy_gmem_to_smem(
                        fabric.peer(x, source).at[token],
                        slots.at[slot],
                        full.at[slot, 0],
                        oob_mode=fb.IN_BOUNDS,
                    )
                    slot_pairs[slot, 0] = source
                    slot_pairs[slot, 1] = token
                    for choice in range(top_k):
                        slot_routes[slot, 0, choice] = jnp.where(
                            here[choice], notes[choice], _NOWHERE
                        )
                        if not self.routes_known:
                            slot_routes[slot, 1, choice] = routes[1, source, entry + choice]
                    plgpu.barrier_arrive(full.at[slot, 1])
                    return used + 1

                def skip(used):
                    if not self.routes_known:
                        for choice in range(top_k):
                            fabric.mine(rows)[source, token * top_k + choice] = jnp.int32(_NOWHERE)
                    return used

                return lax.cond(wanted, fetch, skip, used)

            return lax.fori_loop(0, num_tokens * num_ranks, scout_pair, used)

        num_windows = pl.cdiv(tokens_per_block, window.tokens)
        used = lax.fori_loop(0, num_windows, scout_window, jnp.int32(0))
        slot = open_slot(used)
        slot_pairs[slot, 1] = jnp.int32(_END)
        plgpu.barrier_arrive(full.at[slot, 1])
        fb.drain(empty, used + 1, num_slots)

    def _write(
        self, tokens, rows, *, first_rows, slots, slot_pairs, slot_routes, full, empty, **_
    ):
        shapes, plan, fabric = self.shapes, self.plan, self.fabric
        top_k, num_slots, lag = shapes.top_k, plan.num_slots, plan.store_lag

        def write_slot(state):
            used, _ = state
            slot = lax.rem(used, num_slots)
            plgpu.barrier_wait(full.at[slot, 1])
            source, token = slot_pairs[slot, 0], slot_pairs[slot, 1]
            more = token != _END

            @pl.when(more)
            def _():
                places = []
                for choice in range(top_k):
                    row = slot_routes[slot, 0, choice]
                    if not self.routes_known:
                        expert = row
                        row = first_rows[source, jnp.maximum(expert, 0)]
                        row = row + slot_routes[slot, 1, choice]
                        row = jnp.where(expert >= 0, row, _NOWHERE)
                        fabric.mine(rows)[source, token * top_k + choice] = row
                    places.append(jnp.where(row < shapes.capacity, row, _NOWHERE))
                plgpu.barrier_wait(full.at[slot, 0])
                for place in places:

                    @pl.when(place >= 0)
                    def _():
                        plgpu.copy_smem_to_gmem(
                            slots.at[slot], fabric.mine(tokens).at[place], commit_group=False
                        )

                plgpu.commit_smem_to_gmem_group()
                # A slot is free once the writes from it have read it.
                plgpu.wait_smem_to_gmem(lag, wait_read_only=True)

                @pl.when(used >= lag)
                def _():
                    plgpu.barrier_arrive(empty.at[lax.rem(used - lag, num_slots)])

            return used + 1, more

        used, _ = lax.while_loop(
            lambda state: state[1], write_slot, (jnp.int32(0), jnp.bool_(True))
        )
        plgpu.wait_smem_to_gmem(0)

        def free_slot(i, _):
            plgpu.barrier_arrive(empty.at[lax.rem(i, num_slots)])

        lax.fori_loop(jnp.maximum(used - 1 - lag, 0), used, free_slot, None)

    def _fill(self, tokens, *, zeros, gaps, **_):
        shapes, plan = self.shapes, self.plan
        block = lax.axis_index("block")
        zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
        plgpu.commit_smem()

        def fill_gap(expert, _):
            first, end = gaps[0, expert], jnp.minimum(gaps[1, expert], shapes.capacity)
            count = lax.div(end - first - block + (plan.num_blocks - 1), jnp.int32(plan.num_blocks))

            def fill_row(i, _):
                plgpu.copy_smem_to_gmem(
                    zeros.at[pl.ds(0, shapes.hidden)],
                    self.fabric.mine(tokens).at[first + block + i * plan.num_blocks],
                )
                return _

            return lax.fori_loop(0, jnp.maximum(count, 0), fill_row, _)

        # Only real experts have gaps, and the last entry, the tail.
        lax.fori_loop(0, shapes.num_local_experts, fill_gap, None)
        fill_gap(shapes.count_width - 1, None)
        plgpu.wait_smem_to_gmem(0)


def _call(pull: _Pull, dtype: Any, *operands: jax.Array) -> tuple[jax.Array, ...]:
    shapes = pull.shapes
    out_type = [jax.ShapeDtypeStruct((shapes.capacity, shapes.hidden), dtype)]
    if not pull.routes_known:
        out_type += [
            jax.ShapeDtypeStruct((shapes.num_ranks, shapes.num_tokens * shapes.top_k), jnp.int32),
            jax.ShapeDtypeStruct((shapes.num_ranks, shapes.count_width), jnp.int32),
        ]
    return fb.kernel(
        pull.fabric,
        pull,
        name="ep_dispatch_like" if pull.routes_known else "ep_dispatch",
        num_blocks=pull.plan.num_blocks,
        num_warpgroups=3,
        out_type=out_type,
        scratch_types=pull.scratch_types(dtype),
        num_channels=1,
    )(*operands)
