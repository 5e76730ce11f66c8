"""The dtype that sums and elementwise operations are computed with."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def wide_dtype(dtype: Any) -> Any:
    """Returns float32, or a floating dtype itself if it is wider; for strict promotion, too."""
    return dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
