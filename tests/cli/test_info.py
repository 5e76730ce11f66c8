"""Tests of `python -m jax_ep info`, as a program, and with the facts of other machines."""

from __future__ import annotations

import inspect
import json
import re
import subprocess

import jax
import pytest
from support.kernels import forget, needs_kernels
from support.processes import run_jax_ep

import jax_ep.cli
from jax_ep.cli import info
from jax_ep.matmul import pallas, primitives
from jax_ep.runtime import assembler, availability, environment, jax_compat
from pallas_kernels.fabric import requirements


@pytest.mark.slow
def test_info_as_a_program(tmp_path):
    done = run_jax_ep("info", f"--json={tmp_path}/info.json")
    assert done.returncode == 0, done.stderr
    assert "\nxla            runs here\n" in done.stdout
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["machine"]["devices"].endswith(" x cpu on cpu")
    assert facts["exchange"]["pallas"].startswith("does not run: it needs NVIDIA GPUs")


def collected(monkeypatch, host_of_device):
    """Returns what `info` reports on a machine on which the kernels run."""
    monkeypatch.setattr(environment, "hosts_of", lambda devices: host_of_device)
    monkeypatch.setattr(availability.Machine, "unavailable_reason", lambda *_: None)
    return info.collect()


def test_info_shows_both_levels(monkeypatch):
    text = info.render(collected(monkeypatch, ["a", "a", "b", "b"]))
    assert "\nhosts          2 with 2 + 2 devices\n" in text
    assert "\ntwo_level      runs here\n" in text
    assert (
        "default        two_level between hosts, pallas inside each (implementation=None)" in text
    )
    text = info.render(collected(monkeypatch, ["a", "a"]))
    assert "two_level      does not run: " in text and "on one host" in text


@pytest.mark.parametrize(
    ("found", "shown", "reason"),
    [
        ([None, None], "unknown: JAX does not say", "JAX does not say which devices share a host"),
        (["a", "a", "b"], "2 with 2 + 1 devices", "the ranks, in order, are on hosts [0, 0, 1]"),
    ],
)
def test_info_says_why_two_level_does_not_run(found, shown, reason, monkeypatch):
    text = info.render(collected(monkeypatch, found))
    assert f"\nhosts          {shown}" in text
    assert f"\ntwo_level      does not run: {reason}" in text
    assert "\ndefault        pallas (implementation=None)" in text


@needs_kernels
@pytest.mark.parametrize("module", requirements.REQUIRED)
def test_info_names_what_jax_lacks(module, monkeypatch):
    """The missing module must be named, even if kernels could not run without GPUs anyway."""
    name = requirements.REQUIRED[module][0]
    for cached in (requirements.unavailable_reason, availability.mosaic_unavailable_reason):
        cached.cache_clear()
    assert "\nkernels need   no name that this JAX lacks\n" in info.render(info.collect())
    forget(monkeypatch, module, name)
    try:
        for cached in (requirements.unavailable_reason, availability.mosaic_unavailable_reason):
            cached.cache_clear()
        assert f"lacks {module}.{name}\n" in info.render(info.collect())
    finally:
        monkeypatch.undo()
        for cached in (requirements.unavailable_reason, availability.mosaic_unavailable_reason):
            cached.cache_clear()


@pytest.mark.parametrize("path", jax_compat._OPTIONAL)
def test_info_names_what_jax_lacks_of_the_other_names(path, monkeypatch):
    find = jax_compat._find
    assert "\nJAX lacks" not in info.render(info.collect())
    monkeypatch.setattr(jax_compat, "_find", lambda each: None if each == path else find(each))
    assert f"\nJAX lacks      {path}: {jax_compat._OPTIONAL[path]}\n" in info.render(info.collect())


def test_every_name_that_is_looked_for_is_known_to_info():
    """`info` must know every name of JAX's internals that `jax_compat._find` looks up."""
    text = inspect.getsource(jax_compat)
    looked_for = set(re.findall(r'_find\("([^"]+)"\)', text)) | set(jax_compat._MULTIMEM)
    assert looked_for and looked_for <= {*jax_compat._OPTIONAL, *jax_compat._REQUIRED}


def test_info_names_a_setting_that_does_not_fit(monkeypatch, capsys):
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "x")
    assert jax_ep.cli.main(["jax_ep", "info"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "JAX_EP_DEVICES_PER_HOST must be a positive int, but is 'x'."


def test_no_platform_at_all_is_told_as_another_error_of_jax(monkeypatch, capsys):
    """An AssertionError without text, as JAX raises for lack of a GPU, must be reported."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    assert jax_ep.cli.main(["jax_ep", "info"]) == 1
    assert "\ndevices        none: JAX_PLATFORMS=" in capsys.readouterr().out
    assert jax_ep.cli.main(["jax_ep", "bench"]) == 2
    assert capsys.readouterr().err.startswith("JAX finds no device: JAX_PLATFORMS=")


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


def test_info_says_why_matmuls_have_no_kernel(monkeypatch):
    monkeypatch.setattr(primitives, "default_platform", lambda: "cuda")
    monkeypatch.setattr(pallas, "_platform_reason", lambda platform: "compute capability 10")
    text = info.render(info.collect())
    assert "\n               pallas does not run: compute capability 10\n" in text
    assert text.endswith("\nsample kernel  none: compute capability 10")
    monkeypatch.undo()
    if jax.default_backend() != "gpu":
        assert "\nassembler      none: JAX has no NVIDIA GPU here" in info.render(info.collect())
