"""Tests of the Flax Linen layer: parameters, axes, state, and Linen's transforms."""

from __future__ import annotations

import functools
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.dense_moe import E, F, H, K, S, assert_close, dense, make_params, make_x
from support.flax_layers import as_dict
from support.meshes import expert_mesh, mesh

from jax_ep.linen import MoE
from jax_ep.moe.params import PARAMETERS, MoEParams

pytestmark = pytest.mark.usefixtures("exact_matmuls")

layer: Any = functools.partial(MoE, num_experts=E, num_experts_per_token=K, mlp_dim=F)
LAYER = layer(num_shared_experts=S)


def variables_of(params: MoEParams) -> dict:
    state = {} if params.bias is None else {"router_state": {"gate": {"bias": params.bias}}}
    return {"params": as_dict(params), **state}


def test_init_and_eval_shape_on_an_explicit_mesh_that_does_not_divide_x():
    """`init` must accept a sample whose batch the ranks do not divide, such as a batch of one."""
    x = make_x(shape=(1, 5))
    with jax.set_mesh(mesh((2,), ("expert",), AxisType.Explicit)):
        variables = jax.eval_shape(LAYER.init, jax.random.key(0), x)
        out, metrics = jax.eval_shape(LAYER.apply, variables, x)
    assert nn.unbox(variables)["params"]["wi_0"].shape == (E, H, F)
    assert out.shape == x.shape and metrics.expert_counts.shape == (E,)


@pytest.mark.parametrize("changes", [dict(mlp_dim=7), dict(num_shared_experts=S + 1)], ids=str)
def test_parameters_of_other_sizes_are_refused_with_a_tensor_axis(changes):
    """Only in the caller's shard_map may a parameter hold a part of the columns."""
    variables = variables_of(make_params())
    options = dict(num_shared_experts=S, tensor_axis="tensor")
    with pytest.raises(flax.errors.ScopeParamShapeError, match="expected to generate shape"):
        layer(**options | changes).apply(variables, make_x())


def test_inside_a_shard_map_with_this_ranks_experts_and_columns():
    params, x = make_params(), make_x()
    axes = {"exp": "expert", "mlp": "tensor"}
    own = layer(num_shared_experts=S, tensor_axis="tensor", batch_axes="expert")

    def spec(path, _):
        return P(*(axes.get(axis) for axis in PARAMETERS[path[0].key].logical_axes))

    variables = as_dict(params)
    apply = jax.shard_map(
        lambda params, x: own.apply({"params": params}, x)[0],
        mesh=mesh((4, 2), ("expert", "tensor")),
        in_specs=(jax.tree.map_with_path(spec, variables), P("expert")),
        out_specs=P("expert"),
    )
    out = jax.jit(apply)(variables, x)
    np.testing.assert_allclose(out, dense(params, x)[0], rtol=1e-4, atol=1e-5)


float8 = functools.partial(MoE, 4, 2, 128, matmul_dtype=jnp.float8_e4m3fn)


def test_experts_are_quantized_of_parameters_and_for_float8():
    x = jnp.ones((4, 128))
    with pytest.raises(ValueError, match="quantize_experts needs the layer's parameters"):
        float8().apply({}, method="quantize_experts")
    params = float8().init(jax.random.key(0), x)
    of_one = float8().apply(params, method="quantize_experts")
    of_two = jax.tree.map(lambda a: jnp.stack([a, a]), of_one)
    with pytest.raises(ValueError, match="quantized_experts.wi_0 must have the shape of wi_0"):
        float8().apply(params, x, quantized_experts=of_two)


def scanned(**options):
    """Makes a scan of two layers with a selection bias, with further `options` of nn.scan."""

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            def body(block, x, _):
                out, metrics = block(x)
                return x + out, metrics.load_balance_loss

            body = nn.remat(body, prevent_cse=False)
            scan = nn.scan(body, split_rngs={"params": True}, length=2, **options)
            x, losses = scan(layer(selection_bias=True, name="moe"), x, None)
            return jnp.mean(x**2) + 0.1 * jnp.sum(losses)

    return Scanned()


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "layers"])
def test_a_scan_with_remat_is_a_loop(name):
    """The axis of layers may have a logical name, or none."""
    options = {} if name is None else dict(metadata_params={nn.PARTITION_NAME: name})
    stack = scanned(variable_axes={"params": 0, "router_state": 0}, **options)
    boxed = jax.jit(stack.init)(jax.random.key(0), make_x())
    specs = nn.get_partition_spec(boxed)["params"]["moe"]
    assert specs["wi_0"] == P(name, "exp", "embed", "mlp")
    assert specs["gate"]["kernel"] == P(name, "embed", None)
    variables = nn.unbox(boxed)
    assert variables["router_state"]["moe"]["gate"]["bias"].shape == (2, E)

    def looped(params):
        x, losses = make_x(), 0.0
        for i in range(2):
            own = jax.tree.map(lambda a, i=i: a[i], variables | {"params": params})
            own = {name: tree["moe"] for name, tree in own.items()}
            out, metrics = layer(selection_bias=True).apply(own, x)
            x, losses = x + out, losses + metrics.load_balance_loss
        return jnp.mean(x**2) + 0.1 * losses

    want = jax.jit(jax.value_and_grad(looped))(variables["params"])
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        loss = lambda params: stack.apply(boxed | {"params": params}, make_x())  # noqa: E731
        got = jax.jit(jax.value_and_grad(loss))(boxed["params"])
    assert_close(nn.unbox(got), want)


def test_a_missing_selection_bias_says_what_to_do():
    with pytest.raises(ValueError, match='variable_axes={"params": 0, "router_state": 0}'):
        scanned(variable_axes={"params": 0}).init(jax.random.key(0), make_x())
    variables = variables_of(make_params(shared=False))
    with pytest.raises(ValueError, match='selection_bias=True .*collection "router_state"'):
        layer(selection_bias=True).apply(variables, make_x())


class Owner(nn.Module):
    """A module that updates the selection bias of its layer if a rate is given."""

    @nn.compact
    def __call__(self, x, rate):
        moe_layer = layer(selection_bias=True, name="moe")
        metrics = moe_layer(x)[1]
        if rate is not None:
            moe_layer.update_bias(metrics.expert_counts, rate)
        return np.mean(metrics.expert_counts) - metrics.expert_counts


def test_a_module_may_update_the_selection_bias_in_its_forward_pass():
    variables = variables_of(make_params(shared=False)._replace(bias=jnp.zeros(E)))
    owned = {name: {"moe": tree} for name, tree in variables.items()}
    with jax.set_mesh(expert_mesh(8)):
        for rate in (None, 0.5):
            missing, state = Owner().apply(owned, make_x(), rate, mutable=["router_state"])
            want = (rate or 0) * np.sign(missing)
            np.testing.assert_allclose(state["router_state"]["moe"]["gate"]["bias"], want)
