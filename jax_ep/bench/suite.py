"""`python -m jax_ep bench all`: runs all bench commands but decode, balance, compile and train.

A step is one bench command, which runs in its own process with its own timeout, so that the other
steps run even if one hangs or crashes. The results of a step are written to the file of `--json` as
soon as it has ended. On CPUs the commands use small sizes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax_ep.bench import measuring, report
from jax_ep.bench.flags import BenchFlags
from jax_ep.flags import Error

# How many characters of a failed step's standard error are kept, counted from its end.
_TAIL = 4000
# The seconds to wait for a process to end, after SIGTERM and again after SIGKILL.
_SECONDS_TO_END = 10
_OK = "ok"
_INTERRUPTED = "interrupted"


class Step(NamedTuple):
    """One bench command that `bench all` runs.

    Attributes:
      command: the arguments of `python -m jax_ep` that select and configure the command.
      flags: the names of the flags of `bench all` that are passed on to the command, besides the
        flags that are passed on to every step, such as --repeats.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]


_SIZES = ("ranks", "tokens", "num_experts")
STEPS = {
    "exchange": Step(("bench",), (*_SIZES, "hidden")),
    "short-rows": Step(("bench", "--hidden=2048"), _SIZES),
    "float8": Step(
        (
            "bench",
            "--ops=dispatch,combine,round_trip,dispatch_grad,combine_grad",
            "--baselines=",
            "--wire_dtype=float8_e4m3fn",
            "--output=quantized",
        ),
        (*_SIZES, "hidden"),
    ),
    "layer": Step(("bench", "layer"), (*_SIZES, "hidden", "seconds")),
    "matmul": Step(("bench", "matmul"), ("seconds",)),
    "collectives": Step(("bench", "collectives"), ("ranks", "hidden", "write_table", "seconds")),
}

FLAGS = BenchFlags()
_STEPS = FLAGS.choices(
    "steps",
    STEPS,
    STEPS,
    "The steps to run, in this order, each one bench command in a process of its own; empty: "
    "only the commands of --also.",
    may_be_empty=True,
)
_RANKS = FLAGS.ranks("each step's own default")
_TOKENS = FLAGS.tokens("128,4096", "each step's own default")
_HIDDEN = FLAGS.integer(
    "hidden",
    None,
    "H, the hidden size: the number of values of a token. Default: each step's own default.",
)
_NUM_EXPERTS = FLAGS.integer(
    "num_experts",
    None,
    "E, the number of experts of all ranks together. Default: each step's own default.",
)
_CHECK = FLAGS.check("results with a reference, in every step")
_ITERATIONS = FLAGS.integer(
    "iterations",
    None,
    "The number of dependent calls in one timed loop. Default: each step's own default.",
    least=10,
)
_REPEATS = FLAGS.integer(
    "repeats", None, "How many times each loop is run and timed. Default: each step's own default."
)
_TIMER = FLAGS.device_timer()
_STEP_SECONDS = FLAGS.number(
    "step_seconds", 900.0, "Seconds after which a step that still runs is ended."
)
_ALSO = FLAGS.several(
    "also",
    "A shell command to run as one more step, such as --also='python -m pytest'. May be given "
    "several times. Default: none.",
)
_WRITE_TABLE = FLAGS.write_table()
_JSON = FLAGS.json()


def run() -> int:
    if not _JSON.value:
        raise Error("--json is required: name the file to write the results to")
    if not _STEP_SECONDS.value:
        raise Error("--step_seconds must be above 0, but is 0")
    _check_taken()
    FLAGS.check_outputs()
    with _terminated_as_interrupted():
        return _run()


def _check_taken() -> None:
    """Raises `Error` if a flag is given that is not passed on to any of the steps in --steps."""
    taken = {flag for name in _STEPS.value for flag in STEPS[name].flags}
    for holder in (_RANKS, _TOKENS, _HIDDEN, _NUM_EXPERTS, _WRITE_TABLE):
        if holder.value is not None and holder.name not in taken:
            takers = ", ".join(name for name, step in STEPS.items() if holder.name in step.flags)
            raise Error(f"--{holder.name} needs a step in --steps that has this flag: {takers}")


