"""Computes grouped matmuls of float8 rows and matrices, and quantizes their operands.

Only "pallas" multiplies float8 values; the others multiply the numbers as float32. The kernels of
"pallas" add 128 products in about 14 bits, and then add these sums in float32, so

    |out - exact| <= 2^-12 * (sum of |products|) + what rounding to the result's dtype adds,

if the products have about the same magnitude. The tensor cores cut each of the 128 products off at
about 2^-13 of the largest one. If a few products are much larger than the others, the error of the
sum may be up to 128 * 2^-13 = 2^-6 of the largest product.

The tensor cores need the contracted dimension innermost in both operands. Therefore `product` takes
transposed matrices. `drhs_of_each`, which contracts over rows, takes rows that `transpose_rows` has
transposed, with scales that 128 rows of a group share. Each group's rows are then padded to blocks
of 128 rows; P is the number of rows of all blocks.

The functions of this module have no gradients; `jax_ep.moe.expert_matmuls` computes the gradients
of the experts with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.dtypes import rounded
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, QuantizedArray, Transposed, quantize
from jax_ep.matmul.backend import Backend, added, pad_rows
from jax_ep.matmul.gating import Gating
from jax_ep.matmul.pallas import as_elementwise, elementwise_gradient, in_32_bits, launch_size
from jax_ep.matmul.primitives import Implementation, define, select
from jax_ep.runtime import jax_compat
from pallas_kernels.formats import Float8, Format, Scaled
from pallas_kernels.matmul.chosen_groups import Groups, group_of_row, output_rows
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows, with_shared_scales

DTYPE = jnp.dtype(jnp.float8_e4m3fn)
# The format in which `transpose_rows` quantizes rows: one scale for each 128 rows by 128 columns.
_BLOCKS_OF_ROWS = Float8.of(DTYPE, (BLOCK, BLOCK))


class QuantizedMatrices(NamedTuple):
    """Matrices [L, K, N] in `FLOAT8_MATRICES`; a product and its gradient contract other axes."""

    matrices: QuantizedArray
    transposed: QuantizedArray


def is_operand_format(format: Format, wanted: Float8 = FLOAT8_MATRICES) -> bool:
    # Casting these scales to float32 rounds nothing.
    exact = format.scale_dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return (format.dtype, format.block) == (wanted.dtype, wanted.block) and exact


def rows_as_operand(rows: QuantizedArray) -> QuantizedArray | None:
    """Returns quantized rows in `FLOAT8_ROWS`, or None if this would round the numbers."""
    if not is_operand_format(rows.format, FLOAT8_ROWS):
        return None
    return QuantizedArray(rows.values, rows.scales.astype(jnp.float32), FLOAT8_ROWS, rows.dtype)


def matrices_as_operands(stored: QuantizedArray) -> QuantizedMatrices | None:
    """Returns quantized matrices as operands, or None if this would round the numbers."""
    is_transposed = isinstance(stored.format, Transposed)
    format = stored.format.transposes if isinstance(stored.format, Transposed) else stored.format
    if not is_operand_format(format):
        return None
    scales = stored.scales.astype(jnp.float32)
    as_stored = QuantizedArray(stored.values, scales, FLOAT8_MATRICES, stored.dtype)
    swapped = jax.tree.map(lambda part: jnp.swapaxes(part, 1, 2), as_stored)
    return QuantizedMatrices(*((swapped, as_stored) if is_transposed else (as_stored, swapped)))


def quantize_matrices(
    matrices: jax.Array, implementation: Implementation = None
) -> QuantizedMatrices:
    """Quantizes matrices [L, K, N] in `FLOAT8_MATRICES`; returns them and their transposes."""
    FLOAT8_MATRICES.check_shape("matrices", matrices.shape)
    both = _QUANTIZE_MATRICES(matrices, implementation=implementation)
    return QuantizedMatrices(*(_array(FLOAT8_MATRICES, each, matrices.dtype) for each in both))


def _array(format: Float8, parts: Scaled, dtype: Any) -> QuantizedArray:
    return QuantizedArray(parts.values, parts.scales, format, dtype)


def _parts(array: QuantizedArray) -> Scaled:
    return Scaled(array.values, array.scales)


def quantize_rows(rows: jax.Array) -> QuantizedArray:
    return quantize(rows, FLOAT8_ROWS)


def transpose_rows(
    rows: jax.Array | QuantizedArray,
    blocks: jax.Array,
    *,
    return_rows: bool = False,
    implementation: Implementation = None,
) -> tuple[QuantizedArray | None, TransposedRows]:
    """Quantizes rows [R, K], with a scale per 128 rows by 128 columns, and transposes them: [K, P].

    `blocks` is the first result of `row_blocks`; blocks without rows are undefined. Rows that are
    in `FLOAT8_ROWS` already are rounded again, to the largest of the scales of 128 rows. With
    `return_rows`, the rows are also returned in `FLOAT8_ROWS`.
    """
    if isinstance(rows, QuantizedArray):
        options = dict(return_rows=False, implementation=implementation)
        _, transposed = _TRANSPOSE_ROWS(_parts(rows), blocks, **options)
        return rows if return_rows else None, transposed
    options = dict(return_rows=return_rows, implementation=implementation)
    quantized, transposed = _TRANSPOSE_ROWS(rows, blocks, **options)
    return _array(FLOAT8_ROWS, quantized, rows.dtype) if return_rows else None, transposed


def product_of_float8(
    pairs: Sequence[tuple[QuantizedArray, QuantizedArray]],
    groups: Groups,
    dtype: Any,
    implementation: Implementation = None,
    zero_unused: bool = True,
) -> jax.Array:
    """Sums the products of pairs of rows [R, K] and their groups' transposed matrices [L, N, K]."""
    return _PRODUCT(
        tuple((_parts(rows), _parts(matrices)) for rows, matrices in pairs),
        groups,
        dtype=jnp.dtype(dtype),
        implementation=implementation,
        # JAX would report NaNs in rows that are undefined.
        zero_unused=zero_unused or jax_compat.looks_for_nans(),
    )


