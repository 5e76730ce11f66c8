"""Defines `QuantizedArray`, a pytree of quantized values and scales with their format."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jax_ep import checks
from jax_ep.formats.transposed import Transposed
from jax_ep.runtime.jax_compat import register_for_export
from pallas_kernels.formats import Float8, Format
from pallas_kernels.mxfp4 import MXFP4


@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """An array [..., R, C] stored in a `Format`: a pytree of two arrays, values and scales.

    Values and scales have as many axes as the dequantized array, and the same leading axes. So a
    sharding, a `jax.sharding.PartitionSpec` or an `in_axes` for the dequantized array fits both
    of them, as long as it splits no block of numbers that share a scale. If the format is a
    `jax_ep.formats.Transposed`, both arrays have the last two axes swapped; `specs` returns their
    sharding.

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
        if not isinstance(self.format, Format):
            raise TypeError(
                "format must be a jax_ep.Format, such as jax_ep.formats.FLOAT8_ROWS, but is "
                f"{checks.described(self.format)}."
            )
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
        """The shape [..., R, C] of the array that `dequantize` returns.

        It differs from the shape of `values` where an element of `values` packs several numbers, as
        in MXFP4, or where the format stores the array transposed.
        """
        return self.format.numbers_shape(tuple(self.values.shape))

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    def specs(self, spec: PartitionSpec) -> QuantizedArray:
        """Returns a `QuantizedArray` whose leaves are the PartitionSpecs of values and scales.

        `spec` is the PartitionSpec of the dequantized array, of shape `shape`.
        """
        parts = self.format.stored_order((*spec, *(None,) * (self.ndim - len(spec))))
        return jax.tree.map(lambda _: PartitionSpec(*parts), self)

    def astype(self, dtype: jax.typing.DTypeLike) -> QuantizedArray:
        """Returns a `QuantizedArray` of the same stored values and scales with another `dtype`.

        `dtype` is the dtype that the result's `dequantize` returns by default. The stored arrays do
        not change.

        Raises:
          TypeError: `dtype` is not floating.
        """
        return dataclasses.replace(self, dtype=dtype)

    def dequantize(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """Decodes the array: multiplies values by scales in float32, and rounds to `dtype`.

        A `dtype` of None means the dtype of this array.

        Raises:
          TypeError: `dtype` is not floating.
          ValueError: the shapes of values and scales do not fit each other, such as after an
            operation on one of the two arrays.
        """
        dtype = self.dtype if dtype is None else checks.as_floating("dtype", dtype)
        return self.format.decode((self.values, self.scales), dtype)


def _flatten(array: QuantizedArray) -> tuple[tuple[Any, Any], tuple[Format, Any]]:
    return (array.values, array.scales), (array.format, array.dtype)


def _flatten_with_keys(array: QuantizedArray) -> tuple[Any, tuple[Format, Any]]:
    keys = (jax.tree_util.GetAttrKey(name) for name in ("values", "scales"))
    leaves, static = _flatten(array)
    return tuple(zip(keys, leaves, strict=True)), static


def _unflatten(static: tuple[Format, Any], leaves: Any) -> QuantizedArray:
    """Makes a `QuantizedArray` of any two leaves, without the checks of the constructor.

    JAX also makes such trees of leaves that are not arrays, which the checks would refuse:
    PartitionSpecs, the axes of a vmap, or None.
    """
    array = object.__new__(QuantizedArray)
    names = ("values", "scales", "format", "dtype")
    for name, value in zip(names, (*leaves, *static), strict=True):
        object.__setattr__(array, name, value)
    return array


def _static_to_names(static: tuple[Format, Any]) -> list[Any]:
    format, dtype = static
    transposed = isinstance(format, Transposed)
    format = format.transposes if isinstance(format, Transposed) else format
    power_of_two = getattr(format, "power_of_two", False)
    names = [format.name, format.scale_dtype.name, format.block, power_of_two, dtype.name]
    return [*names, transposed]


def _static_of_names(names: tuple[Any, ...]) -> tuple[Format, Any]:
    name, scale_dtype, block, power_of_two, dtype, transposed = names
    format: Format = MXFP4
    if name != MXFP4.name:
        format = Float8.of(name, block, scale_dtype, power_of_two)
    return Transposed.of(format) if transposed else format, jnp.dtype(dtype)


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
    if not isinstance(format, Format):
        raise TypeError(
            "format must be a jax_ep.Format, such as jax_ep.formats.FLOAT8_ROWS, but is "
            f"{checks.described(format)}."
        )
    checks.check_array("x", x, None, jnp.floating, "[..., R, C]")
    values, scales = format.encode(lax.stop_gradient(x) if isinstance(x, jax.Array) else x)
    if isinstance(values, jax.Array):
        # XLA for GPUs may omit the rounding to a narrow dtype if the program widens the result
        # again. The barrier prevents this.
        values = lax.optimization_barrier(values)
    return QuantizedArray(values, scales, format, x.dtype)


def with_jax_dtype(array: Any) -> Any:
    """Returns an array unchanged, and a `QuantizedArray` with a dtype that JAX arrays can have.

    Without `jax_enable_x64`, that of float64 NumPy numbers becomes float32.
    """
    if not isinstance(array, QuantizedArray):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def without_gradient(name: str, array: Any) -> Any:
    """Returns `array` unchanged, but differentiation fails if it is a `QuantizedArray`.

    Differentiating with respect to it then raises TypeError, with a message that calls it `name`.
    Another array is differentiated as usual.
    """
    if not isinstance(array, QuantizedArray):
        return array
    return jax.tree.map(lax.stop_gradient, _constant(name, array))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name: str, array: QuantizedArray) -> QuantizedArray:
    return array


@functools.partial(_constant.defjvp, symbolic_zeros=True)
def _constant_jvp(name, primals, tangents):
    parts = jax.tree.leaves(tangents, is_leaf=lambda part: isinstance(part, SymbolicZero))
    if not all(isinstance(part, SymbolicZero) for part in parts):
        raise TypeError(
            f"{name} is stored quantized, as a QuantizedArray, and has no gradient. Differentiate "
            "with respect to other arguments only, or dequantize it first."
        )
    return primals[0], tangents[0]
