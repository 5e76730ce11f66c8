"""Tests that the Flax layers and functions show the options of `MoEConfig`, with its defaults."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import jax_ep
from jax_ep.moe.expert_mlp import HiddenUnit
from jax_ep.moe.params import ParameterOptions
from jax_ep.moe.routing import RoutingOptions


def options_of(cls) -> dict[str, object]:
    """Returns the default of each field that has one."""
    fields = dataclasses.fields(cls)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def defaults_of(function) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("layer", [jax_ep.linen.MoE, jax_ep.nnx.MoE.__init__], ids=["linen", "nnx"])
def test_layers_have_the_options_and_their_defaults(layer):
    own = {"parent", "name", "router_dim"}
    found = {name: v for name, v in defaults_of(layer).items() if name not in own}
    assert found == options_of(jax_ep.MoEConfig) | options_of(ParameterOptions)


@pytest.mark.parametrize("part", [RoutingOptions, HiddenUnit])
def test_options_of_a_part_have_the_defaults_of_the_layer(part):
    assert options_of(part).items() <= options_of(jax_ep.MoEConfig).items()


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (jax_ep.top_k_routing, RoutingOptions),
        (jax_ep.expert_mlp, HiddenUnit),
        (jax_ep.routed_experts, HiddenUnit),
    ],
)
def test_functions_have_the_options_of_their_part(function, part):
    assert options_of(part).items() <= defaults_of(function).items()
