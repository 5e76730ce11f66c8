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

from pallas_kernels.exchange.low_latency import RowTransfer, hello, is_among, meet, wait_for_hellos
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
    transfer = RowTransfer(fabric, channels, plan, "combine")
    kernel = _Combine(transfer, y.shape[-2], by_rank, weighted=topk_weights is not None)
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


class _Pair(NamedTuple):
    """A token that the block handles, and its owner."""

    number: int  # i · N + j for the block's i-th token and its j-th owner
    i: int
    token: jax.Array
    exists: jax.Array  # see `RowTransfer.tokens`
    owner: jax.Array


@dataclasses.dataclass(frozen=True)
class _Combine:
    """The kernel of `combine`; its topk_idx and weights are [T·K], and its rows [N, T·K]."""

    transfer: RowTransfer
    capacity: int  # the number of rows of y
    by_rank: bool  # whether y is rank-major, with one row for each pair
    weighted: bool

    @property
    def fabric(self) -> fb.Fabric:
        return self.transfer.fabric

    @property
    def top_k(self) -> int:
        return self.transfer.plan.top_k

    @property
    def num_pairs(self) -> int:
        return self.transfer.plan.tokens_per_block * self.fabric.num_ranks

    @property
    def rows_of_pair(self) -> int:
        return 1 if self.by_rank else self.top_k

    @property
    def num_stages(self) -> int:
        return min(self.num_pairs * self.rows_of_pair, self.transfer.plan.num_stages)

    @property
    def all_fit(self) -> bool:
        """Whether the ring has a stage for every row of y that a block may need."""
        return self.num_stages == self.num_pairs * self.rows_of_pair

    def scratch(self) -> fb.Scratch:
        plan, stages = self.transfer.plan, self.num_stages
        list_shape = self.num_pairs, self.rows_of_pair
        weights = plgpu.SMEM((self.num_pairs, self.top_k), jnp.float32)
        return fb.Scratch(
            # The ring of rows of y: row number n of the block goes to stage n % num_stages.
            stages=plgpu.SMEM((stages, plan.hidden), plan.dtype),
            # The token's rows of y on this rank, and which of the token's K choices has each.
            places=plgpu.SMEM(list_shape, jnp.int32),
            choices=plgpu.SMEM(list_shape, jnp.int32),
            # How many rows a pair has; NOWHERE if the token chose no expert of this rank.
            num_rows=plgpu.SMEM((self.num_pairs,), jnp.int32),
            # A row has arrived; all summers have read it. A warpgroup must wait for every
            # completion of a barrier, so summers arrive at `empty` only if the stage is refilled.
            full=plgpu.Barrier(num_barriers=(stages,)),
            empty=plgpu.Barrier(num_barriers=(stages,), num_arrivals=plan.warpgroups),
            # The scout has filled `places`, `choices` and `num_rows`.
            listed=plgpu.Barrier(),
            # All warpgroups of the block have stored their part of `weights`.
            together=plgpu.Barrier(num_arrivals=plan.warpgroups),
            # The routing weights of the block's pairs.
            weights=weights if self.weighted else None,
        )

    def __call__(self, *refs: Any, scratch: fb.Scratch) -> None:
        y, topk_idx, rows, *rest = refs
        weights = rest.pop(0) if self.weighted else None
        (out,) = rest
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.transfer.plan.warpgroups

        @pl.when(warpgroup < warpgroups)
        def sum_rows() -> None:
            summer = dataclasses.replace(self, transfer=self.transfer.for_warpgroup(warpgroup))
            summer._sum(topk_idx, weights, out, scratch)

        @pl.when(warpgroup == warpgroups)
        def scout() -> None:
            hello(self.fabric)
            self._scout(y, rows, scratch)
            wait_for_hellos(self.fabric, "combine")

    def _pairs(self) -> list[_Pair]:
        """Returns the pairs of the block, in the order in which their rows are in the ring."""
        fabric = self.fabric
        num_ranks = jnp.int32(fabric.num_ranks)
        # The peers in the order of `Endpoint.peers`, then this rank.
        owners = [lax.rem(fabric.rank() + 1 + j, num_ranks) for j in range(fabric.num_ranks)]
        return [
            _Pair(i * fabric.num_ranks + j, i, token, exists, owner)
            for i, (token, exists) in enumerate(self.transfer.tokens())
            for j, owner in enumerate(owners)
        ]

    def _scout(self, y: Any, rows: Any, scratch: fb.Scratch) -> None:
        """Runs the scout warpgroup: lists each pair's rows of y, and copies them into the ring."""
        fabric, top_k = self.fabric, self.top_k
        rows_of_pairs = [
            [fabric.mine(rows)[pair.owner, pair.token * top_k + choice] for choice in range(top_k)]
            for pair in self._pairs()
        ]
        used = jnp.int32(0)  # the number of the block's next row
        for pair, places in zip(self._pairs(), rows_of_pairs, strict=True):
            used = self._list_pair(pair, places, used, y, scratch)
        fabric.barrier()
        plgpu.barrier_arrive(scratch.listed)
        if not self.all_fit:
            self._fetch_more(y, scratch)

    def _list_pair(
        self, pair: _Pair, places: Sequence[jax.Array], used: jax.Array, y: Any, scratch: fb.Scratch
    ) -> jax.Array:
        """Lists a pair's rows, and fetches those for which stages are free; returns `used`."""
        # `places` has the row of y, or NOWHERE, of each choice. `used` counts the block's rows.
        sent = fb.any_row(places) & pair.exists
        if self.by_rank:
            place = pair.owner * self.transfer.plan.num_tokens + pair.token
            places = [jnp.where(sent, place, fb.NOWHERE)]
        count = jnp.int32(0)
        for choice, place in enumerate(places):
            kept = pair.exists & (place >= 0) & (place < self.capacity)
            # If the row is not kept, `count` stays, and the next row overwrites the entry.
            scratch.places[pair.number, count] = place
            scratch.choices[pair.number, count] = jnp.int32(choice)

            @pl.when(kept & (used < self.num_stages))
            def fetch(place: Any = place, used: Any = used) -> None:
                self._fetch(used, place, y, scratch)

            count = count + kept.astype(jnp.int32)
            used = used + kept.astype(jnp.int32)
        scratch.num_rows[pair.number] = jnp.where(sent, count, fb.NOWHERE)
        return used

    def _fetch(self, stage: jax.Array, place: jax.Array, y: Any, scratch: fb.Scratch) -> None:
        row = self.fabric.mine(y).at[place]
        into = scratch.stages.at[stage, pl.ds(0, row.shape[0])]
        fb.fetch(row, into, scratch.full.at[stage])

    def _fetch_more(self, y: Any, scratch: fb.Scratch) -> None:
        """Copies into the ring those rows of y for which it had no free stage before."""

        def fetch(r: jax.Array, used: jax.Array, pair: _Pair) -> jax.Array:
            """Fetches the pair's r-th row, number `used`, unless `_scout` has; returns used + 1."""

            @pl.when(used >= self.num_stages)
            def fetch_to_used_stage() -> None:
                stage = self._stage(used)
                plgpu.barrier_wait(scratch.empty.at[stage])
                self._fetch(stage, scratch.places[pair.number, r], y, scratch)

            return used + 1

        used = jnp.int32(0)  # the number of the block's next row
        for pair in self._pairs():
            fetch_row = functools.partial(fetch, pair=pair)
            used = lax.fori_loop(0, scratch.num_rows[pair.number], fetch_row, used)

    def _stage(self, number: jax.Array) -> jax.Array:
        return lax.rem(number, jnp.int32(self.num_stages))

    def _sum(self, topk_idx: Any, weights: Any, out: Any, scratch: fb.Scratch) -> None:
        """Runs a summer: sends sums to the tokens' ranks, then adds the sums it receives."""
        fabric, transfer = self.fabric, self.transfer
        fabric.delay_point(0)
        endpoint = transfer.open()
        if self.weighted:
            transfer.send_weights(weights)
        ranks = [transfer.ranks_of(topk_idx, token) for token, _ in transfer.tokens()]
        if self.weighted:
            self._read_weights(scratch)
        plgpu.barrier_wait(scratch.listed)
        fabric.barrier()
        sums_of_own_tokens = self._send_sums(endpoint, scratch)
        fabric.delay_point(1)
        for i, (token, exists) in enumerate(transfer.tokens()):
            self._receive(endpoint, i, token, exists, ranks[i], sums_of_own_tokens[i], out)
        fabric.delay_point(2)
        endpoint.close()

    def _send_sums(self, endpoint: Endpoint, scratch: fb.Scratch) -> list[list[jax.Array]]:
        """Sums the rows of each pair, and sends the sums; returns those of this rank's tokens."""
        transfer = self.transfer
        counts = [jnp.maximum(scratch.num_rows[number], 0) for number in range(self.num_pairs)]
        rows_of_block = functools.reduce(jnp.add, counts)
        used = jnp.int32(0)  # the number of the block's next row
        sums_of_own_tokens = []
        for pair in self._pairs():
            count = scratch.num_rows[pair.number]
            sums = self._sum_pair(pair, jnp.maximum(count, 0), used, rows_of_block, scratch)
            used = used + jnp.maximum(count, 0)
            sums = [total.astype(transfer.plan.dtype) for total in sums]
            peer_index = pair.number % self.fabric.num_ranks  # of the owner; this rank is last
            if peer_index < len(endpoint.peers):
                transfer.send(endpoint, peer_index, pair.i, sums, count >= 0, exact=False)
            else:
                sums_of_own_tokens.append(sums)
        return sums_of_own_tokens

    def _read_weights(self, scratch: fb.Scratch) -> None:
        # Each warpgroup receives the weights of some pairs; `meet` waits for other warpgroups.
        for pair in self._pairs():

            @pl.when(self.transfer.warpgroup == pair.number % self.transfer.plan.warpgroups)
            def read(pair: _Pair = pair) -> None:
                start, weights = pair.token * self.top_k, scratch.weights.at[pair.number]
                self.fabric.read_values(pair.owner, start, weights, self.transfer.what)

        meet(self.fabric, scratch.together)

    def _sum_pair(
        self, pair: _Pair, count: jax.Array, used: jax.Array, rows_of_block: Any, scratch: Any
    ) -> list[jax.Array]:
        """Sums a pair's `count` rows, times their weights; returns tiles in float32."""
        # Earlier pairs have `used` rows, and all pairs of the block have `rows_of_block`.
        transfer = self.transfer

        def add(r: jax.Array, sums: Sequence[jax.Array]) -> list[jax.Array]:
            """Adds row r of the pair to `sums`, this warpgroup's tiles."""
            stage = self._stage(used + r)
            plgpu.barrier_wait(scratch.full.at[stage])
            added = []
            for (columns, _), total in zip(transfer.tiles(), sums, strict=True):
                row = fb.load(scratch.stages.at[stage, columns], transfer.plan.vector)
                row = row.astype(jnp.float32)
                if self.weighted:
                    weight = scratch.weights[pair.number, scratch.choices[pair.number, r]]
                    row = vectors.times(row, weight, transfer.plan.vector)
                added.append(total + row)
            if not self.all_fit:

                @pl.when(used + r + self.num_stages < rows_of_block)
                def free_stage() -> None:
                    # This fence orders the next copy to the stage after this warpgroup's reads.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(scratch.empty.at[stage])

            return added

        return lax.fori_loop(0, count, add, [transfer.zeros() for _ in transfer.tiles()])

    def _receive(
        self, endpoint: Endpoint, i: int, token: Any, exists: Any, ranks: Any, sums: Any, out: Any
    ) -> None:
        """Waits for peers' sums of this rank's token, adds them to `sums`, and stores the total."""
        # `token` is the block's i-th, and `ranks` has the rank of each of its experts.
        fabric, transfer = self.fabric, self.transfer
        peer_sends = [is_among(ranks, peer) & exists for peer in endpoint.peers]
        sent = [is_among(ranks, source) for source in range(fabric.num_ranks)]
        received = transfer.receive(endpoint, i, peer_sends, exact=False)
        for j, (own_sum, arrived) in enumerate(zip(sums, received, strict=True)):
            # Puts the sums, which begin with this rank's, into rank order.
            parts = [own_sum, *arrived]
            parts = vectors.rotate(parts, endpoint.rank, transfer.plan.vector)
            # The total starts from 0.0, so that a total of zero is never -0.0.
            total = transfer.zeros()
            for part, was_sent in zip(parts, sent, strict=True):
                part = part.astype(jnp.float32)
                total = total + jnp.where(was_sent, part, jnp.zeros_like(part))
            transfer.store(fabric.mine(out), token, j, total.astype(transfer.plan.dtype), exists)
