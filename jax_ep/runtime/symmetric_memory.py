"""Sets up symmetric memory: a heap on every GPU of a host that all GPUs of the host can address.

`pallas_kernels.fabric.memory_map` states the addresses of the heaps and the contents of their
headers. This module allocates the heaps through the CUDA driver, once, when a program that needs
them is first lowered, and keeps them until the process ends. If a host has several processes, each
process also maps the memory pools of the others, from which XLA allocates arrays. The *domain* of a
process is the GPUs of its host that share memory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep import version
from jax_ep.runtime import cuda_driver, environment, jax_compat, processes
from jax_ep.runtime.processes import Message, Refused
from pallas_kernels.fabric import memory_map

_NO_STORE = (
    "several processes share memory only after jax.distributed.initialize(), in a JAX that has "
    f"jax._src.distributed.global_state.client; this is {jax.__version__}"
)
# Matches XLA_FLAGS that let kernels overlap. By default, XLA runs one kernel at a time.
_CONCURRENT = re.compile(r"xla_gpu_command_buffer_scheduling_mode=.?concurrent")

_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU whose memory the GPUs of its host share."""

    number: int  # of the GPU, and of its heap, on the host
    device_id: int  # `jax.Device.id`
    process: int  # `jax.process_index()`
    bus_id: str  # its PCI address, as "0000:1b:00.0"
    pool_start: int  # the address, in its own process, of XLA's memory pool
    pool_bytes: int  # 0 if the driver's virtual-memory API did not allocate the pool


@dataclasses.dataclass(frozen=True)
class Domain:
    """The GPUs of this host that share memory; all processes of the host number them equally."""

    base: int  # the address of GPU 0's heap; `memory_map.BASE` with several processes
    gpus: tuple[Gpu, ...]  # by number
    # (one, other, reason): GPU `one` cannot address GPU `other`, by number
    no_access: tuple[tuple[int, int, str], ...] = ()

    @property
    def num_gpus(self) -> int:
        return len(self.gpus)

    @property
    def numbers(self) -> dict[int, int]:
        return {gpu.device_id: gpu.number for gpu in self.gpus}


def domain() -> Domain | str:
    """Returns the GPUs of this host that share memory, or a string that says why there are none.

    The first call sets up symmetric memory. It waits until each process of the host calls this
    function, for at most JAX_EP_TIMEOUT_SECONDS, and all get the same answer.
    """
    with _lock:
        return _domain()


def unavailable_reason(devices: Sequence[jax.Device]) -> str | None:
    """Returns why GPUs share no memory with each other, or None; waits as `domain` does."""
    found = domain()
    if isinstance(found, str):
        return found
    numbers = found.numbers
    for device in devices:
        if device.id not in numbers:
            return (
                f"GPU {device.id} of process {device.process_index} belongs to another host than "
                f"GPU {found.gpus[0].device_id} of process {found.gpus[0].process}"
            )
    wanted = {numbers[device.id] for device in devices}
    for one, other, why in found.no_access:
        if {one, other} <= wanted:
            ids = found.gpus[one].device_id, found.gpus[other].device_id
            return f"GPU {ids[0]} cannot address the memory of GPU {ids[1]}: {why}"
    return None


def unavailable_reason_of(process: int) -> str | None:
    """Returns why the GPUs of another host's process share no memory there, or None if they do.

    Waits until that process has called `domain`, for at most JAX_EP_TIMEOUT_SECONDS.
    """
    if (store := jax_compat.distributed_client()) is None:
        return _NO_STORE
    return processes.reported(store, process, environment.timeout_seconds())


def describe() -> list[str]:
    """Returns lines of text on this host's symmetric memory; waits as `domain` does."""
    found = domain()
    if isinstance(found, str):
        return [f"none: {found}"]
    lines = [
        f"{memory_map.heap_bytes(found.num_gpus)} bytes on each of {found.num_gpus} GPUs from "
        f"{found.base:#x} on, {memory_map.STRIDE:#x} apart"
    ]
    for gpu in found.gpus:
        pool = f"pool of {gpu.pool_bytes} bytes at {gpu.pool_start:#x}"
        lines.append(
            f"GPU {gpu.number}: device {gpu.device_id} of process {gpu.process}, {gpu.bus_id}, "
            + (pool if gpu.pool_bytes else "pool not allocated by the virtual-memory API")
        )
    lines += [f"GPU {one} cannot address GPU {other}: {why}" for one, other, why in found.no_access]
    return lines


