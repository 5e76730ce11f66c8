"""Runs a bench command: measures the programs of all its cases, and prints, saves and draws them.

A command is a `Bench`: a table of cases, and how their results are shown. A `Case` is one piece of
work and the programs that do it, such as this library's implementations and the baselines they are
compared with. Each program gives one row of results, a dict, with its times or with the error that
it ended with. A case's programs are compiled in parallel, and checked and timed one at a time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jax_ep.bench import measuring, report
from jax_ep.bench.flags import BenchFlags, Shared
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import DEVICE_TIMERS, Loop, WallTime

_SLOW_REPEATS = 3  # the repeats of a loop that takes seconds
Program = tuple[Row, Loop]


class Run(NamedTuple):
    """Settings of a command's measurements, from its flags.

    Attributes:
      check: whether results are checked before they are timed.
      repeats: how many times each loop is run and timed.
      timer: the profiler that measures device times, one of `flags.TIMERS`.
      seconds: the seconds after which no measurement is begun; None: no limit.
      started: when the command started, in seconds of `time.monotonic`.
    """

    check: bool = False
    repeats: int = 1
    timer: str = "none"
    seconds: float | None = None
    started: float = 0.0

    def check_time(self) -> None:
        """Raises TimeoutError if it is too late to begin a measurement."""
        if self.seconds is not None and time.monotonic() - self.started > self.seconds:
            raise TimeoutError(f"not started within {self.seconds:g} s")


class Case:
    """One piece of work, and the programs that do it.

    Attributes:
      name: the work in words, for the progress line.
      rows: for each program, the fields of its row that identify it.
      in_turns: whether the loops of all programs run in turns; if not, one after the other.
      spaced: whether device times are measured with spaced calls; see `Loop.device_time`.
      device_repeats: how many times a loop runs for its device time, at most.
    """

    in_turns = False
    spaced = True
    device_repeats = 2

    def __init__(self, name: str, rows: Sequence[Row]):
        self.name, self.rows = name, list(rows)

    def prepare(self) -> Any:
        """Makes the data that all programs share, such as operands, for `build` and `check`."""

    def build(self, row: Row, shared: Any) -> Loop:
        """Compiles the loop of a row's program."""
        raise NotImplementedError

    def compiled(self, row: Row, loop: Loop) -> Row:
        """Returns fields that are known before a program has run, such as its memory."""
        return {}

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        """Raises AssertionError unless a program's results are right.

        Returns whether there was anything to compare them with.
        """
        raise NotImplementedError

    def is_slow(self, row: Row) -> bool:
        """Returns whether a program takes so long that few repeats must do."""
        return False

    def results(self, row: Row) -> Row:
        """Returns fields that follow from a row's times, such as throughputs."""
        return {}

    def measure(self, run: Run) -> list[Row]:
        """Measures all programs; returns a row for each."""
        rows = [dict(row) for row in self.rows]
        measuring.progress(f"{self.name}: compiling")
        try:
            shared = self.prepare()
        except Exception as error:  # a case that fails must not cost others their results
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
        """Checks a compiled loop and warms it up; returns None if it fails."""
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
        """Times loops, in turns if there are several; adds the times, and `results`, to their rows.

        The field "rate_of_first" is the time of the case's first program over that of a program:
        the median over turns, since a GPU's clock drifts.
        """
        slow = any(self.is_slow(row) for row, _ in programs)
        with errors_go_into(*(row for row, _ in programs)):
            turns = [
                [loop.run() for _, loop in programs]
                for _ in range(min(run.repeats, _SLOW_REPEATS) if slow else run.repeats)
            ]
            for i, (row, loop) in enumerate(programs):
                row["wall"] = wall_record(WallTime.of([turn[i] for turn in turns]))
                if self.in_turns and programs[0][0].items() >= self.rows[0].items():
                    row["rate_of_first"] = statistics.median(turn[0] / turn[i] for turn in turns)
                repeats = 1 if slow else min(run.repeats, self.device_repeats)
                row |= device_times(loop, run.timer, repeats, self.spaced)
                row |= self.results(row)


class Bench:
    """A bench command: its cases, and how their results are shown.

    Attributes:
      flags: the command's flags.
      shared: those of its flags that several commands have.
      columns: the columns of the table.
      facts: fields of the file of results besides its rows; `cases` may add some.
    """

    flags: BenchFlags
    shared: Shared
    columns: Sequence[Column]

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def default_ranks(self, devices: Sequence[jax.Device]) -> list[int]:
        return [len(devices)]

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> Iterable[Case]:
        """Checks the flags and returns the cases to measure.

        Raises `Error` for a flag that does not fit the others or this machine.
        """
        raise NotImplementedError

    def header(self) -> list[str]:
        """Returns the facts that hold for all rows, as lines to print before measuring."""
        return []

    def name(self, row: Row) -> str:
        """Names a row in words, for errors and times of kernels."""
        raise NotImplementedError

    def compare(self, rows: list[Row]) -> None:
        """Adds to the rows the fields that follow from other rows, such as speed-ups."""

    def table(self, rows: Sequence[Row]) -> list[str]:
        """Renders rows as lines: the table, and the notes below it."""
        return report.table(self.columns, rows)

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        """Draws all rows to a file; `machine` is the devices in words."""
        raise NotImplementedError


def run(bench: Bench, by_case: bool = False) -> int:
    """Runs a bench command; returns its exit status.

    `by_case` is whether each case gets a table of its own, printed once the case is measured.
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
        if shared.json.value:  # after each case, so that an interrupted run keeps its results
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
    """Returns the settings of a command's measurements; their time limit counts from now."""
    started, timing = time.monotonic(), shared.timing
    if timing is None:
        return Run(started=started)
    return Run(
        shared.check is not None and shared.check.value,
        timing.repeats.value,
        timing.timer.value,
        None if shared.seconds is None else shared.seconds.value,
        started,
    )


def _print_table(bench: Bench, rows: Sequence[Row]) -> None:
    timing = bench.shared.timing
    text = ["", *bench.table(rows), *report.notes(rows, bench.name)]
    if timing is not None and timing.by_kernel.value:
        text += report.kernels(rows, bench.name)
    print("\n".join(text), flush=True)


@contextlib.contextmanager
def errors_go_into(*rows: Row) -> Iterator[None]:
    """Ends its block at an error, which becomes the rows' "error".

    A program that fails, each in its own way, must not cost others their results.
    """
    try:
        yield
    except Exception as error:
        for row in rows:
            row["error"] = measuring.first_line(error)


def wall_record(wall: WallTime) -> dict[str, float]:
    return {"median_us": wall.median, "low_us": wall.low, "high_us": wall.high}


def device_times(loop: Loop, timer: str, repeats: int, spaced: bool = True) -> dict[str, Any]:
    """Measures the device time of a loop's iteration, as {"device": record or None}.

    "device" is None where there is no GPU or no timer works; where every timer failed,
    "device_error" says why. `timer` is one of `flags.TIMERS`; `repeats` and `spaced` are arguments
    of `Loop.device_time`.
    """
    if timer == "none":
        return {"device": None}
    if loop.mesh.devices.flat[0].platform != "gpu":
        reason = f"device_timer={timer} is of GPUs, and this is none"
        return {"device": None} | ({} if timer == "auto" else {"device_error": reason})
    try:
        device = loop.device_time(repeats, DEVICE_TIMERS if timer == "auto" else (timer,), spaced)
    except RuntimeError as error:  # the wall time is valid without the device time
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
