"""Holds the sizes of one exchange call, from which each implementation computes its buffers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_ep.runtime import settings
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric.hardware import WORD_BYTES
from pallas_kernels.formats import RowFormat


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes, dtype and layout of one exchange call, from which its memory is counted.

    `jax_ep.exchange.memory` makes it from the checked arguments of `workspace_bytes`.

    Attributes:
      num_tokens: T, the tokens per rank.
      hidden: H, the columns of a row.
      num_experts: E, the experts of all ranks.
      top_k: K, the choices per token.
      num_ranks: N, the ranks that exchange rows.
      dtype: the dtype of the caller's rows.
      capacity: the rows of a receive buffer: R, or N·T in the rank-major layout.
      by_rank: whether the layout is rank-major.
      wire: the format in which rows or sums are sent.
      quantized: whether a dispatch returns float8 rows and scales.
    """

    num_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    num_ranks: int
    dtype: jnp.dtype
    capacity: int
    by_rank: bool
    wire: RowFormat
    quantized: bool

    @property
    def pairs(self) -> int:
        """N·T, the number of (source rank, token) pairs."""
        return self.num_ranks * self.num_tokens

    def rows(self, count: int) -> int:
        return count * self.hidden * self.dtype.itemsize

    def sent_rows(self, count: int) -> int:
        """Returns the bytes of `count` rows in the wire format, scales included."""
        return count * self.wire.row_bytes(self.hidden, self.dtype)

    def quantized_rows(self, count: int) -> int:
        """Returns the bytes of `count` quantized rows; 0 if rows are sent in their own dtype."""
        return self.sent_rows(count) if self.wire.quantized else 0

    def gathered(self, size: int) -> int:
        """Returns `size`, the bytes of an all-gather's result; 0 for one rank, which needs none."""
        return size if self.num_ranks > 1 else 0

    def routes(self) -> int:
        """Returns the bytes of a dispatch's routes.

        The routes have an int32 for each of the N·T·K choices of all ranks. In the expert-major
        layout they also have the counts [N, E] int32.
        """
        counts = 0 if self.by_rank else self.num_ranks * self.num_experts
        return WORD_BYTES * (self.pairs * self.top_k + counts)

    @property
    def padded_hidden(self) -> int:
        """H rounded up to the number of columns that the Pallas kernels need."""
        return plans.padded_hidden(self.hidden, self.dtype, self.wire)

    @property
    def row(self) -> plans.Row:
        """The columns, dtype and wire format of a padded row, from which kernel plans are made."""
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
        """The launch plan of the low-latency kernels on N GPUs; None if they cannot run."""
        return plans.for_low_latency(self.row, self.sizes, self.num_ranks, settings.num_blocks())

    def padded_rows(self, count: int) -> int:
        """Returns the bytes of padded copies of `count` rows; 0 if the kernels need no padding."""
        padded = self.padded_hidden
        return 0 if padded == self.hidden else count * padded * self.dtype.itemsize
