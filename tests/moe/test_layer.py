"""Tests of `moe_layer` against dense NumPy in float64, and over every kind of mesh."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.dense_moe import (
    BATCH,
    CONFIG,
    SEQUENCE,
    E,
    F,
    H,
    K,
    S,
    assert_close,
    dense,
    loss,
    make_params,
    make_x,
    random_params,
    step_of,
)
from support.kernels import needs_kernels
from support.meshes import RANK_COUNTS, cuda_mesh, expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import reference
from jax_ep.moe import layer as moe
from jax_ep.moe import losses, routing
from jax_ep.moe.config import MoEConfig
from jax_ep.placement import Placement, to_slots

pytestmark = pytest.mark.usefixtures("exact_matmuls")

X = np.zeros((8, H), np.float32)


def config_with(**changes) -> MoEConfig:
    return dataclasses.replace(CONFIG, **changes)


compiled = jax.jit(moe.moe_layer, static_argnums=2)


def run(params, x, **options):
    """Returns ((loss, (output, metrics)), gradients of parameters and x), compiled."""
    return step_of(**options)(params, x)


@functools.cache
def unsharded():
    return jax.device_get(run(make_params(), make_x()))


ROUTERS = [
    (dict(), False),
    (dict(scale=0.5), True),
    (dict(score="sigmoid", scale=2.5), True),
    (dict(score="sigmoid", num_groups=4, groups_kept=2, normalize=False), True),
]


@pytest.mark.parametrize("router, bias", quick(ROUTERS, ROUTERS[-1]), ids=str)
def test_matches_dense_numpy(router, bias):
    params, x = make_params(bias=bias), make_x()
    out, metrics = compiled(params, x, config_with(**router))
    want, counts = dense(params, x, **router)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    assert metrics.num_dropped == 0
    logits = x.reshape(-1, H) @ params.gate
    routed = routing.top_k_routing(logits, K, bias=params.bias, **router)
    balance = losses.load_balance_loss(routed.probs, routed.topk_idx)
    np.testing.assert_allclose(metrics.load_balance_loss, balance, rtol=1e-6)
    np.testing.assert_allclose(metrics.router_z_loss, losses.router_z_loss(logits), rtol=1e-6)


HOSTS = ("node", "expert")
MESHES = {f"{n} ranks": ((n,), ("expert",), {}) for n in RANK_COUNTS} | {
    "data": ((2, 4), ("data", "expert"), {}),
    "no experts' axis": ((8,), ("data",), {}),
    "an axis of others": ((2, 2, 2), ("data", "expert", "tensor"), {}),
    "two axes, and tokens over a part": (
        (2, 2, 2),
        ("node", "tensor", "expert"),
        dict(expert_axis=HOSTS, batch_axes=HOSTS),
    ),
    "ample capacity": ((4,), ("expert",), dict(capacity_factor=2.5)),
}


@pytest.mark.parametrize("shape, axes, changes", quick(MESHES, "8 ranks"))
def test_every_mesh_gives_the_same(shape, axes, changes):
    with jax.set_mesh(mesh(shape, axes)):
        got = run(make_params(), make_x(), config=config_with(**changes))
    assert_close(got, unsharded())


@pytest.mark.slow
def test_a_mesh_of_a_with_statement():
    with pytest.warns(DeprecationWarning), mesh((2, 4), ("data", "expert")):
        got = run(make_params(), make_x())
    assert len(got[0][1][0].sharding.device_set) == 8
    assert_close(got, unsharded())


@pytest.mark.parametrize(
    "experts, check_vma", quick([("own", True), ("own", False), ("all", True)], ("own", True))
)
def test_inside_a_shard_map(experts, check_vma):
    axes = ("data", "expert")
    params, x = make_params(), make_x()
    specs = jax.tree.map(lambda _: P(), params)
    if experts == "own":
        specs = specs._replace(wi_0=P("expert"), wi_1=P("expert"), wo=P("expert"))
    layer = jax.shard_map(
        functools.partial(moe.moe_layer, config=config_with(batch_axes=axes)),
        mesh=mesh((2, 4), axes),
        in_specs=(specs, P(axes)),
        out_specs=(P(axes), P()),
        check_vma=check_vma,
    )

    got = run(params, x, layer=lambda params, x, *_: layer(params, x))
    assert_close(got, unsharded())


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_small_capacity_drops_and_says_so(num_ranks):
    config = config_with(capacity_factor=0.5)
    with jax.set_mesh(expert_mesh(num_ranks)):
        (_, (out, metrics)), grads = run(make_params(), make_x(), config=config)
    counts = np.asarray(metrics.expert_counts)
    # Half of a rank's 96 or 24 rows, rounded up to a multiple of 8.
    rows = {1: 48, 4: 16}[num_ranks]
    per_rank = counts.reshape(num_ranks, -1)
    dropped = [c - np.minimum(c, reference.fair_quota([*c], rows, 1)) for c in per_rank]
    np.testing.assert_array_equal(metrics.dropped_counts, np.concatenate(dropped))
    assert metrics.num_dropped == np.sum(dropped) > 0
    np.testing.assert_array_equal(counts, unsharded()[0][1][1].expert_counts)
    assert np.abs(out - unsharded()[0][1][0]).max() > 1e-2
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


def test_what_is_past_a_host_capacity_is_dropped_and_counted(monkeypatch):
    """A rank of 4 tokens may send 2 of them to the other host."""
    params, x = make_params(shared=False), make_x()
    tokens = x.reshape(-1, H)
    routed = reference.top_k_routing(tokens @ params.gate, K)
    host_of_token = np.arange(BATCH * SEQUENCE) * 2 // (BATCH * SEQUENCE)
    away = routed.topk_idx * 2 // E != host_of_token[:, None]
    number = np.cumsum(away.any(axis=1).reshape(BATCH, SEQUENCE), axis=1).reshape(-1, 1)
    lost = away & (number > 2)
    weights = np.where(lost, 0, routed.topk_weights)
    experts = params.wi_0, params.wi_1, params.wo
    want = reference.moe_layer(tokens, routed.topk_idx, weights, *experts)

    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "4")
    config = config_with(host_capacity_factor=0.5, expert_axis=("host", "expert"))
    with jax.set_mesh(mesh((2, 4), ("host", "expert"))):
        out, metrics = moe.moe_layer(params, x, config)
    dropped = np.bincount(routed.topk_idx[lost], minlength=E)
    np.testing.assert_array_equal(metrics.dropped_counts, dropped)
    assert metrics.num_dropped == np.sum(dropped) > 0
    np.testing.assert_allclose(out.reshape(-1, H), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_compute_with_float32_parameters():
    config = config_with(dtype=jnp.bfloat16)
    with jax.set_mesh(expert_mesh(4)):
        (_, (out, metrics)), grads = run(make_params(), make_x(), config=config)
    assert out.dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    # The router gets float32 tokens, so the choices equal those of the float32 layer.
    (_, (want, want_metrics)), want_grads = unsharded()
    assert_close(metrics, want_metrics)
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.05)
    # Rounding to bfloat16 changes an operand by up to 2^-9 of it; five such changes add up to 1%.
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert np.linalg.norm(got - wanted) <= 0.01 * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_hessian_by_reverse_mode(num_ranks):
    """`jax.jacrev` of a gradient must give the products with a vector that need no batching."""
    params, x = make_params(bias=True), make_x(shape=(2, 1))
    vector = make_x(2, (2, 1))

    def gradient(x):
        return jax.grad(lambda x: loss(params, x)[0])(x)

    with jax.set_mesh(expert_mesh(num_ranks)):
        hessian = jax.jit(jax.jacrev(gradient))(x)
        want = jax.jit(jax.grad(lambda x: jnp.vdot(gradient(x), vector)))(x)
    got = jnp.einsum("abhcdi,abh->cdi", hessian, vector)
    assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradients_repeat_bit_for_bit(implementation):
    parts = dict(use_mlp_bias=True, use_expert_scale=True, use_shared_gate=True)
    params, x = random_params(**parts, num_shared_experts=S), make_x(shape=(64, 32))
    config = config_with(implementation=implementation)
    with jax.set_mesh(expert_mesh(2)):
        step = jax.jit(jax.grad(functools.partial(loss, config=config), (0, 1), has_aux=True))
        first, *others = (jax.device_get(step(params, x)[0]) for _ in range(4))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


FOR_GPUS = [
    dict(),
    dict(token_chunks=2),
    dict(matmul_dtype=jnp.float8_e4m3fn),
    dict(matmul_dtype=jnp.float8_e4m3fn, token_chunks=2),
]


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("options", FOR_GPUS, ids=str)
def test_gradients_lower_for_gpus_in_the_shard_map_of_the_layer(options):
    """Kernels that write to their operands must also take operands with varying axes (vma)."""
    small = cuda_mesh((1, 2), ("data", "expert"))
    config = config_with(dtype=jnp.bfloat16, **options)
    params = jax.eval_shape(functools.partial(random_params, 128, 256))
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), params)
    x = jax.ShapeDtypeStruct((2048, 128), jnp.bfloat16)
    step = jax.grad(functools.partial(loss, config=config), (0, 1), has_aux=True)
    with jax.sharding.use_abstract_mesh(small.abstract_mesh):
        traced = jax.jit(step).trace(params, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") > 8


@pytest.mark.parametrize("shared", quick([False, True], False))
def test_masked_tokens_go_nowhere_and_may_hold_anything(shared):
    """NaN or infinity in masked tokens must reach no gradient and no other token's output."""
    params, x = make_params(shared=shared), make_x()
    mask = np.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 3 > 0

    def total(params, x):
        out, metrics = moe.moe_layer(params, x, CONFIG, mask)
        scalar = jnp.sum(jnp.where(mask[..., None], jnp.sin(out), 0.0))
        return scalar + metrics.load_balance_loss + metrics.router_z_loss, (out, metrics)

    with jax.set_mesh(expert_mesh(4)):
        step = jax.jit(jax.grad(total, (0, 1), has_aux=True))
        grads, (out, metrics) = step(params, jnp.where(mask[..., None], x, 0.0))
        for bad in (jnp.nan, jnp.inf):
            same = step(params, jnp.where(mask[..., None], x, bad))
            assert_close((same[0], same[1][1]), (grads, metrics))
            np.testing.assert_array_equal(same[1][0][mask], out[mask])
    assert_close(metrics, compiled(params, x[mask], CONFIG)[1])
    np.testing.assert_allclose(out[mask], dense(params, x)[0][mask], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[~mask], 0.0)
    np.testing.assert_array_equal(grads[1][~mask], 0.0)


