"""Tests of matmuls of a few unquantized rows by quantized matrices."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.float8 import scaled, swiglu
from support.matmuls import run_kernels, runs_kernels
from support.selection import quick

from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, MXFP4, quantize
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul import weight_only
from pallas_kernels.matmul.chosen_groups import chosen_groups

L = 4
# No row chooses group 1, and -1 chooses no group.
CHOICES = {1: [[2, 0, -1]], 3: [[3, 0], [0, -1], [2, 3]], 9: [[3, 0]] * 8 + [[2, 2]]}
# The contraction dimension K and the width N. A sum is shared by 1, 2 or 8 warps, or by 4 in MXFP4.
# The number of chunks of 128 may be uneven, and in MXFP4 the last chunk may be shorter.
SIZES = [(256, 128), (640, 256), (2048, 256)]
SIZES_OF_MXFP4 = {640: (1120, 144)}
FORMATS = {"float8": FLOAT8_MATRICES, "mxfp4": MXFP4}


def case(format, num_rows, depth, width, matrices, shared, with_bias):
    """Returns the operands of a product, and which output row has each (row, choice)."""
    rng = np.random.default_rng(depth + num_rows)
    groups, rows = chosen_groups(jnp.asarray(CHOICES[num_rows], jnp.int32), L)
    count = num_rows if shared else (len(groups.table) - 1) * groups.height
    x = rng.standard_normal((count, depth)) * np.exp2(rng.integers(-20, 20, (count, 1)))
    # Numbers of a chunk may differ much in size.
    x[:, ::7] *= 2.0**-12
    stored = []
    for _ in range(matrices):
        numbers = rng.standard_normal((L, width, depth)) / np.sqrt(depth)
        # No row chose group 1. Its matrices are NaN, which must not reach a result.
        numbers[1] = np.nan
        stored.append(quantize(jnp.asarray(numbers, jnp.bfloat16), format))
    biases = [
        jnp.asarray(rng.standard_normal((L, width)), dtype) if with_bias else None
        for dtype in (jnp.bfloat16, jnp.float32)[:matrices]
    ]
    return jnp.asarray(x, jnp.bfloat16), stored, biases, groups, np.asarray(rows)


def run(x, stored, biases, groups, num_rows, gating):
    product = functools.partial(
        weight_only.weight_only_matmul,
        x,
        list(map(scaled, stored)),
        biases,
        groups,
        num_rows=num_rows,
        format=stored[0].format,
        gating=gating,
    )
    return run_kernels(product).astype(np.float64)


def expected(x, stored, biases, group, gating):
    """Computes an output row in float64.

    Also returns a bound of the error of each product, [N]. A sum has an error of up to 2^-14 of the
    sum of magnitudes, and is rounded to bfloat16.
    """
    products, bounds = [], []
    for each, bias in zip(stored, biases, strict=True):
        matrix = np.asarray(each.dequantize(jnp.float32)[group], np.float64)
        products.append(matrix @ x)
        bounds.append(2**-9 * np.abs(products[-1]) + 2**-14 * (np.abs(matrix) @ np.abs(x)))
        if bias is not None:
            products[-1] += np.asarray(bias[group], np.float64)
    numbers = [jnp.asarray(each, jnp.float32) for each in products]
    return np.asarray(numbers[0] if gating is None else gating.function(*numbers)), bounds


@runs_kernels
@pytest.mark.parametrize("name", quick([*FORMATS], "mxfp4"))
@pytest.mark.parametrize(
    ("num_rows", "depth", "width", "matrices", "shared", "with_bias"),
    quick(
        [
            (1, *SIZES[0], 2, True, False),
            (3, *SIZES[1], 1, False, True),
            (9, *SIZES[2], 2, True, True),
            (1, *SIZES[2], 1, False, False),
        ],
        (1, *SIZES[0], 2, True, False),
    ),
)
def test_products(name, num_rows, depth, width, matrices, shared, with_bias):
    if name == "mxfp4":
        depth, width = SIZES_OF_MXFP4.get(depth, (depth, width))
    x, stored, biases, groups, rows = case(
        FORMATS[name], num_rows, depth, width, matrices, shared, with_bias
    )
    gating = Elementwise(swiglu, 2) if matrices == 2 else None
    out = run(x, stored, biases, groups, num_rows, gating)
    given = np.asarray(CHOICES[num_rows])
    for row, choice in np.argwhere(given >= 0):
        at = rows[row, choice]
        own = np.asarray(x[row if shared else at]).astype(np.float64)
        want, bounds = expected(own, stored, biases, given[row, choice], gating)
        if gating is None:
            # The sum of product and bias is rounded, too.
            assert (np.abs(out[at] - want) <= bounds[0] + 2**-8 * np.abs(want)).all()
        else:
            largest = np.abs(want).max()
            np.testing.assert_allclose(out[at], want, rtol=0, atol=2**-6 * largest)


@runs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth"), [("float8", 256), ("float8", 640), ("mxfp4", 256), ("mxfp4", 352)]
)
def test_nan_and_infinity_stay_in_their_rows_and_columns(name, depth):
    num_rows, width = 3, 128
    x, stored, biases, groups, rows = case(FORMATS[name], num_rows, depth, width, 1, True, False)
    matrix = np.array(stored[0].dequantize(jnp.float32))
    # MXFP4 has no NaN: the whole block of 32 becomes NaN, but only of this column.
    matrix[0, 5, 100] = np.nan
    numbers = quantize(jnp.asarray(matrix), FORMATS[name])
    x = x.at[1, 3].set(jnp.nan).at[2, 200].set(jnp.inf)
    out = run(x, [numbers], biases, groups, num_rows, None)
    of_group_0 = [out[rows[row, choice]] for row, choice in ((0, 1), (1, 0))]
    # A thread computes columns 5 and 13.
    others = np.arange(width) != 5
    assert np.isnan(of_group_0[0][5]) and np.isfinite(of_group_0[0][others]).all()
    assert np.isnan(of_group_0[1]).all()
    assert np.isfinite(out[rows[0, 0]]).all()
    assert not np.isfinite(out[rows[2, 0]]).any()


@pytest.mark.parametrize(
    ("format", "num_rows", "depth", "width", "reason"),
    [
        (FLOAT8_ROWS, 1, 256, 128, "not float8_e4m3fn"),
        (FLOAT8_MATRICES, 1, 320, 128, "and a multiple of 128"),
        (MXFP4, 1, 320, 120, "but have 320 and 120"),
        (MXFP4, 1, 96, 128, "at least 128"),
        (MXFP4, 17, 256, 128, "17 rows of 256 numbers"),
        (MXFP4, 16, 8192, 128, "16 rows of 8192 numbers"),
        (MXFP4, 16, 2880, 2880, None),
        (FLOAT8_MATRICES, 1, 7168, 2048, None),
    ],
)
def test_what_is_supported(format, num_rows, depth, width, reason):
    found = weight_only.unsupported_reason(format, num_rows, depth, width)
    assert found is None if reason is None else reason in found
