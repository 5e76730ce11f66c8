"""Sums and gathers over the tensor axis, whose ranks hold parts of the same experts.

Where the exchange may run on kernels, the library's collectives (`jax_ep.collectives`) are used,
with the fastest algorithm by their table; elsewhere `jax.lax`. According to the table, on 2 GPUs
all of them are faster than `jax.lax` at every size. On 4 GPUs all_reduce is faster up to 27 MB, and
the others at every size. The layer's metrics use `lax.psum`, as `jax_ep.moe.metrics` explains.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_ep.collectives.api import all_gather, all_reduce, reduce_scatter
from jax_ep.exchange.interface import Implementation, algorithm_next_to
from jax_ep.moe.mesh import LayerMesh
from jax_ep.runtime.jax_compat import match_varying, varying_axes


def for_all_ranks(
    arrays: tuple[jax.Array, ...], where: LayerMesh, implementation: Implementation
) -> tuple[jax.Array, ...]:
    """Gathers arrays [T, ...] of the tokens that the ranks along the tensor axes share.

    The gradient of the tokens is a sum over these ranks. It is taken here, with one row per token,
    since after the dispatch there is one row per choice.

    Args:
      arrays: floating, or integers below 2**24 such as expert ids; an array that is given twice is
        gathered once.
      where: the layer's mesh.
      implementation: the implementation of the exchange.
    """
    axes, algorithm = where.tensor_axes, algorithm_next_to(implementation)
    if not axes:
        return arrays
    function = _replicated
    if where.splits_tokens_over_tensor_axes():
        function = _gathered
    given = {id(array): array for array in arrays}
    made = {key: function(axes, algorithm, array) for key, array in given.items()}
    return tuple(made[id(array)] for array in arrays)


def sum_over_ranks(out: jax.Array, where: LayerMesh, implementation: Implementation) -> jax.Array:
    """Sums partial outputs [T, H] over the tensor ranks; returns the rows of this rank's tokens.

    Call it after combine, which leaves one row per token instead of one row per choice.
    """
    if not where.tensor_axes:
        return out
    sum_ranks = reduce_scatter if where.splits_tokens_over_tensor_axes() else all_reduce
    return sum_ranks(out, where.tensor_axes, algorithm=algorithm_next_to(implementation))


def _gathered(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Concatenates the ranks' rows of x [T, ...]."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return all_gather(x, axes, algorithm=algorithm)
    # The collectives move floats only, and float32 holds these integers exactly.
    return all_gather(x.astype(jnp.float32), axes, algorithm=algorithm).astype(x.dtype)


def _replicated(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Returns x, equal on the ranks, as an array that varies over the axes."""
    (varying,) = match_varying((x,), axes)
    added = tuple(axis for axis in axes if axis in varying_axes(varying) - varying_axes(x))
    if not added or not jnp.issubdtype(x.dtype, jnp.floating):
        return varying
    return _cast(added, algorithm, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cast(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Casts x to vary over more axes. The gradient is the sum of the ranks' cotangents."""
    return match_varying((x,), axes)[0]


_cast.defvjp(
    lambda axes, algorithm, x: (_cast(axes, algorithm, x), None),
    lambda axes, algorithm, _, g: (all_reduce(g, axes, algorithm=algorithm),),
)
