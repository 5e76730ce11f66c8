"""Tests of the Flax NNX layer: parameters, axes, state, and NNX's transforms."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.dense_moe import E, F, H, K, S, assert_close, make_x
from support.meshes import expert_mesh, mesh
from support.selection import quick

from jax_ep.nnx import MoE

pytestmark = pytest.mark.usefixtures("exact_matmuls")


def layer(seed: int = 0, **changes) -> Any:
    sizes: dict = dict(num_experts=E, num_experts_per_token=K)
    return MoE(H, F, **(sizes | changes), rngs=nnx.Rngs(seed))


def test_an_initializer_may_be_a_function_of_three_arguments():
    module = layer(kernel_init=lambda key, shape, dtype: jnp.full(shape, 0.5, dtype))
    np.testing.assert_array_equal(module.wo.get_value(), np.full((E, F, H), 0.5))


@nnx.jit
def call(module, *args):
    return module(*args)


SOME_RULES = [(), (("embed", "data"),), (("exp", ("expert",)), ("mlp", "data"))]


@pytest.mark.parametrize("kind", quick(["Auto", "Explicit", "mixed"], "Explicit"))
@pytest.mark.parametrize("rules", SOME_RULES, ids=str)
def test_experts_are_born_sharded_whatever_rules_there_are(rules, kind):
    """Experts must be sharded over expert_axis without a rule, other axes only by rules."""
    auto, explicit = AxisType.Auto, AxisType.Explicit
    kinds = dict(Auto=auto, Explicit=explicit, mixed=(auto, explicit))
    devices = mesh((2, 4), ("data", "expert"), kinds[kind])
    over = dict(rules)
    shape = (E // 4, H // (2 if over.get("embed") else 1), F // (2 if over.get("mlp") else 1))
    make = functools.partial(layer, kernel_init=jax.nn.initializers.ones)
    with jax.set_mesh(devices), nnx.logical_axis_rules(rules):
        for module in (make(), nnx.jit(make)()):
            wi_0 = module.wi_0.get_value()
            assert {shard.data.shape for shard in wi_0.addressable_shards} == {shape}
            gate = module.gate.kernel.get_value()
            assert gate.addressable_shards[0].data.shape == (shape[1], E)
        if kind != "mixed":
            abstract = nnx.eval_shape(make).wi_0.get_value()
            assert abstract.sharding.spec[0] in ("expert", ("expert",))


def test_flax_finds_where_the_parameters_are():
    devices = mesh((2, 4), ("data", "expert"))
    with jax.set_mesh(devices):
        module = layer(kernel_init=jax.nn.initializers.ones)
    params = nnx.state(module, nnx.Param)
    named = nnx.get_named_sharding(params, devices)
    same = jax.tree.map(lambda n, p: n.is_equivalent_to(p.sharding, p.ndim), named, params)
    assert jax.tree.leaves(same) == [True] * 4
    assert module.wi_0.get_value().addressable_shards[0].data.shape == (E // 4, H, F)


def test_a_rule_that_names_no_axis_of_the_mesh_is_an_error():
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        for rule in (("exp", "experts"), ("embed", "fsdp")):
            with nnx.logical_axis_rules((rule,)), pytest.raises(ValueError, match=rule[1]):
                layer()


@pytest.mark.slow
def test_a_layer_can_be_pickled_and_copied():
    module = layer(selection_bias=True, num_shared_experts=S)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert other.config == module.config
        assert_close(call(other, make_x()), call(module, make_x()))


@pytest.mark.parametrize("kind", quick([AxisType.Auto, AxisType.Explicit], AxisType.Auto))
def test_all_state_is_on_the_mesh(kind, tmp_path):
    """A layer that is restored onto its own shardings must run, eagerly and with new biases."""
    devices = mesh((2,), ("expert",), kind)
    with jax.set_mesh(devices):
        module = layer(selection_bias=True)
        state = nnx.to_pure_dict(nnx.state(module))
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
        )
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "moe", state)
            checkpointer.wait_until_finished()
            nnx.update(module, checkpointer.restore(tmp_path / "moe", abstract))
        _, metrics = module(make_x())
        module.update_bias(metrics.expert_counts, 0.5)
        state = nnx.to_pure_dict(nnx.state(module))
        for leaf in jax.tree.leaves(state):
            assert leaf.sharding.device_set == set(devices.devices.flat)
        assert np.any(state["gate"]["bias"])
        module(make_x())


def test_a_layer_without_a_gate_has_no_width_of_its_input():
    with pytest.raises(ValueError, match="router_dim must be None where gate_init is None.* 5"):
        layer(gate_init=None, router_dim=5)


def test_ranks_must_divide_the_slots_but_not_the_experts():
    with jax.set_mesh(expert_mesh(8)):
        assert layer(num_experts=12, num_slots=16).wo.get_value().shape[0] == 16
        with pytest.raises(ValueError, match="num_slots must be a multiple of the 8 ranks .* 12"):
            layer(num_experts=10, num_slots=12)


def stack_of(num_layers, **options):
    """Makes a stack of layers with selection biases, with the given options of nnx.vmap."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, **options)
    def make(rngs):
        return MoE(H, F, num_experts=E, num_experts_per_token=K, selection_bias=True, rngs=rngs)

    return make(nnx.Rngs(0))


def test_the_axis_of_layers_may_have_a_name():
    stack = stack_of(2, transform_metadata={nnx.PARTITION_NAME: "layers"})
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(stack)))
    assert specs["wi_0"] == P("layers", "exp", "embed", "mlp")


def test_the_biases_of_a_stack_are_updated_at_once():
    stack = stack_of(2)
    counts = jnp.stack([jnp.arange(E), jnp.arange(E)[::-1]])
    stack.update_bias(counts, 0.5)
    np.testing.assert_array_equal(stack.gate.bias.get_value(), 0.5 * np.sign((E - 1) / 2 - counts))
    stack.update_bias(jnp.full((2, E), E).at[:, 0].set(0), 0.5, zero_mean=True)
    np.testing.assert_allclose(stack.gate.bias.get_value().mean(axis=1), 0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"transform_metadata": {nnx.PARTITION_NAME: None}}])
def test_a_stack_trains_on_explicit_axes(options):
    """If it is made without transform_metadata, the axis of layers has no logical name."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **options)
    @nnx.remat
    def run(x, module):
        return x + module(x)[0]

    @nnx.jit
    def step(module, optimizer, x):
        gradients = nnx.grad(lambda module: jnp.sum(run(x, module) ** 2))(module)
        optimizer.update(module, gradients)

    with jax.set_mesh(mesh((2, 4), ("data", "expert"), AxisType.Explicit)):
        module = stack_of(4, **options)
        before = np.asarray(module.wi_0.get_value())
        optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
        step(module, optimizer, make_x())
    after, moment = module.wi_0.get_value(), optimizer.opt_state[0].mu.wi_0.get_value()
    for array in (after, moment):
        assert jax.typeof(array).sharding.spec == P(None, "expert", None, None)
    assert np.any(after != before) and not np.any(module.gate.bias.get_value())
