"""Tests that layers with slots compute what they do without, and that copies stay equal."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.dense_moe import E, F, H, K, make_params, make_x
from support.loads import random_loads
from support.meshes import expert_mesh

import jax_ep
from jax_ep.moe.config import MoEConfig
from jax_ep.placement import Placement, balance, redistribute, to_experts, to_slots

SLOTS, WEIGHTS = 12, ("wi_0", "wi_1", "wo")
WITHOUT = MoEConfig(num_experts=E, num_experts_per_token=K)
WITH = dataclasses.replace(WITHOUT, num_slots=SLOTS)


def placed(num_ranks, seed=0):
    load = random_loads("zipf", 1, E, np.random.default_rng(seed)) ** 2
    return balance(load, num_slots=SLOTS, num_ranks=num_ranks)[0]


@functools.cache
def step(num_ranks, config):
    """Returns a step by SGD: (params, x, placement) -> (new params, loss, output, metrics)."""

    def loss(params, x, placement):
        out, metrics = jax_ep.moe_layer(params, x, config, placement=placement)
        return jnp.sum(out**2) + metrics.load_balance_loss, (out, metrics)

    @jax.jit
    def run(params, x, placement):
        (value, (out, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(
            params, x, placement
        )
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return params, value, out, metrics

    def on_mesh(*args):
        with jax.set_mesh(expert_mesh(num_ranks)):
            return run(*args)

    return on_mesh


def assert_copies_are_equal(params, placement):
    for name in WEIGHTS:
        weights = np.asarray(getattr(params, name))
        for slots, copies in zip(placement.slots_of_expert, placement.num_copies, strict=True):
            first = weights[slots[0]].tobytes()
            assert all(weights[slot].tobytes() == first for slot in slots[:copies])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_training_with_copies_is_training_without(num_ranks):
    """Between the steps, the experts move to another placement once."""
    placement, other = placed(num_ranks), placed(num_ranks, seed=1)
    assert placement.num_copies.max() > 1
    x = make_x()
    experts = make_params(shared=False)
    slots = to_slots(experts, placement)
    for i in range(3):
        experts, want, want_out, want_metrics = step(num_ranks, WITHOUT)(experts, x, None)
        # Without `num_slots`, the placement says how many slots the parameters have.
        slots, value, out, metrics = step(num_ranks, (WITHOUT, WITH)[i % 2])(slots, x, placement)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(out, want_out, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(metrics.expert_counts, want_metrics.expert_counts)
        assert_copies_are_equal(slots, placement)
        back = to_experts(slots, placement)
        for got, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(experts), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        if i == 0:
            slots = redistribute(slots, placement, other, mesh=expert_mesh(num_ranks))
            placement = other


def test_drops_are_counted_by_expert():
    placement = placed(4)
    # The placement says how many slots the parameters have.
    config = dataclasses.replace(WITHOUT, capacity_factor=0.5)
    with jax.set_mesh(expert_mesh(4)):
        params = to_slots(make_params(), placement)
        _, metrics = jax.jit(functools.partial(jax_ep.moe_layer, config=config))(
            params, make_x(), placement=placement
        )
    assert metrics.dropped_counts.shape == (E,)
    assert np.all(metrics.dropped_counts <= metrics.expert_counts)
    assert metrics.dropped_counts.sum() == metrics.num_dropped > 0


def test_both_flax_layers_start_in_order():
    placement = Placement.in_order(num_experts=E, num_slots=SLOTS, num_ranks=4)[0]
    options = dict(num_experts=E, num_experts_per_token=K, num_slots=SLOTS)
    with jax.set_mesh(expert_mesh(4)):
        layer = jax_ep.nnx.MoE(H, F, rngs=nnx.Rngs(0), **options)
        linen = jax_ep.linen.MoE(mlp_dim=F, **options)
        variables = linen.init(jax.random.key(0), make_x(), placement=placement)
    for params in (nnx.to_pure_dict(nnx.state(layer)), nn.unbox(variables)["params"]):
        for name in WEIGHTS:
            np.testing.assert_array_equal(params[name][E:], params[name][: SLOTS - E])


OF_LAYERS = Placement.in_order(num_experts=E, num_slots=SLOTS, num_ranks=1)
FEWER = dataclasses.replace(WITH, num_slots=E - 1)
IN_ANY_ORDER = dataclasses.replace(WITH, num_slots=E)


@pytest.mark.parametrize(
    ("config", "placement", "error", "message"),
    [
        (WITH, None, TypeError, r"placement must say .*\(num_slots=12\).* but is"),
        # Shapes do not tell E slots, whose experts may be in any order, from E experts.
        (IN_ANY_ORDER, None, TypeError, r"placement must say .*\(num_slots=8\).* but is"),
        (WITHOUT, [0], TypeError, "placement must say .* but is"),
        (WITHOUT, placed(1), ValueError, "wi_0 must hold 12 experts .*num_slots or placement"),
        (WITH, OF_LAYERS, ValueError, r"shape \(1, 12\).*Pass placement\[layer\]"),
        (FEWER, placed(1), ValueError, "num_slots must be at least num_experts=8, .* but is 7"),
    ],
)
def test_errors_name_the_argument(config, placement, error, message):
    with pytest.raises(error, match=message):
        jax_ep.moe_layer(make_params(), make_x(), config, placement=placement)


def test_a_placement_for_other_ranks_is_refused():
    """The output would be right, but `rank_load` would be that of ranks that do not exist."""
    params, x = to_slots(make_params(), placed(2)), make_x()
    with pytest.raises(ValueError, match="placement must be for the 4 ranks along expert_axis.* 2"):
        with jax.set_mesh(expert_mesh(4)):
            jax_ep.moe_layer(params, x, WITH, placement=placed(2))
    # A single rank has the slots of all ranks.
    jax_ep.moe_layer(params, x, WITH, placement=placed(2))
