"""The blocks of 128 rows that sums over a group's rows are cut into."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128


class TransposedRows(NamedTuple):
    """Rows, transposed: the rows of each group start at a multiple of 128, and are padded with 0.

    Attributes:
      values: [K, P] float8. P is `padded_rows`.
      scales: [P / 128, K] float32, one for 128 rows of a column; or [P / 128, K / 128], one for
        128 rows and 128 columns.
    """

    values: Any
    scales: Any


def row_ranges(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns where each group's rows start and end, [L] int32 each.

    Rows end no later than `num_rows`, whatever the sizes. A negative size counts as 0.
    L * num_rows must be below 2^31.
    """
    sizes = jnp.clip(group_sizes, 0, num_rows)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Returns how many rows there may be if each group's are padded to a multiple of 128."""
    return (-(-num_rows // BLOCK) + num_groups) * BLOCK


def row_blocks(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns which rows the blocks of 128 transposed rows hold.

    Returns:
      [P / 128, 2] int32: the first row of each block, and how many rows it has: from 0, past the
      last group, to 128.
      [L, 2] int32: of each group the first block, and how many blocks there are.
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
    first = jnp.where(count > 0, first, 0)  # a row of the array, also of a block without rows
    return jnp.stack([first, count], axis=1), jnp.stack([first_blocks, counts], axis=1)
