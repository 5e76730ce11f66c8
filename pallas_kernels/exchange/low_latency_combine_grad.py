"""The gradient of a weighted combine over the low-latency protocol, for few tokens.

The owner of a token is the rank whose token it is. Block b of every rank handles the same tokens of
every owner, with five warpgroups:

  scout         finds the rows of each (token, owner) and fetches them into a ring in shared memory;
                then writes zeros to rows of dy that have no token;
  weighers (4)  share each row: send the cotangents of this rank's tokens to the ranks that have
                rows of them, and receive those of the others' tokens. They multiply a cotangent
                with each of its rows and with its weight, store the one to dy, and return the sums
                of the other to the owner, as values.

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

from pallas_kernels.exchange.expert_rows import ExpertRows, ExpertScratch
from pallas_kernels.exchange.low_latency import Gather, GatherScratch, Rows, meet
from pallas_kernels.exchange.plan import LowLatencyPlan, pad_last
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import LANES, align_up
from pallas_kernels.fabric.low_latency import Channels
from pallas_kernels.fabric.memory_map import MAX_VALUES

_RETURNED = MAX_VALUES // 2  # the index of the first value that goes back to the owners


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
    """Computes the cotangents of a weighted combine's rows y and of its weights.

    Arguments and results are those of `combine_grad.combine_grad`, with two differences: `channels`
    connects the warpgroups of the ranks, and the plan must satisfy `fits`. dweights is summed in
    another order, which is the same on every run.
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


class _Refs(NamedTuple):
    """The arrays in global memory."""

    g: Any  # [T, H]
    weights: Any  # [T·K] float32
    y: Any  # [R, H]
    topk_idx: Any  # [T·K] int32
    rows: Any  # [N, T·K] int32
    counts: Any  # [N, E] int32
    dy: Any  # [R, H]
    dweights: Any  # [T·K] float32


class _Scratch(NamedTuple):
    """The shared memory of the kernel."""

    gather: GatherScratch
    experts: ExpertScratch
    weights: Any  # [pairs, K] float32: the weights of each pair's choices
    sums: Any  # float32: the inner products of each pair, [pairs · K], as one partial sum per warp
    totals: Any  # [pairs · K] float32: the totals of `sums`
    returned: Any  # [tokens of a block, N, K] float32: inner products that ranks return


@dataclasses.dataclass(frozen=True)
class _CombineGrad:
    """The kernel of `combine_grad`.

    Attributes:
      gather: the rows of y, and how they are fetched.
      experts: where each expert's rows are.
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
        """Partial sums of an inner product: one of each warp of the weighers."""
        return self.rows.plan.warpgroups * vectors.SUMS_OF_WARPGROUP

    def scratch(self) -> _Scratch:
        """Returns the types of the scratch."""
        pairs, top_k, ranks = self.gather.num_pairs, self.gather.top_k, self.fabric.num_ranks
        sums = align_up(pairs * top_k * self.parts_of_sum, LANES)
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
        refs, fabric = _Refs(*arrays), self.fabric
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.rows.plan.warpgroups

        @pl.when(warpgroup < warpgroups)
        def weigh() -> None:
            weigher = dataclasses.replace(self, gather=self.gather.for_warpgroup(warpgroup))
            weigher._weigh(refs, scratch)

        @pl.when(warpgroup == warpgroups)
        def scout() -> None:
            self.experts.fetch_counts(refs.counts, scratch.experts)
            for start in range(0, scratch.sums.shape[0], LANES):
                scratch.sums[pl.ds(start, LANES)] = jnp.zeros((LANES,), jnp.float32)
            self.gather.scout(refs.y, refs.rows, scratch.gather)
            fabric.delay_point(3)
            self.experts.find_groups(scratch.experts)
            self.experts.fill([refs.dy], scratch.experts)

    def _weigh(self, refs: _Refs, scratch: _Scratch) -> None:
        """Multiplies this warpgroup's tiles of every pair's cotangent with the pair's rows."""
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
            if source == 1:  # this rank's own token comes first
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
        """Multiplies a cotangent with the r-th row of a pair, and with its weight.

        `tiles` are the cotangent's tiles, in float32. Earlier pairs have `begun` rows, and all
        pairs together `num_turns`.
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

    def _return(self, refs: _Refs, scratch: _Scratch) -> None:
        """Sends the inner products to the owners, and writes those that other ranks return."""
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

    def _write_returned(self, i: int, token: jax.Array, refs: _Refs, scratch: _Scratch) -> None:
        """Receives the inner products of this rank's i-th token, and writes its dweights."""
        fabric, returned, start = self.fabric, scratch.returned, token * self.gather.top_k
        for rank in range(fabric.num_ranks):
            values = returned.at[i, rank]
            fabric.read_values(rank, _RETURNED + start, values, self.rows.what)
        fabric.barrier()
        experts = [fabric.mine(refs.topk_idx)[start + k] for k in range(self.gather.top_k)]
        for k, rank_of_choice in enumerate(self.rows.ranks_of(experts)):
            value = returned[i, jnp.maximum(rank_of_choice, 0), k]
            fabric.mine(refs.dweights)[start + k] = jnp.where(rank_of_choice >= 0, value, 0.0)
