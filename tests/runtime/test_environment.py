"""Tests which ranks share a host, on meshes of stand-ins for devices."""

from __future__ import annotations

import re
import types
from typing import Any

import jax
import numpy as np
import pytest

from jax_ep.runtime import environment


def program(processes: list[int], shape: tuple[int, ...], **changes: Any) -> Any:
    """Makes a stand-in for a program on devices of the given processes, in row-major order."""
    devices = np.empty(len(processes), object)
    devices[:] = [types.SimpleNamespace(process_index=p, platform="cpu") for p in processes]
    names = ("a", "b")[: len(shape)]
    mesh = types.SimpleNamespace(
        size=len(processes), axis_names=names, shape=dict(zip(names, shape, strict=True))
    )
    facts = dict(mesh=mesh, mesh_devices=devices.reshape(shape), for_export=False)
    return types.SimpleNamespace(**facts | changes)


@pytest.mark.parametrize(
    "processes, shape, axis_name, expected",
    [
        ([0, 0, 0, 0], (4,), ("a",), 1),
        ([0, 0, 1, 1], (2, 2), ("a", "b"), 2),
        ([0, 0, 1, 1], (2, 2), ("b",), 1),
        ([0, 0, 1, 1], (2, 2), ("a",), 2),
        # "a" is the last of the axes, so ranks are numbered along "a" first.
        ([0, 1, 0, 1], (2, 2), ("b", "a"), 2),
        ([3, 3, 1, 1, 2, 2], (6,), ("a",), 3),
        ([0, 0, 0, 1], (4,), ("a",), r"on hosts \[0, 0, 0, 1\]"),
        ([0, 0, 0, 1], (2, 2), ("b",), r"different numbers of hosts, \[1, 2\]"),
    ],
)
def test_hosts_are_runs_of_neighbours(processes, shape, axis_name, expected, monkeypatch):
    monkeypatch.delenv("JAX_EP_DEVICES_PER_HOST", raising=False)
    found = environment.num_hosts(program(processes, shape), axis_name)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert re.search(expected, str(found))


def test_where_devices_are_may_be_unknown(monkeypatch):
    monkeypatch.delenv("JAX_EP_DEVICES_PER_HOST", raising=False)
    exported = program([0, 0, 1, 1], (4,), for_export=True)
    assert "exported" in str(environment.num_hosts(exported, ("a",)))
    abstract = program([0, 0, 1, 1], (4,), mesh_devices=None)
    assert "use jax.set_mesh" in str(environment.num_hosts(abstract, ("a",)))
    # With this setting, devices belong to hosts in their order in the mesh.
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "1")
    assert environment.num_hosts(abstract, ("a",)) == 4
    gpus = [types.SimpleNamespace(process_index=p, platform="gpu") for p in (0, 1)]
    monkeypatch.delenv("JAX_EP_DEVICES_PER_HOST")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert environment.hosts_of(gpus) == [None, None]
    gpus = [types.SimpleNamespace(slice_index=5, **vars(gpu)) for gpu in gpus]
    assert environment.hosts_of(gpus) == [5, 5]
