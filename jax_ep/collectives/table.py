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
    except ValueError as error:
        # The text cannot be decoded, is not JSON, or fails in `_check`.
        problem = f"holds no table of collectives: {error}"
    else:
        return table
    raise ValueError(
        f"{VARIABLE}={path!r} {problem}. Name a file that `python -m jax_ep bench collectives "
        "--write_table FILE` wrote, or unset the variable."
    )


def _check(table: Any) -> None:
    for capability, operations in _items(table, "the file"):
        for op, by_ranks in _items(operations, capability):
            _require(op in ALGORITHMS, f"{capability}: {op!r} is not one of {tuple(ALGORITHMS)}")
            for ranks, entry in _items(by_ranks, f"{capability}: {op}"):
                where = f"{capability}: {op}: {ranks}"
                is_number = ranks.isdecimal() and int(ranks) > 0
                _require(is_number, f"{where!r} must end in a number of ranks")
                _check_entry(dict(_items(entry, where)), op, where)


def _check_entry(entry: dict[str, Any], op: str, where: str) -> None:
    def check_algorithm(name: Any) -> None:
        names = ALGORITHMS[op].names
        known = ", ".join(names)
        _require(name in names, f"{where}: unknown algorithm {name!r}; {op} has {known}")

    choices, form = entry.get("choices"), "[bytes or null, algorithm]"
    is_list = isinstance(choices, list) and len(choices) > 0
    _require(is_list, f"{where}: choices must be a list of {form}, but is {reprlib.repr(choices)}")
    for choice in entry["choices"]:
        match choice:
            case [None | int(), name]:
                check_algorithm(name)
            case _:
                text = reprlib.repr(choice)
                raise ValueError(f"{where}: a choice must be {form}, but is {text}")
    for size, times in _items(entry.get("us", {}), f"{where}: us"):
        _require(size.isdecimal(), f"{where}: us: {size!r} must be a number of bytes")
        for name, us in _items(times, f"{where}: us: {size}"):
            check_algorithm(name)
            is_time = isinstance(us, (int, float)) and us > 0
            _require(is_time, f"{where}: us: {size}: {name} must be a positive time, but is {us!r}")


def _items(value: Any, where: str) -> list[tuple[str, Any]]:
    is_object = isinstance(value, dict)
    _require(is_object, f"{where} must be a JSON object, but is {reprlib.repr(value)}")
    return list(value.items())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


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

    Of numbers of ranks that were not measured, the next larger one counts, or else the largest.
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
    try:
        here, there = (math.log(times[j][second]) - math.log(times[j][first]) for j in (i, i + 1))
    except KeyError:
        # One of the four times was not measured, so nothing can be interpolated. The lower size, at
        # which `first` is fastest, is returned.
        return sizes[i]
    part = min(max(here / (here - there), 0.0), 1.0) if here != there else 0.0
    return int(sizes[i] * (sizes[i + 1] / sizes[i]) ** part)
