"""Tests of the threads' stores of rows of scales, by the code that they emit, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from support.emitted import Memory, run_warpgroup, scalar

from pallas_kernels.exchange import quantized_rows
from pallas_kernels.fabric.fabric import NOWHERE

# (the number of scales of a row, the number of choices of a token). With 56 scales and 8 choices,
# a token takes nearly all 128 threads; with 128 scales and 22 choices, several turns.
SIZES = [(4, 1), (16, 3), (56, 8), (128, 22)]


def array_of(num_rows: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(width)
    return rng.integers(1, 2**31, (num_rows, width)).astype(np.uint32).view(np.float32)


def bits(memory: Memory) -> np.ndarray:
    return memory.bytes.view(np.uint32).reshape(memory.shape)


@pytest.mark.parametrize(("width", "top_k"), SIZES)
def test_a_row_is_stored_to_each_of_the_rows(width, top_k):
    rng = np.random.default_rng(top_k)
    out, row = array_of(4 * top_k, width), array_of(1, width)[0]
    places = rng.permutation(len(out))[:top_k]
    places[rng.random(top_k) < 0.4] = NOWHERE
    places[-1] = len(out) - 1
    memory, source = Memory(out), Memory(row, is_shared=True)
    run_warpgroup(quantized_rows.store_each, source, memory, [scalar(p) for p in places])
    wanted = out.view(np.uint32).copy()
    wanted[places[places >= 0]] = row.view(np.uint32)
    np.testing.assert_array_equal(bits(memory), wanted)


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize(("width", "top_k"), SIZES)
def test_the_first_row_of_each_list_is_copied_to_its_others(width, top_k, count):
    rng = np.random.default_rng(100 * top_k + count)
    most = 9
    out = array_of(most * top_k, width)
    lists = rng.permutation(len(out)).reshape(most, top_k).astype(np.int32)
    lists[rng.random(lists.shape) < 0.4] = NOWHERE
    memory = Memory(out)
    listed = Memory(lists, is_shared=True)
    run_warpgroup(quantized_rows.copy_listed, memory, listed, scalar(count))
    wanted = out.view(np.uint32).copy()
    for rows in lists[:count]:
        rows = rows[rows >= 0]
        if len(rows):
            wanted[rows[1:]] = wanted[rows[0]]
    np.testing.assert_array_equal(bits(memory), wanted)
