"""Runs a rank's experts on chunks of its tokens, one after the other, to save memory.

A receive buffer that fits any routing of T tokens per rank has N * T * min(K, E / N) rows on each
of N ranks. With c chunks, it has 1 / c of these rows. The backward pass dispatches each chunk and
computes its rows again, so that no received rows are kept until then.

A `lax.scan` runs the chunks. The router's choices, the experts in the compute dtype and their
quantized matrices are computed once, before the scan. The experts' gradients are summed over the
chunks in float32. After the scan, they are summed once over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import Experts, with_operands
from jax_ep.runtime.jax_compat import match_varying

Run = Callable[..., tuple[jax.Array, jax.Array]]


def run(
    function: Run,
    experts: Experts,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    config: MoEConfig,
    expert_axes: tuple[str, ...],
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
        experts = with_operands(config.matmul_dtype, experts, config.matmul_implementation)
    leaves, tree = jax.tree.flatten((experts, arrays))
    experts, arrays = jax.tree.unflatten(tree, match_varying(leaves, expert_axes))
    # The gradients of these arrays are summed over the chunks in float32. Matrices that are stored
    # quantized are left out, since they have no gradient.
    floats = {
        name: array
        for name, array in experts._asdict().items()
        if name != "quantized" and isinstance(array, jax.Array)
    }
    sums = jax.tree.map(lambda w: w.astype(wide_dtype(w.dtype)), floats)
    values = lax.stop_gradient(floats)

    def chunk(_: None, arrays: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        with_gradients = jax.tree.map(_with_gradient_to, values, sums)
        return None, function(experts._replace(**with_gradients), *arrays)

    tokens, topk_idx, topk_weights = arrays
    chunks = [
        _split(array, num_chunks, size, padding)
        for array, padding in ((tokens, 0), (topk_idx, -1), (topk_weights, 0))
    ]
    _, (out, counts) = lax.scan(jax.checkpoint(chunk, prevent_cse=False), None, tuple(chunks))
    out = out.reshape(num_chunks * size, *out.shape[2:])[:num_tokens]
    return out, jnp.sum(counts, axis=0, dtype=counts.dtype)


def _split(array: jax.Array, num_chunks: int, size: int, padding: int) -> jax.Array:
    """Splits an array [T, ...], filled up with `padding`, into chunks: [num_chunks, size, ...]."""
    missing = num_chunks * size - array.shape[0]
    if missing:
        widths = [(0, missing), *[(0, 0)] * (array.ndim - 1)]
        array = jnp.pad(array, widths, constant_values=jnp.asarray(padding, array.dtype))
    return array.reshape(num_chunks, size, *array.shape[1:])


@jax.custom_vjp
def _with_gradient_to(value: jax.Array, wide: jax.Array) -> jax.Array:
    """Returns `value`, but sends its gradient to `wide`, the same numbers in a wider dtype.

    The gradients of several uses of `value` are then summed in that dtype, float32 for bfloat16.
    """
    return value


_with_gradient_to.defvjp(
    lambda value, wide: (value, None),
    lambda _, grad: (None, grad.astype(wide_dtype(grad.dtype))),
)
