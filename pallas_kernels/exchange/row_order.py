"""The tokens of a thread block in the order of the rows that they have at one rank.

Rows are grouped by expert. So if tokens are sent in the order of their first rows, all rows before
the first row of the next token have been sent: a token that is sent later has no earlier row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import LANES, align_up

_UNROLL = 4


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Sorts the tokens of a block by their first rows; its methods are steps of a warpgroup.

    Attributes:
      fabric: how ranks reach each other.
      num_tokens: tokens of a block, a multiple of 4.
      top_k: K.
      capacity: R; a row of R or more was dropped.
    """

    fabric: fb.Fabric
    num_tokens: int
    top_k: int
    capacity: int

    @property
    def listed(self) -> int:
        """Entries of a list of a block's rows, [tokens · K], padded to whole vectors."""
        return align_up(self.num_tokens * self.top_k, LANES)

    @property
    def width(self) -> int:
        """Entries of an order: tokens, padded to whole vectors, and one behind the last token."""
        return align_up(self.num_tokens, LANES) + LANES

    def scratch_types(self, count: int) -> dict[str, Any]:
        """Returns the memory of a warpgroup for orders of the tokens at, or of, `count` ranks."""
        words = plgpu.SMEM((count, self.width), jnp.int32)
        lists = plgpu.SMEM((count, self.listed), jnp.int32)
        return dict(rows=lists, tokens=words, first_rows=words)

    def sort(self, i: Any, *, rows: Any, tokens: Any, first_rows: Any) -> None:
        """Sorts the tokens by their rows, `rows[i]`: the row of each choice, or NOWHERE.

        tokens[i, :] becomes the tokens in order; those without a row come last. first_rows[i, n]
        becomes the first row of the n-th token, or R if it has none; R behind the last token.
        """
        fabric, count = self.fabric, align_up(self.num_tokens, LANES)
        token = fb.iota(fabric, count)
        entry = jnp.minimum(token, self.num_tokens - 1) * self.top_k
        first = jnp.full_like(token, self.capacity)
        for choice in range(self.top_k):
            row = fb.gather(fabric, rows.at[i], entry + choice)
            first = jnp.where((row >= 0) & (row < first), row, first)
        first = jnp.where(token < self.num_tokens, first, self.capacity)
        unsorted = first_rows.at[i, pl.ds(0, count)]
        unsorted[...] = first
        fabric.barrier()

        def count_before(i4: Any, place: jax.Array) -> jax.Array:
            others = [i4 * _UNROLL + j for j in range(_UNROLL)]
            rows_of_others = [first_rows[i, other] for other in others]
            for other, row in zip(others, rows_of_others, strict=True):
                before = (first > row) | ((first == row) & (token > other))
                place = place + before.astype(jnp.int32)
            return place

        steps, nothing = self.num_tokens // _UNROLL, fb.zeros(fabric, count)
        place = lax.fori_loop(0, steps, count_before, nothing)
        fabric.barrier()
        fb.scatter(fabric, tokens.at[i], place, token)
        fb.scatter(fabric, first_rows.at[i], place, first)
        if count == self.num_tokens:  # else the threads behind the last token write it
            first_rows[i, count] = jnp.int32(self.capacity)
        fabric.barrier()
