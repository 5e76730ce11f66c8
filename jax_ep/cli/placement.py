"""`python -m jax_ep placement`: compares methods of placing experts on ranks, on recorded routing.

The trace is an .npz file with `topk_idx` [steps, layers, tokens, K]: the ids of the experts that
each token chose, -1 for no expert. Each method computes a placement from the first steps of the
trace, and the placement is evaluated on the remaining steps.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import checks
from jax_ep.bench import measuring, report
from jax_ep.flags import Error, Flags
from jax_ep.placement import Placement, balance, place_by_affinity
from jax_ep.placement.table import read_arrays
from jax_ep.placement.traffic import traffic

# The load and the placement of each layer have an entry for each expert.
_MOST_EXPERTS = 65536

FLAGS = Flags()
_TRACE = FLAGS.string(
    "trace",
    None,
    "The .npz file with the routing, which examples/train_moe_lm.py --trace=FILE writes. Required.",
)
_RANKS = FLAGS.integer("ranks", 8, "N, the number of ranks that share the experts.")
_HOSTS = FLAGS.integer("hosts", 1, "M, the number of hosts that the ranks are on.")
_SLOTS = FLAGS.integer(
    "slots",
    None,
    "P, the number of slots for experts and their copies on all ranks together, for the method "
    "that makes copies. Default: one more on each rank than the experts need.",
)
_EXPERTS = FLAGS.integer(
    "num_experts",
    None,
    "E, the number of experts of all ranks together. Default: the trace's num_experts, or else its "
    "largest id + 1.",
)
_FIT = FLAGS.integer(
    "fit_steps",
    None,
    "The number of the trace's first steps from which placements are computed; the other steps "
    "evaluate them. Default: half of the steps.",
)
_TOKENS = FLAGS.integer("tokens", 4096, "T, the number of tokens per rank, for the predicted time.")
_HIDDEN = FLAGS.integer(
    "hidden", 2048, "H, the number of values of a token, for the predicted time."
)
_MLP_DIM = FLAGS.integer(
    "mlp_dim", 768, "F, the width of each expert's MLP, for the predicted time."
)
_DISPATCH = FLAGS.number(
    "dispatch_gb_per_s",
    249,
    "Bandwidth of a dispatch for the predicted time, in GB/s (10^9 bytes per second) of received "
    "rows, as `bench` measures it.",
)
_COMBINE = FLAGS.number(
    "combine_gb_per_s",
    180,
    "Bandwidth of a combine for the predicted time, in GB/s (10^9 bytes per second) of sent sums, "
    "as `bench` measures it.",
)
_MATMUL = FLAGS.number(
    "matmul_tflops",
    620,
    "Rate of a grouped matmul for the predicted time, in TFLOP/s (10^12 operations per second), as "
    "`bench matmul` measures it.",
)
_JSON = FLAGS.json()
_PLOT = FLAGS.plot("the balance by step")

# The bytes of one value of a row; rows are bfloat16.
_ROW_BYTES = 2
# The evaluated steps are divided into this many intervals. The load balance of each interval is
# printed, to show how a placement becomes worse with time.
_AGES = 6


def run() -> int:
    FLAGS.check_outputs()
    for flag in (_DISPATCH, _COMBINE, _MATMUL):
        if not flag.value:
            raise Error(f"--{flag.name} must be above 0, but is 0")
    trace, in_file = _read()
    steps, layers, tokens, top_k = trace.shape
    fit = steps // 2 if _FIT.value is None else _FIT.value
    if not 0 < fit < steps:
        raise Error(
            f"--fit_steps must be at least 1 and below {steps}, the steps of the trace, so that "
            f"steps remain to evaluate placements, but is {fit}"
        )
    empty = np.argwhere(np.all(trace[fit:] < 0, axis=(2, 3)))
    if len(empty):
        step, layer = fit + empty[0, 0], empty[0, 1]
        raise Error(f"--trace: no token chose an expert in step {step}, layer {layer}")
    num_experts = _num_experts(trace, in_file)
    found = {
        name: [_figures(step, placement) for step in trace]
        for name, placement in _placements(trace[:fit], num_experts).items()
    }
    sizes = (
        f"{steps} steps, {layers} layers, {tokens} tokens of K={top_k} of E={num_experts} experts; "
        f"N={_RANKS.value} ranks on {_HOSTS.value} hosts"
    )
    shown = {name: figures[fit:] for name, figures in found.items()}
    rows, ages = [_row(name, figures) for name, figures in shown.items()], _by_age(shown)
    # Files are written first: printing fails if a pipe's reader, such as `head`, has ended.
    if _JSON.value:
        facts = {"rows": rows, "by_age": ages, "shape": trace.shape, "fit_steps": fit}
        measuring.save_json(_JSON.value, measuring.run_record() | facts)
    if _PLOT.value:
        _plot(found, fit, _PLOT.value, sizes)
    print(f"{sizes}; found on steps 0 to {fit - 1}, means over the others\n")
    print(_table(rows))
    print("\nbusiest rank over mean, by layer")
    print(_by_layer(shown))
    print("\nbusiest rank over mean, by steps since the placement was found")
    print(_age_table(ages, steps - fit))
    return 0


def _read() -> tuple[np.ndarray, int | None]:
    """Reads the file of --trace.

    Returns the trace, [steps, layers, tokens, K] int64, and the file's `num_experts`, or None if
    the file has no such entry. Raises `Error` if the flag, the file or a valid trace is missing.
    """
    path = _TRACE.value
    if path is None:
        raise Error(
            "--trace is required: name an .npz file with topk_idx [steps, layers, tokens, K]"
        )
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise Error(f"--trace: cannot read the array topk_idx of {path!r}: {error}") from error
    trace = arrays.get("topk_idx")
    if trace is None:
        raise Error(f"--trace: {path!r} must hold an array topk_idx, but holds {', '.join(arrays)}")
    shape = "[steps, layers, tokens, K]"
    try:
        checks.check_array("topk_idx", trace, 4, jnp.integer, shape, may_be_empty=False)
    except (TypeError, ValueError) as error:
        raise Error(f"--trace: {error}") from error
    trace = trace.astype(np.int64)
    if trace.shape[0] < 2 or trace.shape[2] < _RANKS.value:
        raise Error(
            f"--trace: topk_idx must be [steps >= 2, layers, tokens >= {_RANKS.value} ranks, K], "
            f"but has shape {trace.shape}"
        )
    num_experts = arrays.get("num_experts")
    if num_experts is None:
        return trace, None
    if num_experts.ndim or not np.issubdtype(num_experts.dtype, np.integer) or num_experts < 1:
        raise Error(f"--trace: num_experts must be a positive integer, but is {num_experts}")
    return trace, int(num_experts)


def _num_experts(trace: np.ndarray, in_file: int | None) -> int:
    """Returns E, the number of experts of a layer.

    E is the value of --num_experts, or else `in_file`, the `num_experts` of the trace's file, or
    else the largest expert id in the trace plus 1. Raises `Error` if an expert id is not below E.
    """
    largest = int(trace.max())
    num_experts: int = _EXPERTS.value or in_file or largest + 1
    if largest >= num_experts:
        raise Error(
            f"--num_experts must be above {largest}, the largest expert id in the trace, but is "
            f"{num_experts}"
        )
    if num_experts > _MOST_EXPERTS:
        raise Error(
            f"--trace: at most {_MOST_EXPERTS} experts can be placed, but by --num_experts, the "
            f"file's num_experts or the largest expert id there are {num_experts}"
        )
    return num_experts


def _placements(trace: np.ndarray, num_experts: int) -> dict[str, Placement]:
    """Returns a dict from each method's name to the placement that it computes from `trace`.

    `trace` [steps, layers, tokens, K] holds the expert ids of the first steps of the file.
    """
    _, layers, tokens, top_k = trace.shape
    num_ranks, hosts = _RANKS.value, _HOSTS.value
    if num_ranks % hosts:
        raise Error(f"--hosts: {hosts} does not divide --ranks={num_ranks}")
    least = -(-num_experts // num_ranks) * num_ranks
    most = num_experts * num_ranks
    num_slots = _SLOTS.value or min(least + num_ranks, most)
    if num_slots % num_ranks or num_slots < num_experts:
        raise Error(
            f"--slots: must be a multiple of {num_ranks} ranks and at least {num_experts} experts, "
            f"but is {num_slots}"
        )
    if num_slots > most:
        raise Error(
            f"--slots: a copy of each of {num_experts} experts on each of {num_ranks} ranks needs "
            f"{most} slots, but there are {num_slots}"
        )
    flat = trace.transpose(1, 0, 2, 3).reshape(layers, -1, top_k)
    load = np.stack([np.bincount(one[one >= 0], minlength=num_experts) for one in flat])
    slots = np.tile(np.arange(least), (layers, 1))
    in_order = np.where(slots < num_experts, slots, -1)
    ranks: dict[str, Any] = dict(num_ranks=num_ranks, num_hosts=hosts)
    return {
        "in order": Placement.of(in_order, num_experts=num_experts, num_ranks=num_ranks),
        "balance": balance(load, num_slots=least, **ranks),
        f"balance, {num_slots} slots": balance(load, num_slots=num_slots, **ranks),
        "affinity": place_by_affinity(flat, num_experts=num_experts, **ranks),
    }


def _figures(step: np.ndarray, placement: Placement) -> dict[str, Any]:
    """Evaluates a placement on one step of the trace, `step` [layers, tokens, K].

    Returns a dict:
      "balance": [layers], the rows of the busiest rank divided by the mean of all ranks.
      "wire_rows": [layers], the number of rows sent between ranks, divided by the number of tokens.
      "rank_changes": the share of pairs (a token's choice in a layer, its choice in the next layer)
        whose experts are on different ranks.
      "us": [layers], the predicted time of a layer's forward pass in microseconds.
    """
    counted = traffic(step, placement)
    tokens = step.shape[1] // placement.num_ranks * placement.num_ranks
    mean = np.maximum(counted.rows.mean(axis=1), 1e-30)
    # The predicted time is that of the busiest rank. Its rows in the trace are scaled to the number
    # of tokens per rank that --tokens gives.
    scale = _TOKENS.value * placement.num_ranks / tokens
    wire = counted.wire_rows.max(axis=1) * scale * _HIDDEN.value * _ROW_BYTES / 1e3
    flops = counted.rows.max(axis=1) * scale * 6 * _HIDDEN.value * _MLP_DIM.value / 1e6
    times = wire / _DISPATCH.value + wire / _COMBINE.value + flops / _MATMUL.value
    return {
        "balance": counted.rows.max(axis=1) / mean,
        "wire_rows": counted.wire_rows.sum(axis=1) / tokens,
        "rank_changes": counted.rank_changes.mean() if len(counted.rank_changes) else 0.0,
        "us": times,
    }


def _row(name: str, figures: list[dict[str, Any]]) -> report.Row:
    means = {key: float(np.mean([f[key] for f in figures])) for key in figures[0]}
    layers = len(figures[0]["us"])
    return {"method": name} | means | {"us": means["us"] * layers}


def _table(rows: list[report.Row]) -> str:
    header = ["method", "busiest / mean", "wire rows / token", "rank changes", "forward, us"]
    cells = [
        [
            row["method"],
            f"{row['balance']:.3f}",
            f"{row['wire_rows']:.2f}",
            f"{row['rank_changes']:.1%}",
            f"{row['us']:.0f}",
        ]
        for row in rows
    ]
    return "\n".join(report.fixed_width(header, cells, ("method",)))


def _by_layer(found: dict[str, list[dict[str, Any]]]) -> str:
    means = {name: np.mean([f["balance"] for f in each], axis=0) for name, each in found.items()}
    layers = len(next(iter(means.values())))
    header = ["method", *(f"layer {i}" for i in range(layers))]
    cells = [[name, *(f"{value:.3f}" for value in each)] for name, each in means.items()]
    return "\n".join(report.fixed_width(header, cells, ("method",)))


def _by_age(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Averages the load balance of each method over consecutive intervals of the evaluated steps.

    `found` maps each method to the results of `_figures` for the evaluated steps. Returns a dict
    that maps each method to the mean "balance" of each of up to `_AGES` intervals.
    """
    return {
        name: [
            float(np.mean([f["balance"] for f in part]))
            for part in np.array_split(np.array(each, object), min(_AGES, len(each)))
        ]
        for name, each in found.items()
    }


def _age_table(ages: dict[str, list[float]], steps: int) -> str:
    parts = np.array_split(np.arange(steps), min(_AGES, steps))
    header = ["method", *(f"{part[0]}-{part[-1]}" for part in parts)]
    cells = [[name, *(f"{value:.3f}" for value in each)] for name, each in ages.items()]
    return "\n".join(report.fixed_width(header, cells, ("method",)))


def _plot(found: dict[str, list[dict[str, Any]]], fit: int, path: str, sizes: str) -> None:
    """Plots, for each step of the trace, the busiest rank's load divided by the mean load.

    Args:
        found: maps each method to a list with the result of `_figures` for each step.
        fit: the number of steps, from the first, that the placements were computed from.
        path: the image file to write.
        sizes: the sizes of the trace in words, for the title.
    """
    points: dict[str, list[tuple[float, float]]] = {
        name: [(step, float(np.mean(f["balance"]))) for step, f in enumerate(figures)]
        for name, figures in found.items()
    }
    report.lines(
        {"": points},
        path,
        title=f"Load of the busiest rank by step\n{sizes}",
        x_label="step",
        y_label="busiest rank over mean, mean over layers",
        logarithmic=False,
        mark=(fit - 0.5, "placements are found from the steps to the left"),
    )
