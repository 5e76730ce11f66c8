"""The commands of `python -m jax_ep`: each is a module with its own flags and a `run`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from absl import flags

COMMANDS = {
    "info": "versions, devices, peer access, and which implementation serves here",
    "bench": "times of dispatch, combine and their gradients beside what plain JAX offers",
    "memory": "bytes that communication holds per rank, beside other libraries' formulas",
    "bench collectives": "times of every algorithm of all_reduce & co., and the best of them",
    "bench layer": "time, throughput and memory of the MoE layer beside what plain JAX makes of it",
    "bench matmul": "results and times of the grouped matmuls beside a dense matmul",
}

# Where each command is, imported only when it is asked for.
_MODULES = {
    "info": "jax_ep.cli.info",
    "bench": "jax_ep.bench.exchange",
    "memory": "jax_ep.cli.memory",
    "bench collectives": "jax_ep.bench.collectives",
    "bench layer": "jax_ep.bench.layer",
    "bench matmul": "jax_ep.bench.matmul",
}


def usage() -> str:
    lines = ["usage: python -m jax_ep <command> [flags]", "", "commands:"]
    width = max(map(len, COMMANDS)) + 2
    lines += [f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items()]
    lines += ["", "python -m jax_ep <command> --help lists a command's flags."]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs the command that `argv[1]` names; returns the exit status (2: wrong usage)."""
    if len(argv) < 2 or argv[1] not in COMMANDS:
        if len(argv) == 2 and argv[1] in ("help", "-h", "--help"):
            print(usage())
            return 0
        if len(argv) >= 2:
            print(f"unknown command {argv[1]!r}\n", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return 2
    words = 2 if " ".join(argv[1:3]) in COMMANDS else 1
    name = " ".join(argv[1 : 1 + words])
    command = importlib.import_module(_MODULES[name])
    values: flags.FlagValues = command.FLAGS
    for flag in values:  # a second call in one process starts from the defaults again
        values[flag].unparse()
    try:
        extra = values([f"python -m jax_ep {name}", *argv[1 + words :]])[1:]
        if extra:
            raise flags.Error(f"unexpected arguments: {' '.join(extra)}")
        if values.help:
            print(f"usage: python -m jax_ep {name} [flags]\n\n{COMMANDS[name]}\n{values}")
            return 0
        return command.run()
    except flags.Error as error:
        print(f"{error}\nTry: python -m jax_ep {name} --help", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output (`| head`) has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def command_flags() -> flags.FlagValues:
    """An empty set of flags with `--help`; each command owns one, so importing defines nothing."""
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "Show this list.", short_name="h", flag_values=values)
    return values
