"""Chooses the k best experts of each token and computes their weights, by a kernel where it runs.

The kernel is `pallas_kernels.routing.top_k`; elsewhere XLA sorts. Both choose the same experts in
the order of `lax.top_k`, the first of equal values. Weights may differ in their last bits, since
scores are summed in another order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import Program, define_primitive, result_type
from pallas_kernels.routing import plan
from pallas_kernels.routing.plan import Groups, Weighing


def choose(
    values: jax.Array,
    probs: jax.Array | None,
    k: int,
    weighing: Weighing,
    groups: Groups | None = None,
    scores: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each token's k best experts [T, k] int32, their weights [T, k], and probs [T, E].

    Gradients flow through probs to the weights, or through the values where probs is None.

    Args:
        values: [T, E] float32, what experts are compared by.
        probs: [T, E] float32, what weights are computed from; None: the softmax of the values.
        k: choices per token.
        weighing: how weights are computed.
        groups: the groups to choose within, or None.
        scores: [T, E] float32, what groups are compared by; None: the values.
    """
    given = {"probs": probs, "scores": None if groups is None else scores}
    given = {name: array for name, array in given.items() if array is not None}
    operands = [lax.stop_gradient(array) for array in (values, *given.values())]
    topk_idx, chosen, weights, *softmax = _choose_p.bind(
        *operands, given=tuple(given), k=k, weighing=weighing, groups=groups
    )
    if probs is None:
        probs = _softmax_known(values, *softmax)
    chosen = _chosen_known(probs, topk_idx, chosen)
    return topk_idx, _weights_known(chosen, weights, weighing), probs


# Each returns a result that the primitive has computed, with the derivatives that it has; and so do
# their derivatives, for derivatives of these.


@jax.custom_jvp
def _softmax_known(values: jax.Array, softmax: jax.Array) -> jax.Array:
    return softmax


@_softmax_known.defjvp
def _softmax_derivative(primals, tangents):
    softmax = _softmax_known(*primals)
    product = softmax * tangents[0]
    return softmax, product - softmax * jnp.sum(product, axis=-1, keepdims=True)


@jax.custom_jvp
def _chosen_known(probs: jax.Array, topk_idx: jax.Array, chosen: jax.Array) -> jax.Array:
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


def normalized(scores: jax.Array, epsilon: float) -> jax.Array:
    """Divides each row of scores [T, n] float32 by its sum plus epsilon."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + jnp.float32(epsilon))


def weigh(weighing: Weighing, chosen: jax.Array) -> jax.Array:
    """Computes the weights [T, k] float32 from the scores of the chosen experts."""
    if weighing.normalize:
        chosen = normalized(chosen, weighing.epsilon)
    return chosen * jnp.asarray(weighing.scale, jnp.float32)


def _named(values: Any, others: Any, given: tuple[str, ...]) -> dict[str, Any]:
    return {"probs": None, "scores": None, **dict(zip(given, others, strict=True))}


def _by_xla(values, *others, given, k, weighing, groups):
    probs, scores = _named(values, others, given).values()
    softmax = []
    if probs is None:
        probs = jax.nn.softmax(values, axis=-1)
        softmax = [probs]
    if groups is not None:
        values = _within_best_groups(values, scores, groups)
    topk_idx = lax.top_k(values, k)[1].astype(jnp.int32)
    chosen = jnp.take_along_axis(probs, topk_idx, axis=-1)
    return topk_idx, chosen, weigh(weighing, chosen), *softmax


def _within_best_groups(values: jax.Array, scores: jax.Array | None, groups: Groups) -> jax.Array:
    """Returns values [T, E], with -inf outside each token's best groups.

    A group is compared by the sum of its `groups.best` largest scores.
    """
    tokens, num_experts = values.shape
    grouped = (values if scores is None else scores).reshape(
        tokens, groups.number, num_experts // groups.number
    )
    group_score = jnp.sum(lax.top_k(grouped, min(groups.best, grouped.shape[-1]))[0], axis=-1)
    kept = lax.top_k(group_score, groups.kept)[1]
    numbers = jnp.arange(groups.number, dtype=kept.dtype)
    is_kept = jnp.any(kept[:, :, None] == numbers[None, None], axis=1)
    is_kept = jnp.repeat(is_kept, num_experts // groups.number, axis=1)
    return jnp.where(is_kept, values, -jnp.inf)


def _by_kernel(values, *others, given, k, weighing, groups):
    from pallas_kernels.routing import top_k as kernels

    probs, scores = _named(values, others, given).values()
    if groups is not None and plan.unavailable_reason(values.shape[1], k, groups):
        probs = jax.nn.softmax(values, axis=-1) if probs is None else probs
        values, scores, groups = _within_best_groups(values, scores, groups), None, None
    with jax.enable_x64(False):
        chosen = kernels.top_k(values, k, weighing, gathered=probs, groups=groups, scores=scores)
    results = chosen._replace(softmax=probs if chosen.softmax is None else chosen.softmax)
    return results if "probs" not in given else results[:-1]


def _lower(program: Program, *operands: Any, **params: Any) -> Any:
    compute = _by_xla if _kernel_unavailable(program, params["k"]) else _by_kernel
    return program.lower(compute, *operands, **params)


def _kernel_unavailable(program: Program, k: int) -> bool:
    num_tokens, num_experts = program.operand_types[0].shape
    return (
        program.platforms != ("cuda",)
        or program.for_export  # JAX promises no stability for a kernel in a file
        or not program.is_of_one_device
        or not isinstance(num_tokens, int)
        or num_tokens == 0
        or num_tokens * num_experts > checks.MAX_INT32  # the kernel's offsets are int32
        or plan.unavailable_reason(num_experts, k) is not None
        or availability.jax_unavailable_reason() is not None
        or availability.mosaic_unavailable_reason() is not None
        or (jax.default_backend() == "gpu" and availability.unavailable_reason() is not None)
    )


def _types(values: Any, *_: Any, given: tuple[str, ...], k: int, **__: Any) -> Any:
    shape = (values.shape[0], k)
    of_choices = [result_type(values, shape, dtype) for dtype in (jnp.int32, None, None)]
    return of_choices if "probs" in given else [*of_choices, values]


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
    eager=True,
    platforms=(None, "cuda"),
)
