"""Tests of properties that hold for any routing, such as conservation and adjoint gradients."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from support.contract import (
    Case,
    Implementation,
    Inputs,
    assert_bitwise_equal,
    assert_equal,
    implementations,
    most_ranks,
    program,
    rows_of,
    run_reference,
    small_integers,
    small_weights,
)

from jax_ep import reference

settings.register_profile(
    "contract",
    max_examples=100,
    # An example has no deadline, since the first one of a shape waits for its compilation.
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
CONTRACT = settings.get_profile("contract")


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param


# There are few shapes, each compiled once, and many routings, in which repeated ids and -1 are as
# likely as other ids.
DROPLESS = [
    case
    for case in (
        Case(1, 4, 8, 2, 3),
        Case(2, 5, 8, 3, 4, "bfloat16"),
        Case(4, 3, 16, 2, 8, "float32", None, 4),
        Case(8, 2, 8, 4, 16, "float16"),
    )
    if case.num_ranks <= most_ranks(8)
]
OVERFLOWING = [
    case
    for case in (
        Case(1, 6, 8, 3, 3, "float16", 1),
        Case(2, 5, 8, 3, 6, "float32", 7, 4),
        Case(4, 4, 8, 2, 4, "bfloat16", 5),
        Case(8, 3, 8, 2, 16, "float32", 6, 8),
        Case(2, 6, 8, 3, 8, "float32", 9, 2, "fair"),
    )
    if case.num_ranks <= most_ranks(8)
]


Call = tuple[Case, np.ndarray, int]


@st.composite
def calls(draw: st.DrawFn, cases: list[Case]) -> Call:
    """Draws a case, its topk_idx [N, T, K], and a seed for the values."""
    case = draw(st.sampled_from(cases))
    topk_idx = draw(
        st_np.arrays(
            np.int32,
            (case.num_ranks, case.num_tokens, case.top_k),
            elements=st.integers(-1, case.num_experts - 1),
        )
    )
    return case, topk_idx, draw(st.integers(0, 2**16))


def _inputs(call: Call, implementation: Implementation) -> Inputs:
    case, topk_idx, seed = call
    rng = np.random.default_rng(seed)
    by_token = (case.num_ranks, case.num_tokens, case.hidden)
    by_row = (case.num_ranks, rows_of(case, implementation), case.hidden)
    return Inputs(
        x=small_integers(rng, by_token, case.dtype),
        topk_idx=topk_idx,
        grad_tokens=small_integers(rng, by_row, case.dtype),
        y=small_integers(rng, by_row, case.dtype),
        topk_weights=small_weights(rng, topk_idx.shape, "float32"),
        grad_out=small_integers(rng, by_token, case.dtype),
    )


def _dot(a: Any, b: Any) -> float:
    return float(np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64)))


def _f64(a: Any) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


@CONTRACT
@given(calls(DROPLESS + OVERFLOWING))
def test_everything_equals_the_reference(implementation: Implementation, call: Call):
    inputs = _inputs(call, implementation)
    actual, expected = program(call[0], implementation)(inputs), run_reference(call[0], inputs)
    for name in actual._fields[:6]:
        assert_bitwise_equal(getattr(actual, name), getattr(expected, name), name)
    for name in actual._fields[6:]:
        assert_equal(getattr(actual, name), getattr(expected, name), name)


@CONTRACT
@given(calls(DROPLESS))
def test_dropless_round_trip_and_conservation(implementation: Implementation, call: Call):
    """Without a limit, every choice must become a row, and return once in its token's sum."""
    case, topk_idx, _ = call
    inputs = _inputs(call, implementation)
    run = program(case, implementation)
    sent = run(inputs)
    chosen = topk_idx >= 0
    assert not np.any(sent.num_dropped)
    assert np.sum(sent.expert_counts) == np.sum(chosen)
    np.testing.assert_array_equal(
        np.reshape(sent.expert_counts, -1),
        np.bincount(topk_idx[chosen], minlength=case.num_experts),
    )
    copies = chosen.sum(axis=-1, keepdims=True)
    np.testing.assert_array_equal(
        _f64(sent.tokens).sum(axis=(0, 1)), (copies * _f64(inputs.x)).sum(axis=(0, 1))
    )
    back = run(inputs._replace(y=np.asarray(sent.tokens)))
    weight = np.where(chosen, inputs.topk_weights, 0).sum(axis=-1, keepdims=True)
    np.testing.assert_array_equal(_f64(back.plain_out), copies * _f64(inputs.x))
    np.testing.assert_array_equal(_f64(back.out), weight * _f64(inputs.x))