# ----------------------------------------------------------------------- set-up between processes


@dataclasses.dataclass(frozen=True)
class Participant:
    """A process that takes part in setting up symmetric memory."""

    process: int  # `jax.process_index()`
    devices: Sequence[Any]  # its GPUs, `jax.Device` objects
    others: Sequence[int] = ()  # the other processes that may be on this host
    store: processes.Store | None = None  # by which processes find each other
    timeout_s: float = 100.0  # for the whole set-up
    # makes an array on a device and returns its address
    array_address: Callable[[Any], int] = lambda device: 0
    jax_version: str = jax.__version__  # must be equal in all processes
    jax_ep_version: str = ""  # must be equal in all processes


@functools.cache
def _domain() -> Domain | str:
    """Sets up symmetric memory once, and publishes the outcome to the processes of all hosts."""
    found = _set_up_here()
    if (store := jax_compat.distributed_client()) is not None:
        # Other hosts must know if any two GPUs here cannot access each other's memory.
        reasons = [found] if isinstance(found, str) else [why for *_, why in found.no_access]
        try:
            processes.report(store, jax.process_index(), reasons[0] if reasons else None)
        except Exception as error:
            return (
                f"process {jax.process_index()} cannot report whether its GPUs share memory: "
                f"{error}"
            )
    return found


def _set_up_here() -> Domain | str:
    if _CONCURRENT.search(os.environ.get("XLA_FLAGS", "").lower()):
        return (
            "symmetric memory needs the kernels of a program to run one at a time, and XLA_FLAGS "
            "let them overlap"
        )
    devices = jax.local_devices()
    if not devices or any(device.platform != "gpu" for device in devices):
        return "symmetric memory needs NVIDIA GPUs"
    others = {
        device.process_index
        for device in jax.devices()
        if device.process_index != jax.process_index() and _may_share_host(device, devices[0])
    }
    return set_up(
        Participant(
            process=jax.process_index(),
            devices=devices,
            others=sorted(others),
            store=jax_compat.distributed_client(),
            timeout_s=environment.timeout_seconds(),
            array_address=_array_address,
            jax_ep_version=version.__version__,
        )
    )


def set_up(me: Participant) -> Domain | str:
    """Sets up symmetric memory together with the other processes of this host.

    All processes get an equal `Domain`, or an equal reason. With a reason, no memory stays mapped.
    """
    try:
        if me.others and me.store is None:
            raise Refused(_NO_STORE)
        meeting = processes.Meeting(me.store if me.others else None, me.process, me.timeout_s)
        with contextlib.ExitStack() as undo, meeting:
            cards = meeting.introduce(_card(me), me.others)
            cards = _members(cards, me.process)
            sharing = _Sharing(me, cards, undo)
            message, descriptors = sharing.offer()
            try:
                messages = meeting.exchange(cards, message, descriptors)
            finally:
                _close(descriptors)
            outcomes = meeting.agree(sharing.accept(messages))
            found = sharing.domain(message, messages, outcomes)
            undo.pop_all()  # The set-up has succeeded, so its memory stays mapped.
            return found
    except (Refused, cuda_driver.Error) as reason:
        return str(reason)


def _card(me: Participant) -> Message:
    """Returns what others need to share memory with `me`; a key "failure" says why they cannot."""
    card: Message = {
        "memory_map": memory_map.VERSION,
        "jax_ep": me.jax_ep_version,
        "jax": me.jax_version,
        "host": processes.host_id() if me.others else "",
        "uid": os.getuid(),
        "gpus": [],
    }
    try:
        for device in sorted(me.devices, key=lambda device: device.local_hardware_id):
            ordinal = device.local_hardware_id
            names = {"bus": cuda_driver.pci_bus_id(ordinal), "uuid": cuda_driver.uuid(ordinal)}
            card["gpus"].append({"device": device.id, "ordinal": ordinal} | names)
    except cuda_driver.Error as error:
        card["failure"] = f"the GPUs of process {me.process} have no names: {error}"
    return card


