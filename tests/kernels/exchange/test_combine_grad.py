"""Tests of the kernel for a combine's gradient in the simulator, against `jax_ep.reference`."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import Problem, check_combine_grad, combine_grad

from pallas_kernels.exchange.plan import Plan

CASES = {
    "one_rank": (Problem(1, 3, 128, 2, 4), Plan(1, 2)),
    "two_ranks": (Problem(2, 5, 128, 4, 4, "masked"), Plan(2, 4)),
    "four_ranks": (Problem(4, 3, 32, 2, 8, "skewed"), Plan(1, 4)),
    "one_choice": (Problem(2, 3, 32, 1, 2), Plan(3, 2)),
    "many_choices": (Problem(2, 2, 32, 18, 4), Plan(1, 4)),
    "windows": (Problem(2, 7, 32, 3, 8), Plan(1, 4, window_tokens=2)),
    "windows_apart": (
        Problem(2, 22, 32, 6, 8, "masked", capacity=60),
        Plan(1, 6, window_tokens=7),
    ),
    "empty_windows": (Problem(2, 8, 32, 1, 4, "masked"), Plan(1, 6, window_tokens=1)),
    "two_stages": (Problem(2, 4, 32, 3, 4, "skewed"), Plan(1, 2)),
    "one_stage": (Problem(2, 3, 32, 2, 4), Plan(1, 1, 0, num_workers=1)),
    "one_expert": (Problem(2, 3, 32, 6, 4, "one_expert"), Plan(1, 2)),
    "repeated": (Problem(2, 4, 32, 4, 4, "repeated", alignment=4), Plan(1, 4)),
    "many_experts": (Problem(2, 3, 32, 3, 160, "skewed", alignment=2), Plan(1, 4)),
    "dropped": (Problem(2, 5, 32, 3, 4, "skewed", capacity=5), Plan(1, 4)),
    "dropped_of_blocks": (Problem(2, 5, 32, 2, 8, capacity=6, alignment=4), Plan(2, 4)),
    "one_row": (Problem(2, 3, 32, 4, 4, "one_expert", capacity=1), Plan(1, 2)),
    "half": (Problem(2, 4, 192, 3, 4, dtype="bfloat16"), Plan(2, 4)),
    "half_of_one_rank": (Problem(2, 3, 64, 4, 4, "one_rank", "float16"), Plan(1, 4)),
    "long_rows": (Problem(2, 2, 1056, 2, 4), Plan(1, 2)),
    "whole_vectors": (Problem(2, 2, 1024, 2, 4), Plan(1, 4)),
    "empty": (Problem(2, 3, 32, 2, 4, "empty", capacity=4), Plan(1, 4)),
    "idle_sources": (Problem(2, 3, 32, 2, 4, "idle_sources", capacity=9), Plan(1, 4)),
    "fewer_tokens_than_blocks": (Problem(2, 5, 32, 2, 4), Plan(4, 4)),
    "fair": (Problem(2, 5, 32, 3, 6, "skewed", capacity=5, overflow="fair"), Plan(1, 4)),
    "fair_of_blocks": (
        Problem(2, 5, 32, 2, 8, capacity=6, alignment=2, overflow="fair"),
        Plan(2, 4),
    ),
    "last_block_short": (Problem(2, 5, 32, 2, 4), Plan(2, 4, window_tokens=2)),
}


@simulated
@pytest.mark.slow
def test_rows_that_no_token_has_may_stay_as_they_are():
    problem, plan = Problem(2, 5, 32, 2, 4, "masked", alignment=4), Plan(2, 4)
    call = combine_grad(problem, plan, simulated_ranks(2), zero_unused=False)
    check_combine_grad(problem, simulate(call), zero_unused=False)


@simulated
@pytest.mark.slow
def test_an_infinite_row_has_an_infinite_product():
    """The gradient of a weight whose row of y holds an infinity must be infinite, not NaN.

    This gradient is the row's product with the token's cotangent. The columns that pad the row must
    not turn it into NaN.
    """
    problem = Problem(2, 2, 1056, 3, 4, "masked")
    y = problem.y.copy()
    y[..., 0] = np.inf
    call = combine_grad(problem, Plan(1, 2), simulated_ranks(2))
    _, weights, _, *routes = call.args
    _, dweights = simulate(
        functools.partial(
            call.func, jnp.ones_like(y), weights, jnp.asarray(y), *routes, **call.keywords
        )
    )
    filled = ((problem.rows >= 0) & (problem.rows < problem.num_rows)).any(axis=0)
    assert filled.any()
    np.testing.assert_array_equal(dweights, np.where(filled, np.inf, 0))


@simulated
@pytest.mark.parametrize(("problem", "plan"), quick(CASES, "dropped_of_blocks"))
def test_combine_grad(problem, plan):
    fabric = simulated_ranks(problem.num_ranks)
    check_combine_grad(problem, simulate(combine_grad(problem, plan, fabric)))
