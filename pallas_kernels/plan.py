"""How a kernel spreads its work: blocks, tokens per block, and the ring in shared memory."""

from __future__ import annotations

import dataclasses

SHARED_MEMORY_BYTES = 227 * 1024


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one kernel call.

    Attributes:
      num_blocks: thread blocks per rank.
      num_slots: rows that the ring in shared memory holds.
      store_lag: how many slots may wait for their outgoing writes to be read.
      window_tokens: tokens whose routes a block holds in shared memory at a time.
    """

    num_blocks: int
    num_slots: int
    store_lag: int = 1
    window_tokens: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.store_lag < self.num_slots:
            raise ValueError(f"store_lag must lie between 0 and num_slots, but the plan is {self}.")

    def tokens_per_block(self, num_tokens: int) -> int:
        return -(-num_tokens // self.num_blocks)
