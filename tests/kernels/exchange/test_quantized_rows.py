"""Tests of rows that kernels quantize: the arithmetic on GPUs, the rest in the simulator."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.contract import assert_bitwise_equal, random_bits
from support.kernels import lowered, needs_kernels
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import (
    Problem,
    check_dispatch,
    check_dispatch_like,
    check_rank_dispatch,
    dispatch,
    dispatch_like,
    rank_dispatch,
)

from jax_ep.exchange.interface import WIRE_FORMATS
from jax_ep.runtime import availability
from pallas_kernels.exchange import quantized_rows
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.formats import FLOAT8_ROWS

WIRE = FLOAT8_ROWS
BLOCK = WIRE.block[1]
CASES = {
    "one_rank": (Problem(1, 3, 512, 2, 4), Plan(1, 2)),
    "half": (Problem(2, 5, 1024, 4, 4, "one_rank", "bfloat16"), Plan(2, 3, 2, step_tokens=3)),
    "four_ranks": (Problem(4, 3, 512, 2, 8, "skewed", "float16"), Plan(1, 3)),
    "two_stages": (Problem(2, 6, 512, 2, 4), Plan(1, 2, 1, step_tokens=3, num_copy_stages=1)),
    "lag_of_none": (Problem(2, 5, 512, 4, 4), Plan(1, 1, 0, step_tokens=2, num_copy_stages=1)),
    "one_expert": (
        Problem(2, 4, 512, 6, 4, "one_expert", "bfloat16"),
        Plan(1, 3, 1, step_tokens=4, num_copy_stages=3),
    ),
    "repeated": (Problem(2, 4, 512, 4, 4, "repeated", alignment=4), Plan(1, 3, step_tokens=2)),
    "overflow": (Problem(2, 5, 512, 4, 4, "skewed", capacity=7), Plan(2, 3, step_tokens=2)),
    "empty": (Problem(2, 3, 512, 4, 4, "empty", "float16", capacity=4), Plan(1, 3)),
}


RUNS = {
    f"{call.__name__}-{case}": (call, check, *CASES[case])
    for call, check, cases in (
        (dispatch, check_dispatch, CASES),
        (dispatch_like, check_dispatch_like, ("half", "one_expert", "overflow")),
        (
            rank_dispatch,
            check_rank_dispatch,
            ("one_rank", "half", "two_stages", "lag_of_none", "empty"),
        ),
    )
    for case in cases
}


@simulated
@pytest.mark.parametrize(
    ("call", "check", "problem", "plan"), quick(RUNS, "dispatch-overflow", "dispatch-lag_of_none")
)
def test_kernel(call, check, problem, plan):
    results = simulate(call(problem, plan, simulated_ranks(problem.num_ranks), wire=WIRE))
    check(problem, results, WIRE)


def test_kernels_have_every_format_of_the_wire():
    assert set(WIRE_FORMATS) == set(quantized_rows._PTX_TYPES)
    assert {wire.block for wire in WIRE_FORMATS} == {(1, BLOCK)}


COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def quantize_rows(x: jax.Array) -> list[jax.Array]:
    """Quantizes x [T, H] in a kernel, one grid block per row; returns values and scales."""
    hidden = x.shape[1]

    def kernel(x_ref, values_ref, scales_ref, wide, values, scales, full):
        row = lax.axis_index("block")
        plgpu.copy_gmem_to_smem(x_ref.at[row], wide, full, oob_mode=fb.IN_BOUNDS)
        plgpu.barrier_wait(full)
        quantized_rows.quantize_row(WIRE, wide, values, scales)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values, values_ref.at[row])
        plgpu.copy_smem_to_gmem(scales, scales_ref.at[row])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, WIRE.dtype),
            jax.ShapeDtypeStruct((x.shape[0], hidden // BLOCK), jnp.float32),
        ],
        grid=(x.shape[0],),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((hidden,), x.dtype),
            plgpu.SMEM((hidden,), WIRE.dtype),
            plgpu.SMEM((hidden // BLOCK,), jnp.float32),
            plgpu.Barrier(),
        ],
        compiler_params=COMPILER_PARAMS,
    )(x)


def add_rows(values: jax.Array, scales: jax.Array, sent: jax.Array, dtype: str) -> jax.Array:
    """Sums each token's float8 rows over the N ranks in a kernel, one grid block per token."""
    num_ranks, num_rows, hidden = values.shape

    def kernel(values_ref, scales_ref, sent_ref, out_ref, out):
        row, ranks = lax.axis_index("block"), range(num_ranks)
        out[...] = quantized_rows.add_rows(
            WIRE,
            [[part.at[rank, row] for rank in ranks] for part in (values_ref, scales_ref)],
            [sent_ref[rank, row] != 0 for rank in ranks],
            dtype,
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, out_ref.at[row])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, hidden), dtype),
        grid=(num_rows,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((hidden,), dtype)],
        compiler_params=COMPILER_PARAMS,
    )(values, scales, sent)


on_gpus = pytest.mark.skipif(
    availability.unavailable_reason() is not None, reason=availability.unavailable_reason() or ""
)


def assert_equal_bits_but_of_nan(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    assert_bitwise_equal(np.where(nan, 0, got), np.where(nan, 0, want))


@on_gpus
@pytest.mark.parametrize("hidden", [512, 4096, 7168])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_rows_are_those_of_the_reference(dtype, hidden):
    rng = np.random.default_rng(0)
    values = random_bits(rng, (3, 64, hidden), WIRE.dtype)
    scales = np.exp2(rng.uniform(-117, 100, (3, 64, hidden // 128))).astype(np.float32)
    scales[:, :32] = rng.uniform(1, 2, scales[:, :32].shape)
    sent = rng.integers(0, 2, (3, 64), np.int32)
    out = np.asarray(jax.jit(functools.partial(add_rows, dtype=dtype))(values, scales, sent))
    total = np.zeros((64, hidden), np.float32)
    for row, of_row, was_sent in zip(values, scales, sent, strict=True):
        row = WIRE.decode((row, of_row), np.float32)
        total += np.where(was_sent[:, None] != 0, row, 0)
    assert_equal_bits_but_of_nan(out, total.astype(jnp.dtype(dtype)))


@on_gpus
@pytest.mark.parametrize("hidden", [512, 7168])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_arithmetic_is_that_of_the_reference(dtype, hidden):
    x = random_bits(np.random.default_rng(0), (64, hidden), dtype).copy()
    x[1], x[2, ::2], x[3, 5:9] = 0, jnp.finfo(dtype).max, [np.nan, np.inf, -np.inf, -0.0]
    values, scales = (np.asarray(part) for part in jax.jit(quantize_rows)(x))
    expected_values, expected_scales = WIRE.encode(x)
    np.testing.assert_array_equal(scales, expected_scales)
    assert_equal_bits_but_of_nan(values, expected_values)


@needs_kernels
@pytest.mark.parametrize("hidden", [512, 4096, 7168])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_arithmetic_lowers(dtype, hidden):
    shapes = ((4, 8, hidden), WIRE.dtype), ((4, 8, hidden // 128), "float32"), ((4, 8), "int32")
    for function, operands in (
        (quantize_rows, [((4, hidden), dtype)]),
        (functools.partial(add_rows, dtype=dtype), shapes),
    ):
        arrays = [jax.ShapeDtypeStruct(*operand) for operand in operands]
        assert lowered(jax.jit(function), *arrays).count("@mosaic_gpu_v2") == 1
