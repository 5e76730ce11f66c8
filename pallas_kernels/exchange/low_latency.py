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
from collections.abc import Iterator, Sequence
from typing import Any

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
class RowTransfer:
    """Sends and receives rows, a tile at a time, on behalf of one warpgroup of a block."""

    fabric: fb.Fabric
    channels: Channels
    plan: LowLatencyPlan
    what: str  # the kernel's name in the messages of timeouts
    warpgroup: Any = None  # stored, since each query of it would cost the GPU a shuffle instruction

    def for_warpgroup(self, warpgroup: jax.Array) -> RowTransfer:
        return dataclasses.replace(self, warpgroup=warpgroup)

    def open(self) -> Endpoint:
        """Returns this warpgroup's endpoint, which the caller closes."""
        worker = lax.axis_index("block") * self.plan.warpgroups + self.warpgroup
        return Endpoint(self.channels, self.fabric.here(), worker, self.what)

    def tokens(self) -> list[tuple[jax.Array, jax.Array]]:
        """Returns (token, exists) for each token that this block handles."""
        # Kernels unroll loops over the list, so it is equally long in all blocks. That of the last
        # block ends with copies of the rank's last token, which do not exist.
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
        vector = self.plan.vector
        return [vectors.load(ref.at[row, columns], vector) for columns, _ in self.tiles()]

    def store(self, ref: Any, row: Any, i: int, tile: jax.Array, predicate: jax.Array) -> None:
        """Stores this warpgroup's i-th tile of a row to ref[row], if it exists and `predicate`."""
        columns, exists = self.tiles()[i]

        @pl.when(predicate & exists)
        def store_tile() -> None:
            vectors.store([ref.at[row, columns]], tile, self.plan.vector)

    def send(
        self, endpoint: Endpoint, peer_index: int, token: int, tiles: Sequence[jax.Array],
        predicate: jax.Array, *, exact: bool,
    ) -> None:  # fmt: skip
        """Sends this warpgroup's tiles of the block's `token`-th token to a peer, if `predicate`.

        `tiles` has one for each of `self.tiles()`; they go to `endpoint.peers[peer_index]`.
        `exact`: NaNs keep their bits. The receiver must pass the same to `receive`.
        """
        send_to_peer = functools.partial(endpoint.send_to, peer_index, exact=exact)
        for i, (tile, (_, exists)) in enumerate(zip(tiles, self.tiles(), strict=True)):
            index = self.index(token, i)
            pl.when(predicate & exists)(functools.partial(send_to_peer, index, tile))

    def receive(
        self, endpoint: Endpoint, token: int, peer_sends: Sequence[jax.Array], *, exact: bool
    ) -> Iterator[list[jax.Array]]:
        """Waits for the tiles that peers send to this warpgroup for one token of each peer.

        `token` is an index in the block, and `peer_sends` has a [] bool for each peer. Yields for
        each tile of a row the list of that tile from all peers; undefined for a peer that sends
        none. `exact` is that of `send`.
        """
        plan, tiles = self.plan, self.tiles()
        indices = [self.index(token, i) for i in range(len(tiles))]
        wanted = [[sends & exists for sends in peer_sends] for _, exists in tiles]
        # All tiles of the row if registers can hold them for every peer, else one tile.
        at_once = len(indices) if len(indices) * len(peer_sends) <= _TILES_AT_ONCE else 1
        for first in range(0, len(indices), at_once):
            batch = slice(first, first + at_once)
            yield from endpoint.receive_all(
                indices[batch], (plan.tile,), plan.dtype, exact=exact, wanted=wanted[batch]
            )

    def send_weights(self, weights: Any) -> None:
        """Sends this rank's routing weights, [T·K] float32, to all ranks, from block 0."""
        # Each warpgroup sends a part. The last part is moved back until it ends with the array, and
        # may overlap the part before.
        total = self.fabric.mine(weights).shape[0]
        size = -(-total // self.plan.warpgroups)
        start = jnp.minimum(self.warpgroup * size, total - size)

        @pl.when(lax.axis_index("block") == 0)
        def send() -> None:
            self.fabric.send_values(self.fabric.mine(weights).at[pl.ds(start, size)], start)

    def zeros(self) -> jax.Array:
        return vectors.constant(self.plan.tile, 0.0, self.plan.vector)

    def ranks_of(self, topk_idx: Any, token: jax.Array) -> list[jax.Array]:
        """Returns the rank of each expert of a token in topk_idx [T·K]; NOWHERE outside [0, E)."""
        top_k, num_experts = self.plan.top_k, self.plan.num_experts
        experts = [self.fabric.mine(topk_idx)[token * top_k + k] for k in range(top_k)]
        per_rank = jnp.int32(num_experts // self.fabric.num_ranks)
        valid = [(e >= 0) & (e < num_experts) for e in experts]
        return [
            jnp.where(v, lax.div(e, per_rank), fb.NOWHERE)
            for e, v in zip(experts, valid, strict=True)
        ]


def is_among(ranks: Sequence[jax.Array], rank: jax.Array | int) -> jax.Array:
    return fb.any_of([other == rank for other in ranks])


def hello(fabric: fb.Fabric) -> None:
    """Signals to peers that this rank has begun the call, from block 0.

    The low-latency protocol requires that in every call each rank receives something from each
    peer. Kernels in which a rank might receive nothing else exchange this signal.
    """
    pl.when(lax.axis_index("block") == 0)(lambda: fabric.signal(_HELLO, 1, release=False))


def wait_for_hellos(fabric: fb.Fabric, what: str) -> None:
    pl.when(lax.axis_index("block") == 0)(lambda: fabric.wait(_HELLO, 1, what))


def meet(fabric: fb.Fabric, together: Any) -> None:
    """Waits until all warpgroups that share the barrier `together` have called this function."""
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)
    # For the tests' simulator. On a GPU, the barrier above suffices.
    fabric.barrier()
