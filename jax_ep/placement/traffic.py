"""Counts what a routing trace costs under a placement: rows computed and sent, rank changes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_ep.placement.table import Array, Placement


class Traffic(NamedTuple):
    """Counts of one step of a trace, by layer.

    Attributes:
        rows: [layers, N]: the rows that each rank's experts compute.
        wire_rows: [layers, N]: the rows that each rank receives from other ranks. A token is sent
            to a rank once, however many of its experts are there.
        rank_changes: [layers - 1]: the share of pairs (a choice of a token, a choice of the same
            token in the next layer) whose experts are on different ranks.
    """

    rows: Array
    wire_rows: Array
    rank_changes: Array


def traffic(topk_idx: Array, placement: Placement) -> Traffic:
    """Counts what one step sends and computes, with the slots that `choose_slots` chooses.

    Args:
        topk_idx: [layers, tokens, K] integers, -1 for no expert. Each rank takes an equal run of
            tokens, in order; tokens that remain at the end are not counted.
        placement: a placement with the same number of layers.
    """
    num_ranks = placement.num_ranks
    layers, tokens, top_k = topk_idx.shape
    per_rank = tokens // num_ranks
    topk_idx = topk_idx[:, : per_rank * num_ranks].reshape(layers, num_ranks, per_rank, top_k)
    slots_of_rank = placement.expert_of_slot.shape[1] // num_ranks
    ranks = np.stack([
        np.where(slots >= 0, slots // slots_of_rank, -1)
        for slots in (_slots(topk_idx[i], placement[i]) for i in range(layers))
    ])  # fmt: skip
    here = ranks[..., None] == np.arange(num_ranks)  # [layers, source, t, K, N]
    sent = here.any(axis=3).sum(axis=2)  # [layers, source, N]
    sent[:, np.arange(num_ranks), np.arange(num_ranks)] = 0
    first, second = ranks[:-1, ..., :, None], ranks[1:, ..., None, :]
    both = (first >= 0) & (second >= 0)
    changed = ((first != second) & both).sum(axis=(1, 2, 3, 4)) / np.maximum(
        both.sum(axis=(1, 2, 3, 4)), 1
    )
    return Traffic(here.sum(axis=(1, 2, 3)), sent.sum(axis=1), changed)


def _slots(topk_idx: Array, placement: Placement) -> Array:
    """Turns all ranks' choices [N, t, K] of one layer into slots, as `choose_slots` does."""
    num_ranks, num_experts = len(topk_idx), len(placement.num_copies)
    rank = np.arange(num_ranks)[:, None]
    choices = topk_idx.reshape(num_ranks, -1)
    is_choice = (choices >= 0) & (choices < num_experts)
    experts = np.where(is_choice, choices, num_experts)
    order = np.argsort(experts, axis=1, kind="stable")
    in_order = np.take_along_axis(experts, order, 1)
    first = np.stack([np.searchsorted(row, row) for row in in_order])
    turn = np.empty_like(order)
    np.put_along_axis(turn, order, np.arange(choices.shape[1]) - first, 1)
    experts = np.where(is_choice, choices, 0)
    slots_of_rank = len(placement.expert_of_slot) // num_ranks
    slots = placement.slots_of_expert[experts]  # [N, t·K, C]
    local = np.where((slots >= 0) & (slots // slots_of_rank == rank[..., None]), slots, -1).max(2)
    turn = (turn + rank) % placement.num_copies[experts]
    far = np.take_along_axis(slots, turn[..., None], 2)[..., 0]
    chosen = np.where(local >= 0, local, far)
    return np.where(is_choice, chosen, -1).reshape(topk_idx.shape)
