"""Chooses the dtypes to compute in, rounds to others, and keeps XLA from folding constants."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype to compute in for arrays of `dtype`: float32, or float64 for float64."""
    # `jnp.promote_types` fails under `jax.numpy_dtype_promotion("strict")`.
    return dtype if jnp.finfo(dtype).bits > 32 else jnp.float32


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds x, floating, to the numbers of a floating `dtype`; the result has x's dtype.

    XLA may leave out a cast to a narrower dtype and back, but it does not leave out this rounding.
    """
    of_x, bits = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if bits.bits >= of_x.bits:
        return x
    if bits.nexp == of_x.nexp:
        return lax.reduce_precision(x, bits.nexp, bits.nmant)
    # With fewer exponent bits, reduce_precision would make subnormal numbers zero.
    return lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


def not_folded(x: jax.Array) -> jax.Array:
    """Returns x as a value that XLA cannot recognize as a constant, even if x is one."""
    # XLA evaluates reductions of constants while it compiles, which takes seconds for large arrays.
    # It fuses the selection, which always takes x, with the operation that reads the result.
    return jnp.where(lax.optimization_barrier(jnp.bool_(True)), x, jnp.zeros((), x.dtype))
