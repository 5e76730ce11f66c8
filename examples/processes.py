"""Run a program in several processes that share one mesh, on one host or on several.

Start the same command in every process, and give each its own `--process_id`:

    python PROGRAM --coordinator=HOST:PORT --num_processes=2 --process_id=0
    python PROGRAM --coordinator=HOST:PORT --num_processes=2 --process_id=1

HOST is the host of process 0, and PORT is a free port on it. Under SLURM's `srun` and Open MPI's
`mpirun` the three flags are not needed. Otherwise, without the flags, the program runs in one
process.

If one process dies, the other processes end too, with a message. A process that waits for data of
the dead one ends at once; any other ends after `--heartbeat_seconds` without a heartbeat from it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags, logging
from jax.sharding import Sharding

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT at which process 0 waits for the others."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Processes that run this program together.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0 on.", lower_bound=0
)
_HEARTBEAT_SECONDS = flags.DEFINE_integer(
    "heartbeat_seconds",
    60,
    "Seconds without a sign of life after which a process is taken for dead.",
    lower_bound=1,
)


def run(main: Callable[[list[str]], None]) -> None:
    """Joins the other processes, then runs `main` as `absl.app.run` does.

    If `main` fails in one of several processes, that process ends at once, without waiting for the
    others. The other processes then fail instead of waiting for its data.
    """

    def join_and_run(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        _join()
        try:
            main(argv)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if jax.process_count() == 1 or (isinstance(error, SystemExit) and not error.code):
                raise
            # The text of a SystemExit says what the user did wrong; it needs no traceback.
            if isinstance(error, SystemExit):
                print(error, file=sys.stderr)
            else:
                traceback.print_exc()
            print(
                f"process {jax.process_index()} of {jax.process_count()} failed, see above. A "
                "connection that was closed means that another process ended first. Start all "
                "processes again; with --checkpoint_dir they continue from the last checkpoint.",
                file=sys.stderr,
                flush=True,
            )
            # Skip the exit handlers: they wait for the other processes.
            os._exit(1)

    app.run(join_and_run)


def _join() -> None:
    """Connects to the processes that the flags, `srun` or `mpirun` name; else does nothing."""
    named = {flag.name: flag.value for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)}
    missing = [f"--{name}" for name, value in named.items() if value is None]
    if missing and len(missing) < len(named):
        raise app.UsageError(
            f"give {', '.join(missing)} too: a process needs --coordinator, --num_processes and "
            "--process_id together"
        )
    if not missing or _is_started_by_cluster():
        # Clusters end programs by SIGTERM; JAX's preemption service would catch and ignore it.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            _COORDINATOR.value,
            _NUM_PROCESSES.value,
            _PROCESS_ID.value,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS.value,
        )


def _is_started_by_cluster() -> bool:
    """Returns whether `srun` or `mpirun` started this process together with others."""
    if "SLURM_STEP_NODELIST" in os.environ:
        return int(os.environ.get("SLURM_NTASKS", 1)) > 1
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1


def is_first() -> bool:
    """Returns whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def print_once(text: str) -> None:
    """Prints `text` in process 0 only."""
    if is_first():
        print(text, flush=True)


def distribute(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """Returns a global array with `sharding`; every process passes the whole `value`."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
