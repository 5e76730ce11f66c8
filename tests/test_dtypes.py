"""Tests of the dtype in which sums are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jax_ep.dtypes import wide_dtype


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("float8_e4m3fn", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_a_dtype_of_at_least_float32(dtype, wide):
    assert jnp.dtype(wide_dtype(jnp.dtype(dtype))) == wide


def test_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        assert wide_dtype(jnp.bfloat16) == jnp.float32
