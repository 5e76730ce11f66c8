"""Supports layers whose N ranks hold P slots for E experts, so experts may have several copies.

Gradients of an expert's copies are added, and each copy gets the sum, so an elementwise optimizer
keeps copies equal, bit for bit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.dtypes import wide_dtype
from jax_ep.placement.choice import choose_slots
from jax_ep.placement.table import Placement
from jax_ep.runtime.jax_compat import match_varying


def slots_of_choices(topk_idx: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Converts expert ids [T, K] to ids of slots, spread over `axes`, that hold the experts."""
    arrays = placement.expert_of_slot, placement.slots_of_expert, placement.num_copies
    return choose_slots(topk_idx, *map(jnp.asarray, arrays), axis_name=axes)


def counts_by_expert(counts: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Sums `counts`, one for each slot of this rank, over the slots of each expert; [E] int32."""
    expert_of_slot = _held_here(counts.shape[0], placement, axes)
    experts = jnp.arange(placement.num_copies.shape[0], dtype=jnp.int32)
    counts = jnp.where(expert_of_slot[None] == experts[:, None], counts[None], 0)
    return jnp.sum(counts, axis=1, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def equal_copies(weights: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the weights of this rank's slots unchanged; sums their gradients over copies."""
    return weights


def _equal_copies_bwd(axes, placement, grad):
    num_experts = placement.num_copies.shape[0]
    # `grad` has a row for each slot of this rank. `sums` has a static number of rows, which fits
    # any placement: P slots hold second copies of at most P - E experts.
    most_copied = min(placement.expert_of_slot.shape[0] - num_experts, num_experts)
    if most_copied == 0:
        return grad, None
    is_copied = jnp.asarray(placement.num_copies) > 1
    # The row of `sums` of each expert, and then of each slot. Those without copies get the row
    # `most_copied`, which is cut off, so that ranks exchange gradients of copied experts alone.
    among_copied = jnp.cumsum(is_copied, dtype=jnp.int32) - 1
    row_of_expert = jnp.where(is_copied, among_copied, most_copied)
    experts = _held_here(grad.shape[0], placement, axes)
    row_of_slot = jnp.where(experts >= 0, row_of_expert[jnp.maximum(experts, 0)], most_copied)
    dtype = wide_dtype(grad.dtype)
    sums = _sum_by_row(grad.astype(dtype), row_of_slot, most_copied + 1)[:most_copied]
    if axes:
        sums = lax.psum(sums, axes)
    of_slots = sums[jnp.minimum(row_of_slot, most_copied - 1)].astype(grad.dtype)
    has_copies = (row_of_slot < most_copied).reshape(-1, *(1,) * (grad.ndim - 1))
    return jnp.where(has_copies, of_slots, grad), None


def _sum_by_row(values: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """Adds each values[i] to row rows[i] of the result, in the order of i."""
    # A scatter on a GPU would add in any order, and so give other bits in each call.
    zeros = jnp.zeros((num_rows, *values.shape[1:]), values.dtype)
    values, rows, zeros = match_varying((values, rows, zeros))

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(sums, rows[i], keepdims=False) + values[i]
        return lax.dynamic_update_index_in_dim(sums, row, rows[i], 0)

    return lax.fori_loop(0, values.shape[0], add, zeros)


equal_copies.defvjp(lambda weights, placement, axes: (weights, placement), _equal_copies_bwd)


def _held_here(num_slots: int, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the id of the expert in each of this rank's `num_slots` slots; -1 if it is empty."""
    expert_of_slot = jnp.asarray(placement.expert_of_slot)
    first_slot = lax.axis_index(axes) * num_slots if axes else 0
    return lax.dynamic_slice_in_dim(expert_of_slot, first_slot, num_slots)
