"""Shapes and initializers of a layer's parameters; their checks are tested with the layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.moe import params as moe_params
from jax_ep.placement.weights import ROUTED_WEIGHTS


def test_weight_shapes_are_those_of_the_fields_with_logical_axes():
    parts = ("use_gate_bias", "use_expert_scale", "use_mlp_bias", "use_shared_gate")
    everything: dict = dict.fromkeys(parts, True)
    shapes = moe_params.weight_shapes(8, 16, 12, 2, num_constant=3, **everything)
    assert tuple(shapes) == moe_params.WEIGHTS
    assert {*parts, "num_shared_experts", "shared_dim", "gated"} == set(moe_params.PARTS)
    assert {*shapes, "gate", "bias"} == set(moe_params.MoEParams._fields)
    for name, shape in shapes.items():
        assert len(shape) == len(moe_params.LOGICAL_AXES[name])
    assert tuple(moe_params.weight_shapes(8, 16, 12, 0)) == ("wi_0", "wi_1", "wo")
    assert shapes["shared_wi_0"] == (16, 24) and shapes["shared_wo"] == (24, 16)
    plain = moe_params.weight_shapes(8, 16, 12, gated=False, use_mlp_bias=True, shared_dim=5)
    assert {name: shape for name, shape in plain.items() if "wi" in name} == {
        "wi_0": (8, 16, 12),
        "wi_0_bias": (8, 12),
        "shared_wi_0": (16, 5),
    }


def test_routed_weights_are_those_that_lead_with_experts():
    leading = [n for n, axes in moe_params.LOGICAL_AXES.items() if axes[0] == "exp"]
    assert list(ROUTED_WEIGHTS) == leading


def test_shared_experts_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="shared_dim, .* num_shared_experts is 2, but is 20"):
        moe_params.weight_shapes(8, 16, 12, 2, shared_dim=20)
    with pytest.raises(ValueError, match="use_shared_gate must be False without shared experts"):
        moe_params.weight_shapes(8, 16, 12, use_shared_gate=True)


def test_per_expert_initializer_uses_one_experts_fans():
    init = moe_params.per_expert(jax.nn.initializers.lecun_normal())
    weights = init(jax.random.key(0), (4, 256, 64), jnp.float32)
    np.testing.assert_allclose(np.std(weights, axis=(1, 2)), 1 / 16, rtol=0.05)
    assert np.abs(weights[0] - weights[1]).max() > 0.1
