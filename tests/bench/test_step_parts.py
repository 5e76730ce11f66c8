"""Tests how a profile's operations are assigned to the parts of a training step, by name."""

from __future__ import annotations

import pytest

from jax_ep.bench import step_parts, timing

LAYER = "jit(train_step)/transpose(jvp(Decoder))/layers_0"


@pytest.mark.parametrize(
    ("kernel", "op_name", "part"),
    [
        ("ep_dispatch", None, "exchange"),
        ("fusion", f"{LAYER}/self_attn/q_norm/mul", "attention"),
        ("fusion", "jit(train_step)/jvp(Decoder)/norm/mul", "norms and losses"),
        ("gemm", "jit(train_step)/jvp(Decoder)/loss/while/dot_general", "norms and losses"),
        ("fusion", f"{LAYER}/mlp/jit(_layer)/shard_map/router/top_k", "routing"),
        ("fusion", f"{LAYER}/mlp/jit(_layer)/shard_map/dispatch/gather", "exchange"),
        ("fusion", f"{LAYER}/mlp/jit(_layer)/shard_map/experts/mul", "experts"),
        (
            "grouped_matmul_float8",
            f"{LAYER}/mlp/jit(_layer)/shard_map/shared_experts/jit(_compute_gated)",
            "shared experts",
        ),
        ("ncclAllGather", f"{LAYER}/mlp/jit(_layer)/shard_map/all_gather", "exchange"),
        ("ncclAllReduce", f"{LAYER}/self_attn/q_proj/dot_general", "gradient sums"),
        ("ncclAllGather", "jit(train_step)/optimizer/add", "optimizer"),
    ],
)
def test_a_kernel_is_of_the_part_that_names_say(kernel, op_name, part):
    assert step_parts.part_of(kernel, op_name) == part


def test_a_collective_counts_while_nothing_else_runs():
    """The times must add up to the time during which anything runs."""
    spans = [(0, 10), (5, 20), (15, 40), (15, 17), (50, 60), (55, 60)]
    gives_way = [False, True, False, False, True, True]
    times = timing.shared_durations(spans, gives_way)
    assert times == [10, 5, 24, 1, 7.5, 2.5]
    assert sum(times) == 40 + 10
    is_collective = step_parts.is_collective
    assert is_collective("gradient sums: ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)")
    assert not is_collective("exchange: ep_dispatch_mosaic_gpu_kernel")
