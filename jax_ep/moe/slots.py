"""Supports layers with P slots for E experts, where experts may have several copies.

The placement, which says which slot holds which expert, is passed as arrays, so a new placement
needs no new program. Every choice of an expert becomes a choice of a slot, and dispatch and
matmuls use slots. In the backward pass the gradients of an expert's copies are added, and each copy
gets the sum, so an elementwise optimizer keeps copies equal, bit for bit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.placement.choice import choose_slots
from jax_ep.placement.table import Placement


def check_placement(placement: Placement | None, num_experts: int, num_slots: int | None) -> None:
    """Raises ValueError or TypeError unless the placement fits a layer of `num_slots` slots.

    A layer without slots (None) must be given no placement.
    """
    if num_slots is None:
        if placement is not None:
            raise ValueError(
                "placement must be None for a layer without num_slots; set num_slots to the "
                "placement's slots."
            )
        return
    if not isinstance(placement, Placement):
        raise TypeError(
            f"placement must say which expert each of the num_slots={num_slots} slots holds, as a "
            f"jax_ep.placement.Placement of this layer, but is {checks.described(placement)}."
        )
    shapes = placement.expert_of_slot.shape, placement.num_copies.shape
    if shapes != ((num_slots,), (num_experts,)):
        raise ValueError(
            f"placement must be of this layer, with {num_slots} slots and {num_experts} experts, "
            f"but expert_of_slot has shape {shapes[0]} and num_copies {shapes[1]}. Pass "
            "placement[layer] if it is the placement of several layers."
        )


def chosen(topk_idx: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Turns choices of experts [T, K] into choices of slots [T, K]."""
    arrays = placement.expert_of_slot, placement.slots_of_expert, placement.num_copies
    return choose_slots(topk_idx, *map(jnp.asarray, arrays), axis_name=axes)


def by_expert(counts: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Adds up the counts [P / N] of this rank's slots by expert; returns [E] int32."""
    experts = _held_here(counts.shape[0], placement, axes)
    all_experts = jnp.arange(placement.num_copies.shape[0], dtype=jnp.int32)
    theirs = jnp.where(experts[None] == all_experts[:, None], counts[None], 0)
    return jnp.sum(theirs, axis=1, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def equal_copies(weights: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the weights [P / N, ...] of this rank's slots, and sums their gradients by expert.

    Each slot thus gets the gradient of its expert. An all-reduce in float32 sums the gradients of
    the experts with several copies, at most P - E of them.
    """
    return weights


def _equal_copies_fwd(weights, placement, axes):
    return weights, placement


def _equal_copies_bwd(axes, placement, g):
    num_experts = placement.num_copies.shape[0]
    most = min(placement.expert_of_slot.shape[0] - num_experts, num_experts)
    if most == 0:
        return g, None
    copied = jnp.asarray(placement.num_copies) > 1
    among_copied = jnp.cumsum(copied, dtype=jnp.int32) - 1
    index = jnp.where(copied, among_copied, most)
    experts = _held_here(g.shape[0], placement, axes)
    place = jnp.where(experts >= 0, index[jnp.maximum(experts, 0)], most)
    dtype = wide_dtype(g.dtype)
    sums = jax.ops.segment_sum(g.astype(dtype), place, most + 1)[:most]
    if axes:
        sums = lax.psum(sums, axes)
    of_slots = sums[jnp.minimum(place, most - 1)].astype(g.dtype)
    has_copies = (place < most).reshape(-1, *(1,) * (g.ndim - 1))
    return jnp.where(has_copies, of_slots, g), None


equal_copies.defvjp(_equal_copies_fwd, _equal_copies_bwd)


def _held_here(num_slots: int, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the expert of each of this rank's slots, -1 for an empty slot."""
    expert_of_slot = jnp.asarray(placement.expert_of_slot)
    first = lax.axis_index(axes) * num_slots if axes else 0
    return lax.dynamic_slice_in_dim(expert_of_slot, first, num_slots)
