"""The low-latency protocol: receivers poll the data itself, so a call needs no signals.

Data is sent in tiles of 2 KiB. Every GPU has tile buffers in symmetric memory, to which its peers
write tiles. The buffers outlive the calls of kernels. `memory_map` defines their addresses, and
`sentinel_words` reads and writes them. Every 32-bit word of an empty buffer holds a sentinel, all
ones. A receiver polls a buffer until none of its words is the sentinel, takes the tile, and writes
the sentinel back. TensorRT-LLM's Lamport all-reduces use this protocol, with a negative zero as the
sentinel. NCCL's protocol LL stores a flag next to each word instead.

  a worker   is a warpgroup of a kernel. It communicates with the worker of its number on each peer.
  a channel  leads from a worker on one GPU to the worker of the same number on another GPU. It has
             two sets of tile buffers, used by even and odd calls. Both ends count the calls.

A set is empty when it is used again. The third call of a sender uses the set of the first call. The
sender begins its third call after it has received all tiles that its peer sent in the second call.
The peer began its second call after it had ended its first call, in which it emptied the set. This
requires that two GPUs make their calls with each other one at a time and in the same order, and
that in every call each GPU receives something from each peer. Memory accesses of consecutive calls
are ordered because a kernel begins only after the previous kernel has ended.
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
    """The ranks of a kernel that communicates by the low-latency protocol.

    Each warpgroup that communicates does so by an `Endpoint`.

    Attributes:
      memory: the call counters and tile buffers of all GPUs, in symmetric memory.
    """

    memory: TileMemory

    operands = ()

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        return {}

    def enter(self, operands: Sequence[Any], buffers: Sequence[Any], **_: Any) -> None:
        pass

    def mesh_index(self, ref: Any) -> jax.Array:
        """Returns the row-major index of this rank's device in the mesh, [] int32.

        `ref` is a reference to an array [1] that holds the index.
        """
        return ref[0]


class Endpoint:
    """One warpgroup's connection to its peers by the low-latency protocol, during one kernel call.

    Each warpgroup that communicates makes one endpoint, and calls `close` after its last tile.

    Attributes:
      channels: the ranks, and the symmetric memory through which they communicate.
      rank: [] int32, this rank.
      peers: the other ranks, [] int32 each: rank + 1, rank + 2 and so on, modulo num_ranks.
    """

    def __init__(self, channels: Channels, mesh_index: jax.Array, worker: jax.Array, what: str):
        self.channels, self._worker, self._what = channels, worker, what
        self.rank, corner = channels.rank_and_corner(mesh_index)
        num_ranks = channels.num_ranks
        self.peers = [lax.rem(self.rank + j, jnp.int32(num_ranks)) for j in range(1, num_ranks)]
        self._here = channels.gpu(mesh_index)
        self._there = [channels.gpu(corner + self._offset(peer)) for peer in self.peers]
        self._counters = [worker * MAX_LOW_LATENCY_GPUS + gpu for gpu in self._there]
        self._calls = channels.memory.read(self._here, self._counters)

    def send(self, index: int, tiles_of_peers: Sequence[jax.Array], *, exact: bool = False) -> None:
        """Sends a tile to each peer.

        Args:
          index: the number of these tiles in this call, counted from 0. The peers pass it to
            `receive`.
          tiles_of_peers: the tile for each of `peers`, in registers.
          exact: whether NaNs keep their bits; the peers' `receive` must pass the same value.
        """
        for i, tile in enumerate(tiles_of_peers):
            self.send_to(i, index, tile, exact=exact)

    def send_to(self, i: int, index: int, tile: jax.Array, *, exact: bool = False) -> None:
        """Sends a tile to peers[i], which receives it by `receive(index)` in the same kernel call.

        See `send` for the arguments.
        """
        number = self._buffer(self._here, self._there[i], self._calls[i], index)
        self.channels.memory.send(self._there[i], number, tile, exact=exact)

    def receive(
        self, index: int, shape: tuple[int, ...], dtype: Any, *, exact: bool = False
    ) -> list[jax.Array]:
        """Waits for one tile from each peer, and returns these tiles.

        Args:
          index: the number of the tiles in this call, which the peers pass to `send`.
          shape: the shape of each tile.
          dtype: the dtype of each tile.
          exact: whether NaNs keep their bits; the peers' `send` must pass the same value.

        Returns:
          The tile of each of `peers`, in registers.
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
        """Waits for several tiles of this call from each peer at once, and returns them.

        Args:
          indices: the numbers of the tiles in this call, which the peers pass to `send`.
          shape: the shape of each tile.
          dtype: the dtype of each tile.
          exact: whether NaNs keep their bits; the peers' `send` must pass the same value.
          wanted: wanted[i][j], [] bool, is whether peers[j] sends the tile of number indices[i].
            None if all peers send all tiles.

        Returns:
          For each index, the tile of each of `peers`, in registers. A tile that is not sent is
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
        """Receives a tile from each peer, and returns their sum with this rank's tile `mine`.

        The peers send tiles of the shape and dtype of `mine` as tile number `index` of this call.
        The tiles are added in rank order in float32, so that all ranks get equal bits. The sum is
        rounded once, to the dtype of `mine`.
        """
        parts = [mine, *self.receive(index, mine.shape, mine.dtype)]
        parts = vectors.rotate(self.channels, parts, self.rank, vector_length(mine.dtype))
        total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))
        return total.astype(mine.dtype)

    def close(self) -> None:
        """Ends this call: increments this warpgroup's counter of calls with each peer."""
        calls = [calls + 1 for calls in self._calls]
        self.channels.memory.write(self._here, self._counters, calls)

    def delay_point(self, number: int) -> None:
        """Delays this rank if a test set a delay for point `number`; see `Fabric.delay_point`."""
        self.channels.hold_back(number, self.rank)

    def _offset(self, rank: jax.Array) -> jax.Array:
        """Returns the mesh index of `rank`'s device minus that of rank 0's device, [] int32.

        Mesh indices count the devices of the mesh in row-major order.
        """
        offset = jnp.int32(0)
        for stride, size in reversed(self.channels.axes):
            offset = offset + lax.rem(rank, jnp.int32(size)) * stride
            rank = lax.div(rank, jnp.int32(size))
        return offset

    def _buffer(
        self, sender: jax.Array, receiver: jax.Array, calls: jax.Array, index: int
    ) -> jax.Array:
        """Returns the number of a tile buffer, counted among the tile buffers of GPU `receiver`.

        In a call, the buffer receives tile number `index` of those that a warpgroup of GPU `sender`
        sends to GPU `receiver`: the warpgroup with the same number as this one. `calls` is how many
        calls the two GPUs have made with each other before. It selects one of two sets of buffers,
        for even and odd calls.
        """
        num_gpus = self.channels.memory.num_gpus
        senders = num_senders(num_gpus)
        # The sending GPUs are numbered from GPU receiver + 1 on, modulo the number of GPUs, so that
        # no buffers are needed for the receiver itself.
        number = lax.rem(sender - receiver + senders, jnp.int32(senders + 1))
        set_of_sender = (calls & 1) * senders + number
        channel = set_of_sender * MAX_WORKERS + self._worker
        return channel * tiles_of_channel(num_gpus) + index
