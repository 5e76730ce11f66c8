"""Calls the CUDA driver through ctypes; imports without error where there is no driver.

An *ordinal* is the driver's number of a GPU among the GPUs that CUDA_VISIBLE_DEVICES makes visible;
it equals `jax.Device.local_hardware_id`. Functions whose result may be None return None where the
driver does not answer. All other functions raise `Error`, with the name of the driver's function
and the driver's reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any


@functools.cache
def _libcuda() -> ctypes.CDLL | None:
    # The driver's library, initialized; None if there is none, or no GPU that it can use.
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def cuda_version() -> str | None:
    """Returns the newest CUDA version that the driver supports, as "13.0"; None without a GPU."""
    try:
        version = _number(ctypes.c_int, "cuDriverGetVersion")  # 13000 for 13.0
    except Error:
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


def kernel_module_version() -> str | None:
    """Returns the version of NVIDIA's kernel module, as "580.159.04", or None if unreadable."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            # As "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  …".
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


class Error(RuntimeError):
    """Raised if a function of the CUDA driver fails, or if there is no driver."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_MINIMUM = ctypes.c_int(0)  # CU_MEM_ALLOC_GRANULARITY_MINIMUM

_u64, _size = ctypes.c_uint64, ctypes.c_size_t


# ------------------------------------------------------------------------------ identity of a GPU


def pci_bus_id(ordinal: int) -> str:
    """Returns a GPU's PCI address, as "0000:1b:00.0", which is equal in all processes of a host."""
    text = ctypes.create_string_buffer(32)
    _call("cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), _device(ordinal))
    return text.value.decode().lower()


def uuid(ordinal: int) -> str:
    """Returns the UUID of a GPU, or of one instance of a GPU that MIG splits, in hexadecimal."""
    value = (ctypes.c_ubyte * 16)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(value), _device(ordinal))
    return bytes(value).hex()


# ------------------------------------------------- the virtual-memory API: memory and its addresses


def create(ordinal: int, num_bytes: int, *, exportable: bool = False) -> tuple[int, int]:
    """Allocates physical memory of a GPU; returns a handle of it and its size in bytes.

    The size is rounded up to the driver's granularity. The memory is freed once its handle is
    released and it is mapped nowhere. Only `exportable` memory can be passed to `export_fd`.
    """
    handle_type = _FILE_DESCRIPTOR if exportable else 0
    properties = ctypes.byref(_Properties(_PINNED, handle_type, _Location(_ON_DEVICE, ordinal)))
    granularity = _number(_size, "cuMemGetAllocationGranularity", properties, _MINIMUM)
    length = -(-num_bytes // granularity) * granularity
    return _number(_u64, "cuMemCreate", _size(length), properties, _u64(0)), length


def release(handle: int) -> None:
    """Releases a handle of memory, which stays allocated as long as it is mapped."""
    _call("cuMemRelease", _u64(handle))


def export_fd(handle: int) -> int:
    """Exports the memory of `handle` as a file descriptor, which the caller closes."""
    kind = ctypes.c_int(_FILE_DESCRIPTOR)
    fd = _number(ctypes.c_int, "cuMemExportToShareableHandle", _u64(handle), kind, _u64(0))
    os.set_inheritable(fd, False)
    return fd


def import_fd(fd: int) -> int:
    """Returns a handle of memory that another process exported; the caller closes `fd`."""
    kind = ctypes.c_int(_FILE_DESCRIPTOR)
    return _number(_u64, "cuMemImportFromShareableHandle", ctypes.c_void_p(fd), kind)


def retain(address: int) -> int:
    """Returns a handle of the memory mapped at an address; the caller releases the handle."""
    return _number(_u64, "cuMemRetainAllocationHandle", ctypes.c_void_p(address))


def is_exportable(handle: int) -> bool:
    properties = _Properties()
    _call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), _u64(handle))
    return bool(properties.requested_handle_types & _FILE_DESCRIPTOR)


