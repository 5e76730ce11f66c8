"""What the machine offers: devices, peak FLOP/s, and bandwidths that plain copies reach."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.flags import Error
from jax_ep.runtime import jax_compat

# Peak dense bfloat16 FLOP/s by the beginning of a device's `device_kind`. NVIDIA's data sheets list
# figures with sparsity, which are twice as large.
PEAK_BFLOAT16 = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}
_COPY_BYTES = 2**30


def peak_flops(device_kind: str) -> float | None:
    fitting = [name for name in PEAK_BFLOAT16 if device_kind.startswith(name)]
    return PEAK_BFLOAT16[max(fitting, key=len)] if fitting else None


def find_devices(cpu_devices: int) -> list[jax.Device]:
    """Returns all devices of JAX: on CPUs `cpu_devices`, unless JAX has started already."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError:  # JAX has started
            pass
    try:
        return jax_compat.devices()
    except RuntimeError as error:
        raise Error(f"JAX finds no device: {error}") from error


def devices_in_words(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} x {devices[0].device_kind}"


class Bandwidths(NamedTuple):
    """Bytes per second of plain copies between two GPUs, one way, and in one, read and written."""

    link: float | None = None
    memory: float | None = None


def measure_bandwidths(devices: Sequence[jax.Device]) -> Bandwidths:
    """Measures copies between the first two GPUs, and in the first one's memory."""
    if devices[0].platform != "gpu":
        return Bandwidths()
    source = jax.device_put(jnp.zeros(_COPY_BYTES, jnp.uint8), devices[0])
    copy = jax.jit(jnp.copy)
    memory = 2 * _COPY_BYTES * _copies_per_second(lambda: copy(source))
    if len(devices) == 1:
        return Bandwidths(memory=memory)
    link = _COPY_BYTES * _copies_per_second(lambda: jax.device_put(source, devices[1]))
    return Bandwidths(link=link, memory=memory)


def _copies_per_second(copy: Callable[[], jax.Array]) -> float:
    """Returns the highest rate of 8 measurements: other work on the machine only lowers it."""
    at_once = 8
    jax.block_until_ready(copy())
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        copies = [copy() for _ in range(at_once)]
        jax.block_until_ready(copies)
        best = min(best, time.perf_counter() - start)
        del copies
    return at_once / best
