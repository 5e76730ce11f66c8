"""`python -m jax_ep bench layer`: times the whole MoE layer, compared with layers of plain JAX.

A layer is router, dispatch, experts and combine, either forward alone or with the gradients of x,
gate, wi_0, wi_1 and wo. The gate's gradient is not summed over ranks, since a training step sums it
together with the gradients of its other replicated parameters. All layers of a shape have the same
parameters, tokens and number of rows R in the receive buffer. This library's layer is compared with
(a) `lax.ragged_all_to_all` with `lax.ragged_dot`, and (b) the fastest exchange of plain XLA
collectives with this library's grouped matmul. With --token_chunks, this library's layer also
computes its tokens in chunks, one after the other, and the receive buffer is that of a chunk. Its
backward pass then computes each chunk's forward pass again; --remat=full does the same in a layer
that computes all tokens at once.

Throughputs and speed-ups follow from in-loop wall times. FLOP/s count the experts' matmuls of
routed rows: 6 H F for a row, and three times as many with gradients. Matmuls that the backward pass
of a layer in chunks, or of one with --remat=full, computes again do not count. "Matmul us" is the
device time of the experts' matmuls. "Exchange us" is the device time of dispatch, combine and XLA's
collectives, including waits for peers. Both are means over ranks. "If hidden us" subtracts the
shorter of these two times from the slowest rank's device time: the time of a layer that overlaps
communication and matmuls perfectly. "Peak MiB" is the memory that the program holds on a device,
according to XLA: arguments, results and temporaries. "Temp MiB", which is shown if a layer has
several chunks or is rematerialized, is the temporaries alone. Both are then those of one call of
the layer, otherwise those of the timed loop.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jax_ep.bench import measuring, report, runner
from jax_ep.bench.baselines import AXIS, random_rows, rank_seeds
from jax_ep.bench.flags import WIRE_DTYPES, BenchFlags, Iterations, wire_format
from jax_ep.bench.layer_baselines import (
    BASELINES,
    IMPLEMENTATIONS,
    LAYERS,
    RAGGED_DOT,
    make_layer,
    route,
    unavailable_reason,
)
from jax_ep.bench.operations import rows_needed
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop
from jax_ep.flags import Error, check_experts
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.layer import quantize_experts
from jax_ep.moe.params import MoEParams
from jax_ep.moe.routing import Score

DIRECTIONS = ("forward", "forward_backward")
OUTPUTS = ("out", "dgate", "dwi_0", "dwi_1", "dwo", "dx")
# Regular expressions for the names of kernels in a profile. EXCHANGE matches this library's
# exchange and XLA's collectives; MATMUL matches this library's grouped matmuls.
EXCHANGE = re.compile(r"^ep_|nccl|barrier|ragged_?all_?to_?all|all_?reduce", re.IGNORECASE)
MATMUL = re.compile(r"^grouped_matmul")
# The default `tolerance` of `agree`, which leaves room for some roundings to bfloat16.
TOLERANCE = 4 * float(jnp.finfo(jnp.bfloat16).eps)


class Shape(NamedTuple):
    """The sizes of a model's MoE layers.

    Attributes:
      hidden: H, the width of a token.
      mlp_dim: F, the hidden width of an expert.
      num_experts: E, the number of experts of all ranks together.
      top_k: K, the number of experts that each token chooses.
      score: the router's score function.
    """

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
# The shapes that are measured on CPUs in place of SHAPES.
SMALL_SHAPES = {
    "deepseek-v3": Shape(256, 64, 32, 8, "sigmoid"),
    "qwen3-moe": Shape(128, 64, 16, 8),
    "mixtral": Shape(128, 256, 8, 2),
}

FLAGS = BenchFlags()
_SHAPES = FLAGS.choices(
    "shapes",
    SHAPES,
    SHAPES,
    "The models whose MoE layers are measured; on CPUs, small layers of the same kind.",
)
_DIRECTIONS = FLAGS.choices(
    "directions", DIRECTIONS, DIRECTIONS, "What to time: the forward pass, or forward and backward."
)
_TOKENS = FLAGS.tokens("4096", "64")
_HIDDEN = FLAGS.integer(
    "hidden",
    None,
    "H, the hidden size: the number of values of a token. Default: that of each shape.",
)
_MLP_DIM = FLAGS.integer(
    "mlp_dim", None, "F, the width of each expert's MLP. Default: that of each shape."
)
_NUM_EXPERTS = FLAGS.integer(
    "num_experts",
    None,
    "E, the number of experts of all ranks together. With --ranks=1 and an eighth of a model's "
    "experts, the rank does the matmuls of one of 8 ranks. Default: that of each shape.",
)
_TOP_K = FLAGS.integer(
    "top_k",
    None,
    "K, the number of distinct experts that each token chooses. Default: that of each shape.",
)
_IMPLEMENTATIONS = FLAGS.implementations(IMPLEMENTATIONS, "the layer", "all")
_BASELINES = FLAGS.baselines(
    BASELINES,
    "layers of plain JAX",
    "all that run here",
)
_CAPACITY_FACTOR = FLAGS.capacity_factor()
_WIRE_DTYPE = FLAGS.choice(
    "wire_dtype",
    "none",
    WIRE_DTYPES,
    "The dtype in which jax_ep sends tokens to the experts. none: as they are, or in float8 if "
    "--matmul_dtype is float8. The baselines always send them as they are.",
)
_MATMUL_DTYPE = FLAGS.choices(
    "matmul_dtype",
    ["none"],
    ["none", "float8_e4m3fn"],
    "The dtypes that the experts of jax_ep multiply, each measured. none: bfloat16, which is what "
    "the baselines multiply in any case.",
)
_QUANTIZE = FLAGS.choice(
    "quantize",
    "each_call",
    ("each_call", "once"),
    "When the experts' matrices are quantized, with a float8 --matmul_dtype. each_call: in each "
    "call of the layer. once: before the loop, as for several microbatches or steps of decoding.",
)
_TOKEN_CHUNKS = FLAGS.integers(
    "token_chunks",
    [1],
    "The numbers of chunks in which jax_ep computes a rank's tokens, one after the other, each "
    "measured. More than 1 needs --capacity_factor=0. The baselines compute all tokens at once.",
)
_REMAT = FLAGS.choices(
    "remat",
    ["none"],
    ["none", "full"],
    "What the backward pass of jax_ep computes again, each measured. none: nothing, unless "
    "--token_chunks is above 1. full: the whole layer (jax.checkpoint). The forward pass alone is "
    "the same with both.",
)
_TIMING = FLAGS.timing(Iterations(5, 20, 100), 5, least_iterations=2)
# The number of calls in the timed loop of a layer with `lax.ragged_dot`, whose calls are slow.
_ITERATIONS_OF_RAGGED_DOT = 2
_SEED = FLAGS.seed("parameters and tokens")
_SHARED = FLAGS.share(
    plot="the throughputs",
    timing=_TIMING,
    check=FLAGS.check("the outputs and gradients of all layers with each other"),
    seconds=600.0,
)


# The tolerance of `agree` for experts that multiply in float8. Each of an expert's three matmuls
# rounds its two operands, which changes a number by up to 2^-4 of itself.
_FLOAT8_TOLERANCE = 6 * 2**-4


def run() -> int:
    return runner.run(LayerBench())


class LayerCase(runner.Case):
    """Measures all layers of one model shape and number of tokens, forward and with gradients."""

    spaced = False

    def __init__(self, work: Row, shape: Shape, names: Sequence[str]):
        self.shape, self.ranks, self.tokens = shape, work["ranks"], work["tokens"]
        super().__init__(
            "{shape}, {tokens} tokens, {ranks} ranks".format(**work),
            [
                work
                | {
                    "direction": direction,
                    "implementation": name,
                    "wire_dtype": _wire_dtype(name, matmul_dtype),
                    "matmul_dtype": matmul_dtype,
                    "token_chunks": token_chunks,
                    "remat": remat,
                }
                | ({} if matmul_dtype == "none" else {"quantize": _QUANTIZE.value})
                for direction in _DIRECTIONS.value
                for name in names
                for matmul_dtype in _matmul_dtypes(name)
                for token_chunks in _token_chunks(name)
                for remat in _remat(name, direction)
            ],
        )
        # Maps each of DIRECTIONS to the row and the outputs of the first layer that was checked in
        # this direction. All further layers are compared with it.
        self.expected: dict[str, tuple[Row, Any]] = {}

    def prepare(self) -> tuple[Any, MoEConfig, Mesh, Any]:
        """Makes the operands, configuration, mesh and, with --quantize=once, the float8 experts."""
        mesh = Mesh(np.asarray(jax.devices()[: self.ranks]), (AXIS,))
        state = make_state(self.shape, self.tokens, mesh, _SEED.value)
        config, self.load = make_config(self.shape, state, mesh, _CAPACITY_FACTOR.value)
        quantized = None
        if any(row.get("quantize") == "once" for row in self.rows):
            float8 = dataclasses.replace(config, matmul_dtype=jnp.float8_e4m3fn)
            quantized = quantized_experts(state[0], float8, mesh)
        return state, config, mesh, quantized

    def build(self, row: Row, shared: tuple[Any, MoEConfig, Mesh, Any]) -> Loop:
        state, config, mesh, quantized = shared
        iterations = _TIMING.iterations_of(self.tokens)
        if self.is_slow(row):
            iterations = _ITERATIONS_OF_RAGGED_DOT
        wire_dtype = None if row["wire_dtype"] == "none" else jnp.dtype(row["wire_dtype"])
        matmul_dtype = None if row["matmul_dtype"] == "none" else jnp.dtype(row["matmul_dtype"])
        own = dataclasses.replace(
            config,
            wire_dtype=wire_dtype,
            matmul_dtype=matmul_dtype,
            token_chunks=row["token_chunks"],
        )
        capacity = self.load["capacity"]
        step = make_step(row["implementation"], row["direction"], own, capacity, row["remat"])
        if row.get("quantize") == "once":
            state = (*state, quantized)
        loop = Loop(None, step, state, mesh, iterations)
        if _saves_memory(self.rows):
            _ = loop.call  # compiled here, in parallel to other programs
        return loop

    def is_slow(self, row: Row) -> bool:
        return row["implementation"] == RAGGED_DOT

    def compiled(self, row: Row, loop: Loop) -> Row:
        """Returns fields to add to a row of results: memory, loop length and numbers of token rows.

        `measuring.held_bytes` documents the bytes of memory. They are those of the loop, whose
        temporaries include the layer's results; in tables with temporaries, of one call of the
        layer. "iterations" is how often the timed loop calls the layer. `make_config` documents the
        numbers of rows that ranks receive; the "capacity" of a layer in chunks is that of a chunk,
        before it is rounded up.
        """
        held = measuring.held_bytes(loop.call if _saves_memory(self.rows) else loop.compiled)
        # A layer in chunks has no capacity factor: its rows are in proportion to a chunk's tokens.
        tokens_at_once = -(-self.tokens // row["token_chunks"])
        capacity = self.load["capacity"] * tokens_at_once // self.tokens
        return self.load | held | {"capacity": capacity, "iterations": loop.iterations}

    def check(self, row: Row, loop: Loop, shared: Any) -> bool:
        outputs = loop.outputs()
        other, expected = self.expected.setdefault(row["direction"], (row, outputs))
        # Rounding to the wire dtype changes a value by up to `relative_error` of itself, in each of
        # the two compared layers.
        tolerance = max(TOLERANCE, 2 * wire_format(_WIRE_DTYPE.value).relative_error)
        # A row has the field "quantize" if the experts of its layer multiply float8.
        if "quantize" in row or "quantize" in other:
            tolerance = max(tolerance, _FLOAT8_TOLERANCE)
        names = [_variant(each["implementation"], each) for each in (row, other)]
        agree(names[0], outputs, names[1], expected, tolerance)
        return True

    def results(self, row: Row) -> Row:
        """Returns further fields for the row of a layer: throughputs, and device times if measured.

        The device times are those of `parts_of`: the microseconds of the matmuls, of the exchange,
        and of a layer that overlaps matmuls and exchange perfectly.
        """
        seconds = row["wall"]["median_us"] * 1e-6
        passes = 1 if row["direction"] == "forward" else 3
        flops = passes * row["tokens"] * row["top_k"] * 6 * row["hidden"] * row["mlp_dim"]
        return {
            "tokens_per_s": row["ranks"] * row["tokens"] / seconds,
            "tflops_per_rank": flops / seconds / 1e12,
            **({} if row["device"] is None else parts_of(row["device"])),
        }


def _mebibytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**20


# The column that a table has only if a layer has several chunks or is rematerialized.
_TEMPORARIES = Column("temp MiB", lambda row: _mebibytes(row.get("temp_bytes")), "{:.1f}")


class LayerBench(runner.Bench):
    flags, shared = FLAGS, _SHARED
    columns = (
        report.text("shape"),
        Column("tokens", "tokens"),
        Column("ranks", "ranks"),
        report.text("direction"),
        report.text("layer", "implementation"),
        report.text("wire", "wire_dtype", usual="none"),
        report.text("matmul", "matmul_dtype", usual="none"),
        report.text("quantize"),
        Column("chunks", "token_chunks", usual="1"),
        report.text("remat", usual="none"),
        report.CHECKED,
        *report.WALL,
        report.SLOWEST,
        Column("matmul us", "matmul_us", "{:.1f}"),
        Column("exchange us", "exchange_us", "{:.1f}"),
        Column("if hidden us", "if_hidden_us", "{:.1f}"),
        Column("tokens/s", "tokens_per_s", "{:.0f}"),
        Column("TFLOP/s/rank", "tflops_per_rank", "{:.3g}"),
        Column("peak MiB", lambda row: _mebibytes(row.get("peak_bytes")), "{:.0f}"),
        _TEMPORARIES,
        Column("vs (a)", "speedup_over_ragged", "{:.2f}x"),
        Column("vs (b)", "speedup_over_xla", "{:.2f}x"),
        Column("vs plain", "speedup_of_float8", "{:.2f}x"),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[LayerCase]:
        platform = devices[0].platform
        own = {
            "hidden": _HIDDEN.value,
            "mlp_dim": _MLP_DIM.value,
            "num_experts": _NUM_EXPERTS.value,
            "top_k": _TOP_K.value,
        }
        self.shapes = {
            name: shape._replace(**{key: size for key, size in own.items() if size is not None})
            for name, shape in shapes(_SHAPES.value, platform).items()
        }
        names = _names(platform)
        for name, shape in self.shapes.items():
            block = wire_format(_WIRE_DTYPE.value).row_block
            if shape.hidden % block:
                raise Error(
                    f"--wire_dtype needs H that is a multiple of {block}, but {name} has "
                    f"H={shape.hidden}"
                )
        works = works_of(self.shapes, ranks, _TOKENS.value or default_tokens(platform))
        return [LayerCase(work, self.shapes[work["shape"]], names) for work in works]

    def header(self) -> list[str]:
        return ["bfloat16"] + [
            f"{name}: H={shape.hidden} F={shape.mlp_dim} E={shape.num_experts} K={shape.top_k}"
            for name, shape in self.shapes.items()
        ]

    def name(self, row: Row) -> str:
        return _variant("{shape}, {direction}, {implementation}".format(**row), row)

    def compare(self, rows: list[Row]) -> None:
        compare(rows)

    def table(self, rows: Sequence[Row]) -> list[str]:
        legend = f"(a): {RAGGED_DOT}; (b): the fastest plain exchange with our grouped matmul"
        saves_memory = _saves_memory(rows)
        columns = [each for each in self.columns if saves_memory or each is not _TEMPORARIES]
        return [*report.table(columns, rows), "", legend]

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        report.bars(
            rows,
            path,
            title="Throughput of the MoE layer, bfloat16\n" + machine,
            panel=lambda row: row["direction"],
            group=sizes,
            bar=lambda row: _variant(row["implementation"], row),
            height=lambda row: row.get("tokens_per_s"),
            label="tokens/s of all ranks",
        )


def shapes(names: Sequence[str], platform: str) -> dict[str, Shape]:
    """Maps each model in `names` to the shape of its MoE layers; on CPUs, to a smaller shape."""
    table = SMALL_SHAPES if platform == "cpu" else SHAPES
    return {name: table[name] for name in names}


def default_tokens(platform: str) -> list[int]:
    return [64 if platform == "cpu" else 4096]


def works_of(shapes: Mapping[str, Shape], ranks: Sequence[int], tokens: Sequence[int]) -> list[Row]:
    """Lists every combination of a shape, a number of ranks and a number of tokens per rank.

    Returns a dict for each combination: its "shape" (the name), "ranks", "tokens" and the sizes of
    the shape. Raises `Error` if a number of ranks does not divide a shape's number of experts.
    """
    for num_ranks in ranks:
        for name, shape in shapes.items():
            check_experts(shape.num_experts, num_ranks, shape.top_k, name)
    return [
        {"shape": name, "ranks": num_ranks, "tokens": num_tokens} | shape._asdict()
        for num_ranks in ranks
        for name, shape in shapes.items()
        for num_tokens in tokens
    ]


def sizes(row: Row) -> str:
    """Describes a row's shape, tokens and ranks in lines of text, to label bars of a plot."""
    text = "H={hidden} F={mlp_dim}\nE={num_experts} K={top_k}\n{tokens} tokens, {ranks} ranks"
    return f"{row['shape']}\n{text.format(**row)}"


