"""Tests of what all benchmarks share, and of the small ones: rows are right, even if some fail."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_ep.cli
from jax_ep.bench import runner, suite
from jax_ep.bench.timing import Loop, expert_mesh
from jax_ep.flags import Args


class Doubling(runner.Bench):
    """A case whose programs double x; "wrong" triples it, and "broken" does not compile."""

    def __init__(self, *names: str, **args):
        usual = {"check": True, "repeats": 3, "device_timer": "auto"}
        super().__init__(Args(**usual | args))
        self.rows = [{"implementation": name, "ranks": 2} for name in names]

    def group(self, row):
        return "doubling", "2 ranks"

    def prepare(self, row):
        return jnp.arange(8.0).reshape(2, 4)

    def build(self, row, shared):
        if row["implementation"] == "broken":
            raise ValueError("no kernel\nand much more")
        factor = 3 if row["implementation"] == "wrong" else 2
        return Loop(lambda x: factor * x, shared, expert_mesh(row["ranks"]), 10)

    def check(self, row, loop, shared):
        assert (loop.outputs() == 2 * shared).all(), "not twice x"
        return row["implementation"] != "unknown"

    def results(self, row):
        return {"floor_us": row["wall"]["median_us"] / 2}


class InTurns(Doubling):
    in_turns = True


@pytest.mark.needs_devices(2)
@pytest.mark.parametrize("kind", [Doubling, InTurns])
def test_a_program_that_fails_costs_no_other_its_results(kind):
    case = kind("right", "broken", "wrong", "unknown")
    right, broken, wrong, unknown = case.measure(case.rows)
    assert right["checked"] and right["of_floor"] == 0.5 and "error" not in right
    assert right["wall"]["low_us"] <= right["wall"]["median_us"] <= right["wall"]["high_us"]
    assert broken["error"] == "ValueError: no kernel" and "wall" not in broken
    assert wrong["error"].startswith("AssertionError: not twice x") and "wall" not in wrong
    assert "wall" in unknown and not unknown["checked"]
    # `measure` must write its results into copies of the case's rows, and leave these as they are.
    assert case.rows[0] == {"implementation": "right", "ranks": 2}
    unasked_case = kind("wrong", check=False)
    (unasked,) = unasked_case.measure(unasked_case.rows)
    assert "wall" in unasked and not unasked["checked"]


@pytest.mark.slow
def test_decoding_is_measured_in_every_format(tmp_path):
    path = tmp_path / "out.json"
    flags = "--layers=1", "--batches=2", "--ranks=1", "--iterations=2", "--repeats=1", "--check"
    assert jax_ep.cli.main(["jax_ep", "bench", "decode", *flags, f"--json={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    sizes = {row["format"]: row["bytes"] for row in rows}
    assert all(row["checked"] and 4 <= row["experts_hit"] <= 8 for row in rows)
    assert len(rows) == 3 and sizes["mxfp4"] < sizes["float8_e4m3fn"] < sizes["bfloat16"]


def test_an_estimate_follows_from_the_rows_that_random_tokens_need(tmp_path):
    path = tmp_path / "out.json"
    flags = "--hosts=2", "--ranks_per_host=2", "--num_experts=4", "--top_k=1", "--tokens=1000"
    assert jax_ep.cli.main(["jax_ep", "estimate", *flags, f"--json={path}"]) == 0
    flat, two_level, static = json.loads(path.read_text())["rows"]
    # A token has one expert: on another host in half of the cases, which then sets the time.
    assert (flat["rows_between"], flat["rows_inside"]) == (0.5, 0.25)
    assert (two_level["rows_between"], two_level["rows_inside"]) == (0.5, 0.5)
    assert static["rows_between"] == 1
    assert flat["us"] == pytest.approx(0.5 * 1000 * 7168 * 2 / 50e3) and flat["set_by"] == "NIC"


def test_a_step_ends_as_it_ended_and_keeps_what_it_measured(tmp_path):
    script = "import sys; print('said'); open(sys.argv[1][7:], 'w').write('[1]'); sys.exit(3)"
    found = suite.run_step([sys.executable, "-c", script], 100)
    assert (found["ended"], found["output"], found["measured"]) == ("exit status 3", "said\n", [1])
    found = suite.run_step([sys.executable, "-c", "while True: pass"], 0.5)
    assert found["ended"] == "ended after 0.5 s" and found["measured"] is None


def test_all_benchmarks_write_one_file(monkeypatch, tmp_path, capsys):
    step = {"ended": "ok", "seconds": 1.0, "output": "", "measured": {"rows": []}}
    seen = []
    monkeypatch.setattr(suite, "run_step", lambda command, _: seen.append(command) or step)
    path = tmp_path / "out.json"
    command = ["jax_ep", "bench", "all", "--flags=--check --repeats=1", f"--json={path}"]
    assert jax_ep.cli.main(command) == 0
    assert [each["step"] for each in json.loads(path.read_text())["steps"]] == list(suite.STEPS)
    assert all("--check" in each and "--repeats=1" in each for each in seen)
    assert jax_ep.cli.main(["jax_ep", "bench", "all"]) == 2
    assert "--json is required" in capsys.readouterr().err
    command[3] = "--flags='"
    assert jax_ep.cli.main(command) == 2
    assert (
        '--flags: "\'" cannot be split into words: No closing quotation' in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--layouts=row", "--layouts: 'row' is not one of expert, rank"),
        ("--ranks=4096", "--ranks is 4096, but there are only "),
        ("--implementations=pallas", "--implementations: pallas cannot run here: it needs NVIDIA"),
        ("--wire_dtype=float8_e4m3fn --hidden=16", "--wire_dtype needs a multiple of 128"),
        ("--baselines= --implementations=", "leave nothing to measure"),
        ("--output=quantized", "--output=quantized needs --wire_dtype=float8_e4m3fn"),
        ("layer --quantize=once", "--quantize needs --matmul_dtype=float8_e4m3fn"),
        ("layer --token_chunks=2", "--token_chunks above 1 needs --capacity_factor=0"),
        ("layer --num_experts=7 --ranks=2", "--num_experts must be a multiple of the 2 ranks"),
        ("layer --num_experts=2 --ranks=1", "--num_experts must be at least 4, which a token choo"),
        ("layer --shapes=mixtral --ranks=3", "--ranks: 3 ranks cannot share 8 experts equally"),
        ("decode --shapes=mixtral --ranks=3", "--ranks: 3 ranks cannot share 8 experts equally"),
        ("train --ranks=3", "--ranks: 3 ranks cannot share "),
        ("matmul --case=nothing", "--case: no case has 'nothing' in its name; the cases are: "),
        ("matmul --ranks=2", "--ranks: a grouped matmul runs on 1 rank"),
        ("train --ranks=1 --fsdp=2", "--fsdp must divide 1 ranks, but is 2"),
        ("collectives --implementations=one_shot", "one_shot cannot run here: "),
        ("collectives --write_table=/", "--write_table: cannot write '/'"),
        (f"collectives --write_table={__file__}", "must hold a JSON object"),
        ("collectives --rows=7 --ranks=2", "--rows: 7 is not a multiple of 2"),
    ],
)
@pytest.mark.needs_devices(2)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels run there")
def test_flags_that_do_not_fit_are_refused(command, message, capsys):
    assert jax_ep.cli.main(["jax_ep", "bench", *command.split()]) == 2
    assert message in capsys.readouterr().err
