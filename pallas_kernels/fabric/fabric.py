"""Put, signal and wait between ranks: the layer that the kernels use to reach each other.

A kernel body asks the fabric for its rank, for a peer's buffer, and for a rendezvous. Two fabrics
give the same body two ways to run:

  Mesh     each rank is a device of a mesh; a peer's buffer is a remote reference.
  Stacked  all ranks' buffers are stacked along a leading axis of one array and the rank is a grid
           axis. The simulator of the tests makes a fabric of it that runs whole kernels, all ranks
           at once, in Pallas' GPU interpreter with race detection.

A block communicates only with the blocks of its own index on other ranks. So a grid may be larger
than the GPU without a deadlock, as long as every rank starts its blocks in order.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import ptx
from pallas_kernels.fabric.plan import LANES

NOWHERE = -1  # in place of a row, or of an expert
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


class Ranks(Protocol):
    """What a kernel's ranks run on: a fabric of this module, or the channels of `ll`."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def stacked(self) -> bool:
        """Whether all of them are on one device."""

    @property
    def interpret(self) -> Any:
        """The options of Pallas' GPU interpreter; None on a GPU."""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a buffer of all ranks of this device, given that of one rank."""


class OnDevices:
    """Ranks with one device each."""

    stacked = False
    interpret = None

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def mine(self, ref: Any) -> Any:
        """This rank's part of a buffer."""
        return ref

    def barrier(self) -> None:
        """Makes all threads of this warpgroup wait for each other."""
        ptx.barrier()


