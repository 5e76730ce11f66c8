"""Tests of the table of row tiles, made by XLA and by the kernel in Pallas' GPU interpreter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.interpreted import row_tiles_by_xla
from support.matmuls import ON_GPU, run_kernels, runs_kernels
from support.selection import quick

from pallas_kernels.matmul.row_tiles import row_tiles

by_xla = jax.jit(row_tiles_by_xla, static_argnums=(1, 2, 3))


def sizes_of(num_groups, seed=0):
    """Draws group sizes [num_groups] int32, of which about half are zero.

    Returns the sizes, and a number of rows, as of lhs, that is a multiple of 8 above their sum.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 300, num_groups) * rng.integers(0, 2, num_groups)
    return jnp.asarray(sizes, jnp.int32), (int(sizes.sum()) + 31) // 8 * 8


def assert_equal_tables(got, want):
    """Asserts that two tables of row tiles are equal where their contents matter.

    These are the rows of the tiles that exist, and the last row, which has the number of tiles and
    of rows in groups.
    """
    assert got.shape == want.shape
    count = int(want[-1, 0])
    np.testing.assert_array_equal(got[:count], want[:count])
    np.testing.assert_array_equal(got[-1], want[-1])


def by_kernel(sizes, heights, num_rows, *alignment):
    return run_kernels(functools.partial(row_tiles, sizes, heights, num_rows, *alignment))


TABLES = [(11, (16, 64)), (1, (64,)), (3, (32, 96))]
HIGH = 64, 128, 136, 144, 176, 208, 256
TABLES_ON_GPU = [
    (groups, heights) for groups in (1, 8, 33, 64, 500, 1025) for heights in ((32, 64), HIGH)
]


@runs_kernels
@pytest.mark.parametrize(
    ("num_groups", "heights"), TABLES_ON_GPU if ON_GPU else quick(TABLES, TABLES[0])
)
def test_the_kernel_makes_the_same_table(num_groups, heights):
    sizes, num_rows = sizes_of(num_groups, seed=num_groups)
    for most in (num_rows, num_rows // 16 * 8)[: 2 if ON_GPU else 1]:
        for options in ((), (1,)):
            operands = sizes, heights, most, *options
            assert_equal_tables(by_kernel(*operands), by_xla(*operands))


MOST = 2**31 - 1
# Pairs of group sizes of 64 rows: sizes that are negative or add up to more than 64, and the sizes
# to which they must be cut.
EXCESSIVE = [
    ([1000], [64]),
    ([30, 1000, 7], [30, 34, 0]),
    ([30, -10, 20, 30, MOST], [30, 0, 20, 14, 0]),
    ([0, 0, 0], [0, 0, 0]),
]


@runs_kernels
@pytest.mark.parametrize(("sizes", "cut"), quick(EXCESSIVE, EXCESSIVE[2]))
def test_groups_end_where_rows_do(sizes, cut):
    sizes, cut = jnp.asarray(sizes, jnp.int32), jnp.asarray(cut, jnp.int32)
    want = np.asarray(by_xla(cut, (16, 64), 64))
    assert np.all(want[: want[-1, 0], 3] <= 64) and want[-1, 0] < len(want)
    for got in (by_xla(sizes, (16, 64), 64), by_kernel(sizes, (16, 64), 64)):
        assert_equal_tables(np.asarray(got), want)
        if not want[-1, 0]:
            # The matmul reads the first entry even if there is no tile.
            np.testing.assert_array_equal(got[0], np.zeros(4))
