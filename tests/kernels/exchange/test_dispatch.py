"""Tests of the exchange kernels of many tokens in the simulator, against `jax_ep.reference`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import stacked
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import Problem

from pallas_kernels.exchange import dispatch as kernel
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.formats import FLOAT8_ROWS

CASES = {
    "one_rank": (Problem(1, 3, 128, 2, 4), Plan(1, 2)),
    "bulk_lists": (Problem(2, 5, 128, 4, 4, "masked"), Plan(2, 3, 2)),
    "four_ranks": (Problem(4, 3, 32, 2, 8, "skewed", weighted=False), Plan(1, 3)),
    "windows": (Problem(2, 7, 32, 3, 8), Plan(1, 3, 2, window_tokens=2, step_tokens=2)),
    "windows_apart": (
        Problem(2, 22, 32, 6, 8, "masked"),
        Plan(1, 4, window_tokens=3, step_tokens=5),
    ),
    "two_stages": (Problem(2, 6, 32, 2, 4), Plan(1, 2, 1, step_tokens=3, num_copy_stages=1)),
    "lag_of_none": (Problem(2, 5, 32, 4, 4), Plan(1, 1, 0, step_tokens=2, num_copy_stages=1)),
    "one_expert": (Problem(2, 3, 32, 6, 4, "one_expert"), Plan(1, 2, num_copy_stages=2)),
    "repeated": (Problem(2, 4, 32, 4, 4, "repeated", alignment=4), Plan(1, 3, step_tokens=2)),
    "many_experts": (Problem(2, 3, 32, 3, 160, "skewed", alignment=2), Plan(1, 3)),
    "half": (Problem(2, 5, 192, 4, 4, "one_rank", "bfloat16"), Plan(2, 3, 2, step_tokens=3)),
    "words": (Problem(2, 4, 64, 4, 4, "masked", "int32"), Plan(1, 3, 2)),
    "empty": (Problem(2, 3, 64, 4, 4, "empty", "float16", capacity=4), Plan(1, 3)),
    "idle_sources": (Problem(2, 3, 32, 2, 4, "idle_sources", capacity=9), Plan(1, 3, 2)),
}
DROPPING = {
    "overflow": (Problem(2, 5, 32, 4, 4, "skewed", capacity=7), Plan(2, 3, step_tokens=2)),
    "overflow_of_blocks": (Problem(2, 5, 32, 2, 8, capacity=6, alignment=4), Plan(1, 3)),
    "all_dropped": (Problem(2, 4, 32, 2, 4, "one_rank", capacity=1), Plan(1)),
    "fair_of_blocks": (
        Problem(2, 5, 32, 3, 8, "skewed", capacity=9, alignment=2, overflow="fair"),
        Plan(1, 3),
    ),
    "fair_of_too_few_rows": (
        Problem(2, 4, 32, 4, 8, "masked", capacity=3, alignment=2, overflow="fair"),
        Plan(1, 3),
    ),
}
SUMS = {
    "receive_buffer_of_three": (Problem(2, 9, 32, 2, 4), Plan(1, step_tokens=2, receive_steps=3)),
    "one_worker": (Problem(2, 4, 32, 3, 4, "skewed", weighted=False), Plan(1, num_workers=1)),
    "more_workers_than_sums": (Problem(2, 3, 32, 2, 4), Plan(1, num_workers=7)),
    "long_rows": (Problem(2, 2, 8224, 2, 4), Plan(1)),
    "empty_steps": (Problem(2, 8, 32, 1, 4, "masked"), Plan(1)),
}
ALL = CASES | DROPPING | SUMS
# Each kernel with its check, and the cases in which it runs.
KERNELS = {
    "dispatch": (stacked.dispatch, stacked.check_dispatch, CASES | DROPPING),
    "dispatch_like": (
        stacked.dispatch_like,
        stacked.check_dispatch_like,
        ("windows_apart", "one_expert", "half", "overflow_of_blocks", "fair_of_blocks"),
    ),
    "combine": (stacked.combine, stacked.check_combine, ALL),
    "rank_dispatch": (stacked.rank_dispatch, stacked.check_rank_dispatch, CASES),
    "rank_combine": (stacked.rank_combine, stacked.check_rank_combine, CASES),
}
# Cases in which rows also travel quantized. They then have whole blocks of 512 numbers.
QUANTIZED = (
    *("windows", "two_stages", "lag_of_none", "one_expert", "repeated", "half", "empty"),
    *("overflow", "all_dropped", "receive_buffer_of_three", "one_worker", "long_rows"),
)
HIDDEN = {"half": 1536, "long_rows": 8704}


def runs():
    """Returns the kernel, check, problem, plan and wire format of each test, by name."""
    found = {}
    for name, (call, check, cases) in KERNELS.items():
        for case in cases:
            problem, plan = ALL[case]
            # A combine adds rows, which are no integers.
            if case != "words" or "dispatch" in name:
                found[f"{name}-{case}"] = call, check, problem, plan, {}
            if case in QUANTIZED:
                wide = dataclasses.replace(problem, hidden=HIDDEN.get(case, 512))
                found[f"{name}-{case}-float8"] = call, check, wide, plan, dict(wire=FLOAT8_ROWS)
    return found


@simulated
@pytest.mark.parametrize(
    ("call", "check", "problem", "plan", "wire"),
    quick(
        runs(),
        *("dispatch-fair_of_blocks", "dispatch_like-half", "combine-one_worker-float8"),
        *("rank_dispatch-windows", "rank_combine-repeated"),
    ),
)
def test_kernel(call, check, problem, plan, wire):
    results = simulate(call(problem, plan, simulated_ranks(problem.num_ranks), **wire))
    check(problem, results, *wire.values())


@simulated
@pytest.mark.slow
def test_choices_are_counted_in_parts(monkeypatch):
    """The kernel must count each choice once if it loads the choices in several parts."""
    monkeypatch.setattr(kernel, "_COUNTED_AT_ONCE", WARPGROUP)
    problem = Problem(2, 40, 32, 8, 8, "masked")
    assert 2 * WARPGROUP < problem.topk_idx[0].size < 3 * WARPGROUP
    results = simulate(stacked.dispatch(problem, Plan(2, 3), simulated_ranks(2)))
    stacked.check_dispatch(problem, results)


@simulated
@pytest.mark.slow
@pytest.mark.parametrize("call", [stacked.dispatch, stacked.dispatch_like])
def test_rows_that_no_token_gets_may_stay_as_they_are(call):
    """Without `zero_unused`, the kernel must not write the rows past the last expert's rows."""
    problem = Problem(2, 5, 32, 2, 4, "masked", alignment=4)
    results = simulate(call(problem, Plan(2, 3), simulated_ranks(2), zero_unused=False))
    parts = results[0] if call is stacked.dispatch else results
    stacked.check_parts(parts, [stacked.with_unused_rows(problem, problem.tokens, np.nan)])
