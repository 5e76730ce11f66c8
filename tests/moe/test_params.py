"""Tests of the shapes and initializers of a layer's parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.moe import params as moe_params
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import PARAMETERS, MoEParams, ParameterOptions
from jax_ep.placement.weights import ROUTED_WEIGHTS

CONFIG = MoEConfig(num_experts=8, num_experts_per_token=2)
SWITCHES = tuple(
    field.name for field in dataclasses.fields(ParameterOptions) if field.type == "bool"
)


def shapes_of(config=CONFIG, **options):
    return moe_params.weight_shapes(config, ParameterOptions(**options), 16, 12)


def test_every_parameter_has_a_shape_with_logical_axes():
    config = dataclasses.replace(CONFIG, zero_experts=1, constant_experts=3, num_slots=10)
    options = dict.fromkeys(SWITCHES, True) | {"num_shared_experts": 2, "lora_rank": 5}
    shapes = shapes_of(config, **options)
    assert tuple(shapes) == moe_params.WEIGHTS
    assert {*shapes, "gate", "bias"} == set(PARAMETERS) == set(MoEParams._fields)
    for name, shape in shapes.items():
        assert len(shape) == len(PARAMETERS[name].dims) == len(moe_params.LOGICAL_AXES[name])
    assert shapes["shared_wi_0"] == (16, 24) and shapes["shared_wo"] == (24, 16)
    assert shapes["expert_scale"] == (12,) and shapes["wi_0_bias"] == (10, 12)
    assert shapes["wi_0_lora_a"] == (10, 16, 5) and shapes["wo_lora_b"] == (10, 5, 16)
    assert shapes["constant_gate"] == (3, 16, 2) and shapes["shared_gate"] == (16, 1)


def test_a_layer_has_the_parameters_that_its_options_bring():
    assert tuple(shapes_of()) == ("wi_0", "wi_1", "wo")
    plain = shapes_of(gated=False, use_mlp_bias=True, shared_dim=5)
    assert [name for name in plain if "wi" in name] == ["wi_0", "wi_0_bias", "shared_wi_0"]


@pytest.mark.parametrize("switch", SWITCHES)
def test_options_are_known_from_the_parameters_that_they_bring(switch):
    default = getattr(ParameterOptions(), switch)
    options = ParameterOptions(shared_dim=5, **{switch: not default})
    shapes = moe_params.weight_shapes(CONFIG, options, 16, 12)
    if options.selection_bias:
        shapes["bias"] = (8,)
    params = MoEParams.of(**{name: jnp.zeros(shape) for name, shape in shapes.items()})
    assert ParameterOptions.of_params(params) == options


TWICE: dict = dict(num_shared_experts=2, shared_dim=20)
NO_GATE: dict = dict(gate_init=None, selection_bias=True)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (TWICE, ValueError, "shared_dim, .* num_shared_experts is 2, but is 20"),
        (dict(use_shared_gate=True), ValueError, "use_shared_gate must be False without shared"),
        (dict(shared_dim=-1), ValueError, "shared_dim must be at least 0, but is -1"),
        (dict(gated=1), TypeError, "gated must be True or False, but is 1"),
        (dict(use_mlp_bias=None), TypeError, "use_mlp_bias must be True or False, but is None"),
        (dict(gate_init=0.5), TypeError, "gate_init must be an initializer.* but is 0.5"),
        (NO_GATE, ValueError, "selection_bias must be False where gate_init is None.* is True"),
    ],
)
def test_options_that_cannot_be_are_named(options, error, message):
    with pytest.raises(error, match=message):
        moe_params.check_parameter_options(ParameterOptions(**options))


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n not in ("gate", *ROUTED_WEIGHTS)])
def test_a_parameter_of_another_shape_is_named(name):
    config = dataclasses.replace(CONFIG, constant_experts=3)
    shapes = shapes_of(config, shared_dim=5, **dict.fromkeys(SWITCHES, True))
    shapes |= {"gate": (16, 11), "bias": (11,)}
    params = MoEParams(**{n: jnp.zeros(shape) for n, shape in shapes.items()})
    moe_params.check_params(params, 11, 3)
    wrong = jnp.zeros((7, *shapes[name][1:]))
    with pytest.raises(ValueError, match=rf"^{name} must .* shape \({shapes[name][0]},.*but"):
        moe_params.check_params(params._replace(**{name: wrong}), 11, 3)


def test_per_expert_initializer_uses_one_experts_fans():
    init = moe_params.per_expert(jax.nn.initializers.lecun_normal())
    weights = init(jax.random.key(0), (4, 256, 64), jnp.float32)
    np.testing.assert_allclose(np.std(weights, axis=(1, 2)), 1 / 16, rtol=0.05)
    assert np.abs(weights[0] - weights[1]).max() > 0.1
