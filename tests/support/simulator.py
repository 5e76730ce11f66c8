"""Runs kernels in Pallas' GPU interpreter on a CPU, with race detection.

`interpret` runs a kernel on one device, with the options `INTERPRETER`.

`simulate` runs a kernel of several ranks (`Simulated`), all ranks at once, including their
rendezvous. The ranks are the blocks of a cluster, which the interpreter runs concurrently. The
simulator adds to the interpreter:

  signals and waits between ranks, which carry vector clocks, so that races between ranks are found;
  a release signal makes the sender's writes visible to the waiting rank, a relaxed one does not;
  values that ranks send each other without ordering other accesses;
  groups of copies from shared to global memory, counted as the hardware counts them;
  bounds checks of every access, where the interpreter would pad, clip or wrap;
  tile buffers of the low-latency protocol, by which ranks send tiles of data without ordering
  other accesses (`simulated_channels`);
  errors: two grid blocks that touch the same memory, use of a peer's memory before `connect`, a
  rank that exits while a peer may still use its memory, a rank that sends values to a peer and
  receives nothing from it, a wait that never ends, a signal whose count does not grow, a tile that
  overwrites another or is never received, and a missing barrier between threads of a warpgroup
  (the interpreter runs a warpgroup as one thread).

The simulator uses private parts of JAX 0.11 and newer. If one is missing, the tests that need the
simulator are skipped.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import low_latency as ll
from pallas_kernels.fabric.memory_map import MAX_VALUES, NUM_COUNTERS, TILE_BYTES, num_tile_buffers
from pallas_kernels.fabric.sentinel_words import TileMemory
from support.kernels import KERNELS_RUN, WHY_NOT

# The seconds for which a rank may wait while no thread does anything; then the test fails.
WAIT_SECONDS = 30.0
# If this process uses more than this fraction of a CPU core, some thread computes or compiles.
# Threads that only wait use less.
BUSY = 0.05
# The seconds that a whole kernel may take.
DEADLOCK_SECONDS = 300.0

_missing = ""
try:
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState

    _Memory = shared_memory.GPUSharedMemory
    _Interpreter = jaxpr_interpret.JaxprInterpreter
    _run_jaxpr_of_jax = thread_map._run_jaxpr
    _used = (
        gpu_callbacks.get_races,
        gpu_callbacks.reset_gpu_interpret_mode_state,
        _Memory.access,
        _Memory.set_failed,
        _Memory.add_copy_smem_to_gmem_clocks,
        _Memory.wait_smem_to_gmem,
        _Memory.kernel_thread_finished,
        _Memory.commit_smem,
        gpu_callbacks._get,
        gpu_callbacks._swap,
        _Interpreter._interpret_inline_mgpu_p,
        gpu_callbacks.fail_on_exception,
        gpu_callbacks.cluster_finished,
        gpu_callbacks.copy_smem_to_gmem,
    )
    INTERPRETER = InterpretGPUParams(detect_races=True)
except (ImportError, AttributeError) as error:
    _missing = f"this JAX's GPU interpreter lacks what the simulator needs: {error}"

simulated = pytest.mark.skipif(
    not KERNELS_RUN or bool(_missing), reason=WHY_NOT if not KERNELS_RUN else _missing
)


class KernelError(AssertionError):
    """Raised for an error of a simulated kernel, such as a race or a deadlock."""


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The ranks of a kernel under `simulate`, and how they signal and reach each other's memory.

    All ranks run at once, with random delays. Every buffer is one array of all ranks, stacked on
    axis 0, and the rank is a grid axis.
    """

    num_ranks: int
    interpret: Any

    stacked = True
    operands = ()

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        return {}

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (self.num_ranks, *shape)

    def rank(self) -> jax.Array:
        return jax.lax.axis_index("rank")

    def here(self) -> jax.Array:
        return self.rank()

    def mine(self, ref: Any) -> Any:
        return ref.at[self.rank()]

    def peer(self, ref: Any, rank: Any) -> Any:
        return ref.at[rank]

    def async_fence(self) -> None:
        pass

    def barrier(self) -> None:
        _on_host(_Barrier())

    def enter(
        self, operands: Sequence[Any], buffers: Sequence[Any], *, num_blocks: int, **_: Any
    ) -> None:
        _on_host(_Enter(num_blocks))

    def connect(self) -> None:
        _on_host(_Connect(self.num_ranks))

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        _on_host(_Signal(kind, self.num_ranks, release), count)

    def wait(self, kind: int, count: Any, what: str) -> None:
        _on_host(_Wait(kind, self.num_ranks, what), count)

    def send_values(self, words: Any, start: Any, ranks: Sequence[Any] | None = None) -> None:
        ranks = range(self.num_ranks) if ranks is None else ranks
        _on_host(_SendValues(), words[...], start, *ranks)

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        received = jax.ShapeDtypeStruct(words.shape, words.dtype)
        operation = _ReadValues(what, words.shape[0], words.dtype)
        (words[...],) = _on_host(operation, rank, start, returns=[received])

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        _on_host(_SendHalves(self.num_ranks, count), words[...], first)

    def read_halves(self, rank: Any, words: Any, what: str) -> None:
        self.read_values(rank, 0, words, what)

    def delay_point(self, number: int) -> None:
        _on_host(_Pause(number))