@CONTRACT
@given(calls(DROPLESS + OVERFLOWING))
def test_gradients_are_adjoints(implementation: Implementation, call: Call):
    """Gradients must be adjoint: <dispatch(x), g> = <x, dispatch_grad(g)>, and so for combine.

    Combine is linear both in y and in the weights.
    """
    inputs = _inputs(call, implementation)
    out = program(call[0], implementation)(inputs)
    assert _dot(out.tokens, inputs.grad_tokens) == _dot(inputs.x, out.grad_x)
    assert _dot(out.out, inputs.grad_out) == _dot(inputs.y, out.grad_y)
    assert _dot(out.out, inputs.grad_out) == _dot(inputs.topk_weights, out.grad_weights)
    assert _dot(out.plain_out, inputs.grad_out) == _dot(inputs.y, out.plain_grad_y)


@CONTRACT
@given(calls(DROPLESS + OVERFLOWING))
def test_dispatch_and_combine_are_linear(implementation: Implementation, call: Call):
    case, topk_idx, seed = call
    run = program(case, implementation)
    a = _inputs(call, implementation)
    b = _inputs((case, topk_idx, seed + 1), implementation)._replace(topk_weights=a.topk_weights)
    both = a._replace(**{name: getattr(a, name) + getattr(b, name) for name in ("x", "y")})
    out_a, out_b, out = run(a), run(b), run(both)
    for name in ("tokens", "out", "plain_out"):
        total = _f64(getattr(out_a, name)) + _f64(getattr(out_b, name))
        np.testing.assert_array_equal(_f64(getattr(out, name)), total, err_msg=name)


@CONTRACT
@given(calls(OVERFLOWING))
def test_every_pair_is_a_row_or_counted_as_dropped(implementation: Implementation, call: Call):
    case, topk_idx, _ = call
    sent = program(case, implementation)(_inputs(call, implementation))
    capacity = rows_of(case, implementation)
    chosen = topk_idx[topk_idx >= 0]
    meant = np.bincount(chosen, minlength=case.num_experts).reshape(case.num_ranks, -1)
    sizes, counts = np.asarray(sent.group_sizes), np.asarray(sent.expert_counts)
    np.testing.assert_array_equal(counts.sum(axis=1) + sent.num_dropped, meant.sum(axis=1))
    np.testing.assert_array_equal(counts + sent.dropped_counts, meant)
    assert np.all(counts <= np.minimum(sizes, meant))
    assert np.all(sizes.sum(axis=1) <= capacity)
    ends = np.cumsum(sizes, axis=1)
    starts = ends - sizes
    assert np.all((starts % case.expert_alignment == 0) | (sizes == 0))
    assert np.all((np.asarray(sent.num_dropped) == 0) | (np.asarray(sent.rows_needed) > capacity))

    # A row that is outside every expert's filled rows must be zero.
    row = np.arange(capacity)[None, None]
    real = (row >= starts[..., None]) & (row < (starts + counts)[..., None])
    assert not np.any(_f64(sent.tokens)[~real.any(axis=1)])


