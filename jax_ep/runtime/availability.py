"""Where the Pallas kernels run: the one place that decides it, and says why not.

A program is asked while it is traced (`tracing_unavailable_reason`) and when it is lowered
(`program_unavailable_reason`), the machine at any time (`unavailable_reason`). Each answers None,
or a reason that completes "the kernels cannot run: ...". So does `exchange_unavailable_reason`, of
the operands of a dispatch or combine; those of collectives and matmuls are asked in their packages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ep.runtime import cuda_driver, jax_compat
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric.plan import SHARED_MEMORY_BYTES

_OLDEST_JAX = (0, 11)
_OLDEST_CAPABILITY = 9.0
_EXCHANGE_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def jax_unavailable_reason() -> str | None:
    """Why this version of JAX cannot run the kernels, or None if it can."""
    if jax.__version_info__ < _OLDEST_JAX:
        oldest = ".".join(map(str, _OLDEST_JAX))
        return f"it needs JAX {oldest} or newer, and this is JAX {jax.__version__}"
    reason = jax_compat.primitives_unavailable_reason()
    return None if reason is None else f"it needs a primitive, and {reason}"


def unavailable_reason(devices: Sequence[jax.Device] | None = None) -> str | None:
    """Why the kernels cannot run on these devices (default: all), or None if they can."""
    devices = jax.devices() if devices is None else devices
    platforms = sorted({device.platform for device in devices})
    if platforms != ["gpu"]:
        return f"it needs NVIDIA GPUs, and the devices here are {', '.join(platforms)}"
    if reason := jax_unavailable_reason():
        return reason
    if len({device.process_index for device in devices}) > 1:
        return "it needs all GPUs in one process, and these belong to several"
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
    return _peers_unavailable_reason(devices)


def _peers_unavailable_reason(devices: Sequence[jax.Device]) -> str | None:
    """Names the first pair of GPUs without peer access; None if the driver names none."""
    ordinals = [device.local_hardware_id for device in devices]
    for device, row in zip(devices, cuda_driver.peer_access(ordinals) or (), strict=False):
        for peer, can in zip(devices, row, strict=True):
            if not can:
                return (
                    "it needs peer access between all GPUs, and the CUDA driver offers none from "
                    f"GPU {device.id} to GPU {peer.id}"
                )
    return None


def tracing_unavailable_reason() -> str | None:
    """Why the kernels cannot run in the `shard_map` that is being traced; None if they may."""
    if reason := jax_unavailable_reason():
        return reason
    mesh = jax.sharding.get_abstract_mesh()
    not_manual = (*mesh.auto_axes, *mesh.explicit_axes)
    left_out = tuple(axis for axis in not_manual if mesh.shape[axis] > 1)
    if left_out:
        return f"it needs shard_map over all axes of the mesh, and {left_out} are left out of it"
    return None


def traced_devices_unavailable_reason() -> str | None:
    """Why the kernels cannot run on the devices of the mesh that is being traced, if it has any.

    A program may be lowered for others; this is for who asked for the kernels by name.
    """
    platform = jax_compat.platform_of_traced_mesh()
    if platform is not None and platform != "gpu":
        return f"it needs NVIDIA GPUs, and the mesh here is of {platform} devices"
    if platform == "gpu" and jax.default_backend() == "gpu":
        return unavailable_reason()
    return None


def program_unavailable_reason(
    program: jax_compat.Program, axis_name: tuple[str, ...]
) -> str | None:
    """Why the kernels cannot run in the program that is being lowered, or None if they can.

    Args:
      program: what is being lowered.
      axis_name: the mesh axes that the kernels' ranks are along.
    """
    if reason := jax_unavailable_reason():
        return reason
    if "cuda" not in program.platforms:
        return "it needs NVIDIA GPUs, and this program is compiled for another platform"
    if len(program.platforms) > 1:
        # A program for several platforms would branch over them, and XLA takes no collective there.
        platforms = ", ".join(program.platforms)
        return f"it needs a program for NVIDIA GPUs alone, and this one is for {platforms}"
    is_here = jax.default_backend() == "gpu"  # else this lowers for a machine that is not
    mesh = program.mesh
    if mesh is not None and math.prod(mesh.shape[name] for name in axis_name) > 1:
        if isinstance(mesh, Mesh):
            ids = [device.id for device in mesh.devices.flat]
            if sorted(ids) != list(range(len(ids))):
                return f"it needs a mesh of the machine's first devices, and here it is of {ids}"
        elif is_here and mesh.size < jax.device_count():  # a larger one is for another machine
            return "it needs to know the devices, and shard_map was given an abstract mesh of some"
    return unavailable_reason() if is_here else None


def exchange_unavailable_reason(
    hidden: int,
    dtype: jax.typing.DTypeLike,
    *,
    num_ranks: int,
    top_k: int,
    num_experts: int,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> str | None:
    """Why the kernels cannot dispatch and combine such rows, or None if they can.

    Args:
      hidden: H, the columns of a row.
      dtype: of the rows.
      num_ranks: N.
      top_k: K; or 2 K in the rank-major layout if weights are sent with the choices.
      num_experts: E.
      wire_dtype: what rows or their sums are sent in; None for `dtype`.
    """
    if dtype not in _EXCHANGE_DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in _EXCHANGE_DTYPES)
        return f"its dtype is {jnp.dtype(dtype).name}, not one of {names}"
    hidden = plans.padded_hidden(hidden, dtype, wire_dtype)
    row = plans.Row(hidden, dtype, wire_dtype)
    if not plans.fits_shared_memory(row, num_ranks=num_ranks, top_k=top_k, num_experts=num_experts):
        return (
            f"a row of {hidden} {jnp.dtype(dtype).name} is too long for shared memory, which also "
            f"holds the routes of {num_experts} experts and {top_k} choices"
        )
    return None
