"""Combine: each rank sums a token's expert outputs, and sends one sum to the token's owner.

The owner of a token is the rank that dispatched it, and adds up the sums of all ranks. The array y
has a rank's expert outputs, one in each row. Block b of every rank handles the same range of tokens
of every owner, in steps of a few tokens, with these warpgroups:

  scout    lists which rows of y to add for each token of the next step. It signals to peers that
           the sums of a step are in their receive buffers. It also signals that this rank has read
           the sums that peers sent for a step, so that peers may overwrite them;
  workers  compute the sums of a step, a tile of some columns at a time. A worker loads this tile of
           several rows at once from memory into registers, multiplies each row by its weight, and
           adds the rows in float32. It stores the sum in the owner's receive buffer, rounded to the
           rows' dtype, or quantized with a scale for every 128 values. After a step is sent, the
           workers finish this rank's own tokens of the previous step: they wait until the sums of
           every rank have arrived, add them in rank order, and write the result.

In the diagram, token t of rank s chose experts a and b of rank d, and an expert of rank e:

    rank d, workers                                 rank s, owner of token t, workers
    y[row of expert a] --> registers                receive buffer
    y[row of expert b] --> sum in float32 = link => [step, from rank d, t] --> registers
                                                    [step, from rank e, t] --> sum in rank order
    signal: a step's sums are there ==============> workers wait for it    --> out[t]

Rows do not pass through shared memory: workers load them into registers, and every thread has loads
of several rows under way. The receive buffer is a ring with room for `plan.receive_steps` steps. So
a rank may send the sums of step i once the receiver has read those of step i - plan.receive_steps.
A rank's kernel ends only after all sums sent to the rank have arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange import quantized_rows
from pallas_kernels.exchange.plan import (
    ROWS_OF_SUM,
    Plan,
    Row,
    Window,
    combine_receive_buffer,
    combine_tile,
)
from pallas_kernels.exchange.windows import open_window, places_in_list
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import WARPGROUP, align_up, vector_length
from pallas_kernels.formats import PLAIN, RowFormat

# The kinds of signal between ranks. A step is a few tokens. _PUT says that the sender's sums of a
# step are in the receive buffer. _READ says that the receiver has read the sums of a step, so that
# they may be overwritten.
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
    and N the number of ranks. If all ranks are simulated on one device (`fabric.stacked`), every
    array has a leading axis of N.

    Args:
      y: [R, H], the expert outputs in the R rows of the receive buffer; H · itemsize is a multiple
        of 128 bytes.
      topk_weights: [T, K] float32, the routing weights by which rows are multiplied, or None for a
        sum without weights. It is None with `by_rank`, since the rows of y are weighted already.
      topk_idx: [T, K] int32, the experts that this rank's tokens choose.
      rows: [N, T, K] int32, a result of the dispatch. For each choice of every source rank's
        tokens, it has the row of y with the expert output. With `by_rank`, it has the index of the
        expert among this rank's experts instead. Both are negative if the expert is another rank's.
      fabric: how ranks reach each other.
      plan: the number of blocks; the number of worker warpgroups; the number of tokens whose sums a
        block sends between two signals (a step); and the number of steps for which the receive
        buffer has room.
      num_experts: E, the number of experts on all ranks together.
      by_rank: whether y is rank-major: it then has one row for each token of each rank, in which
        the token's expert outputs are summed already. The row of token t of rank r is r · T + t.
      wire: the format in which sums are sent. If it is quantized, H is a multiple of 512.

    Returns:
      The sum for each of this rank's tokens, [T, H] of y's dtype.
    """
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    lead = rows.shape[:-3]
    window = Window.of(plan.step_tokens, plan, num_tokens, top_k)
    call = _Combine(
        num_tokens=num_tokens,
        row=Row(y.shape[-1], y.dtype, wire),
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
        call,
        name="ep_combine",
        num_blocks=plan.num_blocks,
        num_warpgroups=1 + plan.num_workers,
        out_type=[jax.ShapeDtypeStruct((num_tokens, y.shape[-1]), y.dtype), *call.receive_types],
        scratch_types=dict(scratch=call.scratch()),
        shared=call.shared,
    )(*operands)
    return out


