"""Which ranks share a host, in the program that is being lowered.

A host is what is reached without the network between hosts: the GPUs of one NVLink domain, the
devices of one process of CPUs, the chips of a TPU slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_ep.runtime import jax_compat, settings


def num_hosts(program: jax_compat.Program, axis_name: Sequence[str]) -> int | str:
    """M, where the N ranks along some mesh axes are M runs of N / M neighbours, each on one host.

    Every group of ranks along these axes must be so; 1 where each is on one host. Else the answer
    is the reason why the ranks cannot be told apart by host, which completes "the ranks cannot
    exchange between hosts: ...".
    """
    mesh = program.mesh
    if mesh is None or not axis_name:
        return 1
    if program.for_export:
        return "a program that is exported may run on other hosts"
    devices = program.mesh_devices
    if devices is None:
        if settings.devices_per_host() is None:
            return (
                "shard_map was given an abstract mesh, which does not say on which hosts its "
                "devices are; use jax.set_mesh or a mesh of devices"
            )
        devices = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    found = {
        _num_hosts(hosts_of(group)) for group in groups(devices, mesh.axis_names, tuple(axis_name))
    }
    reasons = sorted(each for each in found if isinstance(each, str))
    if reasons:
        return reasons[0]
    if len(found) > 1:
        return f"the groups of ranks along {tuple(axis_name)} span {sorted(found)} hosts"  # type: ignore[type-var]
    return found.pop()


def hosts_of(devices: Sequence[Any]) -> list[Any]:
    """What names the host of each device; None where JAX does not say.

    Devices that are not known are given as their places in the mesh.
    """
    per_host = settings.devices_per_host()
    if per_host is not None:
        place = {device.id: i for i, device in enumerate(jax.devices())}
        return [
            (d if isinstance(d, int | np.integer) else place[d.id]) // per_host for d in devices
        ]
    return [_host_of(device) for device in devices]


def groups(
    devices: np.ndarray, axis_names: Sequence[str], axis_name: Sequence[str]
) -> list[list[Any]]:
    """The devices of each group of ranks along some axes of a mesh."""
    along = [axis_names.index(name) for name in axis_name]
    size = math.prod(devices.shape[axis] for axis in along)
    last = np.moveaxis(devices, along, range(-len(along), 0))
    return [list(group) for group in last.reshape(-1, size)]


def parts_of_axes(sizes: Sequence[int], group_size: int | None) -> list[int] | None:
    """How many neighbours along each axis make a run of `group_size` ranks numbered along all.

    Args:
      sizes: of the axes, the last one counting fastest.
      group_size: of the runs; None: all ranks.

    Returns:
      A number for each axis, whose product is `group_size`; None where no such numbers exist.
    """
    if group_size is None:
        return list(sizes)
    parts, left = [], group_size
    for size in reversed(sizes):
        part = math.gcd(size, left)
        if part not in (size, left):
            return None
        parts.append(part)
        left //= part
    return parts[::-1] if left == 1 else None


def _host_of(device: jax.Device) -> Any:
    """A process is a host on CPUs; elsewhere what XLA calls a slice is one."""
    if device.platform == "cpu" or jax.process_count() == 1:
        return device.process_index
    return getattr(device, "slice_index", None)


def _num_hosts(host_of_rank: Sequence[Any]) -> int | str:
    if None in host_of_rank:
        return "JAX does not say which devices share a host; set JAX_EP_DEVICES_PER_HOST"
    size = len(host_of_rank)
    count = len(set(host_of_rank))
    if size % count == 0:
        group_size = size // count
        runs = [set(host_of_rank[i : i + group_size]) for i in range(0, size, group_size)]
        if all(len(run) == 1 for run in runs):
            return count
    names = {host: i for i, host in enumerate(dict.fromkeys(host_of_rank))}
    numbers = [names[host] for host in host_of_rank]
    return (
        f"the ranks, in order, are on hosts {numbers}, and each host must have an equal number of "
        "them, next to each other: order the devices of the mesh by host"
    )
