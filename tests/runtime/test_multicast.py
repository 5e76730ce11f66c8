"""Tests of `multicast.unavailable_reason`: without several GPUs there is no multicast memory."""

from __future__ import annotations

import jax

from jax_ep.runtime import multicast


def test_multicast_memory_is_not_claimed_without_gpus():
    if jax.default_backend() != "gpu":
        assert "feature of NVIDIA GPUs" in (multicast.unavailable_reason() or "")
    one = jax.devices()[:1]
    assert multicast.unavailable_reason(one)
