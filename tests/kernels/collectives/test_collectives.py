"""The kernels of the collectives: simulated, lowered for CUDA, and on GPUs that are out of step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.kernels import needs_kernels
from support.meshes import RANK_COUNTS, cuda_mesh, expert_mesh
from support.simulator import simulate, simulated, simulated_ranks

from jax_ep.collectives import api as collectives
from jax_ep.collectives import pallas as pallas_collectives
from jax_ep.collectives.primitives import FUSED
from jax_ep.exchange.primitives import pallas_unavailable_reason
from pallas_kernels.collectives.all_gather import all_gather
from pallas_kernels.collectives.all_reduce import one_shot, two_shot
from pallas_kernels.collectives.all_reduce_rms_norm import all_reduce_rms_norm
from pallas_kernels.collectives.all_to_all import all_to_all
from pallas_kernels.collectives.reduce_scatter import reduce_scatter
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.tiles import Plan, Tiles, tile_length

AXIS = "expert"
on_gpus = pytest.mark.skipif(bool(pallas_unavailable_reason()), reason="needs the kernels' GPUs")


def by_rank(num_ranks: int, size: int) -> tuple[int, ...]:
    return (num_ranks, size)


def by_rank_and_shard(num_ranks: int, size: int) -> tuple[int, ...]:
    return (num_ranks, num_ranks, size)


def in_rank_order(x: np.ndarray) -> np.ndarray:
    """The float32 sum over the leading axis, rounded once."""
    return functools.reduce(np.add, (part.astype(np.float32) for part in x)).astype(x.dtype)


# Each kernel, the shape of its stacked operand, and what must come out, bit for bit.
KERNELS: dict[str, tuple[Callable[..., jax.Array], Any, Callable[[np.ndarray], np.ndarray]]] = {
    "one_shot": (one_shot, by_rank, lambda x: np.stack([in_rank_order(x)] * len(x))),
    "two_shot": (two_shot, by_rank_and_shard, lambda x: np.stack([in_rank_order(x)] * len(x))),
    "all_gather": (all_gather, by_rank, lambda x: np.stack([x] * len(x))),
    "reduce_scatter": (reduce_scatter, by_rank_and_shard, in_rank_order),
    "all_to_all": (all_to_all, by_rank_and_shard, lambda x: x.swapaxes(0, 1)),
}


def operand(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def assert_same_bits(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


# ------------------------------------------------------------------------------------ simulated


@simulated
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "tiles", "plan"),
    [
        (1, "float32", 2, Plan(1, 2)),
        (2, "bfloat16", 5, Plan(2, 2)),  # some warpgroups have no second tile
        (3, "float16", 4, Plan(3, 1, 2)),  # a block has nothing to do
    ],
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
    """Two tiles then write the same values to the same place: to the simulator, a race."""
    kernel, shape, expected = KERNELS[name]
    x = operand(shape(2, tile_length("bfloat16") + 8), "bfloat16")
    fabric = simulated_ranks(2, detect_races=False)
    out = simulate(lambda: kernel(jnp.asarray(x), fabric=fabric, plan=Plan(1, 2)))
    assert_same_bits(out, expected(x))


def test_sizes_that_cannot_be_are_refused():
    for size in (8, 1028):  # less than a tile; not whole vectors
        with pytest.raises(ValueError, match=f"whole vectors of 8 elements.*has {size}"):
            Tiles(size, jnp.bfloat16, Plan(1))


NORM_CASES = {
    # num_ranks, rows, hidden, padded, dtype, residual dtype, plan
    "one_rank": (1, 3, 1024, 1024, "float32", "float32", Plan(2, 2)),
    "a_row_to_a_block": (2, 3, 2000, 2048, "bfloat16", "bfloat16", Plan(3, 2)),
    "rows_of_blocks": (2, 5, 1024, 1024, "bfloat16", "float32", Plan(2, 1)),
    "padded": (3, 2, 1000, 1024, "float32", "bfloat16", Plan(3, 2)),
    "tiles_of_warpgroups": (2, 2, 4096, 4096, "bfloat16", "bfloat16", Plan(1, 2)),
}


def norm_operands(num_ranks, rows, hidden, padded, dtype, residual_dtype):
    shapes = ((num_ranks, rows, padded), (num_ranks, rows, padded), (num_ranks, padded))
    arrays = []
    for seed, shape in enumerate(shapes):
        array = operand(shape, "float32", seed)
        array[..., hidden:] = 0
        arrays.append(array.astype(jnp.dtype((dtype, residual_dtype, "float32")[seed])))
    return arrays


def norm_reference(x, residual, scale, hidden, eps):
    """normalized in float64, and new_residual bit for bit."""
    total = in_rank_order(x).astype(np.float32)
    new_residual = (total + residual.astype(np.float32)).astype(residual.dtype)
    wide = new_residual.astype(np.float64)
    mean_square = np.sum(wide**2, axis=-1, keepdims=True) / hidden
    return wide / np.sqrt(mean_square + eps) * scale[:, None].astype(np.float64), new_residual


def check_norm(results, arrays, hidden, eps):
    normalized, new_residual = (np.asarray(result) for result in results)
    want, want_residual = norm_reference(*arrays, hidden, eps)
    assert_same_bits(new_residual, want_residual)
    assert normalized.dtype == arrays[0].dtype
    half_step = float(jnp.finfo(normalized.dtype).eps) / 2 + 1e-6
    np.testing.assert_allclose(normalized.astype(np.float64), want, rtol=half_step, atol=1e-6)


@simulated
@pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("case", NORM_CASES.values(), ids=NORM_CASES)
def test_all_reduce_rms_norm(case, two_shot):
    num_ranks, rows, hidden, padded, dtype, residual_dtype, plan = case
    arrays = norm_operands(num_ranks, rows, hidden, padded, dtype, residual_dtype)
    options = dict(
        eps=1e-3, hidden=hidden, two_shot=two_shot, fabric=simulated_ranks(num_ranks), plan=plan
    )
    results = simulate(lambda: all_reduce_rms_norm(*map(jnp.asarray, arrays), **options))
    check_norm(results, arrays, hidden, 1e-3)


# --------------------------------------------------------------------------- lowered for CUDA


SHARDED, REPLICATED = P(AXIS), P()


def lower_for_cuda(function, num_ranks, *shapes, out_specs=SHARDED, in_specs=SHARDED) -> str:
    mesh = cuda_mesh((num_ranks,), (AXIS,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


LOWERED = [
    ("all_reduce", "one_shot", "ep_all_reduce_one_shot"),
    ("all_reduce", "two_shot", "ep_all_reduce_two_shot"),
    ("all_gather", "direct", "ep_all_gather"),
    ("reduce_scatter", "direct", "ep_reduce_scatter"),
    ("all_to_all", "direct", "ep_all_to_all"),
    ("all_reduce", "one_shot_ll", "ep_all_reduce_one_shot_ll"),
    ("all_reduce", "two_shot_ll", "ep_all_reduce_two_shot_ll"),
    ("all_gather", "ll", "ep_all_gather_ll"),
    ("reduce_scatter", "ll", "ep_reduce_scatter_ll"),
    ("all_to_all", "ll", "ep_all_to_all_ll"),
]


@needs_kernels
@pytest.mark.parametrize(("op", "algorithm", "kernel"), LOWERED)
@pytest.mark.parametrize(
    ("num_ranks", "shape", "dtype"),
    [(2, (4, 8192), "bfloat16"), (3, (9, 5), "float16"), (8, (64, 2880), "float32")],
)
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
def test_multimem_lowers_to_jax_own_kernels():
    text = lower_for_cuda(
        lambda x: collectives.all_reduce(x, AXIS, algorithm="multimem"),
        4,
        jax.ShapeDtypeStruct((20, 33), jnp.bfloat16),
        out_specs=REPLICATED,
    )
    assert text.count("@mosaic_gpu") == 2 and "ep_" not in text


@needs_kernels
def test_a_plan_can_be_forced():
    def lower(plan):
        with pallas_collectives.forced_plan(plan):
            return lower_for_cuda(
                lambda x: collectives.all_gather(x, AXIS, algorithm="direct"),
                2,
                jax.ShapeDtypeStruct((8, 8192), jnp.bfloat16),
            )

    assert f"tensor<{2 * 5}xi32>" in lower(Plan(5, 2))  # a semaphore for each block and rank
    assert f"tensor<{2 * 5}xi32>" not in lower(None)


def test_plans_give_every_warpgroup_as_many_tiles():
    for num_tiles in (1, 5, 64, 128, 300, 512, 1000, 2048, 10**5):
        plan = pallas_collectives._plan(num_tiles * tile_length("bfloat16"), "bfloat16")
        workers = plan.num_blocks * plan.num_warpgroups
        rounds = -(-num_tiles // (workers * plan.num_vectors))
        fewer = (plan.num_blocks - 1) * plan.num_warpgroups * plan.num_vectors * rounds
        assert plan.num_blocks <= 132 and plan.num_warpgroups <= 4 and fewer < num_tiles


# ------------------------------------------------------------------- on GPUs that are out of step


def delays(num_ranks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Nanoseconds by stage (entry, last access, exit) and rank."""
    nobody, others = (0,) * num_ranks, (0,) + (10**6,) * (num_ranks - 1)
    first = (10**6,) + (0,) * (num_ranks - 1)
    rng = np.random.default_rng(0)
    mixed = tuple(tuple(map(int, rng.integers(0, 10**5, num_ranks))) for _ in range(3))
    return [(first,), (others,), (nobody, first), mixed]


