"""Tests of `moe_layer` against dense NumPy in float64, and over every kind of mesh."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.dense_moe import (
    BATCH,
    SEQUENCE,
    E,
    F,
    H,
    K,
    S,
    assert_close,
    dense,
    make_params,
    make_x,
    weight_shapes,
)
from support.kernels import needs_kernels
from support.meshes import RANK_COUNTS, cuda_mesh, expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import reference
from jax_ep.moe import layer as moe
from jax_ep.moe import losses, routing
from jax_ep.moe import params as moe_params
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams
from jax_ep.placement import Placement, to_slots

CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)


compiled = jax.jit(moe.moe_layer, static_argnums=2)


def loss(params, x, mask=None, *, config=CONFIG):
    """Returns a scalar that depends on all outputs, and (output, metrics)."""
    out, metrics = moe.moe_layer(params, x, config, mask)
    scalar = jnp.mean(out**2) + metrics.load_balance_loss + 0.1 * metrics.router_z_loss
    return scalar, (out, metrics)


def run(params, x, mask=None, *, config=CONFIG):
    """Returns ((loss, (output, metrics)), gradients of parameters and x), compiled."""
    step = jax.value_and_grad(functools.partial(loss, config=config), (0, 1), has_aux=True)
    return jax.jit(step)(params, x, mask)


@functools.cache
def unsharded():
    return jax.device_get(run(make_params(), make_x()))


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Sets exact float32 matmuls, since GPUs round float32 operands to fewer bits by default."""
    with jax.default_matmul_precision("float32"):
        yield


ROUTERS = [
    (dict(), False),
    (dict(scale=0.5), True),
    (dict(score="sigmoid", scale=2.5), True),
    (dict(score="sigmoid", num_groups=4, groups_kept=2, normalize=False), True),
]


@pytest.mark.parametrize("router, bias", quick(ROUTERS, ROUTERS[-1]), ids=str)
def test_matches_dense_numpy(router, bias):
    params, x = make_params(bias=bias), make_x()
    config = MoEConfig(num_experts=E, num_experts_per_token=K, expert_alignment=8, **router)
    out, metrics = compiled(params, x, config)
    want, counts = dense(params, x, **router)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    assert metrics.num_dropped == 0


@pytest.mark.slow
def test_metrics_are_those_of_routing():
    params, x = make_params(), make_x()
    _, metrics = compiled(params, x, CONFIG)
    logits = x.reshape(-1, H) @ params.gate
    routed = routing.top_k_routing(logits, K)
    want = losses.load_balance_loss(routed.probs, routed.topk_idx)
    np.testing.assert_allclose(metrics.load_balance_loss, want, rtol=1e-6)
    np.testing.assert_allclose(metrics.router_z_loss, losses.router_z_loss(logits), rtol=1e-6)


@pytest.mark.parametrize("num_ranks", quick(RANK_COUNTS, 8))
def test_every_rank_count_gives_the_same(num_ranks):
    with jax.set_mesh(expert_mesh(num_ranks)):
        got = run(make_params(), make_x())
    assert_close(got, unsharded())


MESHES = [
    ((2, 4), ("data", "expert")),
    ((8,), ("data",)),
    ((2, 2, 2), ("data", "expert", "tensor")),
]


@pytest.mark.parametrize("shape, axes", MESHES)
@pytest.mark.slow
def test_meshes_of_several_axes_and_of_none_for_experts(shape, axes):
    with jax.set_mesh(mesh(shape, axes)):
        got = run(make_params(), make_x())
    assert_close(got, unsharded())


@pytest.mark.slow
def test_experts_over_two_axes_and_tokens_over_a_part_of_the_mesh():
    config = MoEConfig(
        num_experts=E,
        num_experts_per_token=K,
        expert_axis=("node", "expert"),
        batch_axes=("node", "expert"),
    )
    with jax.set_mesh(mesh((2, 2, 2), ("node", "tensor", "expert"))):
        got = run(make_params(), make_x(), config=config)
    assert_close(got, unsharded())


