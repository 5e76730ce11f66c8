"""Runs kernels in Pallas' GPU interpreter on a CPU, with race detection.

`interpret` runs a kernel on one device. `simulate` runs a kernel of several ranks (`Simulated`),
all at once, including their rendezvous: the ranks are the blocks of a cluster, which the
interpreter runs concurrently. The simulator adds to the interpreter:

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

What a kernel emits as MLIR or PTX runs in `emitted`, for one rank. The simulator uses private parts
of JAX 0.11 and newer. If one is missing, the tests that need the simulator are skipped.
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
from pallas_kernels.fabric.low_latency import TileMemory
from pallas_kernels.fabric.memory_map import MAX_VALUES, NUM_COUNTERS, TILE_BYTES, num_tile_buffers
from support.interpreted import matmul_kernels
from support.kernels import KERNELS_RUN, WHY_NOT
from support.one_thread import warpgroups_of_one_thread

# The seconds that a whole kernel may take. Deadlocks are found without a clock; this only ends a
# process that hangs in another way.
HANG_SECONDS = 600.0

_missing = ""
try:
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState

    _Memory = shared_memory.GPUSharedMemory
    # Maps a name to the attribute of the interpreter that a simulation replaces.
    _REPLACED: dict[str, tuple[Any, str]] = {
        "kernel": (plgpu, "kernel"),
        "commit": (plgpu, "commit_smem_to_gmem_group"),
        "run": (thread_map, "_run_jaxpr"),
        "inline": (jaxpr_interpret.JaxprInterpreter, "_interpret_inline_mgpu_p"),
        "access": (_Memory, "access"),
        "check_read": (GPURaceDetectionState, "check_read"),
        "check_write": (GPURaceDetectionState, "check_write"),
        "get": (gpu_callbacks, "_get"),
        "swap": (gpu_callbacks, "_swap"),
        "commit_smem": (_Memory, "commit_smem"),
        "copy": (gpu_callbacks, "copy_smem_to_gmem"),
        "add_copy": (_Memory, "add_copy_smem_to_gmem_clocks"),
        "wait_copies": (_Memory, "wait_smem_to_gmem"),
        "barrier_wait": (shared_memory.Barrier, "_wait"),
        "thread_finished": (_Memory, "kernel_thread_finished"),
        "cluster_finished": (gpu_callbacks, "cluster_finished"),
    }
    _original = {key: getattr(*place) for key, place in _REPLACED.items()}
    _used = (
        gpu_callbacks.get_races,
        gpu_callbacks.reset_gpu_interpret_mode_state,
        gpu_callbacks.fail_on_exception,
        shared_memory.Warpgroup,
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
        _on_host(_barrier)

    def enter(
        self, operands: Sequence[Any], buffers: Sequence[Any], *, num_blocks: int, **_: Any
    ) -> None:
        _on_host(_enter, num_blocks=num_blocks)

    def connect(self) -> None:
        _on_host(_connect, num_ranks=self.num_ranks)

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        _on_host(_signal, count, kind=kind, num_ranks=self.num_ranks, release=release)

    def wait(self, kind: int, count: Any, what: str) -> None:
        _on_host(_wait, count, kind=kind, num_ranks=self.num_ranks, what=what)

    def send_values(self, words: Any, start: Any) -> None:
        _on_host(_send_values, words[...], start, num_ranks=self.num_ranks)

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        received = jax.ShapeDtypeStruct(words.shape, words.dtype)
        (words[...],) = _on_host(_read_values, rank, start, what=what, returns=[received])

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        _on_host(_send_halves, words[...], first, count=count, num_ranks=self.num_ranks)

    def read_halves(self, rank: Any, words: Any, what: str) -> None:
        self.read_values(rank, 0, words, what)

    def delay_point(self, number: int) -> None:
        _on_host(_pause)


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

    def barrier(self) -> None:
        _on_host(_barrier)

    def hold_back(self, point: int, rank: jax.Array) -> None:
        _on_host(_pause)


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
        _on_host(_send, gpu, buffer, tile, memory=self)

    def receive(self, endpoint, buffers, shape, dtype, *, exact, wanted=None) -> list[jax.Array]:
        tiles = [jax.ShapeDtypeStruct(shape, dtype)] * len(buffers)
        wanted = [jnp.int32(w) for w in wanted or (1,) * len(buffers)]
        peers = endpoint.peers * (len(buffers) // len(endpoint.peers))
        operands = endpoint.gpu, endpoint.rank, *buffers, *peers, *wanted
        return _on_host(_receive, *operands, memory=self, what=endpoint.what, returns=tiles)

    def read(self, gpu: jax.Array, counters: Sequence[jax.Array]) -> list[jax.Array]:
        values = [jax.ShapeDtypeStruct((), jnp.int32)] * len(counters)
        return _on_host(_read_counters, gpu, *counters, memory=self, returns=values)

    def write(self, gpu, counters, values) -> None:
        _on_host(_write_counters, gpu, *counters, *values, memory=self)


def simulated_channels(
    axes: Sequence[tuple[int, int]],
    gpus: Sequence[int],
    contents: TileContents | None = None,
    *,
    kind: type[SimulatedChannels] = SimulatedChannels,
    detect_races: bool = True,
) -> SimulatedChannels:
    """Makes simulated `ll.Channels` along mesh axes of these (stride, size)."""
    gpus = tuple(gpus)
    memory = SimulatedTileMemory(0, max(gpus) + 1, contents or TileContents())
    options = InterpretGPUParams(detect_races=detect_races)
    mesh_index = np.arange(len(gpus), dtype=np.int32)[:, None]
    return kind(tuple(axes), gpus, memory, mesh_index, interpret=options)


def interpret(function: Callable[[], Any]) -> Any:
    """Runs `function`, which calls one kernel, in the interpreter; returns NumPy arrays."""
    run_jaxpr = mock.patch.object(thread_map, "_run_jaxpr", _run_jaxpr)
    with _interpreter(), run_jaxpr, matmul_kernels(INTERPRETER):
        try:
            results = jax.tree.map(np.asarray, function())
        # In JAX newer than 0.11, a race is an exception of the runtime.
        except Exception as error:
            if "RACE DETECTED" in str(error):
                raise KernelError(f"a race: {error}") from None
            raise
        if gpu_callbacks.get_races().races_found:
            raise KernelError("a race: its two sides are printed above")
        return results


def simulate(function: Callable[[], Any]) -> Any:
    """Runs `function`, whose kernels use `simulated_ranks` or channels; returns NumPy arrays.

    Raises:
        KernelError: a race, an access out of bounds, a deadlock, an early exit, or another error.
    """
    simulation = _Simulation()
    with _interpreter(), warpgroups_of_one_thread(), _changed_interpreter(simulation):
        try:
            results = jax.tree.map(np.asarray, function())
        # JAX's runtime has turned the kernel's error into text; raise the recorded original.
        except Exception as error:
            raise simulation.failure or error from None
    if simulation.failure is not None:
        raise simulation.failure
    return results


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Makes the CPU run kernels, even if there is a GPU; ends the process if one hangs.

    On a GPU, XLA would remove some of the roundings that the kernels ask for.
    """
    before = jax.config.jax_default_device
    gpu_callbacks.reset_gpu_interpret_mode_state()
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    # Set the default device for all threads, because the interpreter starts threads of its own.
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    try:
        yield
    finally:
        jax.config.update("jax_default_device", before)
        faulthandler.cancel_dump_traceback_later()
        _compiled.clear()
        gpu_callbacks.reset_gpu_interpret_mode_state()


