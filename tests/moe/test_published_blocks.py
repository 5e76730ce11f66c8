"""Tests that the layer's options give published models' MoE blocks, as NumPy computes them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import expert_mesh
from support.published_blocks import BLOCKS, H, in_numpy, make_params
from support.selection import quick

from jax_ep import moe_layer

pytestmark = pytest.mark.usefixtures("exact_matmuls")

X = np.random.default_rng(1).normal(size=(8, 3, H)).astype(np.float32)
MIX = np.random.default_rng(2).normal(size=X.shape)


def results(block, params, x, num_ranks):
    """Returns the output, the metrics, and the gradients of a weighted sum of the output."""

    def total(params, x):
        out, metrics = moe_layer(params, x, block.layer_config())
        return jnp.sum(out * MIX), (out, metrics)

    with jax.set_mesh(expert_mesh(num_ranks)):
        step = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
        return jax.device_get(step(params, x))


# All blocks run on 8 ranks; one block of each kind of router and expert also on one rank.
CASES = [(name, 8) for name in BLOCKS] + [(name, 1) for name in ("GPT-OSS", "Llama 4")]


@pytest.mark.parametrize("name, num_ranks", quick(CASES, ("DeepSeek-V4", 8)))
def test_block(name, num_ranks):
    """Output and counts must be those of NumPy, and gradients those of finite differences."""
    block = BLOCKS[name]
    params = make_params(block)
    arrays = params._asdict() | {"x": np.asarray(X)}
    evaluate = functools.partial(in_numpy, block)
    want, counts = evaluate(params._asdict(), X)
    (_, (out, metrics)), (dparams, dx) = results(block, params, X, num_ranks)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    grads = dparams._asdict() | {"x": dx}
    for key, grad in grads.items():
        if grad is None:
            continue
        at = np.asarray(arrays[key], np.float64)
        direction, eps = np.random.default_rng(4).normal(size=at.shape), 1e-6

        def value(step, key=key, at=at, direction=direction):
            moved = arrays | {key: at + step * direction}
            return np.sum(evaluate(moved, moved["x"])[0] * MIX)

        want_grad = 0.0 if key == "bias" else (value(eps) - value(-eps)) / (2 * eps)
        got = np.sum(np.asarray(grad, np.float64) * direction)
        np.testing.assert_allclose(got, want_grad, rtol=2e-4, atol=2e-4, err_msg=key)
