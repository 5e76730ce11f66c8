"""Chooses the dtype in which sums and elementwise operations are computed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype to compute in for arrays of `dtype`: float32, or float64 for float64.

    Unlike `jnp.promote_types`, this works under `jax.numpy_dtype_promotion("strict")`.
    """
    return dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
