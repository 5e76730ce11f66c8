"""The command line `python -m jax_ep`.

The module of a command has `add_flags(flags)`, and `run(args)`, which returns the exit status.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence

from jax_ep.flags import Error, Flags

# Maps a command to its module, which is not imported before the command runs, and its summary.
COMMANDS = {
    "info": ("cli.info", "print versions, devices, and what runs here"),
    "memory": ("cli.memory", "compute the bytes that communication holds per rank"),
    "estimate": ("bench.estimate", "predict bytes and least time of an exchange between hosts"),
    "placement": ("cli.placement", "compare ways to place experts, on a trace of routing"),
    "bench": ("bench.exchange", "time dispatch, combine and their gradients"),
    "bench layer": ("bench.layer", "time the MoE layer, compared with XLA's exchange"),
    "bench matmul": ("bench.matmul", "time the grouped matmuls, compared with a dense matmul"),
    "bench decode": ("bench.decode", "time the MoE layers of a decoding step by batch"),
    "bench train": ("bench.train", "time a training step of a whole model and its parts"),
    "bench collectives": ("bench.collectives", "time all_reduce and the other collectives"),
    "bench all": ("bench.suite", "run the other benchmarks, each in its own process"),
}


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{summary}" for name, (_, summary) in COMMANDS.items()]
    head = ["usage: python -m jax_ep <command> [flags]", "", "commands:"]
    return "\n".join([*head, *lines, "", "python -m jax_ep <command> --help lists its flags."])


def main(argv: Sequence[str]) -> int:
    """Runs a command; returns its exit status, or 2 for wrong usage. argv[0] is ignored."""
    words = argv[1:]
    if words and words[0] in ("help", "-h", "--help"):
        print(usage())
        return 0
    leading = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    name = " ".join(leading)
    if name not in COMMANDS:
        if words:
            print(f"There is no command {' '.join(leading) or words[0]!r}.\n", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return 2
    path, summary = COMMANDS[name]
    command = importlib.import_module(f"jax_ep.{path}")
    flags = Flags(f"python -m jax_ep {name}", f"{summary[0].upper()}{summary[1:]}.")
    command.add_flags(flags)
    try:
        return command.run(flags.parse_args(words[len(leading) :]))
    except Error as error:
        print(f"{error}\nTry: python -m jax_ep {name} --help", file=sys.stderr)
        return 2
    except SystemExit as end:  # argparse has printed the help
        return int(end.code or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        # The exit status that shells report for SIGINT.
        return 130
    except BrokenPipeError:
        # A reader such as `head` has ended. Python must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
