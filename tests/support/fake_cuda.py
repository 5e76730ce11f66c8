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
    """A stand-in for libcuda in one process."""

    def __init__(
        self,
        visible: list[int],
        *,
        no_access: set[tuple[int, int]] = frozenset(),
        refuses: str = "",
        taken: range = range(0),
    ) -> None:
        self.visible, self.no_access, self.refuses, self.taken = visible, no_access, refuses, taken
        self.calls: list[str] = []
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

    def __getattr__(self, name: str) -> Any:
        """Returns a function of the driver: the method `_name`, or one without an effect."""
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == self.refuses:
                return ERROR
            implementation = vars(type(self)).get(f"_{name}", lambda *_: SUCCESS)
            return implementation(self, *args) or SUCCESS

        return call

    # ------------------------------------------------------------------------------------- devices

    def _cuDeviceGet(self, device, ordinal):
        device._obj.value = FIRST_HANDLE + ordinal.value
        return SUCCESS if 0 <= ordinal.value < len(self.visible) else ERROR

    def _cuDeviceGetPCIBusId(self, text, length, device):
        text.value = f"0000:{0x10 + self.visible[device.value - FIRST_HANDLE]:02X}:00.0".encode()

    def _cuDeviceGetUuid_v2(self, value, device):
        value._obj[15] = self.visible[device.value - FIRST_HANDLE]

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 10 + device.value - FIRST_HANDLE

    def _cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value - 10)

    def _cuCtxPopCurrent_v2(self, context):
        self.contexts.pop()

    def _cuStreamCreate(self, stream, flags):
        # This is CU_STREAM_NON_BLOCKING of cuda.h.
        assert flags.value == 1
        stream._obj.value = 7

    # -------------------------------------------------------------------------------------- memory

    def _cuMemGetAllocationGranularity(self, size, properties, option):
        size._obj.value = GRANULARITY

    def _cuMemCreate(self, handle, size, properties, flags):
        of = properties._obj
        assert (of.type, of.location.type) == (1, 1) and of.requested_handle_types in (0, 1)
        assert size.value % GRANULARITY == 0
        if self.refuses == f"cuMemCreate {of.location.id}":
            return ERROR
        memory = self._memory(of.location.id, size.value, bool(of.requested_handle_types))
        self._new_handle(handle, memory)

    def _cuMemRelease(self, handle):
        self._let_go(self.memories.pop(handle.value))

    def _cuMemExportToShareableHandle(self, fd, handle, kind, flags):
        # This is CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR of cuda.h.
        assert kind.value == 1
        if not self.memories[handle.value].exportable:
            return ERROR
        fd._obj.value = os.dup(self.memories[handle.value].fd)

    def _cuMemImportFromShareableHandle(self, handle, fd, kind):
        assert kind.value == 1
        self._new_handle(handle, Memory(os.dup(fd.value), os.fstat(fd.value).st_size, True))

    def _cuMemRetainAllocationHandle(self, handle, address):
        mapping = self.mapping(address.value)
        if mapping is None or not mapping.virtual:
            return ERROR
        mapping.memory.holds += 1
        self._new_handle(handle, mapping.memory)

    def _cuMemGetAllocationPropertiesFromHandle(self, properties, handle):
        exportable = self.memories[handle.value].exportable
        properties._obj.requested_handle_types = int(exportable)

    def _cuMemAddressReserve(self, start, size, align, at, flags):
        free = at.value and at.value not in self.taken
        start._obj.value = at.value if free else self._place(size.value)
        self.reserved[start._obj.value] = size.value

    def _cuMemAddressFree(self, start, size):
        assert self.reserved.pop(start.value) == size.value
        end = start.value + size.value
        assert not any(start.value <= mapping.start < end for mapping in self.mappings)

    def _cuMemMap(self, start, size, offset, handle, flags):
        memory, end = self.memories[handle.value], start.value + size.value
        assert offset.value == 0 and size.value == memory.size
        assert any(at <= start.value and end <= at + n for at, n in self.reserved.items())
        assert self.mapping(start.value) is None
        memory.holds += 1
        self.mappings.append(Mapping(start.value, memory))

    def _cuMemUnmap(self, start, size):
        mapping = self.mapping(start.value)
        assert mapping is not None
        assert (mapping.start, mapping.memory.size) == (start.value, size.value)
        self.mappings.remove(mapping)
        self._let_go(mapping.memory)

    def _cuMemSetAccess(self, start, size, descriptions, count):
        mapping = self.mapping(start.value)
        assert mapping is not None and mapping.virtual
        assert (mapping.start, mapping.memory.size) == (start.value, size.value)
        for description in descriptions[: count.value]:
            # The values are CU_MEM_LOCATION_TYPE_DEVICE and CU_MEM_ACCESS_FLAGS_PROT_READWRITE of
            # cuda.h.
            assert (description.location.type, description.flags) == (1, 3)
            ordinal = description.location.id
            if self.refuses == f"cuMemSetAccess {ordinal}":
                return ERROR
            if (self.visible[ordinal], mapping.memory.gpu) in self.no_access:
                return NO_ACCESS
            mapping.access.add(ordinal)

    def _cuMemGetAccess(self, flags, location, address):
        mapping = self.mapping(address.value)
        assert mapping is not None and location._obj.type == 1
        flags._obj.value = READ_AND_WRITE * (location._obj.id in mapping.access)

    def _cuMemGetAddressRange_v2(self, start, size, address):
        mapping = self.mapping(address.value)
        assert mapping is not None and self.contexts
        start._obj.value, size._obj.value = mapping.start, mapping.memory.size

    # ------------------------------------------------------------------------------------ contents

    def _cuMemsetD32Async(self, start, word, count, stream):
        self._write(start.value, word.value.to_bytes(4, "little") * count.value, stream)

    def _cuMemcpyHtoDAsync_v2(self, start, data, size, stream):
        self._write(start.value, data[: size.value], stream)

    def _cuMemcpyDtoHAsync_v2(self, data, start, size, stream):
        mapping = self._reached(start.value, size.value)
        read = os.pread(mapping.memory.fd, size.value, start.value - mapping.start)
        ctypes.memmove(data, read, size.value)

    def _cuGetErrorString(self, status, text):
        text._obj.value = _ERRORS.get(status.value)

    def _write(self, start: int, data: bytes, stream: Any) -> None:
        assert stream.value == 7
        mapping = self._reached(start, len(data))
        os.pwrite(mapping.memory.fd, data, start - mapping.start)

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

    def _new_handle(self, handle: Any, memory: Memory) -> None:
        self._next += 1 << 30
        handle._obj.value = self._next
        self.memories[self._next] = memory

    def _let_go(self, memory: Memory) -> None:
        memory.holds -= 1
        if not memory.holds:
            os.close(memory.fd)

    def _place(self, size: int) -> int:
        self._next += -(-size // 2**30) * 2**30
        start, self._next = self._next, self._next + -(-size // 2**30) * 2**30
        return start


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