@CONTRACT
@given(calls(DROPLESS), st.randoms(use_true_random=False))
def test_the_order_of_tokens_and_choices_does_not_matter(
    implementation: Implementation, call: Call, random: Any
):
    """Permuting tokens must permute the results, and permuting a token's choices change nothing."""
    case, topk_idx, _ = call
    inputs = _inputs(call, implementation)
    run = program(case, implementation)
    tokens = random.sample(range(case.num_tokens), case.num_tokens)
    choices = random.sample(range(case.top_k), case.top_k)

    def layer(x: np.ndarray, topk_idx: np.ndarray, weights: np.ndarray) -> np.ndarray:
        given = inputs._replace(x=x, topk_idx=topk_idx, topk_weights=weights)
        return np.asarray(run(given._replace(y=np.asarray(run(given).tokens))).out)

    shuffled = layer(
        inputs.x[:, tokens],
        topk_idx[:, tokens][:, :, choices],
        inputs.topk_weights[:, tokens][:, :, choices],
    )
    assert_equal(shuffled, layer(inputs.x, topk_idx, inputs.topk_weights)[:, tokens])


# The reference needs no compilation, so that the shapes may vary as well.


@st.composite
def any_shape(draw: st.DrawFn) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Any]]:
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_experts = num_ranks * draw(st.integers(1, 4))
    shape = (num_ranks, draw(st.integers(1, 6)), draw(st.integers(1, 5)))
    topk_idx = draw(st_np.arrays(np.int32, shape, elements=st.integers(-1, num_experts - 1)))
    x = np.arange(1, num_ranks * shape[1] + 1, dtype=np.float32).reshape(*shape[:2], 1)
    options = {
        "num_experts": num_experts,
        "expert_alignment": draw(st.sampled_from([1, 2, 3, 8, 128])),
    }
    return list(x), list(topk_idx), options


@CONTRACT
@given(any_shape(), st.integers(1, 40))
def test_the_capacity_only_cuts_off_the_end(call: Any, capacity: int):
    """A smaller receive buffer must hold the first rows of a larger one.

    A capacity of `rows_needed`, the largest over the ranks, must be enough to drop nothing.
    """
    x, topk_idx, options = call
    whole = reference.dispatch(x, topk_idx, **options)
    cut = reference.dispatch(x, topk_idx, capacity=capacity, **options)
    for a, b in zip(whole, cut, strict=True):
        rows = min(capacity, len(a.tokens))
        assert_bitwise_equal(b.tokens[:rows], a.tokens[:rows])
        assert not np.any(b.tokens[rows:])
        assert a.num_dropped == 0 and a.rows_needed <= len(a.tokens)
        assert a.rows_needed == b.rows_needed == a.group_sizes.sum()
        assert b.expert_counts.sum() + b.num_dropped == a.expert_counts.sum()
    enough = max(1, *(int(d.rows_needed) for d in whole))
    for d in reference.dispatch(x, topk_idx, capacity=enough, **options):
        assert d.num_dropped == 0


@CONTRACT
@given(any_shape())
def test_rows_are_in_the_order_of_the_contract(call: Any):
    """The reference, which finds rows by counting, must have them in the documented order.

    That is the order of sorting by (expert, source rank, token, choice).
    """
    x, topk_idx, options = call
    num_local = options["num_experts"] // len(x)
    results = reference.dispatch(x, topk_idx, **options)
    for rank, result in enumerate(results):
        pairs = sorted(
            (int(expert), source, token, choice)
            for source, idx in enumerate(topk_idx)
            for (token, choice), expert in np.ndenumerate(idx)
            if expert >= 0 and expert // num_local == rank
        )
        rows = [int(results[s].routes.rows[t, k]) for _, s, t, k in pairs]
        assert rows == sorted(set(rows))
        np.testing.assert_array_equal(np.flatnonzero(result.tokens), rows)
        np.testing.assert_array_equal(result.tokens[rows, 0], [x[s][t, 0] for _, s, t, _ in pairs])
