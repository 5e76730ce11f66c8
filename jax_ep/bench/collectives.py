"""`python -m jax_ep bench collectives`: times every algorithm of this library's collectives.

Prints a table for each operation and number of ranks. A line has the shape of the whole array, its
size in MB (10^6 bytes), the time of each algorithm, the fastest algorithm, its speed-up over the
function of `jax.lax`, and the algorithm that the library selects for algorithm=None. Times are
in-loop wall times and, on GPUs, device times of everything that a call launches;
`jax_ep.bench.timing` describes both. `--write_table` writes the fastest algorithms to a file like
`jax_ep/collectives/table.json`, the table by which the library selects.

The command turns off NCCL's use of NVLink multicast, unless NCCL_NVLS_ENABLE is set. Many hosts
lack multicast, and the kernels that are measured by default do not use it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.bench import measuring, report, runner
from jax_ep.bench.baselines import AXIS
from jax_ep.bench.flags import BenchFlags
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop
from jax_ep.collectives import api as collectives
from jax_ep.collectives import selection, xla
from jax_ep.collectives import table as collectives_table
from jax_ep.collectives.algorithms import ALGORITHMS
from jax_ep.collectives.problem import Problem
from jax_ep.flags import Error
from jax_ep.runtime import availability

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_to_all": collectives.all_to_all,
    "all_reduce_rms_norm": collectives.all_reduce_rms_norm,
}
OPERATIONS = tuple(FUNCTIONS)
# Maps each operation to the algorithms that are measured by default. "fused" is left out because it
# only selects "fused_one_shot" or "fused_two_shot", and "multimem" because it needs multicast.
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
_ROWS = FLAGS.integers(
    "rows",
    None,
    "Numbers of rows of the whole array, each a multiple of the number of ranks. Default: 8 and "
    "the powers of two from 32 to 4096 on GPUs, 32,128 on CPUs.",
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
    "This library's implementations of the collectives to measure, named like the values of their "
    "argument `algorithm`. xla: the function of jax.lax. Default: all that run here, except fused "
    "and multimem.",
)
_PLANS = FLAGS.strings(
    "plans",
    "Plans to measure each kernel with, besides the plan that it chooses. A plan such as 64x4x1 is "
    "the numbers of thread blocks, of warpgroups of a block and of vectors of a thread. Default: "
    "none.",
)
_TIMING = FLAGS.timing(50, 7, least_iterations=10)
_WRITE_TABLE = FLAGS.write_table()
_SHARED = FLAGS.share(
    plot="the wall times over the size",
    ranks="2, 4 and 8, as far as there are devices",
    timing=_TIMING,
    check=FLAGS.check("results with sums in float64"),
    seconds=1200.0,
)


def run() -> int:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return runner.run(CollectivesBench(), by_case=True)


class CollectivesCase(runner.Case):
    """Measures one collective on one number of ranks, for all array sizes, algorithms and plans.

    A plan is the launch configuration of a kernel: how many thread blocks it has, how many
    warpgroups a block has, and how many 16-byte vectors a thread holds at a time.
    """

    def __init__(self, op: str, ranks: int, rows: Sequence[int], on_gpu: bool):
        self.op, self.num_ranks = op, ranks
        self.dtype = jnp.dtype(_DTYPE.value)
        self.hidden = _HIDDEN.value or (8192 if on_gpu else 256)
        super().__init__(
            f"{op}, {ranks} ranks",
            [
                {
                    "op": op,
                    "ranks": ranks,
                    "rows": count,
                    "hidden": self.hidden,
                    "bytes": count * self.hidden * self.dtype.itemsize,
                    "algorithm": algorithm,
                    "plan": plan,
                    "implementation": f"{algorithm} {plan}" if plan else algorithm,
                    "auto": selection.select(None, self.problem(count)),
                }
                for count in rows
                for algorithm, plan in self.columns(count)
            ],
        )

    def columns(self, rows: int) -> list[tuple[str, str]]:
        """Returns the (algorithm, plan) pairs to measure for an array of `rows` rows.

        A plan is a kernel's launch configuration as text: "64x4x1" is 64 thread blocks of 4
        warpgroups, with 1 vector per thread. "" is the plan that the algorithm chooses itself.
        """
        names = _IMPLEMENTATIONS.value
        if names is None:
            available = ALGORITHMS[self.op].available(self.problem(rows))
            names = [name for name in available if name in MEASURED[self.op]]
        names = [name for name in names if name in ALGORITHMS[self.op].names]
        names = [name for name in names if self.num_ranks > 1 or name == "xla"]
        kernels = [name for name in names if name not in ("xla", "multimem")]
        return [(name, "") for name in names] + [
            (name, plan) for plan in _PLANS.value for name in kernels
        ]

    def x(self, rows: int) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a rank's operand for a whole array of `rows` rows.

        For all_gather, the whole array is the gathered result, and the operand is one of its N
        equal parts. For the other operations, the whole array is the operand itself.
        """
        rows = rows // self.num_ranks if self.op == "all_gather" else rows
        return jax.ShapeDtypeStruct((rows, self.hidden), self.dtype)

    def problem(self, rows: int) -> Problem:
        """Describes the collective on a whole array of `rows` rows: operands, ranks and machine.

        From a `Problem`, the library selects an algorithm, and an algorithm tells whether it can
        run.
        """
        x = self.x(rows)
        others = [x, jax.ShapeDtypeStruct((self.hidden,), self.dtype)]
        operands = [x, *(others if self.op == "all_reduce_rms_norm" else [])]
        place = availability.Machine(jax.devices()[: self.num_ranks])
        return Problem(self.op, operands, self.num_ranks, (AXIS,), place)

    def prepare(self) -> tuple[Mesh, dict[int, tuple[jax.Array, ...]]]:
        """Makes the mesh and, for each number of rows, the operands as sharded arrays.

        An operand is [N * B, ...], B rows for each of the N ranks, with normally distributed
        values. all_reduce_rms_norm takes two more operands, a residual and a scale, which are equal
        on all ranks.
        """
        mesh = Mesh(np.asarray(jax.devices()[: self.num_ranks]), (AXIS,))
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))

        def make(rows: int) -> tuple[jax.Array, ...]:
            shapes: list[tuple[int, ...]] = [(self.num_ranks * self.x(rows).shape[0], self.hidden)]
            if self.op == "all_reduce_rms_norm":
                shapes += [(rows, self.hidden), (self.hidden,)]
            keys = jax.random.split(jax.random.key(rows), len(shapes))
            first, *others = [
                jax.random.normal(key, shape, self.dtype)
                for key, shape in zip(keys, shapes, strict=True)
            ]
            return first, *(jnp.concatenate([array] * self.num_ranks) for array in others)

        compiled = jax.jit(make, static_argnums=0, out_shardings=sharding)
        return mesh, {rows: compiled(rows) for rows in {row["rows"] for row in self.rows}}

    def build(self, row: Row, shared: Any) -> Loop:
        mesh, operands = shared
        kind: type[Loop] = Loop
        if row["algorithm"] == "xla" and self.op in ("all_reduce", "all_reduce_rms_norm"):
            kind = _InPlaceLoop

        def step(state: Any) -> Any:
            return FUNCTIONS[self.op](*state, AXIS, algorithm=row["algorithm"])

        with _plan(row["plan"]):
            return kind(
                lambda *args: args, step, operands[row["rows"]], mesh, _TIMING.iterations.value
            )

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        state, outputs = jax.device_get((loop.state, loop.outputs()))
        eps = float(jnp.finfo(self.dtype).eps)
        exact = self.op in ("all_gather", "all_to_all")
        # XLA may round to the operands' dtype after each of the N - 1 additions of a sum over
        # ranks, so its tolerance grows with N. The kernels of all_reduce and reduce_scatter round
        # only once.
        tolerance = 0.0 if exact else 8 * eps * self.num_ranks
        if row["algorithm"] != "xla" and self.op in ("all_reduce", "reduce_scatter"):
            tolerance = eps
        results = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        for result, wanted in zip(results, expected(self.op, state), strict=True):
            error = np.abs(result.astype(np.float64) - wanted)
            bound = tolerance * np.maximum(np.abs(wanted), 1)
            worst = float(np.max(error - bound))
            assert worst <= 0, f"off by up to {error.max():.3g}, {worst:.3g} more than allowed"
        if self.op in ("all_reduce", "all_reduce_rms_norm"):
            same = all(np.array_equal(result[0], other) for result in results for other in result)
            assert same, "ranks disagree"
        return True


