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
import importlib.resources
import json
import math
import os
import pathlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_ep.collectives.algorithms import ALGORITHMS

FILE_NAME = "table.json"
VARIABLE = "JAX_EP_COLLECTIVES_TABLE"
Choices = list[tuple[int | None, str]]


# A kernel is preferred to XLA if it takes less than this share of XLA's time. A smaller difference
# may be measurement noise.
_CLEARLY_FASTER = 0.97


def current() -> dict[str, Any]:
    """Returns the table that JAX_EP_COLLECTIVES_TABLE names, or the table in this package.

    Raises:
      ValueError: the file that JAX_EP_COLLECTIVES_TABLE names cannot be read or holds no table.
    """
    path = os.environ.get(VARIABLE)
    return _read(path) if path else _shipped()


@functools.cache
def _shipped() -> dict[str, Any]:
    file = importlib.resources.files("jax_ep.collectives") / FILE_NAME
    return json.loads(file.read_text(encoding="utf-8"))


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
    """Raises ValueError unless a JSON value is a table as the module docstring describes it.

    The message names the part of the value that does not have this form.
    """
    for capability, operations in _items(table, "the file"):
        for op, by_ranks in _items(operations, capability):
            if op not in ALGORITHMS:
                raise ValueError(f"{capability}: {op!r} is not one of {tuple(ALGORITHMS)}")
            for ranks, entry in _items(by_ranks, f"{capability}: {op}"):
                where = f"{capability}: {op}: {ranks}"
                if not ranks.isdecimal() or int(ranks) < 1:
                    raise ValueError(f"{where!r} must end in a number of ranks")
                fields = dict(_items(entry, where))
                _check_choices(fields.get("choices"), op, where)
                for size, times in _items(fields.get("us", {}), f"{where}: us"):
                    if not size.isdecimal():
                        raise ValueError(f"{where}: us: {size!r} must be a number of bytes")
                    for name, us in _items(times, f"{where}: us: {size}"):
                        _check_algorithm(name, op, where)
                        if not isinstance(us, (int, float)) or not us > 0:
                            raise ValueError(
                                f"{where}: us: {size}: {name} must be a positive time, but is "
                                f"{us!r}"
                            )


def _items(value: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, but is {reprlib.repr(value)}")
    return list(value.items())


def _check_choices(choices: Any, op: str, where: str) -> None:
    if not isinstance(choices, list) or not choices:
        raise ValueError(
            f"{where}: choices must be a list of [bytes or null, algorithm], but is "
            f"{reprlib.repr(choices)}"
        )
    for choice in choices:
        if (
            not isinstance(choice, list)
            or len(choice) != 2
            or not (choice[0] is None or type(choice[0]) is int)
        ):
            raise ValueError(
                f"{where}: a choice must be [bytes or null, algorithm], but is "
                f"{reprlib.repr(choice)}"
            )
        _check_algorithm(choice[1], op, where)


def _check_algorithm(name: Any, op: str, where: str) -> None:
    names = ALGORITHMS[op].names
    if name not in names:
        raise ValueError(f"{where}: unknown algorithm {name!r}; {op} has {', '.join(names)}")


def lookup(
    op: str,
    num_ranks: int,
    num_bytes: int,
    compute_capability: str | None,
    table: Mapping[str, Any] | None = None,
    can_run: Callable[[str], bool] = lambda algorithm: True,
) -> str:
    """Returns the fastest algorithm that can run; "xla" if this GPU generation was not measured.

    If N ranks were not measured, the times of the next larger measured number of ranks are used. If
    no larger number was measured, the times of the largest measured number are used. If the fastest
    algorithm cannot run, the fastest one that can run is returned.

    Args:
      op: the operation, such as "all_reduce".
      num_ranks: N, the number of ranks.
      num_bytes: the bytes of x, or for all_gather of the result.
      compute_capability: the GPUs' compute capability, as "9.0"; None for other devices.
      table: a table of the form that `current` returns; None: the result of `current`.
      can_run: returns whether an algorithm, given by name, can run.
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
    times = {
        int(size): {name: us for name, us in at_size.items() if name == "xla" or can_run(name)}
        for size, at_size in entry.get("us", {}).items()
        if "xla" in at_size
    }
    return _of_size(choices(list(times), list(times.values())), num_bytes) if times else "xla"


def _of_size(ranges: Choices, num_bytes: int) -> str:
    return next((name for limit, name in ranges if limit is None or num_bytes <= limit), "xla")


def choices(sizes: Sequence[int], times: Sequence[Mapping[str, float]]) -> Choices:
    """Returns the ranges of bytes in which each algorithm is the fastest.

    Args:
      sizes: bytes of the measured arrays, in increasing order.
      times: for each size, the microseconds of every algorithm; "xla" is one of them.

    Returns:
      Pairs (limit, algorithm): the algorithm is the fastest up to `limit` bytes; the last limit is
      None. Between two sizes with different fastest algorithms, the limit is the size at which the
      two times are equal, by linear interpolation on logarithmic scales. XLA's times count as 97 %
      of the measured times, so another algorithm is chosen only where it is clearly faster.
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
    return min(times, key=lambda name: (times[name], name != "xla"))


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
