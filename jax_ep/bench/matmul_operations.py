"""Defines the operations that `bench matmul` times, their sizes and operands, and result checks."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.matmul.backend import Backend

OPERATIONS = ("product", "gated", "dlhs", "drhs", "sum_of_dlhs")
# The operations that consist of two matrix products. Their yardstick, a dense matmul, is a single
# product.
OF_TWO_PAIRS = ("gated", "sum_of_dlhs")

# Maps the operands' dtype to the largest allowed relative error of a group's result: the norm of
# its difference from a float32 result, divided by the norm of the float32 result.
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of a grouped matmul: rows [num_rows, hidden] by num_groups matrices [hidden, mlp].

    Attributes:
      name: the name of the case.
      num_rows: R, the number of rows.
      hidden: H, the length of a row.
      mlp: F, the number of columns of a matrix.
      num_groups: L, the number of groups, each of which has a matrix.
      live: the number of rows that belong to groups. They come first; all later rows are unused.
      slow: whether the slow backends "xla" and "loop" are timed, too.
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
# The cases that are measured on CPUs.
SMALL_CASES = (
    Case("small", 256, 64, 128, 4, 200, slow=True),
    Case("small, wide", 64, 128, 64, 2, 64, slow=True),
    Case("small, whole blocks", 96, 256, 128, 3, 80, slow=True),
)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of all operations, as JAX or NumPy arrays.

    Attributes:
      lhs: [R, H], R rows, ordered by group.
      rhs: [L, H, F], a matrix [H, F] for each of the L groups.
      grad: [R, F], the cotangent of the product lhs @ rhs.
      rhs_1: [L, H, F], the matrices of the second product in "gated" and "sum_of_dlhs".
      grad_1: [R, F], the cotangent of the second product.
      group_sizes: [L] int32, the number of rows of each group.
    """

    lhs: Any
    rhs: Any
    grad: Any
    rhs_1: Any
    grad_1: Any
    group_sizes: Any


jax.tree_util.register_dataclass(
    Operands, [field.name for field in dataclasses.fields(Operands)], []
)
Function = Callable[[Operands], jax.Array]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def operation(backend: Backend, op: str) -> Function:
    """Returns the function that computes the operation `op`, one of OPERATIONS, with a backend.

    The function takes `Operands`. For "gated", it returns only swiglu(lhs @ rhs, lhs @ rhs_1),
    although the backend also returns the two products.
    """
    functions: dict[str, Function] = {
        "product": lambda o: backend.product(o.lhs, o.rhs, o.group_sizes, transpose_rhs=False),
        "gated": lambda o: backend.gated_product(
            o.lhs, (o.rhs, o.rhs_1), o.group_sizes, swiglu, False
        )[0],
        "dlhs": lambda o: backend.product(o.grad, o.rhs, o.group_sizes, transpose_rhs=True),
        "drhs": lambda o: backend.drhs(o.lhs, o.grad, o.group_sizes),
        "sum_of_dlhs": lambda o: backend.sum_of_products(
            [(o.grad, o.rhs), (o.grad_1, o.rhs_1)], o.group_sizes, transpose_rhs=True
        ),
    }
    return functions[op]


def dense_operation(operation: str) -> Function:
    """Returns the dense matmul whose speed is the yardstick for the grouped `operation`.

    The function takes `Operands` and treats all rows as a single group: it multiplies lhs or grad
    by the matrix of the first group or, for "drhs", lhs.T by grad. Of the two products of "gated"
    and "sum_of_dlhs", it computes only one.
    """
    return {
        "product": lambda o: jnp.dot(o.lhs, o.rhs[0]),
        "gated": lambda o: jnp.dot(o.lhs, o.rhs[0]),
        "dlhs": lambda o: jnp.dot(o.grad, o.rhs[0].T),
        "drhs": lambda o: jnp.dot(o.lhs.T, o.grad),
        "sum_of_dlhs": lambda o: jnp.dot(o.grad, o.rhs[0].T),
    }[operation]


