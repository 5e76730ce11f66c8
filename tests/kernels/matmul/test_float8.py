"""Tests of float8 matmul and quantization kernels in Pallas' GPU interpreter.

Races are detected. Every result is compared with `jax_ep.reference`, or with NumPy's quantization.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as operands
from support.float8 import assert_encodes, assert_gated_within_bound, assert_within_bound, scaled
from support.matmuls import run_kernels, runs_kernels
from support.selection import quick
from support.simulator import interpret, simulated

from jax_ep import reference
from jax_ep.formats import FLOAT8_ROWS, QuantizedArray
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul import float8, float8_drhs
from pallas_kernels.matmul.float8 import Float8Tiles
from pallas_kernels.matmul.row_blocks import row_blocks

SIZES = [3, 0, 70, 21]
# The last 42 of the 136 rows are in no group.
ROWS, LIVE = 136, sum(SIZES)
GROUP_SIZES = np.asarray(SIZES, np.int32)
NARROW, WIDE = Float8Tiles(4, 2), Float8Tiles(4, 2, 256)
NOT_AHEAD = dataclasses.replace(NARROW, waits_ahead=False)
WIDE_NOT_AHEAD = dataclasses.replace(WIDE, waits_ahead=False)


def rows_of(x):
    """Appends rows of NaN, past the last group, to rows x [94, C]; returns [136, C]."""
    return np.concatenate([x, np.full((ROWS - LIVE, x.shape[1]), np.nan, np.float32)])


@simulated
@pytest.mark.parametrize(
    ("width", "tiles"),
    quick([(128, NARROW), (384, NARROW), (384, WIDE), (384, WIDE_NOT_AHEAD)], (128, NARROW)),
)
def test_product(width, tiles):
    lhs = operands.mixed((LIVE, 256))
    kinds = ("random", "nan") if width == 128 else ("infinity", "zero")
    rhs = [operands.numbers(kind, (4, 256, width), seed) for seed, kind in enumerate(kinds)]
    got = interpret(
        lambda: float8.float8_matmul(
            [
                (scaled(operands.rows(rows_of(lhs))), scaled(operands.transposed_matrices(each)))
                for each in rhs
            ],
            GROUP_SIZES,
            dtype=jnp.bfloat16,
            num_blocks=2,
            zero_unused=True,
            tiles=tiles,
        )
    )
    assert not np.asarray(got[LIVE:]).astype(np.float32).any()

    def both(lhs, *arrays):
        *rhs, sizes = arrays
        return sum(reference.float8_matmul(lhs, each, sizes) for each in rhs)

    assert_within_bound(got[:LIVE], both, lhs, *rhs, sizes=SIZES)


@runs_kernels
@pytest.mark.parametrize(
    ("keep", "tiles"),
    quick(
        [(True, NARROW), (False, NARROW), (True, NOT_AHEAD), (False, None)],
        *((False, NARROW), (False, None)),
    ),
)
def test_gated_product(keep, tiles):
    """The products that are kept must have the bits of `FLOAT8_ROWS.encode`."""
    lhs = operands.mixed((LIVE, 256))
    rhs = [operands.numbers("random", (4, 256, 128), seed) for seed in (1, 2)]
    rows = scaled(operands.rows(rows_of(lhs)))
    matrices = tuple(scaled(operands.transposed_matrices(each)) for each in rhs)
    got = run_kernels(
        lambda: float8.float8_gated_matmul(
            rows,
            matrices,
            GROUP_SIZES,
            Elementwise(operands.swiglu, 2),
            keep=keep,
            num_blocks=2,
            tiles=tiles,
        )
    )
    assert len(got) == (3 if keep else 1)
    live = [(each.values[:LIVE], each.scales[:LIVE]) for each in got]
    arrays = [QuantizedArray(*each, FLOAT8_ROWS) for each in live]
    assert_gated_within_bound(arrays, lhs, rhs, SIZES)
    for kept, each in zip(live[1:], matrices, strict=False):
        product = run_kernels(
            lambda each=each: float8.float8_matmul(
                [(rows, each)], GROUP_SIZES, dtype=jnp.float32, num_blocks=2, tiles=NARROW
            )
        )
        assert_encodes(kept, np.asarray(product)[:LIVE])


def gradient_of_matrices(lhs, grad, total=None, **options):
    _, groups = row_blocks(GROUP_SIZES, ROWS)
    transposed = (operands.transposed_rows(rows_of(x), SIZES) for x in (lhs, grad))
    return interpret(lambda: float8_drhs.drhs(*transposed, groups, total, num_blocks=2, **options))


@simulated
@pytest.mark.parametrize(
    ("kinds", "dtype", "tiles"),
    quick(
        {
            "narrow": (("nan", "random"), jnp.float32, NARROW),
            "wide": (("nan", "random"), jnp.bfloat16, WIDE),
            "infinity": (("skewed", "infinity"), jnp.bfloat16, NARROW),
            "huge": (("skewed", "huge"), jnp.bfloat16, NARROW),
        },
        "narrow",
    ),
)
def test_gradient_of_matrices(kinds, dtype, tiles):
    lhs, grad = (operands.numbers(kind, (LIVE, 256), seed) for seed, kind in enumerate(kinds))
    options = dict(dtype=dtype, tiles=tiles)
    got = gradient_of_matrices(lhs, grad, **options)
    assert not got[1].astype(np.float32).any()  # group 1 is empty
    assert_within_bound(got, reference.float8_matmul_drhs, lhs, grad, sizes=SIZES)
    total = jnp.asarray(operands.numbers("random", got.shape, 2), dtype)
    added = gradient_of_matrices(lhs, grad, total, **options)
    want = (np.asarray(total).astype(np.float32) + got.astype(np.float32)).astype(dtype)
    # NumPy takes two NaN of bfloat16 for different.
    np.testing.assert_array_equal(added.astype(np.float32), want.astype(np.float32))