# ----------------------------------------------------------------- operations that kernels ask for


def _on_host(
    operation: Callable[..., Any],
    *operands: Any,
    returns: Sequence[jax.ShapeDtypeStruct] = (),
    **options: Any,
) -> list[jax.Array]:
    """Makes the simulation run an operation, in order with this thread's accesses to memory.

    Calls operation(simulation, thread, *operands, **options), which returns the arrays `returns`.
    """

    def layout(shape: tuple[int, ...]) -> Any:
        return plgpu.Layout.WG_STRIDED(shape, vec_size=1) if shape else plgpu.Layout.WG_SPLAT(())

    if returns:
        options["returns"] = returns
    arrays = [x if hasattr(x, "shape") else jnp.int32(x) for x in operands]
    types = [plgpu.ShapeDtypeStruct(r.shape, r.dtype, layout=layout(r.shape)) for r in returns]
    inline = plgpu.inline_mgpu(
        arg_types=tuple(layout(array.shape) for array in arrays), return_type=types
    )
    return inline(functools.partial(operation, **options))(*arrays)


def _barrier(simulation, thread):
    simulation.lanes.barrier(thread)


def _enter(simulation, thread, *, num_blocks):
    with simulation.changed:
        simulation.num_blocks = num_blocks
        simulation.entered.add(thread.block_id)
        simulation.changed.notify_all()


