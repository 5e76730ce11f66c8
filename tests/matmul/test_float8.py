"""Tests of float8 grouped matmuls: every implementation against the reference in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as operands
from support.float8 import KINDS, assert_encodes, assert_gated_within_bound, assert_within_bound
from support.selection import quick

from jax_ep import reference
from jax_ep.formats import FLOAT8_MATRICES, quantize
from jax_ep.matmul import float8
from jax_ep.matmul.backend import Problem
from jax_ep.matmul.primitives import IMPLEMENTATIONS, default_platform
from pallas_kernels.matmul.row_blocks import row_blocks

SIZES = [3, 0, 150, 21]
# The last 26 of the 200 rows are in no group.
ROWS, LIVE = 200, sum(SIZES)
K, N = 256, 384
HERE = IMPLEMENTATIONS.available(Problem((K, N), float8.DTYPE, default_platform(), ROWS, True))
implementations = pytest.mark.parametrize("implementation", quick([None, *HERE], None, HERE[0]))
here = pytest.mark.parametrize("implementation", quick(HERE, HERE[0]))
GROUP_SIZES = np.asarray(SIZES, np.int32)


def rows_of(kind, width=K, seed=0):
    """Returns rows [200, width] of a kind of `KINDS`, with NaN past the last group."""
    x = operands.numbers(kind, (LIVE, width), seed)
    return np.concatenate([x, np.full((ROWS - LIVE, width), np.nan, np.float32)])


def matrices_of(kind, seed=1):
    return operands.numbers(kind, (len(SIZES), K, N), seed)


def of_either_kind(kind):
    """Returns pairs of `KINDS` for the two operands: one operand of `kind`, the other normal."""
    return {(kind, "random"), ("random", kind)}


@functools.cache
def product(implementation, dtype):
    return jax.jit(
        lambda pairs, sizes: float8.product_of_float8(
            pairs, sizes, dtype, implementation=implementation
        )
    )


@here
@pytest.mark.parametrize("kind", quick(KINDS, "skewed", "infinity"))
def test_product(implementation, kind):
    for of_rows, of_matrices in of_either_kind(kind):
        lhs, rhs = rows_of(of_rows), matrices_of(of_matrices)
        pair = operands.rows(lhs), operands.transposed_matrices(rhs)
        out = product(implementation, jnp.float32)([pair], GROUP_SIZES)
        largest = None
        if implementation == "pallas":
            transposed = operands.largest_of_columns(rhs.swapaxes(1, 2))
            largest = operands.largest_of_columns(lhs), transposed.swapaxes(1, 2)
        assert_within_bound(out, reference.float8_matmul, lhs, rhs, sizes=SIZES, largest=largest)
        assert not np.asarray(out[LIVE:]).any()


@implementations
def test_sum_of_products(implementation):
    """The sum of two products must be right, as in the gradient of a gated MLP's rows."""
    grads = [rows_of("skewed", N, seed) for seed in (2, 3)]
    rhs = [matrices_of("random", seed) for seed in (4, 5)]
    pairs = [
        (operands.rows(grad), float8.quantize_matrices(jnp.asarray(each), implementation).matrices)
        for grad, each in zip(grads, rhs, strict=True)
    ]
    out = product(implementation, jnp.bfloat16)(pairs, GROUP_SIZES)
    assert out.dtype == jnp.bfloat16 and out.shape == (ROWS, K)

    def both(*arrays):
        *arrays, sizes = arrays
        pairs = zip(arrays[:2], arrays[2:], strict=True)
        return sum(reference.float8_matmul(x, w.swapaxes(1, 2), sizes) for x, w in pairs)

    assert_within_bound(out, both, *grads, *rhs, sizes=SIZES)


@functools.cache
def gated(implementation):
    return jax.jit(
        lambda rows, pair, sizes: float8.gated_product_of_float8(
            rows, pair, sizes, operands.swiglu, True, implementation
        )
    )


