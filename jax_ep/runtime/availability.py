"""Decides whether a program or a machine can run the Pallas kernels, and says why not.

A `Target` is a program that is being traced (`TRACED`), a program that is being lowered
(`Lowered`), or a list of devices (`Machine`). Functions here return None, or a reason that
completes "the kernels cannot run: ...". The kernels' operands are checked elsewhere, when an
implementation is selected (`jax_ep.implementations`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_ep.runtime import environment, jax_compat, symmetric_memory
from pallas_kernels.fabric import requirements
from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES

_OLDEST_JAX = (0, 11)
_OLDEST_CAPABILITY = 9.0
# The compute capabilities of GPUs on which the kernels have run: those of H100 and H200.
_RUN_ON = ("9.0",)
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def dtype_unavailable_reason(name: str, dtype: jax.typing.DTypeLike) -> str | None:
    if dtype in _DTYPES:
        return None
    names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
    return f"{name} is {jnp.dtype(dtype).name}, not one of {names}"


def jax_unavailable_reason() -> str | None:
    if jax.__version_info__ < _OLDEST_JAX:
        oldest = ".".join(map(str, _OLDEST_JAX))
        return f"it needs JAX {oldest} or newer, and this is JAX {jax.__version__}"
    reason = jax_compat.primitives_unavailable_reason()
    return None if reason is None else f"it needs a primitive, and {reason}"


@functools.cache
def mosaic_unavailable_reason() -> str | None:
    """Returns why this JAX cannot compile the kernels for GPUs, or None; loads Mosaic."""
    try:
        importlib.import_module("pallas_kernels.fabric.mosaic")
    except (ImportError, AttributeError) as error:
        # The import fails if the installed Pallas lacks a name that the module `mosaic` uses.
        return f"it needs Mosaic, and JAX {jax.__version__} lacks a part of it: {error}"
    reason = requirements.unavailable_reason()
    return None if reason is None else f"it needs Mosaic, and {reason}"


def unavailable_reason(devices: Sequence[jax.Device] | None = None) -> str | None:
    """Returns why the kernels cannot run on `devices` (None: all devices), or None if they can."""
    devices = jax.devices() if devices is None else devices
    platforms = sorted({device.platform for device in devices})
    if platforms != ["gpu"]:
        return f"it needs NVIDIA GPUs, and the devices here are {', '.join(platforms)}"
    if reason := jax_unavailable_reason() or mosaic_unavailable_reason():
        return reason
    for device in devices:
        capability = getattr(device, "compute_capability", "0.0")
        if float(capability) < _OLDEST_CAPABILITY:
            return (
                f"it needs compute capability {_OLDEST_CAPABILITY} or newer, and "
                f"{device.device_kind} has {capability}"
            )
        shared = getattr(device, "shared_memory_per_block_optin", SHARED_MEMORY_BYTES)
        if shared < SHARED_MEMORY_BYTES:
            return (
                f"it needs {SHARED_MEMORY_BYTES} bytes of shared memory for a thread block, and "
                f"{device.device_kind} has {shared}"
            )
    return None


def never_run(devices: Sequence[jax.Device]) -> list[str]:
    found = {str(getattr(device, "compute_capability", "unknown")) for device in devices}
    return sorted(found.difference(_RUN_ON))


def tracing_unavailable_reason() -> str | None:
    """Returns why the kernels cannot run in the `shard_map` being traced, whatever the devices."""
    if reason := jax_unavailable_reason():
        return reason
    mesh = jax.sharding.get_abstract_mesh()
    not_manual = (*mesh.auto_axes, *mesh.explicit_axes)
    left_out = tuple(axis for axis in not_manual if mesh.shape[axis] > 1)
    if left_out:
        return f"it needs shard_map over all axes of the mesh, and {left_out} are left out of it"
    return None


def runs_local_kernels(program: jax_compat.Program) -> bool:
    """Returns whether a program can run a kernel that does not communicate."""
    # JAX does not guarantee that exported kernels keep working. With another default backend, the
    # program is for GPUs of another machine.
    return (
        program.platforms == ("cuda",)
        and not program.for_export
        and program.is_of_one_device
        and jax_unavailable_reason() is None
        and mosaic_unavailable_reason() is None
        and (jax.default_backend() != "gpu" or unavailable_reason() is None)
    )


def _memory_unavailable_reason(
    groups: Sequence[Sequence[jax.Device]], ranks_per_host: int | None
) -> str | None:
    """Returns why the ranks of a kernel do not share memory; None if they do."""
    # Each of `groups` is in rank order. A kernel runs among `ranks_per_host` consecutive ranks of a
    # group, which are on one host; None: among the whole group.
    for ranks in groups:
        count = ranks_per_host or len(ranks)
        for start in range(0, len(ranks), count):
            of_kernel = ranks[start : start + count]
            # Each process checks kernels of its own GPUs: it cannot see those of other hosts.
            if any(device.process_index == jax.process_index() for device in of_kernel):
                if reason := symmetric_memory.unavailable_reason(of_kernel):
                    return f"it needs GPUs that share memory, and {reason}"
    if ranks_per_host is not None:
        # All hosts must lower to the same exchange, so kernels need shared memory on each host.
        processes = {device.process_index for ranks in groups for device in ranks}
        for process in sorted(processes - {jax.process_index()}):
            if reason := symmetric_memory.unavailable_reason_of(process):
                return f"it needs GPUs that share memory on every host, and {reason}"
    return None


# Each kind of target has two methods. `unavailable_reason` returns why kernels cannot run there;
# None if they can, or if that is not known yet. With `ranks_per_host`, kernels run among so many
# consecutive ranks, one host (None: among all); of a program, the answer is the same on all hosts.
# `num_hosts` returns how many hosts, 2 or more, the ranks span, or why they cannot exchange rows;
# None while the hosts are not known yet.


class Traced:
    """A traced program, asked only about kernels that the user named; ignores the ranks' axes."""

    def unavailable_reason(
        self, axis_name: tuple[str, ...], ranks_per_host: int | None = None
    ) -> str | None:
        platform = jax_compat.platform_of_traced_mesh()
        if platform is not None and platform != "gpu":
            return f"it needs NVIDIA GPUs, and the mesh here has {platform} devices"
        # With another default backend, the program is for GPUs of another machine.
        is_here = platform == "gpu" and jax.default_backend() == "gpu"
        return (unavailable_reason() if is_here else None) or tracing_unavailable_reason()

    def num_hosts(self, axis_name: tuple[str, ...]) -> int | str | None:
        reason = jax_compat.primitives_unavailable_reason()
        return None if reason is None else f"it needs a primitive, and {reason}"


