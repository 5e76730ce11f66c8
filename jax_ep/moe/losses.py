"""Computes the load-balance loss and the router z-loss, as published models define them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange.routes import count_experts, expert_ids
from jax_ep.runtime.jax_compat import register_for_export

Convention = Literal["switch", "transformers", "deepseek_v3"]


class BalanceSums(NamedTuple):
    """The sums over tokens from which a load-balance loss is computed; a pytree.

    Sums of several ranks, layers or microbatches may be added, so counts are float32, which does
    not overflow. They are exact up to 2^24, and the loss needs only their ratios.

    Attributes:
        choices: [..., E] float32: the number of (token, choice) pairs that chose each expert.
        probs: [..., E] float32: each expert's probability, summed over tokens.
        num_tokens: [...] float32: the number of tokens that chose at least one expert.
    """

    choices: jax.Array
    probs: jax.Array
    num_tokens: jax.Array


register_for_export(BalanceSums)


def load_balance_loss(
    probs: jax.Array,
    topk_idx: jax.Array,
    *,
    convention: Convention = "switch",
    num_sequences: int | None = None,
    sequence_ids: jax.Array | None = None,
    expert_factors: jax.Array | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """Returns a loss that is smallest when choices and probabilities are even over experts.

    Let c_e be the number of (token, choice) pairs that name expert e, and P_e the mean probability
    of e over the tokens. The loss is, by `convention`:

    - "switch": E * sum_e (c_e / sum c) P_e, 1 when even, E at worst (Switch Transformer,
      arXiv:2101.03961, eq. 4; GShard, arXiv:2006.16668).
    - "transformers": E * sum_e (c_e / tokens) P_e, K when even: `load_balancing_loss_func` of the
      package transformers, which takes P_e from the softmax of the logits, its top-k as the
      choices, and the tokens of all layers: see `pooled_load_balance_loss`.
    - "deepseek_v3": the mean over sequences of each sequence's "switch" loss. This is DeepSeek-V3's
      complementary sequence-wise loss (arXiv:2412.19437, eq. 17 to 20), but c counts `topk_idx`,
      as in DeepSeek-V2, and not the choices by scores without the bias.

    A token's probabilities are its row of `probs` divided by the row's sum (DeepSeek-V3's eq. 19);
    a row of zeros stays zero. c and P are summed over all ranks, or over a sequence, before they
    are multiplied. A token that chooses no expert is left out, even if it holds NaN.

    Args:
        probs: [T, E] floating, not negative, such as `Routing.probs`, whose rows are never all 0.
            The gradient flows only through it.
        topk_idx: [T, K] integer expert ids; a value outside [0, E), such as -1, chooses no expert.
        convention: "switch", "transformers" or "deepseek_v3".
        num_sequences: the number of sequences, B, for "deepseek_v3". Without `sequence_ids`, a
            rank's T tokens are B sequences of equal length, one after the other.
        sequence_ids: [T] integer, or None: the sequence of each token, in [0, B), where lengths
            differ or a sequence is on several ranks. B and the ids count all ranks' sequences.
        expert_factors: [E] floating, or None: a factor for each expert's term in the sum, such as
            MoE++'s tau (arXiv:2410.07348) for free experts, and 1 for all others.
        axis_name: the mesh axis, or tuple of axes, over which the tokens are spread, inside
            `jax.shard_map`; None for the loss of this rank's tokens.

    Returns:
        [] float32, the same on every rank along `axis_name`. With `check_vma=False`, `jax.grad`
        inside the `shard_map` gives the gradient of the sum of all ranks' losses (as `lax.psum`).

    Raises:
        ValueError: a shape does not fit or an axis is not bound; the message names the argument.
        TypeError: `probs` is not floating, or `topk_idx` or `sequence_ids` is not integer.
    """
    checks.check_name("convention", convention, get_args(Convention))
    by_sequence = convention == "deepseek_v3"
    if by_sequence != (num_sequences is not None):
        raise ValueError(
            f"num_sequences must be {'a number' if by_sequence else 'None'} for convention "
            f"{convention!r}, but is {num_sequences}."
        )
    if not by_sequence and sequence_ids is not None:
        raise ValueError(f"sequence_ids must be None for convention {convention!r}.")
    sums = balance_sums(probs, topk_idx, num_sequences=num_sequences, sequence_ids=sequence_ids)
    if not by_sequence:
        sums = sum_over_ranks(sums, axis_name)
        return pooled_load_balance_loss(sums, convention=convention, expert_factors=expert_factors)
    if sequence_ids is not None:
        # A rank has parts of sequences. Summed over ranks first, they become whole sequences.
        sums = sum_over_ranks(sums, axis_name)
        axis_name = None
    return _mean_over_sequences(sums, expert_factors, axis_name)


def pooled_load_balance_loss(
    sums: BalanceSums | Iterable[BalanceSums],
    *,
    convention: Convention = "transformers",
    expert_factors: jax.Array | None = None,
) -> jax.Array:
    """Returns one load-balance loss for the tokens of several layers or microbatches.

    Adds the choices and probabilities of all layers before multiplying them, as the package
    transformers does. "deepseek_v3" instead is the mean "switch" loss of all layers' sequences.

    Args:
        sums: one or several `BalanceSums`, such as `MoEMetrics.balance` of each layer; or one whose
            arrays have leading axes, as `lax.scan` over layers stacks them. For "deepseek_v3", each
            has the sums of whole sequences along a leading axis, as `balance_sums` with
            `num_sequences` returns them; `MoEMetrics.balance` has no sequences.
        convention, expert_factors: see `load_balance_loss`.

    Returns:
        [] float32.

    Raises:
        ValueError: the convention is unknown; layers differ in their number of experts; or sums
            have no leading axis for "deepseek_v3".
        TypeError: `sums` holds anything but `BalanceSums`.
    """
    checks.check_name("convention", convention, get_args(Convention))
    one_layer = isinstance(sums, BalanceSums) or not isinstance(sums, Iterable)
    given: list[Any] = [sums] if one_layer else list(sums)
    if not given or not all(isinstance(one, BalanceSums) for one in given):
        raise TypeError(
            "sums must be a BalanceSums or an iterable of them, such as MoEMetrics.balance of each "
            f"layer, but is {checks.described(sums)}."
        )
    if len(sizes := {one.choices.shape[-1] for one in given}) > 1:
        raise ValueError(
            f"sums must all have the same number of experts, but have {sorted(sizes)} experts."
        )
    # Sums of all layers, [layers, E]; the numbers of tokens are [layers, 1] meanwhile.
    stacked = jax.tree.map(
        lambda *arrays: jnp.concatenate([a.reshape(-1, a.shape[-1]) for a in arrays]),
        *(one._replace(num_tokens=one.num_tokens[..., None]) for one in given),
    )
    if convention == "deepseek_v3":
        if any(one.choices.ndim < 2 for one in given):
            raise ValueError(
                'sums must be those of sequences, [B, E], for convention "deepseek_v3", as '
                "jax_ep.balance_sums with num_sequences returns them, but have no axis B."
            )
        by_sequence = stacked._replace(num_tokens=stacked.num_tokens[:, 0])
        return _mean_over_sequences(by_sequence, expert_factors)
    pooled = jax.tree.map(functools.partial(jnp.sum, axis=0), in_float32(stacked))
    pooled = pooled._replace(num_tokens=pooled.num_tokens[0])
    return _loss(pooled, convention, expert_factors)


def balance_sums(
    probs: jax.Array,
    topk_idx: jax.Array,
    *,
    num_sequences: int | None = None,
    sequence_ids: jax.Array | None = None,
) -> BalanceSums:
    """Sums the choices and probabilities of this rank's tokens, for `pooled_load_balance_loss`.

    Args:
        probs, topk_idx, num_sequences, sequence_ids: as in `load_balance_loss`, with
            `num_sequences` B for any convention.

    Returns:
        The sums over all tokens, or with `num_sequences` over each sequence, along a leading axis
        of size B. The counts are int32.

    Raises:
        ValueError, TypeError: as `load_balance_loss`.
    """
    checks.check_array("probs", probs, 2, jnp.floating, "[T, E]")
    checks.check_array("topk_idx", topk_idx, 2, jnp.integer, "[T, K]")
    num_tokens, num_experts = probs.shape
    shape = num_tokens, topk_idx.shape[1]
    checks.check_shape("topk_idx", topk_idx, shape, f"the tokens of probs {probs.shape}")
    topk_idx = expert_ids(topk_idx, num_experts)
    is_routed = jnp.any((topk_idx >= 0) & (topk_idx < num_experts), axis=-1)
    # A token that chooses no expert may hold NaN, which is replaced before the division. If it were
    # replaced after the division, its gradient would be zero times NaN, which is NaN.
    probs = _shares(jnp.where(is_routed[:, None], probs, 0.0))
    if num_sequences is None:
        return BalanceSums(
            count_experts(topk_idx, num_experts),
            jnp.sum(probs, axis=0),
            jnp.sum(is_routed, dtype=jnp.int32),
        )
    num_sequences = checks.check_integer("num_sequences", num_sequences)
    chosen = jax.nn.one_hot(topk_idx, num_experts, dtype=jnp.int32, axis=1).sum(axis=-1)
    # Each token's own choices, probabilities and number, 0 or 1.
    of_tokens = BalanceSums(chosen, probs, is_routed)
    if sequence_ids is None:
        if num_tokens % num_sequences:
            raise ValueError(
                f"num_sequences must divide the {num_tokens} tokens of probs {probs.shape}, but is "
                f"{num_sequences}; give sequence_ids where lengths differ."
            )
        by_sequence = (a.reshape(num_sequences, -1, *a.shape[1:]) for a in of_tokens)
        return BalanceSums(*(jnp.sum(a, axis=1, dtype=_sum_dtype(a)) for a in by_sequence))
    checks.check_array("sequence_ids", sequence_ids, 1, jnp.integer, "[T]")
    of_probs = f"the tokens of probs {probs.shape}"
    checks.check_shape("sequence_ids", sequence_ids, (num_tokens,), of_probs)
    # [num_sequences, T]: 1 where the token belongs to the sequence, else 0.
    members = jax.nn.one_hot(sequence_ids, num_sequences, dtype=jnp.float32, axis=0)
    # The matmul has the highest precision, because on GPUs a lower one would round the counts,
    # which must stay exact integers.
    exact = lax.Precision.HIGHEST
    sums = (jnp.matmul(members, a.astype(jnp.float32), precision=exact) for a in of_tokens)
    return BalanceSums(*(a.astype(_sum_dtype(b)) for a, b in zip(sums, of_tokens, strict=True)))


def in_float32(sums: BalanceSums) -> BalanceSums:
    """Returns the sums with counts as float32, which do not overflow when many are added."""
    return BalanceSums(*(jnp.asarray(array, jnp.float32) for array in sums))


def _shares(probs: jax.Array) -> jax.Array:
    """Divides each row of probs [T, E] by the row's sum, float32; zeros and subnormals become 0."""
    if probs.dtype.itemsize < 4:
        probs = probs.astype(jnp.float32)
    # After division by its largest number, a row's sum is at least 1, so that neither the division
    # by the sum nor its derivative overflows.
    largest = lax.stop_gradient(jnp.max(probs, axis=-1, keepdims=True))
    is_zero = largest < jnp.finfo(probs.dtype).tiny
    probs = jnp.where(is_zero, 0.0, probs) / jnp.where(is_zero, 1.0, largest)
    total = jnp.sum(probs, axis=-1, keepdims=True)
    return (probs / jnp.where(is_zero, 1.0, total)).astype(jnp.float32)


def _sum_dtype(array: jax.Array) -> Any:
    return jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32


def _loss(sums: BalanceSums, convention: str, expert_factors: jax.Array | None) -> jax.Array:
    """Computes the "switch" or "transformers" loss from sums, [...] float32; 0 without tokens."""
    sums = in_float32(sums)
    tokens = _at_least_one(sums.num_tokens)[..., None]
    pairs = _at_least_one(jnp.sum(sums.choices, axis=-1))[..., None]
    share = sums.choices / {"switch": pairs, "transformers": tokens}[convention]
    num_experts = sums.choices.shape[-1]
    if expert_factors is not None:
        checks.check_array("expert_factors", expert_factors, 1, jnp.floating, "[E]")
        wanted = f"one value per expert, shape ({num_experts},)"
        checks.check_shape("expert_factors", expert_factors, (num_experts,), wanted)
        factors = expert_factors.astype(jnp.float32)
        share *= factors.reshape((1,) * (share.ndim - 1) + (-1,))
    return num_experts * jnp.sum(share * (sums.probs / tokens), axis=-1)


def _mean_over_sequences(
    sums: BalanceSums, expert_factors: jax.Array | None, axis_name: AxisName | None = None
) -> jax.Array:
    """Returns the mean "switch" loss of the sequences [B] that have tokens, on all ranks."""
    losses = _loss(sums, "switch", expert_factors)
    has_tokens = (sums.num_tokens > 0).astype(jnp.int32)
    total, num_not_empty = sum_over_ranks((jnp.sum(losses), jnp.sum(has_tokens)), axis_name)
    return total / _at_least_one(num_not_empty)


def router_z_loss(
    logits: jax.Array, *, mask: jax.Array | None = None, axis_name: AxisName | None = None
) -> jax.Array:
    """Returns the router z-loss, mean_t logsumexp(logits[t])^2, which keeps logits small.

    ST-MoE (arXiv:2202.08906, eq. 5). Masked tokens do not count, even if they hold NaN.

    Args:
        logits: [T, E] floating: the router's logits.
        mask: [T] bool or integer, or None: False or 0 leaves a token out.
        axis_name: as in `load_balance_loss`.

    Returns:
        [] float32, the same on every rank along `axis_name`.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
        TypeError: `logits` is not floating, or `mask` is neither bool nor integer.
    """
    checks.check_array("logits", logits, 2, jnp.floating, "[T, E]")
    if mask is None:
        mask = jnp.ones(logits.shape[:1], jnp.bool_)
    checks.check_array("mask", mask, None, checks.MASK, "[T]")
    wanted = f"one value per token of logits {logits.shape}"
    checks.check_shape("mask", mask, logits.shape[:1], wanted)
    mask = mask.astype(jnp.bool_)
    logits = jnp.where(mask[:, None], logits.astype(jnp.float32), 0.0)
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    sums = jnp.sum(jnp.where(mask, squares, 0.0)), jnp.sum(mask, dtype=jnp.int32)
    total, tokens = sum_over_ranks(sums, axis_name)
    return total / _at_least_one(tokens)


def sum_over_ranks(sums: Any, axis_name: AxisName | None) -> Any:
    if axis_name is None:
        return sums
    axes = checks.as_axes(axis_name)
    checks.num_ranks(axes)  # raises ValueError if the axes are not bound here
    return lax.psum(sums, axes)


def _at_least_one(count: jax.Array) -> jax.Array:
    return jnp.maximum(count, 1).astype(jnp.float32)
