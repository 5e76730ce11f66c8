"""The k best experts of each token, by the kernel `pallas_kernels.routing.top_k` where it runs.

Elsewhere XLA sorts. Both choose the same, in the order of `lax.top_k`: of equal values the first.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import Program, define_primitive, result_type
from pallas_kernels.routing import plan
from pallas_kernels.routing.plan import Groups


def top_k(
    values: jax.Array,
    probs: jax.Array,
    k: int,
    groups: Groups | None = None,
    scores: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k best experts of each token, [T, k] int32, and what `probs` holds for them.

    Args:
        values: [T, E] float32, what experts are compared by. Gradients do not flow through it.
        probs: [T, E] float32, what is returned for the chosen, [T, k]; differentiable.
        k: choices per token.
        groups: the groups to choose within, or None.
        scores: [T, E] float32, what groups are compared by; None: the values. No gradients.
    """
    operands = [values, probs]
    if groups is not None and scores is not None and scores is not values:
        operands.append(scores)
    operands = [lax.stop_gradient(operand) for operand in operands]
    topk_idx, chosen = _top_k_p.bind(*operands, k=k, groups=groups)
    return topk_idx, _differentiable(probs, topk_idx, chosen)


@jax.custom_jvp
def _differentiable(probs: jax.Array, topk_idx: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns `chosen`, with the derivatives that it has as the elements `topk_idx` of probs.

    Its derivative returns it so again, for second derivatives.
    """
    return chosen


@_differentiable.defjvp
def _derivative(primals, tangents):
    return _differentiable(*primals), jnp.take_along_axis(tangents[0], primals[1], axis=-1)


def _by_xla(
    values: jax.Array,
    probs: jax.Array,
    scores: jax.Array | None = None,
    *,
    k: int,
    groups: Groups | None,
) -> tuple[jax.Array, jax.Array]:
    if groups is not None:
        values = _within_best_groups(values, scores, groups)
    topk_idx = lax.top_k(values, k)[1].astype(jnp.int32)
    return topk_idx, jnp.take_along_axis(probs, topk_idx, axis=-1)


def _within_best_groups(values: jax.Array, scores: jax.Array | None, groups: Groups) -> jax.Array:
    """Returns [T, E] values, -inf outside the groups of the largest sums of their best scores."""
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


def _by_kernel(
    values: jax.Array,
    probs: jax.Array,
    scores: jax.Array | None = None,
    *,
    k: int,
    groups: Groups | None,
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.routing import top_k as kernels

    if groups is not None and plan.unavailable_reason(values.shape[1], k, groups):
        values, scores, groups = _within_best_groups(values, scores, groups), None, None
    with jax.enable_x64(False):
        return kernels.top_k(values, probs, k, groups=groups, scores=scores)


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
        or plan.unavailable_reason(num_experts, k) is not None
        or availability.jax_unavailable_reason() is not None
        or (jax.default_backend() == "gpu" and availability.unavailable_reason() is not None)
    )


def _types(values: Any, probs: Any, *_: Any, k: int, **__: Any) -> Any:
    shape = (values.shape[0], k)
    return result_type(values, shape, jnp.int32), result_type(probs, shape)


def _batch(operands: Any, axes: Any, **params: Any) -> Any:
    """Chooses for all tokens of a batch at once."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    tokens = [x.reshape(-1, x.shape[-1]) for x in stacked]
    return [
        result.reshape(size, -1, result.shape[-1]) for result in _top_k_p.bind(*tokens, **params)
    ], (0, 0)


@functools.cache
def _jitted(**params: Any) -> Any:
    return jax.jit(functools.partial(_top_k_p.bind, **params))


_top_k_p = define_primitive(
    "ep_top_k",
    abstract_eval=_types,
    lower=_lower,
    inline=_by_xla,
    batch=_batch,
    eager=lambda *operands, **params: _jitted(**params)(*operands),
    platforms=(None, "cuda"),
)
