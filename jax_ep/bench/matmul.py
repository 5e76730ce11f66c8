"""`python -m jax_ep bench matmul`: times grouped matmuls, compared with a dense matmul."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.bench import runner
from jax_ep.bench.layer import MATMUL_DTYPES
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop, expert_mesh
from jax_ep.flags import Args, Error, Flags, choice, some
from jax_ep.formats import QuantizedArray
from jax_ep.matmul import float8, primitives, xla
from jax_ep.matmul.backend import Backend, Problem
from jax_ep.matmul.float8 import QuantizedMatrices
from jax_ep.moe.expert_mlp import HiddenUnit
from pallas_kernels.matmul.row_blocks import TransposedRows, padded_rows, row_blocks

OPERATIONS = ("product", "gated", "dlhs", "drhs", "sum_of_dlhs")
# The operations that consist of two matrix products. Their yardstick, a dense matmul, is a single
# product.
OF_TWO_PAIRS = ("gated", "sum_of_dlhs")

_SWIGLU = HiddenUnit()


class Case(NamedTuple):
    """The sizes of a grouped matmul: rows [num_rows, hidden] by num_groups matrices [hidden, mlp].

    The first `live` rows belong to groups. If `slow`, the slow "blocks" and "xla" are timed, too.
    """

    name: str
    num_rows: int
    hidden: int
    mlp: int
    num_groups: int
    live: int
    slow: bool = False

    def flops(self, operation: str, rows: int) -> float:
        pairs = 2 if operation in OF_TWO_PAIRS else 1
        return 2.0 * pairs * rows * self.hidden * self.mlp


CASES = (
    Case("deepseek-v3 up", 32768, 7168, 2048, 32, 32768, slow=True),
    Case("deepseek-v3 down", 32768, 2048, 7168, 32, 32768),
    Case("dropless, 1/8 live", 262144, 7168, 2048, 32, 32768),
    Case("qwen3-moe up", 32768, 2048, 768, 16, 32768),
    Case("decode", 1024, 7168, 2048, 32, 1024),
    Case("mixtral up, 8 experts", 16384, 4096, 14336, 8, 16384),
    Case("mixtral up, 1 expert", 16384, 4096, 14336, 1, 16384),
    Case("qwen3-moe down", 32768, 768, 2048, 16, 32768),
    Case("qwen3-moe up, 2 ranks", 36864, 2048, 768, 64, 32768),
    Case("qwen3-moe down, 2 ranks", 36864, 768, 2048, 64, 32768),
    Case("qwen3-moe up, decode", 1152, 2048, 768, 64, 1024),
    Case("qwen3-moe down, decode", 1152, 768, 2048, 64, 1024),
)
SMALL_CASES = (Case("small", 96, 256, 128, 3, 80, slow=True),)  # measured on CPUs


class Operands(NamedTuple):
    """The operands of all operations, for R rows in L groups.

    lhs is [R, H], rhs and rhs_1 are [L, H, F], and grad and grad_1, the cotangents of their
    products, are [R, F].
    """

    lhs: Any
    rhs: Any
    grad: Any
    rhs_1: Any
    grad_1: Any
    group_sizes: Any


class Float8Operands(NamedTuple):
    """The operands of all operations, quantized to float8.

    `rows` are lhs, grad and grad_1; `matrices` rhs and rhs_1, as they are and transposed;
    `transposed` lhs and grad for "drhs". `groups` has each group's blocks there (`row_blocks`).
    """

    rows: tuple[QuantizedArray, QuantizedArray, QuantizedArray]
    matrices: tuple[QuantizedMatrices, QuantizedMatrices]
    transposed: tuple[TransposedRows, TransposedRows]
    groups: Any
    group_sizes: Any


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
    flags.add("implementations", None, names, some(choice(primitives.IMPLEMENTATIONS.names)))
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
            # An implementation may lack some dtypes or cases, but not all of them.
            cases = self.sizes.values()
            why = [unavailable_reason(name, c, d) for d in args.matmul_dtype for c in cases]
            runner.check_available({name: why[0] if all(why) else None})
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
        operands = random_operands(self.sizes[row["case"]])
        has_float8 = any(dtype != "none" for dtype in self.args.matmul_dtype)
        return operands, to_float8(operands) if has_float8 else None

    def build(self, row: Row, shared: tuple[Operands, Float8Operands | None]) -> Loop:
        name, op, dtype = row["implementation"], row["op"], row["matmul_dtype"]
        function: Any
        if name == "dense":
            function = dense_operation(op, dtype)
        elif dtype == "none":
            function = operation(primitives.IMPLEMENTATIONS[name], op)
        else:
            function = float8_operation(name, op)
        operands = shared[0] if dtype == "none" else shared[1]
        return Loop(function, operands, expert_mesh(1), self.args.iterations or 5)

    def check(self, row: Row, loop: Loop, shared: tuple[Operands, Float8Operands | None]) -> bool:
        if row["implementation"] == "dense":
            return False
        op, case = row["op"], self.sizes[row["case"]]
        # In float8 operands are rounded: a number by up to 2^-4 of itself, a sum of products by
        # less, since errors cancel. "gated" has two such sums, and rounds its result, too.
        # In bfloat16 only results are, by up to 2^-8; 1e-2 leaves room for two roundings.
        of_float8 = 2 * 2**-4 if op == "gated" else 2**-4
        limit = 1e-2 if row["matmul_dtype"] == "none" else of_float8
        out = loop.outputs()
        if isinstance(out, QuantizedArray):  # whose rows past the last group are undefined
            out = out.dequantize(jnp.float32)
        elif op != "drhs":
            assert not jnp.any(out[:, case.live :] != 0), "rows past the last group"
        last = case.num_groups - 1
        for group in sorted({0, last // 2, last}):
            wanted, rows = group_in_float32(op, shared[0], group)
            runner.agree(out[:, group : group + 1] if op == "drhs" else out[:, rows], wanted, limit)
        return True

    def results(self, row: Row) -> Row:
        case, op = self.sizes[row["case"]], row["op"]
        flops = case.flops(op, row["live_rows"])
        if row["implementation"] == "dense":  # which multiplies rows of no group, too
            rows = case.num_rows
            # `TransposedRows`, the operands of a float8 drhs, have padding in each group.
            if op == "drhs" and row["matmul_dtype"] != "none":
                rows = padded_rows(case.num_rows, case.num_groups)
            flops = case.flops(op, rows) / (2 if op in OF_TWO_PAIRS else 1)
        return {"flops": flops, "tflops": flops / row["wall"]["median_us"] * 1e-6}

    def measure(self, case: Sequence[Row]) -> list[Row]:
        """Adds "share_of_dense"; returns the first dense matmul's row, then the fastest first."""
        rows = super().measure(case)
        timed = [row for row in rows if "wall" in row]
        dense = {row["matmul_dtype"]: row for row in timed if row["implementation"] == "dense"}
        for row in timed:
            yardstick = dense.get(row["matmul_dtype"], row)
            if yardstick is not row:
                # Programs run in turns, so times of one round were measured at the same clock.
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
    platform = primitives.default_platform()
    has_scales = dtype == float8.DTYPE
    problem = Problem((case.hidden, case.mlp), dtype, platform, has_scales=has_scales)
    return primitives.IMPLEMENTATIONS[name].unavailable_reason(problem)


