"""`python -m jax_ep bench layer`: times the whole MoE layer, compared with XLA's exchange."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jax_ep.bench import runner
from jax_ep.bench.exchange import add_capacity_factor
from jax_ep.bench.operations import random_rows, rank_seeds, rows_needed
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import AXIS, Loop, expert_mesh, on_ranks
from jax_ep.flags import Args, Error, Flags, check_experts, choice, integer, some
from jax_ep.moe import routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.held_experts import quantize_experts
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.params import MoEParams
from jax_ep.moe.routing import Score

# This library's layer with XLA's collectives as the exchange.
BASELINES = ("xla",)
DIRECTIONS = ("forward", "forward_backward")
MATMUL_DTYPES = ("none", "float8_e4m3fn")
# Regular expressions for the names of kernels in a profile. EXCHANGE matches this library's
# exchange and XLA's collectives; MATMUL matches this library's grouped matmuls.
EXCHANGE = re.compile(r"^ep_|nccl|barrier|ragged_?all_?to_?all|all_?reduce", re.IGNORECASE)
MATMUL = re.compile(r"^grouped_matmul")
# The default `tolerance` of `agree`, which leaves room for some roundings to bfloat16.
TOLERANCE = 4 * float(jnp.finfo(jnp.bfloat16).eps)
# The tolerance of `agree` for experts that multiply in float8. Each of an expert's three matmuls
# rounds its two operands, which changes a number by up to 2^-4 of itself.
_FLOAT8_TOLERANCE = 6 * 2**-4


class Shape(NamedTuple):
    hidden: int  # H, the width of a token
    mlp_dim: int  # F, the hidden width of an expert
    num_experts: int
    top_k: int  # K, the number of experts that a token chooses
    score: Score = "softmax"

    def config(self, **options: Any) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_experts,
            num_experts_per_token=self.top_k,
            score=self.score,
            expert_axis=AXIS,
            **options,
        )


SHAPES = {
    "deepseek-v3": Shape(7168, 2048, 256, 8, "sigmoid"),
    "qwen3-moe": Shape(2048, 768, 128, 8),
    "mixtral": Shape(4096, 14336, 8, 2),
}


def chosen_shapes(args: Args, ranks: Sequence[int]) -> dict[str, Shape]:
    """Returns the shapes of --shapes by name; small ones, under names that say so, on CPUs."""
    found = {}
    for name in args.shapes:
        shape = SHAPES[name]
        if jax.default_backend() == "cpu":
            experts, top_k = min(shape.num_experts, 16), min(shape.top_k, 4)
            shape = shape._replace(hidden=128, mlp_dim=128, num_experts=experts, top_k=top_k)
            name = f"small {name}"
        if (num_experts := getattr(args, "num_experts", None)) is not None:
            shape = shape._replace(num_experts=num_experts)
        found[name] = shape
        for num_ranks in ranks:
            check_experts(args, shape.num_experts, num_ranks, shape.top_k)
    return found


def sizes_in_words(shapes: Mapping[str, Shape]) -> list[str]:
    return [
        f"{name}: H={shape.hidden} F={shape.mlp_dim} E={shape.num_experts} K={shape.top_k}"
        for name, shape in shapes.items()
    ]


def add_flags(flags: Flags) -> None:
    flags.add("shapes", ",".join(SHAPES), "The models whose layers run.", some(choice(SHAPES)))
    flags.add("directions", ",".join(DIRECTIONS), "The passes to time.", some(choice(DIRECTIONS)))
    flags.add("tokens", None, "T, tokens per rank. Default: 4096; on CPUs 64.", some(integer))
    flags.add("num_experts", None, "E, experts of all ranks. Default: that of a shape.", integer)
    others = some(choice(BASELINES), none=True)
    flags.add("baselines", "xla", "The layer with XLA's exchange, or empty.", others)
    add_capacity_factor(flags)
    dtypes = "The dtypes that jax_ep sends and its experts multiply; none: bfloat16."
    flags.add("matmul_dtype", "none", dtypes, some(choice(MATMUL_DTYPES)))
    when = "When float8 matrices are quantized: in each call, or once before the loop."
    flags.add("quantize", "each_call", when, choice(("each_call", "once")))
    chunks = "The numbers of chunks of a rank's tokens; above 1 needs --capacity_factor=0."
    flags.add("token_chunks", "1", chunks, some(integer))
    remat = "What the backward pass of jax_ep computes again; full: the whole layer."
    flags.add("remat", "none", remat, some(choice(("none", "full"))))
    runner.add_flags(flags, "the outputs and gradients of all layers", repeats=5, least=2)


def run(args: Args) -> int:
    return runner.run(LayerBench(args))


class LayerBench(runner.Bench):
    """A case is all layers of one model shape and number of tokens, forward and with gradients."""

    spaced = False
    columns = (
        Column("matmul us", "matmul_us", "{:.1f}"),
        Column("exchange us", "exchange_us", "{:.1f}"),
        Column("if hidden us", "if_hidden_us", "{:.1f}"),
        Column("tokens/s", "tokens_per_s", "{:.0f}"),
        Column("TFLOP/s/rank", "tflops_per_rank", "{:.3g}"),
        Column("peak MiB", "peak_bytes", "{:.1f}", 2**20),
        Column("temp MiB", "temp_bytes", "{:.1f}", 2**20),
        Column("vs xla", "speedup_over_xla", "{:.2f}x"),
        Column("vs plain", "speedup_of_float8", "{:.2f}x"),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[list[Row]]:
        args = self.args
        if args.quantize == "once" and set(args.matmul_dtype) == {"none"}:
            raise Error("--quantize needs --matmul_dtype=float8_e4m3fn")
        if max(args.token_chunks) > 1 and args.capacity_factor:
            raise Error(
                "--token_chunks above 1 needs --capacity_factor=0: with a capacity factor, each "
                "chunk has a capacity of its own, so rows could be dropped"
            )
        self.shapes = chosen_shapes(args, ranks)
        return [
            self._rows(name, shape, num_ranks, num_tokens)
            for num_ranks in ranks
            for name, shape in self.shapes.items()
            for num_tokens in args.tokens or [64 if devices[0].platform == "cpu" else 4096]
        ]

    def prepare(self, row: Row) -> tuple[Any, MoEConfig, Any]:
        """Makes the operands, the configuration and, with --quantize=once, the float8 experts."""
        shape, mesh = self.shapes[row["shape"]], expert_mesh(row["ranks"])
        state = make_state(shape, row["tokens"], mesh)
        config = shape.config()

        def route(params, x):
            logits = routing.router_logits(x, params.gate)
            return routing.top_k_routing(logits, shape.top_k, score=shape.score).topk_idx

        topk_idx = np.asarray(on_ranks(route, mesh)(*state[:2]))
        # `average` and `needed` are the mean and the largest number of rows that a rank receives.
        # `most` is the largest possible: min(K, the rank's experts) rows for every token.
        average, needed = topk_idx.size // mesh.size, rows_needed(topk_idx, shape.num_experts)
        most = topk_idx.size // shape.top_k * min(shape.top_k, shape.num_experts // mesh.size)
        # `compiled` adds these numbers to the results. "capacity" is of receive buffers.
        self.load = {"rows": average, "rows_needed": needed, "capacity": most}
        if self.args.capacity_factor:
            # As many rows as asked for, but enough to drop none, in whole blocks of 128.
            rows = max(math.ceil(self.args.capacity_factor * average), needed)
            rows = -(-rows // 128) * 128
            self.load["capacity"] = min(rows, most)
            config = dataclasses.replace(config, capacity_factor=rows / average)
        quantized = None
        if self.args.quantize == "once":
            float8 = dataclasses.replace(config, matmul_dtype=jnp.float8_e4m3fn)
            quantized = on_ranks(lambda params: quantize_experts(params, float8), mesh)(state[0])
        return state, config, quantized

    def build(self, row: Row, shared: tuple[Any, MoEConfig, Any]) -> Loop:
        state, config, quantized = shared
        iterations = runner.iterations(self.args, row["tokens"], on_cpus=5, many=20, few=100)
        matmul_dtype = None if row["matmul_dtype"] == "none" else jnp.dtype(row["matmul_dtype"])
        config = dataclasses.replace(
            config,
            wire_dtype=matmul_dtype,
            matmul_dtype=matmul_dtype,
            token_chunks=row["token_chunks"],
        )
        step = make_step(row["implementation"], row["direction"], config, row["remat"])
        if row.get("quantize") == "once":
            state = (*state, quantized)
        loop = Loop(step, state, expert_mesh(row["ranks"]), iterations)
        _ = loop.call  # compiled here, in parallel to other programs
        return loop

    def compiled(self, row: Row, loop: Loop) -> Row:
        # A layer in chunks has no capacity factor: its rows are in proportion to a chunk's tokens.
        tokens_at_once = -(-row["tokens"] // row["token_chunks"])
        capacity = self.load["capacity"] * tokens_at_once // row["tokens"]
        sizes = self.load | {"capacity": capacity, "iterations": loop.iterations}
        return sizes | runner.held_bytes(loop.call)

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        outputs = loop.outputs()
        work = tuple(row[key] for key in ("shape", "tokens", "ranks", "direction"))
        other, expected = self.first.setdefault(work, (row, outputs))
        # A row has the field "quantize" if its layer sends and multiplies float8.
        tolerance = _FLOAT8_TOLERANCE if "quantize" in row or "quantize" in other else TOLERANCE
        # Rounding may swap two experts whose scores are nearly equal.
        runner.agree(outputs, expected, tolerance, exceptions=1e-4)
        return True

    def results(self, row: Row) -> Row:
        seconds = row["wall"]["median_us"] * 1e-6
        passes = 1 if row["direction"] == "forward" else 3
        # Each of an expert's three matmuls takes 2 * H * F operations for a token, and the backward
        # pass twice as many.
        flops = passes * row["tokens"] * row["top_k"] * 6 * row["hidden"] * row["mlp_dim"]
        return {
            "tokens_per_s": row["ranks"] * row["tokens"] / seconds,
            "tflops_per_rank": flops / seconds / 1e12,
            **({} if row["device"] is None else parts_of(row["device"])),
        }

    def header(self) -> list[str]:
        return ["bfloat16", *sizes_in_words(self.shapes)]

    def group(self, row: Row) -> tuple[str, str]:
        return "{shape}, {direction}".format(**row), "{tokens} tokens, {ranks} ranks".format(**row)

    def program(self, row: Row) -> str:
        parts = [row["implementation"]]
        if row["matmul_dtype"] != "none":
            parts.append(row["matmul_dtype"])
            if row["quantize"] == "once":
                parts.append("quantized once")
        if row["token_chunks"] > 1:
            parts.append(f"{row['token_chunks']} chunks")
        if row["remat"] != "none":
            parts.append("remat")
        return ", ".join(parts)

    def compare(self, rows: list[Row]) -> None:
        keys = "shape", "tokens", "ranks", "direction"
        runner.speedups(rows, "speedup_over_xla", keys, implementation="xla")
        alike = (*keys, "implementation", "token_chunks", "remat")
        runner.speedups(rows, "speedup_of_float8", alike, matmul_dtype="none")

    def _rows(self, name: str, shape: Shape, num_ranks: int, num_tokens: int) -> list[Row]:
        args = self.args
        work = {"shape": name, "ranks": num_ranks, "tokens": num_tokens, **shape._asdict()}
        fields = "implementation", "matmul_dtype", "token_chunks", "remat"
        rows = []
        for direction in args.directions:
            remats = ["none"] if direction == "forward" else args.remat
            programs = [*product(["jax_ep"], args.matmul_dtype, args.token_chunks, remats)]
            programs += [(baseline, "none", 1, "none") for baseline in args.baselines]
            for program in programs:
                row = work | {"direction": direction} | dict(zip(fields, program, strict=True))
                if row["matmul_dtype"] != "none":
                    row["quantize"] = args.quantize
                rows.append(row)
        return rows


def parts_of(device: Mapping[str, Any]) -> dict[str, float | None]:
    """Adds up the kernels' times of matmuls and of the exchange, in microseconds per call.

    `device` has the fields of a `DeviceTime`. "if_hidden_us" is what the call would take if the
    exchange and the matmuls, which run one after the other, ran at the same time.
    """
    by_kernel = device["by_kernel_us"]
    exchange = sum(us for name, us in by_kernel.items() if EXCHANGE.search(name))
    matmul = sum(us for name, us in by_kernel.items() if MATMUL.search(name))
    return {
        # XLA may multiply in kernels that `MATMUL` does not find.
        "matmul_us": matmul or None,
        "exchange_us": exchange,
        "if_hidden_us": device["slowest_us"] - min(exchange, matmul) if matmul else None,
    }


def make_state(shape: Shape, num_tokens: int, mesh: Mesh) -> Any:
    """Makes parameters, and tokens x and cotangents [T, H], with a leading axis of ranks."""

    def on_rank(own_seed, gate_seed):
        params = random_params(shape, mesh.size, own_seed, gate_seed)
        # `random_params` draws from the seeds `own_seed` + 100, 200 and 300.
        size = (num_tokens, shape.hidden)
        x = random_rows(own_seed + 400, size, jnp.bfloat16)
        g = random_rows(own_seed + 500, size, jnp.bfloat16)
        return params, x, g

    seeds = rank_seeds(mesh.size)
    return on_ranks(on_rank, mesh)(seeds, np.full_like(seeds, 999))


def random_params(
    shape: Shape, num_ranks: int, own_seed: jax.Array, gate_seed: jax.Array
) -> MoEParams:
    """Makes the parameters of one of N ranks; all ranks pass the same `gate_seed`."""
    num_local = shape.num_experts // num_ranks
    hidden, mlp_dim = shape.hidden, shape.mlp_dim

    def rows(stream, *sizes):
        return random_rows(own_seed + 100 * stream, sizes, jnp.bfloat16)

    # Tokens x have variance 1 / 3; these factors give logits and x @ wi_0 a variance of about 1.
    # The gate's values are exact in bfloat16, so layers choose the same experts even if one
    # computes the router's matmul in float32 and another in bfloat16.
    gate = random_rows(gate_seed, (hidden, shape.num_experts), jnp.bfloat16)
    return MoEParams(
        gate=gate.astype(jnp.float32) * 2.0 ** -round(math.log2(hidden / 8) / 2),
        wi_0=rows(1, num_local, hidden, mlp_dim) * math.sqrt(9 / hidden),
        wi_1=rows(2, num_local, hidden, mlp_dim) * math.sqrt(9 / hidden),
        wo=rows(3, num_local, mlp_dim, hidden) * math.sqrt(9 / mlp_dim),
    )


def make_step(implementation: str, direction: str, config: MoEConfig, remat: str) -> Any:
    """Makes the function that a `Loop` times, of params, x, cotangent and quantized experts.

    It returns "out" and, unless `direction` is "forward", all gradients. With the `remat` "full",
    the backward pass computes the layer's forward pass again.
    """
    config = dataclasses.replace(config, implementation="xla" if implementation == "xla" else None)

    def layer(params, x, quantized=None):
        return moe_layer(params, x, config, quantized_experts=quantized)[0]

    if remat == "full":
        layer = jax.checkpoint(layer)

    def forward(state):
        params, x, _, *quantized = state
        return {"out": layer(params, x, *quantized)}

    def forward_backward(state):
        params, x, g, *quantized = state
        out, backward = jax.vjp(lambda params, x: layer(params, x, *quantized), params, x)
        # The barrier makes g depend on the output, as in training, so that the backward pass
        # starts after the forward pass.
        out, g = lax.optimization_barrier((out, g))
        dparams, dx = backward(g)
        return {"out": out, "dx": dx, "dparams": dparams}

    return forward if direction == "forward" else forward_backward
