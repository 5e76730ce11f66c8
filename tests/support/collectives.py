"""Shared by the tests of the collective kernels: cases, NumPy references, and ways to run them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jax_ep.runtime import availability, symmetric_memory
from jax_ep.runtime.fabric import of_axis
from jax_ep.runtime.jax_compat import mesh_index
from pallas_kernels.collectives import all_reduce_rms_norm, low_latency, with_signals
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.low_latency import Channels, TileMemory
from pallas_kernels.fabric.symmetric import Gpus
from support.simulator import SimulatedChannels, simulated_channels, simulated_ranks

AXIS = "expert"
TIMEOUT_SECONDS = 20.0
PROTOCOLS = ("signals", "low_latency")
on_gpus = pytest.mark.skipif(
    bool(availability.unavailable_reason()), reason="needs the kernels' GPUs"
)


def by_rank(num_ranks: int, size: int) -> tuple[int, ...]:
    return (num_ranks, size)


def by_rank_and_shard(num_ranks: int, size: int) -> tuple[int, ...]:
    return (num_ranks, num_ranks, size)


def in_rank_order(x: np.ndarray) -> np.ndarray:
    """Returns the sum over axis 0, added in rank order in float32 and rounded to x's dtype once."""
    return functools.reduce(np.add, (part.astype(np.float32) for part in x)).astype(x.dtype)


def sum_on_each(x: np.ndarray) -> np.ndarray:
    return np.stack([in_rank_order(x)] * len(x))


# Maps a kernel's name to two functions. The first returns the shape of the operands of all ranks,
# stacked, from the number of ranks and of elements. The second computes the expected results, exact
# in every bit, from these operands.
KERNELS: dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]] = {
    "one_shot": (by_rank, sum_on_each),
    "two_shot": (by_rank_and_shard, sum_on_each),
    "all_gather": (by_rank, lambda x: np.stack([x] * len(x))),
    "reduce_scatter": (by_rank_and_shard, in_rank_order),
    "all_to_all": (by_rank_and_shard, lambda x: x.swapaxes(0, 1)),
}


def simulated_connection(protocol: str, num_ranks: int, *, detect_races: bool = True) -> Any:
    """Makes the fabric or the channels of a kernel that `simulate` runs."""
    if protocol == "signals":
        return simulated_ranks(num_ranks, detect_races=detect_races)
    return one_axis(num_ranks, detect_races=detect_races)


def one_axis(num_ranks: int, **options: Any) -> SimulatedChannels:
    return simulated_channels([(1, num_ranks)], range(num_ranks), **options)


def connection_here(
    protocol: str, mesh: Any, like: jax.Array, delays_ns: tuple[tuple[int, ...], ...] = ()
) -> Gpus | Channels:
    """Makes the fabric or the channels of a kernel of `mesh`, inside a shard_map."""
    if protocol == "signals":
        return ranks_here((AXIS,), like, delays_ns)
    return channels_here(mesh, timeout_s=TIMEOUT_SECONDS, delays_ns=delays_ns)


def ranks_here(
    axis_names: tuple[str, ...], like: jax.Array, delays_ns: tuple[tuple[int, ...], ...] = ()
) -> Gpus:
    """Makes the fabric of a kernel: this rank and its peers along mesh axes, inside a shard_map."""
    fabric = of_axis(axis_names, like)
    return dataclasses.replace(fabric, timeout_s=TIMEOUT_SECONDS, delays_ns=delays_ns)


def channels_here(mesh: Any, axis_names: tuple[str, ...] = (AXIS,), **options: Any) -> Channels:
    """Makes the channels between this rank and others, inside a shard_map over the mesh."""
    strides = {name: math.prod(mesh.axis_sizes[i + 1 :]) for i, name in enumerate(mesh.axis_names)}
    axes = tuple((strides[name], mesh.shape[name]) for name in axis_names)
    # On an abstract mesh, the program is only lowered.
    if isinstance(mesh, AbstractMesh):
        devices, memory = tuple(range(mesh.size)), TileMemory(memory_map.BASE, mesh.size)
    else:
        domain = symmetric_memory.domain()
        assert not isinstance(domain, str), domain
        devices = tuple(domain.numbers[device.id] for device in mesh.devices.flat)
        memory = TileMemory(domain.base, domain.num_gpus)
    return Channels(axes, devices, memory, mesh_index(), **options)


def call(name: str, connection: Any, *arrays: Any, **options: Any) -> Any:
    """Calls a kernel of `KERNELS`, or "all_reduce_rms_norm", over a fabric or over channels."""
    if name == "all_reduce_rms_norm":
        return all_reduce_rms_norm.all_reduce_rms_norm(*arrays, fabric=connection, **options)
    if isinstance(connection, Channels):
        return getattr(low_latency, name)(*arrays, channels=connection, **options)
    return getattr(with_signals, name)(*arrays, fabric=connection, **options)


def operand(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def assert_same_bits(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def norm_operands(num_ranks, rows, hidden, padded, dtype, residual_dtype):
    shapes = ((num_ranks, rows, padded), (num_ranks, rows, padded), (num_ranks, padded))
    arrays = []
    for seed, shape in enumerate(shapes):
        array = operand(shape, "float32", seed)
        array[..., hidden:] = 0
        arrays.append(array.astype(jnp.dtype((dtype, residual_dtype, "float32")[seed])))
    return arrays


def norm_reference(x, residual, scale, hidden, eps):
    """Computes the all-reduce fused with residual add and RMSNorm, in NumPy."""
    total = in_rank_order(x).astype(np.float32)
    new_residual = (total + residual.astype(np.float32)).astype(residual.dtype)
    wide = new_residual.astype(np.float64)
    mean_square = np.sum(wide**2, axis=-1, keepdims=True) / hidden
    return wide / np.sqrt(mean_square + eps) * scale[:, None].astype(np.float64), new_residual


def check_norm(results, arrays, hidden, eps):
    normalized, new_residual = (np.asarray(result) for result in results)
    want, want_residual = norm_reference(*arrays, hidden, eps)
    assert_same_bits(new_residual, want_residual)
    assert normalized.dtype == arrays[0].dtype
    half_step = float(jnp.finfo(normalized.dtype).eps) / 2 + 1e-6
    np.testing.assert_allclose(normalized.astype(np.float64), want, rtol=half_step, atol=1e-6)


def delays(num_ranks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Returns several sets of delays in nanoseconds, each of which puts the ranks out of step."""
    nobody, others = (0,) * num_ranks, (0,) + (10**6,) * (num_ranks - 1)
    first = (10**6,) + (0,) * (num_ranks - 1)
    rng = np.random.default_rng(0)
    mixed = tuple(tuple(map(int, rng.integers(0, 10**5, num_ranks))) for _ in range(3))
    return [(first,), (others,), (nobody, first), mixed]
