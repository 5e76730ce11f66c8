"""Checks of arguments that several functions share. Messages name the argument and its value."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax import lax

AxisName = str | tuple[str, ...]


def as_axes(axis_name: AxisName) -> tuple[str, ...]:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def num_ranks(axis_name: tuple[str, ...]) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name {axis_name} is not bound here: call this inside jax.shard_map over "
            f"{axis_name}."
        ) from error


def check_array(name: str, array: jax.Array, ndim: int, kind: type, shape: str) -> None:
    if not hasattr(array, "dtype") or not hasattr(array, "ndim"):
        raise TypeError(f"{name} must be an array {shape}, but is {type(array)}.")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have rank {ndim}, {shape}, but has shape {array.shape}.")
    if not jnp.issubdtype(array.dtype, kind):
        raise TypeError(f"{name} must be {kind.__name__} {shape}, but has dtype {array.dtype}.")


def check_integer(name: str, value: int, least: int = 1) -> int:
    """A static integer of at least `least`; a traced value or a float is none."""
    try:
        value = operator.index(value)
    except Exception as error:
        raise TypeError(f"{name} must be a static integer, but is {value!r}.") from error
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}.")
    return value
