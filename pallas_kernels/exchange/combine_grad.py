"""The gradient of a weighted combine, for rows and weights, in one pass over the rows.

The owner of a token is the rank whose token it is. Block b of every rank handles the same range of
tokens of every owner, with these warpgroups:

  scout    lists the rows of each (owner, token), and fetches the token's cotangent from its owner
           into a ring in shared memory; for a dropped choice it writes zero to the owner's
           dweights;
  filler   writes zeros to the rows of dy that have no token, and to dweights where this rank's
           choices are of no expert;
  workers  multiply each cotangent with its rows. The sum of the product over the columns goes to
           the owner's dweights, the cotangent times the weight to the row of dy. Rows are loaded
           from memory into registers, several at a time.

    owner of the token                 this rank
    g[token] ==== link, once =====>    ring --> worker <-- y[row]
                                                worker --> dy[row] = weight * g
    dweights[choice] <== link =================  sum of g * y[row]

Workers take the cotangents of the ring in turn. For few tokens, `low_latency_combine_grad` is
faster.

A cotangent crosses the link once per (token, rank), read by the rank that needs it. Every rank
knows the routes, so a block waits for its peers only at its end: it signals that it has read their
memory and written its part of their results, and waits for the same signal of each peer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.expert_rows import ExpertRows
from pallas_kernels.exchange.plan import ROWS_OF_COTANGENT, Plan, Window, pad_last
from pallas_kernels.exchange.ring import Ring
from pallas_kernels.exchange.windows import open_window, places_in_list
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import LANES, align_up, padded_columns, vector_length

_DONE = 0  # kind of signal, sent once
_END = -1  # instead of a number of rows: the worker has taken its last cotangent
_VECTORS_AT_ONCE = 2  # of 16 bytes of a row, for each thread


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    topk_idx: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    plan: Plan,
    expert_alignment: int,
    fair: bool = False,
    zero_unused: bool = True,
    into: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the cotangents of a weighted combine's rows y and of its weights.

    With stacked ranks, every array has a leading axis of N.

    Args:
      g: [T, H], the cotangent of the combine's result; H · itemsize a multiple of 128 bytes.
      topk_weights: [T, K] float32.
      y: [R, H], of g's dtype.
      topk_idx: [T, K] int32.
      rows: [N, T, K] int32, a result of the dispatch: the row of each choice, or less than 0 where
        the choice is of another rank's expert; a row of R or more was dropped.
      counts: [N, E] int32, how many choices of each rank are of each expert.
      fabric: how ranks reach each other.
      plan: number of blocks, of workers, and of cotangents in the ring.
      expert_alignment: the rows of each expert start at a multiple of this.
      fair: whether a rank whose rows did not fit in R kept equally many of each expert.
      zero_unused: whether rows of dy past the last expert's are zero, or what is in memory.
      into: dy of an earlier call with the same counts. The rows of this call's tokens are written
        into it; all others are kept, and none is filled with zeros.

    Returns:
      dy [R, H] of y's dtype: the weight times the cotangent, computed in float32 and rounded once;
      zero in rows without a token, but for `zero_unused` and `into`. dweights [T, K] float32: the
      inner product of cotangent and row, summed in an order that is the same on every run; zero for
      choices that are of no expert or were dropped.
    """
    if plan.num_stages % plan.num_workers:  # a worker waits for every turn of a stage's barriers
        raise ValueError(f"num_stages must be a multiple of num_workers, but the plan is {plan}.")
    lead, (num_ranks, num_tokens, top_k) = rows.shape[:-3], rows.shape[-3:]
    capacity, hidden = y.shape[-2:]
    of_experts = ExpertRows(
        fabric, plan.num_blocks, counts.shape[-1], capacity, expert_alignment,
        parts=[(hidden, y.dtype)], fair=fair, zero_unused=zero_unused,
        adds=into is not None,
    )  # fmt: skip
    window = Window.of(plan.window_tokens, plan, num_tokens, top_k)
    kernel = _CombineGrad(num_tokens, hidden, top_k, y.dtype, fabric, plan, window, of_experts)
    flat = num_tokens * top_k
    out_type = [
        jax.ShapeDtypeStruct((capacity, hidden), y.dtype),
        jax.ShapeDtypeStruct((flat,), jnp.float32),
    ]
    call = fb.kernel(
        fabric,
        kernel,
        name="ep_combine_grad",
        num_blocks=plan.num_blocks,
        num_warpgroups=kernel.num_warpgroups,
        out_type=out_type if into is None else out_type[1:],
        scratch_types=kernel.scratch_types(),
        shared=(0, 1, 7),
    )
    operands = (
        g,
        window.pad(topk_weights.reshape(*lead, flat), 0),
        y,
        topk_idx.reshape(*lead, flat),
        window.pad(rows.reshape(*lead, num_ranks, flat), fb.NOWHERE),
        pad_last(counts, of_experts.count_width - counts.shape[-1]),
    )
    if into is None:
        dy, dweights = call(*operands)
    else:
        ((dy,), (dweights,)) = fb.update_in_place([into], lambda refs: call(*operands, *refs))
    return dy, dweights.reshape(*lead, num_tokens, top_k)


