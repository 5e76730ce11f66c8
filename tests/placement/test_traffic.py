"""Tests of counting a trace's rows and rank changes, and of its choice of slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from support.loads import random_loads
from support.meshes import expert_mesh

from jax_ep.placement import Placement, balance, choose_slots
from jax_ep.placement.traffic import _slots, traffic


def test_a_step_worked_out_by_hand():
    """Rows and rank changes must be those counted by hand, for two ranks with two tokens each.

    The step has five tokens. The last one is left out, so that the ranks have equally many.
    """
    placement = Placement.in_order(num_experts=4, num_slots=4, num_ranks=2, layers=2)
    step = np.array([
        [[0, 1], [2, 3], [0, 2], [3, -1], [0, 0]],
        [[0, 2], [2, 3], [1, 0], [0, 1], [0, 0]],
    ])  # fmt: skip
    counted = traffic(step, placement)
    np.testing.assert_array_equal(counted.rows, [[3, 4], [5, 3]])
    # In layer 0, token 1 sends one row to rank 1 for both choices, and token 2 one to rank 0.
    np.testing.assert_array_equal(counted.wire_rows, [[1, 1], [2, 2]])
    # The tokens have 4, 4, 4 and 2 pairs of choices in the two layers; 2, 0, 2 and 2 change rank.
    np.testing.assert_allclose(counted.rank_changes, [6 / 14])


def test_slots_are_those_of_choose_slots():
    rng = np.random.default_rng(0)
    placed = balance(random_loads("zipf", 1, 12, rng), num_slots=20, num_ranks=4)[0]
    topk_idx = rng.integers(-1, 12, (4, 30, 3)).astype(np.int32)
    arrays = [jnp.asarray(a) for a in jax.tree.leaves(placed)]
    run = jax.shard_map(
        lambda idx: choose_slots(idx[0], *arrays, axis_name="expert")[None],
        mesh=expert_mesh(4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    np.testing.assert_array_equal(_slots(topk_idx, placed), jax.jit(run)(topk_idx))