class CollectivesBench(runner.Bench):
    flags, shared = FLAGS, _SHARED

    def default_ranks(self, devices: Sequence[jax.Device]) -> list[int]:
        return [count for count in (2, 4, 8) if count <= len(devices)] or [1]

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[CollectivesCase]:
        if _WRITE_TABLE.value:
            read_table(_WRITE_TABLE.value)
        on_gpu = devices[0].platform == "gpu"
        rows = _ROWS.value or (_GPU_ROWS if on_gpu else _CPU_ROWS)
        _check_flags(ranks, rows)
        _check_implementations(ranks)
        self.facts = {"nccl_nvls_enable": os.environ["NCCL_NVLS_ENABLE"]}
        return [
            CollectivesCase(op, num_ranks, rows, on_gpu) for num_ranks in ranks for op in _OPS.value
        ]

    def header(self) -> list[str]:
        return [_DTYPE.value, f"NCCL_NVLS_ENABLE={self.facts['nccl_nvls_enable']}"]

    def name(self, row: Row) -> str:
        return "{op}, {ranks} ranks, {rows} rows, {implementation}".format(**row)

    def table(self, rows: Sequence[Row]) -> list[str]:
        """Renders a table of wall times and, if measured, tables of device times and of energies.

        The tables of times have a line for each array size. `rows` are the results of one operation
        on one number of ranks.
        """
        lines = []
        for clock in ("wall", "device"):
            if timed := [row for row in rows if row.get(clock)]:
                title = "{op}, {ranks} ranks: {0} time of one call, us".format(clock, **timed[0])
                lines += ["", title, *table(timed, clock)]
        if measured := [row for row in rows if row.get("energy")]:
            columns = Column("rows", "rows"), report.text("algorithm", "implementation")
            lines += ["", "energy of one call", *report.table((*columns, *report.ENERGY), measured)]
        return lines[1:]

    def compare(self, rows: list[Row]) -> None:
        """Writes the fastest algorithms to the file of --write_table, if the flag is given."""
        if _WRITE_TABLE.value:
            write_table(_WRITE_TABLE.value, rows, jax.devices())

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        """Draws wall times over array size, one panel per operation and number of ranks."""
        panels: report.Panels = {}
        for row in (row for row in rows if "wall" in row):
            panel = panels.setdefault("{op}, {ranks} ranks".format(**row), {})
            points = panel.setdefault(row["implementation"], [])
            points.append((row["bytes"] / 1e6, row["wall"]["median_us"]))
        sizes = f"arrays of {rows[0]['hidden']} columns, {_DTYPE.value}"
        report.lines(
            panels,
            path,
            title=f"Times of the collectives: {sizes}\n{machine}",
            x_label="MB (10^6 bytes) of the whole array",
            y_label="in-loop wall time, us",
        )


