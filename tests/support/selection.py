"""Which cases of a test run by default; `pytest -m ''` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *chosen: Any, unpack: bool = True) -> list[Any]:
    """The cases `values` for `pytest.mark.parametrize`, all but the `chosen` ones marked slow.

    A tuple holds the arguments of one case, unless `unpack` is False.
    """
    values = list(values)
    missing = [case for case in chosen if case not in values]
    assert not missing, f"not among the cases: {missing}"

    def case(value: Any) -> Any:
        arguments = value if unpack and isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, marks=() if value in chosen else pytest.mark.slow)

    return [case(value) for value in values]
