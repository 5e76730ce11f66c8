"""Balance against EPLB as its authors describe it, planted affinity, and slots that are chosen."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.meshes import expert_mesh

from jax_ep import placement
from jax_ep.placement import Placement, balance, choose_slots, place_by_affinity

# The example of EPLB's README: 12 experts, 16 slots, 4 groups, 2 hosts, 8 ranks.
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


def greedy_pack(load, num_packs):
    """Items in falling order, each to the lightest pack that is not full; pack -> items."""
    packs = [[] for _ in range(num_packs)]
    for item in sorted(range(len(load)), key=lambda item: -load[item]):
        open_packs = [pack for pack in packs if len(pack) < len(load) // num_packs]
        min(open_packs, key=lambda pack: sum(load[i] for i in pack)).append(item)
    return packs


def eplb_busiest(load, num_slots, num_ranks, num_hosts, num_groups):
    """The largest rank load that EPLB's three steps leave: groups to hosts, copies, ranks."""
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


def random_loads(kind, layers, num_experts, rng):
    if kind == "zipf":
        ranks = np.stack([rng.permutation(num_experts) for _ in range(layers)])
        return 1e4 / (ranks + 1.0)
    if kind == "sparse":
        return rng.poisson(0.7, (layers, num_experts)).astype(float)
    return rng.lognormal(0, 1.2, (layers, num_experts))


SIZES = [  # experts, slots, ranks, hosts, groups
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


def test_a_large_model_takes_seconds():
    load = random_loads("zipf", 60, 256, np.random.default_rng(2))
    start = time.process_time()
    placed = balance(load, num_slots=320, num_ranks=64)
    assert time.process_time() - start < 30
    busiest = placed.rank_load(load).max(axis=1) / placed.rank_load(load).mean(axis=1)
    assert busiest.max() < 1.1


def test_arrays_agree_and_do_not_change_shape_with_the_load():
    rng = np.random.default_rng(3)
    shapes = set()
    for kind in ("zipf", "lognormal"):
        placed = balance(random_loads(kind, 3, 12, rng), num_slots=20, num_ranks=4)
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(placed)))
        for layer in range(3):
            for expert in range(12):
                slots = placed.slots_of_expert[layer, expert]
                held = np.flatnonzero(placed.expert_of_slot[layer] == expert)
                np.testing.assert_array_equal(slots[: len(held)], held)
                assert np.all(slots[len(held) :] == -1)
                assert placed.num_copies[layer, expert] == len(held)
    assert shapes == {((3, 20), (3, 12, 9), (3, 12))}


def test_no_load_at_all():
    placed = balance(np.zeros((1, 6)), num_slots=8, num_ranks=4)
    assert np.all(placed.num_copies >= 1) and not placed.rank_load(np.zeros((1, 6))).any()


@pytest.mark.parametrize("name", ["placement.json", "placement.npz"])
def test_saved_and_loaded(name, tmp_path):
    placed = balance(PUBLISHED, **EXAMPLE)
    placed.save(tmp_path / name)
    loaded = Placement.load(tmp_path / name)
    jax.tree.map(np.testing.assert_array_equal, loaded, placed)
    assert loaded.num_ranks == 8
    assert (tmp_path / name).stat().st_size < 2000


