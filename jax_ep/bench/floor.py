"""Computes a lower bound ("floor") of the time of dispatch and combine on this machine.

The rows that must cross to another rank take at least their bytes divided by the bandwidth of a
plain copy between two GPUs. Reading operands and writing results takes at least their bytes divided
by the bandwidth of a plain copy in a GPU's own memory. The floor is the longer of the two times.
Both bandwidths are measured in the same run as the exchange.
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
    """Measured bandwidths in bytes per second.

    Attributes:
      link: the bandwidth of a copy from one GPU to another, one way. None: not measurable here.
      memory: the bandwidth of a copy in one GPU's memory. Its bytes are those read plus those
        written. None: not measurable here.
    """

    link: float | None = None
    memory: float | None = None


class Traffic(NamedTuple):
    """The bytes that a rank must move in an operation, with any implementation; means over ranks.

    Attributes:
      remote: the bytes sent to other ranks: one row for each (token, other rank with an expert of
        the token).
      local: the bytes of operands and results: each operand is read once, each result written once.
    """

    remote: float
    local: float


class Floor(NamedTuple):
    """A lower bound of an operation's time.

    Attributes:
      us: the bound in microseconds.
      set_by: the bandwidth that sets it: "link" between GPUs, or "memory".
    """

    us: float
    set_by: str


def measure(devices: Sequence[jax.Device]) -> Bandwidths:
    """Measures the bandwidth between the first two GPUs, and in the first one's memory.

    On CPUs both fields of the result are None. With a single GPU, `link` is None.
    """
    if devices[0].platform != "gpu":
        return Bandwidths()
    link = None
    if len(devices) > 1:
        source = jax.device_put(jnp.zeros(_COPY_BYTES, jnp.uint8), devices[0])
        link = _copies_per_second(lambda: jax.device_put(source, devices[1])) * _COPY_BYTES
    return Bandwidths(link, memory_bandwidth(devices[0]))


def memory_bandwidth(device: jax.Device) -> float:
    """Times copies in a device's memory; returns bytes read plus bytes written per second."""
    size = _COPY_BYTES_OF_CPU if device.platform == "cpu" else _COPY_BYTES
    source = jax.device_put(jnp.zeros(size, jnp.uint8), device)
    copy = jax.jit(jnp.copy)
    return 2 * _copies_per_second(lambda: copy(source)) * size


def _copies_per_second(copy: Callable[[], jax.Array]) -> float:
    """Measures how many calls of `copy` a device completes per second.

    A measurement starts 8 calls and waits for all of them. Returns the highest rate of 8
    measurements, because other work on the machine only lowers the rate.
    """
    repeats, at_once = 8, 8
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
    """Counts the bytes that a rank must move in the operation `op`, with any implementation."""
    case = work.case()
    pairs, received = case.pairs().sum() / work.num_ranks, case.tokens().sum() / work.num_ranks
    own = PLAIN.row_bytes(work.hidden, work.dtype)
    wire = work.wire.row_bytes(work.hidden, work.dtype)
    dispatched = wire if work.output == "quantized" else own
    filled = received if work.layout == "rank" else pairs
    # The bytes of one array [T, H] of a rank: tokens, combined outputs, or their cotangents.
    tokens = work.num_tokens * own
    # The bytes of the filled rows of a receive buffer: experts' outputs, or their cotangents.
    rows = filled * own
    local = {
        "dispatch": tokens + filled * dispatched,
        "combine": rows + tokens,
        "round_trip": tokens + filled * dispatched + rows + tokens,
        "dispatch_grad": rows + tokens,
        # In the layout "expert", a combine takes the router's weights. Their gradient depends on
        # the experts' outputs, which must also be read.
        "combine_grad": tokens + rows + (0 if work.layout == "rank" else rows),
        "group_by_expert": received * dispatched + pairs * own,
        "sum_by_token": pairs * own + received * own,
    }[op]
    crossing = case.wire_rows()
    if op in OF_RANK_MAJOR:
        remote = 0.0
    elif op == "round_trip":
        # In a round trip, only the dispatch sends rows in the wire dtype.
        remote = crossing * (wire + own)
    else:
        remote = crossing * wire
    return Traffic(remote, float(local))


def floor(moved: Traffic, bandwidths: Bandwidths) -> Floor | None:
    """Computes the least time to move the bytes `moved` with the measured `bandwidths`.

    If one of the two bandwidths is None, the bytes that would use it are ignored. Returns None if
    no bytes are left.
    """
    times = []
    if bandwidths.link is not None and moved.remote:
        times.append(Floor(moved.remote / bandwidths.link * 1e6, "link"))
    if bandwidths.memory is not None:
        times.append(Floor(moved.local / bandwidths.memory * 1e6, "memory"))
    return max(times, default=None)


def record(moved: Traffic, bandwidths: Bandwidths) -> dict[str, Any]:
    """Returns fields for a row of results: the bytes `moved` by an operation and its `floor`."""
    found: dict[str, Any] = {"remote_bytes": moved.remote, "local_bytes": moved.local}
    if least := floor(moved, bandwidths):
        found |= {"floor_us": least.us, "floor_set_by": least.set_by}
    return found
