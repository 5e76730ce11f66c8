"""Tests of the top-k kernel by the code that it emits; tests/moe/test_top_k.py runs it on GPUs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import emitted
from support.kernels import needs_kernels
from support.rows import choices, descending, rows
from support.selection import quick

from pallas_kernels.routing import top_k as kernels
from pallas_kernels.routing.plan import Groups, Weighing, unavailable_reason

PLAIN = Weighing(normalize=False, epsilon=0.0, scale=1.0)


def choose(k, weighing=PLAIN, **options):
    return emitted.run_kernel(functools.partial(kernels.top_k, k=k, weighing=weighing, **options))


@needs_kernels
@pytest.mark.parametrize("kind", quick(["ties", "special"], "special"))
@pytest.mark.parametrize(
    ("number", "columns", "k"), quick([(5, 64, 3), (2, 60, 4), (1, 3, 3)], (5, 64, 3))
)
def test_choices_are_the_first_of_the_total_order(number, columns, k, kind):
    logits, gathered = rows(number, columns, kind), rows(number, columns, "random", 1)
    chosen = choose(k, logits=logits, gathered=gathered)
    want = descending(logits)[:, :k]
    np.testing.assert_array_equal(chosen.columns, want)
    np.testing.assert_array_equal(chosen.chosen, np.take_along_axis(gathered, want, axis=1))
    np.testing.assert_array_equal(chosen.weights, chosen.chosen)


@needs_kernels
@pytest.mark.parametrize("columns", quick([40, 64, 3], 40))
def test_weights_are_of_the_softmax(columns):
    logits, k = rows(3, columns, "random"), 3
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(axis=1, keepdims=True)
    want = descending(logits)[:, :k]
    scores = np.take_along_axis(exact, want, axis=1)
    for normalize, factor in ((True, 1 / scores.sum(axis=1, keepdims=True)), (False, 1)):
        weighing = Weighing(normalize, epsilon=0.0, scale=2.5)
        chosen = choose(k, weighing, softmax=True, logits=logits)
        np.testing.assert_allclose(chosen.softmax, exact, rtol=1e-6)
        np.testing.assert_array_equal(chosen.columns, want)
        weighed = logits if normalize else chosen.softmax
        np.testing.assert_array_equal(chosen.chosen, np.take_along_axis(weighed, want, axis=1))
        np.testing.assert_allclose(chosen.weights, 2.5 * scores * factor, rtol=1e-6)


@needs_kernels
@pytest.mark.parametrize("shift", [0, -40, -300])
@pytest.mark.parametrize("epsilon", [0.0, 1e-20])
def test_weights_are_of_scores_of_any_size(epsilon, shift):
    logits, k = rows(3, 40, "random") + np.float32(shift), 3
    want = np.sort(logits.astype(np.float64), axis=1)[:, : -k - 1 : -1]
    scores = np.exp(want) / (1 + np.exp(want))
    weighing = Weighing(normalize=True, epsilon=epsilon, scale=1.0)
    sigmoids = choose(k, dataclasses.replace(weighing, sigmoid=True), logits=logits)
    exponentials = choose(k, weighing, logits=logits)
    for got, of in ((sigmoids, scores), (exponentials, np.exp(want))):
        weights = of / (of.sum(axis=1, keepdims=True) + epsilon)
        rtol = 2e-5 if epsilon else 1e-6
        np.testing.assert_allclose(got.weights, weights, rtol, atol=1e-37)
    nothing = choose(k, dataclasses.replace(weighing, sigmoid=True), logits=logits - np.inf)
    np.testing.assert_array_equal(nothing.weights, 0.0)


GROUPS = [None, Groups(8, 3, 1), Groups(8, 3, 2)]


@needs_kernels
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("num_biases", [1, 5])
@pytest.mark.parametrize("columns", quick([64, 96], 64))
def test_sums_with_a_bias_are_compared_in_float32(columns, num_biases, groups):
    """Of columns whose exact sums differ but are equal in float32, the first must be chosen."""
    logits, compared = rows(5, columns, "random"), rows(5, columns, "random", 1)
    bias = rows(num_biases, columns, "ties", 2)
    for factor in (1, 2**-30):
        scaled = compared * np.float32(factor)
        chosen = choose(9, groups=groups, compared=scaled, bias=bias, logits=logits)
        want = choices(scaled + bias, 9, groups)
        np.testing.assert_array_equal(chosen.columns, want)
        np.testing.assert_array_equal(chosen.chosen, np.take_along_axis(logits, want, axis=1))


@needs_kernels
@pytest.mark.parametrize("columns", [64, 40])
def test_sigmoids_are_compared(columns):
    logits, bias = rows(5, columns, "random"), rows(1, columns, "ties", 1)
    chosen = choose(9, sigmoid=True, bias=bias, logits=logits)
    want = choices(np.asarray(jax.nn.sigmoid(logits)) + bias, 9)
    np.testing.assert_array_equal(chosen.columns, want)
    np.testing.assert_array_equal(chosen.chosen, np.take_along_axis(logits, want, axis=1))


@needs_kernels
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
    values = rows(5, columns, kind)
    chosen = choose(2, groups=groups, logits=values)
    np.testing.assert_array_equal(chosen.columns, choices(values, 2, groups))


def test_what_does_not_fit_is_refused():
    assert unavailable_reason(1024, 32) is None
    assert "1024 columns (experts), not 1025" in unavailable_reason(1025, 1)
    assert "32 choices of each row, not 33" in unavailable_reason(64, 33)
    assert "there are 5 groups and 160 columns" in unavailable_reason(160, 4, Groups(5, 2, 1))
    assert "there are 32 groups and 32 columns" in unavailable_reason(32, 4, Groups(32, 8, 2))
