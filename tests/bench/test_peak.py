"""Tests of the table of GPUs' peak FLOP/s."""

from __future__ import annotations

import pytest

from jax_ep.bench.peak import peak_flops

TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA GeForce RTX 4090": None,
    "cpu": None,
}


@pytest.mark.parametrize(("kind", "tflops"), TFLOPS.items())
def test_a_peak_is_known_by_how_the_name_begins(kind, tflops):
    assert peak_flops(kind) == (tflops and tflops * 1e12)
