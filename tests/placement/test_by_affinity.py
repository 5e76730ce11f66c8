"""Tests that placement by affinity finds clusters of experts, within the limit of load."""

from __future__ import annotations

import numpy as np
import pytest

from jax_ep.placement import Placement, place_by_affinity


def changes(trace, placed, num_parts):
    """Returns the share of pairs of choices, in one layer and the next, that change their part."""
    num_slots = placed.expert_of_slot.shape[1]
    part = placed.slots_of_expert[:, :, 0] // (num_slots // num_parts)
    at = np.stack([part[layer][choices] for layer, choices in enumerate(trace)])
    return np.mean(at[:-1, :, :, None] != at[1:, :, None, :])


def planted(rng, layers, tokens, top_k, num_experts, num_clusters, noise):
    """Draws a trace in which tokens of a cluster choose its own experts, except for some noise."""
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
    "num_ranks, num_hosts, num_experts, top_k", [(4, 1, 32, 2), (8, 2, 32, 1), (8, 1, 60, 2)]
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
        # A tenth of the choices is noise. A pair of choices is on one rank if neither of them is
        # noise, and else by chance.
        stays = 0.9**2 + (1 - 0.9**2) / num_ranks
        assert changes(trace, placed, num_ranks) < 1 - stays + 0.03
    assert changes(trace, placed, num_ranks) < 0.8 * changes(trace, random, num_ranks)
    if num_hosts > 1:
        assert changes(trace, placed, num_hosts) < 0.5 * changes(trace, random, num_hosts)


def test_affinity_gives_way_to_balance():
    """The two busiest experts must be on different ranks, though many tokens choose both."""
    rng = np.random.default_rng(8)
    trace = np.where(rng.random((3, 2000, 1)) < 0.5, 0, 1)
    trace[:, :, :][rng.random(trace.shape) < 0.2] = 5
    placed = place_by_affinity(trace, num_ranks=2, num_experts=8)
    load = np.stack([np.bincount(choices.ravel(), minlength=8) for choices in trace])
    slots = placed.slots_of_expert[:, :, 0] // 4
    assert np.all(slots[:, 0] != slots[:, 1])
    assert placed.rank_load(load).max() < 0.65 * load[0].sum()


def test_affinity_with_choices_of_no_expert_and_one_layer():
    placed = place_by_affinity(np.array([[[0, -1], [2, 1], [3, -1]]]), num_ranks=2)
    assert sorted(placed.expert_of_slot[0]) == [0, 1, 2, 3]


def test_in_one_layer_experts_that_tokens_choose_together_share_a_rank():
    trace, members = planted(np.random.default_rng(9), 1, 2000, 4, 32, 8, noise=0.05)
    placed = place_by_affinity(trace, num_ranks=8)
    ranks = np.sort(placed.expert_of_slot.reshape(8, 4), axis=1)
    assert {*map(tuple, ranks)} == {*map(tuple, np.sort(members.reshape(8, 4), axis=1))}