def random_operands(case: Case) -> Operands:
    """Draws operands, with groups of random sizes and a leading axis of one rank."""
    probabilities = np.full(case.num_groups, 1 / case.num_groups)
    sizes = np.random.default_rng(0).multinomial(case.live, probabilities)
    shape_of_rhs = (case.num_groups, case.hidden, case.mlp)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))

    def array(stream: int, *shape: int) -> jax.Array:
        return normal(jax.random.key(stream), (1, *shape), jnp.bfloat16)

    return Operands(
        lhs=array(0, case.num_rows, case.hidden),
        rhs=array(1, *shape_of_rhs),
        grad=array(2, case.num_rows, case.mlp),
        rhs_1=array(3, *shape_of_rhs),
        grad_1=array(4, case.num_rows, case.mlp),
        group_sizes=jnp.asarray(sizes[None], jnp.int32),
    )


@jax.jit
def to_float8(operands: Operands) -> Float8Operands:
    """Quantizes operands, with a leading axis of one rank, to forms that float8 matmuls take."""
    o: Operands = jax.tree.map(lambda leaf: leaf[0], operands)
    lhs, grad, grad_1 = map(float8.quantize_rows, (o.lhs, o.grad, o.grad_1))
    rhs, rhs_1 = map(float8.quantize_matrices, (o.rhs, o.rhs_1))
    blocks, groups = row_blocks(o.group_sizes, o.lhs.shape[0])
    # The first result, rows that are not transposed, is None by default.
    _, lhs_transposed = float8.transpose_rows(o.lhs, blocks)
    _, grad_transposed = float8.transpose_rows(o.grad, blocks)
    found = Float8Operands(
        rows=(lhs, grad, grad_1),
        matrices=(rhs, rhs_1),
        transposed=(lhs_transposed, grad_transposed),
        groups=groups,
        group_sizes=o.group_sizes,
    )
    return jax.tree.map(lambda leaf: leaf[None], found)


