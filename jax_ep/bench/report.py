"""Renders the rows of results of the bench commands as text tables and matplotlib plots."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

# A row of results: a dict that maps the names of fields to the sizes, times and errors of one
# measured program.
Row = dict[str, Any]
# The points of a plot: maps panels' names to dicts that map lines' labels to points (x, y).
Panels = dict[str, dict[str, list[tuple[float, float]]]]


class Column(NamedTuple):
    """A column of a text table that has a line for each row of results.

    Attributes:
      header: the column's heading.
      value: the name of the field to show, where "wall.median_us" is the field "median_us" of the
        dict "wall"; or a function that returns the value for a row.
      form: the format string of a value, for `str.format`.
      left: whether cells are aligned to the left.
      usual: the text that a cell has if its value is None. A table leaves out a column in which
        every cell is empty or has this text.
    """

    header: str
    value: str | Callable[[Row], Any]
    form: str = "{}"
    left: bool = False
    usual: str = ""

    def cell(self, row: Row) -> str:
        if callable(self.value):
            value = self.value(row)
        else:
            value = row
            for key in self.value.split("."):
                value = None if value is None else value.get(key)
        return self.usual if value is None else self.form.format(value)


def _range(row: Row) -> str:
    wall = row.get("wall")
    return "{low_us:.1f}..{high_us:.1f}".format(**wall) if wall else "failed"


def text(header: str, field: str | None = None, usual: str = "") -> Column:
    """Makes a left-aligned column of a table of results.

    Args:
      header: the column's heading.
      field: the name of the field that the column shows. None: the field has the name `header`.
      usual: the text that a cell has if the field is None.
    """
    return Column(header, field or header, left=True, usual=usual)


CHECKED = Column("checked", lambda row: "yes" if row.get("checked") else None, left=True)
ENERGY = (
    Column("mJ", "energy.millijoules", "{:.2f}"),
    Column("W", "energy.watts", "{:.0f}"),
    Column("MHz", "energy.megahertz", "{:.0f}"),
)
WALL = (
    Column("wall us", "wall.median_us", "{:.1f}"),
    Column("low..high", _range),
    *ENERGY,
)
SLOWEST = Column("device us", "device.slowest_us", "{:.1f}")


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Renders rows of results as an aligned text table, one string per line.

    Leaves out a column in which every cell is empty or the column's `usual` text.
    """
    return fixed_width(
        [column.header for column in columns],
        [[column.cell(row) for column in columns] for row in rows],
        text=[column.header for column in columns if column.left],
        nothing=[column.usual for column in columns],
    )


