"""Defines in plain NumPy what the functions of the library must compute.

The arrays of all ranks are in a Python list: `x_per_rank[r]` holds rank r's tokens. The tests
compare `dispatch` with this module bit for bit, and everything else within float tolerance.

There are N ranks and E experts. Each rank has L = E / N experts: rank r owns experts
r * L ... r * L + L - 1. Each rank has T tokens, and each token has K choices of experts (top-k). A
receive buffer has R rows (the capacity). H is the hidden size of a token, and F the hidden size of
an expert. A pair is a (token, choice) of a rank. A pair is masked if its choice names no expert,
and dropped if its row does not fit in the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Routes(NamedTuple):
    """The rank and row that each (token, choice) pair of one rank was sent to, for `combine`.

    Attributes:
      ranks: [T, K] int: the rank that owns the chosen expert; -1 where masked or dropped.
      rows: [T, K] int: the row in the receive buffer of that rank; -1 where masked or dropped.
      capacity: R.
    """

    ranks: Array
    rows: Array
    capacity: int


class Dispatched(NamedTuple):
    """The rows that one rank received, and the routes of its own tokens.

    Attributes:
      tokens: [R, H]: the received rows, grouped by local expert. Padding and unused rows are zero.
      group_sizes: [L] int32: the number of rows in each expert's block, padding included.
      expert_counts: [L] int32: the received rows of each expert, the first rows of its block.
      num_dropped: [] int32: the pairs that chose this rank's experts and were dropped.
      rows_needed: [] int32: the least capacity R with which no row sent to this rank is dropped.
      dropped_counts: [L] int32: the dropped pairs of each local expert.
      routes: the ranks and rows that this rank's own tokens were sent to.
    """

    tokens: Array
    group_sizes: Array
    expert_counts: Array
    num_dropped: Array
    rows_needed: Array
    dropped_counts: Array
    routes: Routes


def round_up(value: int, multiple: int) -> int:
    """Rounds `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def dropless_capacity(
    num_ranks: int, num_tokens: int, top_k: int, num_local_experts: int, expert_alignment: int = 1
) -> int:
    """Returns a capacity R that fits the rows of any routing, so that nothing is dropped.

    In the worst case, all N * T * K pairs go to one rank, and each expert's block is padded.
    """
    pairs = num_ranks * num_tokens * top_k
    padding = min(num_local_experts, pairs) * (expert_alignment - 1)
    return round_up(pairs + padding, expert_alignment)


def dispatch(
    x_per_rank: Sequence[Array],
    topk_idx_per_rank: Sequence[Array],
    *,
    num_experts: int,
    capacity: int | None = None,
    expert_alignment: int = 1,
    overflow: str = "tail",
    num_hosts: int = 1,
    host_capacity: int | None = None,
) -> list[Dispatched]:
    """Sends every token to the ranks that own its experts, one row per (token, choice).

    Args:
      x_per_rank: N arrays [T, H], floating.
      topk_idx_per_rank: N arrays [T, K], integer, global expert ids. -1, like any other value
        outside 0 ... E - 1, chooses no expert. A token may choose an expert repeatedly.
      num_experts, expert_alignment, overflow: as in `jax_ep.dispatch`.
      capacity: R. None means `dropless_capacity`.
      num_hosts: M, the number of hosts; host m has ranks m * N / M ... (m + 1) * N / M - 1.
      host_capacity: the most tokens that a rank sends to each other host. None sets no limit.
        Choices of later tokens for experts on that host are masked, and the rank that owns the
        chosen expert counts them as dropped.

    Returns:
      N `Dispatched`. Rows are ordered by local expert, then source rank, then source token, then
      choice. With "tail", rows past R in that order are dropped, and `group_sizes` counts only the
      rows of a block, padding included, that are within R. With "fair", each expert keeps the first
      q of the rows sent to it, where q is the rank's `fair_quota`. Its block holds only the kept
      rows and their padding.
    """
    num_ranks = len(x_per_rank)
    num_tokens, hidden = x_per_rank[0].shape
    top_k = topk_idx_per_rank[0].shape[1]
    num_local = num_experts // num_ranks
    if capacity is None:
        capacity = dropless_capacity(num_ranks, num_tokens, top_k, num_local, expert_alignment)

    unmasked_per_rank = topk_idx_per_rank  # before the host_capacity masks choices
    topk_idx_per_rank = [
        _within_host_capacity(
            idx, rank * num_hosts // num_ranks, num_experts, num_hosts, host_capacity
        )
        for rank, idx in enumerate(unmasked_per_rank)
    ]
    route_ranks = [np.full((num_tokens, top_k), -1, np.int32) for _ in range(num_ranks)]
    route_rows = [np.full((num_tokens, top_k), -1, np.int32) for _ in range(num_ranks)]
    received = []
    for rank in range(num_ranks):
        tokens = np.zeros((capacity, hidden), x_per_rank[0].dtype)
        group_sizes = np.zeros(num_local, np.int32)
        expert_counts = np.zeros(num_local, np.int32)
        dropped_counts = np.zeros(num_local, np.int32)
        own_experts = rank * num_local + np.arange(num_local)
        wanted = [sum(int(np.sum(idx == e)) for idx in topk_idx_per_rank) for e in own_experts]
        quota = max(wanted)  # with "tail", it limits nothing
        if overflow == "fair":
            quota = fair_quota(wanted, capacity, expert_alignment)
        # The row at which the block of the local expert starts. It may exceed the capacity.
        start = 0
        for local in range(num_local):
            row = start
            for source in range(num_ranks):
                chosen = topk_idx_per_rank[source] == rank * num_local + local
                # Visits the (token, choice) pairs by token, then by choice.
                for token, choice in zip(*np.nonzero(chosen), strict=True):
                    if row < min(capacity, start + quota):
                        tokens[row] = x_per_rank[source][token]
                        route_ranks[source][token, choice] = rank
                        route_rows[source][token, choice] = row
                        expert_counts[local] += 1
                    else:
                        dropped_counts[local] += 1
                    row += 1
            end = start + round_up(min(row - start, quota), expert_alignment)
            group_sizes[local] = min(end, capacity) - min(start, capacity)
            start = end
            num_unmasked = sum(int(np.sum(idx == own_experts[local])) for idx in unmasked_per_rank)
            dropped_counts[local] += num_unmasked - wanted[local]
        num_dropped = np.int32(dropped_counts.sum())
        rows_needed = np.int32(sum(round_up(rows, expert_alignment) for rows in wanted))
        received.append(
            (tokens, group_sizes, expert_counts, num_dropped, rows_needed, dropped_counts)
        )
    return [
        Dispatched(*fields, routes=Routes(ranks, rows, capacity))  # type: ignore[arg-type]
        for fields, ranks, rows in zip(received, route_ranks, route_rows, strict=True)
    ]


def _within_host_capacity(
    topk_idx: Array, host: int, num_experts: int, num_hosts: int, host_capacity: int | None
) -> Array:
    """Masks the choices [T, K] of a rank on `host` that exceed `host_capacity`."""
    kept = np.array(topk_idx)
    if kept.dtype.kind == "u":  # it could not hold -1
        kept = kept.astype(np.int64)
    for other in range(num_hosts):
        if host_capacity is None or other == host:
            continue
        is_sent = (topk_idx >= 0) & (topk_idx < num_experts)
        is_sent &= topk_idx // (num_experts // num_hosts) == other
        tokens = np.flatnonzero(is_sent.any(axis=1))[host_capacity:]
        kept[tokens] = np.where(is_sent[tokens], -1, kept[tokens])
    return kept


def fair_quota(wanted: Sequence[int], capacity: int, expert_alignment: int) -> int:
    """Returns the largest q at which blocks of at most q rows per expert fit in `capacity`.

    `wanted` holds the number of rows that are sent to each expert. q is at most max(wanted), with
    which no row is dropped.
    """
    quota = 0
    while quota < max(wanted) and capacity >= sum(
        round_up(min(rows, quota + 1), expert_alignment) for rows in wanted
    ):
        quota += 1
    return quota


def combine(
    y_per_rank: Sequence[Array],
    routes_per_rank: Sequence[Routes],
    topk_weights_per_rank: Sequence[Array] | None = None,
    *,
    num_hosts: int = 1,
) -> list[Array]:
    """Sums the experts' rows by token: out[t] = sum_k weights[t, k] * y[row of (t, k)].

    Args:
      y_per_rank: N arrays [R, H], one row for each row of `Dispatched.tokens`. Padding and unused
        rows are never read.
      routes_per_rank: the `Dispatched.routes` of the N ranks.
      topk_weights_per_rank: N arrays [T, K], floating; None for a sum without weights.
      num_hosts: M, as in `dispatch`.

    Returns:
      N arrays [T, H] of y's dtype. Masked and dropped choices add nothing. A token's rows on one
      host are summed in float32, and the sum is rounded to y's dtype. The hosts' sums are then
      added in float32, in their order. (With one host, the library also rounds the sum of a token's
      rows on each rank; this reference does not.)
    """
    outputs = []
    dtype = y_per_rank[0].dtype
    ranks_of_host = len(y_per_rank) // num_hosts
    for rank, routes in enumerate(routes_per_rank):
        num_tokens, top_k = routes.rows.shape
        sums = np.zeros((num_hosts, num_tokens, y_per_rank[0].shape[1]), np.float32)
        for token in range(num_tokens):
            for choice in range(top_k):
                if routes.rows[token, choice] < 0:
                    continue
                y = _row(y_per_rank, routes, token, choice)
                if topk_weights_per_rank is not None:
                    y = np.float32(topk_weights_per_rank[rank][token, choice]) * y
                sums[routes.ranks[token, choice] // ranks_of_host, token] += y
        out = np.zeros(sums.shape[1:], np.float32)
        # Hosts send their sums in y's dtype, so each sum is rounded before the hosts are summed.
        for host_sums in sums.astype(dtype):
            out += host_sums.astype(np.float32)
        outputs.append(out.astype(dtype))
    return outputs


def dispatch_like(x_per_rank: Sequence[Array], routes_per_rank: Sequence[Routes]) -> list[Array]:
    """Sends other data [T, H'] of the same tokens to the rows [R, H'] of a dispatch, else zeros."""
    dtype = x_per_rank[0].dtype
    return _scatter(x_per_rank, routes_per_rank, weights_per_rank=None, dtype=dtype)


def dispatch_grad(
    grad_tokens_per_rank: Sequence[Array], routes_per_rank: Sequence[Routes]
) -> list[Array]:
    """Computes the gradient of `dispatch` with respect to x: sums the cotangents of each token."""
    return combine(grad_tokens_per_rank, routes_per_rank)


def combine_grad(
    grad_out_per_rank: Sequence[Array],
    y_per_rank: Sequence[Array],
    routes_per_rank: Sequence[Routes],
    topk_weights_per_rank: Sequence[Array] | None = None,
) -> tuple[list[Array], list[Array]]:
    """Computes the gradients of `combine` with respect to y and to the weights.

    Returns:
      The gradients of y, N arrays [R, H] of y's dtype: the row of choice k of token t is
      weights[t, k] * grad_out[t], and padding and unused rows are zero. And the gradients of the
      weights, N arrays [T, K] of their dtype: the inner products of grad_out[t] and
      y[row of (t, k)], zero for masked and dropped choices; an empty list without weights.
    """
    grad_y = _scatter(
        grad_out_per_rank, routes_per_rank, topk_weights_per_rank, y_per_rank[0].dtype
    )
    if topk_weights_per_rank is None:
        return grad_y, []
    grad_weights = []
    for rank, routes in enumerate(routes_per_rank):
        grad = np.zeros(routes.rows.shape, np.float32)
        for token, choice in zip(*np.nonzero(routes.rows >= 0), strict=True):
            g = grad_out_per_rank[rank][token].astype(np.float32)
            grad[token, choice] = np.sum(g * _row(y_per_rank, routes, token, choice))
        grad_weights.append(grad.astype(topk_weights_per_rank[rank].dtype))
    return grad_y, grad_weights


def _row(y_per_rank: Sequence[Array], routes: Routes, token: int, choice: int) -> Array:
    rank, row = routes.ranks[token, choice], routes.rows[token, choice]
    return y_per_rank[rank][row].astype(np.float32)


def _scatter(
    x_per_rank: Sequence[Array],
    routes_per_rank: Sequence[Routes],
    weights_per_rank: Sequence[Array] | None,
    dtype: Any,
) -> list[Array]:
    """Copies each token, times the choice's weight if given, to its choices' rows; else zeros."""
    capacity, hidden = routes_per_rank[0].capacity, x_per_rank[0].shape[1]
    received = [np.zeros((capacity, hidden), dtype) for _ in x_per_rank]
    for source, routes in enumerate(routes_per_rank):
        for token, choice in zip(*np.nonzero(routes.rows >= 0), strict=True):
            payload = x_per_rank[source][token]
            if weights_per_rank is not None:
                weight = np.float32(weights_per_rank[source][token, choice])
                payload = (weight * payload.astype(np.float32)).astype(dtype)
            received[routes.ranks[token, choice]][routes.rows[token, choice]] = payload
    return received


class RankDispatched(NamedTuple):
    """The result of `rank_dispatch` on one rank: one row for each (source rank, token).

    Attributes:
      tokens: [N, T, H]: row (s, t) is token t of rank s, or zero if that token chose no expert of
        this rank.
      local_topk_idx: [N, T, K] int32: the choices as ids of this rank's experts, from 0; -1 where a
        choice is an expert of another rank, or none.
      topk_weights: [N, T, K]: the weights of the choices, 0 where local_topk_idx is -1. None if no
        weights were sent.
    """

    tokens: Array
    local_topk_idx: Array
    topk_weights: Array | None


def rank_dispatch(
    x_per_rank: Sequence[Array],
    topk_idx_per_rank: Sequence[Array],
    topk_weights_per_rank: Sequence[Array] | None = None,
    *,
    num_experts: int,
) -> list[RankDispatched]:
    """Sends every token to the ranks that own its experts, one row per (source rank, token).

    The weights, N arrays [T, K] floating, are sent with the choices. Any choice outside 0 ... E - 1
    chooses no expert.
    """
    num_local = num_experts // len(x_per_rank)
    received = []
    for rank in range(len(x_per_rank)):
        topk_idx = np.stack(topk_idx_per_rank).astype(np.int64)
        here = (topk_idx >= rank * num_local) & (topk_idx < (rank + 1) * num_local)
        local = np.where(here, topk_idx - rank * num_local, -1).astype(np.int32)
        x = np.stack(x_per_rank)
        tokens = np.where(here.any(axis=-1, keepdims=True), x, np.zeros((), x.dtype))
        weights = None
        if topk_weights_per_rank is not None:
            all_weights = np.stack(topk_weights_per_rank)
            weights = np.where(here, all_weights, np.zeros((), all_weights.dtype))
        received.append(RankDispatched(tokens, local, weights))
    return received


def rank_combine(
    y_per_rank: Sequence[Array], local_topk_idx_per_rank: Sequence[Array]
) -> list[Array]:
    """Sums the ranks' partial outputs: out[t] of rank s is the sum of all ranks' y[s, t].

    Args:
      y_per_rank: N arrays [N, T, H]: each rank's weighted sum of its own experts' outputs, for
        every (source rank, token). It is added only if the token chose one of the rank's experts.
      local_topk_idx_per_rank: N arrays [N, T, K], as `rank_dispatch` returned them.

    Returns:
      N arrays [T, H] of y's dtype, accumulated in float32 in rank order.
    """
    outputs = []
    for source in range(len(y_per_rank)):  # the rank that sent the tokens
        out = np.zeros(y_per_rank[0].shape[1:], np.float32)
        for y, local in zip(y_per_rank, local_topk_idx_per_rank, strict=True):
            sent = (local[source] >= 0).any(axis=-1)
            out[sent] += y[source][sent].astype(np.float32)
        outputs.append(out.astype(y_per_rank[0].dtype))
    return outputs


class Routing(NamedTuple):
    """The result of `top_k_routing`.

    Attributes:
      topk_idx: [T, K] int32: the ids of the chosen experts, best first.
      topk_weights: [T, K] float64: the weights of the chosen experts.
      probs: [T, E] float64: the score of every expert, before bias, groups and normalization.
    """

    topk_idx: Array
    topk_weights: Array
    probs: Array


def top_k_routing(
    logits: Array,
    k: int,
    *,
    score: str = "softmax",
    bias: Array | None = None,
    choose_by: str = "score",
    num_groups: int = 1,
    groups_kept: int = 1,
    group_score: str | int = "top2",
    normalize: bool = True,
    normalize_epsilon: float = 0.0,
    scale: float = 1.0,
) -> Routing:
    """Chooses k experts for each token from logits [T, E]; computes in float64.

    Experts are chosen by their float32 scores or, with `choose_by="logit"`, by their logits; of
    equal ones, the lower id wins. `bias` [E] is added to these for the choice only (DeepSeek-V3,
    arXiv:2412.19437, 2.1.2). With `num_groups` > 1 the experts form equal groups of consecutive
    ids, and are chosen from the `groups_kept` best ones: by the sum of their two best biased scores
    ("top2"), their best one ("max") or their `group_score` best ones. If nothing is added to
    scores, logits are compared, which have their order. Weights are exact if scores underflow, too.
    """
    logits = logits.astype(np.float64)
    num_tokens, num_experts = logits.shape
    log_scores = _log_scores(logits, score)
    probs = np.exp(log_scores)
    num_best = int({"top2": 2, "max": 1}.get(str(group_score), group_score))
    has_sums = bias is not None or (groups_kept < num_groups and num_best > 1)
    compared = (probs if has_sums and choose_by == "score" else logits).astype(np.float32)
    if bias is not None:
        compared = compared + bias.astype(np.float32)
    if groups_kept < num_groups:
        grouped = compared.reshape(num_tokens, num_groups, -1)
        group_scores = np.sort(grouped, axis=-1)[..., -num_best:].sum(axis=-1)
        group_of_expert = np.arange(num_experts) // grouped.shape[-1]
        kept_groups = _best_first(group_scores, groups_kept)
        is_kept = (kept_groups[:, :, None] == group_of_expert).any(axis=1)
        compared = np.where(is_kept, compared, -np.inf)

    topk_idx = _best_first(compared, k)
    weights = np.take_along_axis(probs, topk_idx, axis=-1)
    if normalize:
        log_weights = np.take_along_axis(log_scores, topk_idx, axis=-1)
        log_epsilon = math.log(normalize_epsilon) if normalize_epsilon else -np.inf
        # Divides weights and epsilon by the largest of them first: not all may underflow to 0.
        largest = np.maximum(log_weights.max(axis=-1, keepdims=True), log_epsilon)
        weights = np.exp(log_weights - largest)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(log_epsilon - largest)
        weights = weights / total
    return Routing(topk_idx.astype(np.int32), weights * scale, probs)


def _log_scores(logits: Array, score: str) -> Array:
    """Computes the logarithms of the scores [T, E], finite even where a score underflows to 0."""
    if score == "softmax":
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    if score == "sigmoid":
        return -np.logaddexp(0, -logits)
    if score == "sqrt_softplus":
        # Below -40, softplus(x) equals exp(x) in float64, so its logarithm is x itself.
        low = np.minimum(logits, -40)
        return 0.5 * np.where(logits < -40, low, np.log(np.logaddexp(0, np.maximum(logits, -40))))
    raise ValueError(f"score must be 'softmax', 'sigmoid' or 'sqrt_softplus', but is {score!r}.")


def _best_first(scores: Array, number: int) -> Array:
    """Returns the indices of the `number` largest scores along the last axis, best first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :number]


def load_balance_loss(probs: Array, topk_idx: Array) -> float:
    """Computes the load-balancing loss of Switch Transformers (arXiv:2101.03961, equation 4).

    The loss is E * sum_e f_e * p_e. Here f_e is the fraction of choices that name expert e, and p_e
    is the mean over tokens of e's score, normalized over experts. Choices outside [0, E), and
    tokens that have only such choices, do not count.
    """
    num_experts = probs.shape[1]
    is_choice = (topk_idx >= 0) & (topk_idx < num_experts)
    choices = topk_idx[is_choice]
    probs = probs[is_choice.any(axis=-1)]
    if len(choices) == 0:
        return 0.0
    share = np.array([np.mean(choices == e) for e in range(num_experts)])
    normalized = probs / probs.sum(axis=-1, keepdims=True)
    return float(num_experts * np.sum(share * normalized.mean(axis=0)))


def router_z_loss(logits: Array) -> float:
    """Computes ST-MoE's router z-loss, mean_t (logsumexp_e logits[t, e])^2 (arXiv:2202.08906)."""
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1)
    return float(np.mean((top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))) ** 2))


def update_expert_bias(bias: Array, expert_counts: Array, rate: float) -> Array:
    """Returns the selection bias [..., E] after a step of DeepSeek-V3's load balancing (§2.1.2).

    It rises by `rate` for experts with fewer tokens than the mean, and falls for those with more.
    """
    counts = expert_counts.astype(np.float64)
    return bias + rate * np.sign(counts.mean(axis=-1, keepdims=True) - counts)


def grouped_matmul(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """Multiplies each of L groups of rows of lhs [R, H] by the group's matrix of rhs [L, H, F].

    Group l has the `group_sizes[l]` rows that follow group l - 1. Returns [R, F] float64, zero past
    the last group.
    """
    out = np.zeros((lhs.shape[0], rhs.shape[2]), np.float64)
    start = 0
    for group, size in enumerate(group_sizes):
        block = slice(start, start + int(size))
        out[block] = lhs[block].astype(np.float64) @ rhs[group].astype(np.float64)
        start += int(size)
    return out


def gated_mlp(x: Array, wi_0: Array, wi_1: Array, wo: Array) -> Array:
    """Computes one expert, (silu(x @ wi_0) * (x @ wi_1)) @ wo, in float64."""
    x, wi_0, wi_1, wo = (a.astype(np.float64) for a in (x, wi_0, wi_1, wo))
    return (_silu(x @ wi_0) * (x @ wi_1)) @ wo


def expert_mlp(tokens: Array, group_sizes: Array, wi_0: Array, wi_1: Array, wo: Array) -> Array:
    """Applies each of L local experts (`gated_mlp`) to its rows of [R, H], in float64."""
    gate = grouped_matmul(tokens, wi_0, group_sizes)
    up = grouped_matmul(tokens, wi_1, group_sizes)
    return grouped_matmul(_silu(gate) * up, wo, group_sizes)


def moe_layer(
    x: Array, topk_idx: Array, topk_weights: Array, wi_0: Array, wi_1: Array, wo: Array
) -> Array:
    """Computes the MoE layer on a single rank that holds all tokens and experts, in float64.

    x is [T, H], topk_idx and topk_weights are [T, K], wi_0 and wi_1 are [E, H, F], and wo is
    [E, F, H]. Returns [T, H].
    """
    out = np.zeros(x.shape, np.float64)
    for expert in range(len(wo)):
        y = gated_mlp(x, wi_0[expert], wi_1[expert], wo[expert])
        weight = np.where(topk_idx == expert, topk_weights.astype(np.float64), 0.0).sum(axis=-1)
        out += weight[:, None] * y
    return out


def float8(x: Array, block: tuple[int, int] = (1, 128)) -> Array:
    """Rounds x to float8_e4m3fn with one scale per block; returns the rounded numbers in float64.

    A number is the exact product of a float8 value and the scale of its block. The scale is the
    largest magnitude of a finite number in the block, times (1 - 2^-22) / 448, in float32, and at
    least 2^-117. NaN and infinities become NaN, without effect on the rest of their block. The
    rounding error of a finite x is at most max(2^-4 |x|, 2^-10 scale).

    Args:
      x: [..., R, C] floating, cast to float32 first.
      block: the numbers of rows and columns of a block. The last blocks may be partial.
    """
    height, width = block
    numbers = np.empty(x.shape, np.float64)
    for row in range(0, x.shape[-2], height):
        for column in range(0, x.shape[-1], width):
            part = np.s_[..., row : row + height, column : column + width]
            numbers[part] = _float8_block(x[part].astype(np.float32))
    return numbers


def _float8_block(x: Array) -> Array:
    """Rounds x [..., R, C] float32 as `float8` does, with one scale for each [R, C]; in float64."""
    finite = np.isfinite(x)
    largest = np.abs(np.where(finite, x, 0)).max(axis=(-2, -1), keepdims=True)
    # `largest` is multiplied by a little less than 1 / 448, so that 448 * scale, the largest number
    # that this scale can represent, never exceeds `largest`. With 2^-117, the least scale, the
    # smallest value but 0, 2^-9, stands for 2^-126, the smallest normal float32.
    scale = np.maximum(largest * np.float32((1 - 2**-22) / 448), np.float32(2.0**-117))
    value = (np.where(finite, x, 0) * (1 / scale)).astype(np.float64)
    # With 4 significant bits, a value in [2^(e - 1), 2^e) is a multiple of 2^(e - 4); e is >= -5.
    spacing = np.exp2(np.maximum(np.frexp(value)[1], -5) - 4)
    value = np.minimum(np.abs(np.round(value / spacing) * spacing), 448) * np.sign(value)
    return np.where(finite, value * scale.astype(np.float64), np.nan)


def float8_matmul(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """Computes `grouped_matmul` of rows lhs [R, H] and L matrices rhs, both rounded to float8.

    Rows of lhs have one scale per 128 numbers of a row, and matrices have one scale per block of
    128 x 128.
    """
    return grouped_matmul(float8(lhs), float8(rhs, (128, 128)), group_sizes)


def float8_matmul_drhs(lhs: Array, grad: Array, group_sizes: Array) -> Array:
    """Computes the gradient of `float8_matmul` with respect to rhs, [L, H, F] float64.

    It is lhs.T @ grad [R, F] over each group's rows. Both operands are rounded to float8, with one
    scale per 128 rows of a group and 128 columns.
    """
    drhs = np.zeros((len(group_sizes), lhs.shape[1], grad.shape[1]), np.float64)
    start = 0
    for group, size in enumerate(group_sizes):
        rows = slice(start, start + int(size))
        drhs[group] = float8(lhs[rows], (128, 128)).T @ float8(grad[rows], (128, 128))
        start += int(size)
    return drhs


def float8_expert_mlp(
    tokens: Array, group_sizes: Array, wi_0: Array, wi_1: Array, wo: Array
) -> Array:
    """Computes `expert_mlp` of [R, H] in float64, with all matmuls' operands rounded to float8."""
    gate, up = (float8_matmul(tokens, wi, group_sizes) for wi in (wi_0, wi_1))
    return float8_matmul(_silu(gate) * up, wo, group_sizes)


def float8_expert_mlp_grad(
    grad: Array, tokens: Array, group_sizes: Array, wi_0: Array, wi_1: Array, wo: Array
) -> tuple[Array, Array, Array, Array]:
    """Returns the gradients of `float8_expert_mlp` for tokens, wi_0, wi_1 and wo, in float64.

    Rounding has the gradient 1. The forward pass keeps both pre-activations in float8, with one
    scale per 128 numbers of a row, and the backward pass computes from these. Tokens and cotangents
    are rounded in the same way. For the gradients of the matrices, `float8_matmul_drhs` rounds its
    operands a second time.
    """
    tokens, grad = float8(tokens), float8(grad)
    gate, up = (float8(float8_matmul(tokens, wi, group_sizes)) for wi in (wi_0, wi_1))
    dhidden = float8_matmul(grad, wo.swapaxes(1, 2), group_sizes)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
    # The derivative of silu(gate) is sigmoid * (1 + gate * (1 - sigmoid)).
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dhidden * _silu(gate)
    dtokens = float8_matmul(dgate, wi_0.swapaxes(1, 2), group_sizes)
    dtokens += float8_matmul(dup, wi_1.swapaxes(1, 2), group_sizes)
    dwi_0, dwi_1 = (float8_matmul_drhs(tokens, dpre, group_sizes) for dpre in (dgate, dup))
    return dtokens, dwi_0, dwi_1, float8_matmul_drhs(_silu(gate) * up, grad, group_sizes)


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))
