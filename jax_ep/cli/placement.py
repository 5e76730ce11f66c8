"""`python -m jax_ep placement`: compares methods of placing experts on ranks, on recorded routing.

The trace is an .npz file with `topk_idx` [steps, layers, tokens, K]: the ids of the experts that
each token chose, -1 for no expert. Each method computes a placement from the first half of the
steps, and the placement is evaluated on the other half.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import checks
from jax_ep.bench import report
from jax_ep.bench.report import Column, Row
from jax_ep.flags import Args, Error, Flags, integer
from jax_ep.placement import Placement, balance, place_by_affinity
from jax_ep.placement.table import read_arrays
from jax_ep.placement.traffic import traffic

# The load and the placement of each layer have an entry for each expert.
_MOST_EXPERTS = 65536


def add_flags(flags: Flags) -> None:
    flags.add("trace", None, "The .npz file of examples/train_qwen3_moe.py --trace=FILE. Required.")
    flags.add("ranks", "8", "N, the number of ranks that share the experts.", integer)
    flags.add("hosts", "1", "M, the number of hosts that the ranks are on.", integer)
    flags.add("slots", None, "P, slots for copies. Default: one more on each rank.", integer)
    flags.add("num_experts", None, "E, the number of experts. Default: the trace's.", integer)
    flags.json()


def run(args: Args) -> int:
    trace, num_experts = _read(args)
    fit = len(trace) // 2
    empty = np.argwhere(np.all(trace[fit:] < 0, axis=(2, 3)))
    if len(empty):
        step, layer = fit + empty[0, 0], empty[0, 1]
        raise Error(f"--trace: no token chose an expert in step {step}, layer {layer}")
    placements = _placements(trace[:fit], num_experts, args)
    rows = [{"method": name} | _figures(trace[fit:], each) for name, each in placements.items()]
    report.save_json(args.json, report.record(rows=rows, shape=trace.shape, fit_steps=fit))
    columns = (
        report.text("method"),
        Column("busiest / mean", "balance", "{:.3f}"),
        Column("wire rows / token", "wire_rows", "{:.2f}"),
        Column("rank changes", "rank_changes", "{:.1%}"),
    )
    steps, layers, tokens, top_k = trace.shape
    print(
        f"{steps} steps, {layers} layers, {tokens} tokens of K={top_k} of E={num_experts} experts"
    )
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
        stored = arrays.get("num_experts", np.array(int(trace.max()) + 1))
        if stored.ndim or not np.issubdtype(stored.dtype, np.integer) or stored < 1:
            raise ValueError(f"num_experts must be a positive integer, but is {stored}")
    except (OSError, TypeError, ValueError) as error:
        raise Error(f"--trace: {args.trace!r}: {error}") from error
    num_experts = args.num_experts or int(stored)
    if trace.max() >= num_experts:
        largest = f"{trace.max()}, the largest expert id in the trace"
        raise Error(f"--num_experts must be above {largest}, but is {num_experts}")
    if num_experts > _MOST_EXPERTS:
        raise Error(f"--trace: at most {_MOST_EXPERTS} experts are placed, not {num_experts}")
    return trace.astype(np.int64), num_experts


def _placements(trace: np.ndarray, num_experts: int, args: Args) -> dict[str, Placement]:
    """Computes a placement by each method from `trace` [steps, layers, tokens, K]."""
    _, layers, _, top_k = trace.shape
    num_ranks, hosts = args.ranks, args.hosts
    if num_ranks % hosts:
        raise Error(f"--hosts: {hosts} does not divide --ranks={num_ranks}")
    least, most = -(-num_experts // num_ranks) * num_ranks, num_experts * num_ranks
    slots = args.slots or min(least + num_ranks, most)
    if slots % num_ranks or not num_experts <= slots <= most:
        raise Error(
            f"--slots: must be a multiple of {num_ranks} ranks, at least {num_experts} experts and "
            f"at most {most}, but is {slots}"
        )
    flat = trace.transpose(1, 0, 2, 3).reshape(layers, -1, top_k)
    load = np.stack([np.bincount(ids[ids >= 0], minlength=num_experts) for ids in flat])
    # Slot s holds expert s; the slots past the experts are empty.
    slot_ids = np.tile(np.arange(least), (layers, 1))
    in_order = np.where(slot_ids < num_experts, slot_ids, -1)
    ranks: dict[str, Any] = dict(num_ranks=num_ranks, num_hosts=hosts)
    return {
        "in order": Placement.of(in_order, num_experts=num_experts, num_ranks=num_ranks),
        "balance": balance(load, num_slots=least, **ranks),
        f"balance, {slots} slots": balance(load, num_slots=slots, **ranks),
        "affinity": place_by_affinity(flat, num_experts=num_experts, **ranks),
    }


def _figures(steps: np.ndarray, placement: Placement) -> Row:
    """Returns means over `steps` [steps, layers, tokens, K].

    "balance" is the rows of the busiest rank over the mean, "wire_rows" the rows sent between ranks
    for a token, both means over layers; "rank_changes" is the share of successive choices of a
    token on different ranks.
    """
    found = []
    for step in steps:
        counted = traffic(step, placement)
        rows, tokens = counted.rows, step.shape[1] // placement.num_ranks * placement.num_ranks
        found.append({
            "balance": np.mean(rows.max(axis=1) / np.maximum(rows.mean(axis=1), 1e-30)),
            "wire_rows": np.mean(counted.wire_rows.sum(axis=1) / tokens),
            "rank_changes": counted.rank_changes.mean() if len(counted.rank_changes) else 0.0,
        })  # fmt: skip
    return {key: float(np.mean([each[key] for each in found])) for key in found[0]}
