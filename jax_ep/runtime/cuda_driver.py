"""What the CUDA driver says, through ctypes: no dependency, and no error where there is none.

It numbers the GPUs as CUDA_VISIBLE_DEVICES lets them be seen. All but `map_shared` and `fill` only
ask.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any


@functools.cache
def _libcuda() -> ctypes.CDLL | None:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return library if library.cuInit(0) == 0 else None
    return None


def cuda_version() -> str | None:
    """The newest CUDA version that the driver serves, as "13.0"; None without driver or GPU."""
    library, version = _libcuda(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def kernel_module_version() -> str | None:
    """The version of NVIDIA's kernel module, as "580.159.04"; None where it cannot be read."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def attribute(ordinal: int, number: int) -> int | None:
    """A `CUdevice_attribute` of a GPU of this process; None: the driver won't say."""
    library, value = _libcuda(), ctypes.c_int()
    if library is None or (handle := _handle(library, ordinal)) is None:
        return None
    if library.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(number), handle) != 0:
        return None
    return value.value


def peer_access(ordinals: Sequence[int]) -> tuple[tuple[bool, ...], ...] | None:
    """Whether GPU i can address the memory of GPU j, for every pair; None: the driver won't say.

    Args:
      ordinals: of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order: what
        `jax.Device.local_hardware_id` is.

    Returns:
      A square matrix in the order of `ordinals`; a GPU reaches itself.
    """
    return _peer_access(tuple(ordinals))


@functools.cache
def _peer_access(ordinals: tuple[int, ...]) -> tuple[tuple[bool, ...], ...] | None:
    library = _libcuda()
    if library is None:
        return None
    handles = [_handle(library, ordinal) for ordinal in ordinals]
    if None in handles:
        return None
    matrix = []
    for i, one in enumerate(handles):
        row = []
        for j, other in enumerate(handles):
            can = ctypes.c_int(1)
            if i != j and library.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) != 0:
                return None
            row.append(bool(can.value))
        matrix.append(tuple(row))
    return tuple(matrix)


class Error(RuntimeError):
    """The driver refused."""


class _Location(ctypes.Structure):
    """CUmemLocation: a GPU."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def map_shared(num_devices: int, num_bytes: int, *, stride: int, address: int) -> int:
    """Memory on each of the first GPUs that all of them can read and write, never given back.

    Args:
      num_devices: how many GPUs.
      num_bytes: on each of them, rounded up to what the driver gives at a time.
      stride: from one GPU's memory to the next one's, a power of two.
      address: of the first GPU's, if the driver has no other use for it.

    Returns:
      The address of the first GPU's.

    Raises:
      Error: the driver gives none.
    """
    u64, size = ctypes.c_uint64, ctypes.c_size_t
    start, granularity = u64(), size()
    _call(
        "cuMemAddressReserve",
        ctypes.byref(start),
        size(num_devices * stride),
        size(stride),
        u64(address),
        u64(0),
    )
    everyone = (_Access * num_devices)(
        *(_Access(_Location(_ON_DEVICE, i), _READ_AND_WRITE) for i in range(num_devices))
    )
    mapped: list[tuple[ctypes.c_uint64, ctypes.c_size_t]] = []
    try:
        for ordinal in range(num_devices):
            properties = _Properties(_PINNED, 0, _Location(_ON_DEVICE, ordinal))
            _call(
                "cuMemGetAllocationGranularity",
                ctypes.byref(granularity),
                ctypes.byref(properties),
                ctypes.c_int(0),
            )
            length = size(-(-num_bytes // granularity.value) * granularity.value)
            memory, here = u64(), u64(start.value + ordinal * stride)
            _call("cuMemCreate", ctypes.byref(memory), length, ctypes.byref(properties), u64(0))
            try:
                _call("cuMemMap", here, length, size(0), memory, u64(0))
                mapped.append((here, length))
            finally:
                _call("cuMemRelease", memory)  # it lives as long as it is mapped
            _call("cuMemSetAccess", here, length, everyone, size(num_devices))
    except Error:
        for here, length in mapped:
            _call("cuMemUnmap", here, length)
        _call("cuMemAddressFree", start, size(num_devices * stride))
        raise
    return start.value


def fill(ordinal: int, address: int, word: int, num_bytes: int) -> None:
    """Sets memory of a GPU to a 32-bit word, over and over; returns when it is done.

    Raises:
      Error: the driver won't.
    """
    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxPushCurrent_v2", context)
    try:
        _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        start, count = ctypes.c_uint64(address), ctypes.c_size_t(num_bytes // 4)
        _call("cuMemsetD32Async", start, ctypes.c_uint(word), count, stream)
        _call("cuStreamSynchronize", stream)
        _call("cuStreamDestroy_v2", stream)
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))
        _call("cuDevicePrimaryCtxRelease_v2", device)


def _call(name: str, *args: Any) -> None:
    library = _libcuda()
    if library is None:
        raise Error("there is no driver")
    status = getattr(library, name)(*args)
    if status != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        raise Error(f"{name}: {(text.value or b'unknown error').decode()}")


def _handle(library: ctypes.CDLL, ordinal: int | None) -> ctypes.c_int | None:
    handle = ctypes.c_int()
    if ordinal is None or library.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(ordinal)) != 0:
        return None
    return handle
