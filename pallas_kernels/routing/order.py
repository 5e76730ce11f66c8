"""Orders columns and groups whose sums of score and bias round to the same float32.

A sum is two float32 numbers: `high` is the sum rounded to float32, and `low` its rounding error. If
both are equal, logits decide. Functions here are elementwise and use only operations that
`pallas_kernels.fabric.elementwise` emits, so that XLA and the kernel compare by the same numbers.
They take and return arrays, or words of a kernel's lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = np.float32(1e37)  # sums and differences of numbers up to this are finite
_LOG_2 = np.float32(math.log(2))


def plus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


def rounded_off(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    """Returns a + b - total exactly, where total is a + b rounded (Knuth's TwoSum)."""
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)


def left_of(total: jax.Array, rest: jax.Array, high: jax.Array) -> jax.Array:
    """Returns total + rest - high exactly, where high is total + rest rounded and rest smaller."""
    return rest - (high - total)


def add(apply: Callable[..., Any], where_finite: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Adds two sums (high, low); returns (high, low).

    Args:
      apply: calls one of the functions above with operands.
      where_finite: a function (a, b) that returns b where a is finite, and 0 elsewhere.
      a: (high, low).
      b: (high, low).
    """
    total = apply(plus, a[0], b[0])
    rest = apply(plus, a[1], b[1])
    rest = where_finite(total, apply(plus, apply(rounded_off, a[0], b[0], total), rest))
    high = apply(plus, total, rest)
    return high, where_finite(high, apply(left_of, total, rest, high))


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
