"""Sums of scores by which top-k routing compares experts and groups of experts.

Experts are the columns of the scores. A *sum* is a score plus a bias, or the sum of the two best
scores of a group of experts. It is a pair of float32 numbers (high, low): `high` is the exact sum
rounded to float32, and `low` is the error of that rounding. Where sums are equal, logits decide.

XLA's implementation and the GPU kernel must choose the same experts, so both call the functions
here. The argument `ops` of these functions has the arithmetic operations: on JAX arrays in XLA, on
registers in the kernel. In the kernel, `pallas_kernels.fabric.elementwise` emits the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.routing.plan import Groups

# `OF_TWO` clips logits to this magnitude, so that sums of two logits are finite in float32.
_LARGEST = np.float32(1e37)
_LOG_2 = np.float32(math.log(2))


class Ops(Protocol):
    """Arithmetic on float32 values, which are JAX arrays in XLA and registers in a kernel."""

    def zero(self) -> Any: ...

    def call(self, function: Callable[..., jax.Array], *operands: Any) -> Any:
        """Applies `function`, one of the keys of `ARITY`, to the operands elementwise."""

    def where_finite(self, of: Any, value: Any) -> Any:
        """Returns, elementwise, `value` where `of` is finite, and 0 elsewhere."""

    def where_positive(self, of: Any, value: Any, other: Any) -> Any:
        """Returns, elementwise, `value` where `of` is greater than 0, and `other` elsewhere."""


def plus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


def rounded_off(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    """Returns a + b - total exactly, where total is a + b rounded to float32 (Knuth's TwoSum)."""
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)


def left_of(total: jax.Array, rest: jax.Array, high: jax.Array) -> jax.Array:
    """Returns total + rest - high exactly (Dekker's Fast2Sum).

    `high` is total + rest rounded to float32; |rest| must be less than |total|.
    """
    return rest - (high - total)


def smaller_sigmoid(x: jax.Array) -> jax.Array:
    """Returns the smaller of sigmoid(x) and sigmoid(-x), which add up to 1."""
    return jax.nn.sigmoid(-jnp.abs(x))


def one_minus(x: jax.Array) -> jax.Array:
    return np.float32(1) - x


def left_of_one(high: jax.Array, smaller: jax.Array) -> jax.Array:
    return (np.float32(1) - high) - smaller


def error_of_two(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a bound of the error if a + b is taken for the sum of two numbers, each high + low.

    a and b are the `high` of the two numbers. Each left-out `low` is at most 2^-24 times its
    `high`. Rounding a + b adds an error of at most 2^-24 times the result. The constant 2^-120
    covers numbers below 2^-126, which are flushed to 0.
    """
    return (jnp.abs(a) + jnp.abs(b)) * np.float32(2**-22) + np.float32(2**-120)


def minus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a - b


# Maps each elementwise function that may be passed to `Ops.call` to its number of operands.
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
    """Adds two numbers a and b, each a pair of float32 values (high, low).

    Returns the float32 values (total, rest, high): the sum is total + rest, and high is the sum
    rounded to float32.
    """
    total = ops.call(plus, a[0], b[0])
    rest = ops.call(plus, a[1], b[1])
    rest = ops.call(plus, ops.call(rounded_off, a[0], b[0], total), rest)
    rest = ops.where_finite(total, rest)
    return total, rest, ops.call(plus, total, rest)


def add(ops: Ops, a: Any, b: Any) -> tuple[Any, Any]:
    """Adds two numbers a and b, each a pair (high, low); returns their sum as such a pair."""
    total, rest, high = _rounded(ops, a, b)
    return high, ops.where_finite(high, ops.call(left_of, total, rest, high))


def has_sums(scores: str, bias: Any, groups: Groups | None) -> bool:
    """Returns whether a sum (high, low) is computed for each column (expert): score plus bias.

    Without a bias, the sum is the score. It is then needed only if groups are compared by the sum
    of their two best scores, and if the scores are not the logits.

    Args:
      scores: the score function, a key of `OF_TWO`.
      bias: the biases, or None.
      groups: the groups of columns, or None.
    """
    return bias is not None or (groups is not None and groups.best == 2 and scores != "logit")


def score_and_bias(
    ops: Ops, scores: str, logit: Any, score: Any, bias: Any, *, rounded: bool = False
) -> tuple[Any, ...]:
    """Computes the sums of scores and biases by which columns (experts) are compared.

    Args:
      ops: the operations on `logit`, `score` and `bias`.
      scores: the score function, a key of `OF_TWO`.
      logit: float32 logits; used if `scores` is "logit" or "sigmoid".
      score: float32 scores; used if `scores` is another function.
      bias: float32 biases, or None for no bias.
      rounded: whether to compute only the sum rounded to float32.

    Returns:
      The sum as a pair (high, low), where high is the sum rounded to float32; (high,) if `rounded`.
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
    """Returns bounds of the exact sum of two numbers, each high + low, given only their highs a, b.

    Returns (total, lower, upper): a + b rounded to float32, and the bounds, which hold for all
    possible lows. If `total` is infinite or NaN, so are the bounds.
    """
    total = ops.call(plus, a, b)
    error = ops.where_finite(total, ops.call(error_of_two, a, b))
    return total, ops.call(minus, total, error), ops.call(plus, total, error)


def _log_sum(a: jax.Array, b: jax.Array | np.float32) -> jax.Array:
    """Returns log(e^a + e^b), as max(a, b) + log(1 + e^-|a - b|)."""
    ratio = jnp.exp(-jnp.abs(a - b))
    # log(1 + ratio) equals 2 artanh(z), which is computed by its power series: odd powers of z.
    z = ratio / (ratio + np.float32(2))
    square = z * z
    series = square * np.float32(2 / 13) + np.float32(2 / 11)
    for power in (9, 7, 5, 3, 1):
        series = series * square + np.float32(2 / power)
    return jnp.maximum(a, b) + z * series


def _log_odds_of_mean(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns log(s / (1 - s)), where s is the mean of sigmoid(a) and sigmoid(b).

    It uses that s / (1 - s) equals (e^a + e^b + 2 e^(a + b)) / (2 + e^a + e^b).
    """
    either = _log_sum(a, b)
    return _log_sum(either, a + b + _LOG_2) - _log_sum(either, _LOG_2)


def _clipped(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def of_clipped(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (jnp.maximum(jnp.minimum(x, _LARGEST), -_LARGEST) for x in (a, b))
        return function(a, b)

    return of_clipped


# Maps the name of each score function s to a function f(a, b) of two logits that grows with s(a) +
# s(b). If groups are compared by the sum of their two best scores, f breaks ties: of two groups
# with equal sums, the better one has the larger f of its two best logits.
OF_TWO: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "softmax": _clipped(_log_sum),
    "sigmoid": _clipped(_log_odds_of_mean),
    "sqrt_softplus": _clipped(lambda a, b: _log_sum(a * np.float32(0.5), b * np.float32(0.5))),
    "logit": _clipped(plus),
}