STRICT = [
    dict(score="sigmoid", num_groups=4, groups_kept=2, scale=np.float64(2.5)),
    dict(capacity_factor=0.5, dtype=jnp.bfloat16, num_slots=12),
    dict(constant_experts=2),
]


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("x64", quick([False, True], True))
@pytest.mark.parametrize("changes", STRICT, ids=str)
def test_strict_promotion(changes, x64):
    """A layer must allow strict promotion; with jax_enable_x64, its indices stay int32."""
    config, x = config_with(**changes), make_x().astype(jnp.bfloat16)
    placement, mask = None, np.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) > 4
    params = random_params(num_shared_experts=S, use_expert_scale=True)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    if config.num_slots is not None:
        placement = Placement.in_order(num_experts=E, num_slots=12, num_ranks=4)[0]
        params = to_slots(params, placement)
    if config.constant_experts:
        params = params._replace(
            gate=jnp.ones((H, E + 2), jnp.bfloat16),
            expert_scale=jnp.ones(E + 2, jnp.bfloat16),
            constant_value=jnp.ones((2, H), jnp.bfloat16),
            constant_gate=jnp.ones((2, H, 2), jnp.bfloat16),
        )
    else:
        params = params._replace(bias=jnp.zeros(E))

    def total(params, x):
        out, metrics = moe.moe_layer(params, x, config, mask, placement=placement)
        assert metrics.dropped_counts.dtype == metrics.expert_counts.dtype == jnp.int32
        return jnp.sum(out.astype(jnp.float32)) + metrics.load_balance_loss + metrics.router_z_loss

    with jax.set_mesh(expert_mesh(4)), jax.enable_x64(x64):
        gradients = jax.eval_shape(jax.grad(total), params, x)
    same = jax.tree.map(lambda gradient, param: gradient.dtype == param.dtype, gradients, params)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    "kind", [jax_ep.MoEMetrics, jax_ep.MoEParams, jax_ep.Routing], ids=lambda kind: kind.__name__
)
def test_results_and_parameters_are_registered_for_export(kind):
    """Types that are registered for the serialization of programs cannot be registered again."""
    with pytest.raises(ValueError, match="[Dd]uplicate serialization registration"):
        jax.export.register_namedtuple_serialization(kind, serialized_name="jax_ep.another")


