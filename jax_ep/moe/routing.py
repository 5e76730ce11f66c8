"""Defines the router's functions: logits, choices of experts, their weights, and the bias update.

All of them are pure functions of one rank's arrays, and compute in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import rounded
from jax_ep.exchange.routes import expert_ids
from jax_ep.moe import few_logits
from jax_ep.moe.options import (
    check_options,
    documented,
    make_options,
    number_or_zero,
    one_of,
    option,
    takes,
)
from jax_ep.moe.top_k import choose, weigh
from jax_ep.runtime.jax_compat import match_varying, register_for_export
from pallas_kernels.routing.plan import Groups, Weighing

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
ChooseBy = Literal["score", "logit"]
GroupScore = Literal["top2", "max"]

# If a token's largest logit is lower than this, a constant is added to the token's logits before
# `Routing.probs` are computed, so that the largest becomes this number. Otherwise all sigmoids of
# the token could underflow to 0.
_LOWEST_LOGIT = -64.0


class Routing(NamedTuple):
    """The experts chosen by each token, and their weights, for T tokens, K choices and E experts.

    Attributes:
        topk_idx: [T, K] int32, expert ids, best first; the K ids of a token are distinct.
        topk_weights: [T, K] float32, the weights for `combine`.
        probs: [T, E] float32, every expert's score before bias, groups, normalization and scale,
            for `load_balance_loss`, which uses only their ratios. If all logits of a token are so
            low that its scores could underflow ("sigmoid", "sqrt_softplus"), a constant is first
            added to these logits, so that the largest is -64. Your own router may return None; the
            load-balance loss is then 0.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    probs: jax.Array | None = None


register_for_export(Routing)


