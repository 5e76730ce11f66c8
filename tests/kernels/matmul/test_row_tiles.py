"""Tests of the table of row tiles, made by XLA and by the kernel in Pallas' GPU interpreter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.interpreted import row_tiles_by_xla
from support.kernels import needs_kernels
from support.selection import quick
from support.simulator import interpret, simulated

from pallas_kernels.matmul.row_tiles import row_tiles

by_xla = jax.jit(row_tiles_by_xla, static_argnums=(1, 2))


def sizes_of(num_groups, seed=0):
    """Draws group sizes [num_groups] int32, of which about half are zero.

    Returns the sizes, and a number of rows, as of lhs, that is a multiple of 8 above their sum.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 300, num_groups) * rng.integers(0, 2, num_groups)
    return jnp.asarray(sizes, jnp.int32), (int(sizes.sum()) + 31) // 8 * 8


@pytest.mark.parametrize("heights", [(16, 64), (8, 24, 80, 96)])
def test_tiles_cover_every_group_once(heights):
    for num_groups in (1, 2, 9):
        sizes, num_rows = sizes_of(num_groups)
        table = np.asarray(by_xla(sizes, heights, num_rows))
        count, live = table[-1, :2]
        assert count < len(table) and live == sizes.sum()
        owner = np.full(num_rows, -1)
        for group, first, begin, end in table[:count]:
            assert first % 8 == 0 and first <= begin < end <= first + heights[-1]
            assert np.all(owner[begin:end] == -1)
            owner[begin:end] = group
        # Each group has as few tiles as the greatest height allows. They begin at equal distances,
        # which are one of the heights.
        for group in range(num_groups):
            first, end = (table[:count][table[:count, 0] == group, i] for i in (1, 3))
            if len(first):
                assert len(first) == -((first[0] - end[-1]) // heights[-1])
                assert len(set(np.diff(first))) <= 1 and set(np.diff(first)) <= set(heights)
        np.testing.assert_array_equal(owner[:live], np.repeat(np.arange(num_groups), sizes))
        assert np.all(owner[live:] == -1)


def assert_equal_tables(got, want):
    """Asserts that two tables of row tiles are equal where their contents matter.

    These are the rows of the tiles that exist, and the last row, which has the number of tiles and
    of rows in groups.
    """
    assert got.shape == want.shape
    count = int(want[-1, 0])
    np.testing.assert_array_equal(got[:count], want[:count])
    np.testing.assert_array_equal(got[-1], want[-1])


ON_GPU = jax.default_backend() == "gpu"
# On a GPU the kernel itself runs, and elsewhere Pallas' interpreter.
runs_kernels = needs_kernels if ON_GPU else simulated


def by_kernel(sizes, heights, num_rows):
    make = functools.partial(row_tiles, sizes, heights, num_rows)
    return make() if ON_GPU else interpret(make)


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
        assert_equal_tables(by_kernel(sizes, heights, most), by_xla(sizes, heights, most))


MOST = 2**31 - 1
# Pairs of group sizes of 64 rows: sizes that are negative or add up to more than 64, and the sizes
# to which they must be cut.
EXCESSIVE = [
    ([1000], [64]),
    ([30, 1000, 7], [30, 34, 0]),
    ([30, -10, 20, 30, MOST], [30, 0, 20, 14, 0]),
]


@pytest.mark.parametrize(("sizes", "cut"), EXCESSIVE)
def test_groups_end_where_rows_do(sizes, cut):
    got, want = (np.asarray(by_xla(jnp.asarray(s, jnp.int32), (16, 64), 64)) for s in (sizes, cut))
    assert_equal_tables(got, want)
    assert np.all(got[: got[-1, 0], 3] <= 64) and got[-1, 0] < len(got)


@runs_kernels
@pytest.mark.parametrize(("sizes", "cut"), quick(EXCESSIVE, EXCESSIVE[-1]))
def test_groups_of_the_kernel_end_where_rows_do(sizes, cut):
    sizes, cut = jnp.asarray(sizes, jnp.int32), jnp.asarray(cut, jnp.int32)
    assert_equal_tables(by_kernel(sizes, (16, 64), 64), by_xla(cut, (16, 64), 64))


@runs_kernels
@pytest.mark.slow
def test_no_rows():
    sizes = jnp.zeros(3, jnp.int32)
    got, want = by_kernel(sizes, (16, 64), 64), by_xla(sizes, (16, 64), 64)
    assert_equal_tables(got, want)
    # The matmul reads the first entry even if there is no tile.
    np.testing.assert_array_equal(got[0], np.zeros(4))
