"""`python -m jax_ep bench decode`: times a stack of MoE layers at the batch sizes of decoding.

A program is a stack of MoE layers in one compiled loop; each iteration stands for one decoding
step. Each layer computes x + moe(normalize(x)), as in a transformer. If the stack has as many
layers as a model, a step is the whole model except for attention, embeddings and logits. Layers are
either unrolled, each with its own arrays, or run by `lax.scan` over stacked arrays. Experts compute
in bfloat16, in float8 with weights that are quantized before the loop, or in bfloat16 with weights
that are stored as MXFP4.

The column "floor us" is a lower bound: the bytes that any implementation must read on a rank,
divided by the bandwidth of a plain copy measured in the same run. These bytes are, for each layer,
the router's gate and the matrices of the experts that the batch chose, on the rank with the most
such experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jax_ep import formats
from jax_ep.bench import floor, report, runner
from jax_ep.bench.baselines import AXIS, random_rows, rank_seeds
from jax_ep.bench.flags import BenchFlags, Iterations
from jax_ep.bench.layer import SHAPES, TOLERANCE, Shape, agree, random_params
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop
from jax_ep.flags import check_experts
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.layer import moe_layer, quantize_experts
from jax_ep.moe.params import MoEParams


class Format(NamedTuple):
    """A number format of the experts' matmuls.

    Attributes:
      matmul_dtype: the `matmul_dtype` of `jax_ep.MoEConfig`; None multiplies in bfloat16.
      bytes_per_number: the bytes of one weight in memory, with its share of the scales.
      tolerance: the largest relative error of a row of the output; see `layer.agree`.
      stored: the format in which the experts' matrices are stored; None: bfloat16.
    """

    matmul_dtype: Any
    bytes_per_number: float
    tolerance: float
    stored: formats.Format | None = None


FORMATS = {
    "bfloat16": Format(None, 2.0, TOLERANCE),
    # Each block of 128 x 128 weights has one float32 scale. The tolerance allows for two successive
    # matmuls with two operands each. Rounding to float8 changes a number by up to 2^-4 of itself.
    "float8_e4m3fn": Format(jnp.float8_e4m3fn, 1 + 4 / 128**2, 4 * 2**-4),
    # Each 32 weights have a scale of one byte. Published models store matrices transposed. Rounding
    # to MXFP4 changes a random number by 1/8 on average, and the tolerance is that of two matmuls.
    "mxfp4": Format(None, 0.5 + 1 / 32, 2 / 8, formats.Transposed.of(formats.MXFP4)),
}
IMPLEMENTATIONS = ("unrolled", "scanned")
# The shapes that are measured on CPUs. Float8 experts need sizes `hidden` and `mlp_dim` that are
# multiples of 128.
SMALL_SHAPES = {
    name: shape._replace(hidden=128, mlp_dim=128, num_experts=16, top_k=min(shape.top_k, 4))
    for name, shape in SHAPES.items()
}

FLAGS = BenchFlags()
_SHAPES = FLAGS.choices(
    "shapes",
    ("qwen3-moe",),
    SHAPES,
    "The models whose MoE layers are measured; on CPUs, small layers of the same kind.",
)
_BATCHES = FLAGS.integers(
    "batches",
    None,
    "The numbers of tokens in a step, over all ranks. Default: 1,8,16,64,128 on GPUs, 1,8 on CPUs.",
)
_LAYERS = FLAGS.integers(
    "layers",
    None,
    "The numbers of layers in a step; 48 are those of Qwen3-30B-A3B. Default: 1,8 on GPUs, 1,2 on "
    "CPUs.",
)
_FORMATS = FLAGS.choices("formats", FORMATS, FORMATS, "The formats that experts are multiplied in.")
_IMPLEMENTATIONS = FLAGS.implementations(IMPLEMENTATIONS, "the stack of layers", "all")
_TIMING = FLAGS.timing(Iterations(2, 20, 50), 5, least_iterations=2)
_SEED = FLAGS.seed("parameters and tokens")
_SHARED = FLAGS.share(
    plot="the times of a step",
    timing=_TIMING,
    check=FLAGS.check("the outputs of all programs of the same layers and batch with each other"),
    seconds=600.0,
)


def run() -> int:
    return runner.run(DecodeBench())


class Stack(NamedTuple):
    """The parameters of a stack of MoE layers.

    Attributes:
      params: a list with one `MoEParams` per layer, or, for scanned layers, one `MoEParams` whose
        arrays have an axis of layers.
      quantized: the layers' `QuantizedExperts` in the same form as `params`, or None if experts
        compute in bfloat16.
    """

    params: list[MoEParams] | MoEParams
    quantized: Any


class DecodeCase(runner.Case):
    """Measures one stack of MoE layers at every batch size."""

    spaced = False

    def __init__(self, bench: DecodeBench, shape: Shape, facts: Row, batches: Sequence[int]):
        self.bench, self.shape = bench, shape
        self.config = MoEConfig(
            num_experts=shape.num_experts,
            num_experts_per_token=shape.top_k,
            score=shape.score,
            expert_axis=AXIS,
            matmul_dtype=FORMATS[facts["format"]].matmul_dtype,
        )
        super().__init__(
            "{shape}, {layers} layers {implementation}, {format}, {ranks} ranks".format(**facts),
            [facts | {"batch": batch} for batch in batches],
        )

    def prepare(self) -> tuple[Mesh, Stack]:
        row = self.rows[0]
        mesh = Mesh(np.asarray(jax.devices()[: row["ranks"]]), (AXIS,))
        scanned = row["implementation"] == "scanned"
        stored = FORMATS[row["format"]].stored
        stack = make_stack(
            self.shape, self.config, row["layers"], scanned, mesh, _SEED.value, stored
        )
        return mesh, stack

    def build(self, row: Row, shared: tuple[Mesh, Stack]) -> Loop:
        mesh, stack = shared
        tokens = -(-row["batch"] // mesh.size)
        state = stack, make_tokens(self.shape, tokens, mesh, _SEED.value)

        def step(state: tuple[Stack, jax.Array]) -> jax.Array:
            return step_of_layers(state, self.config, row["batch"])[0]

        return Loop(None, step, state, mesh, _TIMING.iterations_of(tokens))

    def compiled(self, row: Row, loop: Loop) -> Row:
        """Returns fields with the bytes that a step must read, and the lower bound of its time.

        "bytes" are the bytes of weights that the rank with the most chosen experts must read.
        "floor_us" are the microseconds to read them at the bandwidth of a plain copy. "experts_hit"
        is the number of experts of a layer that the batch chose, mean over layers.
        """
        hits = experts_hit(loop.state, loop.mesh, self.config, row["batch"])
        matrix = self.shape.hidden * self.shape.mlp_dim
        read = hits.max(axis=1).sum() * 3 * matrix * FORMATS[row["format"]].bytes_per_number
        # The router of each layer reads its matrix, the gate, [H, E] float32.
        read += row["layers"] * self.shape.hidden * self.shape.num_experts * 4
        found = {"experts_hit": float(hits.sum(axis=1).mean()), "bytes": float(read)}
        if (bandwidth := self.bench.bandwidths.memory) is not None:
            found["floor_us"] = read / bandwidth * 1e6
        return found | {"iterations": loop.iterations}

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        # Rounding to float8 in one layer may change which experts tokens choose in the next layers.
        # So a stack of several layers is compared only with stacks of the same number format.
        alike = ["shape", "layers", "ranks", "batch"] + ["format"] * (row["layers"] > 1)
        work = tuple(row[key] for key in alike)
        name, outputs = self.bench.name(row), loop.outputs()
        own = name, outputs, FORMATS[row["format"]].tolerance
        other, expected, tolerance = self.bench.expected.setdefault(work, own)
        agree(name, (outputs,), other, (expected,), max(tolerance, own[2]))
        return True

    def results(self, row: Row) -> Row:
        """Returns "tokens_per_s", and "of_floor": a step's time divided by its lower bound."""
        us = (row["device"] or {}).get("slowest_us") or row["wall"]["median_us"]
        found = {"tokens_per_s": row["batch"] / row["wall"]["median_us"] * 1e6}
        return found | ({"of_floor": us / row["floor_us"]} if "floor_us" in row else {})


