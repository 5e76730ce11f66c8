"""Compiles the kernels for H200 GPUs with JAX's CUDA plugin, on any machine.

    python tests/kernels/compile_check.py [--plugin DIR]

Without --plugin the kernels are only lowered for CUDA. DIR is a folder with JAX's CUDA plugin in
the version of JAX, which must not be on Python's path:

    pip install --no-deps --target=DIR jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION

The check needs `ptxas`, on the PATH or in DIR (pip install --no-deps --target=DIR
nvidia-cuda-nvcc). It prints each kernel's registers and the bytes of spilled registers. It fails if

  a program does not lower or compile,
  ptxas serializes the tensor cores' instructions,
  threads of one warp may wait at different barriers, or
  XLA schedules the sending of rows between hosts such that no kernel runs meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.formats import MXFP4, QuantizedArray, Transposed
from jax_ep.matmul import float8, unquantized
from pallas_kernels.matmul.row_blocks import row_blocks

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.float8 import swiglu
from support.meshes import cuda_mesh
from support.ptx import divided_barriers

AXIS = "expert"
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 device_memory_size: 150000000000 l2_cache_size: 52428800
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def gpus(plugin: Path) -> list[jax.Device]:
    """Returns eight devices for which JAX can compile, but not run: H200 GPUs of one host.

    `plugin` is the folder with JAX's CUDA plugin.
    """
    runtime = plugin / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
    library = plugin / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    shape = "1x1x8"
    topology = xla_client.make_c_api_device_topology(api, shape, topology=shape, target_config=H200)
    return topology._make_compile_only_devices()


def compiled(function: Callable[..., Any], num_ranks: int, devices: Any, *shapes: Any) -> str:
    """Compiles a function of each rank's arrays; returns its PTX and the messages of ptxas."""
    with written() as text:
        lowered(function, num_ranks, devices, *shapes).compile()
    return text[0]


