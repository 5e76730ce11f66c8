"""The measured figures are whole, and the plots and tables of docs/performance.md are theirs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "docs" / "performance" / "plot.py"
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGE = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")

_spec = importlib.util.spec_from_file_location("plot_of_performance", SCRIPT)
assert _spec is not None and _spec.loader is not None
plot = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plot)

FIGURES = plot.read_figures()

# Besides these fields, a figure has "why_no_command" where "commands" is empty, and a "plot" or a
# "table", which docs/performance.md shows, or a "record", which other pages cite. "commit" is what
# was measured (None: not recorded), "recorded_in" the commit that first wrote the figure down.
FIELDS = (
    "title gpu num_gpus date jax commit recorded_in shapes dtypes unit statistic commands".split()
)


def has_commit(figure: dict[str, Any]) -> bool:
    """Whether it is recorded of which commit each number of a figure is."""
    commit = figure["commit"]
    return all(commit.values()) if isinstance(commit, dict) else bool(commit)


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a plot's values, or of a table's cells."""
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, str):
        joined = re.sub(r"(?<=\d) (?=\d{3}\b)", "", value)  # 20 275
        yield from map(float, re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", joined))
    elif value is not None:
        yield float(value)


def values(figure: dict[str, Any]) -> set[float]:
    """Returns the measured numbers of a figure's plot, table or record."""
    if table := figure.get("table", figure.get("record")):
        return set(numbers([row[1:] for row in table["rows"]]))
    if "lines" in figure["plot"]:  # of a curve, the mean of its last steps
        return {one["last"] for one in figure["plot"]["lines"]}
    panels = figure["plot"]["panels"]
    shown = [one["values"] for panel in panels for one in panel["series"]]
    bounds = [panel["bound"]["value"] for panel in panels if "bound" in panel]
    return set(numbers(shown + bounds))


def lines(text: str) -> str:
    """A text with its commands on one line each, and no line breaks."""
    return " ".join(text.replace("\\\n", " ").split())


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", svg, re.S)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_its_fields_and_the_page_has_it(name):
    figure = FIGURES[name]
    assert bool(figure["commands"]) != ("why_no_command" in figure)
    (kind,) = set(figure) - {*FIELDS, "why_no_command"}
    assert set(FIELDS) <= set(figure)
    if kind != "plot":
        rows = [figure[kind]["header"], *figure[kind]["rows"]]
        assert len({len(row) for row in rows}) == 1
    if kind == "record":
        return
    if kind == "plot":
        assert f"](_static/performance/{name}.svg)" in PAGE
    else:
        assert all(f"\n| {' | '.join(row)} |\n" in PAGE for row in rows)
    if not has_commit(figure):
        current = PAGE[: PAGE.index("\n## Older measurements\n")]
        assert f"/{name}.svg" not in current
        assert kind == "plot" or f"\n| {' | '.join(rows[1])} |\n" not in current
    machine = f"{plot.gpus(figure)}, jax {figure['jax']}, {figure['date']}"
    assert machine in lines(PAGE) or name == "tokamax" and plot.gpus(figure) in PAGE
    assert all(command in lines(PAGE) for command in figure["commands"])


def test_plots_are_drawn_from_their_figures(tmp_path):
    """Run `python docs/performance/plot.py` after a change of figures.json."""
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], check=True, timeout=300)
    plotted = [name for name, figure in FIGURES.items() if "plot" in figure]
    assert sorted(path.stem for path in plot.PLOTS.iterdir()) == sorted(plotted)
    for name in plotted:
        svg = (plot.PLOTS / f"{name}.svg").read_text(encoding="utf-8")
        assert f"<dc:identifier>{plot.digest(FIGURES[name])}</dc:identifier>" in svg, name
        assert values(FIGURES[name]) <= set(numbers(texts(svg))), name
        # Another version of matplotlib may place lines elsewhere.
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert sorted(texts(drawn)) == sorted(texts(svg)), name


def test_the_readme_shows_a_plot_and_a_table_of_figures_before_installing():
    first = README[: README.index("\n## Install")]
    (image,) = re.findall(r"!\[[^]]*\]\(docs/_static/performance/(\w+)\.svg\)", first)
    assert has_commit(FIGURES[image]) and "](docs/performance.md)" in first
    _, _, *rows = re.findall(r"^\|(.*)\|$", first, re.M)
    known = {
        (plot.gpus(figure).split()[-1], figure["unit"], value)
        for figure in filter(has_commit, FIGURES.values())
        for value in values(figure)
    }
    assert len(rows) >= 3
    for row in rows:
        _, *cells, machine = (cell.strip() for cell in row.split("|"))
        found = re.findall(r"([\d.]+) (µs|ms|%)", " ".join(cells))
        assert len(found) == len(cells), row
        for value, unit in found:
            assert (machine.split()[-1], unit, float(value)) in known, row
