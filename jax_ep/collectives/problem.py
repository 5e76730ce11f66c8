"""A collective as far as the choice of its algorithm depends on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax_ep.runtime import availability

# The names of all_reduce_rms_norm's algorithms that sum and normalize in one kernel.
FUSED = (
    "fused",
    "fused_one_shot_ll",
    "fused_two_shot_ll",
    "fused_one_shot",
    "fused_two_shot",
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of a collective by which its algorithm is selected.

    Attributes:
      op: a key of `ALGORITHMS`.
      operands: a rank's operands, or their shapes and dtypes: x, and for all_reduce_rms_norm also
        the residual and the scale.
      num_ranks: N.
      axis_name: the mesh axes of the ranks.
      place: where the collective runs.
    """

    op: str
    operands: Sequence[Any]
    num_ranks: int
    axis_name: tuple[str, ...]
    place: availability.Place

    @functools.cached_property
    def kernels_unavailable_reason(self) -> str | None:
        """The reason why no kernel can run at `place`; None if kernels can run there."""
        return self.place.unavailable_reason(self.axis_name)


def is_low_latency(algorithm: str) -> bool:
    """Returns whether the algorithm uses the low-latency protocol; its name ends in "ll"."""
    return algorithm.endswith("ll")
