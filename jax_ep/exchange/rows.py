"""Describes the rows of an exchange, and decides whether the Pallas kernels can move them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep.runtime import availability
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric import memory_map
from pallas_kernels.formats import PLAIN, RowFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The properties of an exchange's rows that decide whether the kernels can move them.

    Attributes:
      hidden: H, the columns of a row.
      dtype: the dtype of the rows.
      num_ranks: N, the ranks that exchange rows.
      list_words: the 4-byte words that describe a token's choices: K, or 2 K if weights are sent
        with the choices.
      num_experts: E, the experts of all N ranks.
      wire: the format in which rows or their sums are sent.
    """

    hidden: int
    dtype: jax.typing.DTypeLike
    num_ranks: int
    list_words: int
    num_experts: int
    wire: RowFormat = PLAIN

    def unavailable_reason(self) -> str | None:
        """Returns why the kernels cannot dispatch and combine these rows, or None if they can."""
        if reason := availability.dtype_unavailable_reason("the dtype of the rows", self.dtype):
            return reason
        if plans.count_width(self.num_experts) > memory_map.MAX_VALUES:
            return f"it supports at most {memory_map.MAX_VALUES} experts, not {self.num_experts}"
        hidden = plans.padded_hidden(self.hidden, self.dtype, self.wire)
        if plans.fits_shared_memory(
            plans.Row(hidden, self.dtype, self.wire),
            num_ranks=self.num_ranks,
            top_k=self.list_words,
            num_experts=self.num_experts,
        ):
            return None
        return (
            f"a row of {hidden} {jnp.dtype(self.dtype).name} is too long for shared memory, which "
            f"also holds the routes of {self.num_experts} experts and {self.list_words} choices"
        )
