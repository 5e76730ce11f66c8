"""Processes that set up symmetric memory on a fake CUDA driver; `Processes` starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from jax_ep.runtime import cuda_driver, processes, symmetric_memory
from pallas_kernels.fabric import memory_map
from support.fake_cuda import FakeCuda, open_descriptors
from support.processes import HANG_SECONDS

POOL_BYTES = 2**20
# A process that dies here dies before any other knows of it.
INTRODUCE = "processes.Meeting.introduce"


class Clock:
    """Takes the place of the module `time`; a test, or a `Store`, moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Store:
    """A key-value service like that of `jax.distributed`, whose values are files in a folder.

    A wait for an absent process takes all its time at once, on `clock`.
    """

    def __init__(self, folder: str, absent: Collection[int] = (), clock: Clock | None = None):
        self.folder = Path(folder) / "store"
        self.folder.mkdir(exist_ok=True)
        self.absent = {processes._KEY.format(process=process) for process in absent}
        self.clock = clock or Clock()

    def key_value_set(self, key: str, value: str) -> None:
        path = self.folder / key.replace("/", "-")
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").rename(path)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        path, deadline = self.folder / key.replace("/", "-"), time.monotonic() + timeout_in_ms / 1e3
        if key in self.absent:
            self.clock.now += timeout_in_ms / 1e3
            raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            time.sleep(0.01)
        return path.read_text()


@dataclasses.dataclass
class Process:
    """The options of one process of a test."""

    # The host's GPUs that the process sees, by ordinal.
    gpus: Sequence[int]
    # Options of its `FakeCuda`, and of its memory pools.
    driver: dict[str, Any] = dataclasses.field(default_factory=dict)
    pool: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The bytes to which a pool may grow; None if JAX does not report them.
    memory_limit: int | None = POOL_BYTES
    # Fields of its `symmetric_memory.Participant` that differ from the usual.
    participant: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Maps the name of a function to replace, as "module.name", to what it returns instead.
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The name of a function in which the process is killed.
    dies_in: str = ""
    # Processes, of lower numbers, that must have ended before this one begins.
    after: Sequence[int] = ()


@dataclasses.dataclass
class Outcome:
    """The result of the set-up of symmetric memory in one process."""

    # The domain, or the reason why there is none.
    domain: symmetric_memory.Domain | str
    # Maps a GPU's number to what GPUs wrote into its heap and its array; GPU g writes word g.
    received: dict[int, tuple[list[int], list[int]]]
    # Resources that the set-up should have released.
    left: list[str]
    # How long the process waited in vain, by its `Clock`.
    waited_s: float = 0.0


class Processes:
    """Starts processes fast: a server process imports all modules once and forks for each test."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as it; it.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )

    def close(self) -> None:
        self._server.communicate(timeout=HANG_SECONDS)

    def run(self, members: Sequence[Process], folder: Path) -> list[Outcome | None]:
        """Runs the set-up in one process for each member; its outcome is None if it was killed."""
        pickle.dump((list(members), str(folder)), self._server.stdin)
        self._server.stdin.flush()
        outcomes: list[Outcome | None] = pickle.load(self._server.stdout)
        return outcomes


def serve() -> None:
    """Answers the requests of `Processes` that arrive on standard input, until it is closed."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while requests.peek(1):
        pickle.dump(_run_all(*pickle.load(requests)), replies)
        replies.flush()


def _run_all(members: list[Process], folder: str) -> list[Outcome | None]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in members]
    started: list[multiprocessing.process.BaseProcess] = []
    for number, (_, there) in enumerate(pipes):
        for other in members[number].after:
            started[other].join(HANG_SECONDS)
        started.append(context.Process(target=_run, args=(number, members, folder, there)))
        started[-1].start()
    outcomes: list[Outcome | None] = []
    for (here, there), process in zip(pipes, started, strict=True):
        there.close()
        process.join(HANG_SECONDS)
        assert process.exitcode is not None, "a process hangs"
        outcomes.append(here.recv() if here.poll() and process.exitcode == 0 else None)
        here.close()
    return outcomes


def sockets(folder: Path) -> list[str]:
    """Returns the set-up's Unix sockets that are left in a folder for temporary files."""
    return glob.glob(f"{folder}/jax_ep-*")