def operation(backend: Backend, op: str) -> Callable[[Operands], jax.Array]:
    """Returns the function that computes `op` by `backend` from one rank's operands."""
    functions: dict[str, Callable[[Operands], jax.Array]] = {
        "product": lambda o: backend.product(o.lhs, o.rhs, o.group_sizes, transpose_rhs=False),
        "gated": lambda o: backend.gated_product(
            o.lhs, (o.rhs, o.rhs_1), o.group_sizes, _SWIGLU, keep=False
        )[0],
        "dlhs": lambda o: backend.product(o.grad, o.rhs, o.group_sizes, transpose_rhs=True),
        "drhs": lambda o: backend.drhs(o.lhs, o.grad, o.group_sizes),
        "sum_of_dlhs": lambda o: backend.sum_of_products(
            [(o.grad, o.rhs), (o.grad_1, o.rhs_1)], o.group_sizes, transpose_rhs=True
        ),
    }
    return functions[op]


def float8_operation(implementation: Any, op: str) -> Callable[[Float8Operands], Any]:
    """Returns the function that computes `op` from one rank's operands in float8."""
    # The float8 products take transposed matrices; dlhs multiplies by rhs^T, and so it takes rhs.
    product = functools.partial(
        float8.product_of_float8, dtype=jnp.bfloat16, implementation=implementation
    )

    def gated(o: Float8Operands) -> Any:
        gate, up = (each.transposed for each in o.matrices)
        return float8.gated_product_of_float8(
            o.rows[0], (gate, up), o.group_sizes, _SWIGLU, keep=False, implementation=implementation
        )[0]

    def drhs(o: Float8Operands) -> Any:
        lhs, grad = o.transposed
        return float8.drhs_of_each(lhs, [grad], o.groups, jnp.bfloat16, implementation)[0]

    def sum_of_dlhs(o: Float8Operands) -> Any:
        matrices = (each.matrices for each in o.matrices)
        return product(list(zip(o.rows[1:], matrices, strict=True)), o.group_sizes)

    functions: dict[str, Callable[[Float8Operands], Any]] = {
        "product": lambda o: product([(o.rows[0], o.matrices[0].transposed)], o.group_sizes),
        "gated": gated,
        "dlhs": lambda o: product([(o.rows[1], o.matrices[0].matrices)], o.group_sizes),
        "drhs": drhs,
        "sum_of_dlhs": sum_of_dlhs,
    }
    return functions[op]


def dense_operation(op: str, matmul_dtype: str) -> Callable[[Any], jax.Array]:
    """Returns the yardstick of `op`: one dense matmul by XLA, of all rows and a single matrix."""

    def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        # Contracts the last axes: the operands of float8 are stored for this.
        dims = (((1,), (1,)), ((), ()))
        return lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.bfloat16)

    def plain(o: Operands) -> jax.Array:
        if op == "drhs":
            return jnp.dot(o.lhs.T, o.grad)
        if op in ("dlhs", "sum_of_dlhs"):
            return jnp.dot(o.grad, o.rhs[0].T)
        return jnp.dot(o.lhs, o.rhs[0])

    def of_float8(o: Float8Operands) -> jax.Array:
        if op == "drhs":
            return dot(o.transposed[0].values, o.transposed[1].values)
        if op in ("dlhs", "sum_of_dlhs"):
            return dot(o.rows[1].values, o.matrices[0].matrices.values[0])
        return dot(o.rows[0].values, o.matrices[0].transposed.values[0])

    return plain if matmul_dtype == "none" else of_float8


def group_in_float32(op: str, operands: Operands, group: int) -> tuple[jax.Array, slice]:
    """Computes an operation for one group by XLA in float32; also returns the group's rows.

    Operands and result have a leading axis of one rank.
    """
    sizes = np.asarray(operands.group_sizes[0])
    end = int(sizes[: group + 1].sum())
    rows = slice(end - int(sizes[group]), end)
    groups = slice(group, group + 1)

    def part(x: jax.Array, index: slice) -> jax.Array:
        return x[0, index].astype(jnp.float32)

    of_group = Operands(
        lhs=part(operands.lhs, rows),
        rhs=part(operands.rhs, groups),
        grad=part(operands.grad, rows),
        rhs_1=part(operands.rhs_1, groups),
        grad_1=part(operands.grad_1, rows),
        group_sizes=operands.group_sizes[0, groups],
    )
    with jax.default_matmul_precision("highest"):  # by default, GPUs multiply in TF32
        return jax.jit(operation(xla.BACKEND, op))(of_group)[None], rows
