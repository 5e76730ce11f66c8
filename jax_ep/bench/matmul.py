"""`python -m jax_ep bench matmul`: the grouped matmuls, beside a dense matmul of the same size.

Times the product, its gradients of the rows (dlhs) and of the matrices (drhs), and the sum of two
dlhs, which the gradient of an expert's gated MLP takes. The candidates of an operation and the
dense matmul take turns, one loop each, as a GPU's clock wanders: "of dense" is the median over
turns of the ratio of their rates. TFLOP/s count rows that belong to a group.

`--check` compares every candidate first: on fresh random operands (empty and huge groups, NaN past
the last one) with float64, and at the sizes that are timed, some groups of each, with float32.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import Mesh

from jax_ep.bench import measuring, report
from jax_ep.bench.timing import Loop, WallTime
from jax_ep.cli import command_flags
from jax_ep.matmul import backends as kernels
from jax_ep.matmul.api import serving_implementations
from jax_ep.matmul.backends import Blocks
from pallas_kernels.matmul.grouped_matmul import Tiles

OPERATIONS = ("product", "dlhs", "drhs", "sum_of_dlhs")
# Of the norm of a result: how far off a candidate may be.
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """lhs [num_rows, hidden] by num_groups matrices [hidden, mlp]; `live` rows are in a group."""

    name: str
    num_rows: int
    hidden: int
    mlp: int
    num_groups: int
    live: int
    slow: bool = False  # time "xla" and "loop" too

    def flops(self, operation: str, rows: int) -> float:
        pairs = 2 if operation == "sum_of_dlhs" else 1
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
)
SMALL_CASES = (  # for CPUs
    Case("small", 256, 64, 128, 4, 200, slow=True),
    Case("small, wide", 64, 128, 64, 2, 64, slow=True),
)


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the operations take; the second grad and rhs are those of the sum's other product."""

    lhs: jax.Array  # [R, H]
    rhs: jax.Array  # [L, H, F]
    grad: jax.Array  # [R, F]
    rhs_1: jax.Array
    grad_1: jax.Array
    group_sizes: jax.Array  # [L]


