"""Defines the interface by which kernels communicate: ranks, peers' buffers, signals and waits.

A fabric is an implementation of this interface. `symmetric.Gpus` connects ranks that have a GPU
each. The tests' simulator stacks the buffers of all ranks along a leading axis of one array, makes
the rank a grid axis, and runs the same kernel bodies in Pallas' GPU interpreter, all ranks at once,
with race detection.

A thread block waits only for the blocks of its own index on other ranks. So a grid may have more
blocks than the GPU can run at a time, without a deadlock, if every rank starts its blocks in order.
There are two exceptions: a block of any index may wait for the addresses of a peer's buffers, and
for the numbers that a peer sends by `send_values`.
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
from pallas_kernels.fabric.hardware import WARPGROUP

# Stands for "no row" or "no expert" in arrays of row or expert indices.
NOWHERE = -1
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


class Ranks(Protocol):
    """The ranks that a kernel runs on, and what the kernel's launch needs for communication.

    Communication needs operands and scratch of its own, which this class defines. The function
    `kernel` launches a kernel with these besides the operands and scratch of the kernel's body.
    """

    @property
    def num_ranks(self) -> int: ...

    @property
    def stacked(self) -> bool:
        """Whether all ranks run on one device, in the tests' simulator.

        A buffer then has a leading axis of num_ranks, along which the ranks' buffers are stacked.
        """

    @property
    def interpret(self) -> Any:
        """The options of Pallas' GPU interpreter, or None where the kernel runs on a GPU."""

    @property
    def operands(self) -> Sequence[jax.Array]:
        """The arrays that communication needs; every kernel takes them before its own operands."""

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        """Returns the types of the scratch that communication needs, by name.

        `num_buffers` is the number of buffers that peers access.
        """

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that a buffer has on a device, given its `shape` on one rank.

        It is `shape` itself or, if buffers are `stacked`, has a leading axis of num_ranks.
        """

    def enter(
        self, operands: Sequence[Any], buffers: Sequence[Any], *, name: str, num_blocks: int,
        reads: bool, **scratch: Any,
    ) -> None:  # fmt: skip
        """Begins one run of the kernel, before its body; see `symmetric.Gpus.enter`."""


class Fabric(Ranks, Protocol):
    """The operations by which a kernel's body communicates with the other ranks."""

    def connect(self) -> None:
        """Waits until this rank has received the addresses of the other ranks' buffers.

        A warpgroup must call it before it calls `peer`, which needs these addresses.
        """

    def rank(self) -> jax.Array:
        """Returns the index of this rank among the kernel's ranks, [] int32, from 0 on."""

    def here(self) -> jax.Array:
        """Returns the index of this rank's device in the mesh, in row-major order, [] int32."""

    def mine(self, ref: Any) -> Any:
        """Returns a reference to this rank's own buffer; `ref` is the kernel's reference to it.

        The result is `ref` itself. But if all ranks' buffers are `stacked` in one array, `ref`
        refers to this array, and the result to this rank's entry of it.
        """

    def peer(self, ref: Any, rank: Any) -> Any:
        """Returns a reference to the memory of rank `rank` that corresponds to `ref` on this rank.

        `ref` is one of the buffers that `kernel` was told to share, or a slice of one.
        """

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        """Sends a signal with the number `count` to every rank, for the block of the same index.

        There are two kinds of signals, 0 and 1, which do not affect each other. If a block sends
        several signals of a `kind` in a call, each must have a larger `count` than the one before.
        With `release`, a peer that sees the signal also sees what this warpgroup wrote before.
        """

    def wait(self, kind: int, count: Any, what: str) -> None:
        """Waits until the signal of `kind` from every rank is `count` or more.

        On each rank, the block with this block's index sends the signal. If `count` is 0, nothing
        is waited for. `what` names the wait in the error message of a timeout.
        """

    def send_values(self, words: Any, start: Any, ranks: Sequence[Any] | None = None) -> None:
        """Sends the n 32-bit numbers `words` to each of `ranks`, or to all ranks if None.

        A receiver selects the numbers that it wants by their indices among all that this rank
        sends to it in a call: words[i] has the index start + i. See `read_values`.
        """

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        """Waits for n numbers that `rank` sends by `send_values`, and copies them to `words` [n].

        They are the numbers that `rank` sends with the indices start to start + n - 1. `what` names
        the wait in the error message of a timeout.
        """

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        """Sends pairs of int32 to every rank: `count` pairs of `words`, from pair `first` on.

        Pair i is (words[2 * i], words[2 * i + 1]), and has the number i at the receiver, too. A
        pair is sent as one 32-bit number: an int32 that does not fit in 16 bits arrives as -1.
        """

    def read_halves(self, rank: Any, words: Any, what: str) -> None:
        """Waits for the pairs of int32 that `rank` sends by `send_halves`; copies them to `words`.

        `words` is [n] int32, for n / 2 pairs, rounded up. Pair i goes to words[2 * i] and
        words[2 * i + 1]. `what` names the wait in the error message of a timeout.
        """

    def barrier(self) -> None:
        """Waits until all threads of this warpgroup have reached this barrier."""

    def async_fence(self) -> None:
        """Orders this warpgroup's next bulk copies (TMA) after the peers' writes it has waited for.

        Without this fence a bulk copy may still read what the memory held before these writes.
        """

    def delay_point(self, number: int) -> None:
        """Marks a point of a kernel at which a test may delay each rank by a different time.

        Point 0 is the beginning of a call of the kernel. Point 1 is after writes to peers and
        before the signal of these writes. Point 2 is before or after the wait for peers' data.
        Point 3 is where a warpgroup begins to fill the padding between expert groups.
        """


