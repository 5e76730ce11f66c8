"""Cuts each group's rows into blocks of 128, for float8 matmuls that sum over a group's rows.

The gradient of a group's matrix is such a sum. In it, the products of 128 rows are added before
they are multiplied by scales. So a block must hold rows of one group only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128


class TransposedRows(NamedTuple):
    """The transpose of rows [R, K] that are quantized to float8, for sums over each group's rows.

    Each group's rows are padded with zeros to a multiple of 128, so that each group starts at a
    multiple of 128.

    Attributes:
      values: [K, P] float8, where P is `padded_rows(R, num_groups)`.
      scales: [P / 128, K] float32, a scale for each 128 rows of one column; or [P / 128, K / 128]
        float32, a scale for each 128 rows by 128 columns. Rows and columns are those before the
        transposition.
    """

    values: Any
    scales: Any


def row_ranges(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns where each group begins and ends: (first rows, rows after the last), [L] int32 each.

    Args:
      group_sizes: [L] int32, the number of rows of each group, in order. A negative size counts as
        0.
      num_rows: the number of rows of the array. Groups are cut off there, if their sizes add up to
        more. L * num_rows must be below 2^31.
    """
    sizes = jnp.clip(group_sizes, 0, num_rows)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Returns P, the number of rows that suffices to pad each group to a multiple of 128 rows.

    `num_rows` is the number of rows of all groups without the padding.
    """
    return (-(-num_rows // BLOCK) + num_groups) * BLOCK


def row_blocks(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns which rows each block of 128 rows of `TransposedRows` has, and each group's blocks.

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
    # A block without rows gets 0 as its first row. Kernels may read the first row of any block, so
    # it must be a row that exists.
    first = jnp.where(count > 0, first, 0)
    return jnp.stack([first, count], axis=1), jnp.stack([first_blocks, counts], axis=1)
