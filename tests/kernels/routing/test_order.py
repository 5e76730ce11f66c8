"""Tests of exact sums of float32 numbers, and of the functions that order groups of equal sums.

The expected values are computed in float64.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.routing import order


class Arrays:
    def zero(self):
        return jnp.float32(0)

    def call(self, function, *operands):
        return function(*operands)

    def where_finite(self, of, value):
        return jnp.where(jnp.isfinite(of), value, 0.0)

    def where_positive(self, of, value, other):
        return jnp.where(of > 0, value, other)


add = jax.jit(functools.partial(order.add, Arrays()))


def test_a_sum_keeps_what_float32_rounds_off():
    """A sum of two numbers must be exact, as (high, low): the float32 sum and its rounding error.

    This must also hold if XLA compiles the sum, and if the numbers almost cancel.
    """
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1000)) * 10.0 ** rng.integers(-2, 3, (2, 1000))
    a[:100] = -b[:100] * (1 + 1e-6)
    a, b = a.astype(np.float32), b.astype(np.float32)
    exact = a.astype(np.float64) + b
    high, low = add((a, np.zeros_like(a)), (b, np.zeros_like(b)))
    np.testing.assert_array_equal(high, exact.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(low), exact - np.asarray(high))
    four = add((high, low), (b, np.float32(1e-9) * b))
    total = exact + b + (np.float32(1e-9) * b).astype(np.float64)
    np.testing.assert_array_equal(four[0], total.astype(np.float32))


def test_sums_that_are_not_finite_have_nothing_rounded_off():
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    for high, low in (
        add((values, np.zeros(3, np.float32)), (np.ones(3, np.float32),) * 2),
        add((values, np.zeros(3, np.float32)), (values, np.zeros(3, np.float32))),
    ):
        np.testing.assert_array_equal(high, values)
        np.testing.assert_array_equal(low, 0)


@pytest.mark.parametrize("scores", order.OF_TWO)
def test_groups_are_compared_by_what_grows_with_the_sum_of_two_scores(scores):
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(size=(2, 50)) * 3 + shift for shift in (-200, 0, 60)], 1)
    logits = logits.astype(np.float32)
    a, b = logits.astype(np.float64)
    want = {
        "logit": a + b,
        "softmax": np.logaddexp(a, b),
        "sqrt_softplus": np.logaddexp(a / 2, b / 2),
        "sigmoid": np.logaddexp(-np.logaddexp(0, -a), -np.logaddexp(0, -b))
        - np.logaddexp(-np.logaddexp(0, a), -np.logaddexp(0, b)),
    }[scores]
    # Compute the function as the kernel does: by operations that `Elementwise` can emit.
    function = Elementwise(order.OF_TWO[scores], 2)
    np.testing.assert_allclose(function.function(*logits), want, rtol=1e-6, atol=1e-6)
    lowest = order.OF_TWO[scores](*np.full((2, 1), -np.inf, np.float32))
    assert np.isfinite(lowest) and lowest < np.min(want)


def test_a_sum_of_two_lies_within_its_bounds():
    rng = np.random.default_rng(0)
    highs = rng.normal(size=(2, 1000)) * 10.0 ** rng.integers(-37, 36, (2, 1000))
    highs[1, :500] = -highs[0, :500] * (1 + 1e-7)
    highs = highs.astype(np.float32)
    half_ulps = np.spacing(np.abs(highs)).astype(np.float64) / 2
    total, lower, upper = jax.jit(functools.partial(order.bounds_of_two, Arrays()))(*highs)
    exact = highs.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(total, exact, rtol=2**-23, atol=1e-37)
    assert np.all(np.float64(lower) < exact - half_ulps.sum(axis=0))
    assert np.all(np.float64(upper) > exact + half_ulps.sum(axis=0))
    infinite = np.float32([np.inf, -np.inf])
    for bound in order.bounds_of_two(Arrays(), infinite, infinite):
        np.testing.assert_array_equal(bound, infinite)
