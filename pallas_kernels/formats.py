"""Defines number formats: numbers stored in few bits, with a scale for each block of numbers.

An array of numbers is stored as an array of *values*, of few bits each, and an array of *scales*. A
number is its value times the scale of its block. `Format` is the base class of the formats, and
computes the shapes of these arrays. `Float8` has float8 values. `PLAIN` stands for rows that are
stored in their own dtype. `encode` and `decode` take NumPy or JAX arrays, and return arrays of the
same kind. `pallas_kernels.exchange.quantized_rows` and `pallas_kernels.matmul.quantize` encode
`Float8` within kernels. `pallas_kernels.mxfp4` defines MXFP4. `jax_ep.formats` has the public
names, `QuantizedArray` and `Transposed`.

Imports neither Pallas nor Mosaic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# A jax.Array or np.ndarray.
Array = Any
DType = jax.typing.DTypeLike

E8M0 = np.dtype(jnp.float8_e8m0fnu)
_E8M0_BIAS, _E8M0_NAN = 127, 255
_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format: numbers are stored as values in few bits, with a scale for each block.

    A number is its value times the scale of its block. Blocks divide an array's last two axes, or
    only its last axis if a block has one row. Formats are hashable, and equal formats store equal
    numbers in the same way.

    Attributes:
      name: the name of the numbers' type, such as "float8_e4m3fn" or "mxfp4".
      dtype: the dtype of the array of values.
      scale_dtype: the dtype of the array of scales.
      block: (rows, columns), the shape of a block of numbers that share a scale.
    """

    name: str
    dtype: np.dtype
    scale_dtype: np.dtype
    block: tuple[int, int]

    quantized: ClassVar[bool] = True
    # An element of the array of values stores this many neighbouring numbers of the last axis.
    numbers_per_value: ClassVar[int] = 1

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless an array of numbers of this shape consists of whole blocks.

        `name` is the array's name in the error message.
        """
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
        """Raises ValueError unless `scales_shape` is the shape of scales for numbers of `shape`."""
        expected = self.scales_shape(shape)
        if tuple(scales_shape) != expected:
            raise ValueError(
                f"scales must have shape {expected}, one for each block of {self.block} of "
                f"{tuple(shape)} numbers, but has shape {tuple(scales_shape)}."
            )

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored values of an array whose decoded shape is `shape`."""
        return *shape[:-1], shape[-1] // self.numbers_per_value

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the array of scales for numbers of this shape.

        If an axis is not a multiple of the block, its last block is cut off, and has a scale, too.
        """
        rows, columns = self.block
        blocks = shape[:-1] if rows == 1 else (*shape[:-2], -(-shape[-2] // rows))
        return *blocks, -(-shape[-1] // columns)

    def numbers_shape(self, values_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the decoded array whose stored values have the shape `values_shape`.

        It is wider than `values_shape` if a value stores several numbers.
        """
        return *values_shape[:-1], values_shape[-1] * self.numbers_per_value

    def stored_order(self, of_axes: Sequence[Any]) -> tuple[Any, ...]:
        """Reorders items, one for each axis of the decoded array, to the order of the stored axes.

        The items are for example the entries of a `jax.sharding.PartitionSpec`. The arrays of
        values and scales may have the axes of the decoded array in another order. Here the order is
        the same, but a subclass may change it.
        """
        return tuple(of_axes)

    def row_parts(self, hidden: int, dtype: DType) -> list[tuple[int, DType]]:
        """Returns (columns, dtype) of each array that stores rows of `hidden` numbers.

        The arrays are the values and the scales. `dtype` is the dtype of the rows before they are
        encoded.
        """
        parts = (self.values_shape, self.dtype), (self.scales_shape, self.scale_dtype)
        return [(shape((hidden,))[0], part) for shape, part in parts]

    def row_bytes(self, hidden: int, dtype: DType) -> int:
        """Returns the bytes of a stored row of `hidden` numbers, with its scales.

        `dtype` is the row's dtype before it is encoded.
        """
        return _bytes(self.row_parts(hidden, dtype))

    @property
    def row_block(self) -> int:
        """The number of columns in a block; the length of every row must be a multiple of it."""
        return self.block[1]

    @property
    def relative_error(self) -> float:
        """The largest relative error, |decoded - number| / |number|, of large numbers.

        These are numbers near the largest magnitude of their block. The relative error of much
        smaller numbers may be larger.
        """
        raise NotImplementedError

    def sum_dtype(self, dtype: DType) -> DType:
        """Returns the dtype in which rows of `dtype` are summed before the sum is encoded."""
        return jnp.float32

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Encodes numbers x [..., R, C] as (values, scales).

        The scale of a block is finite even if none of its numbers is.

        Raises:
          ValueError: the shape of x is not of whole blocks.
        """
        raise NotImplementedError

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        """Decodes (values, scales): returns value times scale, rounded from float32 to `dtype`.

        Raises:
          ValueError: the shapes of values and scales do not fit each other.
        """
        raise NotImplementedError

    @property
    def _axes(self) -> tuple[int, ...]:
        """The axes along which a block extends in an array that `_in_blocks` has split."""
        return (-1,) if self.block[0] == 1 else (-3, -1)

    def _in_blocks(self, x: Array) -> Array:
        """Splits x [..., R, C] into blocks: [..., R / rows, rows, C / columns, columns].

        If a block has one row, the result is [..., R, C / columns, columns]. Each reshape splits
        one axis, since JAX supports only such reshapes for arrays sharded over Explicit axes.
        """
        rows, columns = self.block
        *lead, width = x.shape
        x = x.reshape(*lead, width // columns, columns)
        return x if rows == 1 else x.reshape(*lead[:-1], lead[-1] // rows, rows, *x.shape[-2:])

    def _out_of_blocks(self, blocks: Array) -> Array:
        """Returns the array [..., R, C] whose blocks are `blocks`: the inverse of `_in_blocks`."""
        if self.block[0] > 1:
            *lead, count, rows, across, columns = blocks.shape
            blocks = blocks.reshape(*lead, count * rows, across, columns)
        *lead, across, columns = blocks.shape
        return blocks.reshape(*lead, across * columns)

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Splits x [..., R, C] into blocks of float32, and finds each block's largest magnitude.

        Returns (blocks, finite, largest): the elements of x in the shape of `_in_blocks`, whether
        each element is finite, and the largest finite magnitude of each block.
        """
        self.check_shape("x", x.shape)
        xp = namespace(x)
        blocks = self._in_blocks(x.astype(_FLOAT32))
        finite = xp.isfinite(blocks)
        largest = xp.max(xp.abs(xp.where(finite, blocks, 0)), axis=self._axes)
        return blocks, finite, largest

    def _join(self, values: Array, scales: Array, dtype: DType) -> Array:
        """Multiplies float32 values [..., R, C] by their blocks' scales; rounds to `dtype`."""
        self.check_shape("values", values.shape)
        self.check_scales(values.shape, scales.shape)
        with np.errstate(all="ignore"):
            scales = namespace(scales).expand_dims(scales, self._axes)
            return self._out_of_blocks(multiply(self._in_blocks(values), scales).astype(dtype))


