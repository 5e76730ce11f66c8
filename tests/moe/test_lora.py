"""Tests that low-rank adapters act as W + scale * A @ B, alone train, and merge."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.dense_moe import E, make_x, random_params
from support.meshes import mesh, skip_without
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, MoEParams
from jax_ep.formats import MXFP4, quantize
from jax_ep.placement.weights import ADAPTERS

K, H, F, RANK = 2, 32, 64, 4
CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K, lora_scale=0.5)


params_with = functools.partial(random_params, H, F, 0.2, lora_rank=RANK)


def x_of(batch: int = 8) -> jax.Array:
    return 0.4 * jnp.asarray(make_x(1, (batch, 3), H))


def loss(params: MoEParams, x: jax.Array, config: MoEConfig) -> jax.Array:
    out, _ = jax_ep.moe_layer(params, x, config)
    return jnp.sum(jnp.sin(out))


def dense_loss(params: MoEParams, x: jax.Array, config: MoEConfig) -> jax.Array:
    """Computes every expert for every token, with the merged matrices."""

    def merged(name):
        a, b = (getattr(params, f"{name}_lora_{which}") for which in "ab")
        return getattr(params, name) + config.lora_scale * jnp.einsum("ehr,erf->ehf", a, b)

    routed = jax_ep.top_k_routing(x.reshape(-1, H) @ params.gate, K)
    pre = [jnp.einsum("th,ehf->etf", x.reshape(-1, H), merged(name)) for name in ("wi_0", "wi_1")]
    y = jnp.einsum("etf,efh->eth", jax.nn.silu(pre[0]) * pre[1], merged("wo"))
    chosen = jax.nn.one_hot(routed.topk_idx, E) * routed.topk_weights[..., None]
    return jnp.sum(jnp.sin(jnp.einsum("tke,eth->th", chosen, y)))


ON_MESHES = {
    "ranks": ({}, (4,), ("expert",)),
    "columns split": ({"tensor_axis": "tensor"}, (4, 2), ("expert", "tensor")),
    "chunks": ({"token_chunks": 3}, (4,), ("expert",)),
    "FSDP": ({"fsdp_axes": {"exp": "fsdp", "embed": "fsdp"}}, (4, 2), ("expert", "fsdp")),
}


@pytest.mark.parametrize("options, shape, axes", quick(ON_MESHES, "chunks"))
def test_gradients_are_those_of_dense_math(options, shape, axes):
    params, x = params_with(), x_of()
    want, dense = jax.value_and_grad(dense_loss, (0, 1))(params, x, CONFIG)
    config = dataclasses.replace(CONFIG, **options)
    with jax.set_mesh(mesh(shape, axes)):
        got, grads = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(params, x, config)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(grads[1], dense[1], rtol=1e-5, atol=1e-5)
    for name, grad in grads[0]._asdict().items():
        if name in ("wi_0", "wi_1", "wo"):
            assert not np.any(grad), name
        elif grad is not None:
            np.testing.assert_allclose(
                grad, getattr(dense[0], name), rtol=1e-5, atol=1e-5, err_msg=name
            )


@pytest.mark.slow
def test_adapters_of_quantized_matrices_train():
    params, x = params_with(), x_of()
    stored = {name: quantize(getattr(params, name), MXFP4) for name in ("wi_0", "wi_1", "wo")}
    plain = params._replace(**{name: w.dequantize() for name, w in stored.items()})
    names = [name for name in ADAPTERS if getattr(params, name) is not None]

    def of_adapters(adapters, params):
        return loss(params._replace(**adapters), x, CONFIG)

    adapters = {name: getattr(params, name) for name in names}
    want = jax.grad(of_adapters)(adapters, plain)
    got = jax.grad(of_adapters)(adapters, params._replace(**stored))
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)
        assert np.any(got[name])


@pytest.mark.parametrize(
    "options", quick([{"gated": False}, {"use_mlp_bias": True}], {"gated": False}), ids=str
)
def test_merged_parameters_compute_the_same(options):
    params, x = params_with(**options), x_of()
    merged = jax_ep.merge_lora(params, CONFIG.lora_scale)
    assert merged.wi_0_lora_a is None and merged.wo_lora_b is None
    want, _ = jax_ep.moe_layer(params, x, CONFIG)
    got, _ = jax_ep.moe_layer(merged, x, CONFIG)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    plain = params._replace(**dict.fromkeys(ADAPTERS))
    assert np.abs(want - jax_ep.moe_layer(plain, x, CONFIG)[0]).max() > 1e-2


@pytest.mark.needs_devices(4)
@pytest.mark.parametrize("memory_kind", quick(["device", "pinned_host"], "pinned_host"))
@pytest.mark.parametrize("split", quick({"mesh": True, "one device": False}, "mesh"))
def test_adapters_and_merged_matrices_are_where_the_matrices_are(split, memory_kind):
    devices = mesh((2, 2), ("expert", "fsdp"))
    skip_without(memory_kind, devices)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind=memory_kind)
    if split:
        sharding = jax.NamedSharding(devices, jax.P("expert", "fsdp"), memory_kind=memory_kind)
    plain = params_with()._replace(**dict.fromkeys(ADAPTERS))
    names = ("wi_0", "wi_1", "wo")
    plain = plain._replace(**{n: jax.device_put(getattr(plain, n), sharding) for n in names})
    params = jax_ep.init_lora(plain, RANK, jax.random.key(0))
    for name in ADAPTERS:
        held = getattr(params, name).sharding
        assert held.device_set == sharding.device_set and held.memory_kind == memory_kind
        assert not split or held.spec[0] == "expert"
    assert params.wo_lora_a.shape == (E, F, RANK) and np.any(params.wo_lora_a)
    # New adapters change nothing.
    merged = jax_ep.merge_lora(params, CONFIG.lora_scale)
    for name in names:
        assert getattr(merged, name).sharding == sharding
        np.testing.assert_array_equal(getattr(merged, name), getattr(plain, name))


def test_an_optimizer_finds_the_adapters_alone():
    """As nnx.Optimizer(layer, ..., wrt=nnx.LoRAParam) does."""
    options = dict(num_experts=E, num_experts_per_token=K, lora_rank=RANK)
    layer = nnx.eval_shape(lambda: jax_ep.nnx.MoE(H, F, **options, rngs=nnx.Rngs(0)))
    assert set(nnx.to_pure_dict(nnx.state(layer, nnx.LoRAParam))) == set(ADAPTERS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(wi_0_lora_b=None), "wi_0_lora_a must be None where wi_0_lora_b is None"),
        (
            dict(wo_lora_b=np.zeros((E, RANK, F))),
            "wo_lora_b must have shape (8, 4, 32) for L=4, H=32",
        ),
        (dict(wi_1=None), "wi_1_lora_a must be None where wi_1 is None"),
    ],
    ids=str,
)
def test_adapters_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jax_ep.moe_layer(params_with()._replace(**changes), x_of(), CONFIG)


def test_float8_matmuls_are_refused():
    config = dataclasses.replace(CONFIG, matmul_dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="matmul_dtype must be None where experts have adapters"):
        jax_ep.moe_layer(params_with(), x_of(), config)
