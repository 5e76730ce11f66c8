"""Describes a collective by the properties from which its algorithm is selected."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax_ep.runtime import availability

# The algorithms of all_reduce_rms_norm that sum and normalize in one kernel.
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
      op: the collective, a key of `jax_ep.collectives.algorithms.ALGORITHMS`.
      operands: a rank's operands, or their shapes and dtypes: x, and for all_reduce_rms_norm also
        the residual and the scale.
      num_ranks: N, the number of ranks.
      axis_name: the mesh axes of the ranks.
      target: the program or the list of devices that is to run the collective.
    """

    op: str
    operands: Sequence[Any]
    num_ranks: int
    axis_name: tuple[str, ...]
    target: availability.Target

    @functools.cached_property
    def kernels_unavailable_reason(self) -> str | None:
        """Why the program or devices `target` cannot run kernels between ranks; None: they can."""
        return self.target.unavailable_reason(self.axis_name)


def is_low_latency(algorithm: str) -> bool:
    """Returns whether an algorithm uses the low-latency protocol; if so, its name ends in "ll"."""
    return algorithm.endswith("ll")
