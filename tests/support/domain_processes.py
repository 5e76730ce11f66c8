"""Processes that set up symmetric memory on a fake CUDA driver; `Processes` starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from jax_ep.runtime import cuda_driver, processes, symmetric_memory
from pallas_kernels.fabric import memory_map
from support.fake_cuda import FakeCuda, open_descriptors

POOL_BYTES = 2**20


class Store:
    """A key-value service like that of `jax.distributed`, whose values are files in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) / "store"
        self.folder.mkdir(exist_ok=True)

    def key_value_set(self, key: str, value: str) -> None:
        path = self.folder / key.replace("/", "-")
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").rename(path)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        path, deadline = self.folder / key.replace("/", "-"), time.monotonic() + timeout_in_ms / 1e3
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            time.sleep(0.01)
        return path.read_text()


@dataclasses.dataclass
class Process:
    """The options of one process of a test.

    Attributes:
        gpus: the host's GPUs that the process sees, by ordinal.
        driver: options of its `FakeCuda`.
        pool: options of `FakeCuda.pool`, XLA's memory pool on each GPU.
        memory_limit: the bytes to which a pool may grow; None if JAX does not report them.
        participant: fields of its `symmetric_memory.Participant` that differ from the usual.
        answers: the functions to replace: maps a name, "module.name" or "module.class.name", to the
            value that the function returns instead.
        dies_in: the name of a function in which the process is killed; "" for none.
        late_s: seconds that the process waits before it begins.
    """

    gpus: Sequence[int]
    driver: dict[str, Any] = dataclasses.field(default_factory=dict)
    pool: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory_limit: int | None = POOL_BYTES
    participant: dict[str, Any] = dataclasses.field(default_factory=dict)
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)
    dies_in: str = ""
    late_s: float = 0.0


@dataclasses.dataclass
class Outcome:
    """The result of the set-up of symmetric memory in one process.

    Attributes:
        domain: the symmetric-memory domain, or the reason why there is none.
        seconds: how long the set-up took.
        received: what all GPUs have written into each GPU of this process. Maps the GPU's number to
            a pair: the words in its symmetric heap, and those in its XLA array. GPU g writes word g
            of both.
        left: resources that the set-up should have released and did not.
    """

    domain: symmetric_memory.Domain | str
    seconds: float
    received: dict[int, tuple[list[int], list[int]]]
    left: list[str]


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
        self._server.communicate(timeout=60)

    def run(
        self, members: Sequence[Process], folder: Path, timeout_s: float = 20.0
    ) -> list[Outcome | None]:
        """Runs the set-up in one process for each member; its outcome is None if it was killed."""
        pickle.dump((list(members), str(folder), timeout_s), self._server.stdin)
        self._server.stdin.flush()
        outcomes: list[Outcome | None] = pickle.load(self._server.stdout)
        return outcomes


def serve() -> None:
    """Answers the requests of `Processes` that arrive on standard input, until it is closed."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while requests.peek(1):
        pickle.dump(_run_all(*pickle.load(requests)), replies)
        replies.flush()


def _run_all(members: list[Process], folder: str, timeout_s: float) -> list[Outcome | None]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in members]
    started = []
    for number, (_, there) in enumerate(pipes):
        started.append(
            context.Process(target=_run, args=(number, members, folder, timeout_s, there))
        )
        started[-1].start()
    outcomes: list[Outcome | None] = []
    for (here, there), process in zip(pipes, started, strict=True):
        there.close()
        process.join(4 * timeout_s)
        assert process.exitcode is not None, "a process hangs"
        outcomes.append(here.recv() if here.poll() and process.exitcode == 0 else None)
        here.close()
    return outcomes


def sockets(folder: Path) -> list[str]:
    """Returns the set-up's Unix sockets that are left in a folder for temporary files."""
    return glob.glob(f"{folder}/jax_ep-*")


def _run(number: int, members: list[Process], folder: str, timeout_s: float, end: Any) -> None:
    tempfile.tempdir = folder
    me, store = members[number], Store(folder)
    library = FakeCuda(list(me.gpus), **me.driver)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(cuda_driver, "_libcuda", lambda: library))
        if me.dies_in:
            _patch(patches, me.dies_in, lambda *_, **__: os.kill(os.getpid(), 9))
        for name, value in me.answers.items():
            _patch(patches, name, lambda *_, value=value: value)
        time.sleep(me.late_s)
        end.send(set_up(number, members, store, library, timeout_s))


