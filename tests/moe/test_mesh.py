"""Tests of the layer on meshes of every axis type, and in a caller's shard_map."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.dense_moe import (
    BATCH,
    CONFIG,
    SEQUENCE,
    E,
    F,
    H,
    K,
    assert_close,
    dense,
    make_params,
    make_x,
    step_of,
)
from support.flax_layers import LAYERS
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, moe_layer, quantize_experts

pytestmark = pytest.mark.usefixtures("exact_matmuls")

SIZES: dict = dict(num_experts=E, num_experts_per_token=K)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def typed_mesh(shape, axes, types):
    return Mesh(mesh(shape, axes).devices, axes, axis_types=types)


WHOLE = (BATCH, SEQUENCE)
TYPED = {
    "explicit": (WHOLE, (EXPLICIT, EXPLICIT), P("data")),
    "explicit data": (WHOLE, (EXPLICIT, AUTO), P("data")),
    "explicit experts": (WHOLE, (AUTO, EXPLICIT), P()),
    "not divided": ((1, 5), (EXPLICIT, EXPLICIT), P()),
    "not divided, mixed": ((1, 5), (AUTO, EXPLICIT), P()),
    "one token": ((), (EXPLICIT, EXPLICIT), P()),
    "a sharding that the flattening loses": ((2, 3), (EXPLICIT, EXPLICIT), P("data")),
}


@pytest.mark.parametrize("lead, types, spec", quick(TYPED, "not divided, mixed"))
def test_explicit_and_mixed_meshes_keep_the_sharding_of_x(lead, types, spec):
    params, x = make_params(), make_x(shape=lead)
    mask = jnp.arange(x.size // H).reshape(lead) % 5 != 1
    run = step_of(mask=mask)
    want = run(params, x)
    devices = typed_mesh((2, 4), ("data", "expert"), types)
    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, spec))
        got = run(params, x)
        shapes = jax.eval_shape(run, params, x)
    assert_close(got, want)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, want)
    assert jax.typeof(got[0][1][0]).sharding.spec == jax.typeof(x).sharding.spec


SPECS = [(P("expert"), True), (P("expert", None, "model"), True), (P("expert", "model"), False)]


@pytest.mark.slow
@pytest.mark.parametrize("spec, check_vma", SPECS, ids=str)
def test_shard_map_over_some_axes_of_a_mesh_whose_others_are_explicit(spec, check_vma):
    params, x = make_params(), make_x()
    want = step_of()(params, x)
    devices = mesh((4, 2), ("expert", "model"), EXPLICIT)
    layer = jax.shard_map(
        functools.partial(moe_layer, config=CONFIG),
        in_specs=(P(), P("expert")),
        out_specs=(P("expert"), P()),
        axis_names={"expert"},
        check_vma=check_vma,
    )

    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, spec))
        got = step_of(layer=lambda params, x, *_: layer(params, x))(params, x)
    assert_close(got, want)


def warnings_of(function, *args) -> list[str]:
    """Returns the warnings that a call of a function gives, which must be of the caller's line."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(*args)
    assert {warning.filename for warning in found} <= {__file__}
    return [str(warning.message) for warning in found]


def in_callers_shard_map(spec, check_vma, **changes):
    """Runs the layer in a caller's shard_map over a mesh ("data", "expert").

    `spec` names the mesh axes that split the tokens, and `changes` are fields of the configuration.
    """
    layer = jax.shard_map(
        functools.partial(moe_layer, config=dataclasses.replace(CONFIG, **changes)),
        mesh=mesh((2, 4), ("data", "expert")),
        in_specs=(P(), P(spec)),
        out_specs=(P(spec), P()),
        check_vma=check_vma,
    )
    return jax.jit(layer)(make_params(), make_x())


@pytest.mark.slow
def test_callers_tokens_replicated_over_another_axis_count_once():
    out, metrics = in_callers_shard_map("expert", True)
    want, counts = dense(make_params(), make_x())
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    _, metrics = in_callers_shard_map("expert", False, batch_axes="expert")
    np.testing.assert_array_equal(metrics.expert_counts, counts)


