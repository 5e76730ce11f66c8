"""Tests of `python -m jax_ep memory`: its figures, and its reasons why kernels cannot run."""

from __future__ import annotations

import json
import re

import pytest

import jax_ep.cli
from jax_ep.cli.other_libraries import OTHER_LIBRARIES
from jax_ep.exchange import memory
from pallas_kernels.fabric import memory_map


def test_the_command_prints_every_figure(tmp_path, capsys):
    assert jax_ep.cli.main(["jax_ep", "memory"]) == 0
    text = capsys.readouterr().out
    assert "1820" in text and "receive buffer" in text and "gathered tokens" in text
    heap = memory_map.heap_bytes(8) / 2**20
    assert re.search(rf"heap of symmetric memory +{re.escape(f'{heap:.2f}')}\n", text)
    for other in OTHER_LIBRARIES:
        assert other.formula in text and other.source in text
    for implementation in memory.IMPLEMENTATIONS:
        for order in memory.LAYOUTS:
            assert f'implementation="{implementation}", layout="{order}"' in text
    assert all(f"\n  {name}" in text for name in memory.OPERATIONS)
    flags = [f"--json={tmp_path}/out.json", "--tokens=64", "--dtype=float32"]
    assert jax_ep.cli.main(["jax_ep", "memory", *flags]) == 0
    assert "T=64 tokens a rank" in capsys.readouterr().out
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["model"]["num_tokens"] == 64
    for use in facts["here"]:
        buffers, results = use.pop("buffers"), use.pop("results")
        assert buffers == memory.workspace_bytes(**use, **facts["rows"], **facts["model"])
        assert results == memory.result_bytes(**use, **facts["rows"], **facts["model"])
    ways = {(use["operation"], use["implementation"], use["layout"]) for use in facts["here"]}
    assert len(ways) == 2 * (5 + 7)


def test_the_command_shows_both_levels(capsys):
    assert jax_ep.cli.main(["jax_ep", "memory", "--hosts=2"]) == 0
    text = capsys.readouterr().out
    assert "M=2 hosts" in text and "rows of the rail" in text
    assert 'implementation="two_level", layout="expert", "pallas" inside' in text
    assert jax_ep.cli.main(["jax_ep", "memory", "--hosts=3"]) == 2
    assert "--hosts: 3 does not divide --ranks=8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arg", "reason"),
    [
        ("--top_k=300 --num_experts=512", "300 choices"),
        ("--hidden=70000", "a row of 70016 bfloat16 is too long for shared memory"),
        ("--num_experts=4096", "4096 experts"),
    ],
)
def test_the_command_says_why_the_kernels_cannot_run(arg, reason, capsys):
    assert jax_ep.cli.main(["jax_ep", "memory", *arg.split()]) == 0
    text = capsys.readouterr().out
    of_pallas, _, of_xla, _ = text.split('\nimplementation="')[1:]
    assert reason in of_pallas and "cannot run" in of_pallas
    assert of_xla.startswith("xla") and "cannot run" not in of_xla


def test_the_command_refuses_wrong_flags(capsys):
    for flag, message in (
        ("--ranks=7", "--num_experts must be a multiple of the 7 ranks, but is 256"),
        ("--top_k=300", "--top_k must be at most the 256 experts, but is 300"),
        ("--host_capacity=8", "--host_capacity: needs several hosts"),
        ("--json=/no/folder/out.json", "--json: cannot write '/no/folder/out.json'"),
    ):
        assert jax_ep.cli.main(["jax_ep", "memory", flag]) == 2
        assert message in capsys.readouterr().err


def test_the_largest_buffer_is_shown(capsys):
    """The largest buffer must have N * T * K rows: 8 * 128 * 8 of 7168 bfloat16 are 112 MiB."""
    assert jax_ep.cli.main(["jax_ep", "memory"]) == 0
    text = capsys.readouterr().out
    by_expert, by_rank = text.split('\nimplementation="')[1:3]
    assert re.search(
        r"\n  dispatch +0\.04 +112\.00 +routes 0\.04; received tokens 112\.00\n", by_expert
    )
    assert re.search(
        r"\n  dispatch +0\.03 +14\.00 +routes 0\.03; received tokens 14\.00\n", by_rank
    )


def test_rows_that_float8_cannot_have_are_told(capsys):
    assert jax_ep.cli.main(["jax_ep", "memory", "--hidden=100"]) == 0
    assert "combine, float8_e4m3fn; " in " ".join(capsys.readouterr().out.split())
