"""`python -m jax_ep bench layer`: the MoE layer as a whole, beside what plain JAX makes of it.

Router, exchange, experts and exchange back, forward alone or with the gradients of x, gate, wi_0,
wi_1 and wo (each rank's own: a training step sums the gate's over ranks with its other replicated
parameters). All layers of a shape share parameters, tokens and R. The yardsticks: (a)
`lax.ragged_all_to_all` with `lax.ragged_dot`, and (b) the fastest exchange of plain XLA collectives
with this library's grouped matmul.

Throughputs and speed-ups are of in-loop wall times. FLOP/s count the experts' matmuls of rows that
were routed: 6 H F for a row, three times that with gradients. "Communication" is the share of the
device time that kernels of the exchange and of XLA's collectives take, waiting for peers included.
"Peak" is what XLA says the program holds on a device: arguments, results and temporaries.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jax_ep.cli import command_flags, report
from jax_ep.cli.baselines import AXIS, random_rows, rank_seeds
from jax_ep.cli.bench import integers, offer_cpu_devices, progress
from jax_ep.cli.info import versions
from jax_ep.cli.layer_baselines import (
    CONTENDERS,
    RAGGED_DOT,
    make_layer,
    route,
    unavailable_reason,
)
from jax_ep.cli.operations import rows_needed
from jax_ep.cli.timing import DEVICE_TIMERS, Loop
from jax_ep.moe import MoEConfig, MoEParams
from jax_ep.routing import Score

DIRECTIONS = ("forward", "forward_backward")
OUTPUTS = ("out", "dgate", "dwi_0", "dwi_1", "dwo", "dx")
COMMUNICATION = re.compile(r"^ep_|nccl|barrier|ragged_?all_?to_?all|all_?reduce", re.IGNORECASE)
# Of a row of a result, in norm, relative to it and to the mean row: some roundings to bfloat16.
TOLERANCE = 4 * float(jnp.finfo(jnp.bfloat16).eps)


@dataclasses.dataclass(frozen=True)
class Shape:
    """H, F, E and K of a model's MoE layers."""

    hidden: int
    mlp_dim: int
    num_experts: int
    top_k: int
    score: Score = "softmax"


SHAPES = {
    "deepseek-v3": Shape(7168, 2048, 256, 8, "sigmoid"),
    "qwen3-moe": Shape(2048, 768, 128, 8),
    "mixtral": Shape(4096, 14336, 8, 2),
}
SMALL_SHAPES = {  # for CPUs
    "deepseek-v3": Shape(256, 64, 32, 8, "sigmoid"),
    "qwen3-moe": Shape(128, 64, 16, 8),
    "mixtral": Shape(128, 256, 8, 2),
}

