"""Tests of a layer's fields: which are refused, and functions among them under pickle and jit."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense_moe import E, H, K, make_params, make_x

from jax_ep import MoEConfig, moe_layer, top_k_routing
from jax_ep.moe.layer import _moe_layer

CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)


def output(**changes):
    """Computes a layer's output with its configuration changed by `changes`."""
    config = MoEConfig(**vars(CONFIG) | changes)
    return moe_layer(make_params(), make_x(), config)[0]


@pytest.mark.slow
def test_the_same_lambda_written_twice_compiles_once():
    def layer(slope):
        return output(activation=lambda h: jnp.maximum(h, slope * h))

    first = layer(0.1)
    compiled = _moe_layer._cache_size()
    np.testing.assert_array_equal(layer(0.1), first)
    assert _moe_layer._cache_size() == compiled
    assert np.abs(first - layer(0.5)).max() > 1e-3
    compiled = _moe_layer._cache_size()
    layer(0.1)
    assert _moe_layer._cache_size() == compiled
    for _ in range(2):
        out = output(activation=functools.partial(jax.nn.leaky_relu, negative_slope=0.1))
        np.testing.assert_allclose(out, first, rtol=1e-4, atol=1e-5)
    assert _moe_layer._cache_size() == compiled + 1


FACTOR = 1.0
FACTORS = {"h": 1.0}


def times(h):
    return h * FACTOR


class Scale:
    """An object with an attribute that a test may change, and a method that reads it."""

    factor = 1.0

    def act(self, h):
        return h * self.factor


class OfClass:
    factor = 1.0


settings = types.ModuleType("settings")
settings.factor = 1.0  # type: ignore[attr-defined]
exec("def act(h):\n    return h * factor", settings.__dict__)
settings.inner = types.ModuleType("settings.inner")  # type: ignore[attr-defined]
settings.inner.factor = 1.0  # type: ignore[attr-defined]


def reading(scale):
    """Returns options of a layer whose functions read a value that a test may change.

    The keys say where the value is, such as "a global". The functions are new objects at each call.
    """
    note = FACTORS.copy
    named = lambda h: h * named.factor  # noqa: E731
    named.factor = scale.factor
    return {
        "a global": dict(activation=lambda h: h * FACTOR),
        "a global of a helper": dict(activation=lambda h: times(h)),
        "a function within": dict(activation=lambda h: (lambda: h * FACTOR)()),
        "a global dictionary": dict(activation=lambda h: h * FACTORS["h"]),
        "an object": dict(activation=lambda h: h * scale.factor),
        "a method of a dictionary": dict(activation=lambda h: h * note()["h"]),
        "an attribute": dict(activation=named),
        "gating": dict(gating=lambda gate, up: gate * up * FACTOR),
        "an attribute of a class": dict(activation=lambda h: h * OfClass.factor),
        "an attribute of a module": dict(activation=lambda h: h * settings.factor),
        "of a module in it": dict(activation=lambda h: h * settings.inner.factor),
        "of a module, by name": dict(activation=lambda h: h * getattr(settings, "factor")),  # noqa: B009
        "a global of another module": dict(activation=lambda h: settings.act(h)),
        "a module as a default": dict(activation=lambda h, module=settings: h * module.factor),
    }


@pytest.mark.parametrize("what", reading(Scale()))
def test_a_function_that_reads_another_value_is_another(what, monkeypatch):
    scale = Scale()
    first = output(**reading(scale)[what])
    # A factor of 4 rounds nothing.
    scale.factor = 4.0
    monkeypatch.setitem(FACTORS, "h", 4.0)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    monkeypatch.setattr(OfClass, "factor", 4.0)
    monkeypatch.setattr(settings, "factor", 4.0)
    monkeypatch.setattr(settings.inner, "factor", 4.0)
    np.testing.assert_array_equal(output(**reading(scale)[what]), 4 * first)


def test_a_program_that_is_traced_again_reads_its_values_again():
    """If a program is traced again, the layer's functions must read their values again.

    Here the function is a bound method, the same object in both programs.
    """
    scale = Scale()
    config = dataclasses.replace(CONFIG, activation=scale.act)
    params, x = make_params(), make_x()

    def layer(_):
        return moe_layer(params, x, config)[0]

    first = jax.jit(layer)(0)
    scale.factor = 4.0
    np.testing.assert_array_equal(jax.jit(lambda i: layer(i))(0), 4 * first)


