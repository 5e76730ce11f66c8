"""The gradient of a weighted combine over the low-latency protocol, for few tokens.

The owner of a token is the rank that dispatched it. `g` has the cotangents of the owner's results,
one for each token, and `y` the expert outputs. `dy` and `dweights` are the gradients of `y` and of
the routing weights. Block b of every rank handles the same tokens of every owner, with five
warpgroups:

  scout         finds the rows of y of each (token, owner), and copies them into a ring in shared
                memory; then writes zeros to the rows of dy that have no token;
  weighers (4)  each handle some tiles of every row. They send the cotangents of this rank's tokens
                to the ranks that have rows of the tokens, and receive the cotangents of other
                ranks' tokens. They write the cotangent times the weight to dy, and send the inner
                product of cotangent and row of y to the owner, as a float32 value.

    owner of the token                      this rank
    g[token] == tiles, link ==============> registers <-- ring <-- y[row]
    topk_weights[token] -- values, link --> registers --> dy[row] = weight * g
    dweights[token] <------ values, link -------------- sum of g * y[row]

Block 0 of every rank sends the rank's weights to all ranks.
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

from pallas_kernels.exchange.combine_grad import Refs
from pallas_kernels.exchange.expert_rows import ExpertRows, ExpertScratch
from pallas_kernels.exchange.low_latency import Gather, GatherScratch, Rows, meet
from pallas_kernels.exchange.plan import LowLatencyPlan, pad_last
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import WARPGROUP, align_up
from pallas_kernels.fabric.low_latency import Channels
from pallas_kernels.fabric.memory_map import MAX_VALUES

# The values that a rank sends by `send_values` have indices below MAX_VALUES. Routing weights have
# indices in the first half. The inner products, which go back to the tokens' ranks, have indices
# from _RETURNED on.
_RETURNED = MAX_VALUES // 2


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    topk_idx: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    fabric: fb.Fabric,
    channels: Channels,
    plan: LowLatencyPlan,
    expert_alignment: int,
    fair: bool = False,
    zero_unused: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Computes the cotangents of a weighted combine's expert outputs y and of its weights.

    Takes the arguments of `combine_grad.combine_grad` without `into`. It also takes `channels`, the
    symmetric memory through which the warpgroups of ranks send tiles to each other. `plan` is a
    plan for the sizes of this call, for which `plan.fits()` is true. Returns dy and dweights as
    `combine_grad.combine_grad` does, but sums the columns of an inner product in a different order,
    which is the same on every run.
    """
    lead, num_ranks, flat = rows.shape[:-3], plan.num_ranks, plan.num_tokens * plan.top_k
    capacity = y.shape[-2]
    of_rows = Rows(fabric, channels, plan, "the gradient of combine")
    of_experts = ExpertRows(
        fabric, plan.num_blocks, plan.num_experts, capacity, expert_alignment,
        parts=[(plan.hidden, plan.dtype)], fair=fair, zero_unused=zero_unused,
    )  # fmt: skip
    kernel = _CombineGrad(Gather(of_rows, capacity, own_first=True), of_experts)
    dy, dweights = fb.kernel(
        fabric,
        kernel,
        name="ep_combine_grad_ll",
        num_blocks=plan.num_blocks,
        num_warpgroups=plan.warpgroups + 1,
        out_type=[
            jax.ShapeDtypeStruct((capacity, plan.hidden), plan.dtype),
            jax.ShapeDtypeStruct((flat,), jnp.float32),
        ],
        scratch_types=dict(scratch=kernel.scratch()),
    )(
        g,
        topk_weights.reshape(*lead, flat),
        y,
        topk_idx.reshape(*lead, flat),
        rows.reshape(*lead, num_ranks, flat),
        pad_last(counts, of_experts.count_width - counts.shape[-1]),
    )
    return dy, dweights.reshape(topk_idx.shape)


class _Scratch(NamedTuple):
    """The shared memory of the kernel.

    A pair is a token and its owner, the rank that dispatched it. Each of a token's K choices has an
    inner product: that of the token's cotangent and the choice's row of y, the expert outputs.
    """

    gather: GatherScratch
    experts: ExpertScratch
    # [pairs, K] float32: for each (token, owner) pair, the token's routing weights.
    weights: Any
    # [pairs · K · parts_of_sum] float32 with padding: the partial sums of each inner product, one
    # from each warp of the weigher warpgroups.
    sums: Any
    # [pairs · K] float32: the inner products, each the total of its partial sums in `sums`.
    totals: Any
    # [tokens of a block, N, K] float32: for each of this rank's tokens, the inner products that
    # each of the N ranks sends back.
    returned: Any


