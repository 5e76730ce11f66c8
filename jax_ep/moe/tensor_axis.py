"""Sums and gathers over the tensor axis, whose ranks hold different columns of the same experts."""

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

    `arrays` [T, ...] are tokens, and what belongs to them: choices and weights. If these axes do
    not split tokens, all of these ranks have the same, and only the types change.
    """
    # The backward pass sums the gradients of tokens here, where there is one row per token, and not
    # after dispatch, where there is one per choice.
    axes, algorithm = where.tensor_axes, algorithm_next_to(implementation)
    share = _gather if where.splits_tokens_over_tensor_axes() else _cast_to_vary
    # The tokens of routed and of shared experts may be one array, which is gathered only once.
    distinct = {id(array): array for array in arrays}
    results = {key: share(axes, algorithm, array) for key, array in distinct.items()}
    return tuple(results[id(array)] for array in arrays)


def sum_over_ranks(out: jax.Array, where: LayerMesh, implementation: Implementation) -> jax.Array:
    """Sums the partial outputs [T, H] of the ranks along the tensor axes, after combine."""
    sum_ranks = reduce_scatter if where.splits_tokens_over_tensor_axes() else all_reduce
    return sum_ranks(out, where.tensor_axes, algorithm=algorithm_next_to(implementation))


def _gather(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Returns the tokens x [T, ...] of all n ranks along `axes`, [n * T, ...]."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return all_gather(x, axes, algorithm=algorithm)
    # The collectives support only floats, so integers are gathered as float32, which represents
    # integers below 2**24 exactly.
    return all_gather(x.astype(jnp.float32), axes, algorithm=algorithm).astype(x.dtype)


def _cast_to_vary(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    """Returns x, the same on all ranks along `axes`, with a type that varies over `axes`."""
    varying = match_varying(x, axes)
    added = tuple(axis for axis in axes if axis in varying_axes(varying) - varying_axes(x))
    if not added or not jnp.issubdtype(x.dtype, jnp.floating):
        return varying
    # The gradient of `match_varying` would be a `lax.psum`; `_cast` uses `all_reduce` instead.
    return _cast(added, algorithm, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cast(axes: tuple[str, ...], algorithm: str | None, x: jax.Array) -> jax.Array:
    return match_varying(x, axes)


_cast.defvjp(
    lambda axes, algorithm, x: (_cast(axes, algorithm, x), None),
    lambda axes, algorithm, _, g: (all_reduce(g, axes, algorithm=algorithm),),
)
