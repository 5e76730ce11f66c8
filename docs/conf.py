"""Sphinx: a guide in Markdown, an API reference from docstrings, a command line from its flags.

Build with `sphinx-build -W docs build/docs`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

import jax_ep
import jax_ep.cli
from jax_ep.checkpoints.architectures import TABLE, OneOf

project = "jax_ep"
author = "The jax_ep authors"
release = version = jax_ep.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = f"jax_ep {release}"
myst_heading_anchors = 3

# `x` in a docstring is code, and a link where an object of that name is documented.
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # docstrings give shapes and dtypes
napoleon_attr_annotations = False
napoleon_use_ivar = True
napoleon_use_rtype = False

_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")
_CODE = re.compile(r"(`[^`]*`)")
_MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)|(?<=^[A-Z])\.|(?<=: [A-Z])\.")


def _escaped(line: str) -> str:
    """Takes from a line of prose what reStructuredText would read as markup, but `code`."""
    indent = line[: len(line) - len(line.lstrip())]
    parts = _CODE.split(line[len(indent) :])
    parts[::2] = [_MARKUP.sub(lambda found: "\\" + found[0], part) for part in parts[::2]]
    return indent + "".join(parts)


def _reformatted(lines: list[str]) -> Iterator[str]:
    """A docstring as reStructuredText: prose with `code`, lists, Google sections, and pictures.

    A picture is what is indented deeper than the prose around it; its lines stay as they are.
    """
    section = ""
    item = prose = 0  # the indents of a section's items, and of prose
    picture = bullet = False
    before = ""
    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if not text:
            bullet = False
            yield ""
        elif line in _SECTIONS:
            section, item, prose, picture = line, 0, 0, False
            yield line
        else:
            if indent == 0:
                section, prose = "", 0
            elif section and before == section:
                item = prose = indent
            elif section and indent == item:
                prose = item
            elif section and prose == item and not picture and not before.endswith(":"):
                prose = indent  # of the lines that continue an item
            if indent <= prose or (bullet and not picture):
                if picture and before:
                    yield ""
                if text.startswith("- ") and before and not bullet:
                    yield ""
                bullet = (bullet and indent > prose) or text.startswith("- ")
                picture = False
                yield _escaped(line)
            else:
                if not picture:
                    yield from ("", " " * (indent if section else prose) + "::", "")
                picture = True
                yield "    " + line
        before = text


def _one_name_an_item(lines: list[str]) -> list[str]:
    """Gives each attribute of `a, b: meaning` an item of its own, as napoleon does arguments."""
    items: list[str] = []
    attributes, i = False, 0
    while i < len(lines):
        line, i = lines[i], i + 1
        attributes = line == "Attributes:" or (attributes and line[:1] in ("", " "))
        several = re.fullmatch(r"( +)(\w+(?:, \w+)+)(: .*)", line) if attributes else None
        if several is None:
            items.append(line)
            continue
        first = i
        while i < len(lines) and lines[i].startswith(several[1] + " "):
            i += 1
        for name in several[2].split(", "):
            items += [several[1] + name + several[3], *lines[first:i]]
    return items


def _process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = _reformatted(_one_name_an_item(lines))


def _process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Shows a layer's own arguments, and no default that has no literal."""
    if what != "class" or not name.endswith((".MoE", ".MoEConfig")):
        return None
    own = inspect.signature(obj.__init__).parameters.values()
    shown = []
    for p in sorted(own, key=lambda p: (p.kind is p.VAR_KEYWORD, p.default is not p.empty)):
        if p.kind is p.VAR_KEYWORD:
            shown.append(f"**{p.name}")
        elif p.default is p.empty:
            shown.append(p.name)
        else:
            default = repr(p.default)
            shown.append(f"{p.name}={'...' if default.startswith('<') else default}")
    shown = [text for text in shown if text.split("=")[0] not in ("self", "parent", "name")]
    return f"({', '.join(shown)})", ""


class CommandHelp(Directive):
    """The flags of a command of `python -m jax_ep`, as its `--help` prints them."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            jax_ep.cli.main(["jax_ep", *self.arguments[0].split(), "--help"])
        help_ = printed.getvalue()
        return [nodes.literal_block(help_, help_, language="text")]


class Architectures(Directive):
    """The published models that `jax_ep.checkpoints` knows, a row for each of its table."""

    def run(self) -> list[nodes.Node]:
        lines = [".. list-table::", "   :header-rows: 1", ""]
        cells = [["models", "``model_type``", "router", "tensors of a layer"]]
        for row in TABLE:
            fixed = [f"{name} = {value}" for name, value in row.fixed.items()]
            read = [f"{name}: {key}" for name, key in row.fields.items() if name != "activation"]
            layouts = [i.layouts if isinstance(i, OneOf) else ((i,),) for i in row.tensors]
            names = [t.name for options in layouts for tensors in options for t in tensors]
            columns = [list(row.model_types), fixed + read, names]
            marked = ["\n".join(f"| ``{line}``" for line in column) for column in columns]
            cells.append([row.models, *marked])
        for row_cells in cells:
            for i, cell in enumerate(row_cells):
                first, *rest = cell.split("\n")
                lines.append(f"   {'*' if i == 0 else ' '} - {first}")
                lines += [f"       {line}" for line in rest]
        container = nodes.container()
        self.state.nested_parse(StringList(lines), 0, container)
        return container.children


def _skip_member(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    # The fields of a NamedTuple that have no docstring of their own.
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", _skip_member)
    app.connect("autodoc-process-docstring", _process_docstring, priority=100)
    app.connect("autodoc-process-signature", _process_signature)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("architectures", Architectures)
