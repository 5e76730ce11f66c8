"""Defines the options of the routing kernel `top_k`, and which shapes it supports.

Imports neither Pallas nor Mosaic.
"""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.fabric.hardware import WARP

# The most columns (experts) of a row, which must fit in the registers of a warp.
MOST_COLUMNS = 1024
# The most choices of a row, since each lane of a warp stores one choice.
MOST_CHOICES = WARP
# To normalize weights, the kernel divides a row's chosen scores by the largest of them, and then by
# their sum. The sum exceeds this bound, unless all scores are 0. A smaller sum is replaced by this
# bound, to avoid a division by 0.
LEAST_SUM = 1e-6
# The lowest finite float32.
_LOWEST = -3.4028234663852886e38


@dataclasses.dataclass(frozen=True)
class Groups:
    """Group-limited routing: each row chooses columns (experts) only from its best groups.

    A group is a block of neighbouring columns.

    Attributes:
      number: the number of groups, a divisor of the number of columns.
      kept: the number of groups from which a row chooses columns.
      best: 1 or 2; groups are compared by the sum of this many of their largest scores.
    """

    number: int
    kept: int
    best: int


@dataclasses.dataclass(frozen=True)
class Weighing:
    """How weights are computed from the scores of a row's k chosen columns.

    Attributes:
      normalize: whether each score is divided by the sum of the chosen scores plus `epsilon`. The
        kernel's inputs are then logarithms of scores, so that the ratios of scores that underflow
        are still right; if `epsilon` is 0, a common constant may be added to them. If False, the
        inputs are the scores.
      epsilon: a constant added to the sum in the normalization, 0 or more.
      scale: a factor by which each weight is finally multiplied.
      sigmoid: whether, with `normalize`, the inputs are logits whose sigmoids are the scores,
        instead of logarithms of scores.
    """

    normalize: bool
    epsilon: float
    scale: float
    sigmoid: bool = False

    @property
    def log_epsilon(self) -> float:
        """The logarithm of `epsilon`, or the lowest finite float32 if `epsilon` is 0."""
        return math.log(self.epsilon) if self.epsilon else _LOWEST


def unavailable_reason(columns: int, k: int, groups: Groups | None = None) -> str | None:
    """Returns why the kernel cannot choose k of `columns` columns, or None if it can.

    The reason is the end of a sentence such as "the kernel cannot run: ...".
    """
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
