"""Defines the router's functions of one rank's arrays; they compute in float32."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.dtypes import rounded
from jax_ep.exchange.routes import expert_ids
from jax_ep.moe import few_logits, top_k
from jax_ep.runtime.jax_compat import match_varying, register_for_export
from pallas_kernels.routing.plan import Groups, Weighing

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
ChooseBy = Literal["score", "logit"]
# The number of a group's largest scores that are added up, or a name for it.
GroupScore = Literal["top2", "max"] | int
_GROUP_SCORES = {"top2": 2, "max": 1}

# Logits of a token whose largest is lower are raised before `Routing.probs` are computed, as all
# sigmoids could underflow to 0. sigmoid(-64) is 2e-28, and the smallest normal float32 is 1e-38.
_LOWEST_LOGIT = -64.0


class Routing(NamedTuple):
    """The experts chosen by each token, and their weights, for T tokens, K choices and E experts.

    Attributes:
        topk_idx: [T, K] int32, expert ids, best first; the K ids of a token are distinct.
        topk_weights: [T, K] float32, the weights for `combine`.
        probs: [T, E] float32, every expert's score before bias, groups, normalization and scale,
            for `load_balance_loss`, which uses only their ratios; None: that loss is 0. Logits of a
            token are raised until the largest is -64 at least, so that not all scores underflow.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    probs: jax.Array | None = None


register_for_export(Routing)


