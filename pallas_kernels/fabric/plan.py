"""How a kernel's work is cut: blocks, tokens per block, windows of routes, vectors of a row.

Imports neither Pallas nor Mosaic.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

WARP = 32  # threads of a warp
LANES = 128  # threads of a warpgroup; vectors in registers are multiples of this
SHARED_MEMORY_BYTES = 227 * 1024
WORD_BYTES = 4  # of an int32 or a float32
VECTOR_BYTES = 16  # the most that one instruction of a thread loads or stores


def vector_length(dtype: jax.typing.DTypeLike) -> int:
    """Returns how many elements of a dtype a vector of 16 bytes holds."""
    return VECTOR_BYTES // jnp.dtype(dtype).itemsize


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_columns(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the columns of a row, rounded up to whole vectors of every thread of a warpgroup."""
    return align_up(columns, LANES * vector_length(dtype))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call of an exchange kernel.

    Attributes:
      num_blocks: thread blocks per rank.
      num_slots: rows that the ring in shared memory holds, if there is one.
      store_lag: how many of the latest groups of outgoing copies may still read their slots when
        the next slot is filled; fewer than there are slots.
      window_tokens: tokens whose routes a block holds in shared memory at a time.
      step_tokens: tokens between two signals.
      num_copy_slots: rows that the receiver of a dispatch holds while it copies them.
      receive_steps: steps that a combine's receive buffer holds.
      num_g_slots: cotangents that the gradient of a combine of long rows holds in a second ring.
      num_workers: warpgroups of a block that share its sums, or cotangents.
    """

    num_blocks: int
    num_slots: int = 2
    store_lag: int = 1
    window_tokens: int = 16
    step_tokens: int = 1
    num_copy_slots: int = 2
    receive_steps: int = 3
    num_g_slots: int = 2
    num_workers: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.store_lag < self.num_slots:
            raise ValueError(f"store_lag must be less than num_slots, but the plan is {self}.")
        # While a step is summed, the one before it is read, and the one after it is listed.
        if self.receive_steps < 3:
            raise ValueError(f"receive_steps must be at least 3, but the plan is {self}.")

    def tokens_per_block(self, num_tokens: int) -> int:
        return -(-num_tokens // self.num_blocks)

    def steps_per_block(self, num_tokens: int) -> int:
        return -(-self.tokens_per_block(num_tokens) // self.step_tokens)

    def tokens_of_block(self, block: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Returns a block's first token and the number of its tokens, the same on every rank."""
        per_block = self.tokens_per_block(num_tokens)
        first = block * per_block
        return first, jnp.clip(num_tokens - first, 0, per_block)


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of a flat array of routes, [T·K], that a block holds in shared memory at a time."""

    tokens: int  # tokens of a window
    width: int  # entries loaded: tokens · K, rounded up to whole vectors
    total: int  # entries of the (padded) flat array

    @classmethod
    def of(cls, tokens: int, plan: Plan, num_tokens: int, top_k: int) -> Window:
        tokens = min(tokens, plan.tokens_per_block(num_tokens))
        width = align_up(tokens * top_k, LANES)
        return cls(tokens, width, max(width, num_tokens * top_k))

    def start(self, entry: jax.Array) -> jax.Array:
        """Returns the first entry to load so that the window holds `entry` and is in bounds."""
        return jnp.minimum(entry, self.total - self.width)

    def pad(self, flat: jax.Array, value: int) -> jax.Array:
        return pad_last(flat, self.total - flat.shape[-1], value)


def pad_last(array: jax.Array, amount: int, value: int = 0) -> jax.Array:
    """Appends `amount` entries of `value` to the last axis of an array."""
    widths = [(0, 0)] * (array.ndim - 1) + [(0, amount)]
    return jnp.pad(array, widths, constant_values=value)
