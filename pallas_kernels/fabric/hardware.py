"""Sizes of a GPU's warps, warpgroups, vectors and shared memory; imports no Pallas."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Threads of a warp and of a warpgroup.
WARP = 32
WARPGROUP = 128
# The tensor cores read operands from shared memory in blocks of this many rows. So the first row of
# a tile is a multiple of it, and an operand with another number of rows is copied and padded.
ROW_ALIGNMENT = 8
SHARED_MEMORY_BYTES = 227 * 1024
# The streaming multiprocessors of an H100 or H200 SXM, for which matmuls divide their work.
HOPPER_CORES = 132
WORD_BYTES = 4
# The most that a thread loads or stores by one instruction.
VECTOR_BYTES = 16


def vector_length(dtype: jax.typing.DTypeLike) -> int:
    """Returns how many elements of `dtype` fit in a vector of 16 bytes."""
    return VECTOR_BYTES // jnp.dtype(dtype).itemsize


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_columns(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the length of a row padded to equally many vectors for each thread."""
    return align_up(columns, WARPGROUP * vector_length(dtype))
