"""Calls the float8 kernels of `pallas_kernels.matmul` for `jax_ep.matmul.float8`.

Results are pytrees with the arrays of the primitives' results in their order, or None if no kernel
supports the arguments. Rows are padded to a multiple of 8 for these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.matmul.backend import pad_rows
from jax_ep.matmul.pallas import (
    as_elementwise,
    gradient_as_elementwise,
    in_32_bits,
    launch_size,
)
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul.chosen_groups import Groups, output_rows
from pallas_kernels.matmul.row_blocks import TransposedRows


@in_32_bits
def quantize_matrices(matrices: jax.Array) -> Any:
    from pallas_kernels.matmul import quantize

    return quantize.quantize_matrices(matrices)


@in_32_bits
def transpose_rows(rows: jax.Array | Scaled, blocks: jax.Array, return_rows: bool) -> Any:
    from pallas_kernels.matmul import quantize

    if isinstance(rows, Scaled):
        return quantize.transpose_rows(rows, blocks)
    return quantize.quantize_rows(rows, blocks, return_rows=return_rows)


@in_32_bits
def product_of_float8_by_kernel(
    pairs: Any, groups: Groups, dtype: Any, zero_unused: bool
) -> jax.Array:
    from pallas_kernels.matmul.float8 import float8_matmul

    rows, matrices = pairs[0]
    num_rows = output_rows(groups, rows.values.shape[0])
    padded = [(_padded(rows), matrices) for rows, matrices in pairs]
    depth = sum(rows.values.shape[1] for rows, _ in padded)
    out = float8_matmul(
        padded,
        groups,
        dtype=dtype,
        zero_unused=zero_unused,
        **launch_size(num_rows, depth, matrices.values.shape[1]),
    )
    return out[:num_rows]


@in_32_bits
def gated_product_of_float8_by_kernel(
    lhs: Scaled, rhs: Any, groups: Groups, gating: Any, keep: bool
) -> Any:
    from pallas_kernels.matmul.float8 import float8_gated_matmul

    first, second = rhs
    num_rows, (num_cols, depth) = output_rows(groups, lhs.values.shape[0]), first.values.shape[1:]
    if (function := as_elementwise(gating)) is None:
        return None
    results = float8_gated_matmul(
        _padded(lhs),
        (first, second),
        groups,
        function,
        keep=keep,
        **launch_size(num_rows, 2 * depth, num_cols),
    )
    return jax.tree.map(lambda part: part[:num_rows], results)


@in_32_bits
def gate_gradient(
    gating: Any, dhidden: jax.Array, products: Any, weights: jax.Array, blocks: jax.Array
) -> Any:
    from pallas_kernels.matmul import float8_gate_gradient

    if dhidden.dtype != jnp.bfloat16:
        return None
    if (function := gradient_as_elementwise(gating)) is None:
        return None
    gate, up = products
    return float8_gate_gradient.gate_gradient(function, dhidden, gate, up, weights, blocks)


@in_32_bits
def drhs_of_each(
    lhs: TransposedRows,
    grads: Sequence[TransposedRows],
    group_blocks: jax.Array,
    sums: Sequence[jax.Array] | None,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    from pallas_kernels.matmul import float8_drhs

    num_cols = sum(grad.values.shape[0] for grad in grads)
    size = launch_size(*lhs.values.shape, num_cols)
    return float8_drhs.drhs_of_each(lhs, grads, group_blocks, sums, dtype=jnp.dtype(dtype), **size)


def _padded(rows: Scaled) -> Scaled:
    return Scaled(*map(pad_rows, rows))
