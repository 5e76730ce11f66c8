"""`python -m jax_ep bench balance`: times a layer with skewed routing, for ways to place experts.

Every layer of a shape has the same parameters and tokens, and is given its choices of experts: K
distinct experts per token, drawn with probabilities 1 / (1 + popularity rank) ** exponent. Exponent
0 is uniform routing. The experts' popularity ranks are shuffled. A placement is found by
`jax_ep.placement.balance` from the loads of as many tokens of another draw.

The receive buffer has as many rows as a routing and its placement need, or a given number for all.
"Redistribute" is the wall time of one `jax_ep.placement.redistribute` of the experts' weights, from
the order of the ids to the placement or back; "a step" spreads it over the steps between two.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.bench import layer as bench_layer
from jax_ep.bench import measuring, report
from jax_ep.bench.baselines import AXIS
from jax_ep.bench.flags import BenchFlags
from jax_ep.bench.operations import rows_needed
from jax_ep.bench.timing import Loop
from jax_ep.exchange.routes import Overflow
from jax_ep.flags import Error, check_experts
from jax_ep.moe import layer as moe
from jax_ep.moe.config import MoEConfig
from jax_ep.placement import Placement, balance, redistribute, to_slots

FLAGS = BenchFlags()
_SHAPES = FLAGS.choices(
    "shapes",
    ["qwen3-moe"],
    bench_layer.SHAPES,
    "The models whose MoE layers are measured, as in `bench layer`.",
)
_RANKS = FLAGS.ranks()
_TOKENS = FLAGS.tokens("4096", "64")
_EXPONENTS = FLAGS.numbers(
    "exponents",
    [0.0, 1.0],
    "Exponents of the experts' popularity: an expert of popularity rank i, from 0, is chosen with "
    "a probability proportional to 1 / (1 + i) ** exponent. 0: uniform routing.",
)
_COPIES = FLAGS.integers(
    "copies",
    [0, 1],
    "Numbers of extra slots, for copies of popular experts, that each rank has beyond its E / N.",
    least=0,
)
_OVERFLOWS = FLAGS.choices(
    "overflows",
    ["fair"],
    get_args(Overflow),
    "Which rows are dropped where a receive buffer is full: fair takes from the experts with most, "
    "tail from the last.",
)
_CAPACITY_FACTORS = FLAGS.numbers(
    "capacity_factor",
    None,
    "Rows of a receive buffer, as multiples of the T * K rows that a rank gets on average; rows "
    "that do not fit are dropped. 0: room for any routing. Default: what each routing needs.",
)
_EVERY = FLAGS.integer(
    "redistribute_every", 100, "Training steps from one redistribution of experts to the next."
)
_TIMING = FLAGS.timing(10, 5, least_iterations=2)
_CHECK = FLAGS.check("the outputs of all layers of one routing with each other")
_SEED = FLAGS.seed("parameters, tokens and choices")
_JSON = FLAGS.json()
_PLOT = FLAGS.plot("the times by placement")


def run() -> int:
    FLAGS.check_outputs()
    devices = measuring.find_devices(max(_RANKS.value or [8]))
    platform = devices[0].platform
    ranks = _RANKS.value or [len(devices)]
    measuring.check_ranks(ranks, len(devices))
    table = bench_layer.SMALL_SHAPES if platform == "cpu" else bench_layer.SHAPES
    shapes = {name: table[name] for name in _SHAPES.value}
    for num_ranks in ranks:
        for name, shape in shapes.items():
            check_experts(shape.num_experts, num_ranks, shape.top_k, name)
    if FLAGS.given(_COPIES) and not any(_EXPONENTS.value):
        raise Error("--copies: uniform routing is measured without; name an --exponents above 0")
    rows: list[report.Row] = []
    for num_ranks in ranks:
        for name, shape in shapes.items():
            for num_tokens in _TOKENS.value or [4096 if platform == "gpu" else 64]:
                work = {"shape": name, "ranks": num_ranks, "tokens": num_tokens}
                work |= dataclasses.asdict(shape)
                rows += measure_shape(work, shape)
                if _JSON.value:
                    measuring.write_json(_JSON.value, rows)
    measuring.progress("")
    compare(rows, _EVERY.value)
    print(f"{measuring.devices_in_words(devices)}, jax {jax.__version__}, bfloat16, forward")
    text = report.fixed_width(_COLUMNS, [_cells(row) for row in rows], _TEXT)
    text += report.notes(rows, _name)
    print("\n".join(["", *text, *(report.kernels(rows, _name) if _TIMING.by_kernel.value else [])]))
    if _PLOT.value:
        plot(rows, _PLOT.value, measuring.devices_in_words(devices))
    return 1 if any("error" in row for row in rows) else 0


def plot(rows: list[report.Row], path: str, machine: str) -> None:
    """Draws to a file the wall time of a layer, by routing and by where its experts live."""

    def bar(row: report.Row) -> str:
        factor = row.get("capacity_factor")
        buffer = "" if factor is None else f", capacity factor {factor:g}"
        return f"{_placement(row)}, {row.get('overflow', 'not placed')}{buffer}"

    report.bars(
        rows,
        path,
        title=f"Time of the MoE layer under skewed routing, forward, bfloat16\n{machine}",
        panel=bench_layer.sizes,
        group=lambda row: f"exponent {row['exponent']:g}",
        bar=bar,
        height=lambda row: row["wall"]["median_us"] if "wall" in row else None,
        label="in-loop wall time, us",
    )


def draw_choices(
    num_tokens: int, num_experts: int, top_k: int, exponent: float, ranks: Any, seed: int
) -> Any:
    """Draws K distinct experts for each token; expert e has the popularity rank ranks[e].

    Returns:
        [num_tokens, K] int32, the most likely choice of a token first.
    """
    draws = np.random.default_rng(seed).gumbel(size=(num_tokens, num_experts))
    return np.argsort(exponent * np.log1p(ranks) - draws, axis=1)[:, :top_k].astype(np.int32)


def measure_shape(work: dict[str, Any], shape: bench_layer.Shape) -> list[report.Row]:
    """Measures a layer for every routing, placement, overflow and capacity: a row for each."""
    mesh = Mesh(np.asarray(jax.devices()[: work["ranks"]]), (AXIS,))
    sizes = work["ranks"] * work["tokens"], shape.num_experts, shape.top_k
    popularity = np.random.default_rng(_SEED.value).permutation(shape.num_experts)
    state = bench_layer.make_state(shape, work["tokens"], mesh, _SEED.value)
    rows = []
    for exponent in _EXPONENTS.value:
        topk_idx = draw_choices(*sizes, exponent, popularity, _SEED.value + 1)
        earlier = draw_choices(*sizes, exponent, popularity, _SEED.value + 2)
        load = np.bincount(earlier.reshape(-1), minlength=shape.num_experts)[None]
        expected = None
        for copies in [None, *_COPIES.value] if exponent else [None]:
            case = work | {"exponent": exponent, "copies": copies}
            measuring.progress("{shape}, exponent {exponent:g}, copies {copies}".format(**case))
            try:
                placed, facts = place(state, load, copies, mesh)
            except Exception as error:
                rows.append(case | {"error": measuring.first_line(error)})
                continue
            for overflow in _OVERFLOWS.value:
                for factor in _CAPACITY_FACTORS.value or [None]:
                    own = case | facts | {"overflow": overflow, "capacity_factor": factor}
                    try:
                        row, out = _measure(own, shape, placed, topk_idx, mesh)
                    except Exception as error:
                        rows.append(own | {"error": measuring.first_line(error)})
                        continue
                    rows.append(row)
                    if _CHECK.value and not row["dropped"]:
                        expected = out if expected is None else expected
                        bench_layer.agree(_name(row), [out], "experts in order", [expected])
    return rows


def place(state: Any, load: Any, copies: int | None, mesh: Mesh) -> tuple[Any, dict[str, Any]]:
    """Places the experts; returns (params, x, placement), and the times of moving the weights.

    The placement is None, and experts stay in the order of their ids, if `copies` is None.
    """
    params, x, _ = state
    if copies is None:
        return (params, x, None), {}
    num_experts = load.shape[1]
    num_slots = num_experts + copies * mesh.size
    sizes = {"num_slots": num_slots, "num_ranks": mesh.size}
    before = Placement.in_order(num_experts=num_experts, **sizes)
    after = balance(load, **sizes)
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    weights = {name: getattr(params, name) for name in ("wi_0", "wi_1", "wo")}

    def in_slots(weights: Any) -> Any:
        experts = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weights)
        return to_slots(experts, before[0])

    slots = jax.jit(in_slots, out_shardings=split)(weights)
    seconds = []
    for there, then in [(before, after), (after, before)] * 2 + [(before, after)]:
        start = time.perf_counter()
        slots = redistribute(slots, there[0], then[0], mesh=mesh, axis_name=AXIS)
        jax.block_until_ready(slots)
        seconds.append(time.perf_counter() - start)
    stacked = jax.tree.map(lambda leaf: leaf.reshape(mesh.size, -1, *leaf.shape[1:]), slots)
    params = params._replace(**stacked)
    return (params, x, after[0]), {
        "redistribute_us": statistics.median(seconds[2:]) * 1e6,  # the first two compiled
        "redistributed_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(slots)),
    }


def _measure(
    case: dict[str, Any], shape: bench_layer.Shape, placed: Any, topk_idx: Any, mesh: Mesh
) -> tuple[report.Row, Any]:
    params, x, placement = placed
    num_slots = None if placement is None else placement.expert_of_slot.shape[0]
    config = MoEConfig(
        num_experts=shape.num_experts,
        num_experts_per_token=shape.top_k,
        score=shape.score,
        expert_axis=AXIS,
        overflow=case["overflow"],
        num_slots=num_slots,
    )
    average = case["tokens"] * shape.top_k
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    chosen = jax.device_put(topk_idx.reshape(mesh.size, case["tokens"], -1), split)
    stacked = None if placement is None else _stacked(placement, mesh)
    state = params, x, chosen, stacked
    needed = _rows_needed(state, mesh, config)
    most = mesh.size * average
    factor = case["capacity_factor"]
    rows = needed if factor is None else factor * average if factor else most
    rows = min(math.ceil(rows / 128) * 128, most)
    config = dataclasses.replace(config, capacity_factor=rows / average)

    def step(state: Any) -> Any:
        params, x, chosen, placement = state
        out, metrics = moe.moe_layer(params, x, config, placement=placement, topk_idx=chosen)
        return out, metrics.num_dropped

    loop = Loop(None, lambda state: step(state)[0], state, mesh, _TIMING.iterations.value)
    out, dropped = None, [0]
    if _CHECK.value or rows < needed:
        out, dropped = Loop(None, step, state, mesh, 1).outputs()
    times = measuring.times(loop, _TIMING.repeats.value, _TIMING.timer.value, spaced=False)
    facts = {"needed": needed, "busiest": needed / average, "dropped": int(dropped[0])}
    return case | facts | times | {"capacity": rows}, out


def _rows_needed(state: Any, mesh: Mesh, config: MoEConfig) -> int:
    """Returns the number of rows that the rank with most rows receives."""

    def on_rank(state: Any) -> Any:
        params, x, chosen, placement = jax.tree.map(lambda leaf: leaf[0], state)
        slots = chosen
        if placement is not None:
            slots = moe.chosen(chosen, placement, (AXIS,))
        return slots[None]

    spec = PartitionSpec(AXIS)
    chosen = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    slots = np.asarray(jax.jit(chosen)(state))
    return rows_needed(slots, mesh.size, config.num_held, 1)


def _stacked(placement: Placement, mesh: Mesh) -> Placement:
    split = NamedSharding(mesh, PartitionSpec(AXIS))

    def stack(leaf: Any) -> jax.Array:
        return jax.device_put(jnp.broadcast_to(leaf, (mesh.size, *leaf.shape)), split)

    return jax.tree.map(stack, placement)


def compare(rows: list[report.Row], steps: int) -> None:
    """Adds to each row its wall time divided by that of uniform routing.

    The wall time includes a share of one redistribution of the experts in every `steps` steps.
    """
    for row in (row for row in rows if "wall" in row):
        alike = ("shape", "ranks", "tokens", "overflow", "capacity_factor")
        uniform = [
            other
            for other in rows
            if "wall" in other
            and not other["exponent"]
            and all(other[key] == row[key] for key in alike)
        ]
        row["share_us"] = row.get("redistribute_us", 0.0) / steps
        if uniform:
            wall = row["wall"]["median_us"] + row["share_us"]
            row["over_uniform"] = wall / uniform[0]["wall"]["median_us"]


_COLUMNS = (
    "shape", "tokens", "ranks", "exponent", "placement", "overflow", "busiest", "capacity",
    "dropped", "wall us", "low..high", "device us", "redistribute us", "a step", "over uniform",
)  # fmt: skip
_TEXT = ("shape", "placement", "overflow")


def _name(row: report.Row) -> str:
    return "{shape}, exponent {exponent:g}, {0}".format(_placement(row), **row)


def _placement(row: report.Row) -> str:
    copies = row["copies"]
    return (
        "in order" if copies is None else f"balance, {copies} more a rank" if copies else "balance"
    )


def _cells(row: report.Row) -> list[str]:
    wall, device = row.get("wall") or {}, row.get("device") or {}

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return [
        row["shape"],
        str(row["tokens"]),
        str(row["ranks"]),
        f"{row['exponent']:g}",
        _placement(row),
        row.get("overflow", ""),
        cell(row.get("busiest"), "{:.3f}"),
        cell(row.get("capacity"), "{}"),
        cell(row.get("dropped"), "{}"),
        cell(wall.get("median_us"), "{:.1f}"),
        "{low_us:.1f}..{high_us:.1f}".format(**wall) if wall else "failed",
        cell(device.get("slowest_us"), "{:.1f}"),
        cell(row.get("redistribute_us"), "{:.0f}"),
        cell(row.get("share_us") or None, "{:.1f}"),
        cell(row.get("over_uniform"), "{:.3f}"),
    ]