def _connect(simulation, thread, *, num_ranks):
    """Waits until all ranks have entered the kernel; orders no accesses of different ranks."""
    simulation.wait_until(
        thread,
        lambda: len(simulation.entered) == num_ranks,
        lambda: f"rank {thread.block_id} waits to connect: only {simulation.entered} entered",
    )
    clock = simulation.memory.incr_clock(thread)
    with simulation.changed:
        simulation.connected[thread.block_id].append(clock)
        simulation.hears(thread, range(num_ranks))


class _Sent(NamedTuple):
    """A signal that was sent, the sender's vector clock, and what it makes visible (`_Visible`)."""

    count: int
    clock: Any
    visible: dict[int, int]


def _signal(simulation, thread, count, *, kind, num_ranks, release):
    count = int(count)
    simulation.lanes.barrier(thread)
    clock = simulation.memory.incr_clock(thread)
    with simulation.changed:
        visible = simulation.visible.after_signal(thread.block_id) if release else {}
        for rank in range(num_ranks):
            signals = simulation.signals[kind, rank, thread.block_id]
            last = signals[-1].count if signals else 0
            if count <= last:
                raise KernelError(
                    f"rank {thread.block_id} signals {count} of kind {kind}, after {last}: counts "
                    f"must grow"
                )
            signals.append(_Sent(count, clock, visible))
        simulation.changed.notify_all()