def gated_product_of_float8(
    lhs: QuantizedArray,
    rhs: tuple[QuantizedArray, QuantizedArray],
    groups: Groups,
    gating: Gating,
    keep: bool,
    implementation: Implementation = None,
) -> tuple[QuantizedArray, ...]:
    """Applies `gating` to the float32 products of lhs [R, K] with two transposed [L, N, K].

    Returns (hidden,), or with `keep` (hidden, product, product), in `FLOAT8_ROWS`. Rows past the
    last group are undefined.
    """
    options = dict(gating=gating, keep=keep, implementation=implementation)
    results = _GATED(_parts(lhs), tuple(map(_parts, rhs)), groups, **options)
    return tuple(_array(FLOAT8_ROWS, each, lhs.dtype) for each in results)


class GateGradient(NamedTuple):
    # the gradient of each product: rows, and the rows transposed
    dpre: tuple[tuple[QuantizedArray, TransposedRows], tuple[QuantizedArray, TransposedRows]]
    hidden: TransposedRows  # the hidden values times their weights, transposed
    dweights: jax.Array  # [R] float32


def gate_gradient(
    gating: Gating,
    dhidden: jax.Array,
    products: Sequence[QuantizedArray],
    weights: jax.Array,
    blocks: jax.Array,
    implementation: Implementation = None,
) -> GateGradient:
    """Computes the gradient of weights[:, None] * gating(*products), and quantizes the results.

    dhidden is [R, F], the two products [R, F] in `FLOAT8_ROWS`, the weights [R]; `blocks` is as in
    `transpose_rows`. Results are rounded to dhidden's dtype first. Rows past the last group, and
    blocks without rows, are undefined.
    """
    operands = dhidden, tuple(map(_parts, products)), weights, blocks
    options = dict(gating=gating, implementation=implementation)
    rows, transposed, sums = _GATE_GRADIENT(*operands, **options)
    dgate, dup = (_array(FLOAT8_ROWS, each, dhidden.dtype) for each in rows)
    dgate_transposed, dup_transposed, hidden = transposed
    dpre = (dgate, dgate_transposed), (dup, dup_transposed)
    return GateGradient(dpre, hidden, dweights=sums.sum(axis=1))  # `sums`: [R, F / 128]


