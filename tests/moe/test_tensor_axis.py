"""Tests of experts whose F is split over a mesh axis, against the layer without a mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import dense_moe
from support.dense_moe import BATCH, SEQUENCE, E, H, K, assert_close, make_x, random_params
from support.kernels import needs_kernels
from support.meshes import expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, MoEParams, moe_layer
from jax_ep.moe.params import PARAMETERS

pytestmark = pytest.mark.usefixtures("exact_matmuls")

F, S = 8, 12
CONFIG = MoEConfig(
    num_experts=E,
    num_experts_per_token=K,
    activation=lambda gate, up: jnp.tanh(gate) * (up + 1),
    tensor_axis="tensor",
)
PARTS: dict = dict(shared_dim=S, use_shared_gate=True, use_gate_bias=True, use_mlp_bias=True)
AXES = ("expert", "tensor")
MASK = np.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 5 > 0


# The parameters have every part that a tensor axis splits, and the biases of the experts' outputs,
# which only one of its ranks may add.
make_params = functools.partial(random_params, H, F, **PARTS)


loss = functools.partial(dense_moe.loss, mask=MASK, config=CONFIG)


def run(config=CONFIG, **options):
    return dense_moe.step_of(mask=MASK, config=config, **options)(make_params(), make_x())


@functools.cache
def unsharded():
    return jax.device_get(run())


def split_by(*axes: str):
    return dataclasses.replace(CONFIG, batch_axes=axes)


DATA = ("data", *AXES)
TWO_AXES = dataclasses.replace(CONFIG, tensor_axis=("a", "b"))
MESHES = {
    "replicated tokens": (CONFIG, (4, 2), AXES),
    "split tokens": (split_by(*AXES), (4, 2), AXES),
    "data, replicated tokens": (CONFIG, (2, 2, 2), DATA),
    "data, split tokens": (split_by(*DATA), (2, 2, 2), DATA),
    "no experts' axis": (CONFIG, (4, 2), ("data", "tensor")),
    "two axes": (TWO_AXES, (2, 2, 2), ("expert", "a", "b")),
    "explicit, replicated tokens": (CONFIG, (4, 2), AXES, AxisType.Explicit),
    "explicit, split tokens": (split_by(*AXES), (4, 2), AXES, AxisType.Explicit),
}


@pytest.mark.parametrize("name", quick([*MESHES], "split tokens"))
def test_on_a_mesh(name):
    config, *on = MESHES[name]
    with jax.set_mesh(mesh(*on)):
        assert_close(run(config), unsharded())


def specs_of(params) -> MoEParams:
    axes = {"exp": "expert", "mlp": "tensor"}
    return MoEParams.of(**{
        name: P(*(axes.get(axis) for axis in PARAMETERS[name].logical_axes))
        for name, array in params._asdict().items()
        if array is not None
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, split_by(*AXES)], ids=["replicated", "split"])
def test_drops_are_those_of_the_experts_alone(config):
    tight = dict(capacity_factor=0.6, tensor_axis=None, batch_axes=None)
    with jax.set_mesh(expert_mesh(4)):
        want = run(dataclasses.replace(config, **tight))
    with jax.set_mesh(mesh((4, 2), AXES)):
        got = run(dataclasses.replace(config, capacity_factor=0.6))
    assert want[0][1][1].num_dropped > 0
    assert_close(jax.device_get(got), jax.device_get(want))


@pytest.mark.slow
def test_columns_and_their_gradients_stay_where_they_are():
    devices, params = mesh((4, 2), AXES), make_params()
    where = jax.tree.map(lambda spec: NamedSharding(devices, spec), specs_of(params))
    with jax.set_mesh(devices):
        step = jax.jit(jax.grad(lambda p, x: loss(p, x)[0]), in_shardings=(where, None))
        compiled = step.lower(params, make_x()).compile()
    grads = compiled.output_shardings
    stay = jax.tree.map(lambda g, want, p: g.is_equivalent_to(want, p.ndim), grads, where, params)
    assert all(jax.tree.leaves(stay)), stay
    hlo = compiled.as_text() or ""
    assert f"f32[{E // 4},{H},{F // 2}]" in hlo
    assert f"f32[{E // 4},{H},{F}]" not in hlo and f"f32[{E},{H}," not in hlo


def test_nnx_parameters_are_born_split():
    """No rule for "mlp" is needed."""
    devices = mesh((4, 2), AXES)
    options = dict(num_experts=E, num_experts_per_token=K, tensor_axis="tensor", **PARTS)
    options["kernel_init"] = jax.nn.initializers.zeros
    with jax.set_mesh(devices):
        module = jax_ep.nnx.MoE(H, F, **options, rngs=nnx.Rngs(0))
    for name, spec in specs_of(make_params())._asdict().items():
        if spec is not None and name != "gate":
            value, want = getattr(module, name).get_value(), NamedSharding(devices, spec)
            assert value.sharding.is_equivalent_to(want, value.ndim), name


PART = dict(tensor_axis=("tensor", "data"), batch_axes=("expert", "data"))
NINE = {"shared_wo": (9, H), "shared_wi_0": (H, 9), "shared_wi_1": (H, 9)}


@pytest.mark.parametrize(
    "shape, changes, shapes, message",
    [
        ((2, 2, 2), dict(tensor_axis="expert"), {}, "tensor_axis must be another mesh axis than"),
        ((2, 2, 2), dict(tensor_axis=("tensor", "x")), {}, r"tensor_axis \('tensor', 'x'\) must"),
        ((2, 2, 2), PART, {}, r"batch_axes must include all of tensor_axis .* or none"),
        ((1, 4, 2), {}, NINE, r"shared_wo must have a width .* 2 ranks .* is 9"),
        ((1, 1, 3), {}, {}, r"wi_0 must have a width .* 3 ranks .* is 8"),
    ],
)
def test_errors_name_the_argument(shape, changes, shapes, message):
    params = make_params()._replace(**{name: jnp.zeros(each) for name, each in shapes.items()})
    with jax.set_mesh(mesh(shape, DATA)), pytest.raises(ValueError, match=message):
        moe_layer(params, make_x(), dataclasses.replace(CONFIG, **changes))


# Where the kernels cannot run, all collectives are XLA's.
@needs_kernels
@pytest.mark.parametrize("splits_tokens", [True, False])
def test_collectives_along_the_axis_are_those_that_the_implementation_allows(splits_tokens):
    config = split_by(*AXES) if splits_tokens else CONFIG
    names = ("ep_all_gather", "ep_reduce_scatter") if splits_tokens else ("ep_all_reduce",)
    for implementation in (None, "xla"):
        named = dataclasses.replace(config, implementation=implementation)
        step = jax.grad(functools.partial(loss, config=named), has_aux=True)
        with jax.set_mesh(mesh((4, 2), AXES)):
            program = str(jax.make_jaxpr(step)(make_params(), make_x()))
        for name in names:
            assert (name in program) == (implementation is None), name
