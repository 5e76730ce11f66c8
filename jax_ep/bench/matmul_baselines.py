"""Grouped matmuls of other libraries, which `bench matmul` compares with this library's.

"mosaic" is JAX's own pair of Pallas kernels for Hopper GPUs, with the interface that
`jax_ep.matmul.backend` defines. tokamax is an implementation of this library.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.matmul import pallas
from jax_ep.matmul.backend import Backend, pad_rows, zero_tail


def _mosaic_blocks(short: bool, num_cols: int) -> dict[str, int]:
    """Returns the kernels' block sizes: few rows for small groups or odd results."""
    return {
        "block_m": 64 if short else 128,
        "block_n": 128 if num_cols % 128 == 0 else 64,
        "block_k": 64,
        "max_concurrent_steps": 4,
        "grid_block_n": 1,
    }


def _mosaic_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    num_rows, num_cols = len(lhs), rhs.shape[1 if transpose_rhs else 2]
    short = num_rows < 96 * len(rhs)
    with jax.enable_x64(False):
        out = ragged_dot_mgpu.ragged_dot(
            pad_rows(lhs),
            rhs,
            group_sizes=group_sizes,
            transpose_rhs=transpose_rhs,
            **_mosaic_blocks(short, num_cols),
        )
    # The kernel leaves the result's rows past the last group unwritten.
    return zero_tail(out[:num_rows], group_sizes)


def _mosaic_drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    blocks = _mosaic_blocks(short=lhs.shape[1] % 128 != 0, num_cols=grad.shape[1])
    lhs, grad = pad_rows(lhs), pad_rows(grad)
    with jax.enable_x64(False):
        return transposed_ragged_dot_mgpu.transposed_ragged_dot(
            _zero_rows_after_end(lhs, group_sizes, blocks["block_k"]),
            _zero_rows_after_end(grad, group_sizes, blocks["block_k"]),
            group_sizes=group_sizes,
            **blocks,
        )


def _zero_rows_after_end(x: jax.Array, group_sizes: jax.Array, count: int) -> jax.Array:
    """Zeroes the `count` rows of x that follow the last group, which may be NaN.

    The kernel multiplies the rows of a block that belong to another group, or to none, by zero.
    """
    count = min(count, x.shape[0])
    end = jnp.sum(group_sizes)
    first = jnp.minimum(end, x.shape[0] - count)
    window = lax.dynamic_slice_in_dim(x, first, count)
    live = first + jnp.arange(count, dtype=jnp.int32) < end
    return lax.dynamic_update_slice_in_dim(x, jnp.where(live[:, None], window, 0), first, 0)


MOSAIC = Backend(
    name="mosaic",
    unavailable_reason=pallas.unavailable_reason,
    product=_mosaic_product,
    drhs=_mosaic_drhs,
)

BASELINES = {MOSAIC.name: MOSAIC}
