"""MXFP4: float4_e2m1 numbers, two in a byte, with a power-of-two scale for every 32.

Defined by the Open Compute Project's "Microscaling Formats (MX)" 1.0. GPT-OSS' weights are
published in it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from pallas_kernels.formats import (
    E8M0,
    Array,
    DType,
    Format,
    bitcast,
    namespace,
    times_power_of_two,
)

# Entry i is the float4 number with the code i; codes from 8 on are the negative numbers.
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Between neighbours in _POSITIVE.
_MIDDLES = (_POSITIVE[:-1] + _POSITIVE[1:]) / 2
# The largest power of two that float4 represents is 4, with the exponent 2.
_LARGEST_EXPONENT = 2
# A scale 2^e is stored as the byte e + _BIAS; the byte _NAN stands for NaN.
_BIAS, _NAN = 127, 255


@dataclasses.dataclass(frozen=True)
class MXFloat4(Format):
    """Numbers [..., C] as values [..., C / 2] uint8 and scales [..., C / 32] e8m0.

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
            exponent = xp.frexp(largest)[1] - 1 - _LARGEST_EXPONENT
            scales = xp.where(largest > 0, xp.clip(exponent + _BIAS, 0, _NAN - 1), 0)
            scales = xp.where(xp.all(finite, axis=-1), scales, _NAN).astype(np.int32)
            codes = _codes(times_power_of_two(blocks, _BIAS - scales[..., None]))
        pairs = codes[..., ::2] | codes[..., 1::2] << 4
        return pairs.reshape(self.values_shape(x.shape)), bitcast(scales.astype(np.uint8), E8M0)

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        values, scales = parts
        xp = namespace(values, scales)
        # XLA fuses these shifts with later operations. It would not fuse a stack of two arrays.
        shifts = 4 * xp.arange(2, dtype=np.uint8).reshape(*[1] * values.ndim, 2)
        codes = values[..., None] >> shifts & 15
        numbers = _numbers(codes.astype(np.int32))
        return self._join(numbers.reshape(self.numbers_shape(values.shape)), scales, dtype)


def _numbers(codes: Array) -> Array:
    """Decodes int32 codes of float4 (sign, two exponent bits, one fraction bit) to float32."""
    xp = namespace(codes)
    size = codes & 7
    # The exponent's bias is 1, and float32's 127. Sizes 0 and 1 are the numbers 0 and 0.5.
    normal = bitcast(((size >> 1) + 126) << 23 | (size & 1) << 22, np.float32)
    magnitude = xp.where(size < 2, size.astype(np.float32) / 2, normal)
    return xp.where(codes < 8, magnitude, -magnitude)


def _codes(numbers: Array) -> Array:
    """Returns the uint8 code of the float4 nearest to each number; in a tie, the even code."""
    xp = namespace(numbers)
    size = xp.abs(numbers)
    # The code if ties are rounded down, and the one if they are rounded up.
    down = sum((size > middle).astype(np.uint8) for middle in _MIDDLES)
    up = sum((size >= middle).astype(np.uint8) for middle in _MIDDLES)
    code = xp.where(down % 2 == 0, down, up)
    return code | (xp.signbit(numbers).astype(np.uint8) << 3)


MXFP4 = MXFloat4("mxfp4", dtype=np.dtype(np.uint8), scale_dtype=E8M0, block=(1, 32))
