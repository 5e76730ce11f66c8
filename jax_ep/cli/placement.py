"""`python -m jax_ep placement`: compares methods of placing experts on ranks, on recorded routing.

The trace is an .npz file with `topk_idx` [steps, layers, tokens, K], the chosen experts' ids or -1,
and, if not all experts were chosen, their number `num_experts`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import checks
from jax_ep.bench import report
from jax_ep.bench.report import Column
from jax_ep.flags import Args, Error, Flags, integer
from jax_ep.placement import Placement, balance, place_by_affinity
from jax_ep.placement.choice import slots_on_rank
from jax_ep.placement.table import read_arrays

# Limits memory: each layer's load and placement have an entry for each expert, chosen or not.
_MOST_EXPERTS = 65536


def add_flags(flags: Flags) -> None:
    flags.add("trace", None, "The .npz file of examples/train_qwen3_moe.py --trace=FILE. Required.")
    flags.add("ranks", "8", "N, the number of ranks that share the experts.", integer)
    flags.add("hosts", "1", "M, the number of hosts that the ranks are on.", integer)
    flags.add("slots", None, "P, slots for copies. Default: one more on each rank.", integer)
    flags.json()


def run(args: Args) -> int:
    trace, num_experts = _read(args)
    steps, layers, tokens, top_k = trace.shape
    fit = steps // 2
    placements = _placements(trace[:fit], num_experts, args)
    rows = [{"method": name} | means(trace[fit:], each) for name, each in placements.items()]
    report.save_json(args.json, {"rows": rows, "shape": trace.shape, "fit_steps": fit})
    columns = (
        report.text("method"),
        Column("busiest / mean", "balance", "{:.3f}"),
        Column("wire rows / token", "wire_rows", "{:.2f}"),
        Column("rank changes", "rank_changes", "{:.1%}"),
    )
    sizes = f"{tokens} tokens of K={top_k} of E={num_experts} experts"
    print(f"{steps} steps, {layers} layers, {sizes}")
    print(f"placements of the first {fit} steps, means over the others\n")
    print("\n".join(report.table(columns, rows)))
    return 0


def _read(args: Args) -> tuple[np.ndarray, int]:
    """Returns the trace, [steps, layers, tokens, K] int64, and E."""
    if args.trace is None:
        raise Error("--trace is required: name an .npz file with topk_idx")
    try:
        arrays = read_arrays(args.trace)
        trace = arrays.get("topk_idx")
        if trace is None:
            raise ValueError(f"it must hold topk_idx, but holds {', '.join(arrays)}")
        shape = "[steps, layers, tokens, K]"
        checks.check_array("topk_idx", trace, 4, jnp.integer, shape, may_be_empty=False)
        if trace.shape[0] < 2 or trace.shape[2] < args.ranks:
            raise ValueError(
                f"topk_idx must be [steps >= 2, layers, tokens >= {args.ranks} ranks, K], but has "
                f"shape {trace.shape}"
            )
        largest = int(trace.max())
        num_experts = int(arrays.get("num_experts", largest + 1))
        if not largest < num_experts <= _MOST_EXPERTS:
            raise ValueError(
                f"num_experts must be above {largest}, the largest id, and at most {_MOST_EXPERTS} "
                f"experts are placed, but it is {num_experts}"
            )
    except (OSError, TypeError, ValueError) as error:
        raise Error(f"--trace: {args.trace!r}: {error}") from error
    return trace.astype(np.int64), num_experts


def _placements(trace: np.ndarray, num_experts: int, args: Args) -> dict[str, Placement]:
    """Returns a placement by each method, for a trace [steps, layers, tokens, K] of expert ids."""
    _, layers, _, top_k = trace.shape
    if args.ranks % args.hosts:
        raise Error(f"--hosts: {args.hosts} does not divide --ranks={args.ranks}")
    ranks: dict[str, Any] = dict(num_ranks=args.ranks, num_hosts=args.hosts)
    # `least` slots have room for one copy of each expert, `most` for one of each on every rank.
    least, most = -(-num_experts // args.ranks) * args.ranks, num_experts * args.ranks
    slots = args.slots or min(least + args.ranks, most)
    if slots % args.ranks or not num_experts <= slots <= most:
        raise Error(
            f"--slots: must be a multiple of {args.ranks} ranks, at least {num_experts} experts "
            f"and at most {most}, but is {slots}"
        )
    # The choices of each layer's tokens in all steps, and how many choose each expert, [layers, E].
    flat = trace.transpose(1, 0, 2, 3).reshape(layers, -1, top_k)
    load = np.stack([np.bincount(ids[ids >= 0], minlength=num_experts) for ids in flat])
    # Slot s holds expert s; the slots past the experts are empty.
    slot_ids = np.tile(np.arange(least), (layers, 1))
    in_order = np.where(slot_ids < num_experts, slot_ids, -1)
    return {
        "in order": Placement.of(in_order, num_experts=num_experts, num_ranks=args.ranks),
        "balance": balance(load, num_slots=least, **ranks),
        f"balance, {slots} slots": balance(load, num_slots=slots, **ranks),
        "affinity": place_by_affinity(flat, num_experts=num_experts, **ranks),
    }


def means(steps: np.ndarray, placement: Placement) -> dict[str, float]:
    """Returns the figures of a row: means over several steps [steps, layers, tokens, K]."""
    tokens = steps.shape[2] // placement.num_ranks * placement.num_ranks
    counted = zip(*(traffic(step, placement) for step in steps), strict=True)
    rows, wire_rows, changes = map(np.stack, counted)
    busiest = rows.max(axis=2) / np.maximum(rows.mean(axis=2), 1e-30)
    shares = {"balance": busiest.mean(), "wire_rows": wire_rows.sum(axis=2).mean() / tokens}
    shares["rank_changes"] = changes.mean() if changes.size else 0.0
    return {name: float(share) for name, share in shares.items()}


def traffic(
    topk_idx: np.ndarray, placement: Placement
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts the rows of one step's recorded choices [layers, tokens, K]; -1 for no expert.

    Each of N ranks has tokens // N tokens; the remainder is left out. Returns the rows that each
    rank's experts compute, one for each choice, [layers, N]; the rows that each rank receives from
    others, one for each token, [layers, N]; and the share of pairs (a token's choice in a layer,
    its choice in the next layer) whose experts are on different ranks, [layers - 1].
    """
    num_ranks = placement.num_ranks
    layers, tokens, top_k = topk_idx.shape
    per_rank = tokens // num_ranks
    topk_idx = topk_idx[:, : per_rank * num_ranks].reshape(layers, num_ranks, per_rank, top_k)
    slots = np.asarray(_slots(topk_idx, placement))
    ranks = np.where(slots >= 0, slots // (placement.expert_of_slot.shape[1] // num_ranks), -1)
    # here[layer, source, t, k, rank] is whether the k-th expert of token t of rank `source` is on
    # `rank`.
    here = ranks[..., None] == np.arange(num_ranks)
    # sent[layer, source, rank] is the number of tokens that rank `source` sends to `rank`.
    sent = here.any(axis=3).sum(axis=2)
    sent[:, np.arange(num_ranks), np.arange(num_ranks)] = 0  # these tokens stay on their rank
    # All pairs of a token's choices in a layer and in the next one: [layers - 1, N, t, K, K].
    rank_before, rank_after = ranks[:-1, ..., :, None], ranks[1:, ..., None, :]
    is_pair = (rank_before >= 0) & (rank_after >= 0)
    changes = ((rank_before != rank_after) & is_pair).sum(axis=(1, 2, 3, 4))
    num_pairs = is_pair.sum(axis=(1, 2, 3, 4))
    return here.sum(axis=(1, 2, 3)), sent.sum(axis=1), changes / np.maximum(num_pairs, 1)


@jax.jit
def _slots(topk_idx: np.ndarray, placement: Placement) -> jax.Array:
    """Chooses slots on all ranks at once: [layers, N, t, K] from experts of this shape."""
    slots_per_rank = placement.expert_of_slot.shape[1] // placement.num_ranks
    ranks = jnp.arange(placement.num_ranks)

    def of_layer(layer: tuple[jax.Array, Placement]) -> jax.Array:
        choices, placed = layer
        tables: Any = placed.slots_of_expert, placed.num_copies
        choose = functools.partial(slots_on_rank, slots_per_rank=slots_per_rank)
        return jax.vmap(choose, (0, 0, None, None))(choices, ranks, *tables)

    return jax.lax.map(of_layer, (topk_idx, placement))
