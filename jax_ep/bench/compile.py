"""`python -m jax_ep bench compile`: seconds to trace, lower and compile an MoE layer and its parts.

Each program is compiled for this machine's devices from array shapes alone, after JAX's caches have
been cleared. Nothing is run. "Trace" is the time in which JAX traces the Python functions to a
jaxpr. "Lower" is the time to translate the jaxpr, kernels included, to StableHLO. "Compile" is the
time of XLA and, for the kernels, of Mosaic's compiler and ptxas. "Kernels" is the number of
different kernels in the program.

The layer's parts (router, exchange, experts) are also compiled as separate programs. Their seconds
do not add up to the layer's, for two reasons: the layer has operations between its parts, and a
kernel that several of its parts use is compiled once.
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
    "Compile also one program of the forward passes of this many layers, each with parameters of "
    "its own. Default: no such program.",
)
_MATMUL_DTYPE = FLAGS.choices(
    "matmul_dtype",
    ["none"],
    ["none", "float8_e4m3fn"],
    "The dtypes that experts multiply; the programs of each are compiled. none: bfloat16.",
)
_SHARED = FLAGS.share(plot="the seconds of each program")
CAPACITY_FACTOR = 1.125

# Regular expressions for the text of a lowered program. _HASH finds the hash of each Mosaic kernel.
# _NAME finds the kernel's name, which is part of the name of the host function that launches it.
_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
_NAME = re.compile(r"\\00((?!stable)[a-z]\w*)_mosaic_gpu\\")
_SECONDS = ("trace_s", "lower_s", "compile_s")


class Program:
    """A program to compile.

    Attributes:
      function: the function that each rank runs inside `shard_map`.
      operands: its arguments on one rank, pytrees of `jax.ShapeDtypeStruct` in place of arrays.
    """

    def __init__(self, function: Callable[..., Any], *operands: Any):
        self.function, self.operands = function, operands


def run() -> int:
    return runner.run(CompileBench())


class CompileCase(runner.Case):
    """Compiles an MoE layer and its parts one by one, for one shape and number of tokens."""

    def __init__(self, work: Row, shape: Shape):
        super().__init__("{shape}, {tokens} tokens, {ranks} ranks".format(**work), [work])
        self.work, self.shape = work, shape

    def measure(self, run: runner.Run) -> list[Row]:
        mesh = Mesh(np.asarray(jax.devices()[: self.work["ranks"]]), (AXIS,))
        rows: list[Row] = []
        for dtype in _MATMUL_DTYPE.value:
            matmul_dtype = None if dtype == "none" else dtype
            sizes = self.work["tokens"], mesh.size, _LAYERS.value
            for part, program in programs(self.shape, *sizes, matmul_dtype).items():
                measuring.progress(f"{self.name}: {part}")
                rows.append(self.work | {"program": part, "matmul_dtype": dtype})
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
        report.text("matmul", "matmul_dtype", usual="none"),
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
        return runner.with_matmul_dtype("{shape}, {program}".format(**row), row)

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        report.bars(
            rows,
            path,
            title=f"Compiling the MoE layer, bfloat16\n{machine}",
            panel=lambda row: "{shape}, {tokens} tokens, {ranks} ranks".format(**row),
            group=lambda row: runner.with_matmul_dtype(row["program"], row),
            bar=lambda row: "trace, lower and compile",
            height=lambda row: None if "error" in row else seconds(row),
            label="seconds",
        )


def seconds(row: Row) -> float:
    """Returns the sum of a row's trace, lowering and compile times, in seconds."""
    return sum(row[key] for key in _SECONDS)


def programs(
    shape: Shape, tokens: int, num_ranks: int, num_layers: int | None, matmul_dtype: Any = None
) -> dict[str, Program]:
    """Returns the programs to compile for one model shape, in a dict by name.

    The programs are the MoE layer and then its parts, such as the exchange.

    Args:
      shape: the sizes of the layer.
      tokens: T, the number of tokens of a rank.
      num_ranks: N, the number of ranks.
      num_layers: if not None, a program with the forward passes of this many layers is added.
      matmul_dtype: the dtype that experts multiply. None: bfloat16. For any other dtype, parts
        without experts are left out, because they do not depend on it.
    """
    config = MoEConfig(
        num_experts=shape.num_experts,
        num_experts_per_token=shape.top_k,
        score=shape.score,
        capacity_factor=CAPACITY_FACTOR,
        matmul_dtype=matmul_dtype,
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
        return expert_mlp(x, wi_0, wi_1, wo, sizes, matmul_dtype=matmul_dtype)

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
    if matmul_dtype is not None:
        result = {name: result[name] for name in result if name.startswith(("layer", "experts"))}
    if num_layers is not None:
        result[f"{num_layers} layers"] = Program(layers, [params] * num_layers, x)
    return result


def _with_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Makes a function that returns a pair: the result of `function`, and its gradients.

    The gradients are those of the first `count` arguments. The result itself is used as the
    cotangent, because any cotangent will do.
    """

    def both(*args):
        out, pull = jax.vjp(lambda *some: function(*some, *args[count:]), *args[:count])
        return out, pull(out)

    return both


def measure(program: Program, mesh: Mesh) -> dict[str, Any]:
    """Measures the time to compile a program for a mesh, after JAX's caches have been cleared.

    Returns:
        A dict: the seconds "trace_s", "lower_s" and "compile_s"; "kernels", the number of different
        Mosaic kernels in the program; and "kernel_names", a list of their distinct names.
    """
    spec = PartitionSpec(AXIS)

    def on_all_ranks(array):
        shape = mesh.size * array.shape[0], *array.shape[1:]
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, spec))

    operands = jax.tree.map(on_all_ranks, program.operands)
    mapped = jax.shard_map(program.function, mesh=mesh, in_specs=spec, out_specs=spec)
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
    """Returns a context in which every Mosaic kernel of a lowered program is compiled anew.

    Without the context, Mosaic would reuse kernels that it compiled earlier in the process, even
    after JAX's caches are cleared. On CPUs, which have no such kernels, the context does nothing.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return contextlib.nullcontext()
    # Imported here, because it loads Mosaic, which machines without GPUs may lack.
    from pallas_kernels.fabric import mosaic

    return mosaic.compiled_anew()


def kernels_of(text: str) -> tuple[int, list[str]]:
    """Finds the Mosaic kernels in `text`, the text of a lowered program.

    Returns the number of kernels with different hashes, and the list of their distinct names.
    Several kernels may share a name.
    """
    return len(set(_HASH.findall(text))), sorted(set(_NAME.findall(text)))
