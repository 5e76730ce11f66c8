"""Defines the sizes of a GPU's warps, warpgroups, vectors and shared memory.

Imports neither Pallas nor Mosaic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The threads of a warp.
WARP = 32
# The threads of a warpgroup. The length of an array in registers is a multiple of this.
LANES = 128
SHARED_MEMORY_BYTES = 227 * 1024
# The bytes of an int32 or a float32.
WORD_BYTES = 4
# A thread loads or stores at most this many bytes by one instruction.
VECTOR_BYTES = 16


def vector_length(dtype: jax.typing.DTypeLike) -> int:
    """Returns how many elements of a dtype a vector of 16 bytes holds."""
    return VECTOR_BYTES // jnp.dtype(dtype).itemsize


def align_up(value: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def padded_columns(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the row length, rounded up so that all threads of a warpgroup hold equally much.

    Each thread holds whole vectors of 16 bytes.
    """
    return align_up(columns, LANES * vector_length(dtype))
