"""Implements the backend "xla" by `jax.lax.ragged_dot_general`, for any platform.

The contract of `product` and `drhs` is in `jax_ep.matmul.backend`.
"""

from __future__ import annotations

import jax
from jax import lax

from jax_ep.dtypes import wide_dtype
from jax_ep.matmul.backend import Backend, zero_tail

_DRHS_DIMS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def ragged_dot_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    # What `ragged_dot_general` does with rows past the last group, maybe NaNs, is not defined.
    out = lax.ragged_dot_general(
        zero_tail(lhs, group_sizes),
        rhs,
        group_sizes,
        product_dims(transpose_rhs),
        preferred_element_type=wide_dtype(lhs.dtype),
    )
    return zero_tail(out.astype(lhs.dtype), group_sizes)


def drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    # Rows past the last group are zero in both operands: zero times a NaN of the other is NaN.
    return lax.ragged_dot_general(
        zero_tail(lhs, group_sizes),
        zero_tail(grad, group_sizes),
        group_sizes,
        _DRHS_DIMS,
        preferred_element_type=wide_dtype(lhs.dtype),
    ).astype(lhs.dtype)


def product_dims(transpose_rhs: bool) -> lax.RaggedDotDimensionNumbers:
    """Returns the dimension numbers with which `jax.lax.ragged_dot_general` computes `product`."""
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [2 if transpose_rhs else 1]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )


BACKEND = Backend(name="xla", product=ragged_dot_product, drhs=drhs)