@pytest.mark.parametrize("way", ["attribute", "with statement"])
@pytest.mark.slow
def test_mesh_without_set_mesh(way):
    devices = mesh((2, 4), ("data", "expert"))
    if way == "attribute":
        config = MoEConfig(num_experts=E, num_experts_per_token=K, mesh=devices)
        got = run(make_params(), make_x(), config=config)
    else:
        with pytest.warns(DeprecationWarning), devices:
            got = run(make_params(), make_x())
    assert len(got[0][1][0].sharding.device_set) == 8
    assert_close(got, unsharded())


@pytest.mark.parametrize("spec", quick([P(), P("data")], P("data"), unpack=False), ids=str)
def test_explicit_axes_keep_the_sharding_of_x(spec):
    if len(jax.devices()) < 8:
        pytest.skip(f"needs 8 devices, this machine has {len(jax.devices())}")
    devices = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(devices):
        x = jax.device_put(make_x(), NamedSharding(devices, spec))

        @jax.jit
        def residual_loss(params, x):
            value, (out, _) = loss(params, x)
            assert jax.typeof(out).sharding.spec == jax.typeof(x).sharding.spec
            return value + 0 * jnp.sum(x + out)

        value, grads = jax.value_and_grad(residual_loss, (0, 1))(make_params(), x)
    (want_value, _), want_grads = unsharded()
    assert_close((value, grads), (want_value, want_grads))


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

    def total(params, x):
        out, metrics = layer(params, x)
        scalar = jnp.mean(out**2) + metrics.load_balance_loss + 0.1 * metrics.router_z_loss
        return scalar, (out, metrics)

    got = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)
    assert_close(got, unsharded())


def test_inside_a_shard_map_of_a_mesh_without_the_expert_axis():
    layer = jax.shard_map(
        functools.partial(moe.moe_layer, config=CONFIG),
        mesh=expert_mesh(4, "data"),
        in_specs=(P(), P("data")),
        out_specs=(P("data"), P()),
    )
    assert_close(jax.jit(layer)(make_params(), make_x()), unsharded()[0][1])


@pytest.mark.slow
def test_expert_weights_and_their_gradients_stay_where_they_are():
    devices = mesh((2, 4), ("data", "expert"))
    split = NamedSharding(devices, P("expert"))
    params = make_params()
    params = params._replace(
        **{name: jax.device_put(getattr(params, name), split) for name in ("wi_0", "wi_1", "wo")}
    )
    with jax.set_mesh(devices):
        _, (grads, _) = run(params, make_x())
        hlo = jax.jit(loss).lower(params, make_x()).compile().as_text() or ""
    assert grads.wi_0.sharding.is_equivalent_to(split, 3)
    assert f"f32[{E},{H},{F}]" not in hlo and f"f32[{E // 4},{H},{F}]" in hlo


@pytest.mark.parametrize("shape", quick([(), (3,), (5, 1, 2)], (), (3,), unpack=False), ids=str)
def test_any_number_of_tokens_on_eight_ranks(shape):
    params, x = make_params(), make_x(shape=shape)
    want, counts = dense(params, x)
    with jax.set_mesh(expert_mesh(8)):
        out, metrics = compiled(params, x, CONFIG)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)


def test_masked_tokens_go_nowhere_and_count_nowhere():
    params, x = make_params(shared=False), make_x()
    mask = np.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 3 > 0
    _, want = compiled(params, np.asarray(x)[mask], CONFIG)
    want_out, _ = dense(params, x)
    with jax.set_mesh(expert_mesh(4)):
        (_, (out, metrics)), (_, dx) = run(params, x, mask)
    assert_close(metrics, want)
    np.testing.assert_allclose(out[mask], want_out[mask], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[~mask], 0.0)
    np.testing.assert_array_equal(dx[~mask], 0.0)


@pytest.mark.parametrize(
    ("factor", "alignment", "rows"), [(1.1, 1, 36048), (1.1, 24, 36792), (1.0, 128, 36864)]
)
def test_a_receive_buffer_is_of_whole_tiles(factor, alignment, rows):
    """The number of rows of a receive buffer must be a multiple of 8.

    The matmul kernels' row tiles begin at multiples of 8 rows. A buffer of another number of rows
    would have to be copied for them.
    """
    config = MoEConfig(
        num_experts=256,
        num_experts_per_token=8,
        capacity_factor=factor,
        expert_alignment=alignment,
    )
    assert moe.receive_capacity(config, num_tokens=4096, num_ranks=8) == rows