class DecodeBench(runner.Bench):
    flags, shared = FLAGS, _SHARED
    columns = (
        report.text("shape"),
        Column("layers", "layers"),
        Column("ranks", "ranks"),
        report.text("format"),
        report.text("layers are", "implementation"),
        Column("batch", "batch"),
        report.CHECKED,
        *report.WALL,
        report.SLOWEST,
        Column("tokens/s", "tokens_per_s", "{:.0f}"),
        Column("experts", "experts_hit", "{:.1f}"),
        Column("MB", lambda row: row["bytes"] / 1e6 if "bytes" in row else None, "{:.1f}"),
        Column("floor us", "floor_us", "{:.1f}"),
        Column("of floor", "of_floor", "{:.2f}x"),
    )

    def __init__(self) -> None:
        super().__init__()
        # The name, output [N, T, H] and tolerance of the first program of each kind that was
        # checked. All further programs of the kind must give the same output. The key is the kind:
        # (shape, layers, ranks, batch), and the number format if there are several layers.
        self.expected: dict[Any, tuple[str, Any, float]] = {}

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[DecodeCase]:
        on_cpus = devices[0].platform == "cpu"
        table = SMALL_SHAPES if on_cpus else SHAPES
        self.shapes = {name: table[name] for name in _SHAPES.value}
        for name, shape in self.shapes.items():
            for num_ranks in ranks:
                check_experts(shape.num_experts, num_ranks, shape.top_k, name)
        self.bandwidths = floor.measure(devices[:1])
        self.facts["bandwidths"] = self.bandwidths._asdict()
        batches = _BATCHES.value or ((1, 8) if on_cpus else (1, 8, 16, 64, 128))
        implementations = _IMPLEMENTATIONS.value
        return [
            DecodeCase(
                self,
                shape,
                {
                    "shape": name,
                    "layers": layers,
                    "ranks": num_ranks,
                    "format": format,
                    "implementation": implementation,
                },
                batches,
            )
            for name, shape in self.shapes.items()
            for layers in _LAYERS.value or ((1, 2) if on_cpus else (1, 8))
            for num_ranks in ranks
            for format in _FORMATS.value
            for implementation in (IMPLEMENTATIONS if implementations is None else implementations)
        ]

    def header(self) -> list[str]:
        found = [
            f"{name}: H={shape.hidden} F={shape.mlp_dim} E={shape.num_experts} K={shape.top_k}"
            for name, shape in self.shapes.items()
        ]
        if self.bandwidths.memory is not None:
            found.append(f"a copy reads and writes {self.bandwidths.memory / 1e9:.0f} GB/s")
        return found

    def name(self, row: Row) -> str:
        return (
            "{shape}, {layers} layers {implementation}, {format}, {ranks} ranks, batch {batch}"
        ).format(**row)

    def table(self, rows: Sequence[Row]) -> list[str]:
        legend = (
            "experts: those of a layer that the batch chose, mean over layers; MB: bytes that a "
            "rank must read; floor: their time at a copy's bandwidth"
        )
        return [*report.table(self.columns, rows), "", legend]

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        panels: report.Panels = {}
        for row in rows:
            panel = panels.setdefault("{shape}, {layers} layers, {ranks} ranks".format(**row), {})
            lines = {"{format}, {implementation}": (row.get("wall") or {}).get("median_us")}
            lines["{format}, its bytes at a copy's bandwidth"] = row.get("floor_us")
            for line, us in lines.items():
                points = panel.setdefault(line.format(**row), [])
                if us is not None and (row["batch"], us) not in points:
                    points.append((row["batch"], us))
        drawn = {
            name: {line: points for line, points in found.items() if points}
            for name, found in panels.items()
        }
        report.lines(
            drawn,
            path,
            title="MoE layers of one decoding step\n" + machine,
            x_label="tokens of all ranks",
            y_label="wall time of a step [us]",
        )


