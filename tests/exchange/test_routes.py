"""Tests of routes with overflow="fair", which limits the rows of each expert by a quota.

test_api.py tests all other routes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import reference
from jax_ep.exchange import routes


@pytest.mark.parametrize("alignment", [1, 3, 8])
def test_the_fair_quota_is_that_of_the_reference(alignment):
    rng = np.random.default_rng(alignment)
    counts = rng.integers(0, 40, (200, 6)) * rng.integers(0, 2, (200, 6))
    for capacity in (1, 7, 24, 100, 400):
        quota = functools.partial(routes.fair_quota, capacity=capacity, expert_alignment=alignment)
        got = jax.jit(jax.vmap(quota))(jnp.asarray(counts, jnp.int32))
        wanted = [reference.fair_quota(c.tolist(), capacity, alignment) for c in counts]
        blocks = np.minimum(counts, np.asarray(got)[:, None])
        # Compare the rows that the quotas keep of each expert: min(count, quota). Two quotas may
        # differ and keep the same rows.
        np.testing.assert_array_equal(blocks, np.minimum(counts, np.asarray(wanted)[:, None]))
        assert got.dtype == jnp.int32
