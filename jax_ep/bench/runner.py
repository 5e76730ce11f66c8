"""Runs a bench command: measures all its programs, and prints, saves and plots the results.

A command is a `Bench`, which lists its cases and says how results are shown. A `Case` is one piece
of work and the programs that do it, such as this library's implementations and the baselines they
are compared with. Each program gives one row of results: a dict with its times, or with its error.
A case's programs are compiled in parallel; then they are checked and timed one at a time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jax_ep.bench import energy, measuring, report
from jax_ep.bench.flags import BenchFlags, Shared
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import DEVICE_TIMERS, Loop, WallTime

# How many times, at most, the loop of a slow program is run and timed. `Case.is_slow` says which
# programs are slow.
_SLOW_REPEATS = 3
# A pair: the row of results of a program, and the compiled loop that calls the program.
Program = tuple[Row, Loop]


class Run(NamedTuple):
    """The settings of a command's measurements, from its flags.

    Attributes:
      check: whether a program's results are checked before it is timed.
      repeats: how many times each loop is run and timed.
      timer: the profiler that measures device times, one of `flags.TIMERS`.
      seconds: the time limit, in seconds since the start. Past it, the command begins no further
        measurement. None: no limit.
      started: when the command started, in seconds of `time.monotonic`.
      energy: whether the GPUs' energy, power and clock are measured, too.
    """

    check: bool = False
    repeats: int = 1
    timer: str = "none"
    seconds: float | None = None
    started: float = 0.0
    energy: bool = False

    def check_time(self) -> None:
        """Raises TimeoutError if more than `seconds` have passed since the command started."""
        if self.seconds is not None and time.monotonic() - self.started > self.seconds:
            raise TimeoutError(f"not started, because --seconds={self.seconds:g} had passed")


class Case:
    """One piece of work, and the programs that do it, to be measured and compared.

    Subclasses define at least `build` and `check`.

    Attributes:
      name: the work in words, for the progress line.
      rows: a row for each program, with the fields that identify the program.
      in_turns: True to run each program's loop once per round, round after round, so that a
        drifting clock affects all programs alike. False to run all repeats of a program in a row.
      spaced: whether a waiting kernel follows each call while device times are measured; see
        `Loop.device_time`.
      device_repeats: how many times, at most, a loop runs to measure its device time.
    """

    in_turns = False
    spaced = True
    device_repeats = 2

    def __init__(self, name: str, rows: Sequence[Row]):
        self.name, self.rows = name, list(rows)

    def prepare(self) -> Any:
        """Makes what all programs share, such as operands: the `shared` of `build` and `check`."""

    def build(self, row: Row, shared: Any) -> Loop:
        """Compiles the program of a row, and returns the loop that calls it."""
        raise NotImplementedError

    def compiled(self, row: Row, loop: Loop) -> Row:
        """Returns fields to add to `row` that are known after compiling, such as memory."""
        return {}

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        """Checks the results of the program of a row, which `loop` calls.

        Returns False if there is nothing to compare the results with, else True. Raises
        AssertionError if they are wrong.
        """
        raise NotImplementedError

    def is_slow(self, row: Row) -> bool:
        """Returns whether a row's program is so slow that its loop is timed only a few times."""
        return False

    def yardstick(self, row: Row) -> Row:
        """Returns fields that identify the program that a row's speed is compared with."""
        return self.rows[0]

    def results(self, row: Row) -> Row:
        """Returns fields to add to `row` that follow from its times, such as throughputs."""
        return {}

    def measure(self, run: Run) -> list[Row]:
        """Compiles, checks and times all programs.

        Returns a copy of each program's row, with its results added or, after a failure, a field
        "error".
        """
        rows = [dict(row) for row in self.rows]
        measuring.progress(f"{self.name}: compiling")
        try:
            shared = self.prepare()
        except Exception as error:
            return [row | {"error": measuring.first_line(error)} for row in rows]

        def build(row: Row) -> Loop:
            run.check_time()
            return self.build(row, shared)

        with ThreadPoolExecutor(min(len(rows), 16)) as pool:
            futures = [pool.submit(build, row) for row in rows]
        pairs = list(zip(rows, futures, strict=True))
        for group in [pairs] if self.in_turns else [[pair] for pair in pairs]:
            ready = [(row, self._ready(row, future, shared, run)) for row, future in group]
            self._time([(row, loop) for row, loop in ready if loop is not None], run)
        return rows

    def _ready(self, row: Row, future: Future[Loop], shared: Any, run: Run) -> Loop | None:
        """Waits for a program's compiled loop, checks its results and runs it once to warm it up.

        Returns the loop, or None after an error, which is stored in `row`.
        """
        measuring.progress(f"{self.name}, {row['implementation']}")
        with errors_go_into(row):
            loop = future.result()
            row |= self.compiled(row, loop)
            run.check_time()
            row["checked"] = run.check and self.check(row, loop, shared)
            loop.run()
            return loop
        return None

    def _time(self, programs: Sequence[Program], run: Run) -> None:
        """Times the loops of programs; adds wall times, device times and `results` to their rows.

        Each round runs every loop once. With `in_turns`, rows also get the field "relative_rate":
        the speed-up over the program that `yardstick` identifies, the median over rounds. Only
        times of the same round are compared, because a GPU's clock drifts between rounds.
        """
        slow = any(self.is_slow(row) for row, _ in programs)
        with errors_go_into(*(row for row, _ in programs)):
            turns = [
                [loop.run() for _, loop in programs]
                for _ in range(min(run.repeats, _SLOW_REPEATS) if slow else run.repeats)
            ]
            for i, (row, loop) in enumerate(programs):
                row["wall"] = wall_record(WallTime.of([turn[i] for turn in turns]))
                wanted = self.yardstick(row).items()
                found = [j for j, (other, _) in enumerate(programs) if other.items() >= wanted]
                if self.in_turns and found:
                    ratios = [turn[found[0]] / turn[i] for turn in turns]
                    row["relative_rate"] = statistics.median(ratios)
                repeats = 1 if slow else min(run.repeats, self.device_repeats)
                row |= device_times(loop, run.timer, repeats, self.spaced)
                row |= energy_used(loop) if run.energy else {}
                row |= self.results(row)