def router_logits(
    x: jax.Array, gate: jax.Array, bias: jax.Array | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns the router's logits x @ gate + bias, [T, E] float32, of x [T, H] and gate [H, E].

    They have float32's accuracy also for a bfloat16 x. If `dtype` is narrower than float32,
    operands are cast to it, and logits rounded.
    """
    if jnp.dtype(dtype).itemsize < 4:
        logits = _dot(x.astype(dtype), gate.astype(dtype), a_axis=1, b_axis=0, dtype=jnp.float32)
    elif x.dtype != jnp.bfloat16:
        logits = x.astype(jnp.float32) @ gate.astype(jnp.float32)
    else:
        gate = gate if gate.dtype == jnp.bfloat16 else gate.astype(jnp.float32)
        logits = _bfloat16_logits(*match_varying((x, gate)))
    if bias is not None:
        logits += bias.astype(dtype).astype(jnp.float32)[None]
    return rounded(logits, dtype)


@jax.custom_vjp
def _bfloat16_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns x @ gate, [T, E] float32, of a bfloat16 x and a float32 or bfloat16 gate."""
    # A kernel multiplies few tokens in float32. XLA does the same where that kernel cannot run.
    if not checks.is_symbolic(x.shape[0]) and 0 < x.shape[0] <= few_logits.MOST_TOKENS:
        return few_logits.few_logits(x, gate)
    # Three bfloat16 parts add up to the gate exactly. One float32 product would copy x, and on a
    # GPU round the gate to TF32's 11 bits. The backward pass splits its operands into only two
    # parts, which keep 16 bits (Henry, Tang and Heinecke, arXiv:1904.06376).
    # The parts of the gate are multiplied in reverse order, so that the sum of the products begins
    # with the last part, which holds the smallest numbers.
    parts = _split(gate, 3)[::-1]
    products = _dot(x, jnp.concatenate(parts, axis=1), a_axis=1, b_axis=0, dtype=jnp.float32)
    # One `jnp.sum` adds the products of x with all parts of the gate. If XLA splits the matmul
    # along H, as it may for few rows, it can fuse the sum of its partial results with this sum.
    return jnp.sum(products.reshape(x.shape[0], len(parts), -1), axis=1)


def _bfloat16_logits_bwd(saved, grad):
    x, gate = saved
    high, low = _split(grad, 2)
    # dx = grad [T, E] @ gate.T, without the product of the low parts, too small to matter. One
    # matmul adds the other products. A bfloat16 gate has no low part.
    gate_high, *gate_low = _split(gate, 2)
    dx = _dot(
        jnp.concatenate([high, low, high] if gate_low else [high, low], axis=1),
        jnp.concatenate([gate_high, gate_high, *gate_low], axis=1),
        a_axis=1,
        b_axis=1,
        dtype=x.dtype,
    )
    # dgate [H, E] = x.T @ grad. One matmul multiplies x.T by both parts of grad.
    grads = jnp.concatenate([high, low], axis=1)
    dgates = _dot(x, grads, a_axis=0, b_axis=0, dtype=jnp.float32)
    dgate_high, dgate_low = jnp.split(dgates, 2, axis=1)
    return dx, (dgate_high + dgate_low).astype(gate.dtype)


_bfloat16_logits.defvjp(
    lambda x, gate: (_bfloat16_logits(x, gate), (x, gate)), _bfloat16_logits_bwd
)


def _split(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits x into `count` bfloat16 parts that add up to about x; [x] if x is bfloat16."""
    # Each part is what the parts before it leave of x, rounded.
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(count):
        part = rounded(x, jnp.bfloat16)
        parts.append(part.astype(jnp.bfloat16))
        # The remainder of an infinity is 0, because infinity minus infinity would be NaN.
        x = jnp.where(jnp.isfinite(part), x - part, 0)
    return parts


def _dot(a: jax.Array, b: jax.Array, *, a_axis: int, b_axis: int, dtype: Any) -> jax.Array:
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """The options of `top_k_routing`, as one object."""

    score: Score = "softmax"
    choose_by: ChooseBy = "score"
    num_groups: int = 1
    groups_kept: int = 1
    group_score: GroupScore = "top2"
    normalize: bool = True
    normalize_epsilon: float = 0.0
    scale: float = 1.0

    def check(self) -> None:
        checks.check_name("score", self.score, get_args(Score))
        checks.check_name("choose_by", self.choose_by, get_args(ChooseBy))
        checks.check_integer("num_groups", self.num_groups)
        checks.check_integer("groups_kept", self.groups_kept)
        if isinstance(self.group_score, str):
            checks.check_name("group_score", self.group_score, tuple(_GROUP_SCORES))
        else:
            checks.check_integer("group_score", self.group_score)
        checks.check_bool("normalize", self.normalize)
        checks.check_number("normalize_epsilon", self.normalize_epsilon, may_be_zero=True)
        checks.check_number("scale", self.scale, may_be_zero=True)

    def groups(self) -> Groups | None:
        """Returns the groups that limit a token's choice; None if it keeps all groups."""
        if self.groups_kept >= self.num_groups:
            return None
        score = self.group_score
        return Groups(
            number=int(self.num_groups),
            kept=int(self.groups_kept),
            best=_GROUP_SCORES[score] if isinstance(score, str) else int(score),
        )


def top_k_routing(
    logits: jax.Array,
    k: int,
    *,
    score: Score = "softmax",
    choose_by: ChooseBy = "score",
    num_groups: int = 1,
    groups_kept: int = 1,
    group_score: GroupScore = "top2",
    normalize: bool = True,
    normalize_epsilon: float = 0.0,
    scale: float = 1.0,
    bias: jax.Array | None = None,
) -> Routing:
    """Chooses k experts for every token.

    A token's scores are the softmax of its logits over the experts, or the sigmoid or the square
    root of the softplus (DeepSeek-V4) of each logit. `lax.top_k` of the float32 sums `score + bias`
    chooses k experts: of equal sums, the lower id wins. Their weights are their scores. Without
    a bias or a sum over a group, the logits are compared, whose order is that of the scores.
    Gradients flow through the weights and `probs`, but not through the choice.

    With `num_groups > 1` the experts form that many equal blocks of consecutive ids, and a token
    may only choose within its `groups_kept` best groups (DeepSeek-V3's node-limited routing,
    arXiv:2412.19437, section 2.1.2).

    Args:
        logits: [T, E] floating; converted to float32.
        k: the number of choices per token, at most the number of experts in `groups_kept` groups.
        score: the function of the logits that gives the experts' scores: "softmax", "sigmoid" or
            "sqrt_softplus".
        choose_by: "score" or "logit", to which the selection bias is added.
        num_groups: the number of groups of experts, a divisor of E; 1 means no groups.
        groups_kept: the number of groups that a token may choose experts from.
        group_score: how groups are compared: "top2", by the sum of a group's two largest
            `score + bias` (DeepSeek-V3), or "max", by its largest one (DeepSeek-V2); a number n, at
            least 1, by the sum of its n largest ones.
        normalize: whether to divide a token's k weights by their sum plus `normalize_epsilon`,
            which with "softmax" gives the softmax of the chosen logits (GPT-OSS, Granite, Aria).
            Weights are exact even if scores underflow. If all k logits are -inf, they are 0.
        normalize_epsilon: the number that `normalize` adds to the sum of the weights, 0 or more
            (DeepSeek-V3 has 1e-20, LFM2 1e-6).
        scale: the factor, 0 or more, by which the weights are multiplied after normalization.
        bias: [E] or None, a selection bias (`e_score_correction_bias`). It changes only the choice,
            not weights or gradients (arXiv:2408.15664); see `update_expert_bias`. Add a trained
            bias to the logits instead.

    Returns:
        The chosen experts, their weights, and the scores of all experts, as a `Routing`.

    Raises:
        ValueError: a shape, name or number does not fit; the message names the argument.
        TypeError: `logits` or `bias` is not floating, or an option has the wrong type.
    """
    options = RoutingOptions(
        score=score,
        choose_by=choose_by,
        num_groups=num_groups,
        groups_kept=groups_kept,
        group_score=group_score,
        normalize=normalize,
        normalize_epsilon=normalize_epsilon,
        scale=scale,
    )
    options.check()
    checks.check_array("logits", logits, 2, jnp.floating, "[T, E]")
    checks.check_not_sharded("logits", logits, only_last=True)
    if bias is not None:
        checks.check_array("bias", bias, None, jnp.floating, "[E]")
        checks.check_not_sharded("bias", bias)
        shape = logits.shape[1:]
        checks.check_shape("bias", bias, shape, f"one value per expert, shape {shape}")
    check_choosing(logits.shape[1], k, options)
    return choose_experts(logits, int(k), bias, options)


def choose_experts(
    logits: jax.Array, k: int, bias: jax.Array | None, options: RoutingOptions
) -> Routing:
    """Computes `top_k_routing` of arguments that have been checked."""
    score, groups, weighing = options.score, options.groups(), _weighing(options)
    logits = logits.astype(jnp.float32)
    # Experts are compared by their logits, which have the order of the scores, unless scores are
    # added to a bias or to other scores of a group.
    adds_scores = bias is not None or (groups is not None and groups.best > 1)
    by_scores = adds_scores and options.choose_by == "score"
    # `top_k.choose` itself computes sigmoids that it compares, and a softmax that it only returns.
    by_sigmoid = by_scores and score == "sigmoid"
    compared = _SCORES[score](logits) if by_scores and not by_sigmoid else None
    return_softmax = score == "softmax" and not by_scores
    probs = None if return_softmax else _probs(score, logits)
    # The numbers from which weights are computed. They are not an operand of their own if they are
    # the softmax that `choose` returns (None here), or the logits.
    gathered = None
    if options.normalize or not return_softmax:
        gathered = _weighed_numbers(score, logits, weighing)
    operands = top_k.Operands(
        logits,
        compared,
        bias=None if bias is None else bias.astype(jnp.float32)[None],
        gathered=None if gathered is logits else gathered,
    )
    choosing = top_k.Options(k, weighing, by_sigmoid, groups, return_softmax)
    topk_idx, _, weights, *softmax = top_k.choose(match_varying(operands), choosing)
    return Routing(topk_idx, weights, softmax[0] if return_softmax else probs)


def routing_of_choices(logits: jax.Array, topk_idx: jax.Array, options: RoutingOptions) -> Routing:
    """Weighs choices [T, K] by logits [T, E]; an id outside [0, E) has weight 0."""
    score, normalize = options.score, options.normalize
    num_experts = logits.shape[1]
    logits = logits.astype(jnp.float32)
    weighing = _weighing(options)
    topk_idx = expert_ids(topk_idx, num_experts)
    is_choice = (topk_idx >= 0) & (topk_idx < num_experts)
    weighed = _weighed_numbers(score, logits, weighing)
    chosen = jnp.take_along_axis(weighed, jnp.where(is_choice, topk_idx, 0), axis=-1)
    # To normalize, `weigh` takes logits or logarithms of scores; -inf stands for a score of 0.
    weights = top_k.weigh(weighing, jnp.where(is_choice, chosen, -jnp.inf if normalize else 0.0))
    return Routing(topk_idx, jnp.where(is_choice, weights, 0.0), _probs(score, logits))


def _probs(score: str, logits: jax.Array) -> jax.Array:
    """Returns `Routing.probs` [T, E]: all scores, of which some do not underflow in each token."""
    if score != "softmax":
        # If a token's largest logit is below `_LOWEST_LOGIT`, raises all of its logits equally, so
        # that the largest is `_LOWEST_LOGIT`.
        largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        # With the lowest finite number, a token whose logits are all -inf gets no NaN.
        raised = logits - jnp.maximum(largest, jnp.finfo(jnp.float32).min) + _LOWEST_LOGIT
        logits = jnp.where(largest < _LOWEST_LOGIT, raised, logits)
    return _SCORES[score](logits)


def _weighing(options: RoutingOptions) -> Weighing:
    """Selects the options of `top_k.weigh`, which gets `_weighed_numbers`."""
    return Weighing(
        normalize=options.normalize,
        epsilon=float(options.normalize_epsilon),
        scale=float(options.scale),
        sigmoid=options.normalize and options.score == "sigmoid",
    )


def _weighed_numbers(score: str, logits: jax.Array, weighing: Weighing) -> jax.Array:
    """Returns the numbers [T, E] from which `weigh` computes the chosen experts' weights."""
    if not weighing.normalize:
        return _SCORES[score](logits)
    # Logits or logarithms of scores, whose ratios are exact even if the scores underflow.
    if score == "sqrt_softplus":
        return _log_sqrt_softplus(logits)
    # Logits differ from log_softmax by a constant, which cancels only without an epsilon.
    if score == "softmax" and weighing.epsilon:
        return jax.nn.log_softmax(logits, axis=-1)
    return logits


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    # Below -15, softplus(x) equals exp(x) in float32. Where softplus underflows to 0, its square
    # root has the derivative NaN (zero times infinity), which a `where` of the results would keep.
    # So each branch gets arguments for which its derivative is finite.
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


def check_choosing(num_experts: int, k: Any, options: RoutingOptions, k_name: str = "k") -> None:
    checks.check_integer(k_name, k)
    num_groups, groups_kept = options.num_groups, options.groups_kept
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


def update_expert_bias(
    bias: jax.Array,
    expert_counts: jax.Array,
    rate: float | jax.Array,
    *,
    zero_mean: bool = False,
) -> jax.Array:
    """Updates the selection bias so that the experts' loads become more equal.

    Raises an expert's bias by `rate` if its load is below the mean, and lowers it if its load is
    above (arXiv:2408.15664). Call it once per training step, outside the gradient.

    Args:
        bias: [..., E] floating: the bias of one router or of a stack of layers.
        expert_counts: [..., E] integer or floating: the number of tokens that chose each expert in
            this step, on all ranks.
        rate: the change of the bias per step: a number, or an array of shape [] or of bias's shape
            (DeepSeek-V3: 0.001).
        zero_mean: whether the mean of the E changes is subtracted from each, so that the biases do
            not drift together (torchtitan).

    Returns:
        [..., E] of bias's dtype.

    Raises:
        ValueError: the shapes differ; the message names the argument.
        TypeError: `bias` is not floating, `rate` is not a number, or `zero_mean` is not a bool.
    """
    checks.check_array("bias", bias, None, jnp.floating, "[..., E]", may_be_empty=False)
    checks.check_array("expert_counts", expert_counts, None, jnp.number, "[..., E]")
    if bias.ndim == 0:
        raise ValueError(f"bias must be a floating array [..., E], but has shape {bias.shape}.")
    of_bias = f"the shape of bias {bias.shape}"
    checks.check_shape("expert_counts", expert_counts, bias.shape, of_bias)
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        checks.check_array("rate", rate, None, jnp.number, "[] or [..., E], or a number")
    if jnp.shape(rate) not in ((), bias.shape):
        raise ValueError(
            f"rate must be a number, or have {of_bias}, but has shape {jnp.shape(rate)}."
        )
    checks.check_bool("zero_mean", zero_mean)
    # The least count is subtracted in integers, which is exact, since float32 rounds large counts.
    least = jnp.min(expert_counts, axis=-1, keepdims=True)
    counts = (expert_counts - least).astype(jnp.float32)
    sign = jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)
    step = jnp.asarray(rate, jnp.float32) * sign
    if zero_mean:
        step -= jnp.mean(step, axis=-1, keepdims=True)
    return (bias.astype(jnp.float32) + step).astype(bias.dtype)
