"""Meshes for the tests: the same tests run on virtual CPU devices and on real GPUs."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

RANK_COUNTS = (1, 2, 4, 8)


def expert_mesh(num_ranks: int, axis_name: str = "expert") -> Mesh:
    """Makes a one-axis mesh of the first `num_ranks` devices; skips the test if there are fewer."""
    return mesh((num_ranks,), (axis_name,))


def mesh(
    shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    kind: AxisType | tuple[AxisType, ...] = AxisType.Auto,
) -> Mesh:
    """Makes a mesh of the first devices, with axes of one kind or a kind of each.

    Skips the test if there are fewer devices.
    """
    size = int(np.prod(shape))
    devices = jax.devices()
    if len(devices) < size:
        pytest.skip(f"needs {size} devices, this machine has {len(devices)}")
    types = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    return Mesh(np.asarray(devices[:size]).reshape(shape), axis_names, axis_types=types)


def skip_without(memory_kind: str, devices: Mesh) -> None:
    """Skips the test if the devices lack a kind of memory."""
    kinds = {memory.kind for memory in devices.devices.flat[0].addressable_memories()}
    if memory_kind not in kinds:
        pytest.skip(f"the devices have the memories {kinds}")


def cuda_mesh(
    shape: tuple[int, ...], axis_names: tuple[str, ...], kind: AxisType = AxisType.Auto
) -> Mesh | AbstractMesh:
    """Makes a mesh to lower programs for GPUs: of real GPUs if there are enough, else abstract."""
    size = int(np.prod(shape))
    if jax.default_backend() == "gpu" and jax.device_count() >= size:
        return mesh(shape, axis_names, kind)
    return AbstractMesh(shape, axis_names, axis_types=(kind,) * len(shape))


def model_mesh(*shape: int) -> Mesh:
    """Makes a mesh of the axes of a `jax_ep.models` decoder, as many as `shape` has sizes."""
    return mesh(shape, ("data", "expert", "tensor", "fsdp")[: len(shape)])