class _Refs(NamedTuple):
    """The combine kernel's operands, results and receive buffer in global memory."""

    # [R, H], the expert outputs.
    y: Any
    # [T·K] int32, the experts that this rank's tokens choose.
    topk_idx: Any
    # [N, T·K] int32: the row of y for each top-k choice of each source rank's tokens.
    rows: Any
    # [T·K] float32, the routing weights, which peers read from this rank. None for unweighted sums.
    weights: Any
    # [T, H], the result.
    out: Any
    # The receive buffer for peers' sums: an array of values and, if sums are quantized, an array of
    # scales. Each array has the axes block, step, source rank, token of the step, and column.
    received: Sequence[Any]


class _Scratch(NamedTuple):
    """The shared memory of the combine kernel.

    A step is `step_tokens` tokens of each of the N ranks. A block computes a sum for each of them:
    sum i · N + r is for the i-th token of rank r in the step. Arrays whose first axis is 2 have one
    half for even steps and one for odd steps.
    """

    # [N, window] int32: the row of y (the expert outputs) for each top-k choice of each source
    # rank's tokens in a step.
    window_rows: Any
    # [N, window] float32, the routing weights of the choices in `window_rows`.
    window_weights: Any
    # [2, sums] int32, for even and odd steps: how many rows of y each sum of the step adds. It is
    # NOWHERE if the token chose no expert of this rank, so that no sum is sent.
    list_counts: Any
    # [2, sums, listed_rows] int32, for even and odd steps: the numbers of the rows of y to add in
    # each sum.
    list_rows: Any
    # [2, sums, listed_rows] float32: the routing weights of the rows in `list_rows`.
    list_weights: Any
    # 2 barriers, for even and odd steps. Each completes when the scout has listed a step's rows.
    listed: Any
    # 2 barriers, for even and odd steps. Each completes when all workers have sent a step's sums.
    put: Any
    # 2 barriers, for even and odd steps. Each completes when all workers have read the sums that
    # this rank received for a step.
    read: Any


