"""Where experts live: which slot of which rank holds which expert, and how many copies there are.

A rank has P / N slots, each with the weights of one expert. `balance` copies and places experts by
their loads; `place_by_affinity` places experts of successive layers that tokens visit one after the
other on one rank. Both run on the host, in NumPy, and return a `Placement` of small arrays, whose
shapes depend on the numbers of layers, experts and slots alone: a layer that takes them as
arguments is not compiled anew for another placement. `choose_slots` is the traced part.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange.routes import expert_ids

Array = np.ndarray[Any, Any]

# An exchange of two experts must lower the load by more than rounding does.
_LESS = 1 - 1e-9

# Experts times parts of a layer: of more, an integer program does not end in time.
_LARGEST_PROGRAM = 1024


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert_of_slot", "slots_of_expert", "num_copies"],
    meta_fields=["num_ranks"],
)
@dataclasses.dataclass(frozen=True)
class Placement:
    """Which slot holds which expert, layer by layer. A pytree of int32 arrays.

    E experts, P slots; slot s is on rank s // (P / num_ranks). C = P - E + 1 is the most copies
    that one expert can have. Make one with `Placement.of`.

    Attributes:
        expert_of_slot: [layers, P] int32, -1 where a slot is empty.
        slots_of_expert: [layers, E, C] int32: the slots of each expert, in rising order, then -1.
        num_copies: [layers, E] int32, at least 1.
        num_ranks: N.
    """

    expert_of_slot: Array
    slots_of_expert: Array
    num_copies: Array
    num_ranks: int

    @classmethod
    def of(cls, expert_of_slot: Any, *, num_experts: int, num_ranks: int) -> Placement:
        """Makes a placement of `expert_of_slot` [layers, P] integers, -1 where a slot is empty.

        Raises:
            ValueError: P is no multiple of num_ranks, or an id is not below num_experts, or a layer
                has an expert without a slot.
        """
        slots = np.asarray(expert_of_slot)
        checks.check_array("expert_of_slot", slots, 2, jnp.integer, "[layers, P]")
        num_experts = checks.check_integer("num_experts", num_experts)
        num_ranks = checks.check_integer("num_ranks", num_ranks)
        layers, num_slots = slots.shape
        _check_slots(num_slots, num_experts, num_ranks)
        if slots.size and not -1 <= slots.min() <= slots.max() < num_experts:
            raise ValueError(
                f"expert_of_slot must hold ids below num_experts={num_experts}, or -1, but holds "
                f"{slots.min()} to {slots.max()}."
            )
        copies = np.zeros((layers, num_experts), np.int32)
        slots_of_expert = np.full((layers, num_experts, num_slots - num_experts + 1), -1, np.int32)
        for layer, slot in zip(*np.nonzero(slots >= 0), strict=True):
            expert = slots[layer, slot]
            if copies[layer, expert] < slots_of_expert.shape[2]:
                slots_of_expert[layer, expert, copies[layer, expert]] = slot
            copies[layer, expert] += 1
        missing = np.argwhere(copies == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ValueError(f"expert_of_slot has no slot for expert {expert} in layer {layer}.")
        return cls(slots.astype(np.int32), slots_of_expert, copies, num_ranks)

    def rank_load(self, load: Any) -> Array:
        """Returns the load of each rank, [layers, num_ranks]; copies share an expert's evenly.

        Args:
            load: [layers, E] numbers: the load of each expert, in any unit.
        """
        load = _checked_load(load)
        if load.shape != self.num_copies.shape:
            raise ValueError(
                f"load must have shape [layers, E] = {self.num_copies.shape}, but has shape "
                f"{load.shape}."
            )
        share = np.take_along_axis(load / self.num_copies, np.maximum(self.expert_of_slot, 0), 1)
        share = np.where(self.expert_of_slot >= 0, share, 0.0)
        return share.reshape(len(load), self.num_ranks, -1).sum(axis=2)

    def save(self, path: str | Path) -> None:
        """Writes the placement to a file whose name ends in .json or .npz."""
        path = Path(path)
        sizes = {"num_experts": self.num_copies.shape[1], "num_ranks": self.num_ranks}
        if _suffix(path) == ".json":
            path.write_text(json.dumps(sizes | {"expert_of_slot": self.expert_of_slot.tolist()}))
        else:
            np.savez_compressed(path, expert_of_slot=self.expert_of_slot, **sizes)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Placement:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file's name ends in neither .json nor .npz, or it holds no placement.
        """
        path = Path(path)
        if _suffix(path) == ".json":
            fields = json.loads(path.read_text())
        else:
            with np.load(path) as arrays:
                fields = dict(arrays)
        try:
            return cls.of(
                np.asarray(fields["expert_of_slot"], np.int32),
                num_experts=int(fields["num_experts"]),
                num_ranks=int(fields["num_ranks"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} must hold a placement that Placement.save wrote.") from error


def choose_slots(
    topk_idx: jax.Array,
    expert_of_slot: jax.Array,
    slots_of_expert: jax.Array,
    num_copies: jax.Array,
    *,
    axis_name: AxisName,
) -> jax.Array:
    """Turns choices of experts into choices of slots. Call it inside `jax.shard_map`.

    A choice goes to the copy on this rank if there is one; else this rank's choices of an expert
    go to its copies in turn, starting at another copy on each rank. The same choices give the same
    slots on every run.

    Args:
        topk_idx: [T, K] integer: expert ids of this rank's tokens. A value outside [0, E), such as
            -1, is a choice of no expert.
        expert_of_slot: [P] int32, of one layer of a `Placement`, as are the next two.
        slots_of_expert: [E, C] int32.
        num_copies: [E] int32.
        axis_name: the mesh axis, or tuple of axes, that the slots are spread over.

    Returns:
        [T, K] int32: slots, -1 where no expert was chosen; what `dispatch` takes, with
        num_experts=P.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    axes = checks.as_axes(axis_name)
    num_ranks = checks.num_ranks(axes)
    checks.check_array("topk_idx", topk_idx, 2, jnp.integer, "[T, K]")
    checks.check_array("expert_of_slot", expert_of_slot, 1, jnp.integer, "[P]")
    checks.check_array("slots_of_expert", slots_of_expert, 2, jnp.integer, "[E, C]")
    checks.check_array("num_copies", num_copies, 1, jnp.integer, "[E]")
    num_slots, num_experts = expert_of_slot.shape[0], slots_of_expert.shape[0]
    _check_slots(num_slots, num_experts, num_ranks)
    if num_copies.shape != (num_experts,):
        raise ValueError(
            f"num_copies must have shape ({num_experts},) for slots_of_expert [E, C] of shape "
            f"{slots_of_expert.shape}, but has shape {num_copies.shape}."
        )
    rank = lax.axis_index(axes) if axes else jnp.int32(0)
    choices = expert_ids(topk_idx, num_experts).reshape(-1)
    is_choice = (choices >= 0) & (choices < num_experts)
    turn = _turns(jnp.where(is_choice, choices, num_experts), num_experts)
    choices = jnp.where(is_choice, choices, 0)

    slots_of_expert = slots_of_expert.astype(jnp.int32)
    here = (slots_of_expert >= 0) & (slots_of_expert // (num_slots // num_ranks) == rank)
    local = jnp.max(jnp.where(here, slots_of_expert, -1), axis=1)
    turn = (turn + rank) % num_copies.astype(jnp.int32)[choices]
    slots = jnp.where(local[choices] >= 0, local[choices], slots_of_expert[choices, turn])
    return jnp.where(is_choice, slots, -1).reshape(topk_idx.shape)


def _turns(choices: jax.Array, num_experts: int) -> jax.Array:
    """Returns [n] int32: how many earlier entries of `choices` [n], 0 to num_experts, are alike."""
    order = jnp.argsort(choices, stable=True)
    in_order = choices[order]
    first = jnp.searchsorted(in_order, jnp.arange(num_experts + 1, dtype=choices.dtype))
    place = jnp.arange(choices.shape[0], dtype=jnp.int32) - first[in_order].astype(jnp.int32)
    return jnp.zeros_like(place).at[order].set(place)


def balance(
    load: Any, *, num_slots: int, num_ranks: int, num_hosts: int = 1, num_groups: int = 1
) -> Placement:
    """Copies hot experts and places all copies, so that the busiest rank has little to do.

    Starts from what EPLB finds (DeepSeek-V3, github.com/deepseek-ai/EPLB): a copy goes to whatever
    expert has the most load for each copy, and copies go, in falling order of load, to the least
    loaded rank with a free slot. Then, as long as the busiest rank's load falls, it exchanges two
    copies, or gives a slot of one expert to an expert of the busiest rank. So no rank has more to
    do than EPLB's busiest one.

    Args:
        load: [layers, E] numbers, none negative: the load of each expert, in any unit.
        num_slots: P, a multiple of num_ranks, at least E.
        num_ranks: N, a multiple of num_hosts. Rank r is on host r // (N / num_hosts).
        num_hosts: hosts. They count only if num_groups is a multiple of them.
        num_groups: groups of experts of consecutive ids, among which a token chooses first (see
            `jax_ep.top_k_routing`). All experts of a group are then placed on one host, and
            each host has equally many groups.

    Returns:
        A `Placement` with all slots filled.

    Raises:
        ValueError, TypeError: naming the argument that does not fit.
    """
    load = _checked_load(load)
    num_experts = load.shape[1]
    _check_ranks(num_ranks, num_hosts)
    num_slots = checks.check_integer("num_slots", num_slots)
    _check_slots(num_slots, num_experts, num_ranks)
    num_groups = checks.check_integer("num_groups", num_groups)
    if num_experts % num_groups:
        raise ValueError(
            f"num_groups must divide the {num_experts} experts of load {load.shape}, but is "
            f"{num_groups}."
        )
    if num_groups % num_hosts:
        num_groups = num_hosts = 1
    slots = [_balance_layer(w, num_slots, num_ranks, num_hosts, num_groups) for w in load]
    return Placement.of(np.stack(slots), num_experts=num_experts, num_ranks=num_ranks)


def _balance_layer(
    load: Array, num_slots: int, num_ranks: int, num_hosts: int, num_groups: int
) -> Array:
    """Returns the expert of each slot, [P], of one layer."""
    group_of_expert = np.arange(len(load)) // (len(load) // num_groups)
    group_load = np.bincount(group_of_expert, load, num_groups)
    packed = _pack(group_load, num_hosts)
    best, least = np.empty(0), np.inf
    # Hosts of more even load have, as a rule, ranks of more even load, but not always.
    for host_of_group in (packed, _exchange(group_load, packed.copy(), num_hosts)):
        slots, busiest = [], 0.0
        for host in range(num_hosts):
            experts = np.flatnonzero(host_of_group[group_of_expert] == host)
            own, own_busiest = _balance_host(
                load[experts], num_slots // num_hosts, num_ranks // num_hosts
            )
            slots.append(experts[own])
            busiest = max(busiest, own_busiest)
        if busiest < least:
            best, least = np.concatenate(slots), busiest
        if num_hosts == 1:
            break
    return best


def _balance_host(load: Array, num_slots: int, num_ranks: int) -> tuple[Array, float]:
    """Returns the expert of each slot, [P], and the load of the busiest rank."""
    copies = np.ones(len(load), int)
    expert = np.arange(num_slots)
    for slot in range(len(load), num_slots):
        expert[slot] = np.argmax(load / copies)
        copies[expert[slot]] += 1
    rank = _pack((load / copies)[expert], num_ranks)
    for _ in range(4 * num_slots):
        rank = _exchange((load / copies)[expert], rank, num_ranks)
        if not _copy_another(load, expert, copies, rank, num_ranks):
            break
    totals = np.bincount(rank, (load / copies)[expert], num_ranks)
    return expert[np.argsort(rank, kind="stable")], float(totals.max())


def _pack(load: Array, num_packs: int) -> Array:
    """Returns the pack of each item: the heaviest first, to the lightest pack with room."""
    pack, room = np.empty(len(load), int), np.full(num_packs, len(load) // num_packs)
    totals = np.zeros(num_packs)
    for item in np.argsort(-load, kind="stable"):
        lightest = np.argmin(np.where(room > 0, totals, np.inf))
        pack[item] = lightest
        totals[lightest] += load[item]
        room[lightest] -= 1
    return pack


def _exchange(load: Array, pack: Array, num_packs: int) -> Array:
    """Exchanges items between the heaviest pack and another as long as the heavier gets lighter."""
    totals = np.bincount(pack, load, num_packs)
    for _ in range(100 * len(load)):  # each exchange makes the sorted totals smaller: it ends
        heaviest = np.argmax(totals)
        mine, others = np.flatnonzero(pack == heaviest), np.flatnonzero(pack != heaviest)
        if not len(others):
            break
        moved = load[mine][:, None] - load[others][None]
        after = np.maximum(totals[heaviest] - moved, totals[pack[others]][None] + moved)
        i, j = np.unravel_index(np.argmin(after), after.shape)
        if not after[i, j] < totals[heaviest] * _LESS:
            break
        pack[mine[i]], pack[others[j]] = pack[others[j]], heaviest
        totals = np.bincount(pack, load, num_packs)
    return pack


def _copy_another(load: Array, expert: Array, copies: Array, rank: Array, num_ranks: int) -> bool:
    """Gives the slot of a copied expert to an expert of the busiest rank, if that rank gains.

    Changes `expert` and `copies`; returns whether it did.
    """
    held = np.zeros((len(load), num_ranks))
    np.add.at(held, (expert, rank), 1)
    totals = (load / copies) @ held
    victims = np.flatnonzero(copies[expert] > 1)
    wanted = np.unique(expert[rank == np.argmax(totals)])
    if not len(victims):
        return False
    a, b = expert[victims], wanted
    less = load[a] / (copies[a] - 1)  # of each copy of the expert that loses one
    more = load[b] / (copies[b] + 1)
    of_a = held[a] * (less - load[a] / copies[a])[:, None]
    of_b = held[b] * (more - load[b] / copies[b])[:, None]
    there = np.eye(num_ranks)[rank[victims]]
    after = totals + of_a[:, None] + of_b[None]
    after += there[:, None] * (more[None] - less[:, None])[:, :, None]
    busiest = np.where(a[:, None] == b[None], np.inf, after.max(axis=2))
    i, j = np.unravel_index(np.argmin(busiest), busiest.shape)
    if not busiest[i, j] < totals.max() * _LESS:
        return False
    copies[a[i]] -= 1
    copies[b[j]] += 1
    expert[victims[i]] = b[j]
    return True


def place_by_affinity(
    trace: Any,
    *,
    num_ranks: int,
    num_hosts: int = 1,
    max_imbalance: float = 1.05,
    num_experts: int | None = None,
) -> Placement:
    """Places experts of successive layers that the same tokens choose on the same rank.

    The idea is ExFlow's (arXiv:2401.08383): a token that finds its next expert where it is crosses
    no wire. First hosts are chosen, for the fewest changes of host, then the ranks of each. The
    first layer's experts are clustered by the experts that their tokens choose next; each other
    layer is assigned to the clusters of its neighbours, forward and then in sweeps. An assignment
    that breaks the limit of loads is repaired by exchanges of experts. Small layers are in the end
    assigned once more by integer programs (MoETuner, arXiv:2502.06643), which SciPy's HiGHS solves
    within ten seconds together; a layer whose program takes longer stays as it is.

    Args:
        trace: [layers, tokens, K] integers: the experts that each token chose; -1 for none.
        num_ranks: N, a multiple of num_hosts. Rank r is on host r // (N / num_hosts).
        num_hosts: hosts.
        max_imbalance: the most that a rank's load in a layer may be of the mean, at least 1. Where
            no placement keeps it, as with one expert above it, loads come as near as exchanges do.
        num_experts: E; None: the largest id in the trace + 1.

    Returns:
        A `Placement` of one copy of each expert, in the least P >= E that N divides.

    Raises:
        ValueError, TypeError: naming the argument that does not fit.
    """
    trace = np.asarray(trace)
    checks.check_array("trace", trace, 3, jnp.integer, "[layers, tokens, K]", may_be_empty=False)
    _check_ranks(num_ranks, num_hosts)
    checks.check_number("max_imbalance", max_imbalance)
    if max_imbalance < 1:
        raise ValueError(f"max_imbalance must be at least 1, but is {max_imbalance}.")
    largest = int(trace.max())
    if num_experts is None:
        num_experts = largest + 1
    num_experts = checks.check_integer("num_experts", num_experts)
    if largest >= num_experts:
        raise ValueError(
            f"num_experts must be above the largest id of trace, {largest}, but is {num_experts}."
        )
    num_slots = -(-num_experts // num_ranks) * num_ranks
    # Experts from num_experts on stand for empty slots.
    visits = [_visits(choices, num_slots) for choices in trace]
    together = [np.asarray((a.T @ b).todense()) for a, b in zip(visits, visits[1:], strict=False)]
    load = np.stack([np.asarray(v.sum(axis=0)).ravel() for v in visits])
    limit = max_imbalance * load.sum(axis=1)
    experts = np.tile(np.arange(num_slots), (len(trace), 1))
    slots = []
    for own in _split(experts, visits, together, load, num_hosts, limit / num_hosts):
        per_host = num_ranks // num_hosts
        slots += _split(own, visits, together, load, per_host, limit / num_ranks)
    expert_of_slot = np.concatenate(slots, axis=1)
    expert_of_slot = np.where(expert_of_slot < num_experts, expert_of_slot, -1)
    return Placement.of(expert_of_slot, num_experts=num_experts, num_ranks=num_ranks)


def _visits(choices: Array, num_experts: int) -> Any:
    """Returns a sparse [tokens, num_experts]: how often each token chose each expert."""
    from scipy import sparse

    token, k = np.nonzero(choices >= 0)
    ones = np.ones(len(token))
    return sparse.csr_matrix((ones, (token, choices[token, k])), (len(choices), num_experts))


def _split(
    experts: Array, visits: list[Any], together: list[Array], load: Array, parts: int, limit: Array
) -> list[Array]:
    """Splits experts [layers, n] into parts of [layers, n / parts] that tokens seldom leave.

    Args:
        experts: the ids of each layer's experts.
        visits: of each layer, sparse [tokens, P].
        together: of each layer but the last, [P, P]: how often a token chose e, then f.
        load: [layers, P].
        parts: how many.
        limit: [layers]: the most load of a part.
    """
    if parts == 1:
        return [experts]
    near = [m[np.ix_(a, b)] for m, a, b in zip(together, experts, experts[1:], strict=False)]
    load = np.take_along_axis(load, experts, 1)
    profile = _profile(visits, experts)
    best: Array = np.zeros(experts.shape, int)
    most = -1.0
    for seed in range(3):
        part = np.zeros(experts.shape, int)
        first = _clusters(profile, parts, np.random.default_rng(seed))
        part[0] = _assign(first, load[0], limit[0])
        for layer in range(1, len(experts)):
            gain = _of_parts(near[layer - 1].T, part[layer - 1], parts)
            part[layer] = _assign(gain, load[layer], limit[layer])
        kept = _sweep(part, near, load, limit, parts, _assign, 4)
        if kept > most:
            best, most = part, kept
    if best.shape[1] * parts <= _LARGEST_PROGRAM:
        exactly = functools.partial(_assign_exactly, seconds=10 / len(best))
        _sweep(best, near, load, limit, parts, exactly, 1)
    order = np.argsort(best, axis=1, kind="stable")
    return np.split(np.take_along_axis(experts, order, 1), parts, axis=1)


def _profile(visits: list[Any], experts: Array) -> Array:
    """Returns [n, ...]: the experts of the next layers that tokens of a first expert choose."""
    first = visits[0][:, experts[0]].T
    later = [(first @ visits[i][:, experts[i]]).toarray() for i in range(min(5, len(experts)))]
    later[0] = later[0] * (1 - np.eye(len(experts[0])))
    scaled = [m / np.maximum(np.linalg.norm(m, axis=1, keepdims=True), 1e-30) for m in later]
    return np.concatenate(scaled, axis=1)


def _clusters(profile: Array, parts: int, rng: np.random.Generator) -> Array:
    """Returns [n, parts]: how alike each row is to each of `parts` clusters of equal size."""
    centers = profile[[rng.integers(len(profile))]]
    while len(centers) < parts:  # each the least like any before it
        alike = (profile @ centers.T).max(axis=1)
        centers = np.concatenate([centers, profile[[np.argmin(alike)]]])
    for _ in range(10):
        alike = profile @ centers.T
        part = _assign(alike, np.zeros(len(profile)), 0.0)
        centers = np.eye(parts)[part].T @ profile
        centers /= np.maximum(np.linalg.norm(centers, axis=1, keepdims=True), 1e-30)
    return profile @ centers.T


def _of_parts(matrix: Array, part: Array, parts: int) -> Array:
    """Sums the columns of each part: [n, m] -> [n, parts]; parts are of one size."""
    in_order = matrix[:, np.argsort(part, kind="stable")]
    return in_order.reshape(len(matrix), parts, -1).sum(axis=2)


def _sweep(
    part: Array, near: list[Array], load: Array, limit: Array, parts: int, assign: Any, most: int
) -> float:
    """Assigns each layer anew, given its neighbours, until a sweep keeps no more tokens in place.

    Changes `part` [layers, n]; returns how many pairs of choices stay. `most` counts sweeps.
    """

    def kept(part: Array) -> float:
        same = (a[:, None] == b[None] for a, b in zip(part, part[1:], strict=False))
        return float(sum(np.sum(m * s) for m, s in zip(near, same, strict=True)))

    best = kept(part)
    for _ in range(most):
        tried = part.copy()
        for layer in range(len(part)):
            gain = np.zeros((part.shape[1], parts))
            if layer:
                gain += _of_parts(near[layer - 1].T, tried[layer - 1], parts)
            if layer + 1 < len(part):
                gain += _of_parts(near[layer], tried[layer + 1], parts)
            tried[layer] = assign(gain, load[layer], limit[layer])
        if kept(tried) <= best:
            break
        part[:], best = tried, kept(tried)
    return best


def _assign(gain: Array, load: Array, limit: float) -> Array:
    """Returns the part of each item: most gain [n, parts], equal sizes, loads up to a limit."""
    from scipy.optimize import linear_sum_assignment

    size = len(gain) // gain.shape[1]
    part = linear_sum_assignment(np.repeat(gain, size, axis=1), maximize=True)[1] // size
    if np.bincount(part, load, gain.shape[1]).max() <= limit * (1 + 1e-9):
        return part
    return _repair(part, gain, load, limit)


def _assign_exactly(gain: Array, load: Array, limit: float, seconds: float) -> Array:
    """Returns what `_assign` does, by an integer program if that ends in time."""
    from scipy import optimize, sparse

    part = _assign(gain, load, limit)
    items, parts = gain.shape
    one_part = sparse.kron(sparse.eye(items), np.ones((1, parts)))
    members = sparse.kron(np.ones((1, items)), sparse.eye(parts))
    loads = sparse.kron(load[None], sparse.eye(parts))
    solved = optimize.milp(
        -gain.ravel(),
        integrality=np.ones(gain.size),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_part, 1, 1),
            optimize.LinearConstraint(members, items // parts, items // parts),
            optimize.LinearConstraint(loads, -np.inf, limit),
        ],
        options=dict(time_limit=seconds),
    )
    return part if solved.status else solved.x.reshape(gain.shape).argmax(axis=1)


def _repair(part: Array, gain: Array, load: Array, limit: float) -> Array:
    """Exchanges items of the heaviest part, at the least gain lost for the load, to the limit."""
    parts = gain.shape[1]
    for _ in range(100 * len(load)):  # each exchange makes the sorted loads smaller: it ends
        totals = np.bincount(part, load, parts)
        heaviest = np.argmax(totals)
        if totals[heaviest] <= limit:
            break
        mine, others = np.flatnonzero(part == heaviest), np.flatnonzero(part != heaviest)
        moved = load[mine][:, None] - load[others][None]
        after = np.maximum(totals[heaviest] - moved, totals[part[others]][None] + moved)
        lost = gain[mine, heaviest][:, None] - gain[mine][:, part[others]]
        lost = lost + gain[others, part[others]][None] - gain[others, heaviest][None]
        lighter = totals[heaviest] - np.maximum(after, limit)
        price = np.where(after < totals[heaviest] * _LESS, lost / np.maximum(lighter, 1e-9), np.inf)
        i, j = np.unravel_index(np.argmin(price), price.shape)
        if not np.isfinite(price[i, j]):
            break
        part[mine[i]], part[others[j]] = part[others[j]], heaviest
    return part


def _checked_load(load: Any) -> Array:
    load = np.asarray(load)
    checks.check_array("load", load, 2, jnp.number, "[layers, E]", may_be_empty=False)
    load = load.astype(np.float64)
    if not np.all(np.isfinite(load)) or load.min() < 0:
        raise ValueError("load must be finite and not negative, but is not.")
    return load


def _check_ranks(num_ranks: int, num_hosts: int) -> None:
    checks.check_integer("num_ranks", num_ranks)
    if num_ranks % checks.check_integer("num_hosts", num_hosts):
        raise ValueError(
            f"num_ranks must be a multiple of num_hosts={num_hosts}, but is {num_ranks}."
        )


def _check_slots(num_slots: int, num_experts: int, num_ranks: int) -> None:
    if num_slots % num_ranks or num_slots < num_experts:
        raise ValueError(
            f"num_slots must be a multiple of the {num_ranks} ranks and at least the "
            f"{num_experts} experts, but is {num_slots}."
        )


def _suffix(path: Path) -> str:
    if path.suffix not in (".json", ".npz"):
        raise ValueError(f"path must end in .json or .npz, but is {str(path)!r}.")
    return path.suffix
