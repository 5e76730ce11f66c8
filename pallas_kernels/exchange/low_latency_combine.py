"""Combine over the low-latency protocol, for few tokens.

The owner of a token is the rank that dispatched it. Block b of every rank handles the same tokens
of every owner, with five warpgroups:

  scout        finds the rows of each (token, owner) in y, the expert outputs, and copies them into
               a ring in shared memory;
  summers (4)  each handle some tiles of every row. They multiply the tiles of a token's rows by
               their weights, sum them in float32, round the sum once, and send it to the owner.
               Then they receive the sums of this rank's own tokens, and add them in rank order.

    rank d                                        rank s, owner of token t
    y[rows of (t, s)] --> ring --> sum == link => tile buffers --> sum in rank order --> out[t]
    weights of t <---------------------- link --- topk_weights[t]

The routing weights of a token are in the owner's memory. Block 0 of every rank sends its rank's
weights to all ranks.
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
    """Sums the weighted expert outputs of each token, and returns them to the token's rank.

    T is the number of this rank's tokens, H the hidden size, K the number of choices of a token,
    and N the number of ranks. If all ranks are simulated on one device (`fabric.stacked`), every
    array has a leading axis of N.

    Args:
      y: [R, H], the expert outputs in the R rows of the receive buffer.
      topk_weights: [T, K] float32, or None for a sum without weights.
      topk_idx: [T, K] int32, the experts that this rank's tokens choose.
      rows: [N, T, K] int32, a result of the dispatch. For each choice of every source rank's
        tokens, it has the row of y with the expert output. With `by_rank`, it has the index of the
        expert among this rank's experts instead. Both are negative if the expert is another rank's.
      fabric: how ranks reach each other.
      channels: the symmetric memory through which the warpgroups of ranks send tiles to each other.
      plan: how rows are distributed over blocks and warpgroups; a plan for the sizes of this call,
        for which `plan.fits()` is true.
      by_rank: whether y is rank-major: it then has one row for each token of each rank, in which
        the token's expert outputs are summed already. The row of token t of rank r is r · T + t.

    Returns:
      The sum for each of this rank's tokens, [T, H] of y's dtype. It has the same bits as the
      result of `combine.combine` for sums that are sent unquantized.
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
    """The shared memory of the kernel."""

    gather: GatherScratch
    # [pairs, K] float32: the routing weights of each token of the block; a pair is a token and its
    # owner, the rank that dispatched it. None if rows are summed without weights.
    weights: Any


@dataclasses.dataclass(frozen=True)
class _Combine:
    """The kernel of `combine`.

    Attributes:
      weighted: whether rows are multiplied by routing weights.
      gather: copies the expert outputs of the block's tokens, rows of y, to shared memory.
    """

    weighted: bool
    gather: Gather

    @property
    def fabric(self) -> fb.Fabric:
        return self.gather.fabric

    @property
    def rows(self) -> Rows:
        return self.gather.rows

    def scratch(self) -> _Scratch:
        """Returns the types of the kernel's shared memory."""
        weights = plgpu.SMEM((self.gather.num_pairs, self.gather.top_k), jnp.float32)
        return _Scratch(self.gather.scratch(), weights if self.weighted else None)

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
        """Runs a summer warpgroup: sends sums to the tokens' ranks, then adds the sums it receives.

        The warpgroup handles its own tiles of every row. `topk_idx` [T·K], `weights` [T·K] (or
        None) and `out` [T, H] are the kernel's operands and result, in global memory.
        """
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
        used, num_turns, mine = jnp.int32(0), self.gather.num_turns(scratch.gather), []
        for pair, i, _, _, _ in self.gather.pairs():
            count = scratch.gather.num_rows[pair]
            add = functools.partial(
                self._add, pair=pair, begun=used, num_turns=num_turns, scratch=scratch
            )
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
        """Adds the r-th row of a (token, owner) pair, times its weight, to this warpgroup's sums.

        The owner of a token is the rank that dispatched it.

        Args:
          r: the index of the row in the pair's list of rows of y, the expert outputs.
          sums: the sum so far for each tile that the warpgroup handles, in float32.
          pair: the index of the pair in the block.
          begun: the number of rows of y of all earlier pairs. The rows of all pairs pass through
            the ring one after the other, so this row is number `begun` + r.
          num_turns: the number of rows of y that pass through the block's ring.
          scratch: the kernel's shared memory.

        Returns:
          The new sums.
        """
        of_rows, ring = self.rows, scratch.gather.ring
        stage = ring.stage(begun + r)
        plgpu.barrier_wait(ring.full.at[stage])
        added = []
        for (where, _own), total in zip(of_rows.tiles(), sums, strict=True):
            row = fb.load(self.fabric, ring.rows.at[stage, where], of_rows.plan.vector)
            row = row.astype(jnp.float32)
            if self.weighted:
                weight = scratch.weights[pair, scratch.gather.choices[pair, r]]
                row = vectors.times(self.fabric, row, weight, of_rows.plan.vector)
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
        mine: Sequence[jax.Array],
        out: Any,
    ) -> None:
        """Waits for the sums of this rank's token, adds them in rank order, and stores the result.

        Args:
          endpoint: this warpgroup's connection to its peers by the low-latency protocol.
          i: the token's index in the block.
          token: the token's index in this rank, a row of `out`.
          exists: whether the rank has such a token; else nothing is received or stored.
          ranks: for each of the token's K choices, the rank of the chosen expert.
          mine: this warpgroup's tiles of the sum that this rank itself computed for the token.
          out: [T, H] in global memory, the result.
        """
        fabric, of_rows = self.fabric, self.rows
        comes = [is_among(ranks, peer) & exists for peer in endpoint.peers]
        sent = [is_among(ranks, source) for source in range(fabric.num_ranks)]
        received = of_rows.receive(endpoint, i, comes, exact=False)
        for j, (own, arrived) in enumerate(zip(mine, received, strict=True)):
            parts = vectors.rotate(fabric, [own, *arrived], endpoint.rank, of_rows.plan.vector)
            # The total starts from 0.0, so that a total of zero is never -0.0.
            total = of_rows.zeros()
            for part, was_sent in zip(parts, sent, strict=True):
                part = part.astype(jnp.float32)
                total = total + jnp.where(was_sent, part, jnp.zeros_like(part))
            of_rows.store(fabric.mine(out), token, j, total.astype(of_rows.plan.dtype), exists)
