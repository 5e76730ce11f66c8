"""Defines the options and the limits of the routing kernel `top_k`, without importing Pallas."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.fabric.hardware import WARP

# The largest number of columns (experts) for which a row fits in the registers of a warp.
MOST_COLUMNS = 1024
# The largest number of columns that a row may choose, since each lane of a warp stores one of them.
MOST_CHOICES = WARP
# To normalize weights, the kernel divides a row's chosen scores by the largest of them, and then
# the quotients by their sum. The sum exceeds LEAST_SUM unless all scores are 0. A smaller sum is
# replaced by LEAST_SUM, to avoid a division by 0.
LEAST_SUM = 1e-6
# The lowest finite float32.
_LOWEST = -3.4028234663852886e38


@dataclasses.dataclass(frozen=True)
class Groups:
    """Group-limited routing: each row chooses only from its best groups of adjacent columns."""

    number: int  # of groups, a divisor of the number of columns
    kept: int  # the number of groups from which a row chooses columns
    best: int  # groups are compared by the sum of their `best` largest scores, 1 or 2


@dataclasses.dataclass(frozen=True)
class Weighing:
    """How the weights of a row's k chosen columns (experts) are computed from their scores.

    The kernel gets a number for each chosen column: its score or, with `normalize`, the logarithm
    of the score, which does not underflow.
    """

    # Whether each score is divided by the sum of the chosen scores plus `epsilon`. If `epsilon` is
    # 0, a constant may be added to all logarithms of a row, since it cancels.
    normalize: bool
    epsilon: float
    scale: float  # a factor by which each weight is multiplied in the end
    # Whether, with `normalize`, the numbers are logits, whose sigmoids are the scores.
    sigmoid: bool = False

    @property
    def log_epsilon(self) -> float:
        return math.log(self.epsilon) if self.epsilon else _LOWEST


def unavailable_reason(columns: int, k: int, groups: Groups | None = None) -> str | None:
    """Returns why the kernel cannot choose k of `columns` experts for each row, or None."""
    if columns > MOST_COLUMNS:
        return f"it supports at most {MOST_COLUMNS} columns (experts), not {columns}"
    if k > MOST_CHOICES:
        return f"it supports at most {MOST_CHOICES} choices of each row, not {k}"
    if groups is not None and groups.best > 2:
        return f"it adds up at most 2 scores of a group, not {groups.best}"
    if groups is not None:
        too_few = columns < groups.best * groups.number
        if columns % WARP or WARP % groups.number or too_few:
            return (
                f"with groups, the number of columns must be a multiple of {WARP}, the number of "
                f"groups must divide {WARP}, and each group must have at least {groups.best} "
                f"columns, but there are {groups.number} groups and {columns} columns"
            )
    return None
