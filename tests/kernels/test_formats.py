"""Tests of the number formats: float8 by NumPy and JAX, against copies of other implementations.

The functions `wire_*` and `published_*` fix the bits of rows on the wire and of values in files,
which must never change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import assert_bitwise_equal, random_bits

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


# ---------------------------------------------------------------------------- rows on the wire


def wire_quantize(x: Any, dtype: Any, xp: Any) -> tuple[Any, Any]:
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 128)
    finite = xp.isfinite(blocks)
    largest = xp.abs(xp.where(finite, blocks, np.float32(0))).max(axis=-1)
    scales = xp.maximum(largest * np.float32((1 - 2**-22) / 448), np.float32(2.0**-117))
    with np.errstate(all="ignore"):
        values = xp.where(finite, blocks * (np.float32(1) / scales)[..., None], np.float32(np.nan))
    return values.astype(dtype).reshape(x.shape), scales


def wire_dequantize(rows: Any, scales: Any, dtype: Any) -> Any:
    blocks = rows.astype(np.float32).reshape(*scales.shape, 128)
    return (blocks * scales[..., None]).astype(dtype).reshape(rows.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_the_wire_had(kind, dtype):
    x = numbers(kind, (5, 384), dtype)
    parts, of_jax = FLOAT8_ROWS.encode(x), by_jax(FLOAT8_ROWS.encode, x)
    assert isinstance(parts[0], np.ndarray)
    assert_same_parts(parts, wire_quantize(x, E4M3, np))
    assert_same_parts(of_jax, by_jax(lambda x: wire_quantize(x, E4M3, jnp), x))
    # XLA on CPUs flushes subnormal float32 to zero, so its results may then differ from NumPy's.
    if kind not in ("subnormal", "bits"):
        assert_same_parts(of_jax, parts)
    # A format must encode a single row [H] as it does each row of [R, H].
    assert_same_parts(FLOAT8_ROWS.encode(x[1]), [part[1] for part in parts])
    with np.errstate(all="ignore"):
        decoded = FLOAT8_ROWS.decode(parts, x.dtype), wire_dequantize(*parts, x.dtype)
        assert_bitwise_equal(*decoded)
    again = by_jax(lambda *parts: FLOAT8_ROWS.decode(parts, x.dtype), *parts)
    np.testing.assert_array_equal(again.astype(np.float32), decoded[0].astype(np.float32))


# ------------------------------------------------------------ matrices in published checkpoints


def published_scales(largest: np.ndarray, dtype: Any, power_of_two: bool) -> np.ndarray:
    scales = np.where(largest > 0, largest / 448.0, 1).astype(np.float32)
    if power_of_two or dtype == E8M0:
        fraction, exponent = np.frexp(scales)
        scales = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        with np.errstate(over="ignore"):
            scales = np.where(scales * np.float32(448) < largest, 2 * scales, scales)
    scales = scales.astype(dtype).astype(np.float32)
    return np.where(scales > 0, scales, np.float32(1))


def published_encode(x: np.ndarray, block: Any, dtype: Any, power_of_two: bool) -> Any:
    rows, columns = (n // b for n, b in zip(x.shape[-2:], block, strict=True))
    blocks = x.astype(np.float32).reshape(*x.shape[:-2], rows, block[0], columns, block[1])
    largest = np.abs(blocks).max(axis=(-3, -1), keepdims=True)
    scales = published_scales(largest, dtype, power_of_two)
    values = np.clip(blocks / scales, -448.0, 448.0).astype(E4M3).reshape(x.shape)
    return values, scales[..., 0, :, 0].astype(dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("scale_dtype", [np.float32, jnp.bfloat16, jnp.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(2, 3), (1, 6), (128, 128)])
@pytest.mark.parametrize("kind", ["random", "zero", "huge", "tiny", "subnormal"])
def test_matrices_are_what_checkpoints_had(kind, block, scale_dtype, power_of_two):
    format = Float8.of(E4M3, block, scale_dtype, power_of_two)
    x = numbers(kind, (3, 2 * block[0], 2 * block[1]))
    x[0] = 0
    # The scale of this block is exactly 1.
    x[0, 0, 0] = 448
    parts = format.encode(x, divide=True)
    want = published_encode(x, block, jnp.dtype(scale_dtype), power_of_two)
    assert_same_parts(parts, want)
    scales = np.repeat(np.repeat(want[1].astype(np.float32), block[0], -2), block[1], -1)
    with np.errstate(over="ignore"):
        numbers_of_parts = want[0].astype(np.float32) * scales
    assert_bitwise_equal(format.decode(parts, np.float32), numbers_of_parts)


# ------------------------------------------------------------------- properties of every format


FORMATS = {
    "rows": FLOAT8_ROWS,
    "matrices": Float8.of(E4M3, (128, 128)),
    "e5m2": Float8.of(jnp.float8_e5m2, (1, 128)),
    "powers": Float8.of(E4M3, (1, 128), power_of_two=True),
    "e8m0": Float8.of(E4M3, (128, 128), jnp.float8_e8m0fnu),
    "bfloat16": Float8.of(E4M3, (64, 128), jnp.bfloat16),
}


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("name", FORMATS)
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


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("name", FORMATS)
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
