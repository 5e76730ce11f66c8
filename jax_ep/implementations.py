"""Selects an implementation of an operation: the named one, or for None the best that can run.

Each operation has one table, an `Implementations`. Each implementation in it answers whether it
supports a *problem*: an object, of a class that the operation defines, with the operands' shapes
and dtypes, and what is known of where the program will run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: its name as an argument.
      unavailable_reason: returns why it cannot compute a problem, or None if it can. The reason
        completes "cannot run here: ...".
      is_default: returns whether None may select it for a problem that it supports.
    """

    name: str
    unavailable_reason: Callable[[Any], str | None] = lambda problem: None
    is_default: Callable[[Any], bool] = lambda problem: True


_Kind = TypeVar("_Kind", bound=Implementation)


@dataclasses.dataclass(frozen=True)
class Implementations(Generic[_Kind]):
    """The implementations of an operation, from which `select` selects one.

    Attributes:
      table: the implementations, in the order in which None tries them.
      argument: the name, in errors, of the argument that names an implementation.
      operation: the name of the operation at the start of errors; "" leaves it out.
    """

    table: tuple[_Kind, ...]
    argument: str = "implementation"
    operation: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.table)

    def __iter__(self) -> Iterator[_Kind]:
        return iter(self.table)

    def __getitem__(self, name: str) -> _Kind:
        return next(each for each in self.table if each.name == name)

    def available(self, problem: Any) -> list[str]:
        """Returns the names of the implementations that can compute a problem."""
        return [each.name for each in self.table if each.unavailable_reason(problem) is None]

    def check(self, name: Any, problem: Any, argument: str | None = None) -> None:
        """Raises ValueError, with the reason, unless the implementation `name` supports a problem.

        A name of None always passes. `argument` replaces `self.argument` in the message.
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
                f'{prefix}{argument}="{name}" cannot run here: {reason}. {argument}=None picks one '
                "that can."
            )

    def select(self, name: str | None, problem: Any) -> _Kind:
        """Returns the named implementation, or for None the first default that can run.

        Raises ValueError, with the reason, if the named one does not support the problem.
        """
        if name is not None:
            self.check(name, problem)
            return self[name]
        return next(
            each
            for each in self.table
            if each.is_default(problem) and each.unavailable_reason(problem) is None
        )
