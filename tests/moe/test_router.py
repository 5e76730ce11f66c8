"""Tests of what a call may give the router, and of custom routers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.dense_moe import E, F, H, K, assert_close, make_params, make_x
from support.meshes import expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, Routing, moe_layer, reference

pytestmark = pytest.mark.usefixtures("exact_matmuls")

CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)
PARAMS = make_params(shared=False)
X = make_x()


def choices(seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Draws top-k choices and their weights, [..., K] each, without a router.

    Unlike a router's choices, a token's may have one expert twice, or no expert (-1).
    """
    rng = np.random.default_rng(seed)
    topk_idx = rng.integers(-1, E, (*X.shape[:-1], K)).astype(np.int32)
    topk_idx[0, 0] = 2
    return topk_idx, rng.normal(size=topk_idx.shape).astype(np.float32)


def weighted_experts(topk_idx, topk_weights) -> np.ndarray:
    experts = (np.asarray(a, np.float64) for a in (PARAMS.wi_0, PARAMS.wi_1, PARAMS.wo))
    flat = (np.asarray(a).reshape(-1, K) for a in (topk_idx, topk_weights))
    return reference.moe_layer(np.asarray(X).reshape(-1, H), *flat, *experts).reshape(X.shape)


MESHES = {"one rank": ((1,), ("expert",)), "data": ((2, 4), ("data", "expert"))}


