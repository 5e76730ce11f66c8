"""Which cases of a test run by default; `pytest -m ''` runs all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def quick(
    values: Iterable[Any] | Mapping[str, Any], *chosen: Any, unpack: bool = True
) -> list[Any]:
    """The cases `values` for `pytest.mark.parametrize`, all but the `chosen` ones marked slow.

    A tuple holds the arguments of one case, unless `unpack` is False. Cases of a mapping are chosen
    by their names, which are also the tests' ids.
    """
    names = list(values)
    missing = [name for name in chosen if name not in names]
    assert not missing, f"not among the cases: {missing}"

    def case(name: Any) -> Any:
        value, id = (values[name], name) if isinstance(values, Mapping) else (name, None)
        arguments = value if unpack and isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, id=id, marks=() if name in chosen else pytest.mark.slow)

    return [case(name) for name in names]
