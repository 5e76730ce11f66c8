"""The experts and the weighted sum of their outputs as one function, with a gradient of its own.

The output of a choice is linear in its gated product h: w · (h wo). So is its gradient in g, the
cotangent at the row of the choice, and with dh = g woᵀ

  d(h) = w · dh        d(wo) = (w · h)ᵀ g        d(w) = <dh, h>

Neither the experts' output y nor w · g is needed: where `combine` on its own keeps y [R, H] for
its gradient and makes w · g [R, H] and <g, y> in a pass over both, here the gradient of the gate,
which passes over h and dh [R, F] anyway, takes the weights along.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.exchange import primitives
from jax_ep.exchange.api import Dispatched, Handle, Implementation, combine, dispatch_like
from jax_ep.matmul.api import Implementation as MatmulImplementation
from jax_ep.moe.expert_mlp import Activation, backward, check_operands, forward
from jax_ep.runtime.jax_compat import match_varying


@dataclasses.dataclass(frozen=True)
class _Config:
    activation: Activation
    implementation: Implementation
    matmul_implementation: MatmulImplementation


def routed_experts(
    received: Dispatched,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    topk_weights: jax.Array,
    *,
    activation: Activation = jax.nn.silu,
    implementation: Implementation = None,
    matmul_implementation: MatmulImplementation = None,
) -> jax.Array:
    """Runs the experts on received tokens and combines their outputs.

    The result is combine(expert_mlp(received.tokens, ...), received.handle, topk_weights), bit for
    bit.

    The gradients differ from those of that composition by roundings: the products w · g and y are
    not rounded to the tokens' dtype, as they are not made, and h is rounded after w multiplies it.

    **What is kept for the backward pass**: what `expert_mlp` keeps, by the same names, and the
    weights. Under a `jax.checkpoint` that keeps none of it, the last product is not computed
    again, since no gradient needs y.

    Args:
      received: what this rank's `dispatch` returned.
      wi_0, wi_1, wo: as in `expert_mlp`.
      topk_weights: [T, K] floating, as in `combine`.
      activation: as in `expert_mlp`.
      implementation: of combine and its gradient, as in `dispatch`.
      matmul_implementation: as in `grouped_matmul`.

    Returns:
      [T, H], the dtype of the received tokens.

    Raises:
      TypeError, ValueError: as `expert_mlp` and `combine` do.
    """
    if not isinstance(received, Dispatched):
        raise TypeError(
            "received must be what a dispatch returned, a Dispatched, but is "
            f"{checks.described(received)}."
        )
    tokens, group_sizes, handle = received.tokens, received.group_sizes, received.handle
    check_operands(tokens, wi_0, wi_1, wo, group_sizes, matmul_implementation)
    checks.check_array("topk_weights", topk_weights, 2, jnp.floating, "[T, K]")
    operands = (tokens, wi_0, wi_1, wo, topk_weights.astype(jnp.float32), group_sizes)
    config = _Config(activation, implementation, matmul_implementation)
    return _routed_experts(config, *match_varying(operands, handle.axis_name), handle)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed_experts(config: _Config, tokens, wi_0, wi_1, wo, weights, group_sizes, handle):
    return _forward(config, tokens, wi_0, wi_1, wo, weights, group_sizes, handle)[0]


def _forward(config, tokens, wi_0, wi_1, wo, weights, group_sizes, handle: Handle):
    operands = (tokens, wi_0, wi_1, wo, group_sizes)
    y, saved = forward(*operands, config.activation, config.matmul_implementation)
    out = combine(y, handle, weights, implementation=config.implementation)
    return out, (saved, weights, handle)


def _backward(config, residuals, grad):
    saved, weights, handle = residuals
    grad_rows = dispatch_like(grad, handle, implementation=config.implementation)
    routes, axis = handle.routes, dict(axis_name=handle.axis_name)
    row_weights = primitives.choices_to_rows(weights, routes, capacity=handle.capacity, **axis)
    dtokens, *dmatrices, drow_weights = backward(
        saved, grad_rows, row_weights, config.activation, config.matmul_implementation
    )
    # The weights' gradient is sent no sooner than the tokens', for which the ranks meet anyway: a
    # collective that waits for its peers takes multiprocessors from a product that runs meanwhile.
    dtokens, drow_weights = lax.optimization_barrier((dtokens, drow_weights))
    dweights = primitives.rows_to_choices(drow_weights, routes, **axis)
    return dtokens, *dmatrices, dweights, None, None


_routed_experts.defvjp(_forward, _backward)
