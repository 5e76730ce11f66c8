"""Computes routes from `topk_idx`: counts, offsets and rows of receive buffers."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.runtime.jax_compat import register_for_export, smaller

# Choices are counted in chunks of this number; `count_choices` says why.
CHUNK = 128

# Selects the rows to drop where a receive buffer is too small; see `jax_ep.dispatch`.
Overflow = Literal["tail", "fair"]


class Routes(NamedTuple):
    """The routes of one expert-major dispatch."""

    topk_idx: jax.Array  # [T, K] int32: the choices of this rank's tokens, as ids of all experts
    # [N, T, K] int32: entry [s, t, k] is the row, in this rank's receive buffer, for choice k of
    # rank s's token t; -1 if the expert is on another rank, the capacity or more if it is dropped.
    rows: jax.Array
    counts: jax.Array  # [N, E] int32: how often each rank chose each expert


class RankRoutes(NamedTuple):
    """The routes of one rank-major dispatch, in which token t of rank s goes to row (s, t)."""

    topk_idx: jax.Array  # [T, K] int32: the choices of this rank's tokens, as ids of all experts
    # [N, T, K] int32: every rank's choices as this rank's expert ids; -1: another rank's expert.
    local_topk_idx: jax.Array


register_for_export(Routes)
register_for_export(RankRoutes)


class RowGroups(NamedTuple):
    """The blocks of rows in a receive buffer, one per local expert, and counts of dropped rows."""

    group_sizes: jax.Array  # [L] int32: rows in the buffer, padding included
    expert_counts: jax.Array  # [L] int32: received rows in the buffer
    num_dropped: jax.Array  # [] int32: rows that did not fit in the buffer
    rows_needed: jax.Array  # [] int32: the least capacity at which all rows fit
    dropped_counts: jax.Array  # [L] int32: rows that did not fit, by expert


def dropless_capacity(num_choices: int, num_local_experts: int, expert_alignment: int) -> int:
    """Returns a capacity that fits any routing: all choices, and the padding of L blocks."""
    padded_blocks = smaller(num_local_experts, num_choices)  # at most so many have rows
    rows = num_choices + padded_blocks * (expert_alignment - 1)
    return -(-rows // expert_alignment) * expert_alignment


def expert_ids(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Casts ids to int32; those that name no expert stay outside [0, num_experts)."""
    if topk_idx.dtype.itemsize > 4:  # the cast must not wrap a 64-bit id to an expert's
        topk_idx = jnp.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, -1)
    return topk_idx.astype(jnp.int32)


