"""Runs experts on a few tokens without a dispatch, as in decoding on one rank.

There, a dispatch takes seven launches. Here, each chosen expert computes all tokens, and each token
then uses only the outputs of its experts (`pallas_kernels.matmul.chosen_groups`). Only the kernels
for Hopper GPUs can do this: other platforms and the backward pass use a dispatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.exchange.xla import sum_of_choices
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray, Transposed
from jax_ep.formats.quantized_array import without_gradient
from jax_ep.matmul import pallas, weight_only
from jax_ep.matmul.backend import Problem, pad_rows
from jax_ep.matmul.primitives import Implementation
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import Experts, matmuls_of
from jax_ep.moe.expert_mlp import forward
from jax_ep.moe.mesh import LayerMesh
from jax_ep.moe.routed_experts import RoutedTokens, by_dispatch
from jax_ep.runtime.jax_compat import looks_for_nans, match_varying
from pallas_kernels.matmul.chosen_groups import ChosenGroups, chosen_groups

# The most tokens for which each chosen expert computes all tokens. A tile of the matmul kernels has
# room for 64 tokens. Up to which number this is faster than a dispatch has not been measured.
MOST_TOKENS = 16
# The most tokens that are not quantized, although `matmul_dtype` is float8: for so few, matmuls of
# quantized matrices and bfloat16 rows are faster, and nothing is quantized between them.
MOST_UNQUANTIZED_TOKENS = 2

Run = Callable[..., tuple[jax.Array, Any]]


def supports(tokens: jax.Array, experts: Experts, config: MoEConfig, num_ranks: int) -> bool:
    """Returns whether experts may run on tokens [T, H] without a dispatch."""
    # These options ask for a dispatch, or change the rows that it sends. Adapters need such rows.
    of_dispatch = config.implementation, config.capacity_factor, config.wire_dtype
    asked = any(option is not None for option in of_dispatch) or config.weights_on != "output"
    if asked or num_ranks > 1 or experts.adapters:
        return False
    return _each_computes_all(tokens, experts, config)


def _each_computes_all(tokens: jax.Array, experts: Experts, config: MoEConfig) -> bool:
    """Returns whether a GPU may let an expert compute all of these tokens [T, H]."""
    num_tokens = tokens.shape[0]
    if checks.is_symbolic(num_tokens) or not 0 < num_tokens <= MOST_TOKENS:
        return False
    # JAX would report NaNs in rows of no token, which the kernels leave undefined.
    if config.matmul_implementation not in (None, "pallas") or looks_for_nans():
        return False
    quantized = config.matmul_dtype is not None
    dtype = config.matmul_dtype if quantized else tokens.dtype
    problems = (
        Problem(matrices.shape[1:], dtype, "cuda", num_tokens, has_scales=quantized)
        for matrices in (*experts.wi, experts.wo)
    )
    return all(pallas.unavailable_reason(problem) is None for problem in problems)


def run(
    experts: Experts, routed: RoutedTokens, config: MoEConfig, where: LayerMesh
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [T, H] and the rows dropped by local expert, [L], as `by_dispatch` does.

    On a GPU, unless it is differentiated, it needs no dispatch where `supports` allows that.
    """
    with_dispatch = functools.partial(by_dispatch, config=config, where=where)
    if not supports(routed.tokens, experts, config, where.num_ranks()):
        return with_dispatch(experts, routed)

    def by_chosen_experts(experts: Experts, routed: RoutedTokens) -> tuple[jax.Array, jax.Array]:
        out = output(experts, routed, config, implementation="pallas")
        dropped = jnp.zeros(experts.wi_0.shape[0], jnp.int32)
        # Both results must vary (vma) over the same axes as the results of `with_dispatch`.
        out, dropped, _ = match_varying((out, dropped, routed.topk_idx), where.expert_axes)
        return out, dropped

    return _by_platform(by_chosen_experts, with_dispatch, experts, routed, where.expert_axes)


def run_one(
    of_many: Callable[[Experts, jax.Array], jax.Array],
    experts: Experts,
    tokens: jax.Array,
    config: MoEConfig,
) -> jax.Array:
    """Runs the shared experts, [1, ...], on tokens [T, H]: a few by kernels, else by `of_many`."""
    if not _each_computes_all(tokens, experts, config):
        return of_many(experts, tokens)

    def of_few(experts: Experts, tokens: jax.Array) -> tuple[jax.Array, None]:
        count = len(tokens)
        # Every token chooses group 0, the only expert. Rows of the output past `count` are padding.
        groups, _ = chosen_groups(jnp.zeros((count, 1), jnp.int32), 1)
        return _outputs(experts, tokens, groups, config, implementation="pallas")[:count], None

    def on_any(experts: Experts, tokens: jax.Array) -> tuple[jax.Array, None]:
        return of_many(experts, tokens), None

    return _by_platform(of_few, on_any, experts, tokens, axes=())[0]