def test_a_symbolic_number_of_tokens_that_ranks_may_not_divide_is_refused():
    batch, quarter = jax.export.symbolic_shape("b, 4*q")
    layer = jax.jit(lambda x: moe.moe_layer(make_params(), x, CONFIG)[0])
    with jax.set_mesh(expert_mesh(4)):
        with pytest.raises(ValueError, match=r"x must have a dimension .* divide .* as 4 \* n"):
            jax.export.export(layer)(jax.ShapeDtypeStruct((batch, H), jnp.float32))
        jax.export.export(layer)(jax.ShapeDtypeStruct((quarter, H), jnp.float32))


@pytest.mark.parametrize(
    "name, value",
    [
        ("capacity_factor", 2.0),
        ("token_chunks", 2),
        ("matmul_implementation", "loop"),
        ("balance_convention", "deepseek_v3"),
    ],
)
def test_what_needs_the_number_of_tokens_refuses_a_symbolic_one(name, value):
    config = config_with(**{name: value})
    (batch,) = jax.export.symbolic_shape("b")
    layer = jax.jit(lambda x: moe.moe_layer(make_params(), x, config)[0])
    with pytest.raises(ValueError, match=f"{name.removeprefix('matmul_')}.*symbolic"):
        jax.export.export(layer)(jax.ShapeDtypeStruct((batch, SEQUENCE, H), jnp.float32))


