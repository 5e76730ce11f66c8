"""Finds where each expert's rows are in an expert-major receive buffer, and zeroes unused rows.

The rows of one expert are a group: a row for each choice of the expert, sorted by source rank, then
by token, and rows of zeros that pad the group to a multiple of the alignment. A rank's buffer has R
rows:

  rows of a rank:   group of expert 0    group of expert 1               R
                    | tokens' rows | 0 0 | tokens' rows | 0 | 0 0 0 0 ...|
                    ^ start        ^     ^ end with           unused rows
                                   |       padding
                                   ^ end without padding

One warpgroup of every thread block finds the groups, from how often each rank's tokens choose each
expert; another may write the zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import ReceiveBuffer, count_width
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import padded_columns


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Finds each expert's rows in an expert-major receive buffer, and zeroes unused rows."""

    fabric: fb.Fabric
    num_blocks: int
    num_experts: int  # on all ranks
    buffer: ReceiveBuffer
    # (columns, dtype) of a row's values and, if rows are quantized, of its scales.
    parts: Sequence[tuple[int, Any]]
    # Whether an earlier call has zeroed the unused rows, so that `fill` does nothing.
    already_zeroed: bool = False
    # Arrivals that complete `counts_full`; None: one for each copy of `fetch_counts`.
    count_arrivals: int | None = None

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.fabric.num_ranks

    @property
    def count_width(self) -> int:
        return count_width(self.num_experts)

    def scratch(self) -> fb.Scratch:
        """Returns the types of the shared memory that the kernel must allocate."""
        ranks, width = self.fabric.num_ranks, self.count_width
        return fb.Scratch(
            # How often the tokens of each source rank choose each expert.
            all_counts=plgpu.SMEM((ranks, width), jnp.int32),
            # Workspace of the prefix sums of `find_groups`; before, a kernel may use it for counts
            # of its own.
            scan=plgpu.SMEM((2 * width,), jnp.int32),
            # Element [0, e] is the row after the last token of expert e, and element [1, e] is the
            # row after the expert's padding.
            group_ends=plgpu.SMEM((2, width), jnp.int32),
            # A row of zeros, which `fill` copies to the receive buffer.
            zeros=[plgpu.SMEM((padded_columns(columns, t),), t) for columns, t in self.parts],
            counts_full=plgpu.Barrier(num_arrivals=self.count_arrivals or ranks),
        )

    def fetch_counts(self, counts: Any, scratch: fb.Scratch) -> None:
        """Starts to copy an earlier dispatch's counts, [N, count_width] int32, to shared memory."""
        for rank in range(self.fabric.num_ranks):
            counts_of_rank = self.fabric.mine(counts).at[rank]
            fb.fetch(counts_of_rank, scratch.all_counts.at[rank], scratch.counts_full)

    def receive_counts(self, scratch: fb.Scratch) -> None:
        """Waits for the counts that every rank sends, and copies them to `all_counts`."""
        for rank in range(self.fabric.num_ranks):
            self.fabric.read_values(rank, 0, scratch.all_counts.at[rank], "dispatch")
        self.fabric.barrier()
        plgpu.barrier_arrive(scratch.counts_full)

    def find_groups(
        self,
        scratch: fb.Scratch,
        *,
        next_rows: Any = None,
        group_starts: Any = None,
        all_counts_ref: Any = None,
    ) -> None:
        """Waits for the counts, finds each expert's rows, and writes `scratch.group_ends`.

        Args:
          next_rows: [count_width or more] int32 in shared memory, or None. On entry, how often the
            tokens of blocks with lower indices choose each expert. On return, the row that this
            block's first choice of each expert gets.
          group_starts: [count_width] int32 in shared memory, gets each expert's first row; or None.
          all_counts_ref: [N, count_width] int32 in global memory, gets the counts from block 0; or
            None.
        """
        fabric, width = self.fabric, self.count_width
        num_ranks, rank = fabric.num_ranks, fabric.rank()
        plgpu.barrier_wait(scratch.counts_full)
        per_source = [fb.load(scratch.all_counts.at[source], 1) for source in range(num_ranks)]
        num_rows = sum(per_source[1:], per_source[0])  # of each expert
        if self.buffer.fair:
            # Rows beyond an expert's quota are dropped.
            num_rows = jnp.minimum(num_rows, self._quotas(num_rows, scratch))
        padded_sizes = self._aligned(num_rows)
        ends = self._ends(padded_sizes, scratch.scan)
        starts = ends - padded_sizes
        if next_rows is not None:
            # The rows of a group are sorted by source rank, then by token.
            rows = starts + fb.load(next_rows.at[pl.ds(0, width)], 1)
            for source in range(num_ranks):
                counted = per_source[source]
                rows = rows + jnp.where(source < rank, counted, jnp.zeros_like(counted))
            next_rows[pl.ds(0, width)] = rows
        if group_starts is not None:
            group_starts[...] = starts
        scratch.group_ends[0] = starts + num_rows
        scratch.group_ends[1] = ends
        fabric.barrier()
        if all_counts_ref is not None:

            @pl.when(lax.axis_index("block") == 0)
            def write_counts() -> None:
                for source in range(num_ranks):
                    fabric.mine(all_counts_ref)[source] = per_source[source]

    def _aligned(self, counts: Any) -> Any:
        if self.buffer.alignment == 1:
            return counts
        alignment = jnp.int32(self.buffer.alignment)
        return lax.div(counts + (alignment - 1), alignment) * alignment

    def _ends(self, sizes: Any, scan: Any) -> Any:
        """Returns the running sum over each rank's experts of `sizes`, [count_width] int32."""
        fabric, width, per_rank = self.fabric, self.count_width, self.num_local_experts
        # This is an inclusive scan in log2(experts of a rank) rounds. The second half of `scan`
        # holds the sums of the previous round, and its first half is zeros. So a load that begins
        # `shift` entries before the second half gets the sums shifted by `shift` experts.
        local_expert = lax.rem(fb.iota(width), jnp.int32(per_rank))
        fb.clear(scan, width)
        ends, shift = sizes, 1
        while shift < per_rank:
            scan[pl.ds(width, width)] = ends
            fabric.barrier()
            before = fb.load(scan.at[pl.ds(width - shift, width)], 1)
            fabric.barrier()
            ends = ends + jnp.where(local_expert >= shift, before, jnp.zeros_like(before))
            shift *= 2
        return ends

    def _quotas(self, counts: Any, scratch: fb.Scratch) -> Any:
        """Returns the most rows that each expert may keep of its `counts`, [count_width] int32."""
        # All experts of a rank have the same quota: the largest with which their rows fit in the
        # capacity. One binary search, from the highest bit, finds the quotas of all ranks at once.
        rank_of_expert = lax.div(fb.iota(self.count_width), jnp.int32(self.num_local_experts))

        def of_experts(quotas: Sequence[Any]) -> Any:
            """Returns the quota of each expert, [count_width], from those of the N ranks."""
            each = jnp.full((self.count_width,), 0, jnp.int32)
            for rank, quota in enumerate(quotas):
                each = jnp.where(rank_of_expert == rank, quota, each)
            return each

        def try_bit(i: Any, quotas: Sequence[Any]) -> tuple[Any, ...]:
            """Sets bit num_bits - 1 - i of the quota of each rank whose rows then still fit."""
            bit = lax.shift_left(jnp.int32(1), num_bits - 1 - i)
            tried = [quota + bit for quota in quotas]
            fitting = self._fit(jnp.minimum(counts, of_experts(tried)), scratch)
            return tuple(map(jnp.where, fitting, tried, quotas))

        overflows = jnp.logical_not(functools.reduce(operator.and_, self._fit(counts, scratch)))
        # A quota never exceeds the capacity, so it has at most as many bits.
        num_bits = jnp.int32(self.buffer.capacity.bit_length())
        zeros = (jnp.int32(0),) * self.fabric.num_ranks
        quotas = lax.fori_loop(0, jnp.where(overflows, num_bits, 0), try_bit, zeros)
        return jnp.where(overflows, of_experts(quotas), counts)

    def _fit(self, counts: Any, scratch: fb.Scratch) -> list[Any]:
        """Returns for each of the N ranks whether its experts' rows fit in the capacity."""
        num_ranks, per_rank = self.fabric.num_ranks, self.num_local_experts
        # `group_ends` is free, since `find_groups` writes it only later.
        scratch.group_ends[1] = self._ends(self._aligned(counts), scratch.scan)
        self.fabric.barrier()
        # The end of a rank's last group is the number of its rows.
        ends = [scratch.group_ends[1, (rank + 1) * per_rank - 1] for rank in range(num_ranks)]
        self.fabric.barrier()
        return [end <= self.buffer.capacity for end in ends]

    def take_rows(
        self,
        experts: Sequence[Any],
        next_rows: Any,
        scratch: fb.Scratch,
        *,
        leading: tuple[Any, ...] = (),
        last: bool = False,
    ) -> list[Any]:
        """Assigns a receive-buffer row to each choice of a token, and advances `next_rows`.

        Args:
          experts: the expert of each choice, int32 []; `count_width` for a choice that needs no
            row.
          next_rows: [..., more than count_width] int32 in shared memory: the next free row of each
            expert.
          leading: the indices of the leading axes of `next_rows`, such as the token's source rank.
          last: whether no token follows, so that `next_rows` need not be advanced.

        Returns:
          The row of each choice, int32 []; R or more if it is dropped, undefined if it needs none.
        """
        found = [next_rows[(*leading, expert)] for expert in experts]
        # If a token chooses an expert more than once, the later choice gets the next row.
        for choice, expert in enumerate(experts):
            for earlier in experts[:choice]:
                found[choice] = found[choice] + (earlier == expert).astype(jnp.int32)
        if not last:
            # All threads must have read the next free rows before any thread advances them.
            self.fabric.barrier()
            for expert, row in zip(experts, found, strict=True):
                # An expert's last choice has the largest row, and stores last.
                next_rows[(*leading, expert)] = row + 1
            # All threads must have advanced `next_rows` before the next token's rows are read.
            self.fabric.barrier()
        if self.buffer.fair:
            ends = [scratch.group_ends[0, jnp.minimum(e, self.num_experts - 1)] for e in experts]
            dropped_row = jnp.int32(self.buffer.capacity)
            found = [
                jnp.where(row < end, row, dropped_row) for row, end in zip(found, ends, strict=True)
            ]
        return found

    def describe(self, scratch: fb.Scratch, results: Sequence[Any]) -> None:
        """Writes from block 0 the last four results of `expert_dispatch`."""
        group_sizes, expert_counts, num_dropped, rows_needed = results
        fabric, per_rank = self.fabric, self.num_local_experts
        first_expert = fabric.rank() * per_rank

        def describe_group(i: Any, carry: Any) -> Any:
            """Writes sizes of local group i; carries its end, and the rows dropped and needed."""
            start, dropped, needed = carry
            end_of_tokens = scratch.group_ends[0, first_expert + i]
            end = scratch.group_ends[1, first_expert + i]
            # The rows of the group if none were dropped; a `fair` group ends after its quota.
            wanted = end_of_tokens - start
            if self.buffer.fair:
                wanted = jnp.int32(0)
                for source in range(fabric.num_ranks):
                    wanted = wanted + scratch.all_counts[source, first_expert + i]
            room = jnp.maximum(self.buffer.capacity - start, 0)
            kept = jnp.minimum(end_of_tokens - start, room)
            fabric.mine(group_sizes)[i] = jnp.minimum(end - start, room)
            fabric.mine(expert_counts)[i] = kept
            return end, dropped + (wanted - kept), needed + self._aligned(wanted)

        @pl.when(lax.axis_index("block") == 0)
        def write_results() -> None:
            zeros = (jnp.int32(0),) * 3
            _, dropped, needed = lax.fori_loop(0, per_rank, describe_group, zeros)
            fabric.mine(num_dropped)[0] = dropped
            fabric.mine(rows_needed)[0] = needed

    def fill(self, tokens: Sequence[Any], scratch: fb.Scratch) -> None:
        """Writes zeros to the groups' padding and, if `zero_unused`, to rows after the groups.

        `tokens` are the receive buffer's arrays, one for each part of a row.
        """
        if self.already_zeroed:
            return
        rank, per_rank = self.fabric.rank(), self.num_local_experts
        for part in scratch.zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()  # copies from shared memory see the zeros

        def zero_padding(expert: Any, _: None) -> None:
            begin, end = scratch.group_ends[0, expert], scratch.group_ends[1, expert]
            self._zero_rows(begin, end, tokens, scratch)

        if self.buffer.alignment > 1:
            lax.fori_loop(rank * per_rank, (rank + 1) * per_rank, zero_padding, None)
        if self.buffer.zero_unused:
            begin = scratch.group_ends[1, (rank + 1) * per_rank - 1]
            self._zero_rows(begin, self.buffer.capacity, tokens, scratch)
        plgpu.wait_smem_to_gmem(0)

    def _zero_rows(self, begin: Any, end: Any, tokens: Sequence[Any], scratch: fb.Scratch) -> None:
        """Zeroes this block's share of rows `begin` to `end` - 1: every num_blocks-th row."""
        block, num_blocks = lax.axis_index("block"), jnp.int32(self.num_blocks)
        end = jnp.minimum(end, self.buffer.capacity)
        count = lax.div(end - begin - block + (num_blocks - 1), num_blocks)

        def zero_row(i: Any, _: None) -> None:
            row = begin + block + i * num_blocks
            for part, ref, (width, _dtype) in zip(scratch.zeros, tokens, self.parts, strict=True):
                plgpu.copy_smem_to_gmem(part.at[pl.ds(0, width)], self.fabric.mine(ref).at[row])

        lax.fori_loop(0, jnp.maximum(count, 0), zero_row, None)
