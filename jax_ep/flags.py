"""Defines, parses and checks the flags of the `python -m jax_ep` commands, with absl."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

# Raised if a command line is wrong. A command's `main` prints it and exits with status 2.
Error = flags.Error
Holder = flags.FlagHolder
_MOST = 2**31 - 1
# The values that commands allow for --dtype.
DTYPES = ("bfloat16", "float16", "float32")


class Flags:
    """The flags of one command, separate from absl's global flags and from other commands' flags.

    A method such as `integer` or `choices` defines a flag called --`name` and returns its absl
    holder. After `parse`, the holder's `.value` is the flag's value, converted and checked.
    """

    def __init__(self) -> None:
        self.values = flags.FlagValues()
        flags.DEFINE_boolean(
            "help", False, "Print this list and exit.", short_name="h", flag_values=self.values
        )
        self._outputs: list[flags.FlagHolder] = []

    def integer(self, name: str, default: int | None, help: str, least: int = 1) -> Holder:
        """Defines a flag for an integer from `least` to 2^31 - 1, the largest int32."""
        return flags.DEFINE_integer(
            name, default, help, lower_bound=least, upper_bound=_MOST, flag_values=self.values
        )

    def number(self, name: str, default: float | None, help: str) -> Holder:
        """Defines a flag for a finite number of at least 0."""
        return self._define(_Number(), name, default, help)

    def boolean(self, name: str, help: str) -> Holder:
        """Defines a boolean flag, which is False if it is not given."""
        return flags.DEFINE_boolean(name, False, help, flag_values=self.values)

    def string(self, name: str, default: str | None, help: str) -> Holder:
        return flags.DEFINE_string(name, default, help, flag_values=self.values)

    def strings(self, name: str, help: str) -> Holder:
        """Defines a flag for a comma-separated list of strings; [] if it is not given."""
        return flags.DEFINE_list(name, [], help, flag_values=self.values)

    def several(self, name: str, help: str) -> Holder:
        """Defines a flag that may be repeated; its value is a list, or None if it is not given."""
        return flags.DEFINE_multi_string(name, None, help, flag_values=self.values)

    def choice(self, name: str, default: str, allowed: Iterable[str], help: str) -> Holder:
        """Defines a flag whose value must be one of the strings in `allowed`."""
        return flags.DEFINE_enum(name, default, list(allowed), help, flag_values=self.values)

    def choices(
        self,
        name: str,
        default: Iterable[str] | None,
        allowed: Iterable[str],
        help: str,
        *,
        may_be_empty: bool = False,
    ) -> Holder:
        """Defines a flag for a comma-separated list, each item of which must be in `allowed`.

        An empty list is an error unless `may_be_empty`.
        """
        return self._define(_Choices(allowed, may_be_empty), name, default, help)

    def integers(
        self, name: str, default: Sequence[int] | None, help: str, least: int = 1
    ) -> Holder:
        """Defines a flag for a comma-separated list of integers from `least` to 2^31 - 1."""
        return self._define(_Integers(least), name, default, help)

    def numbers(self, name: str, default: Sequence[float] | None, help: str) -> Holder:
        """Defines a flag for a comma-separated list of finite numbers of at least 0."""
        return self._define(_Numbers(), name, default, help)

    def output(self, name: str, help: str) -> Holder:
        """Defines a flag for the path of a file to write, which `check_outputs` checks."""
        holder = self.string(name, None, help)
        self._outputs.append(holder)
        return holder

    def json(self) -> Holder:
        """Defines --json, the path of a JSON file for all results of the command."""
        return self.output(
            "json",
            "The file to write all results to, as one JSON object; what is printed stays the same. "
            "Default: no file.",
        )

    def plot(self, drawn: str) -> Holder:
        """Defines --plot, the path of an image file; `drawn` says in the help what is plotted."""
        return self.output(
            "plot",
            f"The file for a plot of {drawn}; its ending sets the format, such as out.png. "
            "Default: no file.",
        )

    def check_outputs(self) -> None:
        """Raises `Error`, before a command's long work, if an `output` file cannot be written."""
        for holder in self._outputs:
            if holder.value is not None:
                _check_output(holder.name, holder.value)

    def given(self, holder: Holder) -> bool:
        """Returns whether the flag is on the command line, instead of having its default."""
        return bool(self.values[holder.name].present)

    def parse(self, command: str, argv: Sequence[str]) -> None:
        """Resets all flags to their defaults, then parses `argv`, the arguments after `command`.

        Raises `Error` for an unknown flag, a value that is not allowed, or a positional argument.
        """
        for name in self.values:
            self.values[name].unparse()
        try:
            extra = self.values([command, *argv])[1:]
        except ValueError as error:  # such as --noname=1
            raise Error(str(error)) from error
        if extra:
            raise Error(f"unexpected arguments: {' '.join(extra)}")

    def help(self) -> str:
        """Renders the command's list of flags, with their help, defaults and allowed values."""
        sections = self.values.get_help(include_special_flags=False).splitlines()
        return "\n".join(line for line in sections if not line or line.startswith(" ")).strip("\n")

    def _define(self, parser: Any, name: str, default: Any, help: str) -> Holder:
        text = default if default is None else parser.serialize(default)
        return flags.DEFINE(parser, name, text, help, flag_values=self.values, serializer=parser)


