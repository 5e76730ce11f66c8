"""Defines `grouped_matmul`, which multiplies each row by the matrix of the row's group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.formats import QuantizedArray
from jax_ep.formats.quantized_array import with_jax_dtype, without_gradient
from jax_ep.matmul import float8, unquantized, weight_only
from jax_ep.matmul.primitives import Implementation, check_implementation
from jax_ep.runtime.jax_compat import match_varying


def grouped_matmul(
    lhs: jax.Array | QuantizedArray,
    rhs: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies consecutive groups of rows by one matrix per group, such as an expert's weights.

    Rows [0, group_sizes[0]) of `lhs` are multiplied by `rhs[0]`, the next `group_sizes[1]` rows
    by `rhs[1]`, and so on. Sums are float32. Works under `jit`, `grad` (of any order, for both
    operands), `vmap` (one product after another), `jax.checkpoint`, `scan` and `shard_map`.

    Rows of `lhs` past the last group may hold anything, even NaN. The result and the gradient of
    `lhs` are zero in these rows, and the gradient of `rhs` does not depend on them. Only "xla"
    multiplies them.

    **Quantized operands.** Either operand may be a `QuantizedArray`, which has no gradient:

    - lhs in `jax_ep.formats.FLOAT8_ROWS` and rhs in `FLOAT8_MATRICES`, or in formats with other
      scales but the same blocks: "pallas" multiplies float8 values and scales their sums; products
      are added in about 14 bits, 128 at a time, and then in float32. Matrices in the format
      `jax_ep.formats.Transposed.of(FLOAT8_MATRICES)` are multiplied as they are stored; those in
      `FLOAT8_MATRICES` are transposed in each call. The other backends multiply float32.
    - lhs an array and rhs quantized: "pallas" reads matrices as they are stored if they are in
      `jax_ep.formats.Transposed.of(jax_ep.formats.MXFP4)` and lhs is bfloat16. Otherwise, and for
      the gradient of lhs, rhs is dequantized to the dtype of lhs.
    - All others: quantized operands are first dequantized to their dtype.

    Args:
      lhs: [R, H] floating: R rows, in group order. Or a `QuantizedArray` of this shape, such as
        `Dispatched.tokens` of `dispatch(..., output="quantized")`.
      rhs: [L, H, F], the dtype of lhs: one matrix for each of L groups. Or a `QuantizedArray`.
      group_sizes: [L] integer, 0 or more: the number of rows of each group. Rows past R are
        ignored. The result is undefined for a negative size or a sum above 2^31 - 1.
      implementation: the backend:
        "pallas"  this library's kernels for Hopper GPUs; bfloat16 and float16, H and F multiples
                  of 64; float8, H and F multiples of 128.
        "tokamax" kernels of the package tokamax, if it is installed, for NVIDIA GPUs; bfloat16 and
                  float16, H and F multiples of 8. The gradient of `rhs` is that of "blocks".
        "blocks"  batched matmuls of blocks of rows; any platform, made for GPUs.
        "loop"    a loop over groups and tiles of their rows; any platform, made for CPUs.
        "xla"     `jax.lax.ragged_dot`; any platform, slow on CPUs and GPUs.
        None      the fastest backend that supports the operands on the platform that the program
                  is compiled for.

    Returns:
      [R, F], the dtype of lhs; for a `QuantizedArray`, the dtype to which it is dequantized.

    Raises:
      TypeError, ValueError: an argument does not fit, or the named implementation cannot run
        here; the message says why.
    """
    checks.check_array("lhs", lhs, 2, jnp.floating, "[R, H]", may_be_quantized=True)
    options = dict(may_be_empty=False, may_be_quantized=True)
    checks.check_array("rhs", rhs, 3, jnp.floating, "[L, H, F]", **options)
    checks.check_array("group_sizes", group_sizes, 1, jnp.integer, "[L]", may_be_empty=False)
    if lhs.dtype != rhs.dtype:
        raise TypeError(
            f"lhs and rhs must have one dtype, but have {lhs.dtype} and {rhs.dtype}; "
            "cast one of them with .astype."
        )
    if lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            "the columns of lhs [R, H] must be the rows of each matrix of rhs [L, H, F], but lhs "
            f"has shape {lhs.shape} and rhs has shape {rhs.shape}."
        )
    if group_sizes.shape[0] != rhs.shape[0]:
        raise ValueError(
            "group_sizes must have one entry for each matrix of rhs [L, H, F], but has shape "
            f"{group_sizes.shape} where rhs has shape {rhs.shape}."
        )
    for name, operand in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        for part in jax.tree.leaves(operand):
            checks.check_not_sharded(name, part)
    lhs = without_gradient("lhs", with_jax_dtype(lhs))
    rhs = without_gradient("rhs", with_jax_dtype(rhs))
    # Without the barrier, XLA evaluates what follows from constant sizes while it compiles, slowly.
    sizes = lax.optimization_barrier(jnp.asarray(group_sizes, jnp.int32))
    lhs, rhs, sizes = match_varying((lhs, rhs, sizes))
    pair = None
    if isinstance(lhs, QuantizedArray) and isinstance(rhs, QuantizedArray):
        rows, matrices = float8.rows_as_operand(lhs), float8.matrices_as_operands(rhs)
        if rows is not None and matrices is not None:
            # The kernels contract the last axis of both operands; see `jax_ep.matmul.float8`.
            pair = rows, matrices.transposed
    check_implementation(implementation, rhs, matmul_dtype=float8.DTYPE if pair else None)
    if lhs.shape[0] == 0:
        # Like every other product, it must vary (vma) over the mesh axes over which lhs varies.
        empty, _ = match_varying((jnp.zeros((0, rhs.shape[2]), lhs.dtype), lhs))
        return empty
    if pair:
        return float8.product_of_float8([pair], sizes, lhs.dtype, implementation)
    lhs = weight_only.dequantized(lhs, lhs.dtype)
    if isinstance(rhs, QuantizedArray):
        (out,) = weight_only.product_of_stored(
            lhs, matrices=[rhs], biases=[None], groups=sizes, implementation=implementation
        )
        return out
    return unquantized.product_of_arrays(lhs, rhs, sizes, implementation)
