"""Cuts each group's rows into blocks of 128, for float8 matmuls that sum over a group's rows.

The gradient of a group's matrix is such a sum. The tensor cores add the products of 128 rows, a
block, before the sum is multiplied by scales. So a block must hold rows of one group only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats import FLOAT8_ROWS

BLOCK = 128


class TransposedRows(NamedTuple):
    """The transpose of rows [R, K] that are quantized to float8, for sums over each group's rows.

    Each group's rows are padded with zeros, so that each group starts at a multiple of 128.
    """

    # [K, P] float8, where P is `padded_rows(R, num_groups)`.
    values: Any
    # [P / 128, K / 128] float32, a scale for each 128 rows by 128 columns.
    scales: Any


def row_ranges(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns each group's first row and the row after its last, [L] int32 each.

    Negative sizes count as 0. Groups are cut off at `num_rows`. L * num_rows must be below 2^31.
    """
    sizes = jnp.clip(group_sizes, 0, num_rows)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Returns an upper bound of the rows after each group is padded to a multiple of 128."""
    return (-(-num_rows // BLOCK) + num_groups) * BLOCK


def row_blocks(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Cuts each group's rows into the blocks of 128 rows that `TransposedRows` consists of.

    `group_sizes` are [L] int32. Groups are cut off at `num_rows`.

    Returns:
      blocks: [P / 128, 2] int32, where P is `padded_rows(num_rows, L)`: each block's first row in
        the array, and its number of rows: 128, less in a group's last block, 0 past the last group.
      group_blocks: [L, 2] int32, each group's first block and number of blocks.
    """
    num_groups = group_sizes.shape[0]
    starts, ends = row_ranges(group_sizes, num_rows)
    counts = -((starts - ends) // BLOCK)  # rounded up
    block_ends = jnp.cumsum(counts, dtype=jnp.int32)
    first_blocks = block_ends - counts
    block = jnp.arange(padded_rows(num_rows, num_groups) // BLOCK, dtype=jnp.int32)
    # The group of each block.
    group = jnp.sum(block[:, None] >= block_ends[None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    first = starts[group] + (block - first_blocks[group]) * BLOCK
    count = jnp.clip(ends[group] - first, 0, BLOCK)
    count = jnp.where(block < block_ends[-1], count, 0)
    # Kernels may read the first row of any block, so it must be a row that exists.
    first = jnp.where(count > 0, first, 0)
    return jnp.stack([first, count], axis=1), jnp.stack([first_blocks, counts], axis=1)


def with_shared_scales(values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives each block of quantized rows one scale, the largest of the scales of its rows.

    It is the arithmetic of the kernel `quantize.transpose_rows`, in XLA. Takes values [..., 128, C]
    float8 and scales [..., 128], which are 0 past the rows of a block. Values become 0 there, and
    others are multiplied by their row's scale / the block's, and rounded. Returns values and scales
    [...]; the caller transposes.
    """
    largest = jnp.maximum(scales.max(axis=-1), FLOAT8_ROWS.least_scale)
    factors = scales * (1 / largest)[..., None]
    numbers = values.astype(jnp.float32) * factors[..., None]
    return jnp.where(scales[..., None] > 0, numbers, 0).astype(values.dtype), largest
