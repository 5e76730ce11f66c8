"""Computes free experts, which have almost no cost: zero, identity and constant experts.

MoE++ (arXiv:2410.07348) adds free experts to the E experts of a layer, for tokens that need less
computation; LongCat-Flash has identity experts. A zero expert returns 0, an identity expert the
token, and a constant expert a mix of the token and a trained vector. The router chooses among all
experts. The ids from E on are the zero experts, then the identity experts, then the constant
experts. Every rank computes the free experts of its own tokens, so no token is sent for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax_ep.moe.config import MoEConfig
    from jax_ep.moe.params import MoEParams


def without_free(topk_idx: jax.Array, config: MoEConfig) -> jax.Array:
    """Replaces the free experts' ids in `topk_idx` [T, K] by -1, so that dispatch skips them.

    Free experts are the zero, identity and constant experts, whose ids are E or more.
    """
    return jnp.where(topk_idx < config.num_experts, topk_idx, -1)


def output(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    params: MoEParams,
    config: MoEConfig,
) -> jax.Array:
    """Returns for each token the weighted sum of the outputs of its free experts, [T, H] float32.

    Free experts are the zero, identity and constant experts, which a layer has besides its E
    experts. A zero expert gives 0, an identity expert x, and a constant expert a * x + b * v, where
    v is its `constant_value` and (a, b) = softmax(x @ constant_gate) (MoE++, section 3.1). The
    weight always multiplies the expert's output; `MoEConfig.weights_on` does not apply.

    Args:
        x: [T, H] floating: this rank's tokens.
        topk_idx: [T, K] int32: ids among all experts, free ones included.
        topk_weights: [T, K] float32: the weights of the choices.
        params: the parameters of the layer, of which constant experts use `constant_value` and
            `constant_gate`.
        config: the configuration of the layer, which says how many free experts there are.
    """
    x = x.astype(jnp.float32)
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
        shares = jax.nn.softmax(jnp.einsum("th,chs->tcs", x, gate, precision=exact), axis=-1)
        shares = shares * weights[:, :, None]
        out = out + jnp.sum(shares[:, :, 0], axis=1, keepdims=True) * x
        value = params.constant_value.astype(jnp.float32)
        out = out + jnp.matmul(shares[:, :, 1], value, precision=exact)
    return out


def factors(config: MoEConfig) -> jax.Array | None:
    """Returns the factor of each expert's term in the load-balance loss, or None if all are 1.

    The result is a float32 array with a factor for each of the layer's E experts, followed by one
    for each of its free experts: the zero, identity and constant experts. The first E factors are
    1, and the others are `config.free_expert_factor`.
    """
    if not config.num_free or config.free_expert_factor == 1.0:
        return None
    is_free = jnp.arange(config.num_choosable) >= config.num_experts
    return jnp.where(is_free, jnp.float32(config.free_expert_factor), 1.0)
