"""Tests of the matrices' gradient kernel in Pallas' GPU interpreter, with race detection."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import matmuls
from support.selection import quick
from support.simulator import interpret, simulated

from pallas_kernels.matmul.drhs import DrhsTiles, drhs_of_each


def operands(num_rows, sizes, depth, width):
    lhs, _, group_sizes, grad = matmuls.operands(
        num_rows, sizes, "bfloat16", matrix_shape=(depth, width)
    )
    return lhs, grad, group_sizes


def run(lhs, grad, sizes, tiles):
    return interpret(lambda: drhs_of_each(lhs, [grad], sizes, tiles=tiles, num_blocks=2))[0]


def reference(lhs, grad, sizes):
    matrices = np.zeros((len(sizes), lhs.shape[1], grad.shape[1]))
    return matmuls.expected(lhs, matrices, sizes, grad)[2]


def assert_close(got, want):
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 * max(1, np.nanmax(abs(want))))


# Sizes that are negative, or larger than the number of rows, are cut.
CASES = {
    # Groups lie within a step, span several steps, are empty, or start off a multiple of 8 rows.
    "groups of all kinds": ([3, 0, 70, 21], [3, 0, 70, 21], 136, 128, DrhsTiles(128, 4)),
    # The gradient of a group, [192, 128], is one and a half tiles high. A tile has 64 columns, so
    # there are two columns of tiles, and each is a band: the blocks compute one after the other.
    "two bands": ([0, 73, 0], [0, 73, 0], 80, 192, DrhsTiles(64, 4)),
    # There are fewer steps than the loader starts copies of before it clears the first one.
    "few steps": ([5], [5], 64, 64, DrhsTiles(64, 6)),
    "no steps": ([0, 0, 0], [0, 0, 0], 64, 64, DrhsTiles(64, 6)),
    "negative": ([-5, 10], [0, 10], 64, 64, DrhsTiles(64, 6)),
    "too large": ([30, 2**31 - 1, 2**31 - 1], [30, 34, 0], 64, 64, DrhsTiles(64, 6)),
}


@simulated
@pytest.mark.parametrize(("sizes", "cut", "num_rows", "depth", "tiles"), quick(CASES, "few steps"))
def test_drhs(sizes, cut, num_rows, depth, tiles):
    lhs, grad, _ = operands(num_rows, cut, depth, 128)
    got = run(lhs, grad, jnp.asarray(sizes, jnp.int32), tiles)
    assert_close(got, reference(lhs, grad, cut))


@simulated
@pytest.mark.slow
def test_several_gradients_and_sums():
    """Several gradients, also added to sums, must equal those computed one by one, bit for bit."""
    lhs, grad, sizes = operands(136, [3, 0, 70, 21], 192, 128)
    grads, options = [grad, -grad, grad * 2], dict(tiles=DrhsTiles(64, 4), num_blocks=2)
    alone = [np.asarray(run(lhs, each, sizes, options["tiles"])) for each in grads]
    got = interpret(lambda: drhs_of_each(lhs, grads, sizes, **options))
    for mine, each in zip(got, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), each)
        assert np.any(each)
    sums = np.random.default_rng(1).standard_normal((3, 4, 192, 128))
    sums = [jnp.asarray(each, jnp.bfloat16) for each in sums]
    added = interpret(lambda: drhs_of_each(lhs, grads, sizes, sums, **options))
    for mine, total, each in zip(added, sums, alone, strict=True):
        want = np.asarray(total).astype(np.float32) + each.astype(np.float32)
        np.testing.assert_array_equal(np.asarray(mine), want.astype(jnp.bfloat16))
