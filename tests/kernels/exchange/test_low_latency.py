"""Tests of the low-latency exchange kernels in the simulator, against `jax_ep.reference`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.selection import quick
from support.simulator import TileContents, simulate, simulated, simulated_channels, simulated_ranks
from support.stacked import (
    Problem,
    check_combine,
    check_dispatch,
    check_dispatch_like,
    check_parts,
    check_rank_combine,
    receive_buffer,
    with_unused_rows,
)

from pallas_kernels.exchange import low_latency_combine, low_latency_dispatch
from pallas_kernels.exchange.plan import LowLatencyPlan

# A problem, and limits of its plan.
Case = tuple[Problem, dict[str, int]]

CASES: dict[str, Case] = {
    "two_ranks": (Problem(2, 3, 1024, 4, 4, "masked", "bfloat16"), {}),
    "tokens_of_a_block": (
        Problem(2, 3, 512, 3, 4, "repeated", alignment=2),
        dict(max_blocks=2, max_stages=5),
    ),
    "three_ranks": (Problem(3, 3, 512, 3, 6, "skewed"), dict(max_blocks=2, max_stages=2)),
    # A warpgroup sends two tiles to each peer, as many as there is room for with five ranks. There
    # are more ranks than warpgroups in a block, so some of these count the choices of two ranks.
    "five_ranks": (Problem(5, 3, 512, 2, 10, "masked"), dict(max_blocks=2)),
    "tiles_of_a_worker": (Problem(2, 2, 3584, 2, 4), {}),
    "overflow": (Problem(2, 5, 512, 4, 4, "skewed", capacity=7), dict(max_blocks=3)),
    "fair_of_blocks": (
        Problem(2, 4, 512, 3, 8, "skewed", capacity=9, alignment=2, overflow="fair"),
        dict(max_blocks=2),
    ),
    "all_to_one_rank": (Problem(2, 3, 1024, 4, 4, "one_rank", "float16"), dict(max_stages=1)),
    "one_expert": (Problem(2, 3, 512, 6, 4, "one_expert"), dict(max_stages=4)),
    "many_experts": (Problem(2, 3, 512, 3, 160, "skewed", alignment=2), {}),
    "idle_sources": (Problem(2, 3, 512, 2, 4, "idle_sources", capacity=9), {}),
    "empty": (Problem(2, 3, 1024, 4, 4, "empty", "float16", capacity=4), {}),
}
# Two tiles overlap and write the same values, which the interpreter would report as a race.
MOVED_BACK = Problem(2, 2, 1408, 3, 4, "masked", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls of the kernels for one problem, all with the same tile buffers and counters."""

    problem: Problem
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: TileContents = dataclasses.field(default_factory=TileContents)
    detect_races: bool = True

    def run(self, kernel: Any, *arrays: Any, **options: Any) -> Any:
        problem = self.problem
        ranks, races = problem.num_ranks, self.detect_races
        plan = LowLatencyPlan(
            num_tokens=problem.num_tokens,
            hidden=problem.hidden,
            dtype=problem.dtype,
            num_ranks=ranks,
            num_gpus=ranks,
            top_k=problem.top_k,
            num_experts=problem.num_experts,
            **self.limits,
        )
        assert plan.fits()
        channels = simulated_channels([(1, ranks)], range(ranks), self.memory, detect_races=races)
        fabric = simulated_ranks(ranks, detect_races=races)
        operands = [None if a is None else jnp.asarray(a) for a in arrays]
        options |= dict(fabric=fabric, channels=channels, plan=plan)
        return simulate(functools.partial(kernel, *operands, **options))

    def dispatch(self, zero_unused: bool = True) -> Any:
        kernel, problem = low_latency_dispatch.low_latency_dispatch, self.problem
        buffer = receive_buffer(problem, zero_unused)
        return self.run(kernel, problem.x, problem.topk_idx, buffer=buffer)

    def dispatch_like(self) -> Any:
        kernel, problem = low_latency_dispatch.dispatch_like, self.problem
        arrays = problem.x, problem.topk_idx, problem.rows, problem.counts
        return self.run(kernel, *arrays, buffer=receive_buffer(problem))

    def combine(self) -> Any:
        kernel, problem = low_latency_combine.combine, self.problem
        arrays = problem.y, problem.weights, problem.topk_idx, problem.rows
        return self.run(kernel, *arrays)

    def rank_combine(self) -> Any:
        kernel, problem = low_latency_combine.combine, self.problem
        sums = problem.sums.reshape(problem.num_ranks, -1, problem.hidden)
        arrays = sums, None, problem.topk_idx, problem.local_topk_idx
        return self.run(kernel, *arrays, by_rank=True)

    def check(self, *kernels: str) -> None:
        """Runs kernels one after another, and compares their results with the reference's."""
        for kernel in kernels:
            CHECKS[kernel](self.problem, getattr(self, kernel)())


