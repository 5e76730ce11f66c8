"""Defines the activation and router functions that a published model's config.json selects.

A function that is made from a number is the same object for the same number, so that equal layers
have equal `jax_ep.MoEConfig`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.moe.routing import Routing


def relu_squared(x: jax.Array) -> jax.Array:
    """Computes max(x, 0)^2 (So et al., "Primer", arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": relu_squared,
    "gelu_pytorch_tanh": jax.nn.gelu,
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation function that config.json calls `name`, or raises ValueError."""
    if name not in ACTIVATIONS:
        raise ValueError(f"must be one of {', '.join(ACTIVATIONS)}, but is {name!r}.")
    return ACTIVATIONS[name]


def half_silu(x: jax.Array) -> jax.Array:
    return 0.5 * jax.nn.silu(x)


@functools.cache
def step_activation(limit: float) -> Callable[..., jax.Array]:
    """Returns Step-3.5's activation: it clamps silu(gate) and up. A `limit` of 0 clamps nothing."""
    return functools.partial(_step_activation, limit=limit) if limit else jax.nn.silu


def _step_activation(gate: jax.Array, up: jax.Array, *, limit: float) -> jax.Array:
    return jnp.minimum(jax.nn.silu(gate), limit) * jnp.clip(up, -limit, limit)


@functools.cache
def gpt_oss_activation(alpha: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns GPT-OSS's activation: gate * sigmoid(alpha * gate) * (up + 1)."""
    return functools.partial(_gpt_oss_activation, alpha=alpha)


def _gpt_oss_activation(gate: jax.Array, up: jax.Array, *, alpha: float) -> jax.Array:
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


@functools.cache
def sparse_mixer(jitter: float) -> Callable[[jax.Array, Any], Routing]:
    """Returns Phi-3.5-MoE's inference router, which chooses two experts (arXiv:2409.12136).

    The first expert is the one with the largest logit, the second the one with the largest of the
    remaining logits. Each choice has its own softmax, whose value is the chosen expert's weight.
    This softmax leaves out experts chosen before, and logits far below the chosen one: by more than
    2 * jitter times the larger magnitude of the two logits.
    """
    return functools.partial(_sparse_mixer, jitter=jitter)


def _sparse_mixer(x: jax.Array, logits: jax.Array, *, jitter: float) -> Routing:
    # A router gets tokens x [T, H] and their logits [T, E] (`jax_ep.MoEConfig`).
    del x
    chosen, weights = [], []
    left = logits  # -inf for experts that are already chosen
    for _ in range(2):
        # The gradient does not need `largest`, from which only the booleans `near` follow.
        largest = lax.stop_gradient(jnp.max(left, axis=-1, keepdims=True))
        # The larger magnitude of each logit and `largest`. If `largest` < 0, this is |logit|, since
        # no remaining logit is above `largest`.
        size = jnp.maximum(jnp.abs(logits), largest)
        # Divides by 1 where `size` is 0, which changes no result: either the dividend is 0, or the
        # expert is already chosen.
        near = (largest - logits) / jnp.where(size == 0, 1.0, size) <= 2 * jitter
        expert = jnp.argmax(left, axis=-1, keepdims=True)
        # At least one logit in the softmax is finite: the largest one, since it is near itself.
        shares = jax.nn.softmax(jnp.where(near, left, -jnp.inf), axis=-1)
        chosen.append(expert)
        weights.append(jnp.take_along_axis(shares, expert, axis=-1))
        is_chosen = jnp.arange(logits.shape[-1]) == expert
        left = jnp.where(is_chosen, -jnp.inf, left)
    topk_idx = jnp.concatenate(chosen, axis=-1).astype(jnp.int32)
    return Routing(topk_idx, jnp.concatenate(weights, axis=-1))


# Maps a key of config.json or a field of `jax_ep.MoEConfig` to the function that makes the field's
# value from the value in config.json. Other fields take the value in config.json unchanged.
MAKE: dict[str, Callable[[Any], Any]] = {
    "activation": activation,
    "router": sparse_mixer,
    "logit_softcap": lambda cap: cap or None,
    "swiglu_alpha": gpt_oss_activation,
    "swiglu_limits": step_activation,
    "swiglu_limits_shared": step_activation,
    "ffn_config.moe_normalize_expert_weights": bool,
}