WITHOUT_TOKENS: dict = {
    "plain": dict(num_groups=4, groups_kept=2),
    "float8": dict(matmul_dtype=jnp.float8_e4m3fn),
    "chunks": dict(capacity_factor=1.0, token_chunks=2, balance_convention="transformers"),
    "sequences": dict(balance_convention="deepseek_v3", record_choices=True),
    "input": dict(weights_on="input", wire_dtype=jnp.float8_e4m3fn),
}


SPLIT = dict(tensor_axis="tensor", batch_axes=("expert", "tensor"))
EMPTY_ON: dict = {
    "no mesh": ((), AxisType.Auto, {}),
    "explicit axes": ((2, 2), AxisType.Explicit, {}),
    "columns and tokens split": ((2, 2), AxisType.Auto, SPLIT),
    "FSDP": ((2, 2), AxisType.Auto, dict(fsdp_axes={"embed": "tensor"})),
}


@pytest.mark.parametrize("shape, kind, axes", quick(EMPTY_ON, "columns and tokens split"))
@pytest.mark.parametrize("lead", quick([(0,), (3, 0), (2, 0, 4)], (3, 0), unpack=False))
@pytest.mark.parametrize("options", quick([*WITHOUT_TOKENS], "chunks"))
def test_without_tokens_output_metrics_and_gradients_are_zero(lead, shape, kind, axes, options):
    if options == "sequences" and len(lead) < 2:
        pytest.skip("the loss of sequences needs sequences")
    config = config_with(**WITHOUT_TOKENS[options], **axes)
    params = random_params(128, 256, num_shared_experts=1, use_mlp_bias=True)
    params = params._replace(bias=jnp.ones(E))

    def step(params, x):
        out, metrics = moe.moe_layer(params, x, config)
        losses = metrics.load_balance_loss + metrics.router_z_loss
        return out.sum() + losses, (out, metrics)

    given = mesh(shape, ("expert", "tensor")[: len(shape)], kind) if shape else None
    with contextlib.nullcontext() if given is None else jax.set_mesh(given):
        compute = jax.jit(jax.grad(step, (0, 1), has_aux=True))
        grads, (out, metrics) = compute(params, jnp.ones((*lead, 128)))
    assert out.shape == grads[1].shape == (*lead, 128)
    assert metrics.topk_idx is None or metrics.topk_idx.shape == (*lead, K)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((grads, metrics)))


