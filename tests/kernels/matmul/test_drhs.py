"""Tests of the matrices' gradient kernel in Pallas' GPU interpreter, with race detection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import matmuls
from support.kernels import needs_kernels
from support.simulator import interpret, simulated

from jax_ep.matmul import pallas as backend
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


@simulated
@pytest.mark.parametrize(
    ("num_rows", "sizes", "depth", "tiles"),
    [
        # Groups lie within a step, span several steps, are empty, or start off a multiple of 8
        # rows.
        (136, [3, 0, 70, 21], 128, DrhsTiles(128, 3)),
        # The gradient of a group, [192, 128], is one and a half tiles high. A tile has 64 columns,
        # so there are two columns of tiles, and each is a band: the blocks compute one after the
        # other.
        (80, [0, 73, 0], 192, DrhsTiles(64, 3)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_drhs(num_rows, sizes, depth, tiles):
    lhs, grad, group_sizes = operands(num_rows, sizes, depth, 128)
    assert_close(run(lhs, grad, group_sizes, tiles), reference(lhs, grad, sizes))


@simulated
@pytest.mark.parametrize("num_stages", [3, 4, 6])
@pytest.mark.slow
def test_edges(num_stages):
    """The rows of other groups, here NaN, must not enter a group's sum."""
    # Some groups have one row or none, some lie within a step of 64 rows, and some end at a
    # multiple of 64 or of 8.
    sizes = [1, 63, 64, 1, 0, 70, 1, 65, 0, 47]
    lhs, grad, group_sizes = operands(320, sizes, 64, 64)
    ends = np.cumsum(sizes)
    for poisoned in (5, 7):
        rows = slice(ends[poisoned] - sizes[poisoned], ends[poisoned])
        lhs, grad = (array.at[rows].set(np.nan) for array in (lhs, grad))
    got = np.asarray(run(lhs, grad, group_sizes, DrhsTiles(64, num_stages))).astype(np.float64)
    want = reference(lhs, grad, sizes)
    np.testing.assert_array_equal(np.isnan(got).all((1, 2)), np.isin(range(len(sizes)), (5, 7)))
    assert_close(got, want)


@simulated
@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        # There are fewer steps than the loader starts copies of before it clears the first one. One
        # of the two blocks has no output tile.
        ([5], [5]),
        ([0, 0, 0], [0, 0, 0]),
        # These sizes are negative, or larger than the number of rows.
        ([-5, 10], [0, 10]),
        ([30, 2**31 - 1, 2**31 - 1], [30, 34, 0]),
    ],
)
@pytest.mark.slow
def test_few_steps_and_sizes_that_cannot_be(sizes, cut):
    lhs, grad, group_sizes = operands(64, cut, 64, 64)
    got = run(lhs, grad, jnp.asarray(sizes, jnp.int32), DrhsTiles(64, 6))
    assert_close(got, reference(lhs, grad, cut))


@simulated
@pytest.mark.slow
def test_several_gradients():
    """Several gradients at once must equal those computed one by one, bit for bit."""
    lhs, grad, sizes = operands(136, [3, 0, 70, 21], 192, 128)
    grads, options = [grad, -grad, grad * 2], dict(tiles=DrhsTiles(64, 3), num_blocks=2)
    got = interpret(lambda: drhs_of_each(lhs, grads, sizes, **options))
    for mine, each in zip(got, grads, strict=True):
        alone = run(lhs, each, sizes, options["tiles"])
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(alone))
        assert np.any(np.asarray(alone))


@simulated
@pytest.mark.slow
def test_gradients_are_added_to_sums():
    lhs, grad, sizes = operands(136, [3, 0, 70, 21], 192, 128)
    rng, tiles = np.random.default_rng(1), DrhsTiles(64, 3)
    sums = [jnp.asarray(rng.standard_normal((4, 192, 128)), jnp.bfloat16) for _ in range(2)]
    options = dict(tiles=tiles, num_blocks=2)
    got = interpret(lambda: drhs_of_each(lhs, [grad, -grad], sizes, sums, **options))
    gradient = np.asarray(run(lhs, grad, sizes, tiles)).astype(np.float32)
    for mine, total, sign in zip(got, sums, (1, -1), strict=True):
        want = np.asarray(total).astype(np.float32) + sign * gradient
        np.testing.assert_array_equal(np.asarray(mine), want.astype(jnp.bfloat16))


@needs_kernels
def test_tiles_chosen_for_many_shapes_fit_the_kernel():
    """The chosen tiles must divide the output and fit shared memory, which lowering checks."""
    for shape in ((7168, 2048), (64, 192), (192, 320), (128, 64)):
        tiles = backend.drhs_tiles(shape[1])
        assert shape[1] % tiles.block_n == 0
        args = [
            jax.ShapeDtypeStruct((1000, shape[0]), jnp.bfloat16),
            jax.ShapeDtypeStruct((1000, shape[1]), jnp.bfloat16),
            jax.ShapeDtypeStruct((4,), jnp.int32),
        ]
        text = jax.jit(backend.BACKEND.drhs).trace(*args).lower(lowering_platforms=("cuda",))
        assert "@mosaic_gpu" in text.as_text()


def test_tiles_that_cannot_be_are_refused():
    for block_n in (0, 96, 512):
        with pytest.raises(ValueError, match="block_n must be 64, 128, 192 or 256, but"):
            DrhsTiles(block_n, 3)
    with pytest.raises(ValueError, match="num_stages must be at least 3"):
        DrhsTiles(128, 2)
    lhs, grad, sizes = operands(64, [3, 0], 64, 192)
    with pytest.raises(ValueError, match="a multiple of block_n=128 columns, but has 192"):
        drhs_of_each(lhs, [grad], sizes, tiles=DrhsTiles(128, 3), num_blocks=2)
