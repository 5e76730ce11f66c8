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

    The `turn` of a row is its number in the order in which the producer passes rows, from 0. Row
    `turn` goes to stage `turn` modulo S. With a row, the producer may pass *notes*: some int32,
    such as the row's source rank.

    Each row completes the barriers `full` and `empty` of its stage once. `full` completes when the
    copy that `fetch` starts has arrived. If the producer passes only notes, without a row, it
    arrives at `full` itself. `empty` completes when all consumers have read the row and arrived at
    `empty`.

    A warpgroup that waits for a barrier must wait for every completion of it. So the same consumers
    must read all rows of a stage. The producer must wait for every completion of `empty`. Either it
    calls `fabric.drain` at its end, or consumers arrive at `empty` only if the stage will be
    refilled.
    """

    # [S, columns] in shared memory, the S stages: each holds one row.
    rows: Any
    # [S] barriers: `full[s]` completes when stage s has its row, or its notes if no row is passed.
    full: Any
    # [S] barriers: `empty[s]` completes when the consumers have read stage s, so that the producer
    # may fill the stage again.
    empty: Any
    # [S, words] int32 in shared memory: the numbers that the producer passes with the row of each
    # stage, such as the row's source rank. None if there are none.
    notes: Any = None

    def stage(self, turn: jax.Array) -> jax.Array:
        return lax.rem(turn, jnp.int32(self.rows.shape[0]))

    def open(self, turn: jax.Array, *notes: Any) -> jax.Array:
        """Waits until row number `turn` may be written to its stage, and returns the stage's index.

        Writes the int32 scalars `notes`, which consumers read with the row, to self.notes[stage].
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

        The row may be shorter than the stage. The stage's barrier `full` completes when the row has
        arrived.
        """
        place = self.rows.at[stage, pl.ds(0, row.shape[0])]
        plgpu.copy_gmem_to_smem(row, place, self.full.at[stage], oob_mode=fb.IN_BOUNDS)
