"""Tests of the command line: usage, errors and written files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest
from support.processes import HANG_SECONDS, run_jax_ep
from support.selection import quick

import jax_ep.cli


@pytest.mark.parametrize("args", [(), ("no_such_command",), ("info", "--no_such_flag")])
def test_wrong_usage_exits_with_2(args, capsys):
    assert jax_ep.cli.main(["jax_ep", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "python -m jax_ep" in captured.err
    assert all(arg.lstrip("-") in captured.err for arg in args[-1:])


@pytest.mark.parametrize("args", [["benhc", "--tokens=4"], ["bench", "lyaer"], ["--json", "info"]])
def test_a_misspelt_command_is_answered_with_all_commands(args, capsys):
    assert jax_ep.cli.main(["jax_ep", *args]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("There is no command") and args[0] in first
    assert all(any(name in line for line in others) for name in jax_ep.cli.COMMANDS)


@pytest.mark.parametrize("command", quick(["info", "bench", "bench matmul"], "info"))
def test_where_jax_finds_no_backend_a_command_says_so(command):
    done = run_jax_ep(*command.split(), platforms="no_such_platform")
    assert "Traceback" not in done.stderr + done.stdout
    said = done.stdout if command == "info" else done.stderr
    assert "no_such_platform" in said
    assert done.returncode == (1 if command == "info" else 2)
    if command == "info":
        assert jax.__version__ in done.stdout


@pytest.mark.slow
def test_files_are_written_though_nobody_reads_what_is_printed(tmp_path):
    """Files must be written once and whole although standard output is closed, named pipes too."""
    file, pipe = tmp_path / "out.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (file, pipe):
        command = [sys.executable, "-m", "jax_ep", "estimate", "--hosts=2,32", f"--json={path}"]
        read, written = os.pipe()
        os.close(read)
        with subprocess.Popen(command, stdout=written) as started:
            os.close(written)
            text = pipe.read_text() if path is pipe else ""
            assert started.wait(timeout=HANG_SECONDS) == 0
        assert json.loads(text or file.read_text())["rows"][-1]["hosts"] == 32


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("jax_ep.bench.estimate.run", interrupt)
    assert jax_ep.cli.main(["jax_ep", "estimate"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
