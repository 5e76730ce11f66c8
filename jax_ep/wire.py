"""Rows as float8 on the wire: 1 byte a value, and one float32 scale for every 128 values.

The blocks and the scales are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). For a block
of 128 neighbouring values of one row,

    scale = max(largest |finite value| / 448, 2^-117),    sent = float8_e4m3fn(value / scale),

so what arrives, sent · scale, is within the type's own rounding of the value: e4m3 has 3 bits of
fraction, normal numbers from 2^-6 and subnormal ones every 2^-9, so

    |arrived - value| <= max(2^-4 |value|, 2^-10 scale),

and the rounding of the receiver's dtype. A block of zeros arrives as zeros; the largest values a
dtype has do not overflow; below 448 · 2^-117, or 2.7e-33, the scale stays and the error is at most
2^-127. The type has no infinity: NaN and infinities arrive as NaN, and leave the rest of their
block alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128  # values to a scale
DTYPES = (jnp.float8_e4m3fn,)
_MIN_SCALE = 2.0**-117  # so that no product of a value and a scale is subnormal
_WORD_BYTES = 4
# A little less than 1 / 448, so that 448 · scale never rounds to more than the largest value.
_SCALE_OF_LARGEST = (1 - 2**-22) / 448


def check(name: str, hidden: int, dtype: jax.typing.DTypeLike, wire_dtype: object) -> None:
    """Raises ValueError or TypeError unless rows [*, hidden] can go as `wire_dtype`."""
    try:
        known = jnp.dtype(wire_dtype) in DTYPES  # type: ignore[call-overload]
    except TypeError:
        known = False
    if not known:
        names = ", ".join(jnp.dtype(d).name for d in DTYPES)
        raise ValueError(f"wire_dtype must be None or {names}, but is {wire_dtype!r}.")
    if hidden % BLOCK:
        raise ValueError(
            f"wire_dtype={jnp.dtype(wire_dtype).name} needs rows of whole blocks of {BLOCK} "  # type: ignore[call-overload]
            f"values, but {name} has {hidden} columns; pad them."
        )
    if jnp.dtype(dtype).itemsize < 2:
        raise TypeError(
            f"{name} is sent as {jnp.dtype(wire_dtype).name} from a wider dtype, "  # type: ignore[call-overload]
            f"but has dtype {jnp.dtype(dtype).name}; leave wire_dtype out."
        )


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """[..., H] floating -> (rows [..., H] of `dtype`, scales [..., H / 128] float32)."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    finite = jnp.isfinite(blocks)
    largest = jnp.max(jnp.abs(jnp.where(finite, blocks, 0)), axis=-1)
    scales = jnp.maximum(largest * _SCALE_OF_LARGEST, _MIN_SCALE)
    values = jnp.where(finite, blocks / scales[..., None], jnp.nan)
    return values.astype(dtype).reshape(x.shape), scales


def dequantize(rows: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """(rows [..., H] float8, scales [..., H / 128]) -> [..., H] of `dtype`."""
    blocks = rows.astype(jnp.float32).reshape(*scales.shape, BLOCK)
    return (blocks * scales[..., None]).astype(dtype).reshape(rows.shape)


def pack(rows: jax.Array, scales: jax.Array) -> jax.Array:
    """Both in one row of words: [..., H / 4 + H / 128] int32, bit for bit."""
    words = rows.reshape(*rows.shape[:-1], -1, _WORD_BYTES)
    return jnp.concatenate(
        [
            lax.bitcast_convert_type(words, jnp.int32),
            lax.bitcast_convert_type(scales, jnp.int32),
        ],
        axis=-1,
    )


def unpack(
    words: jax.Array, hidden: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """What `pack` was given: rows [..., hidden] of `dtype`, scales [..., hidden / 128]."""
    rows, scales = jnp.split(words, [hidden // _WORD_BYTES], axis=-1)
    rows = lax.bitcast_convert_type(rows, dtype).reshape(*words.shape[:-1], hidden)
    return rows, lax.bitcast_convert_type(scales, jnp.float32)


def packed(num_rows: int, hidden: int) -> jax.ShapeDtypeStruct:
    """What `pack` makes of [num_rows, hidden]."""
    return jax.ShapeDtypeStruct((num_rows, hidden // _WORD_BYTES + hidden // BLOCK), jnp.int32)
