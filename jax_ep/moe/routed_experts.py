"""Computes the experts and the weighted sum of their outputs, with one custom VJP for both.

The weighted output of a (token, choice) pair is w · y with y = h wo, where w is its top-k weight
and h the hidden values of its row. Let g be the cotangent of w · y, and dh = g woᵀ. Then

  d(h) = w · dh        d(wo) = (w · h)ᵀ g        d(w) = <dh, h>

These gradients need neither y nor w · g. A separate `combine` would keep y for its gradient, and
compute w · g and <g, y> in an additional pass over memory. Here, the pass over h and dh that
computes the gradient of the gating also applies the weights.
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
from jax_ep.exchange.expert_major import check_weights, stand_in_rows
from jax_ep.formats import QuantizedArray
from jax_ep.matmul.primitives import Implementation as MatmulImplementation
from jax_ep.moe.expert_matmuls import Experts, Matmuls, matmuls_of
from jax_ep.moe.expert_mlp import (
    ExpertUnit,
    backward,
    check_operands,
    forward,
    traced_unit,
)
from jax_ep.moe.options import documented, make_options, one_of, option, takes
from jax_ep.moe.traced import Traced
from jax_ep.runtime.jax_compat import match_varying

WeightsOn = Literal["output", "input"]


@documented(ExpertUnit)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOptions(ExpertUnit):
    """Options of what the routed experts compute: the fields of `ExpertUnit`, and `weights_on`.

    Attributes:
        {ExpertUnit}
        weights_on: whether the weight of a choice multiplies the "output" of its expert or the
            "input" (Llama 4).
    """

    weights_on: WeightsOn = option("output", one_of(WeightsOn))


@dataclasses.dataclass(frozen=True)
class _Config:
    unit: Traced
    implementation: Implementation
    matmuls: Matmuls
    # The dtype in which the backward pass sends the output's cotangents to the experts' ranks. None
    # means the dtype of the cotangents.
    grad_wire_dtype: Any


@documented(ExpertOptions)
@takes(ExpertOptions, before="implementation")
def routed_experts(
    received: Dispatched,
    wi_0: jax.Array | QuantizedArray,
    wi_1: jax.Array | QuantizedArray | None,
    wo: jax.Array | QuantizedArray,
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
    runs (Llama 4), and the outputs are summed without weights.

    The gradients differ from the gradients of this composition of `expert_mlp` and `combine` only
    by rounding. The backward pass does not compute the experts' output and its weighted cotangent,
    so these are not rounded to the tokens' dtype. It rounds the hidden values after the weights
    have multiplied them.

    **What is kept for the backward pass**: `topk_weights` and what `expert_mlp` keeps, by the same
    names. Even under a `jax.checkpoint` that keeps none of these values, the backward pass does not
    compute the product with wo again.

    `activation` and the other options are the fields of `ExpertOptions`, as keyword arguments.

    Args:
      received: the result of this rank's `dispatch`. With `matmul_dtype`, its tokens may be a
        `QuantizedArray`; they then get no gradient.
      wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias: as in `expert_mlp`.
      topk_weights: [T, K] floating, as in `combine`.
      {ExpertOptions}
      implementation: the implementation of combine and its gradient, as in `dispatch`.
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
    own_tokens: jax.Array | None = None,
) -> jax.Array:
    """Computes `routed_experts`, with its options as one object and the weights as `Experts`.

    If `options.matmul_dtype` is set, the received tokens may be a `QuantizedArray`. Their gradient
    then goes to `own_tokens` [T, H], the tokens of this rank before dispatch. If `own_tokens` is
    None, the tokens get no gradient.
    """
    if not isinstance(received, Dispatched):
        raise TypeError(
            "received must be what a dispatch returned, a Dispatched, but is "
            f"{checks.described(received)}."
        )
    tokens, group_sizes, handle = received.tokens, received.group_sizes, received.handle
    quantized: QuantizedArray | None = None
    grad_wire_dtype = None
    if isinstance(tokens, QuantizedArray):
        if options.matmul_dtype is None:
            raise TypeError(
                "received.tokens must be an array, since the experts multiply tokens as they are, "
                f"but is a QuantizedArray of {tokens.format.name} of shape {tokens.shape}; set "
                'matmul_dtype, or dispatch with output="dequantized".'
            )
        quantized = tokens
        # The cotangents may be sent quantized, since the matmuls quantize them anyway. But the
        # gradient of wo_bias needs them unquantized.
        if experts.wo_bias is None:
            grad_wire_dtype = tokens.format.dtype
        if own_tokens is None:
            tokens = jnp.zeros(quantized.shape, quantized.dtype)
        else:
            tokens = stand_in_rows(
                own_tokens.astype(quantized.dtype),
                handle,
                wire_dtype=None,
                grad_wire_dtype=None,
                implementation=implementation,
            )
        if options.weights_on == "input":
            tokens, quantized = tokens + quantized.dequantize(), None
    check_operands(
        tokens, experts, group_sizes, options, matmul_implementation, "matmul_implementation"
    )
    check_weights(topk_weights, handle)
    row_weights = topk_weights.astype(jnp.float32)
    weights: jax.Array | None = row_weights
    if options.weights_on == "input":
        tokens, weights = _weighted(tokens, row_weights, handle, implementation), None
    arrays = jax.tree.map(jnp.asarray, (tokens, experts, quantized, weights, group_sizes))
    leaves, tree = jax.tree.flatten(arrays)
    tokens, experts, *others = jax.tree.unflatten(tree, match_varying(leaves, handle.axis_name))
    traced = traced_unit(options, tokens, experts)
    with jax.named_scope("experts"):
        matmuls, experts = matmuls_of(options.matmul_dtype, experts, matmul_implementation)
    config = _Config(traced, implementation, matmuls, grad_wire_dtype)
    return _routed_experts(config, tokens, experts, *others, handle)


def _weighted(
    tokens: jax.Array, weights: jax.Array, handle: Handle, implementation: Implementation
) -> jax.Array:
    """Multiplies each received row of `tokens` by the weight of its (token, choice) pair.

    `weights` [T, K] are the weights of this rank's own tokens. They are sent to the ranks that
    received these tokens; `handle` is the one that dispatch returned.
    """
    weights, *_ = match_varying((weights, *handle.routes), handle.axis_name)
    rows = _weight_of_row(weights.astype(jnp.float32), handle, implementation)[:, None]
    wide = wide_dtype(tokens.dtype)
    return (tokens.astype(wide) * rows.astype(wide)).astype(tokens.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed_experts(config: _Config, tokens, experts, quantized, weights, group_sizes, handle):
    return _forward(config, tokens, experts, quantized, weights, group_sizes, handle, keep=False)[0]


def _forward(
    config, tokens, experts, quantized, weights, group_sizes, handle: Handle, keep: bool = True
):
    unit, matmuls = config.unit, config.matmuls
    if quantized is not None:
        tokens = quantized
    with jax.named_scope("experts"):
        y, saved = forward(tokens, experts, group_sizes, unit, matmuls, keep, zero_unused=False)
    with jax.named_scope("combine"):
        out = combine(y, handle, weights, implementation=config.implementation)
    return out, (saved, weights, handle)


def _backward(config, residuals, grad):
    saved, weights, handle = residuals
    # No gradient reads the cotangents in rows past the last group, so the dispatch of the
    # cotangents may leave these rows undefined.
    rows_of_groups = dataclasses.replace(handle, zero_unused=False)
    with jax.named_scope("combine"):
        grad_rows = dispatch_like(
            grad,
            rows_of_groups,
            wire_dtype=config.grad_wire_dtype,
            output="dequantized" if config.grad_wire_dtype is None else "quantized",
            implementation=config.implementation,
        )
        row_weights = None
        if weights is not None:
            row_weights = choices_to_rows(weights, handle, config.implementation)
    with jax.named_scope("experts"):
        dtokens, dexperts, drow_weights = backward(
            saved,
            grad_rows,
            row_weights,
            config.unit,
            config.matmuls,
            handle.zero_unused,
            mean_rows=None if weights is None else weights.size,
        )
    if weights is None:
        return dtokens, dexperts, None, None, None, None
    # The barrier delays the exchange of the weights' gradient until the tokens' gradient has been
    # computed. An earlier exchange would wait for peers, and meanwhile occupy multiprocessors that
    # the matmuls of the tokens' gradient need.
    dtokens, drow_weights = lax.optimization_barrier((dtokens, drow_weights))
    with jax.named_scope("combine"):
        dweights = rows_to_choices(drow_weights, handle, config.implementation)
    return dtokens, dexperts, None, dweights, None, None


_routed_experts.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _weight_of_row(weights: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Sends the weights [T, K] of this rank's choices to the ranks that received their rows.

    Returns the weight of each row that this rank received, float32. The gradient sends the
    cotangents of the rows' weights back to the choices.
    """
    return choices_to_rows(weights, handle, implementation)


_weight_of_row.defvjp(
    lambda weights, handle, implementation: (
        choices_to_rows(weights, handle, implementation),
        handle,
    ),
    lambda implementation, handle, grad: (rows_to_choices(grad, handle, implementation), None),
)
