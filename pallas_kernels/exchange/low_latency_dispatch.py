"""Dispatch into the expert-major layout over the low-latency protocol, for few tokens.

Block 0 of every rank sends its rank's choices to all ranks. A token's row goes to each rank that
gets it at once, before anything is known of the others' choices. Meanwhile every block reads the
choices of all ranks, and computes the rows on this rank of its tokens of every rank, with five
warpgroups:

  movers (4)  share each row: send and receive tiles, count choices, and store a tile to all the
              rows of its token here, from registers;
  planner     computes the layout from the counts, and writes zeros to rows that get no token.

So a row crosses the link once per (token, rank), and no received row is read again.
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
from pallas_kernels.exchange.low_latency import Rows, hello, meet
from pallas_kernels.exchange.plan import LowLatencyPlan, pad_last
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import LANES, align_up
from pallas_kernels.fabric.low_latency import Channels

_COUNTED_AT_ONCE = 1024  # choices, all loaded before the first is counted


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    fabric: fb.Fabric,
    channels: Channels,
    plan: LowLatencyPlan,
    capacity: int,
    expert_alignment: int,
    fair: bool = False,
    zero_unused: bool = True,
) -> tuple[Any, ...]:
    """Computes the routes of a dispatch and sends the rows, in one kernel.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H].
      topk_idx: [T, K] int32.
      fabric: how ranks reach each other.
      channels: how warpgroups of ranks reach each other.
      plan: how rows are spread over blocks and warpgroups; a plan that `fits`, of these sizes.
      capacity: R.
      expert_alignment: the rows of each expert start at a multiple of this.
      fair: whether a rank whose rows do not fit in R keeps equally many of each expert, and the
        others have the row R; else it keeps those before R.
      zero_unused: whether rows past the last expert's are zero, or what is in memory.

    Returns:
      The results of `dispatch.dispatch` without a wire_dtype, bit for bit.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    kernel = _Dispatch.of(
        plan, capacity, expert_alignment, fabric, channels,
        routes_known=False, fair=fair, zero_unused=zero_unused,
    )  # fmt: skip
    width = kernel.expert_rows.count_width
    num_experts, per_rank = plan.num_experts, plan.num_experts // num_ranks
    tokens, rows, counts, *layout = kernel.call(
        [x, topk_idx.reshape(*lead, num_tokens * top_k)],
        [
            jax.ShapeDtypeStruct((num_ranks, num_tokens * top_k), jnp.int32),
            jax.ShapeDtypeStruct((num_ranks, width), jnp.int32),
            *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (per_rank, per_rank, 1, 1)),
        ],
        name="ep_dispatch_ll",
    )
    rows = rows.reshape(*lead, num_ranks, num_tokens, top_k)
    return (tokens,), rows, counts[..., :num_experts], *layout