def set_up(
    number: int, members: list[Process], store: Any, library: FakeCuda, timeout_s: float
) -> Outcome:
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
        "timeout_s": timeout_s,
        "array_address": lambda device: arrays[device.id],
        "jax_ep_version": "1",
    }
    participant = symmetric_memory.Participant(**values | me.participant)
    before, begin = open_descriptors(), time.monotonic()
    domain = symmetric_memory.set_up(participant)
    seconds = time.monotonic() - begin
    left = [f"{kind}: {n}" for kind, n in (open_descriptors() - before).items()]
    left = [what for what in left if not what.startswith("/memfd") or isinstance(domain, str)]
    if threading.active_count() > 1:
        left.append("threads")
    if library.memories:
        left.append("handles")
    if isinstance(domain, str):
        if len(library.mappings) != len(arrays) or library.reserved:
            left.append("mappings")
        return Outcome(domain, seconds, {}, left)
    return Outcome(domain, seconds, _write_to_all(domain, number, arrays, store), left)


def gpus_of_process(domain: symmetric_memory.Domain) -> dict[int, int]:
    """Returns the number of GPUs of each process in a domain, by `jax.process_index()`."""
    return dict(Counter(gpu.process for gpu in domain.gpus))


def _write_to_all(
    domain: symmetric_memory.Domain, number: int, arrays: dict[int, int], store: Any
) -> dict[int, tuple[list[int], list[int]]]:
    """Writes a word from each GPU of this process into the heap and the array of every GPU.

    A peer's array is addressed through the offset in the writer's heap header.

    Returns:
        What all GPUs have written into each GPU of this process. Maps the GPU's number to a pair:
        the words in its heap, and those in its array. GPU g writes word g of both.
    """
    addresses = " ".join(f"{device}:{address}" for device, address in arrays.items())
    store.key_value_set(f"arrays/{number}", addresses)
    of_device = {}
    for process in gpus_of_process(domain):
        for pair in store.blocking_key_value_get(f"arrays/{process}", 10_000).split():
            of_device[int(pair.split(":")[0])] = int(pair.split(":")[1])
    denied = {(one, other) for one, other, _ in domain.no_access}
    own = [gpu for gpu in domain.gpus if gpu.process == number]
    for ordinal, gpu in _by_ordinal(own):
        heap = domain.base + gpu.number * domain.stride
        for peer in domain.gpus:
            if (gpu.number, peer.number) in denied:
                continue
            place, word = 8 * gpu.number, struct.pack("<Q", 100 * gpu.number + peer.number)
            there = domain.base + peer.number * domain.stride + memory_map.HEADER_BYTES
            cuda_driver.write(ordinal, there + place, word)
            (delta,) = struct.unpack(
                "<Q", cuda_driver.read(ordinal, heap + 8 * (memory_map.DELTA + peer.number), 8)
            )
            there = (of_device[peer.device_id] + delta) % 2**64
            cuda_driver.write(ordinal, there + place, word)
    store.key_value_set(f"written/{number}", "")
    for process in gpus_of_process(domain):
        store.blocking_key_value_get(f"written/{process}", 10_000)
    received = {}
    for ordinal, gpu in _by_ordinal(own):
        places = (
            domain.base + gpu.number * domain.stride + memory_map.HEADER_BYTES,
            arrays[gpu.device_id],
        )
        heap, array = (cuda_driver.read(ordinal, place, 8 * domain.num_gpus) for place in places)
        words = f"<{domain.num_gpus}Q"
        received[gpu.number] = list(struct.unpack(words, heap)), list(struct.unpack(words, array))
    return received


def _by_ordinal(gpus: list[symmetric_memory.Gpu]) -> list[tuple[int, symmetric_memory.Gpu]]:
    return [(gpu.device_id % 10, gpu) for gpu in gpus]


def _patch(patches: contextlib.ExitStack, name: str, value: Any) -> None:
    owner: Any = {"processes": processes, "symmetric_memory": symmetric_memory, "os": os}[
        name.split(".")[0]
    ]
    *path, attribute = name.split(".")[1:]
    for part in path:
        owner = getattr(owner, part)
    patches.enter_context(mock.patch.object(owner, attribute, value))
