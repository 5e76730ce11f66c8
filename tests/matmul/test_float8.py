"""Grouped matmuls of float8: every implementation against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import reference
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, quantize
from jax_ep.matmul import float8
from jax_ep.matmul.api import IMPLEMENTATIONS
from jax_ep.matmul.backend import Problem
from pallas_kernels.matmul.row_blocks import row_blocks

SIZES = [3, 0, 150, 21]
ROWS = 200  # of which the last 26 are of no group
K, N = 256, 384
HERE = IMPLEMENTATIONS.available(Problem((K, N), float8.DTYPE, jax.default_backend(), ROWS))
implementations = pytest.mark.parametrize("implementation", [None, *HERE])


def operands():
    """Rows [200, 256], of very different sizes and NaN past the last group, matrices, sizes."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((ROWS, K)) * np.exp(3 * rng.standard_normal((ROWS, 1)))
    rows[sum(SIZES) :] = np.nan
    matrices = rng.standard_normal((2, len(SIZES), K, N))
    rows, matrices = (jnp.asarray(x, jnp.bfloat16) for x in (rows, matrices))
    return float8.quantize_rows(rows), list(matrices), jnp.asarray(SIZES, jnp.int32)


def numbers(array):
    return np.asarray(array.dequantize(jnp.float32)).astype(np.float64)


def products(rows, matrices):
    live = numbers(rows)[: sum(SIZES)]
    return [reference.grouped_matmul(live, numbers(each), np.array(SIZES)) for each in matrices]


def assert_within_bound(got, want, magnitudes, rounding):
    """Asserts the bound that `jax_ep.matmul.float8` states, and the result's rounding."""
    got = np.asarray(got).astype(np.float64)[: len(want)]
    bound = 2.0**-12 * magnitudes + rounding * np.abs(want) + 1e-30
    assert (np.abs(got - want) <= bound).all()


def magnitudes_of(rows, matrices):
    live = np.abs(numbers(rows)[: sum(SIZES)])
    return [
        reference.grouped_matmul(live, np.abs(numbers(each)), np.array(SIZES)) for each in matrices
    ]


@implementations
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sum_of_products(implementation, dtype):
    rows, matrices, sizes = operands()
    quantized = [float8.quantize_matrices(each, implementation) for each in matrices]
    pairs = [(rows, each.transposed) for each in quantized]
    out = jax.jit(lambda pairs, sizes: float8.product(pairs, sizes, dtype, implementation))(
        pairs, sizes
    )
    as_they_are = [each.matrices for each in quantized]
    assert out.dtype == dtype and out.shape == (ROWS, N)
    assert not np.asarray(out[sum(SIZES) :]).any()
    rounding = float(jnp.finfo(dtype).eps)
    magnitudes = sum(magnitudes_of(rows, as_they_are))
    assert_within_bound(out, sum(products(rows, as_they_are)), magnitudes, rounding)


@implementations
def test_gated_product(implementation):
    rows, matrices, sizes = operands()
    quantized = [float8.quantize_matrices(each, implementation) for each in matrices]

    def gating(gate, up):
        return jax.nn.silu(gate) * up

    got = jax.jit(
        lambda rows, pair, sizes: float8.gated_product(
            rows, pair, sizes, gating, True, implementation
        )
    )(rows, tuple(each.transposed for each in quantized), sizes)
    gate, up = products(rows, [each.matrices for each in quantized])
    hidden = gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up
    assert [each.format for each in got] == [FLOAT8_ROWS] * 3
    for mine, want in zip(got, (hidden, gate, up), strict=True):
        scales = np.repeat(np.asarray(mine.scales)[: len(want)], 128, axis=1)
        error = np.abs(numbers(mine)[: len(want)] - want)
        # e4m3 rounds by up to 2^-4 of a number, or 2^-10 of a scale.
        assert (error <= 1.02 * np.maximum(2**-4 * np.abs(want), 2**-9 * scales)).all()


