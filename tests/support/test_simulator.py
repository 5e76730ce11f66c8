"""Tests that the simulator finds the errors of faulty kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import tile_length
from pallas_kernels.collectives.with_signals import one_shot, two_shot
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import WARPGROUP
from support.selection import quick
from support.simulator import KernelError, Simulated, simulate, simulated, simulated_ranks
from support.stacked import Problem, combine, dispatch

PROBLEM = Problem(2, 4, 32, 2, 4, "skewed")
PLAN = Plan(1, 3)

pytestmark = simulated


def faulty(**methods: Any) -> Simulated:
    """Makes a fabric in which some methods of `Simulated` are replaced."""
    ranks = simulated_ranks(PROBLEM.num_ranks)
    return type("Faulty", (Simulated,), methods)(ranks.num_ranks, ranks.interpret)


def nothing(*_: Any, **__: Any) -> None:
    pass


def wait_for_none(self, kind, count, what):
    Simulated.wait(self, kind, 0, what)


def signal_twice(self, kind, count, *, release=True):
    Simulated.signal(self, kind, count)
    Simulated.signal(self, kind, count)


def signal_relaxed(self, kind, count, *, release=True):
    Simulated.signal(self, kind, count, release=False)


UNORDERED = "a race|may leave before|no signal has released"
RELEASED = "no signal has released rank"
# A case is (what the fabric does wrong, the kernel, the error that names the fault).
FAULTS = {
    "silent": (dict(signal=nothing), dispatch, r"rank . waits for signal 1 .* has sent \[\]"),
    "unconnected": (dict(connect=nothing), dispatch, "a rank's memory before connect"),
    "impatient": (dict(wait=wait_for_none), dispatch, UNORDERED),
    "impatient in combine": (dict(wait=wait_for_none), combine, UNORDERED),
    "repeating": (
        dict(signal=signal_twice),
        dispatch,
        "signals 1 of kind 0, after 1: counts must grow",
    ),
    "wordless": (dict(send_values=nothing), dispatch, "rank . waits for (values|signal 1) of"),
    "barrierless": (dict(barrier=nothing), dispatch, "a barrier is missing before"),
    "overtaking": (dict(signal=signal_relaxed), dispatch, RELEASED),
    "overtaking in combine": (dict(signal=signal_relaxed), combine, RELEASED),
}


@pytest.mark.parametrize(("methods", "kernel", "message"), quick(FAULTS, "impatient in combine"))
def test_a_faulty_fabric_is_found(methods, kernel, message):
    with pytest.raises(KernelError, match=message):
        simulate(kernel(PROBLEM, PLAN, faulty(**methods)))


def test_a_rank_that_sends_values_and_hears_nothing_is_found():
    """A rank that sends values must receive something from each peer."""
    ranks = simulated_ranks(2)

    def body(x, out, words):
        ranks.send_values(ranks.mine(x), 0)
        ranks.read_values(ranks.rank(), 0, words, "test")
        ranks.barrier()
        ranks.mine(out)[...] = words[...]

    kernel = fb.kernel(
        ranks, body, name="test", num_blocks=1, num_warpgroups=1,
        out_type=[jax.ShapeDtypeStruct((WARPGROUP,), jnp.int32)],
        scratch_types=dict(words=plgpu.SMEM((WARPGROUP,), jnp.int32)),
    )  # fmt: skip
    with pytest.raises(KernelError, match=r"hears nothing of a peer.*\[\(0, 1\), \(1, 0\)\]"):
        simulate(lambda: kernel(jnp.zeros((2, WARPGROUP), jnp.int32)))


def test_writes_need_no_reader_to_be_released():
    """A relaxed signal must be an error if a rank has written to a peer, unread or not."""
    x = jnp.ones((2, 2, tile_length("float32")))
    collective = dict(fabric=faulty(signal=signal_relaxed), plan=tiles.TilePlan(1, 1))
    with pytest.raises(KernelError, match="no signal has released .* the end of rank"):
        simulate(lambda: two_shot(x, **collective))
    assert (simulate(lambda: one_shot(x[0], **collective)) == 2).all()


def test_a_deadlock_within_a_rank_is_found(monkeypatch):
    monkeypatch.setattr("pallas_kernels.exchange.combine.plgpu.barrier_arrive", nothing)
    with pytest.raises(KernelError, match="a deadlock"):
        simulate(combine(PROBLEM, PLAN, simulated_ranks(2)))


@pytest.mark.slow
def test_a_stage_reused_too_early_is_found(monkeypatch):
    monkeypatch.setattr("pallas_kernels.exchange.dispatch.plgpu.wait_smem_to_gmem", nothing)
    with pytest.raises(KernelError, match="a race|under way"):
        simulate(dispatch(PROBLEM, PLAN, simulated_ranks(2)))
