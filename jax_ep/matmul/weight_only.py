"""Multiplies a few rows by matrices that are stored quantized, without quantizing the rows.

A few rows choose groups (`pallas_kernels.matmul.chosen_groups`), and each chosen group multiplies
all rows by its matrix. "pallas" reads the matrices of these groups as they are stored, if its
kernel knows their format. Otherwise XLA first dequantizes the matrices of the chosen groups, or all
matrices if they are fewer. The functions of this module have no gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jax_ep.dtypes import wide_dtype
from jax_ep.formats import QuantizedArray, Transposed
from jax_ep.matmul.api import IMPLEMENTATIONS, Implementation, bind, make_primitive
from jax_ep.matmul.backend import Backend, Problem, group_of_row, joined_groups
from pallas_kernels.formats import Format
from pallas_kernels.matmul.chosen_groups import ChosenGroups, of_gathered, output_rows


def product(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: ChosenGroups,
    num_rows: int,
    gating: Any = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Computes gating(rows @ matrices[0][group] + biases[0][group], ...) for each chosen group.

    Args:
      rows: [T, K] floating for all S groups, or [S * height, K]: the T rows of each group begin at
        row s * height.
      matrices: one or two quantized arrays [L, K, N].
      biases: for each of `matrices`, [L, N] floating, or None.
      groups: the chosen groups.
      num_rows: T.
      gating: None, or an elementwise function of the products, as float32 or wider.
      implementation: the implementation of the matmuls.

    Returns:
      [S * height, N], the dtype of `rows`. Products are rounded to this dtype before biases are
      added. Rows that are not of the T rows of a group are undefined.
    """
    return bind(
        weight_only_p,
        rows,
        *(part for each in matrices for part in (each.values, each.scales)),
        *(bias for bias in biases if bias is not None),
        groups.table,
        height=groups.height,
        num_rows=num_rows,
        formats=tuple(each.format for each in matrices),
        has_bias=tuple(bias is not None for bias in biases),
        gating=gating,
        implementation=implementation,
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        *("height", "num_rows", "formats", "has_bias", "gating", "implementation", "platform"),
    ),
)
def _compute(
    rows: jax.Array,
    *others: jax.Array,
    height: int,
    num_rows: int,
    formats: tuple[Format, ...],
    has_bias: tuple[bool, ...],
    gating: Any,
    implementation: Implementation,
    platform: str,
) -> jax.Array:
    count = 2 * len(has_bias)
    *of_biases, table = others[count:]
    left = iter(of_biases)
    biases = [next(left) if each else None for each in has_bias]
    matrices = [
        QuantizedArray(others[2 * i], others[2 * i + 1], format, rows.dtype)
        for i, format in enumerate(formats)
    ]
    problem = Problem(matrices[0].shape[1:], rows.dtype, platform, rows.shape[0])
    backend = IMPLEMENTATIONS.select(implementation, problem)
    groups = joined_groups(table, height)
    if backend.name == "pallas":
        from jax_ep.matmul import weight_only_pallas

        out = weight_only_pallas.product(rows, matrices, biases, groups, num_rows, gating)
        if out is not None:
            return out
    return _by_dequantizing(backend, rows, matrices, biases, groups, gating)


def _by_dequantizing(
    backend: Backend,
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: ChosenGroups,
    gating: Any,
) -> jax.Array:
    """Dequantizes the matrices of the chosen groups, or all if they are fewer, and multiplies."""
    wide, of_rows = wide_dtype(rows.dtype), group_of_row(groups, len(rows))
    if len(groups.table) - 1 < matrices[0].shape[0]:
        indices, groups = of_gathered(groups)
        matrices = jax.tree.map(lambda part: part[indices], matrices)
    dense = [dequantized_as_stored(each, rows.dtype) for each in matrices]
    if gating is not None and len(dense) == 2 and list(biases) == [None, None]:
        (gate, gate_is_transposed), (up, up_is_transposed) = dense
        if not gate_is_transposed and not up_is_transposed:
            return backend.gated_product(
                rows, (gate, up), groups, gating, False, zero_unused=False
            )[0]
    numbers = []
    for (each, is_transposed), bias in zip(dense, biases, strict=True):
        number = backend.sum_of_products(
            [(rows, each)], groups, transpose_rhs=is_transposed, zero_unused=False
        ).astype(wide)
        numbers.append(number if bias is None else number + bias.astype(wide)[of_rows])
    result = numbers[0] if gating is None else gating(*numbers)
    return result.astype(rows.dtype)


def dequantized(matrices: jax.Array | QuantizedArray, dtype: Any) -> jax.Array:
    """Returns matrices as an array of `dtype`: casts an array, dequantizes a `QuantizedArray`."""
    if not isinstance(matrices, QuantizedArray):
        return matrices.astype(dtype)
    # Without the barrier, XLA may fuse the dequantization with the matmul that follows, and leave
    # out the rounding to `dtype`.
    return lax.optimization_barrier(matrices.dequantize(dtype))


def dequantized_as_stored(matrices: QuantizedArray, dtype: Any) -> tuple[jax.Array, bool]:
    """Dequantizes matrices to `dtype`, in the axis order in which they are stored.

    To dequantize a matrix and to transpose it would take another pass over it. Also returns whether
    the result holds the transposes of the matrices.
    """
    is_transposed = isinstance(matrices.format, Transposed)
    if isinstance(matrices.format, Transposed):
        format = matrices.format.transposes
        matrices = QuantizedArray(matrices.values, matrices.scales, format, matrices.dtype)
    return dequantized(matrices, dtype), is_transposed


def _type(rows, values, *others, height, formats, **_):
    num_rows = output_rows(joined_groups(others[-1], height), rows.shape[0])
    return num_rows, formats[0].numbers_shape(tuple(values.shape))[2]


weight_only_p = make_primitive("weight_only_matmul", _type, _compute, several=False)
