"""Tests of the grouped matmul in Pallas' GPU interpreter, with race detection."""

from __future__ import annotations

import numpy as np
import pytest
from support.matmuls import assert_close, expected, operands
from support.simulator import KernelError, interpret, simulated

from pallas_kernels.matmul.grouped_matmul import Tiles, grouped_matmul


def run(pairs, group_sizes, tiles, transpose_rhs=False, zero_unused=True):
    options = dict(transpose_rhs=transpose_rhs, tiles=tiles, zero_unused=zero_unused)
    return interpret(lambda: grouped_matmul(pairs, group_sizes, num_blocks=2, **options))


@simulated
@pytest.mark.slow
def test_rows_past_the_last_group_may_stay_as_they_are():
    lhs, rhs, group_sizes, _ = operands(48, [3, 0, 21], "bfloat16")
    tiles = Tiles((16, 32), 128, 3, 1)
    left, zeroed = (
        np.asarray(run([(lhs, rhs)], group_sizes, tiles, zero_unused=zero_unused))
        for zero_unused in (False, True)
    )
    np.testing.assert_array_equal(left[:24], zeroed[:24])
    assert np.all(np.isnan(left[24:].astype(np.float32))) and not np.any(zeroed[24:])


@simulated
@pytest.mark.parametrize(
    ("num_rows", "sizes", "width", "tiles"),
    [
        # Groups lie within a tile, span several tiles, are empty, or start off a multiple of 8
        # rows.
        (136, [3, 0, 70, 21], 128, Tiles((16, 48, 64), 128, 3, 2)),
        # The output is one and a half tiles wide. Each compute warpgroup has 128 of a tile's 256
        # columns, in two parts of 64.
        (80, [0, 37, 30], 384, Tiles((32,), 256, 3, 1)),
        # The output has 64 columns, all in the first compute warpgroup's half of the tile.
        (320, [1, 300, 19], 64, Tiles((136, 256), 128, 4, 3)),
        # There are three columns of tiles in two bands: the first has two of them, the second one.
        (80, [0, 73, 0], 384, Tiles((48, 80), 128, 3, 1, 2)),
        # A loader, for which 256 rows leave no registers if tiles are held, fills three stages.
        (320, [1, 300, 19], 128, Tiles((136, 256), 128, 3, 3, holds=False)),
        # Tiles are higher than the whole array, and some groups have no rows.
        (8, [5, 0], 128, Tiles((64, 256), 128, 4, 1)),
        (8, [0, 0], 128, Tiles((64,), 128, 3, 1)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_product(num_rows, sizes, width, tiles):
    args = operands(num_rows, sizes, "bfloat16", matrix_shape=(128, width))
    lhs, rhs, group_sizes, grad = args
    out = run([(lhs, rhs)], group_sizes, tiles)
    dlhs = run([(grad, rhs)], group_sizes, tiles, transpose_rhs=True)
    both = run([(lhs, rhs), (grad[:, :64], rhs[:, :64])], group_sizes, tiles)
    want_out, want_dlhs, _ = expected(*args)
    of_second, *_ = expected(grad[:, :64], rhs[:, :64], group_sizes, grad)
    for got, want in ((out, want_out), (dlhs, want_dlhs), (both, want_out + of_second)):
        assert_close(got, want, "bfloat16")
        assert not np.any(np.asarray(got)[sum(sizes) :])


@simulated
def test_a_race_is_found(monkeypatch):
    """Sending a tile from shared memory before it is complete must be found as a race."""
    monkeypatch.setattr("pallas_kernels.matmul.store.plgpu.commit_smem", lambda: None)
    lhs, rhs, group_sizes, _ = operands(80, [0, 37, 30], "bfloat16")
    with pytest.raises(KernelError, match="a race"):
        run([(lhs, rhs)], group_sizes, Tiles((32,), 128, 3, 1))
