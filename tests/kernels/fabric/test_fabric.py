"""Tests of ranks and their rendezvous; on GPUs, of the exchange kernels with ranks out of step."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import stacked
from support.collectives import ranks_here
from support.contract import assert_bitwise_equal, small_integers, small_weights
from support.kernels import lowered, needs_kernels, on_ranks
from support.meshes import cuda_mesh, expert_mesh
from support.processes import output_of_a_failure
from support.stacked import Problem

import jax_ep
from jax_ep.runtime import availability
from jax_ep.runtime.fabric import of_axis
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.symmetric import Gpus
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


def calls_of(kind: str, *problems: Problem) -> list[Any]:
    """Returns calls of a kind's kernels, with operands stacked by rank and without a fabric."""
    return [
        call(problem, PLAN, None, **options)
        for problem in problems
        for call, _, options in PROGRAMS[kind]
    ]


def random_delays(num_ranks: int, seed: int | None) -> tuple[tuple[int, ...], ...]:
    if seed is None:
        return ()
    rng = np.random.default_rng(seed)
    delays = rng.integers(0, LONGEST_DELAY_NS, (NUM_DELAY_POINTS, num_ranks))
    delays[rng.random(delays.shape) < 0.3] = 0
    return tuple(map(tuple, delays.tolist()))


def results_of(calls: list[Any], fabric: Gpus, operands: Any) -> Any:
    """Runs calls on one rank; `operands` are the rank's parts of the calls' operands."""
    return [
        call.func(*arrays, **call.keywords | dict(fabric=fabric))
        for call, arrays in zip(calls, jax.tree.map(lambda a: a[0], operands), strict=True)
    ]


def program_of(calls: list[Any], mesh: Any, delays: Any = (), **options: Any) -> Any:
    """Jits `calls` on all ranks of a mesh; it takes their operands and stacks their results."""

    def run(operands: Any) -> Any:
        fabric = ranks_here(("expert",), jax.tree.leaves(operands)[0], delays)
        results = results_of(calls, dataclasses.replace(fabric, **options), operands)
        return jax.tree.map(lambda a: a[None], results)

    return on_ranks(run, mesh)


def operands_of(calls: list[Any]) -> list[Any]:
    return [call.args for call in calls]


