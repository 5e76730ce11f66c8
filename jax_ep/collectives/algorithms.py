"""Lists the algorithms of each collective, and says why one does not support a given call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax_ep.implementations import Implementation, Implementations
from jax_ep.runtime import availability

# The name of an algorithm, or None for the fastest algorithm that can run.
Algorithm = str | None
# The algorithms of all_reduce_rms_norm that sum and normalize in one kernel.
FUSED = ("fused", "fused_one_shot_ll", "fused_two_shot_ll", "fused_one_shot", "fused_two_shot")


@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of a collective by which its algorithm is selected."""

    op: str  # a key of `ALGORITHMS`
    operands: Sequence[Any]  # a rank's operands, or their shapes and dtypes
    num_ranks: int
    axis_name: tuple[str, ...]
    target: availability.Target  # the program or the devices that are to run it

    @functools.cached_property
    def kernels_unavailable_reason(self) -> str | None:
        return self.target.unavailable_reason(self.axis_name)


def _kernel(name: str) -> Implementation:
    """Returns the entry of an algorithm that kernels compute, the library's or JAX's."""

    def unavailable_reason(problem: Problem) -> str | None:
        reason = problem.kernels_unavailable_reason or availability.mosaic_unavailable_reason()
        if reason:
            return reason
        from jax_ep.collectives import pallas

        return pallas.unavailable_reason(name, problem.op, problem.operands, problem.num_ranks)

    return Implementation(name=name, unavailable_reason=unavailable_reason)


def _algorithms(op: str, kernels: Sequence[str], *others: str) -> Implementations[Implementation]:
    anywhere = [Implementation(name=name) for name in (*others, "xla")]
    table = (*map(_kernel, kernels), *anywhere)
    return Implementations(table, argument="algorithm", operation=op)


_ALL_REDUCE = ("one_shot_ll", "two_shot_ll", "one_shot", "two_shot")
# Maps each collective to its algorithms. algorithm=None selects among them by the measured times in
# `jax_ep.collectives.table`.
ALGORITHMS: dict[str, Implementations[Implementation]] = {
    "all_reduce": _algorithms("all_reduce", _ALL_REDUCE),
    "all_gather": _algorithms("all_gather", ("ll", "direct")),
    "reduce_scatter": _algorithms("reduce_scatter", ("ll", "direct")),
    "all_to_all": _algorithms("all_to_all", ("ll", "direct")),
    "all_reduce_rms_norm": _algorithms("all_reduce_rms_norm", FUSED, "unfused"),
}