def simulated_ranks(num_ranks: int, *, detect_races: bool = True) -> Simulated:
    # The interpreter assigns copies to virtual threads in turn, each of which has a vector clock. A
    # race between two copies of one thread is not found. With 251 threads this is rare.
    options = InterpretGPUParams(detect_races=detect_races, num_tma_threads_per_device=251)
    return Simulated(num_ranks, options)


@dataclasses.dataclass(frozen=True)
class SimulatedChannels(ll.Channels):
    """Low-latency channels between ranks along mesh axes; `simulate` runs all ranks of the mesh."""

    interpret: Any = None

    stacked = True

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (len(self.gpus), *shape)

    def mine(self, ref: Any) -> Any:
        return ref.at[jax.lax.axis_index("rank")]

    def mesh_index(self, ref: Any) -> jax.Array:
        return super().mesh_index(self.mine(ref))

    def barrier(self) -> None:
        _on_host(_Barrier())

    def hold_back(self, point: int, rank: jax.Array) -> None:
        del rank
        _on_host(_Pause(point))


class TileContents:
    """The tile buffers and counters of some GPUs; they persist from one `simulate` to the next."""

    def __init__(self) -> None:
        # Maps (GPU, buffer) to the tile in the buffer; an empty buffer has no entry.
        self.tiles: dict[tuple[int, int], np.ndarray] = {}
        self.counters: dict[tuple[int, int], int] = collections.defaultdict(int)


@dataclasses.dataclass(frozen=True)
class SimulatedTileMemory(TileMemory):
    contents: TileContents

    def send(self, gpu: jax.Array, buffer: jax.Array, tile: jax.Array, *, exact: bool) -> None:
        _on_host(_Send(self), gpu, buffer, tile)

    def receive(
        self, gpu, buffers, shape, dtype, *, rank, peers, timeout_s, what, exact, wanted=None
    ) -> list[jax.Array]:
        tiles = [jax.ShapeDtypeStruct(shape, dtype)] * len(buffers)
        operation = _Receive(self, what, len(buffers), dtype, shape)
        wanted = [jnp.int32(w) for w in wanted or (1,) * len(buffers)]
        return _on_host(operation, gpu, rank, *buffers, *peers, *wanted, returns=tiles)

    def read(self, gpu: jax.Array, counters: Sequence[jax.Array]) -> list[jax.Array]:
        values = [jax.ShapeDtypeStruct((), jnp.int32)] * len(counters)
        return _on_host(_ReadCounters(self), gpu, *counters, returns=values)

    def write(self, gpu, counters, values) -> None:
        _on_host(_WriteCounters(self, len(counters)), gpu, *counters, *values)


def simulated_channels(
    axes: Sequence[tuple[int, int]],
    gpus: Sequence[int],
    contents: TileContents | None = None,
    *,
    kind: type[SimulatedChannels] = SimulatedChannels,
    detect_races: bool = True,
) -> SimulatedChannels:
    """Makes simulated `ll.Channels` between GPUs of a mesh.

    Args:
        axes: (stride, size) of the mesh axes along which ranks communicate.
        gpus: the GPU of each rank of the mesh.
        contents: the tile buffers and counters to continue with; new ones by default.
        kind: the class of the result.
        detect_races: whether the interpreter looks for races.
    """
    gpus = tuple(gpus)
    memory = SimulatedTileMemory(0, max(gpus) + 1, contents or TileContents())
    options = InterpretGPUParams(detect_races=detect_races)
    return kind(tuple(axes), gpus, memory, interpret=options)


def interpret(function: Callable[[], Any]) -> Any:
    """Runs `function`, which calls one kernel on `INTERPRETER`; returns NumPy arrays."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with mock.patch.object(thread_map, "_run_jaxpr", _run_jaxpr), _watchdog(None):
            try:
                results = _on_cpu(function)
            # In JAX newer than 0.11, a race is an exception of the runtime.
            except Exception as error:
                if "RACE DETECTED" in str(error):
                    raise KernelError(f"a race: {error}") from None
                raise
        if gpu_callbacks.get_races().races_found:
            raise KernelError("a race: its two sides are printed above")
        return results
    finally:
        _compiled.clear()
        gpu_callbacks.reset_gpu_interpret_mode_state()


def _on_cpu(function: Callable[[], Any]) -> Any:
    """Runs `function` on the CPU, even if there is a GPU; returns NumPy arrays.

    On a GPU, XLA would remove some of the roundings that the kernels ask for.
    """
    before = jax.config.jax_default_device
    # Set the default device for all threads, because the interpreter starts threads of its own.
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    try:
        return jax.tree.map(np.asarray, function())
    finally:
        jax.config.update("jax_default_device", before)


def simulate(function: Callable[[], Any]) -> Any:
    """Runs `function`, whose kernels use `simulated_ranks` or channels; returns NumPy arrays.

    Raises:
        KernelError: a race, an access out of bounds, a deadlock, an early exit, or another error.
    """
    simulation = _Simulation()
    try:
        with _changed_interpreter(simulation), _watchdog(simulation):
            try:
                results = _on_cpu(function)
            # JAX's runtime has turned the kernel's error into text; raise the recorded original.
            except Exception as error:
                raise simulation.failure or error from None
    finally:
        _compiled.clear()
        gpu_callbacks.reset_gpu_interpret_mode_state()
    if simulation.failure is not None:
        raise simulation.failure
    return results


# ----------------------------------------------------------------- operations that kernels ask for


def _on_host(
    operation: Any, *operands: Any, returns: Sequence[jax.ShapeDtypeStruct] = ()
) -> list[jax.Array]:
    """Makes the simulation run `operation`, in order with this thread's accesses to memory."""

    def layout(shape: tuple[int, ...]) -> Any:
        return plgpu.Layout.WG_STRIDED(shape, vec_size=1) if shape else plgpu.Layout.WG_SPLAT(())

    arrays = [x if hasattr(x, "shape") else jnp.int32(x) for x in operands]
    types = [plgpu.ShapeDtypeStruct(r.shape, r.dtype, layout=layout(r.shape)) for r in returns]
    inline = plgpu.inline_mgpu(
        arg_types=tuple(layout(array.shape) for array in arrays), return_type=types
    )
    return inline(operation)(*arrays)


