"""Rows of float32 with ties, NaN and infinities, and the choices of their columns in NumPy."""

from __future__ import annotations

import functools

import numpy as np

from pallas_kernels.routing.plan import Groups

KINDS = ("random", "bfloat16", "ties", "special")
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0, 1e-45, -1e-45]


def rows(number: int, columns: int, kind: str, seed: int = 0) -> np.ndarray:
    """Returns `number` rows of random float32 values, [number, columns].

    `kind` is one of KINDS: "random" values are normal, those of "bfloat16" have bfloat16's
    precision, "ties" are whole numbers, many of them equal, and "special" has zeros, infinities,
    NaNs and subnormals of both signs. All of row 0 of "special" is one NaN, the least value in
    IEEE 754's total order.
    """
    rng = np.random.default_rng(seed)
    shape = number, columns
    if kind == "special":
        values = np.array(_SPECIAL, np.float32)[rng.integers(0, len(_SPECIAL), shape)]
        # This NaN, with the sign bit set, is the least value of the total order.
        values.view(np.uint32)[0] = 0xFFFFFFFF
        return values
    values = rng.normal(size=shape).astype(np.float32)
    if kind == "bfloat16":
        values.view(np.uint32)[:] &= 0xFFFF0000
    return np.round(values) if kind == "ties" else values


def descending(values: np.ndarray) -> np.ndarray:
    """Returns each row's columns sorted by value, the largest first; equal values keep their order.

    Values are compared in IEEE 754's total order, as `lax.top_k` does: -NaN < -inf < -0 < 0 < inf <
    NaN.
    """
    return np.argsort(-total_order(values), axis=-1, kind="stable")


def total_order(values: np.ndarray) -> np.ndarray:
    """Maps float32 to int64 numbers whose order is IEEE 754's total order."""
    bits = values.view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)


def choices(compared: np.ndarray, k: int, groups: Groups | None = None) -> np.ndarray:
    """Returns each row's k best columns, [rows, k]: the result of `lax.top_k` within groups.

    The sum of the best columns of a group must not be NaN, since platforms give NaN other signs.
    """
    if groups is not None:
        grouped = compared.reshape(len(compared), groups.number, -1)
        best = np.take_along_axis(grouped, descending(grouped), axis=-1)[..., : groups.best]
        kept = descending(functools.reduce(np.add, np.moveaxis(best, -1, 0)))[:, : groups.kept]
        is_kept = np.any(kept[:, :, None] == np.arange(groups.number), axis=1)[:, :, None]
        compared = np.where(is_kept, grouped, np.float32(-np.inf)).reshape(compared.shape)
    return descending(compared)[:, :k]
