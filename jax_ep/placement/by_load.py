"""Decides how many copies experts get, and on which ranks, so that ranks have similar loads."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_ep import checks
from jax_ep.placement.table import Array, Placement, check_ranks, check_slots, checked_load

# A swap must lower the load to below this factor times the old load: rounding does not count.
LESS = 1 - 1e-9


def balance(
    load: Any,
    *,
    num_slots: int,
    num_ranks: int,
    num_hosts: int = 1,
    num_groups: int = 1,
    before: Placement | None = None,
    max_imbalance: float = 1.0,
) -> Placement:
    """Decides which experts get copies, and where, so that the busiest rank's load is small.

    Starts from the placement of EPLB (DeepSeek-V3, github.com/deepseek-ai/EPLB), and then swaps two
    copies between ranks, or gives an expert of the busiest rank one more copy in place of a copy of
    another expert, as long as this lowers the busiest rank's load.

    Args:
        load: [layers, E] numbers of at least 0: the load of each expert, in any unit.
        num_slots: P, the number of slots of all ranks, a multiple of num_ranks, at least E.
        num_ranks: N, a multiple of num_hosts. Rank r is on host r // (N / num_hosts).
        num_hosts: the number of hosts. It has an effect only if num_groups is a multiple of it.
        num_groups: the router's number of groups, equal runs of consecutive expert ids (see
            `jax_ep.top_k_routing`). If num_hosts divides it, all experts of a group are placed on
            one host, and each host has equally many groups.
        before: the placement to change, of the same sizes. A layer keeps its slots if the load of
            its busiest rank is at most `max_imbalance` times the mean of its ranks. None: all
            layers are placed anew.
        max_imbalance: see `before`.

    Returns:
        A `Placement` with all slots filled, except in layers that keep theirs.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    load = checked_load(load)
    num_experts = load.shape[1]
    check_ranks(num_ranks, num_hosts)
    num_slots = checks.check_integer("num_slots", num_slots)
    check_slots(num_slots, num_experts, num_ranks)
    num_groups = checks.check_integer("num_groups", num_groups)
    if num_experts % num_groups:
        raise ValueError(
            f"num_groups must divide the {num_experts} experts of load {load.shape}, but is "
            f"{num_groups}."
        )
    if num_groups % num_hosts:  # groups do not fit on hosts, so both are ignored
        num_groups = num_hosts = 1
    is_kept = np.zeros(len(load), np.bool_)
    if before is not None:
        if (np.shape(before.expert_of_slot)[-1], before.num_ranks) != (num_slots, num_ranks):
            raise ValueError(
                f"before must have num_slots={num_slots} and num_ranks={num_ranks}, but has "
                f"{np.shape(before.expert_of_slot)[-1]} and {before.num_ranks}."
            )
        checks.check_number("max_imbalance", max_imbalance)
        of_ranks = before.rank_load(load)
        is_kept = of_ranks.max(axis=-1) <= max_imbalance * of_ranks.mean(axis=-1)
    slots = [
        before.expert_of_slot[i]
        if before is not None and is_kept[i]
        else _balance_layer(layer_load, num_slots, num_ranks, num_hosts, num_groups)
        for i, layer_load in enumerate(load)
    ]
    return Placement.of(np.stack(slots), num_experts=num_experts, num_ranks=num_ranks)


def _balance_layer(
    load: Array, num_slots: int, num_ranks: int, num_hosts: int, num_groups: int
) -> Array:
    """Computes the expert of each slot, [P], from the load of each expert of one layer, [E]."""
    group_of_expert = np.arange(len(load)) // (len(load) // num_groups)
    group_load = np.bincount(group_of_expert, load, num_groups)
    packed = _pack(group_load, num_hosts)
    best = np.empty(0)
    least = np.inf  # the load of the busiest rank with `best`
    # Tries two ways to place the router's groups on hosts: the greedy one, and that with groups
    # then swapped to even out the hosts' loads, which usually, but not always, is better.
    for host_of_group in (packed, _exchange(group_load, packed.copy(), num_hosts)):
        slots = []
        busiest = 0.0
        for host in range(num_hosts):
            experts = np.flatnonzero(host_of_group[group_of_expert] == host)
            index_of_slot, busiest_of_host = _balance_host(
                load[experts], num_slots // num_hosts, num_ranks // num_hosts
            )
            slots.append(experts[index_of_slot])
            busiest = max(busiest, busiest_of_host)
        if busiest < least:
            best, least = np.concatenate(slots), busiest
        if num_hosts == 1:  # both ways are the same
            break
    return best