@dataclasses.dataclass(frozen=True)
class _CombineGrad:
    """The kernel of `combine_grad`.

    Attributes:
      gather: copies the expert outputs of the block's tokens, rows of y, to shared memory.
      experts: finds where each expert's rows are, and zeroes unused rows of dy.
    """

    gather: Gather
    experts: ExpertRows

    @property
    def fabric(self) -> fb.Fabric:
        return self.gather.fabric

    @property
    def rows(self) -> Rows:
        return self.gather.rows

    @property
    def parts_of_sum(self) -> int:
        """The number of partial sums of an inner product: one from each warp of the weighers."""
        return self.rows.plan.warpgroups * vectors.SUMS_OF_WARPGROUP

    def scratch(self) -> _Scratch:
        """Returns the types of the kernel's shared memory."""
        pairs, top_k, ranks = self.gather.num_pairs, self.gather.top_k, self.fabric.num_ranks
        sums = align_up(pairs * top_k * self.parts_of_sum, WARPGROUP)
        returned = (self.rows.plan.tokens_per_block, ranks, top_k)
        return _Scratch(
            self.gather.scratch(),
            self.experts.scratch(),
            weights=plgpu.SMEM((pairs, top_k), jnp.float32),
            sums=plgpu.SMEM((sums,), jnp.float32),
            totals=plgpu.SMEM((pairs * top_k,), jnp.float32),
            returned=plgpu.SMEM(returned, jnp.float32),
        )

    def __call__(self, *arrays: Any, scratch: _Scratch) -> None:
        refs, fabric = Refs(*arrays), self.fabric
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.rows.plan.warpgroups

        @pl.when(warpgroup < warpgroups)
        def weigh() -> None:
            weigher = dataclasses.replace(self, gather=self.gather.for_warpgroup(warpgroup))
            weigher._weigh(refs, scratch)

        @pl.when(warpgroup == warpgroups)
        def scout() -> None:
            self.experts.fetch_counts(refs.counts, scratch.experts)
            for start in range(0, scratch.sums.shape[0], WARPGROUP):
                scratch.sums[pl.ds(start, WARPGROUP)] = jnp.zeros((WARPGROUP,), jnp.float32)
            self.gather.scout(refs.y, refs.rows, scratch.gather)
            fabric.delay_point(3)
            self.experts.find_groups(scratch.experts)
            self.experts.fill([refs.dy], scratch.experts)

    def _weigh(self, refs: Refs, scratch: _Scratch) -> None:
        """Runs a weigher warpgroup: multiplies each token's cotangent with the token's rows of y.

        The warpgroup handles its own tiles of every row. It sends the cotangents of this rank's
        tokens, and receives those of other ranks' tokens that have rows of y here. It writes the
        cotangents times the weights to dy, the gradient of y.
        """
        fabric, of_rows = self.fabric, self.rows
        fabric.delay_point(0)
        endpoint = of_rows.open()
        of_rows.send_values(refs.weights)
        cotangents = of_rows.send_tokens(endpoint, refs.g, refs.topk_idx, exact=False)
        fabric.delay_point(1)
        self.gather.read_weights(scratch.weights, scratch.gather)
        plgpu.barrier_wait(scratch.gather.listed)
        fabric.barrier()
        begun, num_turns = jnp.int32(0), self.gather.num_turns(scratch.gather)
        arrived: list[Any] = []
        for pair, i, _, _, _ in self.gather.pairs():
            source = pair % fabric.num_ranks
            # The block has a token of each rank for every token index. `source` counts the ranks: 0
            # is this rank, whose cotangent is in registers already, and 1 is the first peer. At 1,
            # the cotangents of all peers for this token index are received together.
            if source == 1:
                first = pair - source
                comes = [
                    scratch.gather.num_rows[first + j] >= 0 for j in range(1, fabric.num_ranks)
                ]
                arrived = list(of_rows.receive(endpoint, i, comes, exact=False))
            tiles = [of_peers[source - 1] for of_peers in arrived] if source else cotangents[i]
            tiles = [tile.astype(jnp.float32) for tile in tiles]
            multiply = functools.partial(
                self._multiply,
                tiles=tiles,
                pair=pair,
                begun=begun,
                num_turns=num_turns,
                dy=refs.dy,
                scratch=scratch,
            )
            count = jnp.maximum(scratch.gather.num_rows[pair], 0)
            lax.fori_loop(0, count, multiply, None)
            begun = begun + count
        meet(fabric, scratch.gather.together)
        fabric.delay_point(2)

        pl.when(of_rows.warpgroup == 0)(lambda: self._return(refs, scratch))

        endpoint.close()

    def _multiply(
        self,
        r: jax.Array,
        _: None,
        *,
        tiles: Sequence[jax.Array],
        pair: int,
        begun: jax.Array,
        num_turns: jax.Array,
        dy: Any,
        scratch: _Scratch,
    ) -> None:
        """Multiplies a token's cotangent with one of the token's rows of y, and with its weight.

        Writes the weighted cotangent to `dy`, and this warpgroup's part of the inner product to
        `scratch.sums`. A pair is a token and its owner, the rank that dispatched it.

        Args:
          r: the index of the row in its pair's list of rows of y.
          tiles: this warpgroup's tiles of the cotangent, in float32.
          pair: the index of the pair in the block.
          begun: the number of rows of y of all earlier pairs. The rows of all pairs pass through
            the ring one after the other, so this row is number `begun` + r.
          num_turns: the number of rows of y that pass through the block's ring.
          dy: [R, H] in global memory, the gradient of y.
          scratch: the kernel's shared memory.
        """
        fabric, of_rows, ring = self.fabric, self.rows, scratch.gather.ring
        stage = ring.stage(begun + r)
        choice, place = scratch.gather.choices[pair, r], scratch.gather.places[pair, r]
        weight = scratch.weights[pair, choice]
        for i, tile in enumerate(tiles):
            weighted = (tile * weight).astype(of_rows.plan.dtype)
            of_rows.store(fabric.mine(dy), place, i, weighted, jnp.bool_(True))
        plgpu.barrier_wait(ring.full.at[stage])
        total: Any = None
        for i, ((where, _own), tile) in enumerate(zip(of_rows.tiles(), tiles, strict=True)):
            row = fb.load(fabric, ring.rows.at[stage, where], of_rows.plan.vector)
            product = of_rows.counted(i, tile * row.astype(jnp.float32))
            total = product if total is None else total + product
        self.gather.free(begun + r, num_turns, scratch.gather)
        start = (pair * self.gather.top_k + choice) * self.parts_of_sum
        start = start + of_rows.warpgroup * vectors.SUMS_OF_WARPGROUP
        parts = scratch.sums.at[pl.ds(start, vectors.SUMS_OF_WARPGROUP)]
        vectors.partial_sums(fabric, total, parts, of_rows.plan.vector)

    def _return(self, refs: Refs, scratch: _Scratch) -> None:
        """Sends this block's inner products to the tokens' ranks, and writes dweights.

        First adds up the products' partial sums. dweights, the gradient of the weights, has the
        inner products that ranks send back for this rank's tokens. One warpgroup calls this method.
        """
        fabric, top_k, totals = self.fabric, self.gather.top_k, scratch.totals
        vectors.add_each(fabric, scratch.sums, totals, self.parts_of_sum)
        fabric.barrier()
        for pair, _, token, exists, owner in self.gather.pairs():

            @pl.when(exists)
            def send(pair: int = pair, token: Any = token, owner: Any = owner) -> None:
                of_pair = totals.at[pl.ds(pair * top_k, top_k)]
                fabric.send_values(of_pair, _RETURNED + token * top_k, [owner])

        for i, (token, exists) in enumerate(self.rows.tokens()):
            pl.when(exists)(functools.partial(self._write_returned, i, token, refs, scratch))

    def _write_returned(self, i: int, token: jax.Array, refs: Refs, scratch: _Scratch) -> None:
        """Receives the inner products of one of this rank's tokens, and writes its dweights.

        `i` is the token's index in the block and `token` its index in the rank. Every rank sends a
        value for each choice. The value from the rank that holds the choice's expert is written, or
        0 if the choice's id is no expert's.
        """
        fabric, returned, start = self.fabric, scratch.returned, token * self.gather.top_k
        for rank in range(fabric.num_ranks):
            values = returned.at[i, rank]
            fabric.read_values(rank, _RETURNED + start, values, self.rows.what)
        fabric.barrier()
        experts = [fabric.mine(refs.topk_idx)[start + k] for k in range(self.gather.top_k)]
        for k, rank_of_choice in enumerate(self.rows.ranks_of(experts)):
            value = returned[i, jnp.maximum(rank_of_choice, 0), k]
            fabric.mine(refs.dweights)[start + k] = jnp.where(rank_of_choice >= 0, value, 0.0)
