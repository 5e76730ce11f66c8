"""`python -m jax_ep bench compile`: seconds to trace, lower and compile a layer and its parts.

Each program is compiled for the devices that are here, from the shapes of its arrays alone, after
JAX's caches have been cleared. Nothing is run. "Trace" is Python that runs the functions, "lower"
what writes the program, kernels included, for XLA, and "compile" what XLA does with it, and
Mosaic's compiler and ptxas with the kernels. "Kernels" are the different kernels in the program.

The parts of a layer are compiled as programs of their own. The layer's seconds are not their sum:
the layer has what stands between them, and a kernel that several of them share is compiled once.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep import combine, dispatch, expert_mlp, grouped_matmul
from jax_ep.bench import layer as bench_layer
from jax_ep.bench import measuring, report, runner
from jax_ep.bench.baselines import AXIS
from jax_ep.bench.flags import BenchFlags
from jax_ep.bench.layer import SHAPES, Shape
from jax_ep.bench.layer_baselines import route
from jax_ep.bench.report import Column, Row
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.params import MoEParams

FLAGS = BenchFlags()
_SHAPES = FLAGS.choices(
    "shapes",
    ["qwen3-moe", "deepseek-v3"],
    SHAPES,
    "The models whose MoE layers are compiled; on CPUs, small layers of the same kind.",
)
_TOKENS = FLAGS.tokens("4096", "64")
_LAYERS = FLAGS.integer(
    "layers",
    None,
    "Compiles also one program of the forward passes of this many layers, each with parameters of "
    "its own. Default: no such program.",
)
_SHARED = FLAGS.share(plot="the seconds of each program")
CAPACITY_FACTOR = 1.125

# Matches, in a lowered program, the hash of each kernel and the name of its function on the host.
_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
_NAME = re.compile(r"\\00((?!stable)[a-z]\w*)_mosaic_gpu\\")
_SECONDS = ("trace_s", "lower_s", "compile_s")


class Program:
    """A program to compile: a function of each rank's arrays.

    Attributes:
      function: the function of one rank's `operands`.
      operands: one rank's arrays, a pytree of `jax.ShapeDtypeStruct`.
    """

    def __init__(self, function: Callable[..., Any], *operands: Any):
        self.function, self.operands = function, operands


def run() -> int:
    return runner.run(CompileBench())


class CompileCase(runner.Case):
    """All programs of one shape and number of tokens. They are compiled one after the other."""

    def __init__(self, work: Row, shape: Shape):
        super().__init__("{shape}, {tokens} tokens, {ranks} ranks".format(**work), [work])
        self.work, self.shape = work, shape

    def measure(self, run: runner.Run) -> list[Row]:
        mesh = Mesh(np.asarray(jax.devices()[: self.work["ranks"]]), (AXIS,))
        rows = []
        of_shape = programs(self.shape, self.work["tokens"], mesh.size, _LAYERS.value)
        for part, program in of_shape.items():
            measuring.progress(f"{self.name}: {part}")
            rows.append(self.work | {"program": part})
            with runner.errors_go_into(rows[-1]):
                rows[-1] |= measure(program, mesh)
        return rows


class CompileBench(runner.Bench):
    flags, shared = FLAGS, _SHARED
    columns = (
        report.text("shape"),
        Column("tokens", "tokens"),
        Column("ranks", "ranks"),
        report.text("program"),
        Column("trace s", "trace_s", "{:.2f}"),
        Column("lower s", "lower_s", "{:.2f}"),
        Column("compile s", "compile_s", "{:.2f}"),
        Column("sum s", lambda row: "failed" if "error" in row else f"{seconds(row):.2f}"),
        Column("kernels", "kernels"),
        Column("named", lambda row: ", ".join(row.get("kernel_names", ())), left=True),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[CompileCase]:
        platform = devices[0].platform
        shapes = bench_layer.shapes(_SHAPES.value, platform)
        tokens = _TOKENS.value or bench_layer.default_tokens(platform)
        works = bench_layer.works_of(shapes, ranks, tokens)
        return [CompileCase(work, shapes[work["shape"]]) for work in works]

    def header(self) -> list[str]:
        return ["bfloat16"]

    def name(self, row: Row) -> str:
        return "{shape}, {program}".format(**row)

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        report.bars(
            rows,
            path,
            title=f"Compiling the MoE layer, bfloat16\n{machine}",
            panel=lambda row: "{shape}, {tokens} tokens, {ranks} ranks".format(**row),
            group=lambda row: row["program"],
            bar=lambda row: "trace, lower and compile",
            height=lambda row: None if "error" in row else seconds(row),
            label="seconds",
        )


def seconds(row: Row) -> float:
    """Returns the seconds to trace, lower and compile a row's program."""
    return sum(row[key] for key in _SECONDS)


