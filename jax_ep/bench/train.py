"""`python -m jax_ep bench train`: times a training step of a whole model and of its parts."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.bench import runner, timing
from jax_ep.bench.layer import BASELINES, MATMUL, MATMUL_DTYPES
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import DeviceTime
from jax_ep.flags import Args, Error, Flags, check_experts, choice, integer, number, some
from jax_ep.models.axes import FSDP_AXIS, decoder_mesh
from jax_ep.models.config import MODELS, SIZES
from jax_ep.models.decoder import REMAT, Decoder

# Maps each model to sizes that replace its own, so that the model and its AdamW state fit on one
# GPU of 80 GB.
CUTS: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {"num_layers": 4, "vocab": 151936 // 8},
    "deepseek-v3-like": {"num_layers": 2, "num_experts": 64, "vocab": 129280 // 8},
}
# The sizes of every model on CPUs.
_SMALL = {size: getattr(MODELS["tiny"], size) for size in SIZES} | {"num_layers": 1}
# Peak dense bfloat16 FLOP/s by the beginning of a device's `device_kind`. NVIDIA's data sheets list
# figures with sparsity, which are twice as large.
PEAK_BFLOAT16 = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}
LEARNING_RATE = 1e-6
# By how much, relatively, the loss and the gradient's norm of the first step may differ between two
# programs. Rounding to bfloat16, or to float8 in experts, causes the differences.
_LOSS_TOLERANCE, _NORM_TOLERANCE = 0.01, 0.1

# A profile names the HLO operation that a kernel runs. In the compiled program's text, an operation
# has an `op_name`: the named scopes of `jax_ep.models.decoder` in which JAX traced it. Maps each
# part of a step to a regular expression; an operation belongs to the first that finds its op_name.
_OPERATIONS = {
    "attention": r"\bself_attn\b",
    "routing": r"\bmlp\b.*\brouter\b",
    "exchange": r"\bmlp\b.*(\b(dispatch|combine)\b|all_gather|all_to_all|(psum|reduce)_scatter)",
    "shared experts": r"\bmlp\b.*\bshared_experts\b",
    "experts": r"\bmlp\b.*(\bexperts\b|_compute_gated|ragged_dot)",
    "norms and losses": r"layernorm\b|\bnorm\b|\bloss\b|\bembed_tokens\b",
    "optimizer": r"\boptimizer\b",
}
GRADIENT_SUMS, REST = "gradient sums", "rest"
PARTS = (*_OPERATIONS, GRADIENT_SUMS, REST, "idle")
_COLLECTIVE = re.compile(r"nccl|all-?reduce|reduce-?scatter|all-?gather", re.IGNORECASE)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name=\"([^\"]*)\"", re.MULTILINE)


def add_flags(flags: Flags) -> None:
    flags.add("shapes", "qwen3-30b-a3b", "The models, with fewer layers.", some(choice(CUTS)))
    flags.add("layers", None, "Layers. Default: as many as fit on a GPU.", integer)
    flags.add("sequence", None, "S, tokens of a sequence. Default: 4096; on CPUs 64.", integer)
    flags.add("batch", None, "Sequences of a rank in a step. Default: 2; on CPUs 1.", integer)
    dtypes = "The dtypes that the experts of jax_ep multiply; none: bfloat16."
    flags.add("matmul_dtype", ",".join(MATMUL_DTYPES), dtypes, some(choice(MATMUL_DTYPES)))
    flags.add("baselines", "xla", "XLA's exchange, or empty.", some(choice(BASELINES), none=True))
    factor = "Rows of a receive buffer over the mean; more are dropped. 0: any routing."
    flags.add("capacity_factor", "1.5", factor, number)
    flags.add("fsdp", "1", "Ranks over which every matrix is also split.", integer)
    flags.add("remat", "none", "What layers keep for the backward pass.", some(choice(REMAT)))
    runner.add_flags(flags, "first losses and gradient norms with the first program's", repeats=7)


def run(args: Args) -> int:
    if not importlib.util.find_spec("optax"):
        raise Error("bench train needs optax: pip install 'jax_ep[bench]'")
    return runner.run(TrainBench(args))


class StepLoop:
    """A compiled training step and its state, with the interface of `timing.Loop`.

    `first` are the metrics of the first step, which the constructor runs, as numbers.
    """

    def __init__(self, model: Decoder, mesh: Mesh, batch: np.ndarray, iterations: int):
        import optax

        from jax_ep.models import train_step

        self.mesh, self.iterations = mesh, iterations
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))
        with jax.set_mesh(mesh):
            layout = train_step.make_layout(model, optimizer, mesh)
            step = train_step.make_train_step(model, optimizer, layout, train_step.Objective())
            self._batch = jax.device_put(batch, layout.batch)
            self._state: Any = train_step.init_state(model, optimizer, layout, seed=0)
            start = time.perf_counter()
            self._lowered = step.lower(self._state, self._batch)
            self.compiled = self._lowered.compile()
            self.compile_s = time.perf_counter() - start
        self._state, metrics = self.compiled(self._state, self._batch)
        self.first = jax.tree.map(lambda x: float(np.sum(x)), metrics)

    def run(self) -> float:
        start = time.perf_counter()
        self._run(self.compiled)
        return (time.perf_counter() - start) / self.iterations * 1e6

    def _run(self, compiled: Any) -> None:
        for _ in range(self.iterations):
            self._state, metrics = compiled(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))

    def device_time(self, repeats: int, spaced: bool) -> DeviceTime:
        """Measures the device time of a step, by "part: kernel name"; `spaced` has no effect."""
        # Compiles without CUDA graphs, because a profile does not say which HLO operations the
        # kernels of a graph run.
        compiled = self._lowered.compile({"xla_gpu_enable_command_buffer": ""})
        label = labels(compiled.as_text() or "")
        self._run(compiled)

        def run() -> None:
            for _ in range(repeats):
                self._run(compiled)

        launches = timing.traced_launches(run, self.mesh.size, label, is_collective)
        return timing.summarize(launches, repeats * self.iterations)


class TrainBench(runner.Bench):
    """A case is one program: a model's training step with one implementation of the MoE layer."""

    columns = (
        Column("tokens/s", "tokens_per_s", "{:.0f}"),
        Column("TFLOP/s/rank", "tflops_per_rank", "{:.3g}"),
        Column("of peak", "share_of_peak", "{:.1%}"),
        Column("peak GiB", "peak_bytes", "{:.2f}", 2**30),
        Column("compile s", "compile_s", "{:.1f}"),
        Column("dropped", lambda row: row.get("dropped") or None, "{:.2%}"),
        Column("vs xla", "speedup_over_xla", "{:.2f}x"),
        *(Column(f"{part} ms", f"parts_us.{part}", "{:.2f}", 1e3) for part in PARTS),
    )

    def default_ranks(self, num_devices: int) -> list[int]:
        return sorted({min(self.args.fsdp, num_devices), num_devices})

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[list[Row]]:
        args = self.args
        on_cpus = devices[0].platform == "cpu"
        args.sequence = args.sequence or (64 if on_cpus else 4096)
        args.batch = args.batch or (1 if on_cpus else 2)
        self.configs = {}
        for shape in args.shapes:
            sizes = _SMALL if on_cpus else CUTS[shape]
            if args.layers is not None:
                sizes = sizes | {"num_layers": args.layers}
            name = f"small {shape}" if on_cpus else shape
            config = self.configs[name] = MODELS[shape].replace(**sizes)
            for num_ranks in ranks:
                if num_ranks % args.fsdp:
                    raise Error(f"--fsdp must divide {num_ranks} ranks, but is {args.fsdp}")
                expert_ranks = num_ranks // args.fsdp
                check_experts(args, config.num_experts, expert_ranks, config.num_experts_per_token)
        programs = [("jax_ep", dtype) for dtype in args.matmul_dtype]
        programs += [(name, "none") for name in args.baselines]
        ways = product(self.configs, ranks, programs, args.remat)
        rows = [
            {
                "shape": shape,
                "ranks": num_ranks,
                "fsdp": args.fsdp,
                "sequence": args.sequence,
                "batch": args.batch,
                "implementation": name,
                "matmul_dtype": matmul_dtype,
                "remat": remat,
            }
            for shape, num_ranks, (name, matmul_dtype), remat in ways
        ]
        return [[row] for row in rows]

    def build(self, row: Row, shared: Any) -> Any:
        config = self.configs[row["shape"]]
        sizes = {"data": 1, FSDP_AXIS: row["fsdp"], "expert": row["ranks"] // row["fsdp"]}
        mesh = decoder_mesh(jax.devices()[: row["ranks"]], sizes)
        model = Decoder(
            config=config.replace(
                matmul_dtype=None if row["matmul_dtype"] == "none" else row["matmul_dtype"],
                capacity_factor=self.args.capacity_factor or None,
                implementation="xla" if row["implementation"] == "xla" else None,
            ),
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
            remat=row["remat"],
            loss_chunk=8192,
        )
        # One microbatch. A sequence has one token more, since each of S tokens predicts the next.
        shape = 1, row["ranks"] * row["batch"], row["sequence"] + 1
        batch = np.random.default_rng(0).integers(config.vocab, size=shape, dtype=np.int32)
        # A step takes long enough that the number of tokens does not matter.
        iterations = runner.iterations(self.args, num_tokens=0, on_cpus=2, many=10, few=10)
        return StepLoop(model, mesh, batch, iterations)

    def compiled(self, row: Row, loop: Any) -> Row:
        config = self.configs[row["shape"]]
        choices = row["ranks"] * row["batch"] * row["sequence"] * config.num_experts_per_token
        return runner.held_bytes(loop.compiled) | {
            "compile_s": loop.compile_s,
            "iterations": loop.iterations,
            "loss": loop.first["loss"],
            "grad_norm": loop.first["grad_norm"],
            "dropped": loop.first["num_dropped"] / (choices * config.num_layers),
        }

    def check(self, row: Row, loop: Any, shared: Any) -> bool:
        first = self.first.setdefault((row["shape"], row["ranks"]), loop.first)
        for name, tolerance in (("loss", _LOSS_TOLERANCE), ("grad_norm", _NORM_TOLERANCE)):
            if not abs(loop.first[name] - first[name]) <= tolerance * abs(first[name]):
                raise AssertionError(
                    f"{name} is {loop.first[name]:.6g}, but that of the first program "
                    f"{first[name]:.6g} (tolerance {tolerance:.0%})"
                )
        return True

    def results(self, row: Row) -> Row:
        seconds = row["wall"]["median_us"] * 1e-6
        tokens = row["ranks"] * row["batch"] * row["sequence"]
        flops = tokens * self.configs[row["shape"]].training_flops_per_token(row["sequence"])
        per_rank = flops / seconds / row["ranks"]
        peak = peak_flops(jax.devices()[0].device_kind)
        found: Row = {
            "tokens_per_s": tokens / seconds,
            "tflops_per_rank": per_rank / 1e12,
            "share_of_peak": per_rank / peak if peak else None,
        }
        if row["device"] is not None:
            parts = dict.fromkeys(PARTS, 0.0)
            for label, us in row["device"]["by_kernel_us"].items():
                parts[label.partition(": ")[0]] += us
            parts["idle"] = row["wall"]["median_us"] - sum(parts.values())
            found["parts_us"] = parts
        return found

    def header(self) -> list[str]:
        lines = [
            f"bfloat16, AdamW included; sequences of {self.args.sequence} tokens, "
            f"{self.args.batch} on each rank"
        ]
        for shape, config in self.configs.items():
            published = MODELS[shape.removeprefix("small ")]
            lines.append(
                f"{shape}: {config.num_layers} of {published.num_layers} layers, "
                f"V={config.vocab} of {published.vocab}, E={config.num_experts} of "
                f"{published.num_experts}, K={config.num_experts_per_token} H={config.hidden} "
                f"F={config.mlp_dim}; {config.active_params():,} active parameters, "
                f"{config.training_flops_per_token(self.args.sequence) / 1e9:.3g} GFLOP a token"
            )
        return lines

    def group(self, row: Row) -> tuple[str, str]:
        fsdp = f", fsdp {row['fsdp']}" if row["fsdp"] > 1 else ""
        return row["shape"], f"{row['ranks']} ranks{fsdp}"

    def program(self, row: Row) -> str:
        unusual = [row[key] for key in ("matmul_dtype", "remat") if row[key] != "none"]
        return ", ".join([row["implementation"], *unusual])

    def compare(self, rows: list[Row]) -> None:
        runner.speedups(rows, "speedup_over_xla", ("shape", "ranks", "remat"), implementation="xla")


def peak_flops(device_kind: str) -> float | None:
    fitting = [name for name in PEAK_BFLOAT16 if device_kind.startswith(name)]
    return PEAK_BFLOAT16[max(fitting, key=len)] if fitting else None


def labels(hlo: str) -> Callable[[Any], str]:
    """Returns a function that labels a profile's events "part: kernel name", from the HLO text."""
    found = dict(_INSTRUCTION.findall(hlo))
    # Kernels have the names of operations, with "_" for "." and "-".
    operations = {re.sub(r"[.\-]", "_", name): op_name for name, op_name in found.items()} | found

    def label(event: Any) -> str:
        operation = dict(event.stats).get("hlo_op", event.name)
        op_name = operations.get(operation, operations.get(event.name, ""))
        return f"{part_of(event.name, op_name)}: {event.name}"

    return label


def part_of(kernel: str, op_name: str) -> str:
    """Returns the part that a kernel belongs to; `op_name` is "" if unknown."""
    if kernel.startswith("ep_"):
        return "exchange"
    fitting = (part for part, form in _OPERATIONS.items() if re.search(form, op_name))
    part = next(fitting, REST)
    if MATMUL.search(kernel) and part != "shared experts":
        return "experts"
    # Collectives outside of the exchange and the optimizer sum gradients over devices.
    if is_collective(kernel) and part not in ("exchange", "optimizer"):
        return GRADIENT_SUMS
    return part


def is_collective(kernel: str) -> bool:
    return _COLLECTIVE.search(kernel) is not None
