"""`python -m jax_ep bench decode`: times a stack of MoE layers at the batch sizes of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import formats
from jax_ep.bench import layer as layer_bench
from jax_ep.bench import runner
from jax_ep.bench.layer import SHAPES, TOLERANCE
from jax_ep.bench.operations import random_rows, rank_seeds
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import AXIS, Loop, expert_mesh, on_ranks
from jax_ep.flags import Args, Flags, choice, integer, some
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.held_experts import quantize_experts
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.params import MoEParams


class Format(NamedTuple):
    """A number format of experts."""

    matmul_dtype: Any
    bytes_per_number: float  # of a weight, its share of scales included
    tolerance: float  # of `runner.agree`
    stored: formats.Format | None = None  # of the layer's matrices; None: bfloat16


FORMATS = {
    "bfloat16": Format(matmul_dtype=None, bytes_per_number=2.0, tolerance=TOLERANCE),
    # Each block of 128 x 128 weights has one float32 scale. The tolerance allows for two successive
    # matmuls with two operands each. Rounding to float8 changes a number by up to 2^-4 of itself.
    "float8_e4m3fn": Format(
        matmul_dtype=jnp.float8_e4m3fn, bytes_per_number=1 + 4 / 128**2, tolerance=4 * 2**-4
    ),
    # Each 32 weights have a scale of one byte. Published models store matrices transposed. Rounding
    # to MXFP4 changes a random number by 1/8 on average, and the tolerance allows for two matmuls.
    "mxfp4": Format(
        matmul_dtype=None,
        bytes_per_number=0.5 + 1 / 32,
        tolerance=2 / 8,
        stored=formats.Transposed.of(formats.MXFP4),
    ),
}


def add_flags(flags: Flags) -> None:
    flags.add("shapes", "qwen3-moe", "The models whose layers run.", some(choice(SHAPES)))
    batches = "Tokens of all ranks in a step. Default: 1,8,16,64,128; on CPUs 1,8."
    flags.add("batches", None, batches, some(integer))
    flags.add("layers", None, "Layers in a step. Default: 1,8; on CPUs 1,2.", some(integer))
    flags.add("formats", ",".join(FORMATS), "The experts' formats.", some(choice(FORMATS)))
    runner.add_flags(flags, "outputs of equal layers and batches", repeats=5, least=2)


def run(args: Args) -> int:
    return runner.run(DecodeBench(args))


# The parameters and the quantized experts, if they are kept, of each layer.
Stack = list[tuple[MoEParams, QuantizedExperts | None]]


class DecodeBench(runner.Bench):
    """A case is one stack of MoE layers at every batch size."""

    spaced = False
    columns = (
        Column("tokens/s", "tokens_per_s", "{:.0f}"),
        Column("chosen experts", "experts_hit", "{:.1f}"),
        Column("MB to read", "bytes", "{:.1f}", 1e6),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[list[Row]]:
        args = self.args
        on_cpus = devices[0].platform == "cpu"
        self.shapes = layer_bench.chosen_shapes(args, ranks)
        self.measure_bandwidths(devices[:1])
        batches = args.batches or ((1, 8) if on_cpus else (1, 8, 16, 64, 128))
        depths = args.layers or ((1, 2) if on_cpus else (1, 8))
        cases = []
        for name, layers, num_ranks, format in product(self.shapes, depths, ranks, args.formats):
            work = {"shape": name, "layers": layers, "ranks": num_ranks, "format": format}
            cases.append([work | {"implementation": "jax_ep", "batch": batch} for batch in batches])
        return cases

    def config(self, row: Row) -> MoEConfig:
        return self.shapes[row["shape"]].config(matmul_dtype=FORMATS[row["format"]].matmul_dtype)

    def prepare(self, row: Row) -> Stack:
        """Makes the random parameters of the layers, with a leading axis of ranks."""
        shape, mesh = self.shapes[row["shape"]], expert_mesh(row["ranks"])
        config, stored = self.config(row), FORMATS[row["format"]].stored

        def layer(own_seed: jax.Array, gate_seed: jax.Array) -> Any:
            params = layer_bench.random_params(shape, mesh.size, own_seed, gate_seed)
            if stored is not None:
                quantized_matrices: dict[str, Any] = {
                    name: formats.quantize(getattr(params, name), stored)
                    for name in QuantizedExperts._fields
                }
                params = params._replace(**quantized_matrices)
            quantized = None if config.matmul_dtype is None else quantize_experts(params, config)
            return params, quantized

        make = on_ranks(layer, mesh)
        seeds = rank_seeds(mesh.size)
        # Each rank has a seed of its own for its experts, and all have the same one for the gate.
        return [
            make(seeds + 10_000 * i, np.full_like(seeds, 10_000 * i + 9_999))
            for i in range(row["layers"])
        ]

    def build(self, row: Row, shared: Stack) -> Loop:
        config, mesh = self.config(row), expert_mesh(row["ranks"])
        tokens = -(-row["batch"] // mesh.size)
        size = tokens, self.shapes[row["shape"]].hidden
        # `random_params` draws from the seeds `seed` + 100, 200 and 300.
        make = on_ranks(lambda seed: random_rows(seed + 400, size, jnp.bfloat16), mesh)
        state = shared, make(rank_seeds(mesh.size))

        def step(state: tuple[Stack, jax.Array]) -> jax.Array:
            return step_of_layers(state, config, row["batch"])[0]

        calls = runner.iterations(self.args, tokens, on_cpus=2, many=20, few=50)
        return Loop(step, state, mesh, calls)

    def compiled(self, row: Row, loop: Loop) -> Row:
        """Counts a layer's chosen experts, mean over layers, and the bytes that a step must read.

        Bytes are of the rank that reads the most in a layer; `floor_us` is the time to read them.
        """
        shape = self.shapes[row["shape"]]
        config, mesh = self.config(row), loop.mesh
        count = on_ranks(lambda state: step_of_layers(state, config, row["batch"])[1], mesh)
        # [layers, E], of all ranks' tokens: equal on all ranks.
        counts = np.asarray(count(loop.state))[0]
        hits = (counts.reshape(len(counts), mesh.size, -1) > 0).sum(axis=2)  # [layers, N]
        matrix = shape.hidden * shape.mlp_dim
        # An expert has three matrices: wi_0, wi_1 and wo.
        read = hits.max(axis=1).sum() * 3 * matrix * FORMATS[row["format"]].bytes_per_number
        # The router of each layer reads its matrix, the gate, [H, E] float32.
        read += row["layers"] * shape.hidden * shape.num_experts * 4
        found = {"experts_hit": float(hits.sum(axis=1).mean()), "bytes": float(read)}
        if (bandwidth := self.bandwidths.memory) is not None:
            found["floor_us"] = read / bandwidth * 1e6
        return found | {"iterations": loop.iterations}

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        # Rounding to float8 in one layer may change which experts tokens choose in the next layers.
        # So a stack of several layers is compared only with stacks of the same number format. Other
        # rounding may swap two experts whose scores are nearly equal, in few rows.
        keys = ["shape", "layers", "ranks", "batch"]
        if row["layers"] > 1:
            keys.append("format")
        work = tuple(row[key] for key in keys)
        outputs = loop.outputs()
        tolerance = FORMATS[row["format"]].tolerance
        expected, other_tolerance = self.first.setdefault(work, (outputs, tolerance))
        runner.agree(outputs, expected, max(other_tolerance, tolerance), exceptions=1e-4)
        return True

    def results(self, row: Row) -> Row:
        return {"tokens_per_s": row["batch"] / row["wall"]["median_us"] * 1e6}

    def header(self) -> list[str]:
        return layer_bench.sizes_in_words(self.shapes)

    def group(self, row: Row) -> tuple[str, str]:
        return "{shape}, {layers} layers, {ranks} ranks".format(**row), f"batch {row['batch']}"

    def program(self, row: Row) -> str:
        return row["format"]


def step_of_layers(
    state: tuple[Stack, jax.Array], config: MoEConfig, batch: int
) -> tuple[jax.Array, jax.Array]:
    """Runs all MoE layers on a rank's tokens x [T, H]; tokens past the first `batch` are padding.

    Returns the residual stream [T, H], and how often the batch chose each expert, [layers, E].
    """
    stack, x = state
    tokens = x.shape[0]
    mask = None
    if batch != tokens * lax.axis_size(AXIS):
        mask = lax.axis_index(AXIS) * tokens + jnp.arange(tokens) < batch
    counts = []
    for params, quantized in stack:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        normalized = (wide * scale).astype(x.dtype)
        out, metrics = moe_layer(params, normalized, config, mask, quantized_experts=quantized)
        x = x + out
        counts.append(metrics.expert_counts)
    return x, jnp.stack(counts)
