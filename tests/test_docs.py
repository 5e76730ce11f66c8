"""Tests of the documentation: it names all public names, and its programs run."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import environment_of_program

import jax_ep
import jax_ep.cli
from pallas_kernels.fabric import memory_map

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
PROGRAMS = {
    f"{name}-{i}": program
    for name, page in PAGES.items()
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


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_python_block_runs_as_it_stands(program, tmp_path):
    assert output_of(program, tmp_path).strip()


@pytest.mark.slow
def test_the_bytes_that_policies_keep_are_told(tmp_path):
    """The documentation's table of remat policies must have the numbers that its program prints."""
    (program,) = (program for program in PROGRAMS.values() if "mib_kept" in program)
    told = PAGES["layers.md"].replace("`", "")
    rows = output_of(program, tmp_path).splitlines()
    assert len(rows) == 7 and all(f"\n{row}" in told for row in rows), rows


def test_the_api_reference_has_every_public_name():
    directives = re.findall(r"^\.\. auto\w+:: (?:jax_ep\.)?(\S+)$", "\n".join(PAGES.values()), re.M)
    told = {*directives, *(name.rpartition(".")[2] for name in directives)}
    public = {name for name in jax_ep.__all__ if not isinstance(getattr(jax_ep, name), ModuleType)}
    layers = {"linen.MoE", "nnx.MoE", "reference"}
    assert public | layers <= told, (public | layers) - told


def test_the_memory_of_the_low_latency_protocol_is_told():
    def mib(fewer, more):
        return (memory_map.heap_bytes(more) - memory_map.heap_bytes(fewer)) / (more - fewer) / 2**20

    told = (
        f"{mib(3, 4):g} MiB of each heap for each other GPU of the host, or {mib(5, 8):g} MiB for "
        f"each of up to {memory_map.num_senders(16)} others if the host has more than 4 GPUs."
    )
    assert told in " ".join(PAGES["api/collectives.md"].split())
    assert memory_map.heap_bytes(8) == memory_map.heap_bytes(16) <= 32 * 2**20


def test_every_command_is_told():
    told = re.findall(r"^\.\. command-help:: (.+)$", PAGES["api/command_line.md"], re.M)
    assert sorted(told) == sorted(jax_ep.cli.COMMANDS)


def test_every_environment_variable_is_told():
    sources = [
        path.read_text(encoding="utf-8")
        for package in ("jax_ep", "pallas_kernels")
        for path in (REPOSITORY / package).rglob("*.py")
    ]
    read = set(re.findall(r"JAX_EP_[A-Z_]+", "\n".join(sources)))
    assert read == set(re.findall(r"^\| `(JAX_EP_[A-Z_]+)` \|", PAGES["api/command_line.md"], re.M))


def test_links_lead_somewhere():
    for name in ("CONTRIBUTING.md", "WORKSPACE_NOTES.md", "pallas_kernels/TUNING.md"):
        page = REPOSITORY / name
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name}: {target}"


def test_code_fits_the_width_of_a_page():
    """Code lines must have at most 100 columns, the width in docs/_static/code.css."""
    for name, page in PAGES.items():
        for language, block in re.findall(r"^```(.*)\n(.*?)^```", page, re.M | re.S):
            if not language.startswith(("{eval-rst}", "{toctree}", "{warning}")):
                assert all(len(line) <= 100 for line in block.splitlines()), f"{name}: {block}"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns path -> text of the pages that Sphinx builds, without tags and code blocks."""
    if any(importlib.util.find_spec(name) is None for name in ("sphinx", "furo", "myst_parser")):
        pytest.skip("needs the extra docs")
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(DOCS), str(out)]
    environment = environment_of_program(JAX_PLATFORMS="cpu", PYTHONPATH=str(REPOSITORY))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

    def text_of(path):
        page = re.sub(r"<pre>.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.S)
        body = page[page.index("<article") : page.index("</article>")]
        return " ".join(html.unescape(re.sub(r"<[^>]+>", "", body)).split())

    return {
        str(path.relative_to(out)): text_of(path)
        for path in out.rglob("*.html")
        if "<article" in path.read_text(encoding="utf-8")
    }


def test_pages_show_no_markup(built):
    for name, text in built.items():
        if not name.startswith("_modules"):
            for markup in ("`", ":ivar", ":param", "::"):
                assert markup not in text, (
                    f"{name}: {text[max(0, text.index(markup) - 99) :][:200]}"
                )
