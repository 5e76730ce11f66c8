"""Tests of `python -m jax_ep info`, as a program, and with the facts of other machines."""

from __future__ import annotations

import inspect
import json
import re

import jax
import pytest
from support.kernels import forget, needs_kernels
from support.processes import run_jax_ep

import jax_ep.cli
from jax_ep.cli import info
from jax_ep.runtime import availability, hosts, jax_compat
from pallas_kernels.fabric import mosaic


def test_info_as_a_program(tmp_path):
    done = run_jax_ep("info", f"--json={tmp_path}/info.json")
    assert done.returncode == 0, done.stderr
    assert "\nxla            runs here\n" in done.stdout
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["backend"] == "cpu"
    assert len(facts["devices"]) >= 1
    # The kernels are unavailable on a CPU.
    assert facts["unavailable"]["pallas"]
    assert facts["unavailable"]["xla"] is None


def test_info_says_which_implementation_runs(capsys):
    facts = info.collect()
    one_host = {"two_level": "one host"}
    text = info.render({**facts, "unavailable": {**one_host, "pallas": None, "xla": None}})
    assert "default        pallas" in text
    reasons = {**one_host, "pallas": "needs NVIDIA GPUs", "xla": None}
    text = info.render({**facts, "unavailable": reasons})
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


def collected(monkeypatch, host_of_device):
    """Returns what `info` reports on a machine on which the kernels run.

    `host_of_device` has the host of each device.
    """
    monkeypatch.setattr(hosts, "hosts_of", lambda devices: host_of_device)
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
@pytest.mark.parametrize("module", mosaic._REQUIRED)
def test_info_names_what_jax_lacks(module, monkeypatch):
    """The missing module must be named, even if kernels could not run without GPUs anyway."""
    name = mosaic._REQUIRED[module][0]
    for cached in (mosaic.unavailable_reason, availability.mosaic_unavailable_reason):
        cached.cache_clear()
    assert "\nkernels need   no name that this JAX lacks\n" in info.render(info.collect())
    forget(monkeypatch, module, name)
    try:
        for cached in (mosaic.unavailable_reason, availability.mosaic_unavailable_reason):
            cached.cache_clear()
        assert f"lacks {module}.{name}\n" in info.render(info.collect())
    finally:
        monkeypatch.undo()
        for cached in (mosaic.unavailable_reason, availability.mosaic_unavailable_reason):
            cached.cache_clear()


@needs_kernels
def test_info_gives_every_reason_at_once(monkeypatch):
    monkeypatch.setattr(availability, "mosaic_unavailable_reason", lambda: "no Mosaic")
    monkeypatch.setattr(jax_compat, "_requires_devices", None)
    text = info.render(info.collect())
    assert re.search(
        r"^kernels need   no Mosaic; .* it lacks jax\._src\.dispatch\.prim_", text, re.M
    )


@pytest.mark.parametrize("path", jax_compat._OPTIONAL)
def test_info_names_what_jax_lacks_of_the_other_names(path, monkeypatch):
    find = jax_compat._find
    assert "\nJAX lacks" not in info.render(info.collect())
    monkeypatch.setattr(jax_compat, "_find", lambda each: None if each == path else find(each))
    assert f"\nJAX lacks      {path}: {jax_compat._OPTIONAL[path]}\n" in info.render(info.collect())


def test_every_name_that_is_looked_for_is_known_to_info():
    """`info` must know every name of JAX's internals that `jax_compat._find` looks up.

    The name must be in a table of optional or required names, from which `info` prints.
    """
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


def test_info_names_the_pairs_without_peer_access():
    facts = {
        "versions": {"jax": "1"},
        "backend_error": None,
        "backend": "gpu",
        "processes": 1,
        "devices": [{"kind": "GPU", "compute_capability": "9.0"}] * 2,
        "hosts": ["0", "0"],
        "symmetric_memory": [],
        "names_missing": None,
        "optional_names_missing": [],
        "unavailable": {"pallas": None, "xla": None},
    }
    assert "between all GPUs" in info.render({**facts, "peer_access": [[True, True]] * 2})
    one_way = [[True, False], [True, True]]
    assert "missing between GPUs 0->1\n" in info.render({**facts, "peer_access": one_way})
    assert "unknown" in info.render({**facts, "peer_access": None})
