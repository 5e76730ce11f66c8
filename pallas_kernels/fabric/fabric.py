"""Defines the interface through which kernels communicate: ranks, peers' buffers, signals.

`symmetric.Gpus` is the fabric of ranks that have a GPU each. The tests' simulator is another: it
stacks all ranks' buffers along a leading axis of one array, makes the rank a grid axis, and runs
the same kernel bodies, all ranks at once, in Pallas' GPU interpreter with race detection.

A block communicates only with the blocks of its own index on other ranks, except for addresses and
values, which may go to all blocks of a peer. So a grid may have more blocks than the GPU can
run at a time without a deadlock, as long as every rank starts its blocks in order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic, ptx
from pallas_kernels.fabric.hardware import LANES

NOWHERE = -1  # the index of "no row" and of "no expert"
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


class Ranks(Protocol):
    """The ranks that a kernel runs on, and the operands and scratch that they add to the kernel."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def stacked(self) -> bool:
        """Whether all ranks are on one device."""

    @property
    def interpret(self) -> Any:
        """The options of Pallas' GPU interpreter, or None where the kernel runs on a GPU."""

    @property
    def operands(self) -> Sequence[jax.Array]:
        """The fabric's own operands, which every kernel takes before its caller's operands."""

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        """Returns the fabric's own scratch, for a kernel of which peers reach `num_buffers`."""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a buffer on this device, given its shape on one rank."""

    def enter(
        self, operands: Sequence[Any], buffers: Sequence[Any], *, name: str, num_blocks: int,
        reads: bool, **scratch: Any,
    ) -> None:  # fmt: skip
        """Begins a call of the kernel; `symmetric.Gpus.enter` describes the arguments."""


class Fabric(Ranks, Protocol):
    """The interface by which the ranks of a kernel communicate, within the kernel."""

    def connect(self) -> None:
        """Waits until every rank's buffers are known, so that this warpgroup may use `peer`."""

    def rank(self) -> jax.Array:
        """Returns this rank's number along the axes, [] int32, from 0 to N - 1."""

    def here(self) -> jax.Array:
        """Returns the place of this rank in the mesh."""

    def mine(self, ref: Any) -> Any:
        """Returns this rank's part of a buffer."""

    def peer(self, ref: Any, rank: Any) -> Any:
        """Returns a reference to rank `rank`'s buffer that corresponds to `ref` on this rank."""

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        """Signals `count`, for one kind of signal, to this block's counterpart on every rank."""

    def wait(self, kind: int, count: Any, what: str) -> None:
        """Waits until this block's counterpart on every rank has signalled `count` or more.

        `what` names the wait in the message of a timeout.
        """

    def send_values(self, words: Any, start: Any, ranks: Sequence[Any] | None = None) -> None:
        """Sends words to `ranks` (None: to all) as this rank's values from number `start` on."""

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        """Waits for n values that a rank sends, from number `start` on; copies them to `words`."""

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        """Sends `count` pairs of words of up to 16 bits to every rank, from pair `first` on."""

    def read_halves(self, rank: Any, words: Any, what: str) -> None:
        """Waits for all pairs that a rank sends by `send_halves`; copies them to `words` [n]."""

    def barrier(self) -> None:
        """Waits until all threads of this warpgroup have reached this barrier."""

    def async_fence(self) -> None:
        """Makes writes visible to this warpgroup's bulk copies, after it has waited for them."""

    def delay_point(self, number: int) -> None:
        """Names a point of a kernel at which a test may hold ranks back by different times.

        Point 0 is the beginning of the call; 1 is after writes to peers, before their signal; 2 is
        where data of peers is awaited or has arrived; 3 is the beginning of the warpgroup that
        fills gaps.
        """