@pytest.mark.parametrize("num_ranks", quick([1, 4], 4))
def test_small_capacity_drops_and_says_so(num_ranks):
    config = MoEConfig(num_experts=E, num_experts_per_token=K, capacity_factor=0.5)
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
    """Choices past a host's capacity must count as dropped and add nothing to the output.

    A rank of 4 tokens may send 2 of them to the other host.
    """
    params, x = make_params(shared=False), make_x()
    gate, wi_0, wi_1, wo = (
        np.asarray(a) for a in (params.gate, params.wi_0, params.wi_1, params.wo)
    )
    tokens = np.asarray(x).reshape(-1, H)
    routed = reference.top_k_routing(tokens @ gate, K)
    host_of_token = np.arange(BATCH * SEQUENCE) * 2 // (BATCH * SEQUENCE)
    away = routed.topk_idx * 2 // E != host_of_token[:, None]
    number = np.cumsum(away.any(axis=1).reshape(BATCH, SEQUENCE), axis=1).reshape(-1, 1)
    lost = away & (number > 2)
    weights = np.where(lost, 0, routed.topk_weights)
    want = reference.moe_layer(tokens, routed.topk_idx, weights, wi_0, wi_1, wo)

    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "4")
    config = dataclasses.replace(CONFIG, host_capacity_factor=0.5, expert_axis=("host", "expert"))
    with jax.set_mesh(mesh((2, 4), ("host", "expert"))):
        out, metrics = moe.moe_layer(params, x, config)
    dropped = np.bincount(routed.topk_idx[lost], minlength=E)
    np.testing.assert_array_equal(metrics.dropped_counts, dropped)
    assert metrics.num_dropped == np.sum(dropped) > 0
    np.testing.assert_allclose(out.reshape(-1, H), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ample_capacity_factor_drops_nothing():
    config = MoEConfig(
        num_experts=E, num_experts_per_token=K, capacity_factor=2.5, expert_alignment=4
    )
    with jax.set_mesh(expert_mesh(4)):
        got = run(make_params(), make_x(), config=config)
    assert_close(got, unsharded())


@pytest.mark.parametrize("k, alignment", quick([(1, 1), (3, 8), (E, 1)], (3, 8)))
def test_dropless_holds_the_worst_routing(k, alignment):
    """Without a limit, nothing may be dropped even if all tokens choose the experts of one rank."""
    params = make_params()._replace(gate=jnp.zeros((H, E)))
    config = MoEConfig(num_experts=E, num_experts_per_token=k, expert_alignment=alignment)
    with jax.set_mesh(expert_mesh(4)):
        _, (_, metrics) = jax.jit(functools.partial(loss, config=config))(params, make_x())
    np.testing.assert_array_equal(metrics.expert_counts, [BATCH * SEQUENCE] * k + [0] * (E - k))
    assert metrics.num_dropped == 0


@pytest.mark.slow
def test_bfloat16_compute_with_float32_parameters():
    config = MoEConfig(num_experts=E, num_experts_per_token=K, dtype=jnp.bfloat16)
    with jax.set_mesh(expert_mesh(4)):
        (_, (out, metrics)), grads = run(make_params(), make_x(), config=config)
    assert out.dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    # The router gets float32 tokens, so the choices equal those of the float32 layer.
    (_, (want, want_metrics)), want_grads = unsharded()
    assert_close(metrics, want_metrics)
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.05)
    assert_close(grads, want_grads, rtol=0.1, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_tokens_in_float8_on_the_wire(num_ranks):
    """With float8 on the wire, output and gradient must be near those without, but not equal."""
    hidden, mlp_dim = 256, 32
    keys = jax.random.split(jax.random.key(0), 6)
    x, g = (jax.random.normal(key, (16, hidden)) for key in keys[:2])
    shapes = weight_shapes(E, hidden, mlp_dim) | {"gate": (hidden, E)}
    params = moe_params.MoEParams(**{
        name: jax.random.normal(key, shape) / shape[-2] ** 0.5
        for key, (name, shape) in zip(keys[2:], shapes.items(), strict=True)
    })  # fmt: skip
    with jax.set_mesh(expert_mesh(num_ranks)):

        def results(wire_dtype):
            config = dataclasses.replace(CONFIG, wire_dtype=wire_dtype)
            return jax.jit(jax.vjp, static_argnums=0)(
                lambda x: moe.moe_layer(params, x, config)[0], x
            )

        (out, pull), (plain, plain_pull) = results(jnp.float8_e4m3fn), results(None)
        grad, plain_grad = pull(g)[0], plain_pull(g)[0]
    # The router gets the unrounded tokens, so the choices are equal.
    for got, want in ((out, plain), (grad, plain_grad)):
        error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
        assert 0 < error < 0.1


@pytest.mark.slow
def test_dtype_none_promotes():
    low = make_x().astype(jnp.bfloat16)
    assert moe.moe_layer(make_params(), low, CONFIG)[0].dtype == jnp.float32
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), make_params())
    assert moe.moe_layer(params, low, CONFIG)[0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_checkpoint_and_scan():
    """Two layers in a scan with remat must agree with a plain loop over them."""
    layers = [make_params(seed) for seed in (0, 7)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    policy = jax.checkpoint_policies.save_only_these_names("dispatched_tokens")

    def body(x, params):
        out, metrics = moe.moe_layer(params, x, CONFIG)
        return x + out, metrics.load_balance_loss

    def scanned(stacked, x):
        x, losses = jax.lax.scan(jax.checkpoint(body, policy=policy), x, stacked)
        return jnp.mean(x**2) + jnp.sum(losses)

    def looped(layers, x):
        losses = []
        for params in layers:
            x, balance = body(x, params)
            losses.append(balance)
        return jnp.mean(x**2) + sum(losses)

    want, (want_layers, want_dx) = jax.jit(jax.value_and_grad(looped, (0, 1)))(layers, make_x())
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        got, (grads, dx) = jax.jit(jax.value_and_grad(scanned, (0, 1)))(stacked, make_x())
    assert_close(
        (got, grads, dx), (want, jax.tree.map(lambda *a: jnp.stack(a), *want_layers), want_dx)
    )


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradients_repeat_bit_for_bit(implementation):
    """The gradients of all kinds of parameters must have the same bits in every run."""
    parts = dict(
        use_mlp_bias=True, use_expert_scale=True, num_shared_experts=S, use_shared_gate=True
    )
    rng = np.random.default_rng(6)
    weights = {
        name: jnp.asarray(rng.normal(scale=0.3, size=shape), jnp.float32)
        for name, shape in {"gate": (H, E), **weight_shapes(E, H, F, **parts)}.items()
    }
    x = make_x(shape=(64, 32))
    config = dataclasses.replace(CONFIG, implementation=implementation)
    with jax.set_mesh(expert_mesh(2)):
        step = jax.jit(jax.grad(functools.partial(loss, config=config), (0, 1), has_aux=True))
        first, *others = (jax.device_get(step(MoEParams.of(**weights), x)[0]) for _ in range(4))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


FOR_GPUS = [
    dict(),
    dict(token_chunks=2),
    dict(matmul_dtype=jnp.float8_e4m3fn),
    dict(matmul_dtype=jnp.float8_e4m3fn, token_chunks=2),
]


@needs_kernels
@pytest.mark.parametrize("options", quick(FOR_GPUS, *FOR_GPUS[1:3], unpack=False), ids=str)
def test_gradients_lower_for_gpus_in_the_shard_map_of_the_layer(options):
    """Kernels that write to their operands must also take operands with varying axes (vma)."""
    small, sizes = cuda_mesh((1, 2), ("data", "expert")), dict(num_experts=8, hidden=128)
    config = config_with(mesh=small, dtype=jnp.bfloat16, **options)
    shapes = {"gate": (128, 8), **weight_shapes(**sizes, mlp_dim=256)}
    params = MoEParams.of(**{k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()})
    x = jax.ShapeDtypeStruct((2048, 128), jnp.bfloat16)
    step = jax.grad(functools.partial(loss, config=config), (0, 1), has_aux=True)
    with jax.sharding.use_abstract_mesh(small.abstract_mesh):
        traced = jax.jit(step).trace(params, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") > 8


@pytest.mark.slow
def test_gradients_against_differences_of_dense_numpy():
    params, x = make_params(bias=True), make_x(shape=(2, 2))
    mix = np.random.default_rng(3).normal(size=x.shape)
    grads, dx = jax.grad(lambda p, x: jnp.sum(moe.moe_layer(p, x, CONFIG)[0] * mix), (0, 1))(
        params, x
    )
    rng, eps = np.random.default_rng(4), 1e-5
    for name, grad in (*grads._asdict().items(), ("x", dx)):
        if grad is None:
            continue
        at = np.asarray(x if name == "x" else getattr(params, name), np.float64)
        direction = rng.normal(size=at.shape)

        def value(step, name=name, at=at, direction=direction):
            moved = at + step * direction
            p = params if name == "x" else params._replace(**{name: moved})
            return np.sum(dense(p, moved if name == "x" else x)[0] * mix)

        want = 0.0 if name == "bias" else (value(eps) - value(-eps)) / (2 * eps)
        got = np.sum(np.asarray(grad, np.float64) * direction)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("shared", quick([False, True], True))
def test_masked_tokens_may_hold_anything(shared):
    """NaN or infinity in masked tokens must reach no gradient and no other token's output."""
    params, x = make_params(shared=shared), make_x()
    mask = jnp.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 3 > 0

    def total(params, x):
        out, metrics = moe.moe_layer(params, x, CONFIG, mask)
        scalar = jnp.sum(jnp.where(mask[..., None], jnp.sin(out), 0.0))
        return scalar + metrics.load_balance_loss + metrics.router_z_loss

    step = jax.jit(jax.value_and_grad(total, (0, 1)))
    want = step(params, jnp.where(mask[..., None], x, 0.0))
    for bad in (jnp.nan, jnp.inf):
        assert_close(step(params, jnp.where(mask[..., None], x, bad)), want)


STRICT = [
    dict(),
    dict(score="sigmoid", num_groups=4, groups_kept=2, scale=np.float64(2.5)),
    dict(capacity_factor=0.5, expert_alignment=4, dtype=jnp.bfloat16),
]


@pytest.mark.parametrize("changes", quick(STRICT, STRICT[-1]), ids=str)
def test_strict_promotion(changes):
    """Strict promotion must give the same program, with every optional part and bfloat16 tokens."""
    config = MoEConfig(**vars(CONFIG) | changes)
    params, x = make_params(bias=True), make_x().astype(jnp.bfloat16)
    mask = jnp.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) > 4

    def total(params, x):
        out, metrics = moe.moe_layer(params, x, config, mask)
        return jnp.sum(out.astype(jnp.float32)) + metrics.load_balance_loss + metrics.router_z_loss

    step = jax.jit(jax.value_and_grad(total))
    with jax.set_mesh(expert_mesh(4)):
        want = step.lower(params, x).as_text()
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            assert step.lower(params, x).as_text() == want


WITH_INDICES = [dict(), dict(num_slots=12), dict(constant_experts=2)]


@pytest.mark.parametrize("changes", quick(WITH_INDICES, WITH_INDICES[1]), ids=str)
def test_strict_promotion_with_64_bits(changes):
    """Strict promotion must work with jax_enable_x64, although the layer's indices stay int32."""
    config, x = MoEConfig(**vars(CONFIG) | changes), make_x().astype(jnp.bfloat16)
    placement = None
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), make_params(shared=False))
    if config.num_slots is not None:
        placement = Placement.in_order(num_experts=E, num_slots=12, num_ranks=4)[0]
        params = moe.MoEParams(**to_slots(params._asdict(), placement))
    if config.constant_experts:
        params = params._replace(
            gate=jnp.ones((H, E + 2), jnp.bfloat16),
            constant_value=jnp.ones((2, H), jnp.bfloat16),
            constant_gate=jnp.ones((2, H, 2), jnp.bfloat16),
        )

    def total(params, x):
        out, metrics = moe.moe_layer(params, x, config, placement=placement)
        assert metrics.dropped_counts.dtype == metrics.expert_counts.dtype == jnp.int32
        return jnp.sum(out.astype(jnp.float32)) + metrics.load_balance_loss

    with (
        jax.set_mesh(expert_mesh(4)),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        gradients = jax.eval_shape(jax.grad(total), params, x)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    "kind", [jax_ep.MoEMetrics, jax_ep.MoEParams, jax_ep.Routing], ids=lambda kind: kind.__name__
)
def test_results_and_parameters_are_registered_for_export(kind):
    """The types of results and parameters must be registered for the serialization of programs.

    So registering one again must fail. A real export would need the package flatbuffers.
    """
    with pytest.raises(ValueError, match="[Dd]uplicate serialization registration"):
        jax.export.register_namedtuple_serialization(kind, serialized_name="jax_ep.another")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", [{}, dict(num_groups=2, groups_kept=1)], ids=str)
