"""Shared by the tests of the collective kernels: cases, NumPy references, and lowering for CUDA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.runtime import availability
from jax_ep.runtime.fabric import of_axis
from pallas_kernels.collectives.all_gather import all_gather
from pallas_kernels.collectives.all_reduce import one_shot, two_shot
from pallas_kernels.collectives.all_to_all import all_to_all
from pallas_kernels.collectives.reduce_scatter import reduce_scatter
from pallas_kernels.collectives.tiles import TilePlan
from pallas_kernels.fabric.symmetric import Gpus
from support.meshes import cuda_mesh

AXIS = "expert"
TIMEOUT_SECONDS = 20.0
on_gpus = pytest.mark.skipif(
    bool(availability.unavailable_reason()), reason="needs the kernels' GPUs"
)


def ranks_here(
    axis_names: tuple[str, ...], like: jax.Array, delays_ns: tuple[tuple[int, ...], ...] = ()
) -> Gpus:
    """Makes the fabric of a kernel: this rank and its peers along mesh axes, inside a shard_map.

    A wait for a peer times out after TIMEOUT_SECONDS.

    Args:
        axis_names: the mesh axes of the ranks.
        like: an operand of the kernel, whose varying axes (vma) the fabric's operand must match.
        delays_ns: one entry of `delays`, if the ranks are to run out of step.
    """
    fabric = of_axis(axis_names, like)
    return dataclasses.replace(fabric, timeout_s=TIMEOUT_SECONDS, delays_ns=delays_ns)


def by_rank(num_ranks: int, size: int) -> tuple[int, ...]:
    return (num_ranks, size)


def by_rank_and_shard(num_ranks: int, size: int) -> tuple[int, ...]:
    return (num_ranks, num_ranks, size)


def in_rank_order(x: np.ndarray) -> np.ndarray:
    """Returns the sum over axis 0, added in rank order in float32 and rounded to x's dtype once."""
    return functools.reduce(np.add, (part.astype(np.float32) for part in x)).astype(x.dtype)


# Maps a kernel's name to three functions. The first is the kernel. The second returns the shape of
# the operands of all ranks, stacked, from the number of ranks and of elements. The third computes
# the expected results, exact in every bit, from these operands.
KERNELS: dict[str, tuple[Callable[..., jax.Array], Any, Callable[[np.ndarray], np.ndarray]]] = {
    "one_shot": (one_shot, by_rank, lambda x: np.stack([in_rank_order(x)] * len(x))),
    "two_shot": (two_shot, by_rank_and_shard, lambda x: np.stack([in_rank_order(x)] * len(x))),
    "all_gather": (all_gather, by_rank, lambda x: np.stack([x] * len(x))),
    "reduce_scatter": (reduce_scatter, by_rank_and_shard, in_rank_order),
    "all_to_all": (all_to_all, by_rank_and_shard, lambda x: x.swapaxes(0, 1)),
}


def operand(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def assert_same_bits(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


NORM_CASES = {
    # A case is (ranks, rows, hidden size, padded hidden size, x's dtype, residual's dtype, plan).
    "one_rank": (1, 3, 1024, 1024, "float32", "float32", TilePlan(2, 2)),
    "a_row_to_a_block": (2, 3, 2000, 2048, "bfloat16", "bfloat16", TilePlan(3, 2)),
    "rows_of_blocks": (2, 5, 1024, 1024, "bfloat16", "float32", TilePlan(2, 1)),
    "padded": (3, 2, 1000, 1024, "float32", "bfloat16", TilePlan(3, 2)),
    "tiles_of_warpgroups": (2, 2, 4096, 4096, "bfloat16", "bfloat16", TilePlan(1, 2)),
}


def norm_operands(num_ranks, rows, hidden, padded, dtype, residual_dtype):
    shapes = ((num_ranks, rows, padded), (num_ranks, rows, padded), (num_ranks, padded))
    arrays = []
    for seed, shape in enumerate(shapes):
        array = operand(shape, "float32", seed)
        array[..., hidden:] = 0
        arrays.append(array.astype(jnp.dtype((dtype, residual_dtype, "float32")[seed])))
    return arrays


def norm_reference(x, residual, scale, hidden, eps):
    """Computes the all-reduce fused with residual add and RMSNorm, in NumPy.

    Returns:
        The normalized rows in float64, to compare within rounding, and the new residual, to compare
        bit for bit.
    """
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


SHARDED, REPLICATED = P(AXIS), P()


def lower_for_cuda(function, num_ranks, *shapes, out_specs=SHARDED, in_specs=SHARDED) -> str:
    mesh = cuda_mesh((num_ranks,), (AXIS,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


LOWERED = [
    ("all_reduce", "one_shot", "ep_all_reduce_one_shot"),
    ("all_reduce", "two_shot", "ep_all_reduce_two_shot"),
    ("all_gather", "direct", "ep_all_gather"),
    ("reduce_scatter", "direct", "ep_reduce_scatter"),
    ("all_to_all", "direct", "ep_all_to_all"),
    ("all_reduce", "one_shot_ll", "ep_all_reduce_one_shot_ll"),
    ("all_reduce", "two_shot_ll", "ep_all_reduce_two_shot_ll"),
    ("all_gather", "ll", "ep_all_gather_ll"),
    ("reduce_scatter", "ll", "ep_reduce_scatter_ll"),
    ("all_to_all", "ll", "ep_all_to_all_ll"),
]


def delays(num_ranks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Returns several sets of delays in nanoseconds, each of which puts the ranks out of step.

    A set is [delay points][num_ranks]: how long each rank waits at each delay point of a kernel;
    see `Fabric.delay_point`. A set may end early, with no delays at the remaining points.
    """
    nobody, others = (0,) * num_ranks, (0,) + (10**6,) * (num_ranks - 1)
    first = (10**6,) + (0,) * (num_ranks - 1)
    rng = np.random.default_rng(0)
    mixed = tuple(tuple(map(int, rng.integers(0, 10**5, num_ranks))) for _ in range(3))
    return [(first,), (others,), (nobody, first), mixed]