class Bench:
    """A bench command: its flags, its cases, and how their results are shown.

    Attributes:
      flags: all flags of the command.
      shared: those of the flags that most bench commands have, such as --json.
      columns: the columns of the table of results.
      facts: the fields that the JSON file of results has besides its rows. The method `cases` may
        add fields.
    """

    flags: BenchFlags
    shared: Shared
    columns: Sequence[Column]

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def default_ranks(self, devices: Sequence[jax.Device]) -> list[int]:
        return [len(devices)]

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> Iterable[Case]:
        """Checks the flags and returns the cases to measure, on each number of ranks in `ranks`.

        Raises `Error` if a flag contradicts other flags or is not possible on this machine.
        """
        raise NotImplementedError

    def header(self) -> list[str]:
        """Returns lines to print before measuring: facts that hold for all rows, such as sizes."""
        return []

    def name(self, row: Row) -> str:
        """Describes a row in words, to precede its error or its list of kernel times."""
        raise NotImplementedError

    def compare(self, rows: list[Row]) -> None:
        """Adds further fields to each row that follow from other rows, such as speed-ups."""

    def table(self, rows: Sequence[Row]) -> list[str]:
        """Renders rows of results as lines of text: a table, and a legend where needed."""
        return report.table(self.columns, rows)

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        """Plots all rows of results to the file `path`; `machine` names the devices in words."""
        raise NotImplementedError


def run(bench: Bench, by_case: bool = False) -> int:
    """Runs a bench command; returns its exit status: 1 if a program failed, else 0.

    With `by_case`, each case has its own table, which is printed as soon as the case is measured.
    """
    shared = bench.shared
    run = make_run(shared)
    bench.flags.check_outputs()
    ranks = [1] if shared.ranks is None else shared.ranks.value
    devices = measuring.find_devices(max(ranks or [8]))
    ranks = ranks or bench.default_ranks(devices)
    measuring.check_ranks(ranks, len(devices))
    if shared.ranks is None:
        devices = devices[:1]
    cases = bench.cases(devices, ranks)
    machine = measuring.devices_in_words(devices)
    print("\n".join([f"{machine}, jax {jax.__version__}", *bench.header()]), flush=True)

    rows: list[Row] = []
    for case in cases:
        found = case.measure(run)
        rows += found
        measuring.progress("")
        # The file is written after each case, so that an interrupted run keeps its results.
        if shared.json.value:
            measuring.write_json(shared.json.value, rows, **bench.facts)
        if by_case:
            _print_table(bench, found)
    bench.compare(rows)
    if shared.json.value:
        measuring.write_json(shared.json.value, rows, **bench.facts)
    if shared.plot.value:
        bench.draw(rows, shared.plot.value, machine)
    if not by_case:
        _print_table(bench, rows)
    return 1 if any("error" in row for row in rows) else 0


