"""LL: tiles that say themselves that they have arrived, so that a call needs no rendezvous.

LL is NCCL's name for low-latency transfers in which the receiver polls the data. Every GPU owns
memory that outlives the calls and that its peers write to (`ll_memory`). A word of all ones stands
there wherever nothing has arrived: a receiver polls a tile until none of its words is that, takes
it, and puts the word back. (As in TensorRT-LLM's Lamport all-reduces, which mark what is empty by
a negative zero.)

  a worker   is a warpgroup of a kernel, by its number; workers of one number talk to each other;
  a channel  leads from a worker on one GPU to that on another. It has two sets of slots of a tile
             each, which calls use in turn: both ends count the calls.

So a set is empty when it is used again. A sender begins its third call when it has received all
that its peer sent in the second, which the peer began when its first had ended, and with that left
the set empty. This holds if two GPUs call each other one call at a time, and both in the same
order, and if every worker that takes part in a call sends something to each peer. What orders the
accesses of one call and the next is that a kernel begins when the one before has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import ptx, vectors
from pallas_kernels.fabric.layout import (
    MAX_DEVICES,
    MAX_SLOTS,
    MAX_WORKERS,
)
from pallas_kernels.fabric.plan import vector_length
from pallas_kernels.fabric.sentinel_words import Regions
from pallas_kernels.fabric.tiles import Plan


@dataclasses.dataclass(frozen=True)
class Channels:
    """The channels between the ranks along some axes of a mesh, for one kernel.

    Attributes:
      axes: those of the ranks: the stride of each among the mesh's places, and its size.
      devices: which GPU is at which place of the mesh.
      regions: the GPUs' memory.
    """

    axes: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]
    regions: Regions
    timeout_s: float = 100.0
    delays_ns: tuple[tuple[int, ...], ...] = ()  # for tests: [stage][rank]

    stacked = False
    interpret = None
    operands = ()

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def mine(self, ref: Any) -> Any:
        return ref

    def barrier(self) -> None:
        ptx.barrier()

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        return {}

    def enter(self, operands: Sequence[Any], buffers: Sequence[Any], **_: Any) -> None:
        pass

    def place(self, ref: Any) -> jax.Array:
        """Of this rank in the mesh, which `ref` refers to."""
        return ref[0]

    def stage(self, number: int, rank: jax.Array) -> None:
        """Names a point of a kernel at which a test may hold ranks back by different times."""
        if number < len(self.delays_ns):
            delay = jnp.int32(0)
            for r, nanoseconds in enumerate(self.delays_ns[number]):
                delay = jnp.where(rank == r, nanoseconds, delay)
            ptx.pause(delay)


class Mail:
    """A worker's channels, open for one call; a kernel opens them once.

    Attributes:
      rank: this one.
      peers: the other ranks, from the next one on.
    """

    def __init__(self, channels: Channels, place: jax.Array, worker: jax.Array, what: str):
        self.channels, self._worker, self._what = channels, worker, what
        self.rank, corner = jnp.int32(0), place  # that of rank 0
        for stride, size in channels.axes:
            along = lax.rem(lax.div(place, jnp.int32(stride)), jnp.int32(size))
            self.rank, corner = self.rank * size + along, corner - along * stride
        num_ranks = channels.num_ranks
        self.peers = [lax.rem(self.rank + j, jnp.int32(num_ranks)) for j in range(1, num_ranks)]
        self._here = self._device(place)
        self._there = [self._device(corner + self._offset(peer)) for peer in self.peers]
        self._counters = [worker * MAX_DEVICES + device for device in self._there]
        self._calls = channels.regions.read(self._here, self._counters)

    def post(self, slot: int, tiles_of_peers: Sequence[jax.Array], *, exact: bool = False) -> None:
        """Sends each peer its tile, to a slot of this call's set.

        `exact`: every bit of a NaN, too, arrives at peers who collect it so.
        """
        for device, calls, tile in zip(self._there, self._calls, tiles_of_peers, strict=True):
            number = self._slot(self._here, calls, slot)
            self.channels.regions.post(device, number, tile, exact=exact)

    def collect(
        self, slot: int, shape: tuple[int, ...], dtype: Any, *, exact: bool = False
    ) -> list[jax.Array]:
        """Waits for the tile that each peer has sent to a slot of this call's set."""
        slots = [
            self._slot(device, calls, slot)
            for device, calls in zip(self._there, self._calls, strict=True)
        ]
        return self.channels.regions.collect(
            self._here,
            slots,
            shape,
            dtype,
            rank=self.rank,
            peers=self.peers,
            timeout_s=self.channels.timeout_s,
            what=self._what,
            exact=exact,
        )

    def sum(self, slot: int, mine: jax.Array) -> jax.Array:
        """This rank's tile and those that arrive, summed in rank order in float32, and rounded."""
        parts = [mine, *self.collect(slot, mine.shape, mine.dtype)]
        parts = vectors.rotate(self.channels, parts, self.rank, vector_length(mine.dtype))
        total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))
        return total.astype(mine.dtype)

    def close(self) -> None:
        """This call has ended."""
        calls = [calls + 1 for calls in self._calls]
        self.channels.regions.write(self._here, self._counters, calls)

    def stage(self, number: int) -> None:
        self.channels.stage(number, self.rank)

    def _offset(self, rank: jax.Array) -> jax.Array:
        """From rank 0's place to that of a rank."""
        offset = jnp.int32(0)
        for stride, size in reversed(self.channels.axes):
            offset = offset + lax.rem(rank, jnp.int32(size)) * stride
            rank = lax.div(rank, jnp.int32(size))
        return offset

    def _device(self, place: jax.Array) -> jax.Array:
        devices = self.channels.devices
        if devices == tuple(range(len(devices))):
            return place
        device = jnp.int32(devices[0])
        for i, number in enumerate(devices[1:], 1):
            device = jnp.where(place == i, number, device)
        return device

    def _slot(self, sender: jax.Array, calls: jax.Array, slot: int) -> jax.Array:
        """The number of a slot of the channel from a GPU, among the receiver's."""
        set_of_sender = (calls & 1) * self.channels.regions.num_devices + sender
        return (set_of_sender * MAX_WORKERS + self._worker) * MAX_SLOTS + slot


def call(
    body: Callable[..., None],
    place: jax.Array,
    operands: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    channels: Channels,
    plan: Plan,
    num_slots: int,
    name: str,
    scratch_types: dict[str, Any] | None = None,
) -> list[jax.Array]:
    """Runs `body` on a worker's mail, the refs of operands and results, and those of scratch.

    Args:
      place: [1] int32, of this GPU in the mesh.
      out_type: one rank's.
      num_slots: that `body` uses; what it sends it also collects.
    """
    if plan.num_workers > MAX_WORKERS or num_slots > MAX_SLOTS:
        raise ValueError(
            f"LL has {MAX_WORKERS} workers of {MAX_SLOTS} slots, but {name} with {plan} needs "
            f"{plan.num_workers} of {num_slots}."
        )

    def run(place_ref: Any, *refs: Any, **scratch: Any) -> None:
        mail = Mail(channels, channels.place(place_ref), plan.worker(), name)
        mail.stage(0)
        body(mail, *(channels.mine(ref) for ref in refs), **scratch)
        mail.stage(2)
        mail.close()

    return fb.kernel(
        channels,
        run,
        name=name,
        num_blocks=plan.num_blocks,
        num_warpgroups=plan.num_warpgroups,
        out_type=out_type,
        scratch_types=scratch_types or {},
    )(place, *operands)
