"""Implements the backend "tokamax" by the kernels of the package tokamax, for NVIDIA GPUs.

They have no tuned tile sizes here. The gradient of the matrices is that of the backend "blocks":
in tokamax 0.0.17 it was off by 4 % of its norm on an H200, and no kernel for Ampere or Blackwell
computes it.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.matmul import blocks, xla
from jax_ep.matmul.backend import Backend, Problem, pad_rows, symbolic_rows_reason, zero_tail
from jax_ep.matmul.pallas import in_32_bits
from pallas_kernels.matmul.row_blocks import row_ranges


@in_32_bits
def tokamax_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    starts, ends = row_ranges(group_sizes, lhs.shape[0])
    # The kernels take a multiple of 8 rows, and groups, of `ends - starts` rows, that have no more.
    out = _ragged_dot(pad_rows(lhs), rhs, ends - starts, transpose_rhs=transpose_rhs)
    return zero_tail(out[: lhs.shape[0]], group_sizes)


def _ragged_dot(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    import tokamax

    # Without a name, tokamax would use `lax.ragged_dot` where it has no kernel.
    return tokamax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        xla.product_dims(transpose_rhs),
        preferred_element_type=lhs.dtype,
        implementation="mosaic",
    )


def unavailable_reason(problem: Problem) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "the package tokamax is not installed (pip install 'jax_ep[bench]'; Python >= 3.12)"
    if reason := symbolic_rows_reason(problem):
        return reason
    dtype, shape = jnp.dtype(problem.dtype), tuple(problem.matrix_shape)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {dtype}"
    if any(side % 8 for side in shape):
        return f"both sides of each group's matrix must be multiples of 8, but are {list(shape)}"
    if problem.platform is None:
        return None
    if problem.platform != "cuda" or jax.devices()[0].platform != "gpu":
        return f"tokamax needs an NVIDIA GPU here, and this program is for {problem.platform}"
    return _refusal(shape, dtype)


@functools.cache
@in_32_bits
def _refusal(matrix_shape: tuple[int, int], dtype: Any) -> str | None:
    """Returns why tokamax refuses groups' matrices [K, N] of this shape and dtype, or None."""
    depth, width = matrix_shape
    # A product, and the gradient of its rows, of 128 rows in 2 groups.
    for transpose_rhs, lhs_width in ((False, depth), (True, width)):
        lhs = jax.ShapeDtypeStruct((128, lhs_width), dtype)
        rhs = jax.ShapeDtypeStruct((2, depth, width), dtype)
        sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
        try:
            jax.eval_shape(
                functools.partial(_ragged_dot, transpose_rhs=transpose_rhs), lhs, rhs, sizes
            )
        except Exception as error:  # tokamax and its imports raise many kinds of errors
            return f"tokamax refuses it here: {error}"
    return None


BACKEND = Backend(
    name="tokamax",
    unavailable_reason=unavailable_reason,
    is_default=lambda problem: problem.platform == "cuda",
    product=tokamax_product,
    drhs=blocks.drhs,
)
