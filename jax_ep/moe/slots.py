"""Supports layers whose N ranks hold P slots for E experts, so experts may have several copies.

A slot holds the weights of one expert; rank r holds slots [r * P / N, (r + 1) * P / N). The
placement, which says which expert each slot holds, is passed as arrays, so a new placement does not
recompile the program. Before dispatch, every choice of an expert becomes a choice of a slot that
holds this expert. In the backward pass, the gradients of an expert's copies are added, and each
copy gets the sum, so an elementwise optimizer keeps copies equal, bit for bit.
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
from jax_ep.runtime.jax_compat import match_varying


def check_placement(placement: Placement | None, num_experts: int, num_slots: int | None) -> None:
    """Raises ValueError or TypeError unless the placement fits a layer with `num_slots` slots.

    If `num_slots` is None, the layer has no slots, and the placement must be None.
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


def slots_of_choices(topk_idx: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Converts expert ids `topk_idx` [T, K] to ids of slots that hold these experts, [T, K] int32.

    `axes` are the mesh axes that the slots are spread over.
    """
    arrays = placement.expert_of_slot, placement.slots_of_expert, placement.num_copies
    return choose_slots(topk_idx, *map(jnp.asarray, arrays), axis_name=axes)


def counts_by_expert(counts: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Sums `counts`, one for each slot of this rank, over the slots of each expert; [E] int32.

    Experts without a slot on this rank get 0. `axes` are the mesh axes that slots are spread over.
    """
    experts = _held_here(counts.shape[0], placement, axes)
    all_experts = jnp.arange(placement.num_copies.shape[0], dtype=jnp.int32)
    theirs = jnp.where(experts[None] == all_experts[:, None], counts[None], 0)
    return jnp.sum(theirs, axis=1, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def equal_copies(weights: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the weights of this rank's slots unchanged; sums their gradients over copies.

    In the backward pass, each slot gets the sum of the gradients of all copies of its expert. A
    float32 all-reduce computes these sums for the experts that have several copies. With P slots
    for E experts, these are at most P - E experts.
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
    sums = _sum_by_place(g.astype(dtype), place, most + 1)[:most]
    if axes:
        sums = lax.psum(sums, axes)
    of_slots = sums[jnp.minimum(place, most - 1)].astype(g.dtype)
    has_copies = (place < most).reshape(-1, *(1,) * (g.ndim - 1))
    return jnp.where(has_copies, of_slots, g), None


def _sum_by_place(values: jax.Array, place: jax.Array, num_places: int) -> jax.Array:
    """Sums values[i] to row place[i] of the result, in the order of i.

    A scatter on a GPU would add in any order, and so give other bits in each call.
    """
    nothing = jnp.zeros((num_places, *values.shape[1:]), values.dtype)
    values, place, nothing = match_varying((values, place, nothing), ())

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(sums, place[i], keepdims=False) + values[i]
        return lax.dynamic_update_index_in_dim(sums, row, place[i], 0)

    return lax.fori_loop(0, values.shape[0], add, nothing)


equal_copies.defvjp(_equal_copies_fwd, _equal_copies_bwd)


def _held_here(num_slots: int, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the id of the expert in each of this rank's `num_slots` slots; -1 if it is empty.

    `axes` are the mesh axes that the slots are spread over.
    """
    expert_of_slot = jnp.asarray(placement.expert_of_slot)
    first = lax.axis_index(axes) * num_slots if axes else 0
    return lax.dynamic_slice_in_dim(expert_of_slot, first, num_slots)
