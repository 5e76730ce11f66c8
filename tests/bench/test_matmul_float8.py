"""`python -m jax_ep bench matmul --matmul_dtype`: float8 is measured, compared and checked."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import pytest
from support.selection import quick

import jax_ep.cli
from jax_ep.bench import matmul as bench_matmul
from jax_ep.bench import matmul_float8
from jax_ep.bench.matmul_operations import Case
from jax_ep.formats import QuantizedArray


def bench(*args: str) -> int:
    loop = ("--iterations=2", "--repeats=2", "--device_timer=none")
    return jax_ep.cli.main(["jax_ep", "bench", "matmul", *loop, *args])


FLOAT8 = "--matmul_dtype=none,float8_e4m3fn"


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Makes the command measure one small case, whose matrices have whole blocks of 128 x 128."""
    case = Case("blocks", 96, 256, 128, 3, 80, slow=True)
    monkeypatch.setattr(bench_matmul, "CASES", (case,))
    monkeypatch.setattr(bench_matmul, "SMALL_CASES", (case,))


@pytest.mark.slow
def test_float8_is_measured_next_to_the_operands_own_dtype(tmp_path, capsys):
    path = tmp_path / "out.json"
    ops = f"--ops={','.join((*bench_matmul.OPERATIONS, 'quantize'))}"
    assert bench("--check", FLOAT8, ops, "--implementations=xla", f"--json={path}") == 0
    rows = json.loads(path.read_text())["rows"]
    found = {(row["op"], row["implementation"], row["matmul_dtype"]): row for row in rows}
    for op in bench_matmul.OPERATIONS:
        assert {key[1:] for key in found if key[0] == op} == {
            (name, dtype) for name in ("dense", "xla") for dtype in ("none", "float8_e4m3fn")
        }
        row, plain = (found[op, "xla", dtype] for dtype in ("float8_e4m3fn", "none"))
        assert row["checked"] and row["flops"] == plain["flops"] and row["share_of_dense"] > 0
        ratio = plain["wall"]["median_us"] / row["wall"]["median_us"]
        assert row["speedup_of_float8"] == pytest.approx(ratio)
    row = found["quantize", "xla", "float8_e4m3fn"]
    assert row["checked"] and row["share_of_dense"] > 0 and "tflops" not in row
    assert "vs plain" in capsys.readouterr().out


@pytest.mark.parametrize("op", quick(["product", "gated", "dlhs", "drhs", "quantize"], "gated"))
def test_check_sees_a_wrong_float8_result(op, monkeypatch, capsys):
    make = matmul_float8.operation

    def wrong(*args):
        def scaled(operands):
            out = make(*args)(operands)
            is_leaf = {"is_leaf": lambda leaf: isinstance(leaf, QuantizedArray)}
            return jax.tree.map(lambda leaf: double(leaf), out, **is_leaf)

        return scaled

    def double(leaf):
        if isinstance(leaf, QuantizedArray):
            return dataclasses.replace(leaf, scales=2 * leaf.scales)
        return 2 * leaf

    monkeypatch.setattr(matmul_float8, "operation", wrong)
    flags = "--matmul_dtype=float8_e4m3fn", "--implementations=xla", f"--ops={op}"
    assert bench(*flags, "--check") == 1
    assert re.search(r"AssertionError: (group \d is|numbers are) off by", capsys.readouterr().out)


def test_float8_needs_whole_blocks(monkeypatch, capsys):
    monkeypatch.setattr(bench_matmul, "SMALL_CASES", (Case("odd", 32, 64, 128, 3, 20),))
    assert bench("--matmul_dtype=float8_e4m3fn") == 2
    assert (
        "--matmul_dtype: float8 needs H and F that are multiples of 128" in capsys.readouterr().err
    )