def _wait(simulation, thread, count, *, kind, num_ranks, what):
    memory, count = simulation.memory, int(count)
    for rank in range(num_ranks) if count > 0 else ():
        signals = simulation.signals[kind, thread.block_id, rank]
        simulation.wait_until(
            thread,
            lambda signals=signals: signals and signals[-1].count >= count,
            lambda signals=signals, rank=rank: (
                f"{what}: rank {thread.block_id} waits for signal {count} of kind {kind} of rank "
                f"{rank}, which has sent {[s.count for s in signals]}"
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


def _send_values(simulation, thread, words, start, *, num_ranks):
    with simulation.changed:
        for rank in range(num_ranks):
            values = simulation.values[rank, thread.block_id]
            for i, word in enumerate(np.array(words).view(np.int32), int(start)):
                if not 0 <= i < MAX_VALUES:
                    raise KernelError(f"there is no value {i}")
                if values.setdefault(i, word) != word:
                    raise KernelError(f"rank {thread.block_id} sends two values {i} in a call")
        simulation.changed.notify_all()


def _send_halves(simulation, thread, words, first, *, count, num_ranks):
    start = 2 * int(first)
    sent = np.array(words)[start : start + 2 * count]
    sent = np.where(sent == sent.astype(np.int16), sent, -1)
    _send_values(simulation, thread, sent, start, num_ranks=num_ranks)


def _read_values(simulation, thread, rank, start, *, what, returns):
    (received,) = returns
    values = simulation.values[thread.block_id, int(rank)]
    wanted = range(int(start), int(start) + received.size)
    simulation.wait_until(
        thread,
        lambda: all(i in values for i in wanted),
        lambda: f"{what}: rank {thread.block_id} waits for values of rank {rank}",
    )
    with simulation.changed:
        simulation.hears(thread, [int(rank)])
    return [np.array([values[i] for i in wanted], np.int32).view(received.dtype)]


def _pause(simulation, thread):
    time.sleep(random.choice((0.0, 0.0, 0.001, 0.01)))


def _send(simulation, thread, gpu, buffer, tile, *, memory):
    tile, key, tiles = np.array(tile), (int(gpu), int(buffer)), memory.contents.tiles
    known = key[0] in range(memory.num_gpus) and key[1] < num_tile_buffers(memory.num_gpus)
    if tile.nbytes != TILE_BYTES or not known:
        raise KernelError(f"GPU {gpu} has no tile buffer {buffer} of {tile.nbytes} bytes")
    with simulation.changed:
        if key in tiles:
            raise KernelError(
                f"a tile of rank {thread.block_id} overtakes one that nobody has taken: in tile "
                f"buffer {buffer} of GPU {gpu}"
            )
        simulation.sent[key] = tiles
        tiles[key] = tile
        simulation.changed.notify_all()


def _receive(simulation, thread, gpu, rank, *rest, memory, what, returns):
    """Takes a tile from each of some buffers; `rest` has the buffers, peers, and what is wanted."""
    simulation.owns_memory(thread, gpu)
    tiles, count = memory.contents.tiles, len(returns)
    buffers, peers, wanted = (
        list(map(int, rest[i : i + count])) for i in range(0, 3 * count, count)
    )
    keys = [(int(gpu), buffer) for buffer in buffers]
    comes = {key for key, w in zip(keys, wanted, strict=True) if w}
    if len(set(keys)) < count:
        raise KernelError(
            f"{what}: peers {peers} share a tile buffer: one's tile overtakes another's"
        )

    def missing() -> list[int]:
        waits = zip(peers, keys, strict=True)
        return [peer for peer, key in waits if key in comes and key not in tiles]

    simulation.wait_until(
        thread,
        lambda: not missing(),
        lambda: f"{what}: rank {rank} waits for a tile of {missing()}",
    )
    with simulation.changed:
        simulation.hears(thread, [p for p, w in zip(peers, wanted, strict=True) if w])
        # The kernel polls some buffers without wanting their tiles. It must not use what it reads
        # there, so return a strange value.
        strange = np.full(returns[0].shape, 77, returns[0].dtype)
        return [tiles.pop(key) if key in comes else strange for key in keys]


def _read_counters(simulation, thread, gpu, *counters, memory, returns):
    simulation.owns_memory(thread, gpu)
    return [np.int32(memory.contents.counters[int(gpu), int(counter)]) for counter in counters]


def _write_counters(simulation, thread, gpu, *scalars, memory):
    """Writes counters; `scalars` are their numbers and then their values."""
    simulation.owns_memory(thread, gpu)
    simulation.lanes.barrier(thread)
    count = len(scalars) // 2
    assert all(0 <= counter < NUM_COUNTERS for counter in scalars[:count])
    for counter, value in zip(scalars[:count], scalars[count:], strict=True):
        memory.contents.counters[int(gpu), int(counter)] = int(value)


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
        """Returns records of the last accesses to the accessed elements, and who accesses them.

        The latter is 0 if all threads access a single element. For a vector it is a hash of the
        vector's index: vectors of equal indices are divided among the threads alike.
        """
        names = ("read in", "read by", "written in", "written by", "unsettled in")
        if key not in self._tables:
            self._tables[key] = {name: np.zeros(shape, np.int64) for name in names}
        # Select a single element by a slice, so that the result is a view, which can be assigned.
        where = tuple(slice(i, i + 1) if isinstance(i, int) else i for i in access.range)
        who = hash(str(access.range)) if access.shape else 0
        return {name: self._tables[key][name][where] for name in names}, who

    def read(self, thread: Any, key: Any, access: Any, content: np.ndarray) -> None:
        now, (here, who) = self._periods[thread], self._here(key, access, content.shape)
        of_others = (here["written by"] != 0) & (here["written by"] != who)
        if np.any((here["written in"] == now) & (of_others | (here["unsettled in"] == now))):
            raise KernelError(f"a barrier is missing before {thread} reads {access}")
        mixed = (here["read in"] == now) & (here["read by"] != who)
        here["read by"][...] = np.where(mixed, 0, who)
        here["read in"][...] = now

    def write(self, thread: Any, key: Any, access: Any, old: np.ndarray, new: Any) -> None:
        now, (here, who) = self._periods[thread], self._here(key, access, old.shape)
        changed = ~np.equal(old[access.range], np.asarray(new)).reshape(here["read in"].shape)
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
        """Maps each writer to the number of its last write that `rank`'s signal makes visible."""
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
        # Maps a thread that waits to whether it may go on, and to what it waits for.
        self.waiting: dict[Any, tuple[Callable[[], Any], Callable[[], str]]] = {}
        self.left: set[Any] = set()
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

    def wait_until(self, thread: Any, done: Callable[[], Any], what: Callable[[], str]) -> None:
        """Waits until `done()`; raises KernelError if no thread can go on, and says `what()`."""
        with self.changed, self.waits(thread, done, what):
            while not done():
                # Nothing notifies of a failure.
                self.changed.wait(0.1)
                self.memory.check_failed()

    @contextlib.contextmanager
    def waits(
        self, thread: Any, done: Callable[[], Any], what: Callable[[], str]
    ) -> Iterator[None]:
        """Counts a thread among those that wait until `done()`, within a `with` statement."""
        try:
            with self.changed:
                self.waiting[thread] = done, what
                self.find_deadlock()
            yield
        finally:
            with self.changed:
                del self.waiting[thread]

    def leaves(self, thread: Any) -> None:
        """Counts a thread among those that have left the kernel."""
        with self.changed:
            self.left.add(thread)
            self.find_deadlock()

    def find_deadlock(self) -> None:
        """Raises KernelError if all threads wait and none may go on, but for those that have left.

        Only a running thread can let another one go on, so this needs no clock: it is called when a
        thread stops running.
        """
        self.changed.notify_all()
        if self.waiting and self.stuck(self.threads()):
            whats = "; ".join(what() for _, what in self.waiting.values())
            self.failure = self.failure or KernelError(f"a deadlock: {whats}")
            raise self.failure

    def stuck(self, threads: Sequence[Any]) -> bool:
        """Returns whether each of some threads has left, or waits and may not go on."""
        return all(
            thread in self.left or (thread in self.waiting and not self.waiting[thread][0]())
            for thread in threads
        )

    def threads(self) -> list[Any]:
        """Returns all threads of all ranks; the interpreter runs a warpgroup as one thread."""
        every = self.memory.all_concurrent_threads
        return [thread for thread in every if isinstance(thread, shared_memory.Warpgroup)]

    def fall_behind(self, thread: Any) -> None:
        """Holds a thread back until the threads of all other ranks can do nothing without it."""
        others = [other for other in self.threads() if other.block_id != thread.block_id]
        self.wait_until(
            thread, lambda: self.stuck(others), lambda: f"rank {thread.block_id} falls behind"
        )

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

    def note_access(self, thread: Any, clock: Any, key: Any, access: Any, write: bool) -> bool:
        """Records and checks an access to global memory, where every buffer is stacked by rank.

        Returns whether the access can race. Kernels load vectors of routes ahead of their use,
        perhaps before all entries are written, and use only the entries that were. Every vector of
        integers is taken for one of routes.
        """
        buffer, owner = self.memory.buffer_shape_and_dtype(key), access.range[0]
        shape = buffer.shape
        what = f"{'write to' if write else 'read of'} {shape}{access.range} by {thread}"
        if not isinstance(owner, int):
            raise KernelError(f"several ranks' memory at once: {what}")
        with self.changed:
            if owner != thread.block_id:
                if not self.is_connected(thread):
                    raise KernelError(f"a rank's memory before connect: {what}")
                self.remote_accesses.append((owner, clock, what))
            if not write and buffer.dtype == np.int32 and access.shape != ():
                return False
            self.visible.access(thread.block_id, key, shape, access, write, what)
            for table in (self.writers, self.readers):
                table.setdefault(key, np.full(shape, -1, np.int32))
            touched = [self.writers[key][access.range]]
            if write:
                touched.append(self.readers[key][access.range])
            if any(np.any((block >= 0) & (block != self.block)) for block in touched):
                raise KernelError(f"block {self.block} of the grid touches another's: {what}")
            (self.writers if write else self.readers)[key][access.range] = self.block
        return True

    def is_connected(self, thread: Any) -> bool:
        """Returns whether the thread's current access is ordered after a `connect` of its rank."""
        now = self.memory.clocks[thread].generic_clock.clock
        return any(
            np.all(now >= clock.generic_clock.clock) for clock in self.connected[thread.block_id]
        )

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
    """Replaces functions of the interpreter by those of a simulation."""
    replacements = {"kernel": _kernel, "run": _run_jaxpr}
    replacements |= _operations(simulation) | _memory(simulation)
    with contextlib.ExitStack() as stack:
        for key, (owner, name) in _REPLACED.items():
            stack.enter_context(mock.patch.object(owner, name, replacements[key]))
        yield


def _kernel(*args: Any, **kwargs: Any) -> Any:
    """Turns a grid over (rank, block) into a grid over blocks, each a cluster of all ranks."""
    ranks, blocks = kwargs.pop("grid")
    # The grid has the ranks of one group that communicates, but the leading axis of a result has
    # the ranks of all groups, which the simulation runs. Without results there must be one group.
    if kwargs["out_type"]:
        ranks = kwargs["out_type"][0].shape[0]
    assert kwargs.pop("grid_names") == ("rank", "block")
    kwargs |= dict(grid=(blocks,), grid_names=("block",))
    return _original["kernel"](*args, cluster=(ranks,), cluster_names=("rank",), **kwargs)


def _operations(simulation: _Simulation) -> dict[str, Callable[..., Any]]:
    """Returns what replaces the interpreter's operations of kernels."""

    @gpu_callbacks.fail_on_exception
    @simulation.remembers
    def run_on_host(operation: Any, token: Any, thread: Any, *args: Any) -> Any:
        return token, *(operation(simulation, thread, *args) or ())

    def inline(self: Any, eqn: Any, token: Any, get_operands: Any) -> Any:
        args = get_operands()[: eqn.params["pytree_args"].num_leaves]
        function = functools.partial(run_on_host, eqn.params["mgpu_fn"])
        results = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        results = gpu_callbacks.TOKEN_SHAPE_DTYPE, *results
        token, *results = io_callback(function, results, token, self.thread, *args)
        return token, results

    def copy_smem_to_gmem(*, thread: Any, commit_group: bool, **kwargs: Any) -> Any:
        token = _original["copy"](thread=thread, commit_group=commit_group, **kwargs)
        if commit_group:
            simulation.copies[thread].commit()
        return token

    def watched(key_of_original: str, watch: Callable[..., None]) -> Callable[..., Any]:
        """Wraps a read or a write; `watch` gets (thread, key, access, contents, written values)."""

        @gpu_callbacks.fail_on_exception
        @simulation.remembers
        def operation(token: Any, where: Any, thread: Any, keys: Any, transforms: Any, *args, **kw):
            key = shared_memory.HostAllocationKey.from_array(keys)
            if key.memory_space_id == shared_memory.get_memory_space_idx(plgpu.SMEM):
                indices = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
                memory = simulation.memory
                access, content = memory.access(key, indices), memory.mem[key].content
                with simulation.changed:
                    watch(thread, key, access, content, *args)
            return _original[key_of_original](token, where, thread, keys, transforms, *args, **kw)

        return operation

    return dict(
        commit=lambda: _on_host(lambda simulation, thread: simulation.copies[thread].commit()),
        inline=inline,
        copy=copy_smem_to_gmem,
        get=watched("get", lambda *args: simulation.lanes.read(*args[:4])),
        swap=watched("swap", lambda *args: simulation.lanes.write(*args[:5])),
    )


def _memory(simulation: _Simulation) -> dict[str, Callable[..., Any]]:
    """Returns what replaces methods of the interpreter's memory, barriers and race detection."""

    @simulation.remembers
    def access(self: Any, key: Any, transforms: Any) -> Any:
        found = _original["access"](self, key, transforms)
        _check_bounds(found.range, self.buffer_shape_and_dtype(key).shape)
        return found

    def checking(key_of_original: str, write: bool) -> Callable[..., None]:
        @simulation.remembers
        def check(self: Any, thread: Any, clock: Any, key: Any, access: Any, **info: Any) -> None:
            is_global = key.memory_space_id == shared_memory.get_memory_space_idx(plgpu.GMEM)
            if is_global and not simulation.note_access(thread, clock, key, access, write):
                return
            try:
                _original[key_of_original](self, thread, clock, key, access, **info)
            # In JAX newer than 0.11, a race is an exception.
            except RuntimeError as error:
                raise KernelError(f"a race: {error}") from None
            if self.races_found:
                raise KernelError("a race: its two sides are printed above")

        return check

    def commit_smem(self: Any, thread: Any) -> None:
        simulation.lanes.barrier(thread)
        _original["commit_smem"](self, thread)

    def add_copy(self: Any, thread: Any, read_clock: Any, write_clock: Any) -> None:
        simulation.copies[thread].open.append((read_clock, write_clock))

    def wait_copies(self: Any, thread: Any, n: int, wait_read_only: bool) -> None:
        with self.lock:
            self.incr_clock(thread, take_lock=False)
            simulation.copies[thread].wait(self.clocks[thread], n, wait_read_only)
        simulation.lanes.barrier(thread)

    def barrier_wait(self: Any, thread: Any, logging_info: Any = None) -> None:
        seen = self.last_observed_phase_by_thread.get(thread, 0)
        what = f"rank {thread.block_id} waits at a barrier of its own"
        with simulation.waits(thread, lambda: self.phase > seen, lambda: what):
            _original["barrier_wait"](self, thread, logging_info)

    @simulation.remembers
    def thread_finished(self: Any, thread: Any) -> None:
        if simulation.copies[thread].pending:
            raise KernelError(f"{thread} leaves while copies of it are under way")
        simulation.leaves(thread)
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
        return _original["cluster_finished"](token=token)

    return dict(
        access=access,
        check_read=checking("check_read", write=False),
        check_write=checking("check_write", write=True),
        commit_smem=commit_smem,
        add_copy=add_copy,
        wait_copies=wait_copies,
        barrier_wait=barrier_wait,
        thread_finished=thread_finished,
        cluster_finished=cluster_finished,
    )


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
