"""Runs a rank's experts on chunks of its tokens, one after the other, to save memory.

The backward pass computes each chunk again, so no received rows are kept. Kernels add the gradients
of matrices in place if the sums have the dtype of the operands, or if they multiply float8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.moe import few_tokens
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import EXPERT_MATRICES, Experts, with_quantized
from jax_ep.moe.mesh import LayerMesh
from jax_ep.moe.routed_experts import RoutedTokens
from jax_ep.runtime.jax_compat import match_varying

# Gradients of bfloat16 matrices are summed in bfloat16 over at most this number of chunks, to save
# memory. Each addition then changes a sum by up to 2^-9 of itself, as does the rounding of a whole
# gradient. In bfloat16, a sum of equal numbers stops growing at 256 of them.
_MOST_ROUNDED_SUMS = 8


def run(
    experts: Experts,
    routed: RoutedTokens,
    config: MoEConfig,
    where: LayerMesh,
    param_dtypes: Collection[Any],
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [T, H] and the rows dropped by local expert, [L], as `by_dispatch` does.

    `param_dtypes` are the matrices' dtypes before they were cast to `config.dtype`.
    """
    num_chunks, num_tokens = config.token_chunks, routed.tokens.shape[0]
    if checks.is_symbolic(num_tokens):
        raise ValueError(
            "token_chunks must be 1 where the number of tokens is symbolic, as it may be for "
            f"jax.export, but is {num_chunks}."
        )
    # Few tokens may fill fewer chunks of `size` tokens than asked for.
    size = max(-(-num_tokens // num_chunks), 1)
    num_chunks = -(-num_tokens // size)
    if num_chunks <= 1:
        return few_tokens.run(experts, routed, config, where)

    # Quantizes the experts once, before the scan, and not again for each chunk.
    with jax.named_scope("experts"):
        experts = with_quantized(config.matmul_dtype, experts, config.matmul_implementation)
        experts, routed = match_varying((experts, routed), where.expert_axes)
    with jax.named_scope("dispatch"):
        chunks = RoutedTokens(
            _split(routed.tokens, num_chunks, size, padding=0),
            _split(routed.topk_idx, num_chunks, size, padding=-1),
            _split(routed.topk_weights, num_chunks, size, padding=0),
            routed.distinct,
        )
    with jax.named_scope("experts"):
        in_sum_dtype = _in_sum_dtype(experts, num_chunks, param_dtypes)
    out, counts = _all_chunks(config, where, in_sum_dtype, experts, chunks)
    with jax.named_scope("combine"):
        out = out.reshape(num_chunks * size, *out.shape[2:])[:num_tokens]
    with jax.named_scope("metrics"):
        return out, jnp.sum(counts, axis=0, dtype=counts.dtype)


def _in_sum_dtype(
    experts: Experts, num_chunks: int, param_dtypes: Collection[Any]
) -> dict[str, jax.Array]:
    """Casts the weights that have gradients to the dtypes in which chunks' gradients are summed."""
    dtypes = {experts.wo.dtype, *param_dtypes}
    sums_bfloat16 = num_chunks <= _MOST_ROUNDED_SUMS and dtypes == {jnp.dtype(jnp.bfloat16)}
    keep_dtype = EXPERT_MATRICES if sums_bfloat16 else ()
    return {
        name: array if name in keep_dtype else array.astype(wide_dtype(array.dtype))
        for name, array in experts._asdict().items()
        if isinstance(array, jax.Array)  # Matrices that are stored quantized have no gradient.
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_chunks(
    config: MoEConfig,
    where: LayerMesh,
    in_sum_dtype: dict[str, jax.Array],
    experts: Experts,
    chunks: RoutedTokens,
) -> tuple[jax.Array, jax.Array]:
    """Runs `experts` on each chunk, and stacks the results; `in_sum_dtype` gets their gradients."""

    # A gradient has the dtype of its operand. So the weights are also given as `in_sum_dtype`, cast
    # to the dtypes in which their gradients are summed.
    def of_chunk(_: None, chunk: RoutedTokens) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, few_tokens.run(experts, chunk, config, where)

    with jax.named_scope("token_chunks"):
        return lax.scan(of_chunk, None, chunks)[1]


def _all_chunks_fwd(config, where, in_sum_dtype, experts, chunks):
    # The backward pass reads only the dtypes of `in_sum_dtype`, so empty arrays replace these.
    dtypes = {name: jnp.zeros(0, array.dtype) for name, array in in_sum_dtype.items()}
    return _all_chunks(config, where, in_sum_dtype, experts, chunks), (dtypes, experts, chunks)


def _all_chunks_bwd(config, where, saved, cotangents):
    dtypes, experts, chunks = saved
    zeros = {
        name: jnp.zeros_like(getattr(experts, name), each.dtype) for name, each in dtypes.items()
    }
    douts, _ = cotangents
    add_chunk = functools.partial(_add_chunk, config, where, experts)
    with jax.named_scope("token_chunks"):
        sums, (dtokens, dweights) = lax.scan(add_chunk, zeros, (chunks, douts))
    # `in_sum_dtype` gets the sums, and `experts` and the expert ids no gradient.
    return (
        sums,
        None,
        dataclasses.replace(chunks, tokens=dtokens, topk_idx=None, topk_weights=dweights),
    )


def _add_chunk(
    config: MoEConfig,
    where: LayerMesh,
    experts: Experts,
    sums: dict[str, jax.Array],
    chunk: tuple[RoutedTokens, jax.Array],
) -> tuple[dict[str, jax.Array], tuple[jax.Array, jax.Array]]:
    """Adds a chunk's gradients of `experts` to `sums`; also returns its tokens' and weights'."""
    # `chunk` has the tokens, and the cotangent [size, H] of their output.
    routed, dout = chunk
    matrices = [name for name in EXPERT_MATRICES if name in sums]
    # Biases and adapters.
    others = {name: getattr(experts, name) for name in sums if name not in matrices}

    def output(sums_of_matrices: Any, others: Any, tokens: Any, weights: Any) -> jax.Array:
        with_sums = experts._replace(**others, sums=sums_of_matrices or None)
        given = dataclasses.replace(routed, tokens=tokens, topk_weights=weights)
        return few_tokens.run(with_sums, given, config, where)[0]

    sums_of_matrices = tuple(sums[name] for name in matrices)
    _, vjp = jax.vjp(output, sums_of_matrices, others, routed.tokens, routed.topk_weights)
    # The gradients of the matrices' sums are the new sums; see `Experts`.
    new_sums, dothers, dtokens, dweights = vjp(dout)
    with jax.named_scope("experts"):
        sums_of_others = {
            name: sums[name] + grad.astype(sums[name].dtype) for name, grad in dothers.items()
        }
    return dict(zip(matrices, new_sums, strict=True)) | sums_of_others, (dtokens, dweights)


_all_chunks.defvjp(_all_chunks_fwd, _all_chunks_bwd)


def _split(array: jax.Array, num_chunks: int, size: int, padding: int) -> jax.Array:
    """Splits an array [T, ...], filled up with `padding`, into chunks: [num_chunks, size, ...]."""
    missing = num_chunks * size - array.shape[0]
    if missing:
        widths = [(0, missing), *[(0, 0)] * (array.ndim - 1)]
        array = jnp.pad(array, widths, constant_values=jnp.asarray(padding, array.dtype))
    return array.reshape(num_chunks, size, *array.shape[1:])
