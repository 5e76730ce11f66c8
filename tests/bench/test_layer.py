"""Tests of `python -m jax_ep bench layer`: all layers compute the same, and figures follow."""

from __future__ import annotations

import json

import jax
import pytest

import jax_ep.cli
from jax_ep.bench import layer as bench


def run(*args: str) -> int:
    ranks = min(2, len(jax.devices()))
    small = ("--tokens=8", "--num_experts=8")
    loop = ("--iterations=2", "--repeats=2", "--device_timer=none", "--shapes=mixtral")
    return jax_ep.cli.main(["jax_ep", "bench", "layer", *small, *loop, f"--ranks={ranks}", *args])


@pytest.mark.slow
def test_every_layer_has_a_backward_pass_on_one_rank(tmp_path):
    path = tmp_path / "out.json"
    flags = "--ranks=1", "--directions=forward_backward", f"--baselines={','.join(bench.BASELINES)}"
    assert run(*flags, "--check", f"--json={path}") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["jax_ep", *bench.BASELINES]
    assert all(row["checked"] and row["ranks"] == 1 for row in rows)


@pytest.mark.slow
def test_chunks_and_remat_are_measured_next_to_the_whole(tmp_path):
    path = tmp_path / "out.json"
    flags = "--token_chunks=1,4", "--capacity_factor=0", "--tokens=256", "--baselines=", "--check"
    assert run(*flags, "--directions=forward", f"--json={path}") == 0
    whole, chunked = json.loads(path.read_text())["rows"]
    assert (whole["token_chunks"], chunked["token_chunks"]) == (1, 4)
    assert whole["checked"] and chunked["checked"]
    assert whole["capacity"] == 4 * chunked["capacity"] == 256 * 2 * whole["ranks"]
    assert 0 < chunked["temp_bytes"] < whole["temp_bytes"]


def test_device_time_is_split_by_the_names_of_kernels():
    by_kernel = {"ep_dispatch": 20.0, "ncclAllGather": 5.0, "grouped_matmul_x": 60.0, "fusion": 3.0}
    found = bench.parts_of({"by_kernel_us": by_kernel, "slowest_us": 90.0})
    assert found == {"matmul_us": 60.0, "exchange_us": 25.0, "if_hidden_us": 65.0}
