"""Dispatches tokens, and computes their experts and the weighted sum of the outputs in one VJP.

The weighted output of a (token, choice) pair is w · y with y = h wo, where w is its top-k weight
and h the hidden values of its row. Let g be the cotangent of w · y, and dh = g woᵀ. Then

  d(h) = w · dh        d(wo) = (w · h)ᵀ g        d(w) = <dh, h>

These gradients need neither y nor w · g. A separate `combine` would keep y for its gradient, and
compute w · g and <g, y> in an additional pass over memory. Here, the pass over h and dh that
computes the gradient of the activation also applies the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.exchange.api import check_weights, combine, dispatch, dispatch_like
from jax_ep.exchange.gradients import choices_to_rows, rows_to_choices
from jax_ep.exchange.interface import Dispatched, Handle, Implementation
from jax_ep.formats import QuantizedArray
from jax_ep.matmul.primitives import Implementation as MatmulImplementation
from jax_ep.moe.config import MoEConfig, WeightsOn
from jax_ep.moe.expert_matmuls import ExpertMatmuls, Experts, matmuls_of
from jax_ep.moe.expert_mlp import Activation, backward, check_computation, check_operands, forward
from jax_ep.moe.lora import adapted_mlp
from jax_ep.moe.mesh import LayerMesh
from jax_ep.runtime.jax_compat import match_varying
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT


@dataclasses.dataclass(frozen=True)
class _Static:
    """The static arguments of `_routed_experts`."""

    implementation: Implementation  # of dispatch and combine
    matmuls: ExpertMatmuls
    # The dtype in which the backward pass sends the output's cotangents to the experts' ranks. None
    # means the dtype of the cotangents.
    grad_wire_dtype: Any
    # Whether the operand `tokens` are this rank's tokens [T, H], which were sent quantized.
    tokens_are_own: bool


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
    activation: Activation = jax.nn.silu,
    clamp: float | None = None,
    matmul_dtype: Any = None,
    weights_on: WeightsOn = "output",
    implementation: Implementation = None,
    matmul_implementation: MatmulImplementation = None,
) -> jax.Array:
    """Runs the experts on received tokens and combines their outputs.

    Equals combine(expert_mlp(received.tokens, ...), received.handle, topk_weights), bit for bit.

    The gradients differ from those of this composition by rounding alone: the backward pass
    computes neither the experts' output nor its weighted cotangent, and rounds the hidden values
    after the weights have multiplied them.

    **What is kept for the backward pass**: `topk_weights` and what `expert_mlp` keeps.

    Args:
      received: the result of this rank's `dispatch`. With `matmul_dtype`, its tokens may be a
        `QuantizedArray`; they then get no gradient.
      wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias: as in `expert_mlp`.
      topk_weights: [T, K] floating, as in `combine`.
      activation, clamp, matmul_dtype: as in `expert_mlp`.
      weights_on: whether the weight of a choice multiplies the "output" of its expert or the
        "input" (Llama 4).
      implementation: the implementation of combine and its gradient, as in `dispatch`.
      matmul_implementation: as in `grouped_matmul`.

    Returns:
      [T, H], the dtype of the received tokens.

    Raises:
      TypeError, ValueError: as `expert_mlp` and `combine` do.
    """
    checks.check_name("weights_on", weights_on, get_args(WeightsOn))
    _check_received(received, matmul_dtype)
    config = MoEConfig(
        num_experts=received.handle.num_experts,
        num_experts_per_token=received.handle.shape[2],
        activation=activation,
        clamp=clamp,
        matmul_dtype=matmul_dtype,
        weights_on=weights_on,
        implementation=implementation,
        matmul_implementation=matmul_implementation,
    )
    experts = Experts(wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias)
    check_operands(received.tokens, experts, received.group_sizes, config.unit(), matmul_dtype)
    check_weights(topk_weights, received.handle.shape[1:])
    return _run_experts(received, experts, topk_weights, config)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutedTokens:
    """A rank's tokens and their choices of experts, or of slots; a pytree."""

    tokens: jax.Array  # [T, H]
    topk_idx: jax.Array  # [T, K] int32
    topk_weights: jax.Array  # [T, K] float32
    # whether no token chooses an expert twice
    distinct: bool = dataclasses.field(metadata={"static": True})


