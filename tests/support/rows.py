"""Rows of float32 with all that an order must decide, and their order in plain NumPy."""

from __future__ import annotations

import numpy as np

KINDS = ("random", "bfloat16", "ties", "special")
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0, 1e-45, -1e-45]


def rows(number: int, columns: int, kind: str, seed: int = 0) -> np.ndarray:
    """Returns [number, columns] float32 of one of KINDS; in a row of "special", all are alike."""
    rng = np.random.default_rng(seed)
    shape = number, columns
    if kind == "special":
        values = np.array(_SPECIAL, np.float32)[rng.integers(0, len(_SPECIAL), shape)]
        values.view(np.uint32)[0] = 0xFFFFFFFF  # the least of all: a NaN
        return values
    values = rng.normal(size=shape).astype(np.float32)
    if kind == "bfloat16":
        values.view(np.uint32)[:] &= 0xFFFF0000
    return np.round(values) if kind == "ties" else values


def descending(values: np.ndarray) -> np.ndarray:
    """Returns the columns of each row in IEEE 754's total order, from the largest, first of equals.

    It is the order of `lax.top_k`: -NaN < -inf < -0 < 0 < inf < NaN.
    """
    bits = values.view(np.int32)
    order = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    return np.argsort(-order, axis=-1, kind="stable")


def within_best_groups(
    values: np.ndarray, scores: np.ndarray, number: int, kept: int, best: int
) -> np.ndarray:
    """Returns values, -inf outside of the groups with the largest sums of their best scores."""
    grouped = scores.reshape(len(scores), number, -1)
    largest = np.take_along_axis(grouped, descending(grouped), axis=-1)[..., :best]
    with np.errstate(invalid="ignore"):
        of_group = largest[..., 0] if best == 1 else np.float32(0) + largest.sum(axis=-1)
    # The NaN that arithmetic makes has a sign of its own on each platform.
    assert not np.any(np.isnan(of_group))
    out = np.full(grouped.shape, -np.inf, np.float32)
    for row, groups in enumerate(descending(of_group)[:, :kept]):
        out[row, groups] = values[row].reshape(number, -1)[groups]
    return out.reshape(values.shape)