def _saves_memory(rows: Sequence[Row]) -> bool:
    """Returns whether any of the rows' layers has several chunks or is rematerialized."""
    return any(row["token_chunks"] > 1 or row["remat"] != "none" for row in rows)


def _matmul_dtypes(name: str) -> list[str]:
    return ["none"] if name in BASELINES else _MATMUL_DTYPE.value


def _token_chunks(name: str) -> list[int]:
    return [1] if name in BASELINES else _TOKEN_CHUNKS.value


def _remat(name: str, direction: str) -> list[str]:
    return ["none"] if name in BASELINES or direction == "forward" else _REMAT.value


def _variant(text: str, row: Row) -> str:
    """Adds to a layer's name its matmul dtype, its number of chunks and its rematerialization.

    Leaves out 1 chunk, and "none" for the others.
    """
    text = runner.with_matmul_dtype(text, row)
    if row["token_chunks"] > 1:
        text += f", {row['token_chunks']} chunks"
    return text if row["remat"] == "none" else f"{text}, remat"


def _wire_dtype(name: str, matmul_dtype: str) -> str:
    """Returns the dtype in which the layer `name` sends tokens; "none": the dtype they have."""
    if name in BASELINES:
        return "none"
    return _WIRE_DTYPE.value if matmul_dtype == "none" else matmul_dtype


