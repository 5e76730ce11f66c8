"""The low-latency protocol: receivers poll the payload itself, so a call needs no rendezvous.

Every GPU has tile buffers that outlive the calls, and that its peers write tiles to. `memory_map`
says where they are; `sentinel_words` reads and writes them. An empty buffer holds a sentinel in
every 32-bit word, all ones. A receiver polls a buffer until none of its words is the sentinel,
takes the tile, and writes the sentinel back. This is the protocol of TensorRT-LLM's Lamport
all-reduces, whose sentinel is a negative zero; NCCL's protocol LL stores a flag next to each word
instead.

  a worker   is a warpgroup of a kernel; it communicates with the workers of its number on peers;
  a channel  leads from a worker on one GPU to the worker of the same number on another. It has two
             sets of tile buffers, which calls use in turn. Both ends count the calls.

A set is empty when it is used again, for this reason. A sender begins its third call after it has
received all that its peer sent in the second. The peer began the second call after it had ended the
first, which emptied the set. This holds if two GPUs make their calls with each other one at a time
and in the same order, and if in every call each GPU receives something of each peer.
Accesses of consecutive calls are ordered because a kernel begins when the one before has ended.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import vector_length
from pallas_kernels.fabric.memory_map import (
    MAX_LOW_LATENCY_GPUS,
    MAX_WORKERS,
    num_senders,
    tiles_of_channel,
)
from pallas_kernels.fabric.sentinel_words import TileMemory


@dataclasses.dataclass(frozen=True)
class Channels(fb.RanksOfMesh):
    """Connects the ranks along some axes of a mesh by the low-latency protocol, for one kernel.

    Attributes:
      memory: the counters and tile buffers of the GPUs.
    """

    memory: TileMemory

    operands = ()

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        return {}

    def enter(self, operands: Sequence[Any], buffers: Sequence[Any], **_: Any) -> None:
        pass

    def place(self, ref: Any) -> jax.Array:
        """Returns this rank's place in the mesh, which `ref` [1] int32 holds."""
        return ref[0]


class Endpoint:
    """Sends tiles to a worker's peers and receives theirs, during one call.

    A kernel makes one, and calls `close` when it has sent and received everything.

    Attributes:
      rank: this rank.
      peers: the other ranks, from the next higher one on, modulo N.
    """

    def __init__(self, channels: Channels, place: jax.Array, worker: jax.Array, what: str):
        self.channels, self._worker, self._what = channels, worker, what
        self.rank, corner = channels.rank_and_corner(place)
        num_ranks = channels.num_ranks
        self.peers = [lax.rem(self.rank + j, jnp.int32(num_ranks)) for j in range(1, num_ranks)]
        self._here = channels.gpu(place)
        self._there = [channels.gpu(corner + self._offset(peer)) for peer in self.peers]
        self._counters = [worker * MAX_LOW_LATENCY_GPUS + gpu for gpu in self._there]
        self._calls = channels.memory.read(self._here, self._counters)

    def send(self, index: int, tiles_of_peers: Sequence[jax.Array], *, exact: bool = False) -> None:
        """Sends each peer its tile number `index` of this call.

        With `exact`, here and in the peers' `receive`, the bits of NaNs arrive unchanged too.
        """
        for i, tile in enumerate(tiles_of_peers):
            self.send_to(i, index, tile, exact=exact)

    def send_to(self, i: int, index: int, tile: jax.Array, *, exact: bool = False) -> None:
        """Sends a tile to the i-th of `peers`; see `send`."""
        number = self._buffer(self._here, self._there[i], self._calls[i], index)
        self.channels.memory.send(self._there[i], number, tile, exact=exact)

    def receive(
        self, index: int, shape: tuple[int, ...], dtype: Any, *, exact: bool = False
    ) -> list[jax.Array]:
        """Receives each peer's tile number `index` of this call.

        With `exact`, here and in the peers' `send`, the bits of NaNs arrive unchanged too.
        """
        return self.receive_all([index], shape, dtype, exact=exact)[0]

    def receive_all(
        self,
        indices: Sequence[int],
        shape: tuple[int, ...],
        dtype: Any,
        *,
        exact: bool = False,
        wanted: Sequence[Sequence[jax.Array]] | None = None,
    ) -> list[list[jax.Array]]:
        """Receives several tiles of this call from each peer, at once.

        Args:
          indices: the tiles' numbers in this call.
          shape: the shape of each tile.
          dtype: the dtype of each tile.
          exact: whether the bits of NaNs arrive unchanged; the peers' `send` must pass the same.
          wanted: for each index, which peers send that tile; None: all.

        Returns:
          For each index the tile of each peer; what is returned for a peer that sends none is
          undefined.
        """
        numbers = [
            self._buffer(gpu, self._here, calls, index)
            for index in indices
            for gpu, calls in zip(self._there, self._calls, strict=True)
        ]
        tiles = self.channels.memory.receive(
            self._here,
            numbers,
            shape,
            dtype,
            rank=self.rank,
            peers=self.peers * len(indices),
            timeout_s=self.channels.timeout_s,
            what=self._what,
            exact=exact,
            wanted=None if wanted is None else [w for of_tile in wanted for w in of_tile],
        )
        count = len(self.peers)
        return [tiles[first : first + count] for first in range(0, len(tiles), count)]

    def sum(self, index: int, mine: jax.Array) -> jax.Array:
        """Receives a tile of each peer and adds them to `mine`: in rank order, rounded once.

        The sum is taken in float32, and has the dtype of `mine`.
        """
        parts = [mine, *self.receive(index, mine.shape, mine.dtype)]
        parts = vectors.rotate(self.channels, parts, self.rank, vector_length(mine.dtype))
        total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))
        return total.astype(mine.dtype)

    def close(self) -> None:
        """Ends this call, by counting it for each peer."""
        calls = [calls + 1 for calls in self._calls]
        self.channels.memory.write(self._here, self._counters, calls)

    def delay_point(self, number: int) -> None:
        """See `fabric.Fabric.delay_point`."""
        self.channels.hold_back(number, self.rank)

    def _offset(self, rank: jax.Array) -> jax.Array:
        """Returns the difference between the places in the mesh of a rank and of rank 0."""
        offset = jnp.int32(0)
        for stride, size in reversed(self.channels.axes):
            offset = offset + lax.rem(rank, jnp.int32(size)) * stride
            rank = lax.div(rank, jnp.int32(size))
        return offset

    def _buffer(
        self, sender: jax.Array, receiver: jax.Array, calls: jax.Array, index: int
    ) -> jax.Array:
        """Returns the number, among the receiver's, of this worker's tile buffer for GPU `sender`.

        `calls` is how many calls the two GPUs have made; it selects one of the two sets.
        """
        num_gpus = self.channels.memory.num_gpus
        senders = num_senders(num_gpus)
        # Counted from the receiver's next neighbour, so that it has no buffers for itself.
        number = lax.rem(sender - receiver + senders, jnp.int32(senders + 1))
        set_of_sender = (calls & 1) * senders + number
        channel = set_of_sender * MAX_WORKERS + self._worker
        return channel * tiles_of_channel(num_gpus) + index