def test_the_number_of_tokens_may_be_symbolic(options, biased):
    config = MoEConfig(num_experts=E, num_experts_per_token=K, **options)
    params = make_params()._replace(bias=jnp.arange(E) % 3 / 4 if biased else None)
    (batch,) = jax.export.symbolic_shape("b")
    layer = jax.jit(lambda x: moe.moe_layer(params, x, config)[0])
    exported = jax.export.export(layer)(jax.ShapeDtypeStruct((batch, SEQUENCE, H), jnp.float32))
    x = make_x()
    np.testing.assert_allclose(exported.call(x), layer(x), atol=2e-6)


def test_gradients_for_a_symbolic_number_of_tokens():
    weights = {"gate": (H, E), **weight_shapes(E, H, F, use_mlp_bias=True)}
    rng = np.random.default_rng(7)
    params = MoEParams.of(**{
        name: jnp.asarray(rng.normal(scale=0.3, size=shape), jnp.float32)
        for name, shape in weights.items()
    })  # fmt: skip
    (batch,) = jax.export.symbolic_shape("b")
    grad = jax.jit(jax.grad(lambda params, x: loss(params, x)[0]))
    exported = jax.export.export(grad)(params, jax.ShapeDtypeStruct((batch, H), jnp.float32))
    x = make_x(shape=(8,))
    assert_close(exported.call(params, x), grad(params, x))


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


