"""`python -m jax_ep bench all`: runs the benchmarks of exchange, layer, matmul and collectives."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from jax_ep.bench import report
from jax_ep.bench.report import Column
from jax_ep.flags import Args, Error, Flags

# A step that still runs after so many seconds is ended; its file has the cases that it measured.
_STEP_SECONDS = 900
STEPS = {
    "exchange": ["bench"],
    "short-rows": ["bench", "--hidden=2048"],
    "float8": ["bench", "--baselines=", "--wire_dtype=float8_e4m3fn", "--output=quantized"],
    "layer": ["bench", "layer"],
    "matmul": ["bench", "matmul"],
    "collectives": ["bench", "collectives"],
}


def add_flags(flags: Flags) -> None:
    help = "Flags for every step, such as --flags='--check --repeats=2'. Default: none."
    flags.add("flags", "", help)
    flags.json()


def run(args: Args) -> int:
    if not args.json:
        raise Error("--json is required: name the file to write the results to")
    try:
        flags = shlex.split(args.flags)
    except ValueError as error:
        raise Error(f"--flags: {args.flags!r} cannot be split into words: {error}") from error
    steps: list[dict[str, Any]] = []
    for name, step in STEPS.items():
        command = [sys.executable, "-m", "jax_ep", *step, *flags]
        print(f"\n{name}: {shlex.join(command)}", flush=True)
        found = run_step(command, _STEP_SECONDS)
        print(found["output"], end="", flush=True)
        steps.append({"step": name} | found)
        report.save_json(args.json, {"steps": steps})
    columns = report.text("step"), report.text("ended"), Column("seconds", "seconds", "{:.0f}")
    print("\n".join(["", *report.table(columns, steps)]))
    return 0 if all(step["ended"] == "ok" for step in steps) else 1


def run_step(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Runs a bench command in a new process, and ends it after a timeout.

    Returns a dict: "command"; "ended", how, in words; "seconds"; "output", what it printed; and
    "measured", the contents of its JSON file, or None.
    """
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        try:
            done = subprocess.run(
                [*command, f"--json={file.name}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                text=True,
            )
            output, status = done.stdout, done.returncode
            ended = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            ended = f"ended after {seconds:g} s"
        with open(file.name, encoding="utf-8") as written:
            text = written.read()
    return {
        "command": list(command),
        "ended": ended,
        "seconds": time.monotonic() - started,
        "output": output,
        "measured": json.loads(text) if text else None,
    }
