"""Checks arguments of public functions; the error messages name the argument and its value."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

AxisName = str | tuple[str, ...]

# The largest allowed number of rows, experts or tokens. All of them are counted in int32.
MAX_INT32 = 2**31 - 1

MASK = jnp.bool_, jnp.integer  # the kinds of dtypes of a mask
_KINDS = {
    MASK: "a bool or integer array",
    jnp.floating: "a floating array",
    jnp.integer: "an integer array",
    jnp.bool_: "a bool array",
    jnp.number: "an array of numbers",
}


def warn(message: str) -> None:
    """Warns; shows the user's line that called this library, directly or through Flax or JAX."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("jax_ep", "jax", "flax"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def as_axes(axis_name: AxisName, name: str = "axis_name") -> tuple[str, ...]:
    """Returns `axis_name`, one mesh axis or a tuple of distinct ones, as a tuple, or raises."""
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        if not isinstance(axis, str):
            raise TypeError(
                f"{name} must be the name of a mesh axis or a tuple of names, but is {axis_name!r}."
            )
    if len(set(axes)) < len(axes):
        raise ValueError(f"{name} must name each mesh axis once, but is {axes}.")
    return axes


def num_ranks(axis_name: tuple[str, ...]) -> int:
    """Returns the number of ranks along mesh axes that an enclosing `jax.shard_map` must bind."""
    try:
        size = lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name {axis_name} is not bound here: call this inside jax.shard_map over "
            f"{axis_name}."
        ) from error
    not_of_mesh = set(axis_name) - set(jax.sharding.get_abstract_mesh().manual_axes)
    if not_of_mesh:
        raise ValueError(
            f"axis_name {axis_name} must name mesh axes of an enclosing jax.shard_map, but "
            f"{sorted(not_of_mesh)} are not mesh axes (an axis of jax.vmap(axis_name=...) is not "
            "one, since ranks are devices). Call this inside jax.shard_map instead."
        )
    return size


def check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh of devices, but is {described(mesh)}.")


def check_array(
    name: str,
    array: Any,
    ndim: int | None,
    kind: Any,
    wanted_shape: str,
    *,
    may_be_empty: bool = True,
    may_be_quantized: bool = False,
) -> None:
    """Raises unless `array` has `ndim` axes (None: any) and a dtype of `kind`."""
    # `kind` is a key of `_KINDS`. `wanted_shape`, such as "[T, H]", is only quoted in messages.
    wanted = f"{name} must be {_KINDS[kind]} {wanted_shape}"
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(f"{wanted}, but is {described(array)}.")
    if hasattr(array, "dequantize") and not may_be_quantized:
        raise TypeError(f"{wanted}, but is a QuantizedArray; pass its .dequantize().")
    if ndim is not None and len(array.shape) != ndim:
        raise ValueError(f"{wanted}, but has shape {array.shape}.")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not any(jnp.issubdtype(array.dtype, each) for each in kinds):
        raise TypeError(f"{wanted}, but has dtype {array.dtype}.")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must hold real numbers, but has dtype {array.dtype}.")
    if kind is jnp.floating and jnp.finfo(array.dtype).bits < 8:
        raise TypeError(f"{wanted} of 8 bits or more, but has dtype {array.dtype}.")
    if not may_be_empty and 0 in array.shape:
        raise ValueError(f"{wanted} with no empty axis, but has shape {array.shape}.")


def check_shape(name: str, array: Any, shape: tuple[Any, ...], wanted: str) -> None:
    """Raises ValueError unless `array` has `shape`, which the message says as `wanted`."""
    if array.shape != shape:
        raise ValueError(f"{name} must have {wanted}, but has shape {array.shape}.")


def check_not_sharded(name: str, array: Any, *, only_last: bool = False) -> None:
    """Raises ValueError if Explicit mesh axes split an array, or with `only_last` its last axis."""
    spec = tuple(getattr(getattr(jax.typeof(array), "sharding", None), "spec", ()))
    checked = spec[-1:] if only_last else spec
    if any(checked):
        # Without mesh axes for the checked dimensions.
        suggested = spec[: len(spec) - len(checked)] + (None,) * len(checked)
        along = "along its last axis " if only_last else ""
        raise ValueError(
            f"{name} must not be sharded {along}over Explicit axes of the mesh here, but is "
            f"{jax.typeof(array)}. Call this inside a jax.shard_map over them, where each rank has "
            f"its own part, or gather it first: jax.sharding.reshard({name}, jax.P{suggested})."
        )


def is_symbolic(size: Any) -> bool:
    """Returns whether `size` is a symbolic dimension of `jax.export`, and not an int."""
    return not isinstance(size, int)


def described(value: Any) -> str:
    """Describes an argument's value in an error message; of arrays and the like only the type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"the {type(value).__name__} {reprlib.repr(value)}"
    return f"of type {type(value).__name__}"


def check_integer(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    """Returns `value` as an int, or raises unless it is a static integer from `least` to `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        value = operator.index(value)
    except Exception as error:
        raise TypeError(f"{name} must be a static integer, but is {value!r}.") from error
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}.")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, but is {value}.")
    return value


def floating(dtype: Any) -> np.dtype | None:
    """Returns a floating dtype as `np.dtype`, or None if `dtype` is not a floating dtype."""
    try:
        as_numpy = jnp.dtype(dtype)
    except TypeError:
        return None
    return as_numpy if jnp.issubdtype(as_numpy, jnp.floating) else None


def as_floating(name: str, dtype: Any) -> np.dtype:
    """Returns `dtype` as `np.dtype`; raises TypeError, naming `name`, unless it is floating."""
    if (known := floating(dtype)) is None:
        raise TypeError(f"{name} must be a floating dtype, but is {dtype!r}.")
    return known


def as_dtype_of_arrays(name: str, dtype: Any) -> np.dtype:
    """Returns `dtype` as `np.dtype`; raises TypeError unless it is floating and JAX supports it."""
    known = as_floating(name, dtype)
    if known.itemsize > 8 or (known.itemsize == 8 and not jax.config.jax_enable_x64):  # type: ignore[attr-defined]
        raise TypeError(
            f"{name} must be a dtype that JAX arrays can have, but is {dtype!r}, for which JAX "
            "makes narrower arrays. float64 needs jax.config.update('jax_enable_x64', True)."
        )
    return known


def check_name(name: str, value: Any, names: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {names}, but is {value!r}.")


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a Python or NumPy bool; a traced bool raises, too."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, but is {described(value)}.")


def check_number(name: str, value: Any, *, may_be_zero: bool = False, otherwise: str = "") -> None:
    """Raises unless `value` is a finite Python or NumPy number above 0, or 0 if `may_be_zero`."""
    # `otherwise`, such as ", or None", is what messages add to "a Python number".
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number{otherwise}, but is {described(value)}.")
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        least = "0 or more" if may_be_zero else "above 0"
        raise ValueError(f"{name} must be {least} and finite{otherwise}, but is {value}.")


def check_function(name: str, value: Any, wanted: str) -> None:
    """Raises TypeError unless `value` is callable and hashable; the message quotes `wanted`."""
    if not callable(value):
        raise TypeError(f"{name} must be {wanted}, but is {described(value)}.")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} must be hashable, as static arguments are: {error}.") from error
