"""Tests of the functions that config.json implies, against numbers computed by hand."""

from __future__ import annotations

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import MoEConfig
from jax_ep.checkpoints.functions import (
    activation,
    gpt_oss_gating,
    half_swiglu,
    sparse_mixer,
    step_gating,
    swiglu,
)


def test_activations():
    x = jnp.array([-2.0, 0.0, 3.0])
    assert activation("relu2")(x).tolist() == [0, 0, 9]
    assert activation("silu") is jax.nn.silu
    with pytest.raises(
        ValueError, match="one of silu, swish, relu, relu2, gelu_.*, but is 'snake'"
    ):
        activation("snake")


def test_gpt_oss_gating():
    got = gpt_oss_gating(1.5)(jnp.array([2.0, -1.0]), jnp.array([0.5, 3.0]))
    want = [2 / (1 + math.exp(-3)) * 1.5, -1 / (1 + math.exp(1.5)) * 4]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_gatings_of_step_and_cohere():
    gate, up = jnp.array([2.0, -1.0]), jnp.array([0.5, 3.0])
    silu = np.array([2 / (1 + math.exp(-2)), -1 / (1 + math.exp(1))])
    np.testing.assert_allclose(step_gating(1.5)(gate, up), [1.5 * 0.5, silu[1] * 1.5], rtol=1e-6)
    assert step_gating(0.0) is swiglu and step_gating(1.5) is step_gating(1.5)
    np.testing.assert_allclose(half_swiglu(gate, up), silu * [0.25, 1.5], rtol=1e-6)


def test_sparse_mixer_weighs_among_logits_that_are_near():
    """The weight of a choice must be its softmax among the logits within 10% of the largest.

    In the first row, 10 is weighed against 9.5 and 9. Then 9.5, the largest without 10, is weighed
    against 9.
    """
    logits = jnp.array([[9.0, 10.0, 1.0, 9.5], [-1.0, -8.0, -4.0, -2.0]])
    got = sparse_mixer(0.05)(None, logits)
    assert got.topk_idx.tolist() == [[1, 3], [0, 3]]
    near = 1 + math.exp(-0.5)
    first = [1 / (near + math.exp(-1)), 1 / near]
    np.testing.assert_allclose(got.topk_weights, [first, [1, 1]], rtol=1e-6)


def test_sparse_mixer_of_logits_that_are_zero():
    """Zeros must count as near to each other, although nearness is relative to their magnitude.

    So must the largest logit to itself, whatever its value.
    """
    cases = {
        (0.0, 0.0, 0.0, 0.0): (1 / 4, 1 / 3),
        (2.0, 0.0, -1.0, -1.0): (1, 1),
        (0.0, -0.0, -1.0, 2.0): (1, 1 / 2),
        (-3.0, 0.0, -1.0, -2.0): (1, 1),
        (0.0, -1.0, -1.0, -1.0): (1, 1 / 3),
    }
    logits = jnp.array(list(cases))
    mix = jnp.array([[1.0, -2.0]])
    router = sparse_mixer(0.01)
    np.testing.assert_allclose(router(None, logits).topk_weights, list(cases.values()), rtol=1e-6)
    gradient = jax.grad(lambda logits: jnp.sum(router(None, logits).topk_weights * mix))(logits)
    assert np.all(np.isfinite(gradient)) and np.any(gradient[0])


def test_equal_numbers_give_equal_configurations():
    """Configurations with equal numbers must be equal, so that layers share a program."""

    def config(alpha: float) -> MoEConfig:
        functions = dict(gating=gpt_oss_gating(alpha), router=sparse_mixer(0.01))
        return MoEConfig(num_experts=8, num_experts_per_token=2, **functions)

    assert config(1.5) == config(1.5) != config(1.7)
    again = pickle.loads(pickle.dumps(config(1.5)))
    one = jnp.ones(1)
    np.testing.assert_array_equal(again.gating(one, one), gpt_oss_gating(1.5)(one, one))
