"""Combine over the low-latency protocol, for few tokens.

Block b of every rank handles the same tokens of every owner, the rank whose tokens they are, with
five warpgroups:

  scout        finds the rows of each (token, owner) and fetches them into a ring in shared memory;
  summers (4)  share each row: sum the tiles of these rows in float32, weighted, round the sums
               once and send them to the owner; then receive the sums of the tokens of this rank,
               and add them in rank order.

Weights are the owner's. Block 0 of every rank sends them to all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.low_latency import Gather, Rows, hello, is_among
from pallas_kernels.exchange.plan import LowLatencyPlan
from pallas_kernels.exchange.ring import Ring
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.low_latency import Channels


def combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    topk_idx: jax.Array,
    rows: jax.Array,
    *,
    fabric: fb.Fabric,
    channels: Channels,
    plan: LowLatencyPlan,
    by_rank: bool = False,
) -> jax.Array:
    """Multiplies rows by their weights, sums them by token, and returns the sums to their owners.

    With stacked ranks, every array has a leading axis of N.

    Args:
      y: [R, H].
      topk_weights: [T, K] float32, or None for a sum without weights.
      topk_idx: [T, K] int32.
      rows: [N, T, K] int32, a result of the dispatch: the row of each choice or, with `by_rank`,
        its local expert; less than 0 where the choice is of another rank's expert.
      fabric: how ranks reach each other.
      channels: how warpgroups of ranks reach each other.
      plan: how rows are spread over blocks and warpgroups; a plan that `fits`, of these sizes.
      by_rank: whether y is rank-major, with one row for each (owner, token), at owner · T + token.

    Returns:
      The result of `combine.combine` without a wire_dtype, bit for bit.
    """
    lead, num_ranks, flat = rows.shape[:-3], plan.num_ranks, plan.num_tokens * plan.top_k
    of_rows = Rows(fabric, channels, plan, "combine")
    kernel = _Combine(topk_weights is not None, Gather(of_rows, y.shape[-2], by_rank))
    operands = [y, topk_idx.reshape(*lead, flat), rows.reshape(*lead, num_ranks, flat)]
    if topk_weights is not None:
        operands.append(topk_weights.reshape(*lead, flat))
    (out,) = fb.kernel(
        fabric,
        kernel,
        name="ep_combine_ll",
        num_blocks=plan.num_blocks,
        num_warpgroups=plan.warpgroups + 1,
        out_type=[jax.ShapeDtypeStruct((plan.num_tokens, plan.hidden), y.dtype)],
        scratch_types=kernel.scratch_types(),
    )(*operands)
    return out


@dataclasses.dataclass(frozen=True)
class _Combine:
    """The kernel of `combine`: its static arguments, and the warpgroups' code."""

    weighted: bool
    gather: Gather

    @property
    def fabric(self) -> fb.Fabric:
        return self.gather.fabric

    @property
    def rows(self) -> Rows:
        return self.gather.rows

    def scratch_types(self) -> dict[str, Any]:
        types = self.gather.scratch_types()
        if self.weighted:
            pairs = self.gather.num_pairs
            types["weights"] = plgpu.SMEM((pairs, self.gather.top_k), jnp.float32)
        return types

    def __call__(self, *refs: Any, stages: Any, full: Any, empty: Any, **scratch: Any) -> None:
        y, topk_idx, rows, *rest = refs
        weights_ref = rest.pop(0) if self.weighted else None
        (out,) = rest
        ring = Ring(stages, full, empty)
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.rows.plan.warpgroups

        @pl.when(warpgroup < warpgroups)
        def _summers():
            summer = dataclasses.replace(self, gather=self.gather.for_warpgroup(warpgroup))
            summer._sum(topk_idx, weights_ref, out, ring, **scratch)

        @pl.when(warpgroup == warpgroups)
        def _scout():
            hello(self.fabric.signal, release=False)
            self.gather.scout(y, rows, ring, **scratch)
            hello(self.fabric.wait, "combine")

    def _sum(self, topk_idx, weights_ref, out, ring, *, num_rows, choices, listed, **scratch):
        fabric, of_rows, top_k = self.fabric, self.rows, self.gather.top_k
        fabric.delay_point(0)
        endpoint = of_rows.open()
        if self.weighted:
            of_rows.send_values(weights_ref)
        ranks = [
            of_rows.ranks_of([fabric.mine(topk_idx)[token * top_k + k] for k in range(top_k)])
            for token, _ in of_rows.tokens()
        ]
        if self.weighted:
            self.gather.read_weights(**scratch)
        plgpu.barrier_wait(listed)
        fabric.barrier()
        used, num_turns, mine = jnp.int32(0), self.gather.num_turns(num_rows), []
        for pair, i, _, _, _ in self.gather.pairs():
            count = num_rows[pair]
            add = functools.partial(
                self._add,
                ring=ring, pair=pair, begun=used, num_turns=num_turns, choices=choices, **scratch,
            )  # fmt: skip
            zeros = [of_rows.zeros() for _ in of_rows.tiles()]
            sums = lax.fori_loop(0, jnp.maximum(count, 0), add, zeros)
            used = used + jnp.maximum(count, 0)
            sums = [total.astype(of_rows.plan.dtype) for total in sums]
            peer = pair % fabric.num_ranks
            if peer < len(endpoint.peers):
                of_rows.send(endpoint, peer, i, sums, count >= 0, exact=False)
            else:
                mine.append(sums)
        fabric.delay_point(1)
        for i, (token, exists) in enumerate(of_rows.tokens()):
            self._receive(endpoint, i, token, exists, ranks[i], mine[i], out)
        fabric.delay_point(2)
        endpoint.close()

    def _add(self, r, sums, *, ring, pair, begun, num_turns, choices, weights=None, **_):
        """Adds the r-th row of a pair, times its weight, to the sums."""
        of_rows = self.rows
        stage = ring.stage(begun + r)
        plgpu.barrier_wait(ring.full.at[stage])
        added = []
        for (where, _own), total in zip(of_rows.tiles(), sums, strict=True):
            row = fb.load(self.fabric, ring.rows.at[stage, where], of_rows.plan.vector)
            row = row.astype(jnp.float32)
            if self.weighted:
                weight = weights[pair, choices[pair, r]]
                row = vectors.times(self.fabric, row, weight, of_rows.plan.vector)
            added.append(total + row)
        self.gather.free(ring, begun + r, num_turns)
        return added

    def _receive(self, endpoint, i, token, exists, ranks, mine, out):
        """Adds the sums of this rank's i-th token in the block, and stores the result."""
        fabric, of_rows = self.fabric, self.rows
        comes = [is_among(ranks, peer) & exists for peer in endpoint.peers]
        sent = [is_among(ranks, source) for source in range(fabric.num_ranks)]
        received = of_rows.receive(endpoint, i, comes, exact=False)
        for j, (own, arrived) in enumerate(zip(mine, received, strict=True)):
            parts = vectors.rotate(fabric, [own, *arrived], endpoint.rank, of_rows.plan.vector)
            total = of_rows.zeros()  # so that no sum is -0.0
            for part, was_sent in zip(parts, sent, strict=True):
                part = part.astype(jnp.float32)
                total = total + jnp.where(was_sent, part, jnp.zeros_like(part))
            of_rows.store(fabric.mine(out), token, j, total.astype(of_rows.plan.dtype), exists)
