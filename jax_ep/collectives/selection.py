"""Chooses the algorithm of a collective, and says why one cannot run.

Only conditions that a program depends on are checked, so a program for CPUs loads no kernels and
allocates no symmetric memory.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_ep.collectives import table
from jax_ep.collectives.algorithms import Algorithm, is_low_latency
from jax_ep.runtime import availability, jax_compat, multicast
from pallas_kernels.fabric import memory_map


def unavailable_reason(
    op: str, algorithm: str, x: Any, num_ranks: int, refused: str | None = None
) -> str | None:
    """Returns why an algorithm cannot run, or None if it can.

    Args:
      op: a key of `ALGORITHMS`.
      algorithm: one of `ALGORITHMS[op]`; "xla" and "unfused" can always run.
      x: the operand of a rank, or its shape and dtype.
      num_ranks: N.
      refused: why none of the library's kernels can run, if that is already known.
    """
    if algorithm in ("xla", "unfused"):
        return None
    if refused is not None:
        return refused
    if reason := availability.mosaic_unavailable_reason():
        return reason
    # Loads Mosaic, which only programs for GPUs need.
    from jax_ep.collectives import pallas
    from jax_ep.runtime.fabric import domain_of

    if reason := pallas.payload_unavailable_reason(op, algorithm, x.shape, x.dtype):
        return reason
    if reason := availability.tracing_unavailable_reason():
        return reason
    if algorithm == "multimem" and (reason := jax_compat.multimem_unavailable_reason()):
        return reason
    on_gpus = jax.default_backend() == "gpu"  # else the program is for another, unknown machine
    if on_gpus and algorithm == "multimem":
        return multicast.unavailable_reason()
    if on_gpus and (reason := availability.unavailable_reason()):
        return reason
    if not is_low_latency(algorithm):
        return None
    num_gpus = max(num_ranks, jax.sharding.get_abstract_mesh().size)
    domain = domain_of(num_gpus)
    if isinstance(domain, str):
        return domain
    if domain is not None:
        num_gpus, most = domain.num_gpus, memory_map.MAX_LOW_LATENCY_GPUS
        if num_gpus > most:
            return f"it is for up to {most} GPUs of a host, and has {num_gpus}"
    return pallas.no_room_reason(op, algorithm, x.shape, x.dtype, num_ranks, num_gpus)


def choose(
    op: str, algorithm: Algorithm, x: Any, num_ranks: int, refused: str | None = None
) -> str:
    """Returns the algorithm to run: the named one, or the fastest of those that can run.

    Args:
      op: a key of `ALGORITHMS`.
      algorithm: one of `ALGORITHMS[op]`, or None.
      x: the operand of a rank, or its shape and dtype.
      num_ranks: N.
      refused: why none of the library's kernels can run, if that is already known.

    Raises:
      ValueError: the named algorithm cannot run; the message says why.
    """
    if algorithm is not None:
        if reason := unavailable_reason(op, algorithm, x, num_ranks, refused):
            raise refusal(op, algorithm, reason)
        return algorithm
    if jax.default_backend() != "gpu" or refused is not None:
        return "xla"  # the table has no times of another machine; sizes may be symbols
    capability = getattr(jax.devices()[0], "compute_capability", None)
    num_bytes = x.size * x.dtype.itemsize * (num_ranks if op == "all_gather" else 1)
    return table.lookup(
        op,
        num_ranks,
        num_bytes,
        capability,
        can_run=lambda name: unavailable_reason(op, name, x, num_ranks, refused) is None,
    )


def refusal(op: str, algorithm: str, reason: str) -> ValueError:
    """Returns the error for a named algorithm that cannot run."""
    return ValueError(
        f'{op}: algorithm="{algorithm}" cannot run here: {reason}. algorithm=None picks one that '
        "can."
    )
