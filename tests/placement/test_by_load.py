"""Tests of balancing by load, compared with EPLB as its authors describe it."""

from __future__ import annotations

import cProfile
import pstats

import numpy as np
import pytest
from support.loads import random_loads

from jax_ep.placement import Placement, balance

# The example of EPLB's README has 12 experts, 16 slots, 4 groups, 2 hosts and 8 ranks.
PUBLISHED = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
PUBLISHED_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
EXAMPLE = dict(num_slots=16, num_ranks=8, num_hosts=2, num_groups=4)


def test_only_layers_past_a_threshold_are_placed_anew():
    even = Placement.in_order(num_experts=8, num_slots=8, num_ranks=4, layers=2)
    load = np.array([[2, 1, 1, 1, 1, 1, 1, 1], [9, 9, 1, 1, 1, 1, 1, 1]])
    sizes = dict(num_slots=8, num_ranks=4)
    placed = balance(load, **sizes, before=even, max_imbalance=1.4)
    assert placed[0] == even[0] and placed[1] == balance(load, **sizes)[1] != even[1]
    assert balance(load, **sizes, before=even, max_imbalance=1.3) == balance(load, **sizes)
    other = Placement.in_order(num_experts=8, num_slots=12, num_ranks=4, layers=2)
    with pytest.raises(ValueError, match="before must have num_slots=8 and num_ranks=4.* 12 and 4"):
        balance(load, **sizes, before=other)


def greedy_pack(load, num_packs):
    """Puts items, the heaviest first, into the lightest pack that is not full, by index."""
    packs = [[] for _ in range(num_packs)]
    for item in sorted(range(len(load)), key=lambda item: -load[item]):
        open_packs = [pack for pack in packs if len(pack) < len(load) // num_packs]
        min(open_packs, key=lambda pack: sum(load[i] for i in pack)).append(item)
    return packs


def eplb_busiest(load, num_slots, num_ranks, num_hosts, num_groups):
    """Returns the load of the busiest rank if the experts are placed by EPLB's method."""
    if num_groups % num_hosts:
        num_hosts = num_groups = 1
    size, busiest = len(load) // num_groups, 0.0
    group_load = [sum(load[g * size : (g + 1) * size]) for g in range(num_groups)]
    for groups in greedy_pack(group_load, num_hosts):
        own = [load[g * size + i] for g in groups for i in range(size)]
        copies = [1] * len(own)
        while sum(copies) < num_slots // num_hosts:
            hottest = max(range(len(own)), key=lambda e: own[e] / copies[e])
            copies[hottest] += 1
        shares = [w / c for w, c in zip(own, copies, strict=True) for _ in range(c)]
        for pack in greedy_pack(shares, num_ranks // num_hosts):
            busiest = max(busiest, sum(shares[i] for i in pack))
    return busiest


def test_the_published_example_is_balanced_as_well_or_better():
    published = Placement.of(PUBLISHED_SLOTS, num_experts=12, num_ranks=8).rank_load(PUBLISHED)
    got = balance(PUBLISHED, **EXAMPLE)
    assert np.all(got.rank_load(PUBLISHED).max(axis=1) <= published.max(axis=1))
    for layer, load in enumerate(PUBLISHED):
        assert eplb_busiest(list(load), **EXAMPLE) == pytest.approx(published[layer].max())


# Each case is (experts, slots, ranks, hosts, groups).
SIZES = [
    (60, 64, 8, 1, 1),
    (64, 96, 16, 2, 8),
    (12, 16, 8, 2, 4),
    (32, 32, 8, 1, 1),
    (16, 48, 4, 2, 1),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_never_busier_than_eplb_and_better_on_average(size):
    num_experts, num_slots, num_ranks, num_hosts, num_groups = size
    options = dict(
        num_slots=num_slots, num_ranks=num_ranks, num_hosts=num_hosts, num_groups=num_groups
    )
    rng = np.random.default_rng(num_slots)
    ratios = []
    for kind in ("zipf", "sparse", "lognormal"):
        load = random_loads(kind, 12, num_experts, rng)
        placed = balance(load, **options)
        assert np.all(placed.expert_of_slot >= 0)
        got = placed.rank_load(load).max(axis=1)
        want = np.array([eplb_busiest(list(w), **options) for w in load])
        assert np.all(got <= want * (1 + 1e-9)), kind
        np.testing.assert_allclose(placed.rank_load(load).sum(axis=1), load.sum(axis=1))
        ratios += list(got / np.maximum(want, 1e-30))
    assert np.mean(ratios) < 0.9995


def test_groups_stay_on_one_host():
    rng = np.random.default_rng(1)
    load = random_loads("lognormal", 6, 64, rng)
    placed = balance(load, num_slots=96, num_ranks=16, num_hosts=4, num_groups=8)
    host = np.arange(96) // 24
    for slots in placed.expert_of_slot:
        hosts_of_group = [{*host[slots // 8 == group]} for group in range(8)]
        assert all(len(hosts) == 1 for hosts in hosts_of_group)
        assert sorted(min(hosts) for hosts in hosts_of_group) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_large_model_takes_few_calls():
    """A large model took 0.3 million calls of functions, less than a second."""
    load = random_loads("zipf", 60, 256, np.random.default_rng(2))
    profile = cProfile.Profile()
    placed = profile.runcall(balance, load, num_slots=320, num_ranks=64)
    assert pstats.Stats(profile).total_calls < 3e6
    busiest = placed.rank_load(load).max(axis=1) / placed.rank_load(load).mean(axis=1)
    assert busiest.max() < 1.1


def test_no_load_at_all():
    placed = balance(np.zeros((1, 6)), num_slots=8, num_ranks=4)
    assert np.all(placed.num_copies >= 1) and not placed.rank_load(np.zeros((1, 6))).any()
