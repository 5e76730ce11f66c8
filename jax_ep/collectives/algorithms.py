"""Lists the algorithms of the collectives in tables, with what each does not support.

`jax_ep.collectives.api` describes the algorithms. A program for CPUs that names no kernel loads no
kernels and allocates no symmetric memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_ep.collectives.problem import FUSED, Problem
from jax_ep.implementations import Implementation, Implementations
from jax_ep.runtime import availability

Algorithm = str | None  # None selects the fastest algorithm that can run


def _kernel(name: str) -> Implementation:
    def unavailable_reason(problem: Problem) -> str | None:
        reason = problem.kernels_unavailable_reason or availability.mosaic_unavailable_reason()
        if reason:
            return reason
        from jax_ep.collectives import pallas  # loads Mosaic, which only programs for GPUs need

        return pallas.unavailable_reason(name, problem)

    return Implementation(name=name, unavailable_reason=unavailable_reason)


def _algorithms(op: str, kernels: Sequence[str], *others: str) -> Implementations[Implementation]:
    by_xla = [Implementation(name=name) for name in (*others, "xla")]
    return Implementations((*map(_kernel, kernels), *by_xla), "algorithm", op)


_ALL_REDUCE = ("one_shot_ll", "two_shot_ll", "one_shot", "two_shot", "multimem")
# Each operation's algorithms; `jax_ep.collectives.table` has the times by which None selects one.
ALGORITHMS: dict[str, Implementations[Implementation]] = {
    "all_reduce": _algorithms("all_reduce", _ALL_REDUCE),
    "all_gather": _algorithms("all_gather", ("ll", "direct")),
    "reduce_scatter": _algorithms("reduce_scatter", ("ll", "direct")),
    "all_to_all": _algorithms("all_to_all", ("ll", "direct")),
    "all_reduce_rms_norm": _algorithms("all_reduce_rms_norm", FUSED, "unfused"),
}
