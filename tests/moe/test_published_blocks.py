"""Tests that the layer's options give published models' MoE blocks, as NumPy computes them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense_moe import CONFIG, E, H, K, random_params
from support.meshes import expert_mesh
from support.selection import quick

from jax_ep import moe_layer, reference

pytestmark = pytest.mark.usefixtures("exact_matmuls")

X = np.random.default_rng(1).normal(size=(8, 3, H)).astype(np.float32)
MIX = np.random.default_rng(2).normal(size=X.shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(gate, up):
    return gate * sigmoid(gate) * up


def clamped_swiglu(gate, up):
    return swiglu(np.minimum(gate, 1.0), np.clip(up, -1.0, 1.0))


def gpt_oss_swiglu(gate, up):
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def relu2(h, _):
    return np.maximum(h, 0) ** 2


@dataclasses.dataclass(frozen=True)
class Block:
    """A model's MoE block: options of the layer, and its hidden units in NumPy."""

    config: dict[str, Any]
    parts: dict[str, Any]
    hidden: Any = swiglu
    shared_hidden: Any = swiglu


GROUPS = dict(num_groups=4, groups_kept=2)
BLOCKS = {
    "DeepSeek-V4": Block(
        dict(score="sqrt_softplus", normalize_epsilon=1e-20, scale=1.5, clamp=1.0),
        dict(num_shared_experts=1, selection_bias=True),
        hidden=clamped_swiglu,
        shared_hidden=clamped_swiglu,
    ),
    "GPT-OSS": Block(
        dict(activation=lambda gate, up: (up + 1) * gate * jax.nn.sigmoid(1.702 * gate), clamp=1.5),
        dict(use_gate_bias=True, use_mlp_bias=True),
        hidden=gpt_oss_swiglu,
    ),
    "Llama 4": Block(
        dict(num_experts_per_token=1, score="sigmoid", normalize=False, weights_on="input"),
        dict(num_shared_experts=1),
    ),
    "Nemotron-H": Block(
        dict(score="sigmoid", scale=2.5, activation=lambda h: jax.nn.relu(h) ** 2, **GROUPS),
        dict(shared_dim=12, gated=False, selection_bias=True),
        hidden=relu2,
        shared_hidden=relu2,
    ),
    "Qwen2-MoE": Block(dict(normalize=False), dict(shared_dim=20, use_shared_gate=True)),
    "Gemma 4": Block({}, dict(use_expert_scale=True)),
    "Laguna": Block(dict(score="sigmoid", logit_softcap=0.7), dict(selection_bias=True)),
    "Hunyuan 4": Block(
        dict(score="sigmoid", scale=2.5, clamp=1.0, shared_activation=jax.nn.silu, **GROUPS),
        dict(num_shared_experts=1, selection_bias=True),
        hidden=clamped_swiglu,
    ),
}
ROUTING = ("score", "num_groups", "groups_kept", "normalize", "normalize_epsilon", "scale")


def route(block, p, tokens):
    """Returns each token's weight of each expert, [T, E]; NaN where it is not chosen."""
    logits = tokens @ p["gate"] + p.get("gate_bias", 0)
    if softcap := block.config.get("logit_softcap"):
        logits = softcap * np.tanh(logits / softcap)
    options = {name: block.config[name] for name in ROUTING if name in block.config}
    k = block.config.get("num_experts_per_token", K)
    routed = reference.top_k_routing(logits, k, bias=p.get("bias"), **options)
    weights = np.full(logits.shape, np.nan)
    np.put_along_axis(weights, routed.topk_idx, routed.topk_weights, axis=1)
    return weights * p.get("expert_scale", 1)


def expert(hidden, p, x):
    """Computes an expert's MLP from its matrices and biases, whose names begin with wi_0, ..."""

    def product(name, x):
        return x @ p[name] + p.get(f"{name}_bias", 0)

    return product("wo", hidden(product("wi_0", x), product("wi_1", x) if "wi_1" in p else None))


def in_numpy(block, p, x):
    """Computes the block in float64, every expert for every token; also counts experts' tokens."""
    tokens = x.reshape(-1, H)
    weights, out = route(block, p, tokens), np.zeros((len(tokens), H))
    for e in range(E):
        own = {name: array[e] for name, array in p.items() if name.startswith("w")}
        weight = weights[:, e : e + 1]
        if block.config.get("weights_on") == "input":
            y = expert(block.hidden, own, weight * tokens)
        else:
            y = weight * expert(block.hidden, own, tokens)
        out += np.nan_to_num(y)
    if "shared_wo" in p:
        shared = {name.removeprefix("shared_"): array for name, array in p.items()}
        shared = {name: shared[name] for name in ("wi_0", "wi_1", "wo") if f"shared_{name}" in p}
        y = expert(block.shared_hidden, shared, tokens)
        out += y * sigmoid(tokens @ p["shared_gate"]) if "shared_gate" in p else y
    return out.reshape(x.shape), np.sum(~np.isnan(weights), axis=0)


@pytest.mark.parametrize(
    "block", quick(BLOCKS, "DeepSeek-V4", "GPT-OSS", "Qwen2-MoE", unpack=False)
)
def test_block(block):
    """Output and counts must be those of NumPy, and gradients those of finite differences."""
    config = dataclasses.replace(CONFIG, **block.config)
    parts = {part: value for part, value in block.parts.items() if part != "selection_bias"}
    params = random_params(**parts)
    if "selection_bias" in block.parts:
        params = params._replace(bias=jnp.linspace(-0.4, 0.4, E))

    def total(params, x):
        out, metrics = moe_layer(params, x, config)
        return jnp.sum(out * MIX), (out, metrics)

    with jax.set_mesh(expert_mesh(4)):
        step = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
        (_, (out, metrics)), (dparams, dx) = jax.device_get(step(params, X))
    arrays = {name: a for name, a in params._asdict().items() if a is not None}
    arrays = {name: np.asarray(a, np.float64) for name, a in (arrays | {"x": X}).items()}
    evaluate = functools.partial(in_numpy, block)
    want, counts = evaluate(arrays, arrays["x"])
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    grads = dparams._asdict() | {"x": dx}
    for key, at in arrays.items():
        direction, eps = np.random.default_rng(4).normal(size=at.shape), 1e-6
        moved = (arrays | {key: at + step * direction} for step in (eps, -eps))
        up, down = (np.sum(evaluate(each, each["x"])[0] * MIX) for each in moved)
        want_grad = 0.0 if key == "bias" else (up - down) / (2 * eps)
        got = np.sum(np.asarray(grads[key], np.float64) * direction)
        np.testing.assert_allclose(got, want_grad, rtol=2e-4, atol=2e-4, err_msg=key)
