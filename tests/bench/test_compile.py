"""Tests of `python -m jax_ep bench compile`: every program is compiled, and kernels are counted."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import jax_ep.cli
from jax_ep.bench import compile as bench
from jax_ep.bench import layer


@pytest.mark.needs_devices(2)
def test_every_program_is_compiled(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(layer.SMALL_SHAPES, "qwen3-moe", layer.Shape(32, 16, 8, 2))
    path = tmp_path / "compile.json"
    flags = ["--shapes=qwen3-moe", "--ranks=2", "--tokens=32", "--layers=2", f"--json={path}"]
    assert jax_ep.cli.main(["jax_ep", "bench", "compile", *flags]) == 0
    rows = json.loads(path.read_text())["rows"]
    programs = [row["program"] for row in rows]
    assert programs[:2] == ["layer", "layer, with gradients"] and programs[-1] == "2 layers"
    assert all(row[key] > 0 for row in rows for key in ("trace_s", "lower_s", "compile_s"))
    printed = capsys.readouterr().out
    assert all(program in printed for program in programs)


@pytest.mark.slow
def test_experts_that_multiply_float8_are_compiled_too(monkeypatch, tmp_path):
    monkeypatch.setitem(layer.SMALL_SHAPES, "qwen3-moe", layer.Shape(128, 128, 4, 2))
    path = tmp_path / "compile.json"
    flags = ["--shapes=qwen3-moe", "--ranks=1", "--tokens=32", f"--json={path}"]
    float8 = "--matmul_dtype=float8_e4m3fn"
    assert jax_ep.cli.main(["jax_ep", "bench", "compile", *flags, float8]) == 0
    rows = json.loads(path.read_text())["rows"]
    names = ["layer", "layer, with gradients", "experts", "experts, with gradients"]
    assert [row["program"] for row in rows] == names
    assert all(row["compile_s"] > 0 and row["matmul_dtype"] == "float8_e4m3fn" for row in rows)


def test_a_program_is_compiled_anew_each_time():
    """No compilation may use a cache, so that the seconds are those of a program's first call."""
    traces = []

    def function(x):
        traces.append(x.shape)
        return x + 1

    program = bench.Program(function, jax.ShapeDtypeStruct((4,), jnp.float32))
    mesh = Mesh(jax.devices()[:1], (bench.AXIS,))
    assert [bench.measure(program, mesh)["kernels"] for _ in range(2)] == [0, 0]
    assert traces == [(4,), (4,)]


def test_kernels_are_counted_by_their_hash_and_named():
    lowered = 'backend_config = {kernel_hash = "a\\0B", module = "x\\00top_k_mosaic_gpu\\00y"}'
    other = lowered.replace("a\\0B", "c").replace("top_k", "row_tiles")
    text = lowered + lowered + other + "\\00stable_mosaic_gpu\\00"
    assert bench.kernels_of(text) == (2, ["row_tiles", "top_k"])
