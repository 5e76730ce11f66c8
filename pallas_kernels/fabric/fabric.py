"""The interface by which kernels communicate: ranks, peers' buffers, signals and waits.

`symmetric.Gpus` implements it for ranks that have a GPU each. The tests' simulator stacks the
buffers of all ranks along a leading axis of one array, makes the rank a grid axis, and runs the
same kernel bodies in Pallas' GPU interpreter, all ranks at once, with race detection.

A thread block waits only for the blocks of its own index on other ranks. So if every rank starts
its blocks in order, a grid may have more blocks than the GPU can run at a time, without deadlock.
There are two exceptions: a block of any index may wait for the addresses of a peer's buffers, and
for the values that a peer sends by `send_values`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import compiler, mosaic
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, ir, llvm, scf

# Stands for "no row" or "no expert" in arrays of row or expert indices.
NOWHERE = -1


@jax.tree_util.register_pytree_node_class
class Scratch(SimpleNamespace):
    """Shared memory by name: types of scratch and, inside a kernel's body, references to it."""

    def tree_flatten(self) -> tuple[list[Any], tuple[str, ...]]:
        return list(vars(self).values()), tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names: Sequence[str], values: Iterable[Any]) -> Scratch:
        return cls(**dict(zip(names, values, strict=True)))


class Ranks(Protocol):
    """The ranks that a kernel runs on, and what `kernel` needs to launch it on them."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def stacked(self) -> bool:
        """Whether buffers of all ranks are stacked on one device, in the tests' simulator."""

    @property
    def interpret(self) -> Any:
        """The options of Pallas' GPU interpreter, or None where the kernel runs on a GPU."""

    @property
    def operands(self) -> Sequence[jax.Array]:
        """The arrays that communication needs, taken before the kernel's own operands."""

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        """Returns types of scratch by name; peers access `num_buffers` buffers."""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape on a device of a buffer that has `shape` on one rank."""

    def enter(
        self, operands: Sequence[Any], buffers: Sequence[Any], *, name: str, num_blocks: int,
        reads: bool, **scratch: Any,
    ) -> None:  # fmt: skip
        """Begins one run of the kernel, before its body; see `symmetric.Gpus.enter`."""


class Fabric(Ranks, Protocol):
    """The operations by which a kernel's body communicates with the other ranks."""

    def connect(self) -> None:
        """Waits for the addresses of the peers' buffers; a warpgroup calls it before `peer`."""

    def rank(self) -> jax.Array:
        """Returns the index of this rank among the kernel's ranks, [] int32."""

    def here(self) -> jax.Array:
        """Returns the row-major index of this rank's device in the mesh, [] int32."""

    def mine(self, ref: Any) -> Any:
        """Returns a reference to this rank's own buffer, an entry of `ref` if stacked."""

    def peer(self, ref: Any, rank: Any) -> Any:
        """Returns a reference to the memory of rank `rank` that corresponds to `ref` on this rank.

        `ref` is one of the buffers that `kernel` shares, or a slice of one.
        """

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        """Sends the signal `count`, an int32 below 2**20, to every rank's block of this index.

        Signals of the two kinds, 0 and 1, do not affect each other. Within a call, a block's
        signals of a kind must grow. With `release`, a peer that sees the signal also sees what this
        warpgroup wrote before; without, the signal is only ordered after earlier reads, and arrives
        a microsecond sooner.
        """

    def wait(self, kind: int, count: Any, what: str) -> None:
        """Waits until every rank's signal for this block is at least `count`; not at all if 0.

        `what` names the wait in the message of a timeout, here and below.
        """

    def send_values(self, words: Any, start: Any) -> None:
        """Sends n 32-bit values to every rank; words[i] gets the index start + i.

        Any block of the receiver may read them by `read_values`. Requires that a rank waits for a
        signal or a value of each peer in every call: a peer that sends one in the next call has
        read these values, whose memory the call after that overwrites.
        """

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        """Waits for n values that `rank` sends, from index `start` on; copies them to `words`.

        `words`, n 32-bit words, is in shared memory. The caller must put a barrier before other
        threads read it.
        """

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        """Sends pairs of int32 of `words` to every rank, `count` of them from pair `first` on.

        Pair i is (words[2 * i], words[2 * i + 1]) and is sent as one 32-bit value, so lists of
        expert ids take half of the words. An int32 that does not fit in 16 bits arrives as -1.
        """

    def read_halves(self, rank: Any, words: Any, what: str) -> None:
        """Waits for the pairs of `rank`, and copies them to `words`; see `read_values`."""

    def barrier(self) -> None:
        """Waits until all threads of this warpgroup have reached this barrier."""

    def async_fence(self) -> None:
        """Orders this warpgroup's next bulk copies (TMA) after the peers' writes it has waited for.

        Without it, a bulk copy may still read what the memory held before.
        """

    def delay_point(self, number: int) -> None:
        """Marks a point at which a test may delay each rank by a different time.

        0: the beginning of a call. 1: after writes to peers, before their signal. 2: before or
        after the wait for peers' data. 3: where a warpgroup begins to fill the padding between
        expert groups.
        """


