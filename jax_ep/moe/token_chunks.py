"""Runs a rank's experts on its tokens in chunks, one after the other, so that fewer rows live.

A receive buffer that fits any routing of T tokens has N * T * min(K, E / N) rows on each of N ranks
if nobody knows the routing. With c chunks, it has 1 / c of them. The backward pass computes the
rows of a chunk again, so no rows are kept from one chunk to the next.

All that is the same for each chunk is made once, before the scan: the choices, the experts in the
compute dtype, and their quantized matrices. The experts' gradients are summed over the chunks in
float32, and reduced over the ranks that share experts once, after the scan.
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
    """Runs `function(experts, *arrays)` in `config.token_chunks` chunks of tokens.

    Args:
      function: returns rows [T, H] and counts [L] int32 for tokens [T, H], choices [T, K] and
        weights [T, K].
      experts: of this rank.
      arrays: the tokens, choices and weights of this rank.
      config: the configuration of the layer.
      expert_axes: the mesh axes that the experts are spread over.

    Returns:
      The rows of all tokens, and the sums of the counts.

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

    with jax.named_scope("experts"):  # quantized once, and not in each chunk
        experts = with_operands(config.matmul_dtype, experts, config.matmul_implementation)
    leaves, tree = jax.tree.flatten((experts, arrays))
    experts, arrays = jax.tree.unflatten(tree, match_varying(leaves, expert_axes))
    # Matrices that are stored quantized have no gradient.
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
    """Returns chunks [c, size, ...] of an array [T, ...], padded with a value at the end."""
    missing = num_chunks * size - array.shape[0]
    if missing:
        widths = [(0, missing), *[(0, 0)] * (array.ndim - 1)]
        array = jnp.pad(array, widths, constant_values=jnp.asarray(padding, array.dtype))
    return array.reshape(num_chunks, size, *array.shape[1:])


@jax.custom_vjp
def _with_gradient_to(value: jax.Array, wide: jax.Array) -> jax.Array:
    """Returns `value`; its gradient goes to `wide`, an array of the same numbers in more bits.

    A sum over uses is then made in more bits, and the cast from the one to the other stays where it
    was made.
    """
    return value


_with_gradient_to.defvjp(
    lambda value, wide: (value, None),
    lambda _, grad: (None, grad.astype(wide_dtype(grad.dtype))),
)
