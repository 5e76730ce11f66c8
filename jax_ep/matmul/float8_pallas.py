"""Calls the float8 kernels of `pallas_kernels.matmul` for `jax_ep.matmul.float8`.

The number of rows is padded to a multiple of 8 for these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.matmul.backend import pad_rows
from jax_ep.matmul.groups import Groups
from jax_ep.matmul.pallas import (
    as_elementwise,
    gradient_as_elementwise,
    in_32_bits,
    launch_size,
)
from pallas_kernels.matmul import float8 as kernels
from pallas_kernels.matmul import float8_drhs, float8_gate_gradient, quantize, transpose
from pallas_kernels.matmul.chosen_groups import output_rows
from pallas_kernels.matmul.quantized_tiles import Scaled


@in_32_bits
def quantize_matrices(matrices: jax.Array) -> list[jax.Array]:
    return [part for each in quantize.quantize_matrices(matrices) for part in each]


@in_32_bits
def transpose_rows(
    rows: Sequence[jax.Array], blocks: jax.Array, return_rows: bool
) -> list[jax.Array]:
    """Computes `jax_ep.matmul.float8.transpose_rows`; returns the arrays of its results.

    `rows` is [an array], or [values, scales] of rows that are quantized already.
    """
    if len(rows) > 1:
        return [*transpose.transpose_rows(Scaled(*rows), blocks)]
    kept, transposed = quantize.quantize_rows(rows[0], blocks, return_rows=return_rows)
    return [*(kept or ()), *transposed]


@in_32_bits
def product(pairs: Any, groups: Groups, dtype: Any, zero_unused: bool) -> jax.Array:
    num_rows = output_rows(groups, pairs[0][0][0].shape[0])
    padded = [(_padded(rows), Scaled(*matrices)) for rows, matrices in pairs]
    depth = sum(rows.values.shape[1] for rows, _ in padded)
    out = kernels.product(
        padded,
        groups,
        dtype=dtype,
        zero_unused=zero_unused,
        **launch_size(num_rows, depth, pairs[0][1][0].shape[1]),
    )
    return out[:num_rows]


@in_32_bits
def gated_product(
    lhs: Any, rhs: Any, groups: Groups, gating: Any, keep: bool
) -> list[jax.Array] | None:
    """Computes `jax_ep.matmul.float8.gated_product` in one kernel.

    Returns the values and the scales of each result in a flat list. Returns None if the kernel does
    not support the operations of `gating`.
    """
    first, second = (Scaled(*each) for each in rhs)
    num_rows, (num_cols, depth) = output_rows(groups, lhs[0].shape[0]), first.values.shape[1:]
    if (function := as_elementwise(gating)) is None:
        return None
    results = kernels.gated_product(
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
    """Computes `jax_ep.matmul.float8.gate_gradient` in one kernel.

    Returns the arrays of the result in a flat list. Returns None if the kernel does not support the
    operations of `gating`, or the dtype of `dhidden`.
    """
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
    return Scaled(*(pad_rows(part) for part in rows))