@dataclasses.dataclass(frozen=True)
class _Barrier:
    def run(self, simulation: _Simulation, thread: Any) -> None:
        simulation.lanes.barrier(thread)


@dataclasses.dataclass(frozen=True)
class _Enter:
    num_blocks: int

    def run(self, simulation: _Simulation, thread: Any) -> None:
        with simulation.changed:
            simulation.num_blocks = self.num_blocks
            simulation.entered.add(thread.block_id)
            simulation.changed.notify_all()


@dataclasses.dataclass(frozen=True)
class _Connect:
    """Waits until all ranks have entered the kernel; only then may peers' memory be used.

    It orders no other accesses of different ranks.
    """

    num_ranks: int

    def run(self, simulation: _Simulation, thread: Any) -> None:
        simulation.wait_until(
            lambda: len(simulation.entered) == self.num_ranks,
            lambda: f"rank {thread.block_id} waits to connect: only {simulation.entered} entered",
        )
        clock = simulation.memory.incr_clock(thread)
        with simulation.changed:
            simulation.connected[thread.block_id].append(clock)
            simulation.hears(thread, range(self.num_ranks))


@dataclasses.dataclass(frozen=True)
class _Signal:
    kind: int
    num_ranks: int
    release: bool

    def run(self, simulation: _Simulation, thread: Any, count: Any) -> None:
        simulation.lanes.barrier(thread)
        clock = simulation.memory.incr_clock(thread)
        with simulation.changed:
            visible = simulation.visible.after_signal(thread.block_id) if self.release else {}
            for rank in range(self.num_ranks):
                signals = simulation.signals[self.kind, rank, thread.block_id]
                last = signals[-1].count if signals else 0
                if int(count) <= last:
                    raise KernelError(
                        f"rank {thread.block_id} signals {int(count)} of kind {self.kind}, "
                        f"after {last}: counts must grow"
                    )
                signals.append(_Sent(int(count), clock, visible))
            simulation.changed.notify_all()


class _Sent(NamedTuple):
    """A signal that was sent.

    Attributes:
        count: its count.
        clock: the sender's vector clock at that time.
        visible: maps a writer's rank to the number of its last write that the signal makes visible.
    """

    count: int
    clock: Any
    visible: dict[int, int]


@dataclasses.dataclass(frozen=True)
class _Wait:
    kind: int
    num_ranks: int
    what: str

    def run(self, simulation: _Simulation, thread: Any, count: Any) -> None:
        memory, count = simulation.memory, int(count)
        for rank in range(self.num_ranks) if count > 0 else ():
            signals = simulation.signals[self.kind, thread.block_id, rank]
            simulation.wait_until(
                lambda signals=signals: signals and signals[-1].count >= count,
                lambda signals=signals, rank=rank: (
                    f"{self.what}: rank {thread.block_id} waits for signal {count} of kind "
                    f"{self.kind} of rank {rank}, which has sent {[s.count for s in signals]}"
                ),
            )
            # Take the first signal that suffices: the rank may not have seen any later one.
            seen = next(signal for signal in signals if signal.count >= count)
            with memory.lock:
                memory.clocks[thread].update(seen.clock)
            with simulation.changed:
                simulation.visible.wait(thread.block_id, seen.visible)
                simulation.hears(thread, [rank])
        simulation.lanes.barrier(thread)


@dataclasses.dataclass(frozen=True)
class _SendValues:
    def run(
        self, simulation: _Simulation, thread: Any, words: Any, start: Any, *ranks: Any
    ) -> None:
        with simulation.changed:
            for rank in map(int, ranks):
                values = simulation.values[rank, thread.block_id]
                for i, word in enumerate(np.array(words).view(np.int32), int(start)):
                    if not 0 <= i < MAX_VALUES:
                        raise KernelError(f"there is no value {i}")
                    if values.setdefault(i, word) != word:
                        raise KernelError(f"rank {thread.block_id} sends two values {i} in a call")
            simulation.changed.notify_all()


