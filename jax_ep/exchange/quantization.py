"""Maps wire dtypes to row formats, and packs rows as unsigned integers that XLA sends unchanged.

`jax_ep.formats` describes the formats, their rounding errors, and how NaN is encoded.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import FLOAT8_ROWS, PLAIN, Format, RowFormat

ArrayOrType = jax.Array | jax.ShapeDtypeStruct

WIRE_FORMATS: tuple[Format, ...] = (FLOAT8_ROWS,)
WIRE_DTYPES = tuple(format.dtype for format in WIRE_FORMATS)


def wire_format(wire_dtype: jax.typing.DTypeLike | None, argument: str = "wire_dtype") -> RowFormat:
    """Returns the row format for a `wire_dtype`; None gives the format of unquantized rows.

    Raises ValueError if there is no format for the dtype; `argument` is the name of `wire_dtype` in
    the message.
    """
    if wire_dtype is None:
        return PLAIN
    try:
        return WIRE_FORMATS[WIRE_DTYPES.index(jnp.dtype(wire_dtype))]
    except (TypeError, ValueError):
        names = ", ".join(dtype.name for dtype in WIRE_DTYPES)
        raise ValueError(f"{argument} must be None or {names}, but is {wire_dtype!r}.") from None


def checked(
    name: str,
    rows: ArrayOrType,
    wire_dtype: jax.typing.DTypeLike | None,
    argument: str = "wire_dtype",
) -> RowFormat:
    """Returns the row format for a `wire_dtype` after checking that it can encode `rows`.

    Args:
      name: the caller's name for `rows`, for the error.
      rows: [..., H], or their shape and dtype.
      wire_dtype: the dtype in which rows are sent; None: the rows' own dtype.
      argument: the caller's name for `wire_dtype`, for the error.

    Raises:
      ValueError: wire_dtype is not one of WIRE_DTYPES, or H is not a multiple of the number of
        values that share a scale.
      TypeError: the dtype of `rows` is no wider than wire_dtype.
    """
    wire = wire_format(wire_dtype, argument)
    if not wire.quantized:
        return wire
    columns = wire.row_block
    if rows.shape[-1] % columns:
        raise ValueError(
            f"{argument}={wire.name} needs rows of whole blocks of {columns} values, but {name} "
            f"has {rows.shape[-1]} columns; pad them."
        )
    if rows.dtype.itemsize < 2:
        raise TypeError(
            f"{name} must have a dtype of 16 bits or more to be sent as {wire.name}, but has dtype "
            f"{rows.dtype}; leave {argument} at None."
        )
    return wire


def check_output(output: str, wire: RowFormat) -> None:
    if output not in ("dequantized", "quantized"):
        raise ValueError(f'output must be "dequantized" or "quantized", but is {output!r}.')
    if output == "quantized" and not wire.quantized:
        raise ValueError('output="quantized" needs a wire_dtype, such as jnp.float8_e4m3fn.')


def bits(x: jax.Array, wire: RowFormat = PLAIN) -> jax.Array:
    """Packs rows x [..., H] into one array of unsigned integers, for XLA's collectives to move.

    XLA moves unsigned integers unchanged, but may change the payload of floats that are NaN.
    Unquantized rows become an array [..., H] of uints as wide as x's dtype. Quantized rows become
    uint8 [..., bytes of a row]: the values of a row, then its scales.
    """
    if not wire.quantized:
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    of_parts = (_to_bytes(part) for part in wire.encode(x))
    return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in of_parts], axis=-1)


def parts(sent: jax.Array, x: jax.Array, wire: RowFormat = PLAIN) -> tuple[jax.Array, ...]:
    """Unpacks rows that `bits` packed; returns the arrays that `wire.encode(x)` returns.

    Args:
      sent: the packed rows; they may have other leading axes than x.
      x: an array with the width and dtype of the rows before packing; its values are not read.
      wire: the row format given to `bits`.

    Returns:
      (rows,) if the format does not quantize, else (values, scales).
    """
    if not wire.quantized:
        return (lax.bitcast_convert_type(sent, x.dtype),)
    unpacked, start = [], 0
    for columns, dtype in wire.row_parts(x.shape[-1], x.dtype):
        size = jnp.dtype(dtype).itemsize
        part = sent[..., start : start + columns * size]
        unpacked.append(_from_bytes(part.reshape(*sent.shape[:-1], columns, size), dtype))
        start += columns * size
    return tuple(unpacked)


# A program of `jax.export` with symbolic shapes cannot run a bitcast between numbers of different
# widths. So the two functions below bitcast only between a number and an unsigned integer of the
# same width, and convert that integer from and to bytes by shifts.


def _to_bytes(x: jax.Array) -> jax.Array:
    """Splits each number of x [...] into its `size` bytes, lowest first: [..., size] uint8."""
    size = x.dtype.itemsize
    words = lax.bitcast_convert_type(x, f"uint{8 * size}")
    return jnp.stack([(words >> (8 * i)).astype(jnp.uint8) for i in range(size)], axis=-1)


def _from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
    """Joins the bytes x [..., size] uint8, lowest first, to numbers [...] of `dtype`."""
    size = x.shape[-1]
    words = [x[..., i].astype(f"uint{8 * size}") << (8 * i) for i in range(size)]
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, words), dtype)


def no_gradient(wire: RowFormat) -> str:
    """Returns the error message for differentiating a dispatch with quantized output."""
    return (
        f'dispatch(output="quantized") has no gradient: the cotangent of {wire.name} rows would be '
        f'{wire.name}. Use output="dequantized", or give the cotangent of the rows to combine in a '
        "jax.custom_vjp around the dispatch and the matmul."
    )
