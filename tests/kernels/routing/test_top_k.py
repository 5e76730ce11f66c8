"""The top-k kernel in Pallas' GPU interpreter; tests/moe/test_top_k.py runs it on GPUs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import simulator
from support.rows import descending, rows, within_best_groups
from support.selection import quick
from support.simulator import interpret, simulated

from pallas_kernels.routing import top_k as kernels
from pallas_kernels.routing.plan import Groups, unavailable_reason


def chosen(values, gathered, k, **options):
    arrays = [jnp.asarray(array) for array in (values, gathered)]
    return interpret(lambda: kernels.top_k(*arrays, k, interpret=simulator.INTERPRETER, **options))


@simulated
@pytest.mark.parametrize("kind", quick(["ties", "special"], "special"))
@pytest.mark.parametrize(
    ("number", "columns", "k"), quick([(5, 64, 3), (2, 60, 4), (1, 3, 3)], (5, 64, 3))
)
def test_choices_are_the_first_of_the_total_order(number, columns, k, kind):
    values, gathered = rows(number, columns, kind), rows(number, columns, "random", 1)
    topk_idx, of_chosen = chosen(values, gathered, k)
    want = descending(values)[:, :k]
    np.testing.assert_array_equal(topk_idx, want)
    np.testing.assert_array_equal(of_chosen, np.take_along_axis(gathered, want, axis=1))


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
    options = dict(groups=groups, scores=jnp.asarray(scores))
    topk_idx, _ = chosen(values, values, 2, **options)
    args = groups.number, groups.kept, groups.best
    want = descending(within_best_groups(values, scores, *args))[:, :2]
    np.testing.assert_array_equal(topk_idx, want)


def test_what_does_not_fit_is_refused():
    assert unavailable_reason(1024, 32) is None
    assert "1024 columns, not 1025" in unavailable_reason(1025, 1)
    assert "32 choices, not 33" in unavailable_reason(64, 33)
    assert "not 5 groups of 160" in unavailable_reason(160, 4, Groups(5, 2, 1))
    assert "not 32 groups of 32" in unavailable_reason(32, 4, Groups(32, 8, 2))
    values = jnp.zeros((2, 1025), jnp.float32)
    with pytest.raises(ValueError, match="at most 1024 columns"):
        kernels.top_k(values, values, 4)
