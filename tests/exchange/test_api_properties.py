"""Tests that any routing gives what the reference gives, and that the reference keeps its order."""

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
    assert_bitwise_equal,
    assert_outputs,
    implementations,
    most_ranks,
    program,
    rows_of,
    run_reference,
    some_inputs,
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


@CONTRACT
@given(calls(DROPLESS + OVERFLOWING))
def test_everything_equals_the_reference(implementation: Implementation, call: Call):
    case, topk_idx, seed = call
    capacity = rows_of(case, implementation)
    inputs = some_inputs(case, topk_idx, np.random.default_rng(seed), capacity)
    assert_outputs(program(case, implementation)(inputs), run_reference(case, inputs))


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
    """A smaller receive buffer must hold the first rows of a larger one."""
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
    """The reference, which finds rows by counting, must have them in the documented order."""
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
