"""Declares options of functions and layers; each option is declared once, as a dataclass field.

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
    """Declares an option, as a dataclass field with a default.

    `check(name, value)` must raise TypeError or ValueError for a value that is not allowed.
    """
    return dataclasses.field(default=default, metadata={"check": check})


def function_option(default: T, wanted: str) -> T:
    """Declares an option whose value is a function; None is allowed only as the default.

    `wanted` describes the functions that are allowed, such as "a function of one array". The error
    for any other value quotes it.
    """

    def check(name: str, value: Any) -> None:
        if not (callable(value) or (value is None and default is None)):
            raise TypeError(f"{name} must be {wanted}, but is {checks.described(value)}.")

    return dataclasses.field(default=default, metadata={"check": check, "is_function": True})


def same_option(cls: Any, name: str) -> Any:
    """Declares an option again, with the default and check of the field `name` in class `cls`."""
    field = cls.__dataclass_fields__[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def check_options(options: Any) -> None:
    """Runs the check of each field of `options`, an instance of a class of options.

    Raises TypeError or ValueError, naming the field, for a value that is not allowed.
    """
    for field in dataclasses.fields(options):
        if "check" in field.metadata:
            field.metadata["check"](field.name, getattr(options, field.name))


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def function_names(cls: Any) -> tuple[str, ...]:
    """Returns the names of the options of class `cls` that `function_option` declares."""
    return tuple(f.name for f in dataclasses.fields(cls) if "is_function" in f.metadata)


def options_of(cls: type[T], holder: Any) -> T:
    """Makes an instance of `cls` from attributes of `holder` that are named like its fields."""
    return cls(**{name: getattr(holder, name) for name in _names(cls)})


def pop_options(cls: type[T], keywords: dict[str, Any]) -> T:
    """Removes the fields of `cls` from `keywords`, and makes an instance of `cls` from them."""
    return cls(**{name: keywords.pop(name) for name in _names(cls) if name in keywords})


def make_options(cls: type[T], keywords: dict[str, Any], function: str) -> T:
    """Makes an instance of `cls` from the keyword arguments of the function named `function`.

    Raises TypeError, as Python does, for a keyword that is not a field of `cls`.
    """
    options = pop_options(cls, keywords)
    if keywords:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(keywords)!r}")
    return options


# The functions below can be the `check` of an `option`, like those in `jax_ep.checks`. They take an
# option's name and value, and raise an error unless the value is allowed.


def integer_or_zero(name: str, value: Any) -> None:
    """Raises an error unless the value of option `name` is a static integer of at least 0."""
    checks.check_integer(name, value, least=0)


def number_or_zero(name: str, value: Any) -> None:
    """Raises an error unless the value of option `name` is a finite Python number, 0 or more."""
    checks.check_number(name, value, may_be_zero=True)


def one_of(literal: Any) -> Check:
    """Returns a check that allows only the strings of `literal`, a `typing.Literal`."""
    return lambda name, value: checks.check_name(name, value, get_args(literal))


def axes(name: str, value: Any) -> None:
    """Raises an error unless the value of option `name` is one mesh axis or several distinct ones.

    The value is a string, or a tuple of strings.
    """
    checks.as_axes(value, name)


def optional(check: Check) -> Check:
    """Returns a check that allows None, and applies `check` to any other value."""
    return lambda name, value: None if value is None else check(name, value)


def number_or_none(otherwise: str = ", or None") -> Check:
    """Returns a check that allows None and finite numbers above 0.

    The error message appends `otherwise`, which says that None is allowed, to the requirement.
    """
    return optional(lambda name, value: checks.check_number(name, value, otherwise=otherwise))


# The decorators below write options into the signature and the docstring of a function or class.


def takes(cls: Any, *, before: str, others: bool = False) -> Callable[[T], T]:
    """Decorates a function whose `**` argument takes the fields of `cls` as keywords.

    The decorator replaces the `**` argument in the function's `__signature__` by one keyword-only
    argument for each field, so that `help` and the documentation show the options.

    Args:
        cls: a class of options.
        before: the name of the argument before which the fields are inserted.
        others: whether the `**` argument also takes keywords that are not fields of `cls`. The
            signature then keeps the `**` argument, too.
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
    """Decorates a function or class whose docstring has placeholders, lines such as `{Name}`.

    If one of `classes` is called Name, the decorator replaces the placeholder by the section
    "Attributes:" of the docstring of that class. Otherwise it replaces it by the text that is given
    as the keyword argument `Name`.
    """
    contents = {cls.__name__: _attributes(cls) for cls in classes} | texts

    def fill(documented: Any) -> Any:
        # Under python -OO, `__doc__` is None, and there is nothing to fill in.
        if documented.__doc__ is not None:
            documented.__doc__ = re.sub(
                r"^( *)\{(\w+)\}$",
                lambda found: _indented(contents[found[2]], found[1]),
                documented.__doc__,
                flags=re.MULTILINE,
            )
        return documented

    return fill


def _attributes(cls: Any) -> str:
    """Returns the entries of the section "Attributes:" in a class's docstring, not indented."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    section = re.search(r"^Attributes:\n((?:[ ].*\n?|\n(?=[ ]))*)", doc, re.MULTILINE)
    return inspect.cleandoc("\n" + section[1]) if section else ""


def _indented(text: str, indent: str) -> str:
    return "\n".join(indent + line if line else "" for line in text.splitlines())