def next_operand(name: str, out: Any, rank: Any, num_ranks: int) -> Any:
    """Something as large as the operand, exact in float32, and different on every rank."""
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
    """In a loop every operand is written anew while the slowest rank may still read the old one."""
    kernel, shape, expected = KERNELS[name]
    mesh, calls = expert_mesh(num_ranks), 6
    size = 40 * tile_length("float32")
    x = np.random.default_rng(0).integers(-8, 8, shape(num_ranks, size)).astype(np.float32)
    want = x
    for _ in range(calls):
        outs = expected(want)
        want = np.stack([next_operand(name, outs[r], r, num_ranks) for r in range(num_ranks)])
    for delay in delays(num_ranks):
        fabric = fb.Mesh((AXIS,), (num_ranks,), 20.0, delay)

        def loop(x, fabric=fabric):
            def call(_, x):
                out = kernel(x, fabric=fabric, plan=Plan(8, 4))
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
        fabric = fb.Mesh((AXIS,), (num_ranks,), 20.0, delay)
        plan = Plan(num_blocks, 2)
        options = dict(eps=1e-3, hidden=2048, two_shot=two_shot, fabric=fabric, plan=plan)

        def loop(x, residual, scale, options=options):
            def call(_, results):
                # Depends on the call before, and rewrites the operand that it has read.
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