def parts_of(device: dict[str, Any]) -> dict[str, float | None]:
    """Splits a layer's device time by the names of kernels, into matmuls and exchange.

    Args:
      device: the "device" record of `runner.device_times`, with times by kernel in microseconds.

    Returns:
      A dict of microseconds: "matmul_us", the time of the experts' matmuls; "exchange_us", the time
      of dispatch and combine; and "if_hidden_us", the slowest rank's device time minus the shorter
      of these two times. "matmul_us" and "if_hidden_us" are None if no kernel has the name of an
      expert matmul.
    """
    by_kernel = device["by_kernel_us"]
    exchange, matmul = (
        sum(us for name, us in by_kernel.items() if kind.search(name))
        for kind in (EXCHANGE, MATMUL)
    )
    return {
        "matmul_us": matmul or None,
        "exchange_us": exchange,
        "if_hidden_us": device["slowest_us"] - min(exchange, matmul) if matmul else None,
    }


def make_state(shape: Shape, num_tokens: int, mesh: Mesh, seed: int) -> Any:
    """Makes random operands of a layer for all ranks.

    Returns:
      The tuple (params, x, cotangent): the layer's parameters, its input [T, H], and the cotangent
      of its output [T, H]. Every array has an additional leading axis of N ranks, so x is [N, T, H]
      bfloat16.
    """

    def on_rank(own_seed, gate_seed):
        def rows(stream):
            return random_rows(own_seed + 100 * stream, (num_tokens, shape.hidden), jnp.bfloat16)

        state = random_params(shape, mesh.size, own_seed, gate_seed), rows(4), rows(5)
        return jax.tree.map(lambda leaf: leaf[None], state)

    spec = PartitionSpec(AXIS)
    make = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    seeds = rank_seeds(mesh.size, seed)
    return jax.jit(make)(seeds, np.full_like(seeds, 1000 * seed + 999))


