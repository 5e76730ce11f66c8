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

Rows = jax.Array | jax.ShapeDtypeStruct

BLOCK = 128  # values to a scale
DTYPES = (jnp.float8_e4m3fn,)
_MIN_SCALE = 2.0**-117  # so that no product of a value and a scale is subnormal
_WORD_BYTES = 4
# A little less than 1 / 448, so that 448 · scale never rounds to more than the largest value.
_SCALE_OF_LARGEST = (1 - 2**-22) / 448


def checked(name: str, rows: Rows, wire_dtype: jax.typing.DTypeLike | None) -> jnp.dtype | None:
    """wire_dtype as a dtype; raises ValueError or TypeError unless `rows` can go as that."""
    if wire_dtype is None:
        return None
    try:
        known = jnp.dtype(wire_dtype) in DTYPES
    except TypeError:
        known = False
    if not known:
        names = ", ".join(jnp.dtype(d).name for d in DTYPES)
        raise ValueError(f"wire_dtype must be None or {names}, but is {wire_dtype!r}.")
    dtype = jnp.dtype(wire_dtype)
    if rows.shape[-1] % BLOCK:
        raise ValueError(
            f"wire_dtype={dtype.name} needs rows of whole blocks of {BLOCK} values, but {name} has "
            f"{rows.shape[-1]} columns; pad them."
        )
    if rows.dtype.itemsize < 2:
        raise TypeError(
            f"{name} is sent as {dtype.name} from a wider dtype, but has dtype {rows.dtype}; leave "
            "wire_dtype out."
        )
    return dtype


def sent(x: jax.Array, wire_dtype: jnp.dtype | None) -> jax.Array:
    """Rows [..., H] as they cross the wire: as they are, or quantized and packed."""
    return x if wire_dtype is None else pack(*quantize(x, wire_dtype))


def sent_shape(x: Rows, wire_dtype: jnp.dtype | None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `sent`."""
    if wire_dtype is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    words = x.shape[-1] // _WORD_BYTES + x.shape[-1] // BLOCK
    return jax.ShapeDtypeStruct((*x.shape[:-1], words), jnp.int32)


def received(
    rows: jax.Array, x: jax.Array, wire_dtype: jnp.dtype | None, quantized: bool
) -> tuple[jax.Array, jax.Array | None]:
    """What came of `sent(x)`, as it is handed out: rows, and the scales of quantized ones."""
    if wire_dtype is None:
        return rows, None
    values, scales = unpack(rows, x.shape[-1], wire_dtype)
    return (values, scales) if quantized else (dequantize(values, scales, x.dtype), None)


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


def no_gradient(wire_dtype: jnp.dtype | None) -> str:
    """Why nobody can differentiate a dispatch of quantized output, and what would do."""
    return (
        f'dispatch(output="quantized") has no gradient: the cotangent of {wire_dtype} rows would '
        f'be {wire_dtype}. Use output="dequantized", or give the cotangent of the rows to combine '
        "in a jax.custom_vjp around the dispatch and the matmul."
    )
