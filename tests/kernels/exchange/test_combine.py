"""Tests of the combine kernel in the simulator, against `jax_ep.reference`."""

from __future__ import annotations

import dataclasses

import pytest
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import Problem, check_combine, combine

from pallas_kernels.exchange.plan import Plan
from pallas_kernels.formats import FLOAT8_ROWS

CASES = {
    "one_rank": (Problem(1, 3, 128, 2, 4), Plan(1)),
    "two_ranks": (Problem(2, 5, 128, 4, 4, "masked"), Plan(2)),
    "four_ranks": (Problem(4, 3, 32, 2, 8, "skewed", weighted=False), Plan(1)),
    "one_choice": (Problem(2, 3, 32, 1, 2, weighted=False), Plan(3)),
    "receive_buffer_reused": (Problem(2, 7, 32, 2, 4), Plan(1, receive_steps=3)),
    "receive_buffer_of_three": (
        Problem(2, 9, 32, 2, 4),
        Plan(1, step_tokens=2, receive_steps=3),
    ),
    "receive_buffer_for_all": (Problem(2, 5, 32, 2, 4), Plan(1, step_tokens=3, receive_steps=8)),
    "windows": (Problem(2, 6, 32, 3, 8), Plan(1, step_tokens=4)),
    "windows_apart": (Problem(2, 22, 32, 6, 8, "masked"), Plan(1, step_tokens=7)),
    "one_worker": (
        Problem(2, 4, 32, 3, 4, "skewed", weighted=False),
        Plan(1, receive_steps=3, num_workers=1),
    ),
    "more_workers_than_sums": (Problem(2, 3, 32, 2, 4), Plan(1, num_workers=7)),
    "one_expert": (Problem(2, 3, 32, 6, 4, "one_expert"), Plan(1)),
    "one_expert_plain": (Problem(2, 3, 32, 6, 4, "one_expert", weighted=False), Plan(1)),
    "repeated": (Problem(2, 3, 32, 4, 4, "repeated", alignment=4), Plan(1, step_tokens=2)),
    "dropped": (Problem(2, 5, 32, 3, 4, "skewed", capacity=5), Plan(1, step_tokens=2)),
    "all_dropped": (Problem(2, 4, 32, 2, 4, "one_rank", capacity=1), Plan(1)),
    "half": (Problem(2, 4, 192, 3, 4, dtype="bfloat16"), Plan(2, step_tokens=3)),
    "half_plain": (Problem(2, 3, 64, 4, 4, "skewed", "float16", weighted=False), Plan(1)),
    "long_rows": (Problem(2, 2, 8224, 2, 4), Plan(1)),
    "empty": (Problem(2, 3, 32, 2, 4, "empty", capacity=4), Plan(1)),
    "idle_sources": (Problem(2, 3, 32, 2, 4, "idle_sources", capacity=9), Plan(1)),
    "empty_steps": (Problem(2, 8, 32, 1, 4, "masked"), Plan(1)),
    "fewer_tokens_than_blocks": (Problem(2, 5, 32, 2, 4), Plan(4)),
    "last_block_short": (Problem(2, 5, 32, 2, 4), Plan(2)),
}

# Rows whose sums are quantized have whole blocks of 512 elements.
WIRE_HIDDEN = dict.fromkeys(CASES, 512) | {"half": 1536, "one_expert": 1024, "long_rows": 8704}
WIRE_CASES = {
    name: (dataclasses.replace(problem, hidden=WIRE_HIDDEN[name]), plan)
    for name, (problem, plan) in CASES.items()
}
WIRE_CASES["all_dropped_plain"] = (
    Problem(2, 4, 512, 2, 4, "one_rank", "float16", capacity=1, weighted=False),
    Plan(1),
)


@simulated
@pytest.mark.parametrize(("problem", "plan"), quick(CASES, "half"))
def test_combine(problem, plan):
    fabric = simulated_ranks(problem.num_ranks)
    check_combine(problem, simulate(combine(problem, plan, fabric)))


@simulated
@pytest.mark.parametrize(("problem", "plan"), WIRE_CASES.values(), ids=WIRE_CASES)
@pytest.mark.slow
def test_combine_of_quantized_sums(problem, plan):
    call = combine(problem, plan, simulated_ranks(problem.num_ranks), wire=FLOAT8_ROWS)
    check_combine(problem, simulate(call), FLOAT8_ROWS)
