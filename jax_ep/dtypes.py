"""Chooses the dtype in which sums and elementwise operations are computed, and rounds to others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype to compute in for arrays of `dtype`: float32, or float64 for float64.

    Unlike `jnp.promote_types`, this works under `jax.numpy_dtype_promotion("strict")`.
    """
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
