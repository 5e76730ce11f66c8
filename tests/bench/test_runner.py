"""Tests of the comparison of results: it sees one wrong row, one NaN and one wrong integer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.bench.runner import agree
from jax_ep.formats import FLOAT8_ROWS, quantize

X = np.random.default_rng(0).standard_normal((40, 128)).astype(np.float32)
RESULTS = {"out": X, "counts": np.arange(4)}


@pytest.mark.parametrize("wrong", [1.1, np.nan])
def test_one_wrong_row_is_seen_unless_it_is_an_exception(wrong):
    spoiled = RESULTS | {"out": jnp.asarray(X).at[7].multiply(wrong)}
    with pytest.raises(AssertionError, match="'out'.*1 of 40 rows differ"):
        agree(spoiled, RESULTS, 0.02)
    agree(spoiled, RESULTS, 0.02, exceptions=0.025)
    if not np.isnan(wrong):
        agree(spoiled, RESULTS, 0.06)


def test_integers_and_shapes_must_be_equal():
    with pytest.raises(AssertionError, match="counts"):
        agree(RESULTS | {"counts": jnp.arange(4) + 1}, RESULTS, 1.0)
    with pytest.raises(AssertionError, match="shape"):
        agree(RESULTS | {"out": RESULTS["out"][1:]}, RESULTS, 1.0)
    with pytest.raises(AssertionError):
        agree({"out": RESULTS["out"]}, RESULTS, 1.0)


def test_quantized_results_are_compared_by_value():
    quantized = quantize(jnp.asarray(X), FLOAT8_ROWS)
    agree(quantized, quantized, 0.0)
    agree(quantized, RESULTS["out"], 2**-4)
    with pytest.raises(AssertionError, match="rows differ"):
        agree(quantized, 1.5 * RESULTS["out"], 2**-4)