@pytest.mark.parametrize("shape, names", quick(MESHES, "data"))
def test_given_choices_and_weights(shape, names):
    topk_idx, topk_weights = choices()
    params = PARAMS._replace(gate=None)

    def total(params, topk_weights):
        given = dict(topk_idx=topk_idx, topk_weights=topk_weights)
        out, metrics = moe_layer(params, X, CONFIG, **given)
        return jnp.sum(out * X), (out, metrics)

    with jax.set_mesh(mesh(shape, names)):
        step = jax.jit(jax.value_and_grad(total, 1, has_aux=True))
        (_, (out, metrics)), grad = step(params, topk_weights)
    np.testing.assert_allclose(out, weighted_experts(topk_idx, topk_weights), atol=1e-5)
    counts = np.bincount(np.asarray(topk_idx)[np.asarray(topk_idx) >= 0], minlength=E)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    assert metrics.num_dropped == metrics.load_balance_loss == metrics.router_z_loss == 0
    one = jnp.zeros_like(topk_weights).at[0, 0, 1].set(1.0)
    want = np.sum(weighted_experts(topk_idx, one) * np.asarray(X))
    np.testing.assert_allclose(grad[0, 0, 1], want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_given_choices_are_weighed_by_the_gate(num_ranks):
    topk_idx, _ = choices()
    config = dataclasses.replace(CONFIG, score="sqrt_softplus", scale=1.5)
    with jax.set_mesh(expert_mesh(num_ranks)):
        out, metrics = moe_layer(PARAMS, X, config, topk_idx=topk_idx)
    scores = np.sqrt(np.logaddexp(0, np.asarray(X @ PARAMS.gate, np.float64)))
    idx = np.asarray(topk_idx)
    weights = np.where(idx >= 0, np.take_along_axis(scores, np.maximum(idx, 0), -1), 0)
    weights *= 1.5 / (weights.sum(axis=-1, keepdims=True) + 1e-15)
    np.testing.assert_allclose(out, weighted_experts(topk_idx, weights), atol=1e-5)
    assert metrics.router_z_loss > 0 and metrics.load_balance_loss > 0


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.slow
def test_the_router_may_see_what_the_experts_do_not(num_ranks):
    """The router must read `router_x`; masked tokens may hold NaN in both."""
    rng = np.random.default_rng(6)
    router_x = jnp.asarray(rng.normal(size=(*X.shape[:-1], 5)), jnp.float32)
    params = PARAMS._replace(gate=jnp.asarray(rng.normal(size=(5, E)), jnp.float32))
    mask = jnp.arange(X.shape[1]) % 2 + jnp.arange(X.shape[0])[:, None] * 0

    def step(params, x, router_x):
        def total(params, router_x):
            out, metrics = moe_layer(params, x, CONFIG, mask, router_x=router_x)
            return jnp.sum(jnp.where(mask[..., None] > 0, out * X, 0.0)), metrics

        return jax.grad(total, (0, 1), has_aux=True)(params, router_x)

    bad = jnp.where(mask[..., None] > 0, 0.0, jnp.nan)
    with jax.set_mesh(expert_mesh(num_ranks)):
        got = jax.jit(step)(params, X + bad, router_x + bad[..., :1])
    routed = jax_ep.top_k_routing(router_x.reshape(-1, 5) @ params.gate, K)
    given = (a.reshape(*X.shape[:-1], K) for a in routed[:2])
    topk_idx, topk_weights = given

    def want(params, router_x):
        probs = jax.nn.softmax(router_x @ params.gate)
        weights = jnp.take_along_axis(probs, topk_idx, axis=-1)
        weights /= weights.sum(axis=-1, keepdims=True)
        out, _ = moe_layer(params, X, CONFIG, mask != 0, topk_idx=topk_idx, topk_weights=weights)
        return jnp.sum(jnp.where(mask[..., None] > 0, out * X, 0.0))

    assert_close(got[0], jax.jit(jax.grad(want, (0, 1)))(params, router_x), atol=1e-5)
    assert got[1].expert_counts.sum() == K * np.count_nonzero(mask)


def own_router(x, logits):
    """A custom router that chooses the K experts after the best one, with equal weights."""
    first = jnp.argmax(logits, axis=-1, keepdims=True)
    return Routing((first + jnp.arange(K)[None]) % E, jnp.full((len(x), K), 0.5))


@pytest.mark.slow
def test_a_router_of_ones_own():
    config = dataclasses.replace(CONFIG, router=own_router)
    with jax.set_mesh(expert_mesh(8)):
        out, metrics = moe_layer(PARAMS, X, config)
    first = np.argmax(np.asarray(X) @ np.asarray(PARAMS.gate), axis=-1)[..., None]
    topk_idx = (first + np.arange(K)) % E
    np.testing.assert_allclose(
        out, weighted_experts(topk_idx, np.full(topk_idx.shape, 0.5)), atol=1e-5
    )
    assert metrics.load_balance_loss == 0 and metrics.router_z_loss > 0


def test_a_router_without_a_gate_sees_no_logits():
    def router(x, logits):
        assert logits is None
        idx = lax.top_k(x[:, :E], K)[1]
        return Routing(idx, jnp.ones(idx.shape), jax.nn.softmax(x[:, :E]))

    config = dataclasses.replace(CONFIG, router=router)
    out, metrics = moe_layer(PARAMS._replace(gate=None), X, config)
    idx = np.argsort(-np.asarray(X)[..., :E], axis=-1)[..., :K]
    np.testing.assert_allclose(out, weighted_experts(idx, np.ones(idx.shape)), atol=1e-5)
    assert metrics.load_balance_loss > 0


@pytest.mark.parametrize("router_dtype", [jnp.bfloat16, None])
@pytest.mark.slow
def test_logits_in_the_dtype_of_the_model(router_dtype):
    params = PARAMS._replace(gate_bias=jnp.linspace(-1.0, 1.0, E))
    config = dataclasses.replace(CONFIG, router_dtype=router_dtype, dtype=jnp.bfloat16)
    _, metrics = jax.jit(moe_layer, static_argnums=2)(params, X, config)
    low = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (X, params.gate, params.gate_bias))
    x, gate, bias = low
    logits = (x.reshape(-1, H) @ gate + bias).astype(jnp.bfloat16).astype(jnp.float32)
    want = reference.router_z_loss(np.asarray(logits))
    exact = reference.router_z_loss(np.asarray(X.reshape(-1, H) @ params.gate + params.gate_bias))
    np.testing.assert_allclose(metrics.router_z_loss, want, rtol=1e-6)
    assert abs(want - exact) > 1e-4


IDX, WEIGHTS = choices()


ONES = np.ones((X.shape[0] * X.shape[1], K), np.int32)
BOTH: dict = dict(topk_idx=IDX, topk_weights=WEIGHTS)
BIAS_ALONE: dict = dict(gate=None, gate_bias=np.zeros(E, np.float32))


