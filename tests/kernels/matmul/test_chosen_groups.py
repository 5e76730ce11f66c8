"""Tests of grouped matmuls of few rows, in which each chosen group multiplies all rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as operands
from support.float8 import assert_gated_within_bound, assert_within_bound, scaled, swiglu
from support.kernels import lowered, needs_kernels
from support.selection import quick
from support.simulator import interpret, simulated

from jax_ep import reference
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, MXFP4, QuantizedArray, quantize
from jax_ep.matmul import pallas as backend
from jax_ep.matmul.float8 import gated_product_by_kernel
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul import float8
from pallas_kernels.matmul.chosen_groups import chosen_groups
from pallas_kernels.matmul.gated_matmul import gated_matmul
from pallas_kernels.matmul.grouped_matmul import Tiles, grouped_matmul
from pallas_kernels.matmul.mxfp4_matmul import Mxfp4Matrices

L, K, N = 4, 256, 256
# The groups that 1 row and that 3 rows choose. No row chooses group 1, and -1 chooses no group.
CHOICES = {1: [[2, 0, -1]], 3: [[3, 0], [0, -1], [2, 3]]}


def rows_and_matrices(num_rows, format):
    """Returns rows [8, K], NaN from row `num_rows` on, and matrices [2, L, K, N] and [L, N, K].

    Matrices in MXFP4 are transposed.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, K))
    x[num_rows:] = np.nan
    wi = rng.standard_normal((2, L, K, N)) / np.sqrt(K)
    wo = rng.standard_normal((L, N, K)) / np.sqrt(N)
    # No row chose group 1. Its matrices are NaN, which must not reach a result.
    wi[:, 1], wo[1] = np.nan, np.nan
    x, *matrices = (jnp.asarray(array, jnp.bfloat16) for array in (x, *wi, wo))
    if format is not None:
        matrices = [quantize(each.swapaxes(1, 2), format) for each in matrices]
    return x, *matrices


def numbers_of(matrices):
    """Returns matrices in order, as float32."""
    if isinstance(matrices, QuantizedArray):
        return np.asarray(matrices.dequantize(jnp.float32)).swapaxes(1, 2)
    return np.asarray(matrices).astype(np.float32)


@simulated
@pytest.mark.parametrize(
    ("format", "num_rows"), quick([(None, 1), (None, 3), (MXFP4, 3)], (None, 1), (None, 3))
)
def test_two_products(format, num_rows):
    """The first product must read the same rows for each group, the second the group's own."""
    x, *wi, wo = rows_and_matrices(num_rows, format)
    given = np.asarray(CHOICES[num_rows], np.int32)
    groups, rows = chosen_groups(jnp.asarray(given), L)
    common = dict(num_blocks=2, zero_unused=False)

    def run():
        if format is None:
            tiles, pair = backend.chosen_tiles(groups, N, num_matrices=2), tuple(wi)
        else:
            tiles, pair = Tiles((8,), 64, 3, 1), tuple(map(scaled, wi))
        gating = Elementwise(swiglu, 2)
        (hidden,) = gated_matmul(x, pair, groups, gating, keep=False, tiles=tiles, **common)
        if format is None:
            pair, options = (hidden, wo), dict(tiles=backend.chosen_tiles(groups, K))
        else:
            pair = hidden, scaled(wo)
            options = dict(tiles=Tiles((8,), 128, 3, 1), format=Mxfp4Matrices)
        transposed = format is not None
        return hidden, grouped_matmul([pair], groups, transpose_rhs=transposed, **options, **common)

    hidden, y = (np.asarray(array).astype(np.float32) for array in interpret(run))
    rows = np.asarray(rows)
    for row, choice in np.argwhere(given >= 0):
        group, at = given[row, choice], rows[row, choice]
        token = np.asarray(x[row]).astype(np.float32)
        gate, up = (jnp.asarray(token @ numbers_of(each)[group], jnp.bfloat16) for each in wi)
        want = swiglu(gate.astype(jnp.float32), up.astype(jnp.float32))
        # The kernel sums in another order, so it rounds a few numbers to a neighbor in bfloat16.
        np.testing.assert_allclose(hidden[at], want, rtol=2**-6, atol=2**-6)
        np.testing.assert_allclose(y[at], hidden[at] @ numbers_of(wo)[group], 2**-6, 2**-6)


@simulated
@pytest.mark.parametrize("num_rows", quick([1, 3], 3))
def test_two_float8_products(num_rows):
    given = np.asarray(CHOICES[num_rows], np.int32)
    groups, rows = chosen_groups(jnp.asarray(given), L)
    x = operands.numbers("random", (8, K))
    wi = [operands.numbers("random", (L, K, N), seed) for seed in (1, 2)]
    wo = operands.numbers("random", (L, N, K), 3)

    common = dict(num_blocks=2)

    def run():
        (hidden,) = float8.float8_gated_matmul(
            scaled(operands.rows(x)),
            tuple(scaled(operands.transposed_matrices(each)) for each in wi),
            groups,
            Elementwise(swiglu, 2),
            keep=False,
            **common,
        )
        matrices = scaled(operands.transposed_matrices(wo))
        return *hidden, float8.float8_matmul(
            [(hidden, matrices)], groups, dtype=jnp.float32, **common
        )

    def product_of_quantized(lhs, rhs, sizes):
        return reference.grouped_matmul(lhs, reference.float8(rhs, (128, 128)), sizes)

    values, scales, y = interpret(run)
    rows = np.asarray(rows)
    for row, choice in np.argwhere(given >= 0):
        sizes = np.arange(L) == given[row, choice]
        at = slice(rows[row, choice], rows[row, choice] + 1)
        hidden = QuantizedArray(values[at], scales[at], FLOAT8_ROWS)
        assert_gated_within_bound([hidden], x[row : row + 1], wi, sizes)
        numbers = np.asarray(hidden.dequantize(jnp.float32)).astype(np.float64)
        assert_within_bound(y[at], product_of_quantized, numbers, wo, sizes=sizes)


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_gated_product_of_float8_is_one_kernel(num_rows):
    """There must be no kernel for the table of row tiles."""

    def gated(choices, x, gate, up):
        groups, _ = chosen_groups(choices, L)
        return gated_product_by_kernel(x, (gate, up), groups, swiglu, False)

    def quantized(format, *shape):
        scales = jnp.ones(format.scales_shape(shape), jnp.float32)
        return Scaled(jnp.zeros(shape, jnp.float8_e4m3fn), scales)

    matrices = quantized(FLOAT8_MATRICES, L, N, K)
    choices, rows = jnp.zeros((num_rows, 2), jnp.int32), quantized(FLOAT8_ROWS, num_rows, K)
    text = lowered(jax.jit(gated), choices, rows, matrices, matrices)
    assert text.count("@mosaic_gpu") == 1
