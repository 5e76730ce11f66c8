"""Finds where each expert's rows are in an expert-major receive buffer, and zeroes its gaps.

The places follow from how often each rank chose each expert. The rows of one expert are a group:

    rows of a rank:   group of expert 0      group of expert 1             R
                      | tokens' rows | 0 0 | tokens' rows | 0 | 0 0 0 0 ...|
                      ^ start        ^ end without        ^     unused rows
                                           ^ end with padding

In an expert's group, rows of lower source ranks come first, then those of lower tokens. One
warpgroup of every thread block finds the groups; another may write the zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import count_width
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import padded_columns


class ExpertScratch(NamedTuple):
    """The shared memory of `ExpertRows`. An array of counts has `count_width` entries."""

    all_counts: Any  # [N, counts] int32: choices of each expert, by source rank
    scan: Any  # [2 counts] int32: half of it stays zero
    group_ends: Any  # [2, counts] int32: where groups end without padding, and with it
    zeros: Sequence[Any]  # for each part of a row, a row of zeros
    counts_full: Any  # barrier: `all_counts` is complete


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Finds the groups of experts' rows and fills their gaps; its methods are steps of a kernel.

    The kernel allocates `scratch`, and passes it to the methods.

    Attributes:
      fabric: how ranks reach each other.
      num_blocks: thread blocks per rank.
      num_experts: E.
      capacity: R.
      alignment: the rows of each expert start at a multiple of this.
      parts: columns and dtype of each part of a row.
      fair: whether a rank whose rows do not fit keeps equally many of each expert; else it keeps
        the first rows.
      zero_unused: whether `fill` writes the rows past the last expert's.
      adds: whether the kernel writes rows into an array whose gaps an earlier call has filled; then
        `fill` does nothing.
      count_arrivals: arrivals after which the counts are complete; None: as many as `fetch_counts`
        makes.
    """

    fabric: fb.Fabric
    num_blocks: int
    num_experts: int
    capacity: int
    alignment: int
    parts: Sequence[tuple[int, Any]]
    fair: bool = False
    zero_unused: bool = True
    adds: bool = False
    count_arrivals: int | None = None

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.fabric.num_ranks

    @property
    def count_width(self) -> int:
        """Entries of a rank's counts in memory: E, padded to whole vectors."""
        return count_width(self.num_experts)

    def scratch(self) -> ExpertScratch:
        """Returns the types of the scratch."""
        ranks, width = self.fabric.num_ranks, self.count_width
        return ExpertScratch(
            all_counts=plgpu.SMEM((ranks, width), jnp.int32),
            scan=plgpu.SMEM((2 * width,), jnp.int32),
            group_ends=plgpu.SMEM((2, width), jnp.int32),
            zeros=[plgpu.SMEM((padded_columns(columns, t),), t) for columns, t in self.parts],
            counts_full=plgpu.Barrier(num_arrivals=self.count_arrivals or ranks),
        )

    def fetch_counts(self, counts: Any, scratch: ExpertScratch) -> None:
        """Starts to load the counts of all ranks, [N, E], from this rank's memory."""
        for rank in range(self.fabric.num_ranks):
            plgpu.copy_gmem_to_smem(
                self.fabric.mine(counts).at[rank],
                scratch.all_counts.at[rank],
                scratch.counts_full,
                oob_mode=fb.IN_BOUNDS,
            )

    def receive_counts(self, scratch: ExpertScratch) -> None:
        """Receives every rank's number of choices of each expert."""
        for rank in range(self.fabric.num_ranks):
            self.fabric.read_values(rank, 0, scratch.all_counts.at[rank], "dispatch")
        self.fabric.barrier()
        plgpu.barrier_arrive(scratch.counts_full)

    def find_groups(
        self,
        scratch: ExpertScratch,
        *,
        next_rows: Any = None,
        group_starts: Any = None,
        all_counts_ref: Any = None,
    ) -> None:
        """Finds where each expert's group of rows starts and ends on the expert's rank.

        If `fair`, the groups hold only kept rows: each expert of a rank keeps at most q, the
        largest number at which the rank's groups fit in the capacity. A row at or after the end of
        its expert's rows is dropped.

        Args:
          scratch: its counts have arrived or will arrive. `group_ends` is written.
          next_rows: an array in shared memory, or None. On entry it holds how many choices of each
            expert this rank's earlier blocks make. On return it holds the row of this block's first
            choice of each expert.
          group_starts: [E] in shared memory, for the groups' starts; None: they are not kept.
          all_counts_ref: [N, E] in global memory, to which block 0 writes all counts; or None.
        """
        fabric, width = self.fabric, self.count_width
        num_ranks, rank = fabric.num_ranks, fabric.rank()
        plgpu.barrier_wait(scratch.counts_full)
        per_source = [
            fb.load(fabric, scratch.all_counts.at[source], 1) for source in range(num_ranks)
        ]
        total = sum(per_source[1:], per_source[0])
        if self.fair:
            total = jnp.minimum(total, self._quotas(total, scratch))
        sizes = self._aligned(total)
        ends = self._ends(sizes, scratch.scan)
        starts = ends - sizes
        if next_rows is not None:
            row = starts + fb.load(fabric, next_rows.at[pl.ds(0, width)], 1)
            for source in range(num_ranks):
                counted = per_source[source]
                row = row + jnp.where(source < rank, counted, jnp.zeros_like(counted))
            next_rows[pl.ds(0, width)] = row
        if group_starts is not None:
            group_starts[...] = starts
        scratch.group_ends[0] = starts + total
        scratch.group_ends[1] = ends
        fabric.barrier()
        if all_counts_ref is not None:

            @pl.when(lax.axis_index("block") == 0)
            def write_counts() -> None:
                for source in range(num_ranks):
                    fabric.mine(all_counts_ref)[source] = per_source[source]

    def _aligned(self, counts: Any) -> Any:
        """Rounds numbers of rows up to multiples of the alignment."""
        if self.alignment == 1:
            return counts
        alignment = jnp.int32(self.alignment)
        return lax.div(counts + (alignment - 1), alignment) * alignment

    def _ends(self, sizes: Any, scan: Any) -> Any:
        """Returns where each group ends: the running sums of the sizes of each rank's groups."""
        fabric, width, per_rank = self.fabric, self.count_width, self.num_local_experts
        # Inclusive scan over each rank's experts. `scan` is zeros, then the sums of the last round.
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
        return ends

    def _quotas(self, total: Any, scratch: ExpertScratch) -> Any:
        """Returns the most rows that each expert keeps at its rank, [E]: the rank's quota q.

        The quotas of all ranks are found together, from the highest bit to the lowest: a bit is
        kept if groups of at most that many rows fit. If the rows of all ranks fit, no bit is tried.
        """
        fabric, num_ranks = self.fabric, self.fabric.num_ranks
        per_rank, width = self.num_local_experts, self.count_width
        rank_of_expert = lax.div(fb.iota(fabric, width), jnp.int32(per_rank))

        def of_experts(quotas: Sequence[Any]) -> Any:
            each = jnp.full((width,), 0, jnp.int32)
            for rank, quota in enumerate(quotas):
                each = jnp.where(rank_of_expert == rank, quota, each)
            return each

        def fit(counts: Any) -> list[Any]:
            """Returns whether each rank's groups of these sizes fit in the capacity."""
            scratch.group_ends[1] = self._ends(self._aligned(counts), scratch.scan)
            fabric.barrier()
            ends = [scratch.group_ends[1, (rank + 1) * per_rank - 1] for rank in range(num_ranks)]
            fabric.barrier()
            return [end <= self.capacity for end in ends]

        def try_bit(i: Any, quotas: Sequence[Any]) -> tuple[Any, ...]:
            bit = lax.shift_left(jnp.int32(1), num_bits - 1 - i)
            tried = [quota + bit for quota in quotas]
            fitting = fit(jnp.minimum(total, of_experts(tried)))
            return tuple(map(jnp.where, fitting, tried, quotas))

        overflows = jnp.logical_not(functools.reduce(operator.and_, fit(total)))
        num_bits = jnp.int32(self.capacity.bit_length())  # a quota is at most the capacity
        zeros = (jnp.int32(0),) * num_ranks
        quotas = lax.fori_loop(0, jnp.where(overflows, num_bits, 0), try_bit, zeros)
        # Where nothing overflows anywhere, the quotas are still 0.
        return jnp.where(overflows, of_experts(quotas), total)

    def take_rows(
        self,
        experts: Sequence[Any],
        next_rows: Any,
        scratch: ExpertScratch,
        *,
        of: tuple[Any, ...] = (),
        last: bool = False,
    ) -> list[Any]:
        """Returns the row of each choice of a token, R or more if dropped; advances `next_rows`.

        Args:
          experts: the expert of each choice; `count_width` for a choice whose row may be anything.
          next_rows: the next row of each expert, and an entry for `count_width`.
          scratch: `find_groups` has written its `group_ends`.
          of: the indices of `next_rows`' leading dimensions.
          last: whether no token follows, so that `next_rows` need not be advanced.
        """
        # All threads read each expert's next row before any counts this token's choices.
        found = [next_rows[(*of, expert)] for expert in experts]
        for choice, expert in enumerate(experts):
            for earlier in experts[:choice]:
                found[choice] = found[choice] + (earlier == expert).astype(jnp.int32)
        if not last:
            self.fabric.barrier()
            for expert, row in zip(experts, found, strict=True):
                next_rows[(*of, expert)] = (
                    row + 1
                )  # of repeated choices, the last has the largest row
            self.fabric.barrier()  # the next token reads these counts
        if self.fair:
            ends = [scratch.group_ends[0, jnp.minimum(e, self.num_experts - 1)] for e in experts]
            dropped = jnp.int32(self.capacity)
            found = [
                jnp.where(row < end, row, dropped) for row, end in zip(found, ends, strict=True)
            ]
        return found

    def describe(
        self,
        scratch: ExpertScratch,
        group_sizes: Any,
        expert_counts: Any,
        num_dropped: Any,
        rows_needed: Any,
    ) -> None:
        """Writes this rank's group_sizes, expert_counts, num_dropped and rows_needed, in block 0.

        `dispatch.dispatch` describes these results.
        """
        fabric, per_rank = self.fabric, self.num_local_experts
        first_expert = fabric.rank() * per_rank

        def ends_of_group(i: Any) -> tuple[Any, Any]:
            return scratch.group_ends[0, first_expert + i], scratch.group_ends[1, first_expert + i]

        def describe_tail(i: Any, carry: Any) -> Any:
            """Writes a group's sizes; `carry` holds its start and how many rows were dropped."""
            start, dropped = carry
            end_of_rows, end = ends_of_group(i)
            room = jnp.maximum(self.capacity - start, 0)
            kept = jnp.minimum(end_of_rows - start, room)
            fabric.mine(group_sizes)[i] = jnp.minimum(end - start, room)
            fabric.mine(expert_counts)[i] = kept
            return end, dropped + (end_of_rows - start - kept)

        def describe_fair(i: Any, carry: Any) -> Any:
            """Writes a group's sizes where all groups fit; `carry`: start, dropped, needed."""
            start, dropped, needed = carry
            end_of_rows, end = ends_of_group(i)
            wanted = jnp.int32(0)
            for source in range(fabric.num_ranks):
                wanted = wanted + scratch.all_counts[source, first_expert + i]
            fabric.mine(group_sizes)[i] = end - start
            fabric.mine(expert_counts)[i] = end_of_rows - start
            dropped = dropped + (wanted - (end_of_rows - start))
            return end, dropped, needed + self._aligned(wanted)

        @pl.when(lax.axis_index("block") == 0)
        def describe() -> None:
            zero = jnp.int32(0)
            if self.fair:
                carry = (zero, zero, zero)
                _, dropped, needed = lax.fori_loop(0, per_rank, describe_fair, carry)
            else:
                needed, dropped = lax.fori_loop(0, per_rank, describe_tail, (zero, zero))
            fabric.mine(num_dropped)[0] = dropped
            fabric.mine(rows_needed)[0] = needed

    def fill(self, tokens: Sequence[Any], scratch: ExpertScratch) -> None:
        """Writes zeros to the rows of `tokens`, an array for each part, that receive no token.

        Without `zero_unused`, writes only the padding between experts' rows.
        """
        if self.adds:
            return
        rank, per_rank = self.fabric.rank(), self.num_local_experts
        block = lax.axis_index("block")
        num_blocks = jnp.int32(self.num_blocks)
        for part in scratch.zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()

        def fill_row(row: Any) -> None:
            for part, ref, (width, _) in zip(scratch.zeros, tokens, self.parts, strict=True):
                plgpu.copy_smem_to_gmem(part.at[pl.ds(0, width)], self.fabric.mine(ref).at[row])

        def fill_gap(begin: Any, end: Any) -> None:
            """Fills this block's share of the rows from `begin` to `end`: every num_blocks-th."""
            end = jnp.minimum(end, self.capacity)
            count = lax.div(end - begin - block + (num_blocks - 1), num_blocks)
            lax.fori_loop(
                0,
                jnp.maximum(count, 0),
                lambda i, _: fill_row(begin + block + i * num_blocks),
                None,
            )

        def fill_padding(expert: Any, _: None) -> None:
            fill_gap(scratch.group_ends[0, expert], scratch.group_ends[1, expert])

        if self.alignment > 1:
            lax.fori_loop(rank * per_rank, (rank + 1) * per_rank, fill_padding, None)
        if self.zero_unused:
            fill_gap(scratch.group_ends[1, (rank + 1) * per_rank - 1], self.capacity)
        plgpu.wait_smem_to_gmem(0)
