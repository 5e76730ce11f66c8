"""Tests of the reference against examples computed by hand, whose numbers define the contract."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jax_ep import reference
from jax_ep.formats import Float8

# Two ranks with three tokens each, two choices per token, four experts; rank 0 owns 0 and 1.
X = [
    np.array([[1, 10], [2, 20], [3, 30]], np.float32),
    np.array([[4, 40], [5, 50], [6, 60]], np.float32),
]
TOPK_IDX = [
    np.array([[0, 2], [1, 0], [-1, 1]], np.int32),
    np.array([[3, 0], [0, 0], [-1, -1]], np.int32),
]


def _dispatch(**options):
    return reference.dispatch(X, TOPK_IDX, num_experts=4, **options)


def _check(result, tokens, sizes, counts, needed, dropped=(0, 0)):
    """Asserts that the result of a dispatch on one rank has the given fields.

    `tokens` is column 0 of the received rows; column 1 must be ten times as large.
    """
    first = np.array(tokens, np.float32)
    np.testing.assert_array_equal(result.tokens, np.stack([first, 10 * first], axis=1))
    np.testing.assert_array_equal(result.group_sizes, sizes)
    np.testing.assert_array_equal(result.expert_counts, counts)
    np.testing.assert_array_equal(result.dropped_counts, dropped)
    assert result.group_sizes.dtype == result.expert_counts.dtype == np.int32
    assert (result.num_dropped, result.rows_needed) == (sum(dropped), needed)


def test_rows_stand_by_expert_then_source_then_token_then_choice():
    first, second = _dispatch(capacity=8)
    # Expert 0 has the first five rows, expert 1 the next two.
    _check(first, [1, 2, 4, 5, 5, 2, 3, 0], sizes=[5, 2], counts=[5, 2], needed=7)
    _check(second, [1, 4, 0, 0, 0, 0, 0, 0], sizes=[1, 1], counts=[1, 1], needed=2)
    np.testing.assert_array_equal(first.routes.ranks, [[0, 1], [0, 0], [-1, 0]])
    np.testing.assert_array_equal(first.routes.rows, [[0, 0], [5, 1], [-1, 6]])
    np.testing.assert_array_equal(second.routes.ranks, [[1, 0], [0, 0], [-1, -1]])
    np.testing.assert_array_equal(second.routes.rows, [[1, 2], [3, 4], [-1, -1]])


def test_overflow_drops_the_last_rows_and_clips_the_blocks():
    first, second = _dispatch(capacity=6, expert_alignment=4)
    # Expert 1 has no rows, since its block would begin at row 8, past the end of the buffer.
    rows = [1, 2, 4, 5, 5, 0]
    _check(first, rows, sizes=[6, 0], counts=[5, 0], needed=12, dropped=[0, 2])
    _check(second, [1, 0, 0, 0, 4, 0], sizes=[4, 2], counts=[1, 1], needed=8)
    np.testing.assert_array_equal(first.routes.rows, [[0, 0], [-1, 1], [-1, -1]])
    y = [np.arange(1, 7, dtype=np.float32)[:, None]] * 2
    # Dropped rows count as zeros.
    np.testing.assert_array_equal(
        reference.combine(y, [d.routes for d in (first, second)])[0], [[1 + 1], [2], [0]]
    )


def test_fair_overflow_takes_from_the_experts_with_most_rows():
    """Rows must be dropped from the experts with most rows: rank 0 gets 5 + 2 rows and has 5."""
    first, second = _dispatch(capacity=5, overflow="fair")
    # The quota is 3: three rows of expert 0 are kept, and both of expert 1.
    _check(first, [1, 2, 4, 2, 3], sizes=[3, 2], counts=[3, 2], needed=7, dropped=[2, 0])
    _check(second, [1, 4, 0, 0, 0], sizes=[1, 1], counts=[1, 1], needed=2)
    np.testing.assert_array_equal(second.routes.rows, [[1, 2], [-1, -1], [-1, -1]])
    # With a fifth row, expert 0's block would be padded to eight rows, and the blocks of both
    # experts would not fit.
    first, _ = _dispatch(capacity=11, expert_alignment=4, overflow="fair")
    rows = [1, 2, 4, 5, 2, 3, 0, 0, 0, 0, 0]
    _check(first, rows, sizes=[4, 4], counts=[4, 2], needed=12, dropped=[1, 0])


def test_past_a_host_capacity_a_token_has_no_choices_on_the_host():
    """A token past the host capacity must have no choice there: rank 1's second token."""
    first, second = _dispatch(capacity=8, num_hosts=2, host_capacity=1)
    rows = [1, 2, 4, 2, 3, 0, 0, 0]
    _check(first, rows, sizes=[3, 2], counts=[3, 2], needed=5, dropped=[2, 0])
    np.testing.assert_array_equal(second.tokens[:3, 0], [1, 4, 0])
    np.testing.assert_array_equal(second.routes.rows, [[1, 2], [-1, -1], [-1, -1]])


