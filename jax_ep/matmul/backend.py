"""The interface of the grouped matmul's backends, and functions that several of them share.

All backends follow one contract, with `num_rows = sum(group_sizes) <= R`:

  product(lhs [R, K], rhs [L, K, N], group_sizes [L], transpose_rhs=...) -> [R, N]
      out[r] = lhs[r] @ rhs[group of r], or lhs[r] @ rhs[group of r].T for rhs [L, N, K] with
      `transpose_rhs`; rows from num_rows on are zero, whatever lhs holds there.
  gated_product(lhs [R, K], (rhs [L, K, N], rhs [L, K, N]), group_sizes [L], gating, keep) ->
      (hidden [R, N],), with `keep` (hidden, product, product), [R, N] each: the two products, each
      rounded to the operands' dtype, and gating of the two.
  gated_product_grad(grad [R, K], rhs [L, N, K], (product [R, N], product [R, N]), weights [R] or
      None, group_sizes [L], gating) -> (hidden [R, N], dproduct [R, N], dproduct [R, N]), with
      weights also dweights [R]: hidden is weights * gating of the two products, and the others are
      the gradients of what this is of, where its own is grad @ transposed rhs, rounded to the
      operands' dtype.
  drhs(lhs [R, K], grad [R, N], group_sizes [L]) -> [L, K, N]
      out[l] = lhs[rows of l].T @ grad[rows of l]; zero for an empty group; rows from num_rows on
      contribute nothing, whatever the two operands hold there.

Sums are float32 (float64 for float64 operands); results have the operands' dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

# Rows of a tile of the kernels for GPUs: with another number of rows an operand is copied first.
TILE_ROWS = 8
Pairs = Sequence[tuple[jax.Array, jax.Array]]  # (lhs, rhs), all of the same shapes and dtype
# An elementwise function of two arrays, float32 or wider.
Gating = Callable[[jax.Array, jax.Array], jax.Array]
# From lhs, both rhs, group_sizes, gating and `keep` to what `gated_product` returns, or None.
FusedGate = Callable[
    [jax.Array, tuple[jax.Array, jax.Array], jax.Array, Gating, bool], tuple[jax.Array, ...] | None
]
# From what `gated_product_grad` gets to what it returns, or None.
FusedGateGrad = Callable[
    [
        jax.Array,
        jax.Array,
        tuple[jax.Array, jax.Array],
        jax.Array | None,
        jax.Array,
        Gating,
    ],
    tuple[jax.Array, ...] | None,
]


class Product(Protocol):
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
    ) -> jax.Array: ...


class SumOfProducts(Protocol):
    def __call__(
        self, pairs: Pairs, group_sizes: jax.Array, *, transpose_rhs: bool
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to compute grouped matmuls.

    Attributes:
      name: the backend's name as an `implementation` argument.
      product: multiplies each row by the matrix of its group.
      drhs: computes the gradient of the matrices.
      fused_sum: sums products in one accumulator; None: products are computed apart and added.
      fused_gate: computes a gated product in one kernel, or returns None for a gating that it
        cannot compute; None: products are computed apart, and XLA gates them.
      fused_gate_grad: computes the gradient of a gate in the kernel of the product that its own
        gradient is, or returns None where it cannot; None: XLA computes it from the product.
      operands_reason: returns why the backend cannot multiply by matrices of a shape and dtype, or
        None if it can.
      platform_reason: returns why the backend cannot run on a platform ("cpu", "cuda", ...), or
        None if it can.
    """

    name: str
    product: Product
    drhs: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    fused_sum: SumOfProducts | None = None
    fused_gate: FusedGate | None = None
    fused_gate_grad: FusedGateGrad | None = None
    operands_reason: Callable[[Sequence[int], Any], str | None] = lambda matrix_shape, dtype: None
    platform_reason: Callable[[str], str | None] = lambda platform: None

    def sum_of_products(
        self, pairs: Pairs, group_sizes: jax.Array, *, transpose_rhs: bool
    ) -> jax.Array:
        """Sums the products of (lhs, rhs) pairs, rounded once if fused, else after each product."""
        if self.fused_sum is not None:
            return self.fused_sum(pairs, group_sizes, transpose_rhs=transpose_rhs)
        products = (self.product(*pair, group_sizes, transpose_rhs=transpose_rhs) for pair in pairs)
        return functools.reduce(jnp.add, products)

    def gated_product(
        self,
        lhs: jax.Array,
        rhs: tuple[jax.Array, jax.Array],
        group_sizes: jax.Array,
        gating: Gating,
        keep: bool,
    ) -> tuple[jax.Array, ...]:
        """Gates the products of lhs and both rhs; with `keep` returns the products too."""
        if self.fused_gate is not None:
            fused = self.fused_gate(lhs, rhs, group_sizes, gating, keep)
            if fused is not None:
                return fused
        products = [self.product(lhs, each, group_sizes, transpose_rhs=False) for each in rhs]
        hidden = gated(gating, *products)
        return (hidden, *products) if keep else (hidden,)

    def gated_product_grad(
        self,
        grad: jax.Array,
        rhs: jax.Array,
        products: tuple[jax.Array, jax.Array],
        weights: jax.Array | None,
        group_sizes: jax.Array,
        gating: Gating,
    ) -> tuple[jax.Array, ...]:
        """Returns the weighted hidden values, and gradients of both products and the weights."""
        if self.fused_gate_grad is not None:
            fused = self.fused_gate_grad(grad, rhs, products, weights, group_sizes, gating)
            if fused is not None:
                return fused
        dhidden = self.product(grad, rhs, group_sizes, transpose_rhs=True)
        return gated_grad(gating, dhidden, products, weights)


