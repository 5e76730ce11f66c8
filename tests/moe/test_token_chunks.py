"""Tests that a layer with token chunks agrees with one without, with smaller buffers."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense_moe import (
    CONFIG,
    E,
    S,
    assert_close,
    make_params,
    make_x,
    random_params,
    step_of,
)
from support.meshes import expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, moe_layer
from jax_ep.placement import Placement, to_slots

pytestmark = pytest.mark.usefixtures("exact_matmuls")


def run(params, x, **options):
    """Returns (output, metrics) and the gradients of parameters and x, compiled."""
    (_, outputs), grads = step_of(**options)(params, x)
    return jax.device_get((outputs, grads))


def assert_same(num_chunks, config, devices, params, x, mask=None, **given):
    """Asserts that chunks leave the metrics equal, and outputs and gradients close."""
    with jax.set_mesh(devices):
        (out, metrics), grads = run(params, x, mask=mask, config=config, **given)
        chunked = dataclasses.replace(config, token_chunks=num_chunks)
        (got, got_metrics), got_grads = run(params, x, mask=mask, config=chunked, **given)
    jax.tree.map(np.testing.assert_array_equal, got_metrics, metrics)
    assert_close((got, got_grads), (out, grads))


@pytest.mark.parametrize("num_chunks, num_ranks", quick([(2, 1), (3, 4), (4, 8), (9, 8)], (3, 4)))
def test_chunks_change_nothing_but_rounding(num_chunks, num_ranks):
    """The number of chunks may be no divisor of the number of tokens, or larger than it."""
    params, x, mask = make_params(bias=True), make_x(shape=(8, 5)), np.arange(40).reshape(8, 5) % 7
    assert_same(num_chunks, CONFIG, expert_mesh(num_ranks), params, x, mask > 0)


SPLIT = dict(tensor_axis="tensor", batch_axes=("expert", "tensor"))
KINDS = {
    "replicated over data": ({}, (2, 4), ("data", "expert")),
    "columns split": (dict(tensor_axis="tensor"), (4, 2), ("expert", "tensor")),
    "columns and tokens split": (SPLIT, (4, 2), ("expert", "tensor")),
    "weights on the input": (dict(weights_on="input", clamp=1.0), (4,), ("expert",)),
    "slots": (dict(num_slots=12), (4,), ("expert",)),
    "hosts": (dict(expert_axis=("host", "expert")), (2, 2), ("host", "expert")),
}


@pytest.mark.slow
@pytest.mark.parametrize("changes, shape, axes", KINDS.values(), ids=KINDS)
def test_with_other_options(changes, shape, axes, monkeypatch):
    if "host" in axes:
        monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "2")
    config = dataclasses.replace(CONFIG, **changes)
    params, given = random_params(use_mlp_bias=True, num_shared_experts=S), {}
    if config.num_slots:
        placement = Placement.in_order(num_experts=E, num_slots=12, num_ranks=4)[0]
        params, given = to_slots(params, placement), dict(placement=placement)
    assert_same(2, config, mesh(shape, axes), params, make_x(), **given)


def test_a_capacity_is_of_each_chunk():
    config = dataclasses.replace(CONFIG, capacity_factor=0.5)
    params, x = make_params(), make_x(shape=(4, 16))
    with jax.set_mesh(expert_mesh(4)):
        out, metrics = moe_layer(params, x, dataclasses.replace(config, token_chunks=2))
        parts = [moe_layer(params, part, config) for part in jnp.split(x, 2, axis=1)]
    np.testing.assert_array_equal(out, jnp.concatenate([part for part, _ in parts], axis=1))
    dropped = sum(part.dropped_counts for _, part in parts)
    np.testing.assert_array_equal(metrics.dropped_counts, dropped)
    assert metrics.num_dropped == np.sum(dropped) > 0


# Float8 needs sizes that are multiples of 128.
WIDE = 128


@pytest.mark.slow
@pytest.mark.parametrize("once", [False, True])
def test_float8_experts_are_quantized_once(once):
    """In chunks, rows are quantized in other blocks for the matrices' gradients."""
    float8 = jnp.float8_e4m3fn
    config = dataclasses.replace(CONFIG, wire_dtype=float8, matmul_dtype=float8)
    params, x = random_params(WIDE, WIDE, WIDE**-0.5), make_x(1, (4, 16), WIDE)
    with jax.set_mesh(expert_mesh(4)):
        given = dict(quantized_experts=jax_ep.quantize_experts(params, config)) if once else {}
        want = run(params, x, config=config, **given)
        chunked = dataclasses.replace(config, token_chunks=4)
        got = run(params, x, config=chunked, **given)
        jaxpr = str(jax.make_jaxpr(lambda *a: moe_layer(*a, chunked, **given))(params, x))
    # A gradient has two operands, each with rounding errors of 2^-5 on average, here and there.
    bound = 2 * 2**0.5 * 2.0**-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.float64(a) - b) <= bound * np.linalg.norm(np.float64(b))
    np.testing.assert_array_equal(got[0][0], want[0][0])
    before_scan, in_scan = jaxpr.split("scan[")
    assert "quantize_float8_matrices" not in in_scan
    assert before_scan.count("quantize_float8_matrices") == (0 if once else 3)


