"""Computes the function between an expert's two matmuls, its gradient, and biases of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.dtypes import wide_dtype
from pallas_kernels.matmul.chosen_groups import Groups, group_of_row

# An elementwise function that computes the hidden values of an expert. It gets the two products
# lhs @ rhs[0] and lhs @ rhs[1] in float32 or wider.
Gating = Callable[[jax.Array, jax.Array], jax.Array]


def gated(
    gating: Gating,
    *products: jax.Array,
    biases: Sequence[jax.Array | None] | None = None,
    groups: Groups | None = None,
) -> jax.Array:
    """Computes gating(*products), after adding `biases` [L, N] of each row's group, if given."""
    wide = wide_dtype(products[0].dtype)
    row_biases = biases_of_rows(biases or (), groups, products[0].shape[0], wide)
    return hidden_values(gating, row_biases, products)


def hidden_values(
    unit: Callable[..., jax.Array],
    biases: Sequence[jax.Array | None],
    pre: Sequence[jax.Array],
    weights: jax.Array | None = None,
) -> jax.Array:
    """Applies `unit` to pre-activations [R, N] plus biases [R, N] or None, in float32 or wider.

    Multiplies each row by its weight, if given, and rounds to the dtype of `pre`.
    """
    wide = wide_dtype(pre[0].dtype)
    arguments = [rows.astype(wide) for rows in pre]
    # Callers may pass both of an expert's biases, also for a `unit` of one array.
    for i, bias in enumerate(biases[: len(arguments)]):
        if bias is not None:
            arguments[i] += bias.astype(wide)
    hidden = unit(*arguments)
    if weights is not None:
        hidden *= weights.astype(wide)[:, None]
    return hidden.astype(pre[0].dtype)


def biases_of_rows(
    biases: Sequence[jax.Array | None], groups: Groups | None, num_rows: int, dtype: Any
) -> tuple[jax.Array | None, ...]:
    """Returns `bias_of_row` of each of `biases`, for the rows of `groups`; a None stays None."""
    if all(bias is None for bias in biases):
        return tuple(biases)
    assert groups is not None
    group_of_rows = group_of_row(groups, num_rows)
    return tuple(
        None if bias is None else bias_of_row(bias, group_of_rows, dtype) for bias in biases
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def bias_of_row(bias: jax.Array, group_of_rows: jax.Array, dtype: Any) -> jax.Array:
    """Returns the bias [L, N] of each row's group, [R, N] of `dtype`; zero past the last group."""
    return bias.astype(dtype).at[group_of_rows].get(mode="fill", fill_value=0)


def _bias_of_row_fwd(bias, group_of_rows, dtype):
    return bias_of_row(bias, group_of_rows, dtype), (bias, group_of_rows)


def _bias_of_row_bwd(dtype, saved, grad):
    bias, group_of_rows = saved
    return sum_by_group(grad, group_of_rows, bias), None


bias_of_row.defvjp(_bias_of_row_fwd, _bias_of_row_bwd)


def sum_by_group(rows: jax.Array, group_of_rows: jax.Array, bias: jax.Array) -> jax.Array:
    """Sums cotangents `rows` [R, N] by group, as the gradient of `bias` [L, N]; deterministic."""
    # A matmul with one-hot vectors, since a scatter-add would add the rows in another order each
    # time. In it, zero times a NaN or an infinity would make other groups' sums NaN, so these are
    # replaced by zero, and are added to their own group's sum afterwards.
    members = jax.nn.one_hot(group_of_rows, len(bias), dtype=rows.dtype)
    contract = (((0,), (0,)), ((), ()))
    exact = lax.Precision.HIGHEST
    wide = wide_dtype(rows.dtype)

    def total(terms: jax.Array) -> jax.Array:
        return lax.dot_general(
            members, terms, contract, precision=exact, preferred_element_type=wide
        )

    sums = total(jnp.where(jnp.isfinite(rows), rows, 0))
    # A NaN counts as both infinities: adding inf and -inf to its group's sum makes the sum NaN.
    for value, found in (
        (jnp.inf, (rows == jnp.inf) | jnp.isnan(rows)),
        (-jnp.inf, (rows == -jnp.inf) | jnp.isnan(rows)),
    ):
        sums += jnp.where(total(found.astype(rows.dtype)) > 0, jnp.asarray(value, wide), 0)
    return sums.astype(bias.dtype)


def filled_biases(biases: Sequence[jax.Array | None]) -> tuple[jax.Array, jax.Array] | None:
    """Replaces a missing one of two biases [L, N] by zeros; returns None if both are missing."""
    # `Backend.gated_product` takes two biases or none.
    first, second = biases
    if first is not None:
        return first, jnp.zeros_like(first) if second is None else second
    return None if second is None else (jnp.zeros_like(second), second)


def gate_gradient_of_all(
    gating: Gating, dhidden: jax.Array, products: Sequence[jax.Array], weights: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes `gate_gradient` of `jax_ep.matmul.backend` by XLA, for all rows."""
    without_biases = functools.partial(hidden_values, gating, ())
    hidden, vjp = jax.vjp(without_biases, tuple(products), weights)
    dproducts, dweights = vjp(dhidden)
    return (hidden, *dproducts, dweights)
