"""`python -m jax_ep bench collectives`: times every algorithm of this library's collectives."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep.bench import runner
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import AXIS, Loop, expert_mesh
from jax_ep.collectives import api as collectives
from jax_ep.collectives import table as collectives_table
from jax_ep.collectives import xla
from jax_ep.collectives.algorithms import ALGORITHMS, Problem
from jax_ep.flags import Args, Error, Flags, choice, integer, output, some
from jax_ep.runtime import availability

OPERATIONS = tuple(ALGORITHMS)
# Maps each operation to the algorithms that are measured by default. "fused" is left out because it
# only selects "fused_one_shot" or "fused_two_shot".
MEASURED = {
    op: tuple(name for name in algorithms.names if name != "fused")
    for op, algorithms in ALGORITHMS.items()
}
_DTYPE = jnp.dtype(jnp.bfloat16)
_GPU_ROWS = [8, 32, 64, 128, 256, 512, 1024, 2048, 4096]
_CPU_ROWS = [32, 128]
_ALGORITHM_NAMES = sorted({name for algorithms in ALGORITHMS.values() for name in algorithms.names})


def add_flags(flags: Flags) -> None:
    flags.add("ops", ",".join(OPERATIONS), "The operations to measure.", some(choice(OPERATIONS)))
    rows = "Rows of the whole array. Default: 8 and powers of 2 from 32 to 4096; on CPUs 32,128."
    flags.add("rows", None, rows, some(integer))
    algorithms = "The algorithms to measure. Default: all that run here, but fused."
    flags.add("implementations", None, algorithms, some(choice(_ALGORITHM_NAMES)))
    flags.add("write_table", None, "The JSON file of the lookup table to update.", output)
    # A loop of fewer calls would time its own start.
    runner.add_flags(flags, "results with those of xla", repeats=7, least=10)


def run(args: Args) -> int:
    # Turns off NCCL's use of NVLink multicast, which many hosts lack.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return runner.run(CollectivesBench(args))


class CollectivesBench(runner.Bench):
    """A case is one collective on one number of ranks, for all array sizes and algorithms."""

    columns = (
        Column("MB", "bytes", "{:.2f}", 1e6),
        Column("vs xla", "speedup_over_xla", "{:.2f}x"),
        Column("chosen", lambda row: "yes" if row["auto"] == row["implementation"] else None),
    )

    def default_ranks(self, num_devices: int) -> list[int]:
        return [count for count in (2, 4, 8) if count <= num_devices] or [1]

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[list[Row]]:
        args = self.args
        if args.write_table:
            read_table(args.write_table)  # raises before the measurements if it is damaged
        args.rows = args.rows or (_GPU_ROWS if devices[0].platform == "gpu" else _CPU_ROWS)
        self._check_flags(ranks)
        self.facts = {"nccl_nvls_enable": os.environ["NCCL_NVLS_ENABLE"]}
        return [self._rows(op, num_ranks) for num_ranks in ranks for op in args.ops]

    def _rows(self, op: str, num_ranks: int) -> list[Row]:
        rows = []
        for count in self.args.rows:
            size = {"op": op, "ranks": num_ranks, "rows": count, "hidden": _hidden()}
            size["bytes"] = count * _hidden() * _DTYPE.itemsize
            problem = problem_of(size)
            chosen = {"auto": collectives_table.select(None, problem)}  # for algorithm=None
            available = ALGORITHMS[op].available(problem)
            usual = [name for name in MEASURED[op] if name in available]
            for name in self.args.implementations or usual:
                # On one rank nothing is sent, so only one algorithm is measured.
                if name in ALGORITHMS[op].names and (num_ranks > 1 or name == "xla"):
                    rows.append(size | chosen | {"implementation": name})
        return rows

    def prepare(self, row: Row) -> dict[int, tuple[jax.Array, ...]]:
        """Makes for each number of rows the operands, with a leading axis of ranks."""
        num_ranks = row["ranks"]
        sharding = NamedSharding(expert_mesh(num_ranks), PartitionSpec(AXIS))

        def make(rows: int) -> tuple[jax.Array, ...]:
            operands = []
            for i, operand in enumerate(problem_of(row | {"rows": rows}).operands):
                # The residual and scale of all_reduce_rms_norm are equal on all ranks.
                shape = (num_ranks if i == 0 else 1, *operand.shape)
                drawn = jax.random.normal(jax.random.key(rows + i), shape, _DTYPE)
                operands.append(jnp.broadcast_to(drawn, (num_ranks, *operand.shape)))
            return tuple(operands)

        compiled = jax.jit(make, static_argnums=0, out_shardings=sharding)
        return {rows: compiled(rows) for rows in self.args.rows}

    def build(self, row: Row, shared: dict[int, tuple[jax.Array, ...]]) -> Loop:
        is_psum = row["op"] in ("all_reduce", "all_reduce_rms_norm")
        loop_type = _InPlaceLoop if is_psum and row["implementation"] == "xla" else Loop

        def step(state: Any) -> Any:
            return getattr(collectives, row["op"])(*state, AXIS, algorithm=row["implementation"])

        mesh = expert_mesh(row["ranks"])
        return loop_type(step, shared[row["rows"]], mesh, self.args.iterations or 50)

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        if row["implementation"] == "xla":
            return False
        other = self.build(row | {"implementation": "xla"}, shared)
        exact = row["op"] in ("all_gather", "all_to_all")
        # XLA may round, by eps / 2, after each of the N - 1 additions of a sum over ranks. The
        # rest leaves room for partial sums that are larger than the sum.
        tolerance = 0.0 if exact else 8 * float(jnp.finfo(_DTYPE).eps) * row["ranks"]
        got = loop.outputs()
        runner.agree(got, other.outputs(), tolerance)
        if row["op"] in ("all_reduce", "all_reduce_rms_norm"):
            for result in jax.tree.leaves(got):
                assert (result == result[:1]).all(), "ranks disagree"
        return True

    def header(self) -> list[str]:
        return [f"{_DTYPE}, NCCL_NVLS_ENABLE={self.facts['nccl_nvls_enable']}"]

    def group(self, row: Row) -> tuple[str, str]:
        return "{op}, {ranks} ranks".format(**row), f"{row['rows']} rows"

    def compare(self, rows: list[Row]) -> None:
        runner.speedups(rows, "speedup_over_xla", ("op", "ranks", "rows"), implementation="xla")
        if self.args.write_table:
            write_table(self.args.write_table, rows, jax.devices())

    def _check_flags(self, ranks: Sequence[int]) -> None:
        args, names = self.args, self.args.implementations or []
        refused = availability.Machine(jax.devices()[: max(ranks)]).unavailable_reason((AXIS,))
        kernels = [name for name in names if name not in ("xla", "unfused")]
        runner.check_available(dict.fromkeys(kernels, refused))
        if args.write_table and names and "xla" not in names:
            raise Error("--write_table compares with xla, which --implementations leaves out")
        for num_ranks in ranks:
            for count in args.rows:
                if count % num_ranks:
                    raise Error(f"--rows: {count} is not a multiple of {num_ranks} ranks")


def _hidden() -> int:
    return 8192 if jax.default_backend() == "gpu" else 256


def problem_of(row: Row) -> Problem:
    """Returns the problem of `row`; of all_gather, the result has row["rows"] rows."""
    op, num_rows, hidden, num_ranks = (row[key] for key in ("op", "rows", "hidden", "ranks"))
    rows_of_rank = num_rows // num_ranks if op == "all_gather" else num_rows
    shapes: list[tuple[int, ...]] = [(rows_of_rank, hidden)]
    if op == "all_reduce_rms_norm":
        shapes += [(num_rows, hidden), (hidden,)]
    operands = [jax.ShapeDtypeStruct(shape, _DTYPE) for shape in shapes]
    place = availability.Machine(jax.devices()[:num_ranks])
    return Problem(op, operands, num_ranks, (AXIS,), place)


class _InPlaceLoop(Loop):
    """A timed loop in which each `lax.psum` reduces the previous call's result, in place."""

    # If every call had the same operand, XLA would copy the operand before each psum. Real programs
    # seldom need that copy, so it must not be timed.

    def _loop(
        self, state: Any, after: Callable[[jax.Array, list[jax.Array]], jax.Array], unroll: int
    ) -> Any:
        # `all_reduce_rms_norm` also has a residual and a scale.
        operand, *residual_and_scale = state

        # `total` is the operand of the next psum, and `link` is as in `Loop`.
        def body(_, carry):
            total, link = carry
            total, link = jax.lax.optimization_barrier((total, link))
            total = self._varying(jax.lax.psum(total, AXIS))
            out = []
            if residual_and_scale:
                residual, scale = residual_and_scale
                residual = xla.add_residual(total, residual)
                out = [xla.rms_norm(residual, scale, 1e-6, total.dtype), residual]
            total, *out = jax.lax.optimization_barrier((total, *out))
            return total, self._varying(after(link, [total, *out]))

        start = self._varying((operand, jnp.float32(0)))
        total, link = jax.lax.fori_loop(0, self.iterations, body, start, unroll=unroll)
        return total.reshape(-1)[0], link