@dataclasses.dataclass(frozen=True)
class _CombineGrad:
    """The kernel of `combine_grad`: its static arguments, and the warpgroups' code."""

    num_tokens: int
    hidden: int
    top_k: int
    dtype: Any
    fabric: fb.Fabric
    plan: Plan
    window: Window
    expert_rows: ExpertRows

    @property
    def num_warpgroups(self) -> int:
        return 2 + self.plan.num_workers

    @property
    def listed_rows(self) -> int:
        """Entries of the list of a cotangent's rows: K, in whole parts."""
        return align_up(self.top_k, ROWS_OF_COTANGENT)

    def scratch_types(self) -> dict[str, Any]:
        columns = padded_columns(self.hidden, self.dtype)
        stages, workers, listed = self.plan.num_stages, self.plan.num_workers, self.listed_rows
        window = (self.fabric.num_ranks, self.window.width)  # of all owners' rows, and weights
        return dict(
            **self.expert_rows.scratch_types(),
            window_rows=plgpu.SMEM(window, jnp.int32),
            window_weights=plgpu.SMEM(window, jnp.float32),
            stages=plgpu.SMEM((stages, columns), self.dtype),
            notes=plgpu.SMEM((stages, 2), jnp.int32),  # the number of rows, or _END; the owner
            # The rows of a stage, which choices of the owner they are, and their weights.
            list_rows=plgpu.SMEM((stages, listed), jnp.int32),
            list_choices=plgpu.SMEM((stages, listed), jnp.int32),
            list_weights=plgpu.SMEM((stages, listed), jnp.float32),
            sums=plgpu.SMEM((workers, ROWS_OF_COTANGENT, vectors.SUMS_OF_WARPGROUP), jnp.float32),
            full=plgpu.Barrier(num_barriers=stages),
            empty=plgpu.Barrier(num_barriers=stages),
        )

    def __call__(
        self, *refs: Any, stages: Any, notes: Any, full: Any, empty: Any, **scratch: Any
    ) -> None:
        g, weights, y, topk_idx, rows, counts, dy, dweights = refs
        ring = Ring(stages, full, empty, notes)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _scout():
            self.fabric.delay_point(0)
            self.fabric.connect()
            self._scout(g, weights, rows, dweights, ring, **scratch)

        @pl.when(warpgroup == 1)
        def _filler():
            self.fabric.delay_point(3)
            self.fill(topk_idx, counts, dy, dweights, **scratch)

        @pl.when(warpgroup > 1)
        def _worker():
            self.fabric.connect()
            self._weigh(warpgroup - 2, y, dy, dweights, ring, **scratch)

    def _scout(
        self, g, weights, rows, dweights, ring, *, window_rows, window_weights,
        list_rows, list_choices, list_weights, **_,
    ):  # fmt: skip
        fabric, window, top_k = self.fabric, self.window, self.top_k
        num_ranks, capacity = fabric.num_ranks, self.expert_rows.capacity
        first_token, end_token = self.token_range()

        def scout_window(index, turn):
            window_token = first_token + index * window.tokens
            owners = [self.owner(i) for i in range(num_ranks)]
            start = open_window(
                fabric,
                window,
                window_token * top_k,
                (window_rows, [(owner, fabric.mine(rows), owner) for owner in owners]),
                (window_weights, [(owner, fabric.peer(weights, owner)) for owner in owners]),
            )

            def scout_pair(i, turn):
                token, owner = window_token + lax.div(i, num_ranks), self.owner(i)
                entry = token * top_k
                entries = [entry - start + choice for choice in range(top_k)]
                places = [window_rows[owner, e] for e in entries]
                kept = [(place >= 0) & (place < capacity) for place in places]
                count, order = places_in_list(kept)

                @pl.when(count > 0)
                def _():
                    stage = ring.open(turn, count, owner)
                    for choice, at in enumerate(order):
                        row = jnp.where(kept[choice], places[choice], fb.NOWHERE)
                        list_rows[stage, at] = row
                        list_choices[stage, at] = entry + choice
                        list_weights[stage, at] = window_weights[owner, entries[choice]]
                    for end in range(top_k, self.listed_rows):
                        list_rows[stage, end] = jnp.int32(fb.NOWHERE)
                    ring.fetch(stage, fabric.peer(g, owner).at[token])

                for choice, place in enumerate(places):

                    @pl.when(place >= capacity)
                    def _(choice=choice):
                        fabric.peer(dweights, owner)[entry + choice] = jnp.float32(0)

                return turn + (count > 0).astype(jnp.int32)

            num_tokens = jnp.minimum(end_token - window_token, window.tokens)
            return lax.fori_loop(0, num_tokens * num_ranks, scout_pair, turn)

        turns = lax.fori_loop(0, self.num_windows(), scout_window, jnp.int32(0))

        def end(i, _):
            stage = ring.open(turns + i, _END, 0)
            plgpu.barrier_arrive(ring.full.at[stage])

        lax.fori_loop(0, self.plan.num_workers, end, None)
        fb.drain(ring.empty, turns + self.plan.num_workers, self.plan.num_stages)
        # The workers have read all cotangents of peers, and written all that is theirs.
        self.finish()

    def _weigh(self, worker, y, dy, dweights, ring, **lists):
        def take_stage(state):
            turn, _ = state
            stage = ring.stage(turn)
            plgpu.barrier_wait(ring.full.at[stage])
            count, owner = ring.notes[stage, 0], ring.notes[stage, 1]

            def weigh_rows(part, _):
                first = part * ROWS_OF_COTANGENT
                self._multiply(worker, y, dy, dweights, ring, stage, owner, first, **lists)

            parts = lax.div(
                jnp.maximum(count, 0) + (ROWS_OF_COTANGENT - 1), jnp.int32(ROWS_OF_COTANGENT)
            )
            lax.fori_loop(0, parts, weigh_rows, None)
            plgpu.commit_smem()  # a bulk copy writes to the stage next
            plgpu.barrier_arrive(ring.empty.at[stage])
            return turn + self.plan.num_workers, count != _END

        lax.while_loop(lambda state: state[1], take_stage, (worker, jnp.bool_(True)))

    def _multiply(
        self, worker, y, dy, dweights, ring, stage, owner, first, *,
        list_rows, list_choices, list_weights, sums, **_,
    ):  # fmt: skip
        """Multiplies a stage's cotangent with some of its rows of y, and with their weights."""
        fabric, vector = self.fabric, vector_length(self.dtype)
        at_once = range(ROWS_OF_COTANGENT)
        rows = [list_rows[stage, first + i] for i in at_once]
        held = [row >= 0 for row in rows]
        rows = [jnp.maximum(row, 0) for row in rows]
        weights = [list_weights[stage, first + i] for i in at_once]
        block = LANES * vector  # columns of which each thread holds one vector

        def multiply(start, sizes, totals):
            """Multiplies neighbouring blocks of columns; adds the products with rows to totals."""
            parts = [pl.ds(start + i * block, size) for i, size in enumerate(sizes)]
            loaded = [
                vectors.load_each(
                    fabric, [fabric.mine(y).at[row, part] for row in rows], held, vector,
                    read_only=True,
                )
                for part in parts
            ]  # fmt: skip
            totals = list(totals)
            for part, of_part in zip(parts, loaded, strict=True):
                columns = pl.ds(part.start, part.size if fabric.interpret else block)
                cotangent = fb.load(fabric, ring.rows.at[stage, columns], vector)
                cotangent = cotangent.astype(jnp.float32)
                for i, row in enumerate(of_part):
                    product = cotangent * row.astype(jnp.float32)
                    if columns.size > part.size:  # shared memory past the row was not written
                        inside = fb.iota(fabric, columns.size, vector) < part.size
                        product = jnp.where(inside, product, jnp.zeros_like(product))
                    if fabric.interpret:
                        product = jnp.pad(product, (0, block - part.size))
                    totals[i] = totals[i] + product
                    weighted = (cotangent * weights[i]).astype(self.dtype)
                    there = fabric.mine(dy).at[rows[i], part]
                    vectors.store_part(fabric, there, weighted, vector, held=held[i])
            return tuple(totals)

        wide = _VECTORS_AT_ONCE * block
        loops, rest = divmod(self.hidden, wide)
        totals = tuple(vectors.constant(fabric, block, -0.0, vector) for _ in at_once)
        totals = lax.fori_loop(
            0, loops, lambda i, t: multiply(i * wide, [block] * _VECTORS_AT_ONCE, t), totals
        )
        if rest:
            sizes = [min(block, rest - at) for at in range(0, rest, block)]
            totals = multiply(loops * wide, sizes, totals)
        for i in at_once:
            vectors.partial_sums(fabric, totals[i], sums.at[worker, i], vector)
        fabric.barrier()
        for i in at_once:

            @pl.when(held[i])
            def _(i=i):
                of_owner = fabric.peer(dweights, owner)
                choice = list_choices[stage, first + i]
                vectors.store_total(fabric, sums.at[worker, i], of_owner, choice)

        fabric.barrier()  # before the next partial sums

    def token_range(self) -> tuple[jax.Array, jax.Array]:
        """Returns this block's first token, and the end of its tokens."""
        first, count = self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)
        return first, first + count

    def num_windows(self) -> jax.Array:
        """Returns the number of windows of routes that this block's tokens take."""
        first, end = self.token_range()
        return lax.div(end - first + (self.window.tokens - 1), jnp.int32(self.window.tokens))

    def owner(self, i: jax.Array | int) -> jax.Array:
        """Returns the i-th rank in the order in which this block handles owners."""
        offset = fb.first_peer(self.fabric)
        return lax.rem(i + offset, jnp.int32(self.fabric.num_ranks))

    def finish(self) -> None:
        """Signals that this block is done with its peers' memory; waits for the same of each peer.

        The calling warpgroup must know that the block's reads from peers have arrived, and that its
        writes to peers were made.
        """
        fabric = self.fabric
        fabric.delay_point(1)
        fabric.signal(_DONE, 1)
        fabric.delay_point(2)
        fabric.wait(_DONE, 1, "the gradient of combine")

    def fill(self, topk_idx: Any, counts: Any, dy: Any, dweights: Any, **scratch: Any) -> None:
        """Writes zeros to dy, as `ExpertRows.fill`, and to dweights of choices of no expert."""
        fabric, of_experts, top_k = self.fabric, self.expert_rows, self.top_k
        of_experts.fetch_counts(counts, **scratch)

        def clear_token(token: jax.Array, _: None) -> None:
            entries = [token * top_k + choice for choice in range(top_k)]
            experts = [fabric.mine(topk_idx)[entry] for entry in entries]
            for entry, expert in zip(entries, experts, strict=True):

                @pl.when((expert < 0) | (expert >= of_experts.num_experts))
                def _(entry: jax.Array = entry) -> None:
                    fabric.mine(dweights)[entry] = jnp.float32(0)

        lax.fori_loop(*self.token_range(), clear_token, None)
        of_experts.lay_out(**scratch)
        of_experts.fill([dy], **scratch)