jax.tree_util.register_dataclass(
    Operands, [field.name for field in dataclasses.fields(Operands)], []
)
Function = Callable[[Operands], jax.Array]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to compute the operations; None where it does not compute one.

    Attributes:
      sum_of_products: in one kernel; without it, products are added.
    """

    name: str
    product: Callable[..., jax.Array] | None = None
    drhs: Callable[..., jax.Array] | None = None
    sum_of_products: Callable[..., jax.Array] | None = None

    def operation(self, name: str) -> Function | None:
        product, drhs, of_products = self.product, self.drhs, self.sum_of_products
        if name == "product" and product:
            return lambda o: product(o.lhs, o.rhs, o.group_sizes, transpose_rhs=False)
        if name == "dlhs" and product:
            return lambda o: product(o.grad, o.rhs, o.group_sizes, transpose_rhs=True)
        if name == "drhs" and drhs:
            return lambda o: drhs(o.lhs, o.grad, o.group_sizes)
        if name == "sum_of_dlhs" and of_products:
            return lambda o: of_products(_pairs(o), o.group_sizes, transpose_rhs=True)
        if name == "sum_of_dlhs" and product:
            return lambda o: functools.reduce(
                jnp.add,
                [product(*pair, o.group_sizes, transpose_rhs=True) for pair in _pairs(o)],
            )
        return None


def _pairs(o: Operands) -> list[tuple[jax.Array, jax.Array]]:
    return [(o.grad, o.rhs), (o.grad_1, o.rhs_1)]


def dense_operation(operation: str) -> Function:
    """A plain matmul of the same size, every row of the buffer by the first group's matrix.

    For the sum of two products it is one of them.
    """
    return {
        "product": lambda o: jnp.dot(o.lhs, o.rhs[0]),
        "dlhs": lambda o: jnp.dot(o.grad, o.rhs[0].T),
        "drhs": lambda o: jnp.dot(o.lhs.T, o.grad),
        "sum_of_dlhs": lambda o: jnp.dot(o.grad, o.rhs[0].T),
    }[operation]


FLAGS = command_flags()
_here: dict[str, Any] = {"flag_values": FLAGS}
_CASE = flags.DEFINE_string(
    "case",
    "",
    f"Only cases with this in their name: {'; '.join(case.name for case in CASES)}; on CPUs, "
    f"{'; '.join(case.name for case in SMALL_CASES)}.",
    **_here,
)
_OPS = flags.DEFINE_list("ops", list(OPERATIONS), "Operations to measure.", **_here)
_CANDIDATE = flags.DEFINE_string(
    "candidate", "", "Only candidates with this in their name, beside the dense matmul.", **_here
)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", list(LIMITS), "Of the operands.", **_here)
_SWEEP = flags.DEFINE_boolean(
    "sweep", False, "Try pallas and mosaic with other block sizes too.", **_here
)
_CHECK = flags.DEFINE_boolean("check", False, "Compare results before timing.", **_here)
_ITERATIONS = flags.DEFINE_integer(
    "iterations", 5, "Dependent calls in one compiled loop.", lower_bound=1, **_here
)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Turns of all loops.", lower_bound=1, **_here)
_SECONDS = flags.DEFINE_float("seconds", 600.0, "Start nothing more after this long.", **_here)
_TIMER = flags.DEFINE_enum(
    "device_timer", "auto", list(measuring.TIMERS), "As of `bench`.", **_here
)
_BY_KERNEL = flags.DEFINE_boolean(
    "by_kernel", False, "Print device times by kernel below the table.", **_here
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the operands that are timed.", **_here)
_JSON = flags.DEFINE_string("json", None, "Write everything measured to this file.", **_here)
_PLOT = flags.DEFINE_string("plot", None, "Write a plot to this .png file.", **_here)


def run() -> int:
    measuring.check_outputs(json=_JSON.value, plot=_PLOT.value)
    deadline = time.monotonic() + _SECONDS.value
    device = jax.devices()[0]
    measuring.check_names("ops", _OPS.value, OPERATIONS)
    every_case = SMALL_CASES if device.platform == "cpu" else CASES
    cases = [case for case in every_case if _CASE.value in case.name]
    if not cases:
        names = "; ".join(case.name for case in every_case)
        raise flags.Error(f"--case: {_CASE.value!r} is in the name of none: {names}")
    dtype = jnp.dtype(_DTYPE.value)
    if not any(candidates(case, op, dtype) for case in cases for op in _OPS.value):
        known = implementations((cases[0].hidden, cases[0].mlp), dtype)
        names = ", ".join(candidate.name for candidate in known)
        raise flags.Error(f"--candidate: {_CANDIDATE.value!r} is in the name of none: {names}")
    print(f"{device.device_kind}, jax {jax.__version__}, {dtype}")

    wrong = check(dtype, _CANDIDATE.value, _OPS.value) if _CHECK.value else []
    mesh = Mesh(np.asarray([device]), ("one",))
    rows: list[report.Row] = []
    for case in cases:
        rows += measure_case(case, dtype, mesh, deadline)
    measuring.progress("")
    print(f"\n{table(rows, by_kernel=_BY_KERNEL.value)}")
    if wrong:
        print("\nwrong on small operands:", *wrong, sep="\n  ")
    if _JSON.value:
        measuring.write_json(_JSON.value, rows, wrong=wrong)
    if _PLOT.value:
        report.bars(
            rows,
            _PLOT.value,
            panel="op",
            group=lambda row: row["case"],
            bar="candidate",
            height="tflops",
            label="TFLOP/s",
        )
    return 1 if wrong or any("error" in row for row in rows) else 0


def measure_case(case: Case, dtype: Any, mesh: Mesh, deadline: float) -> Iterator[report.Row]:
    """A row for each operation and candidate, and for the dense matmul beside them."""
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
    except Exception as error:  # nor must one case cost the others their results
        yield from (
            facts | {"op": op, "candidate": "all", "error": measuring.first_line(error)}
            for op in _OPS.value
        )
        return
    for op in _OPS.value:
        for row in measure_operation(case, op, state, mesh, deadline):
            yield facts | {"op": op} | row


def measure_operation(
    case: Case, op: str, state: Operands, mesh: Mesh, deadline: float
) -> list[report.Row]:
    """The dense matmul first, then the candidates, the fastest first and failures last."""
    dtype = state.lhs.dtype
    found = [("dense", dense_operation(op))]
    found += [
        (candidate.name, function)
        for candidate in candidates(case, op, dtype)
        if (function := candidate.operation(op))
    ]
    measuring.progress(f"{case.name}, {op}: compiling")

    def build(function: Function) -> Loop:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not started within {_SECONDS.value:g} s")
        return Loop(None, function, state, mesh, _ITERATIONS.value)

    rows: list[report.Row] = [{"candidate": name} for name, _ in found]
    loops: dict[int, Loop] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:  # compiled side by side, but timed alone
        futures = [pool.submit(build, function) for _, function in found]
    for i, future in enumerate(futures):
        measuring.progress(f"{case.name}, {op}, {rows[i]['candidate']}")
        try:
            loop = future.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not started within {_SECONDS.value:g} s")
            rows[i]["checked"] = _CHECK.value and rows[i]["candidate"] != "dense"
            if rows[i]["checked"]:
                check_some_groups(op, state, loop)
            loop.run()
            loops[i] = loop
        except Exception as error:  # each kernel fails in its own way; say how and go on
            rows[i]["error"] = measuring.first_line(error)
            rows[i].pop("checked", None)
    turns = [{i: loop.run() for i, loop in loops.items()} for _ in range(_REPEATS.value)]
    for i, loop in loops.items():
        dense = rows[i]["candidate"] == "dense"
        flops = case.flops("dlhs" if dense and op == "sum_of_dlhs" else op, case.live)
        if dense:
            flops *= case.num_rows / case.live
        wall = WallTime.of([turn[i] for turn in turns])
        rows[i] |= {
            "wall": measuring.wall_record(wall),
            **measuring.device_times(loop, _TIMER.value, 2, spaced=False),
            "flops": flops,
            "tflops": flops / wall.median * 1e-6,
        }
        if not dense and 0 in loops:
            ratio = statistics.median(turn[0] / turn[i] for turn in turns)
            rows[i]["share_of_dense"] = ratio * flops / rows[0]["flops"]
    fastest_first = sorted(rows[1:], key=lambda row: row.get("wall", {}).get("median_us", 1e99))
    return [rows[0], *fastest_first]


_COLUMNS = (
    "case", "op", "candidate", "checked", "wall us", "low..high", "device us", "TFLOP/s",
    "of dense",
)  # fmt: skip


def table(rows: Sequence[report.Row], by_kernel: bool = False) -> str:
    """Fixed-width text; a column that is empty in every row is left out."""
    text = report.fixed_width(_COLUMNS, [_cells(row) for row in rows], _COLUMNS[:4])
    text += report.notes(rows, _name)
    return "\n".join(text + (report.kernels(rows, _name) if by_kernel else []))


def _name(row: report.Row) -> str:
    return "{case}, {op}, {candidate}".format(**row)


def _cells(row: report.Row) -> list[str]:
    wall, device = row.get("wall"), row.get("device")
    return [
        row["case"],
        row["op"],
        row["candidate"],
        "yes" if row.get("checked") else "",
        f"{wall['median_us']:.1f}" if wall else "",
        f"{wall['low_us']:.1f}..{wall['high_us']:.1f}" if wall else "failed",
        f"{device['median_us']:.1f}" if device else "",
        f"{row['tflops']:.3g}" if wall else "",
        f"{row['share_of_dense']:.0%}" if "share_of_dense" in row else "",
    ]


# ---- candidates ------------------------------------------------------------------------------


def candidates(case: Case, op: str, dtype: Any) -> list[Candidate]:
    """Those that compute the operation here and that `--candidate` does not leave out."""
    found = implementations((case.hidden, case.mlp), dtype, slow=case.slow)
    if _SWEEP.value:
        found += other_blocks(case, op, [candidate.name for candidate in found])
    return [
        candidate
        for candidate in found
        if _CANDIDATE.value in candidate.name and candidate.operation(op)
    ]


def implementations(matrix: tuple[int, int], dtype: Any, slow: bool = True) -> list[Candidate]:
    """Those that serve here, with the block sizes that they choose themselves."""
    fast = ("pallas", "mosaic", "tokamax")
    names = [
        name
        for name in serving_implementations(matrix, dtype)
        if (slow or name in fast) and (name != "loop" or jax.default_backend() == "cpu")
    ]
    return [
        Candidate(
            name,
            getattr(kernels, f"{name}_product"),
            None if name == "tokamax" else getattr(kernels, f"{name}_drhs"),  # it is xla's
            getattr(kernels, f"{name}_sum_of_products", None),
        )
        for name in names
    ]


PALLAS_TILES = (  # block_m, block_n, num_slots, num_staged, band
    (128, 256, 3, 4, 1),
    (128, 256, 3, 4, 4),
    (128, 256, 3, 4, 7),
    (128, 256, 3, 4, 28),
    (128, 256, 4, 1, 8),
    (128, 256, 4, 2, 8),
    (128, 192, 4, 3, 8),
    (128, 128, 5, 2, 8),
    (64, 256, 4, 2, 8),
)
MOSAIC_PRODUCT_BLOCKS = (  # block_m, block_n, block_k, max_concurrent_steps, grid_block_n
    (128, 128, 64, 4, 4),
    (128, 128, 64, 4, 8),
    (128, 128, 64, 6, 4),
    (128, 128, 128, 2, 4),
    (64, 256, 64, 4, 4),
    (128, 64, 128, 4, 8),
)
MOSAIC_DRHS_BLOCKS = (
    (128, 128, 64, 4, 4),
    (128, 128, 64, 6, 4),
    (128, 128, 128, 2, 4),
    (64, 256, 64, 4, 4),
)


def other_blocks(case: Case, op: str, names: Sequence[str]) -> list[Candidate]:
    """The kernels with other blocks than they would choose for an operation."""
    columns = case.hidden if op in ("dlhs", "sum_of_dlhs") else case.mlp
    found = []
    if "pallas" in names:
        for tiles in (Tiles(*sizes) for sizes in PALLAS_TILES):
            count, rest = divmod(columns, tiles.block_n)
            if not rest and count % tiles.band == 0:
                by_these = {
                    name: functools.partial(getattr(kernels, f"pallas_{name}"), tiles=tiles)
                    for name in ("product", "drhs", "sum_of_products")
                }
                sizes = " ".join(map(str, dataclasses.astuple(tiles)))
                found.append(Candidate(f"pallas {sizes}", **by_these))
    if "mosaic" in names and op in ("product", "dlhs"):
        for blocks in (Blocks(*sizes) for sizes in MOSAIC_PRODUCT_BLOCKS):
            if columns % blocks.block_n == 0:
                product = functools.partial(kernels.mosaic_product, blocks=blocks)
                found.append(Candidate(_blocks_name(blocks), product=product))
    if "mosaic" in names and op == "drhs":
        for blocks in (Blocks(*sizes) for sizes in MOSAIC_DRHS_BLOCKS):
            if case.hidden % blocks.block_m == 0 and columns % blocks.block_n == 0:
                drhs = functools.partial(kernels.mosaic_drhs, blocks=blocks)
                found.append(Candidate(_blocks_name(blocks), drhs=drhs))
    return found


def _blocks_name(blocks: Blocks) -> str:
    return "mosaic " + " ".join(map(str, dataclasses.astuple(blocks)))


# ---- operands, and right or wrong ------------------------------------------------------------


def random_operands(case: Case, dtype: Any, seed: int) -> Operands:
    """Normal values, each array with one rank's leading axis; rows in uniformly drawn groups."""
    sizes = np.random.default_rng(seed).multinomial(
        case.live, np.full(case.num_groups, 1 / case.num_groups)
    )
    shape_of_rhs = (case.num_groups, case.hidden, case.mlp)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))

    def array(stream: int, *shape: int) -> jax.Array:
        return normal(jax.random.key(8 * seed + stream), (1, *shape), dtype)

    return Operands(
        lhs=array(0, case.num_rows, case.hidden),
        rhs=array(1, *shape_of_rhs),
        grad=array(2, case.num_rows, case.mlp),
        rhs_1=array(3, *shape_of_rhs),
        grad_1=array(4, case.num_rows, case.mlp),
        group_sizes=jnp.asarray(sizes[None], jnp.int32),
    )


