"""Tests of counting a trace's rows and rank changes."""

from __future__ import annotations

import numpy as np

from jax_ep.placement import Placement
from jax_ep.placement.traffic import traffic


def test_a_step_worked_out_by_hand():
    """Rows and rank changes must be those counted by hand, for two ranks with two tokens each."""
    placement = Placement.in_order(num_experts=4, num_slots=4, num_ranks=2, layers=2)
    step = np.array([
        [[0, 1], [2, 3], [0, 2], [3, -1], [0, 0]],
        [[0, 2], [2, 3], [1, 0], [0, 1], [0, 0]],
    ])  # fmt: skip
    rows, wire_rows, rank_changes = traffic(step, placement)
    np.testing.assert_array_equal(rows, [[3, 4], [5, 3]])
    # In layer 0, token 1 sends one row to rank 1 for both choices, and token 2 one to rank 0.
    np.testing.assert_array_equal(wire_rows, [[1, 1], [2, 2]])
    # The tokens have 4, 4, 4 and 2 pairs of choices in the two layers; 2, 0, 2 and 2 change rank.
    np.testing.assert_allclose(rank_changes, [6 / 14])
