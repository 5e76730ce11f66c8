"""The combine kernel in the simulator, against the plain reference."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from support.contract import assert_equal
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import Problem, combine

from pallas_kernels.fabric.plan import Plan

CASES = {
    "one_rank": (Problem(1, 3, 128, 2, 4), Plan(1, 2)),
    "two_ranks": (Problem(2, 5, 128, 4, 4, "masked"), Plan(2, 3, 2)),
    "four_ranks": (Problem(4, 3, 32, 2, 8, "skewed", weighted=False), Plan(1, 4)),
    "one_choice": (Problem(2, 3, 32, 1, 2, weighted=False), Plan(3, 2)),
    "receive_buffer_reused": (Problem(2, 7, 32, 2, 4), Plan(1, 3, 2)),
    "receive_buffer_of_three": (
        Problem(2, 9, 32, 2, 4),
        Plan(1, 4, 1, step_tokens=2, receive_steps=3),
    ),
    "receive_buffer_for_all": (Problem(2, 5, 32, 2, 4), Plan(1, 3, step_tokens=3, receive_steps=8)),
    "windows": (Problem(2, 6, 32, 3, 8), Plan(1, 3, window_tokens=2, step_tokens=3)),
    "windows_apart": (Problem(2, 22, 32, 6, 8, "masked"), Plan(1, 4, window_tokens=7)),
    "two_slots": (Problem(2, 4, 32, 3, 4, "skewed", weighted=False), Plan(1, 2, 1)),
    "one_slot": (Problem(2, 3, 32, 2, 4), Plan(1, 1, 0)),
    "one_expert": (Problem(2, 3, 32, 6, 4, "one_expert"), Plan(1, 2)),
    "one_expert_plain": (Problem(2, 3, 32, 6, 4, "one_expert", weighted=False), Plan(1, 3, 2)),
    "repeated": (Problem(2, 3, 32, 4, 4, "repeated", alignment=4), Plan(1, 3, step_tokens=2)),
    "dropped": (Problem(2, 5, 32, 3, 4, "skewed", capacity=5), Plan(1, 3, 2, step_tokens=2)),
    "all_dropped": (Problem(2, 4, 32, 2, 4, "one_rank", capacity=1), Plan(1, 3, 2)),
    "half": (Problem(2, 4, 192, 3, 4, dtype="bfloat16"), Plan(2, 3, 2, step_tokens=3)),
    "half_plain": (Problem(2, 3, 64, 4, 4, "skewed", "float16", weighted=False), Plan(1, 3)),
    "long_rows": (Problem(2, 2, 8224, 2, 4), Plan(1, 2)),
    "empty": (Problem(2, 3, 32, 2, 4, "empty", capacity=4), Plan(1, 3)),
    "idle_sources": (Problem(2, 3, 32, 2, 4, "idle_sources", capacity=9), Plan(1, 3, 2)),
    "empty_steps": (Problem(2, 8, 32, 1, 4, "masked"), Plan(1, 5, 4)),
    "fewer_tokens_than_blocks": (Problem(2, 5, 32, 2, 4), Plan(4, 3)),
    "last_block_short": (Problem(2, 5, 32, 2, 4), Plan(2, 3, window_tokens=2)),
}

WIRE = jnp.float8_e4m3fn
WIRE_CASES = {
    "one_rank": (Problem(1, 3, 512, 2, 4), Plan(1, 2)),
    "half": (Problem(2, 4, 1536, 4, 4, "masked", "bfloat16"), Plan(2, 3, 2, step_tokens=2)),
    "half_plain": (Problem(2, 3, 512, 4, 4, "skewed", "float16", weighted=False), Plan(1, 3)),
    "four_ranks": (Problem(4, 3, 512, 2, 8, "skewed", weighted=False), Plan(1, 4)),
    "one_choice": (Problem(2, 3, 512, 1, 2, weighted=False), Plan(3, 2)),
    "windows": (Problem(2, 6, 512, 3, 8), Plan(1, 3, window_tokens=2, step_tokens=3)),
    "receive_buffer_reused": (Problem(2, 7, 512, 2, 4, dtype="bfloat16"), Plan(1, 3, 2)),
    "receive_buffer_of_three": (
        Problem(2, 9, 512, 2, 4),
        Plan(1, 4, 1, step_tokens=2, receive_steps=3),
    ),
    "one_slot": (Problem(2, 3, 512, 2, 4, weighted=False), Plan(1, 1, 0)),
    "two_slots": (Problem(2, 4, 512, 3, 4, "skewed"), Plan(1, 2, 0)),
    "one_expert": (Problem(2, 3, 1024, 6, 4, "one_expert", "bfloat16"), Plan(1, 2)),
    "repeated": (Problem(2, 3, 512, 4, 4, "repeated", alignment=4), Plan(1, 3, step_tokens=2)),
    "dropped": (Problem(2, 5, 512, 3, 4, "skewed", capacity=5), Plan(1, 3, 2, step_tokens=2)),
    "all_dropped": (Problem(2, 4, 512, 2, 4, "one_rank", capacity=1), Plan(1, 3, 2)),
    "all_dropped_plain": (
        Problem(2, 4, 512, 2, 4, "one_rank", "float16", capacity=1, weighted=False),
        Plan(1, 3, 2),
    ),
    "long_rows": (Problem(2, 2, 8704, 2, 4), Plan(1, 2)),
    "empty": (Problem(2, 3, 512, 2, 4, "empty", capacity=4), Plan(1, 3)),
    "idle_sources": (Problem(2, 3, 512, 2, 4, "idle_sources", capacity=9), Plan(1, 3, 2)),
    "fewer_tokens_than_blocks": (Problem(2, 5, 512, 2, 4), Plan(4, 3)),
}


@simulated
@pytest.mark.parametrize(("problem", "plan"), quick(CASES, "half"))
def test_combine(problem, plan):
    out = simulate(combine(problem, plan, simulated_ranks(problem.num_ranks)))
    assert_equal(out, problem.combined)


@simulated
@pytest.mark.parametrize(("problem", "plan"), WIRE_CASES.values(), ids=WIRE_CASES)
@pytest.mark.slow
def test_combine_of_quantized_sums(problem, plan):
    fabric = simulated_ranks(problem.num_ranks)
    out = simulate(combine(problem, plan, fabric, wire_dtype=WIRE))
    assert_equal(out, problem.combined_by_wire)
