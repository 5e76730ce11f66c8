"""Sends and fetches rows for the exchange's kernels over the low-latency protocol.

`Rows` sends and receives tiles of rows; `Gather` lists and fetches the rows of a block's tokens.

For few tokens per rank. Block b of every rank handles the same range of tokens of every rank. A row
is cut into tiles of 2 KiB, of which each of the block's first four warpgroups takes its share: it
sends the tiles of this rank's tokens to the warpgroup of its number at each peer that gets the
token, and polls for the tiles of theirs (`fabric.low_latency`). So nobody
waits for addresses, for the end of a copy or for a signal.
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

_TILES_AT_ONCE = 8  # the tiles that a warpgroup polls together
_HELLO = 0  # the kind of signal: block 0 of a rank has begun this call


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sends and receives the rows of a kernel, on behalf of one warpgroup of a block.

    Attributes:
      fabric: how ranks reach each other.
      channels: how warpgroups of different ranks reach each other.
      plan: how rows are spread over blocks and warpgroups.
      what: the name of the kernel in the messages of timeouts.
      warpgroup: the warpgroup's number; None before `for_warpgroup`. The number is looked up once,
        since each look-up is a shuffle.
    """

    fabric: fb.Fabric
    channels: Channels
    plan: LowLatencyPlan
    what: str
    warpgroup: Any = None

    def for_warpgroup(self, warpgroup: jax.Array) -> Rows:
        """Returns a copy for the warpgroup of this number."""
        return dataclasses.replace(self, warpgroup=warpgroup)

    def open(self) -> Endpoint:
        worker = lax.axis_index("block") * self.plan.warpgroups + self.warpgroup
        return Endpoint(self.channels, self.fabric.here(), worker, self.what)

    def tokens(self) -> list[tuple[jax.Array, jax.Array]]:
        """Returns (token, exists) for each place of this block.

        A place without a token gets the rank's last token, and `exists` is False.
        """
        first = lax.axis_index("block") * self.plan.tokens_per_block
        tokens = [first + i for i in range(self.plan.tokens_per_block)]
        last = self.plan.num_tokens - 1
        return [(jnp.minimum(token, last), token <= last) for token in tokens]

    def tiles(self) -> list[tuple[Any, jax.Array]]:
        """Returns (columns, own) for each of the tiles of a row that this warpgroup handles.

        All warpgroups have the same number of tiles. Where the row has too few tiles for that, the
        columns are those of the row's last tile, and `own` is False. The last tile of a row is
        moved back so that it ends with the row.
        """
        plan = self.plan
        indices = [self.warpgroup + i * plan.warpgroups for i in range(plan.tiles_of_worker)]
        last = plan.hidden - plan.tile
        return [
            (pl.ds(jnp.minimum(index * plan.tile, last), plan.tile), index < plan.num_tiles)
            for index in indices
        ]

    def index(self, token: int, tile: int) -> int:
        """Returns the number, in this call, of a tile of one of the block's tokens."""
        return token * self.plan.tiles_of_worker + tile

    def load(self, ref: Any, row: Any) -> list[jax.Array]:
        """Loads this warpgroup's tiles of a row of global memory."""
        vector = self.plan.vector
        return [vectors.load(self.fabric, ref.at[row, where], vector) for where, _ in self.tiles()]

    def store(self, ref: Any, row: Any, i: int, tile: jax.Array, predicate: jax.Array) -> None:
        """Stores this warpgroup's i-th tile to a row of global memory if `predicate` holds."""
        where, own = self.tiles()[i]

        @pl.when(predicate & own)
        def _() -> None:
            vectors.store(self.fabric, [ref.at[row, where]], tile, self.plan.vector)

    def send(
        self, endpoint: Endpoint, peer: int, token: int, tiles: Sequence[jax.Array],
        goes: jax.Array, *, exact: bool,
    ) -> None:  # fmt: skip
        """Sends the tiles of one of this block's tokens to a peer of `endpoint`, if it `goes`."""
        for i, (tile, (_, own)) in enumerate(zip(tiles, self.tiles(), strict=True)):

            @pl.when(goes & own)
            def _(i: int = i, tile: jax.Array = tile) -> None:
                endpoint.send_to(peer, self.index(token, i), tile, exact=exact)

    def send_tokens(
        self, endpoint: Endpoint, x: Any, topk_idx: Any, *, exact: bool
    ) -> list[list[jax.Array]]:
        """Sends the rows of this block's tokens to the peers that get them; returns their tiles.

        `x` is [T, H] and `topk_idx` [T·K], both of this rank.
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
        """Receives this warpgroup's tiles of the block's `token`-th token of each peer.

        `comes` says which peers send the token. Yields a list for each tile, with the tile of each
        peer, undefined for peers that do not send. Tiles are polled together, or one after the
        other if registers cannot hold all of them.
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
        """Sends the 32-bit words of an array [T·K] of this rank to all ranks, in block 0."""
        total = self.fabric.mine(ref).shape[0]
        size = -(-total // self.plan.warpgroups)
        start = jnp.minimum(self.warpgroup * size, total - size)

        @pl.when(lax.axis_index("block") == 0)
        def _() -> None:
            self.fabric.send_values(self.fabric.mine(ref).at[pl.ds(start, size)], start)

    def counted(self, i: int, tile: jax.Array) -> jax.Array:
        """Zeroes the elements of this warpgroup's i-th tile that overlap another tile.

        Only the last tile of a warpgroup may overlap, since it may repeat the row's last tile.
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
        """Returns a tile of float32 zeros, laid out over threads as tiles of rows are."""
        return vectors.constant(self.fabric, self.plan.tile, 0.0, self.plan.vector)

    def ranks_of(self, experts: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the rank of each expert; NOWHERE for an id outside the experts."""
        num_experts = self.plan.num_experts
        per_rank = jnp.int32(num_experts // self.fabric.num_ranks)
        valid = [(e >= 0) & (e < num_experts) for e in experts]
        return [
            jnp.where(v, lax.div(e, per_rank), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]


class GatherScratch(NamedTuple):
    """The shared memory of a `Gather`: a ring of S stages for rows, and a list for each pair."""

    stages: Any  # [S, H]: rows of y
    places: Any  # [pairs, rows_of_pair] int32: the rows of a pair
    choices: Any  # [pairs, rows_of_pair] int32: the token's choices that `places` belong to
    num_rows: Any  # [pairs] int32: the number of rows; NOWHERE: no choice of the pair is here
    full: Any  # [S] barriers: a row has arrived in its stage
    empty: Any  # [S] barriers: all warpgroups have read a row
    listed: Any  # barrier: the scout has listed all pairs
    together: Any  # barrier: where the other warpgroups meet

    @property
    def ring(self) -> Ring:
        return Ring(self.stages, self.full, self.empty)


@dataclasses.dataclass(frozen=True)
class Gather:
    """The rows of y of a block's tokens of all ranks: listed by one warpgroup, read by the others.

    The owner of a token is the rank whose token it is; a pair is (token, owner).

    Attributes:
      rows: the rows of the kernel.
      capacity: the rows of y.
      by_rank: whether y is rank-major, with one row for each pair.
      own_first: whether a token's pairs begin with this rank's pair; else they end with it.
    """

    rows: Rows
    capacity: int
    by_rank: bool = False
    own_first: bool = False

    def for_warpgroup(self, warpgroup: jax.Array) -> Gather:
        """Returns a copy for the warpgroup of this number."""
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
        """Whether the ring has a stage for each row of a block, so that none is used twice."""
        return self.num_stages == self.num_pairs * self.rows_of_pair

    def scratch(self) -> GatherScratch:
        """Returns the types of the scratch."""
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
        """Returns (the pair's number, token's number, token, exists, owner) of each pair.

        Owners follow each other modulo N; this rank is the last one, or the first. Every
        warpgroup takes the pairs in this order.
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
        """Lists the rows of each pair in shared memory, and fetches them into the ring.

        `rows` is [N, T·K].
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
        """Fetches the rows after the first S, each once the earlier row in its stage is read."""
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
        """Returns the total number of rows of all pairs."""
        counts = [jnp.maximum(scratch.num_rows[pair], 0) for pair in range(self.num_pairs)]
        return functools.reduce(jnp.add, counts)

    def free(self, turn: jax.Array, num_turns: jax.Array, scratch: GatherScratch) -> None:
        """Frees the stage of row `turn`, which this warpgroup has read, if another row needs it.

        `num_turns` is the total number of rows of all pairs.
        """
        if self.all_fit:
            return
        ring = scratch.ring

        @pl.when(turn + self.num_stages < num_turns)
        def free_stage() -> None:
            plgpu.commit_smem()  # the next copy to the stage comes after this read
            plgpu.barrier_arrive(ring.empty.at[ring.stage(turn)])

    def read_weights(self, weights: Any, scratch: GatherScratch) -> None:
        """Waits for the weights that the owners send, and copies them to `weights` [pairs, K].

        The warpgroups divide the pairs among them, and wait for each other at the end.
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
    """Signals that this rank has begun the call, or waits until every rank has; only in block 0.

    `function` is `fabric.signal` or `fabric.wait`. Kernels call this where a rank might otherwise
    receive nothing from a peer; `fabric.low_latency` says why it must receive something.
    """

    @pl.when(lax.axis_index("block") == 0)
    def _() -> None:
        function(_HELLO, 1, *args, **options)


def meet(fabric: fb.Fabric, together: Any) -> None:
    """Makes the threads of all warpgroups that share the barrier `together` wait for each other."""
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)
    fabric.barrier()  # the simulator runs a warpgroup as one thread
