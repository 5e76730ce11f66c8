"""Implements the backend "loop": a loop over groups and tiles of their rows, made for CPUs.

The last tile of a group computes rows that are not used, so tiles have few rows, but enough to keep
the CPU's matmul efficient. (`lax.ragged_dot` multiplies every row by every group's matrix.)
The contract of `product` and `drhs` is in `jax_ep.matmul.backend`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.dtypes import wide_dtype
from jax_ep.matmul.backend import Backend, symbolic_rows_reason
from jax_ep.runtime.jax_compat import match_varying
from pallas_kernels.matmul.row_blocks import row_ranges

_PRODUCT_TILE = 32
_DRHS_TILE = 64


def product_in_loops(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    num_cols = rhs.shape[1 if transpose_rhs else 2]
    tile = min(_PRODUCT_TILE, lhs.shape[0])
    starts, ends = row_ranges(group_sizes, lhs.shape[0])
    num_tiles = -((starts - ends) // tile)  # of each group, rounded up
    contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    def one_group(group, out):
        matrix = lax.dynamic_index_in_dim(rhs, group, 0, keepdims=False)

        def one_tile(i, out):
            first, live = _tile_rows(lhs, starts, ends, group, i, tile)
            rows = lax.dynamic_slice_in_dim(lhs, first, tile)
            products = lax.dot_general(
                rows, matrix, contract, preferred_element_type=wide_dtype(lhs.dtype)
            ).astype(out.dtype)
            # Rows that are not `live` keep what another tile or group has stored.
            old = lax.dynamic_slice_in_dim(out, first, tile)
            new = jnp.where(live[:, None], products, old)
            return lax.dynamic_update_slice_in_dim(out, new, first, 0)

        return lax.fori_loop(0, num_tiles[group], one_tile, out)

    zeros = jnp.zeros((lhs.shape[0], num_cols), lhs.dtype)
    # A loop needs equal vma of what it carries. `lhs` and `rhs` have the same.
    zeros, *_ = match_varying((zeros, group_sizes, lhs))
    return lax.fori_loop(0, rhs.shape[0], one_group, zeros)


def drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    tile = min(_DRHS_TILE, lhs.shape[0])
    dtype = wide_dtype(lhs.dtype)
    starts, ends = row_ranges(group_sizes, lhs.shape[0])
    num_tiles = -((starts - ends) // tile)  # of each group, rounded up

    def one_group(group, out):
        def one_tile(i, total):
            first, live = _tile_rows(lhs, starts, ends, group, i, tile)
            left = jnp.where(live[:, None], lax.dynamic_slice_in_dim(lhs, first, tile), 0)
            right = jnp.where(live[:, None], lax.dynamic_slice_in_dim(grad, first, tile), 0)
            contract = (((0,), (0,)), ((), ()))
            return total + lax.dot_general(left, right, contract, preferred_element_type=dtype)

        total = lax.fori_loop(0, num_tiles[group], one_tile, jnp.zeros_like(out[0], dtype))
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), group, 0)

    zeros = jnp.zeros((group_sizes.shape[0], lhs.shape[1], grad.shape[1]), lhs.dtype)
    zeros, *_ = match_varying((zeros, group_sizes, lhs))  # a loop needs equal vma
    return lax.fori_loop(0, group_sizes.shape[0], one_group, zeros)


def _tile_rows(lhs, starts, ends, group, i, tile):
    """Returns the first of the `tile` rows of a group's i-th tile, and a mask of those to use."""
    # A tile that would extend past lhs starts earlier. The mask leaves out rows before `start`.
    start = starts[group] + i * tile
    first = jnp.minimum(start, lhs.shape[0] - tile)
    rows = first + jnp.arange(tile, dtype=jnp.int32)
    return first, (rows >= start) & (rows < ends[group])


BACKEND = Backend(
    name="loop",
    unavailable_reason=symbolic_rows_reason,
    is_default=lambda problem: problem.platform == "cpu",
    product=product_in_loops,
    drhs=drhs,
)