def make_stack(
    shape: Shape,
    config: MoEConfig,
    layers: int,
    scanned: bool,
    mesh: Mesh,
    seed: int,
    stored: formats.Format | None = None,
) -> Stack:
    """Makes the random parameters of `layers` MoE layers on all ranks.

    Every array has a leading axis of N ranks. If `scanned`, the layers are stacked along a second
    axis; else the result has lists with an entry per layer. Both forms hold the same values.
    """

    def layer(seeds: tuple[jax.Array, jax.Array]) -> tuple[MoEParams, QuantizedExperts | None]:
        params = random_params(shape, mesh.size, *seeds)
        if stored is not None:
            quantized_matrices: dict[str, Any] = {
                name: formats.quantize(getattr(params, name), stored)
                for name in QuantizedExperts._fields
            }
            params = params._replace(**quantized_matrices)
        quantized = None if config.matmul_dtype is None else quantize_experts(params, config)
        return params, quantized

    def on_rank(own: jax.Array, gates: jax.Array) -> Any:
        make = functools.partial(lax.map, layer) if scanned else layer
        own, gates = (a[0] if scanned else a[0, 0] for a in (own, gates))
        return jax.tree.map(lambda leaf: leaf[None], make((own, gates)))

    spec = PartitionSpec(AXIS)
    make = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec))
    own = rank_seeds(mesh.size, seed)[:, None] + 10_000 * np.arange(layers, dtype=np.int32)
    gates = np.broadcast_to(own[:1] + 9_999, own.shape)
    if scanned:
        return Stack(*make(own, gates))
    made = [make(own[:, i : i + 1], gates[:, i : i + 1]) for i in range(layers)]
    params, quantized = (list(part) for part in zip(*made, strict=True))
    return Stack(params, None if config.matmul_dtype is None else quantized)


