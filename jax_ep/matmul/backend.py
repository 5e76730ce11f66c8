"""Defines the interface of the grouped matmul's backends, and functions that they share.

All backends follow one contract. R is the number of rows, and L the number of groups, each with a
matrix [K, N]. The first num_rows = sum(group_sizes) <= R rows belong to groups.

  product(lhs [R, K], rhs [L, K, N], group_sizes [L], transpose_rhs=...) -> [R, N]
      out[r] = lhs[r] @ rhs[group of r], or lhs[r] @ rhs[group of r].T for rhs [L, N, K] with
      `transpose_rhs`; rows from num_rows on are zero, whatever lhs holds there.
  sum_of_products([(lhs, rhs), ...], group_sizes, transpose_rhs=..., zero_unused=...) -> [R, N]
      the sum of `product` over the pairs; without `zero_unused`, rows from num_rows on are
      undefined.
  gated_product(lhs [R, K], (rhs [L, K, N], rhs [L, K, N]), group_sizes [L], gating, keep) ->
      (hidden [R, N],), or with `keep` (hidden, product, product), [R, N] each. A product is rounded
      to the operands' dtype, and hidden = gating(product, product). With `biases`, two arrays
      [L, N], the biases of a row's group are first added to the products that `gating` gets.
      `zero_unused` is that of `sum_of_products`.
  drhs(lhs [R, K], grad [R, N], group_sizes [L]) -> [L, K, N]
      out[l] = lhs[rows of l].T @ grad[rows of l]; zero for an empty group; rows from num_rows on
      contribute nothing, whatever the two operands hold there.
  drhs_of_each(lhs, grads, group_sizes, sums) -> a tuple: drhs of lhs and each array of `grads`,
      added to the arrays `sums` unless these are None.
  gate_gradient(gating, dhidden [R, N], products [R, N] twice, weights [R], group_sizes [L]) ->
      (hidden, dproduct, dproduct, dweights): hidden = weights[:, None] * gating(*products), and the
      gradients of the products and of the weights, where dhidden is the gradient of hidden. Rows
      from num_rows on are undefined.

Sums are float32 (float64 for float64 operands); results have the operands' dtype. `sum_of_products`
and `gated_product` also take `ChosenGroups` for group_sizes; the results have `output_rows` rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.implementations import Implementation
from jax_ep.matmul.gating import Gating, gate_gradient_of_all, gated
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT
from pallas_kernels.matmul.chosen_groups import ChosenGroups, Groups

# Pairs (lhs, rhs) of rows and of groups' matrices, whose grouped products are summed. All lhs have
# one shape, all rhs have one shape, and all arrays have one dtype.
Pairs = Sequence[tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of a grouped matmul by which its backend is selected."""

    # (K, N) or (N, K), the shape of each group's matrix as it is stored
    matrix_shape: Sequence[int]
    dtype: Any
    platform: str | None = None  # "cpu", "cuda", ...; None during tracing, when it is not known
    num_rows: Any = None  # R, which may be symbolic under `jax.export`; None: not known
    has_scales: bool = False  # whether the operands are quantized, each with an array of scales


def symbolic_rows_reason(problem: Problem) -> str | None:
    if problem.num_rows is None or not checks.is_symbolic(problem.num_rows):
        return None
    return "the number of rows is symbolic, as it may be for jax.export"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Implementation):
    """The methods use `product`, `drhs` and XLA; "pallas" has kernels of its own for them."""

    product: Callable[..., jax.Array]
    drhs: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

    def sum_of_products(
        self, pairs: Pairs, groups: Groups, *, transpose_rhs: bool, zero_unused: bool = True
    ) -> jax.Array:
        """Sums the products of pairs, each rounded. Only "pallas" has a use for `zero_unused`."""
        product: Any = product_of_chosen if isinstance(groups, ChosenGroups) else self.product
        products = (product(*pair, groups, transpose_rhs=transpose_rhs) for pair in pairs)
        return functools.reduce(jnp.add, products)

    def gated_product(
        self,
        lhs: jax.Array,
        rhs: tuple[jax.Array, jax.Array],
        groups: Groups,
        gating: Gating,
        keep: bool,
        *,
        biases: tuple[jax.Array, jax.Array] | None = None,
        zero_unused: bool = True,
    ) -> tuple[jax.Array, ...]:
        options = dict(transpose_rhs=False, zero_unused=zero_unused)
        products = [self.sum_of_products([(lhs, each)], groups, **options) for each in rhs]
        hidden = gated(gating, *products, biases=biases, groups=groups)
        return (hidden, *products) if keep else (hidden,)

    def drhs_of_each(
        self,
        lhs: jax.Array,
        grads: Sequence[jax.Array],
        group_sizes: jax.Array,
        sums: Sequence[jax.Array] | None = None,
    ) -> tuple[jax.Array, ...]:
        return added(sums, [self.drhs(lhs, grad, group_sizes) for grad in grads])

    def gate_gradient(
        self,
        gating: Gating,
        dhidden: jax.Array,
        products: Sequence[jax.Array],
        weights: jax.Array,
        group_sizes: jax.Array,
    ) -> tuple[jax.Array, ...]:
        # XLA computes all rows, so `group_sizes` has no effect.
        return gate_gradient_of_all(gating, dhidden, products, weights)


def added(sums: Sequence[jax.Array] | None, terms: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the sums plus the terms, in the dtypes of the sums; or, without sums, the terms."""
    if sums is None:
        return tuple(terms)
    results = []
    for total, term in zip(sums, terms, strict=True):
        wide = wide_dtype(total.dtype)
        results.append((total.astype(wide) + term.astype(wide)).astype(total.dtype))
    return tuple(results)


def product_of_chosen(
    lhs: jax.Array, rhs: jax.Array, groups: ChosenGroups, *, transpose_rhs: bool
) -> jax.Array:
    """Computes a product for chosen groups by XLA, which copies the matrices of these groups.

    lhs is [T, K] for all of S chosen groups, or [S * height, K] with `height` rows for each group.
    Returns [S * height, N].
    """
    # `table` has a row for each tile, which begins with the tile's group, and one row more.
    matrices = rhs[groups.table[:-1, 0]]
    rows = pad_rows(lhs).reshape(-1, groups.height, lhs.shape[1])
    # Rows for all groups, padded to one tile of `height` rows, are repeated for each group.
    rows = jnp.broadcast_to(rows, (matrices.shape[0], *rows.shape[1:]))
    dims = ((2,), (2 if transpose_rhs else 1,)), ((0,), (0,))
    out = lax.dot_general(rows, matrices, dims, preferred_element_type=wide_dtype(lhs.dtype))
    return out.reshape(-1, out.shape[-1]).astype(lhs.dtype)


def pad_rows(x: jax.Array) -> jax.Array:
    """Appends rows of zeros to the matrix x until ROW_ALIGNMENT divides its number of rows."""
    return jnp.pad(x, ((0, -x.shape[0] % ROW_ALIGNMENT), (0, 0)))


def zero_tail(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sets the rows of the matrix x past the last group, from row sum(group_sizes) on, to zero."""
    live = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(live[:, None], x, 0)