def _balance_host(load: Array, num_slots: int, num_ranks: int) -> tuple[Array, float]:
    """Returns for each slot of a host its index into `load` [n], and the busiest rank's load."""
    # Slot i < n has expert i. EPLB gives each further slot to the expert that then has the most
    # load per copy.
    copies = np.ones(len(load), int)
    expert = np.arange(num_slots)
    for slot in range(len(load), num_slots):
        expert[slot] = np.argmax(load / copies)
        copies[expert[slot]] += 1
    rank = _pack((load / copies)[expert], num_ranks)  # of each slot
    # Both functions change slots only as long as that lowers the load of the busiest rank. The
    # loop's limit only bounds its time.
    for _ in range(4 * num_slots):
        rank = _exchange((load / copies)[expert], rank, num_ranks)
        if not _copy_another(load, expert, copies, rank, num_ranks):
            break
    totals = np.bincount(rank, (load / copies)[expert], num_ranks)
    # Lists the slots rank by rank; each rank has equally many.
    return expert[np.argsort(rank, kind="stable")], float(totals.max())


def _pack(load: Array, num_packs: int) -> Array:
    """Puts items [n], heaviest first, into the lightest pack with room; returns their packs."""
    pack = np.empty(len(load), int)
    room = np.full(num_packs, len(load) // num_packs)  # all packs get equally many items
    totals = np.zeros(num_packs)
    for item in np.argsort(-load, kind="stable"):
        lightest = np.argmin(np.where(room > 0, totals, np.inf))
        pack[item] = lightest
        totals[lightest] += load[item]
        room[lightest] -= 1
    return pack


def _exchange(load: Array, pack: Array, num_packs: int) -> Array:
    """Swaps items between packs as long as the heaviest pack gets lighter; updates `pack`."""
    totals = np.bincount(pack, load, num_packs)
    # The loop ends, because a swap makes the packs' loads, sorted, lexicographically smaller. The
    # limit only bounds its time.
    for _ in range(100 * len(load)):
        heaviest = np.argmax(totals)
        mine, others = np.flatnonzero(pack == heaviest), np.flatnonzero(pack != heaviest)
        if not len(others):
            break
        # [mine, others]: the load that a swap takes from the heaviest pack, and the larger load of
        # the two packs after the swap.
        moved = load[mine][:, None] - load[others][None]
        after = np.maximum(totals[heaviest] - moved, totals[pack[others]][None] + moved)
        i, j = np.unravel_index(np.argmin(after), after.shape)
        if not after[i, j] < totals[heaviest] * LESS:
            break
        pack[mine[i]], pack[others[j]] = pack[others[j]], heaviest
        totals = np.bincount(pack, load, num_packs)
    return pack


def _copy_another(load: Array, expert: Array, copies: Array, rank: Array, num_ranks: int) -> bool:
    """Gives one slot to another expert if that lowers the busiest rank's load; returns whether."""
    # Updates the expert of each slot, `expert` [P], and the copies of each expert, `copies` [n].
    # `rank` [P] is the rank of each slot.
    held = np.zeros((len(load), num_ranks))  # how many copies of each expert each rank holds
    np.add.at(held, (expert, rank), 1)
    totals = (load / copies) @ held
    victims = np.flatnonzero(copies[expert] > 1)  # slots whose experts have other copies, too
    wanted = np.unique(expert[rank == np.argmax(totals)])  # experts of the busiest rank
    if not len(victims):
        return False
    # Tries each pair of an expert a that loses the copy in a slot of `victims`, and an expert b of
    # the busiest rank that gains a copy in this slot.
    a, b = expert[victims], wanted
    # The new load per copy, of experts a that lose a copy and of experts b that gain one.
    less = load[a] / (copies[a] - 1)
    more = load[b] / (copies[b] + 1)
    # [victims, N] and [wanted, N]: what the new loads per copy add to the ranks' loads.
    of_a = held[a] * (less - load[a] / copies[a])[:, None]
    of_b = held[b] * (more - load[b] / copies[b])[:, None]
    there = np.eye(num_ranks)[rank[victims]]  # [victims, N]: 1 at the slot's rank
    # [victims, wanted, N]: the ranks' loads after each change. The first line changes the load
    # of all present copies, and the second line replaces the copy in the slot.
    after = totals + of_a[:, None] + of_b[None]
    after += there[:, None] * (more[None] - less[:, None])[:, :, None]
    busiest = np.where(a[:, None] == b[None], np.inf, after.max(axis=2))
    i, j = np.unravel_index(np.argmin(busiest), busiest.shape)
    if not busiest[i, j] < totals.max() * LESS:
        return False
    copies[a[i]] -= 1
    copies[b[j]] += 1
    expert[victims[i]] = b[j]
    return True
