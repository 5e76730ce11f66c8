"""Defines the sizes of a GPU's warps, vectors and shared memory.

Imports neither Pallas nor Mosaic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WARP = 32  # the threads of a warp
LANES = 128  # the threads of a warpgroup; vectors in registers are multiples of this
SHARED_MEMORY_BYTES = 227 * 1024
WORD_BYTES = 4  # the bytes of an int32 or a float32
VECTOR_BYTES = 16  # the most bytes that one instruction of a thread loads or stores


def vector_length(dtype: jax.typing.DTypeLike) -> int:
    """Returns how many elements of a dtype a vector of 16 bytes holds."""
    return VECTOR_BYTES // jnp.dtype(dtype).itemsize


def align_up(value: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def padded_columns(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the columns of a row, rounded up to whole vectors of every thread of a warpgroup."""
    return align_up(columns, LANES * vector_length(dtype))