def make_tokens(shape: Shape, num_tokens: int, mesh: Mesh, seed: int) -> jax.Array:
    """Makes random tokens for all ranks, T = `num_tokens` on each: [N, T, H] bfloat16."""

    def on_rank(seed: jax.Array) -> jax.Array:
        return random_rows(seed + 400, (1, num_tokens, shape.hidden), jnp.bfloat16)

    spec = PartitionSpec(AXIS)
    make = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(make)(rank_seeds(mesh.size, seed))


def step_of_layers(
    state: tuple[Stack, jax.Array], config: MoEConfig, batch: int
) -> tuple[jax.Array, jax.Array]:
    """Runs one decoding step on a rank: all MoE layers, one after the other.

    `state` is the rank's part of the `Stack`, and its tokens x [T, H]. Only the first `batch` of
    the N * T tokens of all ranks are routed to experts. The others are padding.

    Returns:
      The last layer's residual stream x [T, H], and the number of times that the batch chose each
      expert, [layers, E] int32.
    """
    stack, x = state
    tokens, mask = x.shape[0], None
    if batch != tokens * lax.axis_size(AXIS):
        mask = lax.axis_index(AXIS) * tokens + jnp.arange(tokens) < batch

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        normalized = (wide * scale).astype(x.dtype)
        out, metrics = moe_layer(one[0], normalized, config, mask, quantized_experts=one[1])
        return x + out, metrics.expert_counts

    if not isinstance(stack.params, list):
        return lax.scan(layer, x, stack)
    counts = []
    quantized = stack.quantized or [None] * len(stack.params)
    for one in zip(stack.params, quantized, strict=True):
        x, count = layer(x, one)
        counts.append(count)
    return x, jnp.stack(counts)


def experts_hit(
    state: tuple[Stack, jax.Array], mesh: Mesh, config: MoEConfig, batch: int
) -> np.ndarray:
    """Runs a decoding step, and counts the experts that the batch chose in each layer, by rank.

    `state` is the `Stack` and the tokens of all ranks. Returns [layers, N] integers: how many of
    the experts on each of the N ranks were chosen at least once.
    """

    def on_rank(state: Any) -> jax.Array:
        state = jax.tree.map(lambda leaf: leaf[0], state)
        return step_of_layers(state, config, batch)[1][None]

    spec = PartitionSpec(AXIS)
    count = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    counts = np.asarray(jax.jit(count)(state))[0]
    return (counts.reshape(len(counts), mesh.size, -1) > 0).sum(axis=2)