def expected(op: str, state: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Computes with NumPy the results of a collective on all ranks; sums are in float64.

    `op` is the name of the collective, and `state` has its operands. Operands and results have a
    leading axis of ranks, [N, ...].
    """
    x = np.asarray(state[0])
    num_ranks, hidden = len(x), x.shape[-1]
    if op == "all_gather":
        whole = x.reshape(-1, hidden)
        return [np.broadcast_to(whole, (num_ranks, *whole.shape))]
    if op == "all_to_all":
        parts = x.reshape(num_ranks, num_ranks, -1, hidden)
        return [parts.swapaxes(0, 1).reshape(x.shape)]
    total = np.zeros(x.shape[1:])
    for part in x:
        total += part.astype(np.float64)
    if op == "reduce_scatter":
        return [total.reshape(num_ranks, -1, hidden)]
    if op == "all_reduce":
        return [np.broadcast_to(total, x.shape)]
    total += state[1][0].astype(np.float64)
    mean_square = np.mean(total**2, axis=-1, keepdims=True)
    normalized = total / np.sqrt(mean_square + 1e-6) * state[2][0].astype(np.float64)
    return [np.broadcast_to(a, x.shape) for a in (normalized, total)]


def table(timed: Sequence[Row], clock: str) -> list[str]:
    """Renders the times of one operation as lines of text: a line per size, a column per algorithm.

    `clock` selects the times: "wall" (host) or "device" (profiler).
    """
    columns = list(dict.fromkeys(row["implementation"] for row in timed))
    header = ["shape", "MB", *columns, "best", f"vs {LAX_NAMES[timed[0]['op']]}", "auto", "checked"]
    lines = []
    for rows in dict.fromkeys(row["rows"] for row in timed):
        times = {
            row["implementation"]: row[clock]["median_us"] for row in timed if row["rows"] == rows
        }
        row = next(row for row in timed if row["rows"] == rows)
        best = min(times, key=lambda name: times[name])
        speedup = f"{times['xla'] / times[best]:.2f}x" if "xla" in times else ""
        cells = [f"{times[name]:.1f}" if name in times else "" for name in columns]
        shape = f"({rows}, {row['hidden']})"
        size = f"{row['bytes'] / 1e6:.2f}"
        checked = "yes" if row["checked"] else ""
        lines.append([shape, size, *cells, best, speedup, row["auto"], checked])
    return report.fixed_width(header, lines)


class _InPlaceLoop(Loop):
    """A timed loop in which each `lax.psum` reduces the previous call's result, in place.

    If every call had the same operand, XLA would copy the operand before each psum. Real programs
    seldom need that copy, so it must not be timed.
    """

    def _loop(
        self, state: Any, after: Callable[[jax.Array, list[jax.Array]], jax.Array], unroll: int
    ) -> Any:
        first, *others = state

        def body(_, carry):
            total, link = carry
            total, link = jax.lax.optimization_barrier((total, link))
            total = self._varying(jax.lax.psum(total, AXIS))
            out = []
            if others:
                residual = xla.add_residual(total, others[0])
                out = [xla.rms_norm(residual, others[1], 1e-6, total.dtype), residual]
            total, *out = jax.lax.optimization_barrier((total, *out))
            return total, self._varying(after(link, [total, *out]))

        start = self._varying((first, jnp.float32(0)))
        total, link = jax.lax.fori_loop(0, self.iterations, body, start, unroll=unroll)
        return total.reshape(-1)[0], link


def read_table(path: str) -> dict[str, Any]:
    """Reads the lookup table in the file of --write_table, into which new times will be merged.

    Returns {} if there is no file. Raises `Error` if the file does not hold a JSON object.
    """
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except ValueError as error:
        raise Error(
            f"--write_table: {path!r} exists and must hold a JSON object to merge times into, but "
            f"does not: {error}"
        ) from error
    if not isinstance(found, dict):
        raise Error(
            f"--write_table: {path!r} exists and must hold a JSON object to merge times into, but "
            f"holds a {type(found).__name__}"
        )
    return found


def write_table(path: str, records: Sequence[Row], devices: Sequence[jax.Device]) -> None:
    """Writes the fastest algorithm for each operation, number of ranks and size to a lookup table.

    An existing table in the file is updated. The algorithms of an operation on a number of ranks
    are compared by device time if all of them have device times at every size, and else by wall
    time. Times that the file already has for other array sizes are kept only if they come from the
    same machine, JAX version, clock ("device" or "wall") and day as the new ones.

    Args:
      path: the file to write.
      records: the rows of results.
      devices: the devices of the measurement.
    """
    merged = read_table(path)
    capability = getattr(devices[0], "compute_capability", None) or devices[0].platform
    for op, ranks in dict.fromkeys((record["op"], record["ranks"]) for record in records):
        timed = [
            record
            for record in records
            if (record["op"], record["ranks"]) == (op, ranks)
            # Leaves out times with a plan from --plans. Their field "implementation" names the
            # plan, too, as in "one_shot 64x4x1", so it is not in MEASURED.
            and record["implementation"] in MEASURED[op]
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


def _plan(text: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which kernels are compiled with the plan `text`, such as "64x4x1".

    A plan is a launch configuration: "64x4x1" is 64 thread blocks of 4 warpgroups, with 1 vector
    per thread. With "", kernels choose their plan themselves.
    """
    if not text:
        return contextlib.nullcontext()
    # Imported here, because it loads Mosaic, which machines without GPUs may lack.
    from jax_ep.collectives.pallas import forced_plan
    from pallas_kernels.collectives.tiles import TilePlan

    return forced_plan(TilePlan(*map(int, text.split("x"))))


def _check_implementations(ranks: Sequence[int]) -> None:
    """Raises `Error` if --implementations, --plans or --write_table cannot be followed here.

    Examples are an algorithm that cannot run on this machine, and --plans if no kernel is measured.
    """
    names = _IMPLEMENTATIONS.value
    refused = availability.Machine(jax.devices()[: max(ranks)]).unavailable_reason((AXIS,))
    for name in names or []:
        if not any(name in ALGORITHMS[op].names for op in _OPS.value):
            ops = ", ".join(op for op, known in ALGORITHMS.items() if name in known.names)
            raise Error(f"--implementations: {name} needs one of these operations in --ops: {ops}")
        if refused and name not in ("xla", "unfused"):
            raise Error(f"--implementations: {name} cannot run here: {refused}")
        if name != "xla" and max(ranks) == 1:
            raise Error(f"--implementations: {name} needs more than one rank")
    if _PLANS.value and (refused or names and set(names) <= {"xla", "unfused", "multimem"}):
        why = refused or "--implementations names no kernel that takes a plan"
        raise Error(f"--plans: no kernel is measured: {why}")
    if _WRITE_TABLE.value and names and "xla" not in names:
        raise Error(
            "--write_table needs xla in --implementations, since it compares all others with xla"
        )


def _check_flags(ranks: Sequence[int], rows: Sequence[int]) -> None:
    for text in _PLANS.value:
        sizes = text.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise Error(
                f"--plans: {text!r} must be three positive integers such as 64x4x1: thread blocks, "
                "warpgroups of a block, vectors of a thread"
            )
    for num_ranks in ranks:
        for count in rows:
            if count % num_ranks:
                raise Error(f"--rows: {count} is not a multiple of {num_ranks} ranks")