@dataclasses.dataclass(frozen=True)
class RanksOfMesh:
    """The ranks along some axes of a mesh; a *mesh index* is an index in row-major order."""

    # (stride in mesh indices, size) of each mesh axis along which the ranks lie.
    axes: tuple[tuple[int, int], ...]
    gpus: tuple[int, ...]  # for each mesh index, the number of the device's GPU on its host
    # Seconds that a rank waits for a peer before it aborts the program.
    timeout_s: float = dataclasses.field(default=100.0, kw_only=True)
    # delays_ns[point][rank] delays a rank at a delay point, for tests.
    delays_ns: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), kw_only=True)

    stacked = False
    interpret = None

    @functools.cached_property
    def num_ranks(self) -> int:
        return math.prod([size for _, size in self.axes])

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def mine(self, ref: Any) -> Any:
        return ref

    def barrier(self) -> None:
        mosaic.inline(mosaic.barrier, [])

    def rank_and_index_of_rank_0(self, mesh_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a device's rank, and the mesh index of rank 0 of its group of ranks."""
        rank, index_of_rank_0 = jnp.int32(0), mesh_index
        for stride, size in self.axes:
            # The position of the device along this mesh axis.
            along = lax.rem(lax.div(mesh_index, jnp.int32(stride)), jnp.int32(size))
            rank, index_of_rank_0 = rank * size + along, index_of_rank_0 - along * stride
        return rank, index_of_rank_0

    def offsets(self) -> list[int]:
        """Returns for each rank the mesh index of its device minus that of rank 0."""
        offsets = [0]
        for stride, size in self.axes:
            offsets = [offset + i * stride for offset in offsets for i in range(size)]
        return offsets

    def gpu(self, mesh_index: jax.Array) -> jax.Array:
        """Returns self.gpus[mesh_index], the number on its host of that device's GPU."""
        if self.gpus == tuple(range(len(self.gpus))):
            return mesh_index
        # A traced number cannot index a tuple, so select one of its entries.
        number = jnp.int32(self.gpus[0])
        for i, other in enumerate(self.gpus[1:], 1):
            number = jnp.where(mesh_index == i, other, number)
        return number

    def hold_back(self, point: int, rank: jax.Array) -> None:
        """Waits for delays_ns[point][rank] nanoseconds, if a test has set delays for `point`."""
        if point < len(self.delays_ns):
            delay = jnp.int32(0)
            for r, nanoseconds in enumerate(self.delays_ns[point]):
                delay = jnp.where(rank == r, nanoseconds, delay)
            pause(delay)


def pause(nanoseconds: Any) -> None:
    """Delays the warpgroup by `nanoseconds`, to put ranks out of step in tests and benchmarks."""

    def emit(duration: Any) -> None:
        i64 = mosaic.integer_type(64)
        end = mosaic.add(mosaic.global_timer(), arith.extui(i64, mosaic.scalar(duration)))
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            scf.condition(mosaic.below(mosaic.global_timer(), end), [])
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
            scf.yield_([])
        mosaic.barrier()

    mosaic.inline(emit, [jnp.asarray(nanoseconds, jnp.int32)])


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
      body: takes references to inputs and outputs, and scratch by name. Pallas adds no barriers:
        where a thread reads shared memory that another thread of its warpgroup wrote, the body must
        call `fabric.barrier` in between.
      out_type: shape and dtype of each output on one rank.
      shared: indices of the buffers that peers access, counted over inputs and then outputs.
    """
    of_fabric = fabric.scratch_types(len(shared))
    grid: dict[str, Any] = dict(num_blocks=num_blocks)
    if fabric.stacked:
        grid = dict(grid=(fabric.num_ranks, num_blocks), grid_names=("rank", "block"))

    def call(*operands: Any) -> Any:
        num_of_fabric = len(fabric.operands)
        # Whether peers may read what this rank wrote before the call: only operands hold it.
        reads = any(i < len(operands) for i in shared)

        def run(*refs: Any, **scratch: Any) -> None:
            refs_of_fabric, refs = refs[:num_of_fabric], refs[num_of_fabric:]
            fabric.enter(
                refs_of_fabric,
                [refs[i] for i in shared],
                name=name,
                num_blocks=num_blocks,
                reads=reads,
                **{key: scratch.pop(key) for key in of_fabric},
            )
            body(*refs, **scratch)

        launch = compiler.kernel(
            run,
            out_type=[jax.ShapeDtypeStruct(fabric.shape(t.shape), t.dtype) for t in out_type],
            scratch_types={**scratch_types, **of_fabric},
            num_warpgroups=num_warpgroups,
            auto_barriers=False,
            interpret=fabric.interpret,
            kernel_name=name,
            **grid,
        )
        # The body's indices are int32, whatever the caller's default integer type is. Only operands
        # of 64-bit dtypes, which the body copies without arithmetic, need 64-bit types enabled.
        wide = any(operand.dtype.itemsize == 8 for operand in operands)
        with jax.enable_x64(wide):
            return launch(*fabric.operands, *operands)

    return call


def update_in_place(
    arrays: Sequence[jax.Array], write: Callable[[Sequence[Any]], Any]
) -> tuple[tuple[jax.Array, ...], Any]:
    """Lets `write` call a kernel with references to the arrays' own memory.

    An array that is still used elsewhere is copied first. Returns (the updated arrays, what `write`
    returned).
    """
    refs = [jax.new_ref(array) for array in arrays]
    returned = write(refs)
    return tuple(jax.freeze(ref) for ref in refs), returned


def load(ref: Any, vector: int) -> jax.Array:
    """Loads a contiguous 1D array to registers; threads hold vectors of `vector` elements."""
    return plgpu.load(ref, layout=mosaic.strided(ref.shape, vector))


def load_slices(fabric: Fabric, where: Any, *loads: tuple[Any, Iterable[tuple[Any, ...]]]) -> None:
    """Loads the same slice of many lists, such as one of each rank, into shared memory.

    `where` is a `pl.ds` of n elements. Each of `loads` is (buffer, sources), with equally many
    sources. `buffer` is [rows, n] in shared memory. For each source (row, array, *indices),
    buffer[row] gets array[*indices, where], from any rank's global memory.
    """
    # Load all slices before the first store, so that the loads overlap.
    loaded = [
        [(row, array.at[(*indices, where)][...]) for row, array, *indices in sources]
        for _, sources in loads
    ]
    # Until this barrier, other threads of the warpgroup may still read the previous slice.
    fabric.barrier()
    for of_one_source in zip(*loaded, strict=True):
        for (buffer, _), (row, values) in zip(loads, of_one_source, strict=True):
            buffer[row] = values
    fabric.barrier()


def fetch(row: Any, destination: Any, arrived: Any) -> None:
    """Starts a bulk copy of a contiguous row to shared memory; its end counts as an arrival."""
    # The promise makes it a plain bulk copy: no TMA descriptor, no check of bounds.
    promise = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    plgpu.copy_gmem_to_smem(row, destination, arrived, oob_mode=promise)


def put_if(predicate: jax.Array, source: Any, destination: Any) -> None:
    """Starts a bulk copy from shared to global memory if `predicate`, without a branch."""
    plgpu.copy_smem_to_gmem(source, destination, predicate=predicate, commit_group=False)


def iota(size: int, vector: int = 1) -> jax.Array:
    """Returns int32 0, 1, … size - 1 in registers; threads hold vectors of `vector` elements."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=mosaic.strided((size,), vector))


def clear(ref: Any, size: int) -> None:
    """Sets the int32 elements ref[:size] to 0; `size` is a multiple of WARPGROUP."""
    # One store of the whole slice would require that `size` is a power of two.
    for start in range(0, size, WARPGROUP):
        ref[pl.ds(start, WARPGROUP)] = jnp.zeros((WARPGROUP,), jnp.int32)


def count(bins: Any, values: jax.Array, num_bins: int) -> None:
    """For each v in `values` adds 1 to bins[v], if 0 <= v < num_bins.

    `values` is [n] int32 in registers, and `bins` is int32 in shared memory.
    """

    def emit(bins: Value, values: Any) -> None:
        base = mosaic.address(bins, 32)
        for of_thread in mosaic.registers(values):
            value = llvm.extractelement(of_thread, mosaic.i32(0))
            address = mosaic.add(base, mosaic.mul(value, 4))
            counted = mosaic.below(value, num_bins)
            mosaic.asm("@$1 red.shared.add.u32 [$0], 1;", "r,b", address, counted)

    mosaic.inline(emit, [bins, (values, mosaic.strided(values.shape, 1))])


def first_peer(fabric: Fabric) -> jax.Array:
    """Returns the rank, modulo num_ranks, with which this block begins a loop over ranks."""
    # Consecutive blocks begin with different ranks, to spread the load over the links.
    return fabric.rank() + lax.axis_index("block")


def any_row(rows: Sequence[jax.Array]) -> jax.Array:
    return any_of([row >= 0 for row in rows])


def any_of(conditions: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.or_, conditions)


def drain(empty: Any, used: jax.Array, num_stages: int) -> None:
    """Waits, in the warpgroup that filled a ring's stages, until all stages are released.

    `empty` has for each stage the barrier at which consumers release it. `used`, [] int32, is how
    often the warpgroup has filled a stage: filling i was of stage i % num_stages.
    """
    # A warpgroup must wait for every completion of a barrier. Only those of each stage's last
    # filling are left: before it fills a stage again, it waits for the stage's previous filling.

    def wait(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(used - 1 - i, jnp.int32(num_stages))])

    lax.fori_loop(0, jnp.minimum(used, num_stages), wait, None)
