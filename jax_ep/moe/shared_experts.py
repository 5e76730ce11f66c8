"""Computes the shared experts, which process every token.

The shared experts of a layer are stored together, as one MLP. No token is sent for them: every rank
has all of them, or its columns of them along the tensor axes.

XLA multiplies them, except in two cases, in which they go the way of the routed experts, as a
single expert that every token chooses. The kernels multiply float8, and for few tokens they read
matrices that are stored quantized as they are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.matmul.weight_only import dequantized
from jax_ep.moe import few_tokens, fsdp, routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import Experts, check_all_stored, without_gradient
from jax_ep.moe.expert_mlp import ExpertUnit, expert_mlp, hidden_values
from jax_ep.moe.mesh import LayerMesh
from jax_ep.moe.options import options_of
from jax_ep.moe.params import SHARED_WEIGHTS, MoEParams
from jax_ep.runtime.jax_compat import match_varying


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
    if config.matmul_dtype is not None or isinstance(wo, QuantizedArray):
        out = _output_of_quantized(wi, wo, tokens, config, where)
    else:
        out = _output(wi, wo, tokens, config)
    if (gate := params.shared_gate) is not None:
        gate = fsdp.gather("shared_gate", gate, where)
        factor = jax.nn.sigmoid(routing.router_logits(x, gate))
        out = (out.astype(jnp.float32) * factor).astype(out.dtype)
    return out


def check(params: MoEParams, config: MoEConfig, num_tensor_ranks: int) -> None:
    """Raises TypeError or ValueError unless the matmuls can multiply the shared experts' matrices.

    Their columns are split over `num_tensor_ranks`. There may be no shared experts.
    """
    if params.shared_wo is None:
        return
    check_all_stored(params, SHARED_WEIGHTS)
    if config.matmul_dtype is not None:
        hidden, width = params.shared_wi_0.shape  # type: ignore
        on_a_rank = " on a rank" if num_tensor_ranks > 1 else ""
        shape = hidden, width // num_tensor_ranks
        FLOAT8_MATRICES.check_shape(f"shared_wi_0{on_a_rank}", shape)


def _output(
    wi: Sequence[jax.Array], wo: jax.Array, tokens: jax.Array, config: MoEConfig
) -> jax.Array:
    """Runs the shared experts, whose matrices are arrays, on tokens [T, H].

    As in the routed experts, everything between the matmuls is computed in float32, and the
    backward pass computes it again from the products.
    """
    unit = config.expert_options()

    @jax.checkpoint
    def down(wo: jax.Array, *products: jax.Array) -> jax.Array:
        return _product(hidden_values(unit, (None, None), products), wo)

    return down(wo, *(_product(tokens, w) for w in wi))


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    # Without the barrier, XLA may leave out the rounding of the product, depending on what uses it.
    return lax.optimization_barrier(rows @ matrix)


def _output_of_quantized(
    wi: Sequence[Any], wo: Any, tokens: jax.Array, config: MoEConfig, where: LayerMesh
) -> jax.Array:
    """Runs the shared experts as one expert that all tokens [T, H] choose.

    Of many tokens, the matrices that are stored quantized are dequantized, unless the matmuls
    multiply float8.
    """

    def of_many(
        experts: Experts, tokens: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if config.matmul_dtype is None:
            *wi, wo = (
                dequantized(jax.tree.map(lambda part: part[0], w), config.dtype)
                for w in (*experts.wi, experts.wo)
            )
            out = _output(wi, wo, tokens, config)
        else:
            out = expert_mlp(
                tokens,
                experts.wi_0,
                experts.wi_1,
                experts.wo,
                jnp.full(1, num_tokens, jnp.int32),
                implementation=config.matmul_implementation,
                **vars(options_of(ExpertUnit, config)),
            )
        dropped = jnp.zeros(1, jnp.int32)
        out, dropped, _ = match_varying((out, dropped, topk_idx), ())
        return out, dropped

    gate, *up, down = (jax.tree.map(lambda part: part[None], w) for w in (*wi, wo))
    num_tokens = tokens.shape[0]
    # The options of the exchange and of weights do not concern these experts.
    usual = dict(implementation=None, capacity_factor=None, wire_dtype=None, weights_on="output")
    out, _ = few_tokens.run(
        of_many,
        Experts(gate, up[0] if up else None, down),
        tokens,
        jnp.zeros((num_tokens, 1), jnp.int32),
        jnp.ones((num_tokens, 1), jnp.float32),
        config=dataclasses.replace(config, **usual),  # type: ignore
        where=where._replace(expert_axes=()),
    )
    return out
