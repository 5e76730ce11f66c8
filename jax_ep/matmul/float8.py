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
from jax_ep.formats import (
    FLOAT8_MATRICES,
    FLOAT8_ROWS,
    QuantizedArray,
    Transposed,
    quantize,
)
from jax_ep.matmul.backend import Backend, added
from jax_ep.matmul.gating import Gating
from jax_ep.matmul.primitives import Implementation, bind, make_primitive, select
from jax_ep.runtime import jax_compat
from pallas_kernels.formats import Float8, Format
from pallas_kernels.matmul.chosen_groups import (
    Groups,
    group_of_row,
    joined_groups,
    output_rows,
    split_groups,
)
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows, with_shared_scales

DTYPE = jnp.dtype(jnp.float8_e4m3fn)
# The format in which `transpose_rows` quantizes rows: one scale for each 128 rows by 128 columns.
_BLOCKS_OF_ROWS = Float8.of(DTYPE, (BLOCK, BLOCK))


class QuantizedMatrices(NamedTuple):
    """Float8 matrices [L, K, N] in `FLOAT8_MATRICES`, stored as they are and transposed.

    A product and its gradient contract different dimensions.
    """

    matrices: QuantizedArray
    transposed: QuantizedArray


def is_operand_format(format: Format, wanted: Float8 = FLOAT8_MATRICES) -> bool:
    """Returns whether an array in `format` can be multiplied without quantizing it again."""
    # Casting these scales to float32 rounds nothing.
    exact = format.scale_dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return (format.dtype, format.block) == (wanted.dtype, wanted.block) and exact


def rows_as_operand(rows: QuantizedArray) -> QuantizedArray | None:
    """Returns quantized rows in `FLOAT8_ROWS`, or None if this would round the numbers."""
    if not is_operand_format(rows.format, FLOAT8_ROWS):
        return None
    return _array(FLOAT8_ROWS, (rows.values, rows.scales.astype(jnp.float32)), rows.dtype)


def matrices_as_operands(stored: QuantizedArray) -> QuantizedMatrices | None:
    """Returns quantized matrices as operands, or None if this would round the numbers."""
    format, is_transposed = stored.format, False
    if isinstance(format, Transposed):
        format, is_transposed = format.transposes, True
    if not is_operand_format(format):
        return None
    kept = _array(FLOAT8_MATRICES, (stored.values, stored.scales.astype(jnp.float32)), stored.dtype)
    turned = jax.tree.map(lambda part: jnp.swapaxes(part, 1, 2), kept)
    return QuantizedMatrices(*((turned, kept) if is_transposed else (kept, turned)))


def quantize_matrices(
    matrices: jax.Array, implementation: Implementation = None
) -> QuantizedMatrices:
    """Quantizes floating matrices [L, K, N]; K and N are multiples of 128."""
    FLOAT8_MATRICES.check_shape("matrices", matrices.shape)
    dtype = matrices.dtype
    parts = bind(quantize_matrices_p, matrices, implementation=implementation)
    both = (_array(FLOAT8_MATRICES, parts[i : i + 2], dtype) for i in (0, 2))
    return QuantizedMatrices(*both)


def _array(format: Float8, parts: Sequence[jax.Array], dtype: Any) -> QuantizedArray:
    """Makes a `QuantizedArray` of (values, scales), which dequantizes to `dtype`."""
    values, scales = parts
    return QuantizedArray(values, scales, format, dtype)


def quantize_rows(rows: jax.Array) -> QuantizedArray:
    return quantize(rows, FLOAT8_ROWS)


