"""Chooses the k best experts of each token, and computes the weights of these choices.

A GPU kernel does this where it can run, else XLA. Both choose the experts that `lax.top_k` does;
the weights may differ in their last bits, as scores are summed in different orders.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import zero_from_primal

from jax_ep import checks
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import Program, define_primitive, result_type
from pallas_kernels.routing import plan
from pallas_kernels.routing.plan import Groups, Weighing


class Operands(NamedTuple):
    """The arrays of `choose`, all float32."""

    logits: jax.Array  # [T, E]
    compared: jax.Array | None = None  # [T, E]: by which experts are compared; None: the logits
    bias: jax.Array | None = None  # added to what is compared: [1, E], or [T, E] under `jax.vmap`
    # [T, E], from which the weights are computed; None: the softmax of the logits if `choose`
    # returns it and does not normalize, else the logits
    gathered: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `choose`."""

    k: int
    weighing: Weighing
    sigmoid: bool = False  # whether the sigmoids of `Operands.compared` are compared
    groups: Groups | None = None  # of which the best are chosen first
    softmax: bool = False  # whether the softmax of the logits is returned


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def choose(operands: Operands, options: Options) -> list[jax.Array]:
    """Chooses each token's k best experts, as `lax.top_k` does.

    Returns their ids, the numbers that `weigh` takes, and the weights, all [T, k], and the softmax
    if `options` ask for it. All operands must vary (vma) over the same mesh axes.
    """
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    return _choose_p.bind(*given.values(), names=tuple(given), options=options)


@choose.defjvp
def _choose_jvp(options: Options, primals: Any, tangents: Any) -> Any:
    (operands,), (doperands,) = primals, tangents
    results = choose(operands, options)
    topk_idx, chosen, _, *probs = results
    # The tangents of the results; the choice has none. `probs` is [softmax] or [].
    dprobs = []
    for softmax in probs:
        product = softmax * doperands.logits
        dprobs.append(product - softmax * jnp.sum(product, axis=-1, keepdims=True))
    dweighed = _numbers_to_weigh(doperands, dprobs, options.weighing)
    dchosen = jnp.take_along_axis(dweighed, topk_idx, axis=-1)
    _, dweights = jax.jvp(functools.partial(weigh, options.weighing), (chosen,), (dchosen,))
    return results, [zero_from_primal(topk_idx), dchosen, dweights, *dprobs]


def _numbers_to_weigh(
    operands: Operands, probs: Sequence[jax.Array], weighing: Weighing
) -> jax.Array:
    """Selects the numbers [T, E] to `weigh`, or their tangents; `probs` is [softmax] or []."""
    if operands.gathered is not None:
        return operands.gathered
    return operands.logits if weighing.normalize or not probs else probs[0]


def weigh(weighing: Weighing, chosen: jax.Array) -> jax.Array:
    """Computes the weights [T, k] from the chosen experts' scores, logarithms or logits."""
    if weighing.normalize:
        # The scores and epsilon are first divided by about the largest of them, so that their sum
        # is at least 1/2 and cannot underflow. If all scores are 0, the weights are 0.
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
    """Splits sigmoid(logits), which may underflow, into e^a * f with f >= 1/2; returns a and f."""
    is_low = logits < 0
    exponent = jnp.where(is_low, logits, 0.0)
    return exponent, jax.nn.sigmoid(jnp.where(is_low, -logits, logits))


def _by_xla(*arrays: jax.Array, names: tuple[str, ...], options: Options) -> list[jax.Array]:
    """Computes `choose` of the operands called `names`; the others are None."""
    operands = Operands(**dict(zip(names, arrays, strict=True)))
    compared = _compared(operands, options)
    if options.groups is not None:
        compared = _within_best_groups(compared, options.groups)
    topk_idx = _top_k(compared, options.k)[1]
    probs = [jax.nn.softmax(operands.logits, axis=-1)] if options.softmax else []
    weighed = _numbers_to_weigh(operands, probs, options.weighing)
    chosen = jnp.take_along_axis(weighed, topk_idx, axis=-1, mode="promise_in_bounds")
    return [topk_idx, chosen, weigh(options.weighing, chosen), *probs]


def _compared(operands: Operands, options: Options) -> jax.Array:
    """Returns the numbers [T, E] by which experts and groups are compared, with the bias."""
    compared = operands.logits if operands.compared is None else operands.compared
    if options.sigmoid:
        compared = jax.nn.sigmoid(compared)
    return compared if operands.bias is None else compared + operands.bias