@dataclasses.dataclass(frozen=True)
class _SendHalves:
    num_ranks: int
    count: int

    def run(self, simulation: _Simulation, thread: Any, words: Any, first: Any) -> None:
        words, first = np.array(words), int(first)
        sent = words[2 * first : 2 * (first + self.count)]
        sent = np.where(sent == sent.astype(np.int16), sent, -1)
        _SendValues().run(simulation, thread, sent, 2 * first, *range(self.num_ranks))


@dataclasses.dataclass(frozen=True)
class _ReadValues:
    what: str
    count: int
    dtype: Any

    def run(self, simulation: _Simulation, thread: Any, rank: Any, start: Any) -> Any:
        values = simulation.values[thread.block_id, int(rank)]
        wanted = range(int(start), int(start) + self.count)
        simulation.wait_until(
            lambda: all(i in values for i in wanted),
            lambda: f"{self.what}: rank {thread.block_id} waits for values of rank {rank}",
        )
        with simulation.changed:
            simulation.hears(thread, [int(rank)])
        return [np.array([values[i] for i in wanted], np.int32).view(self.dtype)]


@dataclasses.dataclass(frozen=True)
class _Pause:
    point: int

    def run(self, simulation: _Simulation, thread: Any) -> None:
        del simulation, thread
        time.sleep(random.choice((0.0, 0.0, 0.001, 0.01)))


@dataclasses.dataclass(frozen=True)
class _Send:
    memory: SimulatedTileMemory

    def run(self, simulation: _Simulation, thread: Any, gpu: Any, buffer: Any, tile: Any) -> None:
        tile, key = np.array(tile), (int(gpu), int(buffer))
        num_gpus, tiles = self.memory.num_gpus, self.memory.contents.tiles
        known = key[0] in range(num_gpus) and key[1] < num_tile_buffers(num_gpus)
        if tile.nbytes != TILE_BYTES or not known:
            raise KernelError(f"GPU {gpu} has no tile buffer {buffer} of {tile.nbytes} bytes")
        with simulation.changed:
            if key in tiles:
                raise KernelError(
                    f"a tile of rank {thread.block_id} overtakes one that nobody has taken: in "
                    f"tile buffer {buffer} of GPU {gpu}"
                )
            simulation.sent[key] = tiles
            tiles[key] = tile
            simulation.changed.notify_all()


@dataclasses.dataclass(frozen=True)
class _Receive:
    memory: SimulatedTileMemory
    what: str
    count: int
    dtype: Any
    shape: Any

    def run(self, simulation: _Simulation, thread: Any, gpu: Any, rank: Any, *rest: Any) -> Any:
        simulation.owns_memory(thread, gpu)
        tiles = self.memory.contents.tiles
        keys, peers, wanted = (
            rest[i : i + self.count] for i in range(0, 3 * self.count, self.count)
        )
        keys = [(int(gpu), int(buffer)) for buffer in keys]
        peers = [int(peer) for peer in peers]
        comes = {key for key, w in zip(keys, wanted, strict=True) if w}
        if len(set(keys)) < len(keys):
            raise KernelError(
                f"{self.what}: peers {peers} share a tile buffer: one's tile overtakes another's"
            )

        def missing() -> list[int]:
            waits = zip(peers, keys, strict=True)
            return [peer for peer, key in waits if key in comes and key not in tiles]

        simulation.wait_until(
            lambda: not missing(),
            lambda: f"{self.what}: rank {rank} waits for a tile of {missing()}",
        )
        with simulation.changed:
            simulation.hears(thread, [p for p, w in zip(peers, wanted, strict=True) if w])
            # The kernel polls some buffers without wanting their tiles. It must not use what it
            # reads there, so return a strange value.
            strange = np.full(self.shape, 77, self.dtype)
            return [tiles.pop(key) if key in comes else strange for key in keys]


@dataclasses.dataclass(frozen=True)
class _ReadCounters:
    memory: SimulatedTileMemory

    def run(self, simulation: _Simulation, thread: Any, gpu: Any, *counters: Any) -> Any:
        simulation.owns_memory(thread, gpu)
        values = self.memory.contents.counters
        return [np.int32(values[int(gpu), int(counter)]) for counter in counters]


@dataclasses.dataclass(frozen=True)
class _WriteCounters:
    memory: SimulatedTileMemory
    count: int

    def run(self, simulation: _Simulation, thread: Any, gpu: Any, *scalars: Any) -> None:
        simulation.owns_memory(thread, gpu)
        simulation.lanes.barrier(thread)
        assert all(0 <= counter < NUM_COUNTERS for counter in scalars[: self.count])
        for counter, value in zip(scalars[: self.count], scalars[self.count :], strict=True):
            self.memory.contents.counters[int(gpu), int(counter)] = int(value)


@dataclasses.dataclass(frozen=True)
class _CommitGroup:
    def run(self, simulation: _Simulation, thread: Any) -> None:
        simulation.copies[thread].commit()


# --------------------------------------------------------------------------- the simulation's state


