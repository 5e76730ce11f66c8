"""Chooses the k best experts of each token, and computes the weights of these choices.

A GPU kernel, `pallas_kernels.routing.top_k`, does this where it can run, and XLA everywhere else.
Both choose the same experts, because they compare experts by the same sort keys (`_all_keys`),
order numbers as `lax.top_k` does, and prefer the lower id among equal experts. The weights may
differ in their last bits, since the kernel and XLA sum scores in different orders.
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
    """Returns each token's k best experts, the weights of these choices, and the softmax or None.

    Experts are compared by their logits. With a bias, they are compared by score + bias first, and
    by their logits where these sums are equal. Groups of experts are compared by their best score,
    or by the sum of their two best scores; see `pallas_kernels.routing.order`.

    Gradients flow through the weights to `gathered`, or to the logits if `gathered` is None, and
    through the softmax to the logits. The choices have no gradient.

    Args:
        logits: [T, E] float32.
        k: the number of experts that each token chooses.
        weighing: how the weights are computed from the scores of the chosen experts.
        scores: the name of the function that gives an expert's score for its logit, such as
            "sigmoid", or "logit" for the logit itself; a key of `order.OF_TWO`. It gives the scores
            to which the bias is added and by which groups are compared.
        rounded: [T, E] float32: these scores, which are rounded to float32. None if no bias and no
            groups need them, or if they are logits or sigmoids, which are computed from `logits`.
        bias: [E] float32, the selection bias; or None.
        groups: how many groups the experts form, and from how many of them a token may choose; None
            if a token may choose any experts.
        gathered: [T, E] float32: the numbers from which the weights are computed; only the entries
            of the chosen experts are read. None means the logits, or the softmax if it is returned
            and `weighing` does not normalize.
        softmax: whether to return the softmax of the logits, too.

    Returns:
        The ids of the chosen experts, [T, k] int32; their weights, [T, k] float32; and the softmax,
        [T, E] float32, or None.
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


