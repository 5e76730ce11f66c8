"""Measures the energy and the clock of GPUs while a program runs, by NVIDIA's management library.

A GPU that reaches its power limit lowers its clock, and the same program then takes longer. So the
time of a program with long matmuls says little without the clock.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax

from jax_ep.bench.timing import Loop
from jax_ep.runtime import cuda_driver

# The least duration of a measurement, in seconds. A shorter one would be inaccurate, because the
# driver updates its energy counter only a few times a second.
LEAST_SECONDS = 2.0
_SM_CLOCK = 1


@functools.cache
def _nvml() -> Any:
    """Returns NVIDIA's management library, initialized, or None if this machine lacks it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def unavailable_reason(devices: Sequence[jax.Device]) -> str | None:
    """Returns why the energy of devices cannot be measured, or None if it can."""
    if devices[0].platform != "gpu":
        return f"energy is measured on GPUs only, and the devices here are {devices[0].platform}"
    if _nvml() is None:
        return "NVIDIA's library libnvidia-ml.so.1 is not installed, or cannot be initialized"
    return None


def measure(loop: Loop) -> dict[str, float]:
    """Runs a loop for at least `LEAST_SECONDS`; returns the energy, power and clock of its GPUs.

    Returns:
      "millijoules" of one iteration, summed over GPUs; "watts" of a GPU, the mean over GPUs and
      time; and "megahertz", the mean over GPUs of the clock of the multiprocessors, read when the
      loop ends.

    Raises:
      RuntimeError: the energy cannot be measured; the message says why.
    """
    devices = list(loop.mesh.devices.flat)
    if reason := unavailable_reason(devices):
        raise RuntimeError(reason)
    handles = [_handle(device) for device in devices]
    loop.run()
    before, start, runs = _energy(handles), time.monotonic(), 0
    while time.monotonic() - start < LEAST_SECONDS:
        loop.run()
        runs += 1
    seconds = time.monotonic() - start
    used = _energy(handles) - before
    clocks = [
        _read("nvmlDeviceGetClockInfo", handle, ctypes.c_int(_SM_CLOCK), of=ctypes.c_uint)
        for handle in handles
    ]
    return {
        "millijoules": used / (runs * loop.iterations),
        "watts": used * 1e-3 / seconds / len(handles),
        "megahertz": sum(clocks) / len(clocks),
    }


def _handle(device: jax.Device) -> ctypes.c_void_p:
    assert device.local_hardware_id is not None
    bus = cuda_driver.pci_bus_id(device.local_hardware_id)
    handle = ctypes.c_void_p()
    _call("nvmlDeviceGetHandleByPciBusId_v2", bus.encode(), ctypes.byref(handle))
    return handle


def _energy(handles: Sequence[ctypes.c_void_p]) -> int:
    """Returns the millijoules that GPUs have used since their driver was loaded."""
    name = "nvmlDeviceGetTotalEnergyConsumption"
    return sum(_read(name, handle, of=ctypes.c_ulonglong) for handle in handles)


def _read(name: str, *args: Any, of: Any) -> int:
    """Calls the NVML function `name`, which writes a number of the C type `of`; returns it.

    `args` are the function's arguments before the pointer to the number.
    """
    value = of()
    _call(name, *args, ctypes.byref(value))
    return value.value


def _call(name: str, *args: Any) -> None:
    status = getattr(_nvml(), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} failed with status {status}")
