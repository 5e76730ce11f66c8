"""Computes `MoEMetrics`, the losses and counts that a call of the layer returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import checks
from jax_ep.exchange.routes import count_experts
from jax_ep.moe import losses, routing
from jax_ep.moe.call_checks import Call
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.mesh import LayerMesh
from jax_ep.placement.table import Placement, rank_load
from jax_ep.runtime.jax_compat import is_traced, register_for_export


class MoEMetrics(NamedTuple):
    """The losses and counts of one call of a layer, over all tokens of all ranks; a pytree.

    Attributes:
        load_balance_loss: [] float32, by the layer's `balance_convention`; see
            `jax_ep.load_balance_loss`.
        router_z_loss: [] float32; see `jax_ep.router_z_loss`.
        expert_counts: [E] int32, or [E + number of free experts]: the number of (token, choice)
            pairs that chose each expert, dropped pairs included.
        num_dropped: [] int32: the number of (token, choice) pairs that no expert computed, because
            of a capacity; at most 2^31 - 1.
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

    def summary(
        self, num_ranks: int | None = None, *, placement: Placement | None = None
    ) -> dict[str, Any]:
        """Summarizes the load in a few numbers, such as for a log.

        Metrics of several layers, stacked with leading axes, give an array [layers] for each number
        instead of a scalar. Free experts are left out.

        - `busiest_expert`: the largest load of an expert, divided by the mean; from 1 to E.
        - `busiest_rank`, with `num_ranks` or `placement`: the same of the ranks; from 1 to N.
        - `entropy`: the entropy of the experts' loads, divided by its largest value, log(E).
        - `idle_experts`: the number of experts that no token chose.
        - `drop_share`: the dropped share of the choices.

        Args:
            num_ranks: N, the number of ranks that the experts are spread over, or None.
            placement: the placement of the call, or None; of several layers for stacked metrics.

        Returns:
            The numbers by name. Inside `jax.jit` they are traced float32. Outside they are NumPy's
            float64, and the call waits for the metrics.

        Raises:
            ValueError: without a placement, `num_ranks` does not divide E; or the placement is for
                other layers, experts or ranks.
            TypeError: `num_ranks` is not an integer.
        """
        traced = any(map(is_traced, jax.tree.leaves((self.expert_counts, placement))))
        xp, dtype = (jnp, jnp.float32) if traced else (np, np.float64)
        dropped = xp.asarray(self.dropped_counts, dtype)
        num_experts = dropped.shape[-1]
        counts = xp.asarray(self.expert_counts, dtype)[..., :num_experts]
        total = counts.sum(-1)
        shares = counts / xp.maximum(total, 1)[..., None]
        log_shares = xp.log(xp.where(shares > 0, shares, 1))
        found = {"busiest_expert": shares.max(-1) * num_experts}
        if num_ranks is not None:
            num_ranks = checks.check_integer("num_ranks", num_ranks)
        if placement is not None:
            _check_placement(placement, shares.shape, num_ranks)
            by_rank = rank_load(shares, placement, xp)
            found["busiest_rank"] = by_rank.max(-1) * placement.num_ranks
        elif num_ranks is not None:
            if num_experts % num_ranks:
                raise ValueError(
                    f"num_ranks must divide the {num_experts} experts, but is {num_ranks}; give "
                    "placement for a layer with num_slots."
                )
            by_rank = shares.reshape(*shares.shape[:-1], num_ranks, -1).sum(-1)
            found["busiest_rank"] = by_rank.max(-1) * num_ranks
        # The largest entropy; for a single expert, log(1) = 0 must not divide.
        most = max(float(np.log(num_experts)), 1e-9)
        return found | {
            # The sum is at most 0; `abs` negates it without giving -0.
            "entropy": abs((shares * log_shares).sum(-1)) / most,
            "idle_experts": (counts == 0).sum(-1).astype(dtype),
            "drop_share": dropped.sum(-1) / xp.maximum(total, 1),
        }


register_for_export(MoEMetrics)


def _check_placement(placement: Any, shape: tuple[int, ...], num_ranks: int | None) -> None:
    if not isinstance(placement, Placement):
        raise TypeError(
            f"placement must be a jax_ep.placement.Placement, but is {checks.described(placement)}."
        )
    if placement.num_copies.shape != shape:
        raise ValueError(
            f"placement must be of the layers and experts of the metrics, {shape}, but num_copies "
            f"has shape {placement.num_copies.shape}. Pass placement[layer] with metrics of one "
            "layer."
        )
    if num_ranks not in (None, placement.num_ranks):
        raise ValueError(
            f"num_ranks must be that of placement, {placement.num_ranks}, but is {num_ranks}."
        )


