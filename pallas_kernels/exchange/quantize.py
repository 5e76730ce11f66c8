"""Quantizes rows to float8 with a float32 scale for every 128 values, and back, in plain JAX.

`quantized_rows` takes the same arithmetic steps within kernels, so the two agree bit for bit
wherever XLA divides as IEEE 754 says. `jax_ep.exchange.quantization` describes the precision of the
format, and what becomes of infinities and NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 128  # values that share a scale
ROW_MULTIPLE = 512  # columns: whole vectors of 16 bytes of scales, and a block for every warp
MIN_SCALE = 2.0**-117  # so that no product of a value and a scale is subnormal
# A little less than 1 / 448, so that 448 · scale never rounds to more than the largest value.
SCALE_OF_LARGEST = (1 - 2**-22) / 448


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Quantizes x [..., H] to rows [..., H] of `dtype` and scales [..., H / 128] float32."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    finite = jnp.isfinite(blocks)
    largest = jnp.max(jnp.abs(jnp.where(finite, blocks, 0)), axis=-1)
    scales = jnp.maximum(largest * SCALE_OF_LARGEST, MIN_SCALE)
    values = jnp.where(finite, blocks * (1 / scales)[..., None], jnp.nan)
    return values.astype(dtype).reshape(x.shape), scales


def dequantize(rows: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Multiplies rows [..., H] float8 by scales [..., H / 128]; returns [..., H] of `dtype`."""
    blocks = rows.astype(jnp.float32).reshape(*scales.shape, BLOCK)
    return (blocks * scales[..., None]).astype(dtype).reshape(rows.shape)
