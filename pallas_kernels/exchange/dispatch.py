"""Dispatch into the expert-major layout: ranks write rows to their final positions at other ranks.

Block b of every rank handles the same range of tokens, with three or four warpgroups:

- sender: receives how often each rank's tokens choose each expert, which block 0 of every rank
  counts and sends. From these counts and those of earlier blocks' tokens, which every block counts,
  it computes the rows of each token. It writes the token to the first of its rows at every rank
  that gets it, with a list of all its rows at that rank.
- receiver: counts choices together with the sender. It then waits for each step (the tokens that
  each rank sends between two signals), and copies a token that has several rows on this rank from
  its first row to the others.
- filler: writes zeros to the rows of this rank's receive buffer that get no token.
- quantizer: quantizes the rows that the sender sends, if the wire format is quantized.

Rank s sends its token t to rank d, whose receive buffer is `tokens`:

  rank s, sender                     rank d                                     rank d, receiver
  x[t] --> ring -------- link -----> tokens[first row of t] --> ring ---------> tokens[other rows]
  rows of t at d ------- link -----> rows[s, t]             --> which rows ---^
  signal: a step is there ---------> block b

A row crosses the link once per (token, rank), without a staging buffer. A rank's kernel ends only
after the last signal of every peer. Before this signal, the peer has written all rows for this
rank, and has read what it needs of this rank's inputs. So the inputs may be freed when the kernel
ends.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.expert_rows import ExpertRows
from pallas_kernels.exchange.plan import Plan, ReceiveBuffer, Row, pad_last
from pallas_kernels.exchange.sender import PUT, List, Sender
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.formats import PLAIN, RowFormat

# How many warpgroups, the sender and the receiver, count choices by expert at first.
_COUNTERS = 2
# A warpgroup loads this many top-k choices into registers at a time, to count them by expert.
_COUNTED_AT_ONCE = 4096


def expert_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    fabric: fb.Fabric,
    plan: Plan,
    buffer: ReceiveBuffer,
    wire: RowFormat = PLAIN,
) -> tuple[Any, ...]:
    """Computes the receive-buffer row of each top-k choice and sends the tokens, in one kernel.

    T is the number of this rank's tokens, H the hidden size, K the number of choices of a token, N
    the number of ranks, E the number of experts and L that of a rank. Arrays of stacked ranks have
    a leading axis of N.

    Args:
      x: [T, H], the rows of this rank's tokens; H · itemsize is a multiple of 128 bytes.
      topk_idx: [T, K] int32, the experts that each token chooses.
      buffer: describes the R rows of each rank's receive buffer.
      wire: the format of rows sent and received. If it is quantized, H is a multiple of 512.

    Returns:
      tokens: the receive buffer ([R, H],), or with a quantized wire ([R, H], scales [R, H / 128]);
      rows: [N, T, K] int32, the row of this rank's receive buffer for each choice of each source
        rank's tokens, and -1 where the choice is of another rank's expert;
      counts: [N, E] int32, how often the tokens of each source rank choose each expert;
      group_sizes, expert_counts: [L] int32 each, the rows of each local expert with and without
        padding;
      num_dropped: [1] int32, how many of this rank's rows did not fit;
      rows_needed: [1] int32, the capacity with which all rows of this rank would fit.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks, per_rank = x.shape[:-2], fabric.num_ranks, num_experts // fabric.num_ranks
    row = Row(x.shape[-1], x.dtype, wire)
    kernel = _Dispatch(
        Sender(fabric, plan, num_tokens, row, num_words=top_k),
        # `counts_full` is completed by one arrival, that of `receive_counts`.
        ExpertRows(fabric, plan.num_blocks, num_experts, buffer, row.parts, count_arrivals=1),
    )
    window, num_parts = kernel.sender.window, len(row.parts)
    results = fb.kernel(
        fabric,
        kernel,
        name="ep_dispatch",
        num_blocks=plan.num_blocks,
        num_warpgroups=kernel.num_warpgroups,
        out_type=[
            *(jax.ShapeDtypeStruct((buffer.capacity, columns), t) for columns, t in row.parts),
            jax.ShapeDtypeStruct((num_ranks, window.total), jnp.int32),  # rows
            jax.ShapeDtypeStruct((num_ranks, kernel.experts.count_width), jnp.int32),  # counts
            # group_sizes, expert_counts, num_dropped, rows_needed
            *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (per_rank, per_rank, 1, 1)),
        ],
        scratch_types=dict(scratch=kernel.scratch()),
        # Peers write to the receive buffer and to the result `rows`, which follow the 2 operands.
        shared=tuple(range(2, 2 + num_parts + 1)),
    )(x, window.pad(topk_idx.reshape(*lead, num_tokens * top_k), fb.NOWHERE))
    parts, (rows, all_counts, *groups) = results[:num_parts], results[num_parts:]
    rows = rows[..., : num_tokens * top_k].reshape(*lead, num_ranks, num_tokens, top_k)
    return tuple(parts), rows, all_counts[..., :num_experts], *groups


