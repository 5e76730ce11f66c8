"""The float8 operations of `bench matmul`, whose operands are quantized before they are timed.

The OPERATIONS of `jax_ep.bench.matmul_operations` are computed from the same operands as in other
dtypes, quantized in the way in which experts of an MoE layer quantize theirs. A further operation,
QUANTIZE, is the quantization of the matrices itself, which a training step runs once. Its time is
compared with that of a copy of as many bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.bench.matmul_operations import Operands, check_groups, swiglu
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray, quantize
from jax_ep.matmul import float8
from jax_ep.matmul.float8 import QuantizedMatrices
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows, row_blocks

QUANTIZE = "quantize"
# The largest allowed relative error (in norm) of a group's result, for operations that need more
# than the usual 1e-2: "gated" rounds its result to float8, and "drhs" is compared with a result
# from operands that are not quantized.
LIMITS = {"gated": 4e-2, "drhs": 6e-2}


@dataclasses.dataclass(frozen=True)
class Float8Operands:
    """The operands of all operations of `bench matmul`, quantized to float8.

    There are R rows, in L groups, and a matrix [H, F] for each group.

    Attributes:
        rows: lhs [R, H], grad [R, F] and grad_1 [R, F] of `Operands`, quantized with a scale for
            each 128 numbers of a row.
        matrices: rhs and rhs_1 of `Operands`, each stored both as it is and transposed.
        transposed: lhs and grad, transposed for "drhs", with a scale for each block of 128 rows and
            128 columns.
        wide: rhs before it is quantized, [L, H, F], the operand of QUANTIZE.
        groups: [L, 2] int32, for each group the index of its first block of 128 rows in
            `transposed`, and its number of blocks; the second result of `row_blocks`.
        group_sizes: [L] int32, the number of rows of each group.
    """

    rows: tuple[QuantizedArray, QuantizedArray, QuantizedArray]
    matrices: tuple[QuantizedMatrices, QuantizedMatrices]
    transposed: tuple[TransposedRows, TransposedRows]
    wide: Any
    groups: Any
    group_sizes: Any


jax.tree_util.register_dataclass(
    Float8Operands, [field.name for field in dataclasses.fields(Float8Operands)], []
)


@jax.jit
def quantized(operands: Operands) -> Float8Operands:
    """Quantizes the operands of all operations.

    All arrays, those of `operands` and those of the result, have a leading axis of one rank.
    """
    o: Operands = jax.tree.map(lambda leaf: leaf[0], operands)
    blocks, groups = row_blocks(o.group_sizes, o.lhs.shape[0])

    def transposed(rows: jax.Array) -> TransposedRows:
        return float8.transpose_rows(rows, blocks)[1]

    rows, matrices = float8.quantize_rows, float8.quantize_matrices
    found = Float8Operands(
        rows=(rows(o.lhs), rows(o.grad), rows(o.grad_1)),
        matrices=(matrices(o.rhs), matrices(o.rhs_1)),
        transposed=(transposed(o.lhs), transposed(o.grad)),
        wide=o.rhs,
        groups=groups,
        group_sizes=o.group_sizes,
    )
    return jax.tree.map(lambda leaf: leaf[None], found)


def unavailable_reason(hidden: int, mlp: int) -> str | None:
    """Returns why matrices of shape [hidden, mlp] cannot be quantized, or None if they can."""
    if hidden % BLOCK == mlp % BLOCK == 0:
        return None
    return f"float8 needs H and F that are multiples of {BLOCK}, but they are {hidden} and {mlp}"


def operation(implementation: Any, op: str, dtype: Any) -> Callable[[Float8Operands], Any]:
    """Returns the function that computes the operation `op` in float8.

    The function takes `Float8Operands`. It returns a result of the dtype `dtype`, except that the
    results of "gated" and QUANTIZE are quantized. `implementation` is the implementation of
    `jax_ep.grouped_matmul`.
    """
    product = functools.partial(float8.product, dtype=dtype, implementation=implementation)

    def gated(o: Float8Operands) -> Any:
        gate, up = (each.transposed for each in o.matrices)
        return float8.gated_product(
            o.rows[0], (gate, up), o.group_sizes, swiglu, False, implementation
        )[0]

    def drhs(o: Float8Operands) -> Any:
        lhs, grad = o.transposed
        return float8.drhs_of_each(lhs, [grad], o.groups, dtype, implementation)[0]

    def sum_of_dlhs(o: Float8Operands) -> Any:
        matrices = (each.matrices for each in o.matrices)
        return product(list(zip(o.rows[1:], matrices, strict=True)), o.group_sizes)

    functions: dict[str, Callable[[Float8Operands], Any]] = {
        "product": lambda o: product([(o.rows[0], o.matrices[0].transposed)], o.group_sizes),
        "gated": gated,
        "dlhs": lambda o: product([(o.rows[1], o.matrices[0].matrices)], o.group_sizes),
        "drhs": drhs,
        "sum_of_dlhs": sum_of_dlhs,
        QUANTIZE: lambda o: float8.quantize_matrices(o.wide, implementation),
    }
    return functions[op]


def dense_operation(op: str, dtype: Any) -> Callable[[Float8Operands], Any]:
    """Returns the dense float8 matmul whose speed is the yardstick for the grouped operation `op`.

    The function takes `Float8Operands`. It is XLA's matmul of the values, without their scales, and
    treats all rows as a single group, as `matmul_operations.dense_operation` does. For QUANTIZE, it
    is no matmul: it negates the matrices, so that they are read and written as in a copy.
    """

    def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        dims = (((1,), (1,)), ((), ()))
        return lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.dtype(dtype))

    def forward(o: Float8Operands) -> jax.Array:
        return dot(o.rows[0].values, o.matrices[0].transposed.values[0])

    def backward(o: Float8Operands) -> jax.Array:
        return dot(o.rows[1].values, o.matrices[0].matrices.values[0])

    return {
        "product": forward,
        "gated": forward,
        "dlhs": backward,
        "drhs": lambda o: dot(o.transposed[0].values, o.transposed[1].values),
        "sum_of_dlhs": backward,
        QUANTIZE: lambda o: -o.wide,
    }[op]


def check(
    op: str, operands: Operands, shared: Float8Operands, out: Any, groups: Iterable[int]
) -> None:
    """Raises AssertionError unless the result of a float8 operation is right for some groups.

    The result is compared with one that is computed in float32 from the dequantized operands or,
    for "drhs", from the operands before they were quantized. The result of QUANTIZE is compared as
    a whole.

    Args:
        op: the operation.
        operands: the operands before they were quantized, without a leading axis of ranks.
        shared: the quantized operands, without a leading axis of ranks.
        out: the result.
        groups: the numbers of the groups to check.
    """
    if op == QUANTIZE:
        both = (each.dequantize(jnp.float32) for each in out)
        expected = quantize(operands.rhs, FLOAT8_MATRICES).dequantize(jnp.float32)
        for numbers, wanted in zip(both, (expected, expected.swapaxes(1, 2)), strict=True):
            # XLA for GPUs divides approximately, so a number may be rounded to the float8 value
            # next to the right one. That changes few numbers, each by an eighth at most.
            off = jnp.abs(numbers - wanted) > 1e-5 * jnp.abs(wanted)
            share = float(off.mean())
            error = float(jnp.linalg.norm(numbers - wanted) / jnp.linalg.norm(wanted))
            assert share < 1e-2 and error < 1e-2, (
                f"numbers are off by {error:.1e} in norm, and {share:.1%} of them differ"
            )
        return
    lhs, grad, grad_1 = (rows.dequantize(jnp.float32) for rows in shared.rows)
    rhs, rhs_1 = (each.matrices.dequantize(jnp.float32) for each in shared.matrices)
    numbers = Operands(lhs, rhs, grad, rhs_1, grad_1, operands.group_sizes)
    if op == "drhs":
        numbers = operands
    # Sets the result's rows past the last group to zero, because "gated" leaves them undefined.
    if op == "gated":
        live = jnp.arange(lhs.shape[0]) < jnp.sum(operands.group_sizes)
        out = jnp.where(live[:, None], out.dequantize(jnp.float32), 0)
    check_groups(op, numbers, out, groups, LIMITS.get(op, 1e-2))