def transpose_rows(
    rows: jax.Array | QuantizedArray,
    blocks: jax.Array,
    *,
    return_rows: bool = False,
    implementation: Implementation = None,
) -> tuple[QuantizedArray | None, TransposedRows]:
    """Quantizes rows to float8, with one scale per 128 rows by 128 columns, and transposes them.

    If the rows are quantized already, the largest of the scales of 128 rows becomes their shared
    scale. Each row's values are then multiplied by the ratio of its own scale to the shared one,
    and rounded again.

    Args:
      rows: [R, K], floating or in `FLOAT8_ROWS`; K is a multiple of 128.
      blocks: [P / 128, 2] int32, the first result of `row_blocks`: for each block, its first row in
        `rows`, and how many rows it takes from there, at most 128.
      return_rows: whether to return the quantized rows without the transposition, too.

    Returns:
      The rows in `FLOAT8_ROWS`, or None; and the transposed rows, with values [K, P]. Blocks
      without rows are undefined.
    """
    if isinstance(rows, QuantizedArray):
        parts = rows.values, rows.scales, blocks
        turned = bind(transpose_rows_p, *parts, return_rows=False, implementation=implementation)
        return rows if return_rows else None, TransposedRows(*turned)
    *kept, values, scales = bind(
        transpose_rows_p, rows, blocks, return_rows=return_rows, implementation=implementation
    )
    in_order = _array(FLOAT8_ROWS, kept, rows.dtype) if return_rows else None
    return in_order, TransposedRows(values, scales)


def product_of_float8(
    pairs: Sequence[tuple[QuantizedArray, QuantizedArray]],
    groups: Groups,
    dtype: Any,
    implementation: Implementation = None,
    zero_unused: bool = True,
) -> jax.Array:
    """Sums the products of pairs of rows [R, K] and their groups' transposed matrices [L, N, K]."""
    operands = [part for pair in pairs for each in pair for part in (each.values, each.scales)]
    array, height = split_groups(groups)
    (out,) = bind(
        float8_product_p,
        *operands,
        array,
        height=height,
        dtype=jnp.dtype(dtype),
        implementation=implementation,
        # JAX would report NaNs in rows that are undefined.
        zero_unused=zero_unused or jax_compat.looks_for_nans(),
    )
    return out


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
    array, height = split_groups(groups)
    parts = bind(
        float8_gated_p,
        *(part for each in (lhs, *rhs) for part in (each.values, each.scales)),
        array,
        height=height,
        gating=gating,
        keep=keep,
        implementation=implementation,
    )
    return tuple(_array(FLOAT8_ROWS, parts[i : i + 2], lhs.dtype) for i in range(0, len(parts), 2))


class GateGradient(NamedTuple):
    """The gradient of the function between an expert's matmuls, as operands of float8 matmuls."""

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

    The results are rounded to dhidden's dtype before they are quantized. Rows past the last group,
    and blocks without rows, are undefined.

    Args:
      gating: the elementwise function of the two products.
      dhidden: [R, F] floating, the gradient of the weighted hidden values; 128 divides F.
      products: two arrays [R, F] in `FLOAT8_ROWS`.
      weights: [R] float32, the top-k weights of the rows.
      blocks: as in `transpose_rows`.
    """
    *parts, dweights = bind(
        float8_gate_gradient_p,
        dhidden,
        *(part for each in products for part in (each.values, each.scales)),
        weights,
        blocks,
        gating=gating,
        implementation=implementation,
    )
    rows = [_array(FLOAT8_ROWS, parts[i : i + 2], dhidden.dtype) for i in (0, 2)]
    turned = [TransposedRows(*parts[i : i + 2]) for i in (4, 6, 8)]
    return GateGradient(
        dpre=((rows[0], turned[0]), (rows[1], turned[1])),
        hidden=turned[2],
        dweights=dweights.sum(axis=1),
    )


def drhs_of_each(
    lhs: TransposedRows,
    grads: Sequence[TransposedRows],
    group_blocks: jax.Array,
    dtype: Any,
    implementation: Implementation = None,
    sums: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of L groups' matrices, [L, K, N] for each cotangent in `grads`.

    Args:
      lhs: the transposed rows, with values [K, P].
      grads: one or two transposed cotangents, with values [N, P].
      group_blocks: [L, 2] int32, the second result of `row_blocks`: each group's first block, and
        the number of its blocks.
      dtype: the dtype of the results, unless `sums` has one.
      sums: None, or arrays to which the gradients are added.
    """
    sums = sums or ()
    return tuple(
        bind(
            float8_drhs_p,
            *lhs,
            *(part for grad in grads for part in grad),
            group_blocks,
            *sums,
            num_sums=len(sums),
            dtype=jnp.dtype(sums[0].dtype if sums else dtype),
            implementation=implementation,
        )
    )


