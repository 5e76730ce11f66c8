"""The documentation's promises: it has every public name, and its programs run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import environment_of_program

import jax_ep
import jax_ep.cli
from pallas_kernels.fabric import layout

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
PROGRAMS = {
    f"{name}-{i}": program
    for name, page in PAGES.items()
    for i, program in enumerate(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_python_block_runs_as_it_stands(program, tmp_path):
    environment = environment_of_program(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="",  # the program asks for its devices itself
        PYTHONPATH=str(REPOSITORY),
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_api_reference_has_every_public_name():
    directives = re.findall(r"^\.\. auto\w+:: (?:jax_ep\.)?(\S+)$", "\n".join(PAGES.values()), re.M)
    told = {*directives, *(name.rpartition(".")[2] for name in directives)}
    public = {name for name in jax_ep.__all__ if not isinstance(getattr(jax_ep, name), ModuleType)}
    layers = {"linen.MoE", "nnx.MoE", "reference"}
    assert public | layers <= told, (public | layers) - told


def test_the_memory_of_the_low_latency_protocol_is_told():
    def mib(fewer, more):
        return (layout.heap_bytes(more) - layout.heap_bytes(fewer)) / (more - fewer) / 2**20

    told = (
        f"{mib(3, 4):g} MiB for each other GPU of the host, {mib(5, 8):g} where there are over 4,"
    )
    told += f" of up to {layout.num_senders(16)}."
    assert told in " ".join(PAGES["collectives.md"].split())
    assert layout.heap_bytes(8) == layout.heap_bytes(16) <= 32 * 2**20


def test_every_command_is_told():
    told = re.findall(r"^\.\. command-help:: (.+)$", PAGES["command_line.md"], re.M)
    assert sorted(told) == sorted(jax_ep.cli.COMMANDS)


def test_every_environment_variable_is_told():
    sources = [
        path.read_text(encoding="utf-8")
        for package in ("jax_ep", "pallas_kernels")
        for path in (REPOSITORY / package).rglob("*.py")
    ]
    read = set(re.findall(r"JAX_EP_[A-Z_]+", "\n".join(sources)))
    assert read == set(re.findall(r"^\| `(JAX_EP_[A-Z_]+)` \|", PAGES["environment.md"], re.M))


def test_links_lead_somewhere():
    for name in ("CONTRIBUTING.md", "WORKSPACE_NOTES.md", "pallas_kernels/TUNING.md"):
        page = REPOSITORY / name
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name}: {target}"