@dataclasses.dataclass(frozen=True)
class RanksOfMesh:
    """The ranks along some axes of a mesh, each with a GPU.

    It is the base class of `symmetric.Gpus`, and of `low_latency.Channels` for the low-latency
    protocol. A device's *mesh index* is its index in the mesh, in row-major order.

    Attributes:
      axes: (stride, size) of each mesh axis along which the ranks lie. The stride is the difference
        of the mesh indices of two devices that are neighbours along the axis.
      gpus: for each mesh index, the number of the device's GPU among the GPUs of the host.
      timeout_s: the seconds that a rank waits for a peer before it aborts the program.
      delays_ns: delays_ns[point][rank] is the number of nanoseconds by which a test delays a rank
        at a delay point; see `Fabric.delay_point`. Empty outside of tests.
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
        """Returns a reference to this rank's own buffer: `ref`, since no two ranks share one."""
        return ref

    def barrier(self) -> None:
        """Waits until all threads of this warpgroup have reached this barrier."""
        ptx.barrier()

    def rank_and_corner(self, mesh_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the rank of a device, and the mesh index of the device with rank 0.

        Devices whose mesh coordinates differ only along the ranks' axes communicate with each
        other, and one of them has rank 0.
        """
        rank, corner = jnp.int32(0), mesh_index
        for stride, size in self.axes:
            along = lax.rem(lax.div(mesh_index, jnp.int32(stride)), jnp.int32(size))
            rank, corner = rank * size + along, corner - along * stride
        return rank, corner

    def gpu(self, mesh_index: jax.Array) -> jax.Array:
        """Returns the number on its host of the GPU with the mesh index `mesh_index`."""
        if self.gpus == tuple(range(len(self.gpus))):
            return mesh_index
        number = jnp.int32(self.gpus[0])
        for i, other in enumerate(self.gpus[1:], 1):
            number = jnp.where(mesh_index == i, other, number)
        return number

    def hold_back(self, point: int, rank: jax.Array) -> None:
        """Waits for delays_ns[point][rank] nanoseconds, if a test has set delays for `point`.

        `rank` is this rank, and `point` the number of a delay point (see `Fabric.delay_point`).
        """
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
      fabric: the ranks, and the means by which they communicate.
      body: the kernel's body. It takes references to the inputs and outputs, and scratch by name.
        Pallas adds no barriers to it: where a thread reads shared memory that another thread of its
        warpgroup wrote, the body must call `fabric.barrier` in between.
      name: the kernel's name in profiles and messages.
      num_blocks: number of thread blocks per rank.
      num_warpgroups: number of warpgroups per block.
      out_type: shape and dtype of each output on one rank.
      scratch_types: the types of the scratch that `body` takes, by name.
      shared: indices of the buffers that peers read or write, counted over inputs and then outputs.

    Returns:
      A function of the inputs, arrays or references to arrays, that returns the outputs.
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
        # The body's indices are int32, whatever the caller's default integer type is. Only operands
        # of 64-bit dtypes, which the body copies without arithmetic, need 64-bit types enabled.
        wide = any(operand.dtype.itemsize == 8 for operand in operands)
        with jax.enable_x64(wide):
            return wanted(*fabric.operands, *operands)

    return call


def update_in_place(
    arrays: Sequence[jax.Array], write: Callable[[Sequence[Any]], Any]
) -> tuple[tuple[jax.Array, ...], Any]:
    """Lets a kernel write to parts of existing arrays, without copies of the arrays.

    Calls `write` with references to the arrays. A kernel that `write` calls with these references
    writes to the arrays' own memory. If an array is still used elsewhere, XLA first copies it.

    Returns:
      (the updated arrays, what `write` returned).
    """
    refs = [jax.new_ref(array) for array in arrays]
    returned = write(refs)
    return tuple(jax.freeze(ref) for ref in refs), returned


def load(fabric: Ranks, ref: Any, vector: int) -> jax.Array:
    """Loads a contiguous 1D array into the registers of a warpgroup.

    Each thread then holds vectors of `vector` neighbouring elements.
    """
    if fabric.interpret:
        return ref[...]
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector)
    return plgpu.load(ref, layout=layout)


def put_if(fabric: Fabric, predicate: jax.Array, source: Any, destination: Any) -> None:
    """Starts a bulk copy from shared to global memory if the scalar `predicate` is true.

    On a GPU the copy instruction itself is predicated, so no branch is emitted. The copy is not
    committed: the caller's next commit puts it into a group of copies, which can be waited for.
    """
    if not fabric.interpret:
        plgpu.copy_smem_to_gmem(source, destination, predicate=predicate, commit_group=False)
        return

    @pl.when(predicate)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)


def iota(fabric: Fabric, size: int, vector: int = 1) -> jax.Array:
    """Returns the array 0, 1, … size - 1 of int32 in the registers of a warpgroup.

    Each thread holds vectors of `vector` neighbouring elements.
    """
    if fabric.interpret:
        return jnp.arange(size, dtype=jnp.int32)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def clear(ref: Any, size: int) -> None:
    """Sets the int32 elements ref[:size] to 0; `size` is a multiple of WARPGROUP."""
    # One store of the whole slice would require that `size` is a power of two.
    for start in range(0, size, WARPGROUP):
        ref[pl.ds(start, WARPGROUP)] = jnp.zeros((WARPGROUP,), jnp.int32)


def count(fabric: Fabric, bins: Any, values: jax.Array, num_bins: int) -> None:
    """Counts equal values: for each v in `values` adds 1 to bins[v], if 0 <= v < num_bins.

    `values` is [n] int32 in registers, and `bins` is int32 in shared memory.
    """
    if fabric.interpret:
        found = jnp.sum(values[:, None] == jnp.arange(bins.shape[0]), axis=0, dtype=jnp.int32)
        bins[...] += jnp.where(jnp.arange(bins.shape[0]) < num_bins, found, 0)
    else:
        ptx.count(bins, values, num_bins)


def first_peer(fabric: Fabric) -> jax.Array:
    """Returns the rank with which this block begins its loop over all ranks.

    The result may exceed num_ranks - 1; the caller takes it modulo num_ranks. Consecutive blocks
    begin with different ranks, so that they do not all send over the same link.
    """
    return fabric.rank() + lax.axis_index("block")


def any_row(rows: Sequence[jax.Array]) -> jax.Array:
    """Returns whether any of `rows`, [] int32 each, is the index of a row and not NOWHERE."""
    return any_of([row >= 0 for row in rows])


def any_of(conditions: Sequence[jax.Array]) -> jax.Array:
    """Returns whether any of the conditions, [] bool each, holds; [] bool."""
    return functools.reduce(operator.or_, conditions)


def drain(empty: Any, used: jax.Array, num_stages: int) -> None:
    """Waits until consumers have emptied all stages of a ring of pipeline stages.

    The warpgroup that fills the stages calls it before it ends.

    Args:
      empty: [num_stages] barriers. Consumers arrive at a stage's barrier when they have emptied it.
      used: int32, how many times this block has filled a stage of the ring.
      num_stages: number of stages.
    """

    def wait(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(used - 1 - i, jnp.int32(num_stages))])

    lax.fori_loop(0, jnp.minimum(used, num_stages), wait, None)
