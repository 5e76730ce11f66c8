"""Tests of the bench commands' runner: a case's rows are right, even if some programs fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from support import meshes
from support.kernels import needs_kernels

from jax_ep.bench import runner
from jax_ep.bench.collectives import _InPlaceLoop
from jax_ep.bench.timing import Loop


class Doubling(runner.Case):
    """A case whose programs double x; "wrong" triples it, and "broken" does not compile."""

    def __init__(self, *names: str):
        super().__init__("doubling", [{"implementation": name} for name in names])

    def prepare(self):
        return jnp.arange(8.0).reshape(2, 4)

    def build(self, row, shared):
        if row["implementation"] == "broken":
            raise ValueError("no kernel\nand much more")
        factor = 3 if row["implementation"] == "wrong" else 2
        return Loop(None, lambda x: factor * x, shared, meshes.expert_mesh(2), 10)

    def check(self, row, loop, shared):
        assert (loop.outputs() == 2 * shared).all(), "not twice x"
        return row["implementation"] != "unknown"

    def results(self, row):
        return {"per_s": 1e6 / row["wall"]["median_us"]}


class InTurns(Doubling):
    in_turns = True


@pytest.mark.needs_devices(2)
@pytest.mark.parametrize("kind", [Doubling, InTurns])
def test_a_program_that_fails_costs_no_other_its_results(kind):
    case = kind("right", "broken", "wrong", "unknown")
    right, broken, wrong, unknown = case.measure(runner.Run(check=True, repeats=3))
    assert right["checked"] and right["per_s"] > 0 and "error" not in right
    assert right["wall"]["low_us"] <= right["wall"]["median_us"] <= right["wall"]["high_us"]
    assert broken["error"] == "ValueError: no kernel" and "wall" not in broken
    assert wrong["error"].startswith("AssertionError: not twice x") and "wall" not in wrong
    assert "wall" in unknown and not unknown["checked"]
    assert ("relative_rate" in unknown) == (kind is InTurns)
    # `measure` must write its results into copies of the case's rows, and leave these as they are.
    assert case.rows[0] == {"implementation": "right"}
    (unasked,) = kind("wrong").measure(runner.Run(repeats=1))
    assert "wall" in unasked and not unasked["checked"]


@pytest.mark.needs_devices(2)
def test_rates_are_those_of_the_first_program_or_of_none():
    rows = InTurns("right", "also right").measure(runner.Run(repeats=3))
    assert rows[0]["relative_rate"] == 1.0 and rows[1]["relative_rate"] > 0
    rows = InTurns("broken", "right").measure(runner.Run(repeats=3))
    assert "relative_rate" not in rows[1] and "wall" in rows[1]


def test_operands_that_do_not_fit_fail_every_row():
    class TooLarge(Doubling):
        def prepare(self):
            raise RuntimeError("RESOURCE_EXHAUSTED")

    rows = TooLarge("right", "wrong").measure(runner.Run())
    assert [row["error"] for row in rows] == ["RuntimeError: RESOURCE_EXHAUSTED"] * 2


@pytest.mark.needs_devices(2)
def test_what_cannot_start_in_time_is_an_error():
    (row,) = Doubling("right").measure(runner.Run(seconds=0.0))
    assert row["error"] == "TimeoutError: not started, because --seconds=0 had passed"


@pytest.mark.needs_devices(2)
def test_results_are_checked_in_memory_that_held_nan(monkeypatch):
    from jax_ep.bench import timing

    poisoned = []
    monkeypatch.setattr(
        timing, "_poison", lambda array: poisoned.append(array) or jnp.zeros(array.shape)
    )
    Loop(None, lambda x: 2 * x, jnp.ones((2, 4)), meshes.expert_mesh(2), 10).outputs()
    assert [array.shape for array in poisoned] == [(2, 4)]
    monkeypatch.undo()
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32):
        array = timing._poison(jax.ShapeDtypeStruct((2,), dtype))
        assert bool((jnp.isnan(array) if dtype != jnp.int32 else array == 2**31 - 1).all())


@needs_kernels
@pytest.mark.needs_devices(2)
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("kind", [Loop, _InPlaceLoop])
def test_a_loop_lowers_for_gpus(kind, spaced):
    """The loop and its spacer must have types that a `shard_map` with check_vma accepts."""
    from jax_ep.bench import timing

    def step(state):
        (x,) = state
        return 2 * x, jax.lax.psum(x, "expert")

    state = (jnp.ones((2, 4)),)
    loop = kind(None, step, state, meshes.expert_mesh(2), 3)
    after = timing._wait_on_device if spaced else timing._add_up
    on_ranks = loop._per_rank(lambda state: loop._loop(state, after, unroll=1))
    text = jax.jit(on_ranks).trace(state).lower(lowering_platforms=("cuda",)).as_text()
    assert ("@mosaic_gpu" in text) == spaced
