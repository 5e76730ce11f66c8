"""`python -m jax_ep bench collectives`: times every algorithm of the collectives.

Prints a table for each operation and number of ranks, with the shape of the whole array, its MB
(10^6 bytes), a column for each algorithm, the fastest algorithm, its speed-up over the function of
`jax.lax`, and the choice of algorithm=None. Times are in-loop wall times and, on GPUs, device times
of everything that a call launches; `jax_ep.bench.timing` describes both. `--write_table` writes the
resulting choices in the form of `jax_ep/collectives/table.json`, which `algorithm=None` reads.

NCCL's own use of NVLink multicast is off unless NCCL_NVLS_ENABLE is set, since many hosts lack
multicast and the kernels do not need it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.bench import measuring, report
from jax_ep.bench.baselines import AXIS
from jax_ep.bench.flags import BenchFlags
from jax_ep.bench.timing import Loop
from jax_ep.collectives import api as collectives
from jax_ep.collectives import selection, xla
from jax_ep.collectives import table as collectives_table
from jax_ep.collectives.algorithms import ALGORITHMS, Problem
from jax_ep.flags import Error
from jax_ep.runtime import availability

if TYPE_CHECKING:
    from pallas_kernels.collectives.tiles import TilePlan

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_to_all": collectives.all_to_all,
    "all_reduce_rms_norm": collectives.all_reduce_rms_norm,
}
OPERATIONS = tuple(FUNCTIONS)
# Not measured by default: "fused", which is one of two others, and "multimem", which needs
# multicast.
MEASURED = {
    op: tuple(name for name in algorithms.names if name not in ("fused", "multimem"))
    for op, algorithms in ALGORITHMS.items()
}
LAX_NAMES = {
    "all_reduce": "lax.psum",
    "all_gather": "lax.all_gather",
    "reduce_scatter": "lax.psum_scatter",
    "all_to_all": "lax.all_to_all",
    "all_reduce_rms_norm": "lax.psum + norm",
}
_GPU_ROWS = [8, 32, 64, 128, 256, 512, 1024, 2048, 4096]
_CPU_ROWS = [32, 128]
_ALGORITHM_NAMES = sorted({name for algorithms in ALGORITHMS.values() for name in algorithms.names})

FLAGS = BenchFlags()
_OPS = FLAGS.choices("ops", OPERATIONS, OPERATIONS, "The operations to measure.")
_RANKS = FLAGS.ranks("those of 2, 4 and 8 that there are devices for")
_ROWS = FLAGS.integers(
    "rows",
    None,
    "Numbers of rows of the whole array, a multiple of the ranks each. Default: 8 and the powers "
    "of two from 32 to 4096 on GPUs, 32,128 on CPUs.",
)
_HIDDEN = FLAGS.integer(
    "hidden",
    None,
    "H, the hidden size: elements of a row. Default: 8192 on GPUs and 256 on CPUs.",
)
_DTYPE = FLAGS.dtype("the elements")
_IMPLEMENTATIONS = FLAGS.choices(
    "implementations",
    None,
    _ALGORITHM_NAMES,
    "This library's implementations of the collectives to measure, by the name that their "
    "argument `algorithm` takes. xla: the function of jax.lax. Default: all that run here but "
    "fused and multimem.",
)
_PLANS = FLAGS.strings(
    "plans",
    "Plans to measure each kernel with besides its own: thread blocks, warpgroups of a block and "
    "vectors of a thread, such as 64x4x1,32x4x2. Default: none.",
)
_CHECK = FLAGS.check("results with sums in float64")
_TIMING = FLAGS.timing(50, 7, least_iterations=10)
_SECONDS = FLAGS.seconds(1200.0)
_WRITE_TABLE = FLAGS.write_table()
_JSON = FLAGS.json()
_PLOT = FLAGS.plot("the wall times over the size")


@dataclasses.dataclass(frozen=True)
class Case:
    """A measurement: one operation on a whole array of `rows` by `hidden` elements."""

    op: str
    ranks: int
    rows: int
    hidden: int
    dtype: Any

    @property
    def num_bytes(self) -> int:
        return self.rows * self.hidden * jnp.dtype(self.dtype).itemsize

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a rank's operand."""
        rows = self.rows // self.ranks if self.op == "all_gather" else self.rows
        return jax.ShapeDtypeStruct((rows, self.hidden), self.dtype)

    @property
    def problem(self) -> Problem:
        """The collective as its algorithm is selected."""
        place = availability.Machine(jax.devices()[: self.ranks])
        x = self.x
        others = [x, jax.ShapeDtypeStruct((self.hidden,), self.dtype)]
        operands = [x, *(others if self.op == "all_reduce_rms_norm" else [])]
        return Problem(self.op, operands, self.ranks, (AXIS,), place)

    def operands(self, mesh: Mesh) -> Callable[[], tuple[jax.Array, ...]]:
        """Compiles a function that makes the operands, [N * B, ...] each, with B rows for a rank.

        Values are normally distributed; every rank has the same residual and scale.
        """
        shapes: list[tuple[int, ...]] = [(self.ranks * self.x.shape[0], self.hidden)]
        if self.op == "all_reduce_rms_norm":
            shapes += [(self.rows, self.hidden), (self.hidden,)]
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))

        def make() -> tuple[jax.Array, ...]:
            keys = jax.random.split(jax.random.key(self.rows), len(shapes))
            arrays = [
                jax.random.normal(key, shape, self.dtype)
                for key, shape in zip(keys, shapes, strict=True)
            ]
            same = [jnp.concatenate([array] * self.ranks) for array in arrays[1:]]
            return (arrays[0], *same)

        return jax.jit(make, out_shardings=sharding).lower().compile()

    def step(self, algorithm: str) -> Callable[[Any], Any]:
        """Returns the per-rank function that is timed: the operation by an algorithm."""
        function = FUNCTIONS[self.op]
        return lambda state: function(*state, AXIS, algorithm=algorithm)

    def loop(self, algorithm: str, operands: tuple[jax.Array, ...], mesh: Mesh) -> Loop:
        """Compiles the loop that times an algorithm on the operands."""
        kind: type[Loop] = Loop
        if algorithm == "xla" and self.op in ("all_reduce", "all_reduce_rms_norm"):
            kind = _InPlaceLoop
        return kind(
            lambda *args: args, self.step(algorithm), operands, mesh, _TIMING.iterations.value
        )

    def expected(self, state: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Computes the results from the operands, in float64; both have the ranks stacked."""
        x = np.asarray(state[0])
        if self.op == "all_gather":
            return [
                np.broadcast_to(x.reshape(-1, self.hidden), (self.ranks, self.rows, self.hidden))
            ]
        if self.op == "all_to_all":
            parts = x.reshape(self.ranks, self.ranks, -1, self.hidden)
            return [parts.swapaxes(0, 1).reshape(x.shape)]
        total = np.zeros(x.shape[1:])
        for part in x:
            total += part.astype(np.float64)
        if self.op == "reduce_scatter":
            return [total.reshape(self.ranks, -1, self.hidden)]
        if self.op == "all_reduce":
            return [np.broadcast_to(total, x.shape)]
        total += state[1][0].astype(np.float64)
        mean_square = np.mean(total**2, axis=-1, keepdims=True)
        normalized = total / np.sqrt(mean_square + 1e-6) * state[2][0].astype(np.float64)
        return [np.broadcast_to(a, x.shape) for a in (normalized, total)]

    def check(self, loop: Loop, algorithm: str) -> None:
        state, outputs = jax.device_get((loop.state, loop.outputs()))
        eps = float(jnp.finfo(self.dtype).eps)
        exact = self.op in ("all_gather", "all_to_all")
        # XLA may round after every addition; the sum of N normal numbers is about sqrt(N).
        tolerance = 0.0 if exact else 8 * eps * self.ranks
        if algorithm != "xla" and self.op in ("all_reduce", "reduce_scatter"):
            tolerance = eps
        results = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        for result, expected in zip(results, self.expected(state), strict=True):
            error = np.abs(result.astype(np.float64) - expected)
            bound = tolerance * np.maximum(np.abs(expected), 1)
            worst = float(np.max(error - bound))
            assert worst <= 0, f"off by up to {error.max():.3g}, {worst:.3g} more than allowed"
        if self.op in ("all_reduce", "all_reduce_rms_norm"):
            same = all(np.array_equal(result[0], other) for result in results for other in result)
            assert same, "ranks disagree"


class _InPlaceLoop(Loop):
    """A loop of `lax.psum` in place: each call sums the result of the call before.

    If all calls had the same operand, XLA would copy the operand for each call, which programs
    seldom need.
    """

    def _loop(
        self, state: Any, after: Callable[[jax.Array, list[jax.Array]], jax.Array], unroll: int
    ) -> Any:
        first, *others = state

        def body(_, carry):
            total, link = carry
            total, link = jax.lax.optimization_barrier((total, link))
            total = jax.lax.psum(total, AXIS)
            out = []
            if others:
                residual = xla.add_residual(total, others[0])
                out = [xla.rms_norm(residual, others[1], 1e-6, total.dtype), residual]
            total, *out = jax.lax.optimization_barrier((total, *out))
            return total, after(link, [total, *out])

        start = first, jnp.float32(0)
        total, link = jax.lax.fori_loop(0, self.iterations, body, start, unroll=unroll)
        return total.reshape(-1)[0], link


@dataclasses.dataclass
class Column:
    """A column of the table: an algorithm, with the plan to run it with; None: its default plan."""

    algorithm: str
    plan: TilePlan | None = None

    @property
    def name(self) -> str:
        if self.plan is None:
            return self.algorithm
        sizes = (self.plan.num_blocks, self.plan.num_warpgroups, self.plan.num_vectors)
        return f"{self.algorithm} {'x'.join(map(str, sizes))}"


def run() -> int:
    started = time.monotonic()
    multicast = os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    FLAGS.check_outputs()
    if _WRITE_TABLE.value:
        read_table(_WRITE_TABLE.value)
    devices = measuring.find_devices(max(_RANKS.value or [8]))
    ranks = _RANKS.value or [count for count in (2, 4, 8) if count <= len(devices)] or [1]
    measuring.check_ranks(ranks, len(devices))
    on_gpu = devices[0].platform == "gpu"
    rows = _ROWS.value or (_GPU_ROWS if on_gpu else _CPU_ROWS)
    _check_flags(ranks, rows)
    _check_implementations(ranks)
    hidden = _HIDDEN.value or (8192 if on_gpu else 256)
    kind = measuring.devices_in_words(devices)
    print(f"{kind}, jax {jax.__version__}, {_DTYPE.value}")
    if on_gpu:
        print(f"NCCL_NVLS_ENABLE={multicast}")

    records: list[dict[str, Any]] = []
    for num_ranks in ranks:
        mesh = Mesh(np.asarray(devices[:num_ranks]), (AXIS,))
        for op in _OPS.value:
            cases = [Case(op, num_ranks, n, hidden, jnp.dtype(_DTYPE.value)) for n in rows]
            found = _measure(cases, mesh, started)
            records += found
            if _JSON.value:  # as it goes: a run that is ended early leaves what it has
                measuring.write_json(_JSON.value, records, nccl_nvls_enable=multicast)
            for clock in ("wall", "device"):
                if text := table(found, clock):
                    print(f"\n{op}, {num_ranks} ranks: {clock} time of one call, us\n{text}")
            extra = report.notes(found, _name)
            extra += report.kernels(found, _name) if _TIMING.by_kernel.value else []
            if extra:
                print("\n".join(extra))
            sys.stdout.flush()
    print(f"\n{time.monotonic() - started:.0f} s")

    if _JSON.value:
        measuring.write_json(_JSON.value, records, nccl_nvls_enable=multicast)
    if _WRITE_TABLE.value:
        write_table(_WRITE_TABLE.value, records, devices)
    if _PLOT.value:
        plot(records, _PLOT.value, f"arrays of {hidden} columns, {_DTYPE.value}\n{kind}")
    return 1 if any(not record.get("out_of_time") for record in records if "error" in record) else 0


def table(records: Sequence[dict[str, Any]], clock: str) -> str:
    """Renders results by one clock, "wall" or "device", as fixed-width text; "" without results."""
    timed = [record for record in records if record.get(clock)]
    if not timed:
        return ""
    columns = list(dict.fromkeys(record["implementation"] for record in timed))
    header = ["shape", "MB", *columns, "best", f"vs {LAX_NAMES[timed[0]['op']]}", "auto", "checked"]
    lines = []
    for rows in dict.fromkeys(record["rows"] for record in timed):
        times = {
            record["implementation"]: record[clock]["median_us"]
            for record in timed
            if record["rows"] == rows
        }
        record = next(record for record in timed if record["rows"] == rows)
        best = min(times, key=lambda name: times[name])
        speedup = f"{times['xla'] / times[best]:.2f}x" if "xla" in times else ""
        cells = [f"{times[name]:.1f}" if name in times else "" for name in columns]
        shape = f"({rows}, {record['hidden']})"
        size = f"{record['bytes'] / 1e6:.2f}"
        checked = "yes" if record["checked"] else ""
        lines.append([shape, size, *cells, best, speedup, record["auto"], checked])
    return "\n".join(report.fixed_width(header, lines))


def plot(records: Sequence[dict[str, Any]], path: str, sizes: str) -> None:
    """Draws wall times over the array's size to a file: a panel for each operation and N."""
    panels: report.Panels = {}
    for record in (record for record in records if record.get("wall")):
        panel = panels.setdefault("{op}, {ranks} ranks".format(**record), {})
        points = panel.setdefault(record["implementation"], [])
        points.append((record["bytes"] / 1e6, record["wall"]["median_us"]))
    report.lines(
        panels,
        path,
        title=f"Times of the collectives: {sizes}",
        x_label="MB (10^6 bytes) of the whole array",
        y_label="in-loop wall time, us",
    )


def _name(record: dict[str, Any]) -> str:
    return "{op}, {ranks} ranks, {rows} rows, {implementation}".format(**record)


def read_table(path: str) -> dict[str, Any]:
    """Reads the table of the file that will be written; returns {} if there is no file yet."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except ValueError as error:
        raise Error(f"--write_table: {path!r} holds no table to merge into: {error}") from error
    if not isinstance(found, dict):
        raise Error(f"--write_table: {path!r} holds no table to merge into")
    return found


def write_table(
    path: str, records: Sequence[dict[str, Any]], devices: Sequence[jax.Device]
) -> None:
    """Merges the choices that follow from measured times into a file's table, or makes the file.

    Device times are used if every algorithm has them at every size, and else wall times. The times
    of other sizes that the file has are kept, if they are of the same machine, jax, clock and day.
    """
    merged = read_table(path)
    capability = getattr(devices[0], "compute_capability", None) or devices[0].platform
    for op, ranks in dict.fromkeys((record["op"], record["ranks"]) for record in records):
        timed = [
            record
            for record in records
            if (record["op"], record["ranks"]) == (op, ranks)
            and record["implementation"] in MEASURED[op]  # with its own plan
            and record.get("wall")
        ]
        clock = "device" if all(record.get("device") for record in timed) else "wall"
        source = {
            "machine": measuring.devices_in_words(devices[:ranks]),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "jax": jax.__version__,
            "clock": clock,
        }
        times: dict[int, dict[str, float]] = {}
        before = merged.get(capability, {}).get(op, {}).get(str(ranks), {})
        if before.items() >= source.items():
            times = {int(size): dict(at_size) for size, at_size in before["us"].items()}
        for record in timed:
            times.setdefault(record["bytes"], {})[record["implementation"]] = record[clock][
                "median_us"
            ]
        sizes = sorted(size for size, at_size in times.items() if "xla" in at_size)
        if not sizes:
            continue
        merged.setdefault(capability, {}).setdefault(op, {})[str(ranks)] = {
            "choices": collectives_table.choices(sizes, [times[size] for size in sizes]),
            **source,
            "us": {
                str(size): {name: round(us, 2) for name, us in times[size].items()}
                for size in sizes
            },
        }
    text = re.sub(
        r"\[\s+([^\s\[\]]+)\s+([^\s\[\]]+)\s+\]", r"[\1 \2]", json.dumps(merged, indent=1)
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def _measure(cases: Sequence[Case], mesh: Mesh, started: float) -> list[dict[str, Any]]:
    """Compiles the loops of all cases in parallel, and then times them one after the other."""

    def build(case: Case, column: Column, operands: tuple[jax.Array, ...]) -> Loop | Exception:
        if time.monotonic() - started > _SECONDS.value:
            return TimeoutError(f"not started within {_SECONDS.value:g} s")
        try:
            if column.plan is None:
                return case.loop(column.algorithm, operands, mesh)
            from jax_ep.collectives.pallas import forced_plan  # not on a machine without GPUs

            with forced_plan(column.plan):
                return case.loop(column.algorithm, operands, mesh)
        except Exception as error:  # a failed compilation is a result too
            return error

    measuring.progress(f"{cases[0].op}, {cases[0].ranks} ranks: compiling")
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        work = []
        for case, make in zip(
            cases, pool.map(lambda case: case.operands(mesh), cases), strict=True
        ):
            operands = make()
            work += [
                (case, column, pool.submit(build, case, column, operands))
                for column in _columns(case)
            ]
        programs = [(case, column, future.result()) for case, column, future in work]
    del work
    records = []
    for case, column, loop in programs:
        record: dict[str, Any] = {
            "op": case.op,
            "ranks": case.ranks,
            "rows": case.rows,
            "hidden": case.hidden,
            "bytes": case.num_bytes,
            "implementation": column.name,
            "checked": _CHECK.value,
        }
        records.append(record)
        if time.monotonic() - started > _SECONDS.value:
            loop = TimeoutError(f"not started within {_SECONDS.value:g} s")
        try:
            if isinstance(loop, Exception):
                raise loop
            measuring.progress(f"{case.op}, {case.ranks} ranks, {case.rows} rows, {column.name}")
            if _CHECK.value:
                case.check(loop, column.algorithm)
            record["auto"] = selection.select(None, case.problem)
            record |= measuring.times(loop, _TIMING.repeats.value, _TIMING.timer.value)
        except Exception as error:  # one that fails must not cost the others their results
            record["error"] = measuring.first_line(error)
            record["out_of_time"] = isinstance(error, TimeoutError)
    measuring.progress("")
    return records


def _columns(case: Case) -> list[Column]:
    op, names = case.op, _IMPLEMENTATIONS.value
    if names is None:
        available = [n for n in ALGORITHMS[op].available(case.problem) if n in MEASURED[op]]
    else:
        available = [name for name in names if name in ALGORITHMS[op].names]
    columns = [Column(name) for name in available if case.ranks > 1 or name == "xla"]
    plans = [_plan(text) for text in _PLANS.value]
    kernels = [column for column in columns if column.algorithm not in ("xla", "multimem")]
    for plan in plans:
        columns += [Column(kernel.algorithm, plan) for kernel in kernels]
    return columns


def _plan(text: str) -> TilePlan:
    from pallas_kernels.collectives.tiles import TilePlan  # not on a machine without GPUs

    num_blocks, num_warpgroups, num_vectors = map(int, text.split("x"))
    return TilePlan(num_blocks, num_warpgroups, num_vectors)


def _check_implementations(ranks: Sequence[int]) -> None:
    """Raises `Error` for what is named and would not be measured."""
    names = _IMPLEMENTATIONS.value
    refused = availability.Machine(jax.devices()[: max(ranks)]).unavailable_reason((AXIS,))
    for name in names or []:
        if not any(name in ALGORITHMS[op].names for op in _OPS.value):
            ops = ", ".join(op for op, known in ALGORITHMS.items() if name in known.names)
            raise Error(f"--implementations: {name} is of {ops}, and --ops has none of them")
        if refused and name not in ("xla", "unfused"):
            raise Error(f"--implementations: {name} cannot run here: {refused}")
        if name != "xla" and max(ranks) == 1:
            raise Error(f"--implementations: {name} needs more than one rank")
    if _PLANS.value and (refused or names and set(names) <= {"xla", "unfused", "multimem"}):
        raise Error(f"--plans: no kernel is measured: {refused or 'see --implementations'}")
    if _WRITE_TABLE.value and names and "xla" not in names:
        raise Error("--write_table: compares with xla, which --implementations must name")


def _check_flags(ranks: Sequence[int], rows: Sequence[int]) -> None:
    for text in _PLANS.value:
        sizes = text.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise Error(f"--plans: {text!r} is not like 64x4x1")
    for num_ranks in ranks:
        for count in rows:
            if count % num_ranks:
                raise Error(f"--rows: {count} is not a multiple of {num_ranks} ranks")