@dataclasses.dataclass(frozen=True)
class Float8(Format):
    """The format of float8 values whose scale maps a block's largest number to the largest float8.

    DeepSeek-V3 uses the same blocks and scales for rows (arXiv:2412.19437, section 3.3.2). NaN and
    infinities are stored as NaN, and do not affect the other numbers of their block.

    Attributes:
      power_of_two: whether scales are powers of two. A scale is then the least power of two with
        which the block's largest number does not overflow.
    """

    power_of_two: bool = False

    @classmethod
    def of(
        cls,
        dtype: DType,
        block: tuple[int, int],
        scale_dtype: DType = jnp.float32,
        power_of_two: bool = False,
    ) -> Float8:
        """Returns the format of a float8 dtype.

        Args:
          dtype: the float8 dtype of the values.
          block: (rows, columns), the shape of a block.
          scale_dtype: the dtype of the scales.
          power_of_two: whether scales are powers of two. Scales of float8_e8m0fnu always are.

        Raises:
          ValueError: `dtype` is not a float8 dtype for values, `scale_dtype` is not floating, or a
            block is empty.
        """
        dtype, scale_dtype = jnp.dtype(dtype), jnp.dtype(scale_dtype)
        if not jnp.issubdtype(scale_dtype, jnp.floating):
            raise ValueError(f"scale_dtype must be a floating dtype, but is {scale_dtype}.")
        if not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 and dtype != E8M0):
            raise ValueError(f"dtype must be a float8 dtype, but is {dtype}.")
        if min(block) < 1:
            raise ValueError(f"block must be of at least 1 row and 1 column, but is {block}.")
        power_of_two = power_of_two or scale_dtype == E8M0
        return cls(dtype.name, dtype, scale_dtype, block, power_of_two)

    @property
    def largest(self) -> float:
        """The largest finite number of the float8 dtype: 448 for float8_e4m3fn."""
        return float(jnp.finfo(self.dtype).max)

    @property
    def relative_error(self) -> float:
        return float(jnp.finfo(self.dtype).eps) / 2

    @property
    def scale_of_largest(self) -> float:
        """The factor by which a block's largest magnitude is multiplied to get the block's scale.

        It is a little less than 1 / `largest`, so that `largest` times the block's scale never
        rounds to more than the block's largest magnitude.
        """
        return (1 - 2**-22) / self.largest

    @property
    def least_scale(self) -> float:
        """The least scale, so that no product of a value and a scale is subnormal in float32.

        It is 2^-117 for float8_e4m3fn, or the least normal number of the scales' dtype if that is
        larger.
        """
        normal = float(jnp.finfo(self.scale_dtype).smallest_normal)
        return max(2.0**-126 / float(jnp.finfo(self.dtype).smallest_subnormal), normal)

    @property
    def _most_scale(self) -> float:
        """The largest number that a scale may be."""
        most = float(jnp.finfo(self.scale_dtype).max)
        return 2.0 ** math.floor(math.log2(most)) if self.power_of_two else most

    def encode(self, x: Array, *, divide: bool = False) -> tuple[Array, Array]:
        """Encodes numbers x [..., R, C] as values [..., R, C] and a scale for each block.

        Args:
          x: floating-point numbers, which are converted to float32.
          divide: if False, a scale is its block's largest magnitude times `scale_of_largest`, but
            not less than `least_scale`. Numbers are multiplied by 1 / scale, as in kernels. If
            True, a scale is its block's largest magnitude divided by `largest`, or 1 if the
            quotient is 0 in `scale_dtype`. Numbers are divided by scales, as in published
            checkpoints. For JAX arrays, XLA may replace the division by `largest` by a
            multiplication, so only NumPy arrays give the bits of published checkpoints.

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
            if self.scale_dtype != _FLOAT32:
                scales = xp.minimum(scales, np.float32(self._most_scale)).astype(self.scale_dtype)
                # Without the barrier, XLA may leave out the rounding of the scales.
                if isinstance(scales, jax.Array) and not self.power_of_two:
                    scales = lax.optimization_barrier(scales)
                scales = scales.astype(_FLOAT32)
            if divide:
                scales = xp.where(scales > 0, scales, np.float32(1))
            else:
                scales = xp.maximum(scales, np.float32(self.least_scale))
            factors = scales if divide else 1 / scales
            factors = xp.expand_dims(factors, self._axes)
            scaled = blocks / factors if divide else blocks * factors
            # If scales are not float32, a scale may have been rounded down. A number divided by the
            # scale may then exceed the largest float8 number, so it is clipped.
            if self.scale_dtype != _FLOAT32:
                scaled = xp.clip(scaled, -self.largest, self.largest)
            values = xp.where(finite, scaled, np.float32(np.nan)).astype(self.dtype)
        return self._out_of_blocks(values), scales.astype(self.scale_dtype)

    def _round_up_to_power(self, scales: Array, largest: Array) -> Array:
        xp = namespace(scales)
        fraction, exponent = xp.frexp(scales)
        scales = xp.ldexp(xp.ones_like(scales), exponent - (fraction == 0.5).astype(exponent.dtype))
        # The rounding of float32 may have made `scales` a power of two that is too small. The
        # block's largest number would then overflow float8, so the scale is doubled.
        return xp.where(scales * np.float32(self.largest) < largest, 2 * scales, scales)

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        values, scales = parts
        return self._join(values.astype(_FLOAT32), scales, dtype)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The format of rows that are sent unquantized, in their own dtype.

    It has those methods of `Format` that concern rows, so that code for rows can use either.
    """

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
FLOAT8_MATRICES = Float8.of(jnp.float8_e4m3fn, (128, 128))


