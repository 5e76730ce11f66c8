"""Tests of the layer on meshes of every axis type, and in a caller's shard_map."""

from __future__ import annotations

import contextlib
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
from support.dense_moe import BATCH, SEQUENCE, E, F, H, K, assert_close, dense, make_params, make_x
from support.flax_layers import LAYERS, as_dict
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, moe_layer

pytestmark = pytest.mark.usefixtures("exact_matmuls")

SIZES: dict = dict(num_experts=E, num_experts_per_token=K)
CONFIG = MoEConfig(**SIZES)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def typed_mesh(shape, axes, types):
    return Mesh(mesh(shape, axes).devices, axes, axis_types=types)


def loss(params, x, mask=None):
    out, metrics = moe_layer(params, x, CONFIG, mask)
    total = jnp.sum(jnp.sin(out + x)) + metrics.load_balance_loss + metrics.router_z_loss
    return total, (out, metrics)


run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


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


@pytest.mark.parametrize("lead, types, spec", quick(TYPED, "explicit", "not divided"))
def test_explicit_and_mixed_meshes_keep_the_sharding_of_x(lead, types, spec):
    params, x = make_params(), make_x(shape=lead)
    mask = jnp.arange(x.size // H).reshape(lead) % 5 != 1
    want = run(params, x, mask)
    devices = typed_mesh((2, 4), ("data", "expert"), types)
    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, spec))
        got = run(params, x, mask)
        shapes = jax.eval_shape(run, params, x, mask)
    assert_close(got, want)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, want)
    assert jax.typeof(got[0][1][0]).sharding.spec == jax.typeof(x).sharding.spec


SPECS = [(P("expert"), True), (P("expert", None, "model"), True), (P("expert", "model"), False)]


@pytest.mark.parametrize("spec, check_vma", quick(SPECS, SPECS[1]), ids=str)
def test_shard_map_over_some_axes_of_a_mesh_whose_others_are_explicit(spec, check_vma):
    params, x = make_params(), make_x()
    want = run(params, x)
    devices = mesh((4, 2), ("expert", "model"), EXPLICIT)
    layer = jax.shard_map(
        functools.partial(moe_layer, config=CONFIG),
        in_specs=(P(), P("expert")),
        out_specs=(P("expert"), P()),
        axis_names={"expert"},
        check_vma=check_vma,
    )

    def total(params, x):
        out, metrics = layer(params, x)
        scalar = jnp.sum(jnp.sin(out + x)) + metrics.load_balance_loss + metrics.router_z_loss
        return scalar, (out, metrics)

    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, spec))
        got = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)
    assert_close(got, want)


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


def test_callers_tokens_replicated_over_another_axis_count_once():
    out, metrics = in_callers_shard_map("expert", True)
    want, counts = dense(make_params(), make_x())
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    _, metrics = in_callers_shard_map("expert", False, batch_axes="expert")
    np.testing.assert_array_equal(metrics.expert_counts, counts)


def test_callers_tokens_of_which_nothing_is_known_need_batch_axes():
    with pytest.raises(ValueError, match=r"batch_axes must be given .*'data', 'expert'.*check_vma"):
        in_callers_shard_map("expert", False)
    _, metrics = in_callers_shard_map(("data", "expert"), False, batch_axes=("data", "expert"))
    assert metrics.expert_counts.sum() == BATCH * SEQUENCE * K


@pytest.mark.parametrize("changes", [{}, dict(batch_axes=("data", "expert"))], ids=str)
def test_callers_tokens_replicated_over_the_experts_are_refused_by_name(changes):
    with pytest.raises(ValueError, match=r"x must be spread over batch_axes .*\('expert',\)"):
        in_callers_shard_map("data", True, **changes)


def test_a_mesh_beside_another_one_that_is_set_is_refused():
    """A config's mesh other than the mesh that is set must be refused."""
    config = dataclasses.replace(CONFIG, mesh=mesh((8,), ("expert",)))
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        with pytest.raises(ValueError, match=r"mesh must be .*'data': 2.* but is \{'expert': 8\}"):
            jax.eval_shape(lambda x: moe_layer(make_params(), x, config), make_x())


