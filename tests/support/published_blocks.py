"""The MoE blocks of published models: options of the layer, and the same block in NumPy.

The NumPy version computes in float64, token by token. Routers are those of `jax_ep.reference` but
for PhiMoE's, which follows the model's own code (the modeling files of the package transformers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep import reference
from jax_ep.moe.params import PARAMETERS, MoEParams
from support.dense_moe import weight_shapes

Array = np.ndarray
E, H, F, K = 16, 16, 8, 3


def softmax(x: Array) -> Array:
    exp = np.exp(x - x.max())
    return exp / exp.sum()


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


# ---- PhiMoE's router: a token's logits [E] -> experts [2], weights [2] ----


def phimoe(logits):
    """Chooses two experts by PhiMoE's sparsemixer, as it works at inference."""
    idx, weights = [], []
    left = logits
    for _ in range(2):
        top = left.max()
        # Keep the logits whose distance from the largest is at most 2% of the larger magnitude. It
        # is not divided by the magnitude, which may be zero.
        near = top - logits <= 0.02 * np.maximum(np.abs(logits), top)
        expert = np.argmax(left)
        idx.append(expert)
        weights.append(softmax(np.where(near & np.isfinite(left), left, -np.inf))[expert])
        left = np.where(np.arange(E) == expert, -np.inf, left)
    return np.asarray(idx), np.asarray(weights)


def phimoe_router(x, logits) -> jax_ep.Routing:
    idx, weights, left = [], [], logits
    for _ in range(2):
        top = left.max(axis=-1, keepdims=True)
        near = top - logits <= 0.02 * jnp.maximum(jnp.abs(logits), top)
        expert = jnp.argmax(left, axis=-1, keepdims=True)
        gates = jnp.exp(left - top) * (near & jnp.isfinite(left))
        gates /= gates.sum(axis=-1, keepdims=True)
        idx.append(expert)
        weights.append(jnp.take_along_axis(gates, expert, axis=-1))
        left = jnp.where(jnp.arange(E)[None] == expert, -jnp.inf, left)
    return jax_ep.Routing(jnp.concatenate(idx, -1), jnp.concatenate(weights, -1))


# ---- experts: one token's gate and up values [F] -> the operand of the last matmul [F] ----


def swiglu(gate, up):
    return silu(gate) * up


def gpt_oss_swiglu(gate, up):
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def clamped_swiglu(gate, up):
    return silu(np.minimum(gate, 1.0)) * np.clip(up, -1.0, 1.0)


def relu2(h, _):
    return np.maximum(h, 0) ** 2


@dataclasses.dataclass(frozen=True)
class Block:
    """A model's MoE block."""

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    biased: bool = False
    k: int = K
    hidden: Callable[[Array, Any], Array] = swiglu
    shared_hidden: Callable[[Array, Any], Array] | None = None

    def layer_config(self, **changes: Any) -> jax_ep.MoEConfig:
        fields = dict(num_experts=E, num_experts_per_token=self.k) | self.config | changes
        return jax_ep.MoEConfig(**fields)


_GROUPS = dict(num_groups=4, groups_kept=2)
BLOCKS = {
    "Mixtral": Block(),
    "OLMoE": Block(dict(normalize=False)),
    "DeepSeek-V2": Block(dict(group_score="max", normalize=False, scale=16.0, **_GROUPS)),
    "DeepSeek-V3": Block(
        dict(score="sigmoid", normalize_epsilon=1e-20, scale=2.5, **_GROUPS),
        biased=True,
    ),
    "DeepSeek-V4": Block(
        dict(score="sqrt_softplus", normalize_epsilon=1e-20, scale=1.5, clamp=1.0),
        dict(num_shared_experts=1),
        biased=True,
        hidden=clamped_swiglu,
    ),
    "LFM2": Block(dict(score="sigmoid", normalize_epsilon=1e-6), biased=True),
    "Ernie 4.5": Block(dict(normalize_epsilon=1e-12), biased=True),
    "LongCat": Block(dict(normalize=False, scale=6.0), biased=True),
    "GPT-OSS": Block(
        dict(activation=lambda gate, up: (up + 1) * gate * jax.nn.sigmoid(1.702 * gate), clamp=1.5),
        dict(use_gate_bias=True, use_mlp_bias=True),
        hidden=gpt_oss_swiglu,
    ),
    "Llama 4": Block(
        dict(score="sigmoid", normalize=False, weights_on="input"),
        dict(num_shared_experts=1),
        k=1,
    ),
    "Nemotron-H": Block(
        dict(score="sigmoid", scale=2.5, activation=lambda h: jax.nn.relu(h) ** 2, **_GROUPS),
        dict(shared_dim=12, gated=False),
        biased=True,
        hidden=relu2,
    ),
    "Qwen2-MoE": Block(dict(normalize=False), dict(shared_dim=20, use_shared_gate=True)),
    "Gemma 4": Block(parts=dict(use_expert_scale=True)),
    "Kolibri": Block(dict(score="sigmoid", choose_by="logit"), biased=True),
    "Laguna": Block(dict(score="sigmoid", logit_softcap=0.7), biased=True),
    "Hunyuan 4": Block(
        dict(score="sigmoid", scale=2.5, clamp=1.0, **_GROUPS)
        | dict(shared_activation=jax.nn.silu),
        dict(num_shared_experts=1),
        biased=True,
        hidden=clamped_swiglu,
        shared_hidden=swiglu,
    ),
    "PhiMoE": Block(dict(router=phimoe_router), k=2),
}


