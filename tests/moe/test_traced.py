"""Tests that a layer's functions are read in each call, never replaced by earlier results."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.contract import Case, per_rank
from support.dense_moe import E, F, H, K, assert_close, make_params, make_x
from support.meshes import expert_mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, moe_layer, top_k_routing
from jax_ep.moe.traced import Traced

CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)
FACTOR = [1.0]
TABLE = jnp.asarray([1.0, 2.0, 3.0])


class Scale:
    """An object whose methods read an attribute, a list and an array that tests change."""

    def __init__(self):
        self.factor, self.numbers, self.array = 1.0, [1.0], np.ones(1, np.float32)

    def set(self, factor):
        self.factor = self.numbers[0] = self.array[0] = FACTOR[0] = factor

    def attribute(self, h):
        return h * self.factor

    def element(self, h):
        return h * self.numbers[0]

    def in_place(self, h):
        return h * self.array

    def slope(self, h):
        return _custom_gradient(self, h)

    def __call__(self, h):
        return jax.nn.relu(h) * self.factor


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _custom_gradient(scale, h):
    return h * scale.factor


_custom_gradient.defvjp(
    lambda scale, h: (h * scale.factor, None), lambda scale, _, g: (g * scale.factor,)
)


def of_a_global(h):
    return h * FACTOR[0]


def activations(scale):
    """Returns functions of h, named by where they read their factor.

    `scale.set_all` changes all factors. Each function stays the same object meanwhile.
    """
    factor = scale.factor

    def cell(h):
        return h * factor

    def set_cell(value):
        nonlocal factor
        scale.set(value)
        factor = value

    scale.set_all = set_cell
    methods = {name: getattr(scale, name) for name in ("attribute", "element", "in_place", "slope")}
    return methods | {"global": of_a_global, "closure": cell, "callable": scale}


@pytest.fixture
def scale():
    scale = Scale()
    scale.set(1.0)
    yield scale
    FACTOR[0] = 1.0


def nnx_layer(act):
    layer = jax_ep.nnx.MoE(
        H, F, num_experts=E, num_experts_per_token=K, activation=act, rngs=nnx.Rngs(0)
    )
    return lambda x: layer(x)[0]


def linen_layer(act):
    layer = jax_ep.linen.MoE(num_experts=E, num_experts_per_token=K, mlp_dim=F, activation=act)
    params = nn.unbox(layer.init(jax.random.key(0), make_x()))
    return lambda x: layer.apply(params, x)[0]


def layer_as_function(act):
    config = dataclasses.replace(CONFIG, activation=act)
    return lambda x: moe_layer(make_params(), x, config)[0]


def layer_on_mesh(act):
    config = dataclasses.replace(CONFIG, activation=act, mesh=expert_mesh(2))
    return lambda x: moe_layer(make_params(), x, config)[0]


def experts_alone(act):
    p = make_params()
    sizes = jnp.full(E, 4, jnp.int32)
    return lambda x: jax_ep.expert_mlp(
        x.reshape(-1, H), p.wi_0, p.wi_1, p.wo, sizes, activation=act, implementation="xla"
    )


def experts_and_combine(act):
    p, case = make_params(), Case(1, 32, H, K, E)
    topk_idx = jnp.arange(32 * K, dtype=jnp.int32).reshape(32, K) % E

    def on_rank(x):
        sent = case.dispatch(x, topk_idx, "xla")
        weights = jnp.ones((32, K))
        return jax_ep.routed_experts(sent, p.wi_0, p.wi_1, p.wo, weights, activation=act)

    return lambda x: per_rank(on_rank, 1)(x.reshape(1, 32, H))


PLACES = (
    nnx_layer,
    pytest.param(linen_layer, marks=pytest.mark.slow),
    pytest.param(layer_as_function, marks=pytest.mark.slow),
    pytest.param(layer_on_mesh, marks=pytest.mark.slow),
    experts_alone,
    experts_and_combine,
)


def values_and_gradients(run, wrap):
    def both(x):
        out, vjp = jax.vjp(run, x)
        return out, *vjp(jnp.ones_like(out))

    # Compute the arrays before a test changes any value.
    return jax.tree.map(np.asarray, wrap(both)(make_x()))


@pytest.mark.parametrize("wrap", quick({"jit": jax.jit, "eager": lambda f: f}, "jit"))
@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
def test_what_a_bound_method_reads_is_read_again(place, wrap, scale):
    """A value that a bound method reads must be read again in each call of the layer.

    Changing the factor from 1 to 4 must multiply all results by 4 exactly.
    """
    run = place(scale.attribute)
    first = values_and_gradients(run, wrap)
    scale.set(4.0)
    for got, want in zip(values_and_gradients(run, wrap), first, strict=True):
        np.testing.assert_array_equal(got, 4 * want)


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
def test_a_function_is_not_called_while_a_program_is_lowered(place):
    """A value that it reads may be another one by then."""
    calls = []

    def act(h):
        calls.append(h)
        return (
            jnp.tanh(h) * 0.8125
        )  # A factor of this test alone, so that no cache has the program.

    traced = jax.jit(jax.grad(lambda x: place(act)(x).sum())).trace(make_x())
    assert calls
    calls.clear()
    traced.lower()
    assert not calls


@pytest.mark.parametrize("wrap", quick({"jit": jax.jit, "eager": lambda f: f}, "jit"))
@pytest.mark.parametrize("what", activations(Scale()))
def test_whatever_a_function_reads_is_read_again(what, wrap, scale):
    run = experts_alone(activations(scale)[what])
    first = values_and_gradients(run, wrap)
    scale.set_all(4.0)
    for got, want in zip(values_and_gradients(run, wrap), first, strict=True):
        np.testing.assert_array_equal(got, 4 * want)


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
def test_two_calls_of_one_program_read_it_each_for_itself(place, scale):
    """Two calls in one program must each use the value at their time, also in gradients.

    Gradients are traced after both calls.
    """
    run = place(scale.attribute)

    def both(x):
        scale.set(1.0)
        first = run(x)
        scale.set(4.0)
        second = run(x)
        scale.set(64.0)
        return first, second

    (first, second), vjp = jax.vjp(lambda x: jax.jit(lambda x: both(x))(x), make_x())
    np.testing.assert_array_equal(second, 4 * first)
    ones, zeros = jnp.ones_like(first), jnp.zeros_like(first)
    np.testing.assert_array_equal(vjp((zeros, ones))[0], 4 * vjp((ones, zeros))[0])


@pytest.mark.parametrize("wrap", quick({"jit": jax.jit, "eager": lambda f: f}, "jit"))
def test_a_gating_and_a_router_are_read_again(wrap, scale):
    def gating(gate, up):
        return gate * up * scale.factor

    def router(x, logits):
        return top_k_routing(logits, K, scale=scale.factor)

    params = make_params(shared=False)
    for changes in (dict(gating=gating), dict(router=router)):
        config = dataclasses.replace(CONFIG, **changes)

        def run(x, config=config):
            return moe_layer(params, x, config)[0]

        scale.set(1.0)
        first = values_and_gradients(run, wrap)
        scale.set(4.0)
        for got, want in zip(values_and_gradients(run, wrap), first, strict=True):
            np.testing.assert_array_equal(got, 4 * want)


def test_an_activation_that_changes_its_gradient_alone_is_another():
    slope = [1.0]

    @jax.custom_vjp
    def act(h):
        return jnp.tanh(h)

    act.defvjp(lambda h: (jnp.tanh(h), None), lambda _, g: (g * slope[0],))
    run = experts_alone(act)
    gradient = jax.grad(lambda x: jnp.sum(run(x) ** 2))
    first = gradient(make_x())
    slope[0] = 4.0
    with pytest.raises(AssertionError):
        assert_close(gradient(make_x()), first)


def types(*shape):
    return [[jax.ShapeDtypeStruct(shape, jnp.float32)]]


@pytest.mark.parametrize(
    "function",
    [
        lambda: jax.nn.silu,
        lambda: lambda h: jax.nn.relu(h) ** 2,
        lambda: lambda h: jax.nn.gelu(h, approximate=False) * np.float32(0.5),
        lambda: lambda h: jnp.where(h > 0.5, h, TABLE),
    ],
)
def test_functions_written_twice_are_equal(function):
    first, second = (Traced(function(), types(2, 3)) for _ in range(2))
    assert first == second and hash(first) == hash(second) and first.key is not None


@pytest.mark.parametrize(
    "a, b",
    [
        (lambda h: h * 2.0, lambda h: h * 2.5),
        (lambda h: h + 0.0, lambda h: h - 0.0),
        (lambda h: h * h, lambda h: h * jnp.tanh(h)),
        (lambda h: h * np.float32([1, 2, 3]), lambda h: h * np.float32([1, 2, 4])),
        (lambda h: jax.nn.gelu(h), lambda h: jax.nn.gelu(h, approximate=False)),
        (lambda h: jax.lax.integer_pow(h, 2), lambda h: jax.lax.integer_pow(h, 3)),
        (lambda h: jnp.tanh(h) - h, lambda h: h - jnp.tanh(h)),
        (lambda h: jnp.maximum(h, 0.0), lambda h: jnp.maximum(h, -0.0)),
        (lambda h: h, lambda h: jax.lax.stop_gradient(h)),
        (lambda h: jnp.where(h > 0, h, 0), lambda h: jnp.where(h >= 0, h, 0)),
    ],
)
def test_functions_that_compute_otherwise_are_not_equal(a, b):
    assert Traced(a, types(2, 3)) != Traced(b, types(2, 3))


def test_what_cannot_be_traced_equals_itself_alone():
    def act(h):
        raise RuntimeError

    first, second = (Traced(act, types(2, 3)) for _ in range(2))
    assert first == first and first != second and first.key is None
