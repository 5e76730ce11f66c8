"""Sums and gathers over the tensor axis, whose ranks hold different columns of the same experts.

If the `implementation` of dispatch and combine is None or "pallas", the collectives are those of
`jax_ep.collectives`, which selects the fastest algorithm from a table of measurements. Otherwise
they are those of `jax.lax`. In this table, all of the library's collectives are faster than those
of `jax.lax` at every size on 2 GPUs. On 4 GPUs, its all_reduce is faster up to 27 MB, and its
all_gather and reduce_scatter at every size.
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
    """Gives every rank along the tensor axes the tokens of all of these ranks, before dispatch.

    If the ranks hold different tokens, gathers the arrays. Otherwise returns the arrays themselves,
    with types that vary over the tensor axes (vma). In the backward pass, the gradients of the
    tokens are summed over these ranks here, where there is one row per token, rather than after
    dispatch, where there is one row per choice.

    Args:
      arrays: arrays [T, ...] of this rank's tokens, floating or integer. Integers, such as expert
        ids, must be below 2**24, because they are gathered as float32. An array that is given twice
        is gathered once.
      where: the mesh and the mesh axes of the call.
      implementation: the implementation of dispatch and combine, which selects that of the
        collectives.
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
    """Sums the partial outputs [T, H] of the ranks along the tensor axes.

    Returns the rows of this rank's tokens. The sum comes after combine, when there is one row per
    token instead of one row per choice.
    """
    if not where.tensor_axes:
        return out
    sum_ranks = reduce_scatter if where.splits_tokens_over_tensor_axes() else all_reduce
    return sum_ranks(out, where.tensor_axes, algorithm=algorithm_next_to(implementation))


def _gathered(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Concatenates the arrays x [T, ...] of all ranks along `axes`, by an all-gather."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return all_gather(x, axes, algorithm=algorithm)
    # The collectives support only floats, so integers are gathered as float32, which represents
    # integers below 2**24 exactly.
    return all_gather(x.astype(jnp.float32), axes, algorithm=algorithm).astype(x.dtype)


def _replicated(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Returns x, which is equal on all ranks along `axes`, with a type that varies over them (vma).

    In the backward pass, the gradient is summed over the ranks by the library's all_reduce with
    `algorithm`, instead of by `lax.psum`.
    """
    (varying,) = match_varying((x,), axes)
    added = tuple(axis for axis in axes if axis in varying_axes(varying) - varying_axes(x))
    if not added or not jnp.issubdtype(x.dtype, jnp.floating):
        return varying
    return _cast(added, algorithm, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cast(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Returns x with a type that also varies over `axes` (vma).

    In the backward pass, the library's all-reduce over `axes`, with `algorithm`, sums the
    cotangents of x.
    """
    return match_varying((x,), axes)[0]


_cast.defvjp(
    lambda axes, algorithm, x: (_cast(axes, algorithm, x), None),
    lambda axes, algorithm, _, g: (all_reduce(g, axes, algorithm=algorithm),),
)