def read_table(path: str) -> dict[str, Any]:
    """Reads the file of --write_table, a `jax_ep.collectives.table`; {} if there is none."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (TypeError, ValueError) as error:
        raise Error(f"--write_table: {path!r} must hold a JSON object: {error}") from error


def write_table(path: str, rows: Sequence[Row], devices: Sequence[jax.Device]) -> None:
    """Writes the fastest algorithm for each operation, number of ranks and size to a lookup table.

    Other operations and numbers of ranks of an existing table stay. Algorithms are compared by
    device time if all have one, and else by wall time.
    """
    merged = read_table(path)
    capability = getattr(devices[0], "compute_capability", None) or devices[0].platform
    for op, ranks in dict.fromkeys((row["op"], row["ranks"]) for row in rows):
        timed = [row for row in rows if (row["op"], row["ranks"]) == (op, ranks) and "wall" in row]
        clock = "device" if all(row["device"] for row in timed) else "wall"
        # By size in bytes and by algorithm: microseconds.
        times: dict[int, dict[str, float]] = {}
        for row in timed:
            if row["implementation"] in MEASURED[op]:
                of_size = times.setdefault(row["bytes"], {})
                of_size[row["implementation"]] = round(row[clock]["median_us"], 2)
        sizes = sorted(size for size, of_size in times.items() if "xla" in of_size)
        if sizes:
            merged.setdefault(capability, {}).setdefault(op, {})[str(ranks)] = {
                "choices": collectives_table.choices(sizes, [times[size] for size in sizes]),
                "machine": runner.devices_in_words(devices[:ranks]),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "jax": jax.__version__,
                "clock": clock,
                "us": {str(size): times[size] for size in sizes},
            }
    # JSON breaks the line at each value. A pair [size, algorithm] is easier to read on one line.
    pair = r"\[\s+([^\s\[\]]+)\s+([^\s\[\]]+)\s+\]"
    text = re.sub(pair, r"[\1 \2]", json.dumps(merged, indent=1))
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
