"""Places the experts of successive layers so that tokens seldom change rank between layers."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import checks
from jax_ep.placement.by_load import LESS
from jax_ep.placement.table import Array, Placement, check_ranks

# An integer program with more variables than this is not tried, because it would exceed its time
# limit. A program has one variable for each expert of a layer and each host or rank.
_LARGEST_PROGRAM = 1024


def place_by_affinity(
    trace: Any,
    *,
    num_ranks: int,
    num_hosts: int = 1,
    max_imbalance: float = 1.05,
    num_experts: int | None = None,
) -> Placement:
    """Places experts so that a token's experts of successive layers are often on one rank.

    The idea is ExFlow's (arXiv:2401.08383): a token whose next expert is on its present rank needs
    no communication. Experts are first split among hosts, then among the ranks of each host. Each
    split clusters the first layer's experts by the experts that their tokens choose in the next
    layers. Layer by layer, it then assigns each further expert to the cluster whose experts in the
    layer before share the most tokens with it. All layers are then reassigned repeatedly, each
    given its two neighbours. If an assignment exceeds the load limit, pairs of experts are swapped
    until it does not. Small layers are finally reassigned by integer programs (MoETuner,
    arXiv:2502.06643), which SciPy's HiGHS solves within ten seconds for all layers. A layer whose
    program takes longer than its share of this time keeps its assignment.

    Args:
        trace: [layers, tokens, K] integers: the experts that each token chose; -1 for none.
        num_ranks: N, a multiple of num_hosts. Rank r is on host r // (N / num_hosts).
        num_hosts: the number of hosts.
        max_imbalance: the limit of a rank's load in a layer, divided by the mean load; at least 1.
            A layer may exceed the limit if no assignment within it is found, for example because
            one expert alone exceeds it.
        num_experts: E, the number of experts of a layer; None: the largest id in the trace + 1.

    Returns:
        A `Placement` with one copy of each expert. The number of slots P is E rounded up to a
        multiple of N; the slots beyond E are empty.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    trace = np.asarray(trace)
    checks.check_array("trace", trace, 3, jnp.integer, "[layers, tokens, K]", may_be_empty=False)
    check_ranks(num_ranks, num_hosts)
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
    # Empty slots are treated as experts with ids from num_experts on, which no token chooses.
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
    """Counts how often each token chose each expert of one layer, from choices [tokens, K].

    Returns a SciPy sparse matrix [tokens, num_experts].
    """
    from scipy import sparse

    token, k = np.nonzero(choices >= 0)
    ones = np.ones(len(token))
    return sparse.csr_matrix((ones, (token, choices[token, k])), (len(choices), num_experts))


