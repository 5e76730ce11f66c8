"""Tests of `python -m jax_ep info`, with the facts of other machines."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess

import jax
import pytest

import jax_ep.cli
from jax_ep.cli import info
from jax_ep.matmul import pallas, primitives
from jax_ep.runtime import assembler, jax_compat


@pytest.mark.parametrize("path", jax_compat._OPTIONAL)
def test_info_names_what_jax_lacks_of_the_other_names(path, monkeypatch):
    find = jax_compat._find
    assert "\nJAX lacks" not in info.render(info.collect())
    monkeypatch.setattr(jax_compat, "_find", lambda each: None if each == path else find(each))
    assert f"\nJAX lacks      {path}: {jax_compat._OPTIONAL[path]}\n" in info.render(info.collect())


def test_every_name_that_is_looked_for_is_known_to_info():
    """`info` must know every name of JAX's internals that `jax_compat._find` looks up."""
    text = inspect.getsource(jax_compat)
    looked_for = set(re.findall(r'_find\("([^"]+)"\)', text))
    assert looked_for and looked_for <= {*jax_compat._OPTIONAL, *jax_compat._REQUIRED}


def test_no_platform_at_all_is_told_as_another_error_of_jax(monkeypatch, capsys):
    """An AssertionError without text, as JAX raises for lack of a GPU, must be reported."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    assert jax_ep.cli.main(["jax_ep", "info"]) == 1
    assert "\ndevices        none: JAX_PLATFORMS=" in capsys.readouterr().out
    assert jax_ep.cli.main(["jax_ep", "bench"]) == 2
    assert capsys.readouterr().err.startswith("JAX finds no device: JAX_PLATFORMS=")


@pytest.mark.parametrize(("names", "runs"), [(2, "runs here"), (3, "runs inside each host")])
def test_kernels_run_here_or_inside_each_of_several_hosts(names, runs, monkeypatch):
    found = info.IMPLEMENTATIONS
    able = [dataclasses.replace(each, unavailable_reason=lambda _: None) for each in found]
    monkeypatch.setattr(info, "IMPLEMENTATIONS", dataclasses.replace(found, table=able[-names:]))
    text = info.render({"exchange": info._exchange(jax.devices())})
    assert f"\npallas         {runs}\n" in "\n" + text


def on_hopper(monkeypatch, report, returncode=0):
    """Returns what `info` prints where the matmuls' kernels run, and `report` is of the sample."""
    monkeypatch.setattr(primitives, "default_platform", lambda: "cuda")
    monkeypatch.setattr(pallas, "_platform_reason", lambda platform: None)
    done = subprocess.CompletedProcess([], returncode, "", report)
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: done)
    monkeypatch.setattr(assembler, "name", lambda: assembler.PTXAS)
    monkeypatch.setattr(assembler, "version", lambda: "13.0")
    return info.render(info.collect())


REPORT = """
ptxas info    : Compiling entry function 'grouped_matmul_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for grouped_matmul_mosaic_gpu_kernel
    0 bytes stack frame, {spilled} bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 8 bytes cumulative stack size
"""


def test_info_says_that_a_matmul_is_slow_and_who_assembled_it(monkeypatch):
    text = on_hopper(monkeypatch, REPORT.format(spilled=0))
    assert "\nmatmuls        pallas (implementation=None, bfloat16)" in text
    assert "\nassembler      ptxas 13.0\n" in text
    assert text.endswith("\nsample kernel  grouped_matmul: 168 registers, spills none")
    text = on_hopper(monkeypatch, REPORT.format(spilled=384))
    assert text.endswith("168 registers, spills 384 bytes, so it is slow")
    linked = REPORT.format(spilled=0) + "info    : used 168 registers, used 2 barriers\n"
    text = on_hopper(monkeypatch, linked)
    assert "\nassembler      libnvJitLink (expected was ptxas 13.0)\n" in text