def by_dispatch(
    experts: Experts, routed: RoutedTokens, config: MoEConfig, where: LayerMesh
) -> tuple[jax.Array, jax.Array]:
    """Returns the combined output [T, H], and the rows dropped by local expert or slot, [L]."""
    tokens = routed.tokens
    # Float8 matmuls quantize each row by itself, so rows are quantized before they are sent, also
    # without a wire_dtype: the numbers are the same. With weights_on="input", rows are multiplied
    # by their weights on arrival, and must be quantized after that.
    stays_quantized = config.matmul_dtype is not None and config.weights_on == "output"
    without_wire = config.matmul_dtype if stays_quantized else None
    capacity = receive_capacity(config, tokens.shape[0], where.num_ranks(), routed.distinct)
    host_capacity = None
    if config.host_capacity_factor is not None and where.expert_axes:
        num_tokens = tokens.shape[0]
        host_capacity = min(num_tokens, math.ceil(config.host_capacity_factor * num_tokens))
    with jax.named_scope("dispatch"):
        received = dispatch(
            lax.stop_gradient(tokens) if stays_quantized else tokens,
            routed.topk_idx,
            num_experts=config.num_held,
            axis_name=where.expert_axes,
            capacity=capacity,
            # Without a capacity factor, every row fits, so "tail" and "fair" give the same result.
            overflow="tail" if config.capacity_factor is None else "fair",
            host_capacity=host_capacity,
            wire_dtype=without_wire if config.wire_dtype is None else config.wire_dtype,
            output="quantized" if stays_quantized else "dequantized",
            zero_unused=False,
            implementation=config.implementation,
        )
    # Quantized rows have no gradient, so `_run_experts` sends the rows' gradient back to `tokens`.
    own_tokens = tokens if stays_quantized else None
    out = _run_experts(received, experts, routed.topk_weights, config, own_tokens)
    return out, received.dropped_counts


def receive_capacity(
    config: MoEConfig, num_tokens: int, num_ranks: int, distinct: bool
) -> int | None:
    """Returns R, the rows of a rank's buffer for its `num_tokens`; None if that is symbolic."""
    if checks.is_symbolic(num_tokens):
        for name in ("capacity_factor", "host_capacity_factor"):
            if (factor := getattr(config, name)) is not None:
                raise ValueError(
                    f"{name} must be None where the number of tokens is symbolic, as it may be for "
                    f"jax.export, but is {factor}."
                )
        return None
    num_local_experts = config.num_held // num_ranks
    k = config.num_experts_per_token
    # The most rows that a rank receives of one token. If `distinct`, it chooses no expert twice.
    rows_of_token = min(k, num_local_experts) if distinct else k
    rows = num_ranks * max(num_tokens, 1) * rows_of_token
    if config.capacity_factor is not None:
        rows = min(rows, math.ceil(config.capacity_factor * (max(num_tokens, 1) * k)))
    # R is a multiple of ROW_ALIGNMENT, because the matmul kernels would have to copy any other
    # receive buffer to pad it.
    rows = -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    if rows > checks.MAX_INT32:
        raise ValueError(
            f"capacity_factor must give a rank at most {checks.MAX_INT32} rows, but is "
            f"{config.capacity_factor}, with which it has {rows}."
        )
    return rows


def _run_experts(
    received: Dispatched,
    experts: Experts,
    topk_weights: jax.Array,
    config: MoEConfig,
    own_tokens: jax.Array | None = None,
) -> jax.Array:
    """Computes `routed_experts` by the options of `config`.

    The gradient of received tokens that are a `QuantizedArray` goes to `own_tokens` [T, H], the
    tokens of this rank before dispatch, or nowhere.
    """
    unit, implementation = config.unit(), config.implementation
    group_sizes, handle = received.group_sizes, received.handle
    # The cotangents of tokens that were sent quantized may be quantized, too, since the matmuls
    # quantize them anyway. But the gradient of wo_bias needs them unquantized.
    sent_quantized = isinstance(received.tokens, QuantizedArray) or config.wire_dtype is not None
    grad_wire_dtype = config.matmul_dtype if sent_quantized and experts.wo_bias is None else None
    tokens, quantized = _tokens_and_values(received.tokens, own_tokens, config)
    with jax.named_scope("dispatch"):
        topk_weights = topk_weights.astype(jnp.float32)
        weights: jax.Array | None = topk_weights
        if config.weights_on == "input":
            # Each received row is multiplied by the weight of its (token, choice) pair.
            row_weights = choices_to_rows(topk_weights, handle, implementation)[:, None]
            wide = wide_dtype(tokens.dtype)
            tokens = (tokens.astype(wide) * row_weights.astype(wide)).astype(tokens.dtype)
            weights = None
    if experts.adapters:
        with jax.named_scope("experts"):
            y = adapted_mlp(tokens, experts, group_sizes, config)
        with jax.named_scope("combine"):
            return combine(y, handle, weights, implementation=implementation)
    options = config.matmul_dtype, config.matmul_implementation, "matmul_implementation"
    check_computation(tokens, experts, unit, *options)
    with jax.named_scope("experts"):
        arrays = jax.tree.map(jnp.asarray, (tokens, experts, quantized, weights, group_sizes))
        arrays = match_varying(arrays, handle.axis_name)
        tokens, experts, quantized, weights, group_sizes = arrays
        if handle.rows.shape[1] == 0:
            # Without tokens. The result is typed as varying over the operands' axes (vma).
            zeros, *_ = match_varying((jnp.zeros((0, tokens.shape[1]), tokens.dtype), *arrays))
            return zeros
        matmuls, experts = matmuls_of(
            unit, config.matmul_dtype, experts, config.matmul_implementation
        )
    static = _Static(implementation, matmuls, grad_wire_dtype, own_tokens is not None)
    return _routed_experts(static, tokens, experts, quantized, weights, group_sizes, handle)


