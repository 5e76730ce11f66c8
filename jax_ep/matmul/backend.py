"""Defines the interface of the grouped matmul's backends, and functions that they share.

All backends follow one contract, with `num_rows = sum(group_sizes) <= R`:

  product(lhs [R, K], rhs [L, K, N], group_sizes [L], transpose_rhs=...) -> [R, N]
      out[r] = lhs[r] @ rhs[group of r], or lhs[r] @ rhs[group of r].T for rhs [L, N, K] with
      `transpose_rhs`; rows from num_rows on are zero, whatever lhs holds there.
  sum_of_products([(lhs, rhs), ...], group_sizes, transpose_rhs=..., zero_unused=...) -> [R, N]
      the sum of these products; without `zero_unused`, rows from num_rows on hold anything.
  gated_product(lhs [R, K], (rhs [L, K, N], rhs [L, K, N]), group_sizes [L], gating, keep) ->
      (hidden [R, N],), with `keep` (hidden, product, product), [R, N] each: the two products, each
      rounded to the operands' dtype, and gating of the two; `zero_unused` as above.
  drhs(lhs [R, K], grad [R, N], group_sizes [L]) -> [L, K, N]
      out[l] = lhs[rows of l].T @ grad[rows of l]; zero for an empty group; rows from num_rows on
      contribute nothing, whatever the two operands hold there.
  drhs_of_each(lhs, grads, group_sizes) -> drhs of lhs and each grad.

Sums are float32 (float64 for float64 operands); results have the operands' dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.implementations import Implementation

# The GPU kernels' tiles have this many rows; operands with other numbers of rows are copied.
TILE_ROWS = 8
Pairs = Sequence[tuple[jax.Array, jax.Array]]  # (lhs, rhs) pairs of equal shapes and dtypes
# An elementwise function of two arrays, float32 or wider.
Gating = Callable[[jax.Array, jax.Array], jax.Array]
# A function (lhs, grads, group_sizes) -> the results of `drhs_of_each`.
FusedDrhs = Callable[[jax.Array, Sequence[jax.Array], jax.Array], tuple[jax.Array, ...]]


class Product(Protocol):
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
    ) -> jax.Array: ...


class SumOfProducts(Protocol):
    def __call__(
        self, pairs: Pairs, group_sizes: jax.Array, *, transpose_rhs: bool, zero_unused: bool
    ) -> jax.Array: ...


class FusedGate(Protocol):
    """Computes `Backend.gated_product`; returns None for an unsupported gating."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: tuple[jax.Array, jax.Array],
        group_sizes: jax.Array,
        gating: Gating,
        keep: bool,
        *,
        zero_unused: bool,
    ) -> tuple[jax.Array, ...] | None: ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of a grouped matmul by which its backend is selected.

    Attributes:
      matrix_shape: (H, F), the shape of each group's matrix.
      dtype: the dtype of the operands.
      platform: the platform to run on ("cpu", "cuda", ...); None during tracing, when it is not
        known.
      num_rows: R, which is symbolic in some exported programs; None where it is not known.
    """

    matrix_shape: Sequence[int]
    dtype: Any
    platform: str | None = None
    num_rows: Any = None


def symbolic_rows_reason(problem: Problem) -> str | None:
    """Returns why a backend that needs the number of rows cannot run, or None if it is known."""
    if problem.num_rows is None or not checks.is_symbolic(problem.num_rows):
        return None
    return "the number of rows is symbolic, as it may be for jax.export"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Implementation):
    """A way to compute grouped matmuls; its `Implementation` methods take a `Problem`.

    Attributes:
      product: multiplies each row by the matrix of its group.
      drhs: computes the gradient of the matrices.
      fused_sum: sums products in one accumulator; None: products are computed separately and added.
      fused_gate: computes a gated product in one kernel, or returns None for an unsupported gating;
        None: products are computed separately, and XLA computes the gating.
      fused_drhs: computes several gradients of matrices in one kernel; None: one by one.
    """

    product: Product
    drhs: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    fused_sum: SumOfProducts | None = None
    fused_gate: FusedGate | None = None
    fused_drhs: FusedDrhs | None = None

    def sum_of_products(
        self, pairs: Pairs, group_sizes: jax.Array, *, transpose_rhs: bool, zero_unused: bool = True
    ) -> jax.Array:
        """Sums the products of (lhs, rhs) pairs, rounded once if fused, else after each product."""
        if self.fused_sum is not None:
            return self.fused_sum(
                pairs, group_sizes, transpose_rhs=transpose_rhs, zero_unused=zero_unused
            )
        products = (self.product(*pair, group_sizes, transpose_rhs=transpose_rhs) for pair in pairs)
        return functools.reduce(jnp.add, products)

    def gated_product(
        self,
        lhs: jax.Array,
        rhs: tuple[jax.Array, jax.Array],
        group_sizes: jax.Array,
        gating: Gating,
        keep: bool,
        *,
        zero_unused: bool = True,
    ) -> tuple[jax.Array, ...]:
        """Gates the products of lhs and both rhs; with `keep` returns the products too."""
        if self.fused_gate is not None:
            fused = self.fused_gate(lhs, rhs, group_sizes, gating, keep, zero_unused=zero_unused)
            if fused is not None:
                return fused
        products = [self.product(lhs, each, group_sizes, transpose_rhs=False) for each in rhs]
        hidden = gated(gating, *products)
        return (hidden, *products) if keep else (hidden,)

    def drhs_of_each(
        self, lhs: jax.Array, grads: Sequence[jax.Array], group_sizes: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Computes the gradients of matrices from one lhs and several grads, of one shape."""
        if self.fused_drhs is not None:
            return self.fused_drhs(lhs, grads, group_sizes)
        return tuple(self.drhs(lhs, grad, group_sizes) for grad in grads)


def gated(gating: Gating, *products: jax.Array) -> jax.Array:
    """Returns gating of the products, computed in float32 or wider and rounded to their dtype."""
    dtype = products[0].dtype
    return gating(*(product.astype(wide_dtype(dtype)) for product in products)).astype(dtype)


def pad_rows(x: jax.Array) -> jax.Array:
    """Appends rows of zeros to x [R, C], up to the next multiple of TILE_ROWS rows."""
    return jnp.pad(x, ((0, -x.shape[0] % TILE_ROWS), (0, 0)))


def zero_tail(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sets the rows of x [R, ...] past the last group to zero."""
    live = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(live[:, None], x, 0)
