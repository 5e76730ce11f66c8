"""Cuts each group's rows into blocks of 128, for float8 matmuls that sum over a group's rows.

The gradient of a group's matrix is such a sum. A block holds rows of one group only, so that the
products of a block can share scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128


class TransposedRows(NamedTuple):
    """Float8 rows [R, K], transposed, with each group's rows padded to a multiple of 128.

    So each group starts at a multiple of 128. The padding is zero.

    Attributes:
      values: [K, P] float8, where P is `padded_rows(R, num_groups)`.
      scales: [P / 128, K] float32, one scale for 128 rows of a column; or [P / 128, K / 128]
        float32, one scale for 128 rows and 128 columns.
    """

    values: Any
    scales: Any


def row_ranges(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns each group's first row, and the row after its last one, [L] int32 each.

    Args:
      group_sizes: [L] int32, the number of rows of each group, in order. A negative size counts as
        0.
      num_rows: groups are cut off at this row. L * num_rows must be below 2^31.
    """
    sizes = jnp.clip(group_sizes, 0, num_rows)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Returns an upper bound of the number of rows, with each group padded to a multiple of 128."""
    return (-(-num_rows // BLOCK) + num_groups) * BLOCK


def row_blocks(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows in each block of `TransposedRows`, and the blocks of each group.

    Args:
      group_sizes: [L] int32, the number of rows of each group, in order.
      num_rows: R, the number of rows of the array; groups are cut off at this row.

    Returns:
      (blocks, groups). `blocks`: [P / 128, 2] int32, for each block its first row in the array
      [R, K], and its number of rows: 128, fewer in a group's last block, or 0 past the last group.
      `groups`: [L, 2] int32, for each group its first block, and its number of blocks.
    """
    num_groups = group_sizes.shape[0]
    starts, ends = row_ranges(group_sizes, num_rows)
    counts = -((starts - ends) // BLOCK)
    block_ends = jnp.cumsum(counts, dtype=jnp.int32)
    first_blocks = block_ends - counts
    block = jnp.arange(padded_rows(num_rows, num_groups) // BLOCK, dtype=jnp.int32)
    group = jnp.sum(block[:, None] >= block_ends, axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    first = starts[group] + (block - first_blocks[group]) * BLOCK
    count = jnp.clip(ends[group] - first, 0, BLOCK)
    count = jnp.where(block < block_ends[-1], count, 0)
    # A block without rows gets first row 0, which exists, since kernels may read it.
    first = jnp.where(count > 0, first, 0)
    return jnp.stack([first, count], axis=1), jnp.stack([first_blocks, counts], axis=1)