@dataclasses.dataclass(frozen=True)
class RanksOfMesh:
    """Describes the ranks along axes of a mesh, each with a GPU, to kernels of every protocol.

    Attributes:
      axes: (stride, size) of each mesh axis that ranks lie along; the stride is counted in places
        of the mesh, its devices in row-major order.
      gpus: the number of the GPU at each place of the mesh.
      timeout_s: how many seconds a rank waits for a peer before it ends the program.
      delays_ns: the nanoseconds by which tests delay each rank, [point][rank].
    """

    axes: tuple[tuple[int, int], ...]
    gpus: tuple[int, ...]
    timeout_s: float = dataclasses.field(default=100.0, kw_only=True)
    delays_ns: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), kw_only=True)

    stacked = False
    interpret = None

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def mine(self, ref: Any) -> Any:
        """Returns this rank's part of a buffer."""
        return ref

    def barrier(self) -> None:
        """Waits until all threads of this warpgroup have reached this barrier."""
        ptx.barrier()

    def rank_and_corner(self, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the rank whose GPU is at a place of the mesh, and the place of rank 0's."""
        rank, corner = jnp.int32(0), place
        for stride, size in self.axes:
            along = lax.rem(lax.div(place, jnp.int32(stride)), jnp.int32(size))
            rank, corner = rank * size + along, corner - along * stride
        return rank, corner

    def gpu(self, place: jax.Array) -> jax.Array:
        """Returns the number of the GPU at a place of the mesh."""
        if self.gpus == tuple(range(len(self.gpus))):
            return place
        number = jnp.int32(self.gpus[0])
        for i, other in enumerate(self.gpus[1:], 1):
            number = jnp.where(place == i, other, number)
        return number

    def hold_back(self, point: int, rank: jax.Array) -> None:
        """Delays this rank at a delay point of the kernel, by the time in `delays_ns`."""
        if point < len(self.delays_ns):
            delay = jnp.int32(0)
            for r, nanoseconds in enumerate(self.delays_ns[point]):
                delay = jnp.where(rank == r, nanoseconds, delay)
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
    shared: Sequence[int] = (),
) -> Callable[..., Any]:
    """Builds a function of arrays that launches a kernel of `num_blocks` blocks per rank.

    Args:
      fabric: the ranks, and how they reach each other.
      body: the kernel's body; it is given references to inputs and outputs, and scratch by name.
      name: the kernel's name in profiles and messages.
      num_blocks: thread blocks per rank.
      num_warpgroups: warpgroups per block.
      out_type: shape and dtype of each output on one rank.
      scratch_types: the scratch that `body` takes, by name.
      shared: indices of the buffers that peers reach, counted over inputs and then outputs.

    Returns:
      A function of the inputs, arrays or references to arrays, that returns the outputs.

    Only `fabric.barrier` orders the threads of a warpgroup: where one thread reads what another
    wrote to shared memory, the body needs a barrier between the two.
    """
    of_fabric = fabric.scratch_types(len(shared))
    grid: dict[str, Any] = dict(grid=(num_blocks,), grid_names=("block",))
    if fabric.stacked:
        grid = dict(grid=(fabric.num_ranks, num_blocks), grid_names=("rank", "block"))

    def call(*operands: Any) -> Any:
        num_own, reads = len(fabric.operands), any(i < len(operands) for i in shared)

        def run(*refs: Any, **scratch: Any) -> None:
            own, refs = refs[:num_own], refs[num_own:]
            fabric.enter(
                own,
                [refs[i] for i in shared],
                name=name,
                num_blocks=num_blocks,
                reads=reads,
                **{key: scratch.pop(key) for key in of_fabric},
            )
            body(*refs, **scratch)

        wanted = mosaic.kernel(
            run,
            out_type=[jax.ShapeDtypeStruct(fabric.shape(t.shape), t.dtype) for t in out_type],
            scratch_types={**scratch_types, **of_fabric},
            num_threads=num_warpgroups,
            thread_name="warpgroup",
            auto_barriers=False,
            interpret=fabric.interpret,
            kernel_name=name,
            **grid,
        )
        # The body counts in int32, whatever the caller's default integers are. Only payloads of 64
        # bits, which a body moves and does not count with, need 64-bit types to be enabled.
        wide = any(operand.dtype.itemsize == 8 for operand in operands)
        with jax.enable_x64(wide):
            return wanted(*fabric.operands, *operands)

    return call


def update_in_place(
    arrays: Sequence[jax.Array], write: Callable[[Sequence[Any]], Any]
) -> tuple[tuple[jax.Array, ...], Any]:
    """Calls `write` with references to the arrays; returns the updated arrays and its result.

    A kernel that takes the references writes to the arrays' own memory. XLA copies an array first
    if something else still reads it.
    """
    refs = [jax.new_ref(array) for array in arrays]
    returned = write(refs)
    return tuple(jax.freeze(ref) for ref in refs), returned


def load(fabric: Ranks, ref: Any, vector: int) -> jax.Array:
    """Loads a contiguous 1D array into registers, `vector` neighbouring elements to a thread."""
    if fabric.interpret:
        return ref[...]
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector)
    return plgpu.load(ref, layout=layout)


def put_if(fabric: Fabric, predicate: jax.Array, source: Any, destination: Any) -> None:
    """Starts a copy from shared to global memory if `predicate` holds, without a branch on a GPU.

    The copy joins the group of copies that is open.
    """
    if not fabric.interpret:
        plgpu.copy_smem_to_gmem(source, destination, predicate=predicate, commit_group=False)
        return

    @pl.when(predicate)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)


def iota(fabric: Fabric, size: int, vector: int = 1) -> jax.Array:
    """Returns 0, 1, … size - 1 as int32 in registers, `vector` neighbours to a thread."""
    if fabric.interpret:
        return jnp.arange(size, dtype=jnp.int32)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def clear(ref: Any, size: int) -> None:
    """Sets ref[:size] of int32 to 0; `size` is a multiple of LANES."""
    for start in range(0, size, LANES):  # one large store would need a power of two elements
        ref[pl.ds(start, LANES)] = jnp.zeros((LANES,), jnp.int32)


def count(fabric: Fabric, bins: Any, values: jax.Array, num_bins: int) -> None:
    """Adds 1 to bins[v] in shared memory for each v of `values` with 0 <= v < num_bins.

    `values` is [n] int32 in registers.
    """
    if fabric.interpret:
        found = jnp.sum(values[:, None] == jnp.arange(bins.shape[0]), axis=0, dtype=jnp.int32)
        bins[...] += jnp.where(jnp.arange(bins.shape[0]) < num_bins, found, 0)
    else:
        ptx.count(bins, values, num_bins)


def first_peer(fabric: Fabric) -> jax.Array:
    """Returns the rank, modulo N, that this block communicates with first.

    Neighbouring blocks begin at different ranks, to spread the load over the links.
    """
    return fabric.rank() + lax.axis_index("block")


def any_row(places: Sequence[jax.Array]) -> jax.Array:
    """Returns whether any of the places is a row's index, so not NOWHERE."""
    return any_of([place >= 0 for place in places])


def any_of(conditions: Sequence[jax.Array]) -> jax.Array:
    """Returns whether any of the conditions, [] bool each, holds."""
    return functools.reduce(operator.or_, conditions)


def drain(empty: Any, used: jax.Array, num_stages: int) -> None:
    """Waits until every stage of a ring is empty; its stages were filled `used` times in all."""

    def wait(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(used - 1 - i, jnp.int32(num_stages))])

    lax.fori_loop(0, jnp.minimum(used, num_stages), wait, None)
