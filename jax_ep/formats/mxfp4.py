"""Implements MXFP4: pairs of float4_e2m1 in bytes, with a power of two for every 32 numbers.

The Open Compute Project's "Microscaling Formats (MX)", version 1.0, defines the format. GPT-OSS is
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

_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the numbers by code
_MIDDLES = (_POSITIVE[:-1] + _POSITIVE[1:]) / 2
_LARGEST_EXPONENT = 2  # the exponent of 4, float4's largest power of two
_BIAS, _NAN = 127, 255  # an exponent's bias, and its code for NaN


@dataclasses.dataclass(frozen=True)
class MXFloat4(Format):
    """The format MXFP4: values [..., C / 2] uint8, scales [..., C / 32] float8_e8m0fnu.

    The first number of a pair is in the lower half of its byte. float4 has no NaN: where a block
    has NaN or an infinity, its scale is NaN, and so is all of the block.
    """

    numbers_per_value: ClassVar[int] = 2

    @property
    def relative_error(self) -> float:
        return 1 / 4  # a number of almost 8 scales becomes 6 scales

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Stores x [..., C] with the largest power of two that fits in each block as its scale.

        Magnitudes above 6 times a scale become 6 times the scale. A number halfway between two
        codes takes the even code.

        Raises:
          ValueError: the blocks do not divide the last axis of x.
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
        codes = xp.stack([values & 15, values >> 4], axis=-1)
        numbers = _numbers(codes.astype(np.int32))
        return self._join(numbers.reshape(self.numbers_shape(values.shape)), scales, dtype)


def _numbers(codes: Array) -> Array:
    """Decodes int32 codes of float4 (sign, two exponent bits, one fraction bit) to float32."""
    xp = namespace(codes)
    size = codes & 7
    normal = bitcast(((size >> 1) + 126) << 23 | (size & 1) << 22, np.float32)
    magnitude = xp.where(size < 2, size.astype(np.float32) / 2, normal)
    return xp.where(codes < 8, magnitude, -magnitude)


def _codes(numbers: Array) -> Array:
    """Returns the uint8 code of the nearest float4; halfway between two, the even code."""
    xp = namespace(numbers)
    size = xp.abs(numbers)
    below = sum((size > middle).astype(np.uint8) for middle in _MIDDLES)
    above = sum((size >= middle).astype(np.uint8) for middle in _MIDDLES)
    code = xp.where(below % 2 == 0, below, above)
    return code | (xp.signbit(numbers).astype(np.uint8) << 3)


MXFP4 = MXFloat4("mxfp4", np.dtype(np.uint8), E8M0, (1, 32))
