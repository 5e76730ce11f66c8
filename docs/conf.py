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
html_static_path = ["_static"]
html_css_files = ["code.css"]
myst_heading_anchors = 3

# `x` in a docstring is code, and a link where an object of that name is documented.
default_role = "py:obj"

autodoc_member_order = "bysource"
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
        several = re.fullmatch(r"( +)(\w+(?:, \w+)+)(:(?: .*)?)", line) if attributes else None
        if several is None:
            items.append(line)
            continue
        text = several[3]
        if text == ":" and i < len(lines):  # the text begins on the next line
            text, i = f": {lines[i].strip()}", i + 1
        first = i
        while i < len(lines) and lines[i].startswith(several[1] + " "):
            i += 1
        for name in several[2].split(", "):
            items += [several[1] + name + text, *lines[first:i]]
    return items


def _process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = _reformatted(_one_name_an_item(lines))
    if what in ("property", "attribute", "data"):
        # Napoleon takes the text before a colon in the first line for the type; so begin with a
        # comment, which shows nothing.
        lines[:0] = ["..", ""]


_FIELD = re.compile(r":(ivar|param) ([^:]+):(?: (.*))?")
_TITLES = {"ivar": "Attributes", "param": "Arguments"}


def _merge_items(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Makes one list item of neighbouring attributes or arguments that have the same text.

    It runs on what napoleon returned: fields `:ivar name: text` and `:param name: text`.
    """
    out: list[str] = []
    kind, names, text = "", [], []

    def finish() -> None:
        nonlocal names
        if names:
            first, *rest = text
            shown = ", ".join(f"**{name}**" for name in names)
            out.extend([f"   * {shown} -- {first}".rstrip(), *(f"     {line}" for line in rest)])
        names = []

    i = 0
    while i < len(lines):
        found = _FIELD.fullmatch(lines[i])
        if found is None:
            finish()
            kind = ""
            out.append(lines[i])
            i += 1
            continue
        end = i + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        body = [
            found[3] or "",
            *inspect.cleandoc("\n".join(["", *lines[i + 1 : end]])).splitlines(),
        ]
        body = body if body[0] or len(body) == 1 else body[1:]
        if (found[1], body) != (kind, text) or not names:
            finish()
            if found[1] != kind:
                out += ["", f":{_TITLES[found[1]]}:", ""]
        kind, text = found[1], body
        names.append(found[2])
        i = end
    finish()
    lines[:] = out


class _Shown:
    """A default value, as a signature shows it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(default: Any) -> Any:
    """Returns a default that a signature shows as a reader would write it, not as its name here."""
    if isinstance(default, float):
        text = repr(default)
        return _Shown(text if len(text) < 8 else f"{default:.3g}")
    text = repr(default)
    if not text.startswith("<"):
        return default
    name = getattr(default, "__qualname__", None) or type(default).__name__
    return _Shown(name.split(".<locals>")[0])


def _process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Shows a signature with its `*`, and with the values of defaults."""
    if what not in ("class", "function", "method") or signature is None:
        return None
    is_layer = what == "class" and name.endswith(".MoE")
    # Flax gives modules arguments of its own, which callers seldom need.
    left_out = {"self", "parent", "name"} if is_layer else {"self"}
    full = inspect.signature(obj.__init__ if is_layer else obj)
    shown = [
        p.replace(
            default=p.default if p.default is p.empty else _shown(p.default), annotation=p.empty
        )
        for p in full.parameters.values()
        if p.name not in left_out
    ]
    return str(inspect.Signature(shown)), ""


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
    """The published models that `jax_ep.checkpoints` knows: a list for each of its table's rows."""

    def run(self) -> list[nodes.Node]:
        lines = []
        for row in TABLE:
            layouts = [i.layouts if isinstance(i, OneOf) else ((i,),) for i in row.tensors]
            entries = {
                "model_type": list(row.model_types),
                "fixed": [
                    f"{name} = {getattr(value, '__name__', repr(value))}"
                    for name, value in row.fixed.items()
                ],
                "from config.json": [
                    f"{name}: {key}" for name, key in row.fields.items() if name != "activation"
                ],
            }
            tensors = [t for options in layouts for some in options for t in some]
            entries["tensors"] = list(dict.fromkeys(t.name for t in tensors if t.params))
            entries["by load_others"] = [t.name for t in tensors if not t.params]
            lines += [f".. rubric:: {row.models}", ""]
            lines += [
                f":{title}: {', '.join(f'``{value}``' for value in values)}"
                for title, values in entries.items()
                if values
            ]
            lines.append("")
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
    app.connect("autodoc-process-docstring", _merge_items, priority=900)
    app.connect("autodoc-process-signature", _process_signature)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("architectures", Architectures)
