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
# Or group 1 has no rows, and another more than a tile.
SIZES = [5, 0, 21, 3]
FORMATS = {"float8": FLOAT8_MATRICES, "mxfp4": MXFP4}
CORES = weight_only.HOPPER_CORES


def case(format, num_rows, depth, width, matrices, kind, with_bias):
    """Returns the operands of a product, and [products, 3]: its row, that of x, and the group."""
    rng = np.random.default_rng(depth + num_rows)
    if kind == "sizes":
        groups, count = jnp.asarray(SIZES, jnp.int32), 32
        rows = np.arange(sum(SIZES))
        products = np.stack([rows, rows, np.arange(L).repeat(SIZES)], axis=1)
    else:
        choices = np.asarray(CHOICES[num_rows], np.int32)
        groups, rows = chosen_groups(jnp.asarray(choices), L)
        count = num_rows if kind == "shared" else (len(groups.table) - 1) * groups.height
        own, choice = np.nonzero(choices >= 0)
        rows = np.asarray(rows)[own, choice]
        products = np.stack([rows, own if kind == "shared" else rows, choices[own, choice]], axis=1)
    x = rng.standard_normal((count, depth)) * np.exp2(rng.integers(-20, 20, (count, 1)))
    # Numbers of a chunk may differ much in size.
    x[:, ::7] *= 2.0**-12
    stored = []
    for _ in range(matrices):
        numbers = rng.standard_normal((L, width, depth)) / np.sqrt(depth)
        # Some scales of MXFP4 are above 1, and others are not.
        numbers[:, :, :64] *= 2.0 ** rng.integers(-8, 8, (L, width, 1))
        # Group 1 has no rows. Its matrices are NaN, which must not reach a result.
        numbers[1] = np.nan
        stored.append(quantize(jnp.asarray(numbers, jnp.bfloat16), format))
    biases = [
        jnp.asarray(rng.standard_normal((L, width)), dtype) if with_bias else None
        for dtype in (jnp.bfloat16, jnp.float32)[:matrices]
    ]
    return jnp.asarray(x, jnp.bfloat16), stored, biases, groups, products


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
        # Half of the distance between bfloat16 numbers, of 8 bits, at the product.
        rounding = np.ldexp(2.0**-9, np.frexp(products[-1])[1])
        bounds.append(rounding + 2**-14 * (np.abs(matrix) @ np.abs(x)))
        if bias is not None:
            products[-1] += np.asarray(bias[group], np.float64)
    numbers = [jnp.asarray(each, jnp.float32) for each in products]
    return np.asarray(numbers[0] if gating is None else gating.function(*numbers)), bounds


@runs_kernels
@pytest.mark.parametrize("name", quick([*FORMATS], "mxfp4"))
@pytest.mark.parametrize(
    ("num_rows", "depth", "width", "matrices", "kind", "with_bias", "cores", "divided"),
    quick(
        # Last, as many warps share a sum, rounds, steps ahead and warps of a block.
        [
            (1, 256, 128, 2, "shared", False, CORES, (1, 1, 2, 8)),
            (3, 640, 256, 1, "own", True, CORES, (2, 1, 2, 8)),
            # In MXFP4, the last chunk is shorter.
            (3, 1120, 144, 2, "shared", True, CORES, (4, 1, 1, 8)),
            (9, 2048, 256, 2, "shared", True, CORES, (8, 1, 1, 8)),
            (1, 2048, 256, 1, "own", False, CORES, (8, 1, 2, 8)),
            (8, 640, 256, 1, "sizes", True, CORES, (2, 1, 2, 8)),
            (8, 1120, 400, 2, "sizes", False, 1, (1, 3, 1, 8)),
            (8, 96, 384, 2, "sizes", True, 1, (1, 3, 2, 8)),
            (1, 256, 384, 1, "shared", False, 1, (1, 3, 2, 8)),
            (16, 2048, 384, 2, "sizes", False, 8, (2, 2, 1, 8)),
            (16, 2816, 256, 2, "sizes", True, 8, (2, 1, 1, 16)),
            (16, 2816, 640, 2, "sizes", False, 1, (1, 3, 1, 16)),
        ],
        (1, 256, 128, 2, "shared", False, CORES, (1, 1, 2, 8)),
        (8, 640, 256, 1, "sizes", True, CORES, (2, 1, 2, 8)),
    ),
)
def test_products(
    name, num_rows, depth, width, matrices, kind, with_bias, cores, divided, monkeypatch
):
    of_fields, made = weight_only._Sizes, []
    monkeypatch.setattr(weight_only, "HOPPER_CORES", cores)
    monkeypatch.setattr(
        weight_only, "_Sizes", lambda **fields: made.append(of_fields(**fields)) or made[0]
    )
    if name == "float8":
        depth, width = (-(-side // 128) * 128 for side in (depth, width))
    x, stored, biases, groups, products = case(
        FORMATS[name], num_rows, depth, width, matrices, kind, with_bias
    )
    gating = Elementwise(swiglu, 2) if matrices == 2 else None
    out = run(x, stored, biases, groups, num_rows, gating)
    sizes = made[0]
    assert (sizes.splits, sizes.rounds, sizes.steps_ahead, sizes.num_warps) == divided
    for at, row, group in products:
        own = np.asarray(x[row]).astype(np.float64)
        want, bounds = expected(own, stored, biases, group, gating)
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
    x, stored, biases, groups, products = case(
        FORMATS[name], num_rows, depth, width, 1, "shared", False
    )
    matrix = np.array(stored[0].dequantize(jnp.float32))
    # MXFP4 has no NaN: the whole block of 32 becomes NaN, but only of this column.
    matrix[0, 5, 100] = np.nan
    numbers = quantize(jnp.asarray(matrix), FORMATS[name])
    x = x.at[1, 3].set(jnp.nan).at[2, 200].set(jnp.inf)
    out = run(x, [numbers], biases, groups, num_rows, None)
    by_row_and_group = {(row, group): out[at] for at, row, group in products}
    # A thread computes columns 5 and 13.
    others = np.arange(width) != 5
    assert np.isnan(by_row_and_group[0, 0][5])
    assert np.isfinite(by_row_and_group[0, 0][others]).all()
    assert np.isnan(by_row_and_group[1, 0]).all()
    assert np.isfinite(by_row_and_group[0, 3]).all()
    assert not np.isfinite(by_row_and_group[2, 2]).any()


@pytest.mark.parametrize(
    ("format", "num_rows", "depth", "width", "reason"),
    [
        (FLOAT8_ROWS, 1, 256, 128, "not float8_e4m3fn"),
        (FLOAT8_MATRICES, 1, 320, 128, "and a multiple of 128"),
        (MXFP4, 1, 320, 120, "but have 320 and 120"),
        (MXFP4, 1, 96, 128, None),
        (FLOAT8_MATRICES, 8, 7168, 2048, None),
        (MXFP4, 17, 256, 128, "17 rows of 256 numbers"),
        (MXFP4, 16, 8192, 128, "16 rows of 8192 numbers"),
        (MXFP4, 16, 2880, 2880, None),
        (FLOAT8_MATRICES, 1, 7168, 2048, None),
    ],
)
def test_what_is_supported(format, num_rows, depth, width, reason):
    found = weight_only.unsupported_reason(format, num_rows, depth, width)
    assert found is None if reason is None else reason in found
