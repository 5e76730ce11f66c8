"""A ring buffer of rows in shared memory: one warpgroup fills its stages, other ones read them."""

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
    """A ring buffer of S rows in shared memory, from a producer warpgroup to consumer warpgroups.

    A `turn` is the number of a row in the producer's order, from 0; row `turn` goes to stage
    `turn` modulo S. The same consumers must read all rows of a stage, since a warpgroup that waits
    for a barrier must wait for each of the barrier's completions.

    Each row completes both barriers of its stage once. `full` completes when the row that the
    producer fetches has arrived, or when the producer arrives at it to pass on notes without a row.
    `empty` completes when the consumers, which have waited for `full`, arrive at it. The producer
    must wait for every completion of `empty`: at its end it calls `fabric.drain`, or consumers
    arrive at `empty` only if the stage is filled again.
    """

    # [S, columns], in shared memory. Each row is a stage.
    rows: Any
    # [S] barriers. `full[s]` completes when stage s holds a row.
    full: Any
    # [S] barriers. `empty[s]` completes when stage s may be filled again.
    empty: Any
    # [S, words] int32, or None. The producer describes the row of each stage here.
    notes: Any = None

    def stage(self, turn: jax.Array) -> jax.Array:
        return lax.rem(turn, jnp.int32(self.rows.shape[0]))

    def open(self, turn: jax.Array, *notes: Any) -> jax.Array:
        """Waits until row number `turn` may be written to its stage, and returns the stage's index.

        Writes the int32 scalars `notes`, which describe the row to its consumers, to
        self.notes[stage].
        """
        stage = self.stage(turn)

        @pl.when(turn >= self.rows.shape[0])
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

        for i, note in enumerate(notes):
            self.notes[stage, i] = jnp.int32(note)
        return stage

    def fetch(self, stage: jax.Array, row: Any) -> None:
        """Starts an asynchronous copy of a row in global memory to a stage that `open` returned.

        The row may have fewer columns than the stage. Barrier `full` of the stage completes when
        the copy has arrived.
        """
        place = self.rows.at[stage, pl.ds(0, row.shape[0])]
        plgpu.copy_gmem_to_smem(row, place, self.full.at[stage], oob_mode=fb.IN_BOUNDS)