def differences(calls: list[Any], mesh: Any, delays: Any, repeats: int) -> Any:
    """Jits a program that repeats `calls` and counts the result elements that ever differ."""

    def bits(array: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")

    def count(operands: Any) -> jax.Array:
        fabric = ranks_here(("expert",), jax.tree.leaves(operands)[0], delays)

        def run(i: Any) -> list[jax.Array]:
            # The barrier keeps XLA from moving the kernels out of the loop.
            arrays, _ = lax.optimization_barrier((operands, i))
            return [bits(array) for array in jax.tree.leaves(results_of(calls, fabric, arrays))]

        first = run(jnp.int32(-1))

        def add(i: jax.Array, different: jax.Array) -> jax.Array:
            changes = [jnp.sum(a != b, dtype=jnp.int32) for a, b in zip(run(i), first, strict=True)]
            return different + sum(changes)

        return lax.fori_loop(0, repeats, add, jnp.zeros((1,), jnp.int32))

    return on_ranks(count, mesh)


@needs_kernels
@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.slow
def test_the_programs_for_gpus_lower(kind, num_ranks):
    assert (problem_of(num_ranks).groups.num_dropped > 0).all()
    mesh, delays = cuda_mesh((num_ranks,), ("expert",)), random_delays(num_ranks, 0)
    calls = calls_of(kind, problem_of(num_ranks), problem_of(num_ranks, kind="uniform"))
    for program, times in (
        (program_of(calls, mesh, delays), 1),
        (differences(calls, mesh, delays, 1000), 2),
    ):
        text = lowered(program, operands_of(calls))
        assert text.count("custom_call @mosaic_gpu") == times * len(calls)


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
        assert fabric._call.here == gpus[number]
        for rank, gpu in enumerate(fabric._call.peers):
            there = place | dict(zip(names, np.unravel_index(rank, along), strict=True))
            assert gpu == gpus[np.ravel_multi_index(list(there.values()), sizes)]


@needs_kernels
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_wait_that_gives_up_names_op_rank_and_peer(num_ranks):
    calls = calls_of("expert", problem_of(num_ranks))
    program = program_of(calls, cuda_mesh((num_ranks,), ("expert",)))
    text = lowered(program, operands_of(calls))
    for op in ("dispatch", "combine"):
        message = f"jax_ep: {op}: rank %d waited over 20 s for rank %d (block %d); giving up."
        assert message in text


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
    # The ranks' delays are constants of a program, so each seed needs another program.
    for seed in (None, 0, 1):
        program = program_of(calls, mesh, random_delays(num_ranks, seed))
        results = jax.device_get(program(operands_of(calls)))
        for (_, check, options), got in zip(PROGRAMS[kind], results, strict=True):
            check(problem, got, **options)


@needs_gpus
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("seed", [None, 7])
def test_a_thousand_repeats_are_alike(kind, seed):
    num_ranks = max(GPU_COUNTS)
    calls = calls_of(kind, problem_of(num_ranks), problem_of(num_ranks, kind="uniform"))
    delays = random_delays(num_ranks, seed)
    program = differences(calls, expert_mesh(num_ranks), delays, 1000)
    np.testing.assert_array_equal(program(operands_of(calls)), np.zeros(num_ranks))


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


def meshes() -> dict[str, Callable[[], tuple[Mesh, str | tuple[str, ...]]]]:
    """Returns unusual meshes by name, each as a function that makes (mesh, the experts' axes)."""
    devices, half = np.asarray(jax.devices()), NUM_DEVICES // 2
    two_axes = devices[: 2 * half].reshape(2, half)
    return {
        "subset": lambda: (Mesh(devices[-half:], ("expert",)), "expert"),
        "one_of_two": lambda: (Mesh(devices[1::2][::-1], ("expert",)), "expert"),
        "data_expert": lambda: (Mesh(two_axes, ("data", "expert")), "expert"),
        "expert_data": lambda: (Mesh(two_axes, ("expert", "data")), "expert"),
        "both": lambda: (Mesh(two_axes, ("a", "b")), ("a", "b")),
        "both_swapped": lambda: (Mesh(two_axes, ("a", "b")), ("b", "a")),
        "reversed": lambda: (Mesh(devices[::-1], ("expert",)), "expert"),
        "shuffled": lambda: (Mesh(two_axes.T, ("data", "expert")), ("expert", "data")),
        "abstract": lambda: (Mesh(devices, ("expert",)), "expert"),
    }


@needs_gpus
@pytest.mark.parametrize("kind", meshes())
def test_any_mesh_of_one_host(kind):
    """The kernels must give what XLA gives, on any GPUs of a host in any order."""
    mesh, axis_name = meshes()[kind]()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    num_ranks = int(np.prod([mesh.shape[name] for name in names]))
    rng, num_experts, top_k = np.random.default_rng(0), 4 * num_ranks, 4
    rows = mesh.size * NUM_TOKENS
    x = small_integers(rng, (rows, HIDDEN), jnp.dtype(DTYPE))
    topk_idx = rng.integers(-1, num_experts, (rows, top_k)).astype(np.int32)
    weights = small_weights(rng, topk_idx.shape, np.float32)

    def run(implementation: Any, mesh_is_set: bool = kind == "abstract") -> Any:
        def on_one_rank(x: jax.Array, topk_idx: jax.Array, weights: jax.Array) -> Any:
            sent = jax_ep.dispatch(
                x,
                topk_idx,
                num_experts=num_experts,
                axis_name=axis_name,
                capacity=3 * NUM_TOKENS * top_k // 4,
                implementation=implementation,
            )
            out = jax_ep.combine(sent.tokens, sent.handle, weights, implementation=implementation)
            # This is XLA's own collective between the same ranks.
            total = jax.lax.psum(out, axis_name)
            return sent.tokens, out, total + jnp.zeros_like(out)

        spec = P(mesh.axis_names)
        abstract = mesh.abstract_mesh if kind == "abstract" else mesh
        sharded = jax.shard_map(on_one_rank, mesh=abstract, in_specs=spec, out_specs=spec)
        arrays = jax.device_put((x, topk_idx, weights), NamedSharding(mesh, spec))
        with jax.set_mesh(mesh) if mesh_is_set else contextlib.nullcontext():
            return jax.device_get(jax.jit(sharded)(*arrays))

    expected = run("xla")
    if kind == "abstract":
        with pytest.raises(ValueError, match="was given an abstract mesh; use jax.set_mesh"):
            run("pallas", mesh_is_set=False)
    for name, got, want in zip(
        ("dispatch", "combine", "psum"), run("pallas"), expected, strict=True
    ):
        assert_bitwise_equal(got, want, name)
