"""Tests of the kernel of the router's logits for a few tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import emitted
from support.kernels import needs_kernels
from support.selection import quick

from pallas_kernels.routing import logits

ON_GPU = jax.default_backend() == "gpu"


@needs_kernels
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_experts"),
    quick([(1, 256, 8), (3, 300, 12), (16, 2048, 128)], (3, 300, 12)),
)
def test_logits(num_tokens, hidden, num_experts, dtype):
    rng = np.random.default_rng(hidden)
    x = jnp.asarray(rng.standard_normal((num_tokens, hidden)), jnp.bfloat16)
    gate = jnp.asarray(rng.standard_normal((hidden, num_experts)), dtype)
    x = x.at[0, 5].set(jnp.inf) if num_tokens > 1 else x
    run = functools.partial(logits.logits, x, gate)
    # On a GPU the kernel itself runs, and elsewhere the code that it emits.
    out = jax.jit(run)() if ON_GPU else emitted.run_kernel(run, num_threads=256)
    out, rows = np.asarray(out), slice(num_tokens > 1, None)
    x, gate = (np.asarray(each).astype(np.float64) for each in (x, gate))
    assert out.dtype == np.float32
    bound = 2**-21 * (np.abs(x[rows]) @ np.abs(gate))
    assert (np.abs(out[rows] - x[rows] @ gate) <= bound).all()
    if num_tokens > 1:
        # An infinity stays in its own row.
        assert not np.isfinite(out[0]).any()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((1, 2048, 128), None),
        ((16, 7168, 256), None),
        ((17, 2048, 128), "not 17"),
        ((0, 2048, 128), "not 0"),
        ((1, 2048, 126), "a gate [2048, 126]"),
    ],
)
def test_what_is_supported(shape, reason):
    found = logits.unavailable_reason(*shape)
    assert found is None if reason is None else reason in found