def count_choices(topk_idx: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns the counts of experts [E], and each choice's position [T, K] among its expert's."""
    if 0 in topk_idx.shape:  # topk_idx is empty, like the positions
        return count_experts(topk_idx, num_experts), topk_idx
    flat = topk_idx.reshape(-1)
    # With chunks, the cost grows with T·K·(E + 128) and not with (T·K)².
    num_chunks = -(-flat.size // CHUNK)
    padding = num_chunks * CHUNK - flat.size
    chunks = jnp.pad(flat, (0, padding), constant_values=-1).reshape(num_chunks, CHUNK)
    # A position is the number of earlier choices of the same expert, in this chunk and before it.
    same = chunks[:, :, None] == chunks[:, None, :]
    earlier = jnp.tril(jnp.ones((1, CHUNK, CHUNK), bool), k=-1)
    within_chunk = jnp.sum(same & earlier, axis=2, dtype=jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)[None, None, :]
    histogram = jnp.sum(chunks[:, :, None] == experts, axis=1, dtype=jnp.int32)
    upto_chunk = jnp.cumsum(histogram, axis=0, dtype=jnp.int32)
    before_chunk = upto_chunk - histogram
    positions = within_chunk + jnp.take_along_axis(
        before_chunk, jnp.clip(chunks, 0, num_experts - 1), axis=1
    )
    return upto_chunk[-1], positions.reshape(-1)[: flat.size].reshape(topk_idx.shape)


def count_experts(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Counts how often topk_idx [T, K] of this rank has each expert; returns [E] int32."""
    # With the experts' axis first, [E, T·K], XLA fuses the comparison and the sum into one kernel.
    chosen = jnp.arange(num_experts, dtype=jnp.int32)[:, None] == topk_idx.reshape(1, -1)
    return jnp.sum(chosen, axis=1, dtype=jnp.int32)


def counts_here(counts: jax.Array, rank: jax.Array) -> jax.Array:
    """Selects the counts [N, L] of the experts of `rank` from the counts [N, E] of all experts."""
    num_local_experts = counts.shape[1] // counts.shape[0]
    return lax.dynamic_slice_in_dim(counts, rank * num_local_experts, num_local_experts, axis=1)


def block_starts(counts: jax.Array, expert_alignment: int) -> tuple[jax.Array, jax.Array]:
    """Returns each expert's first row and padded size, both [L] int32, for its rows [L]."""
    sizes = -(-counts // expert_alignment) * expert_alignment
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes, sizes


def fair_quota(counts: jax.Array, capacity: int, expert_alignment: int) -> jax.Array:
    """Returns the quota [] to which "fair" cuts counts [L] of rows; max(counts) if all rows fit."""
    # `blocks` has the sizes of the experts' blocks, and `room` is the size of the buffer, in units
    # of expert_alignment rows. In these units, the quota is the largest q with
    # sum(min(blocks, q)) <= room.
    blocks, room = -(-counts // expert_alignment), capacity // expert_alignment
    used = jnp.sum(jnp.minimum(blocks[:, None], blocks[None, :]), axis=0, dtype=jnp.int32)
    # used[i] is the size of all blocks if each is cut to at most the size of block i. Where that
    # fits, block i itself stays uncut.
    is_uncut = used <= room
    largest_uncut = jnp.max(jnp.where(is_uncut, blocks, 0))
    room_left = room - jnp.max(jnp.where(is_uncut, used, 0))
    # Each other block is cut to `largest_uncut` plus an equal share of the room that is left.
    num_cut = jnp.sum(~is_uncut, dtype=jnp.int32)
    quota = (largest_uncut + room_left // jnp.maximum(num_cut, 1)) * expert_alignment
    return jnp.where(num_cut == 0, jnp.max(counts), quota)


def receive_rows(
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    rank: jax.Array,
    capacity: int,
    expert_alignment: int,
    fair_counts: jax.Array | None,
) -> jax.Array:
    """Returns `Routes.rows`, [N, T, K] int32; `capacity` for a row that "fair" drops.

    topk_idx and positions, as `count_choices` returns them, are those of all ranks, [N, T, K];
    recv_counts [N, L] counts each rank's choices of each local expert. `fair_counts` [L] are the
    rows that "fair" keeps; None for "tail".
    """
    num_local_experts = recv_counts.shape[1]
    placed = fair_counts  # [L]: rows of each expert's block, before "tail" drops any
    if placed is None:
        placed = jnp.sum(recv_counts, axis=0, dtype=jnp.int32)
    starts, _ = block_starts(placed, expert_alignment)
    # [N, L]: the first of the rows that each source rank sends to each local expert.
    first_rows = starts[None, :] + jnp.cumsum(recv_counts, axis=0, dtype=jnp.int32) - recv_counts
    local_expert = topk_idx - rank * num_local_experts
    is_local = (local_expert >= 0) & (local_expert < num_local_experts)
    local_expert = jnp.clip(local_expert, 0, num_local_experts - 1)
    source = jnp.arange(topk_idx.shape[0])[:, None, None]
    rows = first_rows[source, local_expert] + positions
    if fair_counts is not None:
        rows = jnp.where(rows < (starts + fair_counts)[local_expert], rows, capacity)
    return jnp.where(is_local, rows, -1)


def row_groups(
    recv_counts: jax.Array, capacity: int, expert_alignment: int, overflow: Overflow = "tail"
) -> RowGroups:
    """Computes this rank's blocks from the ranks' choices of its experts, recv_counts [N, L]."""
    counts = jnp.sum(recv_counts, axis=0, dtype=jnp.int32)
    starts, sizes = block_starts(counts, expert_alignment)
    if overflow == "fair":
        expert_counts = jnp.minimum(counts, fair_quota(counts, capacity, expert_alignment))
        _, group_sizes = block_starts(expert_counts, expert_alignment)
    else:
        room = jnp.maximum(capacity - starts, 0)  # from each block's start to the buffer's end
        expert_counts, group_sizes = jnp.minimum(counts, room), jnp.minimum(sizes, room)
    return RowGroups(
        group_sizes=group_sizes,
        expert_counts=expert_counts,
        num_dropped=jnp.sum(counts - expert_counts, dtype=jnp.int32),
        rows_needed=jnp.sum(sizes, dtype=jnp.int32),
        dropped_counts=counts - expert_counts,
    )
