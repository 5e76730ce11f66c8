"""Finds where each expert's rows are in an expert-major receive buffer, and zeroes unused rows.

The positions follow from how often each rank's tokens choose each expert. The rows of one expert
are a group. A group consists of a row for each choice of the expert, and of rows of zeros that pad
the group to a multiple of the alignment. The rows after the last group are unused. A rank's buffer
has R rows:

    rows of a rank:   group of expert 0    group of expert 1               R
                      | tokens' rows | 0 0 | tokens' rows | 0 | 0 0 0 0 ...|
                      ^ start        ^     ^ end with           unused rows
                                     |       padding
                                     ^ end without padding

An expert's rows are sorted by source rank, then by token. One warpgroup of every thread block
finds where the groups start and end; another warpgroup may write the zeros.
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
    """The shared memory of `ExpertRows`.

    W is `ExpertRows.count_width`, the number of experts on all ranks, padded.
    """

    # [N, W] int32: how often the tokens of each source rank choose each expert.
    all_counts: Any
    # [2 · W] int32: workspace. `find_groups` computes prefix sums over experts in it, with zeros in
    # the first half; before, a kernel may use it for counts of its own.
    scan: Any
    # [2, W] int32: element [0, e] is the row after the last token of expert e, and element [1, e]
    # is the row after the expert's padding.
    group_ends: Any
    # A row of zeros, which `fill` copies to the receive buffer: an array of values and, if rows are
    # quantized, an array of scales.
    zeros: Sequence[Any]
    # A barrier that completes when `all_counts` is filled.
    counts_full: Any


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Finds each expert's rows in an expert-major receive buffer, and zeroes unused rows.

    A kernel calls the methods from its body. It allocates the shared memory that `scratch`
    describes, and passes it to the methods.

    Attributes:
      fabric: how ranks reach each other.
      num_blocks: the number of thread blocks per rank.
      num_experts: E, the number of experts on all ranks together.
      capacity: R, the number of rows of each rank's receive buffer.
      alignment: the rows of each expert start at a multiple of this number.
      parts: (columns, dtype) of a row's values and, if rows are quantized, of its scales.
      fair: how a rank drops rows if more than R would arrive. If true, each of its experts keeps at
        most q rows, where q is the largest number with which the kept rows fit. If false, the rank
        drops the rows that would lie at row R or beyond.
      zero_unused: whether `fill` writes zeros to the rows past the last expert's rows.
      adds: whether the kernel writes into an existing receive buffer, whose unused rows an earlier
        call has zeroed. `fill` then does nothing.
      count_arrivals: how many arrivals complete the barrier `ExpertScratch.counts_full`; None means
        one for each copy that `fetch_counts` starts.
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
        """The length of an array with a count for each expert; see `plan.count_width`."""
        return count_width(self.num_experts)

    def scratch(self) -> ExpertScratch:
        """Returns the types of the shared memory that the kernel must allocate."""
        ranks, width = self.fabric.num_ranks, self.count_width
        return ExpertScratch(
            all_counts=plgpu.SMEM((ranks, width), jnp.int32),
            scan=plgpu.SMEM((2 * width,), jnp.int32),
            group_ends=plgpu.SMEM((2, width), jnp.int32),
            zeros=[plgpu.SMEM((padded_columns(columns, t),), t) for columns, t in self.parts],
            counts_full=plgpu.Barrier(num_arrivals=self.count_arrivals or ranks),
        )

    def fetch_counts(self, counts: Any, scratch: ExpertScratch) -> None:
        """Starts to copy the counts of an earlier dispatch to `scratch.all_counts`.

        `counts` is [N, count_width] int32 in this rank's global memory: how often the tokens of
        each source rank choose each expert.
        """
        for rank in range(self.fabric.num_ranks):
            plgpu.copy_gmem_to_smem(
                self.fabric.mine(counts).at[rank],
                scratch.all_counts.at[rank],
                scratch.counts_full,
                oob_mode=fb.IN_BOUNDS,
            )

    def receive_counts(self, scratch: ExpertScratch) -> None:
        """Waits for the counts that every rank sends, and copies them to `scratch.all_counts`.

        A rank sends [count_width] int32, how often its tokens choose each expert.
        """
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
        """Finds where each expert's rows start and end in the receive buffer of the expert's rank.

        Writes `scratch.group_ends`. With the attribute `fair`, each expert of a rank keeps at most
        q rows, and later choices of the expert are dropped. q is the largest number for which the
        kept rows of the rank's experts fit in the capacity.

        Args:
          scratch: shared memory. This method waits until its `all_counts` is filled.
          next_rows: [count_width or more] int32 in shared memory, or None. On entry it holds, for
            each expert, how often the tokens of blocks with lower indices choose it. On return it
            holds the row that this block's first choice of each expert gets.
          group_starts: [count_width] int32 in shared memory, gets each expert's first row; or None.
          all_counts_ref: [N, count_width] int32 in global memory, or None. Block 0 writes the
            counts of `scratch.all_counts` to it, as a result of the kernel.
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
        """Rounds each expert's number of rows up to a multiple of `alignment`.

        `counts` is int32, one number of rows or an array of them. The result has the same shape.
        """
        if self.alignment == 1:
            return counts
        alignment = jnp.int32(self.alignment)
        return lax.div(counts + (alignment - 1), alignment) * alignment

    def _ends(self, sizes: Any, scan: Any) -> Any:
        """Returns the row after each expert's rows and padding, [count_width] int32.

        `sizes` holds each expert's number of rows with padding. The result is the running sum of
        `sizes` over the experts of each rank. `scan` is `ExpertScratch.scan`.
        """
        fabric, width, per_rank = self.fabric, self.count_width, self.num_local_experts
        # This is an inclusive scan in log2(experts of a rank) rounds. The second half of `scan`
        # holds the sums of the previous round, and its first half is zeros. So a load that begins
        # `shift` entries before the second half gets the sums shifted by `shift` experts.
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
        """Returns each expert's quota, the most rows that it may keep, [count_width] int32.

        `total`, [count_width] int32, is each expert's number of rows before any is dropped. If all
        rows fit, the result is `total`. Otherwise all experts of a rank have the same quota: the
        largest with which their rows fit in the capacity. One binary search, from the highest bit
        to the lowest, finds the quotas of all ranks at once.
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
            """Returns for each of the N ranks whether its experts' rows fit in the capacity.

            `counts`, [count_width] int32, is each expert's number of rows without padding. The
            result has N scalar bools.
            """
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
        # A quota never exceeds the capacity, so it has at most as many bits.
        num_bits = jnp.int32(self.capacity.bit_length())
        zeros = (jnp.int32(0),) * num_ranks
        quotas = lax.fori_loop(0, jnp.where(overflows, num_bits, 0), try_bit, zeros)
        # If the rows of every rank fit, the loop had no iterations, and every expert keeps all its
        # rows.
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
        """Assigns a receive-buffer row to each choice of a token, and advances `next_rows`.

        Args:
          experts: the expert of each of the token's K choices, scalar int32. For a choice that
            needs no row, the caller passes `count_width` instead, and ignores the row.
          next_rows: int32 in shared memory, [..., more than count_width]: the next free row of each
            expert. The element at `count_width` serves choices that need no row.
          scratch: shared memory in which `find_groups` has written `group_ends`.
          of: the indices of the leading axes of `next_rows`, such as the token's source rank.
          last: whether no token follows, so that `next_rows` need not be advanced.

        Returns:
          The row of each choice, K scalar int32; R or more if the choice is dropped.
        """
        found = [next_rows[(*of, expert)] for expert in experts]
        for choice, expert in enumerate(experts):
            for earlier in experts[:choice]:
                found[choice] = found[choice] + (earlier == expert).astype(jnp.int32)
        if not last:
            # All threads must have read the next free rows before any thread advances them.
            self.fabric.barrier()
            for expert, row in zip(experts, found, strict=True):
                # If a token chooses an expert twice, both choices store to the same element of
                # `next_rows`. The later choice has the larger row, and stores last. So the element
                # becomes the row after both, which the expert's next token gets.
                next_rows[(*of, expert)] = row + 1
            # All threads must have advanced `next_rows` before the next token's rows are read.
            self.fabric.barrier()
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
        """Writes the sizes of this rank's groups to results of the kernel, in block 0 alone.

        A group is the rows of one of this rank's L experts.

        Args:
          scratch: shared memory in which `find_groups` has written `group_ends`.
          group_sizes: [L] int32 in global memory, gets each group's number of rows with padding.
          expert_counts: [L] int32 in global memory, gets each group's number without padding.
          num_dropped: [1] int32 in global memory, gets how many of this rank's rows did not fit.
          rows_needed: [1] int32 in global memory, gets the capacity with which all rows would fit.
        """
        fabric, per_rank = self.fabric, self.num_local_experts
        first_expert = fabric.rank() * per_rank

        def ends_of_group(i: Any) -> tuple[Any, Any]:
            return scratch.group_ends[0, first_expert + i], scratch.group_ends[1, first_expert + i]

        def describe_tail(i: Any, carry: Any) -> Any:
            """Writes the size of the group (the rows) of local expert i, if `fair` is False.

            Rows whose index is the capacity or more are dropped. `carry` is a pair: the group's
            first row, and the number of rows dropped from earlier groups. Returns the pair for the
            next group.
            """
            start, dropped = carry
            end_of_rows, end = ends_of_group(i)
            room = jnp.maximum(self.capacity - start, 0)
            kept = jnp.minimum(end_of_rows - start, room)
            fabric.mine(group_sizes)[i] = jnp.minimum(end - start, room)
            fabric.mine(expert_counts)[i] = kept
            return end, dropped + (end_of_rows - start - kept)

        def describe_fair(i: Any, carry: Any) -> Any:
            """Writes the size of the group (the rows) of local expert i, if `fair` is True.

            The experts' quotas have made all groups fit in the capacity. `carry` has three numbers:
            the group's first row, the number of rows dropped from earlier groups, and the number of
            rows (with padding) that earlier groups would have if no row were dropped. Returns these
            three numbers for the next group.
            """
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
        """Writes zeros to the rows of this rank's receive buffer that receive no token.

        These rows are the padding after each expert's rows and, if `zero_unused`, the rows after
        the last expert's padding. Without `zero_unused`, the latter stay undefined. `tokens` is the
        buffer: an array of values and, if rows are quantized, an array of scales.
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
            """Zeroes this block's share of rows `begin` to `end` - 1: every num_blocks-th row."""
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
