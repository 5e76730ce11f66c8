"""The command line `python -m jax_ep`.

Each command is a module with `FLAGS`, the command's flags, and `run()`, which runs it and returns
the exit status.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jax_ep.flags import Error, Flags


class Command(NamedTuple):
    # The name of the command's module, which is not imported before the command runs.
    module: str
    summary: str


COMMANDS = {
    "info": Command(
        "jax_ep.cli.info",
        "print versions, devices and peer access, and which implementation runs here",
    ),
    "memory": Command(
        "jax_ep.cli.memory",
        "compute the bytes that communication holds per rank, compared with other libraries",
    ),
    "estimate": Command(
        "jax_ep.bench.estimate",
        "predict bytes and time of an exchange between hosts, compared with published figures",
    ),
    "placement": Command(
        "jax_ep.cli.placement",
        "compare ways to place experts, on a trace of routing: balance, rows sent, predicted time",
    ),
    "bench": Command(
        "jax_ep.bench.exchange",
        "time dispatch, combine and their gradients, compared with collectives of plain JAX",
    ),
    "bench collectives": Command(
        "jax_ep.bench.collectives",
        "time every algorithm of all_reduce and the other collectives, and name the fastest",
    ),
    "bench layer": Command(
        "jax_ep.bench.layer",
        "measure time, throughput and memory of the MoE layer, compared with layers of plain JAX",
    ),
    "bench decode": Command(
        "jax_ep.bench.decode",
        "time the MoE layers of a decoding step by batch, next to the bytes that they must read",
    ),
    "bench balance": Command(
        "jax_ep.bench.balance",
        "time the MoE layer under skewed routing, for several ways to place its experts",
    ),
    "bench matmul": Command(
        "jax_ep.bench.matmul",
        "check and time the grouped matmuls, compared with a dense matmul and other libraries",
    ),
    "bench compile": Command(
        "jax_ep.bench.compile",
        "measure the seconds to trace, lower and compile the MoE layer and its parts",
    ),
    "bench train": Command(
        "jax_ep.bench.train",
        "time a training step of a whole model and its parts, compared with plain JAX",
    ),
    "bench all": Command(
        "jax_ep.bench.suite",
        "run all benchmarks except decode, balance, compile and train, each in its own process, "
        "and save the results of each as soon as it ends",
    ),
}


def usage() -> str:
    lines = ["usage: python -m jax_ep <command> [flags]", "", "commands:"]
    width = max(map(len, COMMANDS)) + 2
    lines += [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "python -m jax_ep <command> --help lists a command's flags."]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs a command; returns the exit status: the command's own, or 2 for wrong usage.

    argv[0] is ignored. The command's name, of one or two words, and its flags follow.
    """
    words = argv[1:]
    if words and words[0] in ("help", "-h", "--help"):
        print(usage())
        return 0
    name = _command(words)
    if name is None:
        print(usage() if not words else _no_such_command(words), file=sys.stderr)
        return 2
    command = importlib.import_module(COMMANDS[name].module)
    values: Flags = command.FLAGS
    try:
        values.parse(f"python -m jax_ep {name}", words[len(name.split()) :])
        if values.values.help:
            summary = COMMANDS[name].summary
            sentence = f"{summary[0].upper()}{summary[1:]}."
            print(f"usage: python -m jax_ep {name} [flags]\n\n{sentence}\n\n{values.help()}")
            return 0
        return command.run()
    except Error as error:
        print(f"{error}\nTry: python -m jax_ep {name} --help", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        # 130 is the exit status that shells report for a program that SIGINT ended.
        return 130
    except BrokenPipeError:
        # The reader of the output's pipe, such as `head`, has ended. Standard output now goes to
        # /dev/null, so that Python does not fail again when it flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _command(words: Sequence[str]) -> str | None:
    """Returns the name of the command that is given before the first flag; None if unknown."""
    name = " ".join(_before_flags(words))
    return name if name in COMMANDS else None


def _before_flags(words: Sequence[str]) -> list[str]:
    return list(itertools.takewhile(lambda word: not word.startswith("-"), words))


def _no_such_command(words: Sequence[str]) -> str:
    leading = _before_flags(words)[:2] or words[:1]
    guesses = [" ".join(leading), *leading[:1]]
    nearest = [
        command for guess in guesses for command in difflib.get_close_matches(guess, COMMANDS, 1)
    ]
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"There is no command {guesses[0]!r}.{hint}\n\n{usage()}"
