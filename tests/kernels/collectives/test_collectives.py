"""Tests of the collective kernels: simulated, lowered for CUDA, and on GPUs out of step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.collectives import (
    AXIS,
    KERNELS,
    LOWERED,
    NORM_CASES,
    REPLICATED,
    SHARDED,
    assert_same_bits,
    check_norm,
    delays,
    in_rank_order,
    lower_for_cuda,
    norm_operands,
    on_gpus,
    operand,
    ranks_here,
)
from support.kernels import needs_kernels
from support.meshes import RANK_COUNTS, expert_mesh
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks

from jax_ep.collectives import api as collectives
from jax_ep.collectives import pallas as pallas_collectives
from jax_ep.collectives.algorithms import FUSED
from pallas_kernels.collectives.all_reduce_rms_norm import all_reduce_rms_norm
from pallas_kernels.collectives.tiles import FlatTiles, TilePlan, tile_length
from pallas_kernels.fabric import fabric as fb

# --------------------------------------------------------------------- kernels in the simulator


@simulated
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "tiles", "plan"),
    quick(
        [
            (1, "float32", 2, TilePlan(1, 2)),
            # Here some warpgroups have no second tile.
            (2, "bfloat16", 5, TilePlan(2, 2)),
            # Here one block has nothing to do.
            (3, "float16", 4, TilePlan(3, 1, 2)),
        ],
        (3, "float16", 4, TilePlan(3, 1, 2)),
    ),
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, num_ranks, dtype, tiles, plan):
    kernel, shape, expected = KERNELS[name]
    x = operand(shape(num_ranks, tiles * tile_length(dtype)), dtype)
    run = functools.partial(kernel, fabric=simulated_ranks(num_ranks), plan=plan)
    assert_same_bits(simulate(lambda: run(jnp.asarray(x))), expected(x))


@simulated
@pytest.mark.parametrize("name", KERNELS)
def test_the_last_tile_of_an_uneven_size_is_moved_back(name):
    """If a size is not whole tiles, the last tile must be moved back over the one before.

    Both tiles write the same values to the overlap, which the simulator would report as a race.
    """
    kernel, shape, expected = KERNELS[name]
    x = operand(shape(2, tile_length("bfloat16") + 8), "bfloat16")
    fabric = simulated_ranks(2, detect_races=False)
    out = simulate(lambda: kernel(jnp.asarray(x), fabric=fabric, plan=TilePlan(1, 2)))
    assert_same_bits(out, expected(x))


def test_sizes_that_cannot_be_are_refused():
    # The sizes are less than a tile, and not whole vectors.
    for size in (8, 1028):
        with pytest.raises(ValueError, match=f"whole vectors of 8 elements.*has {size}"):
            FlatTiles(size, jnp.bfloat16, TilePlan(1))


@simulated
@pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("case", quick(NORM_CASES, "padded", unpack=False))
def test_all_reduce_rms_norm(case, two_shot):
    num_ranks, rows, hidden, padded, dtype, residual_dtype, plan = case
    arrays = norm_operands(num_ranks, rows, hidden, padded, dtype, residual_dtype)
    options = dict(
        eps=1e-3, hidden=hidden, two_shot=two_shot, fabric=simulated_ranks(num_ranks), plan=plan
    )
    results = simulate(lambda: all_reduce_rms_norm(*map(jnp.asarray, arrays), **options))
    check_norm(results, arrays, hidden, 1e-3)


# ------------------------------------------------------------------- kernels lowered for CUDA


@needs_kernels
@pytest.mark.parametrize(("op", "algorithm", "kernel"), LOWERED)
@pytest.mark.parametrize(
    ("num_ranks", "shape", "dtype"),
    [(2, (4, 8192), "bfloat16"), (3, (9, 5), "float16"), (8, (64, 2880), "float32")],
)
@pytest.mark.slow
def test_collectives_lower_for_cuda(op, algorithm, kernel, num_ranks, shape, dtype):
    text = lower_for_cuda(
        lambda x: getattr(collectives, op)(x, AXIS, algorithm=algorithm),
        num_ranks,
        jax.ShapeDtypeStruct((num_ranks * shape[0], *shape[1:]), jnp.dtype(dtype)),
        out_specs=REPLICATED if op == "all_reduce" else SHARDED,
    )
    assert kernel in text and "@mosaic_gpu" in text


@needs_kernels
@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn"])
def test_what_is_only_moved_has_any_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        for op in ("all_gather", "all_to_all"):
            text = lower_for_cuda(
                lambda x, op=op: getattr(collectives, op)(x, AXIS, algorithm="direct"),
                2,
                jax.ShapeDtypeStruct((8, 1000), jnp.dtype(dtype)),
            )
            assert f"ep_{op}" in text


@needs_kernels
@pytest.mark.parametrize("algorithm", FUSED)
@pytest.mark.parametrize(
    ("num_ranks", "hidden", "dtype"),
    [(2, 8192, "bfloat16"), (8, 2880, "bfloat16"), (4, 5, "float32")],
)
def test_all_reduce_rms_norm_lowers_for_cuda(algorithm, num_ranks, hidden, dtype):
    text = lower_for_cuda(
        lambda *args: collectives.all_reduce_rms_norm(*args, AXIS, algorithm=algorithm),
        num_ranks,
        jax.ShapeDtypeStruct((num_ranks * 4, hidden), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((4, hidden), jnp.float32),
        jax.ShapeDtypeStruct((hidden,), jnp.float32),
        in_specs=(SHARDED, REPLICATED, REPLICATED),
        out_specs=REPLICATED,
    )
    assert "ep_all_reduce_rms_norm" in text and "@mosaic_gpu" in text


@needs_kernels
@pytest.mark.needs_devices(2)
def test_multimem_lowers_to_jax_own_kernels():
    text = lower_for_cuda(
        lambda x: collectives.all_reduce(x, AXIS, algorithm="multimem"),
        4,
        jax.ShapeDtypeStruct((20, 33), jnp.bfloat16),
        out_specs=REPLICATED,
    )
    assert text.count("@mosaic_gpu") == 2 and "ep_" not in text


@needs_kernels
def test_a_plan_can_be_forced(monkeypatch):
    kernel, asked = fb.kernel, []

    def note(*args, num_blocks, num_warpgroups, **options):
        asked.append((num_blocks, num_warpgroups))
        return kernel(*args, num_blocks=num_blocks, num_warpgroups=num_warpgroups, **options)

    monkeypatch.setattr(fb, "kernel", note)
    for plan in (TilePlan(5, 2), None):
        with pallas_collectives.forced_plan(plan):
            lower_for_cuda(
                lambda x: collectives.all_gather(x, AXIS, algorithm="direct"),
                2,
                jax.ShapeDtypeStruct((8, 8192), jnp.bfloat16),
            )
    assert asked[0] == (5, 2) and len(asked) == 2 and asked[1] != (5, 2)


def test_plans_give_every_warpgroup_as_many_tiles():
    for num_tiles in (1, 5, 64, 128, 300, 512, 1000, 2048, 10**5):
        plan = pallas_collectives._plan(num_tiles * tile_length("bfloat16"), "bfloat16")
        workers = plan.num_blocks * plan.num_warpgroups
        rounds = -(-num_tiles // (workers * plan.num_vectors))
        fewer = (plan.num_blocks - 1) * plan.num_warpgroups * plan.num_vectors * rounds
        assert plan.num_blocks <= 132 and plan.num_warpgroups <= 4 and fewer < num_tiles


# ------------------------------------------------------------ kernels on GPUs, with ranks delayed


def next_operand(name: str, out: Any, rank: Any, num_ranks: int) -> Any:
    """Returns a rank's operand for the next call of the collective `name`, made from its result.

    `out` is the result on that rank. The operand is exact in float32, and differs between ranks.
    """
    if name == "all_gather":
        return out.sum(0) / num_ranks + rank
    if name == "reduce_scatter":
        xp = jnp if isinstance(out, jax.Array) else np
        return xp.stack([out / num_ranks + shard for shard in range(num_ranks)]) + rank
    return out / num_ranks + rank


@on_gpus
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
@pytest.mark.parametrize("name", KERNELS)
def test_nobody_leaves_early(name, num_ranks):
    """No rank may leave a call of a collective while a peer still reads the rank's operand.

    Each call in a loop overwrites the operand of the call before, so leaving early changes results.
    """
    kernel, shape, expected = KERNELS[name]
    mesh, calls = expert_mesh(num_ranks), 6
    size = 40 * tile_length("float32")
    x = np.random.default_rng(0).integers(-8, 8, shape(num_ranks, size)).astype(np.float32)
    want = x
    for _ in range(calls):
        outs = expected(want)
        want = np.stack([next_operand(name, outs[r], r, num_ranks) for r in range(num_ranks)])
    for delay in delays(num_ranks):

        def loop(x, delay=delay):
            fabric = ranks_here((AXIS,), x, delay)

            def call(_, x):
                out = kernel(x, fabric=fabric, plan=TilePlan(8, 4))
                return next_operand(name, out, jax.lax.axis_index(AXIS), num_ranks)

            return jax.lax.fori_loop(0, calls, call, x[0])[None]

        mapped = jax.shard_map(
            loop, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED, check_vma=False
        )
        np.testing.assert_array_equal(jax.jit(mapped)(x), want, err_msg=str(delay))


@on_gpus
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
@pytest.mark.parametrize("num_blocks", [8, 24], ids=["three_rows", "one_row"])
@pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])
def test_all_reduce_rms_norm_out_of_step(two_shot, num_blocks, num_ranks):
    mesh, calls = expert_mesh(num_ranks), 6
    arrays = norm_operands(num_ranks, 24, 2048, 2048, "bfloat16", "float32")
    for delay in delays(num_ranks):

        def loop(x, residual, scale, delay=delay):
            fabric, plan = ranks_here((AXIS,), x, delay), TilePlan(num_blocks, 2)
            options = dict(eps=1e-3, hidden=2048, two_shot=two_shot, fabric=fabric, plan=plan)

            def call(_, results):
                # `again` has the values of x but depends on the last call's result, so that XLA
                # keeps the order of the calls. It overwrites the last call's operand.
                again = x[0] + jnp.isnan(results[1][0, 0]).astype(x.dtype)
                return all_reduce_rms_norm(again, residual[0], scale[0], **options)

            first = all_reduce_rms_norm(x[0], residual[0], scale[0], **options)
            return jax.tree.map(lambda a: a[None], jax.lax.fori_loop(1, calls, call, first))

        mapped = jax.shard_map(
            loop, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED, check_vma=False
        )
        check_norm(jax.jit(mapped)(*arrays), arrays, 2048, 1e-3)


@on_gpus
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_ranks_runs_and_algorithms_agree_bit_for_bit(num_ranks, dtype):
    x = operand((num_ranks, 3, 5000), dtype)
    want = np.stack([in_rank_order(x)] * num_ranks)
    for algorithm in ("one_shot", "two_shot", "one_shot_ll", "two_shot_ll") * 2:
        mapped = jax.shard_map(
            functools.partial(collectives.all_reduce, axis_name=AXIS, algorithm=algorithm),
            mesh=expert_mesh(num_ranks),
            in_specs=SHARDED,
            out_specs=SHARDED,
            check_vma=False,
        )
        assert_same_bits(jax.jit(mapped)(x), want)