OF_SIX = make_params()._replace(gate=np.zeros((H, 6)))


@pytest.mark.parametrize(
    "changes, given, message",
    [
        (dict(num_experts=4), {}, r"gate must have shape \[H, 4\], .*\(16, 8\)"),
        ({}, dict(x=X[:, :5]), r"x must be .*H=16.* \(8, 5\)"),
        ({}, dict(x=X.astype(int)), "x must be a floating array"),
        ({}, dict(mask=np.ones(4, bool)), r"mask must .*\(8, 16\).*\(4,\)"),
        ({}, dict(mask=np.ones(8)), "mask must be a bool or integer .*dtype float64"),
        (dict(batch_axes="data"), {}, r"batch_axes must .*'expert'.* but is \('data',\)"),
        (dict(batch_axes=("expert", "rows")), {}, r"batch_axes must .* \('expert', 'rows'\)"),
        (dict(expert_axis=("expert", "node")), {}, r"expert_axis \('expert', 'node'\) must name"),
        ({}, dict(params=make_params()._replace(wo=np.zeros((4, F, H)))), "wo must hold 8 experts"),
        ({}, dict(params=make_params()._replace(shared_wi_0=None)), "shared_wi_0.* together"),
        (dict(num_experts=6), dict(params=OF_SIX), "num_experts must be a multiple of the 4 .* 6"),
    ],
)
def test_errors_name_the_argument(changes, given, message):
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        with pytest.raises((TypeError, ValueError), match=message):
            moe.moe_layer(**dict(params=make_params(), x=X, config=config_with(**changes)) | given)


def test_an_implementation_without_a_mesh_is_named():
    with pytest.raises(ValueError, match="there is no mesh with that"):
        moe.moe_layer(make_params(), X, config_with(implementation="pallas"))


def test_an_expert_axis_that_the_callers_shard_map_lacks_is_named():
    layer = jax.shard_map(
        lambda x: moe.moe_layer(make_params(), x, CONFIG)[0],
        mesh=mesh((2, 4), ("data", "expert")),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    message = r"expert_axis .* enclosing jax.shard_map.*\('data',\)"
    with pytest.raises(ValueError, match=message):
        layer(X)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [None, 2])
def test_a_layer_runs_where_jit_is_disabled(num_ranks):
    want = unsharded()[0][1]
    ambient = (
        contextlib.nullcontext() if num_ranks is None else jax.set_mesh(expert_mesh(num_ranks))
    )
    with ambient, jax.disable_jit():
        assert_close(moe.moe_layer(make_params(), make_x(), CONFIG), want)


@pytest.mark.slow
@pytest.mark.parametrize("lead, num_ranks", [((8, 4), 8), ((3, 5), 4)])
def test_recorded_choices_are_replayed(lead, num_ranks):
    params, x = make_params(), make_x(shape=lead)
    mask = np.arange(x.shape[0] * x.shape[1]).reshape(lead) % 4 > 0
    config = config_with(record_choices=True)

    @jax.jit
    def step(params, x, topk_idx=None):
        def loss(params):
            out, metrics = moe.moe_layer(params, x, config, mask, topk_idx=topk_idx)
            return jnp.mean(out**2) + metrics.load_balance_loss, (out, metrics)

        (_, outputs), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return outputs, grads

    with jax.set_mesh(expert_mesh(num_ranks)):
        recorded = jax.device_get(step(params, x))
        topk_idx = recorded[0][1].topk_idx
        replayed = jax.device_get(step(params, x, topk_idx))
        others = params._replace(gate=params.gate[:, ::-1])
        (_, metrics), _ = jax.device_get(step(others, x, topk_idx))
        (_, own), _ = jax.device_get(step(others, x))
    jax.tree.map(np.testing.assert_array_equal, replayed[0], recorded[0])
    assert_close(replayed[1], recorded[1])
    want = routing.top_k_routing(x.reshape(-1, H) @ params.gate, K).topk_idx.reshape(*lead, K)
    np.testing.assert_array_equal(topk_idx, np.where(mask[..., None], want, -1))
    np.testing.assert_array_equal(metrics.topk_idx, topk_idx)
    assert np.any(own.topk_idx != topk_idx)


