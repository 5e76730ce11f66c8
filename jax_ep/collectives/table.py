"""Reads the table of measured times, and finds the fastest algorithm of a collective in it.

`python -m jax_ep bench collectives --write_table FILE` writes entries into a table of this form,
a JSON object. `table.json`, next to this module, is used unless the environment variable
JAX_EP_COLLECTIVES_TABLE names another file:

    {"9.0":                                  compute capability: a GPU generation
      {"all_reduce":                         operation
        {"8":                                ranks
          {"choices": [[65536, "one_shot"],  up to 65536 bytes
                       [2097152, "two_shot"],
                       [null, "xla"]],       beyond
           "us": {"65536": {"one_shot": 9.5, "xla": 20.1}},     microseconds by bytes; optional
           "machine": ..., "date": ..., "jax": ...}}}}          how it was measured; optional

The bytes are the size of x, or for all_gather the size of the result, on one rank.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_ep.collectives.algorithms import ALGORITHMS, Algorithm, Problem

VARIABLE = "JAX_EP_COLLECTIVES_TABLE"
# Pairs (most bytes, algorithm) in rising order; the bytes are None in the last.
Choices = list[tuple[int | None, str]]
# A kernel is preferred to XLA if it takes less than this share of XLA's time. A smaller difference
# may be measurement noise.
_CLEARLY_FASTER = 0.97


def current() -> dict[str, Any]:
    """Returns the table that JAX_EP_COLLECTIVES_TABLE names, or the table in this package."""
    return _read(os.environ.get(VARIABLE) or str(pathlib.Path(__file__).with_name("table.json")))


@functools.cache
def _read(path: str) -> dict[str, Any]:
    try:
        table = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        _check(table)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # The text cannot be decoded, is not JSON, or fails in `_check`.
        problem = f"holds no table of collectives: {error!r}"
    else:
        return table
    raise ValueError(
        f"{VARIABLE}={path!r} {problem}. Name a file that `python -m jax_ep bench collectives "
        "--write_table FILE` wrote, or unset the variable."
    )


def _check(table: Any) -> None:
    """Raises an exception unless `table` has the form that the module describes."""
    for operations in table.values():
        for op, by_ranks in operations.items():
            known = set(ALGORITHMS[op].names)
            for ranks, entry in by_ranks.items():
                limits, names = zip(*entry["choices"], strict=True)
                times = {int(size): dict(at_size) for size, at_size in entry.get("us", {}).items()}
                used = set(names).union(*times.values())
                are_limits = all(limit is None or isinstance(limit, int) for limit in limits)
                if int(ranks) < 1 or not are_limits or not used <= known:
                    raise ValueError(
                        f"{op} on {ranks} ranks has {reprlib.repr(entry)}, but should have choices "
                        f"[bytes or null, algorithm] and times of the algorithms {sorted(known)}"
                    )


def select(algorithm: Algorithm, problem: Problem) -> str:
    """Returns the name of the algorithm to run; ValueError if the named one cannot run."""
    algorithms = ALGORITHMS[problem.op]
    if algorithm is not None:
        return algorithms.select(algorithm, problem).name
    if jax.default_backend() != "gpu" or problem.kernels_unavailable_reason is not None:
        # No kernel can run, so the table is not used: it has no times of CPUs, and the sizes of x
        # may be symbolic dimensions, which have no value.
        return "xla"
    x = problem.operands[0]
    return lookup(
        problem.op,
        problem.num_ranks,
        x.size * x.dtype.itemsize * (problem.num_ranks if problem.op == "all_gather" else 1),
        getattr(jax.devices()[0], "compute_capability", None),
        can_run=lambda name: algorithms[name].unavailable_reason(problem) is None,
    )


def lookup(
    op: str,
    num_ranks: int,
    num_bytes: int,
    compute_capability: str | None,
    table: Mapping[str, Any] | None = None,
    can_run: Callable[[str], bool] = lambda algorithm: True,
) -> str:
    """Returns the fastest algorithm for `num_bytes` of x (all_gather: of the result).

    If `num_ranks` was not measured, the times are those of the next larger number, or else of the
    largest. Algorithms of which `can_run` is false are passed over. `table` None: `current()`.
    """
    table = current() if table is None else table
    measured = table.get(compute_capability or "", {}).get(op, {})
    if not measured:
        return "xla"
    counts = sorted(int(count) for count in measured)
    nearest = next((count for count in counts if count >= num_ranks), counts[-1])
    entry = measured[str(nearest)]
    best = _of_size(entry["choices"], num_bytes)
    if can_run(best):
        return best
    # Computes the ranges anew, from the measured times of the algorithms that can run, at sizes
    # where XLA was measured, too: there, at least one algorithm can run.
    times = {
        int(size): {name: us for name, us in at_size.items() if name == "xla" or can_run(name)}
        for size, at_size in entry.get("us", {}).items()
        if "xla" in at_size
    }
    return _of_size(choices(list(times), list(times.values())), num_bytes) if times else "xla"


def _of_size(ranges: Choices, num_bytes: int) -> str:
    return next((name for limit, name in ranges if limit is None or num_bytes <= limit), "xla")


def choices(sizes: Sequence[int], times: Sequence[Mapping[str, float]]) -> Choices:
    """Returns the ranges of bytes in which each algorithm is the fastest, as (limit, algorithm).

    `times` are the microseconds for each of the rising `sizes`. A limit is where two algorithms
    take equal times, interpolated on logarithmic scales.
    """
    winners = [fastest(at_size) for at_size in times]
    times = [_with_bonus(at_size) for at_size in times]
    ranges: Choices = []
    for i in range(len(sizes) - 1):
        if winners[i] != winners[i + 1]:
            ranges.append((_crossing(sizes, times, i, winners[i], winners[i + 1]), winners[i]))
    return [*ranges, (None, winners[-1])]


def fastest(times: Mapping[str, float]) -> str:
    """Returns the algorithm with the least of `times`; "xla" unless another is clearly faster."""
    times = _with_bonus(times)
    return min(times, key=lambda name: (times[name], name != "xla"))  # of equal times, XLA's


def _with_bonus(times: Mapping[str, float]) -> dict[str, float]:
    return {name: us * (_CLEARLY_FASTER if name == "xla" else 1) for name, us in times.items()}


def _crossing(
    sizes: Sequence[int], times: Sequence[Mapping[str, float]], i: int, first: str, second: str
) -> int:
    """Returns the bytes, between sizes[i] and sizes[i + 1], above which `second` beats `first`."""
    lower, upper = times[i], times[i + 1]
    if not all(name in at_size for name in (first, second) for at_size in (lower, upper)):
        # Nothing can be interpolated. At the lower size, `first` is the fastest.
        return sizes[i]
    # log(second's time / first's), at both sizes: positive where `first` is faster.
    log_lower = math.log(lower[second]) - math.log(lower[first])
    log_upper = math.log(upper[second]) - math.log(upper[first])
    if log_lower == log_upper:
        return sizes[i]
    # The share of the way between the sizes at which it is 0, if it changes in a straight line.
    share = min(max(log_lower / (log_lower - log_upper), 0.0), 1.0)
    return int(sizes[i] * (sizes[i + 1] / sizes[i]) ** share)