FLAGS = command_flags()
_here: dict[str, Any] = {"flag_values": FLAGS}
_SHAPES = flags.DEFINE_list(
    "shapes", list(SHAPES), "Models; on CPUs, small layers of the same kind.", **_here
)
_DIRECTIONS = flags.DEFINE_list("directions", list(DIRECTIONS), "What to time.", **_here)
_TOKENS = flags.DEFINE_list(
    "tokens", None, "Tokens per rank. Default: 4096 on GPUs and 64 on CPUs.", **_here
)
_RANKS = flags.DEFINE_list("ranks", None, "Rank counts. Default: all devices.", **_here)
_HIDDEN = flags.DEFINE_integer("hidden", None, "H, for every shape.", lower_bound=1, **_here)
_MLP_DIM = flags.DEFINE_integer("mlp_dim", None, "F, for every shape.", lower_bound=1, **_here)
_NUM_EXPERTS = flags.DEFINE_integer(
    "num_experts",
    None,
    "E, for every shape. A single rank with E / 8 does the matmuls of one rank of 8.",
    lower_bound=1,
    **_here,
)
_TOP_K = flags.DEFINE_integer("top_k", None, "K, for every shape.", lower_bound=1, **_here)
_CONTENDERS = flags.DEFINE_list(
    "contenders",
    None,
    f"Of {', '.join(CONTENDERS)}. Default: all that run here, but for the last but one, which is "
    "slow.",
    **_here,
)
_CAPACITY_FACTOR = flags.DEFINE_float(
    "capacity_factor",
    1.125,
    "Rows of a receive buffer over the T * K that a rank gets on average; raised where the run's "
    "routing needs more. 0: room for any routing.",
    lower_bound=0.0,
    **_here,
)
_CHECK = flags.DEFINE_boolean(
    "check", False, "Compare outputs and gradients of all layers before timing.", **_here
)
_ITERATIONS = flags.DEFINE_integer(
    "iterations", 5, "Dependent calls in one loop; 2 of ragged_dot.", lower_bound=2, **_here
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Times each loop is run.", lower_bound=1, **_here)
_SECONDS = flags.DEFINE_float("seconds", 600.0, "Start nothing more after this long.", **_here)
_TIMER = flags.DEFINE_enum(
    "device_timer", "auto", ["auto", *DEVICE_TIMERS, "none"], "As of `bench`.", **_here
)
_SEED = flags.DEFINE_integer("seed", 0, "Of parameters and tokens.", **_here)
_JSON = flags.DEFINE_string("json", None, "Write everything measured to this file.", **_here)
_PLOT = flags.DEFINE_string("plot", None, "Write a plot to this .png file.", **_here)


def run() -> int:
    if _PLOT.value and importlib.util.find_spec("matplotlib") is None:
        raise flags.Error("--plot needs matplotlib: pip install 'jax_ep[examples]'")
    deadline = time.monotonic() + _SECONDS.value
    wanted_ranks = integers("ranks", _RANKS.value or [])
    offer_cpu_devices(max(wanted_ranks, default=8))
    devices = jax.devices()
    platform = devices[0].platform
    shapes = _shapes(platform)
    contenders = _contenders(platform)
    tokens = integers("tokens", _TOKENS.value or ["4096" if platform == "gpu" else "64"])
    ranks = wanted_ranks or [len(devices)]
    _check_flags(ranks, shapes)

    rows: list[report.Row] = []
    for num_ranks in ranks:
        for name, shape in shapes.items():
            for num_tokens in tokens:
                work = {"shape": name, "ranks": num_ranks, "tokens": num_tokens}
                rows += measure_shape(work, shape, contenders, deadline)
    progress("")
    compare(rows)

    kind = f"{len(devices)} x {devices[0].device_kind}"
    print(f"{kind}, jax {jax.__version__}, bfloat16")
    for name, shape in shapes.items():
        print(f"{name}: H={shape.hidden} F={shape.mlp_dim} E={shape.num_experts} K={shape.top_k}")
    print(f"\n{table(rows)}")
    if _JSON.value:
        record = {
            "command": ["python", "-m", "jax_ep", *sys.argv[1:]],
            "versions": versions(),
            "devices": kind,
            "rows": rows,
        }
        with open(_JSON.value, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    if _PLOT.value:
        plot(rows, _PLOT.value)
    return 1 if any("error" in row for row in rows) else 0


def measure_shape(
    work: dict[str, Any], shape: Shape, contenders: Sequence[str], deadline: float
) -> list[report.Row]:
    """A row for each direction and contender, or all with the error that kept them from it."""
    cases = [
        work | dataclasses.asdict(shape) | {"direction": direction, "contender": contender}
        for direction in _DIRECTIONS.value
        for contender in contenders
    ]
    text = "{shape}, {tokens} tokens, {ranks} ranks".format(**work)
    progress(f"{text}: compiling")
    try:
        mesh = Mesh(np.asarray(jax.devices()[: work["ranks"]]), (AXIS,))
        state = make_state(shape, work["tokens"], mesh, _SEED.value)
        config, load = make_config(shape, state, mesh, _CAPACITY_FACTOR.value)
    except Exception as error:  # nor must one shape cost the others their results
        return [case | _failure(error) for case in cases]

    def build(case: dict[str, Any]) -> Loop:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not started within {_SECONDS.value:g} s")
        iterations = 2 if case["contender"] == RAGGED_DOT else _ITERATIONS.value
        step = make_step(case["contender"], case["direction"], config)
        return Loop(None, step, state, mesh, iterations)

    rows: list[report.Row] = []
    expected: dict[str, tuple[str, Any]] = {}  # by direction: whose, and what
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        futures = [pool.submit(build, case) for case in cases]
        for future in futures:  # compiled side by side, but timed alone
            future.exception()
    for case, future in zip(cases, futures, strict=True):
        progress("{}: {direction}, {contender}".format(text, **case))
        memory: dict[str, Any] = {}
        try:
            loop = future.result()
            memory = memory_of(loop)  # known even of what then does not fit
            if time.monotonic() > deadline:
                raise TimeoutError(f"not started within {_SECONDS.value:g} s")
            if _CHECK.value:
                outputs = loop.outputs()
                theirs = expected.setdefault(case["direction"], (case["contender"], outputs))
                agree(case["contender"], outputs, *theirs)
                del outputs
            checked = {"checked": _CHECK.value}
            rows.append(case | load | checked | memory | measure(loop, case))
        except Exception as error:
            rows.append(case | memory | _failure(error))
    return rows


def measure(loop: Loop, case: dict[str, Any]) -> dict[str, Any]:
    """Times and throughput of one compiled layer."""
    slow = case["contender"] == RAGGED_DOT
    wall = loop.wall_time(min(_REPEATS.value, 3) if slow else _REPEATS.value)
    seconds = wall.median * 1e-6
    passes = 1 if case["direction"] == "forward" else 3
    flops = passes * case["tokens"] * case["top_k"] * 6 * case["hidden"] * case["mlp_dim"]
    result: dict[str, Any] = {
        "iterations": loop.iterations,
        "wall": {"median_us": wall.median, "low_us": wall.low, "high_us": wall.high},
        "device": None,
        "tokens_per_s": case["ranks"] * case["tokens"] / seconds,
        "tflops_per_rank": flops / seconds / 1e12,
    }
    on_gpu = loop.mesh.devices.flat[0].platform == "gpu"
    if on_gpu and _TIMER.value != "none":
        timers = DEVICE_TIMERS if _TIMER.value == "auto" else (_TIMER.value,)
        try:
            device = loop.device_time(repeats=1 if slow else 2, timers=timers, spaced=False)
        except RuntimeError as error:  # the wall time stands without it
            result["device_error"] = str(error)
        else:
            result["device"] = {
                "median_us": device.median,
                "slowest_us": device.slowest,
                "low_us": device.low,
                "high_us": device.high,
                "timer": device.timer,
                "by_kernel_us": device.by_kernel,
            }
            result["communication_share"] = communication_share(device.by_kernel)
    return result


def memory_of(loop: Loop) -> dict[str, Any]:
    """What a compiled layer holds on a device, as XLA says."""
    memory = loop.compiled.memory_analysis()
    if memory is None:
        return {"peak_bytes": None, "temp_bytes": None}
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return {"peak_bytes": peak, "temp_bytes": memory.temp_size_in_bytes}


def communication_share(by_kernel: dict[str, float]) -> float:
    """Of the time of all kernels, by their names."""
    in_exchange = sum(us for name, us in by_kernel.items() if COMMUNICATION.search(name))
    return in_exchange / sum(by_kernel.values())


def make_state(shape: Shape, num_tokens: int, mesh: Mesh, seed: int) -> Any:
    """(`MoEParams`, x [T, H], the cotangent of the output [T, H]) of every rank, stacked."""
    num_local = shape.num_experts // mesh.size
    hidden, mlp_dim = shape.hidden, shape.mlp_dim

    def on_rank(own_seed, gate_seed):
        def rows(stream, *sizes):
            return random_rows(own_seed + 100 * stream, sizes, jnp.bfloat16)

        # Of values that bfloat16 holds, so that no precision of the router's matmul rounds them:
        # the layers must not choose other experts for it.
        gate = random_rows(gate_seed, (hidden, shape.num_experts), jnp.bfloat16)
        params = MoEParams(
            gate=gate.astype(jnp.float32) * 2.0 ** -round(math.log2(hidden / 8) / 2),
            wi_0=rows(1, num_local, hidden, mlp_dim) * math.sqrt(9 / hidden),
            wi_1=rows(2, num_local, hidden, mlp_dim) * math.sqrt(9 / hidden),
            wo=rows(3, num_local, mlp_dim, hidden) * math.sqrt(9 / mlp_dim),
        )
        state = params, rows(4, num_tokens, hidden), rows(5, num_tokens, hidden)
        return jax.tree.map(lambda leaf: leaf[None], state)

    spec = PartitionSpec(AXIS)
    make = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    seeds = rank_seeds(mesh.size, seed)
    return jax.jit(make)(seeds, np.full_like(seeds, 1000 * seed + 999))


def make_config(
    shape: Shape, state: Any, mesh: Mesh, capacity_factor: float
) -> tuple[MoEConfig, dict[str, Any]]:
    """The layer's config, whose buffer holds all rows of this routing; and the load in numbers."""
    config = MoEConfig(
        num_experts=shape.num_experts,
        num_experts_per_token=shape.top_k,
        score=shape.score,
        expert_axis=AXIS,
    )
    spec = PartitionSpec(AXIS)

    def on_rank(state):
        params, x, _ = jax.tree.map(lambda leaf: leaf[0], state)
        return route(params, x, config).topk_idx

    routed = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    topk_idx = np.asarray(jax.jit(routed)(state))
    needed = rows_needed(topk_idx, mesh.size, shape.num_experts, 1)
    average = topk_idx.size // mesh.size
    load = {"rows": average, "rows_needed": needed, "capacity": None}
    if capacity_factor:
        rows = max(math.ceil(capacity_factor * average), needed)
        rows = -(-rows // 128) * 128
        config = dataclasses.replace(config, capacity_factor=rows / average)
        load["capacity"] = rows
    return config, load


def make_step(contender: str, direction: str, config: MoEConfig) -> Any:
    """What a `Loop` repeats: from the state, the outputs that `OUTPUTS` names (or the first)."""
    layer = make_layer(contender, config)

    def forward(state):
        params, x, _ = state
        return (layer(params, x),)

    def forward_backward(state):
        params, x, g = state
        out, backward = jax.vjp(layer, params, x)
        out, g = lax.optimization_barrier((out, g))  # in training g depends on the output
        dparams, dx = backward(g)
        return out, dparams.gate, dparams.wi_0, dparams.wi_1, dparams.wo, dx

    return forward if direction == "forward" else forward_backward


def agree(name: str, outputs: Any, other: str, expected: Any) -> None:
    """Raises AssertionError unless two layers' outputs and gradients agree, row by row.

    A row differs if the norm of its error is above TOLERANCE times its own plus the mean row's
    norm. One row in 10000 may: two experts whose scores are equal but for a rounding may change
    places.
    """
    for what, got, wanted in zip(OUTPUTS, outputs, expected, strict=False):
        count, worst = (float(number) for number in _differing_rows(got, wanted))
        rows = got.size // got.shape[-1]
        if count > rows // 10_000:
            raise AssertionError(
                f"{what} of {name} differs from that of {other} in {count:.0f} of {rows} rows, by "
                f"up to {worst:.3g} of a row's norm (tolerance {TOLERANCE:.3g})"
            )


@jax.jit
def _differing_rows(got: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    error = jnp.linalg.norm(got - wanted, axis=-1)
    size = jnp.linalg.norm(wanted, axis=-1)
    relative = error / (size + jnp.sqrt(jnp.mean(size**2)))
    return jnp.sum(~(relative <= TOLERANCE)), jnp.max(relative)  # so that NaN differs


def compare(rows: list[report.Row]) -> None:
    """Adds each row's speed-up over (a) and over the fastest of (b), wall time over wall time."""

    def work(row):
        return row["shape"], row["tokens"], row["ranks"], row["direction"]

    measured = [row for row in rows if "wall" in row]
    for row in measured:
        alike = [other for other in measured if work(other) == work(row)]
        for key, yardsticks in {
            "speedup_over_ragged": [o for o in alike if o["contender"] == RAGGED_DOT],
            "speedup_over_xla": [o for o in alike if CONTENDERS[o["contender"]].plain_exchange],
        }.items():
            if yardsticks:
                fastest = min(other["wall"]["median_us"] for other in yardsticks)
                row[key] = fastest / row["wall"]["median_us"]


_COLUMNS = (
    "shape", "tokens", "ranks", "direction", "layer", "wall us", "low..high", "device us",
    "tokens/s", "TFLOP/s/rank", "communication", "peak MiB", "vs (a)", "vs (b)",
)  # fmt: skip


def table(rows: Sequence[report.Row]) -> str:
    """Fixed-width text; a column that is empty in every row is left out."""
    lines = [_cells(row) for row in rows]
    kept = [i for i in range(len(_COLUMNS)) if any(line[i] for line in lines)]
    chosen = [[line[i] for i in kept] for line in [list(_COLUMNS), *lines]]
    text = report.aligned(chosen, [_COLUMNS[i] in ("shape", "direction", "layer") for i in kept])
    notes = [f"(a): {RAGGED_DOT}; (b): the fastest plain exchange with our grouped matmul"]
    notes += [
        "{shape}, {direction}, {contender}: {error}".format(**r) for r in rows if "error" in r
    ]
    blind = sorted({row["device_error"] for row in rows if row.get("device_error")})
    return "\n".join([*text, "", *notes, *(f"no device time: {error}" for error in blind)])


def _cells(row: report.Row) -> list[str]:
    wall, device = row.get("wall") or {}, row.get("device") or {}

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return [
        row["shape"],
        str(row["tokens"]),
        str(row["ranks"]),
        row["direction"],
        row["contender"],
        cell(wall.get("median_us"), "{:.1f}"),
        "{low_us:.1f}..{high_us:.1f}".format(**wall) if wall else "failed",
        cell(device.get("slowest_us"), "{:.1f}"),
        cell(row.get("tokens_per_s"), "{:.0f}"),
        cell(row.get("tflops_per_rank"), "{:.3g}"),
        cell(row.get("communication_share"), "{:.0%}"),
        cell(None if row.get("peak_bytes") is None else row["peak_bytes"] / 2**20, "{:.0f}"),
        cell(row.get("speedup_over_ragged"), "{:.2f}x"),
        cell(row.get("speedup_over_xla"), "{:.2f}x"),
    ]


def plot(rows: Sequence[report.Row], path: str) -> None:
    """Tokens per second as bars: a panel for each direction, a group for each shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def group(row):
        return f"{row['shape']}\n{row['tokens']} tokens x {row['ranks']}"

    groups = list(dict.fromkeys(group(row) for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    figure, axes = plt.subplots(
        1, len(directions), figsize=(2 + 2.5 * len(groups) * len(directions), 4.5), squeeze=False
    )
    width = 0.8 / len(contenders)
    for axis, direction in zip(axes[0], directions, strict=True):
        for number, contender in enumerate(contenders):
            rates = {
                group(row): row.get("tokens_per_s", 0.0)
                for row in rows
                if (row["direction"], row["contender"]) == (direction, contender)
            }
            places = [i + (number - (len(contenders) - 1) / 2) * width for i in range(len(groups))]
            heights = [rates.get(name, 0.0) for name in groups]
            bars = axis.bar(places, heights, width, label=contender)
            axis.bar_label(bars, fmt="{:.2g}", fontsize=6)
        axis.set_xticks(range(len(groups)), groups, fontsize="small")
        axis.set(title=direction.replace("_", " + "), ylabel="tokens/s")
        axis.grid(visible=True, axis="y", alpha=0.3)
    axes[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _failure(error: Exception) -> dict[str, Any]:
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    return {"error": f"{type(error).__name__}: {first_line}"}


def _shapes(platform: str) -> dict[str, Shape]:
    for name in _SHAPES.value:
        if name not in SHAPES:
            raise flags.Error(f"--shapes: {name!r} is not one of {', '.join(SHAPES)}")
    own = {
        "hidden": _HIDDEN.value,
        "mlp_dim": _MLP_DIM.value,
        "num_experts": _NUM_EXPERTS.value,
        "top_k": _TOP_K.value,
    }
    own = {field: value for field, value in own.items() if value is not None}
    table = SMALL_SHAPES if platform == "cpu" else SHAPES
    return {name: dataclasses.replace(table[name], **own) for name in _SHAPES.value}


def _contenders(platform: str) -> list[str]:
    chosen = _CONTENDERS.value
    if chosen is None:
        usual = [name for name in CONTENDERS if name != "ragged_all_to_all+grouped_matmul"]
        return [name for name in usual if unavailable_reason(name, platform) is None]
    for name in chosen:
        if name not in CONTENDERS:
            raise flags.Error(f"--contenders: {name!r} is not one of {', '.join(CONTENDERS)}")
        if reason := unavailable_reason(name, platform):
            raise flags.Error(f"--contenders: {name} cannot run here: {reason}")
    return chosen


def _check_flags(ranks: list[int], shapes: dict[str, Shape]) -> None:
    for direction in _DIRECTIONS.value:
        if direction not in DIRECTIONS:
            raise flags.Error(f"--directions: {direction!r} is not one of {', '.join(DIRECTIONS)}")
    for num_ranks in ranks:
        if num_ranks > len(jax.devices()):
            raise flags.Error(f"--ranks: {num_ranks} ranks, but {len(jax.devices())} devices")
        for name, shape in shapes.items():
            if shape.num_experts % num_ranks:
                raise flags.Error(f"--ranks: {shape.num_experts} experts over {num_ranks} ranks")
            if shape.top_k > shape.num_experts:
                raise flags.Error(
                    f"--top_k: {shape.top_k} distinct of {name}'s {shape.num_experts} experts"
                )
