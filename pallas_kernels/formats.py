"""Number formats: numbers stored in few bits, with a scale for each block of numbers.

A number is stored as a *value* of few bits; times the *scale* of its block, it gives the number.
`encode` and `decode` take NumPy or JAX arrays and return arrays of the same kind. They silence
NumPy's warnings, since NaN and overflow have defined results. `exchange.quantized_rows` and
`matmul.quantize` encode `Float8` within kernels. Imports neither Pallas nor Mosaic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# A jax.Array or np.ndarray.
Array = Any
DType = jax.typing.DTypeLike

E8M0 = np.dtype(jnp.float8_e8m0fnu)
# A scale 2^e is stored as the byte e + _E8M0_BIAS; the byte _E8M0_NAN stands for NaN.
_E8M0_BIAS, _E8M0_NAN = 127, 255
_FLOAT32 = np.dtype(np.float32)
# Entry i is the float4 number with the code i; codes from 8 on are the negative numbers.
_FLOAT4_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Between neighbours in _FLOAT4_POSITIVE.
_FLOAT4_MIDDLES = (_FLOAT4_POSITIVE[:-1] + _FLOAT4_POSITIVE[1:]) / 2
# The largest power of two that float4 represents is 4, with the exponent 2.
_FLOAT4_LARGEST_EXPONENT = 2


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format: values of few bits, with a scale for each block of numbers.

    Blocks divide an array's last two axes, or only its last axis if a block has one row. Formats
    are hashable; equal formats store equal numbers in the same way.
    """

    name: str  # of the numbers' type, such as "float8_e4m3fn" or "mxfp4"
    dtype: np.dtype  # of the values
    scale_dtype: np.dtype
    block: tuple[int, int]  # (rows, columns)

    quantized: ClassVar[bool] = True
    # An element of the array of values stores this many neighbouring numbers of the last axis.
    numbers_per_value: ClassVar[int] = 1

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError, about array `name`, unless `shape` is of whole blocks."""
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
        """Raises ValueError unless `scales_shape` is that of scales for numbers of `shape`."""
        expected = self.scales_shape(shape)
        if tuple(scales_shape) != expected:
            raise ValueError(
                f"scales must have shape {expected}, one for each block of {self.block} of "
                f"{tuple(shape)} numbers, but have shape {tuple(scales_shape)}."
            )

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return *shape[:-1], shape[-1] // self.numbers_per_value

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales of numbers of `shape`, also for cut-off last blocks."""
        rows, columns = self.block
        blocks = shape[:-1] if rows == 1 else (*shape[:-2], -(-shape[-2] // rows))
        return *blocks, -(-shape[-1] // columns)

    def numbers_shape(self, values_shape: tuple[int, ...]) -> tuple[int, ...]:
        return *values_shape[:-1], values_shape[-1] * self.numbers_per_value

    def stored_order(self, of_axes: Sequence[Any]) -> tuple[Any, ...]:
        """Reorders items from the axes of the decoded array to the axes of the stored arrays."""
        # A format that stores transposes overrides this.
        return tuple(of_axes)

    def row_parts(self, hidden: int, dtype: DType) -> list[tuple[int, DType]]:
        """Returns (columns, dtype) of the values and of the scales of a row of `hidden` numbers."""
        # Only `Plain` depends on `dtype`, that of the numbers.
        (value_columns,) = self.values_shape((hidden,))
        (scale_columns,) = self.scales_shape((hidden,))
        return [(value_columns, self.dtype), (scale_columns, self.scale_dtype)]

    def row_bytes(self, hidden: int, dtype: DType) -> int:
        """Returns the bytes of a stored row of `hidden` numbers of `dtype`, with its scales."""
        return _bytes(self.row_parts(hidden, dtype))

    @property
    def row_block(self) -> int:
        """The number of columns of a block, which divides the length of every row."""
        return self.block[1]

    @property
    def relative_error(self) -> float:
        """The largest |decoded - number| / |number| of numbers near the largest of their block."""
        raise NotImplementedError

    def sum_dtype(self, dtype: DType) -> DType:
        """Returns the dtype in which rows of `dtype` are summed before the sum is encoded."""
        return jnp.float32

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Encodes numbers x [..., R, C] as (values, scales); scales are finite.

        Raises ValueError if x is not of whole blocks.
        """
        raise NotImplementedError

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        """Decodes (values, scales): returns value times scale, rounded from float32 to `dtype`.

        Raises ValueError if the shapes of values and scales do not fit each other.
        """
        raise NotImplementedError

    @property
    def _axes(self) -> tuple[int, ...]:
        """The axes along which a block extends in the result of `_in_blocks`."""
        return (-1,) if self.block[0] == 1 else (-3, -1)

    def _in_blocks(self, x: Array) -> Array:
        """Splits x [..., R, C] to [..., R / rows, rows, C / columns, columns]."""
        # With `rows` = 1, R is not split, for a result [..., R, C / columns, columns]. Each reshape
        # splits one axis, as JAX requires of arrays sharded over Explicit axes.
        rows, columns = self.block
        *lead, width = x.shape
        x = x.reshape(*lead, width // columns, columns)
        return x if rows == 1 else x.reshape(*lead[:-1], lead[-1] // rows, rows, *x.shape[-2:])

    def _out_of_blocks(self, blocks: Array) -> Array:
        """The inverse of `_in_blocks`."""
        if self.block[0] > 1:
            *lead, count, rows, across, columns = blocks.shape
            blocks = blocks.reshape(*lead, count * rows, across, columns)
        *lead, across, columns = blocks.shape
        return blocks.reshape(*lead, across * columns)

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Returns float32 blocks, where they are finite, and each block's largest finite |x|."""
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
    """Float8 values; a scale maps its block's largest number to the largest float8 number.

    DeepSeek-V3 uses the same blocks and scales for rows (arXiv:2412.19437, section 3.3.2). NaN and
    infinities are stored as NaN and do not affect the other numbers of their block.
    """

    # Whether a scale is the least power of two with which its block does not overflow.
    power_of_two: bool = False

    @classmethod
    def of(
        cls,
        dtype: DType,
        block: tuple[int, int],
        scale_dtype: DType = jnp.float32,
        power_of_two: bool = False,
    ) -> Float8:
        """Returns the format of a float8 dtype; scales of float8_e8m0fnu are powers of two.

        Raises ValueError if a dtype is not one for values or scales, or if a block is empty.
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
        return float(jnp.finfo(self.dtype).max)

    @property
    def relative_error(self) -> float:
        return float(jnp.finfo(self.dtype).eps) / 2

    @property
    def scale_of_largest(self) -> float:
        """The ratio of a block's scale to its largest magnitude."""
        # A little less than 1 / `largest`, so that `largest` times the scale never rounds to more
        # than the block's largest magnitude.
        return (1 - 2**-22) / self.largest

    @property
    def least_scale(self) -> float:
        """The least scale: no product of a value and a scale is subnormal in float32.

        2^-117 for float8_e4m3fn, or the least normal number of the scales' dtype if that is larger.
        """
        normal = float(jnp.finfo(self.scale_dtype).smallest_normal)
        return max(2.0**-126 / float(jnp.finfo(self.dtype).smallest_subnormal), normal)

    @property
    def _most_scale(self) -> float:
        """The largest scale; the largest power of two if scales are powers of two."""
        most = float(jnp.finfo(self.scale_dtype).max)
        return 2.0 ** math.floor(math.log2(most)) if self.power_of_two else most

    def encode(self, x: Array, *, divide: bool = False) -> tuple[Array, Array]:
        """Encodes numbers x [..., R, C] as values [..., R, C] and a scale for each block.

        Args:
          x: floating-point numbers.
          divide: if False, as in kernels: a scale is the block's largest magnitude times
            `scale_of_largest`, at least `least_scale`, and numbers are multiplied by 1 / scale. If
            True, as in published checkpoints: a scale is the largest magnitude divided by `largest`
            (1 if that is 0 in `scale_dtype`), and numbers are divided by it. XLA may divide by
            `largest` inexactly, so only NumPy arrays give a checkpoint's bits.

        Raises:
          ValueError: the shape of x is not of whole blocks.
        """
        xp = namespace(x)
        with np.errstate(all="ignore"):
            blocks, finite, largest = self._split(x)
            scales = self._scales(largest, divide)
            factors = scales if divide else 1 / scales
            factors = xp.expand_dims(factors, self._axes)
            scaled = blocks / factors if divide else blocks * factors
            # If scales are not float32, a scale may have been rounded down. A number divided by the
            # scale may then exceed the largest float8 number, so it is clipped.
            if self.scale_dtype != _FLOAT32:
                scaled = xp.clip(scaled, -self.largest, self.largest)
            values = xp.where(finite, scaled, np.float32(np.nan)).astype(self.dtype)
        return self._out_of_blocks(values), scales.astype(self.scale_dtype)

    def _scales(self, largest: Array, divide: bool) -> Array:
        """Returns the float32 scales of blocks by their largest magnitudes; see `encode`."""
        xp = namespace(largest)
        if divide:
            scales = largest / np.float32(self.largest)
        else:
            scales = largest * np.float32(self.scale_of_largest)
        if self.power_of_two:
            scales = self._round_up_to_power(scales, largest)
        if self.scale_dtype != _FLOAT32:
            scales = xp.minimum(scales, np.float32(self._most_scale)).astype(self.scale_dtype)
            # Without the barrier, XLA may leave out the rounding; normal powers of two are exact.
            if isinstance(scales, jax.Array) and not self.power_of_two:
                scales = lax.optimization_barrier(scales)
            scales = scales.astype(_FLOAT32)
        if divide:
            return xp.where(scales > 0, scales, np.float32(1))
        return xp.maximum(scales, np.float32(self.least_scale))

    def _round_up_to_power(self, scales: Array, largest: Array) -> Array:
        """Rounds scales up to powers of two with which the blocks' `largest` do not overflow."""
        xp = namespace(scales)
        fraction, exponent = xp.frexp(scales)
        # The fraction is 0.5 for powers of two, 0 for 0, whose scale becomes 1, and else above 0.5.
        scales = xp.ldexp(xp.ones_like(scales), exponent - (fraction == 0.5).astype(exponent.dtype))
        # Rounded to float32, a scale may be too small by one power of two; the block's largest
        # number would then overflow float8.
        return xp.where(scales * np.float32(self.largest) < largest, 2 * scales, scales)

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        values, scales = parts
        return self._join(values.astype(_FLOAT32), scales, dtype)


@dataclasses.dataclass(frozen=True)
class MXFloat4(Format):
    """Numbers [..., C] as values [..., C / 2] uint8, float4_e2m1, and scales [..., C / 32] e8m0.

    Defined by the Open Compute Project's "Microscaling Formats (MX)" 1.0, and used by GPT-OSS.
    The first of a byte's two numbers is in its lower four bits. float4 has no NaN: if a block has
    NaN or an infinity, its scale is NaN, and all of it decodes to NaN.
    """

    numbers_per_value: ClassVar[int] = 2

    @property
    def relative_error(self) -> float:
        # A number just below 8 times the scale has the largest error: it is stored as 6 times it.
        return 1 / 4

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Quantizes x [..., C]; returns values [..., C / 2] uint8 and scales [..., C / 32].

        A block's scale is the largest power of two that is at most a quarter of the block's largest
        magnitude. Magnitudes above 6 times the scale saturate; ties round to the even code.
        """
        xp = namespace(x)
        with np.errstate(all="ignore"):
            blocks, finite, largest = self._split(x)
            # `frexp` gives a fraction below 1, and so one more than floor(log2(largest)). A scale
            # is `stored` as its exponent plus the bias; a block of zeros gets the least scale.
            exponent = xp.frexp(largest)[1] - 1 - _FLOAT4_LARGEST_EXPONENT
            stored = xp.where(largest > 0, xp.clip(exponent + _E8M0_BIAS, 0, _E8M0_NAN - 1), 0)
            stored = xp.where(xp.all(finite, axis=-1), stored, _E8M0_NAN).astype(np.int32)
            codes = _float4_codes(times_power_of_two(blocks, _E8M0_BIAS - stored[..., None]))
        pairs = codes[..., ::2] | codes[..., 1::2] << 4
        return pairs.reshape(self.values_shape(x.shape)), bitcast(stored.astype(np.uint8), E8M0)

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        values, scales = parts
        xp = namespace(values, scales)
        # XLA fuses these shifts with later operations. It would not fuse a stack of two arrays.
        shifts = 4 * xp.arange(2, dtype=np.uint8).reshape(*[1] * values.ndim, 2)
        codes = values[..., None] >> shifts & 15
        numbers = _float4_numbers(codes.astype(np.int32))
        return self._join(numbers.reshape(self.numbers_shape(values.shape)), scales, dtype)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The format of rows that are sent unquantized: the methods of `Format` that concern rows."""

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
MXFP4 = MXFloat4("mxfp4", dtype=np.dtype(np.uint8), scale_dtype=E8M0, block=(1, 32))


def _bytes(parts: list[tuple[int, DType]]) -> int:
    return sum(columns * jnp.dtype(dtype).itemsize for columns, dtype in parts)


class Scaled(NamedTuple):
    """Quantized rows or matrices: values, and a scale for each block of values."""

    # [R, K] rows, or [L, N, K] matrices, float8; or [L, N, K / 2] uint8, matrices in MXFP4.
    values: Any
    # [R, K / 128] or [L, N / 128, K / 128] float32; or [L, N, K / 32] float8_e8m0fnu.
    scales: Any


# ------------------------------------------------------------------------ NumPy and JAX arrays


def namespace(*arrays: Array) -> Any:
    """Returns the module jax.numpy if any of `arrays` is a JAX array, else numpy."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def bitcast(x: Array, dtype: DType) -> Array:
    """Returns an array of the bits of x as `dtype`, which is as wide as the dtype of x."""
    if isinstance(x, jax.Array):
        return lax.bitcast_convert_type(x, dtype)
    return np.asarray(x).view(jnp.dtype(dtype))


def multiply(numbers: Array, scales: Array) -> Array:
    """Multiplies float32 numbers by scales of any dtype; returns float32."""
    # A float8_e8m0fnu scale of 2^-127 is subnormal in float32. The product is right even where
    # hardware flushes subnormal numbers to zero.
    if scales.dtype != E8M0:
        return numbers * scales.astype(_FLOAT32)
    codes = bitcast(scales, np.uint8).astype(np.int32)
    products = times_power_of_two(numbers, codes - _E8M0_BIAS)
    return namespace(numbers, scales).where(codes == _E8M0_NAN, np.float32(np.nan), products)


def times_power_of_two(x: Array, exponent: Array) -> Array:
    """Multiplies float32 x by 2^exponent, where `exponent` is int32 from -128 to 128."""
    # 2^exponent itself may overflow or be subnormal in float32.
    half = exponent // 2
    for part in (half, exponent - half):
        x = x * bitcast((part + 127) << 23, np.float32)  # 2^part
    return x


# ------------------------------------------------------------------------------- float4 numbers


def _float4_numbers(codes: Array) -> Array:
    """Decodes int32 codes of float4 (sign, two exponent bits, one fraction bit) to float32."""
    xp = namespace(codes)
    size = codes & 7
    # The exponent's bias is 1, and float32's 127. Sizes 0 and 1 are the numbers 0 and 0.5.
    normal = bitcast(((size >> 1) + 126) << 23 | (size & 1) << 22, np.float32)
    magnitude = xp.where(size < 2, size.astype(np.float32) / 2, normal)
    return xp.where(codes < 8, magnitude, -magnitude)


def _float4_codes(numbers: Array) -> Array:
    """Returns the uint8 code of the float4 nearest to each number; in a tie, the even code."""
    xp = namespace(numbers)
    size = xp.abs(numbers)
    # The code if ties are rounded down, and the one if they are rounded up.
    down = sum((size > middle).astype(np.uint8) for middle in _FLOAT4_MIDDLES)
    up = sum((size >= middle).astype(np.uint8) for middle in _FLOAT4_MIDDLES)
    code = xp.where(down % 2 == 0, down, up)
    return code | (xp.signbit(numbers).astype(np.uint8) << 3)
