"""The top-k kernel in Pallas' GPU interpreter; tests/moe/test_top_k.py runs it on GPUs."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support import simulator
from support.rows import descending, rows, within_best_groups
from support.selection import quick
from support.simulator import interpret, simulated

from pallas_kernels.routing import top_k as kernels
from pallas_kernels.routing.plan import Groups, Weighing, unavailable_reason

PLAIN = Weighing(normalize=False, epsilon=0.0, scale=1.0)


def choose(k, weighing=PLAIN, groups=None, **operands):
    call = functools.partial(kernels.top_k, k=k, weighing=weighing, groups=groups)
    arrays = {name: jnp.asarray(array) for name, array in operands.items()}
    return interpret(lambda: call(**arrays, interpret=simulator.INTERPRETER))


@simulated
@pytest.mark.parametrize("kind", quick(["ties", "special"], "special"))
@pytest.mark.parametrize(
    ("number", "columns", "k"), quick([(5, 64, 3), (2, 60, 4), (1, 3, 3)], (5, 64, 3))
)
def test_choices_are_the_first_of_the_total_order(number, columns, k, kind):
    values, gathered = rows(number, columns, kind), rows(number, columns, "random", 1)
    chosen = choose(k, values=values, gathered=gathered)
    want = descending(values)[:, :k]
    np.testing.assert_array_equal(chosen.columns, want)
    np.testing.assert_array_equal(chosen.scores, np.take_along_axis(gathered, want, axis=1))
    np.testing.assert_array_equal(chosen.weights, chosen.scores)


@simulated
@pytest.mark.parametrize("columns", quick([40, 64, 3], 40))
def test_weights_are_of_the_softmax(columns):
    values, k = rows(3, columns, "random"), 3
    chosen = choose(k, Weighing(normalize=True, epsilon=0.25, scale=2.5), values=values)
    exact = np.exp(values.astype(np.float64))
    exact /= exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chosen.softmax, exact, rtol=1e-6)
    want = descending(values)[:, :k]
    np.testing.assert_array_equal(chosen.columns, want)
    np.testing.assert_array_equal(chosen.scores, np.take_along_axis(chosen.softmax, want, axis=1))
    scores = np.take_along_axis(exact, want, axis=1)
    weights = 2.5 * scores / (scores.sum(axis=1, keepdims=True) + 0.25)
    np.testing.assert_allclose(chosen.weights, weights, rtol=1e-6)


@simulated
@pytest.mark.parametrize("kind", quick(["random", "ties"], "ties"))
@pytest.mark.parametrize(
    ("columns", "groups"),
    quick(
        [
            (64, Groups(8, 3, 2)),
            (64, Groups(32, 3, 2)),
            (160, Groups(8, 3, 1)),
            (32, Groups(1, 1, 1)),
        ],
        (64, Groups(8, 3, 2)),
    ),
)
def test_choices_are_of_the_best_groups(columns, groups, kind):
    values, scores = rows(5, columns, kind), rows(5, columns, kind, 1)
    chosen = choose(2, groups=groups, values=values, gathered=values, scores=scores)
    args = groups.number, groups.kept, groups.best
    want = descending(within_best_groups(values, scores, *args))[:, :2]
    np.testing.assert_array_equal(chosen.columns, want)


def test_what_does_not_fit_is_refused():
    assert unavailable_reason(1024, 32) is None
    assert "1024 columns, not 1025" in unavailable_reason(1025, 1)
    assert "32 choices, not 33" in unavailable_reason(64, 33)
    assert "not 5 groups of 160" in unavailable_reason(160, 4, Groups(5, 2, 1))
    assert "not 32 groups of 32" in unavailable_reason(32, 4, Groups(32, 8, 2))
    values = jnp.zeros((2, 1025), jnp.float32)
    with pytest.raises(ValueError, match="at most 1024 columns"):
        kernels.top_k(values, 4, PLAIN)