def _split(
    experts: Array, visits: list[Any], together: list[Array], load: Array, parts: int, limit: Array
) -> list[Array]:
    """Splits the experts of all layers into parts (hosts or ranks) that tokens seldom leave.

    P is the number of slots: E, the number of experts, rounded up to a multiple of the number of
    ranks. Expert ids from E to P - 1 stand for empty slots: no token chooses them.

    Args:
        experts: [layers, n], the ids of the experts to split.
        visits: a list with, for each layer, a sparse matrix [tokens, P]: how often each token chose
            each expert.
        together: a list with, for each layer i but the last, an array [P, P]: entry (e, f) counts
            how often a token chose expert e in layer i and expert f in layer i + 1.
        load: [layers, P], how often each expert was chosen.
        parts: the number of parts, which divides n.
        limit: [layers], the largest load that a part may have in each layer: the load of a part is
            the sum of its experts' loads.

    Returns:
        A list with, for each part, the ids of its experts, [layers, n / parts].
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
    """Describes each expert of the first layer by a vector, to cluster similar experts.

    `experts` [layers, n] are the ids of n experts of each layer. The vector of expert e covers the
    first m = min(5, layers) layers. For each of these layers it has n entries: how often the tokens
    that chose e in the first layer chose each of the layer's n experts. The entry of e itself is
    zero. The n entries of each layer are scaled to Euclidean norm 1.

    Returns:
        The vectors, [n, m * n].
    """
    first = visits[0][:, experts[0]].T
    later = [(first @ visits[i][:, experts[i]]).toarray() for i in range(min(5, len(experts)))]
    later[0] = later[0] * (1 - np.eye(len(experts[0])))
    scaled = [m / np.maximum(np.linalg.norm(m, axis=1, keepdims=True), 1e-30) for m in later]
    return np.concatenate(scaled, axis=1)


def _clusters(profile: Array, parts: int, rng: np.random.Generator) -> Array:
    """Clusters the n rows of `profile` into `parts` clusters of equal size (balanced k-means).

    Returns [n, parts]: the similarity (inner product) of each row to each cluster's center. `rng`
    draws the row that is the first center.
    """
    centers = profile[[rng.integers(len(profile))]]
    # Each new center is the row that is least similar to the centers so far. A row's similarity to
    # them is its largest inner product with one of them.
    while len(centers) < parts:
        alike = (profile @ centers.T).max(axis=1)
        centers = np.concatenate([centers, profile[[np.argmin(alike)]]])
    for _ in range(10):
        alike = profile @ centers.T
        part = _assign(alike, np.zeros(len(profile)), 0.0)
        centers = np.eye(parts)[part].T @ profile
        centers /= np.maximum(np.linalg.norm(centers, axis=1, keepdims=True), 1e-30)
    return profile @ centers.T


def _of_parts(matrix: Array, part: Array, parts: int) -> Array:
    """Sums the columns of `matrix` [n, m] by part (host or rank); returns the sums, [n, parts].

    `part` [m] is the part that each column belongs to. All parts have equally many columns.
    """
    in_order = matrix[:, np.argsort(part, kind="stable")]
    return in_order.reshape(len(matrix), parts, -1).sum(axis=2)


def _sweep(
    part: Array, near: list[Array], load: Array, limit: Array, parts: int, assign: Any, most: int
) -> float:
    """Reassigns experts to parts (hosts or ranks) in sweeps over all layers.

    A pair is a token's choice in a layer and its choice in the next layer. Sweeps maximize the
    number of pairs whose two experts are in the same part. A sweep that does not raise this number
    is undone, and is the last.

    Args:
        part: [layers, n], the part of each expert; updated in place.
        near: a list with, for each layer i but the last, an array [n, n]: the number of pairs of
            each expert of layer i with each expert of layer i + 1.
        load: [layers, n], how often each expert was chosen.
        limit: [layers], the largest load that a part may have in each layer.
        parts: the number of parts.
        assign: a function like `_assign`, (gain [n, parts], load [n], limit) -> part of each
            expert [n], which reassigns the experts of one layer.
        most: the largest number of sweeps.

    Returns:
        The number of pairs whose two experts are in the same part.
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
    """Assigns the n experts of one layer to parts (hosts or ranks) of equally many experts.

    Maximizes the sum of `gain` over the experts. If a part's load then exceeds `limit`, swaps
    experts between parts.

    Args:
        gain: [n, parts], the gain of placing each expert in each part, such as the number of the
            expert's tokens that choose an expert of this part in a neighboring layer.
        load: [n], how often each expert was chosen.
        limit: the largest load that a part may have: the sum of its experts' loads.

    Returns:
        The part of each expert, [n].
    """
    from scipy.optimize import linear_sum_assignment

    size = len(gain) // gain.shape[1]
    part = linear_sum_assignment(np.repeat(gain, size, axis=1), maximize=True)[1] // size
    if np.bincount(part, load, gain.shape[1]).max() <= limit * (1 + 1e-9):
        return part
    return _repair(part, gain, load, limit)


def _assign_exactly(gain: Array, load: Array, limit: float, seconds: float) -> Array:
    """Assigns the experts of one layer to parts, as `_assign` does, by solving an integer program.

    The program maximizes the gain among all assignments in which no part's load exceeds `limit`. If
    it has no solution, or is not solved to optimality within `seconds`, returns the result of
    `_assign`. All arguments but `seconds` are those of `_assign`.
    """
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
    """Swaps pairs of experts between parts until no part's load exceeds `limit`.

    Each swap moves an expert out of the part with the largest load and an expert of another part
    into it. Of all such swaps, the one that loses the least gain per unit of load removed is made.
    Stops early if no swap lowers the largest load.

    Args:
        part: [n], the part of each expert of one layer; updated in place.
        gain: [n, parts], the gain of each expert in each part, as in `_assign`.
        load: [n], how often each expert was chosen.
        limit: the largest load that a part may have.

    Returns:
        `part`.
    """
    parts = gain.shape[1]
    # The loop ends, because a swap never leads back to earlier loads: it makes the parts' loads,
    # sorted from the largest down, lexicographically smaller.
    for _ in range(100 * len(load)):
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
        price = np.where(after < totals[heaviest] * LESS, lost / np.maximum(lighter, 1e-9), np.inf)
        i, j = np.unravel_index(np.argmin(price), price.shape)
        if not np.isfinite(price[i, j]):
            break
        part[mine[i]], part[others[j]] = part[others[j]], heaviest
    return part