@pytest.mark.slow
def test_callers_tokens_of_which_nothing_is_known_need_batch_axes():
    with pytest.raises(ValueError, match=r"batch_axes must be given .*'data', 'expert'.*check_vma"):
        in_callers_shard_map("expert", False)
    _, metrics = in_callers_shard_map(("data", "expert"), False, batch_axes=("data", "expert"))
    assert metrics.expert_counts.sum() == BATCH * SEQUENCE * K


def test_callers_tokens_replicated_over_the_experts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"x must be spread over batch_axes .*\('expert',\)"):
        in_callers_shard_map("data", True)


def test_experts_on_a_mesh_that_is_not_set_are_an_error_or_a_warning():
    """Without a mesh, the layer would gather all experts in each call."""
    devices = mesh((4,), ("expert",))
    params, x = make_params(), make_x()

    def on(spec):
        put = NamedSharding(devices, spec)
        return params._replace(wi_0=jax.device_put(params.wi_0, put))

    def layer(params):
        return jax.eval_shape(lambda x: moe_layer(params, x, CONFIG), x)

    float8 = dataclasses.replace(CONFIG, matmul_dtype=jnp.float8_e4m3fn)
    # The mesh axis may also split another dimension than that of the experts.
    for spec in (P("expert"), P(None, "expert"), P(None, None, "expert")):
        for run in (layer, functools.partial(quantize_experts, config=float8)):
            with pytest.raises(ValueError, match=r"wi_0 .* sharded over \['expert'\].*set_mesh"):
                run(on(spec))
    with pytest.warns(UserWarning, match=r"wi_0 of .* on a mesh with expert_axis .*set_mesh"):
        jax.eval_shape(lambda params, x: moe_layer(params, x, CONFIG), on(P("expert")), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Replicated experts need no gathering.
        layer(on(P()))
        with jax.set_mesh(devices):
            layer(on(P("expert")))


@pytest.mark.parametrize(
    "changes, axes, part",
    [
        (dict(expert_axis="data"), ("data", "expert"), ("expert",)),
        # The axis of the experts has a usual name, and the option was left at its default.
        (dict(), ("data", "ep"), ("ep",)),
        (dict(tensor_axis="data"), ("data", "expert", "tensor"), ("expert", None, "tensor")),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", quick([AUTO, EXPLICIT], AUTO))
def test_experts_sharded_over_another_axis_than_the_option_names_warn(kind, changes, axes, part):
    """Every rank would gather every expert in each call."""
    config, params = dataclasses.replace(CONFIG, **changes), make_params()
    devices = mesh((2, 2, 2)[: len(axes)], axes, kind)
    wi_0 = jax.device_put(params.wi_0, NamedSharding(devices, P(*part)))
    params = params._replace(wi_0=wi_0)
    name = next(iter(changes), "expert_axis")
    with jax.set_mesh(devices):
        if changes:
            run = functools.partial(jax.eval_shape, lambda x: moe_layer(params, x, config)[0])
            (warning,) = warnings_of(run, make_x())
        else:
            # Under jit, the shardings of arrays on Auto axes are unknown.
            run = functools.partial(jax.eval_shape, functools.partial(moe_layer, config=config))
            (warning,) = warnings_of(run, params, make_x())
    assert re.match(rf"wi_0 .* sharded over .*but {name} is .*{getattr(config, name)}", warning)


@pytest.mark.parametrize("kind", quick([AUTO, EXPLICIT], AUTO))
@pytest.mark.parametrize("changes", [dict(expert_axis="exprt"), dict(tensor_axis=["tenosr"])])
def test_an_axis_that_the_mesh_lacks_is_refused(changes, kind):
    ((name, axis),) = changes.items()
    axis = axis if isinstance(axis, str) else axis[0]
    refused = functools.partial(
        pytest.raises, ValueError, match=rf"{name} \('{axis}',\) must name axes of .*'tensor': 2"
    )
    config, x = MoEConfig(**SIZES, **changes), make_x()
    devices = mesh((4, 2), ("expert", "tensor"), kind)
    with jax.set_mesh(devices):
        for wrap in (jax.jit, lambda f: f):
            with refused():
                wrap(lambda params, x: moe_layer(params, x, config))(make_params(), x)
        for layer in LAYERS.values():
            with refused():
                layer(H, F, **SIZES, **changes).abstract()
        with refused():
            jax.shard_map(
                lambda x: moe_layer(make_params(), x, config)[0],
                in_specs=P(("expert", "tensor")),
                out_specs=P(("expert", "tensor")),
            )(jax.device_put(x, P(("expert", "tensor"))))
        # For data parallelism, no axis is named.
        changes = {"expert_axis": ()} if name == "expert_axis" else {"tensor_axis": None}
        jax.eval_shape(lambda x: moe_layer(make_params(), x, MoEConfig(**SIZES, **changes)), x)


@pytest.mark.parametrize("changes", [dict(fsdp_axes={"embed": "dta"}), dict(sequence_axes="sq")])
def test_further_axes_that_the_callers_mesh_lacks_are_refused(changes):
    ((name, axes),) = changes.items()
    missing = next(iter(axes.values())) if isinstance(axes, dict) else axes
    message = rf"{name} must name axes of the mesh .*'data': 2.* but has \['{missing}'\]"
    with pytest.raises(ValueError, match=message):
        in_callers_shard_map(("data", "expert"), True, **changes)
    if name == "fsdp_axes":
        with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
            with pytest.raises(ValueError, match=message):
                LAYERS["nnx"](H, F, **SIZES, **changes).abstract()


REPLICATED = r"wi_0 of shape .*replicated on the mesh .*over expert_axis \('expert',\).*\"exp\""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("rules", [(("exprt", "expert"),), (("exp", None),)])
def test_experts_that_the_rules_replicate_warn_once(rules, kind):
    devices, x = mesh((2, 4), ("data", "expert"), kind), make_x()
    module = jax_ep.linen.MoE(mlp_dim=F, **SIZES)
    specs = nn.get_partition_spec(jax.eval_shape(module.init, jax.random.key(0), x))
    shardings = nn.logical_to_mesh_sharding(specs, devices, rules)
    init = jax.jit(lambda: nn.unbox(module.init(jax.random.key(0), x)), out_shardings=shardings)
    with jax.set_mesh(devices):
        params = init()
        found = warnings_of(module.apply, params, x)
        # Without a rule, an NNX layer splits its experts over expert_axis.
        is_split = rules[0][0] != "exp"
        with nnx.logical_axis_rules(rules):
            if kind == AUTO:
                # `init` makes new arrays, so only the rules say that they will be replicated.
                found += warnings_of(jax.eval_shape, module.init, jax.random.key(0), x)
            layer = jax_ep.nnx.MoE(H, F, **SIZES, rngs=nnx.Rngs(0))
        found += warnings_of(nnx.jit(lambda layer, x: layer(x)), layer, x)
    assert any(layer.wi_0.get_value().sharding.spec) == is_split
    assert len(found) == 1 + (kind == AUTO) + (not is_split)
    assert all(re.match(REPLICATED, warning) for warning in found)


@pytest.mark.parametrize(
    "changes",
    [
        dict(batch_axes=("data", "expert")),
        dict(sequence_axes="expert"),
        dict(fsdp_axes={"exp": "data"}),
        dict(tensor_axis="tensor"),
        dict(host_capacity_factor=0.5),
    ],
    ids=str,
)
def test_an_option_that_needs_a_mesh_warns_without_one(changes):
    (name,) = changes
    config, x = dataclasses.replace(CONFIG, **changes), make_x()
    (warning,) = warnings_of(jax.eval_shape, lambda x: moe_layer(make_params(), x, config), x)
    assert re.match(rf"{name}=.* has no effect without a mesh: .*set_mesh", warning)


def test_a_layer_is_traced_on_an_abstract_mesh():
    x = make_x()
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("expert",))):
        out, _ = jax.eval_shape(lambda x: moe_layer(make_params(), x, CONFIG), x)
    assert out.shape == x.shape


def test_experts_sharded_as_named_or_not_at_all_warn_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for axes in (("data", "expert"), ("data", "model")):
            for kind in (AUTO, EXPLICIT):
                with jax.set_mesh(mesh((2, 4), axes, kind)):
                    for wrap in (jax.jit, lambda f: f):
                        run = wrap(lambda params, x: moe_layer(params, x, CONFIG)[0])
                        jax.eval_shape(run, make_params(), make_x())


@pytest.mark.slow
def test_axis_rules_over_another_axis_than_expert_axis_warn():
    """Under jit the arrays' shardings are unknown, so the rules are looked at."""
    x, rules = make_x(), (("exp", "here"),)
    module = jax_ep.linen.MoE(mlp_dim=F, **SIZES)
    params = module.init(jax.random.key(0), x)
    with jax.set_mesh(mesh((4,), ("here",))), nnx.logical_axis_rules(rules):
        with pytest.warns(UserWarning, match="by the axis rules over .'here',.*'expert'"):
            jax.eval_shape(module.apply, params, x)
        with pytest.warns(UserWarning, match="rules shard .exp. over .'here',.*'expert'"):
            layer = jax_ep.nnx.MoE(H, F, **SIZES, rngs=nnx.Rngs(0))
        with pytest.warns(UserWarning, match="by the axis rules over .'here',.*'expert'"):
            nnx.jit(lambda layer, x: layer(x)[0])(layer, x)


def resharded(text: str) -> list[str]:
    """Returns the lines of a compiled program with collectives outside of dispatch and combine.

    Such collectives move tokens to another sharding. All-reduces, which do not, are left out.
    """
    kinds = r" (all-to-all|collective-permute|all-gather|reduce-scatter)\("
    lines = [line for line in text.splitlines() if re.search(kinds, line)]
    return [line for line in lines if not re.search(r"/(dispatch|combine)/", line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes, kind", [(("expert",), AUTO), (("expert", "data"), AUTO), (None, EXPLICIT)], ids=str
)
def test_tokens_split_along_the_sequence_stay_where_they_are(axes, kind):
    config = dataclasses.replace(CONFIG, balance_convention="deepseek_v3")
    params, x = make_params(), make_x(shape=(4, 8))
    mask = jnp.arange(32).reshape(4, 8) % 5 > 0

    def step_with(**fields):
        return step_of(mask=mask, config=dataclasses.replace(config, **fields))

    want = step_with()(params, x)
    devices = mesh((2, 4), ("data", "expert"), kind)
    sequence = axes or ("expert",)
    spec = P(None if "data" in sequence else "data", sequence)
    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, spec))
        step = step_with(sequence_axes=axes)
        compiled = step.lower(params, x).compile()
        got = step(params, x)
        # Without sequence_axes, the compiled program has such collectives.
        if kind == AUTO:
            assert resharded(step_with().lower(params, x).compile().as_text() or "")
    assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not resharded(compiled.as_text() or "")
    for array in (got[0][1][0], got[1][1]):
        assert array.sharding.is_equivalent_to(NamedSharding(devices, spec), 3)


@pytest.mark.slow
def test_sequences_that_their_axes_do_not_divide_are_moved():
    params, x = make_params(), make_x(shape=(4, 3))
    want, _ = dense(params, x)
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        out = moe_layer(params, x, dataclasses.replace(CONFIG, sequence_axes="expert"))[0]
        tokens = moe_layer(params, x[0], dataclasses.replace(CONFIG, sequence_axes=["expert"]))[0]
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tokens, want[0], rtol=1e-4, atol=1e-5)


def test_sequence_axes_that_hold_no_tokens_are_refused():
    config = dataclasses.replace(CONFIG, batch_axes="expert", sequence_axes="data")
    with (
        jax.set_mesh(mesh((2, 4), ("data", "expert"))),
        pytest.raises(ValueError, match=r"sequence_axes must be among batch_axes \('expert',\)"),
    ):
        jax.eval_shape(lambda x: moe_layer(make_params(), x, config), make_x())
