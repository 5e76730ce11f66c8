"""Defines a format of matrices that stores their transposes in another format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_kernels.formats import Array, DType, Format


@dataclasses.dataclass(frozen=True)
class Transposed(Format):
    """A format of matrices [..., R, C], whose transposes [..., C, R] are stored in another format.

    Published models store a layer's matrix as [out, in], whereas this library takes it as [in,
    out]. A byte and a block of MXFP4 hold several numbers along the last axis of the stored matrix,
    `in`, so the stored arrays cannot be transposed. Instead, values and scales keep the axes [out,
    in]; `QuantizedArray.specs` returns their PartitionSpecs.

    Attributes:
      transposes: the format in which the transposes are stored.
    """

    transposes: Format

    @classmethod
    def of(cls, format: Format) -> Transposed:
        """Returns the format of matrices whose transposes are stored in `format`."""
        rows, columns = format.block
        return cls(format.name, format.dtype, format.scale_dtype, (columns, rows), format)

    @property
    def relative_error(self) -> float:
        return self.transposes.relative_error

    def stored_order(self, of_axes: Sequence[Any]) -> tuple[Any, ...]:
        """Swaps the last two of a sequence with an item for each axis, such as a shape."""
        return *of_axes[:-2], *of_axes[-2:][::-1]

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.transposes.values_shape(self.stored_order(shape))

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.transposes.scales_shape(self.stored_order(shape))

    def numbers_shape(self, values_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.stored_order(self.transposes.numbers_shape(values_shape))

    def encode(self, x: Array) -> tuple[Array, Array]:
        self.check_shape("x", x.shape)
        return self.transposes.encode(x.swapaxes(-2, -1))

    def decode(self, parts: tuple[Array, ...], dtype: DType) -> Array:
        return self.transposes.decode(parts, dtype).swapaxes(-2, -1)
