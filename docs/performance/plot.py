"""Draws the plots of docs/performance.md from the measured figures in figures.json.

Run `python docs/performance/plot.py` after a change of figures.json. It needs matplotlib (extra
`bench`) and writes one SVG for each figure that has a "plot". The same figures give the same bytes
with one version of matplotlib. Each SVG holds the digest of its figure, so that tests find a plot
that is older than its figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
PLOTS = HERE.parent / "_static" / "performance"

# From the palette of Okabe and Ito, which color-blind readers can tell apart.
COLORS = {"blue": "#0072B2", "light blue": "#56B4E9", "orange": "#E69F00", "gray": "#8C8C8C"}
# A plot has no background, and text that can be read on a light page and on a dark one.
TEXT = "#787878"
STYLE = {
    "axes.edgecolor": TEXT,
    "axes.facecolor": "none",
    "axes.labelcolor": TEXT,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 9,
    "grid.alpha": 0.3,
    "grid.color": TEXT,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jax_ep",
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
WIDTH = 8.6  # inches
BAR = 0.19  # inches, the height of a bar with its share of the space between bars


def read_figures() -> dict[str, dict[str, Any]]:
    """Returns all figures by name; `tests/test_performance.py` lists the fields of a figure."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def digest(figure: dict[str, Any]) -> str:
    """Returns the digest of a figure that its SVG holds."""
    text = json.dumps(figure, ensure_ascii=False, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def gpus(figure: dict[str, Any]) -> str:
    """Returns the number and the model of a figure's GPUs, such as "2 × NVIDIA H200"."""
    numbers = figure["num_gpus"]
    text = " and ".join(map(str, numbers)) if isinstance(numbers, list) else str(numbers)
    return f"{text} × {figure['gpu']}"


def draw(figure: dict[str, Any], path: Path) -> None:
    """Draws a figure to an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.style.context(["default", STYLE]):
        draw_plot = _lines if "lines" in figure["plot"] else _bars
        drawn = draw_plot(figure["plot"])
        dtypes = ", ".join(dict.fromkeys(figure["dtypes"].values()))
        under = f"{gpus(figure)}, jax {figure['jax']}, {dtypes}, {figure['date']}"
        drawn.suptitle(f"{figure['title']}\n{under}", x=0.01, ha="left", fontsize=10)
        metadata = {
            "Title": figure["title"].replace("\n", ". "),
            "Identifier": digest(figure),
            "Creator": None,
            "Date": None,
        }
        drawn.savefig(path, metadata=metadata)
        plt.close(drawn)


def _bars(plot: dict[str, Any]) -> Any:
    """Draws groups of horizontal bars, each with its value at its end."""
    import matplotlib.pyplot as plt

    panels = plot["panels"]
    most = max(len(panel["rows"]) * (len(panel["series"]) + 1) for panel in panels)
    same_rows = all(panel["rows"] == panels[0]["rows"] for panel in panels)
    figure, grid = plt.subplots(
        1,
        len(panels),
        figsize=(WIDTH, 1.55 + BAR * most),
        sharey=same_rows,
        squeeze=False,
        layout="constrained",
    )
    for axis, panel in zip(grid[0], panels, strict=True):
        longest = _panel(axis, panel)
        axis.set_xlim(0, longest * (1.1 + 0.06 * len(panels)))  # room for the values
        axis.set(title=panel["title"], xlabel=plot["x_label"])
    _legend(figure)
    return figure


def _panel(axis: Any, panel: dict[str, Any]) -> float:
    """Draws the bars of one panel; returns the length of the longest."""
    rows, series = panel["rows"], panel["series"]
    height = 0.8 / len(series)
    ends = []
    for number, one in enumerate(series):
        offset = (number - (len(series) - 1) / 2) * height
        for row, value in enumerate(one["values"]):
            pieces = value if isinstance(value, list) else [value]
            start = 0.0
            for i, piece in enumerate(pieces):
                last = i == len(pieces) - 1
                axis.barh(
                    row + offset,
                    piece or 0,
                    0.88 * height,
                    left=start,
                    color=COLORS[one["color"]],
                    alpha=1 if last else 0.5,
                    label=one["name"] if last and row == 0 else None,
                )
                start += piece or 0
            text = "not measured" if value is None else " + ".join(map(str, pieces))
            _label(axis, text, start, row + offset)
            ends.append(start)
    if bound := panel.get("bound"):
        value = bound["value"]
        axis.axvline(value, color=TEXT, linestyle="--", linewidth=1, label=bound["label"])
        _label(axis, str(value), value, len(rows) - 0.42)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - (0.2 if bound else 0.5), -0.5)
    axis.tick_params(axis="y", length=0)
    axis.locator_params(axis="x", nbins=5)
    axis.grid(visible=True, axis="x")
    return max(ends)


def _lines(plot: dict[str, Any]) -> Any:
    """Draws curves over steps; a value is the mean of `steps` steps, placed in their middle.

    The legend has the value of the last steps. A later curve is thinner, so that both are seen
    where they are equal.
    """
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    steps = plot["steps"]
    for number, one in enumerate(plot["lines"]):
        axis.plot(
            [(i + 0.5) * steps for i in range(len(one["values"]))],
            one["values"],
            color=COLORS[one["color"]],
            linewidth=3 / (1 + 2 * number),
            label=f"{one['name']}, last 100 steps: {one['last']}",
        )
    # The label of the y axis stands above it, since it may be longer than the axis.
    axis.set(xlabel=plot["x_label"], title=plot["y_label"], yscale="log")
    axis.set_xlim(0, len(plot["lines"][0]["values"]) * steps)
    axis.set_yticks(plot["y_ticks"], map(str, plot["y_ticks"]))
    axis.minorticks_off()
    axis.grid(visible=True)
    _legend(figure)
    return figure


def _label(axis: Any, text: str, x: float, y: float) -> None:
    axis.annotate(text, (x, y), (3, 0), textcoords="offset points", va="center")


def _legend(figure: Any) -> None:
    """Adds one legend below all panels: the series, then the dashed line."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    names = sorted(handles, key=lambda name: hasattr(handles[name], "get_linestyle"))
    if names:
        chosen = [handles[name] for name in names]
        figure.legend(chosen, names, loc="outside lower left", ncols=len(names), frameon=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PLOTS, help="folder that SVGs are written to")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in read_figures().items():
        if "plot" in figure:
            draw(figure, out / f"{name}.svg")


if __name__ == "__main__":
    main()
