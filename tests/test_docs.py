"""Tests of the documentation: it names all public names, and its programs and the README's run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import environment_of_program
from support.selection import quick

import jax_ep
import jax_ep.cli

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PROGRAMS = {
    f"{name}-{i}": program
    for name, page in [*PAGES.items(), ("README", README)]
    for i, program in enumerate(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
}


def output_of(program: str, folder: Path) -> str:
    """Runs a Python program in an empty folder, as a process of its own; returns what it prints.

    The program must write no file there, since users may run it next to files of their own.
    """
    environment = environment_of_program(
        fast=True,
        JAX_PLATFORMS="cpu",
        # The program sets the number of its CPU devices itself.
        XLA_FLAGS="",
        PYTHONPATH=str(REPOSITORY),
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


@pytest.mark.parametrize("program", quick(PROGRAMS, "README-0", unpack=False))
def test_a_python_block_runs_as_it_stands(program, tmp_path):
    printed = output_of(program, tmp_path)
    assert printed.strip() and "nan" not in printed


def test_the_api_reference_has_every_public_name():
    directives = re.findall(r"^\.\. auto\w+:: (?:jax_ep\.)?(\S+)$", "\n".join(PAGES.values()), re.M)
    told = {*directives, *(name.rpartition(".")[2] for name in directives)}
    public = {
        name
        for name, value in vars(jax_ep).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    layers = {"linen.MoE", "nnx.MoE", "reference"}
    assert public | layers <= told, (public | layers) - told


def test_every_command_and_environment_variable_is_told():
    page = PAGES["api/command_line.md"]
    told = re.findall(r"^\.\. command-help:: (.+)$", page, re.M)
    assert sorted(told) == sorted(jax_ep.cli.COMMANDS)
    sources = [
        path.read_text(encoding="utf-8")
        for package in ("jax_ep", "pallas_kernels")
        for path in (REPOSITORY / package).rglob("*.py")
    ]
    read = set(re.findall(r"JAX_EP_[A-Z_]+", "\n".join(sources)))
    assert read == set(re.findall(r"^\| `(JAX_EP_[A-Z_]+)` \|", page, re.M))


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "WORKSPACE_NOTES.md", "pallas_kernels/TUNING.md"]
)
def test_links_lead_somewhere(name):
    page = REPOSITORY / name
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


COMMANDS = re.findall(r"^```bash\n(.*?)\n```", README, re.MULTILINE | re.DOTALL)


def test_ci_installs_what_the_readme_says():
    test = next(command for command in COMMANDS if "pytest" in command)
    install, run = test.split(" && ")
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(rf"^\s*{re.escape(install).replace('install', 'install --quiet')}$", ci, re.M)
    assert run in ci
