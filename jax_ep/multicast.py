"""Whether the GPUs here have NVLink multicast memory. The driver is asked; nothing is changed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


def unavailable_reason(devices: Sequence[jax.Device] | None = None) -> str | None:
    """Why multicast memory cannot be had on these devices (default: all), or None if it may."""
    devices = jax.devices() if devices is None else devices
    if any(device.platform != "gpu" for device in devices):
        return "multicast memory is a feature of NVIDIA GPUs with NVSwitch"
    if len(devices) < 2:
        return "multicast memory needs several GPUs, and there is one"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver cannot be asked for multicast memory ({error})"
    for device in devices:
        handle, supported = ctypes.c_int(), ctypes.c_int()
        ordinal = ctypes.c_int(device.local_hardware_id)
        if driver.cuDeviceGet(ctypes.byref(handle), ordinal) or driver.cuDeviceGetAttribute(
            ctypes.byref(supported), _MULTICAST_SUPPORTED, handle
        ):
            return f"the CUDA driver does not say whether {device} has multicast memory"
        if not supported.value:
            return f"multicast memory is missing: the driver offers none on {device}"
    return None
