"""Chooses the k best experts of each token and computes their weights, by a kernel where it runs.

The kernel is `pallas_kernels.routing.top_k`; elsewhere XLA sorts. Both compare experts by the same
numbers, in the order of `lax.top_k`, and take the first of equals. Weights may differ in their last
bits, since scores are summed in another order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.implementations import Implementation, Implementations
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import Program, define_primitive, match_varying, result_type
from pallas_kernels.routing import order, plan
from pallas_kernels.routing.plan import Groups, Weighing


def choose(
    logits: jax.Array,
    k: int,
    weighing: Weighing,
    *,
    scores: str = "logit",
    rounded: jax.Array | None = None,
    bias: jax.Array | None = None,
    groups: Groups | None = None,
    gathered: jax.Array | None = None,
    softmax: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns each token's k best experts [T, k] int32, their weights, and the softmax or None.

    Experts are compared by their logits. With a bias they are compared by the sum of score and bias
    first, and groups by the sum of their two best; see `pallas_kernels.routing.order`.

    Gradients flow to the logits, or to `gathered`, through the weights and the softmax.

    Args:
        logits: [T, E] float32.
        k: choices per token.
        weighing: how weights are computed.
        scores: what the bias is added to, and what is summed of groups: a key of `order.OF_TWO`.
        rounded: [T, E] float32, the scores if a bias or groups need them and they are neither
            logits nor sigmoids.
        bias: [E] float32, or None.
        groups: the groups to choose within, or None.
        gathered: [T, E] float32, the numbers from which the weights of the chosen are computed;
            None: the softmax if it is returned and not normalized again, else the logits.
        softmax: whether to return the softmax of the logits, [T, E].
    """
    given = {"rounded": rounded, "bias": None if bias is None else bias[None], "gathered": gathered}
    operands = {name: array for name, array in given.items() if array is not None}
    topk_idx, chosen, weights, *made = _choose_p.bind(
        *map(lax.stop_gradient, match_varying((logits, *operands.values()), ())),
        given=tuple(operands),
        k=k,
        weighing=weighing,
        scores=scores,
        groups=groups,
        softmax=softmax,
    )
    probs = _softmax_known(logits, *made) if softmax else None
    chosen = _chosen_known(_weighed(logits, gathered, probs, weighing), topk_idx, chosen)
    return topk_idx, _weights_known(chosen, weights, weighing), probs


def _weighed(
    logits: jax.Array, gathered: jax.Array | None, probs: jax.Array | None, weighing: Weighing
) -> jax.Array:
    if gathered is not None:
        return gathered
    return logits if probs is None or weighing.normalize else probs


# Each function returns a result that the primitive has computed, with a custom JVP rule; so do the
# rules, which makes derivatives of higher order work.


@jax.custom_jvp
def _softmax_known(values: jax.Array, softmax: jax.Array) -> jax.Array:
    return softmax


@_softmax_known.defjvp
def _softmax_derivative(primals, tangents):
    softmax = _softmax_known(*primals)
    product = softmax * tangents[0]
    return softmax, product - softmax * jnp.sum(product, axis=-1, keepdims=True)


@jax.custom_jvp
def _chosen_known(weighed: jax.Array, topk_idx: jax.Array, chosen: jax.Array) -> jax.Array:
    return chosen


