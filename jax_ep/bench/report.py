"""Renders results of the bench commands as tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

Row = dict[str, Any]

_COLUMNS = (
    ("op", "op"),
    ("tokens", "tokens"),
    ("ranks", "ranks"),
    ("dtype", "dtype"),
    ("layout", "layout"),
    ("wire", "wire_dtype"),
    ("implementation", "implementation"),
    ("checked", "checked"),
    ("rows", "rows"),
    ("device us", "device_us"),
    ("slowest", "slowest_us"),
    ("wall us", "wall_us"),
    ("low..high", "wall_range"),
    ("wire MB", "wire_mb"),
    ("logical GB/s", "logical_gb_per_s"),
    ("wire GB/s", "wire_gb_per_s"),
    ("floor us", "floor_us"),
    ("set by", "floor_set_by"),
    ("of floor", "floor_fraction"),
    ("vs ragged", "speedup_over_ragged"),
)
_DEFAULTS = {"layout": "expert", "wire_dtype": "none"}
_TEXT = ("op", "dtype", "layout", "wire_dtype", "implementation", "checked", "floor_set_by")


def table(rows: Sequence[Row], by_kernel: bool = False) -> str:
    """Renders the results of `bench` as a table, followed by errors and, if asked for, kernels."""
    cells = [[_cell(row, key) for _, key in _COLUMNS] for row in rows]
    nothing = [_DEFAULTS.get(key, "") for _, key in _COLUMNS]
    out = fixed_width(
        [header for header, _ in _COLUMNS],
        cells,
        text=[header for header, key in _COLUMNS if key in _TEXT],
        nothing=nothing,
    )
    return "\n".join([*out, *notes(rows, name), *(kernels(rows, name) if by_kernel else [])])


def notes(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Renders lines for below a table: each row's error, and why device times are missing."""
    lines = [f"{name(row)}: {row['error']}" for row in rows if row.get("error")]
    blind = sorted({row["device_error"] for row in rows if row.get("device_error")})
    lines += [f"no device time: {error}" for error in blind]
    return ["", *lines] if lines else []