def config_with(**changes) -> MoEConfig:
    return MoEConfig(**(dict(num_experts=E, num_experts_per_token=K) | changes))


X = jnp.zeros((8, H))


@pytest.mark.parametrize(
    "config, x, mask, error, message",
    [
        (
            config_with(num_experts=4),
            X,
            None,
            ValueError,
            r"gate must have shape \[H, 4\], .*\(16, 8\)",
        ),
        (CONFIG, jnp.zeros((8, 5)), None, ValueError, r"x must be .*H=16.* \(8, 5\)"),
        (CONFIG, X.astype(int), None, TypeError, "x must be a floating array"),
        (CONFIG, X[:0], None, ValueError, r"x must hold at least one token.*\(0, 16\)"),
        (CONFIG, X, jnp.ones(4, bool), ValueError, r"mask must .*\(8, 16\).*\(4,\)"),
        (
            CONFIG,
            X,
            jnp.ones(8),
            TypeError,
            "mask must be a bool or integer .*dtype float32",
        ),
        (
            config_with(capacity_factor=0.0),
            X,
            None,
            ValueError,
            "capacity_factor must .* but is 0.0",
        ),
        (config_with(overflow="last"), X, None, ValueError, "overflow must .* but is 'last'"),
        (config_with(expert_alignment=0), X, None, ValueError, "expert_alignment must .* but is 0"),
        (
            config_with(num_experts_per_token=9),
            X,
            None,
            ValueError,
            "num_experts_per_token must .* but is 9",
        ),
        (config_with(implementation="pallas"), X, None, ValueError, "there is no mesh with that"),
        (config_with(implementation="nccl"), X, None, ValueError, "implementation must .*'nccl'"),
        (config_with(matmul_implementation="x"), X, None, ValueError, "implementation must .*'x'"),
    ],
)
def test_errors_name_the_argument(config, x, mask, error, message):
    with pytest.raises(error, match=message):
        moe.moe_layer(make_params(), x, config, mask)


