"""Tests of the command line: usage, help, errors and written files."""

from __future__ import annotations

import collections
import importlib
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from support.processes import run_jax_ep
from support.selection import quick

import jax_ep.cli


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


@pytest.mark.parametrize("args", [["xyzzy"], ["--version"], ["--json", "info"]])
def test_what_is_like_no_command_has_no_nearest(args, capsys):
    assert jax_ep.cli.main(["jax_ep", *args]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"There is no command {args[0]!r}."


@pytest.mark.parametrize("command", quick(["info", "bench", "bench matmul"], "info", "bench"))
def test_where_jax_finds_no_backend_a_command_says_so(command):
    done = run_jax_ep(*command.split(), platforms="no_such_platform")
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


def _flags_of_commands():
    for name, command in jax_ep.cli.COMMANDS.items():
        flags = importlib.import_module(command.module).FLAGS
        for flag in sorted(set(flags.values)):
            if flag != "h":
                yield name, flags.values[flag]


EVERY_FLAG = [pytest.param(flag, id=f"{name} {flag.name}") for name, flag in _flags_of_commands()]


@pytest.mark.parametrize("flag", EVERY_FLAG)
def test_help_says_what_a_flag_is(flag):
    """Every flag's help must be a sentence on what the flag is and what its default means."""
    # Remove the text that absl adds to a flag's help.
    text = re.sub(r"^<[^>]*>: |;\n *repeat this option.*", "", flag.help)
    assert re.fullmatch(r"[A-Z].*[.]", text, re.S), text
    assert len(text.split()) >= 4, text
    assert not re.match(r"(Of|As in|In which|Default)\b", text), text
    if flag.default in (None, []):
        assert "Default: " in text or "Required." in text, text
    for unit, said in (("seconds", "[Ss]econds"), ("gb_per_s", "GB/s"), ("tflops", "TFLOP/s")):
        if flag.name.endswith(unit):
            assert re.search(said, text), text


def test_one_thing_has_one_name_and_one_meaning():
    """No flag may be the plural of another, and a flag's name must mean one kind of value."""
    kinds = collections.defaultdict(set)
    for _, flag in _flags_of_commands():
        kind = type(flag.parser).__name__.lstrip("_")
        # A flag may take one size in one command and several in another.
        kinds[flag.name].add({"Integers": "IntegerParser", "Numbers": "Number"}.get(kind, kind))
    assert not {name for name in kinds if f"{name}s" in kinds}
    several = {name: {"EnumParser", "Choices"} for name in ("wire_dtype", "matmul_dtype")}
    for name, found in kinds.items():
        assert len(found) == 1 or found == several.get(name), (name, found)
    assert not {"contenders", "candidate", "algorithms", "dtypes"} & set(kinds)
    plots = {name for name, flag in _flags_of_commands() if flag.name == "plot"}
    assert plots == set(jax_ep.cli.COMMANDS) - {"info", "memory", "bench all"}
    files = {name for name, flag in _flags_of_commands() if flag.name == "json"}
    assert files == set(jax_ep.cli.COMMANDS)


def test_files_are_written_though_nobody_reads_what_is_printed(tmp_path):
    """Files must be written once and whole although standard output is closed, named pipes too."""
    file, pipe = tmp_path / "out.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (file, pipe):
        command = [
            sys.executable,
            "-m",
            "jax_ep",
            "estimate",
            "--hosts=2,4,8,16,32",
            f"--json={path}",
        ]
        read, written = os.pipe()
        os.close(read)
        with subprocess.Popen(command, stdout=written) as started:
            os.close(written)
            text = pipe.read_text() if path is pipe else ""
            assert started.wait(timeout=100) == 0
        assert json.loads(text or file.read_text())["rows"][-1]["hosts"] == 32


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("jax_ep.bench.estimate.run", interrupt)
    assert jax_ep.cli.main(["jax_ep", "estimate"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