def kernels(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Renders lines for below a table: each row's device time by kernel, with the loop's own."""
    lines = []
    for row in rows:
        if device := row.get("device"):
            lines += ["", f"{name(row)}: device us by kernel"]
            lines += [f"{us:10.1f}  {kernel}" for kernel, us in device["by_kernel_us"].items()]
    return lines or ["", "no device time by kernel: nothing saw the devices' kernels"]


def fixed_width(
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    text: Collection[str] = (),
    nothing: Sequence[str] | None = None,
) -> list[str]:
    """Renders a table's cells as lines of aligned columns, the header first.

    Columns named in `text` are aligned to the left, all others to the right. A column is left out
    if each of its cells is empty or equals the column's entry in `nothing`.
    """
    usual = nothing or [""] * len(header)
    kept = [i for i in range(len(header)) if any(line[i] not in ("", usual[i]) for line in lines)]
    chosen = [[line[i] for i in kept] for line in [header, *lines]]
    widths = [max(map(len, column)) for column in zip(*chosen, strict=True)]
    out = []
    for line in chosen:
        padded = [
            cell.ljust(width) if header[i] in text else cell.rjust(width)
            for i, cell, width in zip(kept, line, widths, strict=True)
        ]
        out.append("  ".join(padded).rstrip())
    return out


def plot(rows: Sequence[Row], path: str) -> None:
    """Draws the results of `bench` to a file: wall time over tokens, a panel for each operation.

    A panel has a line for each combination of implementation, number of ranks, dtype and layout.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [row for row in rows if not row.get("error")]
    operations = list(dict.fromkeys(row["op"] for row in measured)) or ["nothing measured"]
    figure, axes = plt.subplots(
        1, len(operations), figsize=(5 * len(operations), 4.5), squeeze=False, sharey=True
    )
    for axis, operation in zip(axes[0], operations, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in (row for row in measured if row["op"] == operation):
            label = ", ".join([f"{row['ranks']} ranks", row["dtype"], *_way(row)])
            lines.setdefault(label, []).append((row["tokens"], row["wall"]["median_us"]))
        for label, points in lines.items():
            tokens, times = zip(*sorted(points), strict=True)
            axis.plot(tokens, times, marker="o", label=label)
        axis.set(title=operation, xlabel="tokens per rank", xscale="log", yscale="log")
        label_log_axis(axis.xaxis, sorted({row["tokens"] for row in measured}))
        label_log_axis(axis.yaxis)
        axis.grid(visible=True, which="both", alpha=0.3)
        if lines:
            axis.legend(fontsize="x-small")
    axes[0][0].set_ylabel("in-loop wall time, us")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label_log_axis(axis: Any, ticks: Sequence[float] | None = None) -> None:
    """Labels a plot's logarithmic axis in plain numbers: 32 and 4096, not 3 x 10^1.

    `ticks` are the places of the labels; None: 1, 2 and 5 times each power of ten.
    """
    from matplotlib import ticker

    axis.set_major_locator(
        ticker.LogLocator(subs=(1, 2, 5)) if ticks is None else ticker.FixedLocator(list(ticks))
    )
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def bars(
    rows: Sequence[Row],
    path: str,
    *,
    panel: str,
    group: Callable[[Row], str],
    bar: str,
    height: str,
    label: str,
) -> None:
    """Draws results as groups of bars, to a file.

    Args:
      rows: the results.
      path: the file to write.
      panel: the key whose values get a panel each.
      group: returns the label of the group of bars that a row belongs to.
      bar: the key whose values get a bar each in every group.
      height: the key of a bar's height; a row without it has no height.
      label: the label of the vertical axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(group(row) for row in rows))
    names = list(dict.fromkeys(row[bar] for row in rows))
    panels = list(dict.fromkeys(row[panel] for row in rows))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2 + 2.5 * len(groups) * len(panels), 4.5), squeeze=False
    )
    width = 0.8 / len(names)
    for axis, title in zip(axes[0], panels, strict=True):
        for number, name in enumerate(names):
            found = {
                group(row): row.get(height) or 0.0
                for row in rows
                if (row[panel], row[bar]) == (title, name)
            }
            places = [i + (number - (len(names) - 1) / 2) * width for i in range(len(groups))]
            drawn = axis.bar(places, [found.get(g, 0.0) for g in groups], width, label=name)
            axis.bar_label(drawn, fmt="{:.2g}", fontsize=6)
        axis.set_xticks(range(len(groups)), groups, fontsize="small")
        axis.set(title=title.replace("_", " "), ylabel=label)
        axis.grid(visible=True, axis="y", alpha=0.3)
    axes[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cell(row: Row, key: str) -> str:
    wall, device = row.get("wall") or {}, row.get("device") or {}
    value: Any
    if key == "wall_us":
        value = wall.get("median_us")
    elif key == "wall_range":
        return f"{wall['low_us']:.1f}..{wall['high_us']:.1f}" if wall else "failed"
    elif key == "device_us":
        value = device.get("median_us")
    elif key == "slowest_us":
        value = device.get("slowest_us")
    elif key == "wire_mb":
        value = row["wire_bytes"] / 1e6 if "wire_bytes" in row else None
    else:
        value = row.get(key)
    if key == "checked":
        return "yes" if value else ""
    if value is None:
        return ""
    if key == "rows":
        return f"{value:.0f}"
    if key == "floor_fraction":
        return f"{value:.0%}"
    if key == "speedup_over_ragged":
        return f"{value:.1f}x"
    if key.endswith("_us"):
        return f"{value:.1f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def name(row: Row) -> str:
    """Names a result of `bench` in words: operation, tokens, ranks, dtype and implementation."""
    case = f"{row['op']}, {row['tokens']} tokens, {row['ranks']} ranks, {row['dtype']}"
    return ", ".join([case, *_way(row)])


def _way(row: Row) -> list[str]:
    """Names a result's layout and wire dtype, unless they are defaults, and its implementation."""
    unusual = [row[key] for key, usual in _DEFAULTS.items() if row.get(key, usual) != usual]
    return [*unusual, row["implementation"]]
