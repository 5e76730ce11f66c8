"""Computes the floor of an exchange: the time that no implementation can beat on this machine.

The rows that must cross to another rank take at least their bytes over the bandwidth of a plain
copy between two GPUs. The operands and results take at least their bytes over the bandwidth of a
plain copy in a GPU's own memory. The floor is the longer of the two times. Both bandwidths are
measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.bench.operations import OF_RANK_MAJOR, Work
from pallas_kernels.formats import PLAIN

_COPY_BYTES, _COPY_BYTES_OF_CPU = 2**30, 2**26


class Bandwidths(NamedTuple):
    """Bandwidths in bytes per second; None where one cannot be measured.

    Attributes:
      link: from one GPU to another, one way.
      memory: in the memory of one GPU, counting bytes read and bytes written.
    """

    link: float | None = None
    memory: float | None = None


class Traffic(NamedTuple):
    """The bytes per rank that any implementation of an operation must move; means over ranks.

    Attributes:
      remote: bytes sent to other ranks, one row for each (token, other rank).
      local: bytes of operands, read once, and of results, written once.
    """

    remote: float
    local: float


class Floor(NamedTuple):
    """The least time of an operation, in microseconds, and what sets it: "link" or "memory"."""

    us: float
    set_by: str


def measure(devices: Sequence[jax.Device]) -> Bandwidths:
    """Measures the bandwidths of the link and of memory; CPUs have neither, one GPU no link."""
    if devices[0].platform != "gpu":
        return Bandwidths()
    link = None
    if len(devices) > 1:
        source = jax.device_put(jnp.zeros(_COPY_BYTES, jnp.uint8), devices[0])
        link = _copies_per_second(lambda: jax.device_put(source, devices[1])) * _COPY_BYTES
    return Bandwidths(link, memory_bandwidth(devices[0]))


def memory_bandwidth(device: jax.Device) -> float:
    """Measures a copy in a device's memory; returns bytes per second, read and written."""
    size = _COPY_BYTES_OF_CPU if device.platform == "cpu" else _COPY_BYTES
    source = jax.device_put(jnp.zeros(size, jnp.uint8), device)
    copy = jax.jit(jnp.copy)
    return 2 * _copies_per_second(lambda: copy(source)) * size


def _copies_per_second(copy: Callable[[], jax.Array], repeats: int = 8, at_once: int = 8) -> float:
    """Times copies, `at_once` at a time; returns copies per second, the best of `repeats` times.

    The best stands for what the hardware can do.
    """
    jax.block_until_ready(copy())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        copies = [copy() for _ in range(at_once)]
        jax.block_until_ready(copies)
        best = min(best, time.perf_counter() - start)
        del copies
    return at_once / best


def traffic(op: str, work: Work) -> Traffic:
    """Counts the bytes per rank that an operation of `operations.OPERATIONS` must move."""
    case = work.case()
    pairs, received = case.pairs().sum() / work.num_ranks, case.tokens().sum() / work.num_ranks
    own = PLAIN.row_bytes(work.hidden, work.dtype)
    wire = work.wire.row_bytes(work.hidden, work.dtype)
    dispatched = wire if work.output == "quantized" else own
    filled = received if work.layout == "rank" else pairs
    here = work.num_tokens * own  # the bytes of x, g or out [T, H]
    rows = filled * own  # the bytes of y or dy [R, H]
    local = {
        "dispatch": here + filled * dispatched,
        "combine": rows + here,
        "round_trip": here + filled * dispatched + rows + here,
        "dispatch_grad": rows + here,
        # The gradient of the weights reads y; rank-major combines have no weights.
        "combine_grad": here + rows + (0 if work.layout == "rank" else rows),
        "group_by_expert": received * dispatched + pairs * own,
        "sum_by_token": pairs * own + received * own,
    }[op]
    crossing = case.wire_rows()
    if op in OF_RANK_MAJOR:
        remote = 0.0
    elif op == "round_trip":  # the combine of a round trip is not quantized
        remote = crossing * (wire + own)
    else:
        remote = crossing * wire
    return Traffic(remote, float(local))


def floor(moved: Traffic, bandwidths: Bandwidths) -> Floor | None:
    """Computes the least time that `moved` takes; None if no bandwidth that it needs is known."""
    times = []
    if bandwidths.link is not None and moved.remote:
        times.append(Floor(moved.remote / bandwidths.link * 1e6, "link"))
    if bandwidths.memory is not None:
        times.append(Floor(moved.local / bandwidths.memory * 1e6, "memory"))
    return max(times, default=None)


def record(moved: Traffic, bandwidths: Bandwidths) -> dict[str, Any]:
    """Returns the floor and the bytes it is computed from, as fields of a result of `bench`."""
    found: dict[str, Any] = {"remote_bytes": moved.remote, "local_bytes": moved.local}
    if least := floor(moved, bandwidths):
        found |= {"floor_us": least.us, "floor_set_by": least.set_by}
    return found
