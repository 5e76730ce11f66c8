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
from jax_ep.flags import Error
from jax_ep.moe import layer as moe
from jax_ep.moe.config import MoEConfig
from jax_ep.placement import Placement, balance, redistribute, to_slots

FLAGS = BenchFlags()
_SHAPES = FLAGS.choices("shapes", ["qwen3-moe"], bench_layer.SHAPES, "Models, as `bench layer`'s.")
_RANKS = FLAGS.ranks()
_TOKENS = FLAGS.tokens("4096", "64")
_EXPONENTS = FLAGS.numbers("exponents", [0.0, 1.0], "Of the experts' popularity; 0: uniform.")
_COPIES = FLAGS.integers(
    "copies", [0, 1], "Slots that each rank has besides those for E experts.", least=0
)
_OVERFLOWS = FLAGS.choices("overflows", ["fair"], get_args(Overflow), "Which rows are dropped.")
_CAPACITY_FACTORS = FLAGS.numbers(
    "capacity_factors",
    [0.0],
    "Rows of a receive buffer over the T * K that a rank gets on average, whatever that drops. 0: "
    "what the routing needs.",
)
_STEPS = FLAGS.integer("steps", 100, "Steps from one redistribution to the next.")
_TIMING = FLAGS.timing(10, 5, least_iterations=2)
_CHECK = FLAGS.boolean("check", "Compare the outputs of all layers of one routing before timing.")
_SEED = FLAGS.integer("seed", 0, "Of parameters, tokens and choices.", least=0)
_JSON = FLAGS.json()


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
            if shape.num_experts % num_ranks:
                raise Error(f"--ranks: {name}'s {shape.num_experts} experts on {num_ranks} ranks")
    rows: list[report.Row] = []
    for num_ranks in ranks:
        for name, shape in shapes.items():
            for num_tokens in _TOKENS.value or [4096 if platform == "gpu" else 64]:
                work = {"shape": name, "ranks": num_ranks, "tokens": num_tokens}
                rows += measure_shape(work, shape)
                if _JSON.value:
                    measuring.write_json(_JSON.value, rows)
    measuring.progress("")
    compare(rows, _STEPS.value)
    print(f"{measuring.devices_in_words(devices)}, jax {jax.__version__}, bfloat16, forward")
    text = report.fixed_width(_COLUMNS, [_cells(row) for row in rows], _TEXT)
    text += report.notes(rows, _name)
    print("\n".join(["", *text, *(report.kernels(rows, _name) if _TIMING.by_kernel.value else [])]))
    return 1 if any("error" in row for row in rows) else 0


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
                for factor in _CAPACITY_FACTORS.value:
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
    rows = math.ceil((case["capacity_factor"] * average or needed) / 128) * 128
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
