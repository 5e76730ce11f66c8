"""Counts the rows that ranks would compute and receive if experts had a given placement.

The tokens' choices of experts are given, as recorded in a run. A row is a token's hidden state.

Also counts how often a token's experts of successive layers are on different ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_ep.placement.table import Array, Placement


class Traffic(NamedTuple):
    """The rows of one training step's tokens under a placement, by layer, for N ranks.

    Attributes:
        rows: [layers, N], the number of rows that each rank's experts compute: one for each choice.
        wire_rows: [layers, N], the number of rows that each rank receives from other ranks. A token
            is sent to a rank once, even if it chose several experts there.
        rank_changes: [layers - 1], the share of pairs (a token's choice in a layer, the same
            token's choice in the next layer) whose experts are on different ranks.
    """

    rows: Array
    wire_rows: Array
    rank_changes: Array


def traffic(topk_idx: Array, placement: Placement) -> Traffic:
    """Counts the rows that ranks compute and receive in one step under a placement.

    If an expert has several copies, `choose_slots` decides which copy computes a token.

    Args:
        topk_idx: [layers, tokens, K] integers: the expert ids that each token chose, -1 for no
            expert. Each rank has tokens // N consecutive tokens; the remaining tokens at the end
            are ignored.
        placement: a placement with the same number of layers.

    Returns:
        The counts by layer and rank, and how often tokens change rank between layers.
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
    # here[layer, source, t, k, rank] is whether the k-th expert of token t of rank `source` is on
    # `rank`.
    here = ranks[..., None] == np.arange(num_ranks)
    # sent[layer, source, rank] is the number of tokens that rank `source` sends to `rank`.
    sent = here.any(axis=3).sum(axis=2)
    sent[:, np.arange(num_ranks), np.arange(num_ranks)] = 0
    first, second = ranks[:-1, ..., :, None], ranks[1:, ..., None, :]
    both = (first >= 0) & (second >= 0)
    changed = ((first != second) & both).sum(axis=(1, 2, 3, 4)) / np.maximum(
        both.sum(axis=(1, 2, 3, 4)), 1
    )
    return Traffic(here.sum(axis=(1, 2, 3)), sent.sum(axis=1), changed)


def _slots(topk_idx: Array, placement: Placement) -> Array:
    """Turns the choices of experts of one layer, [N, t, K], into choices of slots, [N, t, K].

    A slot holds one copy of an expert. Computes in NumPy, for all N ranks with t tokens each, what
    `choose_slots` computes in JAX on one rank.
    """
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
    # The slots of each chosen expert, [N, t·K, C]: -1 beyond the number of the expert's copies.
    slots = placement.slots_of_expert[experts]
    local = np.where((slots >= 0) & (slots // slots_of_rank == rank[..., None]), slots, -1).max(2)
    turn = (turn + rank) % placement.num_copies[experts]
    far = np.take_along_axis(slots, turn[..., None], 2)[..., 0]
    chosen = np.where(local >= 0, local, far)
    return np.where(is_choice, chosen, -1).reshape(topk_idx.shape)