def dispatch_like(
    x: jax.Array,
    topk_idx: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    channels: Channels,
    plan: LowLatencyPlan,
    capacity: int,
    expert_alignment: int,
    fair: bool = False,
    zero_unused: bool = True,
) -> tuple[jax.Array, ...]:
    """Sends x [T, H] along the routes of an earlier dispatch, and returns the received rows.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H].
      topk_idx: [T, K] int32, that of `dispatch`.
      rows: [N, T, K] int32, the result of `dispatch`.
      counts: [N, E] int32, the result of `dispatch`.
      fabric: how ranks reach each other.
      channels: how warpgroups of ranks reach each other.
      plan: how rows are spread over blocks and warpgroups; a plan that `fits`, of these sizes.
      capacity: R, that of `dispatch`.
      expert_alignment: that of `dispatch`.
      fair: that of `dispatch`.
      zero_unused: that of `dispatch`.

    Returns:
      tokens ([R, H],).
    """
    num_ranks, num_tokens, top_k = rows.shape[-3:]
    lead, num_experts = x.shape[:-2], counts.shape[-1]
    kernel = _Dispatch.of(
        plan, capacity, expert_alignment, fabric, channels,
        routes_known=True, fair=fair, zero_unused=zero_unused,
    )  # fmt: skip
    tokens = kernel.call(
        [
            x,
            topk_idx.reshape(*lead, num_tokens * top_k),
            rows.reshape(*lead, num_ranks, num_tokens * top_k),
            pad_last(counts, kernel.expert_rows.count_width - num_experts),
        ],
        [],
        name="ep_dispatch_like_ll",
    )
    return tuple(tokens)


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """The kernel of `dispatch` and `dispatch_like`: static arguments, and the warpgroups' code."""

    rows: Rows
    expert_rows: ExpertRows
    routes_known: bool

    @classmethod
    def of(cls, plan, capacity, alignment, fabric, channels, *, routes_known, **options):
        of_experts = ExpertRows(
            fabric, plan.num_blocks, plan.num_experts, capacity, alignment,
            parts=[(plan.hidden, plan.dtype)],
            count_arrivals=None if routes_known else plan.warpgroups, **options,
        )  # fmt: skip
        return cls(Rows(fabric, channels, plan, "dispatch"), of_experts, routes_known)

    @property
    def top_k(self) -> int:
        return self.rows.plan.top_k

    @property
    def fabric(self) -> fb.Fabric:
        return self.rows.fabric

    @property
    def num_choices(self) -> int:
        """The choices of this rank's tokens, T·K."""
        return self.rows.plan.num_tokens * self.top_k

    def call(self, operands, more_results, *, name):
        plan = self.rows.plan
        tokens = jax.ShapeDtypeStruct((self.expert_rows.capacity, plan.hidden), plan.dtype)
        return fb.kernel(
            self.fabric,
            self,
            name=name,
            num_blocks=plan.num_blocks,
            num_warpgroups=plan.warpgroups + 1,
            out_type=[tokens, *more_results],
            scratch_types=self._scratch_types(),
        )(*operands)

    def _scratch_types(self) -> dict[str, Any]:
        plan, ranks = self.rows.plan, self.fabric.num_ranks
        width = self.expert_rows.count_width
        types = self.expert_rows.scratch_types()
        if not self.routes_known:
            types |= dict(
                choices=plgpu.SMEM((ranks, align_up(self.num_choices, LANES)), jnp.int32),
                # Of each source, the next row of each expert; entries after the last expert take
                # choices of none.
                next_rows_from=plgpu.SMEM((ranks, width + LANES), jnp.int32),
                block_starts=plgpu.SMEM((width,), jnp.int32),
                token_rows=plgpu.SMEM((ranks, plan.tokens_per_block, self.top_k), jnp.int32),
                laid_out=plgpu.Barrier(),
                together=plgpu.Barrier(num_arrivals=plan.warpgroups),
            )
        return types

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        layout: Any = ()
        if self.routes_known:
            x, topk_idx, rows, counts, tokens = refs
        else:
            x, topk_idx, tokens, rows, counts, *layout = refs
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < self.rows.plan.warpgroups)
        def _movers():
            mover = dataclasses.replace(self, rows=self.rows.for_warpgroup(warpgroup))
            mover._move(x, topk_idx, rows, tokens, **scratch)

        @pl.when(warpgroup == self.rows.plan.warpgroups)
        def _planner():
            self._lay_out(counts, layout, tokens, **scratch)

    def _lay_out(self, counts, layout, tokens, **scratch):
        fabric, of_experts = self.fabric, self.expert_rows
        if self.routes_known:
            hello(fabric.signal, release=False)
            of_experts.fetch_counts(counts, **scratch)
            of_experts.lay_out(**scratch)
        else:
            of_experts.lay_out(counts, **scratch)
            plgpu.barrier_arrive(scratch["laid_out"])
            of_experts.describe(*layout, **scratch)
        fabric.delay_point(3)
        of_experts.fill([tokens], **scratch)
        if self.routes_known:
            hello(fabric.wait, "dispatch")

    def _move(self, x, topk_idx, rows, tokens, **scratch):
        fabric, of_rows = self.fabric, self.rows
        fabric.delay_point(0)
        endpoint = of_rows.open()
        if not self.routes_known:
            self._send_choices(topk_idx)
        sent = of_rows.send_tokens(endpoint, x, topk_idx, exact=True)
        fabric.delay_point(1)
        if not self.routes_known:
            self._find_rows(rows, **scratch)
        here = [endpoint.rank, *endpoint.peers]
        for i, (token, exists) in enumerate(of_rows.tokens()):
            places = [
                [self._row_of(rows, source, i, token, k, **scratch) for k in range(self.top_k)]
                for source in here
            ]
            places = [[jnp.where(exists, p, fb.NOWHERE) for p in row] for row in places]
            for j, tile in enumerate(sent[i]):
                self._store(tokens, j, tile, places[0])
            comes = [fb.any_row(row) for row in places[1:]]
            for j, arrived in enumerate(of_rows.receive(endpoint, i, comes, exact=True)):
                for tile, row in zip(arrived, places[1:], strict=True):
                    self._store(tokens, j, tile, row)
        fabric.delay_point(2)
        endpoint.close()

    def _send_choices(self, topk_idx):
        """Sends this rank's choices to all ranks: each mover of block 0 a part of them."""
        pairs = -(-self.num_choices // 2)
        count = -(-pairs // self.rows.plan.warpgroups)
        first = jnp.minimum(self.rows.warpgroup * count, pairs - count)

        @pl.when(lax.axis_index("block") == 0)
        def _():
            self.fabric.send_halves(self.fabric.mine(topk_idx), first, count)

    def _store(self, tokens, i, tile, places):
        """Stores the i-th tile of a token to its rows here."""
        for place in places:
            kept = (place >= 0) & (place < self.expert_rows.capacity)
            self.rows.store(self.fabric.mine(tokens), place, i, tile, kept)

    def _row_of(self, rows, source, i, token, choice, *, token_rows=None, **_):
        """Reads the row on this rank of a choice of the block's i-th token of rank `source`."""
        if self.routes_known:
            return self.fabric.mine(rows)[source, token * self.top_k + choice]
        return token_rows[source, i, choice]

    # Computation of new routes; each mover handles other source ranks.

    def _find_rows(self, rows, *, laid_out, together, counts_full, **scratch):
        """Computes the rows on this rank of the block's tokens of all ranks."""
        plan = self.rows.plan

        def each_source(function):
            for first in range(0, self.fabric.num_ranks, plan.warpgroups):
                source = first + self.rows.warpgroup
                whole = first + plan.warpgroups <= self.fabric.num_ranks
                pl.when(whole or source < self.fabric.num_ranks)(
                    lambda source=source: function(source)
                )

        each_source(lambda source: self._count(source, **scratch))
        plgpu.barrier_arrive(counts_full)
        plgpu.barrier_wait(laid_out)
        each_source(lambda source: self._rows_from(source, rows, **scratch))
        meet(self.fabric, together)

    def _count(self, source, *, choices, all_counts, next_rows_from, **_):
        """Counts the choices of a rank by expert: all, and those of tokens of earlier blocks."""
        fabric, of_experts = self.fabric, self.expert_rows
        width, num_choices = of_experts.count_width, self.num_choices
        fb.clear(next_rows_from.at[source], width)
        fb.clear(all_counts.at[source], width)
        fabric.read_halves(source, choices.at[source, pl.ds(0, num_choices)], "dispatch")
        fabric.barrier()
        earlier = lax.axis_index("block") * self.rows.plan.tokens_per_block * self.top_k
        for start in range(0, num_choices, _COUNTED_AT_ONCE):
            size = min(_COUNTED_AT_ONCE, align_up(num_choices - start, LANES))
            experts = fb.load(fabric, choices.at[source, pl.ds(start, size)], 1)
            entries = start + fb.iota(fabric, size)
            if start + size > num_choices:
                experts = jnp.where(entries < num_choices, experts, fb.NOWHERE)
            fb.count(fabric, all_counts.at[source], experts, of_experts.num_experts)
            experts = jnp.where(entries < earlier, experts, fb.NOWHERE)
            bins = next_rows_from.at[source, pl.ds(0, width)]
            fb.count(fabric, bins, experts, of_experts.num_experts)
        fabric.barrier()

    def _rows_from(
        self, source, rows, *, choices, all_counts, next_rows_from, block_starts, block_ends,
        token_rows, **_,
    ):  # fmt: skip
        """Computes the rows on this rank of the block's tokens of rank `source`."""
        fabric, of_experts, top_k = self.fabric, self.expert_rows, self.top_k
        width, per_rank = of_experts.count_width, of_experts.num_local_experts
        entries = pl.ds(0, width)
        row = fb.load(fabric, next_rows_from.at[source, entries], 1)
        row = row + fb.load(fabric, block_starts, 1)
        for lower in range(fabric.num_ranks - 1):
            counted = fb.load(fabric, all_counts.at[lower], 1)
            row = row + jnp.where(lower < source, counted, jnp.zeros_like(counted))
        next_rows_from[source, entries] = row
        fabric.barrier()
        first_expert = fabric.rank() * per_rank
        for i, (token, exists) in enumerate(self.rows.tokens()):
            experts = [choices[source, token * top_k + k] for k in range(top_k)]
            mine = [(e >= first_expert) & (e < first_expert + per_rank) for e in experts]
            experts = [jnp.where(m, e, width) for e, m in zip(experts, mine, strict=True)]
            last = i + 1 == self.rows.plan.tokens_per_block
            found = of_experts.take_rows(
                experts, next_rows_from, block_ends, of=(source,), last=last
            )
            places = [jnp.where(m, p, fb.NOWHERE) for m, p in zip(mine, found, strict=True)]
            for choice, place in enumerate(places):
                token_rows[source, i, choice] = place

            @pl.when(exists)
            def _(token=token, places=places):
                for choice, place in enumerate(places):
                    fabric.mine(rows)[source, token * top_k + choice] = place
