"""Calls the kernel of `pallas_kernels.matmul.weight_only` for `jax_ep.matmul.weight_only`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray, Transposed
from jax_ep.matmul.float8 import is_operand_format
from jax_ep.matmul.pallas import emitted
from pallas_kernels.formats import Format
from pallas_kernels.matmul import weight_only as kernels
from pallas_kernels.matmul.chosen_groups import ChosenGroups
from pallas_kernels.matmul.quantized_tiles import Scaled


def product(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: ChosenGroups,
    num_rows: int,
    gating: Any,
) -> jax.Array | None:
    """Computes `jax_ep.matmul.weight_only.product` by one kernel, or returns None if it cannot."""
    (format, *others), (depth, width) = map(_kernel_format, matrices), matrices[0].shape[1:]
    if rows.dtype != jnp.bfloat16 or format is None or any(each != format for each in others):
        return None
    if kernels.unsupported_reason(format, num_rows, depth, width):
        return None
    supported = jnp.bfloat16, jnp.float32
    with jax.enable_x64(False):
        function = None if gating is None else emitted(gating, len(matrices))
        if gating is not None and function is None:
            return None
        return kernels.product(
            rows,
            [Scaled(each.values, each.scales.astype(format.scale_dtype)) for each in matrices],
            [
                bias if bias is None or bias.dtype in supported else bias.astype(jnp.float32)
                for bias in biases
            ],
            groups,
            num_rows=num_rows,
            format=format,
            gating=function,
        )


def _kernel_format(matrices: QuantizedArray) -> Format | None:
    """Returns the format in which the kernel takes the transposes of matrices, or None if in none.

    It is `FLOAT8_MATRICES`, too, where `is_operand_format` holds: only the scales are then cast.
    """
    if not isinstance(matrices.format, Transposed):
        return None
    format = matrices.format.transposes
    return FLOAT8_MATRICES if is_operand_format(format) else format
