"""Tests how many iterations a benchmark's loop has by default."""

from __future__ import annotations

import jax
import pytest

from jax_ep.bench.flags import BenchFlags, Iterations
from pallas_kernels.exchange.plan import FEW_TOKENS


@pytest.mark.parametrize(
    ("platform", "num_tokens", "iterations"),
    [("cpu", 1, 5), ("gpu", FEW_TOKENS + 1, 20), ("gpu", FEW_TOKENS, 100)],
)
def test_few_tokens_on_gpus_take_more_iterations(platform, num_tokens, iterations, monkeypatch):
    """Few tokens on GPUs must take more iterations, which share the long start of a loop."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    flags = BenchFlags()
    timing = flags.timing(Iterations(5, 20, 100), 3, least_iterations=2)
    flags.values(["bench"])
    assert timing.iterations_of(num_tokens) == iterations
    flags.values(["bench", "--iterations=7"])
    assert timing.iterations_of(num_tokens) == 7


def test_one_default_for_all():
    flags = BenchFlags()
    timing = flags.timing(10, 3, least_iterations=2)
    flags.values(["bench"])
    assert timing.iterations_of(1) == timing.iterations.value == 10
