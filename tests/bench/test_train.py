"""Tests of `python -m jax_ep bench train`: a step's time, its check, its parts and its figures."""

from __future__ import annotations

import json

import jax
import pytest

import jax_ep.cli
from jax_ep.bench import train as bench
from jax_ep.bench.decoder import MODELS

SIZES = ("--hidden=32", "--mlp_dim=32", "--vocab=64", "--sequence=16", "--layers=1")
LOOP = ("--iterations=1", "--repeats=2", "--device_timer=none")


def run(*flags: object) -> int:
    return jax_ep.cli.main(["jax_ep", "bench", "train", *SIZES, *LOOP, *map(str, flags)])


@pytest.mark.slow
@pytest.mark.needs_devices(2)
def test_a_step_is_timed_and_checked(tmp_path, capsys):
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
    out = capsys.readouterr().out
    assert "1 of 48 layers" in out and "active parameters" in out and "step ms" in out


@pytest.mark.slow
def test_float8_experts_are_timed(tmp_path):
    path = tmp_path / "train.json"
    flags = "--hidden=128", "--mlp_dim=128", "--baselines=", "--matmul_dtype=float8_e4m3fn"
    assert run("--ranks=1", *flags, f"--json={path}", "--shapes=deepseek-v3-like") == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["matmul_dtype"] == "float8_e4m3fn" and row["tflops_per_rank"] > 0


@pytest.mark.slow
@pytest.mark.needs_devices(4)
def test_a_step_with_fsdp_has_the_loss_of_one_without(tmp_path, capsys):
    """Of four ranks, two share the experts of a half, split along H; the checks compare losses."""
    path = tmp_path / "train.json"
    flags = "--ranks=4", "--baselines=", "--matmul_dtype=none", "--capacity_factor=0"
    losses = []
    for fsdp in (1, 2, 4):
        assert run(*flags, f"--fsdp={fsdp}", f"--json={path}") == 0
        (row,) = json.loads(path.read_text())["rows"]
        assert row["fsdp"] == fsdp and row["dropped"] == 0
        losses.append((row["loss"], row["grad_norm"]))
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[2] == pytest.approx(losses[0], rel=0.01)
    assert bench.TrainBench().name(row) == "qwen3-30b-a3b, 4 ranks, jax_ep, fsdp 4"
    (header,) = (line for line in capsys.readouterr().out.splitlines()[-2:] if "fsdp" in line)
    assert header.startswith("shape")


@pytest.mark.slow
def test_rematerialization_is_measured_by_policy(tmp_path, capsys):
    path = tmp_path / "train.json"
    flags = "--ranks=1", "--baselines=", "--matmul_dtype=none", "--remat=none,full", "--check"
    assert run(*flags, f"--json={path}") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["remat"] for row in rows] == ["none", "full"]
    assert all(row["checked"] for row in rows)
    name = bench.TrainBench().name
    assert name(rows[0]) == "qwen3-30b-a3b, 1 ranks, jax_ep"
    assert name(rows[1]) == "qwen3-30b-a3b, 1 ranks, jax_ep, remat full"
    (header,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("shape"))
    assert "remat" in header


def test_every_program_has_a_row_though_there_is_no_time(tmp_path, capsys):
    """With no time left, table and plot must still list every program; none is compiled."""
    pytest.importorskip("matplotlib")
    plot, path = tmp_path / "train.png", tmp_path / "train.json"
    flags = "--hidden=128", "--mlp_dim=128", "--baselines=xla,xla+ragged_dot", "--seconds=0"
    outputs = f"--plot={plot}", f"--json={path}"
    assert run("--ranks=1", *flags, "--shapes=qwen3-30b-a3b,deepseek-v3-like", *outputs) == 1
    rows = json.loads(path.read_text())["rows"]
    programs = ["jax_ep none", "jax_ep float8_e4m3fn", "xla none", "xla+ragged_dot none"]
    assert ["{implementation} {matmul_dtype}".format(**row) for row in rows] == programs * 2
    assert all("not started, because --seconds=0 had passed" in row["error"] for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "deepseek-v3-like" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--matmul_dtype=float8_e4m3fn",), "multiples of 128, but qwen3-30b-a3b has H=32"),
        (("--matmul_dtype=none", "--implementations=", "--baselines="), "nothing to measure"),
        (
            ("--matmul_dtype=none", "--fsdp=2"),
            "--fsdp must divide the number of ranks, 1, but is 2",
        ),
        (
            ("--matmul_dtype=none", "--num_experts=1"),
            "--top_k must be at most the 1 experts, but is 2",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message, capsys):
    assert run("--ranks=1", *flags) == 2
    assert message in capsys.readouterr().err


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


def case() -> bench.TrainCase:
    return bench.TrainCase(ROW, MODELS["qwen3-30b-a3b"], {})


def test_figures_follow_from_the_time(monkeypatch):
    monkeypatch.setattr(bench, "peak_flops", lambda kind: 1e15)
    by_kernel = {"attention: cudnn": 20e3, "experts: grouped_matmul": 15e3, "attention: rope": 5e3}
    found = case().results(ROW | {"device": {"by_kernel_us": by_kernel}})
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
    checked = case()
    assert checked.check(ROW, Loop(loss=10.0, grad_norm=2.0), None)
    assert checked.check(ROW, Loop(loss=10.05, grad_norm=2.1), None)
    for other in (Loop(loss=10.2, grad_norm=2.0), Loop(loss=10.0, grad_norm=3.0)):
        with pytest.raises(AssertionError, match="but that of the first program"):
            checked.check(ROW, other, None)
    with pytest.raises(AssertionError):
        checked.check(ROW, Loop(loss=float("nan"), grad_norm=2.0), None)


def test_a_row_is_compared_with_the_plain_exchange_of_its_ranks():
    slower = ROW | {"implementation": "xla", "wall": {"median_us": 75e3}}
    alone = ROW | {"ranks": 1}
    rows = [dict(ROW), slower, alone]
    bench.TrainBench().compare(rows)
    assert [row.get("speedup_over_xla") for row in rows] == [1.5, 1.0, None]


def test_parts_have_a_table_of_their_own():
    parts = {part: 1e3 * i for i, part in enumerate(bench.PARTS)}
    lines = bench.TrainBench().table([ROW | {"parts_us": parts}, ROW | {"ranks": 1}])
    header, line = lines[-2:]
    assert all(f"{part} ms" in header for part in bench.PARTS)
    assert line.split()[-len(parts) :] == [f"{i:.2f}" for i in range(len(parts))]
    assert "parts" not in "".join(bench.TrainBench().table([ROW]))


def test_the_table_shows_the_energy_if_it_was_measured():
    measured = {"energy": {"millijoules": 5e4, "watts": 640.0, "megahertz": 1725.0}}
    header, line = bench.TrainBench().table([ROW | measured])
    assert header.split()[-3:] == ["mJ", "W", "MHz"]
    assert ["50000.00", "640", "1725"] == line.split()[-3:]
    assert "MHz" not in bench.TrainBench().table([ROW])[0]


def test_one_gpu_and_all_are_measured():
    assert bench.TrainBench().default_ranks(jax.devices()) == sorted({1, len(jax.devices())})