def test_what_may_change_is_read_again_outside_of_jit():
    scale = Scale()
    config = dataclasses.replace(CONFIG, activation=scale.act)
    first = moe_layer(make_params(), make_x(), config)[0]
    scale.factor = 4.0
    np.testing.assert_array_equal(moe_layer(make_params(), make_x(), config)[0], 4 * first)


@pytest.mark.parametrize("name", ["activation", "gating"])
def test_functions_read_no_traced_array(name):
    """A function that reads a traced array must be refused; the array's gradient would be 0."""
    functions = {
        "activation": lambda b: lambda h: h * b,
        "gating": lambda b: lambda g, u: g * u * b,
    }

    def loss(b, params):
        config = dataclasses.replace(CONFIG, **{name: functions[name](b)})
        return jnp.sum(moe_layer(params, make_x(), config)[0])

    for wrap in (jax.jit, lambda f: f):
        for argnums in (0, (0, 1)):
            with pytest.raises(
                ValueError, match=f"{name} must be .* reads a traced array, .?float32"
            ):
                wrap(jax.grad(loss, argnums))(1.5, make_params())


def test_a_router_that_reads_another_value_is_another(monkeypatch):
    def routed():
        return output(router=lambda x, logits: top_k_routing(logits, K, scale=settings.factor))

    first = routed()
    monkeypatch.setattr(settings, "factor", 4.0)
    expected = output(router=lambda x, logits: top_k_routing(logits, K, scale=4.0))
    np.testing.assert_array_equal(routed(), expected)
    assert np.abs(first - expected).max() > 1e-3


def test_what_reads_constants_is_compiled_once():
    """Functions that read only constants must not compile again, although they are new objects.

    The constants may be in other modules.
    """
    new = [
        lambda: dict(activation=lambda h: h * settings.factor),
        lambda: dict(activation=jax.nn.silu),
    ]
    for make in new:
        output(**make())
        compiled = _moe_layer._cache_size()
        output(**make())
        assert _moe_layer._cache_size() == compiled


def module_level_activation(x):
    return jnp.tanh(x)


def module_level_router(x, logits):
    return top_k_routing(logits, K)


@pytest.mark.parametrize(
    "activation",
    [jax.nn.silu, jax.nn.gelu, jnp.tanh, module_level_activation],
    ids=["silu", "gelu", "tanh", "of this module"],
)
def test_a_config_can_be_pickled(activation):
    config = MoEConfig(
        num_experts=E,
        num_experts_per_token=K,
        activation=activation,
        router=module_level_router,
        dtype=jnp.bfloat16,
    )
    loaded = pickle.loads(pickle.dumps(config))
    assert loaded == config and loaded.activation is activation
    assert loaded.router is module_level_router


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(capacity_factor=np.inf), ValueError, "capacity_factor must .* but is inf"),
        (dict(capacity_factor=np.nan), ValueError, "capacity_factor must .* but is nan"),
        (dict(capacity_factor="2"), TypeError, "capacity_factor must .* but is '2'"),
        (dict(capacity_factor=True), TypeError, "capacity_factor must .* but is True"),
        (dict(capacity_factor=jnp.ones(())), TypeError, "capacity_factor must .*Array"),
        (dict(host_capacity_factor=0.0), ValueError, "host_capacity_factor must .* but is 0.0"),
        (
            dict(host_capacity_factor=0.5, implementation="xla"),
            ValueError,
            "host_capacity_factor needs .*two_level.* but is 0.5 with implementation='xla'",
        ),
        (dict(mesh="m"), TypeError, "mesh must be a jax.sharding.Mesh.* but is 'm'"),
        (dict(activation="silu"), TypeError, "activation must .*jax.nn.silu, but is 'silu'"),
        (dict(router="top2"), TypeError, "router must be a function of tokens .* but is 'top2'"),
        (dict(router_dtype=jnp.float64), TypeError, "router_dtype must be jnp.float32 .*float64"),
        (dict(dtype=jnp.float64), TypeError, "^dtype must be jnp.float32 or narrower.*float64"),
        (dict(router_dtype=jnp.int8), TypeError, "router_dtype must be a floating dtype .*int8"),
        (dict(gating="swiglu"), TypeError, "gating must be a function of two .* but is 'swiglu'"),
        (dict(clamp=0.0), ValueError, "clamp must be above 0 .* but is 0.0"),
        (dict(weights_on="gate"), ValueError, "weights_on must be one of .* but is 'gate'"),
        (dict(activation=None), TypeError, "activation must .* but is None"),
        (dict(dtype=jnp.float8_e4m3fn), TypeError, "dtype must .*float8_e4m3fn.*wire_dtype"),
        (dict(dtype=jnp.int32), TypeError, "dtype must be a floating dtype.*int32"),
        (dict(dtype="half-float"), TypeError, "dtype must .* but is 'half-float'"),
        (dict(normalize_epsilon="0"), TypeError, "normalize_epsilon must .* but is '0'"),
        (dict(scale="2"), TypeError, "scale must be a Python number, but is '2'"),
        (dict(scale=np.nan), ValueError, "scale must be 0 or more and finite, but is nan"),
        (dict(normalize="no"), TypeError, "normalize must be True or False, but is 'no'"),
        (dict(score="tanh"), ValueError, "score must be one of .* but is 'tanh'"),
        (dict(normalize_epsilon=-1.0), ValueError, "normalize_epsilon must .* but is -1.0"),
        (dict(num_experts_per_token=E + 1), ValueError, "num_experts_per_token must be at most"),
        (dict(num_experts_per_token=0), ValueError, "num_experts_per_token must be at least 1"),
        (dict(num_groups=3), ValueError, "num_groups must divide the .* but is 3"),
        (dict(num_groups=2, groups_kept=3), ValueError, "groups_kept must be at most num_groups=2"),
        (dict(num_groups=E), ValueError, "num_experts_per_token must be at most the 1 expert"),
        (dict(choose_by="bias"), ValueError, "choose_by must be one of .* but is 'bias'"),
        (dict(group_score="top3"), ValueError, "group_score must be one of .* but is 'top3'"),
        (dict(expert_axis=None), TypeError, "expert_axis must"),
        (dict(tensor_axis=4), TypeError, "tensor_axis must"),
        (dict(tensor_axis="expert"), ValueError, "tensor_axis must be another mesh axis"),
        (dict(matmul_implementation="q"), ValueError, "matmul_implementation must be one of"),
    ],
)
def test_impossible_fields_are_named(changes, error, message):
    for x64 in (False, True):
        with jax.enable_x64(x64), pytest.raises(error, match=message):
            moe_layer(make_params(), make_x(), MoEConfig(**vars(CONFIG) | changes))


