"""Tests of the dtype in which sums are computed, and of rounding to another one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.dtypes import rounded, wide_dtype


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "float32", "float64"])
def test_a_dtype_of_at_least_float32(dtype):
    with jax.numpy_dtype_promotion("strict"):
        wide = jnp.dtype(wide_dtype(jnp.dtype(dtype)))
    assert wide == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32", "float64"])
def test_rounding_is_not_left_out(dtype):
    """XLA must round before it sums, also to numbers that are subnormal in the dtype."""
    magnitudes = np.exp(np.random.default_rng(0).uniform(-16, 5, (64, 64)))
    x = (magnitudes * np.random.default_rng(1).choice([-1, 1], (64, 64))).astype(np.float32)
    want = x.astype(jnp.dtype(dtype)).astype(np.float32)
    got, sums = jax.jit(lambda x: (rounded(x, jnp.dtype(dtype)), rounded(x, dtype).sum(axis=0)))(x)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(sums, want.sum(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-4)


def test_the_gradient_passes_through_rounding():
    for dtype in (jnp.bfloat16, jnp.float16):
        grad = jax.grad(lambda x, dtype=dtype: (3 * rounded(x, dtype)).sum())(jnp.ones(4))
        np.testing.assert_array_equal(grad, 3)