@implementations
@pytest.mark.parametrize("count", [1, 2])
def test_gradient_of_matrices(implementation, count):
    rows, _, sizes = operands()
    grads = jax.random.normal(jax.random.key(1), (count, ROWS, N), jnp.bfloat16)
    grads = grads.at[:, sum(SIZES) :].set(jnp.nan)
    blocks, groups = row_blocks(sizes, ROWS)
    _, lhs = float8.transpose_rows(rows, blocks, by_column=True, implementation=implementation)
    of_grads = [
        float8.transpose_rows(each, blocks, by_column=False, implementation=implementation)[1]
        for each in grads
    ]
    got = float8.drhs_of_each(lhs, of_grads, groups, jnp.float32, implementation)
    assert len(got) == count
    left = numbers(rows)
    ends = np.cumsum(SIZES)
    for mine, grad in zip(got, np.asarray(grads).astype(np.float64), strict=True):
        for group, (start, end) in enumerate(zip(ends - SIZES, ends, strict=True)):
            want = left[start:end].T @ grad[start:end]
            size = np.abs(left[start:end]).T @ np.abs(grad[start:end])
            # Both operands are rounded by up to 2^-4, or 2^-10 of the scale of their block.
            assert (np.abs(np.asarray(mine[group]) - want) <= 0.15 * size + 1e-30).all()
            norm = np.linalg.norm(want)
            assert np.linalg.norm(np.asarray(mine[group]) - want) <= 0.06 * norm


@implementations
def test_matrices_in_both_orders_have_the_same_numbers(implementation):
    matrices = jax.random.normal(jax.random.key(0), (2, K, N), jnp.float32)
    both = float8.quantize_matrices(matrices, implementation)
    assert both.matrices.format == both.transposed.format == FLOAT8_MATRICES
    np.testing.assert_array_equal(numbers(both.matrices), numbers(both.transposed).swapaxes(1, 2))
    want = quantize(matrices, FLOAT8_MATRICES)
    assert np.asarray(both.matrices.values).tobytes() == np.asarray(want.values).tobytes()


@implementations
def test_rows_are_quantized_as_they_lie_too(implementation):
    rows, _, sizes = operands()
    source = rows.dequantize(jnp.bfloat16)
    blocks, _ = row_blocks(sizes, ROWS)
    kept, _ = float8.transpose_rows(
        source, blocks, by_column=False, keep_order=True, implementation=implementation
    )
    want = float8.quantize_rows(source)
    live = sum(SIZES)
    assert np.asarray(kept.values)[:live].tobytes() == np.asarray(want.values)[:live].tobytes()
    np.testing.assert_array_equal(np.asarray(kept.scales)[:live], np.asarray(want.scales)[:live])


@implementations
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_stay_in_their_row(implementation, value):
    rows, matrices, sizes = operands()
    source = rows.dequantize(jnp.bfloat16)[: sum(SIZES)].at[5, 7].set(value)
    matrix = float8.quantize_matrices(matrices[0], implementation).transposed
    out = float8.product(
        [(float8.quantize_rows(source), matrix)], sizes, jnp.float32, implementation
    )
    is_nan = np.isnan(np.asarray(out)).any(axis=1)
    assert is_nan.nonzero()[0].tolist() == [5]


@pytest.mark.parametrize("scale", [0.0, 1e-37, 1e30])
def test_zeros_and_numbers_of_any_size(scale):
    rows, matrices, sizes = operands()
    tiny = float8.quantize_rows(jnp.full((ROWS, K), scale, jnp.float32))
    matrix = float8.quantize_matrices(jnp.ones_like(matrices[0], jnp.float32)).transposed
    out = np.asarray(float8.product([(tiny, matrix)], sizes, jnp.float32))[: sum(SIZES)]
    np.testing.assert_allclose(out, K * scale, rtol=2**-4, atol=K * 2.0**-126)


def test_rounding_survives_in_one_program():
    """XLA may compute with more precision than asked for, and take a rounding away."""
    x = jax.random.normal(jax.random.key(0), (8, K), jnp.float32)
    rounded = jax.jit(lambda x: quantize(x, FLOAT8_ROWS).dequantize(jnp.float32))(x)
    np.testing.assert_array_equal(rounded, quantize(x, FLOAT8_ROWS).dequantize(jnp.float32))
    assert (np.asarray(rounded) != np.asarray(x)).mean() > 0.9
