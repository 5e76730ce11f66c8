"""Shared by tests of kernels: marks, programs for CUDA, and a JAX that lacks a name."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.runtime import availability, jax_compat, symmetric_memory
from pallas_kernels.fabric import memory_map

KERNELS_RUN = jax.__version_info__ >= (0, 11)
WHY_NOT = f"the kernels need JAX 0.11 or newer, and this is {jax.__version__}"

needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason=WHY_NOT)


def on_ranks(function: Callable[..., Any], mesh: Any, **options: Any) -> Any:
    """Jits a function that runs on each rank; its arrays are sharded over all axes of the mesh."""
    spec = P(mesh.axis_names)
    options = dict(in_specs=spec, out_specs=spec, check_vma=False) | options
    return jax.jit(jax.shard_map(function, mesh=mesh, **options))


def lowered(program: Any, *arrays: Any) -> str:
    """Lowers a jitted program for CUDA; `arrays` have the shapes and dtypes of its operands."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    return program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def assert_kernels_alone(text: str, num_kernels: int) -> None:
    """Asserts that a program's kernels communicate, and neither XLA nor NVSHMEM does."""
    calls = [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]
    assert len(calls) == num_kernels
    assert "uses_xla_collective_metadata = true" not in text
    assert "nvshmem" not in text.lower()
    for other in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"):
        assert f"stablehlo.{other}" not in text
    # A call's first operand is this rank's place, and no operand is aliased with a result.
    for call in calls:
        operands = call.rpartition(" : (")[2]
        assert operands.startswith("tensor<1xi32>"), call
        assert "output_operand_aliases = []" in call or "output_operand_aliases" not in call


def program_for_cuda(**facts: Any) -> Any:
    """Makes a stand-in for a `jax_compat.Program` of one GPU without a mesh, but for `facts`."""
    usual = dict(
        platforms=("cuda",), for_export=False, is_of_one_device=True, mesh=None, mesh_devices=None
    )
    return types.SimpleNamespace(**usual | facts)


def forget(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Removes `name` from `module` for one test, as in a JAX that lacks it.

    `name` is that of an attribute, or "Class.attribute".
    """
    first, *rest = name.split(".")
    owner, view = importlib.import_module(module), None
    # A class attribute may be a deprecated name or an enumeration's member, which cannot be
    # deleted. Replace the class by a namespace that has all its other attributes.
    if rest:
        others = set(dir(getattr(owner, first))).difference(rest)
        view = types.SimpleNamespace(**dict.fromkeys(others, object()))
    monkeypatch.setattr(owner, first, view, raising=False)


def pass_for_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> list[jax.Device]:
    """Makes the first devices pass for GPUs that share memory; the last one has the number 0."""
    if jax.default_backend() == "gpu":
        pytest.skip("CPUs are taken for GPUs here")
    devices = jax.devices()[:num_gpus]
    numbers = {device.id: num_gpus - 1 - i for i, device in enumerate(devices)}
    domain = types.SimpleNamespace(base=memory_map.BASE, numbers=numbers, num_gpus=num_gpus)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: num_gpus)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(availability, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(jax_compat, "devices_unavailable_reason", lambda: None)
    monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: None)
    monkeypatch.setattr(symmetric_memory, "domain", lambda: domain)
    return devices
