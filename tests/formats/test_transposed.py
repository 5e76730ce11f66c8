"""Tests of the format for matrices that are stored transposed."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.contract import assert_bitwise_equal
from support.meshes import mesh

import jax_ep
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, MXFP4, Transposed

X = np.random.default_rng(0).standard_normal((4, 128, 256)).astype(jnp.bfloat16)


@pytest.mark.parametrize("inner", [FLOAT8_MATRICES, FLOAT8_ROWS, MXFP4], ids=lambda f: f.name)
def test_it_stores_what_the_format_stores_of_the_transpose(inner):
    format = Transposed.of(inner)
    assert format == Transposed.of(inner) and format != inner
    assert format.block == inner.block[::-1]
    for array in (X, jnp.asarray(X)):
        got = jax_ep.quantize(array, format)
        want = jax_ep.quantize(array.swapaxes(1, 2), inner)
        assert_bitwise_equal(np.asarray(got.values), np.asarray(want.values))
        assert_bitwise_equal(np.asarray(got.scales), np.asarray(want.scales))
        assert got.shape == X.shape and got.ndim == 3 and got.dtype == jnp.bfloat16
        assert_bitwise_equal(
            np.asarray(got.dequantize()), np.asarray(want.dequantize()).swapaxes(1, 2)
        )
    assert got.astype(jnp.float32).dequantize().dtype == jnp.float32
    assert got.astype(jnp.float32).values is got.values


def test_it_is_sharded_by_its_specs():
    array = jax_ep.quantize(jnp.asarray(X), Transposed.of(MXFP4))
    on = mesh((2, 2), ("a", "b"))
    specs = array.specs(P("a", "b"))
    assert (specs.values, specs.scales) == (P("a", None, "b"), P("a", None, "b"))
    plain = jax_ep.quantize(jnp.asarray(X), MXFP4).specs(P("a", "b"))
    assert plain.values == P("a", "b", None)
    spread = jax.device_put(array, jax.tree.map(lambda spec: NamedSharding(on, spec), specs))
    inside = jax.shard_map(
        lambda a: a.dequantize(), mesh=on, in_specs=(specs,), out_specs=P("a", "b")
    )
    assert_bitwise_equal(np.asarray(jax.jit(inside)(spread)), np.asarray(array.dequantize()))


def test_shapes_of_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match=r"x must have whole blocks of 32 x 1 .* \(4, 40, 64\)"):
        jax_ep.quantize(X[:, :40, :64], Transposed.of(MXFP4))
    with pytest.raises(ValueError, match="whole blocks of 32 x 1 numbers"):
        jax_ep.quantize(X[0, 0], Transposed.of(MXFP4))


@pytest.mark.parametrize("inner", [FLOAT8_MATRICES, MXFP4], ids=lambda f: f.name)
def test_it_is_exported(inner):
    array = jax_ep.quantize(jnp.asarray(X), Transposed.of(inner))
    exported = jax.export.export(jax.jit(lambda a: a))(array)
    again = jax.export.deserialize(exported.serialize()).call(array)
    assert again.format == array.format
    assert_bitwise_equal(np.asarray(again.dequantize()), np.asarray(array.dequantize()))
