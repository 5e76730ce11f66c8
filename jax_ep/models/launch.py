"""Runs a program in one process or in several that share a mesh.

If one process fails, the others end too, instead of waiting for its data.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import jax


def folder(text: str) -> str:
    """Checks, as a flag's type, that `text` is a folder that can be written or made."""
    path = Path(text).absolute()
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise argparse.ArgumentTypeError(f"must be a folder to write to, but {there} is none")
    return text


def file(text: str) -> str:
    """Checks, as a flag's type, that `text` is no folder, and that its folder can be made."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, but is the folder {text}")
    folder(str(Path(text).parent))
    return text


def blamed_flag(
    text: str, args: argparse.Namespace, names: Iterable[str], paths: Iterable[str]
) -> str | None:
    """Returns the flag that an error's text names first: programs begin their message with it."""
    # The text names a flag in `names` by its name, and a flag in `paths` by its value, a path.
    words = {name: name for name in names}
    for flag in paths:
        if value := getattr(args, flag):
            words |= {str(Path(value)): flag, str(Path(value).absolute()): flag}
    # The longest is tried first: "run/metrics.jsonl" before "run".
    choices = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    # Skips parts of other words and paths, such as the flag "model" in "model-1.safetensors".
    found = re.search(rf"(?<![\w./-])({choices})(?![\w-]|\.\w)", text)
    return words[found[1]] if found else None


def run(
    main: Callable[[], None],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_seconds: int = 60,
    cpu_devices: int | None = None,
) -> None:
    """Joins the other processes, and then calls `main`; call it before anything else uses JAX.

    A process that fails ends at once with exit status 1: it prints the traceback, or only the
    message of a SystemExit. The others end when they wait for its data, or after
    `heartbeat_seconds` without a sign of life from it.

    Process 0 waits for the others at `coordinator`, HOST:PORT. Without it, `num_processes` and
    `process_id`, the processes that SLURM's `srun` or Open MPI's `mpirun` started join, if any.
    `cpu_devices` is the number of CPU devices of all processes together, unless XLA_FLAGS or JAX's
    configuration sets it; None: one for each. SystemExit names a flag that does not fit.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        others = [name for name in given if name not in missing]
        raise SystemExit(f"--{missing[0]} must be given together with --{' and --'.join(others)}")
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise SystemExit(f"--process_id must be below --num_processes={num_processes}")
    host, _, port = (coordinator or "").rpartition(":")
    if coordinator is not None and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise SystemExit(f"--coordinator must be HOST:PORT, but is {coordinator}")
    variable = "SLURM_NTASKS" if "SLURM_STEP_NODELIST" in os.environ else "OMPI_COMM_WORLD_SIZE"
    count = num_processes or int(os.environ.get(variable, 1))
    is_set = jax.config.values["jax_num_cpu_devices"] >= 0  # by default -1
    if cpu_devices and not is_set and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(1, cpu_devices // count))
    if not missing or count > 1:
        # Clusters end programs by SIGTERM; JAX's preemption service would catch and ignore it.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            if coordinator is not None:
                # XLA aborts if it cannot look the host up.
                socket.getaddrinfo(host.strip("[]"), None)
            jax.distributed.initialize(
                coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat_seconds
            )
        except (OSError, RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise SystemExit(f"--coordinator={coordinator}: {text}") from error
    try:
        main()
    except BaseException as error:
        if jax.process_count() == 1 or (isinstance(error, SystemExit) and not error.code):
            raise
        print(
            f"{error if isinstance(error, SystemExit) else traceback.format_exc()}\n"
            f"process {jax.process_index()} of {jax.process_count()} failed, see above. A "
            "connection that was closed means that another process ended first.",
            file=sys.stderr,
            flush=True,
        )
        # Skips the exit handlers, which wait for the other processes.
        os._exit(1)


def print_once(text: str) -> None:
    """Prints `text` in process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)