def _within_best_groups(compared: jax.Array, groups: Groups) -> jax.Array:
    """Returns `compared` [T, E], with -inf for the experts outside of each token's best groups."""
    num_tokens, num_experts = compared.shape
    size = num_experts // groups.number
    of_experts = compared.reshape(num_tokens, groups.number, size)
    largest, _ = _top_k(of_experts, min(groups.best, size))
    # The sum of each group's largest numbers, [T, number], added in this order.
    of_groups = functools.reduce(jnp.add, (largest[..., i] for i in range(largest.shape[-1])))
    _, kept = _top_k(of_groups, groups.kept)
    group_ids = jnp.arange(groups.number, dtype=kept.dtype)[None, None]
    is_kept = jnp.any(kept[:, :, None] == group_ids, axis=1)
    return jnp.where(is_kept[:, :, None], of_experts, -jnp.inf).reshape(compared.shape)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest values along the last axis, best first, and their int32 indices."""
    # Without barriers, XLA sorts all elements if later code slices the results. A single barrier
    # for both results crashes XLA for CPUs.
    values, indices = map(lax.optimization_barrier, lax.top_k(x, k))
    return values, indices.astype(jnp.int32)


def _by_kernel(*arrays: jax.Array, names: tuple[str, ...], options: Options) -> list[jax.Array]:
    """Computes `_by_xla` by the GPU kernel, after XLA has applied groups that the kernel lacks."""
    from pallas_kernels.routing import top_k as kernels

    operands = Operands(**dict(zip(names, arrays, strict=True)))
    num_experts, groups = operands.logits.shape[1], options.groups
    if groups is not None and plan.unavailable_reason(num_experts, options.k, groups):
        compared = _within_best_groups(_compared(operands, options), groups)
        operands = operands._replace(compared=compared, bias=None)
        options = dataclasses.replace(options, sigmoid=False, groups=None)
    # The kernel is traced with int32 indices, also under `jax_enable_x64`.
    with jax.enable_x64(False):
        results = kernels.top_k(
            **operands._asdict(),
            k=options.k,
            weighing=options.weighing,
            sigmoid=options.sigmoid,
            groups=options.groups,
            softmax=options.softmax,
        )
    return list(results if options.softmax else results[:-1])


def _kernel_runs(program: Program, k: int) -> bool:
    num_tokens, num_experts = program.operand_types[0].shape
    return (
        not checks.is_symbolic(num_tokens)
        and 0 < num_tokens * num_experts <= checks.MAX_INT32
        # Groups do not matter: `_by_kernel` applies those that the kernel lacks by XLA.
        and plan.unavailable_reason(num_experts, k) is None
        and availability.runs_local_kernels(program)
    )


def _lower(program: Program, *arrays: Any, options: Options, **params: Any) -> Any:
    compute = _by_kernel if _kernel_runs(program, options.k) else _by_xla
    return program.lower(compute, *arrays, options=options, **params)


def _types(logits: Any, *_: Any, options: Options, **__: Any) -> Any:
    # Returns the types of the results of `choose`.
    shape = (logits.shape[0], options.k)
    of_choices = [result_type(logits, shape, dtype) for dtype in (jnp.int32, None, None)]
    return [*of_choices, *([logits] if options.softmax else [])]


def _batch(arrays: Any, axes: Any, *, names: tuple[str, ...], options: Options) -> Any:
    # The rule for `jax.vmap`: one call chooses for the tokens of all elements of the batch.
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    shape = None
    operands = []
    for name, x, axis in zip(names, arrays, axes, strict=True):
        if axis is None and name == "bias" and x.shape[0] == 1:
            # All tokens share this bias, so it needs no copy for each element of the batch.
            operands.append(x)
            continue
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        # The logits come first, and other operands are broadcast to their shape.
        shape = shape or x.shape
        operands.append(jnp.broadcast_to(x, shape).reshape(-1, shape[-1]))
    results = _choose_p.bind(*operands, names=names, options=options)
    return [x.reshape(size, -1, x.shape[-1]) for x in results], [0] * len(results)


_choose_p = define_primitive(
    "ep_choose",
    abstract_eval=_types,
    lower=_lower,
    inline=_by_xla,
    batch=_batch,
    platforms=(None, "cuda"),
)
