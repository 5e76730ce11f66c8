"""The command line `python -m jax_ep`.

Each command is a module with `add_flags(flags)`, which adds the command's flags, and `run(args)`,
which runs it with their values and returns the exit status.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import sys
from collections.abc import Sequence

from jax_ep.flags import Error, Flags

# Maps a command to its module, which is not imported before the command runs, and its summary.
COMMANDS = {
    "info": ("cli.info", "print versions, devices, peer access, and what runs here"),
    "memory": ("cli.memory", "compute the bytes that communication holds per rank"),
    "estimate": ("bench.estimate", "predict bytes and least time of an exchange between hosts"),
    "placement": ("cli.placement", "compare ways to place experts, on a trace of routing"),
    "bench": ("bench.exchange", "time dispatch, combine and their gradients"),
    "bench layer": ("bench.layer", "time the MoE layer, compared with XLA's exchange"),
    "bench matmul": ("bench.matmul", "time the grouped matmuls, compared with a dense matmul"),
    "bench decode": ("bench.decode", "time the MoE layers of a decoding step by batch"),
    "bench train": ("bench.train", "time a training step of a whole model and its parts"),
    "bench collectives": ("bench.collectives", "time all_reduce and the other collectives"),
    "bench all": (
        "bench.suite",
        "run bench, layer, matmul and collectives, each in its own process",
    ),
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
        print(_no_such_command(leading or words) if words else usage(), file=sys.stderr)
        return 2
    path, summary = COMMANDS[name]
    command = importlib.import_module(f"jax_ep.{path}")
    flags = Flags(name, f"{summary[0].upper()}{summary[1:]}.")
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
        # 130 is the exit status that shells report for a program that SIGINT ended.
        return 130
    except BrokenPipeError:
        # The reader of the output's pipe, such as `head`, has ended. Standard output now goes to
        # /dev/null, so that Python does not fail again when it flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _no_such_command(words: Sequence[str]) -> str:
    guesses = [" ".join(words[:2]), words[0]]
    nearest = [near for guess in guesses for near in difflib.get_close_matches(guess, COMMANDS, 1)]
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"There is no command {guesses[0]!r}.{hint}\n\n{usage()}"
