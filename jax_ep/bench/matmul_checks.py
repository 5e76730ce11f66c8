"""Checks the results of grouped matmuls, for `bench matmul --check`."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.bench import measuring
from jax_ep.bench.matmul_baselines import available
from jax_ep.bench.matmul_operations import OPERATIONS, Operands, operation, swiglu
from jax_ep.bench.timing import Loop

# The largest relative error that a result may have, in norm, by the operands' dtype.
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}


def check(dtype: Any, only: Collection[str], ops: Sequence[str] = OPERATIONS) -> list[str]:
    """Compares every backend with float64 on small random operands, different in each run.

    Args:
      dtype: the operands' dtype.
      only: the names of the backends to check.
      ops: the operations to check, of OPERATIONS.

    Returns:
      A line of text for each wrong result.
    """
    seed = int.from_bytes(os.urandom(4), "little")
    wrong = []
    for operands in _small_operands(np.random.default_rng(seed), dtype):
        _, hidden, mlp = operands.rhs.shape
        want = reference(operands)
        sizes = operands.group_sizes.tolist()
        for backend in available((hidden, mlp), dtype):
            for op in ops if backend.name in only else ():
                where = (
                    f"{backend.name}, {op}, {list(operands.lhs.shape)} x "
                    f"{list(operands.rhs.shape)} by {sizes}"
                )
                try:
                    got = np.asarray(jax.jit(operation(backend, op))(operands))
                except Exception as error:  # each kernel fails in its own way; say how and go on
                    wrong.append(f"{where}: {measuring.first_line(error)}")
                    continue
                scale = np.linalg.norm(want[op]) or 1.0
                distance = np.linalg.norm(got.astype(np.float64) - want[op]) / scale
                stray = op != "drhs" and np.any(got[sum(sizes) :])
                if not distance < LIMITS[dtype.name] or stray:
                    wrong.append(f"{where}: relative error {distance:.1e}, seed {seed}")
    return wrong


def _small_operands(rng: np.random.Generator, dtype: Any) -> Iterator[Operands]:
    """Yields random operands with empty, large and odd groups, and NaN past the last group."""
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

        yield Operands(
            rows(hidden), matrices(), rows(mlp), matrices(), rows(mlp), jnp.asarray(sizes, np.int32)
        )


def check_some_groups(op: str, state: Operands, loop: Loop) -> None:
    """Raises AssertionError unless a loop's result is right in its first, middle and last group.

    The groups are compared with float32, and rows past the last group with zero.
    """
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
    """Computes an operation, by `dot`, on one group's rows x, g, g_1 and matrices w, w_1."""
    if op == "product":
        return dot(x, w)
    if op == "gated":
        return np.asarray(swiglu(dot(x, w), dot(x, w_1)))
    if op == "drhs":
        return dot(x.T, g)
    dlhs = dot(g, w.T)
    return dlhs if op == "dlhs" else dlhs + dot(g_1, w_1.T)


def reference(operands: Operands) -> dict[str, np.ndarray]:
    """Computes the results of all operations in float64, group by group, by operation."""
    o = jax.tree.map(np.asarray, operands)
    x, w, g, w_1, g_1 = (a.astype(np.float64) for a in (o.lhs, o.rhs, o.grad, o.rhs_1, o.grad_1))
    out = {op: np.zeros(g.shape) for op in ("product", "gated")}
    out["drhs"] = np.zeros(w.shape)
    out |= {"dlhs": np.zeros(x.shape), "sum_of_dlhs": np.zeros(x.shape)}
    ends = np.cumsum(o.group_sizes)
    for group, (start, end) in enumerate(zip(ends - o.group_sizes, ends, strict=True)):
        rows = slice(start, end)
        factors = x[rows], w[group], g[rows], w_1[group], g_1[rows]
        for op, result in out.items():
            result[group if op == "drhs" else rows] = of_group(op, np.matmul, *factors)
    return out
