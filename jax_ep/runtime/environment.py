"""Describes what a program runs in: settings, installed versions, and the hosts of devices.

Settings are environment variables, read when a program is lowered. The devices of a *host*
communicate without the network between hosts: a host is the GPUs of one NVLink domain, the CPU
devices of one process, or the chips of one TPU slice.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_ep.runtime import cuda_driver, jax_compat
from jax_ep.version import __version__
from pallas_kernels.fabric import memory_map

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
NO_HOSTS = "JAX does not say which devices share a host; set JAX_EP_DEVICES_PER_HOST"
# Kernels hold the timeout in nanoseconds as a 64-bit integer, which has room for this many seconds.
_LONGEST_TIMEOUT_SECONDS = 1e9


def timeout_seconds() -> float:
    """Returns JAX_EP_TIMEOUT_SECONDS: how long a kernel waits for a peer before it traps."""
    text = os.environ.get("JAX_EP_TIMEOUT_SECONDS", "100")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_TIMEOUT_SECONDS:
        raise ValueError(
            "JAX_EP_TIMEOUT_SECONDS must be a positive float of seconds, at most "
            f"{_LONGEST_TIMEOUT_SECONDS:g}, but is {text!r}."
        )
    return seconds


def num_blocks() -> int | None:
    """Returns JAX_EP_NUM_BLOCKS, the most thread blocks of an exchange kernel; None: default."""
    return _positive_int("JAX_EP_NUM_BLOCKS", most=memory_map.MAX_BLOCKS)


def devices_per_host() -> int | None:
    """Returns JAX_EP_DEVICES_PER_HOST, consecutive `jax.devices()` of one host; None: ask JAX."""
    return _positive_int("JAX_EP_DEVICES_PER_HOST")


def _positive_int(name: str, most: int | None = None) -> int | None:
    """Reads a positive integer from the variable `name`; None if the variable is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1 or (most is not None and value > most):
        bound = "" if most is None else f", at most {most}"
        raise ValueError(f"{name} must be a positive int{bound}, but is {text!r}.")
    return value


def versions() -> dict[str, str | None]:
    """Returns name -> version of what jax_ep runs with; None for what is not installed."""
    found: dict[str, str | None] = {
        "jax_ep": __version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
    }
    for package in PACKAGES:
        found[package] = _version(package)
    plugins = [f"{name} {_version(name)}" for name in CUDA_PLUGINS if _version(name)]
    found["CUDA plugin"] = ", ".join(plugins) or None
    driver, cuda = cuda_driver.kernel_module_version(), cuda_driver.cuda_version()
    if cuda is not None:
        driver = f"{driver or 'version unknown'} (CUDA {cuda})"
    found["NVIDIA driver"] = driver
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def num_hosts(program: jax_compat.Program, axis_name: Sequence[str]) -> int | str:
    """Returns M, the number of hosts that the N ranks along some mesh axes span; or a reason.

    Each host must have N / M consecutive ranks, in each group of ranks along the axes. The reason
    completes "the ranks cannot exchange between hosts: ...".
    """
    mesh = program.mesh
    if mesh is None or not axis_name:
        return 1
    if program.for_export:
        return "a program that is exported may run on other hosts"
    devices = program.mesh_devices
    if devices is None:
        if devices_per_host() is None:
            return (
                "shard_map was given an abstract mesh, which does not say on which hosts its "
                "devices are; use jax.set_mesh or a mesh of devices"
            )
        # `hosts_of` takes indices, too.
        devices = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    groups = ranks_along(devices, mesh.axis_names, tuple(axis_name))
    answers = {num_hosts_of(hosts_of(ranks)) for ranks in groups}
    reasons = sorted(each for each in answers if isinstance(each, str))
    if reasons:
        return reasons[0]
    counts = sorted(each for each in answers if isinstance(each, int))
    if len(counts) > 1:
        return (
            f"the groups of ranks along {tuple(axis_name)} span different numbers of hosts, "
            f"{counts}, and must all span equally many"
        )
    return counts[0]


def hosts_of(devices: Sequence[Any]) -> list[Any]:
    """Returns for each device what identifies its host, or None where JAX does not say it.

    `devices` are `jax.Device`s or, with JAX_EP_DEVICES_PER_HOST, may be indices in the mesh.
    """
    per_host = devices_per_host()
    if per_host is None:
        return [_host_of(device) for device in devices]
    place = {device.id: i for i, device in enumerate(jax.devices())}
    indices = [each if isinstance(each, int | np.integer) else place[each.id] for each in devices]
    return [index // per_host for index in indices]


def num_hosts_of(host_of_rank: Sequence[Any]) -> int | str:
    """Returns how many hosts a group of N ranks spans, or a reason as `num_hosts` does.

    host_of_rank[i] is what `hosts_of` returns for the device of rank i.
    """
    if None in host_of_rank:
        return NO_HOSTS
    num_ranks, count = len(host_of_rank), len(set(host_of_rank))
    if num_ranks % count == 0:
        per_host = num_ranks // count
        blocks = [host_of_rank[i : i + per_host] for i in range(0, num_ranks, per_host)]
        if all(len(set(block)) == 1 for block in blocks):
            return count
    # The reason numbers the hosts in the order in which the ranks meet them.
    number_of_host = {host: i for i, host in enumerate(dict.fromkeys(host_of_rank))}
    numbers = [number_of_host[host] for host in host_of_rank]
    reason = f"the ranks, in order, are on hosts {numbers}, and each host must have equally many"
    if numbers == sorted(numbers):
        return f"{reason} ranks"
    return f"{reason} consecutive ranks: order the devices of the mesh by host"


def ranks_along(
    devices: np.ndarray, mesh_axes: Sequence[str], axis_name: Sequence[str]
) -> list[list[Any]]:
    """Splits the devices of a mesh into the groups of ranks along `axis_name`, in rank order."""
    along = [mesh_axes.index(name) for name in axis_name]
    num_ranks = math.prod(devices.shape[axis] for axis in along)
    ranks_last = np.moveaxis(devices, along, range(-len(along), 0))
    return [list(ranks) for ranks in ranks_last.reshape(-1, num_ranks)]


def parts_of_axes(sizes: Sequence[int], ranks_per_host: int | None) -> list[int] | None:
    """Returns the shape of the block of the mesh that the ranks of a host form; None: no block.

    `sizes` are those of the ranks' mesh axes. With sizes [4, 8], each 16 consecutive ranks form a
    block of [2, 8]. `ranks_per_host` None: all ranks are on one host.
    """
    if ranks_per_host is None:
        return list(sizes)
    # From the last axis on, a block has whole axes, then part of one axis, and 1 of the others.
    parts = []
    remaining = ranks_per_host
    for size in reversed(sizes):
        part = math.gcd(size, remaining)
        # Neither the whole axis, nor all ranks that remain: they would wrap around this axis.
        if part not in (size, remaining):
            return None
        parts.append(part)
        remaining //= part
    return parts[::-1] if remaining == 1 else None


def _host_of(device: jax.Device) -> Any:
    # The process or, if there are several and no CPUs, the XLA slice.
    if device.platform == "cpu" or jax.process_count() == 1:
        return device.process_index
    return getattr(device, "slice_index", None)
