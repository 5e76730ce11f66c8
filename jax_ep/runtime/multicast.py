"""Asks the CUDA driver whether GPUs have NVLink multicast memory."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jax_ep.runtime import cuda_driver

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


def unavailable_reason(devices: Sequence[jax.Device] | None = None) -> str | None:
    """Returns why GPUs have no NVLink multicast memory; None if the driver says that they do.

    The driver's answer describes the hardware only. Where an administrator, a container or the
    fabric manager forbids multicast, the result may be None, too, and kernels that use multicast
    memory then fail when they run.

    Args:
      devices: the GPUs to ask about; None: all of `jax.devices()`.
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
