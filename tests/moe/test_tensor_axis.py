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
from support.dense_moe import BATCH, SEQUENCE, E, H, K, assert_close, make_x, random_params
from support.flax_layers import as_dict
from support.kernels import needs_kernels
from support.meshes import expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, MoEParams, moe_layer
from jax_ep.collectives import table as collectives_table
from jax_ep.moe import tensor_axis
from jax_ep.moe.mesh import LayerMesh
from jax_ep.moe.params import PARAMETERS
from jax_ep.runtime import availability, jax_compat, symmetric_memory
from pallas_kernels.fabric import memory_map

pytestmark = pytest.mark.usefixtures("exact_matmuls")

F, S = 8, 12
CONFIG = MoEConfig(
    num_experts=E,
    num_experts_per_token=K,
    gating=lambda gate, up: jnp.tanh(gate) * (up + 1),
    tensor_axis="tensor",
)
PARTS: dict = dict(shared_dim=S, use_shared_gate=True, use_gate_bias=True, use_mlp_bias=True)
AXES = ("expert", "tensor")
MASK = np.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 5 > 0


# The parameters have every part that a tensor axis splits, and the biases of the experts' outputs,
# which only one of its ranks may add.
make_params = functools.partial(random_params, H, F, **PARTS)


def loss(params, x, mask=MASK, *, layer=moe_layer, config=CONFIG):
    out, metrics = layer(params, x, config, mask)
    total = jnp.sum(jnp.sin(out)) + metrics.load_balance_loss + metrics.router_z_loss
    return total, (out, metrics)


def run(config=CONFIG, layer=moe_layer):
    step = functools.partial(loss, layer=layer, config=config)
    return jax.jit(jax.value_and_grad(step, (0, 1), has_aux=True))(make_params(), make_x())


@functools.cache
def unsharded():
    return jax.device_get(run())


def split_by(*axes: str):
    return dataclasses.replace(CONFIG, batch_axes=axes)


DATA = ("data", *AXES)
MESHES = {
    "replicated tokens": (CONFIG, (4, 2), AXES),
    "split tokens": (split_by(*AXES), (4, 2), AXES),
    "data, replicated tokens": (CONFIG, (2, 2, 2), DATA),
    "data, split tokens": (split_by(*DATA), (2, 2, 2), DATA),
    "no experts' axis": (CONFIG, (4, 2), ("data", "tensor")),
    "two axes": (
        dataclasses.replace(CONFIG, tensor_axis=("a", "b")),
        (2, 2, 2),
        ("expert", "a", "b"),
    ),
    "explicit, replicated tokens": (CONFIG, (4, 2), AXES, AxisType.Explicit),
    "explicit, split tokens": (split_by(*AXES), (4, 2), AXES, AxisType.Explicit),
}


@pytest.mark.parametrize("name", quick([*MESHES], "split tokens"))
def test_on_a_mesh(name):
    config, *on = MESHES[name]
    with jax.set_mesh(mesh(*on)):
        assert_close(run(config), unsharded())


def spec_of(name: str) -> P:
    axes = {"exp": "expert", "mlp": "tensor"}
    return P(*(axes.get(axis) for axis in PARAMETERS[name].logical_axes))


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_a_shard_map(split, check_vma):
    """A rank must compute with the part of the experts that it is given."""
    tokens = P(AXES) if split else P("expert")
    config = split_by(*AXES) if split else split_by("expert")
    params = make_params()
    specs = MoEParams.of(**{n: spec_of(n) for n, a in params._asdict().items() if a is not None})
    layer = jax.shard_map(
        lambda params, x, mask: moe_layer(params, x, config, mask),
        mesh=mesh((4, 2), AXES),
        in_specs=(specs, tokens, tokens),
        out_specs=(tokens, P()),
        check_vma=check_vma,
    )
    got = run(layer=lambda params, x, config, mask: layer(params, x, mask))
    assert_close(got, unsharded())


@pytest.mark.slow
def test_linen_inside_a_shard_map():
    """In a shard_map, Linen's parameters must have the shapes of one rank's parts."""
    params = make_params()
    fields = vars(CONFIG) | dict(batch_axes="expert") | PARTS
    layer = jax_ep.linen.MoE(mlp_dim=F, **fields)
    variables = as_dict(params)
    specs = {n: spec_of(n) for n in variables if n != "gate"} | {"gate": {"kernel": P()}}
    run_on_ranks = jax.shard_map(
        lambda variables, x: layer.apply({"params": variables}, x)[0],
        mesh=mesh((4, 2), AXES),
        in_specs=(specs, P("expert")),
        out_specs=P("expert"),
    )
    want, _ = moe_layer(params, make_x(), CONFIG)
    assert_close(jax.jit(run_on_ranks)(variables, make_x()), want)


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
    devices = mesh((4, 2), AXES)
    given = {n: a for n, a in make_params()._asdict().items() if a is not None}
    params = MoEParams.of(**{
        name: jax.device_put(array, NamedSharding(devices, spec_of(name)))
        for name, array in given.items()
    })  # fmt: skip
    with jax.set_mesh(devices):
        step = jax.jit(jax.grad(lambda p, x: loss(p, x)[0]))
        grads = step(params, make_x())
        hlo = step.lower(params, make_x()).compile().as_text() or ""
    for name in given:
        want = NamedSharding(devices, spec_of(name))
        assert getattr(grads, name).sharding.is_equivalent_to(want, given[name].ndim), name
    assert f"f32[{E // 4},{H},{F // 2}]" in hlo
    assert f"f32[{E // 4},{H},{F}]" not in hlo and f"f32[{E},{H}," not in hlo


