"""`python -m jax_ep bench train`: times a training step of a whole model and of its parts.

The model is `jax_ep.bench.decoder.Decoder` and the training step is that of
`jax_ep.bench.train_step`, with gradients of one batch and AdamW; `examples/train_qwen3_moe.py`
trains with the same step. The widths are those of the published model. The numbers of layers,
experts and vocabulary entries are reduced to fit on one GPU; the command prints them first. All
ranks are along the expert axis. With --fsdp, each group of so many ranks shares the same experts,
and every matrix is split over the group (`jax_ep.bench.decoder.fsdp_axes`). Tokens are random, and
the learning rate is so small that routing stays that of random weights.

The same step is measured with the experts' matmuls in bfloat16 and in float8, and with plain JAX in
place of this library: XLA's collectives as the exchange ("xla"), and also `lax.ragged_dot` for the
experts ("xla+ragged_dot"). Each program is compiled and timed alone.

TFLOP/s count 6 FLOPs for each active parameter and token, and those of causal attention;
`DecoderConfig.training_flops_per_token` is the formula. "Of peak" divides by the GPU's dense
bfloat16 peak (989 TFLOP/s for H100 and H200), even for float8. "Peak GiB" is the memory that the
program holds on a device, according to XLA: arguments, results and temporaries. "Vs xla" is the
speed-up in wall time over the baseline "xla". Times on CPUs say nothing about those on GPUs.

The times of the step's parts are device times from JAX's profiler, means over ranks;
`jax_ep.bench.step_parts` assigns kernels to parts. They are measured on a program that is compiled
without CUDA graphs, because kernels in a CUDA graph lose the names of their operations. While one
of XLA's collectives and another kernel run at the same time, only the other kernel counts. So the
parts add up to the time during which a GPU runs anything. Collectives count as far as nothing runs
beside them. "Idle" is the step's time minus the sum of the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.bench import measuring, report, runner, step_parts, timing
from jax_ep.bench.decoder import (
    FSDP_AXIS,
    MODELS,
    REMAT,
    Decoder,
    DecoderConfig,
    attention_implementation,
    decoder_mesh,
)
from jax_ep.bench.flags import BenchFlags, Iterations
from jax_ep.bench.peak import peak_flops
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import DeviceTime
from jax_ep.flags import Error, check_experts

# Maps each model to sizes that replace its own, so that the model and its AdamW state fit on one
# GPU of 80 GB.
CUTS: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {"num_layers": 4, "vocab": 151936 // 8},
    "deepseek-v3-like": {"num_layers": 2, "num_experts": 64, "vocab": 129280 // 8},
}
_TINY = MODELS["tiny"]
# On CPUs, these sizes replace the sizes of every model.
SMALL = {
    "num_layers": 1,
    **{
        name: getattr(_TINY, name)
        for name in (
            *("vocab", "hidden", "num_heads", "num_key_value_heads", "head_dim", "mlp_dim"),
            *("num_experts", "num_experts_per_token"),
        )
    },
}

# Map each implementation and baseline of the MoE layer to the attributes of `jax_ep.linen.MoE` that
# select it.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {"jax_ep": {}}
BASELINES: dict[str, dict[str, Any]] = {
    "xla": {"implementation": "xla"},
    "xla+ragged_dot": {"implementation": "xla", "matmul_implementation": "xla"},
}
LEARNING_RATE = 1e-6
PARTS = (*step_parts.PARTS, "idle")

FLAGS = BenchFlags()
_SHAPES = FLAGS.choices(
    "shapes",
    ["qwen3-30b-a3b"],
    CUTS,
    "The models that are trained, with fewer layers; on CPUs, small models of the same kind.",
)
_SIZES = {
    "num_layers": FLAGS.integer(
        "layers",
        None,
        "The number of decoder layers. Default: for each model a number that fits into GPU memory.",
    ),
    "hidden": FLAGS.integer(
        "hidden", None, "H, the width of the residual stream. Default: that of each model."
    ),
    "mlp_dim": FLAGS.integer(
        "mlp_dim", None, "F, the width of each expert's MLP. Default: that of each model."
    ),
    "num_experts": FLAGS.integer(
        "num_experts",
        None,
        "E, the number of experts of all ranks. Default: for each model a number that fits into "
        "GPU memory.",
    ),
    "num_experts_per_token": FLAGS.integer(
        "top_k",
        None,
        "K, the number of distinct experts that each token chooses. Default: that of each model.",
    ),
    "vocab": FLAGS.integer(
        "vocab", None, "V, the size of the vocabulary. Default: an eighth of the model's."
    ),
}
_SEQUENCE = FLAGS.integer(
    "sequence", None, "S, the number of tokens of a sequence. Default: 4096 on GPUs and 64 on CPUs."
)
_BATCH = FLAGS.integer(
    "batch",
    None,
    "The number of sequences of each rank in a step. Default: 2 on GPUs and 1 on CPUs.",
)
_MATMUL_DTYPE = FLAGS.choices(
    "matmul_dtype",
    ["none", "float8_e4m3fn"],
    ["none", "float8_e4m3fn"],
    "The dtypes that the experts of jax_ep multiply, each measured. none: bfloat16, which is what "
    "the baselines multiply in any case.",
)
_IMPLEMENTATIONS = FLAGS.implementations(IMPLEMENTATIONS, "the layer", "all")
_BASELINES = FLAGS.baselines(BASELINES, "the layer by plain JAX", "xla")
_CAPACITY_FACTOR = FLAGS.number(
    "capacity_factor",
    1.5,
    "Rows of a receive buffer, as a multiple of the T * K rows that a rank gets on average; rows "
    "that do not fit are dropped, and the table says how many. 0: room for any routing.",
)
_FSDP = FLAGS.integer(
    "fsdp",
    1,
    "The number of ranks over which every matrix is also split (FSDP). The layers gather their "
    "parts before they multiply, and return the sums of their gradients in parts.",
)
_REMAT = FLAGS.choices(
    "remat",
    ["none"],
    REMAT,
    "What a layer keeps for its backward pass besides its input, each measured. none: all that JAX "
    "keeps.",
)
_LOSS_CHUNK = FLAGS.integer(
    "loss_chunk", 8192, "The number of tokens whose logits a rank holds at a time."
)
_PARAM_DTYPE = FLAGS.choice(
    "param_dtype",
    "bfloat16",
    ("bfloat16", "float32"),
    "The dtype of parameters and of AdamW's states.",
)
_TIMING = FLAGS.timing(Iterations(2, 10, 10), 7, least_iterations=1)
_SEED = FLAGS.seed("parameters and tokens")
_SHARED = FLAGS.share(
    plot="the step's time and its parts",
    timing=_TIMING,
    check=FLAGS.check("the first loss and the norm of its gradient with the first program's"),
    seconds=1500.0,
)

# By how much, relatively, the loss and the gradient's norm of the first step may differ between two
# programs. Rounding to bfloat16, or to float8 in experts, causes the differences.
_LOSS_TOLERANCE, _NORM_TOLERANCE = 0.01, 0.1


def run() -> int:
    if not importlib.util.find_spec("optax"):
        raise Error("bench train needs optax: pip install 'jax_ep[bench]'")
    return runner.run(TrainBench())


class StepLoop:
    """A compiled training step and its state, with the interface of `timing.Loop`.

    The constructor compiles the step and runs it once.

    Attributes:
      mesh: the mesh of the ranks.
      compiled: the compiled program of one training step.
      iterations: the number of steps that one call of `run` makes.
      compile_s: the seconds that lowering and compiling took.
      first: the metrics of the first step. A metric that is an array is summed to one number.
    """

    def __init__(self, model: Decoder, mesh: Mesh, batch: np.ndarray, seed: int, iterations: int):
        import optax

        from jax_ep.bench import train_step

        self.mesh, self.iterations = mesh, iterations
        seq_len = batch.shape[-1] - 1
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))
        with jax.set_mesh(mesh):
            layout = train_step.make_layout(model, optimizer, mesh, seq_len)
            objective = train_step.Objective()
            step = train_step.make_train_step(model, optimizer, layout, objective)
            self._batch = jax.device_put(batch, layout.batch)
            self._state: Any = train_step.init_state(model, optimizer, layout, seq_len, seed)
            start = time.perf_counter()
            self._lowered = step.lower(self._state, self._batch)
            self.compiled = self._lowered.compile()
            self.compile_s = time.perf_counter() - start
        self._state, metrics = self.compiled(self._state, self._batch)
        self.first = jax.tree.map(lambda x: float(np.sum(x)), metrics)

    def run(self) -> float:
        """Makes `iterations` training steps; returns the wall time of one step in microseconds."""
        start = time.perf_counter()
        self._run(self.compiled)
        return (time.perf_counter() - start) / self.iterations * 1e6

    def _run(self, compiled: Any) -> None:
        for _ in range(self.iterations):
            self._state, metrics = compiled(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))

    def device_time(self, repeats: int, timers: Sequence[str], spaced: bool) -> DeviceTime:
        """Measures the device time of a training step.

        Runs `repeats` times the `iterations` steps of `run`. The keys of the result's `by_kernel`
        are labels "part: kernel name", where the part of the step is one of
        `jax_ep.bench.step_parts.PARTS`. Only the timer "trace" knows the parts, so RuntimeError is
        raised unless `timers` contains "trace". `spaced`, an argument of other loops, has no
        effect.
        """
        if "trace" not in timers:
            raise RuntimeError("only --device_timer=trace knows the parts of a step")
        # Compiles without CUDA graphs, because a profile does not say which HLO operations the
        # kernels of a graph run.
        compiled = self._lowered.compile({"xla_gpu_enable_command_buffer": ""})
        label = step_parts.labels(step_parts.operations_of(compiled.as_text() or ""))
        self._run(compiled)

        def run() -> None:
            for _ in range(repeats):
                self._run(compiled)

        is_collective = step_parts.is_collective
        launches = timing.traced_launches(run, self.mesh.size, label, is_collective)
        return timing.summarize_by_rank(launches, repeats * self.iterations)


class TrainCase(runner.Case):
    """Measures one program: a model's training step with one implementation of the MoE layer.

    All cases share the dict `seen`, which maps (model, number of ranks) to the metrics of the first
    step of the first program that was checked. Other programs are compared with these metrics.
    """

    device_repeats = 1

    def __init__(self, row: Row, config: DecoderConfig, seen: dict[Any, dict[str, float]]):
        name = "{shape}, {ranks} ranks".format(**row)
        super().__init__(name, [row])
        self.config, self.seen = config, seen

    def build(self, row: Row, shared: Any) -> Any:
        sizes = {"data": 1, FSDP_AXIS: row["fsdp"], "expert": row["ranks"] // row["fsdp"]}
        devices = jax.devices()[: row["ranks"]]
        mesh = decoder_mesh(devices, sizes)
        matmul_dtype = None if row["matmul_dtype"] == "none" else row["matmul_dtype"]
        options = IMPLEMENTATIONS | BASELINES
        model = Decoder(
            self.config,
            dtype=jnp.bfloat16,
            param_dtype=jnp.dtype(_PARAM_DTYPE.value),
            attention=attention_implementation(devices[0].platform, jnp.bfloat16),
            remat=row["remat"],
            loss_chunk=_LOSS_CHUNK.value,
            moe={
                "matmul_dtype": matmul_dtype,
                "capacity_factor": _CAPACITY_FACTOR.value or None,
                **options[row["implementation"]],
            },
        )
        shape = 1, row["ranks"] * row["batch"], row["sequence"] + 1
        rng = np.random.default_rng(_SEED.value)
        batch = rng.integers(self.config.vocab, size=shape, dtype=np.int32)
        iterations = _TIMING.iterations_of(row["batch"] * row["sequence"])
        return StepLoop(model, mesh, batch, _SEED.value, iterations)

    def compiled(self, row: Row, loop: Any) -> Row:
        choices = row["ranks"] * row["batch"] * row["sequence"] * self.config.num_experts_per_token
        return measuring.held_bytes(loop.compiled) | {
            "compile_s": loop.compile_s,
            "iterations": loop.iterations,
            "loss": loop.first["loss"],
            "grad_norm": loop.first["grad_norm"],
            "dropped": loop.first["num_dropped"] / (choices * self.config.num_layers),
        }

    def check(self, row: Row, loop: Any, shared: Any) -> bool:
        work = row["shape"], row["ranks"]
        first = self.seen.setdefault(work, loop.first)
        for name, tolerance in (("loss", _LOSS_TOLERANCE), ("grad_norm", _NORM_TOLERANCE)):
            if not abs(loop.first[name] - first[name]) <= tolerance * abs(first[name]):
                raise AssertionError(
                    f"{name} is {loop.first[name]:.6g}, but that of the first program "
                    f"{first[name]:.6g} (tolerance {tolerance:.0%})"
                )
        return True

    def results(self, row: Row) -> Row:
        """Returns further fields for a row: throughputs, and device times of parts if measured.

        The field "parts_us" has the microseconds of each part in PARTS, such as "attention".
        """
        seconds = row["wall"]["median_us"] * 1e-6
        tokens = row["ranks"] * row["batch"] * row["sequence"]
        flops = tokens * self.config.training_flops_per_token(row["sequence"])
        per_rank = flops / seconds / row["ranks"]
        peak = peak_flops(jax.devices()[0].device_kind)
        found: Row = {
            "tokens_per_s": tokens / seconds,
            "tflops_per_rank": per_rank / 1e12,
            "share_of_peak": per_rank / peak if peak else None,
        }
        if row["device"] is not None:
            parts = step_parts.sums(row["device"]["by_kernel_us"])
            found["parts_us"] = parts | {"idle": row["wall"]["median_us"] - sum(parts.values())}
        return found


def _ms(row: Row, record: str, field: str) -> float | None:
    found = row.get(record)
    return None if not found else found[field] / 1e3


class TrainBench(runner.Bench):
    flags, shared = FLAGS, _SHARED
    program_columns = (
        report.text("shape"),
        Column("ranks", "ranks"),
        Column("fsdp", "fsdp", usual="1"),
        report.text("layer", "implementation"),
        report.text("matmul", "matmul_dtype", usual="none"),
        report.text("remat", usual="none"),
    )
    columns = (
        *program_columns,
        report.CHECKED,
        Column("step ms", lambda row: _ms(row, "wall", "median_us"), "{:.1f}"),
        Column(
            "low..high",
            lambda row: (
                f"{_ms(row, 'wall', 'low_us'):.1f}..{_ms(row, 'wall', 'high_us'):.1f}"
                if "wall" in row
                else "failed"
            ),
        ),
        *report.ENERGY,
        Column("tokens/s", "tokens_per_s", "{:.0f}"),
        Column("TFLOP/s/rank", "tflops_per_rank", "{:.3g}"),
        Column("of peak", "share_of_peak", "{:.1%}"),
        Column(
            "peak GiB",
            lambda row: row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None,
            "{:.2f}",
        ),
        Column("compile s", "compile_s", "{:.1f}"),
        Column("dropped", lambda row: row.get("dropped") or None, "{:.2%}"),
        Column("vs xla", "speedup_over_xla", "{:.2f}x"),
    )
    parts_columns = (
        *program_columns,
        *(
            Column(f"{part} ms", functools.partial(_ms, record="parts_us", field=part), "{:.2f}")
            for part in PARTS
        ),
    )

    def default_ranks(self, devices: Sequence[jax.Device]) -> list[int]:
        return sorted({min(_FSDP.value, len(devices)), len(devices)})

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[TrainCase]:
        on_cpus = devices[0].platform == "cpu"
        own = {name: flag.value for name, flag in _SIZES.items() if flag.value is not None}
        self.configs = {
            shape: dataclasses.replace(
                MODELS[shape], **({**CUTS[shape]} | (SMALL if on_cpus else {}) | own)
            )
            for shape in _SHAPES.value
        }
        self.sequence = _SEQUENCE.value or (64 if on_cpus else 4096)
        self.batch = _BATCH.value or (1 if on_cpus else 2)
        for shape, config in self.configs.items():
            for num_ranks in ranks:
                if num_ranks % _FSDP.value:
                    raise Error(
                        f"--fsdp must divide the number of ranks, {num_ranks}, but is {_FSDP.value}"
                    )
                split = num_ranks // _FSDP.value
                check_experts(config.num_experts, split, config.num_experts_per_token, shape)
            if "float8_e4m3fn" in _MATMUL_DTYPE.value and (config.hidden | config.mlp_dim) % 128:
                raise Error(
                    f"--matmul_dtype: float8_e4m3fn needs H and F that are multiples of 128, but "
                    f"{shape} has H={config.hidden} F={config.mlp_dim}"
                )
        seen: dict[Any, dict[str, float]] = {}
        return [
            TrainCase(
                {
                    "shape": shape,
                    "ranks": num_ranks,
                    "fsdp": _FSDP.value,
                    "sequence": self.sequence,
                    "batch": self.batch,
                    "implementation": name,
                    "matmul_dtype": matmul_dtype,
                    "remat": remat,
                },
                config,
                seen,
            )
            for shape, config in self.configs.items()
            for num_ranks in ranks
            for name, matmul_dtype in _programs()
            for remat in _REMAT.value
        ]

    def header(self) -> list[str]:
        lines = [
            f"bfloat16, sequences of {self.sequence} tokens, {self.batch} on each rank; parameters "
            f"and AdamW in {_PARAM_DTYPE.value}"
        ]
        for shape, config in self.configs.items():
            published = MODELS[shape]
            lines.append(
                f"{shape}: {config.num_layers} of {published.num_layers} layers, "
                f"V={config.vocab} of {published.vocab}, E={config.num_experts} of "
                f"{published.num_experts}, K={config.num_experts_per_token} H={config.hidden} "
                f"F={config.mlp_dim}; {config.active_params():,} active parameters, "
                f"{config.training_flops_per_token(self.sequence) / 1e9:.3g} GFLOP for each token"
            )
        return lines

    def name(self, row: Row) -> str:
        text = "{shape}, {ranks} ranks, {implementation}".format(**row)
        if row["fsdp"] > 1:
            text += f", fsdp {row['fsdp']}"
        text = runner.with_matmul_dtype(text, row)
        return text if row["remat"] == "none" else f"{text}, remat {row['remat']}"

    def compare(self, rows: list[Row]) -> None:
        """Adds each row's speed-up in wall time over the baseline "xla".

        The baseline's row has the same model, number of ranks and rematerialization.
        """
        keys = "shape", "ranks", "remat"
        measured = [row for row in rows if "wall" in row]
        plain = {
            tuple(row[key] for key in keys): row["wall"]["median_us"]
            for row in measured
            if row["implementation"] == "xla"
        }
        for row in measured:
            if us := plain.get(tuple(row[key] for key in keys)):
                row["speedup_over_xla"] = us / row["wall"]["median_us"]

    def table(self, rows: Sequence[Row]) -> list[str]:
        divided = [row for row in rows if row.get("parts_us")]
        lines = report.table(self.columns, rows)
        return [*lines, "", *report.table(self.parts_columns, divided)] if divided else lines

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        bars = [
            row | {"bar": bar, "ms": us and us / 1e3}
            for row in rows
            for bar, us in {
                "step": row.get("wall", {}).get("median_us"),
                **row.get("parts_us", {}),
            }.items()
        ]
        report.bars(
            bars,
            path,
            title="A training step and its parts\n" + "\n".join([machine, *self.header()]),
            panel=lambda row: "{shape}, {ranks} ranks".format(**row),
            group=_program,
            bar=lambda row: row["bar"],
            height=lambda row: row["ms"],
            label="milliseconds",
        )


def _program(row: Row) -> str:
    """Describes what distinguishes a row's program, in lines of text, to label bars of a plot."""
    lines = [row["implementation"]]
    if row["matmul_dtype"] != "none":
        lines.append(row["matmul_dtype"])
    if row["remat"] != "none":
        lines.append(f"remat {row['remat']}")
    return "\n".join(lines)


def _programs() -> list[tuple[str, str]]:
    """Returns the programs to measure, as pairs (implementation or baseline, matmul dtype).

    The matmul dtypes are those of --matmul_dtype, but only "none" (bfloat16) for baselines.
    """
    own = IMPLEMENTATIONS if _IMPLEMENTATIONS.value is None else _IMPLEMENTATIONS.value
    others = ["xla"] if _BASELINES.value is None else _BASELINES.value
    programs = [(name, dtype) for name in own for dtype in _MATMUL_DTYPE.value]
    programs += [(name, "none") for name in others]
    if not programs:
        raise Error("--implementations and --baselines are both empty: nothing to measure")
    return programs