@dataclasses.dataclass(frozen=True)
class GateGradient:
    """A gating function, times weights if there are any, and its gradient, elementwise.

    A function of (gate, up, gradient of the result, and perhaps weights), of one shape and dtype,
    to (result, gradients of gate, up, and perhaps weights).
    """

    gating: Gating

    def __call__(
        self, gate: jax.Array, up: jax.Array, grad: jax.Array, *weights: jax.Array
    ) -> tuple[jax.Array, ...]:
        def hidden(gate, up, *weights):
            return functools.reduce(jnp.multiply, weights, self.gating(gate, up))

        result, gradient = jax.vjp(hidden, gate, up, *weights)
        return (result, *gradient(grad))


def gated_grad(
    gating: Gating,
    dhidden: jax.Array,
    products: tuple[jax.Array, jax.Array],
    weights: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns what `Backend.gated_product_grad` does, from the product dhidden [R, N]."""
    dtype = products[0].dtype
    wide = [array.astype(accumulator(dtype)) for array in (*products, dhidden)]
    if weights is not None:
        wide.append(jnp.broadcast_to(weights.astype(wide[0].dtype)[:, None], dhidden.shape))
    results = GateGradient(gating)(*wide)
    rounded = tuple(result.astype(dtype) for result in results[:3])
    if weights is None:
        return rounded
    return *rounded, jnp.sum(results[3], axis=-1).astype(weights.dtype)


def gated(gating: Gating, *products: jax.Array) -> jax.Array:
    """Returns gating of the products, computed in float32 or wider and rounded to their dtype."""
    dtype = products[0].dtype
    return gating(*(product.astype(accumulator(dtype)) for product in products)).astype(dtype)


def accumulator(dtype: Any) -> Any:
    """Returns the dtype in which products of operands of a dtype are summed: float32 or float64."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def pad_rows(x: jax.Array) -> jax.Array:
    """Appends rows of zeros to x [R, ...], up to the next multiple of TILE_ROWS rows."""
    return jnp.pad(x, ((0, -x.shape[0] % TILE_ROWS), *((0, 0),) * (x.ndim - 1)))


def zero_tail(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sets the rows of x [R, ...] past the last group to zero."""
    live = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(live[:, None], x, 0)