CHECKS = {
    "dispatch": check_dispatch,
    "dispatch_like": check_dispatch_like,
    "combine": check_combine,
    "rank_combine": check_rank_combine,
}


@simulated
@pytest.mark.slow
def test_rows_that_no_token_gets_may_stay_as_they_are():
    problem = Problem(2, 3, 512, 2, 4, "masked", alignment=2)
    parts, *_ = Calls(problem).dispatch(zero_unused=False)
    check_parts(parts, [with_unused_rows(problem, problem.tokens, np.nan)])


def without_weights(problem: Problem) -> Problem:
    return dataclasses.replace(problem, weighted=False)


RUNS = {
    f"{kernel}-{name}": (kernel, *CASES[name])
    for kernel in CHECKS
    for name in CASES
    if kernel != "rank_combine" or name in ("tokens_of_a_block", "idle_sources", "empty")
}
RUNS |= {
    f"plain_combine-{name}": ("combine", without_weights(problem), limits)
    for name, (problem, limits) in CASES.items()
}


@simulated
@pytest.mark.parametrize(
    ("kernel", "problem", "limits"),
    quick(RUNS, "dispatch-tokens_of_a_block", "combine-tokens_of_a_block"),
)
def test_kernel(kernel, problem, limits):
    Calls(problem, limits).check(kernel)


@simulated
@pytest.mark.slow
def test_calls_one_after_another():
    """Calls of different kernels must use the two sets of tile buffers in turn."""
    calls = Calls(*CASES["two_ranks"])
    plain = dataclasses.replace(calls, problem=without_weights(calls.problem))
    for _ in range(2):
        calls.check("dispatch")
        plain.check("combine")
        calls.check("combine")
    assert set(calls.memory.counters.values()) == {6}
    assert not calls.memory.tiles


@simulated
@pytest.mark.slow
def test_a_last_tile_that_is_moved_back():
    Calls(MOVED_BACK, detect_races=False).check("dispatch", "dispatch_like", "combine")


PLAN = LowLatencyPlan(
    num_tokens=128,
    hidden=7168,
    dtype="bfloat16",
    num_ranks=4,
    num_gpus=4,
    top_k=8,
    num_experts=256,
)


@pytest.mark.parametrize(
    "change",
    [
        # A block has three tokens, so a warpgroup sends six tiles to a peer, more than fit.
        dict(num_tokens=257),
        # A row is shorter than a tile.
        dict(hidden=1023),
        dict(num_ranks=1),
        # Five ranks are more than the four GPUs.
        dict(num_ranks=5),
        # These are more values than a call may send.
        dict(num_tokens=256, top_k=9, hidden=2048),
        dict(dtype="float32", num_tokens=129),
        # A host of more GPUs has less room for each.
        dict(num_ranks=2, num_gpus=5, num_tokens=129),
    ],
    ids=str,
)
def test_what_needs_more_room_than_there_is_does_not_fit(change):
    assert dataclasses.replace(PLAN, num_tokens=256).fits()
    assert dataclasses.replace(PLAN, num_ranks=2, num_gpus=5).fits()
    assert not dataclasses.replace(PLAN, **change).fits()