def metrics_of(
    routed: routing.Routing,
    logits: jax.Array | None,
    call: Call,
    num_sequences: int,
    dropped: jax.Array,
    config: MoEConfig,
    where: LayerMesh,
) -> MoEMetrics:
    """Computes the metrics of all ranks' tokens; `dropped` [E] int32 are the pairs dropped here."""
    # `logits` [T, E] are None if no gate ran. `num_sequences` counts the sequences of this rank, or
    # of all ranks if the call has `sequence_ids`.
    batch_axes = where.batch_axes
    z_loss = jnp.zeros((), jnp.float32)
    if logits is not None:
        z_loss = losses.router_z_loss(logits, mask=call.mask, axis_name=batch_axes)
    balance_loss, balance = _balance(routed, logits, call, num_sequences, config, batch_axes)
    counts = balance.choices
    # The convention "transformers" takes the top-k of the logits for `balance.choices`. The
    # router's own choices are counted here.
    if config.balance_convention == "transformers":
        counts = lax.psum(count_experts(routed.topk_idx, config.num_choosable), batch_axes)
    # The ranks along the tensor axes dispatch the same tokens and drop the same rows, so only the
    # first of them counts these rows.
    if where.tensor_axes:
        dropped = jnp.where(lax.axis_index(where.tensor_axes) == 0, dropped, 0)
    dropped_axes = tuple(dict.fromkeys((*batch_axes, *where.tensor_axes)))  # some may be both
    dropped_counts = lax.psum(dropped, dropped_axes)
    return MoEMetrics(
        load_balance_loss=balance_loss,
        router_z_loss=z_loss,
        expert_counts=counts,
        num_dropped=_sum_of_counts(dropped_counts),
        dropped_counts=dropped_counts,
        balance=losses.in_float32(balance),
    )


def _sum_of_counts(counts: jax.Array) -> jax.Array:
    """Returns the sum of `counts`, [] int32, or the largest int32 if the sum is larger."""
    most = jnp.iinfo(jnp.int32).max
    # The float32 sum cannot overflow, but is rounded. Just above `most`, the int32 sum is negative.
    is_larger = jnp.sum(counts, dtype=jnp.float32) > most
    exact = jnp.sum(counts, dtype=jnp.int32)
    return jnp.where(is_larger | (exact < 0), most, exact)


def _balance(
    routed: routing.Routing,
    logits: jax.Array | None,
    call: Call,
    num_sequences: int,
    config: MoEConfig,
    batch_axes: tuple[str, ...],
) -> tuple[jax.Array, losses.BalanceSums]:
    """Returns the load-balance loss (0 without `probs`), and its sums over all ranks' tokens."""
    convention = config.balance_convention
    probs, topk_idx = routed.probs, routed.topk_idx
    if convention == "transformers" and logits is not None:
        topk_idx, _, probs = routing.top_k_routing(logits, config.num_experts_per_token)
        if call.mask is not None:
            topk_idx = jnp.where(call.mask[:, None], topk_idx, -1)
    zeros = jnp.zeros((topk_idx.shape[0], config.num_choosable), jnp.float32)
    sums = losses.balance_sums(zeros if probs is None else probs, topk_idx)
    sums = losses.sum_over_ranks(sums, batch_axes)
    if probs is None:
        return jnp.zeros((), jnp.float32), sums
    factors = None
    if config.num_free and config.free_expert_factor != 1.0:
        is_free = jnp.arange(config.num_choosable) >= config.num_experts
        factors = jnp.where(is_free, jnp.float32(config.free_expert_factor), 1.0)
    if convention != "deepseek_v3":
        loss = losses.pooled_load_balance_loss(sums, convention=convention, expert_factors=factors)
        return loss, sums
    if checks.is_symbolic(num_sequences):
        raise ValueError(
            'balance_convention must not be "deepseek_v3" where the number of sequences, the '
            f"product of all dimensions of x but the last two, is symbolic: {num_sequences}."
        )
    loss = losses.load_balance_loss(
        probs,
        topk_idx,
        convention=convention,
        num_sequences=max(num_sequences, 1),
        sequence_ids=call.sequence_ids,
        expert_factors=factors,
        axis_name=batch_axes,
    )
    return loss, sums
