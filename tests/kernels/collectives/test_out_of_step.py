"""Tests of the collective kernels on GPUs, while ranks are delayed and with unusual numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from support.collectives import (
    AXIS,
    KERNELS,
    PROTOCOLS,
    assert_same_bits,
    by_rank,
    call,
    channels_here,
    connection_here,
    delays,
    in_rank_order,
    on_gpus,
    operand,
)
from support.kernels import lowered, needs_kernels, on_ranks
from support.meshes import RANK_COUNTS, cuda_mesh, expert_mesh
from support.processes import output_of_a_failure

from jax_ep.collectives import api as collectives
from pallas_kernels.collectives.tiles import TilePlan, tile_length

on_ranks_of_gpus = pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])

# Each step of a loop is (kernel, number of tiles, plan).
STEPS = [
    ("one_shot", 40, TilePlan(8, 4)),
    ("two_shot", 3, TilePlan(3, 1)),
    ("all_gather", 64, TilePlan(8, 4)),
    ("reduce_scatter", 1, TilePlan(1, 1)),
    ("all_to_all", 9, TilePlan(4, 2)),
    ("two_shot", 40, TilePlan(5, 4)),
    ("all_gather", 1, TilePlan(2, 2)),
]
LOOPS = {"mixed": STEPS} | {name: [(name, 40, TilePlan(8, 4))] for name in KERNELS}
STATE = 64 * tile_length("float32")


def operand_of(name: str, state: Any, size: int, num_ranks: int) -> Any:
    if KERNELS[name][0] is by_rank:
        return state[:size]
    xp = jnp if isinstance(state, jax.Array) else np
    return xp.stack([state[:size] + shard for shard in range(num_ranks)])


def next_state(state: Any, out: Any, rank: Any) -> Any:
    """Returns a rank's state after a call of a collective in one of `LOOPS`."""
    xp = jnp if isinstance(state, jax.Array) else np
    total = ((out.sum(0) if out.ndim == 2 else out) + rank) % 16
    return xp.concatenate([total, state[total.size :]])


def loop_of_steps(steps: Any, protocol: str, mesh: Any, calls: int, delay: Any) -> Any:
    def step(_: Any, state: jax.Array) -> jax.Array:
        connection = connection_here(protocol, mesh, state, delay)
        for name, num_tiles, plan in steps:
            x = operand_of(name, state, num_tiles * tile_length("float32"), mesh.size)
            out = call(name, connection, x, plan=plan)
            state = next_state(state, out, lax.axis_index(AXIS))
        return state

    return on_ranks(lambda state: lax.fori_loop(0, calls, step, state[0])[None], mesh)


def states_after(steps: Any, state: np.ndarray, calls: int) -> np.ndarray:
    num_ranks = len(state)
    for _ in range(calls):
        for name, num_tiles, _ in steps:
            size = num_tiles * tile_length("float32")
            x = np.stack([operand_of(name, s, size, num_ranks) for s in state])
            outs = KERNELS[name][1](x)
            state = np.stack([next_state(state[r], outs[r], r) for r in range(num_ranks)])
    return state


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_programs_for_gpus_lower(protocol):
    """The programs that other tests run on GPUs must trace and lower on any machine."""
    mesh, delay = cuda_mesh((4,), (AXIS,)), delays(4)[-1]
    loop = loop_of_steps(STEPS, protocol, mesh, 5, delay)
    text = lowered(loop, np.zeros((4, STATE), np.float32))
    assert text.count("custom_call @mosaic_gpu") == len(STEPS)


@on_gpus
@on_ranks_of_gpus
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("steps", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_in_a_loop_out_of_step(protocol, steps, backwards, num_ranks):
    """No rank may leave a call while a peer still reads its operand, or take an old call's data."""
    mesh, calls = expert_mesh(num_ranks), 9
    if backwards:
        mesh = Mesh(mesh.devices[::-1], (AXIS,))
    state = np.random.default_rng(0).integers(0, 16, (num_ranks, STATE)).astype(np.float32)
    want = states_after(steps, state, calls)
    for delay in [(), *delays(num_ranks)]:
        loop = loop_of_steps(steps, protocol, mesh, calls, delay)
        # By the low-latency protocol, the second run begins with the second set of tile buffers.
        for _ in range(2):
            np.testing.assert_array_equal(loop(state), want, err_msg=str(delay))


def each_rank(apply: Callable[..., jax.Array], x: np.ndarray) -> np.ndarray:
    program = on_ranks(lambda x: apply(x[0], axis_name=AXIS)[None], expert_mesh(len(x)))
    return np.asarray(program(x))


# ------------------------------------------------------------------------ the low-latency protocol


@on_gpus
@on_ranks_of_gpus
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_any_word_arrives(num_ranks, dtype):
    """Any bits must arrive, even the sentinel word for an empty buffer and its replacement."""
    words = np.random.default_rng(0).integers(0, 2**32, (num_ranks, 2 * num_ranks, 512), np.uint32)
    words[:, :, ::3], words[:, :, 4::9] = 0xFFFFFFFF, 0xFFFFFFFE
    words[:, :, 1::6], words[:, :, 2::6] = 0xFFFF0000, 0x0000FFFF
    x = words.view(jnp.dtype(dtype))
    by_numpy = {
        "all_gather": lambda x: [x.reshape(-1, x.shape[-1])] * len(x),
        "all_to_all": lambda x: list(x.reshape(len(x), len(x), 2, -1).swapaxes(0, 1)),
    }
    for op, expected in by_numpy.items():
        got = each_rank(functools.partial(getattr(collectives, op), algorithm="ll"), x)
        want = np.stack(expected(x)).reshape(got.shape)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@on_gpus
@on_ranks_of_gpus
@pytest.mark.parametrize(
    ("algorithm", "num_bytes"), [("one_shot_ll", 2**22), ("two_shot_ll", 2**21)]
)
def test_the_largest_payloads_and_odd_ones(algorithm, num_bytes, num_ranks):
    largest = num_bytes // 4 * (num_ranks if algorithm == "two_shot_ll" else 1)
    for size in (largest, largest - 1, largest // 2 + 3, 2 * num_ranks * 512 + 1, 1, largest):
        x = operand((num_ranks, size), "float32", seed=size)
        got = each_rank(functools.partial(collectives.all_reduce, algorithm=algorithm), x)
        assert_same_bits(got, np.stack([in_rank_order(x)] * num_ranks))


def gather_while_rank_1_is_late() -> None:
    mesh = expert_mesh(2)

    def gather(x):
        channels = channels_here(mesh, timeout_s=0.25, delays_ns=((0, 2_000_000_000),))
        return call("all_gather", channels, x, plan=TilePlan(2, 1))

    jax.block_until_ready(on_ranks(gather, mesh)(np.zeros(2 * 1024, np.float32)))


@on_gpus
@pytest.mark.needs_devices(2)
def test_a_rank_that_never_comes_ends_the_program():
    """A rank that never comes must end the program: a message says who waits for whom."""
    output = output_of_a_failure(
        "import test_out_of_step; test_out_of_step.gather_while_rank_1_is_late()", __file__
    )
    message = "jax_ep: ep_all_gather_ll: rank 0 waited over 0.25 s for rank 1 (block "
    assert message in output, output
