"""Selects the cases of a test that run by default; `pytest -m ''` runs all cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def quick(
    values: Iterable[Any] | Mapping[str, Any], *chosen: Any, unpack: bool = True
) -> list[Any]:
    """Returns the cases for `pytest.mark.parametrize`; all but the `chosen` ones are marked slow.

    Args:
        values: the cases; a mapping gives each a name, which is also its test id.
        *chosen: the cases that run by default; of a mapping, their names.
        unpack: whether a tuple holds the arguments of a case, or is its only argument.
    """
    names = list(values)
    missing = [name for name in chosen if name not in names]
    assert not missing, f"not among the cases: {missing}"

    def case(name: Any) -> Any:
        value, id = (values[name], name) if isinstance(values, Mapping) else (name, None)
        arguments = value if unpack and isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, id=id, marks=() if name in chosen else pytest.mark.slow)

    return [case(name) for name in names]
