"""Compiles the kernels for GPUs with JAX's CUDA plugin, on any machine.

    python tests/kernels/compile_check.py [--plugin DIR] [--nvjitlink DIR] [--gpu b200]

Without --plugin the kernels are only lowered for CUDA. The folders hold what assembles kernels in a
user's installation, apart from each other and not on Python's path, in the version of JAX:

    pip install --no-deps --target=PLUGIN jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION \
        nvidia-cuda-nvcc nvidia-nvvm
    pip install --no-deps --target=NVJITLINK nvidia-nvjitlink

JAX 0.12 and newer assemble with libnvJitLink if it is loaded, as it is in a user's installation,
and otherwise with ptxas; older ones always with ptxas. The check fails if another assembler wrote
the reports. It prints each kernel's registers and the bytes of spilled registers. It also fails if

  a program does not lower or compile,
  for the H200, a kernel of matmuls spills registers, or another kernel 8 more than ptxas alone
    makes it spill,
  the assembler serializes the tensor cores' instructions,
  threads of one warp may wait at different barriers, or
  XLA schedules the sending of rows between hosts such that no kernel runs meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
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
from jax_ep.moe.routing import router_logits
from jax_ep.runtime import assembler
from pallas_kernels.matmul.row_blocks import row_blocks

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.float8 import swiglu
from support.kernels import on_ranks
from support.meshes import cuda_mesh
from support.ptx import divided_barriers

AXIS = "expert"
# What XLA knows of a GPU: as Hopper's H200, with what is different on others.
TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache}
}}
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
# Bandwidth is in bytes a second, memory and cache in bytes, and the clock in GHz.
FIELDS = ("name", "major", "cores", "clock", "bandwidth", "memory", "cache")
GPUS = {
    "h200": ("NVIDIA H200", 9, 132, 1.98, 4_800_000_000_000, 150_000_000_000, 52_428_800),
    "b200": ("NVIDIA B200", 10, 148, 1.965, 7_672_320_000_000, 191_514_411_008, 132_644_864),
}


def gpus(plugin: Path, gpu: str = "h200") -> list[jax.Device]:
    """Returns eight GPUs of one host, for which JAX can compile, but not run.

    `plugin` is the folder with JAX's CUDA plugin, and `gpu` is a key of `GPUS`.
    """
    runtime = plugin / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
    library = plugin / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    shape, target = "1x1x8", TARGET.format(**dict(zip(FIELDS, GPUS[gpu], strict=True)))
    topology = xla_client.make_c_api_device_topology(
        api, shape, topology=shape, target_config=target
    )
    return topology._make_compile_only_devices()


def compiled(function: Callable[..., Any], num_ranks: int, devices: Any, *shapes: Any) -> str:
    """Compiles a function of each rank's arrays; returns its PTX and the assembler's report."""
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
    program = on_ranks(function, mesh, check_vma=True)
    return program.trace(*operands).lower(lowering_platforms=("cuda",))


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
    """Computes dispatch, combine and the combine's gradient."""
    del weights
    sent = jax_ep.dispatch(x, topk_idx, axis_name=AXIS, **options)
    out, pull = jax.vjp(functools.partial(jax_ep.combine, handle=sent.handle), sent.tokens)
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
        *unquantized.drhs_of_each(x, (grad,), sizes, "pallas", (total,)),
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


def router(x: Any, gate: Any) -> Any:
    """Chooses the experts of a few tokens."""
    return tuple(jax_ep.top_k_routing(router_logits(x, gate), 8)[:2])


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
    gate = [((16, 2048), jnp.bfloat16), ((2048, 128), jnp.float32)]
    yield "router, T=16", 1, router, gate
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
        if held in (4, 64):  # in float8, tiles depend on the number of multiplications, too
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
PTX = re.compile(
    r"\.version(?:(?!\.version).)*?\.visible \.entry (\w+?)_mosaic_gpu_kernel\(.*?\n}", re.S
)
HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
# The other kernels are of matmuls.
NOT_OF_MATMULS = re.compile(r"ep_|top_k|router_logits")
# Two assemblers that fill all registers differ by a few of them: the bytes of 8 registers.
FEW_REGISTERS = 32