class _Copies:
    """One thread's asynchronous copies from shared to global memory, in groups.

    For each group it keeps the vector clocks of the copies' reads and of their writes.
    """

    def __init__(self) -> None:
        self.open: list[tuple[Any, Any]] = []
        self.reading: collections.deque[list[Any]] = collections.deque()
        self.writing: collections.deque[list[Any]] = collections.deque()

    def commit(self) -> None:
        self.reading.append([read for read, _ in self.open])
        self.writing.append([write for _, write in self.open])
        self.open = []

    def wait(self, clock: Any, allowed: int, read_only: bool) -> None:
        for groups in (self.reading,) if read_only else (self.reading, self.writing):
            while len(groups) > allowed:
                for done in groups.popleft():
                    clock.update(done)

    @property
    def pending(self) -> bool:
        return bool(self.open) or any(self.reading) or any(self.writing)


class _Lanes:
    """Finds missing barriers between threads of one warpgroup that access the same shared memory.

    If a kernel accesses a single element, all threads of the warpgroup access it. If it accesses a
    vector, each thread accesses some of the elements, and the same ones whenever the vector's index
    is the same. If no barrier separates two accesses of different threads to an element, a thread
    that lags behind may read it too late, or overwrite the other thread's value.
    """

    def __init__(self) -> None:
        self._new_period = itertools.count(1)
        self._periods: dict[Any, int] = collections.defaultdict(self._new_period.__next__)
        self._tables: dict[Any, dict[str, np.ndarray]] = {}

    def barrier(self, thread: Any) -> None:
        self._periods[thread] = next(self._new_period)

    def _here(self, key: Any, access: Any, shape: tuple[int, ...]) -> tuple[dict[str, Any], int]:
        """Returns records of the accessed elements, and a number for how the threads divide them.

        The records are arrays that say, for each accessed element, when and how it was last
        accessed. The number is 0 if all threads access a single element. For a vector it is a hash
        of the vector's index: vectors of equal indices are divided among the threads alike.

        Args:
            key: the buffer.
            access: the elements that are accessed.
            shape: the buffer's shape.
        """
        names = ("read in", "read by", "written in", "written by", "unsettled in")
        if key not in self._tables:
            self._tables[key] = {name: np.zeros(shape, np.int64) for name in names}
        # Select a single element by a slice, so that the result is a view, which can be assigned.
        where = tuple(slice(i, i + 1) if isinstance(i, int) else i for i in access.range)
        who = hash(str(access.range)) if access.shape else 0
        return {name: self._tables[key][name][where] for name in names}, who

    def read(self, thread: Any, key: Any, access: Any, shape: tuple[int, ...]) -> None:
        now, (here, who) = self._periods[thread], self._here(key, access, shape)
        of_others = (here["written by"] != 0) & (here["written by"] != who)
        if np.any((here["written in"] == now) & (of_others | (here["unsettled in"] == now))):
            raise KernelError(f"a barrier is missing before {thread} reads {access} of {shape}")
        mixed = (here["read in"] == now) & (here["read by"] != who)
        here["read by"][...] = np.where(mixed, 0, who)
        here["read in"][...] = now

    def write(self, thread: Any, key: Any, access: Any, old: np.ndarray, new: Any) -> None:
        now, (here, who) = self._periods[thread], self._here(key, access, old.shape)
        changed = ~np.equal(old[access.range], new).reshape(here["read in"].shape)
        read = (here["read in"] == now) & ((here["read by"] != who) | (who == 0))
        again = here["written in"] == now
        if np.any(changed & (read | again & (here["written by"] != who))):
            raise KernelError(f"a barrier is missing before {thread} writes {access}")
        if who == 0:
            here["unsettled in"][changed & again] = now
        here["written by"][...] = who
        here["written in"][...] = now


class _Visible:
    """Tracks which writes of other ranks each rank may read: those that a signal has released.

    Vector clocks order all accesses of a rank before its signals, even relaxed ones. On a real GPU
    a relaxed signal may overtake the writes before it; this class finds uses of such writes.
    """

    def __init__(self) -> None:
        # The number of writes so far, of all ranks.
        self._writes = 0
        self._upto: dict[int, dict[int, int]] = collections.defaultdict(dict)
        # Maps a buffer to the rank that wrote each of its elements last, -1 for none.
        self._writers: dict[Any, np.ndarray] = {}
        # Maps a buffer to the number of the last write to each of its elements.
        self._numbers: dict[Any, np.ndarray] = {}
        # Writes to peers' memory: (owner of the memory, writer, number of the write, description).
        self._remote: list[tuple[int, int, int, str]] = []

    def after_signal(self, rank: int) -> dict[int, int]:
        """Returns the last writes that a release signal of `rank` makes visible.

        Maps the rank of each writer to the number of its last visible write.
        """
        return {**self._upto[rank], rank: self._writes}

    def wait(self, rank: int, visible: dict[int, int]) -> None:
        for writer, upto in visible.items():
            self._upto[rank][writer] = max(self._upto[rank].get(writer, 0), upto)

    def access(self, rank: int, key: Any, shape: Any, access: Any, write: bool, what: str) -> None:
        if key not in self._writers:
            self._writers[key] = np.full(shape, -1, np.int64)
            self._numbers[key] = np.zeros(shape, np.int64)
        writers, numbers = self._writers[key][access.range], self._numbers[key][access.range]
        for writer in set(np.unique(writers)) - {-1, rank}:
            last = int(np.max(numbers, where=writers == writer, initial=0))
            self._check(rank, writer, last, what)
        if write:
            self._writes += 1
            self._writers[key][access.range] = rank
            self._numbers[key][access.range] = self._writes
            if access.range[0] != rank:
                self._remote.append((access.range[0], rank, self._writes, what))

    def finish(self) -> None:
        for owner, writer, number, what in self._remote:
            self._check(owner, writer, number, f"the end of rank {owner} after a {what}")

    def _check(self, rank: int, writer: int, number: int, what: str) -> None:
        if number > self._upto[rank].get(writer, 0):
            raise KernelError(f"no signal has released rank {writer}'s writes before: {what}")


