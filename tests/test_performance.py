"""The measured figures are whole, and the plots and tables of docs/performance.md are theirs."""

from __future__ import annotations

import importlib.util
import json
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
PLOTTED = [name for name, figure in FIGURES.items() if "plot" in figure]
each_figure = pytest.mark.parametrize("name", FIGURES)
each_plot = pytest.mark.parametrize("name", PLOTTED)

# The fields of a figure, with what they must match as JSON. Besides, a figure has "why_no_command"
# where "commands" is empty, and one of: a "plot" or a "table", which docs/performance.md shows, or
# a "record", whose numbers other pages or their own tables cite.
FIELDS = {
    "title": r'".+"',
    "gpu": r'"(NVIDIA \w+|virtual CPU device)"',
    "num_gpus": r"\d+|\[\d+, \d+\]",
    "date": r'"\d{4}-\d\d-\d\d"',
    "jax": r'"[\d.]+"',
    "commit": r"null|\"[0-9a-f]{7,}\"|\{.+\}",  # what was measured; null: not recorded
    "recorded_in": r'"[0-9a-f]{7,}"',  # the commit that first wrote the figure down
    "shapes": r"\{.+\}",
    "dtypes": r"\{.+\}",
    "unit": r'"(µs|ms|s|%|ratio|nats)"',
    "statistic": r'".+"',
    "commands": r"\[.*\]",
}


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


@each_figure
def test_a_figure_has_its_fields(name):
    figure = FIGURES[name]
    for field, form in FIELDS.items():
        text = json.dumps(figure.get(field, ""), ensure_ascii=False)
        assert re.fullmatch(form, text), f"{field}: {text}"
    assert bool(figure["commands"]) != ("why_no_command" in figure)
    assert len({"plot", "table", "record"} & set(figure)) == 1
    assert set(figure) <= {*FIELDS, "why_no_command", "plot", "table", "record"}
    table = figure.get("table", figure.get("record", {"header": (), "rows": ()}))
    assert all(len(row) == len(table["header"]) for row in table["rows"])


@pytest.mark.parametrize("name", [name for name in FIGURES if "record" not in FIGURES[name]])
def test_the_page_has_a_figure_with_its_gpus_date_and_commands(name):
    figure = FIGURES[name]
    if "plot" in figure:
        assert f"](_static/performance/{name}.svg)" in PAGE
    else:
        rows = [figure["table"]["header"], *figure["table"]["rows"]]
        assert all(f"\n| {' | '.join(row)} |\n" in PAGE for row in rows)
    machine = f"{plot.gpus(figure)}, jax {figure['jax']}, {figure['date']}"
    assert machine in lines(PAGE) or name == "tokamax" and plot.gpus(figure) in PAGE
    assert all(command in lines(PAGE) for command in figure["commands"])


@each_plot
def test_a_plot_is_drawn_from_its_figure(name):
    """Run `python docs/performance/plot.py` after a change of figures.json."""
    path = plot.PLOTS / f"{name}.svg"
    svg = path.read_text(encoding="utf-8")
    assert f"<dc:identifier>{plot.digest(FIGURES[name])}</dc:identifier>" in svg
    assert "<dc:date>" not in svg and len(svg.encode()) < 40_000
    assert values(FIGURES[name]) <= set(numbers(texts(svg)))


@each_plot
def test_a_curve_ends_at_the_mean_of_its_last_100_steps(name):
    shown = FIGURES[name]["plot"]
    for one in shown.get("lines", ()):
        last = one["values"][-100 // shown["steps"] :]
        assert sum(last) / len(last) == pytest.approx(one["last"], abs=1e-4)


def test_each_committed_plot_has_a_figure():
    assert sorted(path.stem for path in plot.PLOTS.iterdir()) == sorted(PLOTTED)


def test_the_command_draws_the_committed_plots_again(tmp_path):
    pytest.importorskip("matplotlib")
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = [subprocess.Popen([sys.executable, SCRIPT, "--out", folder]) for folder in folders]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]
    for name in PLOTTED:
        one, two = ((folder / f"{name}.svg").read_text(encoding="utf-8") for folder in folders)
        committed = (plot.PLOTS / f"{name}.svg").read_text(encoding="utf-8")
        assert one == two, name
        # Another version of matplotlib may place lines elsewhere.
        assert sorted(texts(one)) == sorted(texts(committed)), name


def test_the_readme_shows_a_plot_and_a_table_of_figures_before_installing():
    first = README[: README.index("\n## Install")]
    (image,) = re.findall(r"!\[[^]]*\]\((docs/_static/performance/\w+\.svg)\)", first)
    assert (REPOSITORY / image).is_file() and "](docs/performance.md)" in first
    _, _, *rows = re.findall(r"^\|(.*)\|$", first, re.M)
    known = {
        (plot.gpus(figure).split()[-1], figure["unit"], value)
        for figure in FIGURES.values()
        for value in values(figure)
    }
    assert len(rows) >= 3
    for row in rows:
        _, *cells, machine = (cell.strip() for cell in row.split("|"))
        found = re.findall(r"([\d.]+) (µs|ms|%)", " ".join(cells))
        assert len(found) == len(cells), row
        for value, unit in found:
            assert (machine.split()[-1], unit, float(value)) in known, row
