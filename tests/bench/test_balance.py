"""Tests of `python -m jax_ep bench balance`: the routings it draws, and what it measures."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jax_ep.cli
from jax_ep.bench import balance, layer


def test_choices_are_distinct_and_follow_the_popularity():
    popularity = np.random.default_rng(0).permutation(16)
    chosen = balance.draw_choices(20_000, 16, 3, 1.0, popularity, seed=1)
    assert all(len(set(row)) == 3 for row in chosen[:200])
    first = np.bincount(chosen[:, 0], minlength=16) / len(chosen)
    weights = 1 / (1.0 + popularity)
    np.testing.assert_allclose(first, weights / weights.sum(), atol=0.02)
    even = np.bincount(balance.draw_choices(20_000, 16, 3, 0.0, popularity, 1)[:, 0]) / len(chosen)
    np.testing.assert_allclose(even, 1 / 16, atol=0.02)


@pytest.mark.slow
@pytest.mark.needs_devices(2)
def test_every_case_is_checked_and_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(layer.SMALL_SHAPES, "qwen3-moe", layer.Shape(32, 16, 8, 2))
    path, plot = tmp_path / "balance.json", f"--plot={tmp_path}/out.png"
    flags = ["--check", "--ranks=2", "--tokens=32", "--copies=2", "--iterations=2", "--repeats=1"]
    assert jax_ep.cli.main(["jax_ep", "bench", "balance", *flags, f"--json={path}", plot]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["exponent"], row["copies"]) for row in rows] == [(0, None), (1, None), (1, 2)]
    uniform, in_order, balanced = rows
    assert balanced["busiest"] < in_order["busiest"]
    assert balanced["redistribute_us"] > 0 and "redistribute_us" not in in_order
    assert not any(row["dropped"] for row in rows)
    assert "balance, 2 more a rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exponents=0", "--copies=1"], "--copies needs a number above 0 in --exponents"),
        (["--ranks=3"], "--num_experts must be a multiple of the 3 ranks, but is 16 for qwen3-moe"),
    ],
)
@pytest.mark.needs_devices(4)
def test_it_refuses_wrong_flags(arguments, message, capsys):
    assert jax_ep.cli.main(["jax_ep", "bench", "balance", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_redistribution_is_spread_over_steps():
    common = {"shape": "s", "ranks": 2, "tokens": 8, "overflow": "fair", "capacity_factor": 0.0}
    uniform = common | {"exponent": 0.0, "copies": None, "wall": {"median_us": 100.0}}
    skewed = uniform | {"exponent": 1.0, "copies": 1, "redistribute_us": 1000.0}
    balance.compare([uniform, skewed], steps=100)
    assert uniform["over_uniform"] == 1
    assert skewed["over_uniform"] == pytest.approx((100 + 1000 / 100) / 100)
