"""Selects the formats in which rows are sent, and packs rows as unsigned integers for XLA.

`jax_ep.formats` describes the formats, their errors, and what becomes of NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import FLOAT8_ROWS, PLAIN, Format, RowFormat

Rows = jax.Array | jax.ShapeDtypeStruct

WIRE_FORMATS: tuple[Format, ...] = (FLOAT8_ROWS,)
WIRE_DTYPES = tuple(format.dtype for format in WIRE_FORMATS)


def wire_format(wire_dtype: jax.typing.DTypeLike | None, argument: str = "wire_dtype") -> RowFormat:
    """Returns the format of rows that are sent in a `wire_dtype`; for None, their own dtype.

    Raises ValueError, with the caller's name `argument`, if there is no such format.
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
    rows: Rows,
    wire_dtype: jax.typing.DTypeLike | None,
    argument: str = "wire_dtype",
) -> RowFormat:
    """Returns the format of a `wire_dtype`; raises an error unless `rows` can be sent in it.

    Args:
      name: the caller's name for `rows`, for the error.
      rows: [..., H], or their shape and dtype.
      wire_dtype: the dtype to send rows in; None: their own.
      argument: the caller's name for `wire_dtype`, for the error.

    Raises:
      ValueError: wire_dtype is not one of WIRE_DTYPES, or H is not a multiple of its blocks.
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
            f"{name} is sent as {wire.name} from a wider dtype, but has dtype {rows.dtype}; leave "
            f"{argument} out."
        )
    return wire


def check_output(output: str, wire: RowFormat) -> None:
    if output not in ("dequantized", "quantized"):
        raise ValueError(f'output must be "dequantized" or "quantized", but is {output!r}.')
    if output == "quantized" and not wire.quantized:
        raise ValueError('output="quantized" needs a wire_dtype, such as jnp.float8_e4m3fn.')


def bits(x: jax.Array, wire: RowFormat = PLAIN) -> jax.Array:
    """Packs rows x [..., H] into one array of unsigned integers, for XLA's collectives to move.

    NaNs then keep their payload. Returns x's bits, [..., H]; or in a quantized format, bytes
    [..., bytes of a row]: the values, then the scales.
    """
    if not wire.quantized:
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    of_parts = (lax.bitcast_convert_type(part, jnp.uint8) for part in wire.encode(x))
    return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in of_parts], axis=-1)


def parts(sent: jax.Array, x: jax.Array, wire: RowFormat = PLAIN) -> tuple[jax.Array, ...]:
    """Unpacks `bits(x, wire)`: the arrays that `wire.encode(x)` returns."""
    if not wire.quantized:
        return (lax.bitcast_convert_type(sent, x.dtype),)
    unpacked, start = [], 0
    for columns, dtype in wire.row_parts(x.shape[-1], x.dtype):
        size = jnp.dtype(dtype).itemsize
        part = sent[..., start : start + columns * size]
        if size > 1:
            part = part.reshape(*sent.shape[:-1], columns, size)
        unpacked.append(lax.bitcast_convert_type(part, dtype))
        start += columns * size
    return tuple(unpacked)


def no_gradient(wire: RowFormat) -> str:
    """Returns the error message for differentiating a dispatch with quantized output."""
    return (
        f'dispatch(output="quantized") has no gradient: the cotangent of {wire.name} rows would be '
        f'{wire.name}. Use output="dequantized", or give the cotangent of the rows to combine in a '
        "jax.custom_vjp around the dispatch and the matmul."
    )