def random_params(
    shape: Shape, num_ranks: int, own_seed: jax.Array, gate_seed: jax.Array
) -> MoEParams:
    """Makes the random parameters of an MoE layer on one of N ranks.

    All ranks pass the same `gate_seed`, so they get the same gate (the router's matrix). Each rank
    passes another `own_seed`, so it gets other weights for its E / N experts.
    """
    num_local = shape.num_experts // num_ranks
    hidden, mlp_dim = shape.hidden, shape.mlp_dim

    def rows(stream, *sizes):
        return random_rows(own_seed + 100 * stream, sizes, jnp.bfloat16)

    # The gate's values are exact in bfloat16. So layers choose the same experts even if one
    # computes the router's matmul in float32 and another in bfloat16.
    gate = random_rows(gate_seed, (hidden, shape.num_experts), jnp.bfloat16)
    return MoEParams(
        gate=gate.astype(jnp.float32) * 2.0 ** -round(math.log2(hidden / 8) / 2),
        wi_0=rows(1, num_local, hidden, mlp_dim) * math.sqrt(9 / hidden),
        wi_1=rows(2, num_local, hidden, mlp_dim) * math.sqrt(9 / hidden),
        wo=rows(3, num_local, mlp_dim, hidden) * math.sqrt(9 / mlp_dim),
    )


