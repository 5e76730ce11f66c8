"""Places the experts of successive layers so that tokens seldom change rank between layers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import checks
from jax_ep.placement.by_load import LESS
from jax_ep.placement.table import Array, Placement, check_ranks


def place_by_affinity(
    trace: Any,
    *,
    num_ranks: int,
    num_hosts: int = 1,
    max_imbalance: float = 1.05,
    num_experts: int | None = None,
) -> Placement:
    """Places experts so that a token's experts of successive layers are often on one rank.

    A token whose next expert is on its present rank needs no communication (ExFlow,
    arXiv:2401.08383). Experts are first split among hosts, then among the ranks of each host. A
    split clusters the first layer's experts by the choices of their tokens, then assigns the
    experts of one layer after the other, given its neighbours.

    Args:
        trace: [layers, tokens, K] integers: the experts that each token chose; -1 for none.
        num_ranks: N, a multiple of num_hosts. Rank r is on host r // (N / num_hosts).
        num_hosts: the number of hosts.
        max_imbalance: the limit of a rank's load in a layer, divided by the mean load; at least 1.
            A layer may exceed it if no assignment within it is found.
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
    num_experts = largest + 1 if num_experts is None else num_experts
    checks.check_integer("num_experts", num_experts)
    if largest >= num_experts:
        raise ValueError(
            f"num_experts must be above the largest id of trace, {largest}, but is {num_experts}."
        )
    num_slots = -(-num_experts // num_ranks) * num_ranks
    # Empty slots are treated as experts with ids from num_experts on, which no token chooses.
    visits = [_visits(choices, num_slots) for choices in trace]
    # [P, P] for each layer but the last: how often tokens chose one expert there, then another.
    pairs = [np.asarray((a.T @ b).todense()) for a, b in zip(visits, visits[1:], strict=False)]
    load = np.stack([np.asarray(v.sum(axis=0)).ravel() for v in visits])
    limit = max_imbalance * load.sum(axis=1)  # of all hosts or ranks together, [layers]
    experts = np.tile(np.arange(num_slots), (len(trace), 1))
    of_ranks = []
    ranks_per_host = num_ranks // num_hosts
    for of_host in _split(experts, visits, pairs, load, num_hosts, limit / num_hosts):
        of_ranks += _split(of_host, visits, pairs, load, ranks_per_host, limit / num_ranks)
    expert_of_slot = np.concatenate(of_ranks, axis=1)
    expert_of_slot = np.where(expert_of_slot < num_experts, expert_of_slot, -1)
    return Placement.of(expert_of_slot, num_experts=num_experts, num_ranks=num_ranks)


def _visits(choices: Array, num_experts: int) -> Any:
    """Counts each token's choices [tokens, K] of each expert: SciPy sparse [tokens, experts]."""
    from scipy import sparse

    token, k = np.nonzero(choices >= 0)
    ones = np.ones(len(token))
    return sparse.csr_matrix((ones, (token, choices[token, k])), (len(choices), num_experts))


def _split(
    experts: Array, visits: list[Any], pairs: list[Array], load: Array, parts: int, limit: Array
) -> list[Array]:
    """Splits `experts` [layers, n] into parts (hosts or ranks) that tokens seldom leave."""
    # By layer: `visits` [tokens, P] has how often each token chose each expert, `pairs` [P, P]
    # how often a token chose expert e there and f in the next layer, `load` [P] how often each
    # expert was chosen, and `limit` the largest load of a part. Returns [layers, n / parts] each.
    if parts == 1:
        return [experts]
    # `pairs` and `load` of the given experts alone, in their order.
    pairs = [m[np.ix_(a, b)] for m, a, b in zip(pairs, experts, experts[1:], strict=False)]
    load = np.take_along_axis(load, experts, 1)
    profile = _profile(visits, experts)
    best: Array = np.zeros(experts.shape, int)
    most_kept = -1.0
    # Clusters depend on their first center, a random expert, so three are tried.
    for seed in range(3):
        part = np.zeros(experts.shape, int)
        similarity = _clusters(profile, parts, np.random.default_rng(seed))
        part[0] = _assign(similarity, load[0], limit[0])
        for layer in range(1, len(experts)):
            # [n, parts]: how often each expert's tokens chose each part in the layer before.
            gain = _of_parts(pairs[layer - 1].T, part[layer - 1], parts)
            part[layer] = _assign(gain, load[layer], limit[layer])
        # `_sweep` updates `part`, and counts the pairs of successive choices that share one.
        kept = _sweep(part, pairs, load, limit, parts)
        if kept > most_kept:
            best, most_kept = part, kept
    order = np.argsort(best, axis=1, kind="stable")
    return np.split(np.take_along_axis(experts, order, 1), parts, axis=1)


def _profile(visits: list[Any], experts: Array) -> Array:
    """Describes each expert of the first layer by what its tokens choose in the first 5 layers."""
    # The vector of an expert has, for each layer, n entries of norm 1; 5 layers bound its length.
    # Its own entry in the first layer, which says nothing of other experts, is 0.
    visitors = visits[0][:, experts[0]].T  # [n, tokens]
    chosen = [(visitors @ visits[i][:, experts[i]]).toarray() for i in range(min(5, len(experts)))]
    chosen[0] = chosen[0] * (1 - np.eye(len(experts[0])))
    scaled = [m / np.maximum(np.linalg.norm(m, axis=1, keepdims=True), 1e-30) for m in chosen]
    return np.concatenate(scaled, axis=1)


def _clusters(profile: Array, parts: int, rng: np.random.Generator) -> Array:
    """Returns the similarity of each row to each center of balanced k-means, [n, parts]."""
    centers = profile[[rng.integers(len(profile))]]
    # Each new center is the row that is least similar to the centers so far. A row's similarity to
    # them is its largest inner product with one of them.
    while len(centers) < parts:
        alike = (profile @ centers.T).max(axis=1)
        centers = np.concatenate([centers, profile[[np.argmin(alike)]]])
    for _ in range(10):  # bounds the time
        alike = profile @ centers.T
        part = _assign(alike, load=np.zeros(len(profile)), limit=0.0)  # loads do not matter here
        # The sum of each part's rows, scaled to norm 1.
        centers = np.eye(parts)[part].T @ profile
        centers /= np.maximum(np.linalg.norm(centers, axis=1, keepdims=True), 1e-30)
    return profile @ centers.T


def _of_parts(matrix: Array, part: Array, parts: int) -> Array:
    """Sums columns of `matrix` [n, m] by their `part` [m], [n, parts]; parts are equally large."""
    in_order = matrix[:, np.argsort(part, kind="stable")]
    return in_order.reshape(len(matrix), parts, -1).sum(axis=2)


def _sweep(part: Array, pairs: list[Array], load: Array, limit: Array, parts: int) -> float:
    """Reassigns experts, layer by layer, while more choices share a part with the next layer's."""
    # Updates `part` [layers, n] by at most four sweeps, which bounds the time. `pairs` and `limit`
    # are as in `_split`. Returns how many pairs of successive choices then share a part.

    def num_kept(part: Array) -> float:
        same = (a[:, None] == b[None] for a, b in zip(part, part[1:], strict=False))
        return float(sum(np.sum(m * s) for m, s in zip(pairs, same, strict=True)))

    best = num_kept(part)
    for _ in range(4):
        tried = part.copy()
        for layer in range(len(part)):
            gain = np.zeros((part.shape[1], parts))
            if layer:
                gain += _of_parts(pairs[layer - 1].T, tried[layer - 1], parts)
            if layer + 1 < len(part):
                gain += _of_parts(pairs[layer], tried[layer + 1], parts)
            tried[layer] = _assign(gain, load[layer], limit[layer])
        if num_kept(tried) <= best:
            break
        part[:] = tried
        best = num_kept(tried)
    return best


def _assign(gain: Array, load: Array, limit: float) -> Array:
    """Assigns experts to equally large parts so that the sum of `gain` [n, parts] is largest."""
    from scipy.optimize import linear_sum_assignment

    # Each part has as many columns in the assignment problem as it has experts. Swaps follow if the
    # load of a part exceeds `limit`.
    size = len(gain) // gain.shape[1]
    part = linear_sum_assignment(np.repeat(gain, size, axis=1), maximize=True)[1] // size
    if np.bincount(part, load, gain.shape[1]).max() <= limit * (1 + 1e-9):  # within rounding
        return part
    return _repair(part, gain, load, limit)


def _repair(part: Array, gain: Array, load: Array, limit: float) -> Array:
    """Swaps experts until no part's load exceeds `limit`, or no swap helps; updates `part`."""
    parts = gain.shape[1]
    # The loop ends, because a swap never leads back to earlier loads: it makes the parts' loads,
    # sorted from the largest down, lexicographically smaller. The limit only bounds its time.
    for _ in range(100 * len(load)):
        totals = np.bincount(part, load, parts)
        heaviest = np.argmax(totals)
        if totals[heaviest] <= limit:
            break
        mine, others = np.flatnonzero(part == heaviest), np.flatnonzero(part != heaviest)
        moved = load[mine][:, None] - load[others][None]
        # [mine, others]: the larger load of both parts after a swap, and the gain that is lost.
        after = np.maximum(totals[heaviest] - moved, totals[part[others]][None] + moved)
        lost = gain[mine, heaviest][:, None] - gain[mine][:, part[others]]
        lost = lost + gain[others, part[others]][None] - gain[others, heaviest][None]
        lighter = totals[heaviest] - np.maximum(after, limit)
        # The gain that is lost per unit of load above `limit` that the heaviest part loses.
        price = np.where(after < totals[heaviest] * LESS, lost / np.maximum(lighter, 1e-9), np.inf)
        i, j = np.unravel_index(np.argmin(price), price.shape)
        if not np.isfinite(price[i, j]):
            break
        part[mine[i]], part[others[j]] = part[others[j]], heaviest
    return part