def check(dtype: Any, only: str = "", ops: Sequence[str] = OPERATIONS) -> list[str]:
    """What is wrong, on operands drawn anew: a line for each implementation and operation."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    wrong = []
    for num_rows, sizes, hidden, mlp in (
        (1024, rng.multinomial(1000, rng.dirichlet(np.full(9, 0.3))), 256, 384),
        (768, np.array([0, 1, 640, 0, 7, 0]), 128, 64),
        (512, np.array([128, 256, 64, 64]), 64, 128),
        (300, np.array([5, 0, 90]), 192, 128),
        (64, np.zeros(3, int), 64, 64),
    ):
        live = int(sizes.sum())

        def rows(columns, num_rows=num_rows, live=live):
            values = rng.standard_normal((num_rows, columns))
            return jnp.asarray(values, dtype).at[live:].set(jnp.nan)

        def matrices(num_groups=sizes.size, hidden=hidden, mlp=mlp):
            return jnp.asarray(rng.standard_normal((num_groups, hidden, mlp)), dtype)

        operands = Operands(
            rows(hidden), matrices(), rows(mlp), matrices(), rows(mlp), jnp.asarray(sizes, np.int32)
        )
        want = reference(operands)
        for candidate in implementations((hidden, mlp), dtype):
            for op in ops:
                function = candidate.operation(op)
                if function is None or only not in candidate.name:
                    continue
                where = (
                    f"{candidate.name}, {op}, [{num_rows}, {hidden}] x [{len(sizes)}, {hidden}, "
                    f"{mlp}] by {sizes.tolist()}"
                )
                try:
                    got = np.asarray(jax.jit(function)(operands))
                except Exception as error:  # each kernel fails in its own way; say how and go on
                    wrong.append(f"{where}: {measuring.first_line(error)}")
                    continue
                scale = np.linalg.norm(want[op]) or 1.0
                distance = np.linalg.norm(got.astype(np.float64) - want[op]) / scale
                stray = op != "drhs" and np.any(got[live:])
                if not distance < LIMITS[dtype.name] or stray:
                    wrong.append(f"{where}: relative error {distance:.1e}, seed {seed}")
    return wrong


def check_some_groups(op: str, state: Operands, loop: Loop) -> None:
    """Raises AssertionError unless the first, a middle and the last group agree with float32."""
    o = jax.tree.map(lambda leaf: leaf[0], state)
    out = loop.outputs()[0]
    ends = np.cumsum(np.asarray(o.group_sizes))
    dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
    if op != "drhs" and ends[-1] < len(out):
        assert not bool(jnp.any(out[ends[-1] :])), "rows past the last group are not zero"
    for group in sorted({0, len(ends) // 2, len(ends) - 1}):
        rows = slice(int(ends[group] - o.group_sizes[group]), int(ends[group]))
        x, g, g_1 = (array[rows].astype(jnp.float32) for array in (o.lhs, o.grad, o.grad_1))
        w, w_1 = (array[group].astype(jnp.float32) for array in (o.rhs, o.rhs_1))
        want = of_group(op, dot, x, w, g, w_1, g_1)
        got = (out[group] if op == "drhs" else out[rows]).astype(jnp.float32)
        error = float(jnp.linalg.norm(got - want) / jnp.maximum(jnp.linalg.norm(want), 1e-30))
        limit = LIMITS[o.lhs.dtype.name]
        assert error < limit, f"group {group} is off by {error:.1e} of its norm, not {limit:g}"


def of_group(op: str, dot: Any, x: Any, w: Any, g: Any, w_1: Any, g_1: Any) -> Any:
    """An operation's result for the rows x, g and g_1 of a group, and its matrices w and w_1."""
    if op == "product":
        return dot(x, w)
    if op == "drhs":
        return dot(x.T, g)
    dlhs = dot(g, w.T)
    return dlhs if op == "dlhs" else dlhs + dot(g_1, w_1.T)


def reference(operands: Operands) -> dict[str, np.ndarray]:
    """The operations in float64, group by group."""
    o = jax.tree.map(np.asarray, operands)
    x, w, g, w_1, g_1 = (a.astype(np.float64) for a in (o.lhs, o.rhs, o.grad, o.rhs_1, o.grad_1))
    out = {"product": np.zeros(g.shape), "drhs": np.zeros(w.shape)}
    out |= {"dlhs": np.zeros(x.shape), "sum_of_dlhs": np.zeros(x.shape)}
    ends = np.cumsum(o.group_sizes)
    for group, (start, end) in enumerate(zip(ends - o.group_sizes, ends, strict=True)):
        rows = slice(start, end)
        factors = x[rows], w[group], g[rows], w_1[group], g_1[rows]
        for op, result in out.items():
            result[group if op == "drhs" else rows] = of_group(op, np.matmul, *factors)
    return out
