"""Tests of ranks and their rendezvous; on GPUs, of the exchange kernels with ranks out of step."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support import stacked
from support.collectives import ranks_here
from support.kernels import lowered, needs_kernels, on_ranks
from support.meshes import cuda_mesh, expert_mesh
from support.processes import output_of_a_failure
from support.stacked import Problem

from jax_ep.runtime import availability
from jax_ep.runtime.fabric import of_axis
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric import mosaic
from pallas_kernels.formats import FLOAT8_ROWS

NUM_DEVICES = len(jax.devices())
needs_gpus = pytest.mark.skipif(
    availability.unavailable_reason() is not None or NUM_DEVICES < 2,
    reason=f"{availability.unavailable_reason() or 'there is one GPU'}",
)

NUM_TOKENS, HIDDEN, DTYPE = 67, 512, "bfloat16"
PLAN = Plan(16, 4, 2, step_tokens=2, receive_steps=3)
LONGEST_DELAY_NS = 200_000
NUM_DELAY_POINTS = 4


# --------------------------------------------------------- the programs that the tests on GPUs run


def problem_of(num_ranks: int, top_k: int = 4, kind: str = "masked") -> Problem:
    # A rank gets half of T * K choices or more, so that some are dropped.
    return Problem(
        num_ranks, NUM_TOKENS, HIDDEN, top_k, 4 * num_ranks, kind, DTYPE,
        capacity=2 * NUM_TOKENS * top_k // 5, alignment=2,
    )  # fmt: skip


FLOAT8 = dict(wire=FLOAT8_ROWS)
# Maps a kind of program to its kernels: how each is called and checked, and its options.
PROGRAMS: dict[str, list[tuple[Any, Any, dict[str, Any]]]] = {
    "expert": [
        (stacked.dispatch, stacked.check_dispatch, {}),
        (stacked.dispatch_like, stacked.check_dispatch_like, {}),
        (stacked.combine, stacked.check_combine, {}),
    ],
    "rank": [
        (stacked.rank_dispatch, stacked.check_rank_dispatch, {}),
        (stacked.rank_combine, stacked.check_rank_combine, {}),
    ],
    "float8": [
        (stacked.dispatch, stacked.check_dispatch, FLOAT8),
        (stacked.dispatch_like, stacked.check_dispatch_like, FLOAT8),
        (stacked.rank_dispatch, stacked.check_rank_dispatch, FLOAT8),
    ],
}


def calls_of(kind: str, problem: Problem) -> list[Any]:
    """Returns calls of a kind's kernels, with operands stacked by rank and without a fabric."""
    return [call(problem, PLAN, None, **options) for call, _, options in PROGRAMS[kind]]


def random_delays(num_ranks: int, seed: int | None) -> tuple[tuple[int, ...], ...]:
    if seed is None:
        return ()
    rng = np.random.default_rng(seed)
    delays = rng.integers(0, LONGEST_DELAY_NS, (NUM_DELAY_POINTS, num_ranks))
    delays[rng.random(delays.shape) < 0.3] = 0
    return tuple(map(tuple, delays.tolist()))


def program_of(calls: list[Any], mesh: Any, delays: Any = (), **options: Any) -> Any:
    """Jits `calls` on all ranks of a mesh; it takes their operands and stacks their results."""

    def run(operands: Any) -> Any:
        fabric = ranks_here(("expert",), jax.tree.leaves(operands)[0], delays)
        fabric = dataclasses.replace(fabric, **options)
        results = [
            call.func(*arrays, **call.keywords | dict(fabric=fabric))
            for call, arrays in zip(calls, jax.tree.map(lambda a: a[0], operands), strict=True)
        ]
        return jax.tree.map(lambda a: a[None], results)

    return on_ranks(run, mesh)


def operands_of(calls: list[Any]) -> list[Any]:
    return [call.args for call in calls]


