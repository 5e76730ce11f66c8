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
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.dense_moe import BATCH, SEQUENCE, E, F, H, K, assert_close, dense, make_params, make_x
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, moe_layer

CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Sets exact float32 matmuls, since GPUs round float32 operands to fewer bits by default."""
    with jax.default_matmul_precision("float32"):
        yield


def typed_mesh(shape, axes, types):
    # This skips the test if there are fewer devices.
    mesh(shape, axes)
    return jax.make_mesh(shape, axes, axis_types=types)


def loss(params, x, mask=None):
    out, metrics = moe_layer(params, x, CONFIG, mask)
    total = jnp.sum(jnp.sin(out + x)) + metrics.load_balance_loss + metrics.router_z_loss
    return total, (out, metrics)


run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize(
    "lead, types",
    quick(
        [
            ((BATCH, SEQUENCE), (EXPLICIT, AUTO)),
            ((BATCH, SEQUENCE), (AUTO, EXPLICIT)),
            ((1, 5), (EXPLICIT, EXPLICIT)),
            ((1, 5), (AUTO, EXPLICIT)),
            ((), (EXPLICIT, EXPLICIT)),
        ],
        ((1, 5), (EXPLICIT, EXPLICIT)),
    ),
    ids=str,
)
def test_explicit_and_mixed_meshes_whatever_the_leading_dimension(lead, types):
    params, x = make_params(), make_x(shape=lead)
    want = run(params, x)
    devices = typed_mesh((2, 4), ("data", "expert"), types)
    spec = P("data") if types[0] == EXPLICIT and lead == (BATCH, SEQUENCE) else P()
    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, spec))
        got = run(params, x)
        shapes = jax.eval_shape(run, params, x)
    assert_close(got, want)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, want)
    assert jax.typeof(got[0][1][0]).sharding.spec == jax.typeof(x).sharding.spec


@pytest.mark.slow
def test_explicit_mesh_with_a_mask_and_a_sharding_that_the_flattening_loses():
    params, x = make_params(), make_x(shape=(2, 3))
    mask = jnp.asarray([[True, False, True], [True, True, False]])
    want = run(params, x, mask)
    devices = typed_mesh((2, 4), ("data", "expert"), (EXPLICIT, EXPLICIT))
    with jax.set_mesh(devices):
        got = run(params, jax.device_put(x, NamedSharding(devices, P("data"))), mask)
    assert_close(got, want)


@pytest.mark.parametrize(
    "spec, check_vma",
    quick(
        [(P("expert"), True), (P("expert", None, "model"), True), (P("expert", "model"), False)],
        (P("expert", None, "model"), True),
    ),
    ids=str,
)
def test_shard_map_over_some_axes_of_a_mesh_whose_others_are_explicit(spec, check_vma):
    params, x = make_params(), make_x()
    want = run(params, x)
    devices = typed_mesh((4, 2), ("expert", "model"), (EXPLICIT, EXPLICIT))
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

    Args:
        spec: the mesh axes that split the tokens.
        check_vma: an argument of the shard_map.
        **changes: fields of the configuration that differ from the usual.

    Returns:
        The output and the metrics.
    """
    layer = jax.shard_map(
        functools.partial(moe_layer, config=MoEConfig(**vars(CONFIG) | changes)),
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
    """A layer must raise an error or warn if its experts are sharded over a mesh that is not set.

    Without a mesh, the layer would gather all experts in each call.
    """
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
    explicit = typed_mesh((8,), ("expert",), (EXPLICIT,))
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
    """Calls a layer with a wrong mesh axis in its configuration; asserts that it warns once.

    Args:
        name: the field of the configuration with the wrong axis, such as "expert_axis".
        part: the mesh axes over which wi_0 is really sharded.
        devices: the mesh.
        config: the configuration.
        wrap: a transformation of the layer, such as jax.jit.
        match: a part of the warning.
        set_mesh: whether the mesh is set by jax.set_mesh.
    """
    params = make_params()
    put = NamedSharding(devices, P(*part))
    params = params._replace(wi_0=jax.device_put(params.wi_0, put))
    given = getattr(config, name)
    with jax.set_mesh(devices) if set_mesh else contextlib.nullcontext():
        with pytest.warns(
            UserWarning, match=rf"wi_0 .* {match} .*but {name} is .*{given}"
        ) as found:
            wrap(lambda params, x: moe_layer(params, x, config)[0])(params, make_x())
    assert len(found) == 1


@pytest.mark.parametrize("kind", quick([AUTO, EXPLICIT], AUTO))
def test_experts_sharded_over_another_axis_than_expert_axis_warn(kind):
    """Experts sharded over another axis than expert_axis must cause a warning.

    Every rank would gather every expert in each call.
    """
    devices = mesh((2, 4), ("data", "expert"), kind)
    config = dataclasses.replace(CONFIG, expert_axis="ep")
    misspelled("expert_axis", ["expert"], devices, config)
    misspelled("expert_axis", ["expert"], devices, dataclasses.replace(config, expert_axis="data"))
    of_jit = "is sharded over" if kind == EXPLICIT else "may be sharded over"
    misspelled("expert_axis", ["expert"], devices, config, jax.jit, of_jit)
    if kind == AUTO:
        misspelled("expert_axis", ["expert"], devices, config, set_mesh=False)
    # The axis of the experts has a usual name, and the option was left at its default.
    usual = mesh((2, 4), ("data", "ep"), kind)
    misspelled("expert_axis", ["ep"], usual, CONFIG, jax.jit, of_jit)
    tensor = dataclasses.replace(CONFIG, tensor_axis="tenosr")
    devices = mesh((2, 4), ("tensor", "expert"), kind)
    misspelled("tensor_axis", ["expert", None, "tensor"], devices, tensor)
    misspelled("tensor_axis", ["expert", None, "tensor"], devices, tensor, jax.jit, of_jit)


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
    """A Flax layer must warn if axis rules shard its experts over another axis than expert_axis.

    Under jit the arrays' shardings are unknown, so the rules are looked at.
    """
    sizes = dict(num_experts=E, num_experts_per_token=K, expert_axis="ep")
    x, rules = make_x(), (("exp", "experts_here"),)
    module = jax_ep.linen.MoE(mlp_dim=F, **sizes)
    params = module.init(jax.random.key(0), x)
    with jax.set_mesh(mesh((4,), ("experts_here",))), nnx.logical_axis_rules(rules):
        with pytest.warns(UserWarning, match="by the axis rules over .'experts_here',.*'ep'"):
            jax.eval_shape(module.apply, params, x)
        with pytest.warns(UserWarning, match="rules shard .exp. over .'experts_here',.*'ep'"):
            layer = jax_ep.nnx.MoE(H, F, **sizes, rngs=nnx.Rngs(0))
        with pytest.warns(UserWarning, match="by the axis rules over .'experts_here',.*'ep'"):
            nnx.jit(lambda layer, x: layer(x)[0])(layer, x)


def resharded(text: str) -> list[str]:
    """Returns the lines of a compiled program with collectives outside of dispatch and combine.

    Such collectives move tokens to another sharding. All-reduces, which do not, are left out.
    """
    kinds = r" (all-to-all|collective-permute|all-gather|reduce-scatter)\("
    lines = [line for line in text.splitlines() if re.search(kinds, line)]
    return [line for line in lines if not re.search(r"/(dispatch|combine)/", line)]


@pytest.mark.parametrize(
    "axes, shape, types",
    quick(
        [
            (("expert",), (2, 4), (AUTO, AUTO)),
            (("expert", "data"), (2, 4), (AUTO, AUTO)),
            (None, (2, 4), (EXPLICIT, EXPLICIT)),
        ],
        (None, (2, 4), (EXPLICIT, EXPLICIT)),
    ),
    ids=str,
)
def test_tokens_split_along_the_sequence_stay_where_they_are(axes, shape, types):
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
    devices = typed_mesh(shape, ("data", "expert"), types)
    sequence = axes or ("expert",)
    spec = P(None if "data" in sequence else "data", sequence)
    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, spec))
        step = step_with(sequence_axes=axes)
        compiled = step.lower(params, x).compile()
        got = step(params, x)
        # Without sequence_axes, the compiled program has such collectives.
        if types[0] == AUTO:
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
