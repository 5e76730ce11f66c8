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


def test_fair_rows_fill_the_buffer_and_others_are_past_it():
    recv_counts = jnp.asarray([[3, 0, 5], [4, 1, 0]], jnp.int32)
    topk_idx = jnp.asarray([[[0, 2]] * 5, [[0, 1]] * 5], jnp.int32)
    places = jnp.asarray([[[t, t] for t in range(5)]] * 2, jnp.int32)
    groups = jax.jit(routes.row_groups, static_argnums=(1, 2, 3))(recv_counts, 8, 1, "fair")
    np.testing.assert_array_equal(groups.expert_counts, [3, 1, 3])
    np.testing.assert_array_equal(groups.dropped_counts, [4, 0, 2])
    assert (groups.num_dropped, groups.rows_needed) == (6, 13)
    receive_rows = functools.partial(
        routes.receive_rows, rank=jnp.int32(0), expert_alignment=1, fair_capacity=8
    )
    rows = np.asarray(jax.jit(receive_rows)(topk_idx, places, recv_counts))
    assert rows[0, :3].tolist() == [[0, 4], [1, 5], [2, 6]]
    assert rows[0, 3, 1] == rows[1, 0, 0] == 8
    assert rows[1, 0, 1] == 3


def test_choices_of_no_expert_are_not_counted():
    topk_idx = jnp.asarray([[0, 2], [2, -1], [4, -1]], jnp.int32)
    np.testing.assert_array_equal(routes.count_experts(topk_idx, 4), [1, 0, 2, 0])
