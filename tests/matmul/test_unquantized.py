"""Tests of the grouped matmuls of arrays besides `grouped_matmul`, and of their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as float8_operands
from support.float8 import swiglu
from support.kernels import lowered, needs_kernels
from support.matmuls import (
    AVAILABLE,
    GROUP_SIZES,
    NUM_ROWS,
    TOLERANCE,
    F,
    assert_close,
    expected,
    gradient_shapes,
    operands,
)
from support.selection import quick

from jax_ep import grouped_matmul
from jax_ep.matmul.gating import gate_gradient_of_all
from jax_ep.matmul.unquantized import (
    drhs_of_each,
    gate_gradient,
    gated_product_of_arrays,
    sum_of_products,
)
from jax_ep.runtime import jax_compat


@pytest.mark.parametrize("transpose_rhs", quick([False, True], True))
@pytest.mark.parametrize(("implementation", "dtype"), quick(AVAILABLE, AVAILABLE[0]))
def test_sum_of_products(implementation, dtype, transpose_rhs):
    sizes = GROUP_SIZES["empty groups"]
    both = [operands(NUM_ROWS, sizes, dtype, seed) for seed in range(2)]
    grad = both[0][3]
    want = [expected(lhs, rhs, sizes, grad) for lhs, rhs, _, _ in both]
    pairs = tuple(
        (lhs, rhs.transpose(0, 2, 1) if transpose_rhs else rhs) for lhs, rhs, _, _ in both
    )

    @jax.jit
    def sum_and_gradients(pairs, sizes, grad):
        out, vjp = jax.vjp(
            lambda pairs: sum_of_products(pairs, sizes, implementation, transpose_rhs), pairs
        )
        return out, *vjp(grad)

    out, dpairs = sum_and_gradients(pairs, jnp.asarray(sizes, jnp.int32), grad)
    assert_close(out, want[0][0] + want[1][0], dtype)
    assert not np.any(np.asarray(out)[sum(sizes) :])
    for (dlhs, drhs), (_, want_dlhs, want_drhs) in zip(dpairs, want, strict=True):
        assert_close(dlhs, want_dlhs, dtype)
        assert_close(drhs.transpose(0, 2, 1) if transpose_rhs else drhs, want_drhs, dtype)


@pytest.mark.parametrize(
    ("keep", "has_biases"), quick([(False, False), (True, True)], (True, True))
)
@pytest.mark.parametrize(("implementation", "dtype"), quick(AVAILABLE, AVAILABLE[0]))
def test_gated_product(implementation, dtype, keep, has_biases):
    """The gated product must equal, bit for bit, two products and a gate, also under vmap."""
    sizes = GROUP_SIZES["empty groups"]
    args = [operands(NUM_ROWS, sizes, dtype, seed) for seed in range(2)]
    lhs, rhs, group_sizes = args[0][0], (args[0][1], args[1][1]), args[0][2]
    shape = 2, rhs[0].shape[0], rhs[0].shape[2]
    of_both = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    biases = tuple(map(jnp.asarray, of_both)) if has_biases else None

    def fused(lhs, rhs, biases):
        return gated_product_of_arrays(
            lhs, rhs, group_sizes, swiglu, keep, implementation, biases=biases
        )

    def apart(lhs, rhs, biases):
        products = [grouped_matmul(lhs, r, group_sizes, implementation=implementation) for r in rhs]
        wide = [product.astype(jnp.float32) for product in products]
        for i, bias in enumerate(biases or ()):
            rows = jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=sum(sizes))
            wide[i] += jnp.pad(rows, ((0, NUM_ROWS - sum(sizes)), (0, 0)))
        hidden = swiglu(*wide).astype(dtype)
        return (hidden, *products) if keep else (hidden,)

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(function, *operands):
        out, vjp = jax.vjp(function, *operands)
        return out, vjp(tuple(args[1][3] for _ in out))

    (out, grads), (want, want_grads) = (
        values_and_gradients(f, lhs, rhs, biases) for f in (fused, apart)
    )
    for mine, theirs in zip(out, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    *of_operands, dbiases = grads
    for mine, theirs in zip(
        jax.tree.leaves(of_operands), jax.tree.leaves(want_grads[:2]), strict=True
    ):
        assert_close(mine, np.asarray(theirs).astype(np.float64), dtype)
    for mine, theirs in zip(dbiases or (), want_grads[2] or (), strict=True):
        assert_close(mine, np.asarray(theirs).astype(np.float64), "float32")
    both = jax.tree.map(lambda bias: jnp.stack([bias, -bias]), biases)
    mapped = jax.jit(jax.vmap(fused, (0, None, 0)))(jnp.stack([lhs, -lhs]), rhs, both)
    np.testing.assert_array_equal(np.asarray(mapped[0][0]), np.asarray(out[0]))


@pytest.mark.parametrize("sums_dtype", quick([None, "float32", "as the rows"], "float32"))
@pytest.mark.parametrize(("implementation", "dtype"), quick(AVAILABLE, AVAILABLE[0]))
def test_several_gradients_of_matrices(implementation, dtype, sums_dtype):
    """Several gradients, also if added to sums, must equal those of each cotangent alone."""
    sizes = GROUP_SIZES["empty groups"]
    lhs, _, group_sizes, grad = operands(NUM_ROWS, sizes, dtype, 0)
    live = (jnp.arange(NUM_ROWS) < sum(sizes))[:, None]
    lhs, grad = jnp.where(live, lhs, 0), jnp.where(live, grad, 0)
    sums = ()
    if sums_dtype is not None:
        kind = dtype if sums_dtype == "as the rows" else sums_dtype
        shape = 2, len(sizes), lhs.shape[1], grad.shape[1]
        sums = tuple(jnp.asarray(np.random.default_rng(1).normal(size=shape), kind))

    def together(lhs, sums, grads):
        return drhs_of_each(lhs, grads, group_sizes, implementation, sums or None)

    def alone(lhs, sums, grads):
        results = [drhs_of_each(lhs, (each,), group_sizes, implementation)[0] for each in grads]
        for i, total in enumerate(sums):
            wide = total.astype("float32") + results[i].astype("float32")
            results[i] = wide.astype(total.dtype)
        return tuple(results)

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(function):
        out, vjp = jax.vjp(function, lhs, sums, (grad, 2 * grad))
        dlhs, *others = vjp(out)
        return dlhs, (out, others)

    dlhs, got = jax.device_get(values_and_gradients(together))
    want_dlhs, want = jax.device_get(values_and_gradients(alone))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.any(each) for each in jax.tree.leaves(got))
    assert got[0][0].dtype == want[0][0].dtype
    assert_close(dlhs, want_dlhs.astype(np.float64), dtype)


@pytest.mark.parametrize("case", quick(["empty groups", "past R", "all empty"], "past R"))
@pytest.mark.parametrize("implementation, dtype", quick(AVAILABLE, AVAILABLE[0]))
def test_gate_gradient(implementation, dtype, case):
    """The gradient of a gating must be NumPy's in the rows of groups, whatever others hold."""
    rng, sizes = np.random.default_rng(0), GROUP_SIZES[case]
    used = min(sum(sizes), NUM_ROWS)
    arrays = [rng.standard_normal((NUM_ROWS, F)).astype(np.float32) for _ in range(3)]
    weights = rng.random(NUM_ROWS, np.float32)
    for each in (*arrays, weights):
        each[used:] = np.nan
    dhidden, gate, up = (jnp.asarray(each, dtype) for each in arrays)
    got = jax.jit(lambda *a: gate_gradient(swiglu, *a, implementation))(
        dhidden, (gate, up), jnp.asarray(weights), jnp.asarray(sizes, jnp.int32)
    )
    dgate, dup, hidden, products = float8_operands.gate_gradient(
        *(np.asarray(each[:used]).astype(np.float32) for each in (dhidden, gate, up)),
        weights[:used],
    )
    for result, want in zip(got, (hidden, dgate, dup, products.sum(axis=1)), strict=True):
        assert result.dtype == (dtype if result.ndim == 2 else jnp.float32)
        np.testing.assert_allclose(
            np.asarray(result[:used]).astype(np.float64), want, rtol=TOLERANCE[dtype], atol=1e-4
        )


