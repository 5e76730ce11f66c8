"""Shapes and initializers of a layer's parameters; their checks are tested with the layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.moe import params as moe_params


def test_weight_shapes_are_those_of_the_fields_with_logical_axes():
    everything: dict = dict(use_gate_bias=True, use_expert_scale=True)
    shapes = moe_params.weight_shapes(8, 16, 12, 2, **everything)
    assert tuple(shapes) == moe_params.WEIGHTS
    assert {*everything, "num_shared_experts"} == set(moe_params.PARTS)
    assert {*shapes, "gate", "bias"} == set(moe_params.MoEParams._fields)
    for name, shape in shapes.items():
        assert len(shape) == len(moe_params.LOGICAL_AXES[name])
    assert tuple(moe_params.weight_shapes(8, 16, 12, 0)) == moe_params.ROUTED_WEIGHTS
    assert shapes["shared_wi_0"] == (16, 24) and shapes["shared_wo"] == (24, 16)


def test_per_expert_initializer_uses_one_experts_fans():
    init = moe_params.per_expert(jax.nn.initializers.lecun_normal())
    weights = init(jax.random.key(0), (4, 256, 64), jnp.float32)
    np.testing.assert_allclose(np.std(weights, axis=(1, 2)), 1 / 16, rtol=0.05)
    assert np.abs(weights[0] - weights[1]).max() > 0.1