def test_combine_and_gradients():
    routes = [result.routes for result in _dispatch(capacity=8)]
    y = [
        np.array([[1], [2], [3], [4], [5], [6], [7], [np.nan]], np.float32),
        np.array([[10], [20], *[[np.nan]] * 6], np.float32),
    ]
    first, second = reference.combine(y, routes)
    np.testing.assert_array_equal(first, [[1 + 10], [6 + 2], [7]])
    np.testing.assert_array_equal(second, [[20 + 3], [4 + 5], [0]])
    sums = reference.dispatch_grad(y, routes)
    for got, want in zip(sums, (first, second), strict=True):
        np.testing.assert_array_equal(got, want)
    weights = [
        np.array([[0.5, 2], [1, 3], [np.nan, -1]], np.float32),
        np.array([[1, 1], [2, 0.25], [4, 4]], np.float32),
    ]
    first, second = reference.combine(y, routes, weights)
    np.testing.assert_array_equal(first, [[0.5 * 1 + 2 * 10], [6 + 3 * 2], [-7]])
    np.testing.assert_array_equal(second, [[20 + 3], [2 * 4 + 0.25 * 5], [0]])

    grad_out = [np.array([[1, 2], [3, 4], [5, 6]], np.float32), np.ones((3, 2), np.float32)]
    y = [np.ones((8, 2), np.float32) * np.arange(8)[:, None].astype(np.float32)] * 2
    weights = [np.array([[2, 3], [4, 5], [6, 7]], np.float32)] * 2
    grad_y, grad_weights = reference.combine_grad(grad_out, y, routes, weights)
    np.testing.assert_array_equal(
        grad_y[0], [[2, 4], [15, 20], [3, 3], [4, 4], [5, 5], [12, 16], [35, 42], [0, 0]]
    )
    np.testing.assert_array_equal(grad_y[1], [[3, 6], [2, 2], *[[0, 0]] * 6])
    np.testing.assert_array_equal(grad_weights[0], [[0, 0], [35, 7], [0, 66]])
    np.testing.assert_array_equal(grad_weights[1], [[2, 4], [6, 8], [0, 0]])


def test_unsigned_choices_with_a_host_capacity():
    """An unsigned dtype cannot hold -1, which marks a choice that is not made."""
    x, choices = np.ones((2, 2, 1), np.float32), np.asarray([[[0], [1]], [[0], [0]]], np.uint8)
    options = dict(num_experts=2, capacity=8, num_hosts=2, host_capacity=1)
    got, _ = reference.dispatch(x, choices, **options)
    want, _ = reference.dispatch(x, choices.astype(np.int32), **options)
    assert got.num_dropped == want.num_dropped == 1
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_combine_accumulates_in_float32_and_returns_the_dtype_of_y():
    x = [np.zeros((1, 1), ml_dtypes.bfloat16)]
    routes = [reference.dispatch(x, [np.array([[0, 0, 0]])], num_experts=1)[0].routes]
    # bfloat16 cannot represent 257.
    y = [np.array([[256], [1], [-256]], ml_dtypes.bfloat16)]
    (out,) = reference.combine(y, routes)
    assert out.dtype == ml_dtypes.bfloat16 and float(out[0, 0]) == 1


def test_float8_numbers_are_those_of_the_formats():
    """The reference's float8 must equal `Float8` bit for bit, at any magnitude and around NaN."""
    rng = np.random.default_rng(0)
    for factor in (0, 1e-40, 1e-30, 1, 1e30):
        x = rng.standard_normal((2, 256, 384)) * np.exp(3 * rng.standard_normal((2, 256, 1)))
        x = (x * factor).astype(np.float32)
        x[0, 3, 5], x[1, 200, 77] = np.nan, np.inf
        for block in ((1, 128), (128, 128), (128, 1)):
            values, scales = Float8.of(ml_dtypes.float8_e4m3fn, block).encode(x)
            scales = scales.astype(np.float64).repeat(block[0], 1).repeat(block[1], 2)
            got = reference.float8(x, block)
            np.testing.assert_array_equal(got, values.astype(np.float64) * scales)
            assert np.isnan(got).sum() == 2
