"""Computes free experts: zero, identity and constant experts (MoE++, arXiv:2410.07348)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams
from jax_ep.moe.routing import Routing


def output(x: jax.Array, routed: Routing, params: MoEParams, config: MoEConfig) -> jax.Array:
    """Returns for each token of x [T, H] the weighted sum of its free experts' outputs, in float32.

    A constant expert gives a * x + b * v, with (a, b) = softmax(x @ constant_gate) and v its
    `constant_value` (MoE++, section 3.1). `MoEConfig.weights_on` does not apply.
    """
    # The ids from E on are the zero experts, then the identity experts, then the constant experts.
    x = x.astype(jnp.float32)
    topk_idx, topk_weights, _ = routed
    first_identity = config.num_experts + config.zero_experts
    first_constant = first_identity + config.identity_experts
    is_identity = (topk_idx >= first_identity) & (topk_idx < first_constant)
    out = jnp.sum(jnp.where(is_identity, topk_weights, 0.0), axis=1, keepdims=True) * x
    if config.constant_experts:
        assert params.constant_value is not None and params.constant_gate is not None
        ids = first_constant + jnp.arange(config.constant_experts, dtype=jnp.int32)
        chosen = topk_idx[:, :, None] == ids[None, None, :]
        # Each token's weight of each constant expert, [T, constant_experts]; 0 if not chosen.
        weights = jnp.sum(jnp.where(chosen, topk_weights[:, :, None], 0.0), axis=1)
        exact = jax.lax.Precision.HIGHEST
        gate = params.constant_gate.astype(jnp.float32)
        # The factors (a, b) of each token and constant expert, [T, constant_experts, 2].
        factors = jax.nn.softmax(jnp.einsum("th,chs->tcs", x, gate, precision=exact), axis=-1)
        factors = factors * weights[:, :, None]
        out = out + jnp.sum(factors[:, :, 0], axis=1, keepdims=True) * x
        value = params.constant_value.astype(jnp.float32)
        out = out + jnp.matmul(factors[:, :, 1], value, precision=exact)
    return out
