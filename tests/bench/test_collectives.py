"""Tests of `python -m jax_ep bench collectives`: what it measures, writes and refuses."""

from __future__ import annotations

import json
import re

import jax
import pytest

import jax_ep.cli
from jax_ep.bench import collectives as bench_collectives
from jax_ep.collectives.algorithms import ALGORITHMS


def bench(*args: str) -> int:
    return jax_ep.cli.main(["jax_ep", "bench", "collectives", *args])


@pytest.mark.slow
def test_bench_prints_and_writes_the_table(tmp_path, capsys):
    num_ranks = min(2, len(jax.devices()))
    path, measured = tmp_path / "table.json", tmp_path / "measured.json"
    path.write_text(json.dumps({"8.0": {"all_gather": {"2": {"choices": [[None, "xla"]]}}}}))
    options = ["--hidden=2560", "--iterations=10", "--repeats=1", "--check", f"--ranks={num_ranks}"]
    args = [f"--write_table={path}", "--ops=all_reduce,all_reduce_rms_norm", "--rows=8,200"]
    assert bench(*options, *args, f"--json={measured}") == 0
    out = capsys.readouterr().out
    assert re.search(r"shape +MB .*xla +best +vs lax.psum +auto +checked", out)
    assert len(re.findall(r"\(8, 2560\) +0\.04 .*x +\w+ +yes", out)) >= 2
    # 200 rows of 2560 bfloat16 values have 1.02 * 10^6 bytes.
    assert len(re.findall(r"\(200, 2560\) +1\.02 .*x +\w+ +yes", out)) >= 2
    table = json.loads(path.read_text())
    # Entries that the file already had must stay.
    (written,) = set(table) - {"8.0"}
    entry = table[written]["all_reduce"][str(num_ranks)]
    assert entry["choices"][-1][0] is None and len(entry["us"]) == 2
    sizes, plot = list(entry["us"]), f"--plot={tmp_path}/out.png"
    assert bench(*options, plot, f"--write_table={path}", "--ops=all_reduce", "--rows=100") == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    again = json.loads(path.read_text())[written]["all_reduce"][str(num_ranks)]
    # Sizes from the earlier run must stay, too.
    assert list(again["us"]) == [sizes[0], str(100 * 2560 * 2), sizes[1]]
    assert {size: again["us"][size] for size in sizes} == entry["us"]
    rows = json.loads(measured.read_text())["rows"]
    assert {row["wall"]["median_us"] > 0 for row in rows} == {True}


def test_bench_measures_2_4_and_8_ranks_by_default(capsys):
    assert bench("--hidden=64", "--iterations=10", "--repeats=1", "--ops=all_gather") == 0
    measured = re.findall(r"all_gather, (\d) ranks: wall", capsys.readouterr().out)
    expected = [count for count in (2, 4, 8) if count <= len(jax.devices())]
    assert [int(count) for count in measured] == (expected or [1])
    assert {512, 2048, 4096} <= set(bench_collectives._GPU_ROWS)


def test_every_collective_can_be_measured():
    assert set(bench_collectives.OPERATIONS) == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ops=psum"], "--ops=psum: 'psum' is not one of all_reduce"),
        pytest.param(
            ["--rows=7", "--ranks=2"],
            "--rows: 7 is not a multiple of 2",
            marks=pytest.mark.needs_devices(2),
        ),
        (
            ["--implementations=ll", "--ops=all_reduce"],
            "--implementations: ll needs one of these operations in --ops: all_gather",
        ),
        (["--implementations=one_shot"], "--implementations: one_shot cannot run here: "),
        (["--plans=64x4x1"], "--plans: no kernel is measured: "),
        (
            ["--implementations=unfused", "--ops=all_reduce_rms_norm", "--write_table=t.json"],
            "--write_table needs xla in --implementations",
        ),
        (["--plans=4x4"], "--plans: '4x4' must be three positive integers"),
        (["--ranks=4096"], "--ranks is 4096, but there are only "),
        (["--json=/no/folder/out.json"], "--json: cannot write '/no/folder/out.json'"),
        (["--write_table=/"], "--write_table: cannot write '/'"),
        (
            [f"--write_table={__file__}"],
            "must hold a JSON object to merge times into, but does not: ",
        ),
    ],
)
def test_bench_refuses_flags(args, message, capsys):
    assert bench(*args) == 2
    assert message in capsys.readouterr().err


def test_the_energy_has_a_table_of_its_own():
    row = {"op": "all_gather", "ranks": 2, "rows": 64, "hidden": 8, "bytes": 1024, "auto": "xla"}
    row |= {"implementation": "xla", "checked": True, "wall": {"median_us": 20.0}}
    measured = {"energy": {"millijoules": 1.5, "watts": 300.0, "megahertz": 1980.0}}
    *_, header, line = bench_collectives.CollectivesBench().table([row | measured])
    assert header.split() == ["rows", "algorithm", "mJ", "W", "MHz"]
    assert line.split() == ["64", "xla", "1.50", "300", "1980"]
    assert not any("mJ" in line for line in bench_collectives.CollectivesBench().table([row]))


def test_device_times_decide_if_all_are_there(tmp_path):
    def record(name, wall, device):
        times = {
            clock: us if us is None else dict(median_us=us)
            for clock, us in (("wall", wall), ("device", device))
        }
        return dict(op="all_gather", ranks=2, implementation=name, bytes=64, **times)

    for device_of_xla, clock, choice in ((11.0, "device", "direct"), (None, "wall", "xla")):
        path = tmp_path / clock
        records = [record("direct", 30.0, 10.0), record("xla", 20.0, device_of_xla)]
        bench_collectives.write_table(str(path), records, jax.devices())
        (operations,) = json.loads(path.read_text()).values()
        entry = operations["all_gather"]["2"]
        assert entry["clock"] == clock and entry["choices"] == [[None, choice]]
        # The entry names only the devices that were measured.
        assert entry["machine"].startswith(f"{min(2, len(jax.devices()))} x ")
