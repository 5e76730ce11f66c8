"""Computes grouped matmuls of arrays, and their gradients of any order, by four JAX primitives.

`jax_ep.matmul.backend` states what each function computes. Operands must have been checked, and
must have the same varying manual axes (vma).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_ep.matmul.gating import Gating, gate_gradient_of_all, gated
from jax_ep.matmul.primitives import Implementation, define, select
from jax_ep.runtime import jax_compat
from pallas_kernels.matmul.chosen_groups import Groups


def product_of_arrays(
    lhs: jax.Array,
    rhs: jax.Array,
    groups: Groups,
    implementation: Implementation,
    transpose_rhs: bool = False,
    zero_unused: bool = True,
) -> jax.Array:
    """Multiplies each of R rows lhs [R, K] by the matrix of its group; returns [R, N]."""
    return sum_of_products(((lhs, rhs),), groups, implementation, transpose_rhs, zero_unused)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def sum_of_products(
    pairs: tuple[tuple[jax.Array, jax.Array], ...],
    groups: Groups,
    implementation: Implementation,
    transpose_rhs: bool = False,
    zero_unused: bool = True,
) -> jax.Array:
    """Sums the products of all (lhs, rhs) pairs; "pallas" rounds once, others each product."""
    return _PRODUCT(
        pairs,
        groups,
        implementation=implementation,
        transpose_rhs=transpose_rhs,
        # JAX would report NaNs in rows that are undefined.
        zero_unused=zero_unused or jax_compat.looks_for_nans(),
    )


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
    """Returns (hidden,), or with `keep` (hidden, product, product); see `jax_ep.matmul.backend`."""
    return _GATED(
        lhs,
        rhs,
        biases,
        groups,
        gating=gating,
        keep=keep,
        implementation=implementation,
        zero_unused=zero_unused or jax_compat.looks_for_nans(),  # as in `sum_of_products`
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def drhs_of_each(
    lhs: jax.Array,
    grads: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    implementation: Implementation,
    sums: tuple[jax.Array, ...] | None = None,
) -> tuple[jax.Array, ...]:
    """Computes the gradient of the groups' matrices from each cotangent of `product` in `grads`.

    They are added to `sums`, if given. "pallas" computes them in one kernel, and adds in place to
    sums of the dtype of `lhs`.
    """
    return _DRHS(lhs, grads, sums, group_sizes, implementation=implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def gate_gradient(
    gating: Gating,
    dhidden: jax.Array,
    products: tuple[jax.Array, jax.Array],
    weights: jax.Array,
    group_sizes: jax.Array,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """Returns hidden = weights[:, None] * gating(*products), dproduct, dproduct and dweights.

    `weights` [R] is float32 or wider. "pallas" computes only the rows of groups, if it supports the
    operations of `gating`. Rows past the last group are undefined.
    """
    operands = dhidden, products, weights, group_sizes
    return _GATE_GRADIENT(*operands, gating=gating, implementation=implementation)


def _sum_of_products_fwd(pairs, group_sizes, implementation, transpose_rhs, zero_unused):
    out = sum_of_products(pairs, group_sizes, implementation, transpose_rhs, zero_unused)
    return out, (pairs, group_sizes)


def _sum_of_products_bwd(implementation, transpose_rhs, zero_unused, saved, grad):
    pairs, group_sizes = saved

    def one_pair(lhs, rhs):
        dlhs = product_of_arrays(
            grad, rhs, group_sizes, implementation, transpose_rhs=not transpose_rhs
        )
        # The gradient of a group's matrix is lhs^T @ grad; of a transpose [N, K], grad^T @ lhs.
        rows, cotangent = (grad, lhs) if transpose_rhs else (lhs, grad)
        return dlhs, *drhs_of_each(rows, (cotangent,), group_sizes, implementation)

    return tuple(one_pair(*pair) for pair in pairs), None


def _gated_product_fwd(
    lhs, rhs, group_sizes, gating, keep, implementation, zero_unused, biases=None
):
    options = implementation, zero_unused, biases
    # With `keep`, since the gradient needs the products.
    results = gated_product_of_arrays(lhs, rhs, group_sizes, gating, True, *options)
    return results if keep else results[:1], (lhs, rhs, group_sizes, biases, results[1:])


def _gated_product_bwd(gating, keep, implementation, zero_unused, saved, grads):
    lhs, rhs, group_sizes, biases, products = saved
    dhidden, *dkept = grads  # `dkept`: with `keep`, the cotangents of the two products

    def hidden(products, biases):
        return gated(gating, *products, biases=biases, groups=group_sizes)

    dproducts, dbiases = jax.vjp(hidden, products, biases)[1](dhidden)
    if keep:
        dproducts = tuple(map(jnp.add, dproducts, dkept))
    pairs = tuple(zip(dproducts, rhs, strict=True))
    dlhs = sum_of_products(pairs, group_sizes, implementation, transpose_rhs=True)
    return dlhs, drhs_of_each(lhs, dproducts, group_sizes, implementation), None, dbiases


def _drhs_fwd(lhs, grads, group_sizes, implementation, sums=None):
    results = drhs_of_each(lhs, grads, group_sizes, implementation, sums)
    return results, (lhs, grads, group_sizes, sums)


def _drhs_bwd(implementation, saved, cts):
    lhs, grads, group_sizes, sums = saved
    # A group's result is lhs^T @ grad, so lhs gets grad @ ct^T, and grad gets lhs @ ct.
    cast_cts = tuple(ct.astype(lhs.dtype) for ct in cts)
    pairs = tuple(zip(grads, cast_cts, strict=True))
    dlhs = sum_of_products(pairs, group_sizes, implementation, transpose_rhs=True)
    dgrads = tuple(product_of_arrays(lhs, ct, group_sizes, implementation) for ct in cast_cts)
    return dlhs, dgrads, None, None if sums is None else cts


def _gate_gradient_fwd(gating, dhidden, products, weights, group_sizes, implementation):
    operands = dhidden, products, weights
    return gate_gradient(gating, *operands, group_sizes, implementation), operands


def _gate_gradient_bwd(gating, implementation, operands, cts):
    return *jax.vjp(functools.partial(gate_gradient_of_all, gating), *operands)[1](cts), None


sum_of_products.defvjp(_sum_of_products_fwd, _sum_of_products_bwd)
gated_product_of_arrays.defvjp(_gated_product_fwd, _gated_product_bwd)
drhs_of_each.defvjp(_drhs_fwd, _drhs_bwd)
gate_gradient.defvjp(_gate_gradient_fwd, _gate_gradient_bwd)


def _compute_product(pairs, groups, *, implementation, platform, transpose_rhs, zero_unused):
    lhs, rhs = pairs[0]
    backend = select(implementation, platform, rhs.shape[1:], lhs.dtype, lhs.shape[0])
    options = dict(transpose_rhs=transpose_rhs, zero_unused=zero_unused)
    return backend.sum_of_products(pairs, groups, **options)


def _compute_gated(
    lhs, rhs, biases, groups, *, gating, keep, implementation, platform, zero_unused
):
    backend = select(implementation, platform, rhs[0].shape[1:], lhs.dtype, lhs.shape[0])
    options = dict(biases=biases, zero_unused=zero_unused)
    return backend.gated_product(lhs, rhs, groups, gating, keep, **options)


def _compute_drhs(lhs, grads, sums, group_sizes, *, implementation, platform):
    shape = lhs.shape[1], grads[0].shape[1]
    backend = select(implementation, platform, shape, lhs.dtype, lhs.shape[0])
    return backend.drhs_of_each(lhs, grads, group_sizes, sums)


def _compute_gate_gradient(
    dhidden, products, weights, group_sizes, *, gating, implementation, platform
):
    # No matrix takes part, so only the width must suit the kernels.
    width = dhidden.shape[1]
    backend = select(implementation, platform, (width, width), dhidden.dtype, dhidden.shape[0])
    return backend.gate_gradient(gating, dhidden, products, weights, group_sizes)


def _without_unused_products(used, params):
    """Drops the results `product` if none is used; see `define_primitive`."""
    if params["keep"] and not any(used[1:]):
        return params | {"keep": False}, [0], None
    return params, range(len(used)), None


def _without_unused_gradients(used, params):
    """Drops unused gradients with their cotangents and sums; see `define_primitive`."""
    tree = params["tree"]
    # Each operand is represented by its index, of which the kept ones are returned.
    lhs, grads, sums, group_sizes = jax.tree.unflatten(tree, range(tree.num_leaves))
    kept_results = [i for i, is_used in enumerate(used) if is_used]
    grads = [grads[i] for i in kept_results]
    sums = None if sums is None else [sums[i] for i in kept_results]
    operands, tree = jax.tree.flatten((lhs, grads, sums, group_sizes))
    return params | {"tree": tree}, kept_results, operands


_PRODUCT = define("grouped_matmul", _compute_product)
_GATED = define("grouped_matmul_gated", _compute_gated, unused=_without_unused_products)
_DRHS = define("grouped_matmul_drhs", _compute_drhs, unused=_without_unused_gradients)
_GATE_GRADIENT = define("gate_gradient", _compute_gate_gradient)