@dataclasses.dataclass(frozen=True)
class Mesh(OnDevices):
    """Ranks along one or several axes of the mesh of the enclosing `shard_map`."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    timeout_s: float = 100.0
    delays_ns: tuple[tuple[int, ...], ...] = ()  # for tests: [stage][rank]

    @property
    def num_ranks(self) -> int:
        size = 1
        for axis_size in self.axis_sizes:
            size *= axis_size
        return size

    def rank(self) -> jax.Array:
        # A kernel that asks for its device is a collective one, even with nobody to talk to.
        return lax.axis_index(self.axis_names) if self.num_ranks > 1 else jnp.int32(0)

    def peer(self, ref: Any, rank: Any) -> Any:
        """The same buffer on another rank."""
        if self.num_ranks == 1:
            return ref
        return plgpu.remote_ref(ref, self._device_id(rank))

    def touch(self, *refs: Any) -> None:
        """Looks up the addresses of the peers' buffers ahead of their first use."""
        if self.num_ranks > 1:
            ptx.touch([self.peer(ref, rank) for ref in refs for rank in range(self.num_ranks)])

    def signal(self, semaphores: Any, channel: int, *, release: bool = True) -> None:
        """Signals every rank on this channel; releases what this warpgroup wrote before.

        Without `release` the signal orders this warpgroup's earlier reads alone: it arrives a
        microsecond sooner, as it does not wait for writes under way.
        """
        mine = semaphores.at[channel, self.rank()]
        peers = [self.peer(mine, rank) for rank in range(self.num_ranks)]
        ptx.signal(peers, release=release)

    def wait(self, semaphores: Any, channel: int, count: Any, what: str) -> None:
        """Waits until every rank has signalled `count` times on this channel."""
        from_ranks = [semaphores.at[channel, rank] for rank in range(self.num_ranks)]
        axes = self.axes()
        ptx.wait(from_ranks, count, timeout_s=self.timeout_s, what=what, axes=axes)

    def async_fence(self) -> None:
        """Makes what this warpgroup has waited for visible to its bulk copies."""
        ptx.async_fence()

    def stage(self, number: int) -> None:
        """Names a point of a kernel at which a test may hold ranks back by different times."""
        hold_back(self.delays_ns, number, self.rank)

    def axes(self) -> tuple[tuple[int, int], ...]:
        """For each axis: its stride among the mesh's devices, and its size."""
        if self.num_ranks == 1:
            return ()
        mesh = jax.sharding.get_abstract_mesh()
        strides, stride = {}, 1
        for name, size in reversed(mesh.shape.items()):
            strides[name] = stride
            stride *= size
        return tuple(
            (strides[name], size)
            for name, size in zip(self.axis_names, self.axis_sizes, strict=True)
        )

    def _device_id(self, rank: Any) -> dict[str, jax.Array]:
        device_id = {}
        rank = jnp.asarray(rank, jnp.int32)
        for name, size in reversed(list(zip(self.axis_names, self.axis_sizes, strict=True))):
            device_id[name] = lax.rem(rank, jnp.int32(size))
            rank = lax.div(rank, jnp.int32(size))
        return device_id


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Ranks stacked along the leading axis of every buffer of one device."""

    num_ranks: int
    interpret: Any = None

    stacked = True

    def rank(self) -> jax.Array:
        return lax.axis_index("rank")

    def mine(self, ref: Any) -> Any:
        return ref.at[self.rank()]

    def peer(self, ref: Any, rank: Any) -> Any:
        return ref.at[rank]

    def touch(self, *refs: Any) -> None:
        pass

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (self.num_ranks, *shape)

    def signal(self, semaphores: Any, channel: int, *, release: bool = True) -> None:
        raise NotImplementedError("ranks on one device signal each other only in the simulator.")

    def wait(self, semaphores: Any, channel: int, count: Any, what: str) -> None:
        raise NotImplementedError("ranks on one device wait for each other only in the simulator.")

    def barrier(self) -> None:
        raise NotImplementedError("ranks on one device meet only in the simulator.")

    def async_fence(self) -> None:
        pass

    def stage(self, number: int) -> None:
        pass


Fabric = Mesh | Stacked


def hold_back(
    delays_ns: Sequence[Sequence[int]], stage: int, rank: Callable[[], jax.Array]
) -> None:
    """Makes a rank wait at a stage for its time [stage][rank], if there is one."""
    if stage < len(delays_ns):
        delay, here = jnp.int32(0), rank()
        for r, nanoseconds in enumerate(delays_ns[stage]):
            delay = jnp.where(here == r, nanoseconds, delay)
        ptx.pause(delay)


def kernel(
    fabric: Ranks,
    body: Callable[..., None],
    *,
    name: str,
    num_blocks: int,
    num_warpgroups: int,
    out_type: Sequence[jax.ShapeDtypeStruct],
    scratch_types: dict[str, Any],
    num_channels: int,
) -> Callable[..., Any]:
    """A kernel of `num_blocks` blocks per rank; `body` gets input, output and scratch refs.

    `out_type` is one rank's. The channels of `signal` and `wait` come as the scratch ref
    `semaphores`; the blocks of one index on all ranks share them. There are none where ranks are
    stacked.

    Nothing but `fabric.barrier` orders the threads of a warpgroup: what one thread writes and
    another reads, in shared memory, needs a barrier between the two.
    """
    scratch_types = dict(scratch_types)
    if fabric.stacked:
        grid: dict[str, Any] = dict(
            grid=(fabric.num_ranks, num_blocks), grid_names=("rank", "block")
        )
        run = functools.partial(body, semaphores=None) if num_channels else body
    else:
        grid = dict(grid=(num_blocks,), grid_names=("block",))
        run = body
        if num_channels:
            semaphores = plgpu.SemaphoreType.REGULAR((num_channels, fabric.num_ranks))
            scratch_types["semaphores"] = semaphores
    call = plgpu.kernel(
        run,
        out_type=[jax.ShapeDtypeStruct(fabric.shape(t.shape), t.dtype) for t in out_type],
        scratch_types=scratch_types,
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=fabric.interpret,
        kernel_name=name,
        **grid,
    )

    def kernel_of_32_bits(*operands: jax.Array) -> Any:
        # Whatever the caller's default integers are, the body's are int32: only 64-bit payloads,
        # which such a body moves but does not count with, need the wider types.
        wide = any(operand.dtype.itemsize == 8 for operand in operands)
        with jax.enable_x64(wide):
            return call(*operands)

    return kernel_of_32_bits


def load(fabric: Ranks, ref: Any, vector: int) -> jax.Array:
    """Loads a contiguous 1D vector into registers, `vector` neighbours to a thread."""
    if fabric.interpret:
        return ref[...]
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector)
    return plgpu.load(ref, layout=layout)


def put_if(fabric: Fabric, predicate: jax.Array, source: Any, destination: Any) -> None:
    """Starts a copy from shared memory, in the open group; without a branch on a GPU."""
    if not fabric.interpret:
        plgpu.copy_smem_to_gmem(source, destination, predicate=predicate, commit_group=False)
        return

    @pl.when(predicate)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)


def iota(fabric: Fabric, size: int, vector: int = 1) -> jax.Array:
    """[size] int32 in registers, `vector` neighbours to a thread."""
    if fabric.interpret:
        return jnp.arange(size, dtype=jnp.int32)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def clear(ref: Any, size: int) -> None:
    """ref[:size] = 0, for whole vectors of int32."""
    for start in range(0, size, LANES):  # a store of more zeros wants a power of two of them
        ref[pl.ds(start, LANES)] = jnp.zeros((LANES,), jnp.int32)


def count(fabric: Fabric, bins: Any, values: jax.Array, num_bins: int) -> None:
    """bins[v] += 1 in shared memory for each of the values [n] in registers that is in range."""
    if fabric.interpret:
        found = jnp.sum(values[:, None] == jnp.arange(bins.shape[0]), axis=0, dtype=jnp.int32)
        bins[...] += jnp.where(jnp.arange(bins.shape[0]) < num_bins, found, 0)
    else:
        ptx.count(bins, values, num_bins)


def first_peer(fabric: Fabric) -> jax.Array:
    """The rank, modulo N, that a block communicates with first; blocks differ in it."""
    return fabric.rank() + lax.axis_index("block")


def any_of(places: Sequence[jax.Array]) -> jax.Array:
    """Whether any of the places is a row, and not NOWHERE."""
    return functools.reduce(operator.or_, [place >= 0 for place in places])


def drain(empty: Any, used: jax.Array, num_slots: int) -> None:
    """Waits until every slot of a ring that was ever filled is empty again."""

    def wait(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(used - 1 - i, jnp.int32(num_slots))])

    lax.fori_loop(0, jnp.minimum(used, num_slots), wait, None)