# The following functions compute the results of the primitives, which are defined at the end.
# Operands and results are flat: a quantized array is two of them, its values and its scales.


def _selected(
    implementation: Implementation, platform: str, matrix_shape: Sequence[int], num_rows: Any
) -> tuple[Backend, Any]:
    """Returns the backend, and the module of float8 kernels, or None for a backend without them."""
    backend = select(implementation, platform, matrix_shape, DTYPE, num_rows, has_scales=True)
    if backend.name != "pallas":
        return backend, None
    from jax_ep.matmul import float8_pallas

    return backend, float8_pallas


def _encode(format: Float8, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes x; returns (values, scales)."""
    quantized = quantize(x, format)
    return quantized.values, quantized.scales


def _dequantized_rows(values: jax.Array, scales: jax.Array) -> jax.Array:
    return FLOAT8_ROWS.decode((values, scales), jnp.float32)


def _dequantized_matrices(values: jax.Array, scales: jax.Array) -> jax.Array:
    return FLOAT8_MATRICES.decode((values, scales), jnp.float32)


@functools.partial(jax.jit, static_argnames=("implementation", "platform"))
def _compute_matrices(matrices, *, implementation, platform):
    _, kernels = _selected(implementation, platform, matrices.shape[1:], num_rows=None)
    if kernels:
        return kernels.quantize_matrices(matrices)
    both = _encode(FLOAT8_MATRICES, matrices)
    return (*both, *(jnp.swapaxes(part, 1, 2) for part in both))


@functools.partial(jax.jit, static_argnames=("return_rows", "implementation", "platform"))
def _compute_transposed(*operands, return_rows, implementation, platform):
    *rows, blocks = operands
    width = rows[0].shape[1]
    _, kernels = _selected(implementation, platform, (width, width), rows[0].shape[0])
    if kernels:
        return kernels.transpose_rows(rows, blocks, return_rows)
    # The rows of `blocks`, [P / 128, 128]. A block of fewer rows than 128 is filled with zeros.
    row_in_block = jnp.arange(BLOCK, dtype=jnp.int32)[None]
    exists = (row_in_block < blocks[:, 1:])[..., None]
    row = jnp.where(exists[..., 0], blocks[:, :1] + row_in_block, 0)

    def in_blocks(part: jax.Array) -> jax.Array:
        return jnp.where(exists, part.at[row].get(mode="clip"), 0)

    # `rows` has values and scales if the rows are quantized already.
    if len(rows) > 1:
        tiles = in_blocks(rows[0]).reshape(-1, BLOCK, width // BLOCK, BLOCK)
        values, scales = with_shared_scales(
            jnp.moveaxis(tiles, 2, 1), in_blocks(rows[1]).swapaxes(1, 2)
        )
        # Without the barrier, XLA may leave out the rounding, as in `jax_ep.quantize`.
        values = lax.optimization_barrier(values)
        return jnp.moveaxis(values, 2, 1).reshape(-1, width).T, scales
    wide = rows[0].astype(jnp.float32)
    kept = _encode(FLOAT8_ROWS, wide) if return_rows else ()
    values, scales = _encode(_BLOCKS_OF_ROWS, in_blocks(wide).reshape(-1, width))
    return (*kept, values.T, scales)


def _exact(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function so that its matmuls do not round float32 numbers to TF32."""

    @functools.wraps(compute)
    def run(*operands: Any, **options: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return compute(*operands, **options)

    return run


@functools.partial(
    jax.jit, static_argnames=("dtype", "height", "implementation", "platform", "zero_unused")
)
@_exact
def _compute_product(*operands, dtype, height, implementation, platform, zero_unused):
    *parts, groups = operands
    pairs = [(parts[i : i + 2], parts[i + 2 : i + 4]) for i in range(0, len(parts), 4)]
    values = parts[0]
    backend, kernels = _selected(implementation, platform, parts[2].shape[1:], values.shape[0])
    groups = joined_groups(groups, height)
    if kernels:
        return (kernels.product_of_float8_by_kernel(pairs, groups, dtype, zero_unused),)
    wide = [
        (_dequantized_rows(*rows), _dequantized_matrices(*matrices)) for rows, matrices in pairs
    ]
    return (_sum_of_products(backend, wide, groups, zero_unused).astype(dtype),)


def _sum_of_products(
    backend: Backend,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    groups: Groups,
    zero_unused: bool = True,
) -> jax.Array:
    """Sums the products of float32 rows and transposed matrices; NaNs stay in their group."""
    # A backend may multiply each matrix by all rows, with other groups' rows set to zero, and zero
    # times NaN is NaN. So NaNs are first replaced by zeros, and then set in the results that they
    # should have reached.
    finite = [(rows, jnp.where(jnp.isnan(matrices), 0, matrices)) for rows, matrices in pairs]
    out = backend.sum_of_products(finite, groups, transpose_rhs=True, zero_unused=zero_unused)
    nan_columns = [jnp.isnan(matrices).any(axis=2) for _, matrices in pairs]
    group = group_of_row(groups, pairs[0][0].shape[0])
    has_nan = functools.reduce(jnp.logical_or, nan_columns)
    is_nan = has_nan.at[group].get(mode="fill", fill_value=False)
    return jnp.where(is_nan, jnp.nan, out)


@functools.partial(
    jax.jit, static_argnames=("gating", "height", "keep", "implementation", "platform")
)
@_exact
def _compute_gated(*operands, gating, height, keep, implementation, platform):
    *parts, groups = operands
    lhs, *rhs = (parts[i : i + 2] for i in range(0, len(parts), 2))
    backend, kernels = _selected(implementation, platform, rhs[0][0].shape[1:], lhs[0].shape[0])
    groups = joined_groups(groups, height)
    if kernels:
        results = kernels.gated_product_of_float8_by_kernel(lhs, rhs, groups, gating, keep)
        if results is not None:
            return results
        products = [
            kernels.product_of_float8_by_kernel(
                [(lhs, each)], groups, dtype=jnp.float32, zero_unused=False
            )
            for each in rhs
        ]
    else:
        rows = _dequantized_rows(*lhs)
        products = [
            _sum_of_products(backend, [(rows, _dequantized_matrices(*each))], groups)
            for each in rhs
        ]
    hidden = gating(*products).astype(jnp.float32)
    return [
        part
        for each in ([hidden, *products] if keep else [hidden])
        for part in _encode(FLOAT8_ROWS, each)
    ]


@functools.partial(jax.jit, static_argnames=("gating", "implementation", "platform"))
def _compute_gate_gradient(*operands, gating, implementation, platform):
    dhidden, *products, weights, blocks = operands
    dtype, width = dhidden.dtype, dhidden.shape[1]
    _, kernels = _selected(implementation, platform, (width, width), dhidden.shape[0])
    if kernels:
        results = kernels.gate_gradient(gating, dhidden, products, weights, blocks)
        if results is not None:
            return results

    def in_float32(*arrays: jax.Array) -> jax.Array:
        return gating(*arrays).astype(jnp.float32)

    wide = (_dequantized_rows(*products[i : i + 2]) for i in (0, 2))
    hidden, vjp = jax.vjp(in_float32, *wide)
    grad, row_weights = dhidden.astype(jnp.float32), weights[:, None]
    dproducts = [rounded(each, dtype) for each in vjp(grad * row_weights)]
    transpose = functools.partial(
        _compute_transposed, implementation=implementation, platform=platform
    )
    both_orders = [transpose(each, blocks, return_rows=True) for each in dproducts]
    weighted = transpose(rounded(hidden * row_weights, dtype), blocks, return_rows=False)
    rows, transposed = ([part for each in both_orders for part in each[i : i + 2]] for i in (0, 2))
    # As the kernel does, returns a sum for each 128 columns; the caller adds them up.
    dweights = (grad * hidden).reshape(dhidden.shape[0], width // BLOCK, BLOCK).sum(axis=2)
    return *rows, *transposed, *weighted, dweights


@functools.partial(jax.jit, static_argnames=("num_sums", "dtype", "implementation", "platform"))
@_exact
def _compute_drhs(*operands, num_sums, dtype, implementation, platform):
    (*parts, group_blocks), sums = _without_sums(operands, num_sums)
    lhs, *grads = (TransposedRows(*parts[i : i + 2]) for i in range(0, len(parts), 2))
    shape = lhs.values.shape[0], grads[0].values.shape[0]
    backend, kernels = _selected(implementation, platform, shape, lhs.values.shape[1])
    if kernels:
        return kernels.drhs_of_each(lhs, grads, group_blocks, sums, dtype)
    rows, *of_grads = (
        _BLOCKS_OF_ROWS.decode((each.values.T, each.scales), jnp.float32) for each in (lhs, *grads)
    )
    results = backend.drhs_of_each(rows, of_grads, group_blocks[:, 1] * BLOCK)
    return added(sums, [rounded(result, dtype).astype(dtype) for result in results])


def _without_sums(operands: Sequence[Any], num_sums: int) -> tuple[Sequence[Any], Any]:
    """Splits off the last `num_sums` operands, and returns None for them if there are none."""
    first = len(operands) - num_sums
    return operands[:first], operands[first:] or None


# The following functions return the types of the results of the primitives.


def _type(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _quantized_type(format: Float8, shape: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    return [_type(shape, DTYPE), _type(format.scales_shape(tuple(shape)), jnp.float32)]


def _types_of_matrices(matrices, **_):
    num_matrices, height, width = matrices.shape
    shapes = matrices.shape, (num_matrices, width, height)
    return [each for shape in shapes for each in _quantized_type(FLOAT8_MATRICES, shape)]


def _types_of_transposed(rows, *others, return_rows, **_):
    num_row_blocks, width = others[-1].shape[0], rows.shape[1]
    kept = _quantized_type(FLOAT8_ROWS, rows.shape) if return_rows else []
    values = _type((width, num_row_blocks * BLOCK), DTYPE)
    return [*kept, values, _type((num_row_blocks, width // BLOCK), jnp.float32)]


def _types_of_gate_gradient(dhidden, *others, **_):
    num_rows, width = dhidden.shape
    num_row_blocks = others[-1].shape[0]
    transposed = _type((width, num_row_blocks * BLOCK), DTYPE)
    scales = _type((num_row_blocks, width // BLOCK), jnp.float32)
    rows = _quantized_type(FLOAT8_ROWS, dhidden.shape)
    sums = _type((num_rows, width // BLOCK), jnp.float32)
    return [*rows * 2, *[transposed, scales] * 3, sums]


def _types_of_product(values, scales, matrices, *others, dtype, height, **__):
    num_rows = output_rows(joined_groups(others[-1], height), values.shape[0])
    return [_type((num_rows, matrices.shape[1]), dtype)]


def _types_of_gated(values, scales, matrices, *others, height, keep, **__):
    num_rows = output_rows(joined_groups(others[-1], height), values.shape[0])
    shape = num_rows, matrices.shape[1]
    return _quantized_type(FLOAT8_ROWS, shape) * (3 if keep else 1)


def _types_of_drhs(values, scales, *others, num_sums, dtype, **_):
    (*grads, group_blocks), _ = _without_sums(others, num_sums)
    return [
        _type((group_blocks.shape[0], values.shape[0], grad.shape[0]), dtype) for grad in grads[::2]
    ]


quantize_matrices_p = make_primitive(
    "quantize_float8_matrices", _types_of_matrices, _compute_matrices
)
transpose_rows_p = make_primitive(
    "transpose_float8_rows", _types_of_transposed, _compute_transposed
)
float8_product_p = make_primitive("grouped_matmul_float8", _types_of_product, _compute_product)
float8_gated_p = make_primitive("grouped_matmul_float8_gated", _types_of_gated, _compute_gated)
float8_gate_gradient_p = make_primitive(
    "gate_gradient_float8", _types_of_gate_gradient, _compute_gate_gradient
)
float8_drhs_p = make_primitive("grouped_matmul_float8_drhs", _types_of_drhs, _compute_drhs)