def _members(cards: Mapping[int, Message], process: int) -> dict[int, Message]:
    """Returns the cards of this host's processes; raises `Refused` if these cannot share memory."""
    host = cards[process]["host"]
    members = {p: card for p, card in sorted(cards.items()) if card["host"] == host}
    first_process, *others = members
    for key, text in (
        ("memory_map", "memory map {} of symmetric memory"),
        ("jax_ep", "jax_ep {}"),
        ("jax", "jax {}"),
        ("uid", "user {}"),
    ):
        for other in others:
            first, second = (text.format(members[p][key]) for p in (first_process, other))
            if first != second:
                raise Refused(f"process {first_process} has {first}, and process {other} {second}")
    processes.raise_failure(members)
    owner: dict[str, int] = {}  # of each GPU, the process
    for p, card in members.items():
        for gpu in card["gpus"]:
            if (before := owner.setdefault(gpu["uuid"], p)) != p:
                raise Refused(
                    f"GPU {gpu['bus']} belongs to process {before} and to process {p}: give each "
                    "its own by CUDA_VISIBLE_DEVICES or jax.distributed.initialize"
                )
    if len(owner) > memory_map.MAX_GPUS:
        raise Refused(
            f"at most {memory_map.MAX_GPUS} GPUs of a host can share memory, and this host has "
            f"{len(owner)}"
        )
    return members


