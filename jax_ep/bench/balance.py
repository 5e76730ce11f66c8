"""`python -m jax_ep bench balance`: times an MoE layer under skewed routing, by placement.

A placement says which rank holds which experts; popular experts may be held by several ranks. All
layers of a model shape have the same parameters and tokens. A token's K experts are not chosen by
the router but drawn at random, with probabilities proportional to
1 / (1 + popularity rank) ** exponent. Exponent 0 is uniform routing. Popularity ranks are assigned
to experts at random. `jax_ep.placement.balance` computes a placement from the experts' loads in a
second draw, independent of the one that is measured.

The receive buffer is just large enough for the routing and the placement, or has the number of rows
that --capacity_factor sets. The column "redistribute us" is the wall time of one call of
`jax_ep.placement.redistribute`, which moves the experts' weights from the order of expert ids to
the placement, or back. The column "a step" is this time divided by --redistribute_every, the number
of training steps between two redistributions.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.bench import layer as bench_layer
from jax_ep.bench import report, runner
from jax_ep.bench.baselines import AXIS
from jax_ep.bench.flags import BenchFlags
from jax_ep.bench.operations import rows_needed
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop
from jax_ep.exchange.routes import Overflow
from jax_ep.flags import Error
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
    "Numbers of slots for copies of popular experts that each rank has besides its E / N slots.",
    least=0,
)
_OVERFLOWS = FLAGS.choices(
    "overflows",
    ["fair"],
    get_args(Overflow),
    "Which rows are dropped where a receive buffer is full. fair: rows of the experts with the "
    "most rows. tail: rows of the last experts.",
)
_CAPACITY_FACTORS = FLAGS.numbers(
    "capacity_factor",
    None,
    "Rows of a receive buffer, as multiples of the T * K rows that a rank gets on average; rows "
    "that do not fit are dropped. 0: room for any routing. Default: what each routing needs.",
)
_EVERY = FLAGS.integer(
    "redistribute_every",
    100,
    "The number of training steps from one redistribution of experts to the next.",
)
_TIMING = FLAGS.timing(10, 5, least_iterations=2)
_SEED = FLAGS.seed("parameters, tokens and choices")
_SHARED = FLAGS.share(
    plot="the times by placement",
    timing=_TIMING,
    check=FLAGS.check("the outputs of all layers of one routing with each other"),
)


def run() -> int:
    return runner.run(BalanceBench())


class Placed(NamedTuple):
    """An MoE layer whose experts' weights are arranged by a placement.

    Attributes:
      state: the tuple (parameters, x, topk_idx, placement); every array has a leading axis of
        ranks. The placement is None if experts are in the order of their ids.
      mesh: the one-axis mesh of the ranks.
      config: the layer's configuration, except for the capacity factor, which `BalanceCase.build`
        sets.
      needed: the number of rows that the most loaded rank receives.
      facts: fields to add to the row of results: the time and bytes of moving the weights to the
        placement.
    """

    state: Any
    mesh: Mesh
    config: MoEConfig
    needed: int
    facts: Row


class BalanceCase(runner.Case):
    """Measures a layer with one routing and one placement, for each overflow rule and capacity.

    All cases share the dict `expected`, which maps a routing, described in words, to the output
    that the first checked placement gave for it, [N, T, H] for N ranks. Every other placement must
    give the same output for this routing.
    """

    spaced = False

    def __init__(self, work: Row, shape: bench_layer.Shape, expected: dict[str, Any]):
        super().__init__(
            "{shape}, exponent {exponent:g}, {0}".format(_placement(work), **work),
            [
                work | {"implementation": overflow, "overflow": overflow, "capacity_factor": factor}
                for overflow in _OVERFLOWS.value
                for factor in _CAPACITY_FACTORS.value or [None]
            ],
        )
        self.work, self.shape, self.expected = work, shape, expected

    def prepare(self) -> Placed:
        work, shape = self.work, self.shape
        mesh = Mesh(np.asarray(jax.devices()[: work["ranks"]]), (AXIS,))
        sizes = work["ranks"] * work["tokens"], shape.num_experts, shape.top_k
        popularity = np.random.default_rng(_SEED.value).permutation(shape.num_experts)
        topk_idx, earlier = (
            draw_choices(*sizes, work["exponent"], popularity, _SEED.value + stream)
            for stream in (1, 2)
        )
        load = np.bincount(earlier.reshape(-1), minlength=shape.num_experts)[None]
        state = bench_layer.make_state(shape, work["tokens"], mesh, _SEED.value)
        (params, x, placement), facts = place(state, load, work["copies"], mesh)
        config = MoEConfig(
            num_experts=shape.num_experts,
            num_experts_per_token=shape.top_k,
            score=shape.score,
            expert_axis=AXIS,
            num_slots=None if placement is None else placement.expert_of_slot.shape[0],
        )
        split = NamedSharding(mesh, PartitionSpec(AXIS))
        chosen = jax.device_put(topk_idx.reshape(mesh.size, work["tokens"], -1), split)
        stacked = None if placement is None else _stacked(placement, mesh)
        state = params, x, chosen, stacked
        return Placed(state, mesh, config, _rows_needed(state, mesh, config), facts)

    def build(self, row: Row, shared: Placed) -> Loop:
        average = row["tokens"] * row["top_k"]
        most = shared.mesh.size * average
        factor = row["capacity_factor"]
        rows = shared.needed if factor is None else factor * average if factor else most
        rows = min(math.ceil(rows / 128) * 128, most)
        row |= shared.facts | {"needed": shared.needed, "busiest": shared.needed / average}
        row["capacity"] = rows
        config = dataclasses.replace(
            shared.config, overflow=row["overflow"], capacity_factor=rows / average
        )

        def step(state: Any) -> Any:
            params, x, chosen, placement = state
            out, metrics = moe.moe_layer(params, x, config, placement=placement, topk_idx=chosen)
            return out, metrics.num_dropped

        def output(state: Any) -> Any:
            return step(state)[0]

        row["dropped"] = 0
        if rows < shared.needed:
            dropped = Loop(None, step, shared.state, shared.mesh, 1).outputs()[1]
            row["dropped"] = int(dropped[0])
        return Loop(None, output, shared.state, shared.mesh, _TIMING.iterations.value)

    def check(self, row: Row, loop: Loop, shared: Placed) -> bool:
        if row["dropped"]:
            return False
        out, routing = loop.outputs(), "{shape}, {ranks}, {tokens}, {exponent}".format(**row)
        expected = self.expected.setdefault(routing, out)
        bench_layer.agree(self.name, [out], "experts in order", [expected])
        return True


class BalanceBench(runner.Bench):
    flags, shared = FLAGS, _SHARED
    columns = (
        report.text("shape"),
        Column("tokens", "tokens"),
        Column("ranks", "ranks"),
        Column("exponent", "exponent", "{:g}"),
        Column("placement", lambda row: _placement(row), left=True),
        report.text("overflow"),
        Column("busiest", "busiest", "{:.3f}"),
        Column("capacity", "capacity"),
        Column("dropped", "dropped"),
        *report.WALL,
        report.SLOWEST,
        Column("redistribute us", "redistribute_us", "{:.0f}"),
        Column("a step", lambda row: row.get("share_us") or None, "{:.1f}"),
        Column("over uniform", "over_uniform", "{:.3f}"),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[BalanceCase]:
        platform = devices[0].platform
        shapes = bench_layer.shapes(_SHAPES.value, platform)
        tokens = _TOKENS.value or bench_layer.default_tokens(platform)
        works = bench_layer.works_of(shapes, ranks, tokens)
        if FLAGS.given(_COPIES) and not any(_EXPONENTS.value):
            raise Error(
                "--copies needs a number above 0 in --exponents: uniform routing (0) is measured "
                "without copies"
            )
        expected: dict[str, Any] = {}
        return [
            BalanceCase(
                work | {"exponent": exponent, "copies": copies}, shapes[work["shape"]], expected
            )
            for work in works
            for exponent in _EXPONENTS.value
            for copies in ([None, *_COPIES.value] if exponent else [None])
        ]

    def header(self) -> list[str]:
        return ["bfloat16, forward"]

    def name(self, row: Row) -> str:
        return "{shape}, exponent {exponent:g}, {0}".format(_placement(row), **row)

    def compare(self, rows: list[Row]) -> None:
        compare(rows, _EVERY.value)

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        """Draws wall times as bars, one group per exponent and one bar per placement."""

        def bar(row: Row) -> str:
            factor = row.get("capacity_factor")
            buffer = "" if factor is None else f", capacity factor {factor:g}"
            return f"{_placement(row)}, {row['overflow']}{buffer}"

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
    """Draws K distinct experts for each token, at random without replacement (Gumbel top-k).

    Expert e is drawn with a probability proportional to 1 / (1 + ranks[e]) ** exponent, where
    `ranks` [E] holds the popularity rank of each expert, 0 for the most popular one.

    Returns:
        [num_tokens, K] int32 expert ids, in the order in which they are drawn.
    """
    draws = np.random.default_rng(seed).gumbel(size=(num_tokens, num_experts))
    return np.argsort(exponent * np.log1p(ranks) - draws, axis=1)[:, :top_k].astype(np.int32)


def place(state: Any, load: Any, copies: int | None, mesh: Mesh) -> tuple[Any, Row]:
    """Computes a placement from the experts' loads, and moves the experts' weights to it.

    Args:
        state: the tuple (params, x, cotangent) from `layer.make_state`; its arrays have a leading
            axis of ranks.
        load: [1, E], how often each expert was chosen.
        copies: the number of extra slots per rank, for copies of popular experts; a slot holds one
            expert's weights. None: experts stay in the order of their ids.
        mesh: the one-axis mesh of the ranks.

    Returns:
        The tuple (params, x, placement) and a dict with the time (microseconds) and the bytes of
        moving the weights. If `copies` is None, the placement is None and the dict is empty.
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
        # The first two redistributions, one in each direction, include compilation.
        "redistribute_us": statistics.median(seconds[2:]) * 1e6,
        "redistributed_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(slots)),
    }


