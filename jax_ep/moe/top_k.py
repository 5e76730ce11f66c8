"""Chooses the k best experts of each token and computes their weights, by a kernel where it runs.

The kernel is `pallas_kernels.routing.top_k`; elsewhere XLA sorts. Both compare experts by the same
numbers, in the order of `lax.top_k`, and take the first of equals. Weights may differ in their last
bits, since scores are summed in another order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.implementations import Implementation, Implementations
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import Program, define_primitive, result_type
from pallas_kernels.routing import order, plan
from pallas_kernels.routing.plan import Groups, Weighing


def choose(
    logits: jax.Array,
    k: int,
    weighing: Weighing,
    *,
    sums: tuple[jax.Array, jax.Array] | None = None,
    biased: bool = False,
    groups: Groups | None = None,
    gathered: jax.Array | None = None,
    softmax: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns each token's k best experts [T, k] int32, their weights, and the softmax or None.

    Gradients flow to the logits, or to `gathered`, through the weights and the softmax.

    Args:
        logits: [T, E] float32, the numbers by which experts are compared.
        k: choices per token.
        weighing: how weights are computed.
        sums: (high, low), [T, E] float32 each, or None: each expert's score plus bias, as the
            rounded sum and its rounding error. Experts (if `biased`) and groups are compared by
            these sums first, and by the logits if the sums are equal.
        biased: whether the sums are used to compare experts, too; else only to compare groups.
        groups: the groups to choose within, or None.
        gathered: [T, E] float32, the numbers from which the weights of the chosen are computed;
            None: the softmax if it is returned and not normalized again, else the logits.
        softmax: whether to return the softmax of the logits, [T, E].
    """
    given = {"high": None, "low": None, "gathered": gathered}
    if sums is not None:
        given |= dict(zip(("high", "low"), sums, strict=True))
    operands = {name: array for name, array in given.items() if array is not None}
    topk_idx, chosen, weights, *made = _choose_p.bind(
        *map(lax.stop_gradient, (logits, *operands.values())),
        given=tuple(operands),
        k=k,
        weighing=weighing,
        groups=groups,
        biased=biased,
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


def _total_order(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 in the total order -NaN < -inf < -0 < 0 < inf < NaN."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _best_first(keys: Sequence[jax.Array], k: int) -> jax.Array:
    """Returns the indices [..., k] int32 of the largest elements, best first; ties by index.

    Elements are compared by `keys`, [..., n] float32 each: by the first key, then the next.
    """
    if len(keys) == 1:
        return lax.top_k(keys[0], k)[1].astype(jnp.int32)
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
    least = lax.bitcast_convert_type(jnp.int32(-1), jnp.float32)  # a NaN, the least in total order
    is_tie = jnp.ones_like(keys[0], jnp.bool_)
    indices: list[jax.Array] = []
    is_out: list[jax.Array] = []
    for key in keys:
        key = jnp.where(is_tie, key, least)
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


def add_sums(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Adds two sums (high, low); see `pallas_kernels.routing.order`."""

    def where_finite(of: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(of), value, 0.0)

    return order.add(lambda function, *arrays: function(*arrays), where_finite, a, b)


def _by_xla(logits, *others, given, k, weighing, groups, biased, softmax):
    operands = dict(zip(given, others, strict=True))
    probs = jax.nn.softmax(logits, axis=-1) if softmax else None
    sums = [operands[name] for name in ("high", "low") if name in operands]
    keys = [*sums, logits] if biased else [logits]
    if groups is not None:
        is_kept = _is_in_best_groups([*sums, logits], groups)
        keys = [jnp.where(is_kept, key, -jnp.inf) for key in keys]
    topk_idx = _best_first(keys, k)
    weighed = _weighed(logits, operands.get("gathered"), probs, weighing)
    chosen = jnp.take_along_axis(weighed, topk_idx, axis=-1)
    return topk_idx, chosen, weigh(weighing, chosen), *([probs] if softmax else [])


def _is_in_best_groups(keys: Sequence[jax.Array], groups: Groups) -> jax.Array:
    """Returns whether experts are in a token's best groups, [T, E] bool.

    `keys` are the logits [T, E], after `high` and `low` if they are given.
    """
    tokens, num_experts = keys[0].shape
    size = num_experts // groups.number
    grouped = [key.reshape(tokens, groups.number, size) for key in keys]
    best = _best_first(grouped, min(groups.best, size))
    of_group = [jnp.take_along_axis(key, best, axis=-1) for key in grouped]
    if best.shape[-1] == 1:
        group_keys = [key[..., 0] for key in of_group]
    else:
        *sums, logits = of_group
        high, low = sums or (logits, jnp.zeros_like(logits))
        total = add_sums((high[..., 0], low[..., 0]), (high[..., 1], low[..., 1]))
        group_keys = [*total, order.OF_TWO[groups.scores](logits[..., 0], logits[..., 1])]
    kept = _best_first(group_keys, groups.kept)
    numbers = jnp.arange(groups.number, dtype=kept.dtype)
    is_kept = jnp.any(kept[:, :, None] == numbers[None, None], axis=1)
    return jnp.repeat(is_kept, size, axis=1)


def _by_kernel(logits, *others, given, k, weighing, groups, biased, softmax):
    from pallas_kernels.routing import top_k as kernels

    operands = dict(zip(given, others, strict=True))
    options: dict[str, Any] = {"biased": biased, "groups": groups, "softmax": softmax}
    probs = None
    if groups is not None and plan.unavailable_reason(logits.shape[1], k, groups):
        sums = {name: operands.pop(name) for name in ("high", "low") if name in operands}
        keys = (sums if biased else {}) | {"logits": logits}
        is_kept = _is_in_best_groups([*sums.values(), logits], groups)
        if softmax:
            probs = jax.nn.softmax(logits, axis=-1)
            if not weighing.normalize:
                operands.setdefault("gathered", probs)
        keys = {name: jnp.where(is_kept, key, -jnp.inf) for name, key in keys.items()}
        logits = keys.pop("logits")
        operands |= keys
        options |= {"groups": None, "softmax": False}
    with jax.enable_x64(False):
        results = kernels.top_k(logits, k, weighing, **operands, **options)
    return (*results[:3], *([results.softmax if probs is None else probs] if softmax else []))


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


def _batch(operands: Any, axes: Any, **params: Any) -> Any:
    """Folds the batch axis into the tokens, for jax.vmap."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    tokens = [x.reshape(-1, x.shape[-1]) for x in stacked]
    results = _choose_p.bind(*tokens, **params)
    return [x.reshape(size, -1, x.shape[-1]) for x in results], [0] * len(results)


_choose_p = define_primitive(
    "ep_choose",
    abstract_eval=_types,
    lower=_lower,
    inline=_by_xla,
    batch=_batch,
    platforms=(None, "cuda"),
)
