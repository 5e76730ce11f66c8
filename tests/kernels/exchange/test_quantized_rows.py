"""Tests of rows that kernels quantize and add, by the code that they emit, in NumPy."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import assert_bitwise_equal, random_bits
from support.emitted import Memory, run_warpgroup, scalar

from jax_ep.exchange.interface import WIRE_FORMATS
from pallas_kernels.exchange import quantized_rows
from pallas_kernels.fabric.fabric import NOWHERE
from pallas_kernels.formats import Float8

WIRES = *WIRE_FORMATS, Float8.of(jnp.float8_e5m2, (1, 128))
wires = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
widths = pytest.mark.parametrize("hidden", [512, 3584])


def assert_equal_bits_but_of_nan(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    assert_bitwise_equal(np.where(nan, 0, got), np.where(nan, 0, want))


@wires
@widths
@dtypes
def test_rows_are_quantized_as_by_the_reference(dtype, hidden, wire):
    rows = random_bits(np.random.default_rng(0), (5, hidden), dtype).copy()
    rows[1], rows[2, ::2], rows[3, 5:9] = 0, jnp.finfo(dtype).max, [np.nan, np.inf, -np.inf, -0.0]
    for row in rows:
        values = Memory(np.zeros(hidden, wire.dtype), is_shared=True)
        scales = Memory(np.zeros(hidden // wire.block[1], np.float32), is_shared=True)
        quantize = functools.partial(quantized_rows.quantize_row, wire)
        run_warpgroup(quantize, Memory(row, is_shared=True), values, scales)
        want_values, want_scales = wire.encode(row)
        np.testing.assert_array_equal(scales.bytes.view(np.float32), want_scales)
        assert_equal_bits_but_of_nan(values.bytes.view(wire.dtype), want_values)


@wires
@widths
@dtypes
def test_sums_of_rows_are_those_of_the_reference(dtype, hidden, wire):
    rng = np.random.default_rng(0)
    for sent in ((1, 0, 1), (1, 1, 1), (0, 0, 0)):
        values = random_bits(rng, (3, hidden), wire.dtype)
        powers = rng.uniform(np.log2(wire.least_scale), 100, (3, hidden // wire.block[1]))
        scales = np.exp2(powers).astype(np.float32)
        parts = [[Memory(row) for row in part] for part in (values, scales)]
        flags = [scalar(flag) for flag in sent]
        vectors = run_warpgroup(quantized_rows.add_rows, wire, parts, flags, dtype)
        # A vector has neighbouring numbers of each thread.
        numbers = [np.concatenate(np.broadcast_arrays(*each), axis=1) for each in vectors]
        total = np.zeros(hidden, np.float32)
        for row, of_row, is_sent in zip(values, scales, sent, strict=True):
            with np.errstate(invalid="ignore"):  # random bits of e5m2 include infinities
                total += np.where(is_sent, wire.decode((row, of_row), np.float32), 0)
        got = np.concatenate([each.reshape(-1) for each in numbers])
        with np.errstate(over="ignore"):
            want = total.astype(jnp.dtype(dtype))
        assert_equal_bits_but_of_nan(got, want)


# ------------------------------------------------------------------------------- rows of scales

# (the number of scales of a row, the number of choices of a token). With 56 scales and 8 choices,
# a token takes nearly all 128 threads; with 128 scales and 22 choices, several turns.
SCALES = [(4, 1), (56, 8), (128, 22)]


def scales_of(num_rows: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(width)
    return rng.integers(1, 2**31, (num_rows, width)).astype(np.uint32).view(np.float32)


def words_of(memory: Memory) -> np.ndarray:
    return memory.bytes.view(np.uint32).reshape(memory.shape)


@pytest.mark.parametrize(("width", "top_k"), SCALES)
def test_a_row_is_stored_to_each_of_the_rows(width, top_k):
    rng = np.random.default_rng(top_k)
    out, row = scales_of(4 * top_k, width), scales_of(1, width)[0]
    places = rng.permutation(len(out))[:top_k]
    places[rng.random(top_k) < 0.4] = NOWHERE
    places[-1] = len(out) - 1
    memory, source = Memory(out), Memory(row, is_shared=True)
    run_warpgroup(quantized_rows.store_each, source, memory, [scalar(p) for p in places])
    wanted = out.view(np.uint32).copy()
    wanted[places[places >= 0]] = row.view(np.uint32)
    np.testing.assert_array_equal(words_of(memory), wanted)


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize(("width", "top_k"), SCALES)
def test_the_first_row_of_each_list_is_copied_to_its_others(width, top_k, count):
    rng = np.random.default_rng(100 * top_k + count)
    most = 9
    out = scales_of(most * top_k, width)
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
    np.testing.assert_array_equal(words_of(memory), wanted)