def faults_of(said: str, gpu: str) -> Iterator[str]:
    """Yields the faults in `said`, the PTX and the assembler's report that `compiled` returned."""
    kernels, texts = assembler.reported(said), list(PTX.finditer(said))
    if not kernels or len(kernels) != len(texts):
        yield f"{len(kernels)} kernels, {len(texts)} in PTX"
    if assembler.author(said) != assembler.name():
        yield f"assembled by {assembler.author(said)}, not by {assembler.name()}"
    for kernel, text in zip(kernels, texts, strict=False):
        if kernel.serialized:
            yield f"{kernel.name} is serialized"
        if kernel.spilled and gpu == "h200":
            yield from excess_spills(kernel, text[0])
        for branch in divided_barriers(text[0]):
            yield f"{kernel.name} parts threads of a warp before a barrier: {branch}"


def excess_spills(kernel: assembler.Kernel, text: str) -> Iterator[str]:
    """Yields a fault if a kernel spills more than it may; `text` is its PTX."""
    if not NOT_OF_MATMULS.match(kernel.name):
        yield f"{kernel.name} spills {kernel.spilled} bytes"
    elif kernel.spilled > FEW_REGISTERS:
        by_ptxas = spilled_by_ptxas(text)
        if kernel.spilled > by_ptxas + FEW_REGISTERS:
            yield f"{kernel.name} spills {kernel.spilled} bytes, with ptxas {by_ptxas}"


def spilled_by_ptxas(text: str) -> int:
    """Returns how many bytes of registers the kernel in PTX `text` spills if ptxas assembles it."""
    (target,) = re.findall(r"^\.target (\w+)", text, re.M)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = ["ptxas", "-v", "-O3", f"-arch={target}", file.name, "-o", os.devnull]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    (kernel,) = assembler.reported(done.stdout + done.stderr)
    return kernel.spilled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plugin", type=Path, help="where the plugin is; none: only lower")
    parser.add_argument(
        "--nvjitlink", type=Path, help="where libnvJitLink is; none: do not load it"
    )
    parser.add_argument("--gpu", default="h200", choices=GPUS, help="the GPU to compile for")
    parser.add_argument("--only", default="", help="of programs in whose name this regex is found")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    # The eight CPU devices have the same numbers as the eight GPUs to compile for.
    jax.config.update("jax_num_cpu_devices", 8)
    devices: Any = []
    if arguments.nvjitlink:
        # The plugin looks the library up by its name, and so finds the one that is loaded.
        library = arguments.nvjitlink / "nvidia" / "cu13" / "lib" / assembler.NVJITLINK_FILE
        ctypes.CDLL(str(library))
    if arguments.plugin:
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", **assembler.REPORTS}
        ptxas = arguments.plugin / "nvidia" / "cu13" / "bin"
        os.environ["PATH"] = f"{ptxas}{os.pathsep}{os.environ['PATH']}"
        devices = gpus(arguments.plugin, arguments.gpu)
    chosen = [program for program in programs() if re.search(arguments.only, program[0])]
    count, faults = 0, []
    print(
        f"{'program':<36}{'ranks':>6}  {'kernel':<28}{'registers':>10}{'spilled':>9}{'seconds':>9}"
    )
    for name, num_ranks, function, operands in chosen:
        wrong, kernels, started = [], [], time.monotonic()
        try:
            if arguments.plugin:
                said = compiled(function, num_ranks, devices, *operands)
                kernels = assembler.reported(said)
                wrong = list(faults_of(said, arguments.gpu))
                count += len(kernels)
            else:
                text = lowered(function, num_ranks, devices, *operands).as_text()
                hashes = set(HASH.findall(text))
                wrong = [] if hashes else ["no kernel in the lowered program"]
                print(f"{name:<36}{num_ranks:>6}  kernels: {len(hashes)}", flush=True)
                count += len(hashes)
        # Go on after a program that fails, to see the other programs' results.
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}".splitlines()[0]]
        faults += [f"{name}, {num_ranks} ranks: {fault}" for fault in wrong]
        for kernel in kernels:
            print(
                f"{name:<36}{num_ranks:>6}  {kernel.name:<28}{kernel.registers:>10}"
                f"{kernel.spilled:>9}{time.monotonic() - started:>9.1f}",
                flush=True,
            )
    hosts = (2, 4) if arguments.plugin and re.search(arguments.only, "between hosts") else ()
    for num_hosts in hosts:
        faults += waits_for_the_network(num_hosts, devices)
    built = (
        f"compiled for {arguments.gpu} with {assembler.name()}" if arguments.plugin else "lowered"
    )
    # The last line sums up the check: CI prints it among its results.
    print("\n".join([*faults, f"{count} kernels {built}, {len(faults)} faults"]))
    return 1 if faults or not (chosen or hosts) else 0


if __name__ == "__main__":
    sys.exit(main())
