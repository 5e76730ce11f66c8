"""Tests of `python -m jax_ep memory`: its figures, and its reasons why kernels cannot run."""

from __future__ import annotations

import json

import jax_ep.cli
from jax_ep.exchange import memory
from pallas_kernels.fabric import memory_map


def rows_of(tmp_path, *flags: str):
    path = tmp_path / "out.json"
    assert jax_ep.cli.main(["jax_ep", "memory", *flags, f"--json={path}"]) == 0
    return json.loads(path.read_text())


def test_every_figure_is_that_of_the_library(tmp_path, capsys):
    found = rows_of(tmp_path, "--tokens=64", "--dtype=float32")
    assert found["heap_bytes"] == memory_map.heap_bytes(8)
    for row in found["rows"]:
        way = {key: row[key] for key in ("operation", "implementation", "layout", "wire_dtype")}
        way["output"] = row["output"]
        assert row["buffers"] == memory.workspace_bytes(**way, **found["sizes"])
        assert row["results"] == memory.result_bytes(**way, **found["sizes"])
    assert {row["operation"] for row in found["rows"]} == set(memory.OPERATIONS)
    assert {row["implementation"] for row in found["rows"]} == set(memory.IMPLEMENTATIONS)
    # The largest buffer has N * T * K rows: 8 * 64 * 8 of 7168 float32 are 112 MiB.
    assert "received tokens 112.00" in capsys.readouterr().out


def test_wrong_flags_are_refused(capsys):
    for flag, message in (
        ("--ranks=7", "--num_experts must be a multiple of the 7 ranks, but is 256"),
        ("--top_k=300", "--top_k must be at most the 256 experts, but is 300"),
        ("--hosts=3", "--hosts: 3 does not divide --ranks=8"),
        ("--host_capacity=8", "--host_capacity: needs several hosts"),
    ):
        assert jax_ep.cli.main(["jax_ep", "memory", flag]) == 2
        assert message in capsys.readouterr().err
