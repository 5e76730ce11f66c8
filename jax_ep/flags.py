"""Parses and checks the flags of programs, such as the `python -m jax_ep` commands."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

Args = argparse.Namespace


class Error(SystemExit):
    """A command line that cannot be followed: ends the program with one line that says why."""


class Flags(argparse.ArgumentParser):
    """The flags of a program."""

    def __init__(self, program: str | None, summary: str) -> None:
        super().__init__(program, description=summary, allow_abbrev=False)

    def add(
        self, name: str, default: Any, help: str, type: Callable[[str], Any] = str, **how: Any
    ) -> None:
        """Adds --`name`; argparse takes `how`. A default that is a string is parsed, too."""
        if default not in (None, ""):
            help += " Default: %(default)s."
        self.add_argument(f"--{name}", default=default, type=type, help=help, **how)

    def switch(self, name: str, help: str) -> None:
        self.add_argument(f"--{name}", action="store_true", help=help)

    def json(self) -> None:
        self.add("json", None, "The JSON file to write all results to.", output)

    def error(self, message: str) -> NoReturn:
        raise Error(message.removeprefix("argument "))


def at_least(least: float, kind: type = int) -> Callable[[str], Any]:
    """Returns a parser of numbers, int or float, from `least` to the largest int32."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < 2**31:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least:g} to 2^31 - 1")
        return value

    return parse


integer, number = at_least(1), at_least(0, float)


def choice(allowed: Iterable[str]) -> Callable[[str], str]:
    names = list(allowed)

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse


def some(item: Callable[[str], Any], *, none: bool = False) -> Callable[[str], list[Any]]:
    """Returns a parser of a list of comma-separated `item`s, which may be empty only if `none`."""

    def parse(text: str) -> list[Any]:
        if not text and not none:
            raise argparse.ArgumentTypeError("name one value or more, or leave the flag out")
        return [item(part.strip()) for part in text.split(",")] if text else []

    return parse


def output(path: str) -> str:
    """Returns the path of a file, unchanged, if the file can be written."""
    file = Path(path)
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path!r}")
    return path


def check_experts(args: Args, num_experts: int, num_ranks: int, top_k: int) -> None:
    """Raises `Error`, about a flag that the command has, unless these sizes fit each other."""
    # Commands that take sizes from a named model have no --top_k, and --num_experts, if they have
    # it, replaces the model's number.
    if num_experts % num_ranks:
        if getattr(args, "num_experts", None) is None:
            raise Error(f"--ranks: {num_ranks} ranks cannot share {num_experts} experts equally")
        wanted = f"a multiple of the {num_ranks} ranks"
        raise Error(f"--num_experts must be {wanted}, but is {num_experts}")
    if top_k > num_experts:
        if not hasattr(args, "top_k"):
            wanted = f"at least {top_k}, which a token chooses"
            raise Error(f"--num_experts must be {wanted}, but is {num_experts}")
        raise Error(f"--top_k must be at most the {num_experts} experts, but is {top_k}")
