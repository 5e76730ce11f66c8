"""Multiplies rows by matrices that are stored quantized, without quantizing the rows.

"pallas" reads matrices as they are stored, if one of its kernels knows their format: MXFP4, and
float8 with blocks of 128 x 128 where groups have a few rows. Otherwise matrices are first
dequantized; of chosen groups only the matrices of these groups, if they are fewer than all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.formats import FLOAT8_MATRICES, MXFP4, QuantizedArray, Transposed
from jax_ep.matmul import unquantized
from jax_ep.matmul.backend import Backend, zero_tail
from jax_ep.matmul.float8 import is_operand_format
from jax_ep.matmul.gating import filled_biases, gated
from jax_ep.matmul.pallas import as_elementwise, as_kernel_bias, in_32_bits
from jax_ep.matmul.primitives import Implementation, define, select
from jax_ep.runtime.jax_compat import looks_for_nans
from pallas_kernels.formats import Format, Scaled
from pallas_kernels.matmul.chosen_groups import ChosenGroups, Groups, of_gathered

# The most rows of a group, on average, that the kernel for few rows multiplies. With more, kernels
# for any rows are faster in MXFP4 (measured with 8 and 16); none reads float8, whose limit was not
# measured. With at most `_VERY_FEW_ROWS`, a tile has room for 8 rows instead of 16.
_FEW_ROWS, _VERY_FEW_ROWS = 8, 3


@dataclasses.dataclass(frozen=True)
class _Options:
    gating: Any  # None, or an elementwise function of the products
    num_rows: int | None = None  # the number of rows if they choose groups, else None
    keep: bool = False  # whether the products are results, too
    zero_unused: bool = True


class _Operands(NamedTuple):
    rows: jax.Array
    matrices: Sequence[QuantizedArray]
    biases: Sequence[jax.Array | None]
    groups: Groups


def product_of_stored(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: Groups,
    num_rows: int | None = None,
    gating: Any = None,
    implementation: Implementation = None,
    *,
    keep: bool = False,
    zero_unused: bool = True,
) -> tuple[jax.Array, ...]:
    """Computes gating(rows @ matrices[0][group] + biases[0][group], ...) for each row's group.

    Rows are [R, K] in group order. For S chosen groups, they are T = `num_rows` rows [T, K], which
    all groups multiply, or [S * height, K], with T rows of group s from row s * height on. Products
    are rounded to the dtype of rows before biases [L, N] are added. Without `zero_unused`, rows of
    no group are undefined. With `keep`, the products follow in the result. A `gating` of None
    returns the product of the only matrix, with its bias.
    """
    # JAX would report NaNs in rows that are undefined.
    zero_unused = zero_unused or looks_for_nans()
    options = _Options(gating, num_rows, keep, zero_unused)
    operands = _Operands(rows, tuple(matrices), tuple(biases), groups)
    return _multiply(operands, options, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _multiply(
    operands: _Operands, options: _Options, implementation: Implementation
) -> tuple[jax.Array, ...]:
    return _WEIGHT_ONLY(operands, options=options, implementation=implementation)


def _multiply_bwd(options, implementation, operands, cotangents):
    rows, matrices, biases, groups = operands
    if isinstance(groups, ChosenGroups):
        raise NotImplementedError(
            "a product of chosen groups has no gradient with respect to its rows; use group sizes."
        )

    def by_dequantized(rows, biases):
        products = []
        for each in matrices:
            numbers, is_transposed = dequantized_as_stored(each, rows.dtype)
            product = unquantized.product_of_arrays(
                rows, numbers, groups, implementation, transpose_rhs=is_transposed
            )
            products.append(product)
        return _finished(products, operands._replace(biases=biases), options)

    drows, dbiases = jax.vjp(by_dequantized, rows, biases)[1](cotangents)
    return (_Operands(drows, None, dbiases, None),)  # type: ignore[arg-type]


_multiply.defvjp(lambda operands, *rest: (_multiply(operands, *rest), operands), _multiply_bwd)


def _finished(
    products: Sequence[jax.Array], operands: _Operands, options: _Options
) -> tuple[jax.Array, ...]:
    """Adds biases to the products and applies the gating, if any; returns all results."""
    gating: Any = (lambda number: number) if options.gating is None else options.gating
    result = gated(gating, *products, biases=operands.biases, groups=operands.groups)
    return (result, *(products if options.keep else ()))


def _compute(operands, *, options, implementation, platform):
    """Computes `product_of_stored` for one platform."""
    rows, matrices, _, groups = operands
    shape = matrices[0].shape[1:]
    backend = select(implementation, platform, shape, rows.dtype, rows.shape[0])
    if backend.name == "pallas" and not options.keep:
        out = _few_rows_by_kernel(operands, options)
        if out is not None:
            return (out,)
    if len(matrices) == 2 and options.gating is not None:
        results = _gated(backend, operands, options)
        if results is not None:
            return results
    products = []
    for each in matrices:
        operand, is_transposed, groups_of_operand = _operand(backend, rows, each, groups)
        product = backend.sum_of_products(
            [(rows, operand)],
            groups_of_operand,
            transpose_rhs=is_transposed,
            zero_unused=options.zero_unused,
        )
        products.append(product)
    return _finished(products, operands, options)


def _gated(
    backend: Backend, operands: _Operands, options: _Options
) -> tuple[jax.Array, ...] | None:
    """Computes a gated product by one call of the backend; None if no such call can compute it."""
    rows, matrices, biases, groups = operands
    both_biases = filled_biases(biases)
    if not all(_is_read_as_stored(backend, rows, each) for each in matrices):
        # `gated_product` takes no transposed arrays. Below, both are read as stored or dequantized.
        if any(isinstance(each.format, Transposed) for each in matrices):
            return None
        # Matrices of chosen groups may be gathered; biases would have to be, too.
        if both_biases is not None and isinstance(groups, ChosenGroups):
            return None
    gate, _, groups_of_both = _operand(backend, rows, matrices[0], groups)
    up, _, _ = _operand(backend, rows, matrices[1], groups)
    return backend.gated_product(
        rows,
        (gate, up),
        groups_of_both,
        options.gating,
        options.keep,
        biases=both_biases,
        zero_unused=options.zero_unused,
    )


@in_32_bits
def _few_rows_by_kernel(operands: _Operands, options: _Options) -> jax.Array | None:
    """Computes `product_of_stored` by the kernel for few rows of each group; None if it cannot."""
    from pallas_kernels.matmul.weight_only import unsupported_reason, weight_only_matmul

    rows, matrices, biases, groups = operands
    format, *others = map(_kernel_format, matrices)
    if rows.dtype != jnp.bfloat16 or format is None or any(each != format for each in others):
        return None
    num_groups, depth, width = matrices[0].shape
    if isinstance(groups, ChosenGroups):
        heights = [options.num_rows or 0]
    elif len(rows) <= _FEW_ROWS * num_groups:
        heights = [8] if len(rows) <= _VERY_FEW_ROWS * num_groups else [16, 8]
    else:
        return None
    supported = (n for n in heights if unsupported_reason(format, n, depth, width) is None)
    if (num_rows := next(supported, None)) is None:
        return None
    gating = options.gating
    function = None if gating is None else as_elementwise(gating, arity=len(matrices))
    if gating is not None and function is None:
        return None
    out = weight_only_matmul(
        rows,
        [Scaled(each.values, each.scales.astype(format.scale_dtype)) for each in matrices],
        [None if bias is None else as_kernel_bias(bias) for bias in biases],
        groups,
        num_rows=num_rows,
        format=format,
        gating=function,
    )
    if isinstance(groups, ChosenGroups) or not options.zero_unused:
        return out
    return zero_tail(out, groups)


def _is_read_as_stored(backend: Backend, rows: jax.Array, matrices: QuantizedArray) -> bool:
    """Returns whether the kernels for any number of rows read these matrices."""
    is_supported = rows.dtype == jnp.bfloat16 and _kernel_format(matrices) == MXFP4
    return backend.name == "pallas" and is_supported


def _kernel_format(matrices: QuantizedArray) -> Format | None:
    """Returns the format in which a kernel reads matrices, which must be stored transposed."""
    if not isinstance(matrices.format, Transposed):
        return None
    format = matrices.format.transposes
    # The caller casts scales of other dtypes.
    return FLOAT8_MATRICES if is_operand_format(format) else format


def _operand(
    backend: Backend, rows: jax.Array, matrices: QuantizedArray, groups: Groups
) -> tuple[Any, bool, Groups]:
    """Returns stored or dequantized matrices, whether they are transposes, and their groups."""
    if _is_read_as_stored(backend, rows, matrices):
        return Scaled(matrices.values, matrices.scales), True, groups
    # `table` has a row for each of the S chosen groups, and one more.
    if isinstance(groups, ChosenGroups) and len(groups.table) - 1 < matrices.shape[0]:
        indices, groups = of_gathered(groups)
        matrices = jax.tree.map(lambda part: part[indices], matrices)
    return *dequantized_as_stored(matrices, rows.dtype), groups


def dequantized(matrices: jax.Array | QuantizedArray, dtype: Any) -> jax.Array:
    if not isinstance(matrices, QuantizedArray):
        return matrices.astype(dtype)
    # Without the barrier, XLA may fuse the dequantization with the matmul that follows, and leave
    # out the rounding to `dtype`.
    return lax.optimization_barrier(matrices.dequantize(dtype))


def dequantized_as_stored(matrices: QuantizedArray, dtype: Any) -> tuple[jax.Array, bool]:
    """Dequantizes matrices in their stored axis order; also returns whether they are transposes."""
    format = matrices.format
    if not isinstance(format, Transposed):
        return dequantized(matrices, dtype), False
    stored = QuantizedArray(matrices.values, matrices.scales, format.transposes, matrices.dtype)
    return dequantized(stored, dtype), True


def _without_unused_products(used, params):
    """Drops the results `product` if none is used; see `define_primitive`."""
    options = params["options"]
    if options.keep and not any(used[1:]):
        return params | {"options": dataclasses.replace(options, keep=False)}, [0], None
    return params, range(len(used)), None


_WEIGHT_ONLY = define("weight_only_matmul", _compute, unused=_without_unused_products)
