"""Calls kernels that read quantized matrices as they are stored, for `jax_ep.matmul.weight_only`.

There are two kinds. For a few rows that choose groups, `pallas_kernels.matmul.weight_only` reads
matrices in MXFP4 or float8, with biases and gating in its epilogue. For any rows, the kernels of
`pallas_kernels.matmul.grouped_matmul` and `gated_matmul` read matrices in MXFP4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.formats import FLOAT8_MATRICES, MXFP4, QuantizedArray, Transposed
from jax_ep.matmul import pallas
from jax_ep.matmul.float8 import is_operand_format
from jax_ep.matmul.gating import filled_biases
from jax_ep.matmul.groups import Groups
from jax_ep.matmul.pallas import as_elementwise, as_kernel_bias, in_32_bits
from pallas_kernels.formats import Format
from pallas_kernels.matmul import weight_only as kernels
from pallas_kernels.matmul.chosen_groups import ChosenGroups
from pallas_kernels.matmul.quantized_tiles import Scaled

# With more rows than this, the kernels for any rows are faster in MXFP4. Measured with 4 and 16.
_FEW_ROWS = 4


@in_32_bits
def few_rows(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: ChosenGroups,
    num_rows: int,
    gating: Any,
) -> jax.Array | None:
    """Computes `weight_only.product` for chosen groups by the kernel for a few rows.

    Returns None if the kernel cannot compute it, or if another one is faster.
    """
    (format, *others), (depth, width) = map(_kernel_format, matrices), matrices[0].shape[1:]
    if rows.dtype != jnp.bfloat16 or format is None or any(each != format for each in others):
        return None
    if format == MXFP4 and num_rows > _FEW_ROWS:
        return None
    if kernels.unsupported_reason(format, num_rows, depth, width):
        return None
    function = None if gating is None else as_elementwise(gating, len(matrices))
    if gating is not None and function is None:
        return None
    return kernels.product(
        rows,
        [Scaled(each.values, each.scales.astype(format.scale_dtype)) for each in matrices],
        [None if bias is None else as_kernel_bias(bias) for bias in biases],
        groups,
        num_rows=num_rows,
        format=format,
        gating=function,
    )


def product(
    rows: jax.Array, matrices: QuantizedArray, groups: Groups, zero_unused: bool
) -> jax.Array | None:
    """Multiplies each row by its group's matrix, or returns None if no kernel can."""
    if not _is_mxfp4(rows, [matrices]):
        return None
    pairs = [(rows, Scaled(matrices.values, matrices.scales))]
    return pallas.sum_of_products(pairs, groups, transpose_rhs=True, zero_unused=zero_unused)


def gated_product(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: Groups,
    gating: Any,
    keep: bool,
    zero_unused: bool,
) -> tuple[jax.Array, ...] | None:
    """Computes `Backend.gated_product` for quantized arrays, or returns None if no kernel can.

    `biases` [L, N] are added to the products before `gating` is applied, but not to the products
    that are returned; one of them, or both, may be None.
    """
    if not _is_mxfp4(rows, matrices):
        return None
    gate, up = (Scaled(each.values, each.scales) for each in matrices)
    return pallas.gated_product(
        rows,
        (gate, up),
        groups,
        gating,
        keep,
        biases=filled_biases(biases),
        zero_unused=zero_unused,
    )


def _is_mxfp4(rows: jax.Array, matrices: Sequence[QuantizedArray]) -> bool:
    """Returns whether the kernels for any rows can multiply `rows` by these matrices."""
    return rows.dtype == jnp.bfloat16 and all(_kernel_format(each) == MXFP4 for each in matrices)


def _kernel_format(matrices: QuantizedArray) -> Format | None:
    """Returns the format in which a kernel reads the matrices, or None if no kernel can.

    The matrices must be stored transposed. Float8 formats that differ from `FLOAT8_MATRICES` only
    in the dtype of the scales count as `FLOAT8_MATRICES`; the caller casts the scales.
    """
    if not isinstance(matrices.format, Transposed):
        return None
    format = matrices.format.transposes
    return FLOAT8_MATRICES if is_operand_format(format) else format
