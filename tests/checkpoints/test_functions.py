"""Tests of the functions that config.json implies, against numbers computed by hand."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import MoEConfig
from jax_ep.checkpoints.functions import (
    activation,
    gpt_oss_activation,
    sparse_mixer,
    step_activation,
)


def test_activations():
    x = jnp.array([-2.0, 0.0, 3.0])
    assert activation("relu2")(x).tolist() == [0, 0, 9]
    assert activation("silu") is jax.nn.silu
    with pytest.raises(
        ValueError, match="one of silu, swish, relu, relu2, gelu_.*, but is 'snake'"
    ):
        activation("snake")


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

    @jax.jit
    def weights(logits):
        return sparse_mixer(0.01)(None, logits).topk_weights

    np.testing.assert_allclose(weights(logits), list(cases.values()), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda logits: jnp.sum(weights(logits) * mix)))(logits)
    assert np.all(np.isfinite(gradient)) and np.any(gradient[0])


def test_equal_numbers_give_equal_configurations():
    def config(alpha: float) -> MoEConfig:
        functions = dict(activation=gpt_oss_activation(alpha), router=sparse_mixer(0.01))
        return MoEConfig(num_experts=8, num_experts_per_token=2, **functions)

    assert config(1.5) == config(1.5) != config(1.7)
    assert step_activation(0.0) is jax.nn.silu
    assert step_activation(1.5) is step_activation(1.5)
    again = pickle.loads(pickle.dumps(config(1.5)))
    one = jnp.ones(1)
    np.testing.assert_array_equal(again.activation(one, one), gpt_oss_activation(1.5)(one, one))
