"""Defines `QuantizedArray`, a pytree of quantized values and scales, and `Transposed` formats."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jax_ep import checks
from jax_ep.dtypes import not_folded
from jax_ep.runtime.jax_compat import register_for_export
from pallas_kernels.formats import MXFP4, Array, DType, Float8, Format


@dataclasses.dataclass(frozen=True)
class Transposed(Format):
    """A format of matrices [..., R, C], whose transposes [..., C, R] are stored in another format.

    Published models store a layer's matrix as [out, in], whereas this library takes it as [in,
    out]. A byte and a block of MXFP4 hold several numbers along the last axis of the stored matrix,
    `in`, so the stored arrays cannot be transposed. Instead, values and scales keep the axes [out,
    in]; `QuantizedArray.specs` returns their PartitionSpecs.
    """

    transposes: Format  # in which the transposes are stored

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


@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """An array [..., R, C] stored in a `Format`: a pytree of two arrays, values and scales.

    Values and scales have as many axes as the dequantized array, and the same leading axes. So a
    sharding, a `jax.sharding.PartitionSpec` or an `in_axes` for the dequantized array fits both
    of them, as long as it splits no block of numbers that share a scale. In a
    `jax_ep.formats.Transposed` format, both have the last two axes swapped; see `specs`.

    Attributes:
      values: [..., R, C], or a narrower last axis if an element of `values` packs several numbers.
      scales: one scale for each block of numbers, such as [..., R, C / 128].
      format: the format of values and scales; static.
      dtype: the dtype of the array that `dequantize` returns by default; static.
    """

    values: jax.Array
    scales: jax.Array
    format: Format
    dtype: Any = jnp.dtype(jnp.bfloat16)

    def __post_init__(self) -> None:
        _check_is_format(self.format)
        object.__setattr__(self, "dtype", checks.as_floating("dtype", self.dtype))
        for name in ("values", "scales"):
            array = getattr(self, name)
            expected = self.format.dtype if name == "values" else self.format.scale_dtype
            if not hasattr(array, "shape") or array.dtype != expected:
                raise TypeError(
                    f"{name} must be an array of dtype {expected} in the format "
                    f"{self.format.name}, but is {checks.described(array)}."
                )
        self.format.check_shape("values", self.shape)
        self.format.check_scales(self.shape, self.scales.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., R, C] of the array that `dequantize` returns."""
        return self.format.numbers_shape(tuple(self.values.shape))

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Returns the part at `index`, such as one expert's matrix, in the same format.

        `index` is like that of an array, without None. It may select along all axes but the last
        two, or all but the last if a block has one row and the array is not stored transposed: the
        other axes are in blocks. Raises TypeError for another index, IndexError for too many axes.
        """
        index = index if isinstance(index, tuple) else (index,)
        # Replaces `...` by whole slices; `...` itself counts in len(index), hence the 1.
        if places := [i for i, part in enumerate(index) if part is Ellipsis]:
            dots = places[0]
            whole = (slice(None),) * (self.ndim - len(index) + 1)
            index = index[:dots] + whole + index[dots + 1 :]
        if len(index) > self.ndim:
            raise IndexError(f"index has {len(index)} axes, but the shape is {self.shape}.")
        is_of_rows = self.format.block[0] == 1 and not isinstance(self.format, Transposed)
        num_axes = self.ndim - (1 if is_of_rows else 2)
        are_whole = (isinstance(part, slice) and part == slice(None) for part in index[num_axes:])
        if not all(are_whole) or any(part is None for part in index):
            raise TypeError(
                f"index must select along the first {max(num_axes, 0)} axes of a QuantizedArray of "
                f"shape {self.shape}, whose other axes are stored in blocks of {self.format.block} "
                f"numbers, but is {index}. Index its .dequantize() instead."
            )
        index = index[:num_axes]
        parts = {name: getattr(self, name)[index] for name in ("values", "scales")}
        return dataclasses.replace(self, **parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantizedArray]:
        return (self[i] for i in range(len(self)))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("a QuantizedArray is not an array of numbers; pass its .dequantize().")

    def specs(self, spec: PartitionSpec) -> QuantizedArray:
        """Returns the PartitionSpecs of values and scales, given that of the dequantized array."""
        parts = self.format.stored_order((*spec, *(None,) * (self.ndim - len(spec))))
        return jax.tree.map(lambda _: PartitionSpec(*parts), self)

    def astype(self, dtype: jax.typing.DTypeLike) -> QuantizedArray:
        """Returns a `QuantizedArray` of the same stored arrays that dequantizes to `dtype`."""
        return dataclasses.replace(self, dtype=dtype)

    def dequantize(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """Decodes the array: multiplies values by scales in float32, and rounds to `dtype`.

        Raises:
          TypeError: `dtype` is neither floating nor None, which is the dtype of this array.
          ValueError: the shapes of values and scales do not fit each other, such as after an
            operation on one of the two arrays.
        """
        dtype = self.dtype if dtype is None else checks.as_floating("dtype", dtype)
        return self.format.decode((self.values, self.scales), dtype)


def _check_is_format(format: Any) -> None:
    if not isinstance(format, Format):
        raise TypeError(
            "format must be a jax_ep.Format, such as jax_ep.formats.FLOAT8_ROWS, but is "
            f"{checks.described(format)}."
        )


def _flatten(array: QuantizedArray) -> tuple[tuple[Any, Any], tuple[Format, Any]]:
    return (array.values, array.scales), (array.format, array.dtype)


def _flatten_with_keys(array: QuantizedArray) -> tuple[Any, tuple[Format, Any]]:
    keys = (jax.tree_util.GetAttrKey(name) for name in ("values", "scales"))
    leaves, static = _flatten(array)
    return tuple(zip(keys, leaves, strict=True)), static


def _unflatten(static: tuple[Format, Any], leaves: Any) -> QuantizedArray:
    # Checks nothing, since JAX may make the leaves of None or PartitionSpecs.
    array = object.__new__(QuantizedArray)
    names = ("values", "scales", "format", "dtype")
    for name, value in zip(names, (*leaves, *static), strict=True):
        object.__setattr__(array, name, value)
    return array


def _static_to_names(static: tuple[Format, Any]) -> list[Any]:
    """Converts the format and the dtype to values that `jax.export` can serialize."""
    format, dtype = static
    is_transposed = isinstance(format, Transposed)
    format = format.transposes if isinstance(format, Transposed) else format
    power_of_two = getattr(format, "power_of_two", False)  # MXFP4 has no such field
    names = [format.name, format.scale_dtype.name, format.block, power_of_two, dtype.name]
    return [*names, is_transposed]


def _static_of_names(names: tuple[Any, ...]) -> tuple[Format, Any]:
    name, scale_dtype, block, power_of_two, dtype, is_transposed = names
    format: Format = MXFP4
    if name != MXFP4.name:  # then a Float8, whose name is that of its dtype
        format = Float8.of(name, block, scale_dtype, power_of_two)
    return Transposed.of(format) if is_transposed else format, jnp.dtype(dtype)


jax.tree_util.register_pytree_with_keys(QuantizedArray, _flatten_with_keys, _unflatten, _flatten)
register_for_export(QuantizedArray, _static_to_names, _static_of_names)


def quantize(x: jax.Array | np.ndarray, format: Format) -> QuantizedArray:
    """Encodes an array of numbers in a format, as values and scales.

    Args:
      x: [..., R, C] floating. A NumPy array is quantized by NumPy, on the host, and gives NumPy
        arrays.
      format: `jax_ep.formats.FLOAT8_ROWS`, `FLOAT8_MATRICES`, `MXFP4`, or another `jax_ep.Format`.

    Returns:
      A `QuantizedArray` of x's shape and dtype. No gradient goes through it: that of x is zero.

    Raises:
      ValueError: the format's blocks do not divide the shape of x.
      TypeError: x is not a floating array, or `format` is not a `jax_ep.Format`.
    """
    _check_is_format(format)
    checks.check_array("x", x, None, jnp.floating, "[..., R, C]")
    if isinstance(x, jax.Array):
        # Else XLA would evaluate reductions of a constant x while it compiles, which is slow.
        x = not_folded(lax.stop_gradient(x))
    values, scales = format.encode(x)
    if isinstance(values, jax.Array):
        # XLA for GPUs may omit the rounding to a narrow dtype if the program widens the result
        # again. The barrier prevents this.
        values = lax.optimization_barrier(values)
    return QuantizedArray(values, scales, format, x.dtype)


def with_jax_dtype(array: Any) -> Any:
    """Returns an array, or a `QuantizedArray` with a dtype that JAX arrays can have."""
    if not isinstance(array, QuantizedArray):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def without_gradient(name: str, array: Any) -> Any:
    """Returns `array`; differentiating raises TypeError if it is a `QuantizedArray`."""
    if not isinstance(array, QuantizedArray):
        return array
    why = (
        f"{name} is stored quantized, as a QuantizedArray, and has no gradient. Differentiate with "
        "respect to other arguments only, or dequantize it first."
    )
    # With stop_gradient, not even zero tangents reach what computes with the array.
    return jax.tree.map(lax.stop_gradient, refuse_tangents(why, array))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_tangents(why: str, tree: Any) -> Any:
    """Returns a pytree unchanged; differentiating it raises TypeError with the message `why`."""
    return tree


@functools.partial(refuse_tangents.defjvp, symbolic_zeros=True)
def _refuse_tangents_jvp(why, primals, tangents):
    (tree,), (tangent,) = primals, tangents
    # JAX passes a symbolic zero for each leaf with respect to which nothing is differentiated.
    parts = jax.tree.leaves(tangent, is_leaf=lambda part: isinstance(part, SymbolicZero))
    if not all(isinstance(part, SymbolicZero) for part in parts):
        raise TypeError(why)
    return tree, tangent
