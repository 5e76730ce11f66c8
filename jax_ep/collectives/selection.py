"""Which algorithm of a collective runs, and why one cannot.

Only what a program needs is asked: a program for CPUs loads no kernels, and one that does not use
the low-latency protocol allocates no symmetric memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_ep.collectives import table
from jax_ep.collectives.algorithms import Algorithm, is_low_latency
from jax_ep.runtime import availability, jax_compat, multicast
from jax_ep.runtime.jax_compat import Program


class Refusals(NamedTuple):
    """Why kernels cannot run in one program; None where nothing is known to prevent it.

    Attributes:
      kernels: why none of the library's kernels can run.
      low_latency: why none that uses the low-latency protocol can run.
    """

    kernels: str | None = None
    low_latency: str | None = None

    @classmethod
    def of_program(cls, program: Program, axis_name: tuple[str, ...]) -> Refusals:
        """Returns those of a program that is being lowered, with ranks along `axis_name`."""
        return cls(
            availability.program_unavailable_reason(program, axis_name),
            _low_latency_unavailable_reason(program),
        )


_NOTHING_KNOWN = Refusals()


def _low_latency_unavailable_reason(program: Program) -> str | None:
    """Returns why a program cannot use the low-latency protocol; None if only the machine may."""
    if program.for_export:
        return "its program holds addresses of this process, and is to be exported"
    mesh = program.mesh
    if mesh is None or not is_of_this_machine(mesh):
        return None
    if reason := jax_compat.devices_unavailable_reason():
        return reason
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return "it needs to know the order of the GPUs, and shard_map was given an abstract mesh"
    return None


def is_of_this_machine(mesh: Any) -> bool:
    """Returns whether this machine has GPUs, and as many as the mesh."""
    return jax.default_backend() == "gpu" and mesh.size <= jax.device_count()


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
    from jax_ep.collectives import pallas  # loads Mosaic, which only programs for GPUs need

    if reason := pallas.payload_unavailable_reason(op, algorithm, x.shape, x.dtype, num_ranks):
        return reason
    if reason := availability.tracing_unavailable_reason():
        return reason
    if is_low_latency(algorithm) and refusals.low_latency is not None:
        return refusals.low_latency
    if jax.default_backend() != "gpu":  # the program is for another machine, which is not known
        return None
    if algorithm == "multimem":
        return multicast.unavailable_reason()
    if reason := availability.unavailable_reason():
        return reason
    if is_low_latency(algorithm):
        from jax_ep.runtime import symmetric_memory  # loads Mosaic

        regions = symmetric_memory.here()
        return regions if isinstance(regions, str) else None
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
