"""Describes what the kernel `top_k` supports, and its options, without Pallas or Mosaic."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.fabric.hardware import WARP

MOST_COLUMNS = 1024  # a row must fit in the registers of a warp
MOST_CHOICES = WARP  # each lane stores one choice
# A bound below every sum of scores divided by their largest, unless all scores are 0.
LEAST_SUM = 1e-6
_LOWEST = -3.4028234663852886e38  # the lowest finite float32


@dataclasses.dataclass(frozen=True)
class Groups:
    """Blocks of neighbouring columns: each row chooses from its best blocks.

    Attributes:
      number: how many blocks there are, a divisor of the columns.
      kept: how many of them a row chooses from.
      best: how many of a block's largest scores are summed to what the block is worth, 1 or 2.
    """

    number: int
    kept: int
    best: int


@dataclasses.dataclass(frozen=True)
class Weighing:
    """Computes weights from the scores of a row's choices.

    Attributes:
      normalize: whether each score is divided by the scores' sum plus `epsilon`. The inputs are
        then logarithms of scores, so that scores that underflow still have ratios; without epsilon
        they may be shifted by a common constant. If False, the inputs are the scores.
      epsilon: the constant of the normalization, 0 or more.
      scale: a factor on each weight, applied last.
      sigmoid: whether, with `normalize`, the inputs are logits whose sigmoids are the scores.
    """

    normalize: bool
    epsilon: float
    scale: float
    sigmoid: bool = False

    @property
    def log_epsilon(self) -> float:
        """The logarithm of epsilon; the lowest float32 for an epsilon of 0."""
        return math.log(self.epsilon) if self.epsilon else _LOWEST


def unavailable_reason(columns: int, k: int, groups: Groups | None = None) -> str | None:
    """Returns why the kernel cannot choose k of this number of columns, or None if it can."""
    if columns > MOST_COLUMNS:
        return f"it holds rows of at most {MOST_COLUMNS} columns, not {columns}"
    if k > MOST_CHOICES:
        return f"it makes at most {MOST_CHOICES} choices, not {k}"
    if groups is not None:
        lanes, rest = divmod(WARP, groups.number)
        if columns % WARP or rest or lanes < 1 or columns < groups.best * groups.number:
            return (
                f"it needs groups of the columns of 1, 2, 4, 8, 16 or 32 lanes of {WARP}, and of "
                f"{groups.best} columns or more, not {groups.number} groups of {columns} columns"
            )
    return None
