"""What the CUDA driver says, through ctypes: no dependency, and no error where there is none."""

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
    """The newest CUDA version that the installed driver serves, as "13.0"; None: no driver."""
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


def peer_access(ordinals: Sequence[int]) -> list[list[bool]] | None:
    """Whether GPU i can address the memory of GPU j, for every pair; None: the driver won't say.

    Args:
      ordinals: CUDA device ordinals of this process (`jax.Device.local_hardware_id`).

    Returns:
      A square matrix in the order of `ordinals`; a GPU reaches itself.
    """
    library = _libcuda()
    if library is None:
        return None
    handles = []
    for ordinal in ordinals:
        handle = ctypes.c_int()
        if library.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(ordinal)) != 0:
            return None
        handles.append(handle)
    matrix = []
    for i, one in enumerate(handles):
        row = []
        for j, other in enumerate(handles):
            can = ctypes.c_int(1)
            if i != j and library.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) != 0:
                return None
            row.append(bool(can.value))
        matrix.append(row)
    return matrix