def reserve(num_bytes: int, *, alignment: int = 0, address: int = 0) -> int:
    """Reserves a range of virtual addresses, at `address` if they are free; returns its start."""
    sizes = _size(num_bytes), _size(alignment)
    return _number(_u64, "cuMemAddressReserve", *sizes, _u64(address), _u64(0))


def free_addresses(address: int, num_bytes: int) -> None:
    _call("cuMemAddressFree", _u64(address), _size(num_bytes))


def map_at(address: int, num_bytes: int, handle: int) -> None:
    """Maps memory at reserved virtual addresses; `allow_access` must then give GPUs access."""
    _call("cuMemMap", _u64(address), _size(num_bytes), _size(0), _u64(handle), _u64(0))


def unmap(address: int, num_bytes: int) -> None:
    _call("cuMemUnmap", _u64(address), _size(num_bytes))


def allow_access(address: int, num_bytes: int, ordinals: Sequence[int]) -> None:
    """Lets GPUs of this process read and write the `num_bytes` that are mapped at `address`."""
    rights = [_Access(_Location(_ON_DEVICE, ordinal), _READ_AND_WRITE) for ordinal in ordinals]
    array = (_Access * len(rights))(*rights)
    _call("cuMemSetAccess", _u64(address), _size(num_bytes), array, _size(len(rights)))


def has_access(address: int, ordinal: int) -> bool:
    location = ctypes.byref(_Location(_ON_DEVICE, ordinal))
    return _number(_u64, "cuMemGetAccess", location, _u64(address)) == _READ_AND_WRITE


def address_range(ordinal: int, address: int) -> tuple[int, int]:
    """Returns the start and the bytes of the allocation on a GPU in which an address lies."""
    num_bytes = _size()
    with _context(ordinal):
        start = _number(_u64, "cuMemGetAddressRange_v2", ctypes.byref(num_bytes), _u64(address))
    return start, num_bytes.value


def fill(ordinal: int, address: int, word: int, num_bytes: int) -> None:
    """Fills memory that GPU `ordinal` can address with a 32-bit word; waits until it is done."""
    with _stream(ordinal) as stream:
        words = _size(num_bytes // 4)
        _call("cuMemsetD32Async", _u64(address), ctypes.c_uint(word), words, stream)


def write(ordinal: int, address: int, data: bytes) -> None:
    """Copies `data` to memory that the GPU `ordinal` can address, and waits until it is there."""
    with _stream(ordinal) as stream:
        _call("cuMemcpyHtoDAsync_v2", _u64(address), data, _size(len(data)), stream)


def read(ordinal: int, address: int, num_bytes: int) -> bytes:
    data = ctypes.create_string_buffer(num_bytes)
    with _stream(ordinal) as stream:
        _call("cuMemcpyDtoHAsync_v2", data, _u64(address), _size(num_bytes), stream)
    return data.raw


@contextlib.contextmanager
def _context(ordinal: int) -> Iterator[None]:
    """Makes a GPU's primary context, the one that XLA uses, current in this thread."""
    device = _device(ordinal)
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))
        _call("cuDevicePrimaryCtxRelease_v2", device)


@contextlib.contextmanager
def _stream(ordinal: int) -> Iterator[ctypes.c_void_p]:
    """Opens a CUDA stream that waits for no other; on exit, waits until its work is done."""
    stream = ctypes.c_void_p()
    with _context(ordinal):
        _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        try:
            yield stream
            _call("cuStreamSynchronize", stream)
        finally:
            _call("cuStreamDestroy_v2", stream)


def _device(ordinal: int) -> ctypes.c_int:
    return ctypes.c_int(_number(ctypes.c_int, "cuDeviceGet", ctypes.c_int(ordinal)))


def _number(kind: Any, name: str, *args: Any) -> int:
    """Calls a function that stores a number of a ctypes type where its first argument points."""
    number = kind()
    _call(name, ctypes.byref(number), *args)
    return int(number.value)


def _call(name: str, *args: Any) -> None:
    library = _libcuda()
    if library is None:
        raise Error("there is no driver")
    status = getattr(library, name)(*args)
    if status != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        raise Error(f"{name}: {(text.value or b'unknown error').decode()}")
