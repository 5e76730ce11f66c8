"""The layout of expert-major rows: where each expert's rows lie, and zeros where there are none.

Both follow from how often each rank chose each expert. Every thread block computes the layout for
itself, in one warpgroup; another may write the zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import count_width
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.plan import Plan, Tiling


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Computes the layout and fills in zeros: its methods are steps of a kernel.

    `scratch` is the scratch memory of that kernel, `scratch_types` what it must hold.

    Attributes:
      fabric: how ranks reach each other.
      plan: number of blocks.
      num_experts: E.
      capacity: R.
      alignment: each expert's block starts at a multiple of this.
      count_dtype: the dtype of the counts that are fetched.
      parts: columns and dtype of each part of a row.
    """

    fabric: fb.Fabric
    plan: Plan
    num_experts: int
    capacity: int
    alignment: int
    count_dtype: Any
    parts: Sequence[tuple[int, Any]]
    fetched: bool = True  # whether the counts are read from this rank's memory, or come from peers

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.fabric.num_ranks

    @property
    def count_width(self) -> int:
        """Entries of the counts that are fetched: E, padded."""
        return count_width(self.num_experts)

    def scratch_types(self) -> dict[str, Any]:
        ranks, width = self.fabric.num_ranks, self.count_width
        return dict(
            all_counts=plgpu.SMEM((ranks, width), self.count_dtype),
            scan=plgpu.SMEM((2 * width,), jnp.int32),
            block_ends=plgpu.SMEM((2, width), jnp.int32),  # of each expert's rows, and padded
            zeros=[plgpu.SMEM((Tiling.of(columns, t).padded,), t) for columns, t in self.parts],
            counts_full=plgpu.Barrier(num_arrivals=ranks if self.fetched else 1),
        )

    def fetch_counts(
        self, sources: Sequence[tuple[Any, Any]], *, all_counts: Any, counts_full: Any, **_: Any
    ) -> None:
        """Starts to load all ranks' counts; a source is a rank and its counts [E]."""
        for rank, source in sources:
            plgpu.copy_gmem_to_smem(source, all_counts.at[rank], counts_full, oob_mode=fb.IN_BOUNDS)

    def receive_counts(self, *, all_counts: Any, counts_full: Any, **_: Any) -> None:
        """Waits for every rank's choices of each expert, as peers send them."""
        self.fabric.receive_words(all_counts, "dispatch")
        plgpu.barrier_arrive(counts_full)

    def lay_out(
        self, all_counts_ref: Any = None, *, all_counts: Any, counts_full: Any, scan: Any,
        block_ends: Any, next_rows: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """Computes where each expert's rows start and end at its rank.

        `next_rows` holds how many choices of each expert this rank makes before this block's; it
        becomes the row of its first choice here. `all_counts_ref` [N, E] takes all counts.
        """
        fabric, width, per_rank = self.fabric, self.count_width, self.num_local_experts
        num_ranks, rank = fabric.num_ranks, fabric.rank()
        plgpu.barrier_wait(counts_full)
        per_source = [
            fb.load(fabric, all_counts.at[source], 1).astype(jnp.int32)
            for source in range(num_ranks)
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
        if next_rows is not None:
            row = starts + fb.load(fabric, next_rows.at[pl.ds(0, width)], 1)
            for source in range(num_ranks):
                counted = per_source[source]
                row = row + jnp.where(source < rank, counted, jnp.zeros_like(counted))
            next_rows[pl.ds(0, width)] = row
        block_ends[0] = starts + total
        block_ends[1] = ends
        fabric.barrier()
        if all_counts_ref is not None:

            @pl.when(lax.axis_index("block") == 0)
            def _() -> None:
                for source in range(num_ranks):
                    fabric.mine(all_counts_ref)[source] = per_source[source]

    def describe(
        self, group_sizes: Any, expert_counts: Any, num_dropped: Any, rows_needed: Any, *,
        block_ends: Any, **_: Any,
    ) -> None:  # fmt: skip
        """Writes the layout of this rank's rows: see `dispatch.dispatch`."""
        fabric, per_rank = self.fabric, self.num_local_experts
        first_expert = fabric.rank() * per_rank

        @pl.when(lax.axis_index("block") == 0)
        def _() -> None:
            def describe(i: Any, carry: Any) -> Any:
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

    def fill(self, tokens: Sequence[Any], *, zeros: Any, block_ends: Any, **_: Any) -> None:
        """Writes zeros to the rows of this rank that receive nothing; `tokens` has their parts."""
        plan, rank, per_rank = self.plan, self.fabric.rank(), self.num_local_experts
        block = lax.axis_index("block")
        for part in zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()

        def fill_gap(begin: Any, end: Any) -> None:
            end = jnp.minimum(end, self.capacity)
            num_blocks = jnp.int32(plan.num_blocks)
            count = lax.div(end - begin - block + (num_blocks - 1), num_blocks)

            def fill_row(i: Any, carry: None) -> None:
                row = begin + block + i * num_blocks
                for part, ref, (width, _) in zip(zeros, tokens, self.parts, strict=True):
                    plgpu.copy_smem_to_gmem(part.at[pl.ds(0, width)], self.fabric.mine(ref).at[row])
                return carry

            lax.fori_loop(0, jnp.maximum(count, 0), fill_row, None)

        if self.alignment > 1:

            def fill_padding(expert: Any, carry: None) -> None:
                fill_gap(block_ends[0, expert], block_ends[1, expert])
                return carry

            lax.fori_loop(rank * per_rank, (rank + 1) * per_rank, fill_padding, None)
        fill_gap(block_ends[1, (rank + 1) * per_rank - 1], self.capacity)
        plgpu.wait_smem_to_gmem(0)
