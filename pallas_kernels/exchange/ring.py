"""A ring of rows in shared memory: one warpgroup fills its slots, others empty them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import fabric as fb


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of S slots for rows in shared memory, between a filler and its emptier warpgroups.

    The filler takes turns in order, counted from 0; turn i uses slot i modulo S. All turns of a
    slot have the same emptier, since a warpgroup that waits for a barrier must wait for each of its
    completions. A turn completes each of its slot's barriers once. First `full`: when the row that
    the filler fetches has arrived, or by the filler's own arrival if it fetches none. Then `empty`:
    when the emptier, which has waited for `full`, arrives. The filler ends after all slots are
    empty, by `fabric.drain`; or emptiers arrive at `empty` only for turns after which the filler
    opens the slot again.
    """

    rows: Any  # [S, columns]
    full: Any  # [S] barriers
    empty: Any  # [S] barriers
    notes: Any = None  # [S, words] int32 that say what each slot holds

    def slot(self, turn: jax.Array) -> jax.Array:
        return lax.rem(turn, jnp.int32(self.rows.shape[0]))

    def open(self, turn: jax.Array, *notes: Any) -> jax.Array:
        """Waits until the slot of a turn is empty, writes its notes, and returns the slot."""
        slot = self.slot(turn)

        @pl.when(turn >= self.rows.shape[0])
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[slot])

        for i, note in enumerate(notes):
            self.notes[slot, i] = jnp.int32(note)
        return slot

    def fetch(self, slot: jax.Array, row: Any) -> None:
        """Starts to copy a row of global memory, of at most the slot's columns, to an open slot."""
        place = self.rows.at[slot, pl.ds(0, row.shape[0])]
        plgpu.copy_gmem_to_smem(row, place, self.full.at[slot], oob_mode=fb.IN_BOUNDS)

    def free(self, turn: jax.Array, lag: int) -> None:
        """Frees the slot of turn `turn` - `lag`, if there was such a turn.

        Where rows are put from slots, the caller closes one group of puts, perhaps empty, in each
        turn, and has waited until all groups but the last `lag` have read their slots.
        """

        @pl.when(turn >= lag)
        def _() -> None:
            plgpu.barrier_arrive(self.empty.at[self.slot(turn - lag)])

    def free_last(self, turns: jax.Array, lag: int) -> None:
        """Frees the slots of the last `lag` of `turns` turns; all puts must have read them."""

        def free(turn: jax.Array, _: None) -> None:
            plgpu.barrier_arrive(self.empty.at[self.slot(turn)])

        lax.fori_loop(jnp.maximum(turns - lag, 0), turns, free, None)