@here
@pytest.mark.parametrize("kind", quick(KINDS, "skewed", "nan"))
def test_gated_product(implementation, kind):
    lhs, rhs = rows_of(kind), [matrices_of("random", seed) for seed in (1, 2)]
    pair = tuple(map(operands.transposed_matrices, rhs))
    got = gated(implementation)(operands.rows(lhs), pair, GROUP_SIZES)
    live = [jax.tree.map(lambda part: part[:LIVE], each) for each in got]
    assert len(live) == 3
    assert_gated_within_bound(live, lhs[:LIVE], rhs, SIZES)


@here
@pytest.mark.parametrize("dtype", quick([jnp.bfloat16, jnp.float32], jnp.bfloat16))
@pytest.mark.parametrize(
    ("kind", "of_grad", "gating"),
    quick(
        [
            *((kind, "random", operands.swiglu) for kind in ("skewed", "zero", "nan")),
            *(("random", kind, operands.swiglu) for kind in ("infinity", "huge")),
            ("random", "random", operands.shifted),
        ],
        ("nan", "random", operands.swiglu),
        ("random", "random", operands.shifted),
    ),
)
def test_gate_gradient(implementation, kind, of_grad, gating, dtype):
    """The gradient of the gate must be quantized correctly; NaN must stay in its own rows."""
    blocks, _ = row_blocks(GROUP_SIZES, ROWS)
    dhidden = np.asarray(jnp.asarray(rows_of(of_grad, N, 3), dtype).astype(jnp.float32))
    gate, up = (operands.rows(rows_of(each, N, i)) for i, each in enumerate((kind, "random")))
    weights = np.random.default_rng(0).random(ROWS, np.float32)
    got = jax.jit(lambda *arrays: float8.gate_gradient(gating, *arrays, implementation))(
        jnp.asarray(dhidden, dtype), (gate, up), weights, blocks
    )
    numbers = [np.asarray(each.dequantize(jnp.float32)) for each in (gate, up)]
    live = [each[:LIVE] for each in (dhidden, *numbers, weights)]
    operands.assert_gate_gradient(got, operands.gate_gradient(*live, gating), SIZES)


@here
def test_gate_gradient_is_rounded_to_bfloat16_first(implementation):
    """XLA must not remove this rounding within one program as excess precision."""
    blocks, _ = row_blocks(GROUP_SIZES, ROWS)
    dhidden = jnp.asarray(rows_of("random", N, 3), jnp.bfloat16)
    pre = tuple(operands.rows(rows_of("random", N, seed)) for seed in (0, 1))
    weights = np.random.default_rng(0).random(ROWS, np.float32)
    got = jax.jit(
        lambda *arrays: float8.gate_gradient(lambda a, b: a * b, *arrays, implementation)
    )(dhidden, pre, weights, blocks)
    weighted = np.asarray(dhidden).astype(np.float32) * weights[:, None]
    for (rows, _), other in zip(got.dpre, pre[::-1], strict=True):
        numbers = weighted * np.asarray(other.dequantize(jnp.float32))
        rounded = numbers.astype(jnp.bfloat16).astype(np.float32)[:LIVE]
        assert_encodes([np.asarray(part)[:LIVE] for part in (rows.values, rows.scales)], rounded)


@implementations
def test_a_row_that_shares_a_larger_scale_keeps_its_nan(implementation):
    """A NaN in a row of zeros must survive next to a row of huge numbers."""
    x = np.zeros((ROWS, 128), np.float32)
    x[0], x[1, 5] = 1e12, np.nan
    blocks, _ = row_blocks(GROUP_SIZES, ROWS)
    rows = operands.rows(x)
    _, turned = float8.transpose_rows(rows, blocks, implementation=implementation)
    assert np.isnan(np.asarray(turned.values, np.float32)[5, 1])


