"""Operands and results of grouped matmuls, and the implementations that run on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.matmul.backend import Problem
from jax_ep.matmul.primitives import IMPLEMENTATIONS, default_platform
from support.float8 import swiglu
from support.kernels import needs_kernels
from support.simulator import interpret, simulated

H, F = 64, 128
DTYPES = ("float32", "bfloat16", "float16")
# Tolerances relative to the largest value; GPUs multiply float32 in TF32 by default.
TOLERANCE = {"float32": 1e-5 if jax.default_backend() == "cpu" else 2e-3}
TOLERANCE |= {"bfloat16": 1e-2, "float16": 2e-3}


def available_implementations(matrix_shape: tuple[int, int], dtype: Any) -> tuple[str, ...]:
    """Names the implementations that support matrices [H, F] of `dtype` on this machine."""
    return tuple(IMPLEMENTATIONS.available(Problem(matrix_shape, dtype, default_platform())))


def implementations_with_dtypes(
    matrix_shape: tuple[int, int], dtypes: Iterable[str]
) -> list[tuple[str, str]]:
    """Returns the pairs (implementation, dtype) that run on this machine."""
    return [
        (name, dtype) for dtype in dtypes for name in available_implementations(matrix_shape, dtype)
    ]


AVAILABLE = implementations_with_dtypes((H, F), ("bfloat16", "float32", "float16"))
NUM_ROWS = 700
# Group sizes by what is special about them. All have six groups, so that one compiled program runs
# them all.
GROUP_SIZES = {
    "even": [116, 116, 116, 116, 116, 116],
    "full": [100, 100, 100, 100, 100, 200],
    "one group": [0, 0, 700, 0, 0, 0],
    "empty groups": [0, 130, 0, 0, 170, 0],
    "one huge group": [1, 640, 0, 3, 7, 2],
    "blocks' edges": [128, 64, 64, 256, 0, 128],
    "far short of R": [5, 0, 20, 0, 0, 1],
    "all empty": [0, 0, 0, 0, 0, 0],
    "past R": [300, 0, 900, 5, 0, 7],
    "far past R": [300, 0, 2**31 - 1000, 5, 0, 7],
}


def operands(num_rows, sizes, dtype, seed=0, matrix_shape=(H, F)):
    """Returns lhs [R, H], rhs [L, H, F], group_sizes [L] and a cotangent [R, F].

    Rows past the last group are NaN.
    """
    rng, (depth, width) = np.random.default_rng(seed), matrix_shape
    lhs = rng.standard_normal((num_rows, depth)).astype(dtype)
    rhs = (rng.standard_normal((len(sizes), depth, width)) / np.sqrt(depth)).astype(dtype)
    grad = rng.standard_normal((num_rows, width)).astype(dtype)
    lhs[sum(sizes) :] = np.nan
    grad[sum(sizes) :] = np.nan
    return jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32), jnp.asarray(grad)


def expected(lhs, rhs, sizes, grad):
    """Returns the product and the gradients of lhs and rhs, in float64."""
    lhs, rhs, grad = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, grad))
    out, dlhs, drhs = np.zeros(grad.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[group]
        dlhs[rows] = grad[rows] @ rhs[group].T
        drhs[group] = lhs[rows].T @ grad[rows]
        start += size
    return out, dlhs, drhs


def assert_close(got, want, dtype):
    assert got.dtype == jnp.dtype(dtype)
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1, abs(want).max()))


ON_GPU = jax.default_backend() == "gpu"
# On a GPU the kernels themselves run, and elsewhere Pallas' interpreter.
runs_kernels = needs_kernels if ON_GPU else simulated


def run_kernels(function):
    return jax.tree.map(np.asarray, jax.jit(function)()) if ON_GPU else interpret(function)


def gate_biases(num_groups, width):
    """Draws biases of gate and up, [L, F] each, of two dtypes."""
    biases = np.random.default_rng(1).standard_normal((2, num_groups, width))
    return jnp.asarray(biases[0], jnp.bfloat16), jnp.asarray(biases[1], jnp.float32)


def swiglu_of_groups(products, sizes, biases=None):
    """Adds each group's biases to the rows of products, and applies SwiGLU, as kernels round."""
    wide = [np.array(product, np.float32) for product in products]
    for product, bias in zip(wide, biases or (), strict=False):
        product[: sum(sizes)] += np.repeat(np.asarray(bias, np.float32), sizes, axis=0)
    return swiglu(*map(jnp.asarray, wide)).astype(jnp.bfloat16)


def gradient_shapes(num_rows, hidden, mlp, groups, dtype):
    return (
        jax.ShapeDtypeStruct((num_rows, hidden), dtype),
        jax.ShapeDtypeStruct((groups, hidden, mlp), dtype),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    )