def random_operands(case: Case, dtype: Any, seed: int) -> Operands:
    """Draws the operands of a case from a normal distribution, with groups of random sizes.

    Every array has a leading axis of length 1, because a `Loop` takes arrays with a leading axis of
    ranks. Each of the first `case.live` rows belongs to a group, and all groups are equally likely.
    """
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


def small_operands(dtype: Any) -> Iterator[Operands]:
    """Yields small NumPy operands, to check operations on empty, large and oddly sized groups.

    Rows past the last group are NaN. Each run of the program draws other random numbers.
    """
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    # Only three shapes are used, because every operation is compiled anew for each shape. In the
    # first and the last, `hidden` and `mlp` are multiples of 128, as float8 needs.
    for num_rows, sizes, hidden, mlp in (
        (1024, rng.multinomial(1000, rng.dirichlet(np.full(9, 0.3))), 256, 384),
        (768, np.array([0, 1, 640, 0, 7, 0]), 192, 64),
        (64, np.zeros(3, int), 128, 128),
    ):

        def array(*shape: int, first_nan: int | None = None) -> Any:
            values = rng.standard_normal(shape)
            if first_nan is not None:
                values[first_nan:] = np.nan
            return values.astype(dtype)

        live, matrices = int(sizes.sum()), (len(sizes), hidden, mlp)
        yield Operands(
            lhs=array(num_rows, hidden, first_nan=live),
            rhs=array(*matrices),
            grad=array(num_rows, mlp, first_nan=live),
            rhs_1=array(*matrices),
            grad_1=array(num_rows, mlp, first_nan=live),
            group_sizes=sizes.astype(np.int32),
        )


def check_groups(
    op: str, operands: Operands, out: Any, groups: Iterable[int], limit: float | None = None
) -> None:
    """Raises AssertionError unless the result of an operation is right for some of the groups.

    The part of the result that belongs to a group is compared with a result in float32, which NumPy
    computes if the operands are NumPy arrays, and else JAX. Except for "drhs", rows of the result
    past the last group must be zero.

    Args:
      op: the operation, one of OPERATIONS.
      operands: its operands.
      out: its result.
      groups: the numbers of the groups to check.
      limit: the largest allowed relative error (in norm) of a group. None: the one that LIMITS has
        for the operands' dtype.
    """
    o, limit = operands, LIMITS[operands.lhs.dtype.name] if limit is None else limit
    on_host = isinstance(o.lhs, np.ndarray)
    dot = np.matmul if on_host else functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
    ends = np.cumsum(np.asarray(o.group_sizes))
    if op != "drhs":
        assert not bool((out[ends[-1] :] != 0).any()), "rows past the last group are not zero"
    for group in groups:
        rows = slice(int(ends[group] - o.group_sizes[group]), int(ends[group]))
        x, g, g_1 = (array[rows].astype(np.float32) for array in (o.lhs, o.grad, o.grad_1))
        w, w_1 = (array[group].astype(np.float32) for array in (o.rhs, o.rhs_1))
        want = np.asarray(_of_group(op, dot, x, w, g, w_1, g_1))
        got = np.asarray(out[group] if op == "drhs" else out[rows]).astype(np.float32)
        error = float(np.linalg.norm(got - want) / np.maximum(np.linalg.norm(want), 1e-30))
        assert error < limit, f"group {group} is off by {error:.1e} of its norm, not {limit:g}"


def _of_group(op: str, dot: Any, x: Any, w: Any, g: Any, w_1: Any, g_1: Any) -> Any:
    """Computes the right result of the operation `op` for one group, with the matmul `dot`.

    x, g and g_1 are the group's rows of lhs, grad and grad_1. w and w_1 are the group's matrices in
    rhs and rhs_1.
    """
    if op == "product":
        return dot(x, w)
    if op == "gated":
        return swiglu(dot(x, w), dot(x, w_1))
    if op == "drhs":
        return dot(x.T, g)
    dlhs = dot(g, w.T)
    return dlhs if op == "dlhs" else dlhs + dot(g_1, w_1.T)
