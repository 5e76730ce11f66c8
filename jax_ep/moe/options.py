"""Declares options of functions and layers: each one once, as a field of a dataclass.

A field states an option's name, type, default and check; the section `Attributes:` of the class's
docstring states its meaning. The signatures and docstrings of the Flax layers, and of functions
that take the options by keyword, are made from these classes:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        \"\"\"Options of a function.

        Attributes:
            clamp: the most that a value may be.
        \"\"\"

        clamp: float | None = option(None, optional(checks.check_number))


    @documented(Options)
    @takes(Options, before="implementation")
    def function(x, *, implementation=None, **options):
        \"\"\"Does something.

        Args:
            x: an array.
            {Options}
            implementation: one of two.
        \"\"\"
        check_options(make_options(Options, options, "function"))
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from jax_ep import checks

T = TypeVar("T")
Check = Callable[[str, Any], object]


def option(default: T, check: Check) -> T:
    """Declares an option; `check(name, value)` raises an error for a value that does not fit."""
    return dataclasses.field(default=default, metadata={"check": check})


def function_option(default: T, wanted: str) -> T:
    """Declares an option that holds a function, or None if that is the default.

    The error for another value quotes `wanted`, such as "a function of one array".
    """

    def check(name: str, value: Any) -> None:
        if not (callable(value) or (value is None and default is None)):
            raise TypeError(f"{name} must be {wanted}, but is {checks.described(value)}.")

    return dataclasses.field(default=default, metadata={"check": check, "is_function": True})


def same_option(cls: Any, name: str) -> Any:
    """Declares an option with the default and check that another class gives it."""
    field = cls.__dataclass_fields__[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def check_options(options: Any) -> None:
    """Raises TypeError or ValueError, naming the field, for a value that fails its check."""
    for field in dataclasses.fields(options):
        if "check" in field.metadata:
            field.metadata["check"](field.name, getattr(options, field.name))


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def function_names(cls: Any) -> tuple[str, ...]:
    """Returns the names of the fields that hold a function."""
    return tuple(f.name for f in dataclasses.fields(cls) if "is_function" in f.metadata)


def options_of(cls: type[T], holder: Any) -> T:
    """Makes options from an object's attributes of the same names, such as a layer's."""
    return cls(**{name: getattr(holder, name) for name in _names(cls)})


def pop_options(cls: type[T], keywords: dict[str, Any]) -> T:
    """Makes options from keyword arguments, and removes these arguments from the dictionary."""
    return cls(**{name: keywords.pop(name) for name in _names(cls) if name in keywords})


def make_options(cls: type[T], keywords: dict[str, Any], function: str) -> T:
    """Makes options from keyword arguments; raises TypeError for an unknown keyword."""
    options = pop_options(cls, keywords)
    if keywords:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(keywords)!r}")
    return options


# Checks that take a name and a value, in addition to those of `jax_ep.checks`.


def integer_or_zero(name: str, value: Any) -> None:
    """Requires a static integer of at least 0."""
    checks.check_integer(name, value, least=0)


def number_or_zero(name: str, value: Any) -> None:
    """Requires a finite Python number of at least 0."""
    checks.check_number(name, value, may_be_zero=True)


def one_of(literal: Any) -> Check:
    """Requires one of the names of a `typing.Literal`."""
    return lambda name, value: checks.check_name(name, value, get_args(literal))


def axes(name: str, value: Any) -> None:
    """Requires the name of a mesh axis, or a tuple of distinct names."""
    checks.as_axes(value, name)


def optional(check: Check) -> Check:
    """Requires None, or what `check` requires."""
    return lambda name, value: None if value is None else check(name, value)


def number_or_none(otherwise: str = ", or None") -> Check:
    """Requires None or a finite number above 0; errors quote `otherwise`, what None stands for."""
    return optional(lambda name, value: checks.check_number(name, value, otherwise=otherwise))


# Signatures and docstrings.


def takes(cls: Any, *, before: str, others: bool = False) -> Callable[[T], T]:
    """Shows the fields of `cls` as keyword arguments of a function that takes them by `**`.

    Args:
        cls: a class of options.
        before: the argument that follows the fields in the signature.
        others: whether the function also takes other keywords by `**`; the signature then keeps
            that argument.
    """

    def show(function: Any) -> Any:
        signature = inspect.signature(function)
        shown: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.name == before:
                shown += [_as_parameter(field) for field in dataclasses.fields(cls)]
            if parameter.kind is not parameter.VAR_KEYWORD or others:
                shown.append(parameter)
        function.__signature__ = signature.replace(parameters=shown)
        return function

    return show


def _as_parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)


def documented(*classes: Any, **texts: str) -> Callable[[T], T]:
    """Fills a docstring: replaces a line `{Name}` by the attributes of class Name, or by a text."""
    contents = {cls.__name__: _attributes(cls) for cls in classes} | texts

    def fill(documented: Any) -> Any:
        if documented.__doc__ is not None:  # python -OO has no docstrings
            documented.__doc__ = re.sub(
                r"^( *)\{(\w+)\}$",
                lambda found: _indented(contents[found[2]], found[1]),
                documented.__doc__,
                flags=re.MULTILINE,
            )
        return documented

    return fill


def _attributes(cls: Any) -> str:
    """Returns the section `Attributes:` of a class's docstring, without indentation."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    section = re.search(r"^Attributes:\n((?:[ ].*\n?|\n(?=[ ]))*)", doc, re.MULTILINE)
    return inspect.cleandoc("\n" + section[1]) if section else ""


def _indented(text: str, indent: str) -> str:
    return "\n".join(indent + line if line else "" for line in text.splitlines())