class _Number(flags.ArgumentParser):
    syntactic_help = "a finite number, not negative"

    def parse(self, argument: Any) -> float:
        try:
            value = float(argument)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError(f"{argument!r} is not {self.syntactic_help}")
        return value

    def serialize(self, value: float) -> str:
        return f"{value:g}"


class _List(flags.ArgumentParser):
    may_be_empty = False

    def parse(self, argument: Any) -> list[Any]:
        values = [text.strip() for text in argument.split(",")] if argument else []
        if not values and not self.may_be_empty:
            raise ValueError("name one value or more, or leave the flag out")
        return [self.item(value) for value in values]

    def serialize(self, values: Iterable[Any]) -> str:
        return ",".join(map(str, values))

    def item(self, value: str) -> Any:
        raise NotImplementedError


class _Integers(_List):
    def __init__(self, least: int) -> None:
        self.least = least
        self.kind = "positive" if least == 1 else "non-negative"
        self.syntactic_help = f"a comma separated list of {self.kind} integers"

    def item(self, value: str) -> int:
        if not (value.isdecimal() and self.least <= int(value) <= _MOST):
            raise ValueError(f"{value!r} is not a {self.kind} integer below 2^31")
        return int(value)


class _Numbers(_List):
    syntactic_help = "a comma separated list of finite numbers, none negative"

    def item(self, value: str) -> float:
        return _Number().parse(value)

    def serialize(self, values: Iterable[float]) -> str:
        return ",".join(f"{value:g}" for value in values)


class _Choices(_List):
    def __init__(self, allowed: Iterable[str], may_be_empty: bool) -> None:
        self.allowed = list(allowed)
        self.may_be_empty = may_be_empty
        self.syntactic_help = f"a comma separated list of: {', '.join(self.allowed)}"

    def item(self, value: str) -> str:
        if value not in self.allowed:
            raise ValueError(f"{value!r} is not one of {', '.join(self.allowed)}")
        return value


def check_experts(num_experts: int, num_ranks: int, top_k: int, whose: str | None = None) -> None:
    """Raises `Error` unless `num_ranks` divides `num_experts`, and `top_k` <= `num_experts`.

    `whose` is the name of the model whose number of experts this is; None if a flag sets it.
    """
    of = "" if whose is None else f" for {whose}"
    if num_experts % num_ranks:
        raise Error(
            f"--num_experts must be a multiple of the {num_ranks} ranks, but is {num_experts}{of}"
        )
    if top_k > num_experts:
        raise Error(f"--top_k must be at most the {num_experts} experts, but is {top_k}{of}")


def _check_output(flag: str, path: str) -> None:
    if flag == "plot":
        _check_plot(path)
    if Path(path).is_fifo():
        # If a pipe were opened and closed here, its reader would see the end of the file.
        return
    existed = os.path.lexists(path)
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise Error(f"--{flag}: cannot write {path!r}: {error.strerror}") from error
    if not existed:
        os.remove(path)


def _check_plot(path: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Error("--plot needs matplotlib: pip install 'jax_ep[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    suffix = os.path.splitext(path)[1].removeprefix(".").lower()
    if suffix not in kinds:
        raise Error(f"--plot: {path!r} does not end in one of .{', .'.join(sorted(kinds))}")
