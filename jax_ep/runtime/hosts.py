"""Finds out which ranks share a host, in the program that is being lowered.

The devices of a *host* communicate without the network between hosts: a host is the GPUs of one
NVLink domain, the CPU devices of one process, or the chips of one TPU slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_ep.runtime import jax_compat, settings


def num_hosts(program: jax_compat.Program, axis_name: Sequence[str]) -> int | str:
    """Returns M, the number of hosts that the N ranks along some mesh axes span.

    Each host must have N / M consecutive ranks, and M must be the same for every group of ranks
    along the axes. If this is not so, or if the hosts are not known, the result is instead a reason
    (str) that completes "the ranks cannot exchange between hosts: ...".

    Args:
      program: the program that is being lowered.
      axis_name: the mesh axes of the ranks; M is 1 if there are none.
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
        num_hosts_of(hosts_of(ranks))
        for ranks in ranks_along(devices, mesh.axis_names, tuple(axis_name))
    }
    reasons = sorted(each for each in found if isinstance(each, str))
    if reasons:
        return reasons[0]
    if len(found) > 1:
        counts = sorted(each for each in found if not isinstance(each, str))
        return (
            f"the groups of ranks along {tuple(axis_name)} span different numbers of hosts, "
            f"{counts}, and must all span equally many"
        )
    return found.pop()


def hosts_of(devices: Sequence[Any]) -> list[Any]:
    """Returns a value for each device; two devices have equal values only if they share a host.

    The value is None where JAX does not say on which host the device is. `devices` are `jax.Device`
    objects or, if JAX_EP_DEVICES_PER_HOST is set, may be the indices of devices in the mesh.
    """
    per_host = settings.devices_per_host()
    if per_host is not None:
        place = {device.id: i for i, device in enumerate(jax.devices())}
        return [
            (d if isinstance(d, int | np.integer) else place[d.id]) // per_host for d in devices
        ]
    return [_host_of(device) for device in devices]


def num_hosts_of(host_of_rank: Sequence[Any]) -> int | str:
    """Returns M, the number of hosts that a group of N communicating ranks spans.

    If the hosts are not known, or do not have N / M consecutive ranks each, returns instead a
    string with the reason why the ranks cannot exchange between hosts. `host_of_rank` is the result
    of `hosts_of` for the devices of these ranks, in rank order.
    """
    if None in host_of_rank:
        return "JAX does not say which devices share a host; set JAX_EP_DEVICES_PER_HOST"
    size = len(host_of_rank)
    count = len(set(host_of_rank))
    if size % count == 0:
        ranks_per_host = size // count
        runs = [set(host_of_rank[i : i + ranks_per_host]) for i in range(0, size, ranks_per_host)]
        if all(len(run) == 1 for run in runs):
            return count
    names = {host: i for i, host in enumerate(dict.fromkeys(host_of_rank))}
    numbers = [names[host] for host in host_of_rank]
    reason = f"the ranks, in order, are on hosts {numbers}, and each host must have equally many"
    if numbers == sorted(numbers):
        return f"{reason} ranks"
    return f"{reason} consecutive ranks: order the devices of the mesh by host"


def ranks_along(
    devices: np.ndarray, axis_names: Sequence[str], axis_name: Sequence[str]
) -> list[list[Any]]:
    """Splits a mesh's devices into groups that communicate along some mesh axes.

    Returns a list of devices for each group, in rank order. The devices of a group differ only in
    their position along the axes `axis_name`.

    Args:
      devices: the mesh's devices, as an array of the mesh's shape.
      axis_names: the names of all axes of the mesh.
      axis_name: the mesh axes along which ranks communicate.
    """
    along = [axis_names.index(name) for name in axis_name]
    size = math.prod(devices.shape[axis] for axis in along)
    last = np.moveaxis(devices, along, range(-len(along), 0))
    return [list(ranks) for ranks in last.reshape(-1, size)]


def parts_of_axes(sizes: Sequence[int], ranks_per_host: int | None) -> list[int] | None:
    """Returns the shape of the blocks that consecutive ranks form in the mesh.

    For example, along axes of sizes [4, 8] each 16 consecutive ranks form a block of [2, 8].

    Args:
      sizes: the sizes of the ranks' mesh axes; ranks are numbered in row-major order.
      ranks_per_host: how many consecutive ranks form a block; None: all of them.

    Returns:
      The block's size along each axis, whose product is `ranks_per_host`. None if `ranks_per_host`
      consecutive ranks do not form a rectangular block of the mesh.
    """
    if ranks_per_host is None:
        return list(sizes)
    parts, left = [], ranks_per_host
    for size in reversed(sizes):
        part = math.gcd(size, left)
        if part not in (size, left):
            return None
        parts.append(part)
        left //= part
    return parts[::-1] if left == 1 else None


def _host_of(device: jax.Device) -> Any:
    """Returns a value that is equal for devices of one host, or None if the host is not known.

    On CPUs, and where JAX has a single process, the value is the process index. Otherwise it is
    XLA's slice index.
    """
    if device.platform == "cpu" or jax.process_count() == 1:
        return device.process_index
    return getattr(device, "slice_index", None)
