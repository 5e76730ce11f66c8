"""Tests of matmuls of unquantized rows by matrices that are stored quantized."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.float8 import swiglu
from support.kernels import needs_kernels
from support.selection import quick

from jax_ep.formats import (
    FLOAT8_MATRICES,
    FLOAT8_ROWS,
    MXFP4,
    Float8,
    QuantizedArray,
    Transposed,
    quantize,
)
from jax_ep.matmul import unquantized, weight_only
from jax_ep.matmul.gating import filled_biases, gated
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
CHOICES = {1: [[2, 0, -1]], 3: [[3, 0], [0, -1], [2, 3]], 17: [[0, 1, 2, 3, 4, 5]] * 17}
# The number of rows, which is no multiple of 8, and those of each group.
NUM_ROWS, SIZES = 37, [3, 0, 21, 0, 7, 2]
USED = sum(SIZES)
DTYPES = {jnp.bfloat16: 2**-7, jnp.float32: 2**-16}
ON_GPU = jax.default_backend() == "gpu"


def case(format, num_rows=None, matrices=2, with_bias=True, dtype=jnp.bfloat16, shared=True):
    """Draws rows, matrices and biases, and chooses groups; for None, they have SIZES rows.

    Also returns the output row, the input row and the group of each product, [3, products]. Rows
    past the last group are NaN.
    """
    rng = np.random.default_rng(num_rows or 0)
    if num_rows is None:
        groups, count = jnp.asarray(SIZES, jnp.int32), NUM_ROWS
        at = np.arange(USED)
        products = np.stack([at, at, np.arange(L).repeat(SIZES)])
    else:
        choices = np.asarray(CHOICES[num_rows], np.int32)
        groups, rows = chosen_groups(jnp.asarray(choices), L)
        count = num_rows if shared else (len(groups.table) - 1) * groups.height
        own, choice = np.nonzero(choices >= 0)
        at = np.asarray(rows)[own, choice]
        products = np.stack([at, own if shared else at, choices[own, choice]])
    x = rng.standard_normal((count, K))
    if num_rows is None:
        x[USED:] = np.nan
    # NumPy quantizes without compiling anything.
    numbers = rng.standard_normal((matrices, L, K, N)) / np.sqrt(K)
    stored = [jax.tree.map(jnp.asarray, quantize(each.astype(dtype), format)) for each in numbers]
    biases = [
        jnp.asarray(rng.standard_normal((L, N)), dtype) if with_bias else None for _ in stored
    ]
    return jnp.asarray(x, dtype), stored, biases, groups, products


def expected(x, stored, biases, products):
    """Computes products by each of the matrices, plus biases, in float64."""
    _, rows, groups = products
    wide, results = np.asarray(x).astype(np.float64)[rows], []
    for each, bias in zip(stored, biases, strict=True):
        # NumPy dequantizes without compiling anything, too.
        dense = jax.tree.map(np.asarray, each).dequantize(jnp.float32).astype(np.float64)
        result = np.stack([row @ dense[group] for row, group in zip(wide, groups, strict=True)])
        if bias is not None:
            result += np.asarray(bias).astype(np.float64)[groups]
        results.append(result)
    return results


def assert_close(got, want, dtype, axis=None):
    """Asserts that numbers differ by at most two roundings of the largest number along `axis`."""
    assert got.dtype == dtype and got.shape == want.shape
    got, want = (np.asarray(each).astype(np.float64) for each in (got, want))
    bound = 2 * DTYPES[dtype] * abs(want).max(axis, keepdims=True)
    assert (abs(got - want) <= bound).all()


@pytest.mark.parametrize("dtype", quick(list(DTYPES), jnp.bfloat16))
@pytest.mark.parametrize("implementation", quick([None, "xla", "loop"], None))
@pytest.mark.parametrize("num_rows", quick([None, *CHOICES], 3))
@pytest.mark.parametrize("name", quick([*FORMATS], "mxfp4"))
@pytest.mark.usefixtures("exact_matmuls")
def test_products(name, num_rows, implementation, dtype):
    for shared, matrices, gating in ((True, 2, swiglu), (False, 1, None), (False, 1, jax.nn.silu)):
        with_bias = gating is not None
        x, stored, biases, groups, products = case(
            FORMATS[name], num_rows, matrices, with_bias, dtype, shared
        )
        out = weight_only.product_of_stored(
            x, stored, biases, groups, num_rows, gating=gating, implementation=implementation
        )[0]
        numbers = expected(x, stored, biases, products)
        want = numbers[0] if gating is None else np.asarray(gating(*numbers))
        assert_close(out[products[0]], want, dtype, axis=1)
        if num_rows is None:
            assert out.shape == (NUM_ROWS, N) and not np.any(out[USED:])


@pytest.mark.parametrize("dtype", quick(list(DTYPES), jnp.bfloat16))
@pytest.mark.parametrize("implementation", quick([None, "xla", "loop"], None))
@pytest.mark.parametrize("name", quick([*FORMATS], "mxfp4"))
@pytest.mark.usefixtures("exact_matmuls")
def test_gated_products(name, implementation, dtype):
    x, stored, some, sizes, places = case(FORMATS[name], dtype=dtype)
    products = expected(x, stored, [None, None], places)
    for keep, biases in ((True, some), (False, [None, None])):
        want = [np.asarray(swiglu(*expected(x, stored, biases, places))), *products]
        options = dict(implementation=implementation, keep=keep, zero_unused=False)
        got = weight_only.product_of_stored(
            x, tuple(stored), biases, sizes, gating=swiglu, **options
        )
        assert len(got) == (3 if keep else 1)
        for mine, theirs in zip(got, want, strict=False):
            assert mine.shape == (NUM_ROWS, N)
            assert_close(mine[:USED], theirs, dtype)
        # XLA for GPUs may leave out the rounding of its products before it applies the function.
        if keep and not (ON_GPU and implementation == "xla"):
            again = jax.jit(gated, static_argnums=0)(
                swiglu, *got[1:], biases=filled_biases(biases), groups=sizes
            )
            np.testing.assert_array_equal(got[0][:USED], again[:USED])


def of_dequantized(x, stored, biases, gating, keep=False):
    """Computes the results for the rows of groups by products of dequantized matrices."""
    sizes = jnp.asarray(SIZES, jnp.int32)
    products = [
        unquantized.product_of_arrays(x, each.dequantize(x.dtype), sizes, None) for each in stored
    ]
    numbers = [product.astype(jnp.float32) for product in products]
    for i, bias in enumerate(biases):
        if bias is not None:
            # In float32, so that the gradient sums over rows in float32.
            wide = bias.astype(jnp.float32)
            numbers[i] += jnp.repeat(wide, sizes, axis=0, total_repeat_length=USED)
    result = numbers[0] if gating is None else gating(*numbers)
    return result.astype(x.dtype), *(products if keep else ())


def gradients(function, x, biases, cotangents):
    return jax.jit(lambda *args: jax.vjp(function, *args[:2])[1](args[2]))(x, biases, cotangents)


@pytest.mark.parametrize("dtype", quick(list(DTYPES), jnp.bfloat16))
@pytest.mark.parametrize("implementation", quick([None, "xla", "loop"], None))
@pytest.mark.parametrize("name", quick(list(FORMATS), "mxfp4"))
@pytest.mark.parametrize("keep", quick([False, True], False))
@pytest.mark.usefixtures("exact_matmuls")
def test_gradients_are_those_of_dequantized_matrices(name, keep, implementation, dtype):
    """Gradients of rows and biases must not depend on anything past the last group."""
    x, stored, biases, sizes, _ = case(FORMATS[name], with_bias=not keep, dtype=dtype)

    options = dict(implementation=implementation, keep=keep, zero_unused=not keep)

    def results(x, biases):
        return weight_only.product_of_stored(
            x, tuple(stored), biases, sizes, gating=swiglu, **options
        )

    def wanted(x, biases):
        return of_dequantized(x, stored, biases, swiglu, keep)

    grads = np.random.default_rng(1).standard_normal((3 if keep else 1, NUM_ROWS, N))
    grads[:, USED:] = np.nan
    grads = tuple(jnp.asarray(each, dtype) for each in grads)
    dx, dbiases = gradients(results, x, biases, grads)
    of_used = tuple(each[:USED] for each in grads)
    want_dx, want_dbiases = gradients(wanted, x[:USED], biases, of_used)
    assert_close(dx[:USED], want_dx, dtype)
    assert not np.any(dx[USED:]) and len(jax.tree.leaves(dbiases)) == (0 if keep else 2)
    for mine, theirs in zip(*map(jax.tree.leaves, (dbiases, want_dbiases)), strict=True):
        assert_close(mine, theirs, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("exact_matmuls")
def test_gradients_of_gradients(name):
    x, stored, biases, sizes, _ = case(FORMATS[name], dtype=jnp.float32)

    def product(x, biases):
        return weight_only.product_of_stored(x, stored, biases, sizes, gating=swiglu)[0]

    def wanted(x, biases):
        return of_dequantized(x, stored, biases, swiglu)[0]

    def squared(function, *args):
        first = jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1))(*args)
        return sum(jnp.sum(each**2) for each in jax.tree.leaves(first))

    got, want = (
        jax.tree.leaves(jax.jit(jax.grad(functools.partial(squared, f), (0, 1)))(x[:USED], biases))
        for f in (product, wanted)
    )
    assert len(got) == 3
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, jnp.float32)
        assert np.any(theirs)


def special_matrices(rng):
    """Returns matrices [2, K, N] in MXFP4, transposed, with every scale and every float4 number."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (2, N, K // 32, 2))
    codes = rng.permuted(codes, axis=-1)
    # The scale with the code 0 is 2^-127, and that with the code 254 is 2^127.
    scales = rng.permuted(np.arange(2 * N * K // 32) % 255).astype(np.uint8)
    scales = scales.reshape(2, N, K // 32)
    # A number of 2^128 or more overflows. It is replaced by 1.5 or less.
    sizes, of_number = codes & 7, scales[..., None]
    overflows = (of_number == 254) & (sizes > 3) | (of_number == 253) & (sizes > 5)
    codes = np.where(overflows, codes & 0b1011, codes)
    # A block whose scale is NaN is NaN even if all of its numbers are zero.
    scales[1, 0, -1] = 255
    codes[1, 0] &= 8
    codes = codes.reshape(2, N, K)
    values = codes[..., ::2] | codes[..., 1::2] << 4
    return QuantizedArray(values, scales.view(MXFP4.scale_dtype), Transposed.of(MXFP4))


def assert_selected(got, matrices):
    """Asserts that `got` [2, K, N] is the identity matrix times each of `matrices`."""
    want = matrices.dequantize(jnp.bfloat16).astype(np.float64)
    # Each product by a column with NaN has the NaN as a term.
    want = np.where(np.isnan(want).any(axis=1, keepdims=True), np.nan, want)
    got = np.asarray(got).astype(np.float64)
    # XLA for CPUs treats numbers below 2^-126 as zero. Only the scale 2^-127 with float4 numbers up
    # to 1.5, and 2^-126 with 0.5, make such numbers.
    flushed = (np.abs(want) < 2.0**-126) & (got == 0)
    np.testing.assert_array_equal(np.where(flushed, want, got), want)


@pytest.mark.slow
def test_every_scale_and_number_of_mxfp4():
    """Rows that each select one row of a matrix must give its numbers exactly."""
    gate, up = (special_matrices(np.random.default_rng(seed)) for seed in range(2))
    stored = [jax.tree.map(jnp.asarray, each) for each in (gate, up)]
    x = jnp.tile(jnp.eye(K, dtype=jnp.bfloat16), (2, 1))
    sizes = jnp.full(2, K, jnp.int32)
    out = weight_only.product_of_stored(x, stored[:1], [None], sizes)[0]
    assert_selected(out.reshape(2, K, N), gate)
    _, *products = weight_only.product_of_stored(
        x, tuple(stored), [None, None], sizes, gating=swiglu, keep=True, zero_unused=False
    )
    for each, matrices in zip(products, (gate, up), strict=True):
        assert_selected(each.reshape(2, K, N), matrices)

    groups, rows = chosen_groups(jnp.asarray([[0, 1]] * 8, jnp.int32), 2)

    @jax.jit
    def of_eight(x, stored):
        return weight_only.product_of_stored(x, [stored], [None], groups, 8)[0][rows.T]

    # The kernel for few rows multiplies once where no scale is above 1.
    not_above_1 = np.asarray(gate.scales).view(np.uint8) & 127
    small = dataclasses.replace(gate, scales=not_above_1.view(MXFP4.scale_dtype))
    for matrices in (gate, small):
        given = jax.tree.map(jnp.asarray, matrices)
        out = [of_eight(x[first : first + 8], given) for first in range(0, K, 8)]
        assert_selected(np.concatenate(out, axis=1), matrices)


def test_each_matrix_has_a_format_of_its_own():
    x, stored, _, groups, products = case(FORMATS["float8"], 3)
    _, (_, second), *_ = case(FORMATS["mxfp4"], 3)
    stored, none = [stored[0], second], [None, None]
    out = weight_only.product_of_stored(x, stored, none, groups, 3, gating=swiglu)[0]
    want = np.asarray(swiglu(*expected(x, stored, none, products)))
    assert_close(out[products[0]], want, jnp.bfloat16, axis=1)


def test_under_vmap_each_element_is_a_product_of_its_own():
    x, stored, biases, groups, (used, *_) = case(FORMATS["mxfp4"], 3)
    several = jnp.stack([x, -x, 2 * x])

    def product(x):
        return weight_only.product_of_stored(x, stored, biases, groups, 3, gating=swiglu)[0]

    out = jax.vmap(product)(several)
    # Other rows of the results are undefined.
    for each, x in zip(out, several, strict=True):
        np.testing.assert_array_equal(each[used], product(x)[used])


WEIGHT_ONLY, GATED, PRODUCT = KERNELS = (
    "weight_only_gated",
    "grouped_matmul_gated_mxfp4",
    "grouped_matmul_mxfp4",
)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "num_rows", "with_bias", "dtype", "kernels"),
    quick(
        {
            "few rows, float8": ("float8", 3, True, jnp.bfloat16, [WEIGHT_ONLY]),
            "few rows, bfloat16 scales": ("bfloat16 scales", 3, True, jnp.bfloat16, [WEIGHT_ONLY]),
            "few rows, float16": ("mxfp4", 3, True, jnp.float16, []),
            "17 rows, biases": ("mxfp4", 17, True, jnp.bfloat16, [GATED]),
            "groups": ("mxfp4", None, False, jnp.bfloat16, [WEIGHT_ONLY]),
            "groups, in order": ("mxfp4 in order", None, False, jnp.bfloat16, []),
            "groups, float8": ("float8", None, True, jnp.bfloat16, [WEIGHT_ONLY]),
        },
        "few rows, float8",
        "17 rows, biases",
    ),
)
def test_which_kernel_reads_matrices_as_they_are_stored(name, num_rows, with_bias, dtype, kernels):
    """If a kernel does so, there must be no array of dequantized numbers."""
    x, stored, biases, groups, _ = case(FORMATS[name], num_rows, 2, with_bias, dtype)

    def product(x, stored, biases, groups):
        return weight_only.product_of_stored(x, stored, biases, groups, num_rows, gating=swiglu)[0]

    traced = jax.jit(product).trace(x, stored, biases, groups)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert [kernel for line in calls for kernel in KERNELS if kernel in line] == kernels
    # For group sizes, a kernel computes the table of row tiles.
    tables = 1 if num_rows is None else 0
    assert len(calls) == len(kernels) + tables if kernels else len(calls) > tables
    shapes = re.findall(r"tensor<((?:\d+x)+)(?:bf16|f16|f32)>", text)
    largest = max(np.prod([int(n) for n in shape.split("x")[:-1]]) for shape in shapes)
    # Rows and results have fewer numbers than a matrix.
    assert (largest < K * N) == bool(kernels)


def test_rows_that_choose_groups_have_no_gradient():
    x, stored, biases, groups, _ = case(FORMATS["mxfp4"], 3)

    def loss(x):
        out = weight_only.product_of_stored(x, stored, biases, groups, 3, gating=swiglu)[0]
        return out.astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="a product of chosen groups has no gradient"):
        jax.grad(loss)(x)