def _run() -> int:
    machine = _machine()
    on_gpu = machine["backend"] == "gpu"
    record = measuring.run_record() | {"machine": machine, "steps": []}
    # On CPUs, each step makes virtual devices of its own, so their number is not printed.
    kind = machine["devices"][0]["kind"]
    print(f"{len(machine['devices'])} x {kind}" if on_gpu else kind, flush=True)
    steps = list(_chosen(on_gpu))
    for number, (name, command, measures) in enumerate(steps, 1):
        print(f"\n[{number}/{len(steps)}] {name}: {shlex.join(command)}", flush=True)
        found = run_step(command, _STEP_SECONDS.value, measures)
        print(found["output"], end="", flush=True)
        print(f"{name}: {found['ended']}, {found['seconds']:.0f} s", flush=True)
        record["steps"].append({"step": name} | found)
        measuring.save_json(_JSON.value, record)
        if found["ended"] == _INTERRUPTED:
            break
    print(f"\n{table(record['steps'])}")
    return 0 if all(step["ended"] == _OK for step in record["steps"]) else 1


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt, so that the running step is also ended.

    A step runs in its own session, so it would go on if SIGTERM ended this process directly.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _machine() -> dict[str, Any]:
    """Returns the facts about the machine that `python -m jax_ep info --json=FILE` writes.

    `info` runs in another process, because JAX in this process would take GPU memory from the bench
    commands. Raises `Error` if `info` fails or JAX finds no device.
    """
    command = [sys.executable, "-m", "jax_ep", "info"]
    found = run_step(command, _STEP_SECONDS.value, measures=True)
    machine = found["measured"]
    if machine is None:
        raise Error(f"python -m jax_ep info failed: {found.get('error_output', found['ended'])}")
    if machine["backend_error"] is not None:
        raise Error(f"JAX finds no device: {machine['backend_error']}")
    return machine


def _chosen(on_gpu: bool) -> Iterator[tuple[str, list[str], bool]]:
    """Yields for each step to run: its name, its command line, and whether it takes --json."""
    values = {
        "ranks": _RANKS.value,
        "tokens": _TOKENS.value or ([128, 4096] if on_gpu else None),
        "hidden": _HIDDEN.value,
        "num_experts": _NUM_EXPERTS.value,
        "write_table": _WRITE_TABLE.value,
        # A step's flag --seconds is below its timeout, so that a slow step ends by itself and
        # prints the results that it has.
        "seconds": 0.8 * _STEP_SECONDS.value,
        "iterations": _ITERATIONS.value,
        "repeats": _REPEATS.value,
        "device_timer": _TIMER.value,
        "check": _CHECK.value or None,
    }
    for name in _STEPS.value:
        step = STEPS[name]
        arguments = [
            f"--{flag}={','.join(map(str, value)) if isinstance(value, list) else value}"
            for flag in (*step.flags, "iterations", "repeats", "device_timer", "check")
            if (value := values[flag]) is not None
        ]
        yield name, [sys.executable, "-m", "jax_ep", *step.command, *arguments], True
    for command in _ALSO.value or []:
        yield command, ["sh", "-c", command], False


def run_step(command: Sequence[str], seconds: float, measures: bool) -> dict[str, Any]:
    """Runs a command in a new process; after a timeout, ends it and all processes it started.

    Args:
      command: the words of the command line.
      seconds: the timeout.
      measures: whether the command has the flag --json, with which it writes its results to a file.

    Returns:
      A dict: "command"; "ended", how the command ended, in words; "seconds", how long it took;
      "output", its standard output; "error_output", its standard error, only after a failure; and
      "measured", the contents of its JSON file, or None if it wrote none.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: os.path.join(folder, name) for name in ("json", "out", "err")}
        arguments = [f"--json={paths['json']}"] if measures else []
        with open(paths["out"], "wb") as out, open(paths["err"], "wb") as err:
            process = subprocess.Popen(
                [*command, *arguments], stdout=out, stderr=err, start_new_session=True
            )
            ended = _wait(process, seconds)
        result = {
            "command": list(command),
            "ended": ended,
            "seconds": time.monotonic() - started,
            "output": _read(paths["out"]),
            "measured": None,
        }
        if ended != _OK:
            result["error_output"] = _read(paths["err"])[-_TAIL:]
        with contextlib.suppress(OSError, ValueError):
            with open(paths["json"], encoding="utf-8") as file:
                result["measured"] = json.load(file)
    return result


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"ended after {seconds:g} s"
    except KeyboardInterrupt:
        _end(process)
        return _INTERRUPTED
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return _OK if status == 0 else f"exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all processes in its group: sends SIGTERM, waits, then sends SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def table(steps: Sequence[dict[str, Any]]) -> str:
    """Renders a table of how each step ended, its seconds, and its measured and failed programs."""
    header = ["step", "ended", "seconds", "measured", "failed"]
    lines = []
    for step in steps:
        rows = (step["measured"] or {}).get("rows", [])
        failed = sum("error" in row for row in rows)
        counts = [str(len(rows) - failed), str(failed)] if step["measured"] else ["", ""]
        lines.append([step["step"], step["ended"], f"{step['seconds']:.0f}", *counts])
    return "\n".join(report.fixed_width(header, lines, ("step", "ended")))
