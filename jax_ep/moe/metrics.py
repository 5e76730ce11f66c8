"""Computes `MoEMetrics`, the losses and counts that a call of the layer returns.

The losses and counts are summed over ranks by `lax.psum`, and not by the library's `all_reduce`,
for three reasons. The kernels of `all_reduce` do not sum int32 counts. They run once per array,
while XLA sums all arrays of a layer, some kilobytes, in one collective. And they run between GPUs
of one host, while the ranks that share a batch are often on several hosts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import checks
from jax_ep.exchange.routes import count_experts
from jax_ep.moe import free_experts, losses, routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.mesh import LayerMesh
from jax_ep.runtime.jax_compat import is_traced, register_for_export


class MoEMetrics(NamedTuple):
    """The losses and counts of one call of a layer, over all tokens of all ranks; a pytree.

    Attributes:
        load_balance_loss: [] float32, by the layer's `balance_convention`; see
            `jax_ep.load_balance_loss`.
        router_z_loss: [] float32; see `jax_ep.router_z_loss`.
        expert_counts: [E] int32, or [E + number of free experts] in a layer that also has free
            experts (zero, identity and constant experts): the number of (token, choice) pairs that
            chose each expert, dropped pairs included.
        num_dropped: [] int32: the number of (token, choice) pairs that no expert computed, because
            a receive buffer was full or a rank had more tokens for a host than
            `host_capacity_factor` allows.
        dropped_counts: [E] int32: the number of dropped (token, choice) pairs of each expert.
        balance: the sums over all tokens from which the load-balance loss is computed, for
            `jax_ep.pooled_load_balance_loss` over layers or microbatches.
        topk_idx: [..., K] int32 with `MoEConfig.record_choices`, or None: the expert ids that each
            token of x chose, free experts included, and -1 for masked tokens. It is sharded like x.
    """

    load_balance_loss: jax.Array
    router_z_loss: jax.Array
    expert_counts: jax.Array
    num_dropped: jax.Array
    dropped_counts: jax.Array
    balance: losses.BalanceSums
    topk_idx: jax.Array | None = None

    def summary(self, num_ranks: int | None = None) -> dict[str, Any]:
        """Summarizes the load in a few numbers, such as for a log.

        Metrics of several layers, stacked with leading axes, give an array [layers] for each number
        instead of a scalar. Free experts are left out. If there are no choices, all numbers but
        `idle_experts` are 0.

        - `busiest_expert`: the load of the expert with most choices, divided by the experts' mean
          load; from 1 to E.
        - `busiest_rank`, with `num_ranks`: the load of the rank with most choices, divided by the
          ranks' mean load; from 1 to N. Expert e is on rank e // (E / N), as in a layer without
          `num_slots`; with slots, `Placement.rank_load` of the counts gives the ranks' loads.
        - `entropy`: the entropy of the experts' loads, divided by its largest value, log(E); 0 if
          one expert has all choices, 1 if several experts have equally many each.
        - `idle_experts`: the number of experts that no token chose.
        - `drop_share`: the number of dropped choices, divided by the number of choices; from 0 to
          1.

        Args:
            num_ranks: N, the number of ranks that the experts are spread over, or None.

        Returns:
            The numbers by name. Inside `jax.jit` they are traced float32. Outside they are NumPy's
            float64, whose scalars are Python floats, and the call waits for the metrics.

        Raises:
            ValueError: `num_ranks` does not divide E.
            TypeError: `num_ranks` is not an integer.
        """
        xp, dtype = (jnp, jnp.float32) if is_traced(self.expert_counts) else (np, np.float64)
        dropped = xp.asarray(self.dropped_counts, dtype)
        num_experts = dropped.shape[-1]
        counts = xp.asarray(self.expert_counts, dtype)[..., :num_experts]
        total = counts.sum(-1)
        shares = counts / xp.maximum(total, 1)[..., None]
        log_shares = xp.log(xp.where(shares > 0, shares, 1))
        found = {"busiest_expert": shares.max(-1) * num_experts}
        if num_ranks is not None:
            num_ranks = checks.check_integer("num_ranks", num_ranks)
            if num_experts % num_ranks:
                raise ValueError(
                    f"num_ranks must divide the {num_experts} experts, but is {num_ranks}."
                )
            by_rank = shares.reshape(*shares.shape[:-1], num_ranks, -1).sum(-1)
            found["busiest_rank"] = by_rank.max(-1) * num_ranks
        return found | {
            "entropy": abs((shares * log_shares).sum(-1)) / max(float(np.log(num_experts)), 1e-9),
            "idle_experts": (counts == 0).sum(-1).astype(dtype),
            "drop_share": dropped.sum(-1) / xp.maximum(total, 1),
        }


register_for_export(MoEMetrics)


class Sequences(NamedTuple):
    """The sequences that a rank's T tokens belong to, for the "deepseek_v3" load-balance loss.

    Attributes:
        number: the number of sequences of this rank, or of all ranks if `ids` are given.
        ids: [T] int32, the sequence of each token, in [0, number). None means that the T tokens are
            `number` sequences of equal length, and no sequence is on several ranks.
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
    """Computes the metrics of all ranks' tokens, from the routing of this rank's T tokens.

    Args:
        routed: the routing of this rank's tokens.
        logits: [T, E] float32; None if no gate ran. The z-loss is then 0.
        mask: [T] bool, or None: the losses do not count tokens whose mask is False.
        dropped: [E] int32: the (token, choice) pairs that this rank dropped, by expert.
        sequences: the sequences of this rank's tokens.
        config: the configuration of the layer.
        where: the mesh axes of the call, over which losses and counts are summed.
    """
    batch_axes = where.batch_axes
    z_loss = jnp.zeros((), jnp.float32)
    if logits is not None:
        z_loss = losses.router_z_loss(logits, mask=mask, axis_name=batch_axes)
    balance_loss, balance = _balance(routed, logits, mask, sequences, config, batch_axes)
    counts = balance.choices
    # The convention "transformers" takes the top-k of the logits for `balance.choices`. The
    # router's own choices are counted here.
    if config.balance_convention == "transformers":
        counts = lax.psum(count_experts(routed.topk_idx, config.num_choosable), batch_axes)
    # The ranks along the tensor axes dispatch the same tokens and drop the same rows, so the sum
    # over all ranks counts each dropped row once per tensor rank.
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
    """Computes the load-balance loss that `config.balance_convention` defines.

    Returns the loss, and the `BalanceSums` over the tokens of all ranks. The loss is 0 if the
    routing has no `probs`.
    """
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
    if checks.is_symbolic(sequences.number):
        raise ValueError(
            'balance_convention must not be "deepseek_v3" where the number of sequences, the '
            f"product of all dimensions of x but the last two, is symbolic: {sequences.number}."
        )
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
