"""Turns tokens' choices of experts into choices of the experts' slots, in a traced program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange.routes import count_choices, expert_ids
from jax_ep.placement.table import check_slots


def choose_slots(
    topk_idx: jax.Array,
    expert_of_slot: jax.Array | np.ndarray,
    slots_of_expert: jax.Array | np.ndarray,
    num_copies: jax.Array | np.ndarray,
    *,
    axis_name: AxisName,
) -> jax.Array:
    """Turns tokens' choices of experts into choices of slots. Call it inside `jax.shard_map`.

    If this rank has a copy of the chosen expert, the choice takes this copy. Otherwise this rank's
    choices of the expert are spread over the expert's copies round-robin; rank r starts with copy r
    modulo the number of copies.

    Args:
        topk_idx: [T, K] integer: expert ids of this rank's tokens. A value outside [0, E), such as
            -1, chooses no expert.
        expert_of_slot, slots_of_expert, num_copies: [P], [E, C] and [E] int32: the attributes of
            one layer's `Placement`.
        axis_name: the mesh axis, or tuple of axes, that the slots are spread over.

    Returns:
        [T, K] int32: the slot of each choice, -1 where no expert was chosen. Pass it to `dispatch`
        as `topk_idx`, with num_experts=P.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    axes = checks.as_axes(axis_name)
    num_ranks = checks.num_ranks(axes)
    checks.check_array("topk_idx", topk_idx, 2, jnp.integer, "[T, K]")
    checks.check_array("expert_of_slot", expert_of_slot, 1, jnp.integer, "[P]")
    checks.check_array("slots_of_expert", slots_of_expert, 2, jnp.integer, "[E, C]")
    checks.check_array("num_copies", num_copies, 1, jnp.integer, "[E]")
    tables = (expert_of_slot, slots_of_expert, num_copies)
    names = ("topk_idx", "expert_of_slot", "slots_of_expert", "num_copies")
    for name, array in zip(names, (topk_idx, *tables), strict=True):
        checks.check_not_sharded(name, array)
    num_slots, num_experts = expert_of_slot.shape[0], slots_of_expert.shape[0]
    check_slots(num_slots, num_experts, num_ranks)
    if num_copies.shape != (num_experts,):
        raise ValueError(
            f"num_copies must have shape ({num_experts},) for slots_of_expert [E, C] of shape "
            f"{slots_of_expert.shape}, but has shape {num_copies.shape}."
        )
    rank = lax.axis_index(axes) if axes else jnp.int32(0)
    slots_of_expert, num_copies = (jnp.asarray(x, jnp.int32) for x in (slots_of_expert, num_copies))
    return slots_on_rank(topk_idx, rank, slots_of_expert, num_copies, num_slots // num_ranks)


def slots_on_rank(
    topk_idx: jax.Array,
    rank: jax.Array,
    slots_of_expert: jax.Array,
    num_copies: jax.Array,
    slots_per_rank: int,
) -> jax.Array:
    """Returns the result of `choose_slots` on `rank`, unchecked; runs outside `shard_map`, too."""
    num_experts = len(num_copies)
    choices = expert_ids(topk_idx, num_experts)
    is_choice = (choices >= 0) & (choices < num_experts)
    # If each expert has only one slot, every choice of an expert takes this slot.
    if slots_of_expert.shape[1] == 1:
        only_slot = slots_of_expert[:, 0][jnp.where(is_choice, choices, 0)]
        return jnp.where(is_choice, only_slot, -1)
    _, position = count_choices(choices, num_experts)  # of a choice, among those of its expert
    choices = jnp.where(is_choice, choices, 0)  # a valid index, whose slot is replaced by -1 below

    here = (slots_of_expert >= 0) & (slots_of_expert // slots_per_rank == rank)  # [E, C]
    slot_here = jnp.max(jnp.where(here, slots_of_expert, -1), axis=1)  # [E]; -1: none on this rank
    copy = (position + rank) % num_copies[choices]
    slots = jnp.where(slot_here[choices] >= 0, slot_here[choices], slots_of_expert[choices, copy])
    return jnp.where(is_choice, slots, -1)
