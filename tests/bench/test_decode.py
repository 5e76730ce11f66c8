"""Tests of `python -m jax_ep bench decode`: its programs agree, and it counts bytes right."""

from __future__ import annotations

import json

import jax
import pytest

import jax_ep.cli
from jax_ep.bench import decode as bench_decode
from jax_ep.bench import floor
from jax_ep.bench.decode import FORMATS, IMPLEMENTATIONS

GATE, MATRIX = 128 * 16 * 4, 128 * 128


def bench(*args: str) -> int:
    loop = ("--iterations=2", "--repeats=1", "--device_timer=none")
    ranks = f"--ranks={min(2, len(jax.devices()))}"
    return jax_ep.cli.main(["jax_ep", "bench", "decode", *loop, ranks, *args])


@pytest.fixture(autouse=True)
def small_layers_and_a_known_bandwidth(monkeypatch):
    monkeypatch.setattr(bench_decode, "SHAPES", bench_decode.SMALL_SHAPES)
    monkeypatch.setattr(floor, "measure", lambda devices: floor.Bandwidths(None, 1e9))


def test_a_step_reads_the_experts_that_its_tokens_chose(tmp_path, capsys):
    """A step must count the bytes of the chosen experts' weights, and of no others.

    On two ranks the batch of one token is padded to two. The padding token must choose no expert.
    """
    path = tmp_path / "out.json"
    args = "--batches=1", "--layers=1", "--formats=float8_e4m3fn", "--implementations=unrolled"
    assert bench(*args, f"--json={path}") == 0
    (row,) = json.loads(path.read_text())["rows"]
    # The one token chooses K = 4 experts.
    assert row["experts_hit"] == 4
    # The bytes are those of the rank with the most chosen experts. On two ranks, that rank has at
    # least two of the four.
    least = 4 if len(jax.devices()) == 1 else 2
    of_experts = [n * 3 * MATRIX * (1 + 4 / 128**2) for n in range(least, 5)]
    assert row["bytes"] - GATE in of_experts
    assert row["floor_us"] == pytest.approx(row["bytes"] / 1e9 * 1e6)
    assert row["of_floor"] == pytest.approx(row["wall"]["median_us"] / row["floor_us"])
    assert row["tokens_per_s"] == pytest.approx(1e6 / row["wall"]["median_us"])
    out = capsys.readouterr().out
    (header,) = (line for line in out.splitlines() if line.startswith("shape"))
    for column in ("batch", "wall us", "experts", "MB", "floor us", "of floor"):
        assert column in header
    assert "a copy reads and writes 1 GB/s" in out


@pytest.mark.slow
def test_all_programs_of_the_same_layers_agree(tmp_path):
    files = tmp_path / "out.json", tmp_path / "out.png"
    args = "--batches=1,3", "--layers=1,2", "--check"
    assert bench(*args, f"--json={files[0]}", f"--plot={files[1]}") == 0
    rows = json.loads(files[0].read_text())["rows"]
    assert [tuple(row[key] for key in ("layers", "format", "implementation", "batch")) for row in
            rows] == [
        (layers, format, implementation, batch)
        for layers in (1, 2)
        for format in FORMATS
        for implementation in IMPLEMENTATIONS
        for batch in (1, 3)
    ]  # fmt: skip
    assert all(row["checked"] for row in rows)
    unrolled, scanned = (
        [row["bytes"] for row in rows if row["implementation"] == name] for name in IMPLEMENTATIONS
    )
    assert unrolled == scanned
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_check_fails_the_program_that_has_other_layers(monkeypatch, capsys):
    make_stack = bench_decode.make_stack

    def with_other_weights(shape, config, layers, scanned, mesh, seed, stored):
        return make_stack(shape, config, layers, scanned, mesh, seed + scanned, stored)

    monkeypatch.setattr(bench_decode, "make_stack", with_other_weights)
    assert bench("--batches=4", "--layers=1", "--formats=bfloat16", "--check") == 1
    out = capsys.readouterr().out
    assert "1 layers scanned, bfloat16" in out and "differs from that of" in out


def test_a_plot_has_the_times_and_the_floors_of_each_format(monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        bench_decode.report, "lines", lambda panels, path, **rest: drawn.update(panels)
    )
    facts = {"shape": "qwen3-moe", "layers": 1, "ranks": 1, "format": "bfloat16"}
    rows = [
        facts
        | {"implementation": name, "batch": batch, "floor_us": 5.0 * batch}
        | {"wall": {"median_us": us * batch}}
        for name, us in (("unrolled", 10.0), ("scanned", 20.0))
        for batch in (1, 8)
    ]
    # Let the last program be one that failed: its row has no time.
    del rows[-1]["wall"]
    bench_decode.DecodeBench().draw(rows, "out.png", "a machine")
    assert drawn == {
        "qwen3-moe, 1 layers, 1 ranks": {
            "bfloat16, unrolled": [(1, 10.0), (8, 80.0)],
            "bfloat16, its bytes at a copy's bandwidth": [(1, 5.0), (8, 40.0)],
            "bfloat16, scanned": [(1, 20.0)],
        }
    }
