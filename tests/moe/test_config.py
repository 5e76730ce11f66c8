"""Tests of a layer's fields: which are refused, and functions among them under pickle and jit."""

from __future__ import annotations

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense_moe import CONFIG, E, H, K, assert_close, make_params, make_x
from support.selection import quick

from jax_ep import moe_layer, top_k_routing
from jax_ep.moe.layer import _layer


def output(**changes):
    """Computes a layer's output with its configuration changed by `changes`."""
    return moe_layer(make_params(), make_x(), dataclasses.replace(CONFIG, **changes))[0]


@dataclasses.dataclass
class Scale:
    """A function of one array that is compared by its class, and captures a factor."""

    factor: float

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return isinstance(other, Scale)

    def __call__(self, h):
        return h * self.factor


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, h):
        return h


@pytest.mark.slow
def test_functions_that_are_equal_share_a_program():
    """What a function captures must be a constant of the program of all functions equal to it."""
    first = output(activation=Scale(2.0))
    compiled = _layer._cache_size()
    np.testing.assert_array_equal(output(activation=Scale(4.0)), first)
    assert _layer._cache_size() == compiled
    np.testing.assert_array_equal(output(activation=lambda h: h * 4.0), 2 * first)
    assert _layer._cache_size() == compiled + 1


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_an_activation_reads_no_traced_array(wrap):
    """A function that reads a traced array must be refused; the array's gradient would be 0."""

    def loss(b, params):
        config = dataclasses.replace(CONFIG, activation=lambda gate, up: gate * up * b)
        return jnp.sum(moe_layer(params, make_x(), config)[0])

    for argnums in (0, (0, 1)):
        with pytest.raises(ValueError, match="activation must be .* reads a traced .*float32"):
            wrap(jax.grad(loss, argnums))(1.5, make_params())


@pytest.mark.parametrize("wrap", quick({"jit": jax.jit, "eager": lambda f: f}, "jit"))
def test_a_router_may_capture_a_traced_array(wrap):
    """A router that is defined in each call must pass gradients to an array that it captures."""
    params, x = make_params(shared=False), make_x()

    def loss(gate, captures):
        router = (lambda x, logits: top_k_routing(x @ gate, K)) if captures else None
        config = dataclasses.replace(CONFIG, router=router)
        return jnp.sum(moe_layer(params._replace(gate=gate), x, config)[0] ** 2)

    captured, given = (wrap(jax.grad(functools.partial(loss, captures=c))) for c in (True, False))
    for factor in (1.0, 2.0):
        gate = factor * params.gate
        assert_close(captured(gate), given(gate))


def of_this_module(x, logits=None):
    return jnp.tanh(x)


@pytest.mark.parametrize("activation", [jax.nn.gelu, jnp.tanh, of_this_module])
def test_a_config_can_be_pickled(activation):
    options: dict = dict(activation=activation, router=of_this_module, dtype=jnp.bfloat16)
    config = dataclasses.replace(CONFIG, **options)
    loaded = pickle.loads(pickle.dumps(config))
    assert loaded == config and loaded.activation is activation
    assert loaded.router is of_this_module


XLA_HOSTS: dict = dict(host_capacity_factor=0.5, implementation="xla")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(num_experts=-1), ValueError, "num_experts must be at least 1, but is -1"),
        (dict(token_chunks=0), ValueError, "token_chunks must be at least 1, but is 0"),
        (dict(capacity_factor=0.0), ValueError, "capacity_factor must .* but is 0.0"),
        (dict(capacity_factor=np.ones(())), TypeError, "capacity_factor must .*array"),
        (dict(host_capacity_factor=0.0), ValueError, "host_capacity_factor must .* but is 0.0"),
        (XLA_HOSTS, ValueError, "host_capacity_factor needs .*two_level.* 0.5 with .*='xla'"),
        (dict(activation=Unhashable()), TypeError, "activation must be hashable.*unhashable"),
        (dict(router="top2"), TypeError, "router must be a function of tokens .* but is 'top2'"),
        (
            dict(router_dtype=jnp.float64),
            TypeError,
            "router_dtype must be .* of 16 or 32 bits.*float64",
        ),
        (dict(router_dtype=jnp.int8), TypeError, "router_dtype must be a floating dtype .*int8"),
        (dict(dtype=jnp.float64), TypeError, "^dtype must be .* of 16 or 32 bits.*float64"),
        (dict(dtype=jnp.float8_e4m3fn), TypeError, "dtype must .*float8_e4m3fn.*wire_dtype"),
        (dict(clamp=0.0), ValueError, "clamp must be above 0 .* but is 0.0"),
        (dict(normalize_epsilon=-1.0), ValueError, "normalize_epsilon must .* but is -1.0"),
        (dict(num_experts_per_token=E + 1), ValueError, "num_experts_per_token must be .*9"),
        (dict(implementation="nccl"), ValueError, "implementation must .*'nccl'"),
        (dict(matmul_implementation="q"), ValueError, "matmul_implementation must be one of"),
        (dict(expert_axis=None), TypeError, "expert_axis must"),
        (dict(tensor_axis=4), TypeError, "tensor_axis must"),
    ],
)
def test_impossible_fields_are_named(changes, error, message):
    with jax.enable_x64(True), pytest.raises(error, match=message):
        output(**changes)


@pytest.mark.slow
def test_float64_tokens_keep_their_dtype():
    with jax.enable_x64(True):
        both = make_params(), make_x()
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), both)
        config = dataclasses.replace(CONFIG, router_dtype=None)
        assert moe_layer(params, x, config)[0].dtype == jnp.float64


@pytest.mark.parametrize("name", ["params", "config"])
def test_what_is_no_parameters_or_configuration_is_named(name):
    arguments = dict(params=make_params(), x=make_x(), config=CONFIG) | {name: {}}
    with pytest.raises(TypeError, match=f"{name} must be MoE(Params|Config), but is"):
        moe_layer(**arguments)


def test_float8_tokens_and_parameters_name_the_dtype():
    params, float8 = make_params(), jnp.float8_e4m3fn
    with pytest.raises(TypeError, match="the dtype of x must .*float8_e4m3fn.*wire_dtype"):
        moe_layer(params, jnp.zeros((8, H), float8), CONFIG)
    params = jax.tree.map(lambda a: a.astype(float8), params)
    with pytest.raises(TypeError, match="the dtype of wi_0 must .*float8_e4m3fn"):
        moe_layer(params, make_x(), CONFIG)
