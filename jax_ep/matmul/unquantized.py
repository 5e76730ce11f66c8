"""Computes grouped matmuls of arrays, and their gradients, by five JAX primitives.

The gradients of matmuls are matmuls, and JAX differentiates the gating functions, so gradients of
any order work. `jax_ep.matmul.backend` states what each function computes. Operands must have been
checked, and must have the same varying manual axes (vma).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_ep.matmul.gating import Gating, gate_gradient_of_all, gated
from jax_ep.matmul.primitives import Implementation, bind, make_primitive, select
from jax_ep.runtime import jax_compat
from pallas_kernels.matmul.chosen_groups import Groups, joined_groups, output_rows, split_groups


def product_of_arrays(
    lhs: jax.Array,
    rhs: jax.Array,
    groups: Groups,
    implementation: Implementation,
    transpose_rhs: bool = False,
    zero_unused: bool = True,
) -> jax.Array:
    """Multiplies each of R rows lhs [R, K] by the matrix of its group; returns [R, N].

    `groups` are the group sizes, [L] int32, or chosen groups, for which the result is
    [S * height, N].
    """
    return sum_of_products(((lhs, rhs),), groups, implementation, transpose_rhs, zero_unused)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def sum_of_products(
    pairs: tuple[tuple[jax.Array, jax.Array], ...],
    groups: Groups,
    implementation: Implementation,
    transpose_rhs: bool = False,
    zero_unused: bool = True,
) -> jax.Array:
    """Returns the sum of the grouped products of all (lhs, rhs) pairs.

    "pallas" rounds the sum once. The other implementations round each product.
    """
    array, height = split_groups(groups)
    (out,) = bind(
        grouped_matmul_p,
        *(operand for pair in pairs for operand in pair),
        array,
        height=height,
        implementation=implementation,
        transpose_rhs=transpose_rhs,
        # JAX would report NaNs in rows that are undefined.
        zero_unused=zero_unused or jax_compat.looks_for_nans(),
    )
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def gated_product_of_arrays(
    lhs: jax.Array,
    rhs: tuple[jax.Array, jax.Array],
    groups: Groups,
    gating: Gating,
    keep: bool,
    implementation: Implementation,
    zero_unused: bool = True,
    biases: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Computes hidden = gating(lhs @ rhs[0], lhs @ rhs[1]) and, with `keep`, the products.

    The elementwise, hashable `gating` gets the rounded products, plus `biases` [L, N], as float32
    or wider. If "pallas" supports the operations of `gating`, it computes all this in one kernel,
    with the same bits as in several. Rows past the last group are zero in the products, and zero or
    gating(0, 0) in hidden; without `zero_unused`, they are undefined.
    """
    array, height = split_groups(groups)
    return tuple(
        bind(
            grouped_matmul_gated_p,
            lhs,
            *rhs,
            *(biases or ()),
            array,
            height=height,
            gating=gating,
            keep=keep,
            implementation=implementation,
            zero_unused=zero_unused or jax_compat.looks_for_nans(),
        )
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def drhs_of_each(
    lhs: jax.Array,
    grads: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """Computes the gradient of the groups' matrices from each cotangent of `product` in `grads`.

    "pallas" computes them in one kernel.
    """
    return tuple(
        bind(grouped_matmul_drhs_p, lhs, *grads, group_sizes, implementation=implementation)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def add_drhs_of_each(
    sums: tuple[jax.Array, ...],
    lhs: jax.Array,
    grads: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """Adds `drhs_of_each` to `sums`; "pallas" in place to sums of the dtype of `lhs`."""
    return tuple(
        bind(
            grouped_matmul_add_drhs_p,
            lhs,
            *sums,
            *grads,
            group_sizes,
            implementation=implementation,
        )
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def gate_gradient(
    gating: Gating,
    dhidden: jax.Array,
    products: tuple[jax.Array, jax.Array],
    weights: jax.Array,
    group_sizes: jax.Array,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """Computes the gradient of hidden = weights[:, None] * gating(*products).

    `weights` [R] is float32 or wider. "pallas" computes only the rows of groups, if it supports the
    operations of `gating`. Rows past the last group are undefined.
    """
    return tuple(
        bind(
            gate_gradient_p,
            dhidden,
            *products,
            weights,
            group_sizes,
            gating=gating,
            implementation=implementation,
        )
    )


def _sum_of_products_fwd(pairs, group_sizes, implementation, transpose_rhs, zero_unused):
    out = sum_of_products(pairs, group_sizes, implementation, transpose_rhs, zero_unused)
    return out, (pairs, group_sizes)


def _sum_of_products_bwd(implementation, transpose_rhs, zero_unused, saved, grad):
    pairs, group_sizes = saved

    def one_pair(lhs, rhs):
        dlhs = product_of_arrays(
            grad, rhs, group_sizes, implementation, transpose_rhs=not transpose_rhs
        )
        rows, cotangent = (grad, lhs) if transpose_rhs else (lhs, grad)
        return dlhs, *drhs_of_each(rows, (cotangent,), group_sizes, implementation)

    return tuple(one_pair(*pair) for pair in pairs), None


def _gated_product_fwd(
    lhs, rhs, group_sizes, gating, keep, implementation, zero_unused, biases=None
):
    hidden, *products = gated_product_of_arrays(
        lhs,
        rhs,
        group_sizes,
        gating,
        keep=True,
        implementation=implementation,
        zero_unused=zero_unused,
        biases=biases,
    )
    saved = lhs, rhs, group_sizes, biases, tuple(products)
    return (hidden, *products) if keep else (hidden,), saved


def _gated_product_bwd(gating, keep, implementation, zero_unused, saved, grads):
    lhs, rhs, group_sizes, biases, products = saved
    dhidden, *dkept = grads

    def hidden(products, biases):
        return gated(gating, *products, biases=biases, groups=group_sizes)

    dproducts, dbiases = jax.vjp(hidden, products, biases)[1](dhidden)
    if keep:
        dproducts = tuple(map(jnp.add, dproducts, dkept))
    pairs = tuple(zip(dproducts, rhs, strict=True))
    dlhs = sum_of_products(pairs, group_sizes, implementation, transpose_rhs=True)
    return dlhs, drhs_of_each(lhs, dproducts, group_sizes, implementation), None, dbiases


def _drhs_fwd(lhs, grads, group_sizes, implementation):
    return drhs_of_each(lhs, grads, group_sizes, implementation), (lhs, grads, group_sizes)


def _drhs_bwd(implementation, saved, cts):
    lhs, grads, group_sizes = saved
    pairs = tuple(zip(grads, cts, strict=True))
    dlhs = sum_of_products(pairs, group_sizes, implementation, transpose_rhs=True)
    dgrads = tuple(product_of_arrays(lhs, ct, group_sizes, implementation) for ct in cts)
    return dlhs, dgrads, None


def _add_drhs_fwd(sums, lhs, grads, group_sizes, implementation):
    results = add_drhs_of_each(sums, lhs, grads, group_sizes, implementation)
    return results, (lhs, grads, group_sizes)


def _add_drhs_bwd(implementation, saved, cts):
    lhs, *_ = saved
    return cts, *_drhs_bwd(implementation, saved, tuple(ct.astype(lhs.dtype) for ct in cts))


def _gate_gradient_fwd(gating, dhidden, products, weights, group_sizes, implementation):
    operands = dhidden, products, weights
    return gate_gradient(gating, *operands, group_sizes, implementation), operands


def _gate_gradient_bwd(gating, implementation, operands, cts):
    return *jax.vjp(functools.partial(gate_gradient_of_all, gating), *operands)[1](cts), None


sum_of_products.defvjp(_sum_of_products_fwd, _sum_of_products_bwd)
gated_product_of_arrays.defvjp(_gated_product_fwd, _gated_product_bwd)
drhs_of_each.defvjp(_drhs_fwd, _drhs_bwd)
add_drhs_of_each.defvjp(_add_drhs_fwd, _add_drhs_bwd)
gate_gradient.defvjp(_gate_gradient_fwd, _gate_gradient_bwd)


# The functions `_compute_…` are jitted, so that a program with many grouped matmuls of one shape
# traces each kernel only once.
@functools.partial(
    jax.jit,
    static_argnames=("height", "implementation", "platform", "transpose_rhs", "zero_unused"),
)
def _compute_product(*operands, height, implementation, platform, transpose_rhs, zero_unused):
    *factors, groups = operands
    pairs = list(zip(factors[::2], factors[1::2], strict=True))
    lhs, rhs = pairs[0]
    backend = select(implementation, platform, rhs.shape[1:], lhs.dtype, lhs.shape[0])
    groups = joined_groups(groups, height)
    options = dict(transpose_rhs=transpose_rhs, zero_unused=zero_unused)
    return (backend.sum_of_products(pairs, groups, **options),)


@functools.partial(
    jax.jit,
    static_argnames=("gating", "height", "keep", "implementation", "platform", "zero_unused"),
)
def _compute_gated(
    lhs, rhs_0, rhs_1, *others, gating, height, keep, implementation, platform, zero_unused
):
    *biases, groups = others
    backend = select(implementation, platform, rhs_0.shape[1:], lhs.dtype, lhs.shape[0])
    return backend.gated_product(
        lhs,
        (rhs_0, rhs_1),
        joined_groups(groups, height),
        gating,
        keep,
        biases=tuple(biases) or None,
        zero_unused=zero_unused,
    )


@functools.partial(jax.jit, static_argnames=("implementation", "platform"))
def _compute_drhs(lhs, *operands, implementation, platform):
    *grads, group_sizes = operands
    backend = select(
        implementation, platform, (lhs.shape[1], grads[0].shape[1]), lhs.dtype, lhs.shape[0]
    )
    return backend.drhs_of_each(lhs, grads, group_sizes)


@functools.partial(jax.jit, static_argnames=("implementation", "platform"))
def _compute_add_drhs(lhs, *operands, implementation, platform):
    *arrays, group_sizes = operands
    sums, grads = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    backend = select(
        implementation, platform, (lhs.shape[1], grads[0].shape[1]), lhs.dtype, lhs.shape[0]
    )
    return backend.drhs_of_each(lhs, grads, group_sizes, sums)


@functools.partial(jax.jit, static_argnames=("gating", "implementation", "platform"))
def _compute_gate_gradient(dhidden, *operands, gating, implementation, platform):
    *products, weights, group_sizes = operands
    width = dhidden.shape[1]
    backend = select(implementation, platform, (width, width), dhidden.dtype, dhidden.shape[0])
    return backend.gate_gradient(gating, dhidden, products, weights, group_sizes)


def _types_of_product(lhs, rhs, *others, height, transpose_rhs, **__):
    num_rows = output_rows(joined_groups(others[-1], height), lhs.shape[0])
    num_columns = rhs.shape[1 if transpose_rhs else 2]
    return [jax.ShapeDtypeStruct((num_rows, num_columns), lhs.dtype)]


def _types_of_gated(lhs, rhs, *others, height, keep, **__):
    num_rows = output_rows(joined_groups(others[-1], height), lhs.shape[0])
    return [jax.ShapeDtypeStruct((num_rows, rhs.shape[2]), lhs.dtype)] * (3 if keep else 1)


def _types_of_drhs(lhs, *operands, **_):
    *grads, group_sizes = operands
    shapes = ((group_sizes.shape[0], lhs.shape[1], grad.shape[1]) for grad in grads)
    return [jax.ShapeDtypeStruct(shape, lhs.dtype) for shape in shapes]


def _types_of_gate_gradient(dhidden, *operands, **_):
    weights = operands[-2]
    of_rows = jax.ShapeDtypeStruct(dhidden.shape, dhidden.dtype)
    return [*[of_rows] * 3, jax.ShapeDtypeStruct(weights.shape, weights.dtype)]


def _types_of_sums(lhs, *operands, **_):
    sums = operands[: len(operands) // 2]
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in sums]


def _without_unused_products(used, params):
    """Drops the results `product` if none is used; see `define_primitive`."""
    if params["keep"] and not any(used[1:]):
        return params | {"keep": False}, [0], None
    return params, range(len(used)), None


def _without_unused_gradients(used, params):
    """Drops unused gradients and their cotangents; see `define_primitive`."""
    left = [i for i, is_used in enumerate(used) if is_used]
    # The operands are lhs, a cotangent for each gradient, and the group sizes.
    return params, left, [0, *(1 + i for i in left), 1 + len(used)]


grouped_matmul_p = make_primitive("grouped_matmul", _types_of_product, _compute_product)
grouped_matmul_gated_p = make_primitive(
    "grouped_matmul_gated", _types_of_gated, _compute_gated, unused=_without_unused_products
)
grouped_matmul_drhs_p = make_primitive(
    "grouped_matmul_drhs", _types_of_drhs, _compute_drhs, unused=_without_unused_gradients
)
grouped_matmul_add_drhs_p = make_primitive(
    "grouped_matmul_add_drhs", _types_of_sums, _compute_add_drhs
)
gate_gradient_p = make_primitive("gate_gradient", _types_of_gate_gradient, _compute_gate_gradient)
