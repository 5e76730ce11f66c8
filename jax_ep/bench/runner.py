"""Runs a bench command: measures all its programs, and prints and saves the results.

A command is a `Bench`; docs/api/command_line.md says what the columns of its table mean. Each
program gives one row of results: a dict with its times, or with its error. The programs of a case
are compiled in parallel, then checked and timed one at a time.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.bench import report
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop, measure_bandwidths
from jax_ep.flags import Args, Error, Flags, at_least, choice, integer, some
from jax_ep.formats import QuantizedArray
from jax_ep.runtime import jax_compat
from pallas_kernels.exchange.plan import FEW_TOKENS


class Bench:
    """A bench command: the programs that it measures, and how it shows their results.

    A *case* is the rows of programs that do the same work. A row first has the fields that identify
    its program, among them "implementation" and "ranks". In the table, `columns` follow the columns
    of all benchmarks. `facts` are the fields of the JSON file besides the rows.
    """

    columns: Sequence[Column] = ()
    # Whether each program of a case runs once per round: a drifting clock then affects all alike.
    in_turns = False
    # Whether the spacer runs after each call, which only short calls need; see `bench.timing`.
    spaced = True

    def __init__(self, args: Args) -> None:
        self.args = args
        self.facts: dict[str, Any] = {}
        self.copies: list[str] = []
        # The results of the first checked program of each kind, which others are compared with.
        self.first: dict[Any, Any] = {}

    def measure_bandwidths(self, devices: Sequence[jax.Device]) -> None:
        """Measures plain copies, whose rates are printed and saved."""
        self.bandwidths = measure_bandwidths(devices)
        self.facts["bandwidths"] = self.bandwidths._asdict()
        for place, per_second in self.bandwidths._asdict().items():
            if per_second is not None:
                self.copies.append(f"copies, {place}: {per_second / 1e9:.0f} GB/s")

    def default_ranks(self, num_devices: int) -> list[int]:
        return [num_devices]

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> Iterable[list[Row]]:
        """Returns the cases to measure; raises `Error` if flags cannot be followed."""
        raise NotImplementedError

    def prepare(self, row: Row) -> Any:
        """Makes the `shared` of a case, such as operands; `row` is the first of the case."""

    def build(self, row: Row, shared: Any) -> Loop:
        raise NotImplementedError

    def compiled(self, row: Row, loop: Loop) -> Row:
        """Returns fields to add to `row` that are known after compiling."""
        return {}

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        """Raises AssertionError if results are wrong; returns whether they were compared."""
        raise NotImplementedError

    def results(self, row: Row) -> Row:
        """Returns fields to add to `row` that follow from its times."""
        return {}

    def compare(self, rows: list[Row]) -> None:
        """Adds fields to rows that follow from other rows, such as speed-ups."""

    def header(self) -> list[str]:
        return []

    def group(self, row: Row) -> tuple[str, str]:
        """Returns in words the row's operation, and the sizes at which programs are compared."""
        raise NotImplementedError

    def program(self, row: Row) -> str:
        """Describes what distinguishes a row's program from others of its group."""
        return row["implementation"]

    def name(self, row: Row) -> str:
        return ", ".join([*self.group(row), self.program(row)])

    def table(self, rows: Sequence[Row]) -> list[str]:
        words = (
            Column("work", lambda row: self.group(row)[0], left=True),
            Column("sizes", lambda row: self.group(row)[1], left=True),
            Column("program", self.program, left=True),
        )
        return report.table((*words, *report.COMMON, *self.columns), rows)

    def measure(self, case: Sequence[Row]) -> list[Row]:
        """Compiles, checks and times all programs; returns new rows, some with an "error"."""
        rows = [dict(row) for row in case]
        try:
            shared = self.prepare(rows[0])
        except Exception as error:
            return [row | {"error": _first_line(error)} for row in rows]

        def build(row: Row) -> Loop:
            report.progress(f"{self.name(row)}: compiling")
            return self.build(row, shared)

        with ThreadPoolExecutor(min(len(rows), 16)) as pool:
            futures = [pool.submit(build, row) for row in rows]
        programs = list(zip(rows, futures, strict=True))
        # Programs of a group are all ready, in memory, before they are timed in turns.
        groups = [programs] if self.in_turns else [[program] for program in programs]
        for group in groups:
            ready = [(row, self._ready(row, future, shared)) for row, future in group]
            self._time([(row, loop) for row, loop in ready if loop is not None])
        return rows

    def _ready(self, row: Row, future: Future[Loop], shared: Any) -> Loop | None:
        """Waits for a program, checks it and runs it once; None after an error, kept in `row`."""
        report.progress(self.name(row))
        with _errors_go_into(row):
            loop = future.result()
            row |= self.compiled(row, loop)
            row["checked"] = self.args.check and self.check(row, loop, shared)
            loop.run()
            return loop
        return None

    def _time(self, programs: Sequence[tuple[Row, Loop]]) -> None:
        """Times programs in turns; adds the times and what follows from them to their rows."""
        with _errors_go_into(*(row for row, _ in programs)):
            turns = [[loop.run() for _, loop in programs] for _ in range(self.args.repeats)]
            for i, (row, loop) in enumerate(programs):
                times = [turn[i] for turn in turns]
                row["wall"] = {
                    "median_us": statistics.median(times),
                    "low_us": min(times),
                    "high_us": max(times),
                    "all_us": times,
                }
                row |= self._device_time(loop)
                row |= self.results(row)
                if "floor_us" in row:  # the least time, which some commands' `results` give
                    row["of_floor"] = row["floor_us"] / time_of(row)

    def _device_time(self, loop: Loop) -> Row:
        """Returns "device", the dict of a `DeviceTime` or None, and perhaps a "device_error"."""
        if self.args.device_timer == "none" or jax.default_backend() != "gpu":
            return {"device": None}
        try:
            return {"device": loop.device_time(min(self.args.repeats, 2), self.spaced)._asdict()}
        except Exception as error:
            return {"device": None, "device_error": _first_line(error)}


