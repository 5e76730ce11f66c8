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

Sums are float32 (float64 for float64 operands); results have the operands' dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.implementations import Implementation
from jax_ep.matmul.gating import Gating, gate_gradient_of_all, gated
from jax_ep.matmul.groups import Groups
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT
from pallas_kernels.matmul.chosen_groups import ChosenGroups

# Pairs (lhs, rhs) of rows and of groups' matrices, whose grouped products are summed. All lhs have
# one shape, all rhs have one shape, and all arrays have one dtype.
Pairs = Sequence[tuple[jax.Array, jax.Array]]
# A function (lhs, cotangents, group_sizes, sums) -> gradients. The rows of lhs [R, K] were
# multiplied by several matrices [L, K, N]. For the cotangent [R, N] of each product, the function
# returns the gradient of the product's matrices, added to an array of `sums` unless that is None.
FusedDrhs = Callable[
    [jax.Array, Sequence[jax.Array], jax.Array, Sequence[jax.Array] | None], tuple[jax.Array, ...]
]
# A function (gating, dhidden, products, weights, group_sizes) -> results. It computes
# `Backend.gate_gradient` in one kernel, for the rows of groups only, or returns None if the kernel
# does not support the arguments.
FusedGateGradient = Callable[
    [Gating, jax.Array, Sequence[jax.Array], jax.Array, jax.Array], tuple[jax.Array, ...] | None
]


class Product(Protocol):
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, groups: Any, /, *, transpose_rhs: bool
    ) -> jax.Array: ...


class SumOfProducts(Protocol):
    def __call__(
        self, pairs: Pairs, groups: Groups, /, *, transpose_rhs: bool, zero_unused: bool
    ) -> jax.Array: ...


