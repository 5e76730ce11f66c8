"""The numbers that columns and groups are compared by where a bias or a second score is added.

A sum of scores, or of a score and a bias, is two float32 numbers: `high`, the sum rounded to
float32, and `low`, what was rounded off. Where two sums are equal, logits decide.

XLA and the kernel compare by the same numbers. So functions here compute with `ops`, which holds
arrays or words of a kernel's lanes, and apply elementwise functions that
`pallas_kernels.fabric.elementwise` emits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.routing.plan import Groups

_LARGEST = np.float32(1e37)  # its sums and differences are finite
_LOG_2 = np.float32(math.log(2))


class Ops(Protocol):
    """What sums are computed with."""

    def zero(self) -> Any: ...

    def call(self, function: Callable[..., jax.Array], *operands: Any) -> Any:
        """Calls a function of `ARITY` with its operands."""

    def where_finite(self, of: Any, value: Any) -> Any:
        """Returns `value` where `of` is finite, and elsewhere 0."""

    def where_positive(self, of: Any, value: Any, other: Any) -> Any:
        """Returns `value` where `of` is larger than 0, and elsewhere `other`."""


def plus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


def rounded_off(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    """Returns a + b - total exactly, where total is a + b rounded (Knuth's TwoSum)."""
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)


def left_of(total: jax.Array, rest: jax.Array, high: jax.Array) -> jax.Array:
    """Returns total + rest - high exactly, where high is total + rest rounded and rest smaller."""
    return rest - (high - total)


def smaller_sigmoid(x: jax.Array) -> jax.Array:
    """Returns the smaller one of sigmoid(x) and sigmoid(-x), which add up to 1."""
    return jax.nn.sigmoid(-jnp.abs(x))


def one_minus(x: jax.Array) -> jax.Array:
    return np.float32(1) - x


def left_of_one(high: jax.Array, smaller: jax.Array) -> jax.Array:
    return (np.float32(1) - high) - smaller


def error_of_two(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns more than the error of a + b as the sum of two sums (high, low), from their highs.

    A low is at most 2^-24 of its high, and so is the rounding of the sum. The constant exceeds what
    is lost where numbers below 2^-126 are flushed to 0.
    """
    return (jnp.abs(a) + jnp.abs(b)) * np.float32(2**-22) + np.float32(2**-120)


def minus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a - b


# The elementwise functions that `Ops.call` gets, and how many operands each has.
ARITY: dict[Callable[..., jax.Array], int] = {
    plus: 2,
    minus: 2,
    rounded_off: 3,
    left_of: 3,
    smaller_sigmoid: 1,
    one_minus: 1,
    left_of_one: 2,
    error_of_two: 2,
}


def _rounded(ops: Ops, a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Returns (total, rest, high): the sum of two sums is total + rest, which rounds to high."""
    total = ops.call(plus, a[0], b[0])
    rest = ops.call(plus, a[1], b[1])
    rest = ops.call(plus, ops.call(rounded_off, a[0], b[0], total), rest)
    rest = ops.where_finite(total, rest)
    return total, rest, ops.call(plus, total, rest)


def add(ops: Ops, a: Any, b: Any) -> tuple[Any, Any]:
    """Adds two sums (high, low)."""
    total, rest, high = _rounded(ops, a, b)
    return high, ops.where_finite(high, ops.call(left_of, total, rest, high))


def has_sums(scores: str, bias: Any, groups: Groups | None) -> bool:
    """Returns whether sums are compared: with a bias, or of a group's two best scores.

    A group's two best logits are found without, and added then.
    """
    return bias is not None or (groups is not None and groups.best == 2 and scores != "logit")


def score_and_bias(
    ops: Ops, scores: str, logit: Any, score: Any, bias: Any, *, rounded: bool = False
) -> tuple[Any, ...]:
    """Returns (high, low), the sum of a score and a bias; with `rounded`, (high,) alone.

    Args:
      ops: computes with the operands.
      scores: what scores are, a key of `OF_TWO`.
      logit: the logits, for scores that are logits or sigmoids.
      score: the scores, rounded, for other scores.
      bias: the biases, or None.
      rounded: whether to compute the rounded sum alone.
    """
    total: tuple[Any, ...] = (logit if scores == "logit" else score, ops.zero())
    if scores == "sigmoid":
        smaller = ops.call(smaller_sigmoid, logit)
        high = ops.where_positive(logit, ops.call(one_minus, smaller), smaller)
        total = (high,)
        if bias is not None or not rounded:
            left = ops.call(left_of_one, high, smaller)
            total = high, ops.where_positive(logit, left, ops.zero())
    if bias is not None:
        bias = bias, ops.zero()
        total = _rounded(ops, total, bias)[-1:] if rounded else add(ops, total, bias)
    return total[:1] if rounded else total


def bounds_of_two(ops: Ops, a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Returns (total, lower, upper) of the sum of two sums, from their highs alone.

    The sum is at least `lower` and at most `upper`, and it is not if all are infinite or NaN.
    """
    total = ops.call(plus, a, b)
    error = ops.where_finite(total, ops.call(error_of_two, a, b))
    return total, ops.call(minus, total, error), ops.call(plus, total, error)


def _log_sum(a: jax.Array, b: jax.Array | np.float32) -> jax.Array:
    """Returns log(e^a + e^b): the larger plus log(1 + y) for a y of 0 to 1, by its series."""
    ratio = jnp.exp(-jnp.abs(a - b))
    z = ratio / (ratio + np.float32(2))  # log(1 + y) = 2 artanh(z)
    square = z * z
    series = square * np.float32(2 / 13) + np.float32(2 / 11)
    for power in (9, 7, 5, 3, 1):
        series = series * square + np.float32(2 / power)
    return jnp.maximum(a, b) + z * series


def _log_odds_of_mean(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns log(s / (1 - s)) of the mean s of two sigmoids.

    s / (1 - s) is (e^a + e^b + 2 e^(a + b)) / (2 + e^a + e^b).
    """
    either = _log_sum(a, b)
    return _log_sum(either, a + b + _LOG_2) - _log_sum(either, _LOG_2)


def _clipped(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def of_clipped(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (jnp.maximum(jnp.minimum(x, _LARGEST), -_LARGEST) for x in (a, b))
        return function(a, b)

    return of_clipped


# For each score function, a function of two logits that grows with the sum of their scores, even
# where the sums round to the same number. It orders groups whose sums of their best two are equal.
OF_TWO: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "softmax": _clipped(_log_sum),
    "sigmoid": _clipped(_log_odds_of_mean),
    "sqrt_softplus": _clipped(lambda a, b: _log_sum(a * np.float32(0.5), b * np.float32(0.5))),
    "logit": _clipped(plus),
}
