"""A fake CUDA driver: each GPU's memory is memfd files, which processes can share."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
from typing import Any

SUCCESS, ERROR, NO_ACCESS = 0, 1, 217
GRANULARITY = 2**16
# Device handles start here, so that no handle equals an ordinal: code must not confuse the two.
FIRST_HANDLE = 100
READ_AND_WRITE = 3
_ERRORS = {ERROR: b"out of memory", NO_ACCESS: b"peer access is not supported"}


@dataclasses.dataclass
class Memory:
    """An allocation of GPU memory, with a count of the handles and mappings that hold it."""

    fd: int
    size: int
    exportable: bool
    holds: int = 1

    @property
    def gpu(self) -> int:
        """The host's number of the GPU that has this memory, read from the memfd's name."""
        return int(os.readlink(f"/proc/self/fd/{self.fd}").rpartition(":")[2].split()[0])


@dataclasses.dataclass
class Mapping:
    start: int
    memory: Memory
    access: set[int] = dataclasses.field(default_factory=set)
    # Whether the mapping was made by the virtual-memory API (cuMemMap).
    virtual: bool = True


class FakeCuda:
    """A stand-in for libcuda in one process.

    Args:
        visible: the host's GPUs that the process sees, by ordinal.
        no_access: pairs of GPUs of the host; the first cannot address the second's memory.
        refuses: a driver function that fails, such as "cuMemCreate"; or only with the given first
            argument, such as "cuMemCreate 2".
        taken: addresses that are not free: a reservation that asks for one is placed elsewhere.
    """

    def __init__(
        self,
        visible: list[int],
        *,
        no_access: set[tuple[int, int]] = frozenset(),
        refuses: str = "",
        taken: range = range(0),
    ) -> None:
        self.visible, self.no_access, self.refuses, self.taken = visible, no_access, refuses, taken
        self.calls: list[tuple[Any, ...]] = []
        # Maps a handle to its allocation.
        self.memories: dict[int, Memory] = {}
        self.mappings: list[Mapping] = []
        self.reserved: dict[int, int] = {}
        self.contexts: list[int] = []
        # The next free address or handle; it differs from those of all other processes.
        self._next = 2**44 + os.getpid() * 2**32

    def pool(
        self, ordinal: int, size: int, *, exportable: bool = True, virtual: bool = True
    ) -> int:
        """Makes XLA's memory pool on a GPU; returns the address of an array inside it."""
        memory = self._memory(ordinal, size, exportable)
        self.mappings.append(Mapping(self._place(size), memory, {ordinal}, virtual))
        return self.mappings[-1].start + size // 2

    def mapping(self, address: int) -> Mapping | None:
        for mapping in self.mappings:
            if mapping.start <= address < mapping.start + mapping.memory.size:
                return mapping
        return None

    def called(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]

    # ------------------------------------------------------------------------------------- devices

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = FIRST_HANDLE + ordinal.value
        return SUCCESS if 0 <= ordinal.value < len(self.visible) else ERROR

    def cuDeviceGetPCIBusId(self, text: Any, length: Any, device: Any) -> int:
        text.value = f"0000:{0x10 + self.visible[device.value - FIRST_HANDLE]:02X}:00.0".encode()
        return self._call("cuDeviceGetPCIBusId", device.value - FIRST_HANDLE)

    def cuDeviceGetUuid_v2(self, value: Any, device: Any) -> int:
        value._obj[15] = self.visible[device.value - FIRST_HANDLE]
        return self._call("cuDeviceGetUuid_v2", device.value - FIRST_HANDLE)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 10 + device.value - FIRST_HANDLE
        return self._call("cuDevicePrimaryCtxRetain", device.value - FIRST_HANDLE)

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.contexts.append(context.value - 10)
        return self._call("cuCtxPushCurrent_v2")

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.contexts.pop()
        return self._call("cuCtxPopCurrent_v2")

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:
        # This is CU_STREAM_NON_BLOCKING of cuda.h.
        assert flags.value == 1
        stream._obj.value = 7
        return self._call("cuStreamCreate")

    # -------------------------------------------------------------------------------------- memory

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: Any) -> int:
        size._obj.value = GRANULARITY
        return self._call("cuMemGetAllocationGranularity", properties._obj.location.id)

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        of = properties._obj
        assert (of.type, of.location.type) == (1, 1) and of.requested_handle_types in (0, 1)
        if status := self._call("cuMemCreate", of.location.id, size.value):
            return status
        assert size.value % GRANULARITY == 0
        memory = self._memory(of.location.id, size.value, bool(of.requested_handle_types))
        return self._new_handle(handle, memory)

    def cuMemRelease(self, handle: Any) -> int:
        self._let_go(self.memories.pop(handle.value))
        return self._call("cuMemRelease", handle.value)

    def cuMemExportToShareableHandle(self, fd: Any, handle: Any, kind: Any, flags: Any) -> int:
        # This is CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR of cuda.h.
        assert kind.value == 1
        if status := self._call("cuMemExportToShareableHandle", handle.value):
            return status
        if not self.memories[handle.value].exportable:
            return ERROR
        fd._obj.value = os.dup(self.memories[handle.value].fd)
        return SUCCESS

    def cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: Any) -> int:
        assert kind.value == 1
        if status := self._call("cuMemImportFromShareableHandle", fd.value):
            return status
        return self._new_handle(handle, Memory(os.dup(fd.value), os.fstat(fd.value).st_size, True))

    def cuMemRetainAllocationHandle(self, handle: Any, address: Any) -> int:
        mapping = self.mapping(address.value)
        if mapping is None or not mapping.virtual:
            return ERROR
        mapping.memory.holds += 1
        self._new_handle(handle, mapping.memory)
        return self._call("cuMemRetainAllocationHandle", address.value)

    def cuMemGetAllocationPropertiesFromHandle(self, properties: Any, handle: Any) -> int:
        exportable = self.memories[handle.value].exportable
        properties._obj.requested_handle_types = int(exportable)
        return self._call("cuMemGetAllocationPropertiesFromHandle", handle.value)

    def cuMemAddressReserve(self, start: Any, size: Any, align: Any, at: Any, flags: Any) -> int:
        if status := self._call("cuMemAddressReserve", size.value, align.value, at.value):
            return status
        free = at.value and at.value not in self.taken
        start._obj.value = at.value if free else self._place(size.value)
        self.reserved[start._obj.value] = size.value
        return SUCCESS

    def cuMemAddressFree(self, start: Any, size: Any) -> int:
        assert self.reserved.pop(start.value) == size.value
        end = start.value + size.value
        assert not any(start.value <= mapping.start < end for mapping in self.mappings)
        return self._call("cuMemAddressFree", start.value, size.value)

    def cuMemMap(self, start: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        if status := self._call("cuMemMap", start.value, size.value):
            return status
        memory, end = self.memories[handle.value], start.value + size.value
        assert offset.value == 0 and size.value == memory.size
        assert any(at <= start.value and end <= at + n for at, n in self.reserved.items())
        assert self.mapping(start.value) is None
        memory.holds += 1
        self.mappings.append(Mapping(start.value, memory))
        return SUCCESS

    def cuMemUnmap(self, start: Any, size: Any) -> int:
        mapping = self.mapping(start.value)
        assert mapping is not None and (mapping.start, mapping.memory.size) == (
            start.value,
            size.value,
        )
        self.mappings.remove(mapping)
        self._let_go(mapping.memory)
        return self._call("cuMemUnmap", start.value, size.value)

    def cuMemSetAccess(self, start: Any, size: Any, descriptions: Any, count: Any) -> int:
        mapping = self.mapping(start.value)
        assert mapping is not None and mapping.virtual
        assert (mapping.start, mapping.memory.size) == (start.value, size.value)
        for description in descriptions[: count.value]:
            # The values are CU_MEM_LOCATION_TYPE_DEVICE and CU_MEM_ACCESS_FLAGS_PROT_READWRITE of
            # cuda.h.
            assert (description.location.type, description.flags) == (1, 3)
            ordinal = description.location.id
            if status := self._call("cuMemSetAccess", ordinal, start.value, size.value):
                return status
            if (self.visible[ordinal], mapping.memory.gpu) in self.no_access:
                return NO_ACCESS
            mapping.access.add(ordinal)
        return SUCCESS

    def cuMemGetAccess(self, flags: Any, location: Any, address: Any) -> int:
        mapping = self.mapping(address.value)
        assert mapping is not None and location._obj.type == 1
        flags._obj.value = READ_AND_WRITE * (location._obj.id in mapping.access)
        return self._call("cuMemGetAccess", location._obj.id)

    def cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> int:
        mapping = self.mapping(address.value)
        assert mapping is not None and self.contexts
        start._obj.value, size._obj.value = mapping.start, mapping.memory.size
        return self._call("cuMemGetAddressRange_v2", address.value)

    # ------------------------------------------------------------------------------------ contents

    def cuMemsetD32Async(self, start: Any, word: Any, count: Any, stream: Any) -> int:
        if status := self._call("cuMemsetD32Async", start.value, word.value, count.value):
            return status
        return self._write(start.value, word.value.to_bytes(4, "little") * count.value, stream)

    def cuMemcpyHtoDAsync_v2(self, start: Any, data: Any, size: Any, stream: Any) -> int:
        if status := self._call("cuMemcpyHtoDAsync_v2", start.value, size.value):
            return status
        return self._write(start.value, data[: size.value], stream)

    def cuMemcpyDtoHAsync_v2(self, data: Any, start: Any, size: Any, stream: Any) -> int:
        if status := self._call("cuMemcpyDtoHAsync_v2", start.value, size.value):
            return status
        mapping = self._reached(start.value, size.value)
        read = os.pread(mapping.memory.fd, size.value, start.value - mapping.start)
        ctypes.memmove(data, read, size.value)
        return SUCCESS

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        text._obj.value = _ERRORS.get(status.value)
        return SUCCESS

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self._call(name)

    def _write(self, start: int, data: bytes, stream: Any) -> int:
        assert stream.value == 7
        mapping = self._reached(start, len(data))
        os.pwrite(mapping.memory.fd, data, start - mapping.start)
        return SUCCESS

    def _reached(self, start: int, size: int) -> Mapping:
        """Returns the mapping at `start`; the current context's GPU must be able to access it."""
        mapping = self.mapping(start)
        assert mapping is not None and self.contexts[-1] in mapping.access
        assert start + size <= mapping.start + mapping.memory.size
        return mapping

    def _memory(self, ordinal: int, size: int, exportable: bool) -> Memory:
        fd = os.memfd_create(f"gpu:{self.visible[ordinal]}")
        os.ftruncate(fd, size)
        return Memory(fd, size, exportable)

    def _new_handle(self, handle: Any, memory: Memory) -> int:
        self._next += 1 << 30
        handle._obj.value = self._next
        self.memories[self._next] = memory
        return SUCCESS

    def _let_go(self, memory: Memory) -> None:
        memory.holds -= 1
        if not memory.holds:
            os.close(memory.fd)

    def _place(self, size: int) -> int:
        self._next += -(-size // 2**30) * 2**30
        start, self._next = self._next, self._next + -(-size // 2**30) * 2**30
        return start

    def _call(self, name: str, *args: Any) -> int:
        self.calls.append((name, *args))
        return ERROR if self.refuses in (name, f"{name} {args[0] if args else None}") else SUCCESS


def open_descriptors() -> collections.Counter[str]:
    """Counts this process's open file descriptors by kind: "socket:", "/memfd:" or a path."""
    kinds: collections.Counter[str] = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            # This descriptor belonged to the listing itself and is closed.
            continue
        kinds[target.split(":")[0] + ":" * (":" in target)] += 1
    return kinds