class FusedGate(Protocol):
    """A function that computes `Backend.gated_product` in one kernel.

    The function returns None if the kernel does not support the operations of `gating`.
    """

    def __call__(
        self,
        lhs: jax.Array,
        rhs: tuple[jax.Array, jax.Array],
        groups: Groups,
        gating: Gating,
        keep: bool,
        /,
        *,
        biases: tuple[jax.Array, jax.Array] | None,
        zero_unused: bool,
    ) -> tuple[jax.Array, ...] | None: ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of a grouped matmul by which its backend is selected.

    Attributes:
      matrix_shape: (K, N) or (N, K), the shape of each group's matrix as it is stored.
      dtype: the dtype of the operands.
      platform: the platform to run on ("cpu", "cuda", ...); None during tracing, when it is not
        known.
      num_rows: R, the number of rows of lhs, which may be a symbolic dimension under `jax.export`;
        None where it is not known.
      has_scales: whether the operands are quantized, each with an array of scales.
    """

    matrix_shape: Sequence[int]
    dtype: Any
    platform: str | None = None
    num_rows: Any = None
    has_scales: bool = False


def symbolic_rows_reason(problem: Problem) -> str | None:
    """Returns why a backend that needs a static number of rows cannot run, or None if it can.

    The reason is that the number of rows is symbolic, as it may be under `jax.export`. Such
    backends use this function as their `unavailable_reason`, or as a part of it.
    """
    if problem.num_rows is None or not checks.is_symbolic(problem.num_rows):
        return None
    return "the number of rows is symbolic, as it may be for jax.export"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Implementation):
    """An implementation of grouped matmuls, which is selected by a `Problem`.

    Attributes:
      product: multiplies each row by the matrix of its group.
      drhs: computes the gradient of the matrices.
      fused_sum_of_products: sums several products in one accumulator. None means that the products
        are computed separately and then added.
      fused_gated_product: computes a gated product, gating(lhs @ rhs[0], lhs @ rhs[1]), in one
        kernel. It returns None if the kernel does not support this gating. None instead of a
        function means that the two products are computed separately, and XLA computes the gating.
      fused_drhs_of_each: computes several gradients of matrices in one kernel. None means that they
        are computed one by one.
      fused_gate_gradient: computes the gradient of a gated product's gating in one kernel. None
        means that XLA computes it, in a pass over all rows.
      has_chosen_groups: whether `product`, `fused_sum_of_products` and `fused_gated_product`
        support chosen groups. If not, XLA gathers the matrices of the chosen groups.
    """

    product: Product
    drhs: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    fused_sum_of_products: SumOfProducts | None = None
    fused_gated_product: FusedGate | None = None
    fused_drhs_of_each: FusedDrhs | None = None
    fused_gate_gradient: FusedGateGradient | None = None
    has_chosen_groups: bool = False

    def sum_of_products(
        self, pairs: Pairs, groups: Groups, *, transpose_rhs: bool, zero_unused: bool = True
    ) -> jax.Array:
        """Returns the sum of the grouped products of all (lhs, rhs) pairs.

        For chosen groups, the result is [S * height, N]. With `transpose_rhs`, the matrices of each
        rhs are transposed. If the backend has a `fused_sum_of_products`, only the sum is rounded to
        the operands' dtype. Otherwise each product is rounded before it is added. Without
        `zero_unused`, rows past the last group may be undefined.
        """
        if self.fused_sum_of_products is not None:
            return self.fused_sum_of_products(
                pairs, groups, transpose_rhs=transpose_rhs, zero_unused=zero_unused
            )
        product = self._product_of(groups)
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
        """Computes hidden = gating(lhs @ rhs[0], lhs @ rhs[1]) group by group; returns (hidden,).

        `biases`, two arrays [L, N], are added to the products before `gating` is applied. With
        `keep`, returns the two products, without biases, too: (hidden, product, product). Without
        `zero_unused`, rows past the last group may be undefined.
        """
        if self.fused_gated_product is not None:
            fused = self.fused_gated_product(
                lhs, rhs, groups, gating, keep, biases=biases, zero_unused=zero_unused
            )
            if fused is not None:
                return fused
        product = self._product_of(groups)
        products = [product(lhs, each, groups, transpose_rhs=False) for each in rhs]
        hidden = gated(gating, *products, biases=biases, groups=groups)
        return (hidden, *products) if keep else (hidden,)

    def _product_of(self, groups: Groups) -> Callable[..., jax.Array]:
        """Returns a function that computes `product`, and that supports `groups`."""
        if isinstance(groups, ChosenGroups) and not self.has_chosen_groups:
            return product_of_chosen
        return self.product

    def drhs_of_each(
        self,
        lhs: jax.Array,
        grads: Sequence[jax.Array],
        group_sizes: jax.Array,
        sums: Sequence[jax.Array] | None = None,
    ) -> tuple[jax.Array, ...]:
        """Computes `drhs`, the gradient of the groups' matrices, for each cotangent in `grads`.

        With `sums`, an array for each gradient, returns the sums plus the gradients, in the dtype
        of the sums.
        """
        if self.fused_drhs_of_each is not None:
            return self.fused_drhs_of_each(lhs, grads, group_sizes, sums)
        return added(sums, [self.drhs(lhs, grad, group_sizes) for grad in grads])

    def gate_gradient(
        self,
        gating: Gating,
        dhidden: jax.Array,
        products: Sequence[jax.Array],
        weights: jax.Array,
        group_sizes: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Returns the weighted hidden values, and the gradients of both products and the weights.

        Rows past the last group may be undefined.
        """
        if self.fused_gate_gradient is not None:
            fused = self.fused_gate_gradient(gating, dhidden, products, weights, group_sizes)
            if fused is not None:
                return fused
        return gate_gradient_of_all(gating, dhidden, products, weights)


def added(sums: Sequence[jax.Array] | None, terms: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the sums plus the terms, in the dtypes of the sums; or, without sums, the terms."""
    if sums is None:
        return tuple(terms)
    return tuple(
        (total.astype(wide) + term.astype(wide)).astype(total.dtype)
        for total, term in zip(sums, terms, strict=True)
        for wide in [wide_dtype(total.dtype)]
    )


def product_of_chosen(
    lhs: jax.Array, rhs: jax.Array, groups: ChosenGroups, *, transpose_rhs: bool
) -> jax.Array:
    """Computes a product for chosen groups by XLA, which copies the matrices of these groups.

    lhs is [T, K], or [S * height, K] with rows of each group. Returns [S * height, N].
    """
    matrices = rhs[groups.table[:-1, 0]]
    rows = pad_rows(lhs).reshape(-1, groups.height, lhs.shape[1])
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