def _rows_needed(state: Any, mesh: Mesh, config: MoEConfig) -> int:
    """Returns the number of rows that the most loaded rank receives.

    `state` is the tuple (parameters, x, topk_idx, placement), with a leading axis of ranks.
    """

    def on_rank(state: Any) -> Any:
        params, x, chosen, placement = jax.tree.map(lambda leaf: leaf[0], state)
        slots = chosen
        if placement is not None:
            slots = moe.slots_of_choices(chosen, placement, (AXIS,))
        return slots[None]

    spec = PartitionSpec(AXIS)
    chosen = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    slots = np.asarray(jax.jit(chosen)(state))
    return rows_needed(slots, mesh.size, config.num_held, 1)


def _stacked(placement: Placement, mesh: Mesh) -> Placement:
    split = NamedSharding(mesh, PartitionSpec(AXIS))

    def stack(leaf: Any) -> jax.Array:
        return jax.device_put(jnp.broadcast_to(leaf, (mesh.size, *leaf.shape)), split)

    return jax.tree.map(stack, placement)


def compare(rows: list[Row], steps: int) -> None:
    """Adds the fields "share_us" and "over_uniform" to each row of results.

    "share_us" is the time of one redistribution of the experts divided by `steps`, the number of
    training steps between two redistributions. "over_uniform" is the sum of the layer's wall time
    and "share_us", divided by the wall time of the same layer with uniform routing.
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


def _placement(row: Row) -> str:
    copies = row["copies"]
    return (
        "in order" if copies is None else f"balance, {copies} more a rank" if copies else "balance"
    )