def _run(number: int, members: list[Process], folder: str, end: Any) -> None:
    tempfile.tempdir = folder
    me, clock = members[number], Clock()
    absent = [i for i, m in enumerate(members) if m.dies_in == INTRODUCE or number in m.after]
    store = Store(folder, absent, clock)
    library = FakeCuda(list(me.gpus), **me.driver)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(cuda_driver, "_libcuda", lambda: library))
        patches.enter_context(mock.patch.object(processes, "time", clock))
        replaced = {name: lambda *_, value=value: value for name, value in me.answers.items()}
        if me.dies_in:
            replaced[me.dies_in] = lambda *_, **__: os.kill(os.getpid(), 9)
        for name, function in replaced.items():
            place = name if name.startswith("os.") else f"jax_ep.runtime.{name}"
            patches.enter_context(mock.patch(place, function))
        outcome = set_up(number, members, store, library)
        end.send(dataclasses.replace(outcome, waited_s=clock.now))


def set_up(number: int, members: list[Process], store: Any, library: FakeCuda) -> Outcome:
    """Sets up symmetric memory in one process; if it succeeds, all GPUs write to all GPUs."""
    me = members[number]
    devices = [
        types.SimpleNamespace(
            id=10 * number + ordinal,
            local_hardware_id=ordinal,
            memory_stats=lambda: me.memory_limit and {"bytes_limit": me.memory_limit},
        )
        for ordinal in range(len(me.gpus))
    ]
    arrays = {
        device.id: library.pool(device.local_hardware_id, POOL_BYTES, **me.pool)
        for device in devices
    }
    values = {
        "process": number,
        "devices": devices,
        "others": [other for other in range(len(members)) if other != number],
        "store": store,
        "timeout_s": HANG_SECONDS,
        "array_address": lambda device: arrays[device.id],
        "jax_ep_version": "1",
    }
    participant = symmetric_memory.Participant(**values | me.participant)
    before = open_descriptors()
    domain = symmetric_memory.set_up(participant)
    left = [f"{kind}: {n}" for kind, n in (open_descriptors() - before).items()]
    left = [what for what in left if not what.startswith("/memfd") or isinstance(domain, str)]
    if threading.active_count() > 1:
        left.append("threads")
    if library.memories:
        left.append("handles")
    if isinstance(domain, str):
        if len(library.mappings) != len(arrays) or library.reserved:
            left.append("mappings")
        return Outcome(domain, {}, left)
    return Outcome(domain, _write_to_all(domain, number, arrays, store), left)


def gpus_of_process(domain: symmetric_memory.Domain) -> dict[int, int]:
    """Returns the number of GPUs of each process in a domain, by `jax.process_index()`."""
    return dict(Counter(gpu.process for gpu in domain.gpus))


def _write_to_all(
    domain: symmetric_memory.Domain, number: int, arrays: dict[int, int], store: Any
) -> dict[int, tuple[list[int], list[int]]]:
    """Writes a word from each GPU of this process into all GPUs; returns `Outcome.received`.

    A peer's array is addressed through the offset in the writer's heap header.
    """
    store.key_value_set(f"arrays/{number}", json.dumps(arrays))
    of_device = {}
    for process in gpus_of_process(domain):
        there = store.blocking_key_value_get(f"arrays/{process}", 1000 * HANG_SECONDS)
        of_device |= {int(device): address for device, address in json.loads(there).items()}
    denied = {(one, other) for one, other, _ in domain.no_access}
    own = [(gpu.device_id % 10, gpu) for gpu in domain.gpus if gpu.process == number]
    for ordinal, gpu in own:
        heap = domain.base + gpu.number * memory_map.STRIDE
        for peer in domain.gpus:
            if (gpu.number, peer.number) in denied:
                continue
            place, word = 8 * gpu.number, struct.pack("<Q", 100 * gpu.number + peer.number)
            there = domain.base + peer.number * memory_map.STRIDE + memory_map.HEADER_BYTES
            cuda_driver.write(ordinal, there + place, word)
            (delta,) = struct.unpack(
                "<Q", cuda_driver.read(ordinal, heap + 8 * (memory_map.DELTA + peer.number), 8)
            )
            there = (of_device[peer.device_id] + delta) % 2**64
            cuda_driver.write(ordinal, there + place, word)
    store.key_value_set(f"written/{number}", "")
    for process in gpus_of_process(domain):
        store.blocking_key_value_get(f"written/{process}", 1000 * HANG_SECONDS)
    received = {}
    for ordinal, gpu in own:
        places = (
            domain.base + gpu.number * memory_map.STRIDE + memory_map.HEADER_BYTES,
            arrays[gpu.device_id],
        )
        heap, array = (cuda_driver.read(ordinal, place, 8 * domain.num_gpus) for place in places)
        words = f"<{domain.num_gpus}Q"
        received[gpu.number] = list(struct.unpack(words, heap)), list(struct.unpack(words, array))
    return received
