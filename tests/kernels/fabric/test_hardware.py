"""Tests of rounding sizes up to a GPU's units."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.fabric.hardware import align_up, padded_columns


def test_sizes_are_rounded_up():
    assert [align_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [padded_columns(n, jnp.bfloat16) for n in (1, 1024, 1025)] == [1024, 1024, 2048]
    assert padded_columns(7168, jnp.float8_e4m3fn) == 8192
