"""Tests of the number formats in NumPy and JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import assert_bitwise_equal, random_bits
from support.selection import quick

from jax_ep.formats import MXFP4
from pallas_kernels.formats import E8M0, FLOAT8_ROWS, Float8

E4M3 = np.dtype(jnp.float8_e4m3fn)
DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("random", "zero", "huge", "tiny", "subnormal", "nan", "infinite", "bits")


def numbers(kind: str, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(len(kind))
    dtype = jnp.dtype(dtype)
    info = jnp.finfo(dtype)
    if kind == "bits":
        return random_bits(rng, shape, dtype)
    x = rng.standard_normal(shape)
    factor = {"zero": 0.0, "huge": float(info.max) / 8, "tiny": float(info.tiny) * 2.0**14}
    factor["subnormal"] = float(info.tiny) / 8
    x = np.clip(x * factor.get(kind, 1.0), float(info.min), float(info.max)).astype(dtype)
    if kind == "huge":
        x[..., 0] = info.max
    if kind in ("nan", "infinite"):
        x[..., 1::5] = np.nan if kind == "nan" else -np.inf
    return x


def by_jax(function: Any, *arrays: np.ndarray) -> Any:
    return jax.tree.map(np.asarray, jax.jit(function)(*arrays))


def assert_same_parts(got: Any, want: Any) -> None:
    for a, b, name in zip(got, want, ("values", "scales"), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        nan = np.isnan(b.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(a.astype(np.float32)), nan)
        assert_bitwise_equal(np.where(nan, 0, a), np.where(nan, 0, b), name)


@pytest.mark.parametrize("dtype", quick(DTYPES, "bfloat16"))
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_jax_quantize_rows_alike(kind, dtype):
    x = numbers(kind, (5, 384), dtype)
    parts = FLOAT8_ROWS.encode(x)
    assert isinstance(parts[0], np.ndarray)
    # A single row [H] is encoded as each row of [R, H] is.
    assert_same_parts(FLOAT8_ROWS.encode(x[1]), [part[1] for part in parts])
    # XLA on CPUs flushes subnormal float32 to zero, so its results may differ from NumPy's.
    if kind not in ("subnormal", "bits"):
        assert_same_parts(by_jax(FLOAT8_ROWS.encode, x), parts)
    with np.errstate(all="ignore"):
        decoded = FLOAT8_ROWS.decode(parts, x.dtype)
    again = by_jax(lambda *parts: FLOAT8_ROWS.decode(parts, x.dtype), *parts)
    np.testing.assert_array_equal(again.astype(np.float32), decoded.astype(np.float32))


FORMATS = {
    "rows": FLOAT8_ROWS,
    "matrices": Float8.of(E4M3, (128, 128)),
    "e5m2": Float8.of(jnp.float8_e5m2, (1, 128)),
    "powers": Float8.of(E4M3, (1, 128), power_of_two=True),
    "e8m0": Float8.of(E4M3, (128, 128), jnp.float8_e8m0fnu),
    "bfloat16": Float8.of(E4M3, (64, 128), jnp.bfloat16),
}


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("name", quick([*FORMATS], "powers", "e8m0", "bfloat16"))
def test_numbers_are_within_half_a_step(name, divide):
    format = FORMATS[name]
    rng = np.random.default_rng(0)
    power = np.repeat(rng.uniform(-100, 110, (2, 256, 2)), 128, axis=-1)
    x = (rng.standard_normal((2, 256, 256)) * np.exp2(power)).astype(np.float32)
    parts = format.encode(x, divide=divide)
    # XLA divides by a constant approximately, so compare only without division.
    if not divide:
        assert_same_parts(by_jax(format.encode, x), parts)
    decoded = format.decode(parts, np.float32)
    assert_bitwise_equal(by_jax(lambda *p: format.decode(p, np.float32), *parts), decoded)
    info = jnp.finfo(format.dtype)
    _, scales = parts
    rows, columns = format.block
    scales = np.repeat(np.repeat(scales.astype(np.float32), rows, -2), columns, -1)
    half = np.maximum(float(info.eps) / 2 * np.abs(x), float(info.smallest_subnormal) / 2 * scales)
    # A block's scale may be a little less than its largest number needs, since scales are rounded.
    # Allow for the error of numbers that are then cut to the format's largest.
    slack = 2.0**-8 if name == "bfloat16" else 2.0**-20
    assert np.all(np.abs(decoded - x) <= half + slack * np.abs(x))


def test_matrices_are_divided_as_in_published_checkpoints():
    x = numbers("random", (3, 4, 6))
    values, scales = Float8.of(E4M3, (2, 3)).encode(x, divide=True)
    want = np.abs(x.reshape(3, 2, 2, 2, 3)).max(axis=(2, 4)) / np.float32(448)
    assert_bitwise_equal(scales, want)
    assert_bitwise_equal(values, (x / want.repeat(2, axis=1).repeat(3, axis=2)).astype(E4M3))


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("name", quick([*FORMATS], "powers"))
def test_what_is_not_finite_stays_in_its_block(name, divide):
    format = FORMATS[name]
    rows, columns = format.block
    x = numbers("random", (2 * rows, 3 * columns))
    # A block of zeros must not become NaN.
    x[:rows, :columns] = 0
    bad = x.copy()
    places = (rows, slice(0, 3))
    bad[places] = [np.nan, np.inf, -np.inf]
    for encode in (format.encode, lambda x, divide: by_jax(format.encode, x)):
        got = format.decode(encode(bad, divide=divide), np.float32)
        want = format.decode(encode(x, divide=divide), np.float32)
        assert np.isnan(got[places]).all() and np.isnan(got).sum() == 3
        assert np.all(got[:rows, :columns] == 0)
        other = np.ones_like(x, bool)
        other[rows:, :columns] = False
        assert_bitwise_equal(got[other], want[other])


def test_small_scales_are_not_flushed():
    """The scale 2^-127 of float8_e8m0fnu, subnormal in float32, must not be flushed to zero."""
    format = Float8.of(E4M3, (1, 2), E8M0)
    parts = np.array([[448.0, 4.0]]).astype(E4M3), np.array([[0]], np.uint8).view(E8M0)
    want = np.array([[448, 4]], np.float32) * np.float32(2.0**-127)
    assert_bitwise_equal(format.decode(parts, np.float32), want)
    assert_bitwise_equal(by_jax(lambda *p: format.decode(p, np.float32), *parts), want)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((np.float32, (1, 128)), "dtype must be a float8 dtype, but is float32"),
        ((E8M0, (1, 128)), "dtype must be a float8 dtype, but is float8_e8m0fnu"),
        ((E4M3, (1, 128), np.int32), "scale_dtype must be a floating dtype, but is int32"),
        ((E4M3, (0, 128)), r"block must be of at least 1 row and 1 column, but is \(0, 128\)"),
    ],
)
def test_formats_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Float8.of(*arguments)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("largest", [1e-6, 1e-5, 2.9e7, 3.1e7, 1e30])
def test_scales_in_float16_are_finite_normal_numbers(largest, power_of_two):
    """Float16 has no scale for the largest and smallest numbers: they are clipped or imprecise."""
    format = Float8.of(E4M3, (1, 4), jnp.float16, power_of_two)
    x = np.asarray([[largest, -largest, largest / 2, 0]], np.float32)
    values, scales = format.encode(x)
    half = np.finfo(np.float16)
    assert half.smallest_normal <= scales <= half.max
    got = format.decode((values, scales), np.float32)
    most = 448 * (2.0**15 if power_of_two else float(half.max))
    error = np.maximum(2**-4 * abs(x), 2**-10 * scales.astype(np.float32))
    assert np.all(abs(got - np.clip(x, -most, most)) <= error)


@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16])
def test_a_compiled_program_rounds_scales(scale_dtype):
    format = Float8.of(E4M3, (2, 4), scale_dtype)
    x = numbers("random", (64, 256))
    compiled = jax.jit(format.encode)(jnp.asarray(x))
    for got, want in zip(compiled, format.encode(x), strict=True):
        assert np.asarray(got).tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_no_number_is_subnormal_in_float32(dtype):
    """The least number of a block with the least scale must be float32's least normal number."""
    format = Float8.of(dtype, (1, 128))
    least = np.float32(jnp.finfo(dtype).smallest_subnormal)
    assert np.float32(format.least_scale) * least == np.finfo(np.float32).smallest_normal
    _, scales = format.encode(np.full((1, 128), 1e-38, np.float32))
    assert scales == np.float32(format.least_scale)


# ----------------------------------------------------------------------------------------- MXFP4

FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_every_code_of_mxfp4_at_every_scale():
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_block_of_mxfp4(bad):
    x = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    want = MXFP4.decode(MXFP4.encode(x), np.float32)
    x[0, 40] = bad
    for encode in (MXFP4.encode, lambda x: by_jax(MXFP4.encode, x)):
        got = MXFP4.decode(encode(x), np.float32)
        assert np.isnan(got[0, 32:64]).all() and np.isnan(got).sum() == 32
        keep = ~np.isnan(got)
        assert_bitwise_equal(got[keep], want[keep])