def notes(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Renders the notes below a table of results as lines of text.

    The notes are the errors of failed programs, each once, and the reasons why device times or
    energies are missing. `name` is a function that describes a row in words.
    """
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault(row["error"], []).append(name(row))
    lines = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {error}"
        for error, names in failed.items()
    ]
    blind = sorted({row["device_error"] for row in rows if row.get("device_error")})
    lines += [f"no device time: {error}" for error in blind]
    unmeasured = sorted({row["energy_error"] for row in rows if row.get("energy_error")})
    lines += [f"no energy: {error}" for error in unmeasured]
    return ["", *lines] if lines else []


def kernels(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Renders, below a table of results, how each row's device time is divided among kernels.

    Times are microseconds per call. The kernels of the timing loop itself are listed, too. `name`
    is a function that describes a row in words.
    """
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
    """Renders the cells of a table as lines of text with aligned columns, the header first.

    Args:
      header: the columns' headings.
      lines: the cells of each line, one per column.
      text: the headings of columns that are aligned to the left; others are aligned to the right.
      nothing: for each column, the text of a cell without a value. A column whose cells are all
        empty or have this text is left out. None: the text is empty.
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


def lines(
    panels: Panels,
    path: str,
    *,
    title: str,
    x_label: str,
    y_label: str,
    logarithmic: bool = True,
    mark: tuple[float, str] | None = None,
) -> None:
    """Draws a line plot with one or more panels, and writes it to a file.

    Args:
      panels: the points (x, y) of each panel and line.
      path: the image file to write.
      title: the plot's title.
      x_label: the label of the x axis, with its unit.
      y_label: the label of the y axis, with its unit.
      logarithmic: whether both axes are logarithmic.
      mark: (x, label) of a dashed vertical line to draw in every panel; None: no such line.
    """
    panels = panels or {"nothing measured": {}}
    styles = _styles(label for found in panels.values() for label in found)
    with _figure(path, title, len(panels)) as axes:
        for axis, (name, found) in zip(axes, panels.items(), strict=True):
            for label, points in found.items():
                x, y = zip(*sorted(points), strict=True)
                # Later lines have smaller markers, so that two equal lines are both visible.
                size = max(3, 10 - 2 * list(styles).index(label))
                points_style = {"marker": "o", "markersize": size} if logarithmic else {}
                axis.plot(x, y, label=label, **styles[label], **points_style)
            axis.set(title=name.replace("_", " "), xlabel=x_label, ylabel=y_label)
            if logarithmic:
                axis.set(xscale="log", yscale="log")
                ticks = {x for points in found.values() for x, _ in points}
                label_log_axis(axis.xaxis, sorted(ticks) if len(ticks) < 8 else None)
                label_log_axis(axis.yaxis)
            if mark is not None:
                axis.axvline(mark[0], color="gray", linestyle="--", label=mark[1])
            axis.grid(visible=True, which="both", alpha=0.3)


def label_log_axis(axis: Any, ticks: Sequence[float] | None = None) -> None:
    """Labels a logarithmic matplotlib axis with plain numbers such as 32 and 4096.

    `ticks` are the values to label; None: 1, 2 and 5 times each power of ten.
    """
    from matplotlib import ticker

    axis.set_major_locator(
        ticker.LogLocator(subs=(1, 2, 5)) if ticks is None else ticker.FixedLocator(list(ticks))
    )
    axis.set_major_formatter(
        ticker.FuncFormatter(
            lambda value, _: f"{value:.0f}" if 1 <= value < 1e6 else readable(value)
        )
    )
    axis.set_minor_formatter(ticker.NullFormatter())


def readable(value: float) -> str:
    """Formats a number with three digits and a suffix: k (10^3), M (10^6) or G (10^9)."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def bars(
    rows: Sequence[Row],
    path: str,
    *,
    title: str,
    panel: Callable[[Row], str],
    group: Callable[[Row], str],
    bar: Callable[[Row], str],
    height: Callable[[Row], float | None],
    label: str,
) -> None:
    """Draws a bar chart with one bar per row of results, and writes it to a file.

    Args:
      rows: the rows of results.
      path: the image file to write.
      title: the plot's title.
      panel: returns the name of the panel that a row belongs to.
      group: returns the label of the group of bars that a row belongs to.
      bar: returns the name of a row's bar in its group; bars of one name have one color.
      height: returns the height of a row's bar, or None for a failed measurement.
      label: the label of the vertical axis, with its unit.
    """
    from matplotlib import ticker

    panels = list(dict.fromkeys(panel(row) for row in rows))
    groups = list(dict.fromkeys(group(row) for row in rows))
    styles = _styles(bar(row) for row in rows)
    width = 0.8 / max(len(styles), 1)
    panel_width = 2 + max(2.5, 0.55 * len(styles)) * len(groups)
    with _figure(path, title, max(len(panels), 1), panel_width) as axes:
        for axis, name in zip(axes, panels, strict=False):
            for number, (text, style) in enumerate(styles.items()):
                found = {
                    group(row): height(row)
                    for row in rows
                    if panel(row) == name and bar(row) == text
                }
                offset = (number - (len(styles) - 1) / 2) * width
                places = [groups.index(key) + offset for key in found]
                drawn = axis.bar(
                    places, [h or 0.0 for h in found.values()], width, label=text, **style
                )
                texts = ["failed" if h is None else readable(h) for h in found.values()]
                axis.bar_label(drawn, texts, fontsize=7, rotation=90, padding=2)
            axis.set_xticks(range(len(groups)), groups, fontsize="small")
            # Leaves space above the bars, where their heights are written as numbers.
            axis.margins(y=0.15)
            axis.set(title=name.replace("_", " "), ylabel=label)
            axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: readable(value)))
            axis.grid(visible=True, axis="y", alpha=0.3)


def _styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Maps each distinct label to its color, as matplotlib's keyword arguments {"color": ...}."""
    import matplotlib

    distinct = list(dict.fromkeys(labels))
    name, count = ("tab10", 10) if len(distinct) <= 10 else ("tab20", 20)
    colors = matplotlib.colormaps[name]
    return {label: {"color": colors(i % count)} for i, label in enumerate(distinct)}


@contextlib.contextmanager
def _figure(path: str, title: str, panels: int, width: float = 5.5) -> Iterator[list[Any]]:
    """Makes a matplotlib figure with several panels; yields a list of the panels' axes.

    On exit, adds one legend for all panels below them, adds the title, and writes the image file
    `path`. `panels` is the number of panels, and `width` the width of one in inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(panels, max(1, int(22 / width)))
    rows = -(-panels // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(width * columns, 4.5 * rows), squeeze=False, layout="constrained"
    )
    axes = list(grid.reshape(-1))
    for unused in axes[panels:]:
        unused.remove()
    yield axes[:panels]
    handles: dict[str, Any] = {}
    for axis in axes[:panels]:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if handles:
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower center",
            ncols=max(1, int(width * columns / 2.7)),
            fontsize="small",
        )
    # About this many characters of the title fit on a line.
    letters = int(width * columns * 13)
    wrapped = [textwrap.fill(line, letters) for line in title.splitlines()]
    figure.suptitle("\n".join(wrapped), fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)
