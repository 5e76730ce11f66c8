"""Tests of QuantizedArray: it can take an array's place in JAX's transformations."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.contract import assert_bitwise_equal
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep.formats import (
    FLOAT8_MATRICES,
    FLOAT8_ROWS,
    MXFP4,
    PLAIN,
    Float8,
    QuantizedArray,
    Transposed,
)

FORMATS = {
    "rows": FLOAT8_ROWS,
    "matrices": FLOAT8_MATRICES,
    "mxfp4": MXFP4,
    "e5m2": Float8.of(jnp.float8_e5m2, (1, 128)),
    "e8m0": Float8.of(jnp.float8_e4m3fn, (128, 128), jnp.float8_e8m0fnu),
}
SHAPE = 4, 128, 256


@pytest.fixture(params=quick(FORMATS, "matrices"))
def format(request):
    return request.param


@functools.cache
def x():
    return np.random.default_rng(0).standard_normal(SHAPE).astype(jnp.bfloat16)


@functools.cache
def quantized(format):
    """Quantizes x with JAX, on the default device."""
    return jax_ep.quantize(jnp.asarray(x()), format)


def dequantized(format):
    return format.decode(format.encode(x()), jnp.bfloat16)


def assert_is(array, format, numbers):
    assert isinstance(array, QuantizedArray) and array.format == format
    assert array.shape == numbers.shape and array.dtype == numbers.dtype
    assert_bitwise_equal(array.dequantize(), numbers)


def test_no_gradient_goes_through_quantization(format):
    numbers = jnp.asarray(x())
    grad = jax.jit(jax.grad(lambda x: (jax_ep.quantize(x, format).dequantize() * x).sum()))
    want = jax_ep.quantize(numbers, format).dequantize()
    np.testing.assert_array_equal(grad(numbers), want)


def test_numpy_stays_on_the_host(format):
    array = jax_ep.quantize(x(), format)
    assert isinstance(array.values, np.ndarray) and isinstance(array.scales, np.ndarray)
    assert_is(array, format, dequantized(format))


def test_it_is_indexed_before_its_blocks(format):
    array, numbers = quantized(format), dequantized(format)
    transposed = QuantizedArray(array.values, array.scales, Transposed.of(format))
    whole = slice(None)
    for index in (..., 1, np.int32(-1), (slice(1, 3), whole), np.asarray([2, 0]), (0, ..., whole)):
        assert_is(array[index], format, numbers[index])
    assert_is(transposed[1], transposed.format, numbers[1].T)
    assert_is(jax.jit(lambda a: a[1])(array), format, numbers[1])
    assert_is(nnx.Param(array)[...], format, numbers)


def test_its_blocks_are_not_indexed(format):
    array = quantized(format)
    transposed = QuantizedArray(array.values, array.scales, Transposed.of(format))
    assert len(array) == 4 and [part.shape for part in array] == [(128, 256)] * 4
    for index in ((..., 0), (0, slice(None), slice(128)), None, (0, None)):
        with pytest.raises(TypeError, match=r"index must .* first .* axes .*\(4, 128, 256\).*deq"):
            array[index]
    with pytest.raises(TypeError, match="first 1 axes .* Index its .dequantize"):
        transposed[0, 5]
    with pytest.raises(IndexError, match=r"4 axes, .*\(4, 128, 256\)"):
        array[(slice(None),) * 4]
    with pytest.raises(TypeError, match="QuantizedArray is not an array .*dequantize"):
        np.asarray(array)
    with pytest.raises(TypeError, match="QuantizedArray is not an array .*dequantize"):
        jnp.asarray(array)


def test_rows_are_indexed():
    array, numbers = quantized(FLOAT8_ROWS), dequantized(FLOAT8_ROWS)
    assert_is(array[1, 5], FLOAT8_ROWS, numbers[1, 5])
    assert_is(array[:, 5:9], FLOAT8_ROWS, numbers[:, 5:9])
    with pytest.raises(TypeError, match="index must"):
        quantized(FLOAT8_MATRICES)[:, 5:9]


def test_it_passes_scan_and_cond(format):
    def step(carry, array):
        assert array.shape == SHAPE[1:]
        return lax.cond(jnp.bool_(True), lambda: carry, lambda: carry), array.dequantize()

    carry, numbers = jax.jit(lambda a: lax.scan(step, a, a))(quantized(format))
    assert_is(carry, format, dequantized(format))
    assert_bitwise_equal(numbers, dequantized(format))


def test_it_passes_vmap(format):
    array = jax.vmap(lambda x: jax_ep.quantize(x, format))(jnp.asarray(x()))
    assert_is(array, format, dequantized(format))
    assert_bitwise_equal(jax.vmap(QuantizedArray.dequantize)(array), dequantized(format))


def test_it_passes_tree_map(format):
    array = quantized(format)
    assert_is(jax.tree.map(lambda leaf: leaf[1:], array), format, dequantized(format)[1:])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), array, array)
    assert_is(stacked, format, np.stack([dequantized(format)] * 2))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(array)]
    assert names == [".values", ".scales"]
    axes = jax.tree.map(lambda leaf: None, array)
    assert axes.values is None and axes.format == format


def test_it_is_sharded_as_an_array_of_its_shape(format):
    devices, spec = mesh((2, 2), ("a", "b")), P("a", None, "b")
    sharding = NamedSharding(devices, spec)
    array = jax.device_put(quantized(format), sharding)
    assert array.values.sharding == array.scales.sharding == sharding
    assert_is(array, format, dequantized(format))
    made = jax.jit(lambda x: jax_ep.quantize(x, format), out_shardings=sharding)(jnp.asarray(x()))
    assert made.scales.sharding.is_equivalent_to(sharding, 3)
    assert_is(made, format, dequantized(format))
    specs = dict(in_specs=spec, out_specs=spec)
    inside = jax.shard_map(lambda a: (a, a.dequantize()), mesh=devices, **specs)
    same, numbers = jax.jit(inside)(array)
    assert_is(same, format, dequantized(format))
    assert_bitwise_equal(numbers, dequantized(format))


def test_it_is_made_on_explicit_axes(format):
    with jax.set_mesh(mesh((4,), ("a",), AxisType.Explicit)):
        sharded = jax.device_put(x(), P("a"))
        array = jax.jit(lambda x: jax_ep.quantize(x, format))(sharded)
        assert tuple(jax.typeof(array.scales).sharding.spec)[0] == "a"
        assert_is(array, format, dequantized(format))


def test_it_is_exported(format):
    for each in (format, Transposed.of(format)):
        exported = jax.export.export(jax.jit(lambda a: a))(quantized(each))
        again = jax.export.deserialize(exported.serialize())
        assert_is(again.call(quantized(each)), each, dequantized(each))


def test_rows_of_one_axis():
    row = jax_ep.quantize(jnp.asarray(x()[0, 0]), FLOAT8_ROWS)
    assert row.shape == (256,) and row.scales.shape == (2,)


@pytest.mark.parametrize(
    ("x", "format", "message"),
    [
        (np.ones((4, 200)), FLOAT8_ROWS, r"x must have whole blocks .* but has shape \(4, 200\)"),
        (np.ones((200, 256)), FLOAT8_MATRICES, r"x must have whole blocks .* \(200, 256\)"),
        (np.ones((4, 40, 64)), Transposed.of(MXFP4), r"whole blocks of 32 x 1 .* \(4, 40, 64\)"),
        (np.ones(256), Transposed.of(MXFP4), "whole blocks of 32 x 1 numbers"),
        (np.ones((2, 128)), PLAIN, "format must be a jax_ep.Format.* of type Plain"),
        (np.ones((2, 128)), "float8", "format must be a jax_ep.Format.*'float8'"),
        ([1.0], FLOAT8_ROWS, "x must be a floating array .*, but is the list"),
        (np.ones((2, 128), np.int32), FLOAT8_ROWS, "x must be a floating array"),
    ],
)
def test_what_cannot_be_quantized_is_refused(x, format, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jax_ep.quantize(x, format)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(scales=np.ones((1, 1), np.float32)), r"scales must have shape \(2, 1\).*\(1, 1\)"),
        (dict(scales=np.ones((2, 1))), "scales must be an array of dtype float32"),
        (dict(values=np.ones((2, 128))), "values must be an array of dtype float8_e4m3fn"),
        (dict(dtype=np.int32), "dtype must be a floating dtype"),
        (dict(format=None), "format must be a jax_ep.Format"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    values, scales = FLOAT8_ROWS.encode(np.ones((2, 128), np.float32))
    parts = dict(values=values, scales=scales, format=FLOAT8_ROWS, dtype=np.float32)
    with pytest.raises((TypeError, ValueError), match=message):
        QuantizedArray(**parts | change)
    array = QuantizedArray(**parts)
    with pytest.raises(TypeError, match="x must be .*, but is a QuantizedArray; pass its .deq"):
        jax_ep.quantize(array, FLOAT8_ROWS)
    with pytest.raises(TypeError, match="dtype must be a floating dtype"):
        array.dequantize(jnp.int8)
    with pytest.raises(ValueError, match="values must have whole blocks"):
        jax.tree.map(lambda leaf: leaf[..., :1], array).dequantize()


# ---------------------------------------------------------------------------- stored transposed


def test_it_stores_what_the_format_stores_of_the_transpose(format):
    transposed = Transposed.of(format)
    assert transposed == Transposed.of(format) and transposed.block == format.block[::-1]
    for array in (x(), jnp.asarray(x())):
        got = jax_ep.quantize(array, transposed)
        want = jax_ep.quantize(array.swapaxes(1, 2), format)
        assert_bitwise_equal(got.values, want.values)
        assert_bitwise_equal(got.scales, want.scales)
        assert_is(got, transposed, np.asarray(want.dequantize()).swapaxes(1, 2))
    assert got.astype(jnp.float32).dequantize().dtype == jnp.float32


def test_it_is_sharded_by_its_specs():
    array, on = quantized(Transposed.of(MXFP4)), mesh((2, 2), ("a", "b"))
    specs = array.specs(P("a", "b"))
    assert (specs.values, specs.scales) == (P("a", None, "b"), P("a", None, "b"))
    assert quantized(MXFP4).specs(P("a", "b")).values == P("a", "b", None)
    spread = jax.device_put(array, jax.tree.map(lambda spec: NamedSharding(on, spec), specs))
    inside = jax.shard_map(
        lambda a: a.dequantize(), mesh=on, in_specs=(specs,), out_specs=P("a", "b")
    )
    assert_bitwise_equal(jax.jit(inside)(spread), array.dequantize())