def programs(
    shape: Shape, tokens: int, num_ranks: int, num_layers: int | None
) -> dict[str, Program]:
    """Returns the programs of a model's layer, by name: the layer first, then its parts."""
    config = MoEConfig(
        num_experts=shape.num_experts,
        num_experts_per_token=shape.top_k,
        score=shape.score,
        capacity_factor=CAPACITY_FACTOR,
        expert_axis=AXIS,
    )
    num_local = shape.num_experts // num_ranks
    rows = -(-int(CAPACITY_FACTOR * tokens * shape.top_k) // 8) * 8
    array: Any = jax.ShapeDtypeStruct
    x = array((tokens, shape.hidden), jnp.bfloat16)
    params = MoEParams(
        gate=array((shape.hidden, shape.num_experts), jnp.float32),
        wi_0=array((num_local, shape.hidden, shape.mlp_dim), jnp.bfloat16),
        wi_1=array((num_local, shape.hidden, shape.mlp_dim), jnp.bfloat16),
        wo=array((num_local, shape.mlp_dim, shape.hidden), jnp.bfloat16),
    )
    received = array((rows, shape.hidden), jnp.bfloat16)
    sizes = array((num_local,), jnp.int32)
    topk_idx = array((tokens, shape.top_k), jnp.int32)

    def layer(params, x):
        return moe_layer(params, x, config)[0]

    def layers(stack, x):
        for params in stack:
            x += layer(params, x)
        return x

    def exchange(x, topk_idx):
        sent = dispatch(x, topk_idx, num_experts=shape.num_experts, axis_name=AXIS, capacity=rows)
        return combine(sent.tokens, sent.handle)

    def experts(x, wi_0, wi_1, wo, sizes):
        return expert_mlp(x, wi_0, wi_1, wo, sizes)

    matrices = params.wi_0, params.wi_1, params.wo
    result = {
        "layer": Program(layer, params, x),
        "layer, with gradients": Program(_with_gradients(layer, 2), params, x),
        "router": Program(lambda params, x: route(params, x, config), params, x),
        "exchange": Program(exchange, x, topk_idx),
        "exchange, with gradients": Program(_with_gradients(exchange, 1), x, topk_idx),
        "experts": Program(experts, received, *matrices, sizes),
        "experts, with gradients": Program(_with_gradients(experts, 4), received, *matrices, sizes),
        "grouped_matmul": Program(grouped_matmul, received, params.wi_0, sizes),
    }
    if num_layers is not None:
        result[f"{num_layers} layers"] = Program(layers, [params] * num_layers, x)
    return result


def _with_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Returns a function of the same arrays: the result, and gradients of the first `count`."""

    def both(*args):
        out, pull = jax.vjp(lambda *some: function(*some, *args[count:]), *args[:count])
        return out, pull(out)

    return both


def measure(program: Program, mesh: Mesh) -> dict[str, Any]:
    """Compiles a program for the devices of a mesh: returns its seconds and kernels by name."""
    spec = PartitionSpec(AXIS)

    def on_all_ranks(array):
        shape = mesh.size * array.shape[0], *array.shape[1:]
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, spec))

    operands = jax.tree.map(on_all_ranks, program.operands)
    mapped = jax.shard_map(
        program.function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    jax.clear_caches()
    with _compiled_anew(mesh):
        times = [time.perf_counter()]
        traced = jax.jit(mapped).trace(*operands)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
    text = lowered.as_text()
    started = time.perf_counter()
    lowered.compile()
    count, names = kernels_of(text)
    seconds = [*np.diff(times), time.perf_counter() - started]
    return dict(zip(_SECONDS, map(float, seconds), strict=True)) | {
        "kernels": count,
        "kernel_names": names,
    }


def _compiled_anew(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """Makes programs lowered within compile kernels that an earlier program has, too."""
    if mesh.devices.flat[0].platform == "cpu":
        return contextlib.nullcontext()
    from pallas_kernels.fabric import mosaic  # loads Mosaic, which machines without GPUs may lack

    return mosaic.compiled_anew()


def kernels_of(text: str) -> tuple[int, list[str]]:
    """Returns how many different kernels a lowered program has, and their names."""
    return len(set(_HASH.findall(text))), sorted(set(_NAME.findall(text)))
