"""Chooses the algorithm of a collective, and says why one cannot run.

Only conditions that a program depends on are checked, so a program for CPUs loads no kernels and
allocates no symmetric memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_ep.collectives import table
from jax_ep.collectives.algorithms import Algorithm, is_low_latency
from jax_ep.runtime import availability, jax_compat, multicast, symmetric_memory
from jax_ep.runtime.jax_compat import Program
from pallas_kernels.fabric import layout


class Refusals(NamedTuple):
    """What is known to prevent kernels in one program.

    Attributes:
      kernels: why none of the library's kernels can run; None where nothing is known to prevent it.
    """

    kernels: str | None = None

    @classmethod
    def of_program(cls, program: Program, axis_name: tuple[str, ...]) -> Refusals:
        """Returns the refusals of a program being lowered, with ranks along `axis_name`."""
        return cls(availability.program_unavailable_reason(program, axis_name))


_NOTHING_KNOWN = Refusals()


def unavailable_reason(
    op: str, algorithm: str, x: Any, num_ranks: int, refusals: Refusals = _NOTHING_KNOWN
) -> str | None:
    """Returns why an algorithm cannot run, or None if it can.

    Args:
      op: a key of `ALGORITHMS`.
      algorithm: one of `ALGORITHMS[op]`; "xla" and "unfused" can always run.
      x: the operand of a rank, or its shape and dtype.
      num_ranks: N.
      refusals: what is already known about the program.
    """
    if algorithm in ("xla", "unfused"):
        return None
    if refusals.kernels is not None:
        return refusals.kernels
    if reason := availability.mosaic_unavailable_reason():
        return reason
    from jax_ep.collectives import pallas  # loads Mosaic, which only programs for GPUs need

    if reason := pallas.payload_unavailable_reason(op, algorithm, x.shape, x.dtype, num_ranks):
        return reason
    if reason := availability.tracing_unavailable_reason():
        return reason
    if algorithm == "multimem" and (reason := jax_compat.multimem_unavailable_reason()):
        return reason
    if jax.default_backend() != "gpu":  # the program is for another machine, of unknown properties
        return None
    if algorithm == "multimem":
        return multicast.unavailable_reason()
    if reason := availability.unavailable_reason():
        return reason
    if is_low_latency(algorithm):
        found = symmetric_memory.domain()
        if isinstance(found, str):
            return found
        most = layout.MAX_LOW_LATENCY_GPUS
        if found.num_gpus > most:
            return f"it is for up to {most} GPUs of a host, and has {found.num_gpus}"
    return None


def choose(
    op: str, algorithm: Algorithm, x: Any, num_ranks: int, refusals: Refusals = _NOTHING_KNOWN
) -> str:
    """Returns the algorithm to run: the named one, or the fastest of those that can run.

    Args:
      op: a key of `ALGORITHMS`.
      algorithm: one of `ALGORITHMS[op]`, or None.
      x: the operand of a rank, or its shape and dtype.
      num_ranks: N.
      refusals: what is already known about the program.

    Raises:
      ValueError: the named algorithm cannot run; the message says why.
    """
    if algorithm is not None:
        if reason := unavailable_reason(op, algorithm, x, num_ranks, refusals):
            raise refusal(op, algorithm, reason)
        return algorithm
    if jax.default_backend() != "gpu":
        return "xla"  # the table has no times of a machine that is not this one
    capability = getattr(jax.devices()[0], "compute_capability", None)
    num_bytes = x.size * x.dtype.itemsize * (num_ranks if op == "all_gather" else 1)
    return table.lookup(
        op,
        num_ranks,
        num_bytes,
        capability,
        can_run=lambda name: unavailable_reason(op, name, x, num_ranks, refusals) is None,
    )


def refusal(op: str, algorithm: str, reason: str) -> ValueError:
    """Returns the error for a named algorithm that cannot run."""
    return ValueError(
        f'{op}: algorithm="{algorithm}" cannot run here: {reason}. algorithm=None picks one that '
        "can."
    )
