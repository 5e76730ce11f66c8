"""Calls the float8 kernels of `pallas_kernels.matmul` for `jax_ep.matmul.float8`.

Quantized operands are pairs (values, scales). Results are flat lists of values and scales, or None
if no kernel supports the arguments. Rows are padded to a multiple of 8 for these kernels.
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


@in_32_bits
def quantize_matrices(matrices: jax.Array) -> list[jax.Array]:
    from pallas_kernels.matmul import quantize

    return [part for each in quantize.quantize_matrices(matrices) for part in each]


@in_32_bits
def transpose_rows(
    rows: Sequence[jax.Array], blocks: jax.Array, return_rows: bool
) -> list[jax.Array]:
    """`rows` is [an array], or [values, scales] of rows that are quantized already."""
    from pallas_kernels.matmul import quantize

    if len(rows) > 1:
        return [*quantize.transpose_rows(Scaled(*rows), blocks)]
    kept, transposed = quantize.quantize_rows(rows[0], blocks, return_rows=return_rows)
    return [*(kept or ()), *transposed]


@in_32_bits
def product_of_float8_by_kernel(
    pairs: Any, groups: Groups, dtype: Any, zero_unused: bool
) -> jax.Array:
    from pallas_kernels.matmul.float8 import float8_matmul

    num_rows = output_rows(groups, pairs[0][0][0].shape[0])
    padded = [(_padded(rows), Scaled(*matrices)) for rows, matrices in pairs]
    depth = sum(rows.values.shape[1] for rows, _ in padded)
    out = float8_matmul(
        padded,
        groups,
        dtype=dtype,
        zero_unused=zero_unused,
        **launch_size(num_rows, depth, pairs[0][1][0].shape[1]),
    )
    return out[:num_rows]


@in_32_bits
def gated_product_of_float8_by_kernel(
    lhs: Any, rhs: Any, groups: Groups, gating: Any, keep: bool
) -> list[jax.Array] | None:
    from pallas_kernels.matmul.float8 import float8_gated_matmul

    first, second = (Scaled(*each) for each in rhs)
    num_rows, (num_cols, depth) = output_rows(groups, lhs[0].shape[0]), first.values.shape[1:]
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
    return [part[:num_rows] for each in results for part in each]


@in_32_bits
def gate_gradient(
    gating: Any, dhidden: jax.Array, products: Any, weights: jax.Array, blocks: jax.Array
) -> list[jax.Array] | None:
    from pallas_kernels.matmul import float8_gate_gradient

    if dhidden.dtype != jnp.bfloat16:
        return None
    if (function := gradient_as_elementwise(gating)) is None:
        return None
    gate, up = (Scaled(*products[i : i + 2]) for i in (0, 2))
    results = float8_gate_gradient.gate_gradient(function, dhidden, gate, up, weights, blocks)
    return jax.tree.leaves(results)


@in_32_bits
def drhs_of_each(
    lhs: Any, grads: Any, group_blocks: jax.Array, sums: Sequence[jax.Array] | None, dtype: Any
) -> list[jax.Array]:
    from pallas_kernels.matmul import float8_drhs

    num_cols = sum(values.shape[0] for values, _ in grads)
    return list(
        float8_drhs.drhs_of_each(
            lhs,
            grads,
            group_blocks,
            sums,
            dtype=jnp.dtype(dtype),
            **launch_size(*lhs[0].shape, num_cols),
        )
    )


def _padded(rows: Any) -> Scaled:
    """Appends zeros to the values and the scales of rows; see `pad_rows`."""
    return Scaled(*(pad_rows(part) for part in rows))
