"""`python -m jax_ep bench matmul`: times grouped matmuls, compared with a dense matmul.

The operations are the product of rows and their groups' matrices, the gated product
silu(x @ gate) * (x @ up), the product's gradients with respect to the rows (dlhs) and to the
matrices (drhs), and the sum of two dlhs, which the gradient of a gated expert needs. A backend is
an implementation of this library or of another project. A GPU's clock drifts, so the programs run
in turns: each round runs one loop of the dense matmul and one of each backend. The column "of
dense" is a backend's rate divided by the rate of the dense matmul in the same dtype, the median
over rounds. TFLOP/s count only rows that are in a group.

The baseline "torch" is PyTorch's grouped matmul by CUTLASS, for product and dlhs, in bfloat16 and
float8. It runs in a process of its own, one loop per round, on random operands with groups of the
same sizes, but without rows that are in no group. In float8 it has one scale for each row and for
each column of a matrix, and its sums are less precise than float32. It needs PyTorch 2.9 or newer,
an NVIDIA GPU, and a few GB of memory that JAX has not reserved. Its device time is the time between
CUDA events around a loop. A compiled JAX loop takes about 450 us to start, which this loop does
not. So compare device times, or set many --iterations.

With --matmul_dtype=float8_e4m3fn, operations are also measured on float8 operands, which are
quantized before the loop. "vs plain" is the rate of a float8 program divided by the rate of the
same implementation in --dtype. The operation "quantize" quantizes the matrices, as they are and
transposed. It is compared with a copy instead of the dense matmul, so "of dense" is its rate
divided by the copy's. If --dtype has 16 bits, both move as many bytes.

`--check` compares the results of every backend with float32. It checks some groups of the timed
operands, and all groups of additional small operands. Some groups of the small operands are empty,
some are large, and the rows past the last group are NaN. For small operands, only errors are shown.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.bench import matmul_float8, matmul_torch, report, runner
from jax_ep.bench.flags import BenchFlags
from jax_ep.bench.matmul_baselines import (
    BASELINES,
    IMPLEMENTATIONS,
    TOKAMAX,
    available,
    other_tiles,
    unavailable_reason,
    usual_implementations,
)
from jax_ep.bench.matmul_float8 import QUANTIZE, Float8Operands
from jax_ep.bench.matmul_operations import (
    CASES,
    LIMITS,
    OF_TWO_PAIRS,
    OPERATIONS,
    SMALL_CASES,
    Case,
    Operands,
    check_groups,
    dense_operation,
    operation,
    random_operands,
    small_operands,
)
from jax_ep.bench.matmul_torch import TORCH, TorchLoop
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop
from jax_ep.flags import Error
from jax_ep.matmul.backend import Backend
from pallas_kernels.matmul.row_blocks import padded_rows

FLAGS = BenchFlags()
_CASE = FLAGS.string(
    "case",
    "",
    "Measure the cases that have this text in their name; empty: all cases. The cases are: "
    f"{'; '.join(case.name for case in CASES)}; on CPUs: "
    f"{'; '.join(case.name for case in SMALL_CASES)}.",
)
_OPS = FLAGS.choices(
    "ops",
    OPERATIONS,
    (*OPERATIONS, QUANTIZE),
    "The operations to measure. quantize: quantizes the matrices to float8.",
)
_IMPLEMENTATIONS = FLAGS.implementations(
    IMPLEMENTATIONS,
    "grouped matmuls",
    "all that run here, except that the slow xla and loop run only in a few cases",
)
_BASELINES = FLAGS.baselines(
    BASELINES,
    "grouped matmuls of other libraries, besides a dense matmul; torch (PyTorch) has only product "
    "and dlhs",
    "all that run here",
)
_DTYPE = FLAGS.dtype("the operands", LIMITS)
_MATMUL_DTYPE = FLAGS.choices(
    "matmul_dtype",
    ["none"],
    ["none", "float8_e4m3fn"],
    "The dtypes that are multiplied, each measured. none: --dtype. float8_e4m3fn: results have the "
    "dtype --dtype; cases whose H or F is no multiple of 128 are left out.",
)
_SWEEP = FLAGS.boolean(
    "sweep", "Measure pallas with other tile sizes too, not only with those that it chooses."
)
_TIMING = FLAGS.timing(5, 10, least_iterations=1)
_SEED = FLAGS.seed("operands that are timed")
_CHECK = FLAGS.check("all groups of small operands, and some groups of those timed, with float32")
_SHARED = FLAGS.share(plot="the rates", ranks=None, timing=_TIMING, check=_CHECK, seconds=600.0)


def run() -> int:
    return runner.run(MatmulBench())


class MatmulCase(runner.Case):
    """Measures one operation on operands of one size, in each matmul dtype.

    The operation is computed by every backend, and the dense matmul is measured for comparison.
    """

    in_turns = True
    spaced = False

    def __init__(self, case: Case, op: str, dtype: Any):
        self.case, self.op, self.dtype = case, op, dtype
        # On exit, it ends the PyTorch processes that `build` has started.
        self.processes = contextlib.ExitStack()
        self.functions = programs(case, op, dtype)
        facts = {
            "case": case.name,
            "rows": case.num_rows,
            "live_rows": case.live,
            "hidden": case.hidden,
            "mlp_dim": case.mlp,
            "num_groups": case.num_groups,
            "dtype": dtype.name,
            "op": op,
        }
        rows = [
            facts | {"implementation": name, "matmul_dtype": matmul_dtype}
            for name, matmul_dtype in self.functions
        ]
        super().__init__(f"{case.name}, {op}", rows)

    def operands(self) -> Operands:
        """Makes the operands of the operation. Each array has a leading axis of size 1."""
        return random_operands(self.case, self.dtype, _SEED.value)

    def prepare(self) -> tuple[Operands, Float8Operands | None]:
        operands = self.operands()
        has_float8 = any(matmul_dtype != "none" for _, matmul_dtype in self.functions)
        return operands, matmul_float8.quantized(operands) if has_float8 else None

    def build(self, row: Row, shared: tuple[Operands, Float8Operands | None]) -> Loop:
        mesh = Mesh(np.asarray(jax.devices()[:1]), ("one",))
        is_plain = row["matmul_dtype"] == "none"
        function = self.functions[row["implementation"], row["matmul_dtype"]]
        iterations = _TIMING.iterations.value
        if function is None:
            sizes = shared[0].group_sizes[0].tolist()
            loop = TorchLoop(self.case, self.op, not is_plain, sizes, mesh, iterations)
            self.processes.callback(loop.close)
            return loop
        operands = shared[0] if is_plain else shared[1]
        return Loop(None, function, operands, mesh, iterations)

    def check(self, row: Row, loop: Loop, shared: tuple[Operands, Float8Operands | None]) -> bool:
        if row["implementation"] == "dense":
            return False
        if isinstance(loop, TorchLoop):
            loop.check(self.checked_groups())
            return True
        operands, float8, out = jax.tree.map(lambda leaf: leaf[0], (*shared, loop.outputs()))
        if row["matmul_dtype"] == "none":
            check_groups(self.op, operands, out, self.checked_groups())
        else:
            matmul_float8.check(self.op, operands, float8, out, self.checked_groups())
        return True

    def checked_groups(self) -> Sequence[int]:
        last = self.case.num_groups - 1
        return sorted({0, last // 2, last})

    def yardstick(self, row: Row) -> Row:
        alike = [other for other in self.rows if other["matmul_dtype"] == row["matmul_dtype"]]
        return alike[0]

    def results(self, row: Row) -> Row:
        flops = self.case.flops(self.op, self.case.live)
        rows = self.case.num_rows
        if self.op == "drhs" and row["matmul_dtype"] != "none":
            rows = padded_rows(rows, self.case.num_groups)
        of_dense = flops * rows / self.case.live
        of_dense /= 2 if self.op in OF_TWO_PAIRS else 1
        is_dense, rate = row["implementation"] == "dense", row.pop("relative_rate", None)
        # Quantization has no FLOPs. It is compared with a copy of as many bytes, by time alone.
        if self.op == QUANTIZE:
            return {} if is_dense else {"share_of_dense": rate}
        done = of_dense if is_dense else flops
        found = {"flops": done, "tflops": done / row["wall"]["median_us"] * 1e-6}
        if rate is not None and not is_dense:
            found["share_of_dense"] = rate * flops / of_dense
        return found

    def measure(self, run: runner.Run) -> list[Row]:
        """Measures all of `programs`; returns the dense matmul's results, then the backends'.

        The backends are sorted by wall time, the fastest first.
        """
        with self.processes:
            dense, *others = super().measure(run)
        others.sort(key=lambda row: row["wall"]["median_us"] if "wall" in row else math.inf)
        return [dense, *others]


class SmallCase(MatmulCase):
    """Checks one operation on small operands; `measure` returns only the rows of failures.

    PyTorch is not checked, because it makes its own operands.
    """

    def __init__(self, operands: Operands, op: str, dtype: Any):
        shapes = f"{list(operands.lhs.shape)} x {list(operands.rhs.shape)}"
        sizes = operands.group_sizes.tolist()
        num_rows, (num_groups, hidden, mlp) = len(operands.lhs), operands.rhs.shape
        self.small = operands
        name = f"{shapes} by {sizes}"
        super().__init__(Case(name, num_rows, hidden, mlp, num_groups, sum(sizes)), op, dtype)
        self.rows = [row for row in self.rows if row["implementation"] != TORCH]

    def operands(self) -> Operands:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], self.small)

    def checked_groups(self) -> Sequence[int]:
        return range(self.case.num_groups)

    def results(self, row: Row) -> Row:
        return {}

    def measure(self, run: runner.Run) -> list[Row]:
        rows = super().measure(run._replace(repeats=1, timer="none"))
        return [row for row in rows if "error" in row]


class MatmulBench(runner.Bench):
    flags, shared = FLAGS, _SHARED
    columns = (
        report.text("case"),
        report.text("op"),
        report.text("implementation"),
        report.text("matmul", "matmul_dtype", usual="none"),
        report.CHECKED,
        *report.WALL,
        Column("device us", "device.median_us", "{:.1f}"),
        Column("TFLOP/s", "tflops", "{:.3g}"),
        Column("of dense", "share_of_dense", "{:.0%}"),
        Column("vs plain", "speedup_of_float8", "{:.2f}x"),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[MatmulCase]:
        every_case = SMALL_CASES if devices[0].platform == "cpu" else CASES
        cases = [case for case in every_case if _CASE.value in case.name]
        if not cases:
            names = "; ".join(case.name for case in every_case)
            raise Error(f"--case: no case has {_CASE.value!r} in its name; the cases are: {names}")
        dtype = jnp.dtype(_DTYPE.value)
        _check_backends(cases, dtype)
        small = small_operands(dtype) if _CHECK.value else ()
        checked: list[MatmulCase] = [
            SmallCase(operands, op, dtype) for operands in small for op in _OPS.value
        ]
        timed = [MatmulCase(case, op, dtype) for case in cases for op in _OPS.value]
        return [case for case in checked + timed if case.rows]

    def header(self) -> list[str]:
        return [_DTYPE.value]

    def name(self, row: Row) -> str:
        return runner.with_matmul_dtype("{case}, {op}, {implementation}".format(**row), row)

    def compare(self, rows: list[Row]) -> None:
        """Adds to each row of a float8 matmul its speed-up over the same backend without float8."""
        runner.compare_float8(rows, ("case", "op", "implementation"))

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        report.bars(
            rows,
            path,
            title=f"Grouped matmuls, {_DTYPE.value}: rows of H times groups of [H, F]\n{machine}",
            panel=lambda row: row["op"],
            group=lambda row: (
                "{case}\n{rows} rows, H={hidden}\nF={mlp_dim}, {num_groups} groups".format(**row)
            ),
            bar=lambda row: runner.with_matmul_dtype(row["implementation"], row),
            height=lambda row: row.get("tflops"),
            label="TFLOP/s",
        )


def _names(case: Case) -> list[str]:
    """Returns the names of the implementations and baselines to measure for a case."""
    own, others = _IMPLEMENTATIONS.value, _BASELINES.value
    return [
        *(usual_implementations(case) if own is None else own),
        *(BASELINES if others is None else others),
    ]


def _check_backends(cases: Sequence[Case], dtype: Any) -> None:
    """Raises `Error` if a backend that a flag names can run none of the cases on this machine.

    Also raises `Error` if the flags leave no backend to measure, or if --sweep is set but the
    backend "pallas", whose tile sizes it varies, is not measured.
    """
    dtypes = [dtype if d == "none" else jnp.dtype(d) for d in _MATMUL_DTYPE.value]
    sizes = [(case.hidden, case.mlp) for case in cases]
    for flag in (_IMPLEMENTATIONS, _BASELINES):
        for name in flag.value or []:
            reasons = [unavailable_reason(name, size, d) for d in dtypes for size in sizes]
            if all(reasons):
                raise Error(f"--{flag.name}: {name} cannot run here: {reasons[0]}")
    found = [
        name
        for case in cases
        for op in _OPS.value
        for name, _ in programs(case, op, dtype)
        if name != "dense"
    ]
    if set(_MATMUL_DTYPE.value) != {"none"}:
        reasons = [matmul_float8.unavailable_reason(*size) for size in sizes]
        if all(reasons):
            raise Error(f"--matmul_dtype: {reasons[0]}")
    if not found:
        raise Error(
            "--implementations, --baselines, --ops and --matmul_dtype leave nothing to measure"
        )
    if _SWEEP.value and not any(" " in name for name in found):
        raise Error(
            "--sweep varies the tile sizes of pallas without float8, but pallas is not measured "
            "without float8 here; see --implementations and --matmul_dtype"
        )


# A JAX function that computes an operation from the operands, or None for PyTorch.
Program = Callable[[Any], Any] | None


def programs(case: Case, op: str, dtype: Any) -> dict[tuple[str, str], Program]:
    """Returns the programs to measure for an operation `op` on operands of the size `case`.

    `dtype` is the dtype of the operands. Returns a dict from pairs (name, matmul dtype) to
    programs. The name is that of a backend, TORCH for PyTorch, or "dense" for the dense matmul,
    with which the others are compared. For each matmul dtype, "dense" comes first. If nothing else
    can run the operation in a matmul dtype, the dict has no programs for this dtype.
    """
    found: dict[tuple[str, str], Program] = {}
    if "none" in _MATMUL_DTYPE.value and op != QUANTIZE:
        others: dict[str, Program] = {b.name: operation(b, op) for b in backends(case, op, dtype)}
        others |= _in_torch(case, op, dtype)
        found |= {("dense", "none"): dense_operation(op)} if others else {}
        found |= {(each, "none"): program for each, program in others.items()}
    name = next((name for name in _MATMUL_DTYPE.value if name != "none"), None)
    if name is None or matmul_float8.unavailable_reason(case.hidden, case.mlp):
        return found
    own = [each for each in _names(case) if each in IMPLEMENTATIONS]
    sizes = case.hidden, case.mlp
    own = [each for each in own if not unavailable_reason(each, sizes, jnp.dtype(name))]
    others = {each: matmul_float8.operation(each, op, dtype) for each in own}
    others |= _in_torch(case, op, jnp.dtype(name))
    found |= {("dense", name): matmul_float8.dense_operation(op, dtype)} if others else {}
    return found | {(each, name): program for each, program in others.items()}


def _in_torch(case: Case, op: str, dtype: Any) -> dict[str, Program]:
    """Returns {TORCH: None} if TORCH is selected and can run the operation in `dtype`, else {}."""
    if TORCH not in _names(case) or op not in matmul_torch.OPERATIONS:
        return {}
    return {} if unavailable_reason(TORCH, (case.hidden, case.mlp), dtype) else {TORCH: None}


def backends(case: Case, op: str, dtype: Any) -> list[Backend]:
    """Returns the backends to measure: those that the flags select and that can run here.

    With --sweep, variants of the backend "pallas" with other tile sizes are added.
    """
    names = _names(case)
    found = [b for b in available((case.hidden, case.mlp), dtype) if b.name in names]
    if _SWEEP.value:
        found += other_tiles(case, op, [backend.name for backend in found])
    # TOKAMAX is left out for drhs, because it calls the same function as the backend "xla".
    if op == "drhs":
        found = [backend for backend in found if backend is not TOKAMAX]
    return found