def test_nnx_parameters_are_born_split():
    """No rule for "mlp" is needed, on the ambient mesh or the layer's own."""
    devices = mesh((4, 2), AXES)
    sizes = dict(num_experts=E, num_experts_per_token=K, tensor_axis="tensor", **PARTS)
    sizes["kernel_init"] = jax.nn.initializers.zeros
    with jax.set_mesh(devices):
        born = [jax_ep.nnx.MoE(H, F, **sizes, rngs=nnx.Rngs(0))]
    born.append(jax_ep.nnx.MoE(H, F, **sizes, mesh=devices, rngs=nnx.Rngs(0)))
    for module in born:
        for name in ("wi_0", "wo", "wi_0_bias", "wo_bias", "shared_wo", "gate_bias"):
            value = getattr(module, name).get_value()
            want = NamedSharding(devices, spec_of(name))
            assert value.sharding.is_equivalent_to(want, value.ndim), name


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tensor_axis="expert"), "tensor_axis must be another mesh axis than expert_axis"),
        (dict(tensor_axis=("tensor", "x")), r"tensor_axis \('tensor', 'x'\) must name axes"),
        (
            dict(tensor_axis=("tensor", "data"), batch_axes=("expert", "data")),
            r"batch_axes must include all of tensor_axis .* or none .*\('expert', 'data'\)",
        ),
    ],
)
def test_errors_name_the_axis(changes, message):
    with (
        jax.set_mesh(mesh((2, 2, 2), ("data", *AXES))),
        pytest.raises(ValueError, match=message),
    ):
        moe_layer(make_params(), make_x(), dataclasses.replace(CONFIG, **changes))


def test_a_width_that_does_not_divide_is_named():
    params = make_params()._replace(shared_wo=jnp.zeros((9, H)), shared_wi_0=jnp.zeros((H, 9)))
    params = params._replace(shared_wi_1=params.shared_wi_0)
    layer = functools.partial(moe_layer, config=CONFIG)
    with jax.set_mesh(mesh((4, 2), AXES)):
        with pytest.raises(ValueError, match=r"shared_wo must have a width .* 2 ranks .* is 9"):
            jax.eval_shape(layer, params, make_x())
    with jax.set_mesh(mesh((1, 3), AXES)):
        with pytest.raises(ValueError, match=r"wi_0 must have a width .* 3 ranks .* is 8"):
            jax.eval_shape(layer, make_params(), make_x())


RANKS = 2


def mapped(splits_tokens, implementation):
    """Returns a stand-in for a layer that is split over a tensor axis, on a mesh.

    Each tensor rank gets the tokens of all tensor ranks and multiplies them by its own factors. The
    output is the sum of these products over the tensor ranks.
    """
    tokens = P("tensor") if splits_tokens else P()
    there = LayerMesh((), ("tensor",) if splits_tokens else (), None, ("tensor",))

    def outputs(x, ids, weights, factors):
        arrays = x, x, ids, weights
        x, same, ids, weights = tensor_axis.for_all_ranks(arrays, there, implementation)
        assert same is x and ids.dtype == jnp.int32
        part = x * factors * jnp.sum(weights * ids, axis=1, keepdims=True)
        return tensor_axis.sum_over_ranks(part, there, implementation)

    return jax.shard_map(
        outputs,
        mesh=mesh((RANKS,), ("tensor",)),
        in_specs=(tokens, tokens, tokens, P("tensor")),
        out_specs=tokens,
    )


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
@pytest.mark.parametrize("splits_tokens", [True, False])
def test_kernels_run_where_the_table_says_that_they_are_faster(splits_tokens, monkeypatch):
    """The collectives along a tensor axis must be kernels where the table says they are faster."""
    gpus = tuple(symmetric_memory.Gpu(g, g, 0, "", 0, 0) for g in range(RANKS))
    domain = symmetric_memory.Domain(
        memory_map.BASE, memory_map.STRIDE, memory_map.heap_bytes(RANKS), gpus
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(availability, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(symmetric_memory, "domain", lambda: domain)
    monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: None)
    monkeypatch.setattr(jax_compat, "devices_unavailable_reason", lambda: None)
    measured = collectives_table.current()["9.0"]
    monkeypatch.setattr(collectives_table, "current", lambda: {"": measured})
    monkeypatch.setattr(jax_compat, "platform_of_traced_mesh", lambda: "gpu")

    num_tokens = 8 * RANKS if splits_tokens else 8
    x, factors = jnp.ones((num_tokens, H)), jnp.ones((RANKS, H))
    others = jnp.zeros((num_tokens, 2), jnp.int32), jnp.ones((num_tokens, 2)), factors

    def text(implementation):
        def gradient(x, *others):
            run = mapped(splits_tokens, implementation)
            return jax.grad(lambda x: jnp.sum(jnp.sin(run(x, *others))))(x)

        lowered = jax.jit(gradient).trace(x, *others).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    kernels, by_xla = text(None), text("xla")
    moved = ("all_gather", "all_reduce", "reduce_scatter")
    assert kernels.count("@mosaic_gpu") >= 2 and "@mosaic_gpu" not in by_xla
    assert not any(f"stablehlo.{name}" in kernels for name in moved)
    assert any(f"stablehlo.{name}" in by_xla for name in moved)