@here
@pytest.mark.parametrize("kind", quick(KINDS, "skewed", "nan"))
def test_gradient_of_matrices(implementation, kind):
    _, groups = row_blocks(GROUP_SIZES, ROWS)
    for of_rows, of_grad in of_either_kind(kind):
        lhs = rows_of(of_rows)
        grads = [rows_of(of_grad, N, seed) for seed in (1, 2)]
        got = float8.drhs_of_each(
            operands.transposed_rows(lhs, SIZES),
            [operands.transposed_rows(grad, SIZES) for grad in grads],
            groups,
            jnp.float32,
            implementation,
        )
        for mine, grad in zip(got, grads, strict=True):
            largest = None
            if implementation == "pallas":
                largest = [operands.largest_of_rows(each, SIZES) for each in (lhs, grad)]
            compute = reference.float8_matmul_drhs
            assert_within_bound(mine, compute, lhs, grad, sizes=SIZES, largest=largest)


@here
@pytest.mark.parametrize("dtype", quick([jnp.bfloat16, jnp.float32], jnp.bfloat16))
def test_gradients_of_matrices_are_added_to_sums(implementation, dtype):
    _, groups = row_blocks(GROUP_SIZES, ROWS)
    lhs, *grads = (
        operands.transposed_rows(rows_of("random", width, seed), SIZES)
        for seed, width in enumerate((K, N, N))
    )
    arguments = lhs, grads, groups, dtype, implementation
    gradients = float8.drhs_of_each(*arguments)
    rng = np.random.default_rng(3)
    sums = [jnp.asarray(rng.normal(size=each.shape), dtype) for each in gradients]
    got = float8.drhs_of_each(*arguments, sums)
    for mine, total, gradient in zip(got, sums, gradients, strict=True):
        want = np.asarray(total).astype(np.float32) + np.asarray(gradient).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(mine), want.astype(dtype))


@here
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("kind", quick(["skewed", "nan"], "nan"))
def test_transposed_rows_share_scales(implementation, kind, is_quantized):
    x = rows_of(kind)
    blocks, _ = row_blocks(GROUP_SIZES, ROWS)
    source, want = jnp.asarray(x), operands.transposed_rows(x, SIZES)
    if is_quantized:
        source = operands.rows(x)
        want = operands.transposed_quantized_rows(source, SIZES)
    kept, got = float8.transpose_rows(
        source, blocks, return_rows=not is_quantized, implementation=implementation
    )
    if not is_quantized:
        # The rows are quantized as they lie, too.
        in_order = float8.quantize_rows(source)
        for mine, part in ((kept.values, in_order.values), (kept.scales, in_order.scales)):
            assert np.asarray(mine)[:LIVE].tobytes() == np.asarray(part)[:LIVE].tobytes()
    (values, scales), (wanted, wanted_scales) = (
        operands.live_blocks(each, SIZES) for each in (got, want)
    )
    np.testing.assert_allclose(scales, wanted_scales, rtol=2**-21)
    values, expected = (each.astype(np.float32) for each in (values, wanted))
    np.testing.assert_allclose(values, expected, rtol=2**-3, atol=2**-9)
    # XLA on GPUs divides approximately, so a quotient halfway between two float8 numbers may be
    # rounded to either of them.
    equal = (values == expected) | np.isnan(expected)
    assert equal.all() if jax.default_backend() == "cpu" else equal.mean() > 0.999


@implementations
@pytest.mark.parametrize("dtype", quick(["bfloat16", "float16", "float32"], "bfloat16"))
@pytest.mark.parametrize("kind", quick(["random", "zero", "nan", "subnormal"], "zero", "nan"))
def test_matrices_in_both_orders_have_the_same_numbers(implementation, kind, dtype):
    matrices = jnp.asarray(operands.numbers(kind, (2, K, N)), dtype)
    both = float8.quantize_matrices(matrices, implementation)
    assert both.matrices.format == both.transposed.format == FLOAT8_MATRICES
    want = quantize(matrices, FLOAT8_MATRICES)
    for part in ("values", "scales"):
        mine, turned, wanted = (np.asarray(getattr(each, part)) for each in (*both, want))
        assert mine.swapaxes(1, 2).tobytes() == turned.tobytes()
        assert mine.tobytes() == wanted.tobytes()