TRACED = Traced()


@dataclasses.dataclass(frozen=True)
class Lowered:
    program: jax_compat.Program

    def unavailable_reason(
        self, axis_name: tuple[str, ...], ranks_per_host: int | None = None
    ) -> str | None:
        program = self.program
        if "cuda" not in program.platforms:
            return "it needs NVIDIA GPUs, and this program is compiled for another platform"
        if reason := jax_unavailable_reason():
            return reason
        if len(program.platforms) > 1:
            # Such a program has a branch for each platform. XLA forbids collectives in branches.
            platforms = ", ".join(program.platforms)
            return f"it needs a program for NVIDIA GPUs alone, and this one is for {platforms}"
        if program.for_export:
            return "its program holds addresses of this machine, so it cannot be exported"
        if not program.is_of_one_device:
            return "it needs shard_map over all axes of the mesh, and XLA partitions this program"
        if reason := mosaic_unavailable_reason():
            return reason
        mesh = program.mesh
        if mesh is not None:
            sizes = [mesh.shape[name] for name in axis_name]
            if environment.parts_of_axes(sizes, ranks_per_host) is None:
                return (
                    "it needs the ranks of each host to be a block of the mesh, and "
                    f"{ranks_per_host} consecutive ranks on axes of sizes {sizes} do not form one"
                )
        default = jax.default_backend()
        if default != "gpu" and jax_compat.gpus():
            return f"it needs GPUs as JAX's default backend, which is {default} (see JAX_PLATFORMS)"
        if default != "gpu" or (mesh is not None and mesh.size > jax.device_count()):
            # The program is lowered for another machine, which is assumed to run kernels.
            return None
        if reason := unavailable_reason() or jax_compat.devices_unavailable_reason():
            return reason
        devices = program.mesh_devices
        if devices is None and mesh is None:
            return "it needs to know which GPU it runs on, and this JAX does not say"
        if devices is None:
            return (
                "it needs to know the order of the GPUs, and shard_map was given an abstract mesh; "
                "use jax.set_mesh or a mesh of devices"
            )
        names = () if mesh is None else mesh.axis_names
        groups = environment.ranks_along(devices, names, axis_name)
        return _memory_unavailable_reason(groups, ranks_per_host)

    def num_hosts(self, axis_name: tuple[str, ...]) -> int | str | None:
        if not axis_name:
            return "there is no mesh, and so only one rank"
        found = environment.num_hosts(self.program, axis_name)
        if found == 1:
            return f"all ranks along {axis_name} are on one host (see JAX_EP_DEVICES_PER_HOST)"
        return found


@dataclasses.dataclass(frozen=True)
class Machine:
    """A list of devices; device i runs rank i. Reports that are no program ask of it."""

    devices: Sequence[jax.Device]

    def unavailable_reason(
        self, axis_name: tuple[str, ...], ranks_per_host: int | None = None
    ) -> str | None:
        if reason := unavailable_reason(self.devices):
            return reason
        # Whatever the axes and hosts are, a process can only check if its own GPUs share memory.
        own = [each for each in self.devices if each.process_index == jax.process_index()]
        return symmetric_memory.unavailable_reason(own)

    def num_hosts(self, axis_name: tuple[str, ...]) -> int | str | None:
        found = environment.num_hosts_of(environment.hosts_of(self.devices))
        if found == 1:
            return f"{len(self.devices)} ranks are on one host"
        return found


Target = Traced | Lowered | Machine
