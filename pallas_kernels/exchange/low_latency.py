"""Sends and fetches rows for dispatch and combine kernels over the low-latency protocol.

`Rows` sends and receives rows between ranks. `Gather` fetches the expert outputs of a block's
tokens from this rank's memory.

The protocol is for few tokens per rank. Block b of every rank handles the same range of tokens of
every rank. A row is cut into tiles of 2 KiB, which the block's first four warpgroups share. Each of
them sends its tiles of a token's row to the warpgroup of the same index at each peer that gets the
token. It then polls the memory in which tiles of peers arrive, as `fabric.low_latency` describes.
So no rank waits for addresses of buffers, for the end of a copy or for a signal.
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
from pallas_kernels.exchange.ring import Ring
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.low_latency import Channels, Endpoint

# A warpgroup polls for at most this many tiles together, which it holds in registers.
_TILES_AT_ONCE = 8
# The kind of signal by which block 0 of a rank says that the rank has begun this call.
_HELLO = 0


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sends and receives rows, a tile at a time, on behalf of one warpgroup of a block.

    Attributes:
      fabric: how ranks reach each other.
      channels: the symmetric memory through which the warpgroups of ranks send tiles to each other.
      plan: how rows are distributed over blocks and warpgroups.
      what: the kernel's name in the error messages of timeouts.
      warpgroup: the index of this warpgroup in its block; None before `for_warpgroup` sets it. It
        is stored here, since each query of it would cost the GPU a shuffle instruction.
    """

    fabric: fb.Fabric
    channels: Channels
    plan: LowLatencyPlan
    what: str
    warpgroup: Any = None

    def for_warpgroup(self, warpgroup: jax.Array) -> Rows:
        """Returns a copy of this object that acts for the warpgroup of the given index."""
        return dataclasses.replace(self, warpgroup=warpgroup)

    def open(self) -> Endpoint:
        worker = lax.axis_index("block") * self.plan.warpgroups + self.warpgroup
        return Endpoint(self.channels, self.fabric.here(), worker, self.what)

    def tokens(self) -> list[tuple[jax.Array, jax.Array]]:
        """Returns a list of (token, exists), one for each of the tokens that this block handles.

        `token` is the token's index in its rank, a scalar int32. The lists of all blocks have the
        same length, since kernels unroll the loops over them. If the last block has fewer tokens,
        its list ends with copies of the rank's last token. `exists`, a scalar bool, is false for
        these copies and true for all other items.
        """
        first = lax.axis_index("block") * self.plan.tokens_per_block
        tokens = [first + i for i in range(self.plan.tokens_per_block)]
        last = self.plan.num_tokens - 1
        return [(jnp.minimum(token, last), token <= last) for token in tokens]

    def tiles(self) -> list[tuple[Any, jax.Array]]:
        """Returns a pair (columns, own) for each of this warpgroup's tiles of a row.

        `columns` is the tile's slice of the columns. All tiles have the same length, so the row's
        last tile is moved back until it ends with the row, and may overlap the tile before. All
        warpgroups have the same number of tiles. If the row has too few tiles, some warpgroups get
        the row's last tile as a substitute. `own`, a scalar bool, is false for a substitute, which
        must be neither sent nor stored.
        """
        plan = self.plan
        indices = [self.warpgroup + i * plan.warpgroups for i in range(plan.tiles_of_worker)]
        last = plan.hidden - plan.tile
        return [
            (pl.ds(jnp.minimum(index * plan.tile, last), plan.tile), index < plan.num_tiles)
            for index in indices
        ]

    def index(self, token: int, tile: int) -> int:
        """Returns the number by which the sender and the receiver of a tile find its tile buffer.

        `token` is the token's index in the block, and `tile` the index of the tile among the
        warpgroup's tiles of a row.
        """
        return token * self.plan.tiles_of_worker + tile

    def load(self, ref: Any, row: Any) -> list[jax.Array]:
        """Loads this warpgroup's tiles of row `row` of `ref`, in global memory, into registers."""
        vector = self.plan.vector
        return [vectors.load(self.fabric, ref.at[row, where], vector) for where, _ in self.tiles()]

    def store(self, ref: Any, row: Any, i: int, tile: jax.Array, predicate: jax.Array) -> None:
        """Stores this warpgroup's i-th tile of a row to row `row` of `ref` if `predicate` is true.

        `ref` is [rows, H] in global memory. A substitute tile (see `tiles`) is not stored.
        """
        where, own = self.tiles()[i]

        @pl.when(predicate & own)
        def _() -> None:
            vectors.store(self.fabric, [ref.at[row, where]], tile, self.plan.vector)

    def send(
        self, endpoint: Endpoint, peer: int, token: int, tiles: Sequence[jax.Array],
        goes: jax.Array, *, exact: bool,
    ) -> None:  # fmt: skip
        """Sends this warpgroup's tiles of a token to a peer, if the scalar bool `goes` is true.

        `peer` is an index into `endpoint.peers`, and `token` is the token's index in the block.
        `exact` is whether NaNs keep their bits; the peer must receive with the same value.
        """
        for i, (tile, (_, own)) in enumerate(zip(tiles, self.tiles(), strict=True)):

            @pl.when(goes & own)
            def _(i: int = i, tile: jax.Array = tile) -> None:
                endpoint.send_to(peer, self.index(token, i), tile, exact=exact)

    def send_tokens(
        self, endpoint: Endpoint, x: Any, topk_idx: Any, *, exact: bool
    ) -> list[list[jax.Array]]:
        """Sends the block's tokens to the peers whose experts they choose.

        This warpgroup sends its tiles of the tokens' rows.

        Args:
          endpoint: this warpgroup's connection to its peers by the low-latency protocol.
          x: [T, H] in global memory, the rows of this rank's tokens.
          topk_idx: [T·K] int32 in global memory, the experts that this rank's tokens choose.
          exact: whether NaNs keep their bits; the receivers must pass the same value.

        Returns:
          For each token of the block, the list of this warpgroup's tiles of its row, in registers.
        """
        fabric, top_k = self.fabric, self.plan.top_k
        sent = [self.load(fabric.mine(x), token) for token, _ in self.tokens()]
        for i, (token, exists) in enumerate(self.tokens()):
            experts = [fabric.mine(topk_idx)[token * top_k + k] for k in range(top_k)]
            ranks = self.ranks_of(experts)
            for j, peer in enumerate(endpoint.peers):
                goes = is_among(ranks, peer) & exists
                self.send(endpoint, j, i, sent[i], goes, exact=exact)
        return sent

    def receive(
        self, endpoint: Endpoint, token: int, comes: Sequence[jax.Array], *, exact: bool
    ) -> Iterator[list[jax.Array]]:
        """Waits for the tiles that peers send to this warpgroup for one token of each peer.

        The warpgroup polls for all its tiles of the token together, or for one tile after the other
        if registers cannot hold all of them.

        Args:
          endpoint: this warpgroup's connection to its peers by the low-latency protocol.
          token: the token's index in the block, the same for every peer.
          comes: a scalar bool for each peer, whether the peer sends its row.
          exact: whether NaNs keep their bits; the senders must have passed the same value.

        Yields:
          For each of this warpgroup's tiles of a row, the list of that tile from all peers, in
          registers. The tile of a peer that sends no row is undefined.
        """
        plan, tiles = self.plan, self.tiles()
        indices = [self.index(token, i) for i in range(len(tiles))]
        wanted = [[c & own for c in comes] for _, own in tiles]
        together = len(indices) if len(indices) * len(comes) <= _TILES_AT_ONCE else 1
        for first in range(0, len(indices), together):
            these = slice(first, first + together)
            yield from endpoint.receive_all(
                indices[these], (plan.tile,), plan.dtype, exact=exact, wanted=wanted[these]
            )

    def send_values(self, ref: Any) -> None:
        """Sends the routing weights of this rank's tokens to all ranks.

        `ref` is [T·K] float32 in global memory. Only block 0 sends, and each of its warpgroups
        sends a slice of the array. `Gather.read_weights` receives the weights.
        """
        total = self.fabric.mine(ref).shape[0]
        size = -(-total // self.plan.warpgroups)
        start = jnp.minimum(self.warpgroup * size, total - size)

        @pl.when(lax.axis_index("block") == 0)
        def _() -> None:
            self.fabric.send_values(self.fabric.mine(ref).at[pl.ds(start, size)], start)

    def counted(self, i: int, tile: jax.Array) -> jax.Array:
        """Zeroes the elements of a tile that another tile of the row contains, too.

        A sum over all tiles of all warpgroups then counts each element of the row once. `tile` is
        this warpgroup's i-th tile. Only a warpgroup's last tile may overlap another one. It does if
        it is the row's last tile, moved back to end with the row, or a substitute for a missing
        tile (see `tiles`).
        """
        plan = self.plan
        whole = plan.num_tiles * plan.tile == plan.hidden
        if i + 1 < plan.tiles_of_worker or (whole and plan.num_tiles % plan.warpgroups == 0):
            return tile
        if whole:
            return jnp.where(self.tiles()[i][1], tile, jnp.zeros_like(tile))
        start = (self.warpgroup + i * plan.warpgroups) * plan.tile
        repeated = start - jnp.minimum(start, plan.hidden - plan.tile)
        position = fb.iota(self.fabric, plan.tile, plan.vector)
        return jnp.where(position >= repeated, tile, jnp.zeros_like(tile))

    def zeros(self) -> jax.Array:
        """Returns a tile of float32 zeros in registers, in the register layout of a row's tiles."""
        return vectors.constant(self.fabric, self.plan.tile, 0.0, self.plan.vector)

    def ranks_of(self, experts: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the rank of each expert, a scalar int32; NOWHERE for an id outside [0, E)."""
        num_experts = self.plan.num_experts
        per_rank = jnp.int32(num_experts // self.fabric.num_ranks)
        valid = [(e >= 0) & (e < num_experts) for e in experts]
        return [
            jnp.where(v, lax.div(e, per_rank), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]


class GatherScratch(NamedTuple):
    """The shared memory of a `Gather`: a ring of S stages for rows of y, and lists of row numbers.

    y has the expert outputs. A pair is a token and its owner, the rank that dispatched it.
    """

    # [S, H], the rows of y (the expert outputs) in the S stages of the ring.
    stages: Any
    # [pairs, rows_of_pair] int32: for each (token, owner) pair of the block, the numbers of the
    # token's rows of y on this rank. The owner is the rank that dispatched the token.
    places: Any
    # [pairs, rows_of_pair] int32: for each row number in `places`, which of the token's K choices
    # has this row.
    choices: Any
    # [pairs] int32: how many row numbers `places` has for each (token, owner) pair. NOWHERE if the
    # token chose no expert of this rank.
    num_rows: Any
    # [S] barriers: `full[s]` completes when a row has arrived in stage s.
    full: Any
    # [S] barriers: `empty[s]` completes when all warpgroups have read the row in stage s.
    empty: Any
    # A barrier that completes when the scout has filled `places`, `choices` and `num_rows`.
    listed: Any
    # A barrier at which the warpgroups that read the ring wait for each other. The scout, which
    # fills the ring, does not take part.
    together: Any

    @property
    def ring(self) -> Ring:
        return Ring(self.stages, self.full, self.empty)


@dataclasses.dataclass(frozen=True)
class Gather:
    """Fetches the rows of y, the expert outputs, that belong to a block's tokens of all ranks.

    One warpgroup, the scout, lists the rows and copies them into a ring in shared memory; the other
    warpgroups read them there. A pair is a token and its owner, the rank that dispatched it.

    Attributes:
      rows: sends and receives rows between ranks; its `plan` has the sizes of the call.
      capacity: R, the number of rows of y.
      by_rank: whether y is rank-major, with one row for each pair.
      own_first: whether this rank is the first, rather than the last, of the N owners that `pairs`
        lists for each token index.
    """

    rows: Rows
    capacity: int
    by_rank: bool = False
    own_first: bool = False

    def for_warpgroup(self, warpgroup: jax.Array) -> Gather:
        """Returns a copy of this object that acts for the warpgroup of the given index."""
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
        """Whether the ring has a stage for every row of y that a block may need.

        No stage is then refilled, so warpgroups need not signal that they have read a stage.
        """
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
        """Returns the block's pairs (token, owner), where the owner is the token's source rank.

        Every warpgroup must take the pairs in the order of the result, since the rows of y pass
        through the ring in this order.

        Returns:
          A tuple (pair, i, token, exists, owner) for each pair:
          pair: the index of the pair in the block, i · N + j for the j-th owner;
          i: the token's index in the block;
          token: the token's index among its owner's tokens, a scalar int32;
          exists: whether the owner has such a token, a scalar bool;
          owner: a scalar int32. The owners ascend modulo N, and begin with this rank if
            `own_first`, else with the next rank, so that this rank is last.
        """
        fabric = self.fabric
        num_ranks, first = jnp.int32(fabric.num_ranks), 0 if self.own_first else 1
        owners = [lax.rem(fabric.rank() + first + j, num_ranks) for j in range(fabric.num_ranks)]
        return [
            (i * fabric.num_ranks + j, i, token, exists, owner)
            for i, (token, exists) in enumerate(self.rows.tokens())
            for j, owner in enumerate(owners)
        ]

    def scout(self, y: Any, rows: Any, scratch: GatherScratch) -> None:
        """Runs the scout warpgroup: lists each pair's rows of y, and copies them into the ring.

        A pair is a token of the block and its owner, the rank that dispatched it.

        Args:
          y: [R, H] in global memory, the expert outputs.
          rows: [N, T·K] int32 in global memory, the row of y for each choice of each owner's
            tokens.
          scratch: the shared memory of this object.
        """
        fabric, top_k, ring = self.fabric, self.top_k, scratch.ring
        found = [
            [fabric.mine(rows)[owner, token * top_k + choice] for choice in range(top_k)]
            for _, _, token, _, owner in self.pairs()
        ]
        used = jnp.int32(0)
        for (pair, _, token, exists, owner), of_choices in zip(self.pairs(), found, strict=True):
            sent = fb.any_row(of_choices) & exists
            if self.by_rank:
                place = owner * self.rows.plan.num_tokens + token
                of_choices = [jnp.where(sent, place, fb.NOWHERE)]
            count = jnp.int32(0)
            for choice, place in enumerate(of_choices):
                held = exists & (place >= 0) & (place < self.capacity)
                scratch.places[pair, jnp.minimum(count, self.rows_of_pair - 1)] = place
                scratch.choices[pair, jnp.minimum(count, self.rows_of_pair - 1)] = jnp.int32(choice)

                @pl.when(held & (used < self.num_stages))
                def fetch(place: Any = place, used: Any = used) -> None:
                    ring.fetch(used, fabric.mine(y).at[place])

                count, used = (n + held.astype(jnp.int32) for n in (count, used))
            scratch.num_rows[pair] = jnp.where(sent, count, fb.NOWHERE)
        fabric.barrier()
        plgpu.barrier_arrive(scratch.listed)
        if not self.all_fit:
            self._fetch_more(y, scratch)

    def _fetch_more(self, y: Any, scratch: GatherScratch) -> None:
        """Copies into the ring those rows of y for which it had no free stage before.

        The ring has S stages, to which the first S rows have been copied already. Before each
        further copy, waits until all warpgroups have read the previous row in the stage.
        """
        ring = scratch.ring

        def fetch(r: jax.Array, used: jax.Array, pair: int) -> jax.Array:
            @pl.when(used >= self.num_stages)
            def fetch_to_used_stage() -> None:
                stage = ring.open(used)
                ring.fetch(stage, self.fabric.mine(y).at[scratch.places[pair, r]])

            return used + 1

        used = jnp.int32(0)
        for pair, *_ in self.pairs():
            of_pair = functools.partial(fetch, pair=pair)
            used = lax.fori_loop(0, scratch.num_rows[pair], of_pair, used)

    def num_turns(self, scratch: GatherScratch) -> jax.Array:
        """Returns the number of rows that pass through the block's ring, a scalar int32."""
        counts = [jnp.maximum(scratch.num_rows[pair], 0) for pair in range(self.num_pairs)]
        return functools.reduce(jnp.add, counts)

    def free(self, turn: jax.Array, num_turns: jax.Array, scratch: GatherScratch) -> None:
        """Signals that this warpgroup has read a row from the ring.

        `turn` is the row's number in the order in which rows pass through the ring, from 0.

        The scout, which fills the ring, waits for this signal before it refills the row's stage.
        There is no signal if no later row uses the stage. `num_turns` is the total number of rows
        that pass through the ring.
        """
        if self.all_fit:
            return
        ring = scratch.ring

        @pl.when(turn + self.num_stages < num_turns)
        def free_stage() -> None:
            # This fence orders the next copy to the stage after this warpgroup's reads.
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.empty.at[ring.stage(turn)])

    def read_weights(self, weights: Any, scratch: GatherScratch) -> None:
        """Receives the routing weights of this block's tokens, which the tokens' ranks send.

        Copies them to `weights`, [pairs, K] float32 in shared memory, where a pair is a token and
        its owner, the rank that dispatched it. All warpgroups that read the weights must call this
        method: each warpgroup receives the weights of some pairs, and then waits until the other
        warpgroups have received theirs.
        """
        for pair, _, token, _, owner in self.pairs():

            @pl.when(self.rows.warpgroup == pair % self.rows.plan.warpgroups)
            def read(pair: int = pair, token: Any = token, owner: Any = owner) -> None:
                start = token * self.top_k
                self.fabric.read_values(owner, start, weights.at[pair], self.rows.what)

        meet(self.fabric, scratch.together)


def is_among(ranks: Sequence[jax.Array], rank: jax.Array | int) -> jax.Array:
    return fb.any_of([other == rank for other in ranks])


def hello(function: Callable[..., None], *args: Any, **options: Any) -> None:
    """Signals that this rank has begun the call, or waits until every rank has signalled it.

    Only block 0 does so. `function` is `fabric.signal` to signal and `fabric.wait` to wait; `args`
    and `options` are passed to it. The low-latency protocol requires that in every call each rank
    receives something from each peer (`fabric.low_latency` says why). So kernels in which a rank
    might receive nothing else from a peer exchange this signal.
    """

    @pl.when(lax.axis_index("block") == 0)
    def _() -> None:
        function(_HELLO, 1, *args, **options)


def meet(fabric: fb.Fabric, together: Any) -> None:
    """Waits until all warpgroups that share the barrier `together` have called this function."""
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)
    # On a GPU, the barrier above suffices. The simulator of the tests runs a warpgroup as one
    # thread, and needs this barrier to see that the warpgroup's threads have met.
    fabric.barrier()
