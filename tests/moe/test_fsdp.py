"""Tests of parameters split over further axes (FSDP): gathered, with gradients scattered."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.dense_moe import (
    CONFIG,
    E,
    F,
    H,
    K,
    assert_close,
    loss,
    make_x,
    random_params,
    step_of,
    weight_shapes,
)
from support.flax_layers import LAYERS
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEParams, linen, moe_layer
from jax_ep.moe.params import LOGICAL_AXES
from jax_ep.placement import Placement, to_experts, to_slots

pytestmark = pytest.mark.usefixtures("exact_matmuls")

PARTS: dict = dict(shared_dim=8, use_shared_gate=True, use_mlp_bias=True)
BF16 = dataclasses.replace(CONFIG, dtype=jnp.bfloat16, fsdp_axes={"embed": "fsdp"})
AXES = ("fsdp", "expert")


def shardings(params: MoEParams, devices, axes) -> MoEParams:
    """Returns shardings in which a logical axis has the mesh axes that `axes` gives it.

    Mesh axes of a parameter split only the first dimension that they are given to.
    """

    def spec(name: str) -> P:
        used, parts = set(), []
        for logical in LOGICAL_AXES[name]:
            named = axes.get(logical) or ()
            own = {named} if isinstance(named, str) else {*named}
            parts.append(None if own & used else named or None)
            used |= own
        return P(*parts)

    return MoEParams.of(**{
        name: NamedSharding(devices, spec(name))
        for name, array in params._asdict().items()
        if array is not None
    })  # fmt: skip


@functools.cache
def unsharded():
    return jax.device_get(step_of()(random_params(**PARTS), make_x()))


THREE = (2, 2, 2)
WITH_TENSOR = (*AXES, "tensor")
TENSOR: dict = {"tensor_axis": "tensor"}
CASES: dict = {
    "embed": ((4, 2), AXES, {"embed": "fsdp"}, {}),
    "mlp": ((2, 4), AXES, {"mlp": "fsdp"}, {}),
    "experts, and H of others": ((2, 4), AXES, {"exp": "fsdp", "embed": "fsdp"}, {}),
    "two axes, and copies": (THREE, ("data", *AXES), {"embed": ["fsdp", "data"]}, {}),
    "with a tensor axis": (THREE, WITH_TENSOR, {"mlp": "fsdp"}, TENSOR),
    "split tokens": (THREE, WITH_TENSOR, {"embed": "fsdp"}, TENSOR | {"batch_axes": WITH_TENSOR}),
}


@pytest.mark.parametrize("shape, axes, fsdp_axes, fields", quick(CASES, "embed"))
def test_results_are_those_without_a_mesh(shape, axes, fsdp_axes, fields):
    config = dataclasses.replace(CONFIG, fsdp_axes=fsdp_axes, **fields)
    devices = mesh(shape, axes)
    params = random_params(**PARTS)
    base = {"exp": ("expert",), "mlp": ("tensor",) if "tensor" in axes else ()}
    split = base | {k: (*base.get(k, ()), *config.fsdp_axes_by_logical()[k]) for k in fsdp_axes}
    where = shardings(params, devices, split)
    with jax.set_mesh(devices):
        got = step_of(config=config)(jax.device_put(params, where), make_x())
    assert_close(got, unsharded(), rtol=1e-4, atol=1e-5)


def collectives(text: str, kind: str) -> list[str]:
    """Returns the sorted result types of all collectives of a kind in a StableHLO text."""
    found = re.findall(rf'"stablehlo\.{kind}"\(.*? : \(tensor[^)]*\) -> (\S+)', text, re.DOTALL)
    return sorted(found)


def types(dtype: str, *shapes: tuple[int, ...]) -> list[str]:
    """Returns the types of arrays as StableHLO writes them, sorted."""
    return sorted(f"tensor<{'x'.join(map(str, shape))}x{dtype}>" for shape in shapes)


@pytest.mark.slow
def test_bfloat16_is_gathered_and_gradients_are_scattered():
    """The lowered program shows the dtypes, since XLA for CPUs moves bfloat16 as float32."""
    devices = mesh((2, 4), AXES)
    params = random_params(shared_dim=8)
    where = shardings(params, devices, {"exp": "expert", "embed": "fsdp"})
    of_tokens = NamedSharding(devices, P(AXES))
    with jax.set_mesh(devices):
        run = jax.checkpoint(functools.partial(loss, config=BF16))
        step = jax.jit(
            jax.value_and_grad(run, (0, 1), has_aux=True),
            out_shardings=(None, (where, of_tokens)),
        )
        lowered = step.lower(jax.device_put(params, where), jax.device_put(make_x(), of_tokens))
    text = lowered.as_text()
    own, half = E // 4, H // 2
    matrices = [(own, H, F)] * 2 + [(own, F, H)]
    weights = [t for t in collectives(text, "all_gather") if f"{H}" in t and "bf16" in t]
    # jax.checkpoint gathers again in the backward pass.
    assert weights == sorted(types("bf16", *matrices, (H, 8), (H, 8), (8, H)) * 2)
    # The gate's gradient is scattered, too.
    scattered = [(own, half, F)] * 2 + [(own, F, half), (half, 8), (half, 8), (8, half), (half, E)]
    assert collectives(text, "reduce_scatter") == types("f32", *scattered)

    # Outside the layer's shard_map, XLA must add no collective of parameters or tokens.
    hlo = lowered.compile().as_text() or ""
    moved = re.findall(r"= (\S+|\(.*?\)) (all-\S+|reduce-scatter|collective-permute)\(", hlo)
    whole = (f"[{own},{H},{F}]", f"[{own},{F},{H}]", f"[{own},{half},{F}]")
    of_experts = [kind for result, kind in moved if any(shape in result for shape in whole)]
    assert "all-reduce" not in of_experts
    assert not [kind for _, kind in moved if kind == "collective-permute"]
    # XLA for CPUs may merge gathers that remat repeats.
    assert 3 <= of_experts.count("all-gather") <= 3 * 2


@pytest.mark.slow
@pytest.mark.parametrize("split", ["embed", "exp"])
def test_slots_with_copies(split):
    params, x = random_params(), make_x()
    config = dataclasses.replace(CONFIG, num_slots=16, fsdp_axes={split: "fsdp"})
    placement = Placement.in_order(num_experts=E, num_slots=16, num_ranks=4)[0]
    with jax.set_mesh(mesh((2, 4), AXES)):
        step = step_of(config=config, placement=placement)
        (_, (out, _)), (dslots, dx) = step(to_slots(params, placement), x)
    dparams = to_experts(dslots, placement)
    (_, (want, _)), want_grads = jax.device_get(step_of()(params, x))
    assert_close((out, dparams, dx), (want, *want_grads), rtol=1e-4, atol=1e-5)
    # Copies of an expert must have equal gradients.
    np.testing.assert_array_equal(to_slots(dparams, placement).wi_0, dslots.wi_0)


@pytest.mark.slow
def test_float8_values_are_gathered_and_the_bits_are_the_same():
    params, x = random_params(256, 128), make_x(1, hidden=256)
    quantizing = dataclasses.replace(BF16, matmul_dtype=jnp.float8_e4m3fn, fsdp_axes={})
    gathering = dataclasses.replace(quantizing, fsdp_axes={"embed": "fsdp"})
    with jax.set_mesh(mesh((2, 2), AXES)):
        want = step_of(config=quantizing)(params, x)
        got = step_of(config=gathering)(params, x)
        text = step_of(config=gathering).lower(params, x).as_text()
        # Experts that are quantized beforehand are split, too.
        quantized = jax.jit(lambda p: jax_ep.quantize_experts(p, gathering))(params)
        layer = jax.jit(lambda p, q, x: moe_layer(p, x, gathering, quantized_experts=q)[0])
        out = layer(params, quantized, x)
    assert_close(got[0], want[0], rtol=0, atol=0)
    np.testing.assert_array_equal(out, got[0][1][0])
    assert "fsdp" in quantized.wi_0.matrices.values.sharding.spec
    # The two programs sum the ranks' gradients in different dtypes, bfloat16 and float32.
    assert_close(got[1], want[1], rtol=2e-2, atol=2e-2)
    own = E // 2
    gathered = [t for t in collectives(text, "all_gather") if t.count("x") == 3 and "128" in t]
    assert gathered == types("f8E4M3FN", (own, 128, 256), *[(own, 256, 128)] * 2)
    assert f"tensor<{own}x128x128xf32>" in collectives(text, "reduce_scatter")


RULES = (("embed", "fsdp"), ("exp", "expert"), ("mlp", None))


def gathers(text: str) -> bool:
    return f"tensor<{E // 4}x{H}x{F}xbf16>" in collectives(text, "all_gather")


def test_linen_layer_follows_the_rules_in_force():
    layer = linen.MoE(E, K, F, dtype=jnp.bfloat16)
    x = make_x()
    with jax.set_mesh(mesh((2, 4), AXES)):
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        whole_experts = [("exp", ("expert", "fsdp")), ("embed", "fsdp")]
        for rules, found in ((RULES, True), (RULES[1:], False), (whole_experts, True)):
            with nn.logical_axis_rules(rules):
                assert gathers(jax.jit(layer.apply).lower(params, x).as_text()) == found
        off = layer.clone(fsdp_axes={})
        with nn.logical_axis_rules(RULES):
            assert not gathers(jax.jit(off.apply).lower(params, x).as_text())


@pytest.mark.slow
def test_rules_may_split_parameters_without_experts_over_all_ranks():
    """The gate must then be gathered over both axes, and its gradient be scattered."""
    layer = linen.MoE(E, K, F, num_shared_experts=1)
    rules = [("exp", ("expert", "fsdp")), ("embed", ("fsdp", "expert"))]
    boxed = layer.init(jax.random.key(0), make_x())
    specs, params = nn.get_partition_spec(boxed), nn.unbox(boxed)
    total = lambda params: jnp.sum(jnp.sin(layer.apply(params, make_x())[0]))  # noqa: E731
    want = jax.grad(total)(params)
    with jax.set_mesh(devices := mesh((2, 4), AXES)), nn.logical_axis_rules(rules):
        where = nn.logical_to_mesh_sharding(specs, devices, rules)
        step = jax.jit(jax.grad(total), out_shardings=where)
        text = step.lower(jax.device_put(params, where)).as_text()
        got = step(jax.device_put(params, where))
    assert types("f32", (H, E))[0] in collectives(text, "all_gather")
    assert types("f32", (H // 8, E))[0] in collectives(text, "reduce_scatter")
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def nnx_layer(**options):
    sizes: dict = dict(num_experts=E, num_experts_per_token=K, dtype=jnp.bfloat16)
    return jax_ep.nnx.MoE(H, F, **sizes | options, rngs=nnx.Rngs(0))


def text_of(layer) -> str:
    """Returns the lowered program of an NNX layer."""
    graph, state = nnx.split(layer)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0]).lower(state, make_x()).as_text()


def parts(param) -> tuple[int, ...]:
    """Returns into how many parts each dimension of a parameter of an NNX layer is split."""
    array = param.get_value()
    shard = array.sharding.shard_shape(array.shape)
    return tuple(a // b for a, b in zip(array.shape, shard, strict=True))


OF_EXPERTS, OF_OTHERS = ("exp", ("expert", "fsdp")), ("embed", "fsdp")
ORDERED, BOTH = [OF_EXPERTS, OF_OTHERS], {"exp": "fsdp", "embed": "fsdp"}
WHOLE_EXPERTS = (8, 1, 1), (8, 1, 1), (2, 1)
# Rules, fsdp_axes, and into how many parts each dimension of wi_0, wo and the gate is split. Both
# may give a mesh axis to several dimensions, of which the first is split. The first rule that names
# an axis takes it.
NNX: dict = {
    "rules": (RULES, None, (4, 2, 1), (4, 1, 2), (2, 1)),
    "fsdp_axes": ([], {"embed": "fsdp"}, (4, 2, 1), (4, 1, 2), (2, 1)),
    "an axis twice in both": (ORDERED, BOTH, *WHOLE_EXPERTS),
    "an axis in each": ([OF_OTHERS], BOTH, *WHOLE_EXPERTS),
    "order of rules": ([("mlp", "fsdp"), *RULES[:2]], None, (4, 1, 2), (4, 2, 1), (2, 1)),
}


@pytest.mark.parametrize("rules, fsdp_axes, wi_0, wo, gate", NNX.values(), ids=NNX)
def test_nnx_layer_is_created_split_and_remembers_the_rules(rules, fsdp_axes, wi_0, wo, gate):
    devices = mesh((2, 4), AXES)
    with jax.set_mesh(devices):
        with nnx.logical_axis_rules(rules):
            layer = nnx_layer(fsdp_axes=fsdp_axes)
            for spec in jax.tree.leaves(nnx.get_partition_spec(nnx.state(layer))):
                NamedSharding(devices, spec)  # raises an error if the spec repeats an axis
        split = [parts(param) for param in (layer.wi_0, layer.wo, layer.gate.kernel)]
        assert split == [wi_0, wo, gate]
        assert gathers(text_of(layer))


EXPERT_LAST = [("exp", ("fsdp", "expert")), OF_OTHERS]


@pytest.mark.parametrize(
    "rules, message",
    [
        (EXPERT_LAST, r"must come first.*Write \('expert', 'fsdp'\) in"),
        ([OF_OTHERS, OF_EXPERTS], "no axis rule splits wi_0"),
    ],
    ids=["the expert axis of a rule", "the rule of experts"],
)
def test_what_must_come_first_is_told(rules, message):
    layer = linen.MoE(E, K, F, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh((2, 4), AXES)):
        params = jax.eval_shape(layer.init, jax.random.key(0), make_x())
        with nnx.logical_axis_rules(rules), pytest.warns(UserWarning, match=message):
            jax.eval_shape(layer.apply, params, make_x())


@pytest.mark.parametrize("framework", LAYERS)
def test_rules_that_contradict_fsdp_axes_are_refused(framework):
    """Otherwise the parameters, created by the rules, would be moved in each call."""
    options = dict(num_experts=E, num_experts_per_token=K)
    with jax.set_mesh(mesh((2, 4), AXES)), nnx.logical_axis_rules([("exp", "expert")]):
        (params, _), _ = LAYERS[framework](H, F, **options).abstract()
        layer = LAYERS[framework](H, F, **options, fsdp_axes={"exp": "fsdp"})
        message = r"agree with the axis rules, but splits 'exp' of wi_0 over .*, and the rules over"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(layer, params, make_x())


@pytest.mark.slow
def test_types_show_explicit_axes():
    devices = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Explicit,) * 2)
    params = random_params(**PARTS)
    where = shardings(params, devices, {"exp": "expert", "mlp": "fsdp"})
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    with jax.set_mesh(devices):
        params = jax.device_put(params, where)
        step = step_of(config=config)
        assert gathers(step.lower(params, make_x()).as_text())
        grads = step(params, make_x())[1][0]
    assert grads.wi_0.sharding.spec == where.wi_0.spec


@pytest.mark.parametrize(
    "fsdp_axes, fields, match",
    [
        ({"embed": "rows"}, {}, r"fsdp_axes must name axes of the mesh .*'rows'"),
        ({"embed": "expert"}, {}, "other mesh axes than expert_axis"),
        ({"mlp": "fsdp"}, {"tensor_axis": "fsdp"}, "other mesh axes than tensor_axis"),
        ({"exp": ("fsdp", "data"), "embed": "fsdp"}, {}, "the same mesh axes, or different ones"),
        ({"vocab": "fsdp"}, {}, 'must map "exp", "embed" or "mlp", but maps \'vocab\''),
        ({"embed": "fsdp"}, {"batch_axes": "expert"}, "over which the tokens are spread"),
        ({"mlp": "fsdp"}, {}, r"'mlp' of wi_0 \(8, 16, 15\) has 15, and 2 ranks"),
        ({"exp": "fsdp"}, {"num_experts": 12}, "'exp' of wi_0 .* has 12, and 8 ranks"),
        ("fsdp", {}, "fsdp_axes must be None or map logical axes"),
    ],
)
def test_axes_that_do_not_fit_are_refused(fsdp_axes, fields, match):
    config = dataclasses.replace(CONFIG, fsdp_axes=fsdp_axes, **fields)
    number = config.num_experts
    shapes = {"gate": (H, number)} | weight_shapes(number, H, 15)
    params = MoEParams.of(**{name: jnp.zeros(shape) for name, shape in shapes.items()})
    error = TypeError if fsdp_axes == "fsdp" else ValueError
    with jax.set_mesh(mesh((2, 4), AXES)), pytest.raises(error, match=match):
        moe_layer(params, make_x(), config)


def test_in_the_callers_shard_map_the_caller_gathers():
    layer = jax.shard_map(
        lambda params, x: moe_layer(params, x, dataclasses.replace(BF16, batch_axes=AXES))[0],
        in_specs=(P(), P(AXES)),
        out_specs=P(AXES),
    )
    with jax.set_mesh(mesh((2, 4), AXES)), pytest.raises(ValueError, match="fsdp_axes must not"):
        layer(random_params(), make_x())


def test_matrices_that_are_not_split_over_the_fsdp_axes_warn_once():
    params, devices = random_params(), mesh((4, 2), AXES)
    config = dataclasses.replace(CONFIG, fsdp_axes={"embed": "fsdp"})
    by_rules = {"exp": "expert", "embed": "fsdp"}
    # With a misspelled rule of "embed", each rank along "fsdp" holds a copy.
    for axes, messages in (({"exp": "expert"}, ["holds a copy"]), (by_rules, [])):
        held = jax.tree.map(jax.device_put, params, shardings(params, devices, axes))
        with jax.set_mesh(devices), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            jax.eval_shape(lambda x, held=held: moe_layer(held, x, config), make_x())
        assert len(found) == len(messages)
        for warning, message in zip(found, messages, strict=True):
            assert re.search(rf"^wi_0 .*over \['fsdp'\].*{message}", str(warning.message))
