"""Computes the losses and counts that a call of the layer returns.

`lax.psum` sums them over ranks, and not the library's `all_reduce`. The counts are int32, which no
kernel sums. XLA sums all counts and losses of a layer, some kilobytes, in one collective, where
`all_reduce` would be a kernel for each array. And the ranks of a batch are often on several hosts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.routes import count_experts
from jax_ep.moe import free_experts, losses, routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.mesh import LayerMesh
from jax_ep.runtime.jax_compat import register_for_export


class MoEMetrics(NamedTuple):
    """The losses and counts of one call of a layer, over all tokens of all ranks; a pytree.

    Attributes:
        load_balance_loss: [] float32, by the layer's `balance_convention`; see
            `jax_ep.load_balance_loss`.
        router_z_loss: [] float32; see `jax_ep.router_z_loss`.
        expert_counts: int32, [E], or with free experts [E + free experts]: the number of (token,
            choice) pairs that chose each expert, dropped pairs included.
        num_dropped: [] int32: the pairs that no expert computed, because a receive buffer was full
            or a rank had more tokens for a host than `host_capacity_factor` allows.
        dropped_counts: [E] int32: the dropped pairs of each expert.
        balance: the sums over all tokens from which the load-balance loss is computed, for
            `jax_ep.pooled_load_balance_loss` over layers or microbatches.
    """

    load_balance_loss: jax.Array
    router_z_loss: jax.Array
    expert_counts: jax.Array
    num_dropped: jax.Array
    dropped_counts: jax.Array
    balance: losses.BalanceSums


register_for_export(MoEMetrics)


class Sequences(NamedTuple):
    """The sequences of the tokens, for a loss by sequence.

    Attributes:
        number: the number of sequences of this rank, or of all ranks if `ids` are given.
        ids: [T] int32, each token's sequence; None for sequences of equal length on one rank each.
    """

    number: int
    ids: jax.Array | None


def metrics_of(
    routed: routing.Routing,
    logits: jax.Array | None,
    mask: jax.Array | None,
    dropped: jax.Array,
    sequences: Sequences,
    config: MoEConfig,
    where: LayerMesh,
) -> MoEMetrics:
    """Computes the metrics over all ranks' tokens, from the routing of this rank's T tokens.

    `dropped` [E] int32 counts this rank's dropped pairs by expert.
    """
    batch_axes = where.batch_axes
    z_loss = jnp.zeros((), jnp.float32)
    if logits is not None:
        z_loss = losses.router_z_loss(logits, mask=mask, axis_name=batch_axes)
    balance_loss, balance = _balance(routed, logits, mask, sequences, config, batch_axes)
    counts = balance.choices
    if config.balance_convention == "transformers":  # its choices are the top-k of the logits
        counts = lax.psum(count_experts(routed.topk_idx, config.num_choosable), batch_axes)
    # The ranks along the tensor axes drop the same rows.
    dropped_axes = tuple(dict.fromkeys((*batch_axes, *where.tensor_axes)))
    dropped_counts = lax.psum(dropped, dropped_axes) // where.num_tensor_ranks()
    return MoEMetrics(
        load_balance_loss=balance_loss,
        router_z_loss=z_loss,
        expert_counts=counts,
        num_dropped=jnp.sum(dropped_counts, dtype=jnp.int32),
        dropped_counts=dropped_counts,
        balance=balance,
    )


def _balance(
    routed: routing.Routing,
    logits: jax.Array | None,
    mask: jax.Array | None,
    sequences: Sequences,
    config: MoEConfig,
    batch_axes: tuple[str, ...],
) -> tuple[jax.Array, losses.BalanceSums]:
    """Computes the load-balance loss by the layer's convention, and its sums over all tokens."""
    convention = config.balance_convention
    probs, topk_idx = routed.probs, routed.topk_idx
    if convention == "transformers" and logits is not None:
        topk_idx, _, probs = routing.top_k_routing(logits, config.num_experts_per_token)
        if mask is not None:
            topk_idx = jnp.where(mask[:, None], topk_idx, -1)
    absent = probs is None
    if probs is None:
        probs = jnp.zeros((topk_idx.shape[0], config.num_choosable), jnp.float32)
    sums = losses.sum_over_ranks(losses.balance_sums(probs, topk_idx), batch_axes)
    if absent:
        return jnp.zeros((), jnp.float32), sums
    factors = free_experts.factors(config)
    if convention != "deepseek_v3":
        loss = losses.pooled_load_balance_loss(sums, convention=convention, expert_factors=factors)
        return loss, sums
    loss = losses.load_balance_loss(
        probs,
        topk_idx,
        convention=convention,
        num_sequences=sequences.number,
        sequence_ids=sequences.ids,
        expert_factors=factors,
        axis_name=batch_axes,
    )
    return loss, sums