class _Sharing:
    """Sets up symmetric memory on behalf of one process, by `offer`, `accept` and then `domain`."""

    def __init__(
        self, me: Participant, cards: Mapping[int, Message], undo: contextlib.ExitStack
    ) -> None:
        # `cards` are the `_card`s by process. If the set-up fails, the callbacks that are added to
        # `undo` free all memory.
        self._me, self._undo = me, undo
        self._alone = len(cards) == 1
        # By number: each GPU's process, and its entry in that process's `_card`.
        self.places = [(p, gpu) for p, card in cards.items() for gpu in card["gpus"]]
        # If there are several processes, all GPUs are numbered in the order of their PCI
        # addresses. If there is one, they keep the driver's order.
        if not self._alone:
            self.places.sort(key=lambda place: (place[1]["bus"], place[1]["uuid"]))
        # Maps the number of each GPU of this process to the driver's ordinal.
        self.local = {
            g: gpu["ordinal"] for g, (p, gpu) in enumerate(self.places) if p == me.process
        }
        self._base = memory_map.BASE
        # (a GPU of this process, another GPU): why the first cannot access the second's memory.
        self._no_access: dict[tuple[int, int], str] = {}
        # By number: how far a peer's pool is mapped from where its own process has it.
        self._deltas: dict[int, int] = {}

    def offer(self) -> tuple[Message, list[int]]:
        """Allocates heaps, finds XLA's memory pools; returns a message and file descriptors."""
        descriptors: list[int] = []
        offers = []  # of each GPU; its pool is (address, bytes)
        try:
            self._reserve()
            for device in self._me.devices:
                ordinal = device.local_hardware_id
                g = next(number for number, of_gpu in self.local.items() if of_gpu == ordinal)
                heap_bytes = self._take_heap(g, ordinal, descriptors)
                pool = self._find_pool(g, device, descriptors)
                # The GPUs of one process can access every address, so no pool limits them.
                shared = memory_map.ANY_ADDRESS if self._alone else pool
                self._write_words(g, memory_map.MAGIC, [memory_map.MAGIC_VALUE, *shared])
                offers.append({"gpu": g, "heap_bytes": heap_bytes, "pool": pool})
        except (cuda_driver.Error, Refused) as error:
            _close(descriptors)
            failure = f"process {self._me.process} has no memory to share: {error}"
            return {"failure": failure, "offers": []}, []
        return {"offers": offers}, descriptors

    def accept(self, messages: Mapping[int, tuple[Message, list[int]]]) -> Message:
        """Maps the other processes' heaps and pools, from their `offer`s; returns the outcome."""
        try:
            for process, (message, descriptors) in messages.items():
                for i, offer in enumerate(message["offers"]):
                    try:
                        # Each GPU has two descriptors, of its heap and of its pool.
                        self._map_peer(offer, *descriptors[2 * i : 2 * i + 2])
                    except cuda_driver.Error as error:
                        raise Refused(
                            f"process {self._me.process} cannot map the memory of GPU "
                            f"{offer['gpu']}, of process {process}: {error}"
                        ) from error
            deltas = [self._deltas.get(g, 0) for g in range(memory_map.MAX_GPUS)]
            for g in self.local:
                self._write_words(g, memory_map.DELTA, deltas)
        except (cuda_driver.Error, Refused) as error:
            return {"failure": str(error)}
        finally:
            for _, descriptors in messages.values():
                _close(descriptors)
        return {"no_access": [[*pair, why] for pair, why in self._no_access.items()]}

    def domain(
        self,
        message: Message,
        messages: Mapping[int, tuple[Message, list[int]]],
        outcomes: Mapping[int, Message],
    ) -> Domain:
        """Makes the same `Domain` in all processes, from their results of `offer` and `accept`."""
        of_all = [message, *(other for other, _ in messages.values())]
        pools = {offer["gpu"]: offer["pool"] for each in of_all for offer in each["offers"]}
        pairs = [pair for outcome in outcomes.values() for pair in outcome["no_access"]]
        return Domain(
            base=self._base,
            gpus=tuple(
                Gpu(
                    number=g,
                    device_id=gpu["device"],
                    process=process,
                    bus_id=gpu["bus"],
                    pool_start=pools[g][0],
                    pool_bytes=pools[g][1],
                )
                for g, (process, gpu) in enumerate(self.places)
            ),
            no_access=tuple((one, other, why) for one, other, why in sorted(pairs)),
        )

    def _reserve(self) -> None:
        """Reserves all heaps' addresses, from BASE on if several processes map them, or refuses."""
        num_bytes = len(self.places) * memory_map.STRIDE
        self._base = cuda_driver.reserve(
            num_bytes, alignment=memory_map.STRIDE, address=memory_map.BASE
        )
        self._undo.callback(cuda_driver.free_addresses, self._base, num_bytes)
        if self._base != memory_map.BASE and not self._alone:
            raise Refused(
                f"in process {self._me.process} the addresses from {memory_map.BASE:#x} on are "
                f"taken, and the driver offers {self._base:#x}"
            )

    def _take_heap(self, g: int, ordinal: int, descriptors: list[int]) -> int:
        """Allocates, maps and fills the heap of GPU g; returns its size in bytes."""
        # Other processes map the heap by the file descriptor that is appended.
        needed = memory_map.heap_bytes(len(self.places))
        handle, heap_bytes = cuda_driver.create(ordinal, needed, exportable=not self._alone)
        try:
            self._map(g, self._heap(g), heap_bytes, handle)
            if not self._alone:
                descriptors.append(cuda_driver.export_fd(handle))
        finally:
            cuda_driver.release(handle)
        for offset, word, num_bytes in memory_map.contents(len(self.places)):
            cuda_driver.fill(ordinal, self._heap(g) + offset, word, num_bytes)
        return heap_bytes

    def _find_pool(self, g: int, device: Any, descriptors: list[int]) -> tuple[int, int]:
        """Lets GPUs of this process access XLA's memory pool on GPU g; returns (address, bytes)."""
        # Other processes map the pool by the file descriptor that is appended.
        address = self._me.array_address(device)
        try:
            handle = cuda_driver.retain(address)
        except cuda_driver.Error as error:
            # Only pools of the virtual-memory API can be shared between processes. In one process,
            # XLA lets its GPUs address each other's memory anyway.
            if self._alone:
                return 0, 0
            raise Refused(
                f"the memory pool of GPU {g} was not allocated by the virtual-memory API, which "
                "XLA's own allocator uses (XLA_PYTHON_CLIENT_ALLOCATOR, or a jaxlib before 0.11?): "
                f"{error}"
            ) from error
        try:
            start, num_bytes = cuda_driver.address_range(device.local_hardware_id, address)
            without_access = {
                number
                for number, of_gpu in self.local.items()
                if not cuda_driver.has_access(address, of_gpu)
            }
            self._allow(g, start, num_bytes, without_access)
            if not self._alone:
                self._check_pool(g, device, num_bytes, handle)
                descriptors.append(cuda_driver.export_fd(handle))
        finally:
            cuda_driver.release(handle)
        return start, num_bytes

    def _check_pool(self, g: int, device: Any, num_bytes: int, handle: int) -> None:
        """Raises `Refused` if other processes cannot map the memory pool of GPU g once, whole."""
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit is None or num_bytes < limit:
            raise Refused(
                f"the memory pool of GPU {g} may grow, from {num_bytes} bytes to "
                f"{limit or 'any size'}, and other processes map it once "
                "(XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_PYTHON_CLIENT_ALLOCATOR?)"
            )
        if not cuda_driver.is_exportable(handle):
            raise Refused(f"the memory pool of GPU {g} was not made for sharing")

    def _map_peer(self, offer: Message, heap_fd: int, pool_fd: int) -> None:
        """Maps the heap and the pool of another process's GPU; `offer` is one of its "offers"."""
        g, heap_bytes, (start, num_bytes) = offer["gpu"], offer["heap_bytes"], offer["pool"]
        pool = cuda_driver.reserve(num_bytes)
        self._undo.callback(cuda_driver.free_addresses, pool, num_bytes)
        heap = heap_fd, self._heap(g), heap_bytes
        for fd, address, length in (heap, (pool_fd, pool, num_bytes)):
            handle = cuda_driver.import_fd(fd)
            try:
                self._map(g, address, length, handle)
            finally:
                cuda_driver.release(handle)
        self._deltas[g] = (pool - start) % 2**64
        header = struct.pack("<3Q", memory_map.MAGIC_VALUE, start, num_bytes)
        # One GPU that has access to the heap checks it.
        for one, ordinal in self.local.items():
            if (one, g) not in self._no_access:
                if cuda_driver.read(ordinal, self._heap(g), len(header)) != header:
                    raise Refused(
                        f"process {self._me.process} has mapped memory that is not GPU {g}'s heap"
                    )
                break

    def _heap(self, g: int) -> int:
        return self._base + g * memory_map.STRIDE

    def _map(self, g: int, address: int, num_bytes: int, handle: int) -> None:
        cuda_driver.map_at(address, num_bytes, handle)
        self._undo.callback(cuda_driver.unmap, address, num_bytes)
        self._allow(g, address, num_bytes, self.local)

    def _allow(self, g: int, address: int, num_bytes: int, numbers: Iterable[int]) -> None:
        """Gives the GPUs `numbers` access to memory of GPU g, or stores why not in `_no_access`."""
        for one in numbers:
            try:
                cuda_driver.allow_access(address, num_bytes, [self.local[one]])
            except cuda_driver.Error as error:
                if one == g:  # Without its own memory, a GPU cannot take part.
                    raise
                self._no_access.setdefault((one, g), str(error))

    def _write_words(self, g: int, index: int, words: Sequence[int]) -> None:
        data = struct.pack(f"<{len(words)}Q", *words)
        cuda_driver.write(self.local[g], self._heap(g) + index * memory_map.WORD64_BYTES, data)


def _array_address(device: jax.Device) -> int:
    """Returns the address of a new array on a device, which lies in XLA's memory pool there."""

    # Another thread makes the array, since one made while this thread traces has no address.
    def make() -> int:
        return jax_compat.address_of(jax.device_put(np.zeros(1, np.int32), device))

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(make).result()
        except NotImplementedError as error:
            raise Refused(str(error)) from error


def _may_share_host(device: jax.Device, mine: jax.Device) -> bool:
    """Returns whether two GPUs may share a host: their slice indices are equal or unknown."""
    slices = {getattr(each, "slice_index", None) for each in (device, mine)}
    return len(slices) == 1 or None in slices


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