@needs_kernels
@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.slow
def test_the_programs_for_gpus_lower(kind, num_ranks):
    assert (problem_of(num_ranks).groups.num_dropped > 0).all()
    mesh, delays = cuda_mesh((num_ranks,), ("expert",)), random_delays(num_ranks, 0)
    calls = calls_of(kind, problem_of(num_ranks))
    text = lowered(program_of(calls, mesh, delays), operands_of(calls))
    assert text.count("custom_call @mosaic_gpu") == len(calls)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((8,), "a"), ((2, 4), "ab"), ((2, 4), "ba"), ((2, 4), "a"), ((2, 2, 2), "ca")],
)
@pytest.mark.parametrize("gpus", [tuple(range(8)), (3, 1, 4, 15, 9, 2, 6, 5)], ids=str)
def test_a_gpu_knows_its_rank_and_its_peers(sizes, names, gpus, monkeypatch):
    """From its place in the mesh, a kernel must compute `lax.axis_index` and its peers' GPUs."""
    mesh = AbstractMesh(sizes, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))
    traced = []

    def trace(x: jax.Array) -> jax.Array:
        traced.append(of_axis(tuple(names), x))
        return x

    spec = P(mesh.axis_names)
    jax.eval_shape(jax.shard_map(trace, mesh=mesh, in_specs=spec, out_specs=spec), np.zeros(8))
    for name in ("inline", "reach_peers"):
        monkeypatch.setattr(mosaic, name, lambda *_: None)
    fabric, along = dataclasses.replace(traced[0], gpus=gpus), [mesh.shape[n] for n in names]
    assert fabric.num_ranks == np.prod(along)
    for number in range(8):
        place = dict(zip(mesh.axis_names, np.unravel_index(number, sizes), strict=True))
        operands = [jnp.full((1,), number, jnp.int32)]
        fabric.enter(operands, [], name="", num_blocks=1, reads=False, fabric_table=None)
        assert fabric.rank() == np.ravel_multi_index([place[name] for name in names], along)
        assert fabric._call.gpu == gpus[number]
        for rank, gpu in enumerate(fabric._call.gpus):
            there = place | dict(zip(names, np.unravel_index(rank, along), strict=True))
            assert gpu == gpus[np.ravel_multi_index(list(there.values()), sizes)]


# ------------------------------------------------------------------------------------ tests on GPUs

GPU_COUNTS = [n for n in (2, 4, 8) if n <= NUM_DEVICES]


@needs_gpus
@pytest.mark.parametrize("num_ranks", GPU_COUNTS)
@pytest.mark.parametrize("top_k", [3, 4])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_ranks_out_of_step_change_nothing(kind, weighted, num_ranks, top_k):
    problem = dataclasses.replace(problem_of(num_ranks, top_k), weighted=weighted)
    calls, mesh = calls_of(kind, problem), expert_mesh(num_ranks)
    backwards = Mesh(mesh.devices[::-1], mesh.axis_names)
    # The ranks' delays are constants of a program, so each seed needs another program.
    for seed, devices in ((None, mesh), (0, mesh), (1, backwards)):
        program = program_of(calls, devices, random_delays(num_ranks, seed))
        results = jax.device_get(program(operands_of(calls)))
        for (_, check, options), got in zip(PROGRAMS[kind], results, strict=True):
            check(problem, got, **options)


def exchange_while_rank_1_is_late() -> None:
    calls = calls_of("expert", problem_of(2))
    program = program_of(calls, expert_mesh(2), ((0, 2_000_000_000),), timeout_s=0.25)
    jax.block_until_ready(program(operands_of(calls)))


@needs_gpus
def test_a_rank_that_never_comes_ends_the_program():
    """A rank that never comes must end the program: a message says who waits for whom."""
    program = "import test_fabric; test_fabric.exchange_while_rank_1_is_late()"
    output = output_of_a_failure(program, __file__)
    # The late rank then waits for the one that gave up; which of them prints first is up to CUDA.
    said = re.search(
        r"jax_ep: dispatch: rank (\d) waited over 0.25 s for rank (\d) \(block ", output
    )
    assert said is not None and {*said.groups()} == {"0", "1"}, output
