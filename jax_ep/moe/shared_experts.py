"""Computes the shared experts, which process every token, as one MLP on the token's own rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import checks
from jax_ep.formats import QuantizedArray
from jax_ep.formats.quantized_array import without_gradient
from jax_ep.matmul.gating import hidden_values
from jax_ep.matmul.weight_only import dequantized
from jax_ep.moe import few_tokens, fsdp, routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import Experts
from jax_ep.moe.expert_mlp import run_mlp
from jax_ep.moe.mesh import LayerMesh
from jax_ep.moe.params import SHARED_WEIGHTS, MoEParams

# With fewer tokens, arrays are not quantized to float8: in a forward pass, that takes longer than
# the faster matmuls save. Computed from the bandwidth and the rates of an H200, not measured.
LEAST_QUANTIZED_TOKENS = 512


def output(params: MoEParams, x: jax.Array, config: MoEConfig, where: LayerMesh) -> jax.Array:
    """Runs the shared experts on every token x [T, H]; a partial sum along tensor axes."""
    if config.shared_activation is not None:
        config = dataclasses.replace(config, activation=config.shared_activation, clamp=None)
    *wi, wo = (
        fsdp.gather(name, without_gradient(name, w), where, config.dtype)
        for name in SHARED_WEIGHTS
        if (w := getattr(params, name)) is not None
    )
    tokens = x.astype(config.dtype)
    is_stored = isinstance(wo, QuantizedArray)
    num_tokens = tokens.shape[0]
    are_few = not checks.is_symbolic(num_tokens) and num_tokens < LEAST_QUANTIZED_TOKENS
    if config.matmul_dtype is not None and not is_stored and are_few:
        config = dataclasses.replace(config, matmul_dtype=None)
    if config.matmul_dtype is not None or is_stored:
        out = _output_of_quantized(wi, wo, tokens, config)
    else:
        out = _output(wi, wo, tokens, config)
    if params.shared_gate is not None:
        gate = fsdp.gather("shared_gate", params.shared_gate, where)
        factor = jax.nn.sigmoid(routing.router_logits(x, gate))
        out = (out.astype(jnp.float32) * factor).astype(out.dtype)
    return out


def _output(
    wi: Sequence[jax.Array], wo: jax.Array, tokens: jax.Array, config: MoEConfig
) -> jax.Array:
    """Computes the MLP of all tokens by XLA, [T, H]; `wi` are shared_wi_0 and any shared_wi_1."""
    unit = config.unit()

    # As in the routed experts, the backward pass computes hidden values again from the products.
    @jax.checkpoint
    def second_matmul(wo: jax.Array, *products: jax.Array) -> jax.Array:
        return _product(hidden_values(unit, (None, None), products), wo)

    products = (checkpoint_name(_product(tokens, w), "expert_pre_activations") for w in wi)
    return second_matmul(wo, *products)


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    # Without the barrier, XLA may leave out the rounding of the product, depending on what uses it.
    return lax.optimization_barrier(rows @ matrix)


def _output_of_quantized(
    wi: Sequence[Any], wo: Any, tokens: jax.Array, config: MoEConfig
) -> jax.Array:
    """Computes the MLP as one expert's, if matmuls are float8 or matrices are stored quantized."""

    def of_many(experts: Experts, tokens: jax.Array) -> jax.Array:
        if config.matmul_dtype is not None:
            return run_mlp(
                tokens,
                experts,
                group_sizes=jnp.full(1, tokens.shape[0], jnp.int32),
                unit=config.unit(),
                matmul_dtype=config.matmul_dtype,
                implementation=config.matmul_implementation,
            )
        # XLA multiplies stored matrices as arrays, without their axis of one expert.
        *wi, wo = (
            dequantized(jax.tree.map(lambda part: part[0], w), config.dtype)
            for w in (*experts.wi, experts.wo)
        )
        return _output(wi, wo, tokens, config)

    # A matrix such as [H, S] becomes the matrices of one expert, [1, H, S].
    wi_0, *wi_1, wo = (jax.tree.map(lambda part: part[None], w) for w in (*wi, wo))
    experts = Experts(wi_0, wi_1[0] if wi_1 else None, wo)
    return few_tokens.run_one(of_many, experts, tokens, config)
