"""Tests of float8 with block scales and of MXFP4, against numbers computed by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.published import publish

from jax_ep.checkpoints.encodings import Blockwise, Plain, Quantization, open_tensor
from jax_ep.checkpoints.safetensors import Directory

WHOLE = slice(None)
BLOCK = Quantization("fp8", (2, 3))


def tensor(folder, name, tensors, writable=False):
    publish(folder, {}, tensors)
    return open_tensor(Directory(folder, writable=writable), name, BLOCK)


def stored(encoding):
    """Returns all bytes of the file that stores `encoding`, a tensor opened by `open_tensor`."""
    directory = encoding.directory
    return (directory.path / directory.files[encoding.name]).read_bytes()


# ---------------------------------------------------------------------------------- float8

# float8_e4m3fn has a sign, 4 exponent bits with bias 7, and 3 fraction bits.
BYTES = np.array([[0x38, 0x40, 0x3C, 0xB8], [0x00, 0x7E, 0x01, 0x48], [0x30, 0x31, 0xC5, 0x08]])
NUMBERS = np.array([[1, 2, 1.5, -1], [0, 448, 2**-9, 4], [0.5, 0.5625, -3.25, 2**-6]])
SCALES = np.array([[2, 10], [0.25, 3]], np.float32)
SCALE_OF_EACH = np.array([[2, 2, 2, 10], [2, 2, 2, 10], [0.25, 0.25, 0.25, 3]])


def float8_tensors():
    values = BYTES.astype(np.uint8).view(jnp.float8_e4m3fn)
    return {"w.weight": values, "w.weight_scale_inv": SCALES}


def test_float8_is_the_number_times_its_blocks_scale(tmp_path):
    w = tensor(tmp_path, "w.weight", float8_tensors())
    assert isinstance(w, Blockwise) and w.dtype == jnp.bfloat16 and w.shape == (3, 4)
    for index in [(WHOLE, WHOLE), (slice(1, 3), slice(1, 4)), (slice(0, 3, 2), slice(3, 4))]:
        np.testing.assert_array_equal(w.read(index), (NUMBERS * SCALE_OF_EACH)[index])
    two = {name: np.stack([a, a]) for name, a in float8_tensors().items()}
    two["w.weight_scale_inv"][1] *= 2
    got = tensor(tmp_path, "w.weight", two).read((slice(1, 2), WHOLE, slice(2, 4)))
    np.testing.assert_array_equal(got, 2 * (NUMBERS * SCALE_OF_EACH)[None, :, 2:])


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 0.0])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_scale_that_no_block_can_have_is_refused(tmp_path, scale, dtype):
    """It must be refused where its block is read, in any way, and be replaced by a save.

    A scale of 0 is allowed for a block of zeros.
    """
    tensors = float8_tensors()
    scales = tensors["w.weight_scale_inv"] = SCALES.astype(dtype)
    scales[0, 0] = scale
    w = tensor(tmp_path, "w.weight", tensors, writable=True)
    beside = slice(2, 3), slice(0, 3)
    np.testing.assert_array_equal(w.read(beside), (NUMBERS * SCALE_OF_EACH)[beside])
    message = rf"w.weight_scale_inv in .* must hold scales .* but has {scale} \(1 of the "
    for read in (w.read, w.read_parts):
        with pytest.raises(ValueError, match=message):
            read((slice(0, 2), slice(0, 3)))
    w.write((WHOLE, WHOLE), NUMBERS)
    np.testing.assert_allclose(w.read((WHOLE, WHOLE)), NUMBERS, rtol=2**-4, atol=2**-9)
    tensors["w.weight"][:2, :3] = 0
    of_zeros = tensor(tmp_path, "w.weight", tensors)
    if scale == 0:
        assert not of_zeros.read((slice(0, 2), slice(0, 3))).any()
    else:
        with pytest.raises(ValueError, match=f"but has {scale}"):
            of_zeros.read((WHOLE, WHOLE))


def test_float8_of_a_changed_block_has_the_scale_of_its_largest_number(tmp_path):
    """Numbers too small for a scale must become zeros, and zeros must stay zeros."""
    w = tensor(tmp_path, "w.weight", float8_tensors(), writable=True)
    values = w.read((WHOLE, WHOLE))
    values[0, 3] = 44.8
    w.write((WHOLE, WHOLE), values)
    scales = w.directory.read("w.weight_scale_inv", (WHOLE, WHOLE))
    np.testing.assert_array_equal(scales, np.array([[2, 0.1], [0.25, 3]], np.float32))
    np.testing.assert_allclose(w.read((WHOLE, WHOLE)), values, rtol=2**-4)
    assert w.read((slice(0, 1), slice(3, 4))) == np.float32(44.8)
    values[:2, :3] = [[0, 1e-44, 0], [0, 0, 0]]
    w.write((WHOLE, WHOLE), values)
    np.testing.assert_array_equal(w.read((slice(0, 2), slice(0, 3))), np.zeros((2, 3)))


def test_float8_keeps_blocks_with_nan_and_writes_nan_for_what_is_not_finite(tmp_path):
    """Writing must handle blocks of numbers with NaN and infinity.

    A block with NaN whose numbers have not changed must keep its bytes. An infinity must be stored
    as NaN, and the finite numbers of its block must set the block's scale.
    """
    tensors = float8_tensors()
    # The byte 0x7F is NaN.
    tensors["w.weight"].view(np.uint8)[0, 0] = 0x7F
    w = tensor(tmp_path, "w.weight", tensors, writable=True)
    before, values = stored(w), w.read((WHOLE, WHOLE))
    assert np.isnan(values[0, 0]) and np.isnan(values).sum() == 1
    w.write((WHOLE, WHOLE), values)
    assert stored(w) == before
    values[0, 1] = np.inf
    values[1, 1] = 1000
    w.write((WHOLE, WHOLE), values)
    after = w.read((WHOLE, WHOLE))
    np.testing.assert_array_equal(np.argwhere(np.isnan(after)), [[0, 0], [0, 1]])
    finite = np.isfinite(after)
    np.testing.assert_allclose(after[finite], values[finite], rtol=2**-4, atol=1000 / 448 * 2**-10)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e8m0fnu])
def test_float8_whose_scales_are_powers_of_two(tmp_path, dtype):
    """A scale must be the least power of two at which no number of its block is over 448 scales.

    448 is the largest number of e4m3.
    """
    quantization = Quantization("fp8", (2, 3), power_of_two=True)
    rng = np.random.default_rng(0)
    largest = np.float32([448, 449, 1, 1.75, 1.7500002, 2.0**-100, 3e30, 447.99997, 448.00003])
    for size in largest:
        publish(tmp_path, {}, float8_tensors() | {"w.weight_scale_inv": SCALES.astype(dtype)})
        w = open_tensor(Directory(tmp_path, writable=True), "w.weight", quantization)
        values = size * rng.uniform(-0.9, 0.9, (3, 4)).astype(np.float32)
        values[0, 0] = values[0, 3] = values[2, 0] = values[2, 3] = size
        w.write((WHOLE, WHOLE), values)
        scales = w.directory.read("w.weight_scale_inv", (WHOLE, WHOLE)).astype(np.float32)
        exponent = next(e for e in range(-126, 128) if np.float64(size) <= 448 * 2.0**e)
        np.testing.assert_array_equal(scales, np.float32(2.0**exponent))
        np.testing.assert_allclose(
            w.read((WHOLE, WHOLE)), values, rtol=2**-4, atol=2.0 ** (exponent - 10)
        )


# ----------------------------------------------------------------------------------- MXFP4

FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def mxfp4_tensors():
    """Returns MXFP4 tensors: two rows of two blocks, with all 16 codes, rising or falling."""
    codes = np.arange(16)
    forwards = np.concatenate([codes, codes])
    rows = np.array([[forwards, forwards[::-1]], [forwards[::-1], forwards]])
    blocks = (rows[..., ::2] + 16 * rows[..., 1::2]).astype(np.uint8)
    # The first of two numbers is in the low half of their byte.
    assert blocks[0, 0, 0] == 0x10 and blocks[0, 0, 1] == 0x32
    scales = np.array([[127, 130], [126, 0]], np.uint8)
    factors = np.array([[1, 8], [0.5, 2.0**-127]])[..., None]
    return {"w_blocks": blocks, "w_scales": scales}, (np.array(FLOAT4)[rows] * factors).reshape(
        2, 64
    )


def test_mxfp4_is_a_float4_times_its_blocks_power_of_two(tmp_path):
    tensors, want = mxfp4_tensors()
    w = tensor(tmp_path, "w_blocks", tensors)
    assert isinstance(w, Blockwise) and w.dtype == jnp.bfloat16 and w.shape == (2, 64)
    np.testing.assert_array_equal(w.read((WHOLE, WHOLE)), want)
    for index in [(slice(1, 2), slice(5, 40)), (WHOLE, slice(33, 64, 2)), (WHOLE, slice(2, 3))]:
        np.testing.assert_array_equal(w.read(index), want[index])


def test_mxfp4_of_a_changed_block_is_rounded_to_the_nearest(tmp_path):
    w = tensor(tmp_path, "w_blocks", mxfp4_tensors()[0], writable=True)
    values = w.read((WHOLE, WHOLE))
    new = np.zeros(32, np.float32)
    # A number halfway between two float4 numbers is rounded to the one with an even code.
    new[:12] = [24, 1, 1.1, 3, 5, 5.1, 7, -10, 14.1, -20, 22, 1e-9]
    values[1, :32] = new
    w.write((WHOLE, WHOLE), values)
    got = w.read((WHOLE, WHOLE))
    # The changed block's scale is 2**2, which is stored as 127 + 2. The exponent 2 is that of the
    # block's largest number, 24, which is 4, less that of float4's largest number, 6, which is 2.
    assert w.directory.read("w_scales", (WHOLE, WHOLE)).tolist() == [[127, 130], [129, 0]]
    assert got[1, :12].tolist() == [24, 0, 2, 4, 4, 6, 8, -8, 16, -16, 24, 0]
    np.testing.assert_array_equal(got[0], values[0])
    np.testing.assert_array_equal(got[1, 32:], values[1, 32:])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_mxfp4_of_a_block_that_is_not_finite_is_nan(tmp_path, bad):
    w = tensor(tmp_path, "w_blocks", mxfp4_tensors()[0], writable=True)
    values = w.read((WHOLE, WHOLE))
    values[1, 3] = bad
    w.write((WHOLE, WHOLE), values)
    assert w.directory.read("w_scales", (WHOLE, WHOLE)).tolist() == [[127, 130], [255, 0]]
    got = w.read((WHOLE, WHOLE))
    assert np.isnan(got[1, :32]).all() and np.isnan(got).sum() == 32
    before = stored(w)
    w.write((WHOLE, WHOLE), got)
    assert stored(w) == before


NAN = np.array([[0x7FC1, 0xFFC3, 0x3C00]], np.uint16)
UNCHANGED = {
    # The stored scales are none that encoding would choose.
    "float8": ("w.weight", float8_tensors()),
    "MXFP4": ("w_blocks", mxfp4_tensors()[0]),
    "bfloat16 with NaN": ("x", {"x": NAN.view(jnp.bfloat16)}),
    "float16 with NaN": ("x", {"x": NAN.view(np.float16)}),
}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", UNCHANGED)
def test_what_did_not_change_keeps_its_bytes(tmp_path, case, dtype):
    w = tensor(tmp_path, *UNCHANGED[case], writable=True)
    before = stored(w)
    w.write((WHOLE, WHOLE), w.read((WHOLE, WHOLE)).astype(dtype))
    assert stored(w) == before


def test_a_plain_number_that_was_rounded_and_did_not_change_keeps_its_bits(tmp_path):
    x = np.array([1, 1 + 2**-12, 3], np.float32)
    w = tensor(tmp_path, "x", {"x": x}, writable=True)
    assert isinstance(w, Plain)
    rounded = w.read((WHOLE,)).astype(jnp.bfloat16)
    rounded[2] = 5
    w.write((WHOLE,), rounded)
    assert w.read((WHOLE,)).tolist() == [1, 1 + 2**-12, 5]


def test_errors_name_the_tensor(tmp_path):
    values = float8_tensors()["w.weight"]
    for tensors, message in (
        ({"x": np.zeros(3, np.int32)}, "x in .* must be of a floating dtype, .* but is int32"),
        ({"w.weight": values}, "float8_e4m3fn with w.weight_scale_inv"),
        (
            {"w.weight": values, "w.weight_scale_inv": np.ones((1, 2), np.float32)},
            r"w.weight_scale_inv must have shape \(2, 2\), .*\(1, 2\)",
        ),
        (
            {"w.weight": values, "w.weight_scale_inv": np.ones((2, 2), np.int32)},
            "w.weight_scale_inv must hold scales of a floating dtype",
        ),
        (
            {"w_blocks": np.zeros((2, 2, 16), np.uint8), "w_scales": np.zeros((2, 3), np.uint8)},
            r"w_scales must have shape \(2, 2\), .* \(2, 3\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            _ = tensor(tmp_path, next(iter(tensors)), tensors).shape
