"""Tests of `python -m jax_ep bench matmul`: its operations and figures, and that it sees errors."""

from __future__ import annotations

import json

import pytest
from support.selection import quick

import jax_ep.cli
from jax_ep.bench import matmul as bench

(CASE,) = bench.SMALL_CASES


def run(*args: str) -> int:
    loop = ("--iterations=2", "--repeats=2", "--device_timer=none")
    return jax_ep.cli.main(["jax_ep", "bench", "matmul", *loop, *args])


@pytest.fixture(autouse=True)
def one_case(monkeypatch):
    monkeypatch.setattr(bench, "CASES", (CASE,))


@pytest.mark.parametrize("dtype", quick(["none", "float8_e4m3fn"], "none"))
def test_check_sees_a_wrong_result(dtype, monkeypatch, capsys):
    outputs = bench.Loop.outputs
    monkeypatch.setattr(bench.Loop, "outputs", lambda loop: 1.2 * outputs(loop))
    flags = f"--matmul_dtype={dtype}", "--implementations=xla", "--ops=product"
    assert run(*flags, "--check") == 1
    assert "rows differ" in capsys.readouterr().out


def test_what_runs_here_is_measured_by_default(tmp_path):
    path = tmp_path / "out.json"
    assert run(f"--json={path}", "--ops=product,drhs") == 0
    names = {row["implementation"] for row in json.loads(path.read_text())["rows"]}
    assert names >= {"dense", "xla"}
