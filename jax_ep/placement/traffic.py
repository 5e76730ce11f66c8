"""Counts the rows that ranks would compute and receive if experts had a given placement."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.placement.choice import slots_on_rank
from jax_ep.placement.table import Array, Placement


def means(steps: Array, placement: Placement) -> dict[str, float]:
    """Returns means over recorded choices of several steps, [steps, layers, tokens, K].

    "balance" is the rows of the busiest rank over the mean of ranks, "wire_rows" are the rows that
    ranks receive from others, per token, and "rank_changes" is as in `traffic`.
    """
    tokens = steps.shape[2] // placement.num_ranks * placement.num_ranks
    counted = zip(*(traffic(step, placement) for step in steps), strict=True)
    rows, wire_rows, changes = map(np.stack, counted)
    busiest = rows.max(axis=2) / np.maximum(rows.mean(axis=2), 1e-30)
    shares = {"balance": busiest.mean(), "wire_rows": wire_rows.sum(axis=2).mean() / tokens}
    shares["rank_changes"] = changes.mean() if changes.size else 0.0
    return {name: float(share) for name, share in shares.items()}


def traffic(topk_idx: Array, placement: Placement) -> tuple[Array, Array, Array]:
    """Counts the rows of one step's recorded choices [layers, tokens, K]; -1 for no expert.

    Each rank has tokens // N tokens; those past N times that are left out. Returns the rows that
    each rank's experts compute, one for each choice, [layers, N]; the rows that each rank receives
    from others, one for each token, [layers, N]; and the share of pairs (a token's choice in a
    layer, its choice in the next layer) whose experts are on different ranks, [layers - 1].
    """
    num_ranks = placement.num_ranks
    layers, tokens, top_k = topk_idx.shape
    per_rank = tokens // num_ranks
    topk_idx = topk_idx[:, : per_rank * num_ranks].reshape(layers, num_ranks, per_rank, top_k)
    slots_of_rank = placement.expert_of_slot.shape[1] // num_ranks
    slots = np.asarray(
        _slots(topk_idx, placement.slots_of_expert, placement.num_copies, slots_of_rank)
    )
    ranks = np.where(slots >= 0, slots // slots_of_rank, -1)
    # here[layer, source, t, k, rank] is whether the k-th expert of token t of rank `source` is on
    # `rank`.
    here = ranks[..., None] == np.arange(num_ranks)
    # sent[layer, source, rank] is the number of tokens that rank `source` sends to `rank`.
    sent = here.any(axis=3).sum(axis=2)
    sent[:, np.arange(num_ranks), np.arange(num_ranks)] = 0  # these tokens stay on their rank
    # All pairs of a token's choices in a layer and in the next one: [layers - 1, N, t, K, K].
    rank_before, rank_after = ranks[:-1, ..., :, None], ranks[1:, ..., None, :]
    is_pair = (rank_before >= 0) & (rank_after >= 0)
    changes = ((rank_before != rank_after) & is_pair).sum(axis=(1, 2, 3, 4))
    num_pairs = is_pair.sum(axis=(1, 2, 3, 4))
    return here.sum(axis=(1, 2, 3)), sent.sum(axis=1), changes / np.maximum(num_pairs, 1)


@functools.partial(jax.jit, static_argnums=3)
def _slots(
    topk_idx: jax.Array, slots_of_expert: jax.Array, num_copies: jax.Array, slots_per_rank: int
) -> jax.Array:
    """Chooses slots on all ranks at once: [layers, N, t, K] from experts of this shape."""
    choose = functools.partial(slots_on_rank, slots_per_rank=slots_per_rank)
    of_ranks = jax.vmap(choose, (0, 0, None, None))
    ranks = jnp.arange(topk_idx.shape[1])
    return jax.lax.map(
        lambda layer: of_ranks(layer[0], ranks, *layer[1:]), (topk_idx, slots_of_expert, num_copies)
    )
