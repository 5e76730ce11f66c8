"""Tests of the layer's losses in each convention, on meshes that keep or cut sequences."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense_moe import E, H, K, assert_close, make_params, make_x
from support.meshes import expert_mesh

import jax_ep
from jax_ep import MoEConfig, moe_layer
from jax_ep.moe import losses, metrics, routing
from jax_ep.placement import Placement

PARAMS = make_params(bias=True, shared=False)
CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K, score="sigmoid", implementation="xla")


def expected(gate, x, mask, convention):
    """Computes the load-balance loss of all tokens, and the sums from which it is computed.

    `convention` is one of the layer's, and decides which scores and choices the loss takes.
    """
    logits = x.reshape(-1, H) @ gate
    routed = routing.top_k_routing(logits, K, score="sigmoid", bias=PARAMS.bias)
    probs, idx = routed.probs, routed.topk_idx
    if convention == "transformers":
        probs, idx = jax.nn.softmax(logits), jax.lax.top_k(logits, K)[1]
    idx = jnp.where(mask.reshape(-1, 1), idx, -1)
    sequences = int(np.prod(x.shape[:-2])) if convention == "deepseek_v3" else None
    given: dict = dict(convention=convention, num_sequences=sequences)
    return losses.load_balance_loss(probs, idx, **given), losses.balance_sums(probs, idx)


# Each entry is (leading axes of x, number of ranks).
TOKENS = [((8, 4), 8), ((3, 5), 8), ((24,), 4), ((2, 2, 3), 1)]


@pytest.mark.parametrize("convention", ["switch", "transformers", "deepseek_v3"])
@pytest.mark.parametrize("lead, num_ranks", TOKENS)
@pytest.mark.slow
def test_conventions(convention, lead, num_ranks):
    x = make_x(shape=lead)
    mask = jnp.asarray(np.random.default_rng(1).integers(0, 3, lead) > 0)
    config = dataclasses.replace(CONFIG, balance_convention=convention)

    def loss(params):
        metrics = moe_layer(params, x, config, mask)[1]
        return metrics.load_balance_loss, metrics

    with jax.set_mesh(expert_mesh(num_ranks)):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, metrics), grads = jax.device_get(step(PARAMS))
    given = x, mask, convention
    (want, sums), want_grad = jax.value_and_grad(expected, has_aux=True)(PARAMS.gate, *given)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_close(metrics.balance, sums, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads.gate, want_grad, atol=1e-6)


def test_a_sequence_wise_loss_needs_sequences():
    config = dataclasses.replace(CONFIG, balance_convention="deepseek_v3")
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., sequence, H\] .* \(16,\)"):
        moe_layer(PARAMS, jnp.zeros(H), config)


def test_sums_over_layers_and_steps_may_be_added():
    """Counts stay int32, but those that are added over layers or microbatches are float32."""
    found = moe_layer(PARAMS, make_x(), CONFIG)[1]
    assert found.expert_counts.dtype == found.num_dropped.dtype == jnp.int32
    assert all(array.dtype == jnp.float32 for array in found.balance)
    np.testing.assert_array_equal(found.balance.choices, found.expert_counts)


def test_a_sum_of_dropped_counts_that_int32_cannot_hold_is_the_largest():
    for counts, total in [
        ([2**30, 2**30 - 1], 2**31 - 1),
        ([2**30, 2**30], 2**31 - 1),
        ([2**31 - 1] * 4, 2**31 - 1),
        ([2**26 + 1, 3], 2**26 + 4),
    ]:
        assert metrics._sum_of_counts(jnp.asarray(counts, jnp.int32)) == total


def metrics_with(counts, dropped):
    """Makes metrics in which only the expert counts and the dropped counts are of interest.

    `counts` is [..., E + the number of free experts], and `dropped` is [..., E].
    """
    zero = jnp.zeros(())
    counts, dropped = jnp.asarray(counts, jnp.int32), jnp.asarray(dropped, jnp.int32)
    return jax_ep.MoEMetrics(zero, zero, counts, dropped.sum(-1), dropped, balance=None)


@pytest.mark.parametrize("traced", [False, True])
def test_a_summary_of_the_load(traced):
    metrics = metrics_with([[6, 2, 0, 0, 5], [2, 2, 2, 2, 0], [0, 0, 0, 0, 3]], np.eye(3, 4))
    summary = (jax.jit if traced else lambda f: f)(lambda metrics: metrics.summary(num_ranks=2))
    found = summary(metrics)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    want = {
        "busiest_expert": [3, 1, 0],
        "busiest_rank": [2, 1, 0],
        "entropy": [entropy, 1, 0],
        "idle_experts": [2, 0, 4],
        "drop_share": [1 / 8, 1 / 8, 1],
    }
    assert found.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)
        assert isinstance(found[name], jax.Array) == traced


@pytest.mark.parametrize("traced", [False, True])
def test_a_summary_has_the_ranks_of_a_placement(traced):
    """The ranks' loads are those of `Placement.rank_load`, even if the ranks divide no experts."""
    counts = np.array([[6, 2, 4], [0, 8, 1]])
    placed = Placement.of([[0, 1, 2, 0], [1, 2, 1, 0]], num_experts=3, num_ranks=2)
    summary = (jax.jit if traced else lambda f: f)(lambda m, p: m.summary(placement=p))
    found = summary(metrics_with(counts, np.zeros((2, 3))), placed)
    want = placed.rank_load(counts).max(-1) * 2 / counts.sum(-1)
    np.testing.assert_allclose(found["busiest_rank"], want, rtol=1e-6)
    one = metrics_with(counts[0], np.zeros(3)).summary(num_ranks=2, placement=placed[0])
    np.testing.assert_allclose(one["busiest_rank"], want[0])
    metrics = metrics_with(counts, np.zeros((2, 3)))
    with pytest.raises(ValueError, match="num_ranks must be that of placement, 2, but is 4"):
        metrics.summary(num_ranks=4, placement=placed)
    with pytest.raises(ValueError, match=r"placement must be of the layers .*\(2, 3\).* \(3,\)"):
        metrics.summary(placement=placed[0])
    with pytest.raises(ValueError, match="num_ranks must divide the 3 experts.*give placement"):
        metrics.summary(num_ranks=2)


def test_a_summary_of_one_layer_has_python_floats():
    metrics = metrics_with([3, 1], [0, 1])
    found = metrics.summary()
    assert all(isinstance(value, float) for value in found.values())
    assert found["drop_share"] == 0.25 and "busiest_rank" not in found
    assert str(metrics_with([7], [0]).summary()["entropy"]) == "0.0"
    with pytest.raises(ValueError, match="num_ranks must divide the 2 experts, but is 3"):
        metrics.summary(num_ranks=3)
    with pytest.raises(TypeError, match="num_ranks must be a static integer, but is 2.0"):
        metrics.summary(num_ranks=2.0)
