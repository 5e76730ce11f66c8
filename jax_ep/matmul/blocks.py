"""Implements the backend "blocks" by batched matmuls of XLA, for GPUs without kernels for them.

Each group's rows are cut into blocks of `height` rows. Round r multiplies the r-th block of every
group, with the matrices where they lie. Once few groups have a block left, the other blocks are
multiplied several at a time, with copies of their matrices. The contract of `product` and `drhs` is
in `jax_ep.matmul.backend`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.matmul.backend import Backend
from jax_ep.runtime.jax_compat import match_varying
from pallas_kernels.matmul.row_blocks import row_ranges

# Section "GPUs without kernels" of pallas_kernels/TUNING.md has this backend's times and memory.
# The most memory that one step of a loop may take, in bytes.
_MOST_BYTES = 512 << 20
# The most blocks that are multiplied at once by copies of their matrices.
_MOST_COPIES = 16
# Reading a matrix, writing the copy and reading it takes three times as long as reading it.
_COST_OF_COPY = 3
# The height of blocks if the number of rows is symbolic.
_USUAL_HEIGHT = 256


def product_in_blocks(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    num_rows, num_groups = lhs.shape[0], rhs.shape[0]
    wide = wide_dtype(lhs.dtype)
    depth, width = lhs.shape[1], rhs.shape[1 if transpose_rhs else 2]  # K, N
    row_bytes = depth * lhs.dtype.itemsize + width * jnp.dtype(wide).itemsize  # with its product
    # A round multiplies a block of each group, and a step of `some_blocks` multiplies `copies`.
    height = _height(num_rows, num_groups, _MOST_BYTES // (num_groups * row_bytes))
    block_bytes = depth * width * rhs.dtype.itemsize + height * row_bytes
    copies = max(1, min(_MOST_COPIES, num_groups, _MOST_BYTES // block_bytes))
    dims = ((2,), (2 if transpose_rhs else 1,)), ((0,), (0,))

    def multiply(out, matrices, first, end):
        """Multiplies blocks that begin at rows `first` [B]; stores their rows before `end` [B]."""
        rows = first[:, None] + jnp.arange(height, dtype=jnp.int32)[None]
        products = lax.dot_general(
            lhs.at[rows].get(mode="clip"), matrices, dims, preferred_element_type=wide
        )
        # Each row that is not stored gets its own index past the last row: indices must be unique.
        unused = jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape) + num_rows
        target = jnp.where(rows < end[:, None], rows, unused)
        return out.at[target].set(products.astype(out.dtype), mode="drop", unique_indices=True)

    zeros = jnp.zeros((num_rows, width), lhs.dtype)
    starts, ends = row_ranges(group_sizes, num_rows)
    zeros, starts, ends, _ = match_varying((zeros, starts, ends, lhs))  # a loop needs equal vma
    num_blocks = _num_blocks(starts, ends, height)
    # A round reads the matrices of all groups. It pays only while at least `fewest` groups have a
    # block left; copying the matrices of fewer groups costs less.
    fewest = -(-num_groups // _COST_OF_COPY)
    num_rounds = jnp.sort(num_blocks)[num_groups - fewest]
    num_left = jnp.maximum(num_blocks - num_rounds, 0)  # [L]: each group's blocks after the rounds
    left_ends = jnp.cumsum(num_left, dtype=jnp.int32)

    def one_round(i, out):
        return multiply(out, rhs, starts + i * height, ends)

    def some_blocks(i, out):
        """Multiplies the next `copies` of the blocks that are left, numbered in group order."""
        number = i * copies + jnp.arange(copies, dtype=jnp.int32)
        # The group of each of these blocks; L for a number past the last block.
        found = jnp.sum(number[:, None] >= left_ends[None], axis=1, dtype=jnp.int32)
        exists = found < num_groups
        group = jnp.where(exists, found, 0)
        block = num_rounds + number - (left_ends - num_left)[group]
        end = jnp.where(exists, ends[group], 0)
        return multiply(out, rhs.at[group].get(mode="clip"), starts[group] + block * height, end)

    out = lax.fori_loop(0, num_rounds, one_round, zeros)
    return lax.fori_loop(0, -(-left_ends[-1] // copies), some_blocks, out)


def drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    num_rows, num_groups = lhs.shape[0], group_sizes.shape[0]
    wide = wide_dtype(lhs.dtype)
    depth, width = lhs.shape[1], grad.shape[1]  # K, N
    # A step computes the results of `count` groups. It adds up, in rounds, the products of a block
    # of each of these groups.
    sum_bytes = depth * width * jnp.dtype(wide).itemsize
    row_bytes = (depth + width) * lhs.dtype.itemsize
    # The rows of a block take about as many bytes as a group's sum [K, N], at most.
    height = _height(num_rows, num_groups, sum_bytes // row_bytes)
    # XLA may keep the sum of earlier rounds and that of the current one apart, hence the factor 2.
    most_groups = max(1, _MOST_BYTES // (2 * sum_bytes + height * row_bytes))
    num_steps = -(-num_groups // most_groups)
    count = -(-num_groups // num_steps)
    dims = ((1,), (1,)), ((0,), (0,))

    zeros = jnp.zeros((num_groups, depth, width), lhs.dtype)
    starts, ends = row_ranges(group_sizes, num_rows)
    zeros, starts, ends, _ = match_varying((zeros, starts, ends, lhs))  # a loop needs equal vma
    num_blocks = _num_blocks(starts, ends, height)

    def some_groups(step, out):
        # The last step may compute groups again that the step before it has computed.
        first_group = jnp.minimum(step * count, num_groups - count)
        first, end, num_rounds = (
            lax.dynamic_slice_in_dim(each, first_group, count)
            for each in (starts, ends, num_blocks)
        )

        def product_of_round(i):
            rows = first[:, None] + i * height + jnp.arange(height, dtype=jnp.int32)[None]
            live = (rows < end[:, None])[..., None]
            left, right = (jnp.where(live, x.at[rows].get(mode="clip"), 0) for x in (lhs, grad))
            return lax.dot_general(left, right, dims, preferred_element_type=wide)

        def add(i, total):
            return total + product_of_round(i)

        # Round 0 is computed even if no group has a row; it is then zero.
        total = lax.fori_loop(1, jnp.max(num_rounds), add, product_of_round(0))
        return lax.dynamic_update_slice_in_dim(out, total.astype(out.dtype), first_group, 0)

    return lax.fori_loop(0, num_steps, some_groups, zeros)


def _num_blocks(starts: jax.Array, ends: jax.Array, height: int) -> jax.Array:
    return (ends - starts + (height - 1)) // height


def _height(num_rows: Any, num_groups: int, most: int) -> int:
    """Returns the height of a block: at most max(8, `most`) before it is rounded up to tiles."""
    most = max(8, most)
    if checks.is_symbolic(num_rows):
        return min(_USUAL_HEIGHT, most)
    # Few groups of random sizes have more than `usual` rows: the mean and 4 standard deviations, if
    # sizes have a Poisson distribution. These rows are cut into the fewest equal blocks.
    mean = -(-num_rows // num_groups)
    usual = mean + 4 * math.sqrt(mean)
    height = math.ceil(usual / math.ceil(usual / most))
    # Matmuls compute whole tiles of rows, which are higher for higher blocks.
    multiple = 8 if height <= 16 else 16 if height <= 128 else 64
    return -(-height // multiple) * multiple


BACKEND = Backend(
    name="blocks",
    is_default=lambda problem: problem.platform == "cuda",
    product=product_in_blocks,
    drhs=drhs,
)