# The primitive computes the softmax, the numbers of the chosen experts, and the weights, but it has
# no derivative. Each of the next three functions returns one of these results unchanged, and gives
# it a custom JVP rule. The rules call these functions, too, so derivatives of higher order work.


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
    """Computes the weights [T, k] float32 of the chosen experts from their numbers `chosen` [T, k].

    `weighing` says what these numbers are (scores, logarithms of scores, or logits), and whether
    the weights are normalized. To normalize them, the scores and epsilon are first divided by about
    the largest of them. Their sum, by which they are then divided, is at least 1/2 and cannot
    underflow. If all scores are 0, the weights are 0.
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
    """Splits sigmoid(logits) into two factors, e^a * f with f >= 1/2; returns the arrays a and f.

    Neither factor underflows, so they are right for logits below -87, too, where float32 cannot
    represent the sigmoid itself.
    """
    is_low = logits < 0
    exponent = jnp.where(is_low, logits, 0.0)
    return exponent, jax.nn.sigmoid(jnp.where(is_low, -logits, logits))


class _Arrays:
    """Implements `order.Ops`, the operations by which experts are compared, on JAX arrays."""

    def zero(self) -> jax.Array:
        return jnp.float32(0)

    def call(self, function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
        return function(*operands)

    def where_finite(self, of: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(of), value, 0.0)

    def where_positive(self, of: jax.Array, value: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.where(of > 0, value, other)


_ARRAYS = _Arrays()
# Experts are first compared by their first sort key alone, which may choose wrong experts for some
# tokens. If at most one in `_FEW` tokens is such a token, only these tokens choose again, by all
# sort keys. Otherwise all tokens do.
_FEW = 64


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _total_order(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 in the order of `lax.top_k`: -NaN < -inf < -0 < 0 < inf < NaN."""
    bits = _bits(x)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the values and indices of `lax.top_k`, each behind its own optimization barrier.

    Without the barriers, XLA sorts all elements if later code slices the results. A single barrier
    for both results crashes XLA for CPUs.
    """
    values, indices = map(lax.optimization_barrier, lax.top_k(x, k))
    return values, indices.astype(jnp.int32)


def _by_xla(logits, *others, given, k, weighing, scores, groups, softmax):
    operands = dict(zip(given, others, strict=True))
    probs = jax.nn.softmax(logits, axis=-1) if softmax else None
    topk_idx = _topk_idx(logits, operands, k, scores, groups)
    weighed = _weighed(logits, operands.get("gathered"), probs, weighing)
    chosen = jnp.take_along_axis(weighed, topk_idx, axis=-1, mode="promise_in_bounds")
    return topk_idx, chosen, weigh(weighing, chosen), *([probs] if softmax else [])


def _topk_idx(
    logits: jax.Array,
    operands: Mapping[str, jax.Array],
    k: int,
    scores: str,
    groups: Groups | None,
) -> jax.Array:
    """Returns the ids of each token's k best experts, [T, k] int32, best first.

    Experts are compared by several sort keys (see `_all_keys`). For most tokens the first key alone
    decides, and to compare by one key is fast. So all tokens' experts are first compared by the
    first key. Only the tokens for which this may be wrong are then compared by all keys. `operands`
    holds, by name, the arguments `rounded`, `bias` and `gathered` of `choose` that are not None.
    `scores` and `groups` are arguments of `choose`.
    """
    guess = _by_first_key(logits, operands, k, scores, groups)
    by_all_keys = functools.partial(_by_all_keys, k=k, scores=scores, groups=groups)
    return _settled(guess, by_all_keys, logits, operands)


def _kept_groups(
    logits: jax.Array, operands: Mapping[str, jax.Array], scores: str, groups: Groups
) -> jax.Array:
    """Returns the ids of the groups from which each token may choose experts, [T, kept] int32.

    Groups are compared by the first sort key alone. For tokens for which that may choose wrong
    groups, they are compared by all keys. The arguments are those of `_topk_idx`.
    """
    first = _first_key(logits, operands, scores, groups)
    guess = _groups_by_first_key(first, groups, is_all=first is logits)
    by_all_keys = functools.partial(_groups_by_all_keys, scores=scores, groups=groups)
    return _settled(guess, by_all_keys, logits, operands)


@dataclasses.dataclass(frozen=True)
class _Guess:
    """Each token's n best experts or groups by the first sort key alone, which may be wrong.

    They may be wrong where the first keys of two experts or groups are equal, since then further
    keys decide. If groups are compared by the sum of two first keys, they may also be wrong where
    two groups' sums are nearly equal.

    Attributes:
        choices: [T, n] int32: the ids of the experts or groups.
        may_differ: [T] bool: True for a token whose choices may be wrong; None if all are right.
        in_doubt: a function that checks the tokens of `may_differ` more closely: it returns [T]
            bool, True for a token whose experts or groups must be compared by all keys. It is
            called only if `may_differ` is True for any token. None means that `may_differ` itself
            marks the tokens to compare by all keys.
    """

    choices: jax.Array
    may_differ: jax.Array | None
    in_doubt: Callable[[], jax.Array] | None = None


def _settled(
    guess: _Guess,
    by_all_keys: Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array],
    logits: jax.Array,
    operands: Mapping[str, jax.Array],
) -> jax.Array:
    """Returns the right choices [T, n] int32: those of `guess`, corrected where they may be wrong.

    For tokens whose choices may be wrong, `by_all_keys(logits, operands)` chooses again. This is
    rare: only about one in thousands of tokens has experts whose first keys, which are rounded, are
    equal, while their other keys differ.
    """
    may_differ = guess.may_differ
    if may_differ is None:
        return guess.choices
    num_tokens = logits.shape[0]

    def settle() -> jax.Array:
        # With a symbolic number of tokens, `few` below could not be static. So all tokens are
        # compared by all keys.
        if checks.is_symbolic(num_tokens):
            return by_all_keys(logits, operands)
        in_doubt = guess.in_doubt() if guess.in_doubt else may_differ
        number, few = jnp.sum(in_doubt, dtype=jnp.int32), -(-num_tokens // _FEW)

        def settle_few() -> jax.Array:
            rows = _top_k(in_doubt.astype(jnp.float32), few)[1]
            of_rows = {name: x if x.shape[0] == 1 else x[rows] for name, x in operands.items()}
            choices = by_all_keys(logits[rows], of_rows)
            return guess.choices.at[rows].set(choices, unique_indices=True)

        which = (number > 0).astype(jnp.int32) + (number > few).astype(jnp.int32)
        branches = [lambda: guess.choices, settle_few, lambda: by_all_keys(logits, operands)]
        return lax.switch(which, branches)

    return lax.cond(jnp.any(may_differ), settle, lambda: guess.choices)


def _by_first_key(
    logits: jax.Array,
    operands: Mapping[str, jax.Array],
    k: int,
    scores: str,
    groups: Groups | None,
) -> _Guess:
    """Chooses each token's k best experts by the first of their sort keys.

    A choice may be wrong where first keys are equal, or where the choice of the token's groups may
    be wrong. The arguments are those of `_topk_idx`.
    """
    num_experts = logits.shape[1]
    bias = operands.get("bias")
    first = _first_key(logits, operands, scores, groups)
    is_kept = groups_may_differ = None
    if groups is not None:
        of_groups = _groups_by_first_key(first, groups, is_all=first is logits)
        groups_may_differ = of_groups.may_differ
        is_kept = functools.partial(_is_in_groups, of_groups.choices, groups, num_experts)
    first = logits if bias is None else first
    if is_kept is not None:
        first = jnp.where(is_kept(), first, -jnp.inf)
    if bias is None:
        return _Guess(_top_k(first, k)[1], groups_may_differ)

    values, best = _top_k(first, min(k + 1, num_experts))
    is_tie = _bits(values[:, 1:]) == _bits(values[:, :-1])
    may_differ = jnp.any(is_tie, axis=-1)
    if groups_may_differ is not None:
        may_differ |= groups_may_differ

    def in_doubt() -> jax.Array:
        # Two experts that are equal in all arrays of `alike` are equal in all sort keys. For them
        # the guess is right, since the lower id wins in any case.
        alike = [logits, bias]
        if "rounded" in operands:
            alike.append(operands["rounded"])
        if is_kept is not None:
            alike.append(is_kept().astype(jnp.float32))
        of_best = [_gathered(x, best[:, :k]) for x in alike]
        is_unlike = _any_differs([x[:, 1:] for x in of_best], [x[:, :-1] for x in of_best])
        in_doubt = jnp.any(is_tie[:, : k - 1] & is_unlike, axis=-1)
        if groups_may_differ is not None:
            in_doubt |= groups_may_differ
        if k == num_experts:
            return in_doubt

        def has_others() -> jax.Array:
            is_equal = _bits(first) == _bits(values[:, k - 1 : k])
            return jnp.any(is_equal & _any_differs(alike, [x[:, k - 1 :] for x in of_best]), -1)

        no_others = functools.partial(jnp.zeros_like, in_doubt)
        return in_doubt | lax.cond(jnp.any(is_tie[:, k - 1]), has_others, no_others)

    return _Guess(best[:, :k], may_differ, in_doubt)


def _gathered(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the entries indices[t] of row x[t] for each token t; `indices` is [T, n].

    x is [T, E], or [1, E] if all tokens have the same row.
    """
    if x.shape[0] == 1:
        return x[0][indices]
    return jnp.take_along_axis(x, indices, axis=-1)


