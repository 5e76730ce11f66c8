"""Tests of `python -m jax_ep bench train`: a step's time, its check, its parts and its figures."""

from __future__ import annotations

import json

import pytest

import jax_ep.cli
from jax_ep.bench import timing
from jax_ep.bench import train as bench
from jax_ep.flags import Args
from jax_ep.models.config import MODELS

SIZES = ("--sequence=16", "--layers=1")
LOOP = ("--iterations=1", "--repeats=2", "--device_timer=none")


def run(*flags: object) -> int:
    return jax_ep.cli.main(["jax_ep", "bench", "train", *SIZES, *LOOP, *map(str, flags)])


@pytest.mark.slow
@pytest.mark.needs_devices(2)
def test_a_step_is_timed_and_checked(tmp_path):
    path = tmp_path / "train.json"
    assert run("--ranks=2", "--matmul_dtype=none", "--check", f"--json={path}") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["jax_ep", "xla"]
    for row in rows:
        assert row["checked"] and row["compile_s"] > 0 and 0 <= row["dropped"] < 0.5
        assert 0 < row["temp_bytes"] < row["peak_bytes"]
        seconds = row["wall"]["median_us"] * 1e-6
        assert row["tokens_per_s"] == pytest.approx(2 * row["batch"] * 16 / seconds)
    faster = rows[1]["wall"]["median_us"] / rows[0]["wall"]["median_us"]
    assert rows[0]["speedup_over_xla"] == pytest.approx(faster)


ROW = {
    "shape": "qwen3-30b-a3b",
    "ranks": 2,
    "fsdp": 1,
    "remat": "none",
    "sequence": 4096,
    "batch": 2,
    "implementation": "jax_ep",
    "matmul_dtype": "none",
    "wall": {"median_us": 50e3, "low_us": 49e3, "high_us": 51e3},
}


def train_bench() -> bench.TrainBench:
    found = bench.TrainBench(Args())
    found.configs = {ROW["shape"]: MODELS[ROW["shape"]]}
    return found


def test_figures_follow_from_the_time(monkeypatch):
    monkeypatch.setattr(bench, "peak_flops", lambda kind: 1e15)
    by_kernel = {"attention: cudnn": 20e3, "experts: grouped_matmul": 15e3, "attention: rope": 5e3}
    found = train_bench().results(ROW | {"device": {"by_kernel_us": by_kernel}})
    assert found["tokens_per_s"] == pytest.approx(2 * 2 * 4096 / 0.05)
    flops = MODELS["qwen3-30b-a3b"].training_flops_per_token(4096)
    assert found["tflops_per_rank"] == pytest.approx(found["tokens_per_s"] * flops / 2 / 1e12)
    assert found["share_of_peak"] == pytest.approx(found["tflops_per_rank"] / 1e3)
    parts = found["parts_us"]
    assert (parts["attention"], parts["experts"], parts["idle"]) == (25e3, 15e3, 10e3)
    assert set(parts) == set(bench.PARTS) and sum(parts.values()) == 50e3


class Loop:
    def __init__(self, **first: float):
        self.first = first


def test_the_check_sees_another_loss_and_another_gradient():
    checked = train_bench()
    assert checked.check(ROW, Loop(loss=10.0, grad_norm=2.0), None)
    assert checked.check(ROW, Loop(loss=10.05, grad_norm=2.1), None)
    for other in (Loop(loss=10.2, grad_norm=2.0), Loop(loss=10.0, grad_norm=3.0)):
        with pytest.raises(AssertionError, match="but that of the first program"):
            checked.check(ROW, other, None)
    with pytest.raises(AssertionError):
        checked.check(ROW, Loop(loss=float("nan"), grad_norm=2.0), None)


LAYER = "jit(train_step)/transpose(jvp(Decoder))/layers_0"


@pytest.mark.parametrize(
    ("kernel", "op_name", "part"),
    [
        ("ep_dispatch", "", "exchange"),
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
    assert bench.part_of(kernel, op_name) == part


def test_a_collective_counts_while_nothing_else_runs():
    """The times must add up to the time during which anything runs."""
    spans = [(0, 10), (5, 20), (15, 40), (15, 17), (50, 60), (55, 60)]
    gives_way = [False, True, False, False, True, True]
    times = timing.shared_durations(spans, gives_way)
    assert times == [10, 5, 24, 1, 7.5, 2.5]
    assert sum(times) == 40 + 10
    is_collective = bench.is_collective
    assert is_collective("gradient sums: ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)")
    assert not is_collective("exchange: ep_dispatch_mosaic_gpu_kernel")


@pytest.mark.parametrize(
    ("kind", "tflops"),
    {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 NVL": 835,
        "NVIDIA GeForce RTX 4090": None,
    }.items(),
)
def test_a_peak_is_known_by_how_the_name_begins(kind, tflops):
    assert bench.peak_flops(kind) == (tflops and tflops * 1e12)
