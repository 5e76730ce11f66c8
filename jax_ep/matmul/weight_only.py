"""Multiplies rows by matrices that are stored quantized, without quantizing the rows.

The rows are those of groups, as in a grouped matmul, or a few rows that choose groups
(`pallas_kernels.matmul.chosen_groups`): then each chosen group multiplies all rows by its matrix.

"pallas" reads matrices as they are stored, if one of its kernels knows their format: MXFP4, and
float8 with blocks of 128 x 128 for a few rows. Otherwise matrices are first dequantized; of chosen
groups only the matrices of these groups, if they are fewer than all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jax_ep.formats import QuantizedArray, Transposed
from jax_ep.matmul import unquantized
from jax_ep.matmul.backend import Backend
from jax_ep.matmul.gating import Gating, filled_biases, gated
from jax_ep.matmul.groups import Groups, joined_groups, split_groups
from jax_ep.matmul.primitives import Implementation, bind, make_primitive, select
from jax_ep.runtime.jax_compat import looks_for_nans
from pallas_kernels.formats import Format
from pallas_kernels.matmul.chosen_groups import ChosenGroups, of_gathered, output_rows


@dataclasses.dataclass(frozen=True)
class _Options:
    """The static parameters of a matmul.

    Attributes:
      formats: the format of each array of matrices.
      has_bias: for each array of matrices, whether it has a bias.
      gating: None, or an elementwise function of the products.
      keep: whether the products are results, too.
      num_rows: the number of rows if they choose groups, else None.
      zero_unused: whether the result's rows past the last group are zero.
      implementation: the implementation of the matmul.
    """

    formats: tuple[Format, ...]
    has_bias: tuple[bool, ...]
    gating: Gating | None
    keep: bool
    num_rows: int | None
    zero_unused: bool
    implementation: Implementation


def product(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: Groups,
    num_rows: int | None = None,
    gating: Any = None,
    implementation: Implementation = None,
    *,
    zero_unused: bool = True,
) -> jax.Array:
    """Computes gating(rows @ matrices[0][group] + biases[0][group], ...) for each row's group.

    Args:
      rows: [R, K] floating, in group order. For S chosen groups, [T, K] for all of them, or
        [S * height, K]: the T rows of each group begin at row s * height.
      matrices: one or two quantized arrays [L, K, N].
      biases: for each of `matrices`, [L, N] floating, or None.
      groups: [L] int32, the number of rows of each group; or the chosen groups.
      num_rows: T for chosen groups, else None.
      gating: an elementwise function of the products, as float32 or wider; None for the product of
        one array of matrices.
      implementation: the implementation of the matmuls.
      zero_unused: whether rows past the last group are zero, or gating(0, 0) with `gating`.

    Returns:
      [R, N], or [S * height, N], the dtype of `rows`. Products are rounded to this dtype before
      biases are added. Without `zero_unused`, rows that belong to no group are undefined.
    """
    return _results(
        rows, matrices, biases, groups, num_rows, gating, False, zero_unused, implementation
    )[0]


def gated_product(
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: Groups,
    gating: Gating,
    keep: bool,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """Computes `unquantized.gated_product` for two quantized arrays [L, K, N].

    Rows past the last group are undefined. `biases` [L, N] are added to the products before
    `gating` is applied, but not to the products that are returned; one of them, or both, may be
    None.
    """
    return _results(rows, matrices, biases, groups, None, gating, keep, False, implementation)


def _results(
    rows, matrices, biases, groups, num_rows, gating, keep, zero_unused, implementation
) -> tuple[jax.Array, ...]:
    options = _Options(
        tuple(each.format for each in matrices),
        tuple(bias is not None for bias in biases),
        gating,
        keep,
        num_rows,
        zero_unused or looks_for_nans(),
        implementation,
    )
    return _multiply(rows, tuple(matrices), tuple(biases), groups, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _multiply(rows, matrices, biases, groups, options: _Options):
    array, height = split_groups(groups)
    return tuple(
        bind(
            weight_only_p,
            rows,
            *(part for each in matrices for part in (each.values, each.scales)),
            *(bias for bias in biases if bias is not None),
            array,
            height=height,
            options=options,
        )
    )


def _multiply_fwd(rows, matrices, biases, groups, options):
    return _multiply(rows, matrices, biases, groups, options), (rows, matrices, biases, groups)


def _multiply_bwd(options, saved, cotangents):
    rows, matrices, biases, groups = saved
    if isinstance(groups, ChosenGroups):
        raise NotImplementedError(
            "a product of chosen groups has no gradient with respect to its rows; use group sizes."
        )

    def dense(rows, biases):
        products = []
        for each in matrices:
            numbers, is_transposed = dequantized_as_stored(each, rows.dtype)
            products.append(
                unquantized.product(rows, numbers, groups, options.implementation, is_transposed)
            )
        return _finished(products, biases, groups, options)

    drows, dbiases = jax.vjp(dense, rows, biases)[1](cotangents)
    return drows, None, dbiases, None


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


def _finished(
    products: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    groups: Groups,
    options: _Options,
) -> tuple[jax.Array, ...]:
    """Returns the results, given the products: adds biases, and applies the gating function."""
    gating: Any = (lambda number: number) if options.gating is None else options.gating
    result = gated(gating, *products, biases=biases, groups=groups)
    return (result, *(products if options.keep else ()))


def _kernels(backend: Backend) -> Any:
    """Returns the module that calls the kernels, or None if the backend is not "pallas"."""
    if backend.name != "pallas":
        return None
    from jax_ep.matmul import weight_only_pallas

    return weight_only_pallas


@functools.partial(jax.jit, static_argnames=("height", "options", "platform"))
def _compute(
    rows: jax.Array,
    *others: jax.Array,
    height: int | None,
    options: _Options,
    platform: str,
) -> tuple[jax.Array, ...]:
    count = 2 * len(options.formats)
    *of_biases, array = others[count:]
    left = iter(of_biases)
    biases = [next(left) if each else None for each in options.has_bias]
    matrices = [
        QuantizedArray(others[2 * i], others[2 * i + 1], format, rows.dtype)
        for i, format in enumerate(options.formats)
    ]
    groups = joined_groups(array, height)
    shape = matrices[0].shape[1:]
    backend = select(options.implementation, platform, shape, rows.dtype, rows.shape[0])
    kernels = _kernels(backend)
    if kernels and options.num_rows is not None:
        out = kernels.few_rows(rows, matrices, biases, groups, options.num_rows, options.gating)
        if out is not None:
            return (out,)
    if len(matrices) == 2 and options.gating is not None:
        results = _gated(backend, rows, matrices, biases, groups, options)
        if results is not None:
            return results
    products = [_product(backend, rows, each, groups, options) for each in matrices]
    return _finished(products, biases, groups, options)


def _gated(
    backend: Backend,
    rows: jax.Array,
    matrices: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    groups: Groups,
    options: _Options,
) -> tuple[jax.Array, ...] | None:
    """Computes gating(rows @ matrices[0] + biases[0], rows @ matrices[1] + biases[1]) at once.

    Returns None if the products must be computed one by one.
    """
    if kernels := _kernels(backend):
        results = kernels.gated_product(
            rows, matrices, biases, groups, options.gating, options.keep, options.zero_unused
        )
        if results is not None:
            return results
    if any(isinstance(each.format, Transposed) for each in matrices):
        return None
    both = filled_biases(biases)
    # The matrices of chosen groups may be gathered, and then the biases would have to be, too.
    if both is not None and isinstance(groups, ChosenGroups):
        return None
    assert options.gating is not None
    dense = [_gathered(each, groups, rows.dtype) for each in matrices]
    (gate, _, groups), (up, _, _) = dense
    return backend.gated_product(
        rows,
        (gate, up),
        groups,
        options.gating,
        options.keep,
        biases=both,
        zero_unused=options.zero_unused,
    )


def _product(
    backend: Backend, rows: jax.Array, matrices: QuantizedArray, groups: Groups, options: _Options
) -> jax.Array:
    """Computes the product of the rows with one array of matrices."""
    if kernels := _kernels(backend):
        out = kernels.product(rows, matrices, groups, options.zero_unused)
        if out is not None:
            return out
    dense, is_transposed, groups = _gathered(matrices, groups, rows.dtype)
    return backend.sum_of_products(
        [(rows, dense)], groups, transpose_rhs=is_transposed, zero_unused=options.zero_unused
    )


def _gathered(
    matrices: QuantizedArray, groups: Groups, dtype: Any
) -> tuple[jax.Array, bool, Groups]:
    """Dequantizes matrices to `dtype`: of chosen groups only theirs, if they are fewer than all.

    Returns the matrices, whether they are transposes, and the groups for these matrices.
    """
    if isinstance(groups, ChosenGroups) and len(groups.table) - 1 < matrices.shape[0]:
        indices, groups = of_gathered(groups)
        matrices = jax.tree.map(lambda part: part[indices], matrices)
    return *dequantized_as_stored(matrices, dtype), groups


def dequantized(matrices: jax.Array | QuantizedArray, dtype: Any) -> jax.Array:
    """Returns matrices as an array of `dtype`: casts an array, dequantizes a `QuantizedArray`."""
    if not isinstance(matrices, QuantizedArray):
        return matrices.astype(dtype)
    # Without the barrier, XLA may fuse the dequantization with the matmul that follows, and leave
    # out the rounding to `dtype`.
    return lax.optimization_barrier(matrices.dequantize(dtype))


def dequantized_as_stored(matrices: QuantizedArray, dtype: Any) -> tuple[jax.Array, bool]:
    """Dequantizes matrices to `dtype`, in the axis order in which they are stored.

    To dequantize a matrix and to transpose it would take another pass over it. Also returns whether
    the result holds the transposes of the matrices.
    """
    is_transposed = isinstance(matrices.format, Transposed)
    if isinstance(matrices.format, Transposed):
        format = matrices.format.transposes
        matrices = QuantizedArray(matrices.values, matrices.scales, format, matrices.dtype)
    return dequantized(matrices, dtype), is_transposed


def _result_types(rows, values, *others, height, options):
    num_rows = output_rows(joined_groups(others[-1], height), rows.shape[0])
    width = options.formats[0].numbers_shape(tuple(values.shape))[2]
    result = jax.ShapeDtypeStruct((num_rows, width), rows.dtype)
    return [result] * (1 + len(options.formats) * options.keep)


def _without_unused_products(used, params):
    """Adapts the primitive to a program that uses none of the products, only their function.

    The arguments and results are those of `unquantized._without_unused_products`.
    """
    options = params["options"]
    if options.keep and not any(used[1:]):
        return params | {"options": dataclasses.replace(options, keep=False)}, [0], None
    return params, range(len(used)), None


weight_only_p = make_primitive(
    "weight_only_matmul", _result_types, _compute, unused=_without_unused_products
)
