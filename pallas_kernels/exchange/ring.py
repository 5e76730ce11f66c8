"""A ring of rows in shared memory: one warpgroup fills its stages, others empty them."""

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
    """A ring of S stages for rows in shared memory, between a filler and its emptier warpgroups.

    The filler takes turns in order, counted from 0; turn i uses stage i modulo S. All turns of a
    stage have the same emptier, since a warpgroup that waits for a barrier must wait for each of
    its completions. A turn completes each of its stage's barriers once. First `full`: when the row
    that the filler fetches has arrived, or by the filler's own arrival if it fetches none. Then
    `empty`: when the emptier, which has waited for `full`, arrives. The filler ends after all
    stages are empty, by `fabric.drain`; or emptiers arrive at `empty` only for turns after which
    the filler opens the stage again.
    """

    rows: Any  # [S, columns]: the stages
    full: Any  # [S] barriers: a stage's row has arrived
    empty: Any  # [S] barriers: a stage may be filled again
    notes: Any = None  # [S, words] int32 that say what each stage holds

    def stage(self, turn: jax.Array) -> jax.Array:
        return lax.rem(turn, jnp.int32(self.rows.shape[0]))

    def open(self, turn: jax.Array, *notes: Any) -> jax.Array:
        """Waits until the stage of a turn is empty, writes its notes, and returns the stage."""
        stage = self.stage(turn)

        @pl.when(turn >= self.rows.shape[0])
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

        for i, note in enumerate(notes):
            self.notes[stage, i] = jnp.int32(note)
        return stage

    def fetch(self, stage: jax.Array, row: Any) -> None:
        """Starts to copy a row of global memory, of at most a stage's columns, to an open stage."""
        place = self.rows.at[stage, pl.ds(0, row.shape[0])]
        plgpu.copy_gmem_to_smem(row, place, self.full.at[stage], oob_mode=fb.IN_BOUNDS)
