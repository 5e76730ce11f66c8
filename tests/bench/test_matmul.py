"""Tests of `python -m jax_ep bench matmul`: what it measures, and that --check finds errors."""

from __future__ import annotations

import dataclasses
import json
import re

import jax.numpy as jnp
import pytest

import jax_ep.cli
from jax_ep.bench import matmul as bench_matmul
from jax_ep.bench import matmul_baselines as baselines
from jax_ep.bench.matmul_operations import OF_TWO_PAIRS, Case
from jax_ep.bench.matmul_torch import TORCH
from jax_ep.implementations import Implementations
from jax_ep.matmul import primitives, xla

# The smallest case that the kernels of every platform support.
TINY = Case("tiny", 32, 64, 64, 3, 20, slow=True)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(bench_matmul, "CASES", (TINY,))
    monkeypatch.setattr(bench_matmul, "SMALL_CASES", (TINY,))


def bench(*args: str) -> int:
    loop = ("--iterations=2", "--repeats=2", "--device_timer=none")
    return jax_ep.cli.main(["jax_ep", "bench", "matmul", *loop, *args])


@pytest.mark.slow
def test_it_measures_every_operation_and_writes_them(tmp_path, capsys):
    files = tmp_path / "out.json", tmp_path / "out.png"
    status = bench("--check", f"--json={files[0]}", f"--plot={files[1]}")
    out = capsys.readouterr().out
    assert status == 0, out
    rows = json.loads(files[0].read_text())["rows"]
    shape = (64, 64), jnp.dtype("bfloat16")
    available = {c.name for c in baselines.available(*shape)}
    in_torch = set() if baselines.unavailable_reason(TORCH, *shape) else {TORCH}
    for op in bench_matmul.OPERATIONS:
        of_op = [row for row in rows if row["op"] == op]
        assert of_op[0]["implementation"] == "dense" and "share_of_dense" not in of_op[0]
        expected = available | (in_torch if op in ("product", "dlhs") else set())
        assert {row["implementation"] for row in of_op[1:]} == expected
        assert all(row["checked"] and row["share_of_dense"] > 0 for row in of_op[1:])
        times = [row["wall"]["median_us"] for row in of_op[1:]]
        assert times == sorted(times)
        pairs = 2 if op in OF_TWO_PAIRS else 1
        for row in of_op[1:]:
            # Only rows that are in a group count.
            flops = pairs * 2 * 20 * 64 * 64
            assert row["tflops"] == pytest.approx(flops / row["wall"]["median_us"] * 1e-6)
        assert of_op[0]["flops"] == 2 * 32 * 64 * 64
    header = next(line for line in out.splitlines() if line.startswith("case"))
    assert header.split() == (
        "case op implementation checked wall us low..high TFLOP/s of dense".split()
    )
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_one_implementation_and_operation_can_be_asked_for(capsys):
    assert bench("--implementations=xla", "--ops=drhs", "--case=tin") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "tiny" in line]
    assert [line[:3] for line in lines] == [["tiny", "drhs", "dense"], ["tiny", "drhs", "xla"]]


def replace_xla(monkeypatch, **functions):
    """Replaces functions of the implementation "xla" in the table of implementations."""
    table = (
        dataclasses.replace(each, **functions) if each.name == "xla" else each
        for each in primitives.IMPLEMENTATIONS
    )
    monkeypatch.setattr(primitives, "IMPLEMENTATIONS", Implementations(tuple(table)))


@pytest.mark.parametrize("op", ["product", "drhs"])
@pytest.mark.slow
def test_check_sees_a_wrong_group(op, monkeypatch, capsys):
    right = getattr(xla, op)

    def wrong(*operands, **options):
        out = right(*operands, **options)
        return out * jnp.asarray(1.1, out.dtype)

    replace_xla(monkeypatch, **{op: wrong})
    # Without --check, a wrong result must not fail.
    assert bench("--implementations=xla", f"--ops={op}") == 0
    assert bench("--implementations=xla", f"--ops={op}", "--check") == 1
    out = capsys.readouterr().out
    assert re.search(rf"^tiny +{op} +xla +failed$", out, re.M)
    assert re.search(
        rf", {op}, xla( and \d more)?: AssertionError: group \d is off by 1.0e-01", out
    )
    assert "[1024, 256] x [9, 256, 384] by [" in out


def test_an_implementation_that_fails_is_a_row(monkeypatch, tmp_path, capsys):
    def fails(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: no\nand much more")

    replace_xla(monkeypatch, product=fails)
    path = tmp_path / "out.json"
    assert bench("--ops=product", "--implementations=xla", f"--json={path}") == 1
    assert "tiny, product, xla: RuntimeError: RESOURCE_EXHAUSTED: no\n" in capsys.readouterr().out
    dense, failed = json.loads(path.read_text())["rows"]
    assert "wall" in dense and "wall" not in failed


def test_what_cannot_start_in_time_is_reported(capsys):
    assert bench("--ops=product", "--seconds=0") == 1
    assert (
        "tiny, product, dense and 2 more: TimeoutError: not started, because --seconds=0 had passed"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--case=nothing", "--case: no case has 'nothing' in its name; the cases are: tiny"),
        ("--baselines=cublas", "--baselines=cublas: 'cublas' is not one of mosaic, tokamax, torch"),
        ("--implementations=xla,loop,cublas", "'cublas' is not one of pallas, loop, xla"),
        ("--implementations=pallas", "--implementations: pallas cannot run here: "),
        ("--baselines=mosaic", "--baselines: mosaic cannot run here: "),
        ("--baselines=torch", "--baselines: torch cannot run here: "),
        ("--implementations= --baselines=", "leave nothing to measure"),
        ("--sweep", "--sweep varies the tile sizes of pallas without float8, but pallas is not"),
        ("--dtype=foo", "--dtype=foo"),
        ("--seconds=nan", "--seconds=nan: 'nan' is not a finite number"),
        ("--ops=dance", "--ops=dance: 'dance' is not one of product"),
        ("--json=/no/folder/out.json", "--json: cannot write '/no/folder/out.json'"),
        ("--plot=/no/folder/out.png", "--plot: cannot write '/no/folder/out.png'"),
        ("--tiny", "tiny"),
    ],
)
def test_it_refuses_wrong_flags(arg, message, capsys):
    assert bench(*arg.split()) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_tries_other_tiles():
    assert not baselines.other_tiles(TINY, "product", ["xla"])
    large = Case("large", 4096, 512, 1024, 4, 4096)
    assert not baselines.other_tiles(large, "gated", ["pallas"])
    for op in set(bench_matmul.OPERATIONS) - {"gated"}:
        found = baselines.other_tiles(large, op, ["pallas", "mosaic"])
        assert found and len({backend.name for backend in found}) == len(found)
        assert all(backend.name.startswith("pallas ") for backend in found)
