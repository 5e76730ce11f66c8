"""Tests of `python -m jax_ep bench collectives`: the table of the fastest algorithms."""

from __future__ import annotations

import json

import jax
import pytest

import jax_ep.cli
from jax_ep.bench import collectives as bench
from jax_ep.collectives.algorithms import ALGORITHMS


def run(*args: str) -> int:
    small = "--rows=32", "--iterations=10", "--repeats=1"
    return jax_ep.cli.main(["jax_ep", "bench", "collectives", *small, *args])


def test_every_collective_can_be_measured():
    assert set(bench.OPERATIONS) == set(ALGORITHMS)


@pytest.mark.needs_devices(2)
def test_results_are_checked_and_the_table_is_updated(tmp_path):
    path, table = tmp_path / "out.json", tmp_path / "table.json"
    table.write_text('{"9.0": {"all_gather": {}}}')
    flags = "--ops=all_reduce_rms_norm", "--ranks=2", "--check", f"--write_table={table}"
    assert run(*flags, f"--json={path}") == 0
    checked = {
        row["implementation"]: row["checked"] for row in json.loads(path.read_text())["rows"]
    }
    assert checked["unfused"] and not checked["xla"]
    found = json.loads(table.read_text())
    assert found["9.0"] == {"all_gather": {}}
    entry = found[jax.devices()[0].platform]["all_reduce_rms_norm"]["2"]
    assert set(entry["us"][str(32 * 256 * 2)]) >= {"xla", "unfused"} and entry["choices"]


def test_device_times_decide_if_all_are_there(tmp_path):
    def row(name, wall, device):
        device = device and {"median_us": device}
        found = dict(op="all_gather", ranks=2, implementation=name, bytes=64, device=device)
        return found | {"wall": {"median_us": wall}}

    for device_of_xla, clock, choice in ((11.0, "device", "direct"), (None, "wall", "xla")):
        path = tmp_path / clock
        rows = [row("direct", 30.0, 10.0), row("xla", 20.0, device_of_xla)]
        bench.write_table(str(path), rows, jax.devices())
        (found,) = json.loads(path.read_text()).values()
        entry = found["all_gather"]["2"]
        assert entry["clock"] == clock and entry["choices"] == [[None, choice]]
