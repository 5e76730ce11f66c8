"""Computes the shared experts, which process every token.

The shared experts of a layer are stored together, as one MLP. No token is sent for them: every rank
has all of them, or its columns of them along the tensor axes.

XLA multiplies them, except in two cases, in which the kernels of the routed experts run them as a
single expert. These kernels multiply float8, and for few tokens they read matrices that are stored
quantized as they are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import checks
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.formats.quantized_array import without_gradient
from jax_ep.matmul.gating import hidden_values
from jax_ep.matmul.weight_only import dequantized
from jax_ep.moe import few_tokens, fsdp, routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import Experts, check_same_kind
from jax_ep.moe.expert_mlp import run_mlp
from jax_ep.moe.mesh import LayerMesh
from jax_ep.moe.params import SHARED_WEIGHTS, MoEParams

# With fewer tokens, arrays are not quantized to float8: in a forward pass, that takes longer than
# the faster matmuls save. Computed from the bandwidth and the rates of an H200, not measured.
LEAST_QUANTIZED_TOKENS = 512


def output(params: MoEParams, x: jax.Array, config: MoEConfig, where: LayerMesh) -> jax.Array:
    """Runs the shared experts on every token x [T, H].

    Returns [T, H], multiplied by sigmoid(x @ shared_gate) if there is a `shared_gate`. With tensor
    axes, the result is a partial sum, which must be added to those of the ranks along these axes.
    """
    *wi, wo = (
        fsdp.gather(name, without_gradient(name, w), where, config.dtype)
        for name in SHARED_WEIGHTS
        if (w := getattr(params, name)) is not None
    )
    tokens = x.astype(config.dtype)
    is_stored = isinstance(wo, QuantizedArray)
    if config.matmul_dtype is not None and not is_stored and _are_few(tokens):
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


def _are_few(tokens: jax.Array) -> bool:
    num_tokens = tokens.shape[0]
    return not checks.is_symbolic(num_tokens) and num_tokens < LEAST_QUANTIZED_TOKENS


def check(params: MoEParams, config: MoEConfig, where: LayerMesh) -> None:
    """Raises TypeError or ValueError unless the matmuls can multiply the shared experts' matrices.

    There may be no shared experts.
    """
    if params.shared_wo is None:
        return
    check_same_kind(params, SHARED_WEIGHTS)
    if config.matmul_dtype is not None:
        hidden, width = params.shared_wi_0.shape  # type: ignore
        on_a_rank = " on a rank" if where.num_parts() > 1 else ""
        shape = hidden, width // where.num_parts()
        FLOAT8_MATRICES.check_shape(f"with matmul_dtype, shared_wi_0{on_a_rank}", shape)


def _output(
    wi: Sequence[jax.Array], wo: jax.Array, tokens: jax.Array, config: MoEConfig
) -> jax.Array:
    """Runs the shared experts, whose matrices are arrays, on tokens [T, H].

    As in the routed experts, everything between the matmuls is computed in float32, and the
    backward pass computes it again from the products.
    """
    unit = config.expert_options()

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
    """Runs the shared experts, whose matrices are stored quantized or become float8, on [T, H]."""

    def of_many(experts: Experts, tokens: jax.Array) -> jax.Array:
        if config.matmul_dtype is not None:
            sizes, unit = jnp.full(1, tokens.shape[0], jnp.int32), config.expert_options()
            return run_mlp(tokens, experts, sizes, unit, config.matmul_implementation)
        *wi, wo = (
            dequantized(jax.tree.map(lambda part: part[0], w), config.dtype)
            for w in (*experts.wi, experts.wo)
        )
        return _output(wi, wo, tokens, config)

    wi_0, *wi_1, wo = (jax.tree.map(lambda part: part[None], w) for w in (*wi, wo))
    experts = Experts(wi_0, wi_1[0] if wi_1 else None, wo)
    return few_tokens.run_one(of_many, experts, tokens, config)
