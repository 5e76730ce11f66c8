"""Tests of the dispatch kernel in the simulator, against `jax_ep.reference`."""

from __future__ import annotations

import numpy as np
import pytest
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import (
    Problem,
    check_dispatch,
    check_dispatch_like,
    check_parts,
    dispatch,
    dispatch_like,
    with_unused_rows,
)

from pallas_kernels.exchange import dispatch as kernel
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric.hardware import WARPGROUP

CASES = {
    "one_rank": (Problem(1, 3, 128, 2, 4), Plan(1, 2)),
    "bulk_lists": (Problem(2, 5, 128, 4, 4, "masked"), Plan(2, 3, 2)),
    "four_ranks": (Problem(4, 3, 32, 2, 8, "skewed"), Plan(1, 3)),
    "one_choice": (Problem(2, 3, 32, 1, 2), Plan(3, 2)),
    "windows": (Problem(2, 7, 32, 3, 8), Plan(1, 3, 2, window_tokens=2, step_tokens=2)),
    "windows_apart": (
        Problem(2, 22, 32, 6, 8, "masked"),
        Plan(1, 4, window_tokens=3, step_tokens=5),
    ),
    "window_within_step": (Problem(2, 5, 32, 4, 8), Plan(1, 2, window_tokens=1, step_tokens=3)),
    "one_step": (Problem(2, 4, 32, 3, 4, "skewed"), Plan(1, 4, 3, step_tokens=8)),
    "two_stages": (Problem(2, 6, 32, 2, 4), Plan(1, 2, 1, step_tokens=3, num_copy_stages=1)),
    "lag_of_none": (Problem(2, 5, 32, 4, 4), Plan(1, 1, 0, step_tokens=2, num_copy_stages=1)),
    "one_expert": (Problem(2, 3, 32, 6, 4, "one_expert"), Plan(1, 2, num_copy_stages=2)),
    "repeated": (Problem(2, 4, 32, 4, 4, "repeated", alignment=4), Plan(1, 3, step_tokens=2)),
    "repeated_by_neighbours": (Problem(2, 4, 32, 3, 2, "repeated"), Plan(1, 3, step_tokens=2)),
    "many_experts": (Problem(2, 3, 32, 3, 160, "skewed", alignment=2), Plan(1, 3)),
    "overflow": (Problem(2, 5, 32, 4, 4, "skewed", capacity=7), Plan(2, 3, step_tokens=2)),
    "overflow_of_blocks": (Problem(2, 5, 32, 2, 8, capacity=6, alignment=4), Plan(1, 3)),
    "one_row": (Problem(2, 3, 32, 4, 4, "one_expert", capacity=1), Plan(1, 2, step_tokens=2)),
    "half": (Problem(2, 5, 64, 4, 4, "one_rank", "bfloat16"), Plan(2, 3, 2, step_tokens=3)),
    "empty": (Problem(2, 3, 64, 4, 4, "empty", "float16", capacity=4), Plan(1, 3)),
    "idle_sources": (Problem(2, 3, 32, 2, 4, "idle_sources", capacity=9), Plan(1, 3, 2)),
    "fewer_tokens_than_blocks": (Problem(2, 5, 32, 2, 4), Plan(4, 3)),
    "fair": (
        Problem(2, 5, 32, 4, 6, "skewed", capacity=7, overflow="fair"),
        Plan(2, 3, step_tokens=2),
    ),
    "fair_of_blocks": (
        Problem(2, 5, 32, 3, 8, "skewed", capacity=9, alignment=2, overflow="fair"),
        Plan(1, 3),
    ),
    "fair_of_one_expert": (
        Problem(2, 4, 32, 3, 2, "masked", capacity=3, overflow="fair"),
        Plan(1, 3),
    ),
    "fair_where_all_fits": (Problem(2, 4, 32, 2, 8, capacity=99, overflow="fair"), Plan(1, 3)),
    "fair_of_too_few_rows": (
        Problem(2, 4, 32, 4, 8, "masked", capacity=3, alignment=2, overflow="fair"),
        Plan(1, 3),
    ),
    "fair_of_many_experts": (
        Problem(2, 5, 32, 4, 160, "skewed", capacity=11, alignment=2, overflow="fair"),
        Plan(1, 3),
    ),
}


@simulated
@pytest.mark.parametrize(
    ("problem", "plan"), quick(CASES, "overflow_of_blocks", "many_experts", "fair_of_blocks")
)
def test_dispatch(problem, plan):
    fabric = simulated_ranks(problem.num_ranks)
    check_dispatch(problem, simulate(dispatch(problem, plan, fabric)))


@simulated
@pytest.mark.slow
def test_choices_are_counted_in_parts(monkeypatch):
    """The kernel must count each choice once if it loads the choices in several parts."""
    monkeypatch.setattr(kernel, "_COUNTED_AT_ONCE", WARPGROUP)
    problem = Problem(2, 40, 32, 8, 8, "masked")
    assert 2 * WARPGROUP < problem.topk_idx[0].size < 3 * WARPGROUP
    check_dispatch(problem, simulate(dispatch(problem, Plan(2, 3), simulated_ranks(2))))


@simulated
@pytest.mark.parametrize("call", quick([dispatch, dispatch_like], dispatch))
def test_rows_that_no_token_gets_may_stay_as_they_are(call):
    """Without `zero_unused`, the kernel must not write the rows past the last expert's rows."""
    problem = Problem(2, 5, 32, 2, 4, "masked", alignment=4)
    results = simulate(call(problem, Plan(2, 3), simulated_ranks(2), zero_unused=False))
    parts = results[0] if call is dispatch else results
    check_parts(parts, [with_unused_rows(problem, problem.tokens, np.nan)])


LIKE_CASES = [
    "one_rank",
    "four_ranks",
    "windows_apart",
    "one_expert",
    "overflow_of_blocks",
    "half",
    "fewer_tokens_than_blocks",
    "fair",
    "fair_of_blocks",
    "fair_of_many_experts",
]


@simulated
@pytest.mark.parametrize("case", LIKE_CASES)
@pytest.mark.slow
def test_dispatch_like(case):
    problem, plan = CASES[case]
    fabric = simulated_ranks(problem.num_ranks)
    check_dispatch_like(problem, simulate(dispatch_like(problem, plan, fabric)))
