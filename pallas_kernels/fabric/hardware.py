"""Defines the sizes of a GPU's warps, warpgroups, vectors and shared memory.

Imports neither Pallas nor Mosaic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The number of threads of a warp.
WARP = 32
# The number of threads of a warpgroup. Arrays in its registers have a multiple of this number of
# elements.
WARPGROUP = 128
# The tensor cores read operands from shared memory in blocks of this many rows. So the first row of
# a tile is a multiple of it, and an operand with another number of rows is copied and padded.
ROW_ALIGNMENT = 8
SHARED_MEMORY_BYTES = 227 * 1024
# The number of bytes of a 32-bit word.
WORD_BYTES = 4
# The number of bytes of a vector: the most that a thread loads or stores by one instruction.
VECTOR_BYTES = 16


def vector_length(dtype: jax.typing.DTypeLike) -> int:
    """Returns how many elements of `dtype` fit in a vector of 16 bytes."""
    return VECTOR_BYTES // jnp.dtype(dtype).itemsize


def align_up(value: int, multiple: int) -> int:
    """Returns `value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def padded_columns(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the length of a row of `columns` elements of `dtype`, padded for a warpgroup.

    A warpgroup holds a row in registers as vectors of 16 bytes. The padding makes the number of
    vectors a multiple of WARPGROUP, so that each thread holds the same number of vectors.
    """
    return align_up(columns, WARPGROUP * vector_length(dtype))
