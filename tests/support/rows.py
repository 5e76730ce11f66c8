"""Rows of float32 with all that an order must decide, and their order in plain NumPy."""

from __future__ import annotations

import numpy as np

from pallas_kernels.routing.order import OF_TWO

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
    return np.argsort(-total_order(values), axis=-1, kind="stable")


def total_order(values: np.ndarray) -> np.ndarray:
    """Returns int64 numbers in IEEE 754's total order of float32 numbers."""
    bits = values.view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)


def within_best_groups(
    values: np.ndarray,
    scores: np.ndarray,
    number: int,
    kept: int,
    best: int,
    of_ties: str = "logit",
) -> np.ndarray:
    """Returns values, -inf outside of the groups with the largest sums of their best scores.

    Of scores alike the one of the larger value is better, and groups whose sums are equal are
    compared by a function of `pallas_kernels.routing.order` of the values of their best two. Scores
    have few digits, so that sums are exact, or are not alike.
    """
    grouped, of_values = (a.reshape(len(scores), number, -1) for a in (scores, values))
    first = np.lexsort((-total_order(of_values), -total_order(grouped)))[..., :best]
    of_best, values_of_best = (
        np.moveaxis(np.take_along_axis(a, first, axis=-1), -1, 0) for a in (grouped, of_values)
    )
    if best == 1:
        keys = total_order(values_of_best[0]), total_order(of_best[0])
    else:
        ties = np.asarray(OF_TWO[of_ties](*values_of_best))
        keys = total_order(ties), of_best.astype(np.float64).sum(axis=0)
        # The NaN that arithmetic makes has a sign of its own on each platform.
        assert not np.any(np.isnan(keys[1]))
    best_groups = np.lexsort([-key for key in keys])
    out = np.full(grouped.shape, -np.inf, np.float32)
    for row, groups in enumerate(best_groups[:, :kept]):
        out[row, groups] = values[row].reshape(number, -1)[groups]
    return out.reshape(values.shape)