def make_config(
    shape: Shape, state: Any, mesh: Mesh, capacity_factor: float
) -> tuple[MoEConfig, dict[str, Any]]:
    """Makes the configuration of the measured layers, with a receive buffer that drops no rows.

    Args:
      shape: the sizes of the layers.
      state: the operands from `make_state`, whose tokens are routed to count rows.
      mesh: the one-axis mesh of the ranks.
      capacity_factor: the capacity factor, which is raised if rows would be dropped. 0: a buffer
        that is large enough for any routing.

    Returns:
      The configuration, and a dict of numbers of rows: "rows", the rows that a rank receives, mean
      over ranks; "rows_needed", the rows that the most loaded rank receives; and "capacity", the
      rows of the receive buffer.
    """
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

    routed = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    topk_idx = np.asarray(jax.jit(routed)(state))
    needed = rows_needed(topk_idx, mesh.size, shape.num_experts, 1)
    average = topk_idx.size // mesh.size
    # The most rows that a rank can receive: every token of all ranks, once for each of the rank's
    # experts, but at most K times.
    most = len(topk_idx) * min(shape.top_k, shape.num_experts // mesh.size)
    if not capacity_factor:
        return config, {"rows": average, "rows_needed": needed, "capacity": most}
    rows = max(math.ceil(capacity_factor * average), needed)
    rows = -(-rows // 128) * 128
    config = dataclasses.replace(config, capacity_factor=rows / average)
    return config, {"rows": average, "rows_needed": needed, "capacity": min(rows, most)}


def make_step(
    name: str, direction: str, config: MoEConfig, capacity: int, remat: str = "none"
) -> Any:
    """Makes the function that a `Loop` times: it runs the layer that LAYERS calls `name`.

    With the `remat` "full", the backward pass computes the layer's forward pass again.

    The function takes a tuple, the operands of one rank: params, x and cotangent (see `make_state`)
    and optionally quantized experts. It returns a tuple of the arrays that OUTPUTS names, or only
    of the first, the layer's output, if `direction` is "forward".
    """
    layer = make_layer(name, config, capacity)
    if remat == "full":
        layer = jax.checkpoint(layer)

    def forward(state):
        params, x, _, *quantized = state
        return (layer(params, x, *quantized),)

    def forward_backward(state):
        params, x, g, *quantized = state
        out, backward = jax.vjp(lambda params, x: layer(params, x, *quantized), params, x)
        # The barrier makes g depend on the output, as in training, so that the backward pass
        # starts after the forward pass.
        out, g = lax.optimization_barrier((out, g))
        dparams, dx = backward(g)
        return out, dparams.gate, dparams.wi_0, dparams.wi_1, dparams.wo, dx

    return forward if direction == "forward" else forward_backward


def quantized_experts(params: MoEParams, config: MoEConfig, mesh: Mesh) -> Any:
    """Quantizes the experts of all ranks for a layer with the configuration `config`.

    Arrays of `params` (from `make_state`) and of the result have a leading axis of ranks.
    """
    spec = PartitionSpec(AXIS)

    def on_rank(params):
        params = jax.tree.map(lambda leaf: leaf[0], params)
        return jax.tree.map(lambda leaf: leaf[None], quantize_experts(params, config))

    quantize = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(quantize)(params)


def agree(name: str, outputs: Any, other: str, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Raises AssertionError unless the outputs and gradients of two layers agree, row by row.

    Two rows differ if the norm of their difference is more than `tolerance` times the sum of the
    expected row's norm and the root mean square of all expected rows' norms. One row in 10000 may
    differ, because rounding may swap two experts whose scores are nearly equal.

    Args:
      name: the name of the layer that is checked.
      outputs: its arrays, in the order of OUTPUTS.
      other: the name of the layer it is compared with.
      expected: the other layer's arrays.
      tolerance: the largest allowed error of a row.
    """
    for what, got, wanted in zip(OUTPUTS, outputs, expected, strict=False):
        count, worst = (float(number) for number in _differing_rows(got, wanted, tolerance))
        rows = got.size // got.shape[-1]
        if count > rows // 10_000:
            raise AssertionError(
                f"{what} of {name} differs from that of {other} in {count:.0f} of {rows} rows, by "
                f"up to {worst:.3g} of a row's norm (tolerance {tolerance:.3g})"
            )


@jax.jit
def _differing_rows(
    got: jax.Array, wanted: jax.Array, tolerance: float
) -> tuple[jax.Array, jax.Array]:
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    error = jnp.linalg.norm(got - wanted, axis=-1)
    size = jnp.linalg.norm(wanted, axis=-1)
    relative = error / (size + jnp.sqrt(jnp.mean(size**2)))
    # Written as ~(... <= ...), the comparison also counts rows with NaN as different.
    return jnp.sum(~(relative <= tolerance)), jnp.max(relative)


def compare(rows: list[Row]) -> None:
    """Adds to each row of results how much faster its layer is than other layers, in wall time.

    The other layers have the same shape, tokens, ranks and direction. "speedup_over_ragged" is the
    speed-up over the baseline of ragged_all_to_all and ragged_dot. "speedup_over_xla" is the
    speed-up over the fastest baseline that combines plain XLA collectives with this library's
    grouped matmul. The baselines compute all tokens at once, also where the compared layer has
    several chunks. "speedup_of_float8" is the speed-up of a layer whose experts multiply float8
    over the same layer in bfloat16, with the same number of chunks and the same rematerialization.
    """
    keys = "shape", "tokens", "ranks", "direction", "implementation", "token_chunks", "remat"
    runner.compare_float8(rows, keys)

    def work(row):
        return row["shape"], row["tokens"], row["ranks"], row["direction"]

    measured = [row for row in rows if "wall" in row]
    for row in measured:
        alike = [other for other in measured if work(other) == work(row)]
        for key, yardsticks in {
            "speedup_over_ragged": [o for o in alike if o["implementation"] == RAGGED_DOT],
            "speedup_over_xla": [o for o in alike if LAYERS[o["implementation"]].plain_exchange],
        }.items():
            if yardsticks:
                fastest = min(other["wall"]["median_us"] for other in yardsticks)
                row[key] = fastest / row["wall"]["median_us"]


def _names(platform: str) -> list[str]:
    """Returns the names of the layers to measure: implementations first, then baselines.

    Raises `Error` if a named baseline cannot run on the platform, if nothing is left, or if flags
    do not fit together.
    """
    own = _IMPLEMENTATIONS.value
    others = _BASELINES.value
    if others is None:
        others = [name for name in BASELINES if unavailable_reason(name, platform) is None]
    for name in others:
        if reason := unavailable_reason(name, platform):
            raise Error(f"--baselines: {name} cannot run here: {reason}")
    names = [*(IMPLEMENTATIONS if own is None else own), *others]
    if not names:
        raise Error("--implementations and --baselines are both empty: nothing to measure")
    only_baselines = all(name in BASELINES for name in names)
    if _WIRE_DTYPE.value != "none" and only_baselines:
        raise Error(
            "--wire_dtype needs jax_ep in --implementations: baselines send tokens as they are"
        )
    if set(_MATMUL_DTYPE.value) != {"none"} and only_baselines:
        raise Error("--matmul_dtype needs jax_ep in --implementations: baselines multiply bfloat16")
    if _QUANTIZE.value != "each_call" and set(_MATMUL_DTYPE.value) == {"none"}:
        raise Error("--quantize needs --matmul_dtype=float8_e4m3fn: without, nothing is quantized")
    if set(_TOKEN_CHUNKS.value) != {1} and only_baselines:
        raise Error(
            "--token_chunks needs jax_ep in --implementations: baselines compute all tokens at once"
        )
    if set(_REMAT.value) != {"none"} and only_baselines:
        raise Error("--remat needs jax_ep in --implementations: baselines keep all they need")
    if max(_TOKEN_CHUNKS.value) > 1 and _CAPACITY_FACTOR.value:
        raise Error(
            "--token_chunks above 1 needs --capacity_factor=0: with a capacity factor, each chunk "
            "has a capacity of its own, so rows could be dropped"
        )
    return names
