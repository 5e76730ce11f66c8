"""Makes the objects through which the ranks of a kernel communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax import lax

from jax_ep.runtime import environment, jax_compat, symmetric_memory
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.symmetric import Gpus

if TYPE_CHECKING:
    from pallas_kernels.fabric.low_latency import Channels


def of_axis(axis_name: tuple[str, ...], like: jax.Array, ranks_per_host: int | None = None) -> Gpus:
    """Returns the `Gpus` of the ranks along some axes of the enclosing `shard_map`'s mesh.

    `like` is an operand of the kernel; the mesh index is cast to vary (vma) over its axes, too.
    `ranks_per_host` is the number of ranks of a host if ranks communicate only inside hosts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # By how much the mesh index grows along each axis.
    strides = {}
    stride = 1
    for name, size in reversed(mesh.shape.items()):
        strides[name] = stride
        stride *= size
    parts = environment.parts_of_axes([lax.axis_size(name) for name in axis_name], ranks_per_host)
    # `runtime.availability` has refused kernels if the ranks of a host form no block of the mesh.
    assert parts is not None, (axis_name, ranks_per_host)
    # Each axis's stride, and the number of ranks along it; with `ranks_per_host`, of one host.
    axes = tuple((strides[name], part) for name, part in zip(axis_name, parts, strict=True))
    index, _ = jax_compat.match_varying((jax_compat.mesh_index(), like), axis_name)
    base, gpus = _heaps_of_mesh(mesh.size)
    return Gpus(axes, gpus, mesh_index=index, base=base, timeout_s=environment.timeout_seconds())


def _heaps_of_mesh(num_devices: int) -> tuple[int, tuple[int, ...]]:
    """Returns the address of GPU 0's heap, and for each mesh index its GPU's number on its host."""
    domain = domain_of(num_devices)
    # `runtime.availability` has refused kernels if the GPUs do not share memory.
    assert not isinstance(domain, str), domain
    if domain is None:  # The program is lowered for another machine.
        return memory_map.BASE, tuple(range(num_devices))
    program = jax_compat.current_program()
    devices = None if program is None else program.mesh_devices
    if devices is None:  # Device i of the mesh is then taken to be GPU i.
        return domain.base, tuple(range(num_devices))
    numbers = domain.numbers
    # GPUs of other hosts get an arbitrary number, since kernels of this host never address them.
    return domain.base, tuple(
        numbers.get(device.id, device.local_hardware_id or 0) for device in devices.flat
    )


def channels_of(fabric: Gpus) -> Channels:
    """Returns the ranks of `fabric` for a kernel that uses the low-latency protocol."""
    from pallas_kernels.fabric.low_latency import Channels, TileMemory

    memory = TileMemory(fabric.base, num_gpus(fabric))
    axes, gpus, mesh_index = fabric.axes, fabric.gpus, fabric.mesh_index
    return Channels(axes, gpus, memory, mesh_index, timeout_s=fabric.timeout_s)


def num_gpus(fabric: Gpus) -> int:
    """Returns how many GPUs have a heap; if lowering for another machine, the size of the mesh."""
    num_devices = len(fabric.gpus)
    domain = domain_of(num_devices)
    assert not isinstance(domain, str), domain
    return num_devices if domain is None else domain.num_gpus


def domain_of(num_devices: int) -> symmetric_memory.Domain | str | None:
    """Returns this host's domain; None if a mesh of `num_devices` must be on another machine."""
    if jax.default_backend() != "gpu" or num_devices > jax.device_count():
        return None
    return symmetric_memory.domain()