def _tokens_and_values(
    tokens: jax.Array | QuantizedArray, own_tokens: jax.Array | None, config: MoEConfig
) -> tuple[jax.Array, QuantizedArray | None]:
    """Returns what gets the gradient of `tokens`, or zeros; and `tokens` if they stay quantized."""
    if not isinstance(tokens, QuantizedArray):
        return tokens, None
    if config.weights_on == "input":
        return tokens.dequantize(), None
    return jnp.zeros(tokens.shape, tokens.dtype) if own_tokens is None else own_tokens, tokens


def _check_received(received: Any, matmul_dtype: Any) -> None:
    if not isinstance(received, Dispatched):
        raise TypeError(
            "received must be what a dispatch returned, a Dispatched, but is "
            f"{checks.described(received)}."
        )
    tokens = received.tokens
    if isinstance(tokens, QuantizedArray) and matmul_dtype is None:
        raise TypeError(
            "received.tokens must be an array, since the experts multiply tokens as they are, "
            f"but is a QuantizedArray of {tokens.format.name} of shape {tokens.shape}; set "
            'matmul_dtype, or dispatch with output="dequantized".'
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed_experts(static: _Static, tokens, experts, quantized, weights, group_sizes, handle):
    """Runs the experts on `quantized`, or on `tokens` if that is None; combines by `weights`."""
    return _forward(static, tokens, experts, quantized, weights, group_sizes, handle, keep=False)[0]


def _forward(
    static, tokens, experts, quantized, weights, group_sizes, handle: Handle, keep: bool = True
):
    # Returns the output of `_routed_experts`, and with `keep` the residuals of `_backward`.
    matmuls = static.matmuls
    tokens, experts, weights = matmuls.differentiated_once((tokens, experts, weights))
    if quantized is not None:
        tokens = quantized
    with jax.named_scope("experts"):
        y, saved = forward(tokens, experts, group_sizes, matmuls, keep, zero_unused=False)
    with jax.named_scope("combine"):
        out = combine(y, handle, weights, implementation=static.implementation)
    return out, (saved, weights, handle)


def _backward(static, residuals, grad):
    # Returns the gradients of the arrays of `_routed_experts`, in their order.
    saved, weights, handle = residuals
    grad = static.matmuls.differentiated_once(grad)
    # No gradient reads the cotangents in rows past the last group, so the dispatch of the
    # cotangents may leave these rows undefined.
    rows_of_groups = dataclasses.replace(handle, zero_unused=False)
    with jax.named_scope("combine"):
        grad_rows = dispatch_like(
            grad,
            rows_of_groups,
            wire_dtype=static.grad_wire_dtype,
            output="dequantized" if static.grad_wire_dtype is None else "quantized",
            implementation=static.implementation,
        )
        row_weights = None
        if weights is not None:
            row_weights = choices_to_rows(weights, handle, static.implementation)
    with jax.named_scope("experts"):
        dtokens, dexperts, drow_weights = backward(
            saved,
            grad_rows,
            row_weights,
            static.matmuls,
            handle.zero_unused,
            # A rank receives T * K rows on average.
            mean_rows=None if weights is None else weights.size,
        )
    # None means weights_on="input": `tokens` are then received rows, times their weights.
    if weights is None:
        return dtokens, dexperts, None, None, None, None
    # The barrier delays the exchange of the weights' gradient until the tokens' gradient has been
    # computed. An earlier exchange would wait for peers, and meanwhile occupy multiprocessors that
    # the matmuls of the tokens' gradient need.
    dtokens, drow_weights = lax.optimization_barrier((dtokens, drow_weights))
    with jax.named_scope("combine"):
        dweights = rows_to_choices(drow_weights, handle, static.implementation)
    if static.tokens_are_own:
        with jax.named_scope("dispatch"):
            dtokens = combine(dtokens, handle, implementation=static.implementation)
    return dtokens, dexperts, None, dweights, None, None


_routed_experts.defvjp(_forward, _backward)
