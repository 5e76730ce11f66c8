"""Tests of the top-k kernel in Pallas' GPU interpreter; tests/moe/test_top_k.py runs it on GPUs."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support import simulator
from support.rows import (
    SUMS,
    by_sums,
    comparable,
    descending,
    rows,
    sums,
    total_order,
    within_best_groups,
)
from support.selection import quick
from support.simulator import interpret, simulated

from pallas_kernels.routing import order
from pallas_kernels.routing import top_k as kernels
from pallas_kernels.routing.plan import Groups, Weighing, unavailable_reason

PLAIN = Weighing(normalize=False, epsilon=0.0, scale=1.0)


def choose(k, weighing=PLAIN, groups=None, scores="logit", softmax=False, **operands):
    call = functools.partial(
        kernels.top_k, k=k, weighing=weighing, groups=groups, scores=scores, softmax=softmax
    )
    arrays = {name: jnp.asarray(array) for name, array in operands.items()}
    return interpret(lambda: call(**arrays, interpret=simulator.INTERPRETER))


@simulated
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


@simulated
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


@simulated
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


def assert_compares_exactly(scores, bias, logits, groups):
    """The kernel must choose the columns with the largest exact sums of score and bias.

    The exact sums must decide between sums that are equal if they are rounded to float32, and
    between equal exact sums the logits. `bias` is [1, columns] or [rows, columns].
    """
    logits = comparable(logits, groups)
    chosen = choose(9, groups=groups, scores="softmax", rounded=scores, bias=bias, logits=logits)
    want = by_sums(scores, bias, logits, groups)[:, :9]
    np.testing.assert_array_equal(chosen.columns, want)
    np.testing.assert_array_equal(chosen.chosen, np.take_along_axis(logits, want, axis=1))


GROUPS = [None, Groups(8, 3, 1), Groups(8, 3, 2)]


@simulated
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_sums_with_one_bias_are_compared_exactly(groups):
    scores, bias, logits = sums(5, 64, "unlike beyond")
    assert_compares_exactly(scores, bias[None], logits, groups)


@pytest.mark.slow
@simulated
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("columns", [64, 96])
def test_sums_with_a_bias_for_each_row_are_compared_exactly(columns, groups):
    """The rows are of all kinds of sums that are equal if they are rounded to float32."""
    of_kinds = [sums(5, columns, kind) for kind in SUMS]
    each = [
        (scores, np.broadcast_to(bias, scores.shape), logits) for scores, bias, logits in of_kinds
    ]
    scores, bias, logits = (np.concatenate(parts) for parts in zip(*each, strict=True))
    assert_compares_exactly(scores, bias, logits, groups)


@simulated
@pytest.mark.parametrize("shift", [0, 18])
def test_sums_of_sigmoids_are_made_of_the_logits(shift):
    """The kernel must choose columns by the exact order of the sums sigmoid(logit) + bias.

    With a `shift` of 18, the sigmoids round to 1 in float32, so the logits must give the order.
    """
    logits = rows(5, 64, "random") + np.float32(shift)
    bias = rows(5, 64, "random", 1) * np.float32(1e-9 if shift else 0.1)
    chosen = choose(9, scores="sigmoid", bias=bias, logits=logits)
    exact = bias.astype(np.float64) - 1 / (1 + np.exp(logits.astype(np.float64)))
    want = np.argsort(-exact, axis=1, kind="stable")[:, :9]
    np.testing.assert_array_equal(chosen.columns, want)


@simulated
def test_columns_that_are_not_kept_count_as_infinitely_low():
    logits, bias = rows(5, 40, "ties"), rows(1, 40, "ties", 1)
    kept = (rows(5, 40, "random", 2) > 0).astype(np.int32)
    chosen = choose(9, bias=bias, logits=logits, kept=kept)
    want = np.argsort(-np.where(kept, logits + bias, -np.inf), axis=1, kind="stable")
    ordered = np.lexsort((-total_order(logits), -np.where(kept, logits + bias, -np.inf)))[:, :9]
    assert np.any(want[:, :9] != ordered)
    np.testing.assert_array_equal(chosen.columns, ordered)


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
    args = groups.number, groups.kept, groups.best
    if groups.best == 1:
        chosen = choose(2, groups=groups, logits=values)
        want = within_best_groups(values, values, *args)
    else:
        chosen = choose(2, groups=groups, scores="softmax", logits=values, rounded=scores)
        want = within_best_groups(values, scores, *args, of_ties="softmax")
    np.testing.assert_array_equal(chosen.columns, descending(want)[:, :2])


@simulated
@pytest.mark.parametrize("scores", quick(list(order.OF_TWO), "sigmoid"))
def test_groups_of_equal_sums_are_those_of_larger_scores(scores):
    """The kernel must keep the group whose two best scores have the largest exact sum.

    The groups' sums may be equal in float32: with a `shift` of the logits, sigmoids are near 1,
    near 0, or below float32's range.
    """
    for shift in (0, 18, -18, -120):
        logits = rows(5, 64, "random") + np.float32(shift)
        two = np.sort(logits.astype(np.float64).reshape(5, 8, 8))[..., -2:]
        log_score, other = {
            "logit": (two, None),
            "softmax": (two, None),
            "sqrt_softplus": (two / 2, None),
            "sigmoid": (-np.logaddexp(0, -two), -np.logaddexp(0, two)),
        }[scores]
        of_group = np.logaddexp(*np.moveaxis(log_score, -1, 0))
        if scores == "logit":
            of_group = two.sum(axis=-1)
        elif other is not None and shift > 0:
            of_group = -np.logaddexp(*np.moveaxis(other, -1, 0))
        best = np.argsort(-of_group, axis=-1)[:, 0]
        chosen = choose(
            2,
            groups=Groups(8, 1, 2),
            scores=scores,
            logits=logits,
            rounded=np.zeros_like(logits),
            bias=np.full((1, 64), 12, np.float32),
        )
        np.testing.assert_array_equal(np.asarray(chosen.columns) // 8, best[:, None] + [[0, 0]])


def test_what_does_not_fit_is_refused():
    assert unavailable_reason(1024, 32) is None
    assert "1024 columns (experts), not 1025" in unavailable_reason(1025, 1)
    assert "32 choices of each row, not 33" in unavailable_reason(64, 33)
    assert "there are 5 groups and 160 columns" in unavailable_reason(160, 4, Groups(5, 2, 1))
    assert "there are 32 groups and 32 columns" in unavailable_reason(32, 4, Groups(32, 8, 2))
    logits = jnp.zeros((2, 1025), jnp.float32)
    with pytest.raises(ValueError, match="at most 1024 columns"):
        kernels.top_k(logits, 4, PLAIN)
