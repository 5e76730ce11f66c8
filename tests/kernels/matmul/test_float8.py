"""The float8 matmuls and quantization in Pallas' GPU interpreter, with race detection."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import simulator
from support.simulator import interpret, simulated

from jax_ep.matmul import float8 as op
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul import float8, quantize
from pallas_kernels.matmul.float8 import Float8Tiles
from pallas_kernels.matmul.quantize import Scaled
from pallas_kernels.matmul.row_blocks import TransposedRows, row_blocks

SIZES = [3, 0, 70, 21]
ROWS = 136  # of which the last 42 are of no group
TILES = Float8Tiles(num_stages=2, band=2)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


@functools.cache
def operands(width):
    """Rows [136, 256], NaN past the last group, and two arrays of matrices [4, width, 256]."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((ROWS, 256)) * np.exp(2 * rng.standard_normal((ROWS, 1)))
    rows[sum(SIZES) :] = np.nan
    matrices = rng.standard_normal((2, len(SIZES), 256, width))
    rows = op.quantize_rows(jnp.asarray(rows, jnp.bfloat16))
    both = [op.quantize_matrices(jnp.asarray(m, jnp.bfloat16)).transposed for m in matrices]
    return rows, both, jnp.asarray(SIZES, jnp.int32)


def scaled(array):
    return Scaled(array.values, array.scales)


def assert_near(got, want, terms):
    """Asserts equality within the rounding of bfloat16 and of sums of `terms` float32 products."""
    got, want = (np.asarray(x).astype(np.float64)[: sum(SIZES)] for x in (got, want))
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=terms * 2**-23 * scale)


@simulated
@pytest.mark.parametrize("width", [128, 384])
def test_product(width):
    rows, matrices, sizes = operands(width)
    pairs = [(rows, each) for each in matrices]
    got = interpret(
        lambda: float8.product(
            [(scaled(lhs), scaled(rhs)) for lhs, rhs in pairs],
            sizes,
            dtype=jnp.bfloat16,
            num_blocks=2,
            tiles=TILES,
            interpret=simulator.INTERPRETER,
        )
    )
    want = op.product(pairs, sizes, jnp.float32, "loop")
    assert_near(got, want, 512)


@simulated
@pytest.mark.parametrize("keep", [True, False])
def test_gated_product(keep):
    rows, matrices, sizes = operands(128)
    got = interpret(
        lambda: float8.gated_product(
            scaled(rows),
            tuple(map(scaled, matrices)),
            sizes,
            Elementwise(swiglu, 2),
            keep=keep,
            num_blocks=2,
            tiles=TILES,
            interpret=simulator.INTERPRETER,
        )
    )
    want = op.gated_product(rows, tuple(matrices), sizes, swiglu, keep, "loop")
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        live = sum(SIZES)
        scales, expected = np.asarray(mine.scales)[:live], np.asarray(theirs.scales)[:live]
        np.testing.assert_allclose(scales, expected, rtol=1e-5)
        numbers = np.asarray(mine.values).astype(np.float32)[:live] * scales
        other = np.asarray(theirs.dequantize(jnp.float32))[:live]
        # A number halfway between two of float8 may be rounded to the other.
        np.testing.assert_allclose(numbers, other, rtol=2**-3, atol=2**-9 * expected.max())
        assert np.mean(numbers != other) < 0.02 or np.allclose(numbers, other, rtol=1e-5)


@simulated
@pytest.mark.parametrize("count", [1, 2])
def test_gradient_of_matrices(count):
    rows, _, sizes = operands(128)
    blocks, groups = row_blocks(sizes, ROWS)
    lhs = op.transpose_rows(rows, blocks, by_column=True, implementation="loop")[1]
    grads = [op.transpose_rows(rows, blocks, by_column=False, implementation="loop")[1]] * count
    got = interpret(
        lambda: float8.drhs_of_each(
            TransposedRows(*lhs),
            [TransposedRows(*grad) for grad in grads],
            groups,
            dtype=jnp.bfloat16,
            num_blocks=2,
            tiles=TILES,
            interpret=simulator.INTERPRETER,
        )
    )
    want = op.drhs_of_each(lhs, grads, groups, jnp.float32, "loop")
    assert len(got) == count
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(x).astype(np.float64) for x in (mine, theirs))
        assert not mine[1].any()  # an empty group
        np.testing.assert_allclose(
            mine, theirs, rtol=2**-8, atol=128 * 2**-23 * np.abs(theirs).max()
        )


@simulated
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("by_column", [False, True])
def test_quantized_rows(is_scaled, by_column):
    rows, _, sizes = operands(128)
    blocks, _ = row_blocks(sizes, ROWS)
    source = rows if is_scaled else rows.dequantize(jnp.bfloat16)
    kept, got = interpret(
        lambda: quantize.quantize_rows(
            scaled(source) if is_scaled else source,
            blocks,
            keep_order=not is_scaled,
            by_column=by_column,
            interpret=simulator.INTERPRETER,
        )
    )
    want_kept, want = op.transpose_rows(
        source, blocks, by_column=by_column, keep_order=not is_scaled, implementation="loop"
    )
    for mine, theirs in zip(got, want, strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    if not is_scaled:
        live = sum(SIZES)
        for mine, theirs in zip(kept, (want_kept.values, want_kept.scales), strict=True):
            assert np.asarray(mine)[:live].tobytes() == np.asarray(theirs)[:live].tobytes()


@simulated
def test_quantized_matrices():
    matrices = jax.random.normal(jax.random.key(0), (2, 256, 128), jnp.bfloat16)
    got = interpret(lambda: quantize.quantize_matrices(matrices, interpret=simulator.INTERPRETER))
    want = op.quantize_matrices(matrices, "loop")
    for mine, theirs in zip(got, want, strict=True):
        for part, expected in zip(mine, (theirs.values, theirs.scales), strict=True):
            assert np.asarray(part).tobytes() == np.asarray(expected).tobytes()