def make_params(block: Block, seed: int = 0) -> MoEParams:
    rng = np.random.default_rng(seed)
    shapes = {"gate": (H, E)} | weight_shapes(E, H, F, **block.parts)

    def draw(name: str, shape: tuple[int, ...]) -> Any:
        is_matrix = PARAMETERS[name].init in ("gate", "kernel")
        scale = shape[-2] ** -0.5 if is_matrix else 0.5
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    bias = jnp.asarray(rng.normal(size=E) * 0.2, jnp.float32) if block.biased else None
    return MoEParams.of(**{name: draw(name, shape) for name, shape in shapes.items()}, bias=bias)


ROUTING = {"score", "choose_by", "num_groups", "groups_kept", "group_score"}
ROUTING |= {"normalize", "normalize_epsilon", "scale"}


def route(block: Block, logits: Array, bias: Array | None) -> tuple[Array, Array]:
    """Returns the experts and the weights [T, k] of tokens, from their logits [T, E]."""
    if "router" in block.config:
        idx, weights = zip(*map(phimoe, logits), strict=True)
        return np.stack(idx), np.stack(weights)
    if softcap := block.config.get("logit_softcap"):
        logits = softcap * np.tanh(logits / softcap)
    options = {name: block.config[name] for name in ROUTING & block.config.keys()}
    routing = reference.top_k_routing(logits, block.k, bias=bias, **options)
    return routing.topk_idx, routing.topk_weights


def in_numpy(block: Block, params: Any, x: Array) -> tuple[Array, Array]:
    """Computes the block for tokens x [..., H] in float64; also counts each expert's tokens."""
    p = {
        name: None if a is None else np.asarray(a, np.float64)
        for name, a in params.items()
        if name != "x"
    }
    tokens = np.asarray(x, np.float64).reshape(-1, H)
    out, counts = np.zeros_like(tokens), np.zeros(E, int)
    logits = tokens @ p["gate"] + (0 if p["gate_bias"] is None else p["gate_bias"])
    for token, row, *chosen in zip(tokens, out, *route(block, logits, p["bias"]), strict=True):
        for e, weight in zip(*chosen, strict=True):
            counts[e] += 1
            if p["expert_scale"] is not None:
                weight = weight * p["expert_scale"][e]
            seen = token * weight if block.config.get("weights_on") == "input" else token
            weight = 1.0 if block.config.get("weights_on") == "input" else weight
            row += weight * expert(
                block, *(None if p[n] is None else p[n][e] for n in ROUTED), seen
            )
        if p["shared_wo"] is not None:
            weights = (p[n] for n in ("shared_wi_0", "shared_wi_1", "shared_wo"))
            of_shared = dataclasses.replace(block, hidden=block.shared_hidden or block.hidden)
            shared = expert(of_shared, *weights, None, None, None, token)
            row += (
                shared if p["shared_gate"] is None else shared * sigmoid(token @ p["shared_gate"])
            )
    return out.reshape(x.shape), counts


ROUTED = ("wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias")


def expert(block: Block, wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias, token: Array) -> Array:
    gate = token @ wi_0 + (0 if wi_0_bias is None else wi_0_bias)
    up = None if wi_1 is None else token @ wi_1 + (0 if wi_1_bias is None else wi_1_bias)
    return block.hidden(gate, up) @ wo + (0 if wo_bias is None else wo_bias)
