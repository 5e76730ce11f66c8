"""Tests of the router's logits of a few tokens: which implementation computes them, and vmap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import needs_kernels

from jax_ep.moe.few_logits import few_logits


def operands(num_tokens, num_experts=8, hidden=64):
    rng = np.random.default_rng(num_tokens)
    x = jnp.asarray(rng.standard_normal((num_tokens, hidden)), jnp.bfloat16)
    return x, jnp.asarray(rng.standard_normal((hidden, num_experts)), jnp.float32)


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)])
def test_vmap(axes):
    x, gate = operands(3)
    both = [
        each if axis is None else jnp.stack([each, 2 * each])
        for each, axis in zip((x, gate), axes, strict=True)
    ]
    out = jax.jit(jax.vmap(few_logits, axes))(*both)
    for i in range(2):
        own = (each if axis is None else each[i] for each, axis in zip(both, axes, strict=True))
        np.testing.assert_allclose(out[i], few_logits(*own), rtol=2**-18, atol=2**-18)


@needs_kernels
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "by_kernel"), [(1, 8, True), (16, 8, True), (1, 6, False)]
)
def test_which_programs_use_the_kernel(num_tokens, num_experts, by_kernel):
    traced = jax.jit(few_logits).trace(*operands(num_tokens, num_experts))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("router_logits" in text) == by_kernel
    assert "router_logits" not in traced.lower(lowering_platforms=("cpu",)).as_text()
