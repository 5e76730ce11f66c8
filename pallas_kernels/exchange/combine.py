"""Combine: each rank sums a token's expert outputs, and sends one sum to the token's owner.

The owner of a token is the rank that dispatched it, and adds up the sums of all ranks. y has a
rank's expert outputs, one in each row. Block b of every rank handles the same range of tokens of
every owner, in steps of a few tokens, with these warpgroups:

- scout: lists which rows of y to add for each token of the next step. It signals to peers that the
  sums of a step are in their receive buffers, and that this rank has read the sums that peers sent
  for a step, so that peers may overwrite them.
- workers: compute the sums of a step in float32, a tile of some columns at a time, from rows that
  they load into registers. They store a sum in the owner's receive buffer, rounded to the rows'
  dtype, or quantized with a scale for every 128 values. After a step is sent, they wait until the
  sums of every rank for this rank's tokens of the previous step have arrived, and add them in rank
  order.

Token t of rank s chose experts a and b of rank d, and an expert of rank e:

  rank d, workers                                 rank s, owner of token t, workers
  y[row of expert a] --> registers                receive buffer
  y[row of expert b] --> sum in float32 = link => [step, from rank d, t] --> registers
                                                  [step, from rank e, t] --> sum in rank order
  signal: a step's sums are there ==============> workers wait for it    --> out[t]

The receive buffer is a ring with room for `plan.receive_steps` steps: a rank may send the sums of
step i once the receiver has read those of step i - plan.receive_steps. A rank's kernel ends only
after all sums sent to the rank have arrived.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import (
    ROWS_OF_SUM,
    Plan,
    Row,
    Window,
    combine_receive_buffer,
    combine_tile,
)
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import WARPGROUP, align_up, vector_length
from pallas_kernels.formats import PLAIN, RowFormat

# The kinds of signal: the sender's sums of a step are in the receive buffer; the receiver has read
# the sums of a step, so that they may be overwritten.
_PUT, _READ = 0, 1


def combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    topk_idx: jax.Array,
    rows: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    num_experts: int,
    by_rank: bool = False,
    wire: RowFormat = PLAIN,
) -> jax.Array:
    """Sums the weighted expert outputs of each token, and returns them to the token's rank.

    T is the number of this rank's tokens, H the hidden size, K the number of choices of a token,
    and N the number of ranks. Arrays of stacked ranks have a leading axis of N.

    Args:
      y: [R, H], the expert outputs in the R rows of the receive buffer; H · itemsize is a multiple
        of 128 bytes.
      topk_weights: [T, K] float32, the weights of rows, or None. None with `by_rank`.
      topk_idx: [T, K] int32, the experts that this rank's tokens choose.
      rows: [N, T, K] int32, a result of the dispatch: the row of y for each choice of every source
        rank's tokens; with `by_rank`, the local index of the expert. Negative for another rank's
        expert.
      by_rank: whether y is rank-major: row r · T + t has the sum of the expert outputs of token t
        of rank r.
      wire: the format in which sums are sent. If it is quantized, H is a multiple of 512.

    Returns:
      The sum for each of this rank's tokens, [T, H] of y's dtype.
    """
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    lead = rows.shape[:-3]
    window = Window.of(plan.step_tokens, plan, num_tokens, top_k)
    row = Row(y.shape[-1], y.dtype, wire)
    kernel = _Combine(
        num_tokens=num_tokens,
        row=row,
        top_k=top_k,
        num_local_experts=num_experts // num_ranks,
        capacity=y.shape[-2],
        weighted=topk_weights is not None,
        by_rank=by_rank,
        fabric=fabric,
        plan=plan,
        window=window,
    )
    operands = [
        y,
        topk_idx.reshape(*lead, num_tokens * top_k),
        window.pad(rows.reshape(*lead, num_ranks, num_tokens * top_k), fb.NOWHERE),
    ]
    if topk_weights is not None:
        operands.append(window.pad(topk_weights.reshape(*lead, num_tokens * top_k), 0))
    out, *_ = fb.kernel(
        fabric,
        kernel,
        name="ep_combine",
        num_blocks=plan.num_blocks,
        num_warpgroups=1 + plan.num_workers,
        out_type=[
            jax.ShapeDtypeStruct((num_tokens, y.shape[-1]), y.dtype),
            *combine_receive_buffer(plan, row, num_tokens, num_ranks),
        ],
        scratch_types=dict(scratch=kernel.scratch()),
        shared=kernel.shared,
    )(*operands)
    return out


class _Refs(NamedTuple):
    y: Any
    topk_idx: Any  # [T·K]
    rows: Any  # [N, T·K]
    weights: Any  # [T·K], which peers read; or None
    out: Any
    received: Sequence[Any]  # the receive buffer for peers' sums; see `plan.combine_receive_buffer`


@dataclasses.dataclass(frozen=True)
class _Combine:
    """The kernel of `combine`."""

    num_tokens: int
    row: Row
    top_k: int
    num_local_experts: int
    capacity: int  # the number of rows of y
    weighted: bool
    by_rank: bool
    fabric: fb.Fabric
    plan: Plan
    window: Window  # of a step's choices

    @property
    def receive_steps(self) -> int:
        return min(self.plan.receive_steps, self.plan.steps_per_block(self.num_tokens))

    @functools.cached_property
    def step_tokens(self) -> int:
        return min(self.plan.step_tokens, self.plan.tokens_per_block(self.num_tokens))

    @functools.cached_property
    def vector(self) -> int:
        return vector_length(self.row.dtype)

    @functools.cached_property
    def tile(self) -> int:
        return combine_tile(self.row)

    @property
    def num_tiles(self) -> int:
        return self.row.hidden // self.tile

    @property
    def listed_rows(self) -> int:
        """The length of the list of rows that one sum adds, padded to whole `rows_at_once`."""
        return align_up(1 if self.by_rank else self.top_k, self.rows_at_once)

    @property
    def rows_at_once(self) -> int:
        """The number of rows that a worker loads into registers at a time, to add them."""
        return min(ROWS_OF_SUM, 1 if self.by_rank else self.top_k)

    @property
    def shared(self) -> tuple[int, ...]:
        # Peers read this rank's weights, operand 3, and write to its receive buffer, which follows
        # the operands and the result `out`.
        num_operands = 4 if self.weighted else 3
        received = range(num_operands + 1, num_operands + 1 + len(self.row.parts))
        return (*((3,) if self.weighted else ()), *received)

    def scratch(self) -> fb.Scratch:
        # Sum i · N + r of a step is for token i of rank r; axes of 2 are even and odd steps.
        ranks, sums = self.fabric.num_ranks, self.step_tokens * self.fabric.num_ranks
        workers = plgpu.Barrier(num_arrivals=self.plan.num_workers, num_barriers=2)
        return fb.Scratch(
            # The row of y and the weight of each choice in a step.
            window_rows=plgpu.SMEM((ranks, self.window.width), jnp.int32),
            window_weights=plgpu.SMEM((ranks, self.window.width), jnp.float32),
            # How many rows of y each sum adds; NOWHERE if the token chose no expert of this rank,
            # so that no sum is sent. Then these rows and their weights.
            list_counts=plgpu.SMEM((2, sums), jnp.int32),
            list_rows=plgpu.SMEM((2, sums, self.listed_rows), jnp.int32),
            list_weights=plgpu.SMEM((2, sums, self.listed_rows), jnp.float32),
            # The scout has listed a step's rows; all workers have sent a step's sums; all workers
            # have read the sums that this rank received for a step.
            listed=plgpu.Barrier(num_barriers=2),
            put=workers,
            read=workers,
        )

    def __call__(self, *arrays: Any, scratch: fb.Scratch) -> None:
        y, topk_idx, rows, *rest = arrays
        weights = rest.pop(0) if self.weighted else None
        out, *received = rest
        refs = _Refs(y, topk_idx, rows, weights, out, received)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def scout() -> None:
            self.fabric.delay_point(0)
            # Weights are all that the scout reads from peers' buffers.
            if self.weighted:
                self.fabric.connect()
            self._scout(refs, scratch)

        @pl.when(warpgroup > 0)
        def work() -> None:
            self.fabric.connect()
            self._work(warpgroup - 1, refs, scratch)

    def _range(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns this block's first token, number of tokens and number of steps, int32 scalars."""
        first, count = self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)
        return first, count, lax.div(count + (self.step_tokens - 1), jnp.int32(self.step_tokens))

    def _scout(self, refs: _Refs, scratch: fb.Scratch) -> None:
        """Runs the scout warpgroup: lists the rows to add in each step, and signals to peers."""
        fabric = self.fabric
        _, _, num_steps = self._range()

        def begin(step: jax.Array) -> None:
            """Lists a step's rows, once peers have read the older sums that its sums overwrite."""
            if self.plan.steps_per_block(self.num_tokens) > self.receive_steps:
                fabric.wait(_READ, jnp.maximum(step + 1 - self.receive_steps, 0), "combine")
            self._list(step, refs, scratch)
            plgpu.barrier_arrive(scratch.listed.at[lax.rem(step, 2)])

        def run_step(step: jax.Array, _: None) -> None:
            half = lax.rem(step, 2)

            # Steps `step - 1` and `step + 1` use the same half of the lists. That half is free now,
            # since the previous iteration waited until all workers had sent step `step - 1`.
            pl.when(step + 1 < num_steps)(lambda: begin(step + 1))
            plgpu.barrier_wait(scratch.put.at[half])
            fabric.delay_point(1)
            fabric.signal(_PUT, step + 1)

            # Signals that this rank has read the sums received for step `step - 1`. Peers overwrite
            # them in step `step - 1 + receive_steps`. Without such a step no signal is needed.
            @pl.when((step > 0) & (step - 1 + self.receive_steps < num_steps))
            def signal_read() -> None:
                plgpu.barrier_wait(scratch.read.at[lax.rem(step - 1, 2)])
                fabric.signal(_READ, step, release=False)

        pl.when(num_steps > 0)(lambda: begin(jnp.int32(0)))
        lax.fori_loop(0, num_steps, run_step, None)

    def _list(self, step: jax.Array, refs: _Refs, scratch: fb.Scratch) -> None:
        """Lists for each sum of a step the rows of y that it adds, and their weights."""
        fabric, top_k, num_ranks = self.fabric, self.top_k, self.fabric.num_ranks
        first_token, num_tokens, _ = self._range()
        first_of_step = first_token + step * self.step_tokens
        rows = [(owner, fabric.mine(refs.rows), owner) for owner in range(num_ranks)]
        loads: list[Any] = [(scratch.window_rows, rows)]
        if self.weighted:
            weights = [(owner, fabric.peer(refs.weights, owner)) for owner in range(num_ranks)]
            loads.append((scratch.window_weights, weights))
        start = self.window.start(first_of_step * top_k)
        fb.load_slices(fabric, pl.ds(start, self.window.width), *loads)
        half = lax.rem(step, 2)

        def list_sum(i: jax.Array, _: None) -> None:
            """Lists the rows of sum i, for a token of the step and its owner; see `scratch`."""
            step_token, owner = lax.div(i, num_ranks), lax.rem(i, num_ranks)
            entry = (first_of_step + step_token) * top_k - start
            places = [scratch.window_rows[owner, entry + choice] for choice in range(top_k)]
            sent = fb.any_row(places)
            weights = [jnp.float32(1)] * top_k
            if self.weighted:
                weights = [scratch.window_weights[owner, entry + choice] for choice in range(top_k)]
            # A rank-major y has one row for each token, which the token's experts share.
            if self.by_rank:
                place = owner * self.num_tokens + first_of_step + step_token
                places = [jnp.where(sent, place, fb.NOWHERE)]
                weights = [jnp.float32(1)]
            count = self._write_list((half, i), places, weights, scratch)
            scratch.list_counts[half, i] = jnp.where(sent, count, fb.NOWHERE)

        tokens_of_step = jnp.minimum(num_tokens - step * self.step_tokens, self.step_tokens)
        lax.fori_loop(0, tokens_of_step * num_ranks, list_sum, None)

    def _write_list(
        self, index: Any, places: Sequence[Any], weights: Sequence[Any], scratch: fb.Scratch
    ) -> jax.Array:
        """Writes list `index` = (half, sum), with rows of y first; returns how many these are."""
        kept = [(place >= 0) & (place < self.capacity) for place in places]
        ones = [is_kept.astype(jnp.int32) for is_kept in kept]
        count = sum(ones, jnp.int32(0))
        # Of the last group that workers load, entries past `count`, NOWHERE, add -0.0 by weight 1.
        indices, next_kept, next_other = [], jnp.int32(0), count
        for is_kept, one in zip(kept, ones, strict=True):
            indices.append(jnp.where(is_kept, next_kept, next_other))
            next_kept, next_other = next_kept + one, next_other + (1 - one)
        for choice, at in enumerate(indices):
            scratch.list_rows[*index, at] = jnp.where(kept[choice], places[choice], fb.NOWHERE)
            scratch.list_weights[*index, at] = jnp.where(kept[choice], weights[choice], 1)
        for padding in range(len(places), self.listed_rows):
            scratch.list_rows[*index, padding] = jnp.int32(fb.NOWHERE)
            scratch.list_weights[*index, padding] = jnp.float32(1)
        return count

    def _work(self, worker: jax.Array, refs: _Refs, scratch: fb.Scratch) -> None:
        """Runs a worker: sums and sends the rows of each step, and adds up received sums."""
        _, _, num_steps = self._range()

        def put_step(step: jax.Array) -> None:
            half = lax.rem(step, 2)
            plgpu.barrier_wait(scratch.listed.at[half])
            self._sum_and_put(step, worker, refs, scratch)
            plgpu.barrier_arrive(scratch.put.at[half])

        def receive_step(step: jax.Array) -> None:
            self._receive(step, worker, refs)

            # The scout waits for this only if a later step overwrites the sums.
            @pl.when(step + self.receive_steps < num_steps)
            def read() -> None:
                plgpu.barrier_arrive(scratch.read.at[lax.rem(step, 2)])

        def run_step(step: jax.Array, _: None) -> None:
            pl.when(step < num_steps)(lambda: put_step(step))
            # The sums that ranks sent for the previous step have had time to arrive.
            pl.when(step > 0)(lambda: receive_step(step - 1))

        @pl.when(num_steps > 0)
        def run_steps() -> None:
            lax.fori_loop(0, num_steps + 1, run_step, None)

    def _each(
        self,
        step: jax.Array,
        worker: jax.Array,
        per_token: int,
        body: Callable[[jax.Array, jax.Array], None],
    ) -> None:
        """Calls `body(i, item)` for this worker's share of `per_token` items of each token i."""
        workers = jnp.int32(self.plan.num_workers)
        _, num_tokens, _ = self._range()
        tokens_of_step = jnp.minimum(num_tokens - step * self.step_tokens, self.step_tokens)
        # Items are tiles of sums, for token i of the step. Workers take them round-robin, and go on
        # with the round from step to step, so that all workers get equal shares.
        next_worker = lax.rem(step * (self.step_tokens * per_token), workers)
        first = lax.rem(worker + workers - next_worker, workers)

        def call_body(turn: jax.Array, _: None) -> None:
            index = first + turn * workers
            body(lax.div(index, jnp.int32(per_token)), lax.rem(index, jnp.int32(per_token)))

        count = lax.div(tokens_of_step * per_token - first + workers - 1, workers)
        lax.fori_loop(0, count, call_body, None)

    def _sum_and_put(
        self, step: jax.Array, worker: jax.Array, refs: _Refs, scratch: fb.Scratch
    ) -> None:
        """Sums this worker's tiles of a step, and stores them in the owners' receive buffers."""
        fabric = self.fabric
        rank, block = fabric.rank(), lax.axis_index("block")
        half = lax.rem(step, 2)  # that of the lists
        slot = lax.rem(step, self.receive_steps)  # the step's place in the receive buffer
        first_owner = fb.first_peer(fabric)

        def put_tile(token: jax.Array, item: jax.Array) -> None:
            """Sums and sends one tile for one owner's token number `token` of the step."""
            owner_number, tile = lax.div(item, self.num_tiles), lax.rem(item, self.num_tiles)
            owner = lax.rem(owner_number + first_owner, jnp.int32(fabric.num_ranks))
            index = token * fabric.num_ranks + owner  # of the sum; see `scratch`
            columns_of_y = pl.ds(tile * self.tile, self.tile)
            count = scratch.list_counts[half, index]

            @pl.when(count >= 0)
            def put_sum() -> None:
                total = self._sum_tile((half, index), count, columns_of_y, refs.y, scratch)
                there = [
                    fabric.peer(ref, owner).at[block, slot, rank, token, columns]
                    for ref, columns in zip(refs.received, self._columns(tile), strict=True)
                ]
                if not self.row.wire.quantized:
                    vectors.store(there, total.astype(self.row.dtype), self.vector)
                else:
                    from pallas_kernels.exchange import quantized_rows

                    quantized_rows.put_row(self.row.wire, total, there, self.vector)

        self._each(step, worker, fabric.num_ranks * self.num_tiles, put_tile)

    def _sum_tile(
        self, index: tuple[Any, Any], count: jax.Array, columns: Any, y: Any, scratch: fb.Scratch
    ) -> jax.Array:
        """Sums `columns` of the `count` rows of y in the list [*index], in float32 registers."""
        at_once = jnp.int32(self.rows_at_once)

        def add_rows(group: jax.Array, total: jax.Array) -> jax.Array:
            """Adds the next `rows_at_once` rows of the list to `total`."""
            places = [group * at_once + i for i in range(self.rows_at_once)]
            rows = [scratch.list_rows[*index, place] for place in places]
            loaded = vectors.load_each(
                [self.fabric.mine(y).at[jnp.maximum(row, 0), columns] for row in rows],
                [row >= 0 for row in rows],
                self.vector,
                fill=-0.0,
                read_only=True,
            )
            for place, row in zip(places, loaded, strict=True):
                row = row.astype(jnp.float32)
                if self.weighted:
                    weight = scratch.list_weights[*index, place]
                    row = vectors.times(row, weight, self.vector)
                total = total + row
            return total

        # The sum starts from -0.0, and unused entries of the list add -0.0. Neither changes a bit
        # of the sum, since x + -0.0 has the bits of x for every x.
        total = vectors.constant(self.padded_tile, -0.0, self.vector)
        groups = lax.div(count + (at_once - 1), at_once)
        return lax.fori_loop(0, groups, add_rows, total)

    def _columns(self, tile: jax.Array) -> list[Any]:
        """Returns the columns of tile `tile` in a sum's values and, if quantized, scales."""
        parts = self.row.wire.row_parts(self.tile, self.row.dtype)
        return [pl.ds(tile * size, size) for size, _ in parts]

    @property
    def padded_tile(self) -> int:
        """The number of elements of a tile in registers, padded to a vector for each thread."""
        return align_up(self.tile, WARPGROUP * self.vector)

    def _receive(self, step: jax.Array, worker: jax.Array, refs: _Refs) -> None:
        """Waits for all ranks' sums for this rank's tokens of a step, and adds them."""
        fabric, num_ranks = self.fabric, self.fabric.num_ranks
        block, slot = lax.axis_index("block"), lax.rem(step, self.receive_steps)
        first_token, _, _ = self._range()
        first_of_step = first_token + step * self.step_tokens
        fabric.wait(_PUT, step + 1, "combine")
        fabric.delay_point(2)

        def add_sums(step_token: jax.Array, tile: jax.Array) -> None:
            """Adds up the tiles that ranks sent for one token of the step; stores the total."""
            token = first_of_step + step_token
            columns_of_out = pl.ds(tile * self.tile, self.tile)
            sent = self._ranks_that_send(token, refs.topk_idx)
            # The values of every rank's sum and, if quantized, their scales.
            sums = []
            for ref, columns in zip(refs.received, self._columns(tile), strict=True):
                at = [(block, slot, source, step_token, columns) for source in range(num_ranks)]
                sums.append([fabric.mine(ref).at[indices] for indices in at])
            if not self.row.wire.quantized:
                # The total starts from 0.0, so that a total of zero is never -0.0.
                total = vectors.constant(self.padded_tile, 0.0, self.vector)
                for part in vectors.load_each(sums[0], sent, self.vector):
                    total = total + part.astype(jnp.float32)
                total, elements = total.astype(self.row.dtype), self.vector
            else:
                from pallas_kernels.exchange import quantized_rows

                total = quantized_rows.add_rows(self.row.wire, sums, sent, self.row.dtype)
                elements = quantized_rows.elements_of_sum(self.tile)
            out = fabric.mine(refs.out).at[token, columns_of_out]
            vectors.store([out], total, elements)

        self._each(step, worker, self.num_tiles, add_sums)

    def _ranks_that_send(self, token: jax.Array, topk_idx: Any) -> list[jax.Array]:
        """Returns for each rank whether it sends a sum: whether the token chose its experts."""
        ids, top_k, per_rank = self.fabric.mine(topk_idx), self.top_k, self.num_local_experts
        experts = [ids[token * top_k + choice] for choice in range(top_k)]
        return [
            fb.any_of([(e >= first) & (e < first + per_rank) for e in experts])
            for first in range(0, self.fabric.num_ranks * per_rank, per_rank)
        ]
