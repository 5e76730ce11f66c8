"""Sends and fetches rows for dispatch and combine kernels over the low-latency protocol.

Block b of every rank handles the same range of tokens of every rank. A row is cut into tiles of 2
KiB, which the block's first four warpgroups share. Each of them sends its tiles of a token's row to
the warpgroup of the same index at each peer that gets the token. It then polls for the tiles of
peers (`fabric.low_latency`). So no rank waits for addresses of buffers, for the end of a copy or
for a signal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import LowLatencyPlan
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.low_latency import Channels, Endpoint

# A warpgroup polls for at most this many tiles together, which it holds in registers.
_TILES_AT_ONCE = 8
# The kind of signal: the rank has begun this call.
_HELLO = 0


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sends and receives rows, a tile at a time, on behalf of one warpgroup of a block."""

    fabric: fb.Fabric
    channels: Channels
    plan: LowLatencyPlan
    what: str  # the kernel's name in the messages of timeouts
    warpgroup: Any = None  # stored, since each query of it would cost the GPU a shuffle instruction

    def for_warpgroup(self, warpgroup: jax.Array) -> Rows:
        return dataclasses.replace(self, warpgroup=warpgroup)

    def open(self) -> Endpoint:
        """Returns this warpgroup's endpoint, which the caller closes."""
        worker = lax.axis_index("block") * self.plan.warpgroups + self.warpgroup
        return Endpoint(self.channels, self.fabric.here(), worker, self.what)

    def tokens(self) -> list[tuple[jax.Array, jax.Array]]:
        """Returns (token, exists) for each token that this block handles."""
        # Kernels unroll loops over the lists, so all have the same length. The last block's ends
        # with copies of the rank's last token, which do not exist.
        first = lax.axis_index("block") * self.plan.tokens_per_block
        tokens = [first + i for i in range(self.plan.tokens_per_block)]
        last = self.plan.num_tokens - 1
        return [(jnp.minimum(token, last), token <= last) for token in tokens]

    def tiles(self) -> list[tuple[Any, jax.Array]]:
        """Returns (columns, exists) for each of this warpgroup's tiles of a row.

        The row's last tile ends with the row, and may overlap the tile before. A warpgroup with too
        few tiles gets a copy of the last tile, which does not exist: it is neither sent nor stored.
        """
        plan = self.plan
        indices = [self.warpgroup + i * plan.warpgroups for i in range(plan.tiles_of_worker)]
        last = plan.hidden - plan.tile
        return [
            (pl.ds(jnp.minimum(index * plan.tile, last), plan.tile), index < plan.num_tiles)
            for index in indices
        ]

    def index(self, token: int, tile: int) -> int:
        """Returns the number, in this call, of this warpgroup's tile `tile` of a block's token."""
        return token * self.plan.tiles_of_worker + tile

    def load(self, ref: Any, row: Any) -> list[jax.Array]:
        """Loads this warpgroup's tiles of row `row` of `ref`, in global memory, into registers."""
        vector = self.plan.vector
        return [vectors.load(ref.at[row, where], vector) for where, _ in self.tiles()]

    def store(self, ref: Any, row: Any, i: int, tile: jax.Array, predicate: jax.Array) -> None:
        """Stores this warpgroup's i-th tile of a row to ref[row], if it exists and `predicate`."""
        where, exists = self.tiles()[i]

        @pl.when(predicate & exists)
        def _() -> None:
            vectors.store([ref.at[row, where]], tile, self.plan.vector)

    def send(
        self, endpoint: Endpoint, peer: int, token: int, tiles: Sequence[jax.Array],
        goes: jax.Array, *, exact: bool,
    ) -> None:  # fmt: skip
        """Sends this warpgroup's tiles of a token of the block to peer number `peer`, if `goes`."""
        for i, (tile, (_, exists)) in enumerate(zip(tiles, self.tiles(), strict=True)):

            @pl.when(goes & exists)
            def _(i: int = i, tile: jax.Array = tile) -> None:
                endpoint.send_to(peer, self.index(token, i), tile, exact=exact)

    def send_tokens(self, endpoint: Endpoint, x: Any, topk_idx: Any) -> list[list[jax.Array]]:
        """Sends this warpgroup's tiles of tokens to the peers whose experts they choose.

        x is [T, H] and topk_idx [T·K] int32 in global memory. Returns the tiles of each token in
        registers.
        """
        fabric, top_k = self.fabric, self.plan.top_k
        sent = [self.load(fabric.mine(x), token) for token, _ in self.tokens()]
        for i, (token, exists) in enumerate(self.tokens()):
            experts = [fabric.mine(topk_idx)[token * top_k + k] for k in range(top_k)]
            ranks = self.ranks_of(experts)
            for j, peer in enumerate(endpoint.peers):
                goes = is_among(ranks, peer) & exists
                self.send(endpoint, j, i, sent[i], goes, exact=True)
        return sent

    def receive(
        self, endpoint: Endpoint, token: int, comes: Sequence[jax.Array], *, exact: bool
    ) -> Iterator[list[jax.Array]]:
        """Waits for the tiles that peers send to this warpgroup for one token of each peer.

        `token` is an index in the block, and `comes` says for each peer whether it sends. Yields
        for each tile of a row the list of that tile from all peers; undefined for a peer that sends
        none.
        """
        plan, tiles = self.plan, self.tiles()
        indices = [self.index(token, i) for i in range(len(tiles))]
        wanted = [[c & exists for c in comes] for _, exists in tiles]
        # All tiles of the row if registers can hold them for every peer, else one tile.
        at_once = len(indices) if len(indices) * len(comes) <= _TILES_AT_ONCE else 1
        for first in range(0, len(indices), at_once):
            batch = slice(first, first + at_once)
            yield from endpoint.receive_all(
                indices[batch], (plan.tile,), plan.dtype, exact=exact, wanted=wanted[batch]
            )

    def send_values(self, ref: Any) -> None:
        """Sends `ref`, this rank's routing weights [T·K] float32, to all ranks, from block 0."""
        # The last warpgroup's part is moved back until it ends with `ref`, and may overlap.
        total = self.fabric.mine(ref).shape[0]
        size = -(-total // self.plan.warpgroups)
        start = jnp.minimum(self.warpgroup * size, total - size)

        @pl.when(lax.axis_index("block") == 0)
        def send() -> None:
            self.fabric.send_values(self.fabric.mine(ref).at[pl.ds(start, size)], start)

    def zeros(self) -> jax.Array:
        """Returns a tile of float32 zeros in registers."""
        return vectors.constant(self.plan.tile, 0.0, self.plan.vector)

    def ranks_of(self, experts: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the rank of each expert, a scalar int32; NOWHERE for an id outside [0, E)."""
        num_experts = self.plan.num_experts
        per_rank = jnp.int32(num_experts // self.fabric.num_ranks)
        valid = [(e >= 0) & (e < num_experts) for e in experts]
        return [
            jnp.where(v, lax.div(e, per_rank), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring buffer of S rows in shared memory, from a producer warpgroup to consumer warpgroups.

    Row `turn`, counted from 0, goes to stage `turn` modulo S. Each row completes the barriers
    `full` and `empty` of its stage once: `full` when the copy of `fetch` has arrived, `empty` when
    all consumers have arrived.

    A warpgroup that waits for a barrier must wait for every completion of it. So the same consumers
    must read all rows of a stage. The producer must wait for every completion of `empty`: either it
    calls `fabric.drain` at its end, or consumers arrive at `empty` only if the stage will be
    refilled.
    """

    rows: Any  # [S, columns] in shared memory
    full: Any  # [S] barriers each
    empty: Any

    def stage(self, turn: jax.Array) -> jax.Array:
        return lax.rem(turn, jnp.int32(self.rows.shape[0]))

    def open(self, turn: jax.Array) -> jax.Array:
        """Waits until the stage of row `turn` is free; returns the stage."""
        stage = self.stage(turn)

        @pl.when(turn >= self.rows.shape[0])
        def wait_until_empty() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

        return stage

    def fetch(self, stage: jax.Array, row: Any) -> None:
        """Starts a copy of a row in global memory, no longer than a stage, to the stage."""
        place = self.rows.at[stage, pl.ds(0, row.shape[0])]
        plgpu.copy_gmem_to_smem(row, place, self.full.at[stage], oob_mode=fb.IN_BOUNDS)


class GatherScratch(NamedTuple):
    stages: Any  # [S, H], the ring's rows of y
    # [pairs, rows_of_pair] int32: the token's rows of y on this rank, and which of the token's K
    # choices has each.
    places: Any
    choices: Any
    # [pairs] int32: how many rows a pair has. NOWHERE if the token chose no expert of this rank.
    num_rows: Any
    full: Any  # [S] barriers each: a row has arrived; all warpgroups have read it
    empty: Any
    listed: Any  # A barrier: the scout has filled `places`, `choices` and `num_rows`
    together: Any  # a barrier of the warpgroups that read the ring

    @property
    def ring(self) -> Ring:
        return Ring(self.stages, self.full, self.empty)


@dataclasses.dataclass(frozen=True)
class Gather:
    """Fetches the rows of y, the expert outputs, that belong to a block's tokens of all ranks.

    One warpgroup, the scout, lists the rows and copies them into a ring in shared memory; the other
    warpgroups read them there. A pair is a token and its owner, the rank that dispatched it.
    """

    rows: Rows
    capacity: int  # the number of rows of y
    by_rank: bool = False  # whether y is rank-major, with one row for each pair

    def for_warpgroup(self, warpgroup: jax.Array) -> Gather:
        return dataclasses.replace(self, rows=self.rows.for_warpgroup(warpgroup))

    @property
    def fabric(self) -> fb.Fabric:
        return self.rows.fabric

    @property
    def top_k(self) -> int:
        return self.rows.plan.top_k

    @property
    def num_pairs(self) -> int:
        return self.rows.plan.tokens_per_block * self.fabric.num_ranks

    @property
    def rows_of_pair(self) -> int:
        return 1 if self.by_rank else self.top_k

    @property
    def num_stages(self) -> int:
        return min(self.num_pairs * self.rows_of_pair, self.rows.plan.num_stages)

    @property
    def all_fit(self) -> bool:
        """Whether the ring has a stage for every row of y that a block may need."""
        return self.num_stages == self.num_pairs * self.rows_of_pair

    def scratch(self) -> GatherScratch:
        """Returns the types of the shared memory that the kernel must allocate."""
        plan, stages, lists = self.rows.plan, self.num_stages, (self.num_pairs, self.rows_of_pair)
        return GatherScratch(
            stages=plgpu.SMEM((stages, plan.hidden), plan.dtype),
            places=plgpu.SMEM(lists, jnp.int32),
            choices=plgpu.SMEM(lists, jnp.int32),
            num_rows=plgpu.SMEM((self.num_pairs,), jnp.int32),
            full=plgpu.Barrier(num_barriers=(stages,)),
            empty=plgpu.Barrier(num_barriers=(stages,), num_arrivals=plan.warpgroups),
            listed=plgpu.Barrier(),
            together=plgpu.Barrier(num_arrivals=plan.warpgroups),
        )

    def pairs(self) -> list[tuple[int, int, jax.Array, jax.Array, jax.Array]]:
        """Returns (pair, i, token, exists, owner) of each pair, in the order of the ring.

        `pair` is i · N + j for the block's i-th token and its j-th owner; owners ascend modulo N.
        """
        fabric = self.fabric
        num_ranks = jnp.int32(fabric.num_ranks)
        owners = [lax.rem(fabric.rank() + 1 + j, num_ranks) for j in range(fabric.num_ranks)]
        return [
            (i * fabric.num_ranks + j, i, token, exists, owner)
            for i, (token, exists) in enumerate(self.rows.tokens())
            for j, owner in enumerate(owners)
        ]

    def scout(self, y: Any, rows: Any, scratch: GatherScratch) -> None:
        """Runs the scout warpgroup: lists each pair's rows of y, and copies them into the ring."""
        fabric, top_k, ring = self.fabric, self.top_k, scratch.ring
        rows_of_pairs = [
            [fabric.mine(rows)[owner, token * top_k + choice] for choice in range(top_k)]
            for _, _, token, _, owner in self.pairs()
        ]
        used = jnp.int32(0)
        for (pair, _, token, exists, owner), places in zip(
            self.pairs(), rows_of_pairs, strict=True
        ):
            sent = fb.any_row(places) & exists
            if self.by_rank:
                place = owner * self.rows.plan.num_tokens + token
                places = [jnp.where(sent, place, fb.NOWHERE)]
            count = jnp.int32(0)
            for choice, place in enumerate(places):
                kept = exists & (place >= 0) & (place < self.capacity)
                # If the row is not kept, `count` stays, and the next row overwrites the entry.
                scratch.places[pair, jnp.minimum(count, self.rows_of_pair - 1)] = place
                scratch.choices[pair, jnp.minimum(count, self.rows_of_pair - 1)] = jnp.int32(choice)

                @pl.when(kept & (used < self.num_stages))
                def fetch(place: Any = place, used: Any = used) -> None:
                    ring.fetch(used, fabric.mine(y).at[place])

                count = count + kept.astype(jnp.int32)
                used = used + kept.astype(jnp.int32)
            scratch.num_rows[pair] = jnp.where(sent, count, fb.NOWHERE)
        fabric.barrier()
        plgpu.barrier_arrive(scratch.listed)
        if not self.all_fit:
            self._fetch_more(y, scratch)

    def _fetch_more(self, y: Any, scratch: GatherScratch) -> None:
        """Copies into the ring those rows of y for which it had no free stage before."""
        ring = scratch.ring

        def fetch(r: jax.Array, used: jax.Array, pair: int) -> jax.Array:
            """Fetches the pair's r-th row, number `used`, unless `scout` has; returns used + 1."""

            @pl.when(used >= self.num_stages)
            def fetch_to_used_stage() -> None:
                stage = ring.open(used)
                ring.fetch(stage, self.fabric.mine(y).at[scratch.places[pair, r]])

            return used + 1

        used = jnp.int32(0)
        for pair, *_ in self.pairs():
            fetch_row = functools.partial(fetch, pair=pair)
            used = lax.fori_loop(0, scratch.num_rows[pair], fetch_row, used)

    def num_turns(self, scratch: GatherScratch) -> jax.Array:
        """Returns the number of rows that pass through the block's ring, a scalar int32."""
        counts = [jnp.maximum(scratch.num_rows[pair], 0) for pair in range(self.num_pairs)]
        return functools.reduce(jnp.add, counts)

    def free(self, turn: jax.Array, num_turns: jax.Array, scratch: GatherScratch) -> None:
        """Signals that this warpgroup has read row `turn`, if its stage will be refilled."""
        if self.all_fit:
            return
        ring = scratch.ring

        @pl.when(turn + self.num_stages < num_turns)
        def free_stage() -> None:
            # This fence orders the next copy to the stage after this warpgroup's reads.
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.empty.at[ring.stage(turn)])

    def read_weights(self, weights: Any, scratch: GatherScratch) -> None:
        """Receives the routing weights of this block's tokens to `weights`, [pairs, K] float32."""
        # Each warpgroup receives the weights of some pairs, and waits for the others.
        for pair, _, token, _, owner in self.pairs():

            @pl.when(self.rows.warpgroup == pair % self.rows.plan.warpgroups)
            def read(pair: int = pair, token: Any = token, owner: Any = owner) -> None:
                start = token * self.top_k
                self.fabric.read_values(owner, start, weights.at[pair], self.rows.what)

        meet(self.fabric, scratch.together)


def is_among(ranks: Sequence[jax.Array], rank: jax.Array | int) -> jax.Array:
    """Returns whether `rank` is one of `ranks`, bool []."""
    return fb.any_of([other == rank for other in ranks])


def hello(function: Callable[..., None], *args: Any, **options: Any) -> None:
    """Signals that this rank has begun the call, or waits for the signals, in block 0.

    `function` is `fabric.signal` or `fabric.wait`, which gets the other arguments.
    The low-latency protocol requires that in every call each rank receives something from each
    peer. Kernels in which a rank might receive nothing else exchange this signal.
    """

    @pl.when(lax.axis_index("block") == 0)
    def signal_or_wait() -> None:
        function(_HELLO, 1, *args, **options)


def meet(fabric: fb.Fabric, together: Any) -> None:
    """Waits until all warpgroups that share the barrier `together` have called this function."""
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)
    # For the tests' simulator. On a GPU, the barrier above suffices.
    fabric.barrier()
