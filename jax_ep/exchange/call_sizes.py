"""Describes the sizes of an exchange's call, from which each implementation counts its buffers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_ep.runtime import settings
from pallas_kernels.exchange import plan as plans
from pallas_kernels.formats import RowFormat

WORD = 4  # an int32 or a float32 has 4 bytes


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes of one call of an exchange, as `jax_ep.exchange.memory` makes them."""

    num_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    num_ranks: int
    dtype: jnp.dtype
    capacity: int
    by_rank: bool
    wire: RowFormat
    quantized: bool  # whether a dispatch returns float8 rows

    @property
    def pairs(self) -> int:
        """The number of (source rank, token) pairs."""
        return self.num_ranks * self.num_tokens

    def rows(self, count: int) -> int:
        return count * self.hidden * self.dtype.itemsize

    def sent_rows(self, count: int) -> int:
        """Returns the bytes of `count` rows as they are sent."""
        return count * self.wire.row_bytes(self.hidden, self.dtype)

    def quantized_rows(self, count: int) -> int:
        """Returns the bytes of `count` quantized rows; 0 on a plain wire."""
        return self.sent_rows(count) if self.wire.quantized else 0

    def gathered(self, size: int) -> int:
        """Returns `size`, the bytes gathered from all ranks; 0 for one rank."""
        return size if self.num_ranks > 1 else 0

    def routes(self) -> int:
        """Returns the bytes of the routes.

        The routes hold one word for each choice of all ranks, and in the expert-major layout also
        the counts.
        """
        counts = 0 if self.by_rank else self.num_ranks * self.num_experts
        return WORD * (self.pairs * self.top_k + counts)

    @property
    def padded_hidden(self) -> int:
        """H, padded as the kernels need it."""
        return plans.padded_hidden(self.hidden, self.dtype, self.wire)

    @property
    def row(self) -> plans.Row:
        """The size of a padded row, for the kernels' plans."""
        return plans.Row(self.padded_hidden, self.dtype, self.wire)

    @property
    def sizes(self) -> plans.Sizes:
        return plans.Sizes(
            num_tokens=self.num_tokens,
            num_ranks=self.num_ranks,
            top_k=self.top_k,
            num_experts=self.num_experts,
        )

    @property
    def low_latency(self) -> plans.LowLatencyPlan | None:
        """The plan of the low-latency kernels; None if they do not support such rows."""
        return plans.for_low_latency(self.row, self.sizes, self.num_ranks, settings.num_blocks())

    def padded_rows(self, count: int) -> int:
        """Returns the bytes of padded copies of `count` rows; 0 where rows need no padding."""
        padded = self.padded_hidden
        return 0 if padded == self.hidden else count * padded * self.dtype.itemsize
