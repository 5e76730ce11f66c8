"""Tests how slots are chosen for the experts that tokens chose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import per_rank
from support.loads import random_loads

from jax_ep.placement import Placement, balance, choose_slots


def slots_on_ranks(topk_idx, placed, num_ranks):
    """Returns the slots that each of the N ranks chooses for its experts topk_idx [N, T, K]."""

    def on_rank(idx):
        return choose_slots(idx, *jax.tree.leaves(placed), axis_name="expert")

    return np.asarray(jax.jit(per_rank(on_rank, num_ranks))(topk_idx))


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_slots_hold_the_experts_that_were_chosen(num_ranks, dtype):
    rng = np.random.default_rng(4)
    experts, num_slots = 12, 20
    load = random_loads("zipf", 1, experts, rng)
    placed = balance(load, num_slots=num_slots, num_ranks=num_ranks)
    topk_idx = rng.integers(-1, experts + 1, (num_ranks, 50, 3)).astype(dtype)
    slots = slots_on_ranks(topk_idx, placed[0], num_ranks)
    on_devices = jax.tree.map(jnp.asarray, placed[0])
    np.testing.assert_array_equal(slots, slots_on_ranks(topk_idx, on_devices, num_ranks))
    assert slots_on_ranks(topk_idx[:, :0], placed[0], num_ranks).shape == (num_ranks, 0, 3)
    is_choice = (topk_idx >= 0) & (topk_idx < experts)
    assert slots.dtype == np.int32
    np.testing.assert_array_equal(slots == -1, ~is_choice)
    np.testing.assert_array_equal(placed.expert_of_slot[0][slots[is_choice]], topk_idx[is_choice])
    rank_of_slot = np.arange(num_slots) // (num_slots // num_ranks)
    for rank in range(num_ranks):
        for expert in range(experts):
            copies = np.flatnonzero(placed.expert_of_slot[0] == expert)
            used = slots[rank][topk_idx[rank] == expert]
            if np.any(rank_of_slot[copies] == rank):
                assert np.all(rank_of_slot[used] == rank)
            else:
                counts = [np.sum(used == copy) for copy in copies]
                assert max(counts) - min(counts) <= 1


def test_single_choices_of_many_ranks_spread_over_copies():
    """Choices of one expert by ranks that have no copy of it must spread evenly over the copies."""
    slots = [0, 1, 2, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    placed = Placement.of([slots], num_experts=15, num_ranks=8)[0]
    topk_idx = np.zeros((8, 1, 1), np.int32)
    chosen = slots_on_ranks(topk_idx, placed, 8).ravel()
    assert chosen[0] == 0 and chosen[1] == 3
    assert sorted(chosen[2:]) == [0, 0, 0, 3, 3, 3]


def test_another_placement_compiles_nothing_anew():
    @jax.jit
    def run(topk_idx, placed):
        return choose_slots(topk_idx, *jax.tree.leaves(placed[0]), axis_name=())

    rng = np.random.default_rng(5)
    for _ in range(3):
        placed = balance(random_loads("zipf", 1, 6, rng), num_slots=8, num_ranks=1)
        run(jnp.zeros((4, 2), jnp.int32), placed)
    assert run._cache_size() == 1
