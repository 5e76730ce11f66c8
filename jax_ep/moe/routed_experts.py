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
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.exchange.api import Dispatched, Handle, Implementation, combine, dispatch_like
from jax_ep.exchange.choice_values import choices_to_rows, rows_to_choices
from jax_ep.exchange.expert_major import check_weights
from jax_ep.matmul.api import Implementation as MatmulImplementation
from jax_ep.moe.expert_mlp import (
    Experts,
    HiddenUnit,
    backward,
    check_operands,
    forward,
    traced_unit,
)
from jax_ep.moe.options import documented, make_options, one_of, option, takes
from jax_ep.moe.traced import Traced
from jax_ep.runtime.jax_compat import match_varying

WeightsOn = Literal["output", "input"]


@documented(HiddenUnit)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOptions(HiddenUnit):
    """What routed experts compute, besides their weights.

    Attributes:
        {HiddenUnit}
        weights_on: what the weight of a choice multiplies: the "output" of its expert, or the
            "input" (Llama 4).
    """

    weights_on: WeightsOn = option("output", one_of(WeightsOn))


@dataclasses.dataclass(frozen=True)
class _Config:
    unit: Traced
    implementation: Implementation
    matmul_implementation: MatmulImplementation


@documented(ExpertOptions)
@takes(ExpertOptions, before="implementation")
def routed_experts(
    received: Dispatched,
    wi_0: jax.Array,
    wi_1: jax.Array | None,
    wo: jax.Array,
    topk_weights: jax.Array,
    *,
    wi_0_bias: jax.Array | None = None,
    wi_1_bias: jax.Array | None = None,
    wo_bias: jax.Array | None = None,
    implementation: Implementation = None,
    matmul_implementation: MatmulImplementation = None,
    **options: Any,
) -> jax.Array:
    """Runs the experts on received tokens and combines their outputs.

    The result is combine(expert_mlp(received.tokens, ...), received.handle, topk_weights), bit for
    bit. With weights_on="input" each received row is multiplied by its weight before its expert
    sees it (Llama 4), and the outputs are summed as they are.

    The gradients differ from those of that composition in their roundings, in the terms of this
    module: the experts' output y and w · g are not computed, so they are not rounded to the tokens'
    dtype, and the gated product h is rounded after w multiplies it.

    **Kept for the backward pass** are the weights and what `expert_mlp` keeps, by the same names.
    Under a `jax.checkpoint` that keeps none of it, the product by wo is not computed again, since
    no gradient needs y.

    Args:
      received: what this rank's `dispatch` returned, its scales None.
      wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias: as in `expert_mlp`.
      topk_weights: [T, K] floating, as in `combine`.
      {ExpertOptions}
      implementation: of combine and its gradient, as in `dispatch`.
      matmul_implementation: as in `grouped_matmul`.

    Returns:
      [T, H], the dtype of the received tokens.

    Raises:
      TypeError, ValueError: as `expert_mlp` and `combine` do.
    """
    experts = Experts(wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias)
    given = make_options(ExpertOptions, options, "routed_experts")
    return run_experts(
        received, experts, topk_weights, given, implementation, matmul_implementation
    )


def run_experts(
    received: Dispatched,
    experts: Experts,
    topk_weights: jax.Array,
    options: ExpertOptions,
    implementation: Implementation,
    matmul_implementation: MatmulImplementation,
) -> jax.Array:
    """Does what `routed_experts` does."""
    if not isinstance(received, Dispatched):
        raise TypeError(
            "received must be what a dispatch returned, a Dispatched, but is "
            f"{checks.described(received)}."
        )
    if received.scales is not None:
        raise ValueError(
            "received.scales must be None, since the experts multiply tokens as they are, but is "
            f'an array of shape {received.scales.shape}; dispatch with output="dequantized".'
        )
    tokens, group_sizes, handle = received.tokens, received.group_sizes, received.handle
    check_operands(
        tokens, experts, group_sizes, options, matmul_implementation, "matmul_implementation"
    )
    check_weights(topk_weights, handle)
    row_weights = topk_weights.astype(jnp.float32)
    weights: jax.Array | None = row_weights
    if options.weights_on == "input":
        tokens, weights = _weighted(tokens, row_weights, handle, implementation), None
    arrays = jax.tree.map(jnp.asarray, (tokens, experts, weights, group_sizes))
    leaves, tree = jax.tree.flatten(arrays)
    operands = jax.tree.unflatten(tree, match_varying(leaves, handle.axis_name))
    traced = traced_unit(options, *operands[:2])
    config = _Config(traced, implementation, matmul_implementation)
    return _routed_experts(config, *operands, handle)


def _weighted(
    tokens: jax.Array, weights: jax.Array, handle: Handle, implementation: Implementation
) -> jax.Array:
    """Multiplies each received row by the weight of its choice."""
    weights, *_ = match_varying((weights, *handle.routes), handle.axis_name)
    rows = _weight_of_row(weights.astype(jnp.float32), handle, implementation)[:, None]
    wide = wide_dtype(tokens.dtype)
    return (tokens.astype(wide) * rows.astype(wide)).astype(tokens.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed_experts(config: _Config, tokens, experts, weights, group_sizes, handle):
    return _forward(config, tokens, experts, weights, group_sizes, handle, keep=False)[0]


def _forward(config, tokens, experts, weights, group_sizes, handle: Handle, keep: bool = True):
    unit, implementation = config.unit, config.matmul_implementation
    y, saved = forward(tokens, experts, group_sizes, unit, implementation, keep, zero_unused=False)
    out = combine(y, handle, weights, implementation=config.implementation)
    return out, (saved, weights, handle)


def _backward(config, residuals, grad):
    saved, weights, handle = residuals
    # The rows past the last group, which a buffer for any routing has many of, change nothing here.
    rows_of_groups = dataclasses.replace(handle, zero_unused=False)
    grad_rows = dispatch_like(grad, rows_of_groups, implementation=config.implementation)
    row_weights = None
    if weights is not None:
        row_weights = choices_to_rows(weights, handle, config.implementation)
    dtokens, dexperts, drow_weights = backward(
        saved,
        grad_rows,
        row_weights,
        config.unit,
        config.matmul_implementation,
        handle.zero_unused,
    )
    if weights is None:
        return dtokens, dexperts, None, None, None
    # The weights' gradient is sent no sooner than the tokens', for which the ranks meet anyway: a
    # collective that waits for its peers takes multiprocessors from a product that runs meanwhile.
    dtokens, drow_weights = lax.optimization_barrier((dtokens, drow_weights))
    dweights = rows_to_choices(drow_weights, handle, config.implementation)
    return dtokens, dexperts, dweights, None, None


_routed_experts.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _weight_of_row(weights: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Returns [R] float32, the weight of each row's choice."""
    return choices_to_rows(weights, handle, implementation)


_weight_of_row.defvjp(
    lambda weights, handle, implementation: (
        choices_to_rows(weights, handle, implementation),
        handle,
    ),
    lambda implementation, handle, grad: (rows_to_choices(grad, handle, implementation), None),
)