def test_second_order_gradient_of_a_gate():
    rng = np.random.default_rng(0)
    dhidden, gate, up = (jnp.asarray(rng.standard_normal((6, 8)), jnp.float32) for _ in range(3))
    weights, sizes = jnp.asarray(rng.random(6), jnp.float32), jnp.asarray([4, 2], jnp.int32)

    def total(function):
        def of(dhidden, products, weights):
            results = function(dhidden, products, weights)
            return sum(jnp.sum(jnp.sin(each)) for each in results)

        return jax.jit(jax.grad(of, (0, 1, 2)))(dhidden, (gate, up), weights)

    got = total(lambda *a: gate_gradient(swiglu, *a, sizes, None))
    want = total(lambda *a: gate_gradient_of_all(swiglu, *a))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.skipif(jax_compat._dce_rules is None, reason="this JAX computes all results")
def test_a_gradient_that_nothing_uses_is_not_computed():
    lhs, _, group_sizes, grad = operands(NUM_ROWS, GROUP_SIZES["empty groups"], "float32", 0)

    def gradients(lhs, grad):
        return drhs_of_each(lhs, (grad, 2 * grad, 3 * grad), group_sizes, "loop")

    def alone(lhs, grad):
        return drhs_of_each(lhs, (2 * grad,), group_sizes, "loop")[0]

    def second(lhs, grad):
        return gradients(lhs, grad)[1]

    def products(function):
        return jax.jit(function).trace(lhs, grad).lower().as_text().count("dot_general")

    assert 0 < products(second) == products(alone) < products(gradients)
    got, want = (np.asarray(jax.jit(function)(lhs, grad)) for function in (second, alone))
    np.testing.assert_array_equal(got, want)


@needs_kernels
def test_a_sum_of_products_is_one_kernel_for_cuda():
    def sum_of_two(lhs, rhs, sizes):
        return sum_of_products(((lhs, rhs), (2 * lhs, rhs)), sizes, None)

    shapes = gradient_shapes(1000, 256, 128, 4, jnp.bfloat16)
    # There is one kernel for the sum, and one that divides the groups' rows into tiles.
    assert lowered(jax.jit(sum_of_two), *shapes).count("@mosaic_gpu") == 2
