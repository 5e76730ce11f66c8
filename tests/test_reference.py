"""Tests of the reference against examples computed by hand, whose numbers define the contract."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

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


def test_routes_name_the_row_of_every_pair():
    first, second = _dispatch(capacity=8)
    np.testing.assert_array_equal(first.routes.ranks, [[0, 1], [0, 0], [-1, 0]])
    np.testing.assert_array_equal(first.routes.rows, [[0, 0], [5, 1], [-1, 6]])
    np.testing.assert_array_equal(second.routes.ranks, [[1, 0], [0, 0], [-1, -1]])
    np.testing.assert_array_equal(second.routes.rows, [[1, 2], [3, 4], [-1, -1]])


def test_alignment_pads_blocks_and_counts_the_padding():
    first, second = _dispatch(capacity=12, expert_alignment=4)
    rows = [1, 2, 4, 5, 5, 0, 0, 0, 2, 3, 0, 0]
    _check(first, rows, sizes=[8, 4], counts=[5, 2], needed=12)
    _check(second, [1, 0, 0, 0, 4, *[0] * 7], sizes=[4, 4], counts=[1, 1], needed=8)


def test_overflow_drops_the_last_rows_and_clips_the_blocks():
    first, second = _dispatch(capacity=6, expert_alignment=4)
    # Expert 1 has no rows, since its block would begin at row 8, past the end of the buffer.
    rows = [1, 2, 4, 5, 5, 0]
    _check(first, rows, sizes=[6, 0], counts=[5, 0], needed=12, dropped=[0, 2])
    _check(second, [1, 0, 0, 0, 4, 0], sizes=[4, 2], counts=[1, 1], needed=8)
    np.testing.assert_array_equal(first.routes.rows, [[0, 0], [-1, 1], [-1, -1]])


def test_fair_overflow_takes_from_the_experts_with_most_rows():
    """Rows must be dropped from the experts with most rows: rank 0 gets 5 + 2 rows and has 5."""
    first, second = _dispatch(capacity=5, overflow="fair")
    # The quota is 3: three rows of expert 0 are kept, and both of expert 1.
    _check(first, [1, 2, 4, 2, 3], sizes=[3, 2], counts=[3, 2], needed=7, dropped=[2, 0])
    _check(second, [1, 4, 0, 0, 0], sizes=[1, 1], counts=[1, 1], needed=2)
    np.testing.assert_array_equal(first.routes.rows, [[0, 0], [3, 1], [-1, 4]])
    np.testing.assert_array_equal(second.routes.rows, [[1, 2], [-1, -1], [-1, -1]])


def test_fair_overflow_counts_padding():
    first, _ = _dispatch(capacity=11, expert_alignment=4, overflow="fair")
    # Expert 0 keeps four rows. With a fifth one, its block would be padded to eight rows, and the
    # blocks of both experts would not fit.
    rows = [1, 2, 4, 5, 2, 3, 0, 0, 0, 0, 0]
    _check(first, rows, sizes=[4, 4], counts=[4, 2], needed=12, dropped=[1, 0])
    # No row is kept: one row for each of the two experts would need two blocks of four rows, more
    # than the capacity.
    none, _ = _dispatch(capacity=7, expert_alignment=4, overflow="fair")
    _check(none, [0] * 7, sizes=[0, 0], counts=[0, 0], needed=12, dropped=[5, 2])


def test_unsigned_choices_with_a_host_capacity():
    """An unsigned dtype cannot hold -1, which marks a choice that is not made."""
    x, choices = np.ones((2, 2, 1), np.float32), np.asarray([[[0], [1]], [[0], [0]]], np.uint8)
    options = dict(num_experts=2, capacity=8, num_hosts=2, host_capacity=1)
    got, _ = reference.dispatch(x, choices, **options)
    want, _ = reference.dispatch(x, choices.astype(np.int32), **options)
    assert got.num_dropped == want.num_dropped == 1
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_past_a_host_capacity_a_token_has_no_choices_on_the_host():
    """A token past the host capacity must have no choice there: rank 1's second token."""
    first, second = _dispatch(capacity=8, num_hosts=2, host_capacity=1)
    rows = [1, 2, 4, 2, 3, 0, 0, 0]
    _check(first, rows, sizes=[3, 2], counts=[3, 2], needed=5, dropped=[2, 0])
    np.testing.assert_array_equal(second.tokens[:3, 0], [1, 4, 0])
    np.testing.assert_array_equal(second.routes.rows, [[1, 2], [-1, -1], [-1, -1]])
    for one, other in zip(_dispatch(num_hosts=2, host_capacity=2), _dispatch(), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_the_fair_quota_is_the_largest_that_fits():
    rng = np.random.default_rng(0)
    for _ in range(50):
        wanted = rng.integers(0, 30, rng.integers(1, 6)).tolist()
        capacity, alignment = int(rng.integers(1, 80)), int(rng.integers(1, 9))

        quota = reference.fair_quota(wanted, capacity, alignment)
        kept, one_more = (np.minimum(wanted, q) for q in (quota, quota + 1))
        assert sum(-(-kept // alignment) * alignment) <= capacity
        fits = sum(-(-one_more // alignment) * alignment) <= capacity
        assert quota == max(wanted) if fits else quota < max(wanted)


def test_capacity_of_one_row():
    first, second = _dispatch(capacity=1)
    _check(first, [1], sizes=[1, 0], counts=[1, 0], needed=7, dropped=[4, 2])
    _check(second, [1], sizes=[1, 0], counts=[1, 0], needed=2, dropped=[0, 1])


def test_empty_experts_have_no_rows_and_ids_out_of_range_are_none():
    idx = [np.array([[3, 4], [-7, 3], [99, -1]], np.int32), np.full((3, 2), -1, np.int32)]
    first, second = reference.dispatch(X, idx, num_experts=4, capacity=4, expert_alignment=2)
    _check(first, [0, 0, 0, 0], sizes=[0, 0], counts=[0, 0], needed=0)
    _check(second, [1, 2, 0, 0], sizes=[0, 2], counts=[0, 2], needed=2)


def test_dropless_capacity_is_enough_for_the_worst_routing():
    assert reference.dropless_capacity(1, 3, 2, 4) == 6
    assert reference.dropless_capacity(2, 3, 2, 2) == 12
    # 12 rows and the padding of two experts make 18, rounded up to a multiple of 4.
    assert reference.dropless_capacity(2, 3, 2, 2, 4) == 20
    # Two (token, choice) pairs fill two blocks of eight at most.
    assert reference.dropless_capacity(1, 1, 2, 64, 8) == 16
    everything_to_zero = [np.zeros((3, 2), np.int32)] * 2
    result = reference.dispatch(X, everything_to_zero, num_experts=4)[0]
    assert result.num_dropped == 0 and result.rows_needed == 12 == len(result.tokens)


def test_combine_sums_the_rows_of_a_token():
    routes = [result.routes for result in _dispatch(capacity=8)]
    y = [
        np.array([[1], [2], [3], [4], [5], [6], [7], [np.nan]], np.float32),
        np.array([[10], [20], *[[np.nan]] * 6], np.float32),
    ]
    first, second = reference.combine(y, routes)
    np.testing.assert_array_equal(first, [[1 + 10], [6 + 2], [7]])
    np.testing.assert_array_equal(second, [[20 + 3], [4 + 5], [0]])

    weights = [
        np.array([[0.5, 2], [1, 3], [np.nan, -1]], np.float32),
        np.array([[1, 1], [2, 0.25], [4, 4]], np.float32),
    ]
    first, second = reference.combine(y, routes, weights)
    np.testing.assert_array_equal(first, [[0.5 * 1 + 2 * 10], [6 + 3 * 2], [-7]])
    np.testing.assert_array_equal(second, [[20 + 3], [2 * 4 + 0.25 * 5], [0]])


def test_combine_takes_dropped_rows_as_zeros():
    routes = [result.routes for result in _dispatch(capacity=1)]
    y = [np.array([[3]], np.float32), np.array([[5]], np.float32)]
    first, second = reference.combine(y, routes)
    np.testing.assert_array_equal(first, [[3 + 5], [0], [0]])
    np.testing.assert_array_equal(second, [[0], [0], [0]])


def test_combine_accumulates_in_float32_and_returns_the_dtype_of_y():
    x = [np.zeros((1, 1), ml_dtypes.bfloat16)]
    routes = [reference.dispatch(x, [np.array([[0, 0, 0]])], num_experts=1)[0].routes]
    # bfloat16 cannot represent 257.
    y = [np.array([[256], [1], [-256]], ml_dtypes.bfloat16)]
    (out,) = reference.combine(y, routes)
    assert out.dtype == ml_dtypes.bfloat16 and float(out[0, 0]) == 1


def test_dispatch_like_follows_the_routes():
    routes = [result.routes for result in _dispatch(capacity=6, expert_alignment=4)]
    other = [np.array([[1], [2], [3]], np.float16), np.array([[4], [5], [6]], np.float16)]
    first, second = reference.dispatch_like(other, routes)
    assert first.dtype == np.float16
    np.testing.assert_array_equal(first, [[1], [2], [4], [5], [5], [0]])
    np.testing.assert_array_equal(second, [[1], [0], [0], [0], [4], [0]])


def test_gradients():
    routes = [result.routes for result in _dispatch(capacity=8)]
    grad_tokens = [np.arange(1, 9, dtype=np.float32)[:, None], np.full((8, 1), 10, np.float32)]
    first, second = reference.dispatch_grad(grad_tokens, routes)
    np.testing.assert_array_equal(first, [[1 + 10], [6 + 2], [7]])
    np.testing.assert_array_equal(second, [[10 + 3], [4 + 5], [0]])

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

    grad_y, grad_weights = reference.combine_grad(grad_out, y, routes)
    np.testing.assert_array_equal(grad_y[1], [[1, 2], [1, 1], *[[0, 0]] * 6])
    assert grad_weights == []


def test_top_k_routing_softmax():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]))
    routing = reference.top_k_routing(logits, 2)
    # Of equal logits, the lower expert id comes first.
    np.testing.assert_array_equal(routing.topk_idx, [[1, 3], [0, 1]])
    np.testing.assert_allclose(routing.topk_weights, np.array([[4 / 7, 3 / 7], [0.5, 0.5]]))
    np.testing.assert_allclose(routing.probs, np.exp(logits))
    routing = reference.top_k_routing(logits, 2, normalize=False, scale=10.0)
    np.testing.assert_allclose(routing.topk_weights, np.array([[4, 3], [2.5, 2.5]]))
    routing = reference.top_k_routing(logits, 2, normalize_epsilon=0.3)
    np.testing.assert_allclose(routing.topk_weights, np.array([[0.4, 0.3], [0.3125, 0.3125]]))


def test_the_bias_steers_the_choice_and_never_the_weight():
    scores = np.array([[0.8, 0.5, 0.2, 0.4]])
    logits = np.log(scores / (1 - scores))
    # With the bias, the scores are 0.8, 0.1, 0.7, 0.4.
    bias = np.array([0.0, -0.4, 0.5, 0.0])
    routing = reference.top_k_routing(logits, 2, score="sigmoid", bias=bias)
    np.testing.assert_array_equal(routing.topk_idx, [[0, 2]])
    np.testing.assert_allclose(routing.topk_weights, [[0.8, 0.2]])
    np.testing.assert_allclose(routing.probs, scores)
    # Scores differ by 0.1 and logits by 2, so a bias of 1 changes only the choice by scores.
    for choose_by, expert in (("score", 1), ("logit", 0)):
        options: dict = dict(score="sigmoid", bias=np.array([0.0, 1.0]), choose_by=choose_by)
        assert reference.top_k_routing(np.array([[4.0, 2.0]]), 1, **options).topk_idx == expert


def test_groups_are_ranked_by_their_two_best():
    scores = np.array([[0.9, 0.1, 0.1, 0.6, 0.6, 0.2, 0.3, 0.3, 0.3]])
    logits = np.log(scores / (1 - scores))
    routing = reference.top_k_routing(
        logits, 2, score="sigmoid", num_groups=3, groups_kept=1, normalize=False
    )
    # The second group wins, since 0.6 + 0.6 is more than 0.9 + 0.1.
    np.testing.assert_array_equal(routing.topk_idx, [[3, 4]])
    routing = reference.top_k_routing(logits, 2, score="sigmoid", num_groups=3, groups_kept=2)
    np.testing.assert_array_equal(routing.topk_idx, [[0, 3]])
    # The first group has the best expert.
    options: dict = dict(num_groups=3, groups_kept=1, group_score="max")
    routing = reference.top_k_routing(logits, 2, score="sigmoid", **options)
    np.testing.assert_array_equal(routing.topk_idx, [[0, 1]])
    with pytest.raises(ValueError, match="score"):
        reference.top_k_routing(logits, 2, score="argmax")


def test_losses_and_bias_update():
    uniform = np.full((4, 4), 0.25)
    spread = np.array([[0, 1], [2, 3], [0, 1], [2, 3]])
    assert reference.load_balance_loss(uniform, spread) == pytest.approx(1.0)
    one_hot = np.tile([1.0, 0, 0, 0], (4, 1))
    assert reference.load_balance_loss(one_hot, np.zeros((4, 1), int)) == pytest.approx(4.0)
    masked = np.array([[0, 1], [2, 3], [-1, -1], [-1, -1]])
    skewed = np.concatenate([uniform[:2], one_hot[:2]])
    assert reference.load_balance_loss(skewed, masked) == pytest.approx(1.0)
    assert reference.load_balance_loss(uniform, np.full((4, 2), -1)) == 0.0
    assert reference.router_z_loss(np.zeros((3, 4))) == pytest.approx(np.log(4) ** 2)
    bias = reference.update_expert_bias(np.array([0.0, 1.0, 2.0]), np.array([4, 3, 2]), 0.5)
    np.testing.assert_allclose(bias, [-0.5, 1.0, 2.5])


def test_grouped_matmul_skips_empty_groups_and_the_tail():
    lhs = np.array([[1, 0], [0, 1], [1, 1], [np.nan, np.nan]], np.float32)
    rhs = np.array([[[1], [2]], [[np.nan], [np.nan]], [[3], [4]]], np.float32)
    out = reference.grouped_matmul(lhs, rhs, np.array([2, 0, 1], np.int32))
    np.testing.assert_array_equal(out, [[1], [2], [7], [0]])


def test_the_layer_equals_dispatch_experts_combine():
    rng = np.random.default_rng(0)
    num_ranks, num_tokens, hidden, mlp, num_experts, top_k = 2, 5, 6, 7, 4, 2
    x = [rng.normal(size=(num_tokens, hidden)).astype(np.float32) for _ in range(num_ranks)]
    idx = [rng.integers(-1, num_experts, (num_tokens, top_k)) for _ in range(num_ranks)]
    weights = [rng.random((num_tokens, top_k)).astype(np.float32) for _ in range(num_ranks)]
    wi_0, wi_1 = rng.normal(size=(2, num_experts, hidden, mlp))
    wo = rng.normal(size=(num_experts, mlp, hidden))

    sent = reference.dispatch(x, idx, num_experts=num_experts, expert_alignment=8)
    y = [
        reference.expert_mlp(d.tokens, d.group_sizes, wi_0[own], wi_1[own], wo[own])
        for d, own in zip(sent, (slice(0, 2), slice(2, 4)), strict=True)
    ]
    y32 = [a.astype(np.float32) for a in y]
    out = reference.combine(y32, [d.routes for d in sent], weights)
    expected = reference.moe_layer(
        np.concatenate(x), np.concatenate(idx), np.concatenate(weights), wi_0, wi_1, wo
    )
    np.testing.assert_allclose(np.concatenate(out), expected, rtol=1e-4, atol=1e-4)
    one = reference.gated_mlp(x[0], wi_0[0], wi_1[0], wo[0])
    assert one.shape == (num_tokens, hidden) and one.dtype == np.float64


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


def test_float8_keeps_what_it_can_store():
    """Numbers that float8 can represent must not change, even in a block that is not full."""
    x = np.full((3, 200), 448.0)
    x[:, 1:6] = [416, 1.125, 2**-9, -(2**-8), 0]
    got = reference.float8(x)
    np.testing.assert_allclose(got, x, rtol=2**-22)
    assert reference.float8(np.full((1, 4), 17.0), (1, 4))[0, 0] == pytest.approx(17)


def test_float8_gradients_are_those_of_the_rounded_operands():
    rng = np.random.default_rng(0)
    sizes = np.array([5, 0, 9])
    tokens, grad = rng.standard_normal((2, 16, 128))
    wi_0, wi_1, wo = rng.standard_normal((3, 3, 128, 128)) / 12
    got = reference.float8_expert_mlp_grad(grad, tokens, sizes, wi_0, wi_1, wo)

    def loss(tokens, wi_0, wi_1, wo):
        return np.sum(reference.expert_mlp(tokens, sizes, wi_0, wi_1, wo) * grad)

    # Compare with the slope of the unrounded experts along the gradient; float8 keeps 4 bits.
    arrays = tokens, wi_0, wi_1, wo
    for i, gradient in enumerate(got):
        step = np.zeros_like(gradient)
        step[:] = 1e-4 * gradient / np.linalg.norm(gradient)
        ahead, behind = (
            loss(*(a + sign * step if i == j else a for j, a in enumerate(arrays)))
            for sign in (1, -1)
        )
        assert (ahead - behind) / 2e-4 == pytest.approx(np.linalg.norm(gradient), rel=0.02)
    assert not got[1][1].any() and not got[0][14:].any()
