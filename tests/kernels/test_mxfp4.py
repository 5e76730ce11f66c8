"""Tests of MXFP4 in NumPy and JAX, against numbers by hand and another implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import assert_bitwise_equal

from jax_ep.formats import MXFP4
from pallas_kernels.formats import E8M0

FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def by_jax(function: Any, *arrays: np.ndarray) -> Any:
    return jax.tree.map(np.asarray, jax.jit(function)(*arrays))


def earlier_encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encodes MXFP4 in another way: returns codes, two in a byte, and exponents."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(axis=-1)
    exponent = np.frexp(largest)[1] - 1 - 2
    scales = np.where(largest > 0, np.clip(exponent + 127, 0, 254), 0).astype(np.uint8)
    numbers = np.ldexp(blocks, 127 - scales[..., None].astype(np.int32))
    middles = (FLOAT4[:7] + FLOAT4[1:8]) / 2
    below = np.searchsorted(middles, np.abs(numbers), side="left")
    above = np.searchsorted(middles, np.abs(numbers), side="right")
    code = np.where(below % 2 == 0, below, above).astype(np.uint8)
    code |= np.signbit(numbers).astype(np.uint8) << 3
    return (code[..., ::2] | code[..., 1::2] << 4).reshape(*x.shape[:-1], -1), scales


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [0.0, 2.0**-149, 2.0**-125, 1.0, 3.0, 2.0**125])
def test_blocks_are_what_checkpoints_had(factor, dtype):
    x = np.random.default_rng(0).uniform(-7, 7, (3, 5, 64)) * factor
    with np.errstate(over="ignore"):
        x = x.astype(jnp.dtype(dtype))
    x = np.where(np.isfinite(x), x, np.ones((), x.dtype))
    values, scales = MXFP4.encode(x)
    want_values, want_scales = earlier_encode(x)
    assert_bitwise_equal(values, want_values, "values")
    assert_bitwise_equal(scales.view(np.uint8), want_scales, "scales")
    # Leave out factors that make numbers subnormal, since XLA on CPUs flushes them to zero.
    if factor not in (2.0**-149, 2.0**-125):
        for got, want in zip(by_jax(MXFP4.encode, x), (values, scales), strict=True):
            assert_bitwise_equal(got, want, "by JAX")


def test_every_code_at_every_scale():
    codes = np.arange(32, dtype=np.uint8) % 16
    values = np.tile(codes[::2] | codes[1::2] << 4, (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    with np.errstate(over="ignore"):
        want = np.ldexp(FLOAT4[codes], scales.astype(np.int32) - 127)
    # The MX specification defines the scale 255 as NaN.
    want[255] = np.nan
    parts = values, scales.view(E8M0)
    got = MXFP4.decode(parts, np.float32)
    assert_bitwise_equal(got[:255], want[:255])
    assert np.isnan(got[255]).all()
    of_jax = by_jax(lambda *parts: MXFP4.decode(parts, jnp.float32), *parts)
    # The first two scales give subnormal numbers, which XLA may flush to zero.
    assert_bitwise_equal(of_jax[2:255], want[2:255])
    assert np.isnan(of_jax[255]).all()
    again = MXFP4.encode(got[2:250])
    decoded = MXFP4.decode(again, np.float32)
    assert_bitwise_equal(decoded, got[2:250], "what was stored is stored alike")


def test_numbers_by_hand():
    """Ties take the even code, and the first of a pair is in a byte's lower half."""
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    x[0, 8:16] = -x[0, :8]
    values, scales = MXFP4.encode(x)
    want = np.array([0, 1, 1, 2, 2, 4, 4, 6], np.float32)
    np.testing.assert_array_equal(
        MXFP4.decode((values, scales), np.float32)[0, :16], [*want, *-want]
    )
    assert values.dtype == np.uint8 and values.shape == (1, 16) and values[0, 3] == 0x76
    assert scales.dtype == E8M0 and scales.shape == (1, 1) and scales.view(np.uint8) == 127


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_block(bad):
    x = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    want = MXFP4.decode(MXFP4.encode(x), np.float32)
    x[0, 40] = bad
    for encode in (MXFP4.encode, lambda x: by_jax(MXFP4.encode, x)):
        got = MXFP4.decode(encode(x), np.float32)
        assert np.isnan(got[0, 32:64]).all() and np.isnan(got).sum() == 32
        keep = ~np.isnan(got)
        assert_bitwise_equal(got[keep], want[keep])


def test_shapes():
    assert MXFP4.numbers_shape((3, 32)) == (3, 64) and MXFP4.row_bytes(64, "bfloat16") == 34
