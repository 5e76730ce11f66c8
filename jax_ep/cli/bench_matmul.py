"""Grouped matmul on this machine: is it right, and how fast is it beside a dense matmul.

    python -m jax_ep.cli.bench_matmul

Checks every implementation that serves here on fresh random operands (empty and huge groups, NaN
past the last group), then times the product, its gradient of the rows (dlhs) and of the matrices
(drhs). A case that fails is reported and the others go on; none starts once `--seconds` are
up. Times are in-loop wall times, medians over repeats; TFLOP/s counts rows that belong to a group.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import grouped_matmul_kernels as kernels
from jax_ep.grouped_matmul import serving_implementations
from jax_ep.grouped_matmul_kernels import Blocks
from pallas_kernels.grouped_matmul import Tiles

Operands = tuple[jax.Array, ...]  # lhs, rhs, grad, group_sizes
Function = Callable[..., jax.Array]
OPERATIONS = ("product", "dlhs", "drhs")


@dataclasses.dataclass(frozen=True)
class Case:
    """lhs [num_rows, hidden] by num_groups matrices [hidden, mlp]; `live` rows are in a group."""

    name: str
    num_rows: int
    hidden: int
    mlp: int
    num_groups: int
    live: int
    sweep: bool = False  # try other block sizes too
    slow: bool = False  # time "xla" and "loop" too


CASES = (
    Case("deepseek-v3 up", 32768, 7168, 2048, 32, 32768, sweep=True, slow=True),
    Case("deepseek-v3 down", 32768, 2048, 7168, 32, 32768, sweep=True),
    Case("dropless, 1/8 live", 262144, 7168, 2048, 32, 32768),
    Case("qwen3-moe up", 32768, 2048, 768, 16, 32768, sweep=True),
    Case("decode", 1024, 7168, 2048, 32, 1024),
    Case("mixtral up, 8 experts", 16384, 4096, 14336, 8, 16384),
    Case("mixtral up, 1 expert", 16384, 4096, 14336, 1, 16384),
    Case("qwen3-moe down", 32768, 768, 2048, 16, 32768),
)
TINY_CASES = (
    Case("tiny", 256, 64, 128, 4, 200, sweep=True, slow=True),
    Case("tiny, wide", 64, 128, 64, 2, 64, slow=True),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to compute the three operations; None where it does not compute one."""

    name: str
    product: Function | None
    drhs: Function | None

    def operation(self, name: str) -> Function | None:
        """(lhs, rhs, grad, group_sizes) -> the result of the operation."""
        product, drhs = self.product, self.drhs
        if name == "product" and product:
            return lambda lhs, rhs, grad, sizes: product(lhs, rhs, sizes, transpose_rhs=False)
        if name == "dlhs" and product:
            return lambda lhs, rhs, grad, sizes: product(grad, rhs, sizes, transpose_rhs=True)
        if name == "drhs" and drhs:
            return lambda lhs, rhs, grad, sizes: drhs(lhs, grad, sizes)
        return None