def run(bench: Bench) -> int:
    """Runs a bench command; returns its exit status: 1 if a program failed, else 0."""
    args = bench.args
    # Without --ranks, CPUs get 8 virtual devices.
    devices = find_devices(max(args.ranks or [8]))
    ranks = args.ranks or bench.default_ranks(len(devices))
    if max(ranks) > len(devices):
        raise Error(f"--ranks is {max(ranks)}, but there are only {len(devices)} devices")
    cases = [case for case in bench.cases(devices, ranks) if case]
    if not cases:
        raise Error("--implementations and --baselines leave nothing to measure")
    machine = f"{devices_in_words(devices[: max(ranks)])}, jax {jax.__version__}"
    print("\n".join([machine, *bench.header(), *bench.copies]), flush=True)

    rows: list[Row] = []

    def save() -> None:
        facts = {"devices": devices_in_words(devices), **bench.facts, "rows": rows}
        report.save_json(args.json, facts)

    for case in cases:
        rows += bench.measure(case)
        report.progress("")
        save()  # after each case, so that an interrupted run keeps its results
    bench.compare(rows)
    save()
    lines = ["", *bench.table(rows), *report.notes(rows, bench.name)]
    if args.by_kernel:
        lines += report.kernels(rows, bench.name)
    print("\n".join(lines), flush=True)
    return 1 if any("error" in row for row in rows) else 0


