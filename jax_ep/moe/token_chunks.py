"""Runs a rank's experts on chunks of its tokens, one after the other, to save memory.

A receive buffer that fits any routing of T tokens per rank has N * T * min(K, E / N) rows on each
of N ranks. With c chunks, it has 1 / c of these rows. The backward pass dispatches each chunk and
computes its rows again, so that no received rows are kept until then.

A `lax.scan` runs the chunks. The router's choices, the experts in the compute dtype and their
quantized matrices are computed once, before the scan. In the backward pass, a scan sums the
experts' gradients over the chunks. The matmuls add the gradients of matrices to the sums of those
before: kernels do so in place if the sums have the dtype of the operands, or if they multiply
float8. After the scan, the gradients are summed once over the ranks that hold the same experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import Experts, QuantizedExperts, with_quantized
from jax_ep.runtime.jax_compat import match_varying

Run = Callable[..., tuple[jax.Array, jax.Array]]
# Gradients of bfloat16 matrices are summed in bfloat16 over at most this number of chunks, to save
# memory. Each addition then changes a sum by up to 2^-9 of itself, as does the rounding of a whole
# gradient. Sums of many gradients need float32: in bfloat16, a sum of equal numbers stops growing
# at 256 of them.
_MOST_ROUNDED_SUMS = 8


def run(
    function: Run,
    experts: Experts,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    config: MoEConfig,
    expert_axes: tuple[str, ...],
    param_dtypes: Collection[Any],
) -> tuple[jax.Array, jax.Array]:
    """Calls `function(experts, *arrays)` for each of `config.token_chunks` chunks of tokens.

    Args:
      function: called with the experts, and with tokens [t, H], expert ids [t, K] and weights
        [t, K] of a chunk of t tokens. It returns the outputs of these tokens, [t, H], and an
        int32 array with a count for each of this rank's experts.
      experts: the weights of this rank's experts.
      arrays: tokens [T, H], expert ids [T, K] and weights [T, K] of all of this rank's tokens.
      config: the configuration of the layer.
      expert_axes: the mesh axes that the experts are spread over.
      param_dtypes: the dtypes of the layer's parameters wi_0, wi_1 and wo. Gradients of matrices
        may be summed in bfloat16 if these and the matrices in `experts` are bfloat16.

    Returns:
      The outputs of all tokens, [T, H], and each expert's count, summed over the chunks.

    Raises:
      ValueError: the number of tokens is symbolic, and there are several chunks.
    """
    num_chunks, num_tokens = config.token_chunks, arrays[0].shape[0]
    if num_chunks == 1:
        return function(experts, *arrays)
    if checks.is_symbolic(num_tokens):
        raise ValueError(
            "token_chunks must be 1 where the number of tokens is symbolic, as it may be for "
            f"jax.export, but is {num_chunks}."
        )
    size = -(-num_tokens // num_chunks)
    num_chunks = -(-num_tokens // size)
    if num_chunks == 1:
        return function(experts, *arrays)

    # Quantizes the experts once, before the scan, and not again for each chunk.
    with jax.named_scope("experts"):
        experts = with_quantized(config.matmul_dtype, experts, config.matmul_implementation)
    leaves, tree = jax.tree.flatten((experts, arrays))
    experts, arrays = jax.tree.unflatten(tree, match_varying(leaves, expert_axes))
    tokens, topk_idx, topk_weights = arrays
    chunks = [
        _split(array, num_chunks, size, padding)
        for array, padding in ((tokens, 0), (topk_idx, -1), (topk_weights, 0))
    ]
    # Matrices that are stored quantized are left out, since they have no gradient.
    floats = {
        name: array for name, array in experts._asdict().items() if isinstance(array, jax.Array)
    }
    dtypes = {experts.wo.dtype, *param_dtypes}
    is_rounded = num_chunks <= _MOST_ROUNDED_SUMS and dtypes == {jnp.dtype(jnp.bfloat16)}
    keep_dtype = QuantizedExperts._fields if is_rounded else ()
    summed = {
        name: array if name in keep_dtype else array.astype(wide_dtype(array.dtype))
        for name, array in floats.items()
    }
    out, counts = _all_chunks(function, summed, experts, tuple(chunks))
    out = out.reshape(num_chunks * size, *out.shape[2:])[:num_tokens]
    return out, jnp.sum(counts, axis=0, dtype=counts.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_chunks(
    function: Run,
    summed: dict[str, jax.Array],
    experts: Experts,
    chunks: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Calls `function(experts, *chunk)` for each chunk, and stacks the results.

    `summed` has the experts' arrays that have gradients, in the dtypes in which these are summed.
    The gradients go to `summed`, and not to `experts`.
    """

    def of_chunk(_: None, chunk: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, function(experts, *chunk)

    return lax.scan(of_chunk, None, chunks)[1]


def _all_chunks_fwd(function, summed, experts, chunks):
    # Of the arrays `summed`, the backward pass reads only the dtypes, so empty arrays replace them.
    dtypes = {name: jnp.zeros(0, array.dtype) for name, array in summed.items()}
    return _all_chunks(function, summed, experts, chunks), (dtypes, experts, chunks)


def _all_chunks_bwd(function, saved, cts):
    dtypes, experts, (tokens, topk_idx, topk_weights) = saved
    zeros = {
        name: jnp.zeros_like(getattr(experts, name), each.dtype) for name, each in dtypes.items()
    }
    matrices = [name for name in QuantizedExperts._fields if name in zeros]

    def of_chunk(sums: dict[str, jax.Array], chunk: Any) -> Any:
        tokens, topk_idx, topk_weights, ct = chunk
        biases = {name: getattr(experts, name) for name in sums if name not in matrices}

        def out(sums: Any, biases: Any, tokens: jax.Array, topk_weights: jax.Array) -> jax.Array:
            given = experts._replace(**biases, sums=sums or None)
            return function(given, tokens, topk_idx, topk_weights)[0]

        of_matrices = tuple(sums[name] for name in matrices)
        _, pull = jax.vjp(out, of_matrices, biases, tokens, topk_weights)
        # The gradients of the matrices' sums are the new sums; see `Experts`.
        new, dbiases, dtokens, dweights = pull(ct)
        added = {name: sums[name] + each.astype(sums[name].dtype) for name, each in dbiases.items()}
        return dict(zip(matrices, new, strict=True)) | added, (dtokens, dweights)

    sums, (dtokens, dweights) = lax.scan(of_chunk, zeros, (tokens, topk_idx, topk_weights, cts[0]))
    return sums, None, (dtokens, None, dweights)


_all_chunks.defvjp(_all_chunks_fwd, _all_chunks_bwd)


def _split(array: jax.Array, num_chunks: int, size: int, padding: int) -> jax.Array:
    """Splits an array [T, ...], filled up with `padding`, into chunks: [num_chunks, size, ...]."""
    missing = num_chunks * size - array.shape[0]
    if missing:
        widths = [(0, missing), *[(0, 0)] * (array.ndim - 1)]
        array = jnp.pad(array, widths, constant_values=jnp.asarray(padding, array.dtype))
    return array.reshape(num_chunks, size, *array.shape[1:])