def main(argv: Sequence[str] = ()) -> int:
    """Checks, times, prints a table; returns 1 if an implementation was wrong, else 0."""
    parser = argparse.ArgumentParser(prog="bench_matmul", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--seconds", type=float, default=210, help="start no case after this long")
    parser.add_argument("--iterations", type=int, default=5, help="calls in one timed loop")
    parser.add_argument("--repeats", type=int, default=10, help="timed loops; the median counts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--candidate", default="", help="only candidates with this in their name")
    parser.add_argument("--no-sweep", action="store_true", help="no other block sizes")
    parser.add_argument("--no-check", action="store_true", help="time without checking first")
    args = parser.parse_args(list(argv))
    deadline = time.monotonic() + args.seconds
    dtype = jnp.dtype(args.dtype)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {dtype}", flush=True)

    wrong = [] if args.no_check else check(dtype, args.candidate)
    lines: list[tuple[str, ...]] = []
    for case in TINY_CASES if args.tiny else CASES:
        if args.case not in case.name:
            continue
        if time.monotonic() > deadline:
            lines.append((case.name, "", "", "", "", "", "out of time"))
            continue
        operands = random_operands(case, dtype)
        if case.slow and not args.no_check:
            wrong += check_large(case, operands, args.candidate)
        for line in case_lines(case, operands, args, deadline):
            print("  ".join(filter(None, line)), flush=True)
            lines.append(line)
        del operands

    header = ("case", "operation", "candidate", "ms", "TFLOP/s", "of dense", "")
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    print(f"\n{args.seconds - (deadline - time.monotonic()):.0f} s\n")
    for line in [header, *sorted(lines, key=_order(list(dict.fromkeys(x[0] for x in lines))))]:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    if wrong:
        print("\nWRONG RESULTS:", *wrong, sep="\n  ")
    return 1 if wrong else 0


def case_lines(
    case: Case, operands: Operands, args: argparse.Namespace, deadline: float
) -> Iterator[tuple[str, ...]]:
    """(case, operation, candidate, ms, TFLOP/s, share of dense, error) for each measurement."""
    dense: dict[str, float] = {}
    for operation in OPERATIONS:
        result = _timed(_compiled(dense_operation(operation), operands, args), operands, args)
        if isinstance(result, float):
            dense[operation] = 2 * case.num_rows * case.hidden * case.mlp / result
        yield _line(case, operation, "dense", result, case.num_rows, dense)
    found = candidates(case, operands[0].dtype, args.candidate, not args.no_sweep)
    with ThreadPoolExecutor(max_workers=8) as pool:
        programs: list[tuple[str, str, Future[Any]]] = []
        for operation, candidate in found:
            function = candidate.operation(operation)
            assert function is not None
            program = pool.submit(_compiled, function, operands, args)
            programs.append((operation, candidate.name, program))
        # Compiling in parallel, but timing alone: a kernel that is timed has the GPU to itself.
        for _, _, program in programs:
            program.result()
        for operation, name, program in programs:
            if time.monotonic() > deadline:
                yield case.name, operation, name, "", "", "", "out of time"
                continue
            result = _timed(program.result(), operands, args)
            yield _line(case, operation, name, result, case.live, dense)


def candidates(case: Case, dtype: Any, only: str, sweep: bool) -> Iterator[tuple[str, Candidate]]:
    """(operation, candidate) in the order of how much one wants to know it."""
    found = implementations((case.hidden, case.mlp), dtype, slow=case.slow)
    for candidate in found:
        for operation in OPERATIONS:
            if only in candidate.name and candidate.operation(operation):
                yield operation, candidate
    if sweep and case.sweep:
        names = [candidate.name for candidate in found]
        for operation, candidate in other_blocks(case, names):
            if only in candidate.name:
                yield operation, candidate


def implementations(matrix: tuple[int, int], dtype: Any, slow: bool = True) -> list[Candidate]:
    """Those that serve here, with the block sizes that they choose themselves."""
    fast = ("pallas", "mosaic", "tokamax")
    names = [
        name
        for name in serving_implementations(matrix, dtype)
        if (slow or name in fast) and (name != "loop" or jax.default_backend() == "cpu")
    ]
    return [
        Candidate(name, getattr(kernels, f"{name}_product"), getattr(kernels, f"{name}_drhs"))
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


def other_blocks(case: Case, names: Sequence[str]) -> Iterator[tuple[str, Candidate]]:
    """The kernels with other blocks than they would choose."""
    columns = {"product": case.mlp, "dlhs": case.hidden, "drhs": case.mlp}
    if "pallas" in names:
        for tiles in (Tiles(*sizes) for sizes in PALLAS_TILES):
            candidate = Candidate(
                "pallas " + " ".join(map(str, dataclasses.astuple(tiles))),
                functools.partial(kernels.pallas_product, tiles=tiles),
                functools.partial(kernels.pallas_drhs, tiles=tiles),
            )
            for operation in OPERATIONS:
                count, rest = divmod(columns[operation], tiles.block_n)
                if not rest and count % tiles.band == 0:
                    yield operation, candidate
    if "mosaic" in names:
        for blocks in (Blocks(*sizes) for sizes in MOSAIC_PRODUCT_BLOCKS):
            product = functools.partial(kernels.mosaic_product, blocks=blocks)
            for operation in ("product", "dlhs"):
                if columns[operation] % blocks.block_n == 0:
                    yield operation, Candidate(_blocks_name(blocks), product, None)
        for blocks in (Blocks(*sizes) for sizes in MOSAIC_DRHS_BLOCKS):
            if case.hidden % blocks.block_m == 0 and case.mlp % blocks.block_n == 0:
                drhs = functools.partial(kernels.mosaic_drhs, blocks=blocks)
                yield "drhs", Candidate(_blocks_name(blocks), None, drhs)


def _blocks_name(blocks: Blocks) -> str:
    return "mosaic " + " ".join(map(str, dataclasses.astuple(blocks)))


# ---- right or wrong --------------------------------------------------------------------------


def check(dtype: Any, only: str = "") -> list[str]:
    """What is wrong, on operands drawn anew: a line for each implementation and operation."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    wrong = []
    limit = {"bfloat16": 1e-2, "float16": 2e-3}.get(dtype.name, 2e-3)
    for num_rows, sizes, hidden, mlp in (
        (1024, rng.multinomial(1000, rng.dirichlet(np.full(9, 0.3))), 256, 384),
        (768, np.array([0, 1, 640, 0, 7, 0]), 128, 64),
        (512, np.array([128, 256, 64, 64]), 64, 128),
        (300, np.array([5, 0, 90]), 192, 128),
        (64, np.zeros(3, int), 64, 64),
    ):
        live = int(sizes.sum())
        lhs = jnp.asarray(rng.standard_normal((num_rows, hidden)), dtype).at[live:].set(jnp.nan)
        grad = jnp.asarray(rng.standard_normal((num_rows, mlp)), dtype).at[live:].set(jnp.nan)
        rhs = jnp.asarray(rng.standard_normal((len(sizes), hidden, mlp)), dtype)
        device_sizes = jnp.asarray(sizes, jnp.int32)
        want = dict(zip(OPERATIONS, reference(lhs, rhs, grad, sizes), strict=True))
        for candidate in implementations((hidden, mlp), dtype):
            for operation in OPERATIONS:
                function = candidate.operation(operation)
                if function is None or only not in candidate.name:
                    continue
                where = (
                    f"{candidate.name} {operation} {lhs.shape} x {rhs.shape} by {sizes.tolist()}"
                )
                try:
                    got = np.asarray(jax.jit(function)(lhs, rhs, grad, device_sizes))
                except Exception as error:  # each kernel fails in its own way; say how and go on
                    wrong.append(f"{where}: {_first_line(error)}")
                    continue
                scale = np.linalg.norm(want[operation]) or 1.0
                distance = np.linalg.norm(got.astype(np.float64) - want[operation]) / scale
                stray = operation != "drhs" and np.any(got[live:])
                if not distance < limit or stray:
                    wrong.append(f"{where}: relative error {distance:.1e}, seed {seed}")
    print(f"checked with seed {seed}: {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    return wrong


def check_large(case: Case, operands: Operands, only: str) -> list[str]:
    """What is wrong at full size, for the first, a middle and the last group, in float32."""
    wrong = []
    lhs, rhs, grad, sizes = operands
    ends = np.cumsum(np.asarray(sizes))
    dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
    for candidate in implementations((case.hidden, case.mlp), lhs.dtype, slow=False):
        if only not in candidate.name:
            continue
        for operation in OPERATIONS:
            function = candidate.operation(operation)
            assert function is not None
            try:
                out = jax.jit(function)(*operands)
                for group in {0, len(ends) // 2, len(ends) - 1}:
                    rows = slice(ends[group] - int(sizes[group]), ends[group])
                    x, w, g = (a.astype(jnp.float32) for a in (lhs[rows], rhs[group], grad[rows]))
                    want, got = {
                        "product": lambda x, w, g, r=rows, o=out: (dot(x, w), o[r]),
                        "dlhs": lambda x, w, g, r=rows, o=out: (dot(g, w.T), o[r]),
                        "drhs": lambda x, w, g, i=group, o=out: (dot(x.T, g), o[i]),
                    }[operation](x, w, g)
                    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
                    if not error < 1e-2:
                        wrong.append(f"{case.name} {candidate.name} {operation}: {error:.1e}")
            except Exception as error:  # as above
                wrong.append(f"{case.name} {candidate.name} {operation}: {_first_line(error)}")
    print(f"checked {case.name}: {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    return wrong


def reference(
    lhs: jax.Array, rhs: jax.Array, grad: jax.Array, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three operations in float64, group by group."""
    x, w, g = (np.asarray(array).astype(np.float64) for array in (lhs, rhs, grad))
    product, dlhs, drhs = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        product[start:end] = x[start:end] @ w[group]
        dlhs[start:end] = g[start:end] @ w[group].T
        drhs[group] = x[start:end].T @ g[start:end]
    return product, dlhs, drhs


# ---- how fast --------------------------------------------------------------------------------


def random_operands(case: Case, dtype: Any, seed: int = 0) -> Operands:
    """lhs, rhs, grad, group_sizes: normal values; each live row in a uniformly drawn group."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (
        (case.num_rows, case.hidden),
        (case.num_groups, case.hidden, case.mlp),
        (case.num_rows, case.mlp),
    )
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    arrays = [normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    sizes = np.random.default_rng(seed).multinomial(
        case.live, np.full(case.num_groups, 1 / case.num_groups)
    )
    return (*arrays, jnp.asarray(sizes, jnp.int32))


def dense_operation(operation: str) -> Function:
    """A plain matmul of the same size, every row of the buffer by the first group's matrix."""

    def dense(lhs, rhs, grad, sizes):
        if operation == "product":
            return jnp.dot(lhs, rhs[0])
        if operation == "dlhs":
            return jnp.dot(grad, rhs[0].T)
        return jnp.dot(lhs.T, grad)

    return dense


def _compiled(
    function: Function, operands: Operands, args: argparse.Namespace
) -> Callable[[Operands], jax.Array] | str:
    """A compiled loop of calls that depend on each other; or why it could not be compiled."""

    def loop(operands: Operands) -> jax.Array:
        def body(_, link):
            # XLA for GPUs keeps the barriers, so each call computes its whole result anew; XLA
            # for CPUs drops them, and times there mean little.
            mine, link = lax.optimization_barrier((operands, link))
            out = lax.optimization_barrier(function(*mine))
            return link + out.reshape(-1)[0].astype(jnp.float32) * 1e-6

        return lax.fori_loop(0, args.iterations, body, jnp.float32(0))

    try:
        return jax.jit(loop).lower(operands).compile()
    except Exception as error:  # a kernel that cannot be compiled is a result too
        return _first_line(error)


def _timed(
    program: Callable[[Operands], jax.Array] | str, operands: Operands, args: argparse.Namespace
) -> float | str:
    """Seconds of one call, the median over repeats of the loop; or why it did not run."""
    if isinstance(program, str):
        return program
    try:
        times = []
        jax.block_until_ready(program(operands))
        for _ in range(args.repeats):
            start = time.perf_counter()
            jax.block_until_ready(program(operands))
            times.append((time.perf_counter() - start) / args.iterations)
        return statistics.median(times)
    except Exception as error:  # nor must one that crashes end the run
        return _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:90]}"


def _line(
    case: Case,
    operation: str,
    name: str,
    seconds: float | str,
    rows: int,
    dense: dict[str, float],
) -> tuple[str, ...]:
    """`rows`: how many of them count as work; dense: flop/s of the dense matmuls."""
    if isinstance(seconds, str):
        return case.name, operation, name, "", "", "", seconds
    rate = 2 * rows * case.hidden * case.mlp / seconds
    share = f"{rate / dense[operation]:.0%}" if operation in dense else ""
    return case.name, operation, name, f"{seconds * 1e3:.3f}", f"{rate / 1e12:.1f}", share, ""


def _order(case_names: list[str]) -> Callable[[tuple[str, ...]], tuple[Any, ...]]:
    def key(line: tuple[str, ...]) -> tuple[Any, ...]:
        milliseconds = float(line[3]) if line[3] else float("inf")
        operation = OPERATIONS.index(line[1]) if line[1] else 0
        return case_names.index(line[0]), operation, milliseconds

    return key


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
