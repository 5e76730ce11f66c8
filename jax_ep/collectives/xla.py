"""Implements the collectives with functions of `jax.lax`, for any platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.dtypes import wide_dtype


@dataclasses.dataclass(frozen=True)
class XlaCollectives:
    """Computes each collective over the mesh axes `axis_name`, with the primitives' shapes."""

    axis_name: tuple[str, ...]

    def all_reduce(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.axis_name)

    def all_gather(self, x: jax.Array) -> jax.Array:
        return _over_auto_axes(lambda x: lax.all_gather(x, self.axis_name, axis=0, tiled=True), x)

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        return _over_auto_axes(
            lambda x: lax.psum_scatter(x, self.axis_name, scatter_dimension=0, tiled=True), x
        )

    def all_to_all(self, x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, self.axis_name, 0, 0, tiled=True)

    def all_reduce_rms_norm(
        self, x: jax.Array, residual: jax.Array, scale: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        return unfused(self.all_reduce, x, residual, scale, eps=eps)


def _over_auto_axes(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Calls `function` with the mesh's Explicit axes made Auto; shards the result like x."""
    # JAX cannot lower psum_scatter, which is also all_gather's transpose, over Explicit axes.
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit:
        spec = jax.typeof(x).sharding.spec
        function = jax.sharding.auto_axes(function, axes=explicit, out_sharding=spec)
    return function(x)


def unfused(
    all_reduce: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Computes all_reduce_rms_norm in three steps: all_reduce, the residual, and the norm."""
    new_residual = add_residual(all_reduce(x), residual)
    return rms_norm(new_residual, scale, eps, x.dtype), new_residual


def add_residual(total: jax.Array, residual: jax.Array) -> jax.Array:
    """Returns total + residual in residual's dtype; adds in float32, or that dtype if wider."""
    wide = wide_dtype(residual.dtype)
    return (total.astype(wide) + residual.astype(wide)).astype(residual.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """Divides rows x [..., H] by their root mean square, times `scale` [H]; rounds to `dtype`."""
    wide = wide_dtype(x.dtype)
    x = x.astype(wide)
    factor = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    # The broadcast is explicit, since jax_numpy_rank_promotion="raise" forbids an implicit one.
    scale = lax.broadcast_in_dim(scale.astype(wide), x.shape, (x.ndim - 1,))
    return (x * factor * scale).astype(dtype)
