"""Tests of the rank-major layout's kernels in the simulator, against `jax_ep.reference`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.kernels import lowered, needs_kernels, on_ranks
from support.meshes import cuda_mesh
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import (
    Problem,
    check_rank_combine,
    check_rank_dispatch,
    rank_combine,
    rank_dispatch,
)

import jax_ep
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.formats import FLOAT8_ROWS

CASES = {
    "one_rank": (Problem(1, 3, 128, 2, 4), Plan(1, 2)),
    "bulk_lists": (Problem(2, 5, 128, 4, 4, "masked", weighted=False), Plan(2, 3, 2)),
    "bulk_lists_of_both": (Problem(2, 5, 32, 2, 4, "masked"), Plan(2, 3, 2)),
    "four_ranks": (Problem(4, 3, 32, 2, 8, "skewed"), Plan(1, 3)),
    "one_choice": (Problem(2, 3, 32, 1, 2, weighted=False), Plan(3, 2)),
    "windows": (Problem(2, 7, 32, 3, 8), Plan(1, 3, 2, window_tokens=2, step_tokens=2)),
    "window_within_step": (Problem(2, 5, 32, 4, 8), Plan(1, 2, window_tokens=1, step_tokens=3)),
    "one_step": (Problem(2, 4, 32, 3, 4, "skewed"), Plan(1, 4, 3, step_tokens=8)),
    "lag_of_none": (Problem(2, 5, 32, 4, 4), Plan(1, 1, 0, step_tokens=2)),
    "repeated": (Problem(2, 4, 32, 4, 4, "repeated"), Plan(1, 3, step_tokens=2)),
    "half": (Problem(2, 5, 64, 4, 4, "one_rank", "bfloat16"), Plan(2, 3, 2, step_tokens=3)),
    "words": (Problem(2, 4, 64, 4, 4, "masked", "int32"), Plan(1, 3, 2)),
    "empty": (Problem(2, 3, 64, 4, 4, "empty", "float16"), Plan(1, 3)),
    "idle_sources": (Problem(2, 3, 32, 2, 4, "idle_sources"), Plan(1, 3, 2)),
    "fewer_tokens_than_blocks": (Problem(2, 5, 32, 2, 4), Plan(4, 3)),
}


@simulated
@pytest.mark.parametrize(("problem", "plan"), quick(CASES, "windows"))
def test_dispatch(problem, plan):
    fabric = simulated_ranks(problem.num_ranks)
    check_rank_dispatch(problem, simulate(rank_dispatch(problem, plan, fabric)))


WIRE_CASES = ("one_rank", "windows", "lag_of_none", "repeated", "half", "empty", "idle_sources")


@simulated
@pytest.mark.parametrize(
    ("case", "wire"),
    [(name, None) for name in CASES if name != "words"]
    + [(name, FLOAT8_ROWS) for name in WIRE_CASES],
)
@pytest.mark.slow
def test_combine(case, wire):
    problem, plan = CASES[case]
    options = {}
    if wire:
        problem, options = dataclasses.replace(problem, hidden=512), dict(wire=wire)
    call = rank_combine(problem, plan, simulated_ranks(problem.num_ranks), **options)
    check_rank_combine(problem, simulate(call), wire)


@needs_kernels
@pytest.mark.parametrize(
    ("num_ranks", "shape", "dtype"),
    [
        (8, (128, 7168, 8, 256), "bfloat16"),
        (8, (4096, 7168, 8, 256), "bfloat16"),
        (2, (17, 40, 3, 4), "float32"),
        (4, (300, 2944, 4, 128), "float16"),
        (1, (5, 128, 2, 4), "bfloat16"),
        # Many choices per token need long lists, which leave little shared memory for rows.
        (8, (128, 7168, 32, 256), "bfloat16"),
        (8, (128, 4096, 22, 256), "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_lowers_to_the_kernels(num_ranks, shape, dtype):
    num_tokens, hidden, top_k, num_experts = shape
    mesh = cuda_mesh((num_ranks,), ("expert",))

    def loss(x, topk_idx, weights, wire_dtype):
        def on_one_rank(x, topk_idx, weights):
            sent = jax_ep.dispatch(
                x,
                topk_idx,
                num_experts=num_experts,
                axis_name="expert",
                layout="rank",
                topk_weights=weights,
                wire_dtype=wire_dtype,
                grad_wire_dtype=wire_dtype,
                implementation="pallas",
            )
            y = sent.tokens * jnp.sum(sent.topk_weights, axis=-1, keepdims=True).astype(dtype)
            return jax_ep.combine(y, sent.handle, wire_dtype=wire_dtype, implementation="pallas")

        run = on_ranks(on_one_rank, mesh, check_vma=True)
        return jnp.sum(run(x, topk_idx, weights).astype(jnp.float32))

    rows = num_ranks * num_tokens
    shapes = (
        ((rows, hidden), dtype), ((rows, top_k), jnp.int32), ((rows, top_k), jnp.float32)
    )  # fmt: skip
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    for wire_dtype in (None, "float8_e4m3fn") if hidden % 128 == 0 else (None,):
        gradient = jax.jit(jax.value_and_grad(lambda *a, w=wire_dtype: loss(*a, w), argnums=(0, 2)))
        text = lowered(gradient, *arguments)
        # Forward and backward have one dispatch and one combine each; the weights' gradient is an
        # all-to-all.
        assert text.count("@mosaic_gpu_v2") == 4
        assert text.count("stablehlo.all_gather") == 0
