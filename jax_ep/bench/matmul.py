"""`python -m jax_ep bench matmul`: times grouped matmuls, compared with a dense matmul.

The operations are the product of rows and their groups' matrices, the gated product
silu(x @ gate) * (x @ up), the product's gradients with respect to the rows (dlhs) and to the
matrices (drhs), and the sum of two dlhs, which the gradient of a gated expert needs. "Of dense" is
a program's rate divided by that of the dense matmul in the same dtype, the median over rounds of
one loop of each program. TFLOP/s count only rows that are in a group.

Float8 operands are quantized before the loop. "Vs plain" is the rate of a float8 program divided by
that of the same implementation in bfloat16.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.bench import matmul_operations as operations
from jax_ep.bench import runner
from jax_ep.bench.agreement import agree
from jax_ep.bench.layer import MATMUL_DTYPES
from jax_ep.bench.matmul_operations import (
    CASES,
    OF_TWO_PAIRS,
    OPERATIONS,
    SMALL_CASES,
    Case,
    Float8Operands,
    Operands,
)
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop, expert_mesh
from jax_ep.flags import Args, Error, Flags, choice, some
from jax_ep.formats import QuantizedArray
from jax_ep.matmul import float8, primitives
from jax_ep.matmul.backend import Backend, Problem
from pallas_kernels.matmul.row_blocks import padded_rows

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in primitives.IMPLEMENTATIONS}


def add_flags(flags: Flags) -> None:
    flags.add(
        "case",
        "",
        "Measure the cases that have this text in their name; empty: all. The cases are: "
        f"{'; '.join(case.name for case in CASES)}; on CPUs: "
        f"{'; '.join(case.name for case in SMALL_CASES)}.",
    )
    flags.add("ops", ",".join(OPERATIONS), "The operations to measure.", some(choice(OPERATIONS)))
    names = "Default: pallas and tokamax, and in a few cases also the slow ones."
    flags.add("implementations", None, names, some(choice(BACKENDS)))
    dtypes = "The dtypes that are multiplied, each measured; none: bfloat16."
    flags.add("matmul_dtype", "none", dtypes, some(choice(MATMUL_DTYPES)))
    runner.add_flags(flags, "three groups of the results with float32", repeats=10)


def run(args: Args) -> int:
    args.ranks = args.ranks or [1]
    if args.ranks != [1]:
        raise Error("--ranks: a grouped matmul runs on 1 rank")
    return runner.run(MatmulBench(args))


class MatmulBench(runner.Bench):
    """A case is one operation on operands of one size, by every backend and in each dtype."""

    columns = (
        Column("TFLOP/s", "tflops", "{:.3g}"),
        Column("of dense", "share_of_dense", "{:.0%}"),
        Column("vs plain", "speedup_of_float8", "{:.2f}x"),
    )
    in_turns = True
    spaced = False

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[list[Row]]:
        args = self.args
        every_case = SMALL_CASES if devices[0].platform == "cpu" else CASES
        self.sizes = {case.name: case for case in every_case if args.case in case.name}
        if not self.sizes:
            names = "; ".join(case.name for case in every_case)
            raise Error(f"--case: no case has {args.case!r} in its name; the cases are: {names}")
        for name in args.implementations or []:
            # A program may lack a dtype or a case, but not all of them.
            cases = self.sizes.values()
            why = [unavailable_reason(name, c, d) for d in args.matmul_dtype for c in cases]
            runner.check_available("implementations", {name: why[0] if all(why) else None})
        return [self._rows(case, op) for case in self.sizes.values() for op in args.ops]

    def _rows(self, case: Case, op: str) -> list[Row]:
        """Returns a row for each program; for each dtype, "dense" comes first."""
        facts = {
            "ranks": 1,
            "case": case.name,
            "rows": case.num_rows,
            "live_rows": case.live,
            "hidden": case.hidden,
            "mlp_dim": case.mlp,
            "num_groups": case.num_groups,
            "op": op,
        }
        usual = ["pallas", "tokamax", *(["blocks", "xla"] if case.slow else [])]
        names = self.args.implementations or usual
        rows = []
        for dtype in self.args.matmul_dtype:
            able = [name for name in names if not unavailable_reason(name, case, dtype)]
            for name in ["dense", *able] if able else []:
                rows.append(facts | {"implementation": name, "matmul_dtype": dtype})
        return rows

    def prepare(self, row: Row) -> tuple[Operands, Float8Operands | None]:
        operands = operations.random_operands(self.sizes[row["case"]])
        has_float8 = any(dtype != "none" for dtype in self.args.matmul_dtype)
        return operands, operations.quantized(operands) if has_float8 else None

    def build(self, row: Row, shared: tuple[Operands, Float8Operands | None]) -> Loop:
        name, op, dtype = row["implementation"], row["op"], row["matmul_dtype"]
        function: Any
        if name == "dense":
            function = operations.dense_operation(op, dtype)
        elif dtype == "none":
            function = operations.operation(BACKENDS[name], op)
        else:
            function = operations.float8_operation(name, op)
        operands = shared[0] if dtype == "none" else shared[1]
        return Loop(function, operands, expert_mesh(1), self.args.iterations or 5)

    def check(self, row: Row, loop: Loop, shared: tuple[Operands, Float8Operands | None]) -> bool:
        op, case = row["op"], self.sizes[row["case"]]
        if row["implementation"] == "dense":
            return False
        limit = operations.tolerance(op, row["matmul_dtype"])
        out, last = loop.outputs(), case.num_groups - 1
        if isinstance(out, QuantizedArray):  # whose rows past the last group are undefined
            out = out.dequantize(jnp.float32)
        elif op != "drhs":
            assert not jnp.any(out[:, case.live :] != 0), "rows past the last group"
        for group in sorted({0, last // 2, last}):
            wanted, rows = operations.group_in_float32(op, shared[0], group)
            agree(out[:, group : group + 1] if op == "drhs" else out[:, rows], wanted, limit)
        return True

    def results(self, row: Row) -> Row:
        case, op, rows = self.sizes[row["case"]], row["op"], row["live_rows"]
        flops = case.flops(op, rows)
        if row["implementation"] == "dense":  # which multiplies rows of no group, too
            rows = case.num_rows
            # `TransposedRows`, the operands of a float8 drhs, have padding in each group.
            if op == "drhs" and row["matmul_dtype"] != "none":
                rows = padded_rows(rows, case.num_groups)
            flops = case.flops(op, rows) / (2 if op in OF_TWO_PAIRS else 1)
        return {"flops": flops, "tflops": flops / row["wall"]["median_us"] * 1e-6}

    def measure(self, case: Sequence[Row]) -> list[Row]:
        """Returns the results of the dense matmul first, then of the others, the fastest first."""
        rows = super().measure(case)
        timed = [row for row in rows if "wall" in row]
        dense = {row["matmul_dtype"]: row for row in timed if row["implementation"] == "dense"}
        for row in timed:
            yardstick = dense.get(row["matmul_dtype"], row)
            if yardstick is not row:
                rounds = zip(yardstick["wall"]["all_us"], row["wall"]["all_us"], strict=True)
                speedup = statistics.median(dense_us / us for dense_us, us in rounds)
                row["share_of_dense"] = speedup * row["flops"] / yardstick["flops"]
        first, *others = rows
        others.sort(key=lambda row: row["wall"]["median_us"] if "wall" in row else math.inf)
        return [first, *others]

    def compare(self, rows: list[Row]) -> None:
        keys = "case", "op", "implementation"
        runner.speedups(rows, "speedup_of_float8", keys, matmul_dtype="none")

    def header(self) -> list[str]:
        return ["bfloat16"]

    def group(self, row: Row) -> tuple[str, str]:
        return row["op"], row["case"]

    def program(self, row: Row) -> str:
        plain = row["matmul_dtype"] == "none"
        return row["implementation"] if plain else "{implementation}, {matmul_dtype}".format(**row)


def unavailable_reason(name: str, case: Case, matmul_dtype: str) -> str | None:
    dtype = jnp.dtype("bfloat16" if matmul_dtype == "none" else matmul_dtype)
    platform, has_scales = primitives.default_platform(), dtype == float8.DTYPE
    problem = Problem((case.hidden, case.mlp), dtype, platform, has_scales=has_scales)
    return BACKENDS[name].unavailable_reason(problem)
