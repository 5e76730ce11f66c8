"""Calls the kernel of `pallas_kernels.matmul.weight_only` for `jax_ep.matmul.weight_only`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.formats import QuantizedArray, Transposed
from jax_ep.matmul.pallas import emitted
from pallas_kernels.matmul import weight_only as kernels
from pallas_kernels.matmul.chosen_groups import ChosenGroups
from pallas_kernels.matmul.quantized_tiles import Scaled


def product(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: ChosenGroups,
    num_rows: int,
    function: Any,
) -> jax.Array | None:
    """Computes `jax_ep.matmul.weight_only.product` by one kernel, or returns None if it cannot."""
    format, (depth, width) = matrices[0].format, matrices[0].shape[1:]
    if rows.dtype != jnp.bfloat16 or not isinstance(format, Transposed):
        return None
    if kernels.unsupported_reason(format.transposes, num_rows, depth, width):
        return None
    narrow = jnp.bfloat16, jnp.float32
    with jax.enable_x64(False):
        gating = None if function is None else emitted(function, len(matrices))
        if function is not None and gating is None:
            return None
        return kernels.product(
            rows,
            [Scaled(each.values, each.scales) for each in matrices],
            [
                bias if bias is None or bias.dtype in narrow else bias.astype(jnp.float32)
                for bias in biases
            ],
            groups,
            num_rows=num_rows,
            format=format.transposes,
            gating=gating,
        )
