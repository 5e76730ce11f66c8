"""Whether the GPUs here have NVLink multicast memory. The driver is asked; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jax_ep.runtime import cuda_driver

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


def unavailable_reason(devices: Sequence[jax.Device] | None = None) -> str | None:
    """Why multicast memory cannot be had on these devices (default: all), or None if it may.

    The driver answers for the hardware, not for the host: where an administrator, a container or
    the fabric manager forbids multicast, it may still say yes, and the kernels fail when they run.
    Only an attempt would tell, and this makes none.
    """
    devices = jax.devices() if devices is None else devices
    if any(device.platform != "gpu" for device in devices):
        return "multicast memory is a feature of NVIDIA GPUs with NVSwitch"
    if len(devices) < 2:
        return "multicast memory needs several GPUs, and there is one"
    for device in devices:
        supported = cuda_driver.attribute(device.local_hardware_id, _MULTICAST_SUPPORTED)
        if supported is None:
            return f"the CUDA driver does not say whether {device} has multicast memory"
        if not supported:
            return f"multicast memory is missing: the driver offers none on {device}"
    return None
