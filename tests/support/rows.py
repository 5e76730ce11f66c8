"""Rows of float32 with ties, NaN and infinities, and their sorted order in NumPy."""

from __future__ import annotations

import numpy as np

from pallas_kernels.routing.order import OF_TWO
from pallas_kernels.routing.plan import Groups

# Kinds of `sums`. A kind says how many columns of a row share a sum score + bias in float32:
#   "nothing"        each column has its own sum;
#   "pairs"          about two columns share a sum;
#   "all"            all columns share one sum;
#   "beyond"         a third of the columns share a sum, and their exact sums are equal too;
#   "unlike beyond"  a third of the columns share a sum, but their exact sums differ;
#   "close"          some columns share a sum; others differ by about one unit in the last place;
#   "special"        columns with infinite biases share a sum; logits have infinities and NaN.
SUMS = ("nothing", "pairs", "all", "beyond", "unlike beyond", "close", "special")
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


def sums(number: int, columns: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scores [number, columns], biases [columns] and logits [number, columns], float32.

    `kind` is one of SUMS. In most kinds, biases are whole numbers and scores are small next to
    them, so that many rounded sums are equal; in "nothing", all sums of a row differ.
    """
    rng = np.random.default_rng(0)
    tiny = rng.integers(-9, 10, (number, columns)) * 2.0**-30
    bias = rng.integers(0, columns // 2, columns)
    logits = rows(number, columns, "ties", 1)
    if kind == "nothing":
        tiny, bias = rng.permuted(np.tile(np.arange(columns) / 64, (number, 1)), axis=1), bias * 0
    elif kind == "all":
        tiny, bias, logits = tiny * 0, bias * 0 + 1, logits * 0
    elif kind == "beyond":
        tiny, bias, logits = tiny * 0, bias % 3, logits * 0 + bias % 3
    elif kind == "unlike beyond":
        bias = bias % 3 + 1
    elif kind == "close":
        tiny, bias = 1 + rng.integers(0, 3, (number, columns)) * 2.0**-23, bias % 2 * 2.0**-24
    elif kind == "special":
        logits = rows(number, columns, "special", 1)
        bias = np.where(bias % 5 == 0, -np.inf, np.where(bias % 7 == 0, -0.0, bias % 2))
    return tiny.astype(np.float32), bias.astype(np.float32), logits.astype(np.float32)


def comparable(logits: np.ndarray, groups: Groups | None) -> np.ndarray:
    """Returns the logits, with NaN replaced by 2 if their order would not be defined.

    This is so if groups of columns are ordered by a function of their two best logits
    (`groups.best` is 2): IEEE 754 does not say which NaN, and of which sign, a function of two NaNs
    returns.
    """
    if groups is None or groups.best == 1:
        return logits
    return np.where(np.isnan(logits), np.float32(2), logits)


def by_sums(
    scores: np.ndarray, bias: np.ndarray, logits: np.ndarray, groups: Groups | None = None
) -> np.ndarray:
    """Returns each row's columns sorted by score + bias in float64, the largest sum first.

    Equal sums are ordered by logit, then by column. With groups, only the best groups' columns
    count, and groups with equal sums are ordered by `order.OF_TWO["softmax"]` of their two best
    logits.
    """
    total = scores.astype(np.float64) + bias
    by_logit = total_order(logits)
    if groups is not None:
        grouped, of_logits = (a.reshape(len(a), groups.number, -1) for a in (total, by_logit))
        values = logits.reshape(grouped.shape)
        first = np.lexsort((-of_logits, -grouped))[..., : groups.best]
        of_best = np.take_along_axis(grouped, first, axis=-1)
        of_values = np.take_along_axis(values, first, axis=-1)
        if groups.best == 2:
            ties = np.asarray(OF_TWO["softmax"](of_values[..., 0], of_values[..., 1]))
        else:
            ties = of_values[..., 0]
        best_groups = np.lexsort((-total_order(ties), -of_best.sum(axis=-1)))[:, : groups.kept]
        is_kept = np.any(best_groups[:, :, None] == np.arange(groups.number), axis=1)
        is_out = ~np.repeat(is_kept, grouped.shape[-1], axis=1)
        total = np.where(is_out, -np.inf, total)
        # A sum of -inf in a kept group still comes before all columns of dropped groups.
        lows = np.where(is_out, 1, 0)
        by_logit = np.where(is_out, total_order(np.float32([-np.inf])), by_logit)
        return np.lexsort((-by_logit, lows, -total))
    return np.lexsort((-by_logit, -total))


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


def within_best_groups(
    values: np.ndarray,
    scores: np.ndarray,
    number: int,
    kept: int,
    best: int,
    of_ties: str = "logit",
) -> np.ndarray:
    """Returns `values`, with -inf outside the groups whose best scores have the largest sums.

    Scores must have few digits, so that sums are exact, or be all different.

    Args:
        values: [T, E] float32; of equal scores, the one with the larger value is better.
        scores: [T, E] float32.
        number: how many groups there are.
        kept: how many groups are kept.
        best: how many scores of a group are summed, 1 or 2.
        of_ties: a key of `OF_TWO`; that function of the two best values orders groups of equal
            sums.
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
        # The sign of a NaN that arithmetic produces depends on the platform, so there must be none.
        assert not np.any(np.isnan(keys[1]))
    best_groups = np.lexsort([-key for key in keys])
    out = np.full(grouped.shape, -np.inf, np.float32)
    for row, groups in enumerate(best_groups[:, :kept]):
        out[row, groups] = values[row].reshape(number, -1)[groups]
    return out.reshape(values.shape)