def dispatch_like(
    x: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    buffer: ReceiveBuffer,
    wire: RowFormat = PLAIN,
    into: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Sends x to the receive-buffer rows that `expert_dispatch` computed for the same tokens.

    Args:
      x: [T, H], a row for each of this rank's tokens; H · itemsize is a multiple of 128 bytes.
      rows, counts: results of `expert_dispatch`, whose other arguments are the same.
      into: None, or an existing receive buffer, whose other rows keep their values. If the tokens
        of one dispatch are divided among several calls, it is the result of the previous call, and
        `counts` is that of the whole dispatch.

    Returns:
      The receive buffer ([R, H],), or with a quantized wire ([R, H], scales [R, H / 128]).
    """
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    num_experts = counts.shape[-1]
    row = Row(x.shape[-1], x.dtype, wire)
    kernel = _DispatchLike(
        Sender(fabric, plan, num_tokens, row, num_words=top_k, num_sources=num_ranks),
        ExpertRows(
            fabric, plan.num_blocks, num_experts, buffer, row.parts, already_zeroed=into is not None
        ),
    )
    tokens = [jax.ShapeDtypeStruct((buffer.capacity, columns), t) for columns, t in row.parts]
    call = fb.kernel(
        fabric,
        kernel,
        name="ep_dispatch_like",
        num_blocks=plan.num_blocks,
        num_warpgroups=kernel.num_warpgroups,
        out_type=tokens if into is None else [],
        scratch_types=dict(scratch=kernel.scratch()),
        # Peers read operand 1, `rows`, and write to the receive buffer, which follows the 3
        # operands.
        shared=(1, *range(3, 3 + len(row.parts))),
    )
    operands = (
        x,
        kernel.sender.window.pad(rows.reshape(*rows.shape[:-2], -1), fb.NOWHERE),
        pad_last(counts, kernel.experts.count_width - num_experts),
    )
    if into is None:
        return tuple(call(*operands))
    updated, _ = fb.update_in_place(into, lambda refs: call(*operands, *refs))
    return updated


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What both kernels share: the types of shared memory, and the receiver.

    In global memory, `rows` is [N, T·K] int32, and `tokens` are the buffer's values and scales.
    """

    sender: Sender
    experts: ExpertRows

    @property
    def fabric(self) -> fb.Fabric:
        return self.sender.fabric

    @property
    def top_k(self) -> int:
        return self.sender.num_words

    @property
    def num_warpgroups(self) -> int:
        return 2 + self.sender.num_warpgroups

    def scratch(self) -> fb.Scratch:
        ranks, num_copy_stages = self.fabric.num_ranks, self.sender.plan.num_copy_stages
        tokens_of_step = self.sender.step_tokens * ranks
        columns, dtype = self.sender.row.parts[0]
        return fb.Scratch(
            sender=self.sender.scratch(),
            experts=self.experts.scratch(),
            # The receive-buffer row for each choice of each source rank's tokens in one step.
            step_rows=plgpu.SMEM((ranks, self.sender.step_window.width), jnp.int32),
            # For each of the step's tokens that has several rows on this rank, the row number of
            # each of its K choices; NOWHERE for a choice without a row here.
            step_copies=plgpu.SMEM((tokens_of_step, self.top_k), jnp.int32),
            # The receiver's ring, from which values are copied to a token's other rows.
            copies=plgpu.SMEM((num_copy_stages, columns), dtype),
            copy_full=plgpu.Barrier(num_barriers=(num_copy_stages,)),
            # The sender has found where each expert's rows are.
            groups_known=plgpu.Barrier(),
        )

    def kept(self, row: jax.Array) -> jax.Array:
        return (row >= 0) & (row < self.experts.buffer.capacity)

    def receive(self, rows: Any, tokens: Sequence[Any], scratch: fb.Scratch) -> None:
        """Waits for the tokens of peers, and copies each from its first row to its other rows."""
        _, num_tokens = self.sender.range()

        # `copied` is the number of tokens that earlier steps copied.
        def receive_step(step: jax.Array, copied: jax.Array) -> jax.Array:
            self.fabric.wait(PUT, step + 1, "dispatch")
            self.fabric.delay_point(2)
            self.fabric.async_fence()
            count = self._list_copies(step, rows, scratch)
            self._copy_listed(copied, count, tokens, scratch)
            return copied + count

        lax.fori_loop(0, self.sender.num_steps(), receive_step, jnp.int32(0))

        @pl.when(num_tokens == 0)
        def wait_for_peers() -> None:
            # A block without tokens has no step to wait for. It still waits for each peer's signal:
            # in `dispatch_like`, the peer may read this rank's `rows` until then.
            self.fabric.wait(PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)

    def _list_copies(self, step: jax.Array, rows: Any, scratch: fb.Scratch) -> jax.Array:
        """Lists a step's tokens that have several rows here in `step_copies`; returns the count."""
        first_token, num_tokens = self.sender.range()
        fabric, num_ranks = self.fabric, self.fabric.num_ranks
        step_tokens = self.sender.step_tokens
        first_of_step = first_token + step * step_tokens
        # Without this rank's own tokens, which the sender writes to all their rows.
        peers = [lax.rem(fabric.rank() + i, jnp.int32(num_ranks)) for i in range(1, num_ranks)]
        if not peers:
            return jnp.int32(0)
        sources = [(peer, fabric.mine(rows), peer) for peer in peers]
        window = self.sender.step_window
        start = window.start(first_of_step * self.top_k)
        fb.load_slices(fabric, pl.ds(start, window.width), (scratch.step_rows, sources))

        def list_token_of_peers(i: jax.Array, count: jax.Array) -> jax.Array:
            entry = (first_of_step + i) * self.top_k - start
            for peer in peers:
                count = self._list_token(peer, entry, count, scratch)
            return count

        tokens_of_step = jnp.minimum(num_tokens - step * step_tokens, step_tokens)
        count = lax.fori_loop(0, tokens_of_step, list_token_of_peers, jnp.int32(0))
        fabric.barrier()
        return count

    def _list_token(
        self, peer: jax.Array, entry: jax.Array, count: jax.Array, scratch: fb.Scratch
    ) -> jax.Array:
        """Lists a peer's token if it has several rows here; returns `count` of listed tokens."""
        # The rows of the token's choices are step_rows[peer, entry : entry + K].
        places, num_places = [], jnp.int32(0)
        for choice in range(self.top_k):
            row = scratch.step_rows[peer, entry + choice]
            kept = self.kept(row)
            places.append(jnp.where(kept, row, fb.NOWHERE))
            num_places = num_places + kept.astype(jnp.int32)
        # If the token has at most one row here, the next token overwrites this entry.
        for choice, place in enumerate(places):
            scratch.step_copies[count, choice] = place
        return count + (num_places > 1).astype(jnp.int32)

    def _copy_listed(
        self, copied: jax.Array, count: jax.Array, tokens: Sequence[Any], scratch: fb.Scratch
    ) -> None:
        """Copies `count` listed tokens to their other rows; earlier steps copied `copied`."""
        num_stages = self.sender.plan.num_copy_stages
        values, *scales = (self.fabric.mine(ref) for ref in tokens)

        def fetch(i: jax.Array, _: None) -> None:
            """Starts to copy the i-th listed token from its first row here into the ring."""
            first_row = jnp.int32(fb.NOWHERE)
            for choice in reversed(range(self.top_k)):  # so that the first choice with a row stays
                place = scratch.step_copies[i, choice]
                first_row = jnp.where(place >= 0, place, first_row)
            stage = lax.rem(copied + i, jnp.int32(num_stages))
            fb.fetch(values.at[first_row], scratch.copies.at[stage], scratch.copy_full.at[stage])

        def copy_token(i: jax.Array, _: None) -> None:
            self._put_copies(i, lax.rem(copied + i, jnp.int32(num_stages)), values, scratch)

            @pl.when(i + num_stages < count)
            def fetch_next() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # copies have read the stage
                fetch(i + num_stages, None)

        lax.fori_loop(0, jnp.minimum(count, num_stages), fetch, None)
        if scales:  # not by the ring: bulk copies are slow for a few scales
            from pallas_kernels.exchange import quantized_rows

            quantized_rows.copy_listed(scales[0], scratch.step_copies, count)
        lax.fori_loop(0, count, copy_token, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _put_copies(self, i: jax.Array, stage: jax.Array, values: Any, scratch: fb.Scratch) -> None:
        """Waits until the i-th listed token is in `stage` of the ring; copies it to other rows."""
        plgpu.barrier_wait(scratch.copy_full.at[stage])
        # The first choice that has a row is the source; only later choices are destinations.
        has_source = scratch.step_copies[i, 0] >= 0
        for choice in range(1, self.top_k):
            place = scratch.step_copies[i, choice]
            is_further = has_source & (place >= 0)
            fb.put_if(is_further, scratch.copies.at[stage], values.at[place])
            has_source = has_source | (place >= 0)
        plgpu.commit_smem_to_gmem_group()


class _DispatchLike(_Kernel):
    """The kernel of `dispatch_like`, which is given the rows."""

    def __call__(self, *refs: Any, scratch: fb.Scratch) -> None:
        x, rows, counts, *tokens = refs
        fabric, warpgroup = self.fabric, lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def send() -> None:
            routes = _KnownRoutes(self, scratch, rows)
            fabric.delay_point(0)
            self.experts.fetch_counts(counts, scratch.experts)
            self.sender.fetch_first(x, scratch.sender)
            fabric.connect()
            self.sender.open_window(routes, 0, scratch.sender)
            # The sender knows its rows already; it finds the groups for the filler.
            self.experts.find_groups(scratch.experts)
            plgpu.barrier_arrive(scratch.groups_known)
            self.sender.send(x, tokens, None, routes, scratch.sender)

        @pl.when(warpgroup == 2)
        def fill() -> None:
            plgpu.barrier_wait(scratch.groups_known)
            fabric.delay_point(3)
            self.experts.fill(tokens, scratch.experts)

        @pl.when(warpgroup == 1)
        def receive() -> None:
            self.receive(rows, tokens, scratch)

        if self.sender.num_warpgroups > 1:
            pl.when(warpgroup == 3)(lambda: self.sender.quantize(x, scratch.sender))


class _Dispatch(_Kernel):
    """The kernel of `expert_dispatch`, which finds the rows."""

    def scratch(self) -> fb.Scratch:
        return fb.Scratch(
            **vars(super().scratch()),
            # For each expert of all ranks, how often the tokens of earlier blocks choose it. After
            # `find_groups`, the next free row in the receive buffer of the expert's rank. The entry
            # at `count_width` is for choices whose id names no expert.
            next_rows=plgpu.SMEM((self.experts.count_width + WARPGROUP,), jnp.int32),
            counted=plgpu.Barrier(num_arrivals=_COUNTERS),
            # The receiver has called `fabric.connect`, so the sender may write to peers.
            connected=plgpu.Barrier(),
        )

    def __call__(self, *refs: Any, scratch: fb.Scratch) -> None:
        x, choices, *results = refs
        num_parts = len(self.sender.row.parts)
        tokens, (rows, all_counts, *groups) = results[:num_parts], results[num_parts:]
        fabric, warpgroup = self.fabric, lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def begin() -> None:
            fabric.delay_point(0)
            self.sender.fetch_first(x, scratch.sender)

        pl.when(warpgroup < _COUNTERS)(lambda: self._count(choices, warpgroup, scratch))

        @pl.when(warpgroup == 0)
        def send() -> None:
            routes = _NewRoutes(self, scratch, choices)
            plgpu.barrier_wait(scratch.counted)
            self._add_counts(scratch)
            self._send_counts(scratch)
            self.sender.open_window(routes, 0, scratch.sender)
            self.experts.receive_counts(scratch.experts)
            self.experts.find_groups(
                scratch.experts, next_rows=scratch.next_rows, all_counts_ref=all_counts
            )
            plgpu.barrier_arrive(scratch.groups_known)
            plgpu.barrier_wait(scratch.connected)
            self.sender.send(x, tokens, rows, routes, scratch.sender)

        @pl.when(warpgroup == 2)
        def fill() -> None:
            plgpu.barrier_wait(scratch.groups_known)
            fabric.delay_point(3)
            self.experts.describe(scratch.experts, groups)
            self.experts.fill(tokens, scratch.experts)

        @pl.when(warpgroup == 1)
        def receive() -> None:
            # `connect` waits until the addresses of the peers' buffers have arrived. The receiver
            # calls it, since the sender waits for the peers' counts meanwhile.
            fabric.connect()
            plgpu.barrier_arrive(scratch.connected)
            self.receive(rows, tokens, scratch)

        if self.sender.num_warpgroups > 1:
            pl.when(warpgroup == 3)(lambda: self.sender.quantize(x, scratch.sender))

    def _count(self, choices: Any, warpgroup: jax.Array, scratch: fb.Scratch) -> None:
        """Counts a part of the choices by expert, in this warpgroup's half of `experts.scan`."""
        # In block 0, the sender and the receiver together count the choices of all tokens of this
        # rank; in any other block, the choices of the tokens of blocks with lower indices. They
        # count the first `end` of `choices`, in slices that they take alternately.
        fabric, num_tokens = self.fabric, self.sender.num_tokens
        num_choices = self.sender.window.total  # of this rank, padded to WARPGROUP or more
        slice_size = min(_COUNTED_AT_ONCE, num_choices // WARPGROUP * WARPGROUP)
        first_token, _ = self.sender.range()
        tokens_before = jnp.minimum(first_token, num_tokens)
        end = jnp.where(lax.axis_index("block") == 0, num_tokens, tokens_before) * self.top_k
        bins = self._counts_of(warpgroup, scratch)
        fb.clear(bins, self.experts.count_width)
        fabric.barrier()

        def count_slice(i: jax.Array, _: None) -> None:
            # The last slice is moved back until it fits, and skips choices of the slice before.
            index = i * _COUNTERS + warpgroup
            start = jnp.minimum(index * slice_size, num_choices - slice_size)
            entries = start + fb.iota(slice_size)
            experts = fb.load(fabric.mine(choices).at[pl.ds(start, slice_size)], 1)
            is_counted = (entries >= index * slice_size) & (entries < end)
            experts = jnp.where(is_counted, experts, fb.NOWHERE)
            fb.count(bins, experts, self.experts.num_experts)

        num_slices = lax.div(end + (slice_size - 1), jnp.int32(slice_size))
        slices_here = lax.div(num_slices - warpgroup + (_COUNTERS - 1), jnp.int32(_COUNTERS))
        lax.fori_loop(0, slices_here, count_slice, None)
        fabric.barrier()
        plgpu.barrier_arrive(scratch.counted)

    def _counts_of(self, warpgroup: Any, scratch: fb.Scratch) -> Any:
        """Returns the half of `experts.scan`, [count_width] int32, in which a warpgroup counts."""
        width = self.experts.count_width
        return scratch.experts.scan.at[pl.ds(warpgroup * width, width)]

    def _add_counts(self, scratch: fb.Scratch) -> None:
        """Adds up both warpgroups' counts of choices by expert; writes the sums to `next_rows`."""
        counts = [self._counts_of(i, scratch) for i in range(_COUNTERS)]
        for start in range(0, self.experts.count_width, WARPGROUP):
            part = pl.ds(start, WARPGROUP)
            counts_of_part = [fb.load(half.at[part], 1) for half in counts]
            scratch.next_rows[part] = functools.reduce(operator.add, counts_of_part)
        self.fabric.barrier()

    def _send_counts(self, scratch: fb.Scratch) -> None:
        """Sends the counts of this rank's choices to all ranks, itself included, from block 0."""
        fabric, width = self.fabric, self.experts.count_width

        # Block 0, which a GPU starts first, has counted the choices of all tokens in `next_rows`.
        @pl.when(lax.axis_index("block") == 0)
        def send() -> None:
            fabric.send_values(scratch.next_rows.at[pl.ds(0, width)], 0)
            fabric.barrier()
            # No tokens precede those of block 0.
            fb.clear(scratch.next_rows, width)
            fabric.barrier()


@dataclasses.dataclass(frozen=True)
class _Routes:
    """`sender.Routes` whose list for a rank has the row there of each of the token's K choices."""

    kernel: _Kernel
    scratch: fb.Scratch

    def row(self, words: List, i: jax.Array) -> jax.Array:
        """Returns the first of `words` that is a row of the buffer, or NOWHERE; `i` is unused."""
        place = jnp.int32(fb.NOWHERE)
        for row in reversed(words):
            place = jnp.where(self.kernel.kept(row), row, place)
        return place

    def further_rows(self, words: List) -> list[jax.Array]:
        """Returns the rows of choices after the first; NOWHERE if none, or if `row` returns it."""
        found, places = jnp.bool_(False), []
        for row in words:
            kept = self.kernel.kept(row)
            places.append(jnp.where(kept & found, row, fb.NOWHERE))
            found = found | kept
        # No row precedes that of the first choice, so it is never a further one.
        return places[1:]


@dataclasses.dataclass(frozen=True)
class _KnownRoutes(_Routes):
    """`sender.Routes` with the rows of an earlier dispatch, which are in every rank's memory."""

    rows: Any  # [N, T·K] int32 in global memory, the result of `expert_dispatch`

    def sources(self) -> list[Any]:
        fabric = self.kernel.fabric
        return [fabric.peer(self.rows, peer).at[fabric.rank()] for peer in range(fabric.num_ranks)]

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> list[List]:
        entries = [entry + choice for choice in range(self.kernel.top_k)]
        return [[self.scratch.sender.words[rank, at] for at in entries] for rank in ranks]


@dataclasses.dataclass(frozen=True)
class _NewRoutes(_Routes):
    """`sender.Routes` of `expert_dispatch`: assigns rows in the order of calls of `lists`."""

    choices: Any  # [T·K] int32 in global memory, the experts that this rank's tokens choose

    def sources(self) -> list[Any]:
        return [self.kernel.fabric.mine(self.choices)]

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> list[List]:
        """Computes a token's lists and advances `next_rows`; called once for each token."""
        expert_rows, scratch = self.kernel.experts, self.scratch
        ids = [scratch.sender.words[0, entry + choice] for choice in range(self.kernel.top_k)]
        valid = [(e >= 0) & (e < expert_rows.num_experts) for e in ids]
        # An id that names no expert uses the extra entry of `next_rows`.
        experts = [
            jnp.where(v, e, expert_rows.count_width) for e, v in zip(ids, valid, strict=True)
        ]
        found = expert_rows.take_rows(experts, scratch.next_rows, scratch.experts)
        owners = [
            jnp.where(v, lax.div(e, jnp.int32(expert_rows.num_local_experts)), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]
        lists: list[List] = []
        for rank in ranks:
            rows = zip(owners, found, strict=True)
            lists.append([jnp.where(owner == rank, row, fb.NOWHERE) for owner, row in rows])
        return lists