def find_devices(cpu_devices: int) -> list[jax.Device]:
    """Returns JAX's devices: on CPUs `cpu_devices`, unless XLA_FLAGS set it or JAX has started."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    try:
        return jax_compat.devices()
    except RuntimeError as error:
        raise Error(f"JAX finds no device: {error}") from error


def devices_in_words(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} x {devices[0].device_kind}"


def add_flags(flags: Flags, check: str, repeats: int, least: int = 1) -> None:
    """Adds the flags of all benchmarks: --check compares `check`, --iterations is >= `least`."""
    flags.add("ranks", None, "N, the numbers of ranks. Default: all devices.", some(integer))
    calls = "Dependent calls in one timed loop. Default: more for few tokens."
    flags.add("iterations", None, calls, at_least(least))
    flags.add("repeats", str(repeats), "How many times each loop is run and timed.", integer)
    timers = "What measures device times: on GPUs JAX's profiler, or nothing."
    flags.add("device_timer", "auto", timers, choice(("auto", "none")))
    flags.switch("by_kernel", "Print each result's device time by kernel, below the table.")
    flags.switch("check", f"Before timing, compare {check}; a difference is an error.")
    flags.json()


def iterations(args: Args, num_tokens: int, on_cpus: int, many: int, few: int) -> int:
    """Returns --iterations, or its default: on GPUs `many` for many tokens and `few` for few.

    On GPUs a compiled loop takes about 450 microseconds to start, so short calls must be more.
    """
    if args.iterations is not None:
        return args.iterations
    if jax.default_backend() != "gpu":
        return on_cpus
    return few if num_tokens <= FEW_TOKENS else many


def check_available(reasons: Mapping[str, str | None]) -> None:
    """Raises `Error` if one of --implementations cannot run; `reasons` says why, by name."""
    for name, why in reasons.items():
        if why:
            raise Error(f"--implementations: {name} cannot run here: {why}")


def held_bytes(compiled: Any) -> dict[str, int]:
    """Returns the bytes that a compiled program holds on a device."""
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return {"peak_bytes": peak, "temp_bytes": memory.temp_size_in_bytes}


def speedups(rows: Sequence[Row], field: str, keys: Sequence[str], **base: Any) -> None:
    """Adds `field`: a row's speed-up over the row with the same `keys` and the values `base`."""
    timed = [row for row in rows if "wall" in row]
    bases = {tuple(row[key] for key in keys): row for row in timed if row.items() >= base.items()}
    for row in timed:
        other = bases.get(tuple(row[key] for key in keys))
        if other is not None and other is not row:
            row[field] = other["wall"]["median_us"] / row["wall"]["median_us"]


def time_of(row: Row) -> float:
    """Returns the slowest rank's device time if it was measured, else the wall time."""
    return row["device"]["slowest_us"] if row["device"] else row["wall"]["median_us"]


def agree(got: Any, wanted: Any, tolerance: float, exceptions: float = 0.0) -> None:
    """Raises AssertionError unless two pytrees of arrays agree; quantized arrays are dequantized.

    Integers must be equal. Two rows of floats (along the last axis) differ if the norm of their
    difference is more than `tolerance` times the sum of the expected row's norm and the root mean
    square of all expected rows' norms. The share `exceptions` of an array's rows may differ.
    """
    got, wanted = _dequantized(got), _dequantized(wanted)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (got, wanted)]
    assert structures[0] == structures[1], f"{structures[0]} is not {structures[1]}"
    found, expected = jax.tree.leaves_with_path(got), jax.tree.leaves(wanted)
    for (path, array), right in zip(found, expected, strict=True):
        name = jax.tree_util.keystr(path)
        assert array.shape == right.shape, f"{name}: shape {array.shape}, not {right.shape}"
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            assert np.array_equal(array, right), f"{name}: {array} is not {right}"
        elif array.size:
            count, worst = map(float, _differing_rows(array, right, tolerance))
            rows = array.size // array.shape[-1]
            assert count <= exceptions * rows, (
                f"{name}: {count:.0f} of {rows} rows differ, by up to {worst:.3g} of a row's norm "
                f"(tolerance {tolerance:.3g})"
            )


def _dequantized(tree: Any) -> Any:
    def is_quantized(leaf: Any) -> bool:
        return isinstance(leaf, QuantizedArray)

    def numbers(leaf: Any) -> Any:
        return leaf.dequantize(jnp.float32) if is_quantized(leaf) else leaf

    return jax.tree.map(numbers, tree, is_leaf=is_quantized)


@jax.jit
def _differing_rows(
    got: jax.Array, wanted: jax.Array, tolerance: float
) -> tuple[jax.Array, jax.Array]:
    """Returns how many rows differ by more than `tolerance`, and the largest difference."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    error = jnp.linalg.norm(got - wanted, axis=-1)
    size = jnp.linalg.norm(wanted, axis=-1)
    relative = error / jnp.maximum(size + jnp.sqrt(jnp.mean(size**2)), 1e-30)
    # Written as ~(... <= ...), the comparison also counts rows with NaN as different.
    return jnp.sum(~(relative <= tolerance)), jnp.max(relative)


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def _errors_go_into(*rows: Row) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        for row in rows:
            row["error"] = _first_line(error)
