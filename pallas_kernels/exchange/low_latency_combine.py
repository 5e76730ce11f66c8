"""Combine over the low-latency protocol, for few tokens.

The owner of a token is the rank that dispatched it. Block b of every rank handles the same tokens
of every owner, with five warpgroups:

- scout: finds the rows of each (token, owner) in y, the expert outputs, and copies them into a ring
  in shared memory.
- summers (4): each handle some tiles of every row. They multiply the tiles of a token's rows by
  their weights, sum them in float32, round the sum once, and send it to the owner. Then they
  receive the sums of this rank's own tokens, and add them in rank order.

  rank d                                        rank s, owner of token t
  y[rows of (t, s)] --> ring --> sum == link => tile buffers --> sum in rank order --> out[t]
  weights of t <---------------------- link --- topk_weights[t]

Block 0 of every rank sends its rank's routing weights to all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.low_latency import Gather, GatherScratch, Rows, hello, is_among
from pallas_kernels.exchange.plan import LowLatencyPlan
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.low_latency import Channels, Endpoint


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
    """Does what `combine.combine` does without a `wire` format, with the same bits.

    `plan` is one for the sizes of this call, for which `plan.fits()` is true.
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
        scratch_types=dict(scratch=kernel.scratch()),
    )(*operands)
    return out


class _Scratch(NamedTuple):
    gather: GatherScratch
    # [pairs, K] float32: the routing weights of each (token, owner) of the block, or None.
    weights: Any


@dataclasses.dataclass(frozen=True)
class _Combine:
    """The kernel of `combine`."""

    weighted: bool
    gather: Gather

    @property
    def fabric(self) -> fb.Fabric:
        return self.gather.fabric

    @property
    def rows(self) -> Rows:
        return self.gather.rows

    def scratch(self) -> _Scratch:
        weights = plgpu.SMEM((self.gather.num_pairs, self.gather.top_k), jnp.float32)
        return _Scratch(gather=self.gather.scratch(), weights=weights if self.weighted else None)

    def __call__(self, *refs: Any, scratch: _Scratch) -> None:
        y, topk_idx, rows, *rest = refs
        weights = rest.pop(0) if self.weighted else None
        (out,) = rest
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.rows.plan.warpgroups

        @pl.when(warpgroup < warpgroups)
        def sum_rows() -> None:
            summer = dataclasses.replace(self, gather=self.gather.for_warpgroup(warpgroup))
            summer._sum(topk_idx, weights, out, scratch)

        @pl.when(warpgroup == warpgroups)
        def scout() -> None:
            hello(self.fabric.signal, release=False)
            self.gather.scout(y, rows, scratch.gather)
            hello(self.fabric.wait, "combine")

    def _sum(self, topk_idx: Any, weights: Any, out: Any, scratch: _Scratch) -> None:
        """Runs a summer: sends sums to the tokens' ranks, then adds the sums it receives."""
        fabric, of_rows, top_k = self.fabric, self.rows, self.gather.top_k
        fabric.delay_point(0)
        endpoint = of_rows.open()
        if self.weighted:
            of_rows.send_values(weights)
        ranks = [
            of_rows.ranks_of([fabric.mine(topk_idx)[token * top_k + k] for k in range(top_k)])
            for token, _ in of_rows.tokens()
        ]
        if self.weighted:
            self.gather.read_weights(scratch.weights, scratch.gather)
        plgpu.barrier_wait(scratch.gather.listed)
        fabric.barrier()
        used, num_turns = jnp.int32(0), self.gather.num_turns(scratch.gather)
        sums_of_own_tokens = []
        for pair, i, _, _, _ in self.gather.pairs():
            count = scratch.gather.num_rows[pair]
            add = functools.partial(
                self._add, pair=pair, begun=used, num_turns=num_turns, scratch=scratch
            )
            zeros = [of_rows.zeros() for _ in of_rows.tiles()]
            sums = lax.fori_loop(0, jnp.maximum(count, 0), add, zeros)
            used = used + jnp.maximum(count, 0)
            sums = [total.astype(of_rows.plan.dtype) for total in sums]
            # A token's owners are the peers in the order of `endpoint.peers`, then this rank.
            peer = pair % fabric.num_ranks
            if peer < len(endpoint.peers):
                of_rows.send(endpoint, peer, i, sums, count >= 0, exact=False)
            else:
                sums_of_own_tokens.append(sums)
        fabric.delay_point(1)
        for i, (token, exists) in enumerate(of_rows.tokens()):
            self._receive(endpoint, i, token, exists, ranks[i], sums_of_own_tokens[i], out)
        fabric.delay_point(2)
        endpoint.close()

    def _add(
        self,
        r: jax.Array,
        sums: Sequence[jax.Array],
        *,
        pair: int,
        begun: jax.Array,
        num_turns: jax.Array,
        scratch: _Scratch,
    ) -> list[jax.Array]:
        """Adds row r of a pair, number begun + r in the ring, times its weight, to `sums`."""
        of_rows, ring = self.rows, scratch.gather.ring
        stage = ring.stage(begun + r)
        plgpu.barrier_wait(ring.full.at[stage])
        added = []
        for (where, _), total in zip(of_rows.tiles(), sums, strict=True):
            row = fb.load(ring.rows.at[stage, where], of_rows.plan.vector)
            row = row.astype(jnp.float32)
            if self.weighted:
                weight = scratch.weights[pair, scratch.gather.choices[pair, r]]
                row = vectors.times(row, weight, of_rows.plan.vector)
            added.append(total + row)
        self.gather.free(begun + r, num_turns, scratch.gather)
        return added

    def _receive(
        self,
        endpoint: Endpoint,
        i: int,
        token: jax.Array,
        exists: jax.Array,
        ranks: Sequence[jax.Array],
        own_sums: Sequence[jax.Array],
        out: Any,
    ) -> None:
        """Waits for peers' sums of this rank's token, adds them to `own_sums`, stores the total."""
        fabric, of_rows = self.fabric, self.rows
        comes = [is_among(ranks, peer) & exists for peer in endpoint.peers]
        sent = [is_among(ranks, source) for source in range(fabric.num_ranks)]
        received = of_rows.receive(endpoint, i, comes, exact=False)
        for j, (own_sum, arrived) in enumerate(zip(own_sums, received, strict=True)):
            # Puts the sums, which begin with this rank's, into rank order.
            parts = [own_sum, *arrived]
            parts = vectors.rotate(parts, endpoint.rank, of_rows.plan.vector)
            # The total starts from 0.0, so that a total of zero is never -0.0.
            total = of_rows.zeros()
            for part, was_sent in zip(parts, sent, strict=True):
                part = part.astype(jnp.float32)
                total = total + jnp.where(was_sent, part, jnp.zeros_like(part))
            of_rows.store(fabric.mine(out), token, j, total.astype(of_rows.plan.dtype), exists)