def _by_platform(
    on_gpu: Run, on_any: Run, experts: Experts, operand: Any, axes: tuple[str, ...]
) -> tuple[jax.Array, Any]:
    """Returns `on_gpu(experts, operand)` on a GPU; elsewhere, and where differentiated, `on_any`.

    `operand` is tokens or `RoutedTokens`. Both functions return the output and a pytree without
    gradient. Operands are cast to vary (vma) over `axes`, too.
    """
    # Quantized matrices have no gradient. They are an argument of their own, since differentiating
    # with respect to them, as `jax.vjp` does with all of its arguments, raises TypeError.
    quantized = {
        name: without_gradient(name, weights)
        for name, weights in experts._asdict().items()
        if name == "quantized" or isinstance(weights, QuantizedArray)
    }

    @jax.custom_vjp
    def compute(quantized: dict[str, Any], experts: Experts, operand: Any) -> Any:
        whole = experts._replace(**quantized)
        return lax.platform_dependent(whole, operand, cuda=on_gpu, default=on_any)

    def compute_and_keep(quantized: dict[str, Any], *operands: Any) -> tuple[Any, Any]:
        def of_arrays(experts: Experts, operand: Any) -> tuple[jax.Array, Any]:
            return on_any(experts._replace(**quantized), operand)

        out, vjp, aux = jax.vjp(of_arrays, *operands, has_aux=True)
        return (out, aux), vjp

    # The first cotangent is the output's; the other result has no gradient.
    compute.defvjp(compute_and_keep, lambda vjp, cotangents: (None, *vjp(cotangents[0])))
    arrays = experts._replace(**dict.fromkeys(quantized))
    return compute(*match_varying((quantized, arrays, operand), axes))


def _matrices_of_weight_only(
    experts: Experts, matmul_dtype: Any, tokens: jax.Array
) -> list[QuantizedArray] | None:
    """Returns the matrices, wo last, if quantized ones multiply unquantized tokens; else None."""
    if matmul_dtype is None:
        return [*experts.wi, experts.wo] if isinstance(experts.wo, QuantizedArray) else None
    if len(tokens) > MOST_UNQUANTIZED_TOKENS or tokens.dtype != jnp.bfloat16:
        return None
    assert experts.quantized is not None
    # Of both orders in which matrices were quantized, the kernel reads the transposed one.
    format = Transposed.of(FLOAT8_MATRICES)
    return [
        QuantizedArray(each.transposed.values, each.transposed.scales, format, each.matrices.dtype)
        for each in (*experts.quantized.wi, experts.quantized.wo)
    ]


def output(
    experts: Experts, routed: RoutedTokens, config: MoEConfig, implementation: Implementation
) -> jax.Array:
    """Computes each token's weighted sum of its experts' outputs, [T, H], without a dispatch."""
    with jax.named_scope("dispatch"):
        groups, rows = chosen_groups(routed.topk_idx, experts.wi_0.shape[0])
    with jax.named_scope("experts"):
        y = _outputs(experts, routed.tokens, groups, config, implementation)
    with jax.named_scope("combine"):
        return sum_of_choices(y, rows, routed.topk_weights).astype(y.dtype)


def _outputs(
    experts: Experts,
    tokens: jax.Array,
    groups: ChosenGroups,
    config: MoEConfig,
    implementation: Implementation,
) -> jax.Array:
    """Returns the outputs of the S chosen experts for all tokens, [S * groups.height, H]."""
    unit = config.unit()
    matmuls, experts = matmuls_of(unit, config.matmul_dtype, experts, implementation)
    stored = _matrices_of_weight_only(experts, config.matmul_dtype, tokens)
    if stored is None:
        rows = pad_rows(tokens)
        return forward(rows, experts, groups, matmuls, keep=False, zero_unused=False)[0]
    product = functools.partial(
        weight_only.product_of_stored,
        groups=groups,
        num_rows=len(tokens),
        implementation=implementation,
        zero_unused=False,
    )
    *wi, wo = stored
    (hidden,) = product(tokens, wi, experts.biases[: len(wi)], gating=unit)
    (out,) = product(hidden, [wo], [experts.wo_bias])
    return out