@dataclasses.dataclass(frozen=True)
class _Combine:
    """The kernel of `combine`.

    Attributes:
      num_tokens: T, the number of tokens of each rank.
      row: the size of a row of y, and of a sum in the format in which sums are sent.
      top_k: K, the number of experts chosen for each token.
      num_local_experts: L, the number of experts of each rank.
      capacity: R, the number of rows of y.
      weighted: whether rows are multiplied by routing weights.
      by_rank: whether y is rank-major, with one row for each token of each rank.
      fabric: how ranks reach each other.
      plan: the number of blocks and of worker warpgroups, and the number of tokens of a step.
      window: the slice of the routing data (rows and weights of choices) for one step's tokens.
    """

    num_tokens: int
    row: Row
    top_k: int
    num_local_experts: int
    capacity: int
    weighted: bool
    by_rank: bool
    fabric: fb.Fabric
    plan: Plan
    window: Window

    @property
    def steps_per_block(self) -> int:
        return self.plan.steps_per_block(self.num_tokens)

    @property
    def receive_steps(self) -> int:
        return min(self.plan.receive_steps, self.steps_per_block)

    @property
    def step_tokens(self) -> int:
        return min(self.plan.step_tokens, self.plan.tokens_per_block(self.num_tokens))

    @property
    def vector(self) -> int:
        return vector_length(self.row.dtype)

    @property
    def tile(self) -> int:
        """The number of columns that a worker warpgroup sums at a time."""
        return combine_tile(self.row)

    @property
    def num_tiles(self) -> int:
        return self.row.hidden // self.tile

    @property
    def listed_rows(self) -> int:
        """The length, with padding, of the list of rows that one sum adds.

        It is K, or 1 if y is rank-major, rounded up to a multiple of `rows_at_once`.
        """
        return align_up(1 if self.by_rank else self.top_k, self.rows_at_once)

    @property
    def rows_at_once(self) -> int:
        """The number of rows that a worker loads into registers at a time, to add them."""
        return min(ROWS_OF_SUM, 1 if self.by_rank else self.top_k)

    @property
    def reused(self) -> bool:
        """Whether later steps overwrite earlier steps' sums in the receive buffer.

        If so, a rank may send sums only after the receiver has read the sums that they overwrite.
        """
        return self.steps_per_block > self.receive_steps

    @property
    def shared(self) -> tuple[int, ...]:
        """The buffers that peers access, as positions in the list of operands and results.

        Peers read this rank's weights, if there are any, and write to its receive buffer.
        """
        num_operands = 4 if self.weighted else 3
        received = range(num_operands + 1, num_operands + 1 + len(self.row.parts))
        return (*((3,) if self.weighted else ()), *received)

    @property
    def receive_types(self) -> list[jax.ShapeDtypeStruct]:
        return combine_receive_buffer(self.plan, self.row, self.num_tokens, self.fabric.num_ranks)

    def scratch(self) -> _Scratch:
        """Returns the types of the kernel's shared memory."""
        ranks, sums = self.fabric.num_ranks, self.step_tokens * self.fabric.num_ranks
        workers = plgpu.Barrier(num_arrivals=self.plan.num_workers, num_barriers=2)
        return _Scratch(
            window_rows=plgpu.SMEM((ranks, self.window.width), jnp.int32),
            window_weights=plgpu.SMEM((ranks, self.window.width), jnp.float32),
            list_counts=plgpu.SMEM((2, sums), jnp.int32),
            list_rows=plgpu.SMEM((2, sums, self.listed_rows), jnp.int32),
            list_weights=plgpu.SMEM((2, sums, self.listed_rows), jnp.float32),
            listed=plgpu.Barrier(num_barriers=2),
            put=workers,
            read=workers,
        )

    def __call__(self, *arrays: Any, scratch: _Scratch) -> None:
        y, topk_idx, rows, *rest = arrays
        weights = rest.pop(0) if self.weighted else None
        out, *received = rest
        refs = _Refs(y, topk_idx, rows, weights, out, received)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def scout() -> None:
            self.fabric.delay_point(0)
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

    def _scout(self, refs: _Refs, scratch: _Scratch) -> None:
        """Runs the scout warpgroup: lists the rows to add in each step, and signals to peers.

        The lists are in shared memory, where the workers read them. The signals say that the sums
        of a step have been sent, and that received sums have been read.
        """
        fabric, num_steps = self.fabric, self._range()[2]

        def begin(step: jax.Array) -> None:
            """Lists the rows to add in a step, and lets the workers begin the step.

            First waits until peers have read the older sums in their receive buffers that this
            step's sums will overwrite.
            """
            if self.reused:
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

    def _list(self, step: jax.Array, refs: _Refs, scratch: _Scratch) -> None:
        """Lists, in shared memory, the rows of y that each sum of a step adds, and their weights.

        A step is `step_tokens` tokens of each of the N ranks, and has one sum for each token. The
        owner of a token is the rank that dispatched it.
        """
        fabric, top_k, num_ranks = self.fabric, self.top_k, self.fabric.num_ranks
        first_token, num_tokens = self._range()[:2]
        token = first_token + step * self.step_tokens
        held: list[Any] = [
            (
                scratch.window_rows,
                [(owner, fabric.mine(refs.rows), owner) for owner in range(num_ranks)],
            )
        ]
        if self.weighted:
            theirs = [(owner, fabric.peer(refs.weights, owner)) for owner in range(num_ranks)]
            held.append((scratch.window_weights, theirs))
        start = open_window(fabric, self.window, token * top_k, *held)
        half = lax.rem(step, 2)

        def list_sum(i: jax.Array, _: None) -> None:
            step_token, owner = lax.div(i, num_ranks), lax.rem(i, num_ranks)
            entry = (token + step_token) * top_k - start
            places = [scratch.window_rows[owner, entry + choice] for choice in range(top_k)]
            sent = fb.any_row(places)
            factors = [jnp.float32(1)] * top_k
            if self.weighted:
                factors = [scratch.window_weights[owner, entry + choice] for choice in range(top_k)]
            if self.by_rank:
                place = owner * self.num_tokens + token + step_token
                places, factors = [jnp.where(sent, place, fb.NOWHERE)], [jnp.float32(1)]
            kept = [(place >= 0) & (place < self.capacity) for place in places]
            count, order = places_in_list(kept)
            for choice, at in enumerate(order):
                scratch.list_rows[half, i, at] = jnp.where(kept[choice], places[choice], fb.NOWHERE)
                scratch.list_weights[half, i, at] = jnp.where(kept[choice], factors[choice], 1)
            for end in range(len(places), self.listed_rows):
                scratch.list_rows[half, i, end] = jnp.int32(fb.NOWHERE)
                scratch.list_weights[half, i, end] = jnp.float32(1)
            scratch.list_counts[half, i] = jnp.where(sent, count, fb.NOWHERE)

        tokens = jnp.minimum(num_tokens - step * self.step_tokens, self.step_tokens)
        lax.fori_loop(0, tokens * num_ranks, list_sum, None)

    def _work(self, worker: jax.Array, refs: _Refs, scratch: _Scratch) -> None:
        """Runs a worker warpgroup: sums and sends the rows of each step, and adds up received sums.

        A step is `step_tokens` tokens of every rank. For each step, the warpgroup sums the rows of
        the step's tokens and sends these sums to the tokens' ranks. Then it adds up the sums that
        all ranks sent for this rank's tokens of the previous step; they have had time to arrive.
        `worker` is the index of the warpgroup among the workers of the block.
        """
        num_steps = self._range()[2]

        def put_step(step: jax.Array) -> None:
            half = lax.rem(step, 2)
            plgpu.barrier_wait(scratch.listed.at[half])
            self._sum_and_put(step, worker, refs, scratch)
            plgpu.barrier_arrive(scratch.put.at[half])

        def receive_step(step: jax.Array) -> None:
            self._receive(step, worker, refs)

            @pl.when(step + self.receive_steps < num_steps)
            def read() -> None:
                plgpu.barrier_arrive(scratch.read.at[lax.rem(step, 2)])

        def run_step(step: jax.Array, _: None) -> None:
            pl.when(step < num_steps)(lambda: put_step(step))
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
        """Calls `body(token, item)` for this worker's share of a step's work items.

        A work item is, for example, one tile of the sum of one token. Each token has `per_token`
        items, which are dealt to the workers round-robin. `token` is the token's index within the
        step, and `item` the item's index within the token.
        """
        workers = jnp.int32(self.plan.num_workers)
        tokens = jnp.minimum(
            self._range()[1] - step * self.step_tokens, jnp.int32(self.step_tokens)
        )
        # Deals items to the workers round-robin, and continues the round from step to step, so that
        # all workers get equal shares.
        passed = lax.rem(step * (self.step_tokens * per_token), workers)
        first = lax.rem(worker + workers - passed, workers)

        def item(i: jax.Array, _: None) -> None:
            index = first + i * workers
            body(lax.div(index, jnp.int32(per_token)), lax.rem(index, jnp.int32(per_token)))

        count = lax.div(tokens * per_token - first + workers - 1, workers)
        lax.fori_loop(0, count, item, None)

    def _sum_and_put(
        self, step: jax.Array, worker: jax.Array, refs: _Refs, scratch: _Scratch
    ) -> None:
        """Sums the expert outputs of each token of a step, and sends the sum to the token's owner.

        The owner of a token is the rank that dispatched it. The sum is written to the owner's
        receive buffer. The block's workers share the tiles of all sums, and this is worker number
        `worker`.
        """
        fabric, at_once = self.fabric, jnp.int32(self.rows_at_once)
        rank, block, half = fabric.rank(), lax.axis_index("block"), lax.rem(step, 2)
        place = lax.rem(step, self.receive_steps)
        offset = fb.first_peer(fabric)

        def put(token: jax.Array, item: jax.Array) -> None:
            peer, tile = lax.div(item, self.num_tiles), lax.rem(item, self.num_tiles)
            owner = lax.rem(peer + offset, jnp.int32(self.fabric.num_ranks))
            index = token * self.fabric.num_ranks + owner
            columns = pl.ds(tile * self.tile, self.tile)
            count = scratch.list_counts[half, index]

            def add_rows(part: jax.Array, total: jax.Array) -> jax.Array:
                choices = [part * at_once + i for i in range(self.rows_at_once)]
                rows = [scratch.list_rows[half, index, choice] for choice in choices]
                loaded = vectors.load_each(
                    fabric,
                    [fabric.mine(refs.y).at[jnp.maximum(row, 0), columns] for row in rows],
                    [row >= 0 for row in rows],
                    self.vector,
                    fill=-0.0,
                    read_only=True,
                )
                for choice, row in zip(choices, loaded, strict=True):
                    row = row.astype(jnp.float32)
                    if self.weighted:
                        weight = scratch.list_weights[half, index, choice]
                        row = vectors.times(fabric, row, weight, self.vector)
                    total = total + row
                return total

            @pl.when(count >= 0)
            def put_sum() -> None:
                # The sum starts from -0.0, and unused entries of the list add -0.0. Neither changes
                # a bit of the sum, since x + -0.0 has the bits of x for every x.
                total = vectors.constant(fabric, self.held, -0.0, self.vector)
                parts = lax.div(count + (at_once - 1), at_once)
                total = lax.fori_loop(0, parts, add_rows, total)
                there = [
                    fabric.peer(ref, owner).at[block, place, rank, token, part]
                    for ref, part in zip(refs.received, self._columns(tile), strict=True)
                ]
                if not self.row.wire.quantized:
                    vectors.store_part(fabric, there[0], total.astype(self.row.dtype), self.vector)
                else:
                    quantized_rows.put_row(fabric, self.row.wire, total, there, self.vector)

        self._each(step, worker, self.fabric.num_ranks * self.num_tiles, put)

    def _columns(self, tile: jax.Array) -> list[Any]:
        """Returns the columns of a sum that tile number `tile` covers, as a list of slices.

        The first slice is of the sum's values. If sums are quantized, a second slice is of its
        scales.
        """
        parts = self.row.wire.row_parts(self.tile, self.row.dtype)
        return [pl.ds(tile * size, size) for size, _ in parts]

    @property
    def held(self) -> int:
        """The number of elements of a tile in registers: the tile's length, padded.

        The padding gives all threads of the warpgroup the same number of whole vectors.
        """
        return self.tile if self.fabric.interpret else align_up(self.tile, WARPGROUP * self.vector)

    def _receive(self, step: jax.Array, worker: jax.Array, refs: _Refs) -> None:
        """Waits for all ranks' sums for this rank's tokens of a step, and adds them up into `out`.

        The sums for a token are added in float32, in rank order. This worker, number `worker`,
        handles its share of the tiles.
        """
        fabric, top_k, per_rank = self.fabric, self.top_k, self.num_local_experts
        block, place = lax.axis_index("block"), lax.rem(step, self.receive_steps)
        first_token = self._range()[0] + step * self.step_tokens
        fabric.wait(_PUT, step + 1, "combine")
        fabric.delay_point(2)

        def add_sums(step_token: jax.Array, tile: jax.Array) -> None:
            token = first_token + step_token
            columns = pl.ds(tile * self.tile, self.tile)
            experts = [
                fabric.mine(refs.topk_idx)[token * top_k + choice] for choice in range(top_k)
            ]
            sent = [
                fb.any_of([(e >= low) & (e < low + per_rank) for e in experts])
                for low in range(0, self.fabric.num_ranks * per_rank, per_rank)
            ]
            sums = [
                [
                    fabric.mine(ref).at[block, place, source, step_token, part]
                    for source in range(self.fabric.num_ranks)
                ]
                for ref, part in zip(refs.received, self._columns(tile), strict=True)
            ]
            if not self.row.wire.quantized:
                # The total starts from 0.0, so that a total of zero is never -0.0.
                total = vectors.constant(fabric, self.held, 0.0, self.vector)
                for part in vectors.load_each(fabric, sums[0], sent, self.vector):
                    total = total + part.astype(jnp.float32)
                total, elements = total.astype(self.row.dtype), self.vector
            else:
                wire, dtype = self.row.wire, self.row.dtype
                total = quantized_rows.add_rows(fabric, wire, sums, sent, dtype)
                elements = quantized_rows.elements_of_sum(self.tile)
            vectors.store_part(fabric, fabric.mine(refs.out).at[token, columns], total, elements)

        self._each(step, worker, self.num_tiles, add_sums)
