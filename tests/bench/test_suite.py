"""Tests of `python -m jax_ep bench all`: a step that fails, hangs or dies harms no other step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from support.processes import environment_of_program

import jax_ep.cli
from jax_ep.bench import suite

REPOSITORY = Path(__file__).parents[2]


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


WRITES = "import sys; path = sys.argv[1].split('=')[1]; open(path, 'w').write('{\"rows\": [{}]}'); "


def assert_gone(pid: int) -> None:
    """Asserts that a process ends within a short time; a zombie counts as ended."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rsplit(")")[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is in state {state}")


def test_a_step_that_ends_well_hands_over_what_it_measured():
    step = suite.run_step(program(WRITES + "print('table')"), 60, measures=True)
    assert (step["ended"], step["output"], step["measured"]) == ("ok", "table\n", {"rows": [{}]})


def test_a_step_that_fails_keeps_what_it_had_and_its_last_words():
    text = WRITES + "print('half a table'); sys.exit('no more memory')"
    step = suite.run_step(program(text), 60, measures=True)
    assert step["ended"] == "exit status 1"
    assert (step["output"], step["measured"]) == ("half a table\n", {"rows": [{}]})
    assert step["error_output"] == "no more memory\n"


def test_a_step_that_dies_is_told_from_one_that_fails():
    step = suite.run_step(program("import os; os.abort()"), 60, measures=True)
    assert (step["ended"], step["measured"]) == ("killed by SIGABRT", None)


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    """A hanging step must be ended with its children, even if all of them ignore SIGTERM."""
    monkeypatch.setattr(suite, "_SECONDS_TO_END", 1)
    pid = tmp_path / "pid"
    script = f"trap '' TERM; sleep 600 & echo $! > {pid}; echo started; wait"
    started = time.monotonic()
    step = suite.run_step(["sh", "-c", script], 5, measures=False)
    assert step["ended"] == "ended after 5 s" and step["output"] == "started\n"
    assert time.monotonic() - started < 60
    assert_gone(int(pid.read_text()))


@pytest.mark.slow
def test_a_run_that_is_told_to_end_ends_its_step_and_keeps_what_it_has(tmp_path):
    path, pid = tmp_path / "out.json", tmp_path / "pid"
    sleeps = f"echo $$ > {pid}; exec sleep 600"
    arguments = ["bench", "all", f"--json={path}", "--steps=", "--also=true", f"--also={sleeps}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_ep", *arguments],
        cwd=REPOSITORY,
        env=environment_of_program(),
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    ended = [(step["step"], step["ended"]) for step in json.loads(path.read_text())["steps"]]
    assert ended == [("true", "ok"), (sleeps, "interrupted")]
    assert out.splitlines()[-2].split()[:2] == ["true", "ok"]
    assert_gone(int(pid.read_text()))


@pytest.mark.slow
@pytest.mark.slow
def test_bench_all_runs_every_step_and_saves_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "out.json"
    monkeypatch.setenv(
        "JAX_PLATFORMS", jax.default_backend() if "cpu" in jax.default_backend() else "cuda"
    )
    status = jax_ep.cli.main([
        "jax_ep", "bench", "all", f"--json={path}", "--steps=float8,collectives",
        "--tokens=4", "--hidden=128", "--num_experts=8", "--ranks=1", "--iterations=10",
        "--repeats=1", "--device_timer=none", "--also=exit 3", "--also=echo measured by hand",
    ])  # fmt: skip
    out = capsys.readouterr().out
    record = json.loads(path.read_text())
    ended = [(step["step"], step["ended"]) for step in record["steps"]]
    assert ended == [
        ("float8", "ok"), ("collectives", "ok"),
        ("exit 3", "exit status 3"), ("echo measured by hand", "ok"),
    ], out  # fmt: skip
    assert status == 1
    assert record["machine"]["versions"]["jax"] == jax.__version__
    float8, collectives, *_ = (step["measured"] for step in record["steps"])
    assert {row["wire_dtype"] for row in float8["rows"]} == {"float8_e4m3fn"}
    assert {row["tokens"] for row in float8["rows"]} == {4}
    assert all("wall" in row for row in (*float8["rows"], *collectives["rows"]))
    last = out[out.rindex("\nstep ") :].splitlines()
    assert last[1].split() == ["step", "ended", "seconds", "measured", "failed"]
    assert last[2].split()[:2] == ["float8", "ok"]
    assert last[2].split()[3:] == [str(len(float8["rows"])), "0"]
    assert last[-2].split()[:5] == ["exit", "3", "exit", "status", "3"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--json is required: name the file"),
        (["--json=/no/folder/out.json"], "--json: cannot write '/no/folder/out.json'"),
        (["--json=out.json", "--steps=dance"], "--steps=dance: 'dance' is not one of exchange"),
        (["--json=out.json", "--steps=matmul", "--tokens=4"], "--tokens needs a step in --steps"),
        (
            ["--json=out.json", "--steps=layer", "--write_table=t"],
            "--write_table needs a step in --steps that has this flag: coll",
        ),
        (["--json=out.json", "--step_seconds=0"], "--step_seconds must be above 0, but is 0"),
    ],
)
def test_it_refuses_wrong_flags(args, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert jax_ep.cli.main(["jax_ep", "bench", "all", *args]) == 2
    assert message in capsys.readouterr().err
