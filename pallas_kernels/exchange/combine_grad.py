"""The gradients of a weighted combine's expert outputs and weights, in one pass over the rows.

The owner of a token is the rank that dispatched it. `g` has the cotangents of the owner's results,
one for each token, and `y` the expert outputs. `dy` and `dweights` are the gradients of `y` and of
the routing weights. Block b of every rank handles the same range of tokens of every owner, with
these warpgroups:

  scout    lists the rows of y that each token has, and fetches the token's cotangent from its owner
           into a ring in shared memory. For a dropped choice it writes zero to the owner's
           dweights;
  filler   writes zeros to the rows of dy that have no token, and to dweights where the id that a
           token of this rank chose is no expert's;
  workers  multiply each cotangent with the token's rows of y. The inner product goes to the owner's
           dweights, and the cotangent times the weight to the row of dy. Rows are loaded from
           memory into registers, several at a time.

    owner of the token                 this rank
    g[token] ==== link, once =====>    ring --> worker <-- y[row]
                                                worker --> dy[row] = weight * g
    dweights[choice] <== link =================  sum of g * y[row]

The scout numbers the cotangents of a block in order. Worker w takes every cotangent whose number is
w modulo the number of workers. For few tokens, `low_latency_combine_grad` is faster.

A cotangent crosses the link once per (token, rank): each rank that has expert outputs of the token
reads it from the owner's memory. A rank knows from the dispatch which tokens it received. So a
block waits for its peers only at its end: it signals that its reads and writes of their memory are
done, and waits until each peer has signalled the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.expert_rows import ExpertRows, ExpertScratch
from pallas_kernels.exchange.plan import ROWS_OF_COTANGENT, Plan, Window, pad_last
from pallas_kernels.exchange.ring import Ring
from pallas_kernels.exchange.windows import open_window, places_in_list
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import WARPGROUP, align_up, padded_columns, vector_length

# The kind of signal by which a block says that it has made its last access to its peers' memory.
_DONE = 0
# With each cotangent, the scout warpgroup passes through the ring how many rows of y its token has.
# After the last cotangent it passes this value to each worker instead, to tell it to stop.
_END = -1
# A thread holds this many 16-byte vectors of a row in registers at a time.
_VECTORS_AT_ONCE = 2


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
    """Computes the cotangents of a weighted combine's expert outputs y and of its weights.

    T is the number of this rank's tokens, H the hidden size, K the number of choices of a token,
    and N the number of ranks. If all ranks are simulated on one device (`fabric.stacked`), every
    array has a leading axis of N.

    Args:
      g: [T, H], the cotangent of the combine's result; H · itemsize is a multiple of 128 bytes.
      topk_weights: [T, K] float32, the weights of the combine.
      y: [R, H] of g's dtype, the expert outputs in the R rows of the receive buffer.
      topk_idx: [T, K] int32, the experts that this rank's tokens choose.
      rows: [N, T, K] int32, a result of the dispatch: for each choice of every source rank's
        tokens, the row of y with the choice's expert output. It is negative if the expert is
        another rank's, and R or more if the choice was dropped.
      counts: [N, E] int32, how often the tokens of each source rank choose each expert.
      fabric: how ranks reach each other.
      plan: the number of blocks, of workers, and of cotangents in the ring.
      expert_alignment: the rows of each expert start at a multiple of this number.
      fair: the dispatch's argument `fair`: how a rank dropped rows if more than R would have come.
      zero_unused: whether rows of dy past the last expert's rows are zero; else they are undefined.
      into: None, or an existing dy into which this call writes the rows of its tokens. All other
        rows keep their values. If the tokens of one dispatch are divided among several calls, it is
        the dy of the previous call, and `counts` is that of the whole dispatch.

    Returns:
      dy: [R, H] of y's dtype. A row with a token is the weight times the cotangent, computed in
        float32 and rounded once. Other rows are zero, except as `zero_unused` and `into` say.
      dweights: [T, K] float32, the inner product of the token's cotangent and the choice's row of
        y, summed in the same order on every run. It is zero for choices that are of no expert or
        were dropped.
    """
    # A warpgroup that waits for a barrier must wait for every completion of it. Each stage has a
    # barrier, so all cotangents that pass through a stage must go to the same worker.
    if plan.num_stages % plan.num_workers:
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
        scratch_types=dict(scratch=kernel.scratch()),
        # Peers read operands 0 and 1, g and the weights, and write to dweights, which follows the 6
        # operands and dy.
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


class Refs(NamedTuple):
    """The operands and results of a kernel for a combine's gradient, in global memory.

    Peers read `g` and `weights`, and write to `dweights`. Over the low-latency protocol they access
    none of the arrays, since ranks send the values instead.
    """

    # [T, H], the cotangent of the combine's result.
    g: Any
    # [T·K] float32, the routing weights.
    weights: Any
    # [R, H], the expert outputs.
    y: Any
    # [T·K] int32, the experts that this rank's tokens choose.
    topk_idx: Any
    # [N, T·K] int32: the row of y for each top-k choice of each source rank's tokens.
    rows: Any
    # [N, count_width] int32: how often the tokens of each source rank choose each expert.
    counts: Any
    # [R, H], the gradient of y, a result.
    dy: Any
    # [T·K] float32, the gradient of the routing weights, a result.
    dweights: Any


class _Scratch(NamedTuple):
    """The shared memory of the kernel.

    The ring has S stages. A stage holds a token's cotangent and the list of the token's rows of y
    on this rank. The owner of a token is the rank that dispatched it.
    """

    experts: ExpertScratch
    # [N, window] int32: the row of y (the expert outputs) for each top-k choice of each source
    # rank's tokens in the loaded slice.
    window_rows: Any
    # [N, window] float32, the routing weights of the choices in `window_rows`.
    window_weights: Any
    # [S, columns], the S stages of the ring, with one cotangent in each.
    stages: Any
    # [S, 2] int32: notes[s, 0] is how many rows of y the token in stage s has on this rank, or _END
    # to tell the worker to stop. notes[s, 1] is the token's owner.
    notes: Any
    # [S, listed_rows] int32: for the token in each stage of the ring, the numbers of its rows of y
    # on this rank.
    list_rows: Any
    # [S, listed_rows] int32: for each row in `list_rows`, the index of its choice in the owner's
    # dweights, token · K + choice.
    list_choices: Any
    # [S, listed_rows] float32: for each row in `list_rows`, its routing weight.
    list_weights: Any
    # [workers, ROWS_OF_COTANGENT, warps] float32: the partial sum of each warp of a worker for each
    # of the inner products that the worker computes at a time.
    sums: Any
    # [S] barriers: `full[s]` completes when a cotangent has arrived in stage s.
    full: Any
    # [S] barriers: `empty[s]` completes when a worker has used the cotangent in stage s.
    empty: Any

    @property
    def ring(self) -> Ring:
        return Ring(self.stages, self.full, self.empty, self.notes)


@dataclasses.dataclass(frozen=True)
class _CombineGrad:
    """The kernel of `combine_grad`.

    Attributes:
      num_tokens: T, the number of tokens of each rank.
      hidden: H, the hidden size.
      top_k: K, the number of experts chosen for each token.
      dtype: the dtype of cotangents and of the rows of y and dy.
      fabric: how ranks reach each other.
      plan: the number of blocks, of workers, and of stages of the ring.
      window: the slice of the routing data that the scout loads at a time.
      experts: finds where each expert's rows are, and zeroes unused rows of dy.
    """

    num_tokens: int
    hidden: int
    top_k: int
    dtype: Any
    fabric: fb.Fabric
    plan: Plan
    window: Window
    experts: ExpertRows

    @property
    def num_warpgroups(self) -> int:
        return 2 + self.plan.num_workers

    @property
    def listed_rows(self) -> int:
        """The length, with padding, of the list of one token's rows of y on this rank.

        It is K, rounded up to a multiple of ROWS_OF_COTANGENT.
        """
        return align_up(self.top_k, ROWS_OF_COTANGENT)

    def scratch(self) -> _Scratch:
        """Returns the types of the kernel's shared memory."""
        columns = padded_columns(self.hidden, self.dtype)
        stages, workers, listed = self.plan.num_stages, self.plan.num_workers, self.listed_rows
        window = (self.fabric.num_ranks, self.window.width)
        return _Scratch(
            experts=self.experts.scratch(),
            window_rows=plgpu.SMEM(window, jnp.int32),
            window_weights=plgpu.SMEM(window, jnp.float32),
            stages=plgpu.SMEM((stages, columns), self.dtype),
            notes=plgpu.SMEM((stages, 2), jnp.int32),
            list_rows=plgpu.SMEM((stages, listed), jnp.int32),
            list_choices=plgpu.SMEM((stages, listed), jnp.int32),
            list_weights=plgpu.SMEM((stages, listed), jnp.float32),
            sums=plgpu.SMEM((workers, ROWS_OF_COTANGENT, vectors.SUMS_OF_WARPGROUP), jnp.float32),
            full=plgpu.Barrier(num_barriers=stages),
            empty=plgpu.Barrier(num_barriers=stages),
        )

    def __call__(self, *arrays: Any, scratch: _Scratch) -> None:
        refs, warpgroup = Refs(*arrays), lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def scout() -> None:
            self.fabric.delay_point(0)
            self.fabric.connect()
            self._scout(refs, scratch)

        @pl.when(warpgroup == 1)
        def fill() -> None:
            self.fabric.delay_point(3)
            self._fill(refs, scratch)

        @pl.when(warpgroup > 1)
        def work() -> None:
            self.fabric.connect()
            self._weigh(warpgroup - 2, refs, scratch)

    def _scout(self, refs: Refs, scratch: _Scratch) -> None:
        """Runs the scout warpgroup: fills the ring with cotangents and lists of rows of y."""
        fabric, window, ring = self.fabric, self.window, scratch.ring
        num_ranks = fabric.num_ranks
        first_token, end_token = self.token_range()

        def scout_window(index: jax.Array, turn: jax.Array) -> jax.Array:
            """Passes the cotangents of the tokens of window number `index` to the workers.

            A window is the slice of the routing data that is loaded at a time. `turn` is how many
            cotangents were passed before this window. Returns how many were passed by its end.
            """
            window_token = first_token + index * window.tokens
            owners = [self.owner(i) for i in range(num_ranks)]
            start = open_window(
                fabric,
                window,
                window_token * self.top_k,
                (scratch.window_rows, [(owner, fabric.mine(refs.rows), owner) for owner in owners]),
                (
                    scratch.window_weights,
                    [(owner, fabric.peer(refs.weights, owner)) for owner in owners],
                ),
            )

            def scout_pair(i: jax.Array, turn: jax.Array) -> jax.Array:
                token, owner = window_token + lax.div(i, num_ranks), self.owner(i)
                return self._scout_pair(token, owner, start, turn, refs, scratch)

            num_tokens = jnp.minimum(end_token - window_token, window.tokens)
            return lax.fori_loop(0, num_tokens * num_ranks, scout_pair, turn)

        turns = lax.fori_loop(0, self.num_windows(), scout_window, jnp.int32(0))

        def end(i: jax.Array, _: None) -> None:
            stage = ring.open(turns + i, _END, 0)
            plgpu.barrier_arrive(ring.full.at[stage])

        lax.fori_loop(0, self.plan.num_workers, end, None)
        fb.drain(ring.empty, turns + self.plan.num_workers, self.plan.num_stages)
        # `drain` has waited until the workers have read all cotangents and written all dweights.
        self.finish()

    def _scout_pair(
        self,
        token: jax.Array,
        owner: jax.Array,
        start: jax.Array,
        turn: jax.Array,
        refs: Refs,
        scratch: _Scratch,
    ) -> jax.Array:
        """Fills a stage of the ring with a token's cotangent and the list of the token's rows of y.

        Also writes zero to the owner's dweights, the weights' gradient, for each dropped choice.

        Args:
          token: the token's index among its owner's tokens.
          owner: the rank that dispatched the token.
          start: the index in the routing data [T·K] at which the loaded slice begins.
          turn: how many cotangents were passed to the ring before this one.
          refs: the kernel's operands and results.
          scratch: the kernel's shared memory.

        Returns:
          How many cotangents were passed, including this one: `turn` + 1, or `turn` if the token
          has no row on this rank, so that its cotangent is not needed.
        """
        fabric, top_k, ring = self.fabric, self.top_k, scratch.ring
        entry = token * top_k
        entries = [entry - start + choice for choice in range(top_k)]
        places = [scratch.window_rows[owner, e] for e in entries]
        kept = [(place >= 0) & (place < self.experts.capacity) for place in places]
        count, order = places_in_list(kept)

        @pl.when(count > 0)
        def list_rows() -> None:
            stage = ring.open(turn, count, owner)
            for choice, at in enumerate(order):
                row = jnp.where(kept[choice], places[choice], fb.NOWHERE)
                scratch.list_rows[stage, at] = row
                scratch.list_choices[stage, at] = entry + choice
                scratch.list_weights[stage, at] = scratch.window_weights[owner, entries[choice]]
            for end in range(top_k, self.listed_rows):
                scratch.list_rows[stage, end] = jnp.int32(fb.NOWHERE)
            ring.fetch(stage, fabric.peer(refs.g, owner).at[token])

        for choice, place in enumerate(places):

            @pl.when(place >= self.experts.capacity)
            def write_zero_of_dropped(choice: int = choice) -> None:
                fabric.peer(refs.dweights, owner)[entry + choice] = jnp.float32(0)

        return turn + (count > 0).astype(jnp.int32)

    def _weigh(self, worker: jax.Array, refs: Refs, scratch: _Scratch) -> None:
        """Runs a worker warpgroup: multiplies its share of the cotangents with rows of y.

        `worker` is the index of the warpgroup among the workers of the block.
        """
        ring = scratch.ring

        def take_stage(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            turn, _ = state
            stage = ring.stage(turn)
            plgpu.barrier_wait(ring.full.at[stage])
            count, owner = ring.notes[stage, 0], ring.notes[stage, 1]

            def weigh_rows(part: jax.Array, _: None) -> None:
                first = part * ROWS_OF_COTANGENT
                self._multiply(worker, stage, owner, first, refs, scratch)

            parts = lax.div(
                jnp.maximum(count, 0) + (ROWS_OF_COTANGENT - 1), jnp.int32(ROWS_OF_COTANGENT)
            )
            lax.fori_loop(0, parts, weigh_rows, None)
            # This fence orders the scout's next copy into the stage after this warpgroup's reads.
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.empty.at[stage])
            return turn + self.plan.num_workers, count != _END

        lax.while_loop(lambda state: state[1], take_stage, (worker, jnp.bool_(True)))

    def _multiply(
        self,
        worker: jax.Array,
        stage: jax.Array,
        owner: jax.Array,
        first: jax.Array,
        refs: Refs,
        scratch: _Scratch,
    ) -> None:
        """Multiplies a cotangent with up to ROWS_OF_COTANGENT rows of y, and with their weights.

        Writes two results for each row. The inner product of cotangent and row goes to the owner's
        dweights, the gradient of the weights. The cotangent times the row's weight goes to the
        row's place in dy, the gradient of y.

        Args:
          worker: the index of this warpgroup among the workers of the block.
          stage: the stage of the ring that holds the cotangent.
          owner: the rank that dispatched the cotangent's token.
          first: the position of the first of these rows in the stage's list of rows.
          refs: the kernel's operands and results.
          scratch: the kernel's shared memory.
        """
        fabric, vector = self.fabric, vector_length(self.dtype)
        at_once = range(ROWS_OF_COTANGENT)
        rows = [scratch.list_rows[stage, first + i] for i in at_once]
        held = [row >= 0 for row in rows]
        rows = [jnp.maximum(row, 0) for row in rows]
        weights = [scratch.list_weights[stage, first + i] for i in at_once]
        # A block of columns is what the warpgroup multiplies at a time: one vector in each thread.
        block = WARPGROUP * vector

        def multiply(start: Any, sizes: Sequence[int], totals: Any) -> tuple[jax.Array, ...]:
            """Multiplies the cotangent with the rows in some neighbouring blocks of columns.

            The first block begins at column `start`, and `sizes` has the number of columns of each
            block. Writes the cotangent times the weight to these columns of dy. `totals` has an
            array for each row, as long as a block: its element c is the sum of the products in
            column c of all earlier blocks. Returns `totals` plus the products in these blocks.
            """
            parts = [pl.ds(start + i * block, size) for i, size in enumerate(sizes)]
            loaded = [
                vectors.load_each(
                    fabric, [fabric.mine(refs.y).at[row, part] for row in rows], held, vector,
                    read_only=True,
                )
                for part in parts
            ]  # fmt: skip
            totals = list(totals)
            for part, of_part in zip(parts, loaded, strict=True):
                columns = pl.ds(part.start, part.size if fabric.interpret else block)
                cotangent = fb.load(fabric, scratch.stages.at[stage, columns], vector)
                cotangent = cotangent.astype(jnp.float32)
                for i, row in enumerate(of_part):
                    product = cotangent * row.astype(jnp.float32)
                    if columns.size > part.size:
                        # The load of the cotangent reads past the end of the row. The values there
                        # are undefined, so their products are replaced by zeros.
                        inside = fb.iota(fabric, columns.size, vector) < part.size
                        product = jnp.where(inside, product, jnp.zeros_like(product))
                    if fabric.interpret:
                        product = jnp.pad(product, (0, block - part.size))
                    totals[i] = totals[i] + product
                    weighted = (cotangent * weights[i]).astype(self.dtype)
                    there = fabric.mine(refs.dy).at[rows[i], part]
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
            vectors.partial_sums(fabric, totals[i], scratch.sums.at[worker, i], vector)
        fabric.barrier()
        for i in at_once:

            @pl.when(held[i])
            def store_dweight(i: int = i) -> None:
                of_owner = fabric.peer(refs.dweights, owner)
                choice = scratch.list_choices[stage, first + i]
                vectors.store_total(fabric, scratch.sums.at[worker, i], of_owner, choice)

        # All threads must have read `scratch.sums` before the next call overwrites it.
        fabric.barrier()

    def token_range(self) -> tuple[jax.Array, jax.Array]:
        """Returns the first token of this block and the token after its last, int32 scalars."""
        first, count = self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)
        return first, first + count

    def num_windows(self) -> jax.Array:
        """Returns the number of slices in which this block loads routing data, a scalar int32."""
        first, end = self.token_range()
        return lax.div(end - first + (self.window.tokens - 1), jnp.int32(self.window.tokens))

    def owner(self, i: jax.Array | int) -> jax.Array:
        """Returns the owner in the i-th (token, owner) pair of this block, a scalar int32.

        The owner of a token is the rank that dispatched it. For each token index, the block handles
        the tokens of all N owners in succession. The order of the owners differs between blocks, to
        spread the load over the links.
        """
        offset = fb.first_peer(self.fabric)
        return lax.rem(i + offset, jnp.int32(self.fabric.num_ranks))

    def finish(self) -> None:
        """Signals that this block is done with its peers' memory, and waits for the peers' signals.

        The kernel may end after the call. Before the call, the block's reads from peers must have
        completed, and its writes to peers must have been issued.
        """
        fabric = self.fabric
        fabric.delay_point(1)
        fabric.signal(_DONE, 1)
        fabric.delay_point(2)
        fabric.wait(_DONE, 1, "the gradient of combine")

    def _fill(self, refs: Refs, scratch: _Scratch) -> None:
        """Runs the filler warpgroup: zeroes the elements of dy and dweights that no worker writes.

        In dy, the gradient of y, these elements are the rows without a token. In dweights, the
        gradient of the weights, they belong to the choices of this rank's tokens whose id is no
        expert's.
        """
        fabric, top_k, num_experts = self.fabric, self.top_k, self.experts.num_experts
        self.experts.fetch_counts(refs.counts, scratch.experts)

        def clear_token(token: jax.Array, _: None) -> None:
            entries = [token * top_k + choice for choice in range(top_k)]
            experts = [fabric.mine(refs.topk_idx)[entry] for entry in entries]
            for entry, expert in zip(entries, experts, strict=True):

                @pl.when((expert < 0) | (expert >= num_experts))
                def write_zero(entry: jax.Array = entry) -> None:
                    fabric.mine(refs.dweights)[entry] = jnp.float32(0)

        lax.fori_loop(*self.token_range(), clear_token, None)
        self.experts.find_groups(scratch.experts)
        self.experts.fill([refs.dy], scratch.experts)