def make_run(shared: Shared) -> Run:
    """Makes a `Run` from the values of a command's flags; its time limit counts from this call."""
    started, timing = time.monotonic(), shared.timing
    if timing is None:
        return Run(started=started)
    return Run(
        shared.check is not None and shared.check.value,
        timing.repeats.value,
        timing.timer.value,
        None if shared.seconds is None else shared.seconds.value,
        started,
        timing.energy.value,
    )


def _print_table(bench: Bench, rows: Sequence[Row]) -> None:
    timing = bench.shared.timing
    text = ["", *bench.table(rows), *report.notes(rows, bench.name)]
    if timing is not None and timing.by_kernel.value:
        text += report.kernels(rows, bench.name)
    print("\n".join(text), flush=True)


@contextlib.contextmanager
def errors_go_into(*rows: Row) -> Iterator[None]:
    """A context that catches any exception, and stores its text as the field "error" of `rows`."""
    try:
        yield
    except Exception as error:
        for row in rows:
            row["error"] = measuring.first_line(error)


def with_matmul_dtype(text: str, row: Row) -> str:
    """Adds a row's matmul dtype to the name of its program, unless the dtype is "none"."""
    return text if row["matmul_dtype"] == "none" else f"{text}, {row['matmul_dtype']}"


def compare_float8(rows: Iterable[Row], keys: Sequence[str]) -> None:
    """Adds the field "speedup_of_float8" to rows whose "matmul_dtype" is float8.

    The field is the speed-up in wall time over another row: the one with the matmul dtype "none"
    and the same values of the fields `keys`.
    """
    rows = [row for row in rows if "wall" in row]

    def identity(row: Row) -> tuple[Any, ...]:
        return tuple(row[key] for key in keys)

    plain = {identity(row): row for row in rows if row["matmul_dtype"] == "none"}
    for row in rows:
        if row["matmul_dtype"] != "none" and (other := plain.get(identity(row))):
            row["speedup_of_float8"] = other["wall"]["median_us"] / row["wall"]["median_us"]


def energy_used(loop: Loop) -> dict[str, Any]:
    """Returns {"energy": what `energy.measure` returns}, or {"energy_error": why it failed}."""
    try:
        return {"energy": energy.measure(loop)}
    except RuntimeError as error:  # the times are valid without the energy
        return {"energy_error": str(error)}


def wall_record(wall: WallTime) -> dict[str, float]:
    return {"median_us": wall.median, "low_us": wall.low, "high_us": wall.high}


def device_times(loop: Loop, timer: str, repeats: int, spaced: bool = True) -> dict[str, Any]:
    """Measures the device time of one iteration of a loop.

    Args:
      loop: the loop.
      timer: the profiler to use, one of `flags.TIMERS`: "auto" tries each profiler in turn until
        one works, and "none" measures nothing.
      repeats: how many times the loop runs.
      spaced: whether a kernel that only waits follows each iteration, and the time of the loop's
        own kernels is subtracted; see `Loop.device_time`.

    Returns:
      A dict with the field "device": a dict of times in microseconds, or None if nothing was
      measured. If the measurement failed, the field "device_error" has the reason. It is no failure
      if `timer` is "none", or if `timer` is "auto" and the devices are not GPUs.
    """
    if timer == "none":
        return {"device": None}
    if (platform := loop.mesh.devices.flat[0].platform) != "gpu":
        reason = f"--device_timer={timer} measures GPUs only, and the devices here are {platform}"
        return {"device": None} | ({} if timer == "auto" else {"device_error": reason})
    try:
        device = loop.device_time(repeats, DEVICE_TIMERS if timer == "auto" else (timer,), spaced)
    except RuntimeError as error:
        return {"device": None, "device_error": str(error)}
    return {
        "device": {
            "median_us": device.median,
            "slowest_us": device.slowest,
            "low_us": device.low,
            "high_us": device.high,
            "timer": device.timer,
            "of_loop_us": device.of_loop,
            "by_kernel_us": device.by_kernel,
        }
    }