def test_errors_about_the_mesh_name_the_argument():
    devices = mesh((2, 4), ("data", "expert"))
    with jax.set_mesh(devices):
        with pytest.raises(ValueError, match=r"batch_axes must .*'expert'.* but is \('data',\)"):
            moe.moe_layer(make_params(), X, config_with(batch_axes="data"))
        with pytest.raises(ValueError, match=r"batch_axes must .* but is \('expert', 'rows'\)"):
            moe.moe_layer(make_params(), X, config_with(batch_axes=("expert", "rows")))
        with pytest.raises(ValueError, match=r"expert_axis \('expert', 'node'\) must name axes"):
            moe.moe_layer(make_params(), X, config_with(expert_axis=("expert", "node")))
        with pytest.raises(
            ValueError, match=r"expert_axis .* enclosing jax.shard_map.*\('data',\)"
        ):
            jax.shard_map(
                lambda x: moe.moe_layer(make_params(), x, CONFIG)[0],
                in_specs=P("data"),
                out_specs=P("data"),
                axis_names={"data"},
            )(X)
    with pytest.raises(ValueError, match=r"expert_axis \('ep',\) must name axes of the mesh"):
        moe.moe_layer(make_params(), X, config_with(mesh=devices, expert_axis="ep"))
    with jax.set_mesh(expert_mesh(8)):
        params = make_params()._replace(gate=jnp.zeros((H, 12)))
        with pytest.raises(ValueError, match="num_experts must be a multiple of the 8 ranks.* 12"):
            moe.moe_layer(params, X, config_with(num_experts=12))
        with pytest.raises(ValueError, match=r"wo must hold 8 experts .*\(4, 12, 16\)"):
            moe.moe_layer(make_params()._replace(wo=jnp.zeros((4, F, H))), X, CONFIG)


