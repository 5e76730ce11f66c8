"""Selects the implementation of an operation by its name, or the first that can run for None.

An operation has its own class of *problems*, with the operands' types and what is known of devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation; its functions take a problem."""

    name: str  # as in implementation="pallas"
    # Why it does not support a problem, after "cannot run here: "; None if it does.
    unavailable_reason: Callable[[Any], str | None] = lambda problem: None
    # whether implementation=None may select it
    is_default: Callable[[Any], bool] = lambda problem: True


_Kind = TypeVar("_Kind", bound=Implementation)


@dataclasses.dataclass(frozen=True)
class Implementations(Generic[_Kind]):
    """The implementations of an operation, from which `select` selects one."""

    table: tuple[_Kind, ...]  # tried in this order for None; the last supports every problem
    argument: str = "implementation"  # that selects an implementation, for errors
    operation: str = ""  # with which errors begin
    layer_argument: str = ""  # a layer's name of `argument`, for errors at lowering

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.table)

    def __iter__(self) -> Iterator[_Kind]:
        return iter(self.table)

    def __getitem__(self, name: str) -> _Kind:
        return next(each for each in self.table if each.name == name)

    def available(self, problem: Any) -> list[str]:
        """Returns the names of the implementations that support `problem`."""
        return [each.name for each in self.table if each.unavailable_reason(problem) is None]

    def check(self, name: Any, problem: Any, argument: str | None = None) -> None:
        """Raises ValueError, with the reason, unless `name` is None or supports `problem`.

        `argument` is the name of the caller's argument in the error; None: `self.argument`.
        """
        if name is None:
            return
        argument = argument or self.argument
        prefix = f"{self.operation}: " if self.operation else ""
        if name not in self.names:
            raise ValueError(
                f"{prefix}{argument} must be one of {self.names} or None, but is {name!r}."
            )
        if reason := self[name].unavailable_reason(problem):
            raise ValueError(
                f'{prefix}{argument}="{name}" cannot run here: {reason}. None picks one that can.'
            )

    def select(self, name: str | None, problem: Any) -> _Kind:
        """Returns the implementation called `name`, or for None the first default that can run."""
        if name is not None:
            argument = self.argument
            if self.layer_argument:
                argument = f'{self.layer_argument}="{name}" of a layer, or {argument}'
            self.check(name, problem, argument)
            return self[name]
        return next(
            each
            for each in self.table
            if each.is_default(problem) and each.unavailable_reason(problem) is None
        )