def test_experts_on_a_mesh_that_is_not_set_are_an_error_or_a_warning():
    """Without a mesh, the layer would gather all experts in each call."""
    devices = mesh((8,), ("expert",))
    params, x = make_params(), make_x()

    def on(spec, devices=devices):
        put = NamedSharding(devices, spec)
        return params._replace(wi_0=jax.device_put(params.wi_0, put))

    def layer(params, config=CONFIG):
        return jax.eval_shape(lambda x: moe_layer(params, x, config), x)

    with pytest.raises(ValueError, match=r"wi_0 of .* sharded over expert_axis .* jax\.set_mesh"):
        layer(on(P("expert")))
    with pytest.warns(UserWarning, match=r"wi_0 of .* on a mesh with expert_axis .*set_mesh"):
        jax.eval_shape(lambda params, x: moe_layer(params, x, CONFIG), on(P("expert")), x)
    explicit = mesh((8,), ("expert",), EXPLICIT)
    with pytest.raises(ValueError, match="wi_0 of .* sharded over expert_axis"):
        jax.eval_shape(lambda params, x: moe_layer(params, x, CONFIG), on(P("expert"), explicit), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Replicated experts need no gathering.
        layer(on(P()))
        layer(on(P("expert")), dataclasses.replace(CONFIG, mesh=devices))
        with jax.set_mesh(devices):
            layer(on(P("expert")))


def misspelled(
    name, part, devices, config, wrap=lambda f: f, match="is sharded over", set_mesh=True
):
    """Calls a layer whose option `name` is a wrong axis; asserts that it warns once with `match`.

    `part` are the mesh axes over which wi_0 is really sharded, on the mesh `devices`.
    """
    params = make_params()
    put = NamedSharding(devices, P(*part))
    params = params._replace(wi_0=jax.device_put(params.wi_0, put))
    given = getattr(config, name)
    message = rf"wi_0 .* {match} .*but {name} is .*{given}"
    with jax.set_mesh(devices) if set_mesh else contextlib.nullcontext():
        with pytest.warns(UserWarning, match=message) as found:
            wrap(lambda params, x: moe_layer(params, x, config)[0])(params, make_x())
    assert len(found) == 1


@pytest.mark.parametrize("kind", quick([AUTO, EXPLICIT], AUTO))
def test_experts_sharded_over_another_axis_than_expert_axis_warn(kind):
    """Every rank would gather every expert in each call."""
    devices = mesh((2, 4), ("data", "expert"), kind)
    misspelled("expert_axis", ["expert"], devices, dataclasses.replace(CONFIG, expert_axis="data"))
    of_jit = "is sharded over" if kind == EXPLICIT else "may be sharded over"
    if kind == AUTO:
        config = dataclasses.replace(CONFIG, expert_axis="ep")
        misspelled("expert_axis", ["expert"], devices, config, set_mesh=False)
    # The axis of the experts has a usual name, and the option was left at its default.
    usual = mesh((2, 4), ("data", "ep"), kind)
    misspelled("expert_axis", ["ep"], usual, CONFIG, jax.jit, of_jit)
    swapped = dataclasses.replace(CONFIG, tensor_axis="data")
    devices = mesh((2, 2, 2), ("data", "expert", "tensor"), kind)
    misspelled("tensor_axis", ["expert", None, "tensor"], devices, swapped)


@pytest.mark.parametrize("kind", quick([AUTO, EXPLICIT], AUTO))
@pytest.mark.parametrize("changes", [dict(expert_axis="exprt"), dict(tensor_axis=["tenosr"])])
def test_an_axis_that_the_mesh_lacks_is_refused(changes, kind):
    """A layer must not take an axis that the mesh lacks for one that splits nothing."""
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


def warnings_of(function, *args) -> list[str]:
    """Returns the warnings that a call of a function gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in found]


REPLICATED = r"wi_0 of shape .*replicated on the mesh .*over expert_axis \('expert',\).*\"exp\""


@pytest.mark.parametrize("kind", quick([AUTO, EXPLICIT], AUTO))
@pytest.mark.parametrize("rules", [(("embed", None),), (("exprt", "expert"),), (("exp", None),)])
def test_experts_that_the_rules_replicate_warn_once(rules, kind):
    devices, x = mesh((2, 4), ("data", "expert"), kind), make_x()
    module = jax_ep.linen.MoE(mlp_dim=F, **SIZES)
    specs = nn.get_partition_spec(jax.eval_shape(module.init, jax.random.key(0), x))
    shardings = nn.logical_to_mesh_sharding(specs, devices, rules)
    init = jax.jit(lambda: nn.unbox(module.init(jax.random.key(0), x)), out_shardings=shardings)
    with jax.set_mesh(devices):
        params = init()
        assert not any(params["params"]["wi_0"].sharding.spec)
        (warning,) = warnings_of(lambda: module.apply(params, x))
        assert re.match(REPLICATED, warning)
        if kind == EXPLICIT:
            (warning,) = warnings_of(lambda: jax.jit(module.apply)(params, x))
            assert re.match(REPLICATED, warning)
        if kind == AUTO:
            with nn.logical_axis_rules(rules):
                # `init` makes new arrays, so only the rules say that they will be replicated.
                for run in (lambda: jax.eval_shape(module.init, jax.random.key(0), x),
                            lambda: jax.jit(module.apply)(params, x)):  # fmt: skip
                    (warning,) = warnings_of(run)
                    assert re.match(REPLICATED, warning)

        with nnx.logical_axis_rules(rules):
            layer = jax_ep.nnx.MoE(H, F, **SIZES, rngs=nnx.Rngs(0))
        # Without a rule, an NNX layer splits its experts over expert_axis.
        is_split = rules[0][0] != "exp"
        assert any(layer.wi_0.get_value().sharding.spec) == is_split
        for run in (lambda: layer(x), lambda: nnx.jit(lambda layer, x: layer(x))(layer, x)):
            found = warnings_of(run)
            assert len(found) == (not is_split)
            assert all(re.match(REPLICATED, warning) for warning in found)


def test_columns_that_the_rules_replicate_warn_with_the_experts():
    config = dataclasses.replace(CONFIG, tensor_axis="tensor")
    devices = mesh((4, 2), ("expert", "tensor"))
    params = make_params()
    with jax.set_mesh(devices):
        for spec, named in ((P(), "expert_axis .* or tensor_axis"), (P("expert"), "tensor_axis")):
            on_mesh = params._replace(wi_0=jax.device_put(params.wi_0, spec))
            (warning,) = warnings_of(lambda: moe_layer(on_mesh, make_x(), config))  # noqa: B023
            assert re.search(rf"not sharded over {named} \('tensor',\)", warning)


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
    """A layer must say so if it is given an option that has no effect without a mesh."""
    (name,) = changes
    config, x = dataclasses.replace(CONFIG, **changes), make_x()
    for wrap in (jax.jit, lambda f: f):
        (warning,) = warnings_of(wrap(lambda x: moe_layer(make_params(), x, config)), x)
        assert re.match(rf"{name}=.* has no effect without a mesh: .*set_mesh", warning)
    for layer in LAYERS.values():
        # Layers are often initialized without a mesh.
        made = layer(H, F, **SIZES, **changes)
        (warning,) = warnings_of(jax.jit(made), as_dict(make_params(shared=False)), x)
        assert warning.startswith(name)


def test_an_abstract_mesh_is_refused_as_mesh_but_may_be_ambient():
    """`MoEConfig.mesh` must have devices, unless the layer is only traced on that mesh."""
    abstract = AbstractMesh((4,), ("expert",))
    config, params, x = dataclasses.replace(CONFIG, mesh=abstract), make_params(), make_x()
    refused = functools.partial(pytest.raises, TypeError, match="mesh must be .*AbstractMesh")
    with refused():
        moe_layer(params, x, config)
    with refused():
        float8 = dataclasses.replace(config, matmul_dtype=jnp.float8_e4m3fn)
        jax_ep.quantize_experts(params, float8)
    for layer in LAYERS.values():
        with refused():
            layer(H, F, **SIZES, mesh=abstract).abstract()
    with jax.sharding.use_abstract_mesh(abstract):
        for each in (CONFIG, config):
            out, _ = jax.eval_shape(lambda x: moe_layer(params, x, each), x)  # noqa: B023
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


@pytest.mark.parametrize(
    "axes, kind",
    quick([(("expert",), AUTO), (("expert", "data"), AUTO), (None, EXPLICIT)], (None, EXPLICIT)),
    ids=str,
)
def test_tokens_split_along_the_sequence_stay_where_they_are(axes, kind):
    config = dataclasses.replace(CONFIG, balance_convention="deepseek_v3")
    params, x = make_params(), make_x(shape=(4, 8))
    mask = jnp.arange(32).reshape(4, 8) % 5 > 0

    def step_with(**fields):
        changed = dataclasses.replace(config, **fields)

        def total(params, x):
            out, metrics = moe_layer(params, x, changed, mask)
            return jnp.sum(jnp.sin(out)) + metrics.load_balance_loss, (out, metrics)

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))

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
        moe_layer(make_params(), make_x(), config)