def slots_on_ranks(topk_idx, placed, num_ranks):
    """choose_slots on every rank, each with its part of topk_idx [N, T, K]."""
    layer = jax.tree.map(lambda a: jnp.asarray(a[0]), placed)
    arrays = layer.expert_of_slot, layer.slots_of_expert, layer.num_copies
    run = jax.shard_map(
        lambda idx: choose_slots(idx[0], *arrays, axis_name="expert")[None],
        mesh=expert_mesh(num_ranks),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    return np.asarray(jax.jit(run)(topk_idx))


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_slots_hold_the_experts_that_were_chosen(num_ranks, dtype):
    rng = np.random.default_rng(4)
    experts, num_slots = 12, 20
    load = random_loads("zipf", 1, experts, rng)
    placed = balance(load, num_slots=num_slots, num_ranks=num_ranks)
    topk_idx = rng.integers(-1, experts + 1, (num_ranks, 50, 3)).astype(dtype)
    slots = slots_on_ranks(topk_idx, placed, num_ranks)
    is_choice = (topk_idx >= 0) & (topk_idx < experts)
    assert slots.dtype == np.int32
    np.testing.assert_array_equal(slots == -1, ~is_choice)
    np.testing.assert_array_equal(placed.expert_of_slot[0][slots[is_choice]], topk_idx[is_choice])
    rank_of_slot = np.arange(num_slots) // (num_slots // num_ranks)
    for rank in range(num_ranks):
        for expert in range(experts):
            copies = np.flatnonzero(placed.expert_of_slot[0] == expert)
            used = slots[rank][topk_idx[rank] == expert]
            here = copies[rank_of_slot[copies] == rank]
            if len(here):
                assert np.all(rank_of_slot[used] == rank)
            else:
                counts = [np.sum(used == copy) for copy in copies]
                assert max(counts) - min(counts) <= 1


def test_single_choices_of_many_ranks_spread_over_copies():
    """As in decoding: each rank has one token, and no copy."""
    slots = [0, 1, 2, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    placed = Placement.of([slots], num_experts=15, num_ranks=8)
    topk_idx = np.zeros((8, 1, 1), np.int32)
    chosen = slots_on_ranks(topk_idx, placed, 8).ravel()
    assert chosen[0] == 0 and chosen[1] == 3
    assert sorted(chosen[2:]) == [0, 0, 0, 3, 3, 3]


def test_another_placement_compiles_nothing_anew():
    traced = []

    @functools.partial(
        jax.shard_map, mesh=expert_mesh(1), in_specs=(P("expert"), P()), out_specs=P("expert")
    )
    def run(topk_idx, placed):
        traced.append(1)
        layer = jax.tree.map(lambda a: a[0], placed)
        return choose_slots(
            topk_idx,
            layer.expert_of_slot,
            layer.slots_of_expert,
            layer.num_copies,
            axis_name="expert",
        )

    run = jax.jit(run)
    rng = np.random.default_rng(5)
    for _ in range(3):
        placed = balance(random_loads("zipf", 1, 6, rng), num_slots=8, num_ranks=1)
        run(jnp.zeros((4, 2), jnp.int32), placed)
    assert len(traced) == 1


def changes(trace, placed, num_parts):
    """The share of pairs of choices of successive layers that are on different parts."""
    num_slots = placed.expert_of_slot.shape[1]
    part = placed.slots_of_expert[:, :, 0] // (num_slots // num_parts)
    at = np.stack([part[layer][choices] for layer, choices in enumerate(trace)])
    return np.mean(at[:-1, :, :, None] != at[1:, :, None, :])


def planted(rng, layers, tokens, top_k, num_experts, num_clusters, noise):
    """Tokens of a cluster choose among its own experts of each layer, but for some noise."""
    size = num_experts // num_clusters
    members = np.stack([rng.permutation(num_experts) for _ in range(layers)])
    cluster = np.arange(tokens) % num_clusters
    own = (
        cluster[:, None] * size
        + rng.permuted(np.tile(np.arange(size), (layers, tokens, 1)), axis=2)[..., :top_k]
    )
    trace = np.stack([members[layer][own[layer]] for layer in range(layers)])
    stray = rng.random(trace.shape) < noise
    return np.where(stray, rng.integers(0, num_experts, trace.shape), trace), members


@pytest.mark.parametrize(
    "num_ranks, num_hosts, num_experts, top_k",
    [(4, 1, 32, 2), (8, 2, 32, 1), (8, 1, 60, 2)],
)
def test_planted_affinity_is_found(num_ranks, num_hosts, num_experts, top_k):
    rng = np.random.default_rng(7)
    clusters = num_ranks if num_experts % num_ranks == 0 else 4
    trace, _ = planted(rng, 5, 4000, top_k, num_experts, clusters, noise=0.1)
    placed = place_by_affinity(trace, num_ranks=num_ranks, num_hosts=num_hosts)
    slots = placed.expert_of_slot.shape[1]
    assert slots == -(-num_experts // num_ranks) * num_ranks and np.all(placed.num_copies == 1)
    load = np.stack([np.bincount(choices.ravel(), minlength=num_experts) for choices in trace])
    per_rank = placed.rank_load(load)
    assert np.all(per_rank.max(axis=1) <= 1.05 * per_rank.mean(axis=1))
    shuffled = np.stack([rng.permutation(placed.expert_of_slot[0]) for _ in trace])
    random = Placement.of(shuffled, num_experts=num_experts, num_ranks=num_ranks)
    if clusters == num_ranks:
        # A pair stays if neither choice strays; a stray one stays by chance.
        stays = 0.9**2 + (1 - 0.9**2) / num_ranks
        assert changes(trace, placed, num_ranks) < 1 - stays + 0.03
    assert changes(trace, placed, num_ranks) < 0.8 * changes(trace, random, num_ranks)
    if num_hosts > 1:
        assert changes(trace, placed, num_hosts) < 0.5 * changes(trace, random, num_hosts)


def test_affinity_gives_way_to_balance():
    """All tokens visit the same two experts of each layer, and a limit keeps them apart."""
    rng = np.random.default_rng(8)
    trace = np.where(rng.random((3, 2000, 1)) < 0.5, 0, 1)
    trace[:, :, :][rng.random(trace.shape) < 0.2] = 5
    placed = place_by_affinity(trace, num_ranks=2, num_experts=8)
    load = np.stack([np.bincount(choices.ravel(), minlength=8) for choices in trace])
    slots = placed.slots_of_expert[:, :, 0] // 4
    assert np.all(slots[:, 0] != slots[:, 1])
    assert placed.rank_load(load).max() < 0.65 * load[0].sum()


def test_affinity_of_a_large_model_takes_seconds():
    rng = np.random.default_rng(9)
    trace, _ = planted(rng, 60, 2000, 8, 256, 16, noise=0.3)
    start = time.process_time()
    placed = place_by_affinity(trace, num_ranks=64)
    assert time.process_time() - start < 120
    load = np.stack([np.bincount(choices.ravel(), minlength=256) for choices in trace])
    per_rank = placed.rank_load(load)
    assert np.all(per_rank.max(axis=1) <= 1.05 * per_rank.mean(axis=1))


def test_affinity_with_choices_of_no_expert_and_one_layer():
    placed = place_by_affinity(np.array([[[0, -1], [2, 1], [3, -1]]]), num_ranks=2)
    assert sorted(placed.expert_of_slot[0]) == [0, 1, 2, 3]


LOAD = np.ones((2, 12))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: balance(LOAD[0], num_slots=16, num_ranks=8), ValueError, r"load must .*\(12,\)"),
        (lambda: balance(-LOAD, num_slots=16, num_ranks=8), ValueError, "load must .*negative"),
        (lambda: balance(LOAD, num_slots=12, num_ranks=8), ValueError, "num_slots must .* is 12"),
        (lambda: balance(LOAD, num_slots=8, num_ranks=8), ValueError, "num_slots must .* is 8"),
        (
            lambda: balance(LOAD, num_slots=16, num_ranks=8, num_hosts=3),
            ValueError,
            "num_ranks must be a multiple of num_hosts=3, but is 8",
        ),
        (
            lambda: balance(LOAD, num_slots=16, num_ranks=8, num_groups=5),
            ValueError,
            "num_groups must divide the 12 experts .* but is 5",
        ),
        (
            lambda: balance(LOAD, num_slots=16, num_ranks=8).rank_load(LOAD[:1]),
            ValueError,
            r"load must have shape .*\(2, 12\), but has shape \(1, 12\)",
        ),
        (
            lambda: Placement.of([[0, 1, 1, 1]], num_experts=3, num_ranks=2),
            ValueError,
            "no slot for expert 2 in layer 0",
        ),
        (
            lambda: Placement.of([[0, 1, 2, 3]], num_experts=3, num_ranks=2),
            ValueError,
            "ids below num_experts=3.* -?[0-9]+ to 3",
        ),
        (
            lambda: place_by_affinity(np.zeros((2, 4), int), num_ranks=2),
            ValueError,
            r"trace must .*\(2, 4\)",
        ),
        (
            lambda: place_by_affinity(np.full((2, 4, 1), 7), num_ranks=2, num_experts=4),
            ValueError,
            "num_experts must be above the largest id of trace, 7, but is 4",
        ),
        (
            lambda: place_by_affinity(np.zeros((2, 4, 1), int), num_ranks=2, max_imbalance=0.9),
            ValueError,
            "max_imbalance must be at least 1, but is 0.9",
        ),
        (lambda: Placement.load("placement.txt"), ValueError, "path must end in .json or .npz"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
    assert placement.__doc__
