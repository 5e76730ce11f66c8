"""Tests of the collective kernels by both protocols: simulated, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.collectives import (
    AXIS,
    KERNELS,
    PROTOCOLS,
    assert_same_bits,
    call,
    check_norm,
    norm_operands,
    operand,
    simulated_connection,
)
from support.kernels import assert_kernels_alone, lowered, needs_kernels, on_ranks
from support.meshes import cuda_mesh
from support.selection import quick
from support.simulator import simulate, simulated

from jax_ep.collectives import api as collectives
from jax_ep.collectives.algorithms import FUSED
from pallas_kernels.collectives.tiles import TilePlan

# --------------------------------------------------------------------- kernels in the simulator

# A case is (protocol, ranks, dtype, elements, plan, whether to look for races). A last tile that is
# not whole is moved back over the one before; if another warpgroup has that one, the interpreter
# would report a race of equal values.
CASES = {
    "one_rank": ("signals", 1, "float32", 1024, TilePlan(1, 2), True),
    "warpgroups_without_a_second_tile": (
        "signals", 2, "bfloat16", 5 * 1024, TilePlan(2, 2), True,
    ),
    "a_block_with_nothing_to_do": ("signals", 3, "float16", 4 * 1024, TilePlan(3, 1, 2), True),
    "a_last_tile_moved_back": ("signals", 2, "bfloat16", 1024 + 8, TilePlan(1, 2), False),
    "ll_of_three_ranks": ("low_latency", 3, "float16", 2 * 1024, TilePlan(1, 2), True),
    # With four ranks, a float32 sum depends on its order.
    "ll_of_four_ranks": ("low_latency", 4, "float32", 512, TilePlan(1, 1), True),
    # Workers without a tile of their own repeat the last tile.
    "ll_of_more_workers_than_tiles": (
        "low_latency", 2, "bfloat16", 1024 + 8, TilePlan(2, 2), False,
    ),
}  # fmt: skip


@simulated
@pytest.mark.parametrize(
    ("protocol", "num_ranks", "dtype", "size", "plan", "detect_races"),
    quick(CASES, "a_block_with_nothing_to_do", "ll_of_four_ranks"),
)
@pytest.mark.parametrize("name", quick([*KERNELS], "two_shot", "all_to_all"))
def test_kernel(name, protocol, num_ranks, dtype, size, plan, detect_races):
    shape, expected = KERNELS[name]
    x = operand(shape(num_ranks, size), dtype)
    connection = simulated_connection(protocol, num_ranks, detect_races=detect_races)
    out = simulate(lambda: call(name, connection, jnp.asarray(x), plan=plan))
    assert_same_bits(out, expected(x))
    if protocol == "low_latency":
        # Each worker of each rank, even one without a tile of its own, has counted one call.
        counters = connection.memory.contents.counters
        assert set(counters.values()) == {1}
        workers = num_ranks * plan.num_blocks * plan.num_warpgroups
        assert len(counters) == workers * (num_ranks - 1)


NORM_CASES = {
    # A case is (ranks, rows, hidden size, padded hidden size, x's dtype, residual's dtype, plan).
    "one_rank": (1, 3, 1024, 1024, "float32", "float32", TilePlan(2, 2)),
    "a_row_to_a_block": (2, 3, 2000, 2048, "bfloat16", "bfloat16", TilePlan(3, 2)),
    "padded": (3, 2, 1000, 1024, "float32", "bfloat16", TilePlan(3, 2)),
    "tiles_of_warpgroups": (2, 2, 4096, 4096, "bfloat16", "bfloat16", TilePlan(1, 2)),
    "a_last_tile_moved_back": (3, 4, 1032, 1032, "bfloat16", "bfloat16", TilePlan(2, 1)),
}
NORMS = {
    f"{name}-{protocol}": (protocol, *case)
    for name, case in NORM_CASES.items()
    for protocol in PROTOCOLS
    if name != ("one_rank" if protocol == "low_latency" else "a_last_tile_moved_back")
}


@simulated
@pytest.mark.parametrize("two_shot", quick({"one_shot": False, "two_shot": True}, "one_shot"))
@pytest.mark.parametrize("case", quick(NORMS, "padded-signals", unpack=False))
def test_all_reduce_rms_norm(case, two_shot):
    protocol, num_ranks, rows, hidden, padded, dtype, residual_dtype, plan = case
    arrays = norm_operands(num_ranks, rows, hidden, padded, dtype, residual_dtype)
    by_signals = protocol == "signals"
    if two_shot and not by_signals:
        plan = TilePlan(-(-rows // num_ranks), plan.num_warpgroups)
    # Low-latency blocks without a row repeat the last row, which would be reported as a race.
    connection = simulated_connection(
        protocol, num_ranks, detect_races=by_signals or plan.num_blocks <= rows
    )
    options = dict(eps=1e-3, hidden=hidden, two_shot=two_shot, plan=plan)
    operands = [jnp.asarray(array) for array in arrays]
    # A second low-latency call uses the second set of tile buffers.
    for _ in range(1 if by_signals else 2):
        results = simulate(lambda: call("all_reduce_rms_norm", connection, *operands, **options))
        check_norm(results, arrays, hidden, 1e-3)


# ------------------------------------------------------------------- kernels lowered for CUDA

LOWERED = [
    ("all_reduce", "one_shot", "ep_all_reduce_one_shot"),
    ("all_reduce", "two_shot", "ep_all_reduce_two_shot"),
    ("all_gather", "direct", "ep_all_gather"),
    ("reduce_scatter", "direct", "ep_reduce_scatter"),
    ("all_to_all", "direct", "ep_all_to_all"),
]
LOWERED += [
    (op, "ll" if algorithm == "direct" else f"{algorithm}_ll", f"{kernel}_ll")
    for op, algorithm, kernel in LOWERED
]


@needs_kernels
@pytest.mark.parametrize(("op", "algorithm", "kernel"), LOWERED)
@pytest.mark.parametrize(
    ("num_ranks", "shape", "dtype"),
    quick([(3, (9, 5), "float16"), (8, (64, 2880), "float32")], (3, (9, 5), "float16")),
)
def test_a_collective_and_its_gradient_are_kernels_alone(
    op, algorithm, kernel, num_ranks, shape, dtype
):
    backwards = {"all_gather": "ep_reduce_scatter", "reduce_scatter": "ep_all_gather"}

    def out_and_gradient(x):
        apply = functools.partial(getattr(collectives, op), axis_name=AXIS, algorithm=algorithm)
        out, pull = jax.vjp(apply, x)
        return out, *pull(jnp.sin(out))

    x = jax.ShapeDtypeStruct((num_ranks * shape[0], *shape[1:]), jnp.dtype(dtype))
    text = lowered(on_ranks(out_and_gradient, cuda_mesh((num_ranks,), (AXIS,))), x)
    assert_kernels_alone(text, num_kernels=2)
    assert kernel in text and backwards.get(op, kernel) in text
    if algorithm.endswith("ll"):
        assert f"jax_ep: {kernel}: rank %d waited over 100 s for rank %d (block %d)" in text


@needs_kernels
@pytest.mark.parametrize(
    ("op", "dtype"), [("all_gather", "float64"), ("all_to_all", "float8_e4m3fn")]
)
def test_what_is_only_moved_has_any_dtype(op, dtype):
    apply = functools.partial(getattr(collectives, op), axis_name=AXIS, algorithm="direct")
    program = on_ranks(apply, cuda_mesh((2,), (AXIS,)), check_vma=True)
    with jax.enable_x64(dtype == "float64"):
        assert f"ep_{op}" in lowered(program, jax.ShapeDtypeStruct((16, 1000), dtype))


@needs_kernels
@pytest.mark.parametrize("algorithm", FUSED)
def test_all_reduce_rms_norm_lowers_for_cuda(algorithm):
    num_ranks, hidden = 4, 5
    program = on_ranks(
        lambda *args: collectives.all_reduce_rms_norm(*args, AXIS, algorithm=algorithm),
        cuda_mesh((num_ranks,), (AXIS,)),
        in_specs=(P(AXIS), P(), P()),
        out_specs=P(),
        check_vma=True,
    )
    shapes = (num_ranks * 4, hidden), (4, hidden), (hidden,)
    text = lowered(program, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert "ep_all_reduce_rms_norm" in text and "@mosaic_gpu" in text
