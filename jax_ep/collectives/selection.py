"""Selects a collective's algorithm: the named one, or the fastest in the table of times."""

from __future__ import annotations

import jax

from jax_ep.collectives import table
from jax_ep.collectives.algorithms import ALGORITHMS, Algorithm
from jax_ep.collectives.problem import Problem


def select(algorithm: Algorithm, problem: Problem) -> str:
    """Returns the name of the algorithm to run.

    This is `algorithm`, or for None the fastest algorithm that can run, by the table of measured
    times. Raises ValueError, with the reason, if the named algorithm cannot run.
    """
    algorithms = ALGORITHMS[problem.op]
    if algorithm is not None:
        return algorithms.select(algorithm, problem).name
    if jax.default_backend() != "gpu" or problem.kernels_unavailable_reason is not None:
        # No kernel can run, so the table is not used: it has no times of CPUs, and the sizes of x
        # may be symbolic dimensions, which have no value.
        return "xla"
    x = problem.operands[0]
    return table.lookup(
        problem.op,
        problem.num_ranks,
        x.size * x.dtype.itemsize * (problem.num_ranks if problem.op == "all_gather" else 1),
        getattr(jax.devices()[0], "compute_capability", None),
        can_run=lambda name: algorithms[name].unavailable_reason(problem) is None,
    )
