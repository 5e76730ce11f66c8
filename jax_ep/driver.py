"""What the CUDA driver says, through ctypes: no dependency, and no error where there is none.

It is asked, and nothing is changed. It numbers the GPUs as CUDA_VISIBLE_DEVICES lets them be seen.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence


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


def _handle(library: ctypes.CDLL, ordinal: int | None) -> ctypes.c_int | None:
    handle = ctypes.c_int()
    if ordinal is None or library.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(ordinal)) != 0:
        return None
    return handle
