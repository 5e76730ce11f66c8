"""Tests of free experts (zero, identity, constant) against a dense layer and MoE++'s loss."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense_moe import E, H, K, make_params, make_x
from support.meshes import expert_mesh
from support.selection import quick

import jax_ep
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.losses import BalanceSums

FREE = dict(zero_experts=1, identity_experts=2, constant_experts=2)
ALL = E + 5
CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K, free_expert_factor=0.25, **FREE)


def params_with_free():
    rng = np.random.default_rng(5)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)  # noqa: E731
    return make_params(shared=False)._replace(
        gate=draw(H, ALL), constant_value=draw(2, H), constant_gate=draw(2, H, 2)
    )


def dense(params, x):
    """Computes every expert's output of every token; returns the weighted sum [T, H] and more.

    The other results are MoE++'s load-balance loss, and the tokens of each expert.
    """
    x = x.reshape(-1, H)
    probs = jax.nn.softmax(x @ params.gate)
    weights, ids = jax.lax.top_k(probs, K)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("th,ehf->tef", x, params.wi_0))
    hidden = hidden * jnp.einsum("th,ehf->tef", x, params.wi_1)
    outputs = [*jnp.einsum("tef,efh->eth", hidden, params.wo), jnp.zeros_like(x), x, x]
    for value, gate in zip(params.constant_value, params.constant_gate, strict=True):
        share = jax.nn.softmax(x @ gate)
        outputs.append(share[:, :1] * x + share[:, 1:] * value)
    chosen = jax.nn.one_hot(ids, ALL)
    out = jnp.einsum("tk,tke,eth->th", weights, chosen, jnp.stack(outputs))
    factors = jnp.where(jnp.arange(ALL) < E, 1.0, 0.25)
    share = jax.lax.stop_gradient(chosen.mean(axis=(0, 1)))
    return out, ALL * jnp.sum(factors * share * probs.mean(axis=0)), chosen.sum(axis=(0, 1))


@pytest.mark.parametrize("num_ranks", quick([2, 4], 2))
def test_the_layer_is_the_dense_one(num_ranks):
    params, x = params_with_free(), make_x()

    def loss(params, x):
        out, metrics = jax_ep.moe_layer(params, x, CONFIG)
        return jnp.sum(out**2) + metrics.load_balance_loss, (out, metrics)

    def wanted(params, x):
        out, balance, counts = dense(params, x)
        return jnp.sum(out**2) + balance, (out, balance, counts)

    # GPUs multiply float32 in TF32 by default.
    with jax.default_matmul_precision("highest"):
        with jax.set_mesh(expert_mesh(num_ranks)):
            (_, (out, metrics)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, x)
        want_grads, (want, balance, counts) = jax.jit(jax.grad(wanted, has_aux=True))(params, x)
    np.testing.assert_allclose(out.reshape(-1, H), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics.load_balance_loss, balance, rtol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    assert metrics.expert_counts[E:].min() > 0 and metrics.dropped_counts.shape == (E,)
    for name in ("gate", "wi_0", "wo", "constant_value", "constant_gate"):
        got, want = getattr(grads, name), getattr(want_grads, name)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_free_choices_take_no_row():
    """All choices but one are of free experts, so 8 rows per rank must be enough."""
    x = make_x()
    rows = x.shape[0] * x.shape[1]
    # These are the zero expert and the identities.
    ids = np.tile(np.arange(E, E + K), (*x.shape[:2], 1)).astype(np.int32)
    ids[0, 0, 0] = 3
    config = MoEConfig(num_experts=E, num_experts_per_token=K, capacity_factor=1 / rows, **FREE)
    weights = jnp.ones(ids.shape)
    with jax.set_mesh(expert_mesh(4)):
        run = functools.partial(jax_ep.moe_layer, config=config)
        out, metrics = jax.jit(run)(
            params_with_free(), x, topk_idx=jnp.asarray(ids), topk_weights=weights
        )
    assert metrics.num_dropped == 0 and metrics.expert_counts[:E].sum() == 1
    np.testing.assert_allclose(out[1:], 2 * x[1:], rtol=1e-6)


def test_errors_name_the_argument():
    params = params_with_free()
    with pytest.raises(ValueError, match=r"constant_value must have shape \(2, 16\).* is None"):
        jax_ep.moe_layer(params._replace(constant_value=None), make_x(), CONFIG)
    config = MoEConfig(num_experts=E, num_experts_per_token=K, zero_experts=-1)
    with pytest.raises(ValueError, match="zero_experts must be at least 0, but is -1"):
        jax_ep.moe_layer(params, make_x(), config)
    sums = BalanceSums(jnp.ones(ALL, jnp.int32), jnp.ones(ALL), jnp.int32(3))
    with pytest.raises(ValueError, match=r"expert_factors must .* \(13,\), but has shape \(8,\)"):
        jax_ep.pooled_load_balance_loss(sums, expert_factors=jnp.ones(E))
