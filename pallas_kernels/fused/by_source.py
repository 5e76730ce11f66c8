"""Dispatch whose rows come source by source, and the table of tiles that follow from each other.

The rows of an expert that come from one rank are neighbours. So they can be multiplied as soon as
that rank has sent them, whatever the others do. Every rank sends in rounds: in round 0 to itself,
in round i to the rank i places after it. So the rows of round i come from the rank i places before.

Blocks report what is stored in this rank's memory, to blocks that multiply:

  SENT      1: the table of tiles, this rank's own rows, and the zeros between experts' rows;
  RECEIVED  i: the rows of round i, and of the rounds before it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.dispatch import Dispatch
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.matmul.row_tiles import count_tiles, most_tiles, write_entry, write_tiles

SENT, RECEIVED = range(2)  # kinds of report


@dataclasses.dataclass(frozen=True)
class DispatchBySource(Dispatch):
    """The blocks of a dispatch in rounds.

    Attributes:
      heights: the numbers of rows that a tile may have, as of `grouped_matmul.Tiles`.
    """

    heights: tuple[int, ...] = dataclasses.field(kw_only=True)

    @property
    def num_groups(self) -> int:
        """Pairs of a round and an expert of this rank, in this order."""
        return self.fabric.num_ranks * self.expert_rows.num_local_experts

    @property
    def most_tiles(self) -> int:
        return most_tiles(self.num_groups, self.heights[-1], self.expert_rows.capacity)

    @property
    def table(self) -> jax.ShapeDtypeStruct:
        """The table of tiles, as `row_tiles` describes it, of groups that are pairs.

        Behind its last entry there is one for each round: the number of tiles of it and all before.
        """
        return jax.ShapeDtypeStruct((self.most_tiles + 1 + self.fabric.num_ranks, 4), jnp.int32)

    def _scratch_types(self) -> dict[str, Any]:
        ranks, width = self.fabric.num_ranks, self.expert_rows.count_width
        return super()._scratch_types() | dict(
            first_rows=plgpu.SMEM((width,), jnp.int32),  # `next_rows` before the first token
            block_starts=plgpu.SMEM((width,), jnp.int32),
            tile_ends=plgpu.SMEM((ranks, width), jnp.int32),  # within each round
            tiles_before=plgpu.SMEM((ranks + 1,), jnp.int32),
            stored=plgpu.Barrier(),  # the filler's part of what SENT reports
        )

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        *refs, table = refs
        warpgroup = lax.axis_index("warpgroup")
        x, choices, *results = refs
        tokens, (rows, counts, *layout) = self.split(results)

        @pl.when(warpgroup == 0)
        def _sender():
            self._send(x, choices, rows, counts, tokens, **scratch)

        @pl.when(warpgroup == 2)
        def _filler():
            plgpu.barrier_wait(scratch["laid_out"])
            self.fabric.stage(3)
            self._write_table(self.fabric.mine(table), **scratch)
            self.expert_rows.fill_padding(tokens, **scratch)
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(scratch["stored"])
            self.expert_rows.describe(*layout, **scratch)
            self.expert_rows.fill_tail(tokens, **scratch)

        @pl.when(warpgroup == 1)
        def _receiver():
            self.fabric.connect()
            plgpu.barrier_arrive(scratch["connected"])
            self._receive(rows, tokens, **scratch)

    def _send_rows(self, x, sources, tokens, rows, *, stored, first_rows, **scratch):
        fabric, sender, width = self.fabric, self.sender, self.expert_rows.count_width
        next_rows = scratch["next_rows"]
        start = next_rows.at[pl.ds(0, width)]
        first_rows[...] = fb.load(fabric, start, 1)
        send = functools.partial(
            sender.send,
            x,
            sources,
            tokens,
            rows,
            lists_for=functools.partial(self._new_rows, **scratch),
            place_of=self._first_place,
            **scratch,
        )
        send(peers=[fabric.rank()], further_of=self._further_places, signalled=None)
        plgpu.barrier_wait(stored)
        fabric.report(SENT, 1)

        # Not a loop: of kernels with one more loop around these, ptxas makes the tensor cores'
        # instructions wait for each other.
        for i in range(1, fabric.num_ranks):
            fabric.barrier()
            start[...] = fb.load(fabric, first_rows, 1)
            sender.fetch_first(x, **scratch)
            sender.open_window(sources, 0, **scratch)
            sender.make_ready(x, 0, **scratch)
            send(peers=[self._rank_after(i)], signalled=i - 1)

    def _receive(self, rows, tokens, **scratch):
        begun = jnp.int32(0)
        for i in range(1, self.fabric.num_ranks):
            sources = [self._rank_after(self.fabric.num_ranks - i)]
            begun = self._receive_from(sources, i - 1, begun, rows, tokens, **scratch)
            plgpu.wait_smem_to_gmem(0)
            self.fabric.report(RECEIVED, i)

    def _rank_after(self, distance):
        return lax.rem(self.fabric.rank() + distance, jnp.int32(self.fabric.num_ranks))

    def _write_table(
        self, table, /, *, all_counts, block_starts, block_ends, scan, tile_ends, tiles_before, **_
    ):
        """Writes this block's share of the table of tiles."""
        fabric, of_experts = self.fabric, self.expert_rows
        num_ranks, per_rank = fabric.num_ranks, of_experts.num_local_experts
        first_expert, capacity = fabric.rank() * per_rank, of_experts.capacity
        last_expert = first_expert + per_rank - 1

        def rows_of(source, before, counted, end_of_rows, end):
            """Returns where a source's rows of an expert start, and how many are kept.

            Zeros between experts' rows belong to the last source's.
            """
            begin = jnp.minimum(before, end_of_rows)
            stop = jnp.where(
                source == num_ranks - 1, end, jnp.minimum(before + counted, end_of_rows)
            )
            return begin, jnp.minimum(stop, capacity) - begin

        def count_round(i, total):
            source = self._rank_after(num_ranks - i)
            before = fb.load(fabric, block_starts, 1)
            for other in range(num_ranks):
                counted = fb.load(fabric, all_counts.at[other], 1)
                before = before + jnp.where(other < source, counted, jnp.zeros_like(counted))
            counted = fb.load(fabric, all_counts.at[source], 1)
            ends = (fb.load(fabric, block_ends.at[which], 1) for which in range(2))
            tiles = count_tiles(*rows_of(source, before, counted, *ends), self.heights)
            tile_ends[i] = of_experts._ends(tiles, scan)
            tiles_before[i] = total
            fabric.barrier()
            return total + tile_ends[i, last_expert]

        total = lax.fori_loop(0, num_ranks, count_round, jnp.int32(0))
        tiles_before[num_ranks] = total
        fabric.barrier()
        block, num_blocks = lax.axis_index("block"), jnp.int32(self.plan.num_blocks)

        def write_group(i, carry):
            group = block + i * num_blocks
            number = lax.div(group, jnp.int32(per_rank))
            expert = first_expert + lax.rem(group, jnp.int32(per_rank))
            source = self._rank_after(num_ranks - number)
            before = block_starts[expert]
            for other in range(num_ranks):
                before = before + jnp.where(other < source, all_counts[other, expert], 0)
            start, size = rows_of(
                source, before, all_counts[source, expert],
                block_ends[0, expert], block_ends[1, expert],
            )  # fmt: skip
            entry = tiles_before[number] + tile_ends[number, expert]
            entry = entry - count_tiles(start, size, self.heights)
            write_tiles(table, entry, group, start, size, self.heights)
            return carry

        mine = lax.div(self.num_groups - block + (num_blocks - 1), num_blocks)
        lax.fori_loop(0, jnp.maximum(mine, 0), write_group, None)

        @pl.when(block == 0)
        def _():
            live = jnp.minimum(block_ends[1, last_expert], capacity)
            write_entry(table, self.most_tiles, total, live)
            for i in range(num_ranks):
                write_entry(table, self.most_tiles + 1 + i, tiles_before[i + 1])

            @pl.when(total == 0)
            def _():
                zero = jnp.int32(0)
                write_entry(table, 0, zero, zero, zero, zero)