def router_logits(
    x: jax.Array, gate: jax.Array, bias: jax.Array | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns the router's logits, x @ gate + bias, in float32.

    A bfloat16 x of up to 16 tokens is multiplied as float32. For more tokens, the float32 gate is
    split into three bfloat16 parts, which add up to it exactly, and the three products are summed
    in float32. (One float32 product would copy x, and on a GPU round the gate to TF32's 11 bits.)
    The backward pass splits its float32 operands into only two bfloat16 parts, which keep 16 bits
    (Henry, Tang and Heinecke, arXiv:1904.06376). If x has another dtype, x and gate are multiplied
    as float32, in the precision of `jax.default_matmul_precision`.

    Args:
        x: [T, H] floating: the tokens.
        gate: [H, E] floating: the router's kernel.
        bias: [E] floating, or None: a trained bias of the logits (GPT-OSS).
        dtype: float32, or a narrower floating dtype. With a narrower dtype, x, gate and bias are
            cast to it, products are summed in float32, and the logits are rounded to it.

    Returns:
        [T, E] float32.
    """
    checks.check_array("x", x, 2, jnp.floating, "[T, H]")
    checks.check_array("gate", gate, 2, jnp.floating, "[H, E]")
    dtype = checks.as_floating("dtype", dtype)
    if dtype.itemsize > 4:
        raise TypeError(f"dtype must be float32 or narrower, but is {dtype!r}.")
    if dtype.itemsize < 4:
        logits = _dot(x.astype(dtype), gate.astype(dtype), 1, 0, jnp.float32)
    else:
        logits = _float32_logits(x, gate)
    if bias is not None:
        checks.check_array("bias", bias, 1, jnp.floating, "[E]")
        logits += bias.astype(dtype).astype(jnp.float32)[None]
    return rounded(logits, dtype)


def _float32_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32) @ gate.astype(jnp.float32)
    if gate.dtype != jnp.bfloat16:
        gate = gate.astype(jnp.float32)
    return _bfloat16_logits(*match_varying((x, gate), ()))


@jax.custom_vjp
def _bfloat16_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    if not checks.is_symbolic(x.shape[0]) and x.shape[0] <= few_logits.MOST_TOKENS:
        return few_logits.few_logits(x, gate)
    # The parts of the gate are multiplied in reverse order, so that the sum of the products begins
    # with the last part, which holds the smallest numbers.
    parts = _split(gate, 3)[::-1]
    products = _dot(x, jnp.concatenate(parts, axis=1), 1, 0, jnp.float32)
    # One `jnp.sum` adds the products of x with all parts of the gate. If XLA splits the matmul
    # along H, as it may for few rows, it can fuse the sum of its partial results with this sum.
    return jnp.sum(products.reshape(x.shape[0], len(parts), -1), axis=1)


def _bfloat16_logits_bwd(saved, grad):
    x, gate = saved
    high, low = _split(grad, 2)
    gate_high, *gate_low = _split(gate, 2)
    dx = _dot(
        jnp.concatenate([high, low, high][: 2 + len(gate_low)], axis=1),
        jnp.concatenate([gate_high, gate_high, *gate_low], axis=1),
        1,
        1,
        x.dtype,
    )
    dgate = _dot(x, jnp.concatenate([high, low], axis=1), 0, 0, jnp.float32)
    return dx, _sum_of_columns(dgate, 2).astype(gate.dtype)


_bfloat16_logits.defvjp(
    lambda x, gate: (_bfloat16_logits(x, gate), (x, gate)), _bfloat16_logits_bwd
)


def _split(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits x, a float32 array, into `count` bfloat16 arrays that add up to about x.

    The first array is x rounded to bfloat16, the second is the rest rounded to bfloat16, and so on.
    Three arrays add up to x exactly. A bfloat16 x is returned unsplit, in a list.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(count):
        part = rounded(x, jnp.bfloat16)
        parts.append(part.astype(jnp.bfloat16))
        # The remainder of an infinity is 0, because infinity minus infinity would be NaN.
        x = jnp.where(jnp.isfinite(part), x - part, 0)
    return parts


def _sum_of_columns(products: jax.Array, count: int) -> jax.Array:
    """Splits an array [H, count * E] into `count` blocks of E columns, and sums the blocks, [H, E].

    Adds the blocks from the last to the first, since the last holds the smallest numbers.
    """
    return functools.reduce(jnp.add, jnp.split(products, count, axis=1)[::-1])


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype: Any) -> jax.Array:
    """Contracts axis `a_axis` of matrix a with axis `b_axis` of matrix b; returns `dtype`."""
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Options of how the router chooses experts by their logits and weighs the choices.

    Attributes:
        score: the function of the logits that gives the experts' scores: "softmax", "sigmoid" or
            "sqrt_softplus".
        choose_by: "score" or "logit": whether the selection bias is added to an expert's score or
            to its logit. Groups are compared by these sums, too.
        num_groups: the number of groups of experts, a divisor of E; 1 means no groups.
        groups_kept: the number of groups that a token may choose experts from.
        group_score: how groups are compared: "top2", by the sum of a group's two largest
            `score + bias` (DeepSeek-V3), or "max", by its largest one (DeepSeek-V2).
        normalize: whether to divide a token's k weights by their sum plus `normalize_epsilon`. The
            logarithms of the scores are used, so weights are exact even if scores underflow in
            float32. If all k logits are -inf, the weights are 0.
        normalize_epsilon: the number that `normalize` adds to the sum of the weights, 0 or more
            (DeepSeek-V3 has 1e-20, LFM2 1e-6). If scores are far below it, the weights' sum and
            gradients are small.
        scale: the factor, 0 or more, by which the weights are multiplied after normalization.
    """

    score: Score = option("softmax", one_of(Score))
    choose_by: ChooseBy = option("score", one_of(ChooseBy))
    num_groups: int = option(1, checks.check_integer)
    groups_kept: int = option(1, checks.check_integer)
    group_score: GroupScore = option("top2", one_of(GroupScore))
    normalize: bool = option(True, checks.check_bool)
    normalize_epsilon: float = option(0.0, number_or_zero)
    scale: float = option(1.0, number_or_zero)


@documented(RoutingOptions)
@takes(RoutingOptions, before="bias")
def top_k_routing(
    logits: jax.Array,
    k: int,
    *,
    bias: jax.Array | None = None,
    **options: Any,
) -> Routing:
    """Chooses k experts for every token.

    A token's scores are the softmax of its logits over the experts, or the sigmoid or the square
    root of the softplus (DeepSeek-V4) of each logit. The k experts with the largest `score + bias`
    are chosen; their weights are their scores. The sums `score + bias` are computed with about
    twice the digits of float32. Among experts with equal sums, the one with the larger logit wins,
    then the one with the lower id. (Equal biases therefore never change a choice.) Without a bias,
    experts are compared by their logits, which have the order of the scores. Gradients flow through
    the weights and `probs`, but not through the choice.

    With `num_groups > 1` the experts form that many equal blocks of consecutive ids, and a token
    may only choose within its `groups_kept` best groups (DeepSeek-V3's node-limited routing,
    arXiv:2412.19437, section 2.1.2).

    A softmax over the chosen logits alone (GPT-OSS, Granite, Aria) equals the softmax over all
    logits with `normalize=True`.

    `score` and the other options are the fields of `RoutingOptions`, as keyword arguments.

    Args:
        logits: [T, E] floating; converted to float32.
        k: the number of choices per token, at most the number of experts in `groups_kept` groups.
        {RoutingOptions}
        bias: [E] or None, a selection bias (`e_score_correction_bias`). It changes only the choice,
            not weights or gradients (arXiv:2408.15664); see `update_expert_bias`. Add a trained
            bias to the logits instead.

    Returns:
        The chosen experts, their weights, and the scores of all experts, as a `Routing`.

    Raises:
        ValueError: a shape, name or number does not fit; the message names the argument.
        TypeError: `logits` or `bias` is not floating, or an option has the wrong type.
    """
    return choose_experts(logits, k, bias, make_options(RoutingOptions, options, "top_k_routing"))


def choose_experts(
    logits: jax.Array, k: int, bias: jax.Array | None, options: RoutingOptions
) -> Routing:
    """Computes `top_k_routing` for logits [T, E] and `bias` [E], with all options in one object."""
    check_options(options)
    _check_logits(logits, bias)
    k, num_groups, groups_kept = check_choosing(logits.shape[1], k, options)
    score, choose_by, normalize = options.score, options.choose_by, options.normalize
    logits = logits.astype(jnp.float32)
    scores = score if choose_by == "score" else "logit"
    best = {"top2": 2, "max": 1}[options.group_score]
    groups = Groups(num_groups, groups_kept, best) if groups_kept < num_groups else None
    weighing = _weighing(options)
    # Experts can be compared by their logits, which have the order of the scores. The scores are
    # needed only for sums: of a score and a bias, or of the two best scores of a group.
    has_sums = bias is not None or (groups is not None and best == 2)
    softmax = score == "softmax" and not (has_sums and scores == "softmax")
    probs = None
    if not softmax:
        probs = _SCORES[score](_raised(logits) if score != "softmax" else logits)
    rounded = None
    if has_sums and scores not in ("logit", "sigmoid"):
        rounded = _SCORES[score](logits)
    gathered = None
    if not (softmax and not normalize):
        gathered = _weighed(score, logits, weighing)
    topk_idx, weights, made = choose(
        logits,
        k,
        weighing,
        scores=scores,
        rounded=rounded,
        bias=None if bias is None else bias.astype(jnp.float32),
        groups=groups,
        gathered=None if gathered is logits else gathered,
        softmax=softmax,
    )
    return Routing(topk_idx, weights, made if softmax else probs)


def routing_of_choices(
    logits: jax.Array,
    topk_idx: jax.Array,
    options: RoutingOptions,
) -> Routing:
    """Weighs choices `topk_idx` that the caller makes, such as by a hash of the tokens.

    The weights are computed from the logits [T, E] as in `top_k_routing`. topk_idx is [T, K]
    integer; an id outside [0, E) chooses no expert and has weight 0.
    """
    check_options(options)
    score, normalize = options.score, options.normalize
    num_experts = logits.shape[1]
    logits = logits.astype(jnp.float32)
    weighing = _weighing(options)
    topk_idx = expert_ids(topk_idx, num_experts)
    is_choice = (topk_idx >= 0) & (topk_idx < num_experts)
    weighed = _weighed(score, logits, weighing)
    chosen = jnp.take_along_axis(weighed, jnp.where(is_choice, topk_idx, 0), axis=-1)
    weights = weigh(weighing, jnp.where(is_choice, chosen, -jnp.inf if normalize else 0.0))
    probs = _SCORES[score](_raised(logits) if score != "softmax" else logits)
    return Routing(topk_idx, jnp.where(is_choice, weights, 0.0), probs)


def _weighing(options: RoutingOptions) -> Weighing:
    is_sigmoid = options.normalize and options.score == "sigmoid"
    epsilon, scale = float(options.normalize_epsilon), float(options.scale)
    return Weighing(options.normalize, epsilon, scale, is_sigmoid)


def _weighed(score: str, logits: jax.Array, weighing: Weighing) -> jax.Array:
    """Returns the numbers [T, E] float32 from which `weigh` computes the weights of chosen experts.

    They are the scores, if weights are not normalized. Otherwise they are logits or logarithms of
    scores, whose ratios `weigh` can compute even if the scores underflow.
    """
    if not weighing.normalize:
        return _SCORES[score](logits)
    if score == "sqrt_softplus":
        return _log_sqrt_softplus(logits)
    if score == "softmax" and weighing.epsilon:
        return jax.nn.log_softmax(logits, axis=-1)
    return logits


def _raised(logits: jax.Array) -> jax.Array:
    """Raises the logits of each token whose largest logit is below `_LOWEST_LOGIT`.

    Adds a constant to all logits of such a token, so that the largest becomes `_LOWEST_LOGIT`. The
    logits of other tokens stay as they are.
    """
    largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    raised = logits - jnp.maximum(largest, jnp.finfo(jnp.float32).min) + _LOWEST_LOGIT
    return jnp.where(largest < _LOWEST_LOGIT, raised, logits)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    # Where softplus underflows to 0, the derivative of its square root is zero times infinity,
    # which is NaN. A `where` around the results would not remove this NaN from the gradient, so
    # each branch gets arguments for which its derivative is finite.
    is_low = logits < -15.0
    low, high = jnp.where(is_low, logits, -15.0), jnp.where(is_low, 0.0, logits)
    return jnp.where(is_low, jnp.exp(0.5 * low), jnp.sqrt(jax.nn.softplus(high)))


def _log_sqrt_softplus(logits: jax.Array) -> jax.Array:
    # Below -15, softplus(x) equals exp(x) in float32, so its logarithm is x itself.
    is_low = logits < -15.0
    low, high = jnp.where(is_low, logits, -15.0), jnp.where(is_low, 0.0, logits)
    return 0.5 * jnp.where(is_low, low, jnp.log(jax.nn.softplus(high)))


_SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": functools.partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}


def check_choosing(
    num_experts: int, k: Any, options: RoutingOptions, *, k_name: str = "k"
) -> tuple[int, int, int]:
    """Raises TypeError or ValueError unless `options` let a token choose k of the experts.

    Returns k, num_groups and groups_kept as ints. Messages name the option, and call k `k_name`.
    """
    k = checks.check_integer(k_name, k)
    num_groups = checks.check_integer("num_groups", options.num_groups)
    groups_kept = checks.check_integer("groups_kept", options.groups_kept)
    if num_experts % num_groups:
        raise ValueError(
            f"num_groups must divide the {num_experts} experts that tokens choose among, but is "
            f"{num_groups}."
        )
    if groups_kept > num_groups:
        raise ValueError(
            f"groups_kept must be at most num_groups={num_groups}, but is {groups_kept}."
        )
    selectable = num_experts // num_groups * groups_kept
    if k > selectable:
        raise ValueError(
            f"{k_name} must be at most the {selectable} experts that a token may choose from "
            f"({num_experts} experts, num_groups={num_groups}, groups_kept={groups_kept}), but is "
            f"{k}."
        )
    return k, num_groups, groups_kept


def _check_logits(logits: jax.Array, bias: jax.Array | None) -> None:
    checks.check_array("logits", logits, 2, jnp.floating, "[T, E]")
    checks.check_not_sharded("logits", logits, -1)
    if bias is not None:
        checks.check_array("bias", bias, None, jnp.floating, "[E]")
        checks.check_not_sharded("bias", bias)
        if bias.shape != logits.shape[1:]:
            raise ValueError(
                f"bias must have one value per expert, shape {logits.shape[1:]}, but has shape "
                f"{bias.shape}."
            )


def update_expert_bias(
    bias: jax.Array, expert_counts: jax.Array, rate: float | jax.Array
) -> jax.Array:
    """Updates the selection bias so that the experts' loads become more equal.

    Raises the bias of an expert by `rate` if its load is below the mean, and lowers it by `rate` if
    its load is above. This balances loads without an auxiliary loss (arXiv:2408.15664, as in
    DeepSeek-V3). Call it once per training step, outside the gradient, with the counts of that step
    on all ranks.

    Args:
        bias: [..., E] floating: the bias of one router or of a stack of layers.
        expert_counts: [..., E]: the number of tokens that chose each expert, summed over ranks.
        rate: the change of the bias per step: a number, or an array of shape [] or of bias's shape.
            DeepSeek-V3 used 0.001.

    Returns:
        [..., E] of bias's dtype.

    Raises:
        ValueError: the shapes differ; the message names the argument.
        TypeError: `bias` is not floating, or `rate` is not a number.
    """
    checks.check_array("bias", bias, None, jnp.floating, "[..., E]", may_be_empty=False)
    checks.check_array("expert_counts", expert_counts, None, jnp.number, "[..., E]")
    if bias.ndim == 0:
        raise ValueError(f"bias must be a floating array [..., E], but has shape {bias.shape}.")
    if expert_counts.shape != bias.shape:
        raise ValueError(
            f"expert_counts must have the shape of bias {bias.shape}, but has shape "
            f"{expert_counts.shape}."
        )
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        checks.check_array("rate", rate, None, jnp.number, "[] or [..., E], or a number")
    if jnp.shape(rate) not in ((), bias.shape):
        raise ValueError(
            f"rate must be a number, or have the shape of bias {bias.shape}, but has shape "
            f"{jnp.shape(rate)}."
        )
    # The least count is subtracted in integers, which is exact, since float32 rounds large counts.
    least = jnp.min(expert_counts, axis=-1, keepdims=True)
    counts = (expert_counts - least).astype(jnp.float32)
    sign = jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)
    step = jnp.asarray(rate, jnp.float32) * sign
    return (bias.astype(jnp.float32) + step).astype(bias.dtype)
