"""Defines number formats: numbers stored in few bits, with a scale for each block of numbers.

A number is its stored value times the scale of its block. `Format` states the shapes that follow
from the blocks, `Float8` is float8 with a scale for each block of rows and columns, and `PLAIN`
stands for rows in their own dtype. `encode` and `decode` take NumPy and JAX arrays, and return
arrays of the same kind. `pallas_kernels.exchange.quantized_rows` encodes `Float8` within kernels;
`jax_ep.formats` has the public names, and the formats that no kernel reads.

Nothing here imports Pallas or Mosaic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any  # a jax.Array or np.ndarray
DType = jax.typing.DTypeLike

E8M0 = np.dtype(jnp.float8_e8m0fnu)
_E8M0_BIAS, _E8M0_NAN = 127, 255
_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store numbers: as values in few bits, and a scale for each block of numbers.

    Formats are hashable, and equal formats store equal numbers in the same way. A number is its
    value times the scale of its block. Blocks divide the last two axes; in a format whose blocks
    have one row, they divide the last axis alone.

    Attributes:
      name: the name of the numbers' type, such as "float8_e4m3fn" or "mxfp4".
      dtype: the dtype of the array of values.
      scale_dtype: the dtype of the scales.
      block: the rows and columns of numbers that share a scale.
    """

    name: str
    dtype: np.dtype
    scale_dtype: np.dtype
    block: tuple[int, int]

    quantized: ClassVar[bool] = True
    numbers_per_value: ClassVar[int] = 1  # neighbours of the last axis that share an element

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError, naming the argument `name`, unless blocks divide `shape`."""
        rows, columns = self.block
        dims = 1 if rows == 1 else 2
        sizes = shape[-dims:]
        if len(sizes) < dims or any(n % b for n, b in zip(sizes, self.block[-dims:], strict=True)):
            what = f"rows of {columns} numbers" if rows == 1 else f"{rows} x {columns} numbers"
            raise ValueError(
                f"{name} must have whole blocks of {what} to be stored as {self.name}, but has "
                f"shape {tuple(shape)}; pad it."
            )

    def check_scales(self, shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> None:
        """Raises ValueError unless scales of one shape fit numbers of another shape."""
        expected = self.scales_shape(shape)
        if tuple(scales_shape) != expected:
            raise ValueError(
                f"scales must have shape {expected}, one for each block of {self.block} of "
                f"{tuple(shape)} numbers, but has shape {tuple(scales_shape)}."
            )

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the values that store numbers of a shape."""
        return *shape[:-1], shape[-1] // self.numbers_per_value

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales for numbers of a shape; last blocks may be partial."""
        rows, columns = self.block
        blocks = shape[:-1] if rows == 1 else (*shape[:-2], -(-shape[-2] // rows))
        return *blocks, -(-shape[-1] // columns)

    def numbers_shape(self, values_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the numbers that values of a shape store."""
        return *values_shape[:-1], values_shape[-1] * self.numbers_per_value

    def stored_order(self, of_axes: Sequence[Any]) -> tuple[Any, ...]:
        """Reorders items, one for each axis of the numbers, as the axes of values and scales.

        The items are, for example, the parts of a `jax.sharding.PartitionSpec`.
        """
        return tuple(of_axes)

    def row_parts(self, hidden: int, dtype: DType) -> list[tuple[int, DType]]:
        """Returns the columns and dtype of each array that stores rows of H numbers of `dtype`."""
        parts = (self.values_shape, self.dtype), (self.scales_shape, self.scale_dtype)
        return [(shape((hidden,))[0], part) for shape, part in parts]

    def row_bytes(self, hidden: int, dtype: DType) -> int:
        """Returns the bytes of a stored row of H numbers of `dtype`, its scales included."""
        return _bytes(self.row_parts(hidden, dtype))

    @property
    def row_block(self) -> int:
        """The divisor of the length of every row."""
        return self.block[1]

    @property
    def relative_error(self) -> float:
        """The largest |decoded - number| / |number| for numbers near the largest of their block."""
        raise NotImplementedError

    def sum_dtype(self, dtype: DType) -> DType:
        """Returns the dtype of sums of rows of `dtype` before they are encoded."""
        return jnp.float32

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Stores x [..., R, C] as (values, scales). A block with no finite number has no NaN scale.

        Raises:
          ValueError: the shape of x is not of whole blocks.
        """
        raise NotImplementedError

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        """Returns the numbers of (values, scales), rounded to `dtype` from float32.

        Raises:
          ValueError: the shapes do not fit each other.
        """
        raise NotImplementedError

    @property
    def _axes(self) -> tuple[int, ...]:
        """The axes of `_in_blocks`' result that run within a block."""
        return (-1,) if self.block[0] == 1 else (-3, -1)

    def _in_blocks(self, x: Array) -> Array:
        """Reshapes [..., R, C] to [..., R / rows, rows, C / columns, columns].

        Each reshape splits one axis, since JAX supports no others for arrays on Explicit axes.
        """
        rows, columns = self.block
        *lead, width = x.shape
        x = x.reshape(*lead, width // columns, columns)
        return x if rows == 1 else x.reshape(*lead[:-1], lead[-1] // rows, rows, *x.shape[-2:])

    def _out_of_blocks(self, blocks: Array) -> Array:
        """Undoes `_in_blocks`."""
        if self.block[0] > 1:
            *lead, count, rows, across, columns = blocks.shape
            blocks = blocks.reshape(*lead, count * rows, across, columns)
        *lead, across, columns = blocks.shape
        return blocks.reshape(*lead, across * columns)

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Splits x [..., R, C] into blocks of float32, and finds each block's largest magnitude.

        Returns (blocks, finite, largest): the numbers, whether each is finite, and the largest
        finite magnitude of each block.
        """
        self.check_shape("x", x.shape)
        xp = namespace(x)
        blocks = self._in_blocks(x.astype(_FLOAT32))
        finite = xp.isfinite(blocks)
        largest = xp.max(xp.abs(xp.where(finite, blocks, 0)), axis=self._axes)
        return blocks, finite, largest

    def _join(self, values: Array, scales: Array, dtype: DType) -> Array:
        """Multiplies float32 values [..., R, C] by the scales of their blocks."""
        self.check_shape("values", values.shape)
        self.check_scales(values.shape, scales.shape)
        with np.errstate(all="ignore"):
            scales = namespace(scales).expand_dims(scales, self._axes)
            return self._out_of_blocks(multiply(self._in_blocks(values), scales).astype(dtype))


@dataclasses.dataclass(frozen=True)
class Float8(Format):
    """float8 values, and scales that map the largest number of a block to the type's largest.

    The blocks and the scales of rows are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).
    NaN and infinities are stored as NaN, without effect on the rest of their block.

    Attributes:
      power_of_two: whether scales are powers of two: the least with which the largest number of the
        block does not overflow.
    """

    power_of_two: bool = False

    # The least scale is chosen so that no product of a value and a scale is subnormal.
    least_scale: ClassVar[float] = 2.0**-117

    @classmethod
    def of(
        cls,
        dtype: DType,
        block: tuple[int, int],
        scale_dtype: DType = jnp.float32,
        power_of_two: bool = False,
    ) -> Float8:
        """Returns the format of a float8 dtype. Scales of dtype float8_e8m0fnu are powers of two.

        Raises:
          ValueError: the dtype has no room for scales of blocks, or a block is empty.
        """
        dtype, scale_dtype = jnp.dtype(dtype), jnp.dtype(scale_dtype)
        if not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 and dtype != E8M0):
            raise ValueError(f"dtype must be a float8 dtype, but is {dtype}.")
        if min(block) < 1:
            raise ValueError(f"block must be of at least 1 row and 1 column, but is {block}.")
        power_of_two = power_of_two or scale_dtype == E8M0
        return cls(dtype.name, dtype, scale_dtype, block, power_of_two)

    @property
    def largest(self) -> float:
        """The largest number of the type, such as 448."""
        return float(jnp.finfo(self.dtype).max)

    @property
    def relative_error(self) -> float:
        return float(jnp.finfo(self.dtype).eps) / 2

    @property
    def scale_of_largest(self) -> float:
        """The factor from a block's largest magnitude to its scale.

        It is a little less than 1 / `largest`, so that `largest` times a scale never rounds to more
        than the largest magnitude.
        """
        return (1 - 2**-22) / self.largest

    def encode(self, x: Array, *, divide: bool = False) -> tuple[Array, Array]:
        """Stores x [..., R, C] as values [..., R, C] and a scale for each block.

        Args:
          x: floating numbers, taken as float32.
          divide: False: scales are the largest magnitudes times `scale_of_largest` and at least
            `least_scale`, and numbers are multiplied by 1 / scale, as kernels do. True: scales are
            the largest magnitudes / `largest`, or 1 where that is 0 in `scale_dtype`, and numbers
            are divided by them, as published checkpoints are made. XLA may multiply by
            1 / `largest` instead, so only NumPy gives the bits of those.

        Raises:
          ValueError: the shape of x is not of whole blocks.
        """
        xp = namespace(x)
        with np.errstate(all="ignore"):
            blocks, finite, largest = self._split(x)
            if divide:
                scales = largest / np.float32(self.largest)
            else:
                scales = largest * np.float32(self.scale_of_largest)
            if self.power_of_two:
                scales = self._round_up_to_power(scales, largest)
            scales = scales.astype(self.scale_dtype).astype(_FLOAT32)
            if divide:
                scales = xp.where(scales > 0, scales, np.float32(1))
            else:
                scales = xp.maximum(scales, np.float32(self.least_scale))
            factors = scales if divide else 1 / scales
            factors = xp.expand_dims(factors, self._axes)
            scaled = blocks / factors if divide else blocks * factors
            if self.scale_dtype != _FLOAT32:  # a scale may have been rounded down
                scaled = xp.clip(scaled, -self.largest, self.largest)
            values = xp.where(finite, scaled, np.float32(np.nan)).astype(self.dtype)
        return self._out_of_blocks(values), scales.astype(self.scale_dtype)

    def _round_up_to_power(self, scales: Array, largest: Array) -> Array:
        xp = namespace(scales)
        fraction, exponent = xp.frexp(scales)
        scales = xp.ldexp(xp.ones_like(scales), exponent - (fraction == 0.5))
        # The scale may have been rounded down to a power of two.
        return xp.where(scales * np.float32(self.largest) < largest, 2 * scales, scales)

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        values, scales = parts
        return self._join(values.astype(_FLOAT32), scales, dtype)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Rows that are sent in their own dtype; has the methods of `Format` for rows."""

    name: ClassVar[str] = "plain"
    quantized: ClassVar[bool] = False
    row_block: ClassVar[int] = 1
    relative_error: ClassVar[float] = 0.0

    def row_parts(self, hidden: int, dtype: DType) -> list[tuple[int, DType]]:
        return [(hidden, dtype)]

    def row_bytes(self, hidden: int, dtype: DType) -> int:
        return _bytes(self.row_parts(hidden, dtype))

    def sum_dtype(self, dtype: DType) -> DType:
        return dtype

    def encode(self, x: Array) -> tuple[Array, ...]:
        return (x,)

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        return parts[0]


RowFormat = Format | Plain

PLAIN = Plain()
FLOAT8_ROWS = Float8.of(jnp.float8_e4m3fn, (1, 128))


def _bytes(parts: list[tuple[int, DType]]) -> int:
    return sum(columns * jnp.dtype(dtype).itemsize for columns, dtype in parts)


# ------------------------------------------------------------------------ NumPy and JAX arrays


def namespace(*arrays: Array) -> Any:
    """Returns the module with the operations of these arrays, `jax.numpy` or `numpy`."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def bitcast(x: Array, dtype: DType) -> Array:
    """Returns the bits of x as another dtype of the same size."""
    if isinstance(x, jax.Array):
        return lax.bitcast_convert_type(x, dtype)
    return np.asarray(x).view(jnp.dtype(dtype))


def multiply(numbers: Array, scales: Array) -> Array:
    """Multiplies float32 numbers by scales of any dtype, in float32.

    Scales of float8_e8m0fnu as small as 2^-127, which is subnormal, are not flushed to zero.
    """
    if scales.dtype != E8M0:
        return numbers * scales.astype(_FLOAT32)
    codes = bitcast(scales, np.uint8).astype(np.int32)
    products = times_power_of_two(numbers, codes - _E8M0_BIAS)
    return namespace(numbers, scales).where(codes == _E8M0_NAN, np.float32(np.nan), products)


def times_power_of_two(x: Array, exponent: Array) -> Array:
    """Multiplies float32 x by 2^exponent, int32 from -128 to 128, in two steps."""
    half = exponent // 2
    for part in (half, exponent - half):
        x = x * bitcast((part + 127) << 23, np.float32)
    return x