def drhs_of_each(
    lhs: TransposedRows,
    grads: Sequence[TransposedRows],
    group_blocks: jax.Array,
    dtype: Any,
    implementation: Implementation = None,
    sums: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of L groups' matrices, [L, K, N] for each cotangent in `grads`.

    lhs has values [K, P], each cotangent [N, P]. `group_blocks` is the second result of
    `row_blocks`. The gradients are added to `sums`, if given, in their dtype.
    """
    dtype = jnp.dtype(sums[0].dtype if sums else dtype)
    operands = lhs, tuple(grads), group_blocks, None if sums is None else tuple(sums)
    return _DRHS(*operands, dtype=dtype, implementation=implementation)


# The following functions compute the results of the primitives, which are defined at the end.
# Quantized operands and results are `Scaled`.


def _selected(
    implementation: Implementation, platform: str, matrix_shape: Sequence[int], num_rows: Any
) -> tuple[Backend, bool]:
    """Returns the backend, and whether it has float8 kernels."""
    backend = select(implementation, platform, matrix_shape, DTYPE, num_rows, has_scales=True)
    return backend, backend.name == "pallas"


def _encode(format: Float8, x: jax.Array) -> Scaled:
    return _parts(quantize(x, format))


def _compute_matrices(matrices, *, implementation, platform):
    _, has_kernels = _selected(implementation, platform, matrices.shape[1:], num_rows=None)
    if has_kernels:
        from pallas_kernels.matmul import quantize as kernels

        return in_32_bits(kernels.quantize_matrices)(matrices)
    encoded = _encode(FLOAT8_MATRICES, matrices)
    return encoded, Scaled(*(jnp.swapaxes(part, 1, 2) for part in encoded))


def _compute_transposed(rows, blocks, *, return_rows, implementation, platform):
    num_rows, width = jax.tree.leaves(rows)[0].shape
    # No matrix takes part, so only the width must suit the kernels.
    _, has_kernels = _selected(implementation, platform, (width, width), num_rows)
    if has_kernels:
        from pallas_kernels.matmul import quantize as kernels

        if isinstance(rows, Scaled):
            # The quantized rows, None, may be left out: `define` puts results in their places.
            return in_32_bits(kernels.transpose_rows)(rows, blocks)
        return in_32_bits(kernels.quantize_rows)(rows, blocks, return_rows=return_rows)
    return _transposed_by_xla(rows, blocks, return_rows)


def _transposed_by_xla(
    rows: jax.Array | Scaled, blocks: jax.Array, return_rows: bool
) -> tuple[Scaled | None, TransposedRows]:
    """Computes `transpose_rows`; returns the quantized rows, or None, and the transposed ones."""
    width = jax.tree.leaves(rows)[0].shape[1]  # K
    # `blocks` has each block's first row and its number of rows, and `row` [P / 128, 128] all of
    # its rows. A block of fewer rows than 128 is filled with zeros.
    row_in_block = jnp.arange(BLOCK, dtype=jnp.int32)[None]
    exists = (row_in_block < blocks[:, 1:])[..., None]
    row = jnp.where(exists[..., 0], blocks[:, :1] + row_in_block, 0)

    def in_blocks(part: jax.Array) -> jax.Array:
        """Gathers the rows of an array [R, ...] by block: [P / 128, 128, ...]."""
        return jnp.where(exists, part.at[row].get(mode="clip"), 0)

    if isinstance(rows, Scaled):
        # Values become [P / 128, K / 128, 128, 128], and scales of rows [P / 128, K / 128, 128].
        tiles = in_blocks(rows.values).reshape(-1, BLOCK, width // BLOCK, BLOCK)
        values, scales = with_shared_scales(
            jnp.moveaxis(tiles, 2, 1), in_blocks(rows.scales).swapaxes(1, 2)
        )
        # Without the barrier, XLA may leave out the rounding, as in `jax_ep.quantize`.
        values = lax.optimization_barrier(values)
        return None, TransposedRows(jnp.moveaxis(values, 2, 1).reshape(-1, width).T, scales)
    wide = rows.astype(jnp.float32)
    quantized = _encode(FLOAT8_ROWS, wide) if return_rows else None
    values, scales = _encode(_BLOCKS_OF_ROWS, in_blocks(wide).reshape(-1, width))
    return quantized, TransposedRows(values.T, scales)


def _exact(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function so that its matmuls do not round float32 numbers to TF32."""

    @functools.wraps(compute)
    def run(*operands: Any, **options: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return compute(*operands, **options)

    return run


@_exact
def _compute_product(pairs, groups, *, dtype, implementation, platform, zero_unused):
    rows, matrices = pairs[0]
    shape = matrices.values.shape[1:]
    backend, has_kernels = _selected(implementation, platform, shape, rows.values.shape[0])
    if has_kernels:
        return _product_by_kernel(pairs, groups, dtype, zero_unused)
    return _sum_of_products(backend, pairs, groups, zero_unused).astype(dtype)


@in_32_bits
def _product_by_kernel(pairs: Any, groups: Groups, dtype: Any, zero_unused: bool) -> jax.Array:
    from pallas_kernels.matmul.float8 import float8_matmul

    rows, matrices = pairs[0]
    num_rows = output_rows(groups, rows.values.shape[0])
    depth = sum(rows.values.shape[1] for rows, _ in pairs)
    out = float8_matmul(
        [(Scaled(*map(pad_rows, rows)), matrices) for rows, matrices in pairs],
        groups,
        dtype=dtype,
        zero_unused=zero_unused,
        **launch_size(num_rows, depth, matrices.values.shape[1]),
    )
    return out[:num_rows]


def _sum_of_products(
    backend: Backend,
    pairs: Sequence[tuple[Scaled, Scaled]],
    groups: Groups,
    zero_unused: bool = True,
) -> jax.Array:
    """Sums products of rows and transposed matrices in float32; NaNs stay in their group."""
    wide = [
        (FLOAT8_ROWS.decode(rows, jnp.float32), FLOAT8_MATRICES.decode(matrices, jnp.float32))
        for rows, matrices in pairs
    ]
    # A backend may multiply each matrix by all rows, with other groups' rows set to zero, and zero
    # times NaN is NaN. So NaNs are first replaced by zeros, and then set in the results that they
    # should have reached.
    finite = [(rows, jnp.where(jnp.isnan(matrices), 0, matrices)) for rows, matrices in wide]
    out = backend.sum_of_products(finite, groups, transpose_rhs=True, zero_unused=zero_unused)
    nan_columns = [jnp.isnan(matrices).any(axis=2) for _, matrices in wide]
    group = group_of_row(groups, wide[0][0].shape[0])
    has_nan = functools.reduce(jnp.logical_or, nan_columns)
    is_nan = has_nan.at[group].get(mode="fill", fill_value=False)
    return jnp.where(is_nan, jnp.nan, out)


@_exact
def _compute_gated(lhs, rhs, groups, *, gating, keep, implementation, platform):
    shape = rhs[0].values.shape[1:]
    backend, has_kernels = _selected(implementation, platform, shape, lhs.values.shape[0])
    if has_kernels:
        results = gated_product_by_kernel(lhs, rhs, groups, gating, keep)
        if results is not None:
            return results
        products = [
            _product_by_kernel([(lhs, each)], groups, jnp.float32, zero_unused=False)
            for each in rhs
        ]
    else:
        products = [_sum_of_products(backend, [(lhs, each)], groups) for each in rhs]
    hidden = gating(*products).astype(jnp.float32)
    return [_encode(FLOAT8_ROWS, each) for each in [hidden, *(products if keep else ())]]


@in_32_bits
def gated_product_by_kernel(
    lhs: Scaled, rhs: tuple[Scaled, Scaled], groups: Groups, gating: Gating, keep: bool
) -> Any:
    """Computes `gated_product_of_float8` by a kernel; None if none can call `gating`."""
    from pallas_kernels.matmul.float8 import float8_gated_matmul

    if (function := as_elementwise(gating)) is None:
        return None
    num_rows = output_rows(groups, lhs.values.shape[0])
    _, num_cols, depth = rhs[0].values.shape
    size = launch_size(num_rows, 2 * depth, num_cols)
    rows = Scaled(*map(pad_rows, lhs))
    results = float8_gated_matmul(rows, rhs, groups, function, keep=keep, **size)
    return jax.tree.map(lambda part: part[:num_rows], results)


def _compute_gate_gradient(dhidden, products, weights, blocks, *, gating, implementation, platform):
    """Returns products' gradients; transposes of them and of weighted hidden; sums for dweights."""
    dtype, width = dhidden.dtype, dhidden.shape[1]
    # No matrix takes part, so only the width must suit the kernels.
    _, has_kernels = _selected(implementation, platform, (width, width), dhidden.shape[0])
    if has_kernels and dtype == jnp.bfloat16:
        from pallas_kernels.matmul import float8_gate_gradient as kernels

        if (function := elementwise_gradient(gating)) is not None:
            operands = dhidden, *products, weights, blocks
            return in_32_bits(kernels.gate_gradient)(function, *operands)

    def in_float32(*arrays: jax.Array) -> jax.Array:
        return gating(*arrays).astype(jnp.float32)

    wide = (FLOAT8_ROWS.decode(each, jnp.float32) for each in products)
    hidden, vjp = jax.vjp(in_float32, *wide)
    grad, row_weights = dhidden.astype(jnp.float32), weights[:, None]
    dproducts = [rounded(each, dtype) for each in vjp(grad * row_weights)]
    transpose = functools.partial(
        _compute_transposed, implementation=implementation, platform=platform
    )
    both_orders = [transpose(each, blocks, return_rows=True) for each in dproducts]
    _, weighted = transpose(rounded(hidden * row_weights, dtype), blocks, return_rows=False)
    rows, transposed = zip(*both_orders, strict=True)
    # As the kernel does, returns a sum for each 128 columns; the caller adds them up.
    dweights = (grad * hidden).reshape(dhidden.shape[0], width // BLOCK, BLOCK).sum(axis=2)
    return rows, (*transposed, weighted), dweights


@_exact
def _compute_drhs(lhs, grads, group_blocks, sums, *, dtype, implementation, platform):
    shape = lhs.values.shape[0], grads[0].values.shape[0]
    backend, has_kernels = _selected(implementation, platform, shape, lhs.values.shape[1])
    if has_kernels:
        from pallas_kernels.matmul import float8_drhs as kernels

        drhs, size = in_32_bits(kernels.drhs), launch_size(*lhs.values.shape, shape[1])
        return [
            drhs(lhs, grad, group_blocks, total, dtype=dtype, **size)
            for grad, total in zip(grads, sums or [None] * len(grads), strict=True)
        ]
    rows, *of_grads = (
        _BLOCKS_OF_ROWS.decode((each.values.T, each.scales), jnp.float32) for each in (lhs, *grads)
    )
    # A group has group_blocks[:, 1] whole blocks of rows here, padded with zeros.
    results = backend.drhs_of_each(rows, of_grads, group_blocks[:, 1] * BLOCK)
    return added(sums, [rounded(result, dtype).astype(dtype) for result in results])


_QUANTIZE_MATRICES = define("quantize_float8_matrices", _compute_matrices)
_TRANSPOSE_ROWS = define("transpose_float8_rows", _compute_transposed)
_PRODUCT = define("grouped_matmul_float8", _compute_product)
_GATED = define("grouped_matmul_float8_gated", _compute_gated)
_GATE_GRADIENT = define("gate_gradient_float8", _compute_gate_gradient)
_DRHS = define("grouped_matmul_float8_drhs", _compute_drhs)
