"""Tests of what is known and measured of the machine."""

from __future__ import annotations

import jax
import pytest

from jax_ep.bench.machine import measure_bandwidths, peak_flops


@pytest.mark.parametrize(
    ("kind", "tflops"),
    {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 NVL": 835,
        "NVIDIA GeForce RTX 4090": None,
    }.items(),
)
def test_a_peak_is_known_by_how_the_name_begins(kind, tflops):
    assert peak_flops(kind) == (tflops and tflops * 1e12)


def test_what_this_machine_can_measure():
    found = measure_bandwidths(jax.devices())
    if jax.default_backend() != "gpu":
        assert found == (None, None)
    else:
        assert found.memory > 1e11
        assert (found.link is None) == (len(jax.devices()) == 1)
