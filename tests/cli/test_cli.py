"""The command line: usage, `info`, and the parts that a GPU alone would otherwise exercise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from support.processes import environment_of_program

import jax_ep.cli
from jax_ep.cli import info

REPOSITORY = Path(__file__).parents[2]


def run_cli(*args: str, platforms: str = "cpu") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jax_ep", *args],
        cwd=REPOSITORY,
        env=environment_of_program(JAX_PLATFORMS=platforms),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("args", [(), ("no_such_command",), ("info", "--no_such_flag")])
def test_wrong_usage_exits_with_2(args, capsys):
    assert jax_ep.cli.main(["jax_ep", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "python -m jax_ep" in captured.err
    assert all(arg.lstrip("-") in captured.err for arg in args[-1:])


@pytest.mark.parametrize(
    ("args", "there_is_no", "nearest"),
    [
        (["benhc"], "benhc", "bench"),
        (["benhc", "--tokens=4"], "benhc", "bench"),
        (["inof"], "inof", "info"),
        (["bench", "lyaer"], "bench lyaer", "bench layer"),
        (["benhc", "matmul", "--check"], "benhc matmul", "bench matmul"),
        (["info", "now"], "info now", "info"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_nearest(args, there_is_no, nearest, capsys):
    assert jax_ep.cli.main(["jax_ep", *args]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first == f"There is no command {there_is_no!r}. Did you mean {nearest!r}?"


def test_what_is_like_no_command_has_no_nearest(capsys):
    assert jax_ep.cli.main(["jax_ep", "xyzzy"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "There is no command 'xyzzy'."


@pytest.mark.parametrize("command", ["info", "bench", "bench matmul"])
def test_where_jax_finds_no_backend_a_command_says_so(command):
    done = run_cli(*command.split(), platforms="no_such_platform")
    assert "Traceback" not in done.stderr + done.stdout
    said = done.stdout if command == "info" else done.stderr
    assert "no_such_platform" in said
    assert done.returncode == (1 if command == "info" else 2)
    if command == "info":
        assert jax.__version__ in done.stdout
        assert "devices        none: " in done.stdout


def test_help_lists_every_command(capsys):
    assert jax_ep.cli.main(["jax_ep", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in jax_ep.cli.COMMANDS)


def test_info_as_a_program():
    done = run_cli("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["backend"] == "cpu"
    assert len(facts["devices"]) >= 1
    assert facts["pallas_unavailable"]  # no CPU is served by the GPU kernels


def test_info_says_which_implementation_serves(capsys):
    facts = info.collect()
    text = info.render({**facts, "pallas_unavailable": None})
    assert "default        pallas" in text
    text = info.render({**facts, "pallas_unavailable": "needs NVIDIA GPUs"})
    assert "does not run: needs NVIDIA GPUs" in text
    assert "default        xla" in text
    assert len(facts["devices"]) == len(jax.devices())


def test_info_shows_the_memory_that_gpus_share():
    facts = info.collect()
    assert "\nshared memory  none: symmetric memory needs NVIDIA GPUs\n" in info.render(
        {**facts, "symmetric_memory": ["none: symmetric memory needs NVIDIA GPUs"]}
    )
    two = ["16 bytes on each of 2 GPUs", "GPU 0: device 0"]
    text = info.render({**facts, "symmetric_memory": two})
    assert f"\nshared memory  {two[0]}\n{15 * ' '}{two[1]}\n" in text


def test_info_names_the_pairs_without_peer_access():
    facts = {
        "versions": {"jax": "1"},
        "backend_error": None,
        "backend": "gpu",
        "processes": 1,
        "devices": [{"kind": "GPU", "compute_capability": "9.0"}] * 2,
        "symmetric_memory": [],
        "pallas_unavailable": None,
    }
    assert "between all GPUs" in info.render({**facts, "peer_access": [[True, True]] * 2})
    one_way = [[True, False], [True, True]]
    assert "missing between GPUs 0->1\n" in info.render({**facts, "peer_access": one_way})
    assert "unknown" in info.render({**facts, "peer_access": None})