PARTS = ("router", "dispatch", "experts", "combine", "shared_experts")
SHARED: dict = dict(num_shared_experts=1)
NAMED = {
    "plain": SHARED,
    "remat": SHARED,
    "float8": SHARED | dict(matmul_dtype=jnp.float8_e4m3fn),
    "chunks": dict(token_chunks=2, use_mlp_bias=True),
    "free experts": dict(zero_experts=1, identity_experts=1, constant_experts=1),
    "columns split": SHARED | dict(tensor_axis="data"),
    "weighted input": dict(weights_on="input", capacity_factor=1.5),
    "FSDP": dict(fsdp_axes={"exp": "data", "embed": "data"}),
}


EVEN, PADDED = (4, 8), (3, 5)
OPERATIONS = [(case, lead) for case in NAMED for lead in (EVEN, PADDED)]


@pytest.mark.slow
@pytest.mark.parametrize("case, lead", OPERATIONS)
def test_almost_every_operation_has_the_name_of_its_part(case, lead):
    """Of a gradient's operations that compute, 99 % must have a part."""
    options = NAMED[case]
    module = jax_ep.linen.MoE(mlp_dim=256, num_experts=E, num_experts_per_token=K, **options)
    x = jax.ShapeDtypeStruct((*lead, 128), jnp.float32)
    mask = jax.ShapeDtypeStruct(lead, jnp.bool_)

    def total(variables, x, mask):
        out, metrics = module.apply(variables, x, mask)
        return jnp.sum(out**2) + metrics.load_balance_loss + metrics.router_z_loss

    if case == "remat":
        total = jax.checkpoint(total)
    variables = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    with jax.set_mesh(mesh((2, 2), ("data", "expert"))):
        step = jax.jit(jax.value_and_grad(total, (0, 1)))
        text = step.lower(variables, x, mask).compile().as_text() or ""
    counts, found = collections.Counter(), set()
    for line in text.splitlines():
        name = re.search(r'op_name="([^"]*MoE[^"]*)"', line)
        if name is None or re.search(r" (constant|broadcast|parameter)\(", line):
            continue
        parts = re.findall(r"\w+", name[1])
        found |= {(part, "transpose" in name[1]) for part in parts if part in PARTS}
        is_named = {*PARTS, "free_experts", "metrics", "token_chunks"} & set(parts)
        counts["" if is_named else name[1]] += 1
        if case in ("plain", "remat") and lead == EVEN:
            moves = r" (dot|all-to-all|all-gather|all-reduce|reduce-scatter)\("
            assert is_named or not re.search(moves, line), line
    named = counts.pop("")
    assert named > 1000 and sum(counts.values()) <= 0.01 * named, counts
    expected = PARTS if options.keys() >= SHARED.keys() else PARTS[:-1]
    assert found >= {(part, backward) for part in expected for backward in (False, True)}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels run there")
def test_a_matmul_backend_that_cannot_run_is_said_by_the_layers_option():
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), random_params(128, 128))
    for dtype in (jnp.bfloat16, jnp.float32):  # refused where it is lowered, and where it is traced
        operands = jax.tree.map(lambda w, dtype=dtype: w.astype(dtype), params)
        with pytest.raises(ValueError, match='matmul_implementation="pallas"'):
            compiled(
                operands, jnp.ones((4, 128), dtype), config_with(matmul_implementation="pallas")
            )