def _bytes(parts: list[tuple[int, DType]]) -> int:
    return sum(columns * jnp.dtype(dtype).itemsize for columns, dtype in parts)


# ------------------------------------------------------------------------ NumPy and JAX arrays


def namespace(*arrays: Array) -> Any:
    """Returns the module to compute with: `jax.numpy` if any array is a JAX array, else `numpy`."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def bitcast(x: Array, dtype: DType) -> Array:
    """Returns x with its bits reinterpreted as another dtype of the same size."""
    if isinstance(x, jax.Array):
        return lax.bitcast_convert_type(x, dtype)
    return np.asarray(x).view(jnp.dtype(dtype))


def multiply(numbers: Array, scales: Array) -> Array:
    """Multiplies float32 numbers by scales of any dtype; returns float32.

    A scale of float8_e8m0fnu may be 2^-127, which is subnormal in float32. The product is right
    even where hardware flushes subnormal numbers to zero.
    """
    if scales.dtype != E8M0:
        return numbers * scales.astype(_FLOAT32)
    codes = bitcast(scales, np.uint8).astype(np.int32)
    products = times_power_of_two(numbers, codes - _E8M0_BIAS)
    return namespace(numbers, scales).where(codes == _E8M0_NAN, np.float32(np.nan), products)


def times_power_of_two(x: Array, exponent: Array) -> Array:
    """Multiplies float32 x by 2^exponent, where `exponent` is int32 from -128 to 128.

    Multiplies twice, since 2^exponent itself may overflow or be subnormal in float32.
    """
    half = exponent // 2
    for part in (half, exponent - half):
        x = x * bitcast((part + 127) << 23, np.float32)
    return x
