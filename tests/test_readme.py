"""Tests of the README: its Python runs, and its commands are those that CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.processes import environment_of_program

from jax_ep.cli import COMMANDS as COMMANDS_OF_CLI

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [text.strip() for language, text in BLOCKS if language == "bash"]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_python_block_runs_as_it_stands(program, tmp_path):
    environment = environment_of_program(
        fast=True,
        JAX_PLATFORMS="cpu",
        # The program sets the number of its CPU devices itself.
        XLA_FLAGS="",
        PYTHONPATH=str(REPOSITORY),
    )
    exchanges = "\nassert mesh.size == 8, mesh\n"
    done = subprocess.run(
        [sys.executable, "-c", program + exchanges],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "nan" not in done.stdout


def test_the_commands_name_extras_and_files_that_exist():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    train, test = (command for command in COMMANDS if command.startswith("pip install"))
    for command in (train, test):
        (named,) = re.findall(r"\[([\w,]+)\]", command)
        assert set(named.split(",")) <= set(extras)
    (script,) = re.findall(r"python (\S+\.py)", train)
    assert (REPOSITORY / script).is_file()


def test_ci_installs_what_the_readme_says():
    test = next(command for command in COMMANDS if "pytest" in command)
    install, run = test.split(" && ")
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(rf"^\s*{re.escape(install).replace('install', 'install --quiet')}$", ci, re.M)
    assert run in ci


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert "WORKSPACE_NOTES.md" in targets
    for target in targets:
        assert target.startswith("https://") or (REPOSITORY / target).exists(), target


def test_every_command_and_extra_is_told():
    for command in COMMANDS_OF_CLI:
        assert f"`python -m jax_ep {command}`" in README
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert all(f"`{extra}`" in README for extra in project["optional-dependencies"])