@pytest.mark.parametrize(
    "num_chunks, dtype, wanted",
    [(8, "bfloat16", "bf16"), (9, "bfloat16", "f32"), (8, "both", "f32")],
)
def test_few_gradients_of_bfloat16_matrices_are_summed_in_bfloat16(num_chunks, dtype, wanted):
    """Sums in float32 would take twice the memory of bfloat16 parameters."""
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16, token_chunks=num_chunks)
    params = make_params()
    kinds = ("bfloat16", "float32") if dtype == "both" else (dtype, dtype)
    params = jax.tree.map(lambda w: w.astype(kinds[0]), params)
    params = params._replace(wi_0=params.wi_0.astype(kinds[1]))

    def total(params):
        x = make_x(shape=(4, 18))
        return jnp.sum(moe_layer(params, x, config)[0].astype(jnp.float32))

    with jax.set_mesh(expert_mesh(4)):
        jaxpr = str(jax.make_jaxpr(jax.grad(total))(params))
    sums = re.findall(r"((?:\w+:\w+\[[\d,]+\](?:{[^}]*})? ?)+) = grouped_matmul_drhs", jaxpr)
    assert len(sums) == 2
    assert set(re.findall(r":(\w+)\[", " ".join(sums))) == {wanted}


@pytest.mark.slow
@pytest.mark.parametrize("of", ["x", "params"])
def test_gradients_of_gradients(of):
    params, x = make_params(bias=True), make_x()

    def penalty(params, x, config):
        def loss(params, x):
            return jnp.mean(moe_layer(params, x, config)[0] ** 2)

        gradients = jax.grad(loss, ("params", "x").index(of))(params, x)
        return sum(jnp.sum(each**2) for each in jax.tree.leaves(gradients))

    def gradient(num_chunks):
        config = dataclasses.replace(CONFIG, token_chunks=num_chunks)
        with jax.set_mesh(expert_mesh(2)):
            return jax.device_get(jax.jit(jax.grad(penalty), static_argnums=2)(params, x, config))

    want = gradient(1)
    assert np.any(want.wi_0) and np.any(want.wo)
    assert_close(gradient(2), want)


def compiled(num_chunks, mesh_shape=(4,), axes=("expert",), num_tokens=2048):
    """Compiles the gradient of a layer that drops nothing."""
    config = MoEConfig(
        num_experts=E, num_experts_per_token=4, dtype=jnp.bfloat16, token_chunks=num_chunks
    )
    params = jax.eval_shape(functools.partial(random_params, 64, 64))
    x = jax.ShapeDtypeStruct((8, num_tokens // 2, 64), jnp.bfloat16)

    def loss(params, x):
        return jnp.sum(moe_layer(params, x, config)[0].astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh(mesh_shape, axes)):
        return jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()


@pytest.mark.slow
def test_a_step_needs_less_memory():
    """Four chunks must need at most 0.35 of the memory, which on CPUs is mostly rows."""
    whole, chunked = (compiled(c).memory_analysis().temp_size_in_bytes for c in (1, 4))
    assert chunked <= 0.35 * whole


@pytest.mark.slow
def test_gradients_of_experts_are_reduced_once():
    shape = dict(mesh_shape=(2, 4), axes=("data", "expert"), num_tokens=16)
    whole, chunked = (compiled(c, **shape).as_text().count(" all-reduce(") for c in (1, 4))
    assert chunked == whole > 0
