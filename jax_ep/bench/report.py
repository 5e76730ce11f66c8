"""Shows rows of results: one text table, and a JSON file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_ep.runtime.environment import versions

# The results of one measured program: names of fields -> sizes, times and errors.
Row = dict[str, Any]
_started = time.monotonic()


class Column(NamedTuple):
    """A column of a text table.

    `value` is the name of a field, where "wall.median_us" is the field of a field, or a function of
    the row. Numbers are divided by `unit` (None: 1), and `form` formats them. `left` aligns left.
    """

    header: str
    value: str | Callable[[Row], Any]
    form: str = "{}"
    unit: float | None = None
    left: bool = False

    def cell(self, row: Row) -> str:
        if callable(self.value):
            value = self.value(row)
        else:
            value = row
            for key in self.value.split("."):
                value = None if value is None else value.get(key)
        if value is None:
            return ""
        return self.form.format(value if self.unit is None else value / self.unit)


def text(header: str, field: str | None = None) -> Column:
    return Column(header, field or header, left=True)


def _range(row: Row) -> str:
    wall = row.get("wall")
    return "{low_us:.1f}..{high_us:.1f}".format(**wall) if wall else "failed"


# The columns of all benchmarks: "device us" is the slowest rank's, "floor us" a lower bound.
COMMON = (
    Column("checked", lambda row: "yes" if row.get("checked") else None, left=True),
    Column("wall us", "wall.median_us", "{:.1f}"),
    Column("low..high", _range),
    Column("device us", "device.slowest_us", "{:.1f}"),
    Column("floor us", "floor_us", "{:.1f}"),
    Column("of floor", "of_floor", "{:.0%}"),
)


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Renders rows as an aligned text table, without columns of empty cells."""
    shown = []
    for column in columns:
        cells = [column.cell(row) for row in rows]
        if any(cells):
            width = max(map(len, [column.header, *cells]))
            align = str.ljust if column.left else str.rjust
            shown.append([align(cell, width) for cell in [column.header, *cells]])
    return ["  ".join(line).rstrip() for line in zip(*shown, strict=True)]


def notes(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Returns lines on the rows that failed, by error, and on missing device times."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault(row["error"], []).append(name(row))
    lines = []
    for error, names in failed.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{names[0]}{others}: {error}")
    blind = sorted({row["device_error"] for row in rows if row.get("device_error")})
    lines += [f"no device time: {error}" for error in blind]
    return ["", *lines] if lines else []


def kernels(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Returns lines on each row's device time by kernel."""
    lines = []
    for row in rows:
        if device := row.get("device"):
            lines += ["", f"{name(row)}: device us by kernel"]
            lines += [f"{us:10.1f}  {kernel}" for kernel, us in device["by_kernel_us"].items()]
    return lines or ["", "no device time by kernel: nothing saw the devices' kernels"]


def save_json(path: str | None, facts: dict[str, Any]) -> None:
    """Writes `facts`, with the command and versions, as JSON to the file of --json, if any.

    Call it before printing, which fails if a pipe's reader, such as `head`, has ended.
    """
    if path is not None:
        command = ["python", "-m", "jax_ep", *sys.argv[1:]]
        record = {"command": command, "versions": versions(), **facts}
        Path(path).write_text(json.dumps(record, indent=1), encoding="utf-8")


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"{time.monotonic() - _started:6.1f}s {text}", file=sys.stderr, flush=True)
