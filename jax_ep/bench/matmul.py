"""`python -m jax_ep bench matmul`: times grouped matmuls, compared with a dense matmul and others'.

Times the product, the gate of two products (gated), the product's gradients for the rows (dlhs) and
for the matrices (drhs), and the sum of two dlhs, which the gradient of a gated expert needs.
All backends that compute an operation here and the dense matmul run in turn, one loop each, since a
GPU's clock drifts; "of dense" is the median over turns of the ratio of their rates. TFLOP/s count
only rows that are in a group.

`--check` first compares every backend: on small random operands (empty and large groups, NaN past
the last group) with float64, and at the sizes that are timed, in some groups, with float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.bench import measuring, report
from jax_ep.bench.flags import BenchFlags
from jax_ep.bench.matmul_baselines import (
    BASELINES,
    IMPLEMENTATIONS,
    TOKAMAX,
    available,
    other_blocks,
    unavailable_reason,
    usual_implementations,
)
from jax_ep.bench.matmul_checks import LIMITS, check, check_some_groups
from jax_ep.bench.matmul_operations import (
    CASES,
    OF_TWO_PAIRS,
    OPERATIONS,
    SMALL_CASES,
    Case,
    Function,
    Operands,
    dense_operation,
    operation,
    random_operands,
)
from jax_ep.bench.timing import Loop, WallTime
from jax_ep.flags import Error
from jax_ep.matmul.backend import Backend

FLAGS = BenchFlags()
_CASE = FLAGS.string(
    "case",
    "",
    "A part of the names of the cases to measure; empty: all. The cases are: "
    f"{'; '.join(case.name for case in CASES)}; on CPUs: "
    f"{'; '.join(case.name for case in SMALL_CASES)}.",
)
_OPS = FLAGS.choices("ops", OPERATIONS, OPERATIONS, "The operations to measure.")
_IMPLEMENTATIONS = FLAGS.implementations(
    IMPLEMENTATIONS, "grouped matmuls", "all that run here, but the slow xla and loop in few cases"
)
_BASELINES = FLAGS.baselines(
    BASELINES, "others' grouped matmuls, next to the dense matmul", "all that run here"
)
_DTYPE = FLAGS.dtype("the operands", LIMITS)
_SWEEP = FLAGS.boolean(
    "sweep", "Measure pallas and mosaic with other block sizes too, not only those they choose."
)
_CHECK = FLAGS.check("results with float64 on small operands, and with float32 on those timed")
_TIMING = FLAGS.timing(5, 10, least_iterations=1)
_SECONDS = FLAGS.seconds(600.0)
_SEED = FLAGS.seed("the operands that are timed")
_JSON = FLAGS.json()
_PLOT = FLAGS.plot("the rates")


def run() -> int:
    FLAGS.check_outputs()
    deadline = time.monotonic() + _SECONDS.value
    device = measuring.find_devices(1)[0]
    every_case = SMALL_CASES if device.platform == "cpu" else CASES
    cases = [case for case in every_case if _CASE.value in case.name]
    if not cases:
        names = "; ".join(case.name for case in every_case)
        raise Error(f"--case: {_CASE.value!r} is in the name of none: {names}")
    dtype = jnp.dtype(_DTYPE.value)
    _check_backends(cases, dtype)
    print(f"{device.device_kind}, jax {jax.__version__}, {dtype}")

    wrong = (
        check(dtype, {name for case in cases for name in _names(case)}, _OPS.value)
        if _CHECK.value
        else []
    )
    mesh = Mesh(np.asarray([device]), ("one",))
    rows: list[report.Row] = []
    for case in cases:
        rows += measure_case(case, dtype, mesh, deadline)
        if _JSON.value:  # as it goes: a run that is ended early leaves what it has
            measuring.write_json(_JSON.value, rows, wrong=wrong)
    measuring.progress("")
    print(f"\n{table(rows, by_kernel=_TIMING.by_kernel.value)}")
    if wrong:
        print("\nwrong on small operands:", *wrong, sep="\n  ")
    if _JSON.value:
        measuring.write_json(_JSON.value, rows, wrong=wrong)
    if _PLOT.value:
        report.bars(
            rows,
            _PLOT.value,
            title=f"Grouped matmuls, {dtype}: rows of H times groups of [H, F]\n"
            + device.device_kind,
            panel=lambda row: row["op"],
            group=lambda row: (
                "{case}\n{rows} rows, H={hidden}\nF={mlp_dim}, {num_groups} groups".format(**row)
            ),
            bar=lambda row: row["implementation"],
            height=lambda row: row.get("tflops"),
            label="TFLOP/s",
        )
    return 1 if wrong or any("error" in row for row in rows) else 0


def measure_case(case: Case, dtype: Any, mesh: Mesh, deadline: float) -> Iterator[report.Row]:
    """Yields a row of results for each operation and backend of a case, dense matmul included."""
    facts = {
        "case": case.name,
        "rows": case.num_rows,
        "live_rows": case.live,
        "hidden": case.hidden,
        "mlp_dim": case.mlp,
        "num_groups": case.num_groups,
        "dtype": dtype.name,
    }
    measuring.progress(f"{case.name}: operands")
    try:
        state = random_operands(case, dtype, _SEED.value)
    except Exception as error:  # a case that fails must not cost others their results
        yield from (
            facts | {"op": op, "implementation": "all", "error": measuring.first_line(error)}
            for op in _OPS.value
        )
        return
    for op in _OPS.value:
        for row in measure_operation(case, op, state, mesh, deadline):
            yield facts | {"op": op} | row


def measure_operation(
    case: Case, op: str, state: Operands, mesh: Mesh, deadline: float
) -> list[report.Row]:
    """Measures one operation: returns a row for the dense matmul, then others, fastest first."""
    found = [("dense", dense_operation(op))]
    for backend in backends(case, op, state.lhs.dtype):
        found.append((backend.name, operation(backend, op)))
    rows: list[report.Row] = [{"implementation": name} for name, _ in found]
    loops = _compile(f"{case.name}, {op}", op, found, rows, state, mesh, deadline)
    turns = [{i: loop.run() for i, loop in loops.items()} for _ in range(_TIMING.repeats.value)]
    for i, loop in loops.items():
        dense = rows[i]["implementation"] == "dense"
        flops = case.flops(op, case.live)
        if dense:
            flops *= case.num_rows / case.live / (2 if op in OF_TWO_PAIRS else 1)
        wall = WallTime.of([turn[i] for turn in turns])
        rows[i] |= {
            "wall": measuring.wall_record(wall),
            **measuring.device_times(loop, _TIMING.timer.value, 2, spaced=False),
            "flops": flops,
            "tflops": flops / wall.median * 1e-6,
        }
        if not dense and 0 in loops:
            ratio = statistics.median(turn[0] / turn[i] for turn in turns)
            rows[i]["share_of_dense"] = ratio * flops / rows[0]["flops"]
    fastest_first = sorted(rows[1:], key=lambda row: row.get("wall", {}).get("median_us", 1e99))
    return [rows[0], *fastest_first]


def _compile(
    what: str,
    op: str,
    found: Sequence[tuple[str, Function]],
    rows: Sequence[report.Row],
    state: Operands,
    mesh: Mesh,
    deadline: float,
) -> dict[int, Loop]:
    """Compiles the loops of all functions in parallel; checks and warms them up one by one.

    Returns the loops that work, by their index in `found`. The error of another loop goes into its
    entry of `rows`.
    """
    measuring.progress(f"{what}: compiling")

    def build(function: Function) -> Loop:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not started within {_SECONDS.value:g} s")
        return Loop(None, function, state, mesh, _TIMING.iterations.value)

    loops: dict[int, Loop] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        futures = [pool.submit(build, function) for _, function in found]
    for i, (row, future) in enumerate(zip(rows, futures, strict=True)):
        measuring.progress(f"{what}, {row['implementation']}")
        try:
            loop = future.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not started within {_SECONDS.value:g} s")
            checked = _CHECK.value and row["implementation"] != "dense"
            if checked:
                check_some_groups(op, state, loop)
            loop.run()
            row["checked"] = checked
            loops[i] = loop
        except Exception as error:  # each kernel fails in its own way; say how and go on
            row["error"] = measuring.first_line(error)
    return loops


_COLUMNS = (
    "case", "op", "implementation", "checked", "wall us", "low..high", "device us", "TFLOP/s",
    "of dense",
)  # fmt: skip


def table(rows: Sequence[report.Row], by_kernel: bool = False) -> str:
    """Renders results as fixed-width text, without columns that are empty in every row."""
    text = report.fixed_width(_COLUMNS, [_cells(row) for row in rows], _COLUMNS[:4])
    text += report.notes(rows, _name)
    return "\n".join(text + (report.kernels(rows, _name) if by_kernel else []))


def _name(row: report.Row) -> str:
    return "{case}, {op}, {implementation}".format(**row)


def _cells(row: report.Row) -> list[str]:
    wall, device = row.get("wall"), row.get("device")
    return [
        row["case"],
        row["op"],
        row["implementation"],
        "yes" if row.get("checked") else "",
        f"{wall['median_us']:.1f}" if wall else "",
        f"{wall['low_us']:.1f}..{wall['high_us']:.1f}" if wall else "failed",
        f"{device['median_us']:.1f}" if device else "",
        f"{row['tflops']:.3g}" if wall else "",
        f"{row['share_of_dense']:.0%}" if "share_of_dense" in row else "",
    ]


def _names(case: Case) -> list[str]:
    """Returns the names of the backends to measure a case by."""
    own, others = _IMPLEMENTATIONS.value, _BASELINES.value
    return [
        *(usual_implementations(case) if own is None else own),
        *(BASELINES if others is None else others),
    ]


def _check_backends(cases: Sequence[Case], dtype: Any) -> None:
    """Raises `Error` for a named backend that runs no case here, and if none is left to measure."""
    for flag in (_IMPLEMENTATIONS, _BASELINES):
        for name in flag.value or []:
            reasons = [unavailable_reason(name, (c.hidden, c.mlp), dtype) for c in cases]
            if all(reasons):
                raise Error(f"--{flag.name}: {name} cannot run here: {reasons[0]}")
    found = [b.name for case in cases for op in _OPS.value for b in backends(case, op, dtype)]
    if not found:
        raise Error("--implementations, --baselines and --ops leave nothing to measure")
    if _SWEEP.value and not any(" " in name for name in found):
        raise Error("--sweep: is of pallas and mosaic, of which none is measured here")


def backends(case: Case, op: str, dtype: Any) -> list[Backend]:
    """Returns the backends that the flags choose, of those that compute an operation here."""
    names = _names(case)
    found = [b for b in available((case.hidden, case.mlp), dtype) if b.name in names]
    if _SWEEP.value:
        found += other_blocks(case, op, [backend.name for backend in found])
    if op == "drhs":  # TOKAMAX has the drhs of "xla"
        found = [backend for backend in found if backend is not TOKAMAX]
    return found