class _Simulation:
    """The state of one `simulate`, of the current kernel call, and of the current grid block."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        # Each maps a buffer to the grid block that wrote (or read) each element, -1 for none.
        self.writers: dict[Any, np.ndarray] = {}
        self.readers: dict[Any, np.ndarray] = {}
        self.block = 0
        # When some thread last did something: wall-clock time, and this process's CPU time.
        self.last_step = time.monotonic(), time.process_time()
        self._begin_call()

    def _begin_call(self) -> None:
        self.num_blocks = 1
        self.finished_blocks = 0
        # The ranks that have entered the kernel.
        self.entered: set[int] = set()
        # Pairs (rank, peer): the rank has received something from the peer.
        self.heard: set[tuple[int, int]] = set()
        self.values: dict[tuple[int, int], dict[int, Any]] = collections.defaultdict(dict)
        self._begin_block()

    def _begin_block(self) -> None:
        # Maps (kind of signal, receiving rank, sending rank) to the signals sent.
        self.signals: dict[Any, list[_Sent]] = collections.defaultdict(list)
        # Maps a rank to the vector clocks of its calls of `connect`.
        self.connected: dict[int, list[Any]] = collections.defaultdict(list)
        self.copies: dict[Any, _Copies] = collections.defaultdict(_Copies)
        self.lanes = _Lanes()
        self.visible = _Visible()
        # Accesses to peers' memory: (owner of the memory, vector clock, description).
        self.remote_accesses: list[tuple[int, Any, str]] = []
        self.exit_clocks: dict[int, Any] = {}
        # Maps a GPU to the rank that uses its memory as its own.
        self.owners: dict[int, int] = {}
        # Maps (GPU, buffer), where a tile was sent, to the dict of tiles that has the buffer.
        self.sent: dict[Any, Any] = {}

    @property
    def memory(self) -> Any:
        return gpu_callbacks._get_shared_memory()

    def wait_until(self, done: Callable[[], Any], what: Callable[[], str]) -> None:
        """Waits until `done()`; raises KernelError(what()) after WAIT_SECONDS without any activity.

        CPU time that this process uses, for example to compile, is activity too.
        """
        with self.changed:
            self._step()
            while not done():
                self.changed.wait(0.1)
                self.memory.check_failed()
                when, computed = self.last_step
                if time.process_time() > computed + BUSY * WAIT_SECONDS:
                    self._step()
                elif time.monotonic() > when + WAIT_SECONDS:
                    raise KernelError(what())

    def _step(self) -> None:
        self.last_step = time.monotonic(), time.process_time()

    def remembers(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a callback of the interpreter so that its first error is kept in `failure`.

        JAX's runtime passes on only the error's text, and `simulate` raises the kept error.
        """

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.failure = self.failure or error
                raise

        return wrapped

    def note_access(self, thread: Any, clock: Any, key: Any, access: Any, write: bool) -> None:
        """Records and checks an access to global memory, where every buffer is stacked by rank."""
        shape, owner = self.memory.buffer_shape_and_dtype(key).shape, access.range[0]
        what = f"{'write to' if write else 'read of'} {shape}{access.range} by {thread}"
        self._step()
        if not isinstance(owner, int):
            raise KernelError(f"several ranks' memory at once: {what}")
        with self.changed:
            if owner != thread.block_id:
                if not self.is_connected(thread):
                    raise KernelError(f"a rank's memory before connect: {what}")
                self.remote_accesses.append((owner, clock, what))
            if self.reads_ahead(key, access, write):
                return
            self.visible.access(thread.block_id, key, shape, access, write, what)
            for table in (self.writers, self.readers):
                table.setdefault(key, np.full(shape, -1, np.int32))
            touched = [self.writers[key][access.range]]
            if write:
                touched.append(self.readers[key][access.range])
            if any(np.any((block >= 0) & (block != self.block)) for block in touched):
                raise KernelError(f"block {self.block} of the grid touches another's: {what}")
            (self.writers if write else self.readers)[key][access.range] = self.block

    def is_connected(self, thread: Any) -> bool:
        """Returns whether the thread's current access is ordered after a `connect` of its rank."""
        now = self.memory.clocks[thread].generic_clock.clock
        return any(
            np.all(now >= clock.generic_clock.clock) for clock in self.connected[thread.block_id]
        )

    def reads_ahead(self, key: Any, access: Any, write: bool) -> bool:
        """Returns whether an access reads a vector of routes, which is never a race.

        Kernels load vectors of routes ahead of their use, perhaps before all entries are written,
        and use only the entries that were. Every vector of integers is taken for one of routes.
        """
        is_integer = self.memory.buffer_shape_and_dtype(key).dtype == np.int32
        return not write and is_integer and access.shape != ()

    def hears(self, thread: Any, peers: Any) -> None:
        self.heard |= {(thread.block_id, peer) for peer in peers}

    def owns_memory(self, thread: Any, gpu: Any) -> None:
        with self.changed:
            if self.owners.setdefault(int(gpu), thread.block_id) != thread.block_id:
                raise KernelError(f"{thread} takes the memory of GPU {gpu} for its own")

    def finish_block(self) -> None:
        """Checks, at the end of a grid block, that no peer can still use a rank's memory."""
        left = [key for key, tiles in self.sent.items() if key in tiles]
        if left:
            raise KernelError(f"nobody has taken the tiles of these buffers of GPUs: {left}")
        accesses = list(self.remote_accesses)
        for (kind, owner, source), signals in self.signals.items():
            what = f"signal of kind {kind} of rank {source}"
            accesses += [(owner, signal.clock.generic_clock, what) for signal in signals]
        for owner, clock, what in accesses if self.memory.detect_races else ():
            if np.any(clock.clock > self.exit_clocks[owner].generic_clock.clock):
                raise KernelError(f"rank {owner} may leave before this has ended: {what}")
        self.visible.finish()
        self.block += 1
        self.finished_blocks += 1
        if self.finished_blocks == self.num_blocks:
            pairs = {(sender, rank) for rank, sender in self.values if rank != sender}
            if silent := {(rank, peer) for rank, peer in pairs if (rank, peer) not in self.heard}:
                raise KernelError(
                    f"a rank sends values and hears nothing of a peer, whose next call but one may "
                    f"come before they are read: {sorted(silent)}"
                )
            self._begin_call()
        else:
            self._begin_block()