def test_float64_tokens_keep_their_dtype():
    """float64 tokens must give a float64 output, although the logits are float32."""
    with jax.enable_x64(True):
        params, x = (
            jax.tree.map(lambda a: a.astype(jnp.float64), t) for t in (make_params(), make_x())
        )
        config = dataclasses.replace(CONFIG, router_dtype=None)
        assert moe_layer(params, x, config)[0].dtype == jnp.float64


@pytest.mark.parametrize("name", ["params", "config"])
def test_what_is_no_parameters_or_configuration_is_named(name):
    arguments = dict(params=make_params(), x=make_x(), config=CONFIG) | {name: {}}
    with pytest.raises(TypeError, match=f"{name} must be MoE(Params|Config), but is"):
        moe_layer(**arguments)


def test_impossible_weighing_is_named_where_the_gate_weighs_nothing():
    x, config = make_x(), MoEConfig(**vars(CONFIG) | dict(normalize=1))
    topk_idx = jnp.zeros((*x.shape[:-1], K), jnp.int32)
    with pytest.raises(TypeError, match="normalize must be True or False, but is 1"):
        moe_layer(make_params(), x, config, topk_idx=topk_idx, topk_weights=topk_idx * 1.0)


def test_a_traced_capacity_factor_is_named():
    @jax.jit
    def layer(factor):
        config = MoEConfig(num_experts=E, num_experts_per_token=K, capacity_factor=factor)
        return moe_layer(make_params(), make_x(), config)[0]

    with pytest.raises(TypeError, match="capacity_factor must be a Python number.*Tracer"):
        layer(1.0)


def test_float8_tokens_and_parameters_name_the_dtype():
    params, float8 = make_params(), jnp.float8_e4m3fn
    with pytest.raises(TypeError, match="the dtype of x must .*float8_e4m3fn.*wire_dtype"):
        moe_layer(params, jnp.zeros((8, H), float8), CONFIG)
    params = jax.tree.map(lambda a: a.astype(float8), params)
    with pytest.raises(TypeError, match="the dtype of wi_0 must .*float8_e4m3fn"):
        moe_layer(params, make_x(), CONFIG)
