"""Which algorithm of a collective is the fastest: a table of what was measured.

`python -m jax_ep bench collectives --write_table FILE` writes entries into a table of this form,
a JSON object. The one that is shipped is `table.json`, next to this module; a program takes another
one from the file that the environment's JAX_EP_COLLECTIVES_TABLE names:

    {"9.0":                                  compute capability: a GPU generation
      {"all_reduce":                         operation
        {"8":                                ranks
          {"choices": [[65536, "one_shot"],  up to 65536 bytes
                       [2097152, "two_shot"],
                       [null, "xla"]],       beyond
           "machine": ..., "date": ..., "jax": ..., "us": {...}}}}}   where it comes from

Bytes are those of the whole array: x of all_reduce, reduce_scatter, all_to_all and
all_reduce_rms_norm, and the result of all_gather.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FILE_NAME = "table.json"
Choices = list[tuple[int | None, str]]

_CLEARLY_FASTER = 0.97  # of lax's own time: above that the difference may be the measurement's


@functools.cache
def current() -> dict[str, Any]:
    """The table of the file that JAX_EP_COLLECTIVES_TABLE names, or the shipped one."""
    path = os.environ.get("JAX_EP_COLLECTIVES_TABLE")
    file = (
        pathlib.Path(path) if path else importlib.resources.files("jax_ep.collectives") / FILE_NAME
    )
    return json.loads(file.read_text(encoding="utf-8"))


def lookup(
    op: str,
    num_ranks: int,
    num_bytes: int,
    compute_capability: str | None,
    table: Mapping[str, Any] | None = None,
    serves: Callable[[str], bool] = lambda algorithm: True,
) -> str:
    """The fastest algorithm that serves; "xla" where nothing was measured on such a GPU.

    A number of ranks that was not measured is taken for the next larger one that was, and for the
    largest one if there is none. Where the fastest one does not serve, the measured times tell
    which of the others is the fastest.
    """
    table = current() if table is None else table
    measured = table.get(compute_capability or "", {}).get(op, {})
    if not measured:
        return "xla"
    counts = sorted(int(count) for count in measured)
    nearest = next((count for count in counts if count >= num_ranks), counts[-1])
    entry = measured[str(nearest)]
    best = _of_size(entry["choices"], num_bytes)
    if serves(best):
        return best
    times = {
        int(size): {name: us for name, us in at_size.items() if name == "xla" or serves(name)}
        for size, at_size in entry.get("us", {}).items()
        if "xla" in at_size
    }
    return _of_size(choices(list(times), list(times.values())), num_bytes) if times else "xla"


def _of_size(ranges: Choices, num_bytes: int) -> str:
    return next((name for limit, name in ranges if limit is None or num_bytes <= limit), "xla")


def choices(sizes: Sequence[int], times: Sequence[Mapping[str, float]]) -> Choices:
    """The ranges of bytes in which each algorithm is the fastest.

    Args:
      sizes: bytes, increasing.
      times: for each size, every algorithm's time; "xla" is one of them.

    Returns:
      (limit, algorithm): up to so many bytes this one; the last limit is None. Between two sizes
      with different winners the limit is where their times, straight lines between the two sizes
      on logarithmic scales, cross. All of this with 97 % of lax's own time, so that nothing is
      chosen that is not clearly faster.
    """
    winners = [fastest(at_size) for at_size in times]
    times = [_with_bonus(at_size) for at_size in times]
    ranges: Choices = []
    for i in range(len(sizes) - 1):
        if winners[i] != winners[i + 1]:
            ranges.append((_crossing(sizes, times, i, winners[i], winners[i + 1]), winners[i]))
    return [*ranges, (None, winners[-1])]


def fastest(times: Mapping[str, float]) -> str:
    """The algorithm with the least time; "xla" unless another one is clearly faster."""
    times = _with_bonus(times)
    return min(times, key=lambda name: (times[name], name != "xla"))


def _with_bonus(times: Mapping[str, float]) -> dict[str, float]:
    return {name: us * (_CLEARLY_FASTER if name == "xla" else 1) for name, us in times.items()}


def _crossing(
    sizes: Sequence[int], times: Sequence[Mapping[str, float]], i: int, first: str, second: str
) -> int:
    """Bytes between sizes i and i + 1 from where on `second` is faster than `first`."""
    try:
        here, there = (math.log(times[j][second]) - math.log(times[j][first]) for j in (i, i + 1))
    except KeyError:  # one of the two was not measured at both sizes
        return sizes[i]
    part = min(max(here / (here - there), 0.0), 1.0) if here != there else 0.0
    return int(sizes[i] * (sizes[i + 1] / sizes[i]) ** part)