@pytest.mark.parametrize("num_ranks", quick([None, 2], None))
def test_a_layer_runs_where_jit_is_disabled(num_ranks):
    config = CONFIG if num_ranks is None else config_with(mesh=expert_mesh(num_ranks))
    with jax.disable_jit():
        step = jax.value_and_grad(functools.partial(loss, config=config), (0, 1), has_aux=True)
        assert_close(step(make_params(), make_x()), unsharded())


@pytest.mark.parametrize("lead, num_ranks", quick([((8, 4), 4), ((3, 5), 8)], ((3, 5), 8)))
def test_recorded_choices_are_replayed(lead, num_ranks):
    """Recorded choices must be replayed, even with a gate that would choose other experts.

    The tokens may need padding to a multiple of the ranks.
    """
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


@pytest.mark.parametrize("wrap", [lambda loss: loss, jax.checkpoint], ids=["plain", "remat"])
def test_op_names_say_which_part_of_the_layer_they_are_of(wrap):
    with jax.set_mesh(expert_mesh(4)):
        step = jax.value_and_grad(wrap(lambda *args: loss(*args)[0]), (0, 1))
        hlo = jax.jit(step).lower(make_params(), make_x()).compile().as_text() or ""
    found = set()
    for line in hlo.splitlines():
        if (name := re.search(r'op_name="([^"]*)"', line)) is None:
            continue
        parts = [p for p in re.findall(r"\w+", name[1]) if p in (*PARTS, "metrics")]
        found |= {(part, "transpose" in name[1]) for part in parts[:1]}
        if re.search(r" (dot|all-to-all|all-gather|all-reduce|reduce-scatter)\(", line):
            assert parts, line
    assert found >= {(part, backward) for part in PARTS for backward in (False, True)}
