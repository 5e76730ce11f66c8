"""Sends rows as float8 on the wire: 1 byte for each value, and a float32 scale for 128 values.

The blocks and the scales are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). For a block
of 128 neighbouring values of one row,

    scale = max(largest |finite value| / 448, 2^-117),    sent = float8_e4m3fn(value · (1 / scale)),

What arrives is sent · scale. e4m3 has 3 bits of fraction, normal numbers from 2^-6 on, and
subnormal numbers every 2^-9, so

    |arrived - value| <= max(2^-4 |value|, 2^-10 scale),

before it is rounded to the receiver's dtype. A block of zeros arrives as zeros, and the largest
values of a dtype do not overflow. In a block whose largest value is below 448 · 2^-117, or 2.7e-33,
the scale is 2^-117 and the error is at most 2^-127. The type has no infinity: NaN and infinities
arrive as NaN, without effect on the rest of their block.

XLA on CPUs, the kernels and `jax_ep.reference` give the same bits, with these exceptions. XLA on
CPUs treats subnormal float32 values, below 2^-126, as zero: such a value arrives as zero, so it is
off by up to 2^-126 where the bound above may say less. XLA on GPUs divides approximately: 1 / scale
may have a relative error of 2^-22, so a value halfway between two numbers of e4m3 may be rounded to
the other one. Rows that "xla" sends from GPUs as float8 differ from the kernels' in such ties.
Where sums are sent, XLA may multiply by a scale and add to the sum over ranks in one rounding; the
kernels round twice, as does `jax_ep.reference`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.exchange.quantize import BLOCK, dequantize, quantize

Rows = jax.Array | jax.ShapeDtypeStruct

DTYPES = (jnp.float8_e4m3fn,)
_SCALE_BYTES = 4


def checked(
    name: str,
    rows: Rows,
    wire_dtype: jax.typing.DTypeLike | None,
    argument: str = "wire_dtype",
) -> jnp.dtype | None:
    """Returns wire_dtype as a dtype, or None; raises an error unless `rows` can be sent in it.

    Args:
      name: the caller's name for `rows`, for the error.
      rows: [..., H], or their shape and dtype.
      wire_dtype: the dtype to send rows in; None: their own.
      argument: the caller's name for `wire_dtype`, for the error.

    Raises:
      ValueError: wire_dtype is not one of DTYPES, or H is not a multiple of 128.
      TypeError: the dtype of `rows` is no wider than wire_dtype.
    """
    if wire_dtype is None:
        return None
    try:
        known = jnp.dtype(wire_dtype) in DTYPES
    except TypeError:
        known = False
    if not known:
        names = ", ".join(jnp.dtype(d).name for d in DTYPES)
        raise ValueError(f"{argument} must be None or {names}, but is {wire_dtype!r}.")
    dtype = jnp.dtype(wire_dtype)
    if rows.shape[-1] % BLOCK:
        raise ValueError(
            f"{argument}={dtype.name} needs rows of whole blocks of {BLOCK} values, but {name} has "
            f"{rows.shape[-1]} columns; pad them."
        )
    if rows.dtype.itemsize < 2:
        raise TypeError(
            f"{name} is sent as {dtype.name} from a wider dtype, but has dtype {rows.dtype}; leave "
            f"{argument} out."
        )
    return dtype


def check_output(output: str, wire_dtype: jax.typing.DTypeLike | None) -> None:
    if output not in ("dequantized", "quantized"):
        raise ValueError(f'output must be "dequantized" or "quantized", but is {output!r}.')
    if output == "quantized" and wire_dtype is None:
        raise ValueError('output="quantized" needs a wire_dtype, such as jnp.float8_e4m3fn.')


def dequantized(received: tuple[jax.Array, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns received rows, dequantized to `dtype` if they are (float8 rows, scales)."""
    rows, *scales = received
    return dequantize(rows, scales[0], dtype) if scales else rows


def row_bytes(
    hidden: int, dtype: jax.typing.DTypeLike, wire_dtype: jax.typing.DTypeLike | None
) -> int:
    """Returns the bytes of a row of `hidden` columns on the wire, its scales included."""
    if wire_dtype is None:
        return hidden * jnp.dtype(dtype).itemsize
    return hidden * jnp.dtype(wire_dtype).itemsize + hidden // BLOCK * _SCALE_BYTES


def bits(x: jax.Array, wire_dtype: jnp.dtype | None) -> jax.Array:
    """Packs rows x [..., H] into one array of unsigned integers, for XLA's collectives to move.

    So NaNs keep their payload. Returns x's bits, [..., H]; or with a wire_dtype, bytes
    [..., H + H / 32]: the quantized values, then the scales.
    """
    if wire_dtype is None:
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    rows, scales = quantize(x, wire_dtype)
    of_scales = lax.bitcast_convert_type(scales, jnp.uint8)
    of_rows = lax.bitcast_convert_type(rows, jnp.uint8)
    return jnp.concatenate([of_rows, of_scales.reshape(*rows.shape[:-1], -1)], axis=-1)


def parts(sent: jax.Array, x: jax.Array, wire_dtype: jnp.dtype | None) -> tuple[jax.Array, ...]:
    """Unpacks `bits(x, wire_dtype)`: (rows of x's dtype,), or (rows of wire_dtype, scales)."""
    if wire_dtype is None:
        return (lax.bitcast_convert_type(sent, x.dtype),)
    rows, scales = jnp.split(sent, [x.shape[-1]], axis=-1)
    scales = scales.reshape(*sent.shape[:-1], -1, _SCALE_BYTES)
    return (
        lax.bitcast_convert_type(rows, wire_dtype),
        lax.bitcast_convert_type(scales, jnp.float32),
    )


def no_gradient(wire_dtype: jnp.dtype | None) -> str:
    """Returns the error message for differentiating a dispatch with quantized output."""
    return (
        f'dispatch(output="quantized") has no gradient: the cotangent of {wire_dtype} rows would '
        f'be {wire_dtype}. Use output="dequantized", or give the cotangent of the rows to combine '
        "in a jax.custom_vjp around the dispatch and the matmul."
    )