def _any_differs(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> jax.Array:
    """Returns, elementwise, whether any array in `some` differs in any bit from its counterpart.

    The counterpart of some[i] is others[i]. All arrays have the same shape, also the bool result.
    """
    pairs = zip(some, others, strict=True)
    return functools.reduce(jnp.logical_or, (_bits(a) != _bits(b) for a, b in pairs))


def _groups_by_first_key(first: jax.Array, groups: Groups, *, is_all: bool) -> _Guess:
    """Chooses the groups from which each token may choose, by the first sort key `first` [T, E].

    Groups are compared by their best expert (if `groups.best` is 1) or by the sum of their two best
    experts. `is_all` says that experts have no other sort key. Comparing best experts is then
    always right, and `may_differ` of the result is None. Otherwise `may_differ` marks the tokens
    for which the choice is uncertain: two groups tie, or, since sums are rounded, two groups' sums
    are nearly equal.
    """
    tokens, num_experts = first.shape
    size = num_experts // groups.number
    grouped = first.reshape(tokens, groups.number, size)
    if min(groups.best, size) == 1:
        best = _top_k(grouped, 1)[0][..., 0]
        values, kept = _top_k(best, min(groups.kept + 1, groups.number))
        if is_all or groups.kept == groups.number:
            return _Guess(kept[:, : groups.kept], None)
        last, next_ = _bits(values[:, groups.kept - 1]), _bits(values[:, groups.kept])
        return _Guess(kept[:, : groups.kept], last == next_)
    values, _ = _top_k(grouped, 2)
    total, lower, upper = order.bounds_of_two(_ARRAYS, values[..., 0], values[..., 1])
    least, kept = _top_k(lower, groups.kept)
    may_be_kept = jnp.isnan(total) | ~(upper < least[:, -1:])
    is_out = ~_is_among(kept, groups.number)
    return _Guess(kept, jnp.any(jnp.isnan(total) | (may_be_kept & is_out), axis=-1))


def _is_among(chosen: jax.Array, number: int) -> jax.Array:
    """Returns which ids below `number` each row of `chosen` [T, k] contains: [T, number] bool."""
    numbers = jnp.arange(number, dtype=chosen.dtype)
    return jnp.any(chosen[:, :, None] == numbers[None, None], axis=1)


def _is_in_groups(kept: jax.Array, groups: Groups, num_experts: int) -> jax.Array:
    """Returns which experts are in the groups `kept` [T, kept] of each token: [T, E] bool."""
    return jnp.repeat(_is_among(kept, groups.number), num_experts // groups.number, axis=1)


def _first_key(
    logits: jax.Array, operands: Mapping[str, jax.Array], scores: str, groups: Groups | None
) -> jax.Array:
    """Returns the first sort key of each expert, [T, E] float32.

    The key is score + bias, rounded to float32, if experts are compared by such sums
    (`order.has_sums`). Otherwise it is the logit. The arguments are those of `_topk_idx`.
    """
    given = operands.get("rounded"), operands.get("bias")
    if not order.has_sums(scores, given[1], groups):
        return logits
    return order.score_and_bias(_ARRAYS, scores, logits, *given, rounded=True)[0]


def _all_keys(
    logits: jax.Array, operands: Mapping[str, jax.Array], scores: str, groups: Groups | None
) -> list[jax.Array]:
    """Returns the sort keys of the experts, [T, E] float32 each, in the order in which they count.

    If experts are compared by sums score + bias (`order.has_sums`), the keys are the sum rounded to
    float32, the error of this rounding, and the logit. Otherwise the logit is the only key. The
    arguments are those of `_topk_idx`.
    """
    given = operands.get("rounded"), operands.get("bias")
    if not order.has_sums(scores, given[1], groups):
        return [logits]
    high, low = order.score_and_bias(_ARRAYS, scores, logits, *given)
    return [high, jnp.broadcast_to(low, logits.shape), logits]


def _by_all_keys(
    logits: jax.Array,
    operands: Mapping[str, jax.Array],
    k: int,
    scores: str,
    groups: Groups | None,
) -> jax.Array:
    """Returns what `_topk_idx` does for the same arguments, but compares all tokens by all keys."""
    keys = _all_keys(logits, operands, scores, groups) if "bias" in operands else [logits]
    if groups is not None:
        kept = _groups_by_all_keys(logits, operands, scores, groups)
        is_kept = _is_in_groups(kept, groups, logits.shape[1])
        keys = [jnp.where(is_kept, key, -jnp.inf) for key in keys]
    return _sorted(keys, k)


def _groups_by_all_keys(
    logits: jax.Array, operands: Mapping[str, jax.Array], scores: str, groups: Groups
) -> jax.Array:
    """Returns the ids of the groups from which each token may choose, [T, kept] int32.

    If `groups.best` is 1, or if groups have only one expert each, a group is compared by all sort
    keys of its best expert. Otherwise it is compared by the sum of its two best experts' scores (or
    score + bias). Where two groups' sums are equal, the function `order.OF_TWO` of the two experts'
    logits decides. The arguments are those of `_topk_idx`.
    """
    tokens, num_experts = logits.shape
    size = num_experts // groups.number
    keys = _all_keys(logits, operands, scores, groups)
    grouped = [key.reshape(tokens, groups.number, size) for key in keys]
    number = min(groups.best, size)
    best = _sorted(grouped, number)
    of_best = [jnp.take_along_axis(key, best, axis=-1) for key in grouped]
    if number == 1:
        return _sorted([key[..., 0] for key in of_best], groups.kept)
    of_logits = of_best[-1]
    high, low = of_best[:-1] or (of_logits, jnp.zeros_like(of_logits))
    sums = order.add(_ARRAYS, (high[..., 0], low[..., 0]), (high[..., 1], low[..., 1]))
    tie = order.OF_TWO[scores](of_logits[..., 0], of_logits[..., 1])
    return _sorted([*sums, tie], groups.kept)


def _sorted(keys: Sequence[jax.Array], k: int) -> jax.Array:
    """Returns the indices [..., k] int32 of the k largest elements along the last axis, in order.

    Each element has several sort keys: keys[0], keys[1] and so on are [..., n] float32. A later key
    decides only between elements that are equal in all earlier keys. Of elements that are equal in
    all keys, the one with the lower index comes first.
    """
    indices = lax.broadcasted_iota(jnp.int32, keys[0].shape, keys[0].ndim - 1)
    is_out = jnp.zeros_like(indices)
    if len(keys) * k < keys[0].shape[-1]:
        indices, is_out = _candidates(keys, k)
        keys = [jnp.take_along_axis(key, indices, axis=-1) for key in keys]
    words = is_out, *(~_total_order(key) for key in keys), indices
    return lax.sort(words, num_keys=len(words))[-1][..., :k]


def _candidates(keys: Sequence[jax.Array], k: int) -> tuple[jax.Array, jax.Array]:
    """Selects candidates that include the k largest elements along the last axis, for `_sorted`.

    Each key contributes k candidates. Those of the first key are the k largest elements by this
    key. A later key selects only among ties: the elements that equal the k-th largest in all
    earlier keys. This takes one `lax.top_k` per key, which is much faster than a sort of all
    elements by several keys.

    Returns the indices of the candidates, and a mask that is 1 for a candidate to ignore, because
    it is a tie, among which the next key selects, or because it is no tie of the earlier keys.
    Both are int32, with k entries for each key along the last axis.
    """
    # These are the two least numbers in the order of `lax.top_k`; both are NaN. Elements that are
    # no ties are set to the least number. An element that has this number itself is set to the next
    # one, so that elements that are no ties come after all ties.
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
        # The next key selects among the elements that equal the k-th largest in this key, so those
        # are ignored here.
        if len(indices) < len(keys) - 1:
            out |= order_of_best == last
        indices.append(best)
        is_out.append(out)
        is_tie &= _total_order(key) == last
    return (
        jnp.concatenate(indices, axis=-1),
        jnp.concatenate(is_out, axis=-1).astype(jnp.int32),
    )


def _by_kernel(logits, *others, given, k, weighing, scores, groups, softmax):
    from pallas_kernels.routing import top_k as kernels

    operands = dict(zip(given, others, strict=True))
    if groups is not None and plan.unavailable_reason(logits.shape[1], k, groups):
        kept = _kept_groups(logits, operands, scores, groups)
        operands["kept"] = _is_in_groups(kept, groups, logits.shape[1]).astype(jnp.int32)
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
    """Holds what decides which implementation can run: the program that is being lowered, and k."""

    program: Program
    k: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TopK(Implementation):
    """An implementation of `choose`, by the GPU kernel or by XLA.

    `compute` computes the primitive's results from its operands and parameters.
    """

    compute: Callable[..., Any]


def _kernel_reason(problem: _Problem) -> str | None:
    """Returns why the GPU kernel cannot run in the program of `problem`, or None if it can."""
    num_tokens, num_experts = problem.program.operand_types[0].shape
    if not isinstance(num_tokens, int):
        return f"the number of tokens is symbolic, {num_tokens}"
    if not 0 < num_tokens * num_experts <= checks.MAX_INT32:
        return f"it supports 1 to {checks.MAX_INT32} logits, not {num_tokens} x {num_experts}"
    return plan.unavailable_reason(
        num_experts, problem.k
    ) or availability.one_device_unavailable_reason(problem.program)


# The implementations, in the order in which they are tried. Callers cannot choose one, because all
# choose the same experts.
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
    """Runs the primitive for `jax.vmap`, as one call for the tokens of all elements of the batch.

    `axes` has the batch axis of each operand, or None. `given` names the operands after the logits.
    """
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    shape = None
    tokens = []
    for name, x, axis in zip(("logits", *given), operands, axes, strict=True):
        if axis is None and name == "bias" and x.shape[0] == 1:
            # All tokens share this bias, so it needs no copy for each element of the batch.
            tokens.append(x)
            continue
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        # The logits come first, and other operands are broadcast to their shape.
        shape = shape or x.shape
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
