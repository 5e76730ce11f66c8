"""Tests of grouped matmuls of few rows, in which each chosen group multiplies all rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as operands
from support.float8 import assert_gated_within_bound, assert_within_bound, scaled, swiglu
from support.selection import quick
from support.simulator import interpret, simulated

from jax_ep import reference
from jax_ep.formats import FLOAT8_ROWS, QuantizedArray
from jax_ep.matmul import pallas as backend
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul import float8
from pallas_kernels.matmul.chosen_groups import chosen_groups
from pallas_kernels.matmul.gated_matmul import gated_matmul
from pallas_kernels.matmul.grouped_matmul import grouped_matmul

L, K, N = 4, 256, 256
# The groups that 1 row and that 3 rows choose. No row chooses group 1, and -1 chooses no group.
CHOICES = {1: [[2, 0, -1]], 3: [[3, 0], [0, -1], [2, 3]]}


@simulated
@pytest.mark.parametrize("num_rows", quick([1, 3], 3))
def test_two_products(num_rows):
    """The first product must read the same rows for each group, the second the group's own."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, K))
    x[num_rows:] = np.nan
    wi = rng.standard_normal((2, L, K, N)) / np.sqrt(K)
    wo = rng.standard_normal((L, N, K)) / np.sqrt(N)
    # No row chose group 1. Its matrices are NaN, which must not reach a result.
    wi[:, 1], wo[1] = np.nan, np.nan
    x, *wi, wo = (jnp.asarray(array, jnp.bfloat16) for array in (x, *wi, wo))
    given = np.asarray(CHOICES[num_rows], np.int32)
    groups, rows = chosen_groups(jnp.asarray(given), L)
    common = dict(num_blocks=2, zero_unused=False)

    def run():
        gating, tiles = Elementwise(swiglu, 2), backend.chosen_tiles(groups, N, num_matrices=2)
        (hidden,) = gated_matmul(x, tuple(wi), groups, gating, keep=False, tiles=tiles, **common)
        tiles = backend.chosen_tiles(groups, K)
        y = grouped_matmul([(hidden, wo)], groups, transpose_rhs=False, tiles=tiles, **common)
        return hidden, y

    wide_x, *wide_wi, wide_wo = (np.asarray(array).astype(np.float32) for array in (x, *wi, wo))
    hidden, y = (np.asarray(array).astype(np.float32) for array in interpret(run))
    rows = np.asarray(rows)
    for row, choice in np.argwhere(given >= 0):
        group, at = given[row, choice], rows[row, choice]
        gate, up = (jnp.asarray(wide_x[row] @ each[group], jnp.bfloat16) for each in wide_wi)
        want = swiglu(gate.astype(jnp.float32), up.astype(jnp.float32))
        # The kernel sums in another order, so it rounds a few numbers to a neighbor in bfloat16.
        np.testing.assert_allclose(hidden[at], want, rtol=2**-6, atol=2**-6)
        np.testing.assert_allclose(y[at], hidden[at] @ wide_wo[group], 2**-6, 2**-6)


@simulated
@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3])
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