@_chosen_known.defjvp
def _chosen_derivative(primals, tangents):
    topk_idx = primals[1]
    return _chosen_known(*primals), jnp.take_along_axis(tangents[0], topk_idx, axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _weights_known(chosen: jax.Array, weights: jax.Array, weighing: Weighing) -> jax.Array:
    return weights


@_weights_known.defjvp
def _weights_derivative(weighing, primals, tangents):
    weights = _weights_known(*primals, weighing)
    return weights, jax.jvp(functools.partial(weigh, weighing), primals[:1], tangents[:1])[1]


def weigh(weighing: Weighing, chosen: jax.Array) -> jax.Array:
    """Computes the weights [T, k] float32 of the chosen; see `Weighing`.

    The scores and epsilon are divided by the largest of them, so that their sum is at least 1/2,
    however small they are. If all scores are 0, the weights are 0.
    """
    if weighing.normalize:
        exponent, factor = _sigmoid_factors(chosen) if weighing.sigmoid else (chosen, None)
        log_epsilon = jnp.float32(weighing.log_epsilon)
        largest = jnp.maximum(jnp.max(exponent, axis=-1, keepdims=True), log_epsilon)
        largest = lax.stop_gradient(largest)
        terms = jnp.exp(exponent - largest)
        if factor is not None:
            terms *= factor
        total = jnp.sum(terms, axis=-1, keepdims=True)
        if weighing.epsilon:
            total += jnp.exp(log_epsilon - largest)
        chosen = terms / jnp.maximum(total, jnp.float32(plan.LEAST_SUM))
    return chosen * jnp.asarray(weighing.scale, jnp.float32)


def _sigmoid_factors(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (a, f) with sigmoid(logits) = e^a * f and f >= 1/2, exact for logits below -87."""
    is_low = logits < 0
    exponent = jnp.where(is_low, logits, 0.0)
    return exponent, jax.nn.sigmoid(jnp.where(is_low, -logits, logits))


class _Arrays:
    """`order.Ops` of arrays."""

    def zero(self) -> jax.Array:
        return jnp.float32(0)

    def call(self, function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
        return function(*operands)

    def where_finite(self, of: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(of), value, 0.0)

    def where_positive(self, of: jax.Array, value: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.where(of > 0, value, other)


_ARRAYS = _Arrays()
_MOST_RANKED = 32  # choices that are ordered by comparing each with all others


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _total_order(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 in the total order -NaN < -inf < -0 < 0 < inf < NaN."""
    bits = _bits(x)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """What elements are compared by, [..., n] float32 each.

    Attributes:
        first: decides unless elements are equal in it.
        others: returns the keys that decide then, the first first. They are computed in the rare
            branches that need them, or not at all.
    """

    first: jax.Array
    others: Callable[[], list[jax.Array]] = list

    def all(self) -> list[jax.Array]:
        return [self.first, *self.others()]

    def map(self, function: Callable[[jax.Array], jax.Array]) -> _Keys:
        if self.others is list:
            return _Keys(function(self.first))
        return _Keys(function(self.first), lambda: list(map(function, self.others())))


def _best_first(keys: _Keys, k: int) -> jax.Array:
    """Returns the indices [..., k] int32 of the largest of the last axis, the first of equals."""
    values, best = _top_k(keys.first, k)
    best = best.astype(jnp.int32)
    if keys.others is list:
        return best
    bits = _bits(values)
    columns = lax.broadcasted_iota(jnp.int32, keys.first.shape, keys.first.ndim - 1)
    equals_last = (_bits(keys.first) == bits[..., -1:]) & (columns != best[..., -1:])
    has_ties = _any(equals_last) | jnp.any(bits[..., 1:] == bits[..., :-1])
    return lax.cond(has_ties, lambda: _best_of_ties(keys.all(), best), lambda: best)


def _top_k(x: jax.Array, k: int) -> list[jax.Array]:
    """Returns the values and indices of `lax.top_k`, behind a barrier each.

    Without a barrier XLA sorts all elements where what follows slices the results. XLA for CPUs
    crashes if one barrier is behind both.
    """
    return [lax.optimization_barrier(result) for result in lax.top_k(x, k)]


def _any(x: jax.Array) -> jax.Array:
    """Returns whether any element is true: like `jnp.any`, and faster on CPUs."""
    return jnp.any(jnp.max(x.astype(jnp.float32), axis=tuple(range(x.ndim - 1))) > 0)


def _best_of_ties(keys: Sequence[jax.Array], best: jax.Array) -> jax.Array:
    """Returns what `_best_first` does, by all keys, given the best by the first key."""
    k = best.shape[-1]
    if k > _MOST_RANKED:
        return _sorted(keys, k)
    # The best are the right ones if elements that equal the last in the first key do so in all, or
    # if they are among the best themselves.
    of_last = [jnp.take_along_axis(_bits(key), best[..., -1:], axis=-1) for key in keys]
    is_tie, *is_alike = (_bits(key) == last for key, last in zip(keys, of_last, strict=True))
    best_ties = jnp.sum(jnp.take_along_axis(is_tie, best, axis=-1), axis=-1)
    has_others = jnp.sum(is_tie, axis=-1) > best_ties
    has_unlike = jnp.any(is_tie & ~functools.reduce(jnp.logical_and, is_alike), axis=-1)
    return lax.cond(
        jnp.any(has_others & has_unlike), lambda: _sorted(keys, k), lambda: _ranked(keys, best)
    )


def _ranked(keys: Sequence[jax.Array], indices: jax.Array) -> jax.Array:
    """Returns indices [..., k] in the order of their keys, which are compared each with each.

    Of equal keys the index that comes first stays first.
    """
    number = indices.shape[-1]
    of_indices = [_total_order(jnp.take_along_axis(key, indices, axis=-1)) for key in keys]
    pairs = (*indices.shape, number)  # of a place i and a place, or a rank, j
    axis = indices.ndim
    places = lax.broadcasted_iota(jnp.int32, pairs, axis)
    precedes = lax.broadcasted_iota(jnp.int32, pairs, axis - 1) < places
    for key in reversed(of_indices):
        one, other = key[..., :, None], key[..., None, :]
        precedes = (one > other) | ((one == other) & precedes)
    ranks = jnp.sum(precedes, axis=-2, dtype=jnp.int32)
    is_at = ranks[..., None] == places
    return jnp.sum(jnp.where(is_at, indices[..., None], 0), axis=-2, dtype=jnp.int32)


def _sorted(keys: Sequence[jax.Array], k: int) -> jax.Array:
    """Returns what `_best_first` does, by sorting candidates by all of their keys."""
    indices = lax.broadcasted_iota(jnp.int32, keys[0].shape, keys[0].ndim - 1)
    is_out = jnp.zeros_like(indices)
    if len(keys) * k < keys[0].shape[-1]:
        indices, is_out = _candidates(keys, k)
        keys = [jnp.take_along_axis(key, indices, axis=-1) for key in keys]
    words = is_out, *(~_total_order(key) for key in keys), indices
    return lax.sort(words, num_keys=len(words))[-1][..., :k]


def _candidates(keys: Sequence[jax.Array], k: int) -> tuple[jax.Array, jax.Array]:
    """Returns indices of candidates that include the best k, and 1 for duplicates to leave out.

    Each key contributes its k largest among the elements that equal the k-th best in all earlier
    keys. `lax.top_k` by one key is much faster than a sort of all elements by several keys.
    """
    # The two least NaNs in the total order. Elements that are no ties come after all that are.
    least, next_to_least = (
        lax.bitcast_convert_type(jnp.int32(bits), jnp.float32) for bits in (-1, -2)
    )
    is_tie = jnp.ones_like(keys[0], jnp.bool_)
    indices: list[jax.Array] = []
    is_out: list[jax.Array] = []
    for key in keys:
        key = jnp.where(is_tie, jnp.where(_bits(key) == -1, next_to_least, key), least)
        best = lax.top_k(key, k)[1].astype(jnp.int32)
        is_tie_of_best = jnp.take_along_axis(is_tie, best, axis=-1)
        order_of_best = _total_order(jnp.take_along_axis(key, best, axis=-1))
        last = order_of_best[..., -1:]
        out = ~is_tie_of_best
        if len(indices) < len(keys) - 1:  # the next key compares the elements equal to the k-th
            out |= order_of_best == last
        indices.append(best)
        is_out.append(out)
        is_tie &= _total_order(key) == last
    return (
        jnp.concatenate(indices, axis=-1),
        jnp.concatenate(is_out, axis=-1).astype(jnp.int32),
    )


def _by_xla(logits, *others, given, k, weighing, scores, groups, softmax):
    operands = dict(zip(given, others, strict=True))
    probs = jax.nn.softmax(logits, axis=-1) if softmax else None
    with_sums = _keys_with_sums(logits, operands, scores, groups)
    keys = with_sums if "bias" in operands else _Keys(logits)
    if groups is not None:
        is_kept = _is_in_best_groups(with_sums, scores, groups)
        keys = keys.map(lambda key: jnp.where(is_kept, key, -jnp.inf))
    topk_idx = _best_first(keys, k)
    weighed = _weighed(logits, operands.get("gathered"), probs, weighing)
    chosen = jnp.take_along_axis(weighed, topk_idx, axis=-1)
    return topk_idx, chosen, weigh(weighing, chosen), *([probs] if softmax else [])


def _keys_with_sums(
    logits: jax.Array, operands: Mapping[str, jax.Array], scores: str, groups: Groups | None
) -> _Keys:
    """Returns the logits [T, E], after (high, low) if a bias is added, or scores of groups are."""
    bias = operands.get("bias")
    if not order.has_sums(scores, bias, groups):
        return _Keys(logits)
    sums = functools.partial(
        order.score_and_bias, _ARRAYS, scores, logits, operands.get("rounded"), bias
    )
    return _Keys(sums(rounded=True)[0], lambda: [jnp.broadcast_to(sums()[1], logits.shape), logits])


def _is_in_best_groups(keys: _Keys, scores: str, groups: Groups) -> jax.Array:
    """Returns whether experts are in a token's best groups, [T, E] bool.

    `keys` are the logits [T, E], after (high, low) if there are sums.
    """
    tokens, num_experts = keys.first.shape
    size = num_experts // groups.number
    grouped = keys.map(lambda key: key.reshape(tokens, groups.number, size))
    if min(groups.best, size) == 2:
        kept = _best_groups_of_two(grouped, scores, groups.kept)
    else:
        best = _best_first(grouped, 1)
        of_best = grouped.map(lambda key: jnp.take_along_axis(key, best, axis=-1)[..., 0])
        kept = _best_first(of_best, groups.kept)
    return jnp.repeat(_is_among(kept, groups.number), size, axis=1)


def _is_among(chosen: jax.Array, number: int) -> jax.Array:
    """Returns [T, number] bool: which of the numbers are among those chosen, [T, k]."""
    numbers = jnp.arange(number, dtype=chosen.dtype)
    return jnp.any(chosen[:, :, None] == numbers[None, None], axis=1)


def _best_groups_of_two(grouped: _Keys, scores: str, kept: int) -> jax.Array:
    """Returns the groups [T, kept] with the largest sums of two experts, in any order.

    `grouped` are the keys [T, groups, size]. Sums of the first keys decide, unless they are so
    close that what they round off may count.
    """
    values, _ = _top_k(grouped.first, 2)
    total, lower, upper = order.bounds_of_two(_ARRAYS, values[..., 0], values[..., 1])
    lowest, best = _top_k(lower, kept)
    best = best.astype(jnp.int32)
    may_be_larger = _total_order(upper) >= _total_order(lowest)[:, -1:]
    is_unsure = jnp.isnan(total) | (may_be_larger & ~_is_among(best, total.shape[1]))

    def compare() -> jax.Array:
        first_two = _best_first(grouped, 2)
        of_two = [jnp.take_along_axis(key, first_two, axis=-1) for key in grouped.all()]
        logits = of_two[-1]
        high, low = of_two[:-1] or (logits, jnp.zeros_like(logits))
        sums = order.add(_ARRAYS, (high[..., 0], low[..., 0]), (high[..., 1], low[..., 1]))
        tie = order.OF_TWO[scores](logits[..., 0], logits[..., 1])
        return _best_first(_Keys(sums[0], lambda: [sums[1], tie]), kept)

    return lax.cond(jnp.any(is_unsure), compare, lambda: best)


def _by_kernel(logits, *others, given, k, weighing, scores, groups, softmax):
    from pallas_kernels.routing import top_k as kernels

    operands = dict(zip(given, others, strict=True))
    if groups is not None and plan.unavailable_reason(logits.shape[1], k, groups):
        sums = _keys_with_sums(logits, operands, scores, groups)
        operands["kept"] = _is_in_best_groups(sums, scores, groups).astype(jnp.int32)
        groups = None
    with jax.enable_x64(False):
        results = kernels.top_k(
            logits, k, weighing, scores=scores, groups=groups, softmax=softmax, **operands
        )
    return results if softmax else results[:-1]


def _lower(program: Program, *operands: Any, **params: Any) -> Any:
    problem = _Problem(program, params["k"])
    return program.lower(IMPLEMENTATIONS.select(None, problem).compute, *operands, **params)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A choice of k experts for each token, in a program that is being lowered."""

    program: Program
    k: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TopK(Implementation):
    """A way to choose experts; `compute` takes the operands and parameters of the primitive."""

    compute: Callable[..., Any]


def _kernel_reason(problem: _Problem) -> str | None:
    """Returns why the kernel cannot choose the experts, or None if it can."""
    program = problem.program
    num_tokens, num_experts = program.operand_types[0].shape
    if program.platforms != ("cuda",):
        platforms = ", ".join(program.platforms) or "an unknown platform"
        return f"it needs a program for NVIDIA GPUs alone, and this one is for {platforms}"
    if program.for_export:
        return "JAX promises no stability for a kernel in a file, and the program is to be exported"
    if not program.is_of_one_device:
        return "it runs on one device, and XLA partitions this program over several"
    if not isinstance(num_tokens, int):
        return f"the number of tokens is symbolic, {num_tokens}"
    if not 0 < num_tokens * num_experts <= checks.MAX_INT32:
        return f"its offsets are int32, and there are {num_tokens} x {num_experts} logits"
    return (
        plan.unavailable_reason(num_experts, problem.k)
        or availability.jax_unavailable_reason()
        or availability.mosaic_unavailable_reason()
        or (availability.unavailable_reason() if jax.default_backend() == "gpu" else None)
    )


# In the order in which they are tried. No argument names one: both choose the same experts.
IMPLEMENTATIONS = Implementations(
    (
        _TopK(name="pallas", unavailable_reason=_kernel_reason, compute=_by_kernel),
        _TopK(name="xla", compute=_by_xla),
    )
)


def _types(logits: Any, *_: Any, k: int, softmax: bool, **__: Any) -> Any:
    shape = (logits.shape[0], k)
    of_choices = [result_type(logits, shape, dtype) for dtype in (jnp.int32, None, None)]
    return [*of_choices, *([logits] if softmax else [])]


def _batch(operands: Any, axes: Any, *, given: tuple[str, ...], **params: Any) -> Any:
    """Folds the batch axis into the tokens, for jax.vmap."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    shape = None
    tokens = []
    for name, x, axis in zip(("logits", *given), operands, axes, strict=True):
        if axis is None and name == "bias" and x.shape[0] == 1:
            tokens.append(x)  # of all tokens
            continue
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        shape = shape or x.shape  # of the logits
        tokens.append(jnp.broadcast_to(x, shape).reshape(-1, shape[-1]))
    results = _choose_p.bind(*tokens, given=given, **params)
    return [x.reshape(size, -1, x.shape[-1]) for x in results], [0] * len(results)


_choose_p = define_primitive(
    "ep_choose",
    abstract_eval=_types,
    lower=_lower,
    inline=_by_xla,
    batch=_batch,
    platforms=(None, "cuda"),
)