def lowered(function: Callable[..., Any], num_ranks: int, devices: Any, *shapes: Any) -> Any:
    """Lowers a function of each rank's arrays for `devices`, or for CUDA if there are none."""
    mesh: Any = cuda_mesh((num_ranks,), (AXIS,))
    if devices:
        mesh = Mesh(np.asarray(devices[:num_ranks]), (AXIS,))
    sharding = NamedSharding(mesh, P(AXIS)) if devices else None
    operands = [
        jax.ShapeDtypeStruct((num_ranks * n, *rest), dtype, sharding=sharding)
        for (n, *rest), dtype in shapes
    ]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def written() -> Iterator[list[str]]:
    """Captures what this process writes to stdout and stderr while the context is open.

    Yields a list, which is empty until the context ends and then has the written text as its one
    item.
    """
    text: list[str] = []
    streams = sys.stdout.fileno(), sys.stderr.fileno()
    sys.stdout.flush()
    kept = [os.dup(stream) for stream in streams]
    with tempfile.TemporaryFile() as file:
        for stream in streams:
            os.dup2(file.fileno(), stream)
        try:
            yield text
        finally:
            for stream, copy in zip(streams, kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def exchange(options: dict[str, Any], x: Any, topk_idx: Any, weights: Any) -> Any:
    """Computes dispatch, combine and their gradients."""

    def there_and_back(x, weights):
        sent = jax_ep.dispatch(x, topk_idx, axis_name=AXIS, **options)
        return jax_ep.combine(sent.tokens, sent.handle, topk_weights=weights)

    out, pull = jax.vjp(there_and_back, x, weights)
    return out, *pull(out)


def between_hosts(options: dict[str, Any], x: Any, topk_idx: Any, weights: Any) -> Any:
    """Computes dispatch, combine and the combine's gradients."""
    sent = jax_ep.dispatch(x, topk_idx, axis_name=AXIS, **options)
    combine = functools.partial(jax_ep.combine, handle=sent.handle)
    out, pull = jax.vjp(lambda y, weights: combine(y, topk_weights=weights), sent.tokens, weights)
    return out, *pull(out)


def by_rank(options: dict[str, Any], x: Any, topk_idx: Any, weights: Any) -> Any:
    """Computes dispatch and combine in the rank-major layout."""
    sent = jax_ep.dispatch(
        x, topk_idx, axis_name=AXIS, topk_weights=weights, layout="rank", **options
    )
    return jax_ep.combine(sent.tokens, sent.handle)


def experts(matmul_dtype: Any, x: Any, wi_0: Any, wi_1: Any, wo: Any, sizes: Any) -> Any:
    """Computes the experts' MLPs of one rank, and their gradients."""
    options = dict(matmul_dtype=matmul_dtype, implementation="pallas")
    mlp = functools.partial(jax_ep.expert_mlp, group_sizes=sizes, **options)
    out, pull = jax.vjp(mlp, x, wi_0, wi_1, wo)
    return mlp(x, wi_0, wi_1, wo), *pull(out)


def added_gradients(x: Any, grad: Any, sizes: Any, total: Any) -> Any:
    """Adds the gradients of the experts' matrices to sums, in bfloat16 and in float8."""
    blocks, groups = row_blocks(sizes, x.shape[0])
    x_rows, grad_rows = (
        float8.transpose_rows(each, blocks, implementation="pallas")[1] for each in (x, grad)
    )
    return (
        *unquantized.add_drhs_of_each((total,), x, (grad,), sizes, "pallas"),
        *float8.drhs_of_each(x_rows, [grad_rows], groups, total.dtype, "pallas", [total]),
    )


def gate_gradients(dhidden: Any, gate: Any, up: Any, weights: Any, sizes: Any) -> Any:
    """Computes the gradients of the gates of one rank's experts, for the rows that they have."""
    return unquantized.gate_gradient(swiglu, dhidden, (gate, up), weights, sizes, "pallas")


def few_tokens(matmul_dtype: Any, x: Any, gate: Any, wi_0: Any, wi_1: Any, wo: Any) -> Any:
    """Computes a layer of a few tokens on a rank alone, as in decoding."""
    params = jax_ep.MoEParams.of(gate=gate, wi_0=wi_0, wi_1=wi_1, wo=wo)
    config = jax_ep.MoEConfig(
        num_experts=wi_0.shape[0],
        num_experts_per_token=8,
        expert_axis=AXIS,
        matmul_dtype=matmul_dtype,
    )
    return jax_ep.moe_layer(params, x, config)[0]


def mxfp4_layer(x: Any, gate: Any, *parts: Any) -> Any:
    """Computes a layer whose experts are stored as MXFP4, with biases."""
    format = Transposed.of(MXFP4)
    biases, parts = parts[:3], parts[3:]
    stored = [
        QuantizedArray(values, jax.lax.bitcast_convert_type(codes, format.scale_dtype), format)
        for values, codes in zip(parts[::2], parts[1::2], strict=True)
    ]
    params = jax_ep.MoEParams.of(
        gate=gate,
        **dict(zip(("wi_0", "wi_1", "wo"), stored, strict=True)),
        **dict(zip(("wi_0_bias", "wi_1_bias", "wo_bias"), biases, strict=True)),
    )
    config = jax_ep.MoEConfig(num_experts=gate.shape[1], num_experts_per_token=4, expert_axis=AXIS)
    return jax_ep.moe_layer(params, x, config)[0]


def collective(name: str, algorithm: str | None, x: Any) -> Any:
    return getattr(jax_ep.collectives, name)(x, AXIS, algorithm=algorithm)


def programs() -> Iterator[tuple[str, int, Callable[..., Any], list[Any]]]:
    """Yields each program's name, number of ranks, function, and operands of one rank."""
    alone = [((512, 4096), jnp.float32), ((512, 2), jnp.int32), ((512, 2), jnp.float32)]
    one: dict[str, Any] = dict(num_experts=4, implementation="pallas")
    yield "T=512 H=4096 E=4", 1, functools.partial(exchange, one), alone
    for num_ranks in (2, 4, 8):
        for tokens, hidden, num_experts in ((128, 7168, 256), (4096, 7168, 256), (4096, 2048, 128)):
            operands = [
                ((tokens, hidden), jnp.bfloat16),
                ((tokens, 8), jnp.int32),
                ((tokens, 8), jnp.float32),
            ]
            model: dict[str, Any] = dict(num_experts=num_experts, implementation="pallas")
            name = f"T={tokens} H={hidden} E={num_experts}"
            yield name, num_ranks, functools.partial(exchange, model), operands
            if num_ranks == 4:
                continue
            yield f"{name}, rank-major", num_ranks, functools.partial(by_rank, model), operands
            quantized = model | dict(wire_dtype="float8_e4m3fn")
            yield f"{name}, float8", num_ranks, functools.partial(exchange, quantized), operands
        for op, *algorithms in (
            ("all_reduce", "one_shot_ll", "two_shot_ll", "one_shot", "two_shot"),
            ("all_gather", "ll", "direct"),
            ("reduce_scatter", "ll", "direct"),
            ("all_to_all", "ll", "direct"),
        ):
            for algorithm in algorithms:
                of_op = functools.partial(collective, op, algorithm)
                yield f"{op}, {algorithm}", num_ranks, of_op, [((64, 4096), jnp.bfloat16)]
    for tokens, dtype in ((1, None), (1, jnp.float8_e4m3fn), (16, None)):
        sides = (2048, 768), (2048, 768), (768, 2048)
        matrices = [((128, *side), jnp.bfloat16) for side in sides]
        operands = [((tokens, 2048), jnp.bfloat16), ((2048, 128), jnp.float32), *matrices]
        name = f"{'' if dtype is None else 'float8 '}layer, T={tokens}, qwen3-moe"
        yield name, 1, functools.partial(few_tokens, dtype), operands
    for tokens in (1, 16, 128, 512, 4096):
        operands = [((tokens, 2880), jnp.bfloat16), ((2880, 32), jnp.float32)]
        operands += [((32, 2880), jnp.bfloat16)] * 3
        operands += [((32, 2880, 1440), jnp.uint8), ((32, 2880, 90), jnp.uint8)] * 3
        yield f"MXFP4 layer, T={tokens}, gpt-oss", 1, mxfp4_layer, operands
    for name, rows, hidden, ffn, held in (
        ("qwen3-moe, T=4096", 32768, 2048, 768, 64),
        ("qwen3-moe, T=128", 1024, 2048, 768, 64),
        ("deepseek-v3, T=4096", 32768, 7168, 2048, 128),
        ("mixtral, T=4096", 8192, 4096, 14336, 4),
    ):
        matrices = [((held, *sides), jnp.bfloat16) for sides in [(hidden, ffn)] * 2]
        operands = [((rows, hidden), jnp.bfloat16), *matrices, ((held, ffn, hidden), jnp.bfloat16)]
        operands.append(((held,), jnp.int32))
        yield f"experts of {name}", 1, functools.partial(experts, None), operands
        if held == 64 and rows > 1024:
            quantized = functools.partial(experts, jnp.float8_e4m3fn)
            yield f"float8 experts of {name}", 1, quantized, operands

    operands = [((4096, 2048), jnp.bfloat16), ((4096, 768), jnp.bfloat16), ((64,), jnp.int32)]
    operands.append(((64, 2048, 768), jnp.bfloat16))
    yield "gradients added in place", 1, added_gradients, operands
    of_rows = [((32768, 768), jnp.bfloat16)] * 3 + [((32768,), jnp.float32)]
    yield "gate's gradient", 1, gate_gradients, [*of_rows, ((64,), jnp.int32)]


def waits_for_the_network(num_hosts: int, devices: Any) -> Iterator[str]:
    """Yields a fault for each sending of rows between hosts during which no kernel runs.

    Compiles `between_hosts` for eight ranks on `num_hosts` hosts, and reads XLA's schedule.
    `devices` are the devices to compile for.
    """
    os.environ["JAX_EP_DEVICES_PER_HOST"] = str(8 // num_hosts)
    options = dict(num_experts=256, capacity=4608, implementation="two_level")
    operands = [((512, 7168), jnp.bfloat16), ((512, 8), jnp.int32), ((512, 8), jnp.float32)]
    program = lowered(functools.partial(between_hosts, options), 8, devices, *operands)
    with written():
        schedule = program.compile().as_text()
    running: dict[str, int] = {}
    started = 0
    for name, op, operand in SCHEDULED.findall(schedule):
        if op == "collective-permute-start":
            running[name], started = 0, started + 1
        elif op == "custom-call":
            running = {transfer: kernels + 1 for transfer, kernels in running.items()}
        elif op == "collective-permute" or not running.pop(operand):
            yield f"{num_hosts} hosts: no kernel runs beside {name}"
    if started != 3 * (num_hosts - 1):
        yield f"{num_hosts} hosts: rows are sent {started} times"


SCHEDULED = re.compile(
    r"%(\S+) = .*? "
    r"(collective-permute(?:-start|-done)?|custom-call(?=.*custom_call_target=\"mosaic_gpu))"
    r"\(%([^,)]+).*"
)
PTX = re.compile(r"\.visible \.entry (\w+?)_mosaic_gpu_kernel\(.*?\n}", re.S)
KERNEL = re.compile(
    r"Compiling entry function '(\w+?)_mosaic_gpu_kernel'(.*?)Used (\d+) regis", re.S
)
SPILLED = re.compile(r"(\d+) bytes spill stores")
HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
SERIALIZED = re.compile(r"wgmma.mma_async instructions are serialized.*?function '(\w+)'")


def faults_of(said: str) -> list[str]:
    """Returns the faults in `said`, the PTX and messages that `compiled` has returned."""
    found, texts = KERNEL.findall(said), list(PTX.finditer(said))
    faults = [f"{kernel} is serialized" for kernel in SERIALIZED.findall(said)]
    if not found or len(found) != len(texts):
        faults.append(f"{len(found)} kernels, {len(texts)} in PTX")
    for kernel in texts:
        for branch in divided_barriers(kernel[0]):
            faults.append(f"{kernel[1]} parts threads of a warp before a barrier: {branch}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plugin", type=Path, help="where the plugin is; none: only lower")
    parser.add_argument("--only", default="", help="of programs whose name has this in it")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    # The eight CPU devices have the same numbers as the eight GPUs to compile for.
    jax.config.update("jax_num_cpu_devices", 8)
    devices: Any = []
    if arguments.plugin:
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        os.environ["PATH"] += f"{os.pathsep}{arguments.plugin / 'nvidia' / 'cu13' / 'bin'}"
        devices = gpus(arguments.plugin)
    chosen = [program for program in programs() if arguments.only in program[0]]
    count, faults = 0, []
    print(f"{'program':<36}{'ranks':>6}  {'kernel':<28}{'registers':>10}{'spilled':>9}")
    for name, num_ranks, function, operands in chosen:
        wrong, said, kernels = [], "", 0
        try:
            if arguments.plugin:
                said = compiled(function, num_ranks, devices, *operands)
                wrong = faults_of(said)
            else:
                text = lowered(function, num_ranks, devices, *operands).as_text()
                kernels = len(set(HASH.findall(text)))
                wrong = [] if kernels else ["no kernel in the lowered program"]
                print(f"{name:<36}{num_ranks:>6}  kernels: {kernels}", flush=True)
        # Go on after a program that fails, to see the other programs' results.
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}".splitlines()[0]]
        faults += [f"{name}, {num_ranks} ranks: {fault}" for fault in wrong]
        for kernel, properties, registers in KERNEL.findall(said):
            spilled = max(map(int, SPILLED.findall(properties)), default=0)
            print(f"{name:<36}{num_ranks:>6}  {kernel:<28}{registers:>10}{spilled:>9}", flush=True)
            kernels += 1
        count += kernels
    hosts = (2, 4) if arguments.plugin and arguments.only in "between hosts" else ()
    for num_hosts in hosts:
        faults += waits_for_the_network(num_hosts, devices)
    built = "compiled" if arguments.plugin else "lowered"
    # The last line sums up the check: CI prints it among its results.
    print("\n".join([*faults, f"{count} kernels {built}, {len(faults)} faults"]))
    return 1 if faults or not (chosen or hosts) else 0


if __name__ == "__main__":
    sys.exit(main())