@pytest.mark.parametrize(
    "changes, call, error, message",
    [
        ({}, dict(topk_idx=IDX[..., :2]), ValueError, r"topk_idx must be \[\.\.\., K=3\].*, 2\)"),
        ({}, dict(topk_idx=WEIGHTS), TypeError, "topk_idx must be an integer array"),
        ({}, dict(topk_weights=WEIGHTS), ValueError, "topk_weights must be given together"),
        ({}, dict(topk_idx=IDX, topk_weights=IDX), TypeError, "topk_weights must be a floating"),
        ({}, dict(router_x=X[:4]), ValueError, r"router_x must be .* \(4, 4, 16\)"),
        ({}, dict(router_x=X[..., :5]), ValueError, r"router_x must be \[\.\.\., H=16\] for gate"),
        ({}, BOTH | dict(router_x=X), ValueError, "router_x must be None where topk_weights is"),
        (dict(gate=None), {}, ValueError, r"gate must be .* but is None.*topk_weights"),
        (dict(gate=None), dict(topk_idx=IDX), ValueError, "gate must be .* but is None"),
        (BIAS_ALONE, BOTH, ValueError, "gate_bias must be None where gate is None"),
        (dict(gate_bias=np.zeros(3)), {}, ValueError, r"gate_bias must have.*\(8,\).*\(3,\)"),
        (dict(expert_scale=IDX), {}, ValueError, "expert_scale must be a floating array"),
    ],
)
def test_errors_name_the_argument(changes, call, error, message):
    with pytest.raises(error, match=message):
        moe_layer(PARAMS._replace(**changes), X, CONFIG, **call)


@pytest.mark.parametrize(
    "routed, error, message",
    [
        (lambda x: (x, x), TypeError, "router must return a jax_ep.Routing, .*tuple"),
        (lambda x: Routing(x, x), TypeError, "topk_idx of router must be an integer array"),
        (lambda x: Routing(ONES[:, :2], x), ValueError, r"topk_idx of router .*\(32, 3\).*32, 2"),
        (lambda x: Routing(ONES, x[:, :K], x), ValueError, r"probs of router .*\(32, 8\).*32, 16"),
    ],
)
def test_errors_name_what_a_router_returned(routed, error, message):
    with pytest.raises(error, match=message):
        moe_layer(PARAMS, X, dataclasses.replace(CONFIG, router=lambda x, _: routed(x)))


@pytest.mark.parametrize(
    "bias, call, message",
    [
        (np.zeros(E, np.float32), {}, r"bias must be None .*MoEConfig\.router is set.*\(8,\)"),
        (None, dict(topk_idx=IDX), "topk_weights must be given together .*MoEConfig.router is set"),
    ],
)
def test_what_a_router_of_ones_own_does_not_see_is_refused(bias, call, message):
    config = dataclasses.replace(CONFIG, router=own_router)
    with pytest.raises(ValueError, match=message):
        moe_layer(PARAMS._replace(bias=bias), X, config, **call)


@pytest.mark.slow
def test_a_router_is_not_called_where_choices_and_weights_are_given():
    def router(x, logits):
        raise AssertionError("called")

    out, _ = moe_layer(PARAMS, X, dataclasses.replace(CONFIG, router=router), **BOTH)
    np.testing.assert_allclose(out, weighted_experts(IDX, WEIGHTS), atol=1e-5)


def test_a_bias_among_the_gates_parameters_is_named():
    """A gate.bias among Linen's parameters must be refused, since Linen would ignore it."""
    linen = jax_ep.linen.MoE(mlp_dim=F, num_experts=E, num_experts_per_token=K)
    gate = {"kernel": PARAMS.gate, "bias": jnp.zeros(E)}
    weights = dict(wi_0=PARAMS.wi_0, wi_1=PARAMS.wi_1, wo=PARAMS.wo)
    with pytest.raises(ValueError, match=r"gate\.bias is no parameter.*gate_bias"):
        linen.apply({"params": {"gate": gate, **weights}}, X)
