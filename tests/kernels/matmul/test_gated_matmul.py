"""Tests of the gated product in Pallas' GPU interpreter, with race detection, and on GPUs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import matmuls
from support.float8 import swiglu
from support.selection import quick
from support.simulator import interpret, simulated

from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul.gated_matmul import gated_matmul
from pallas_kernels.matmul.grouped_matmul import Tiles


@simulated
@pytest.mark.parametrize("keep", quick([True, False], True))
@pytest.mark.parametrize(
    ("num_rows", "sizes", "depth", "width", "tiles"),
    quick(
        {
            # Groups lie within a tile, span several tiles, are empty, or start off a multiple of 8
            # rows.
            "several tiles": (136, [3, 0, 70, 21], 128, 128, Tiles((32, 64), 128, 3, 2)),
            "small": (40, [3, 0, 21], 64, 128, Tiles((16, 32), 128, 3, 1)),
            # Each compute warpgroup stores two parts of 64 columns.
            "two parts": (40, [3, 0, 21], 64, 256, Tiles((16, 32), 256, 3, 3)),
            # Each compute warpgroup computes one of the products.
            "narrow tiles": (40, [3, 0, 21], 128, 128, Tiles((8, 32), 64, 3, 2)),
            # Tiles are so high that each compute warpgroup stores half of the rows.
            "high tiles": (160, [1, 140, 19], 64, 128, Tiles((64, 192), 64, 3, 3)),
        },
        "small",
    ),
)
def test_gated_product(num_rows, sizes, depth, width, tiles, keep):
    """With biases; tests/kernels/matmul/test_decoder.py has the same tests without, too."""
    (lhs, gate, group_sizes, _), (_, up, *_) = (
        matmuls.operands(num_rows, sizes, "bfloat16", seed, (depth, width)) for seed in range(2)
    )
    biases = matmuls.gate_biases(len(sizes), width)
    options = dict(keep=keep, tiles=tiles, num_blocks=2, biases=biases)
    got = interpret(
        lambda: gated_matmul(lhs, (gate, up), group_sizes, Elementwise(swiglu, 2), **options)
    )
    nothing = np.zeros((num_rows, width))
    products = [matmuls.expected(lhs, each, sizes, nothing)[0] for each in (gate, up)]
    products = [jnp.asarray(product, jnp.bfloat16) for product in products]
    want = [matmuls.swiglu_of_groups(products, sizes, biases), *products][: 3 if keep else 1]
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(array).astype(np.float32) for array in (mine, theirs))
        # Sums in another order round a few products differently, by 2^-8 of their value.
        np.testing.assert_allclose(mine, theirs, rtol=2**-6, atol=2**-6)
        assert not np.any(mine[sum(sizes) :])
    if keep:
        np.testing.assert_array_equal(got[0], matmuls.swiglu_of_groups(got[1:], sizes, biases))