def _check_bounds(where: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    for index, size in zip(where, shape, strict=True):
        low, high = (index, index + 1) if isinstance(index, int) else (index.start, index.stop)
        if low < 0 or high > size:
            raise KernelError(f"an access to {where} of a buffer of shape {shape}")


# ------------------------------------------------------------------ replacements in the interpreter


@contextlib.contextmanager
def _changed_interpreter(simulation: _Simulation) -> Iterator[None]:
    """Replaces functions of the interpreter by those of a simulation.

    One long function has all replacements, since all use the simulation and the originals.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Turns a grid over (rank, block) into a grid over blocks, each a cluster of all ranks."""
        ranks, blocks = kwargs.pop("grid")
        # The grid has the ranks of one group that communicates, but the leading axis of a result
        # has the ranks of all groups, which the simulation runs. Without results there must be one
        # group only.
        if kwargs["out_type"]:
            ranks = kwargs["out_type"][0].shape[0]
        assert kwargs.pop("grid_names") == ("rank", "block")
        kwargs |= dict(grid=(blocks,), grid_names=("block",))
        return original["kernel"](*args, cluster=(ranks,), cluster_names=("rank",), **kwargs)

    @gpu_callbacks.fail_on_exception
    @simulation.remembers
    def run_on_host(operation: Any, token: Any, thread: Any, *args: Any) -> Any:
        return token, *(operation.run(simulation, thread, *args) or ())

    def inline(self: Any, eqn: Any, token: Any, get_operands: Any) -> Any:
        args = get_operands()[: eqn.params["pytree_args"].num_leaves]
        function = functools.partial(run_on_host, eqn.params["mgpu_fn"])
        results = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        results = gpu_callbacks.TOKEN_SHAPE_DTYPE, *results
        token, *results = io_callback(function, results, token, self.thread, *args)
        return token, results

    @simulation.remembers
    def access(self: Any, key: Any, transforms: Any) -> Any:
        found = original["access"](self, key, transforms)
        _check_bounds(found.range, self.buffer_shape_and_dtype(key).shape)
        return found

    def checking(name: str, write: bool) -> Callable[..., None]:
        @simulation.remembers
        def check(self: Any, thread: Any, clock: Any, key: Any, access: Any, **info: Any) -> None:
            if key.memory_space_id == shared_memory.get_memory_space_idx(plgpu.GMEM):
                simulation.note_access(thread, clock, key, access, write)
                if simulation.reads_ahead(key, access, write):
                    return
            try:
                original[name](self, thread, clock, key, access, **info)
            # In JAX newer than 0.11, a race is an exception.
            except RuntimeError as error:
                raise KernelError(f"a race: {error}") from None
            if self.races_found:
                raise KernelError("a race: its two sides are printed above")

        return check

    def copy_smem_to_gmem(*, thread: Any, commit_group: bool, **kwargs: Any) -> Any:
        token = original["copy"](thread=thread, commit_group=commit_group, **kwargs)
        if commit_group:
            simulation.copies[thread].commit()
        return token

    def shared(keys: Any, transforms: Any) -> tuple[Any, Any, np.ndarray] | None:
        """Returns (key, access, contents) of a buffer in shared memory; None for other memory.

        Args:
            keys: the interpreter's array that identifies the buffer.
            transforms: the indices and slices that the kernel applies to the buffer; as an
                `access` they say which elements it reads or writes.
        """
        key = shared_memory.HostAllocationKey.from_array(keys)
        if key.memory_space_id != shared_memory.get_memory_space_idx(plgpu.SMEM):
            return None
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        memory = simulation.memory
        return key, memory.access(key, transforms), memory.mem[key].content

    @gpu_callbacks.fail_on_exception
    @simulation.remembers
    def get(token: Any, location: Any, thread: Any, keys: Any, transforms: Any, *args, **kw) -> Any:
        simulation._step()
        if found := shared(keys, transforms):
            key, where, content = found
            with simulation.changed:
                simulation.lanes.read(thread, key, where, content.shape)
        return original["get"](token, location, thread, keys, transforms, *args, **kw)

    @gpu_callbacks.fail_on_exception
    @simulation.remembers
    def swap(token: Any, location: Any, thread: Any, keys: Any, transforms: Any, val, *args, **kw):
        simulation._step()
        if found := shared(keys, transforms):
            key, where, content = found
            with simulation.changed:
                simulation.lanes.write(thread, key, where, content, np.asarray(val))
        return original["swap"](token, location, thread, keys, transforms, val, *args, **kw)

    def commit_smem(self: Any, thread: Any) -> None:
        simulation.lanes.barrier(thread)
        original["commit_smem"](self, thread)

    def add_copy(self: Any, thread: Any, read_clock: Any, write_clock: Any) -> None:
        simulation.copies[thread].open.append((read_clock, write_clock))

    def wait_copies(self: Any, thread: Any, n: int, wait_read_only: bool) -> None:
        with self.lock:
            self.incr_clock(thread, take_lock=False)
            simulation.copies[thread].wait(self.clocks[thread], n, wait_read_only)
        simulation.lanes.barrier(thread)

    @simulation.remembers
    def thread_finished(self: Any, thread: Any) -> None:
        if simulation.copies[thread].pending:
            raise KernelError(f"{thread} leaves while copies of it are under way")
        # Without race detection there are no clocks.
        if not self.detect_races:
            return
        with simulation.changed:
            clock = simulation.exit_clocks.setdefault(thread.block_id, self.get_clock(thread))
            clock.update(self.get_clock(thread))

    @gpu_callbacks.fail_on_exception
    @simulation.remembers
    def cluster_finished(*, token: Any) -> Any:
        simulation.finish_block()
        return original["cluster_finished"](token=token)

    changes = (
        ("kernel", plgpu, "kernel", kernel),
        ("commit", plgpu, "commit_smem_to_gmem_group", lambda: _on_host(_CommitGroup())),
        ("run", thread_map, "_run_jaxpr", _run_jaxpr),
        ("inline", _Interpreter, "_interpret_inline_mgpu_p", inline),
        ("access", _Memory, "access", access),
        ("read", GPURaceDetectionState, "check_read", checking("read", write=False)),
        ("write", GPURaceDetectionState, "check_write", checking("write", write=True)),
        ("get", gpu_callbacks, "_get", get),
        ("swap", gpu_callbacks, "_swap", swap),
        ("commit_smem", _Memory, "commit_smem", commit_smem),
        ("copy", gpu_callbacks, "copy_smem_to_gmem", copy_smem_to_gmem),
        ("add_copy", _Memory, "add_copy_smem_to_gmem_clocks", add_copy),
        ("wait_copies", _Memory, "wait_smem_to_gmem", wait_copies),
        ("thread_finished", _Memory, "kernel_thread_finished", thread_finished),
        ("cluster_finished", gpu_callbacks, "cluster_finished", cluster_finished),
    )
    original = {key: getattr(where, name) for key, where, name, _ in changes}
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with contextlib.ExitStack() as stack:
        for _, where, name, replacement in changes:
            stack.enter_context(mock.patch.object(where, name, replacement))
        yield


_compiled: dict[int, tuple[Any, Any]] = {}
_compiling = threading.Lock()


def _run_jaxpr(jaxpr: Any, consts: Any, *args: Any) -> None:
    """Replaces JAX's `_run_jaxpr`: compiles once for all threads and blocks, unoptimized."""
    with _compiling:
        if id(jaxpr) not in _compiled:
            function = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
            options = {"xla_backend_optimization_level": 0}
            _compiled[id(jaxpr)] = jaxpr, function.lower(consts, *args).compile(options)
    _compiled[id(jaxpr)][1](consts, *args)


@contextlib.contextmanager
def _watchdog(simulation: _Simulation | None) -> Iterator[None]:
    """Ends the code in a `with` statement if it runs longer than DEADLOCK_SECONDS.

    A simulation ends with a KernelError. Without a simulation, or if that fails, the process ends.
    """

    def give_up() -> None:
        assert simulation is not None
        simulation.failure = KernelError(f"a deadlock: no end after {DEADLOCK_SECONDS:g} s")
        simulation.memory.set_failed(simulation.failure, None, top_level=False)

    timer = threading.Timer(DEADLOCK_SECONDS, give_up)
    if simulation is not None:
        timer.daemon = True
        timer.start()
    faulthandler.dump_traceback_later(DEADLOCK_SECONDS + 2 * WAIT_SECONDS, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
