"""Tests of matmuls of a few unquantized rows by matrices that are stored quantized."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import needs_kernels
from support.selection import quick

from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, MXFP4, Float8, Transposed, quantize
from jax_ep.matmul import weight_only
from pallas_kernels.matmul.chosen_groups import chosen_groups

L, K, N = 6, 256, 128
FORMATS = {
    "float8": Transposed.of(FLOAT8_MATRICES),
    "mxfp4": Transposed.of(MXFP4),
    "float8 in order": FLOAT8_MATRICES,
    "mxfp4 in order": MXFP4,
    "rows": FLOAT8_ROWS,
    "bfloat16 scales": Transposed.of(Float8.of(jnp.float8_e4m3fn, (128, 128), jnp.bfloat16)),
}
CHOICES = {1: [[2, 0, -1]], 3: [[3, 0], [0, -1], [2, 3]], 8: [[0, 1, 2, 3, 4, 5]] * 8}
DTYPES = {jnp.bfloat16: 2**-7, jnp.float32: 2**-16}


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def case(format, num_rows, matrices=2, shared=True, with_bias=True, dtype=jnp.bfloat16):
    rng = np.random.default_rng(num_rows)
    groups, rows = chosen_groups(jnp.asarray(CHOICES[num_rows], jnp.int32), L)
    count = num_rows if shared else (len(groups.table) - 1) * groups.height
    x = jnp.asarray(rng.standard_normal((count, K)), dtype)
    stored = [
        quantize(jnp.asarray(rng.standard_normal((L, K, N)) / np.sqrt(K), dtype), format)
        for _ in range(matrices)
    ]
    biases = [
        jnp.asarray(rng.standard_normal((L, N)), dtype) if with_bias else None for _ in stored
    ]
    return x, stored, biases, groups, np.asarray(rows)


@pytest.mark.parametrize("dtype", quick(list(DTYPES), jnp.bfloat16))
@pytest.mark.parametrize("implementation", quick([None, "xla", "loop"], None))
@pytest.mark.parametrize("num_rows", quick(list(CHOICES), 3))
@pytest.mark.parametrize("name", FORMATS)
def test_products(name, num_rows, implementation, dtype):
    for shared, matrices, gating in ((True, 2, swiglu), (False, 1, None), (False, 1, jax.nn.silu)):
        x, stored, biases, groups, rows = case(
            FORMATS[name], num_rows, matrices, shared, gating is not None, dtype
        )
        out = weight_only.product(
            x, stored, biases, groups, num_rows, gating=gating, implementation=implementation
        )
        assert out.dtype == dtype
        out, given = np.asarray(out).astype(np.float64), np.asarray(CHOICES[num_rows])
        for row, choice in np.argwhere(given >= 0):
            at, group = rows[row, choice], given[row, choice]
            own = np.asarray(x[row if shared else at]).astype(np.float64)
            products = [own @ np.asarray(each.dequantize(jnp.float32)[group]) for each in stored]
            products = [
                product if bias is None else product + np.asarray(bias[group]).astype(np.float64)
                for product, bias in zip(products, biases, strict=True)
            ]
            want = products[0] if gating is None else np.asarray(gating(*products))
            atol = 2 * DTYPES[dtype] * np.abs(want).max()
            np.testing.assert_allclose(out[at], want, rtol=0, atol=atol)


@pytest.mark.parametrize("other", ["float8 in order", "mxfp4", "bfloat16 scales"])
def test_each_matrix_has_a_format_of_its_own(other):
    x, (gate, up), _, groups, rows = case(FORMATS["float8"], 3)
    up = quantize(up.dequantize(), FORMATS[other])

    def product(x, gate, up, groups):
        return weight_only.product(x, [gate, up], [None, None], groups, 3, gating=swiglu)

    out = np.asarray(product(x, gate, up, groups)).astype(np.float64)
    for row, choice in np.argwhere(np.asarray(CHOICES[3]) >= 0):
        own, group = np.asarray(x[row]).astype(np.float32), CHOICES[3][row][choice]
        want = swiglu(*(own @ each.dequantize(jnp.float32)[group] for each in (gate, up)))
        atol = 2**-6 * np.abs(want).max()
        np.testing.assert_allclose(out[rows[row, choice]], want, rtol=0, atol=atol)


def test_under_vmap_each_element_is_a_product_of_its_own():
    x, stored, biases, groups, _ = case(FORMATS["mxfp4"], 3)
    several = jnp.stack([x, -x, 2 * x])

    def product(x):
        return weight_only.product(x, stored, biases, groups, 3, gating=swiglu)

    out = jax.vmap(product)(several)
    for each, x in zip(out, several, strict=True):
        np.testing.assert_array_equal(each, product(x))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype", "is_weight_only"),
    [
        ("float8", jnp.bfloat16, True),
        ("mxfp4", jnp.bfloat16, True),
        ("bfloat16 scales", jnp.bfloat16, True),
        ("mxfp4 in order", jnp.bfloat16, False),
        ("rows", jnp.bfloat16, False),
        ("mxfp4", jnp.float16, False),
    ],
)
def test_which_matrices_a_kernel_reads_as_they_are_stored(name, dtype, is_weight_only):
    x, stored, biases, groups, _ = case(FORMATS[name], 3, dtype=dtype)

    def product(x, stored, biases, groups):
        return weight_only.product(x, stored, biases, groups, 3, gating=swiglu)

    traced = jax.jit(product).trace(x, stored, biases, groups)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("weight_only_gated" in text) == is_weight_only
    assert text.count("@mosaic_gpu") == (1 if is_weight_only else 2)
