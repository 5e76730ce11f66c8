"""Tests of what both Flax layers have: parameters, axes, options, arguments, state and errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.dense_moe import (
    E,
    F,
    H,
    K,
    S,
    assert_close,
    make_params,
    make_x,
    random_params,
)
from support.flax_layers import LAYERS, as_dict
from support.jaxprs import executions
from support.meshes import expert_mesh

from jax_ep.moe.config import MoEConfig
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.params import PARAMETERS, ParameterOptions, weight_shapes

pytestmark = pytest.mark.usefixtures("exact_matmuls")


SIZES: dict = dict(num_experts=E, num_experts_per_token=K)


@pytest.fixture(params=LAYERS)
def layer(request):
    """Returns a function that makes a layer of E experts with the given options."""
    return lambda **options: LAYERS[request.param](H, F, **SIZES | options)


PARTS: dict = dict(use_mlp_bias=True, use_gate_bias=True, use_shared_gate=True, lora_rank=2)
PARTS |= dict(use_expert_scale=True, num_shared_experts=S)


@pytest.mark.parametrize("parts", [{}, {"gated": False}, PARTS], ids=len)
def test_parameters_and_logical_axes(layer, parts):
    free = dict(zero_experts=1, identity_experts=2, constant_experts=2) if parts else {}
    made = layer(**free, **parts, selection_bias=bool(parts), param_dtype=jnp.bfloat16)
    shapes = weight_shapes(made.config, ParameterOptions(**parts), H, F)
    shapes["gate"] = (H, E + 5 * bool(parts))
    (params, specs), bias = made.abstract()
    (params["gate"],), (specs["gate"],) = params["gate"].values(), specs["gate"].values()
    assert jax.tree.map(jnp.shape, params) == shapes
    assert specs == {name: P(*PARAMETERS[name].logical_axes) for name in shapes}
    assert {a.dtype for a in params.values()} == {jnp.dtype(jnp.bfloat16)}
    if parts:
        assert bias.shape == (E + 5,) and bias.dtype == jnp.float32
    else:
        assert bias is None


def test_results_are_those_of_the_function(layer):
    params, x = make_params(bias=True), make_x()
    router = dict(score="sigmoid", scale=2.0)
    made = layer(num_shared_experts=S, selection_bias=True, **router)
    config = MoEConfig(**SIZES, **router)

    mask = np.arange(x.shape[1]) < np.arange(x.shape[0])[:, None]

    def step(run, params):
        def loss(params, x):
            out, metrics = run(params, x)
            return jnp.mean(out**2) + 0.1 * metrics.load_balance_loss, (out, metrics)

        return jax.jit(jax.grad(loss, has_aux=True))(params, x)

    with jax.set_mesh(expert_mesh(4)):
        grads, got = step(lambda tree, x: made(tree, x, mask, bias=params.bias), as_dict(params))
        want_grads, want = step(lambda params, x: moe_layer(params, x, config, mask), params)
    assert_close((grads, got), (as_dict(want_grads), want))


CHANGED: dict = (
    dict(num_experts=6, num_experts_per_token=2, score="sigmoid", choose_by="logit")
    | dict(num_groups=3, groups_kept=2, group_score="max", normalize=False)
    | dict(normalize_epsilon=1e-6, scale=2.5, router=lambda x, logits: None)
    | dict(router_dtype=jnp.bfloat16, logit_softcap=30.0, balance_convention="transformers")
    | dict(capacity_factor=1.25, host_capacity_factor=0.5, num_slots=64)
    | dict(zero_experts=1, identity_experts=2, constant_experts=3, free_expert_factor=0.5)
    | dict(record_choices=True, token_chunks=4, wire_dtype=jnp.float8_e4m3fn)
    | dict(activation=jax.nn.gelu, clamp=7.0, shared_activation=jnp.tanh)
    | dict(matmul_dtype=jnp.float8_e4m3fn, weights_on="input", lora_scale=2.0, dtype=jnp.bfloat16)
    | dict(expert_axis=("a", "b"), batch_axes=("a", "b"), sequence_axes="b", tensor_axis="c")
    | dict(fsdp_axes=(("embed", "d"),), implementation="two_level", matmul_implementation="xla")
)


def test_options_reach_the_configuration(layer):
    config = layer(**CHANGED).config
    assert {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} == CHANGED
    assert layer().config == MoEConfig(**SIZES)


def test_choices_and_weights_may_be_given(layer):
    params, x = make_params(shared=False), make_x()
    rng = np.random.default_rng(5)
    given = dict(topk_idx=rng.integers(-1, E, (*x.shape[:-1], K)).astype(np.int32))
    given["topk_weights"] = rng.normal(size=given["topk_idx"].shape).astype(np.float32)
    want = moe_layer(params, x, layer().config, **given)
    assert_close(layer()(as_dict(params), x, **given), want)
    without, weights = layer(gate_init=None), as_dict(params._replace(gate=None))
    assert set(without.abstract(**given)[0][0]) == set(weights)
    assert_close(without(weights, x, **given), want)
    with pytest.raises(ValueError, match="gate must be .* but is None"):
        without(weights, x)


def test_selection_bias_changes_when_told_and_only_then(layer):
    made, x = layer(selection_bias=True), make_x()
    params, bias = as_dict(make_params(shared=False)), jnp.zeros(E)
    with jax.set_mesh(expert_mesh(8)):
        counts = np.asarray(made(params, x, bias=bias)[1].expert_counts)
        updated = jax.jit(made.update_bias)(params, bias, counts, 0.5)
        moved = made(params, x, bias=updated)[1].expert_counts
    np.testing.assert_allclose(updated, 0.5 * np.sign(counts.mean() - counts))
    assert np.std(moved) != np.std(counts)
    counts = jnp.full(E, E).at[0].set(0)
    centered = made.update_bias(params, bias, counts, 0.5, zero_mean=True)
    np.testing.assert_allclose(centered.mean(), 0, atol=1e-7)
    with pytest.raises(ValueError, match="update_bias needs selection_bias=True"):
        layer().update_bias(params, None, counts, 0.1)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_experts=-1), "num_experts must be at least 1, but is -1"),
        (dict(kernel_init=None), "kernel_init must be an initializer.* but is None"),
        (dict(param_dtype=jnp.float64), "param_dtype must be .* but is .*float64"),
    ],
    ids=str,
)
def test_a_layer_is_not_made_of_what_does_not_fit(layer, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        layer(**changes).abstract()


@pytest.mark.slow
@pytest.mark.parametrize("framework", LAYERS)
def test_experts_of_a_stack_may_be_quantized_once(framework):
    """The experts of all layers, quantized at once, must be those that each layer quantizes."""
    made = LAYERS[framework](128, 128, **SIZES, matmul_dtype=jnp.float8_e4m3fn)
    layers = (as_dict(random_params(128, 128, 0.1, seed)) for seed in (0, 1))
    stack = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    x = make_x(shape=(16,), hidden=128)

    def run(stack, quantized):
        def block(x, of_layer):
            params, quantized = of_layer
            return x + made(params, x, quantized_experts=quantized)[0], None

        return jax.lax.scan(block, x, (stack, quantized))[0]

    quantized = jax.jit(jax.vmap(made.quantize_experts))(stack)
    program = jax.make_jaxpr(run)(stack, quantized).jaxpr
    assert executions(program, "quantize_float8_matrices") == 0
    got, want = (jax.jit(run)(stack, each) for each in (quantized, None))
    np.testing.assert_array_equal(got, want)
