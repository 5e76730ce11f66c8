"""Tests of the grouped matmuls to compare with: they lower for GPUs, and say where they run."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from support.kernels import needs_kernels
from support.selection import quick

from jax_ep.bench import matmul_baselines as baselines
from jax_ep.bench.matmul_operations import OF_TWO_PAIRS, OPERATIONS, Case, Operands, operation
from jax_ep.matmul.backend import Problem

# Each shape is (R rows, H, F, L matrices).
SHAPES = [
    (4096, 7168, 2048, 32),
    (1000, 4096, 14336, 8),
    (333, 64, 192, 3),
    (8, 128, 64, 1),
    (1, 64, 64, 4),
]


@pytest.mark.parametrize("shape", quick(SHAPES, SHAPES[0], unpack=False), ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_mosaic_lowers_for_cuda(op, shape):
    num_rows, hidden, mlp, groups = shape
    dtype = jnp.float16 if num_rows % 16 else jnp.bfloat16
    rhs = jax.ShapeDtypeStruct((groups, hidden, mlp), dtype)
    grad = jax.ShapeDtypeStruct((num_rows, mlp), dtype)
    operands = Operands(
        jax.ShapeDtypeStruct((num_rows, hidden), dtype), rhs, grad, rhs, grad,
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    )  # fmt: skip
    traced = jax.jit(operation(baselines.MOSAIC, op)).trace(operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == (2 if op in OF_TWO_PAIRS else 1)


@needs_kernels
def test_a_baseline_says_where_it_cannot_run():
    def reason(backend, platform, matrix=(64, 128), dtype=jnp.bfloat16):
        return backend.unavailable_reason(Problem(matrix, dtype, platform))

    assert "not float32" in reason(baselines.MOSAIC, "cuda", dtype=jnp.float32)
    assert "must be multiples of 64, but are [100, 128]" in reason(
        baselines.MOSAIC, "cuda", (100, 128)
    )
    assert "this program is for cpu" in reason(baselines.MOSAIC, "cpu")
    if importlib.util.find_spec("tokamax") is None:
        assert "tokamax is not installed" in reason(baselines.TOKAMAX, "cuda")


def test_a_machine_without_gpus_measures_the_backends_for_it():
    if jax.default_backend() != "cpu":
        pytest.skip("of a CPU")
    names = [backend.name for backend in baselines.available((64, 64), jnp.bfloat16)]
    assert names == ["loop", "xla"]
    case = Case("usual", 64, 64, 64, 1, 64)
    assert baselines.usual_implementations(case) == ["pallas"]
    slow = dataclasses.replace(case, slow=True)
    assert baselines.usual_implementations(slow) == ["pallas", *names]
