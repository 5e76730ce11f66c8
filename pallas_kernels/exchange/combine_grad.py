"""The gradient of a weighted combine, for rows and weights, in one pass over the rows.

The owner of a token is the rank whose token it is. Block b of every rank handles the same range of
tokens of every owner, with three warpgroups:

  scout    finds the rows of each (owner, token), and fetches the token's cotangent from its owner
           into one ring in shared memory and the rows of y into another; for a dropped choice it
           writes zero to the owner's dweights;
  weigher  multiplies a cotangent with each of its rows. The sum of the product over the columns
           goes to the owner's dweights. The cotangent times the weight replaces the row in the ring
           and is put to its row of dy;
  filler   writes zeros to the rows of dy that have no token, and to dweights where this rank's
           choices are of no expert.

This is the form for long rows; `combine_grad_of_short_rows` is faster for short ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.combine_grad_base import CombineGrad
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.exchange.ring import Ring
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import LANES, padded_columns, vector_length

# Bits of the kind of a slot of the ring of rows: the first and the last row of a cotangent (both
# may be set), and the end of a window.
_FIRST, _LAST, _END_OF_WINDOW = 1, 2, 4


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    topk_idx: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    expert_alignment: int,
    fair: bool = False,
    zero_unused: bool = True,
    into: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the cotangents of a weighted combine's rows y and of its weights.

    With stacked ranks, every array has a leading axis of N.

    Args:
      g: [T, H], the cotangent of the combine's result; H · itemsize a multiple of 128 bytes.
      topk_weights: [T, K] float32.
      y: [R, H], of g's dtype.
      topk_idx: [T, K] int32.
      rows: [N, T, K] int32, a result of the dispatch: the row of each choice, or less than 0 where
        the choice is of another rank's expert; a row of R or more was dropped.
      counts: [N, E] int32, how many choices of each rank are of each expert.
      fabric: how ranks reach each other.
      plan: number of blocks, and depth of the two rings.
      expert_alignment: the rows of each expert start at a multiple of this.
      fair: whether a rank whose rows did not fit in R kept equally many of each expert.
      zero_unused: whether rows of dy past the last expert's are zero, or what is in memory.
      into: dy of an earlier call with the same counts. The rows of this call's tokens are written
        into it; all others are kept, and none is filled with zeros.

    Returns:
      dy [R, H] of y's dtype: the weight times the cotangent, computed in float32 and rounded once;
      zero in rows without a token, but for `zero_unused` and `into`. dweights [T, K] float32: the
      inner product of cotangent and row, summed in an order that is the same on every run; zero for
      choices that are of no expert or were dropped.
    """
    return _LongRows.run(
        g, topk_weights, y, topk_idx, rows, counts,
        fabric=fabric, plan=plan, expert_alignment=expert_alignment, fair=fair,
        zero_unused=zero_unused, into=into,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _LongRows(CombineGrad):
    """The kernel of `combine_grad`: the warpgroups' code, but for the filler's."""

    @property
    def num_warpgroups(self) -> int:
        return 3

    def scratch_types(self) -> dict[str, Any]:
        slots, g_slots = self.plan.num_slots, self.plan.num_g_slots
        columns = padded_columns(self.hidden, self.dtype)
        return dict(
            **super().scratch_types(),
            slots=plgpu.SMEM((slots, columns), self.dtype),
            slot_notes=plgpu.SMEM((slots, 4), jnp.int32),  # kind, owner, choice of the owner, row
            g_slots=plgpu.SMEM((g_slots, columns), self.dtype),
            sums=plgpu.SMEM((vectors.SUMS_OF_WARPGROUP,), jnp.float32),
            full=plgpu.Barrier(num_barriers=(slots,)),
            empty=plgpu.Barrier(num_barriers=(slots,)),
            g_full=plgpu.Barrier(num_barriers=(g_slots,)),
            g_empty=plgpu.Barrier(num_barriers=(g_slots,)),
        )

    def __call__(
        self, *refs: Any, slots: Any, slot_notes: Any, full: Any, empty: Any,
        g_slots: Any, g_full: Any, g_empty: Any, **scratch: Any,
    ) -> None:  # fmt: skip
        g, weights, y, topk_idx, rows, counts, dy, dweights = refs
        ring, g_ring = Ring(slots, full, empty, slot_notes), Ring(g_slots, g_full, g_empty)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _scout():
            self.fabric.stage(0)
            self.fabric.connect()
            self._scout(g, y, rows, dweights, ring, g_ring, **scratch)

        @pl.when(warpgroup == 1)
        def _weigher():
            self.fabric.connect()
            self._weigh(weights, dy, dweights, ring, g_ring, **scratch)

        @pl.when(warpgroup == 2)
        def _filler():
            self.fabric.stage(3)
            self.fill(topk_idx, counts, dy, dweights, **scratch)

    def _scout(self, g, y, rows, dweights, ring, g_ring, *, window_rows, **_):
        fabric, window, top_k = self.fabric, self.window, self.top_k
        num_ranks, capacity = fabric.num_ranks, self.expert_rows.capacity
        first_token, end_token = self.token_range()

        def scout_window(index, used):
            window_token = first_token + index * window.tokens
            sources = ((owner, fabric.mine(rows), owner) for owner in range(num_ranks))
            start = open_window(fabric, window, window_token * top_k, (window_rows, sources))

            def scout_pair(i, used):
                token, owner = window_token + lax.div(i, num_ranks), self.owner(i)
                entry = token * top_k
                places = [window_rows[owner, entry - start + choice] for choice in range(top_k)]
                held = [(place >= 0) & (place < capacity) for place in places]
                num_held = sum(h.astype(jnp.int32) for h in held)
                used_rows, used_g = used

                @pl.when(num_held > 0)
                def _():
                    g_ring.fetch(g_ring.open(used_g), fabric.peer(g, owner).at[token])

                seen = jnp.int32(0)
                for choice, place in enumerate(places):
                    kind = jnp.where(seen == 0, _FIRST, 0)
                    kind = kind + jnp.where(seen == num_held - 1, _LAST, 0)

                    def fetch(used, choice=choice, place=place, kind=kind):
                        slot = ring.open(used, kind, owner, entry + choice, place)
                        ring.fetch(slot, fabric.mine(y).at[place])
                        return used + 1

                    used_rows = lax.cond(held[choice], fetch, lambda used: used, used_rows)
                    seen = seen + held[choice].astype(jnp.int32)

                dropped = [place >= capacity for place in places]

                @pl.when(fb.any_of(dropped))
                def _():
                    for choice in range(top_k):

                        @pl.when(dropped[choice])
                        def _(choice=choice):
                            fabric.peer(dweights, owner)[entry + choice] = jnp.float32(0)

                return used_rows, used_g + (num_held > 0).astype(jnp.int32)

            num_tokens = jnp.minimum(end_token - window_token, window.tokens)
            used_rows, used_g = lax.fori_loop(0, num_tokens * num_ranks, scout_pair, used)
            slot = ring.open(used_rows, _END_OF_WINDOW, 0, 0, 0)
            plgpu.barrier_arrive(ring.full.at[slot])
            return used_rows + 1, used_g

        zero = jnp.int32(0)
        used = lax.fori_loop(0, self.num_windows(), scout_window, (zero, zero))
        fb.drain(ring.empty, used[0], self.plan.num_slots)
        fb.drain(g_ring.empty, used[1], self.plan.num_g_slots)

    def _weigh(self, weights, dy, dweights, ring, g_ring, *, window_weights, sums, **_):
        fabric, window, num_ranks = self.fabric, self.window, self.fabric.num_ranks
        lag, first_token = self.plan.store_lag, self.token_range()[0]

        def sources():
            owners = [self.owner(i) for i in range(num_ranks)]
            for owner in owners:
                yield owner, fabric.peer(weights, owner)

        def take_slot(start, state):
            used, used_g, _ = state
            slot, g_slot = ring.slot(used), g_ring.slot(used_g)
            plgpu.barrier_wait(ring.full.at[slot])
            kind, owner, choice, place = (ring.notes[slot, i] for i in range(4))
            last, end = (kind & _LAST) != 0, (kind & _END_OF_WINDOW) != 0

            @pl.when((kind & _FIRST) != 0)
            def _():
                plgpu.barrier_wait(g_ring.full.at[g_slot])

            @pl.when(~end)
            def _():
                weight = window_weights[owner, choice - start]
                self._multiply(ring, slot, g_ring, g_slot, weight, sums)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    ring.rows.at[slot, pl.ds(0, self.hidden)],
                    fabric.mine(dy).at[place],
                    commit_group=False,
                )
                vectors.store_total(fabric, sums, fabric.peer(dweights, owner), choice)

            @pl.when(last)
            def _():
                plgpu.barrier_arrive(g_ring.empty.at[g_slot])

            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            ring.free(used, lag)
            return used + 1, used_g + last.astype(jnp.int32), ~end

        def weigh_window(index, used):
            entry = (first_token + index * window.tokens) * self.top_k
            # The last slot of the window before ended in a barrier of this warpgroup.
            start = open_window(fabric, window, entry, (window_weights, sources()), in_use=False)
            *used, _ = lax.while_loop(
                lambda state: state[2],
                lambda state: take_slot(start, state),
                (*used, jnp.bool_(True)),
            )
            return tuple(used)

        zero = jnp.int32(0)
        used, _ = lax.fori_loop(0, self.num_windows(), weigh_window, (zero, zero))
        plgpu.wait_smem_to_gmem(0)
        ring.free_last(used, lag)
        # All rows that the scout read from peers have arrived here, and it wrote to peers before it
        # marked the end of the last window.
        self.finish()

    def _multiply(self, ring, slot, g_ring, g_slot, weight, sums):
        """Multiplies a cotangent with a row and with a weight, both from slots.

        Writes partial sums of row * cotangent to `sums`, and weight * cotangent over the row.
        """
        fabric, vector = self.fabric, vector_length(self.dtype)
        size = LANES * vector
        total: Any = None
        for first in range(0, self.hidden, size):
            columns = pl.ds(first, size)
            cotangent = fb.load(fabric, g_ring.rows.at[g_slot, columns], vector)
            cotangent = cotangent.astype(jnp.float32)
            row = fb.load(fabric, ring.rows.at[slot, columns], vector).astype(jnp.float32)
            product = cotangent * row
            if first + size > self.hidden:  # shared memory past the row's end was not written
                inside = fb.iota(fabric, size, vector) < self.hidden - first
                product = jnp.where(inside, product, jnp.zeros_like(product))
            total = product if total is None else total + product
            ring.rows[slot, columns] = (cotangent * weight).astype(self.dtype)
        vectors.partial_sums(fabric, total, sums, vector)
