"""Train a Qwen3-MoE, from random or published weights, with experts over the devices.

    python examples/train_qwen3_moe.py --model=tiny      # two CPU cores are enough
    python examples/train_qwen3_moe.py --num_layers=4 --matmul_dtype=float8_e4m3fn    # GPUs
    python examples/train_qwen3_moe.py --checkpoint=Qwen3-30B-A3B --data=tokens.npy \\
        --learning_rate=1e-5 --remat=full --checkpoint_dir=/data/run    # may be killed and resumed

The mesh is `data` x `expert`, with flags also `fsdp` and `tensor`. It has all GPUs of the machine,
or eight virtual CPU devices; `processes.py` says how to train on several hosts.
`jax_ep/bench/decoder.py` has the model and its loss, which computes the logits in chunks of tokens.
`jax_ep/bench/train_step.py` has the training step: gradients summed over microbatches, and AdamW
with states split over all devices. `training.py` has checkpoints, metrics and the loop over steps.
This file connects these modules.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

# XLA reads this flag once, when JAX starts; GPUs ignore it. Flags that the user sets win.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
import processes
import training
from absl import app, flags
from jax.sharding import Mesh
from qwen3_moe import load_params, read_config
from text import load_text, windows
from training import BATCH_SIZE

from jax_ep.bench.decoder import (
    FSDP_AXIS,
    MODELS,
    REMAT,
    TENSOR_AXIS,
    Decoder,
    DecoderConfig,
    attention_implementation,
    decoder_mesh,
)
from jax_ep.bench.peak import peak_flops
from jax_ep.bench.train_step import (
    Objective,
    init_state,
    make_layout,
    make_train_step,
    num_batch_ranks,
)

flags.set_default(training.PLOT, "train_qwen3_moe.png")
flags.set_default(training.STEPS, 100)
flags.set_default(training.LEARNING_RATE, 3e-4)
_MODEL = flags.DEFINE_enum("model", "qwen3-30b-a3b", list(MODELS), "Configuration of the model.")
_SIZES = [
    flags.DEFINE_integer(
        name, None, f"The {name} to use in place of that of --model.", lower_bound=1
    )
    for name in (
        *("vocab", "hidden", "num_layers", "num_heads", "num_key_value_heads", "head_dim"),
        *("mlp_dim", "num_experts", "num_experts_per_token"),
    )
]
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "Directory of a Qwen3-MoE as published, to start from in place of random weights. "
    "--num_layers takes its first layers.",
)
_DATA = flags.DEFINE_string(
    "data", None, "File .npy of token ids, [N] integers. Default: bytes of Python's documentation."
)
_SEQ_LEN = flags.DEFINE_integer("seq_len", None, "Tokens in a sequence. Default: 4096; tiny: 64.")
_MICROBATCHES = flags.DEFINE_integer(
    "microbatches",
    1,
    "Parts of a batch, whose gradients are added up. With --matmul_dtype, experts are quantized "
    "once a step for all parts, which takes 2 bytes for each number of all layers' experts.",
    lower_bound=1,
)
_EXPERT_PARALLEL = flags.DEFINE_integer(
    "expert_parallel",
    None,
    "Ranks to spread the experts over. Default: the most that divide both the experts and the "
    "ranks that --fsdp and --tensor_parallel leave.",
    lower_bound=1,
)
_FSDP = flags.DEFINE_integer(
    "fsdp",
    1,
    "Ranks to split every matrix over, experts too; they hold different sequences, and gather the "
    "matrices of a layer where they use them. Without --remat=full the gathered matrices are kept "
    "for the backward pass.",
    lower_bound=1,
)
_TENSOR_PARALLEL = flags.DEFINE_integer(
    "tensor_parallel", 1, "Ranks to split heads and experts' columns over.", lower_bound=1
)
_PARAM_DTYPE = flags.DEFINE_enum(
    "param_dtype", "float32", ["float32", "bfloat16"], "Dtype of parameters and Adam's states."
)
_MATMUL_DTYPE = flags.DEFINE_enum(
    "matmul_dtype",
    None,
    ["float8_e4m3fn"],
    "Dtype that experts multiply. Default: bfloat16 on GPUs, float32 on CPUs.",
)
_WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype",
    None,
    ["float8_e4m3fn"],
    "Dtype that tokens are sent to their experts in. Default: as they are, or in --matmul_dtype.",
)
_CAPACITY_FACTOR = flags.DEFINE_float(
    "capacity_factor",
    None,
    "Rows of a receive buffer, as a multiple of the rows that a rank gets on average; rows that do "
    "not fit are dropped. Default: room for any routing.",
)
_REMAT = flags.DEFINE_enum(
    "remat",
    "none",
    list(REMAT),
    "What a layer keeps for its backward pass besides its input. none: all that JAX keeps.",
)
_LOSS_CHUNK = flags.DEFINE_integer(
    "loss_chunk", 1024, "Tokens whose logits a device holds at a time.", lower_bound=1
)
_BALANCE = flags.DEFINE_float("balance_weight", 1e-3, "Factor of the load-balance loss.")
_ROUTER_Z = flags.DEFINE_float("router_z_weight", 1e-4, "Factor of the router's z-loss.")
_BIAS_RATE = flags.DEFINE_float(
    "bias_rate", 0.0, "Change of the selection biases per step. 0: no selection biases."
)
# A run can continue a checkpoint only if it has the same values of these flags; the mesh may be
# another.
RUN_FLAGS = (
    *(*training.RUN_FLAGS, _MODEL, *_SIZES, _CHECKPOINT, _DATA, _SEQ_LEN, _PARAM_DTYPE),
    *(_MATMUL_DTYPE, _WIRE_DTYPE, _BALANCE, _ROUTER_Z, _BIAS_RATE),
)


def make_config() -> DecoderConfig:
    """Returns the model's sizes: those of --model or --checkpoint, overridden by other flags."""
    own: dict[str, Any] = {flag.name: flag.value for flag in _SIZES if flag.value is not None}
    if _CHECKPOINT.value is None:
        return dataclasses.replace(MODELS[_MODEL.value], **own)
    config = read_config(Path(_CHECKPOINT.value))
    if others := [name for name in own if name != "num_layers"]:
        raise SystemExit(
            f"--{others[0]} must not be given with --checkpoint, which has the model's sizes; of "
            "the sizes, only --num_layers may be given"
        )
    if own.get("num_layers", 0) > config.num_layers:
        raise SystemExit(
            f"--num_layers must be at most {config.num_layers}, the number of layers of "
            f"--checkpoint, but is {own['num_layers']}"
        )
    return dataclasses.replace(config, **own)


def make_mesh(config: DecoderConfig) -> Mesh:
    """Makes a `data` (x `fsdp`) x `expert` (x `tensor`) mesh of the devices of all processes.

    `fsdp` has --fsdp ranks, `tensor` --tensor_parallel, and `expert` --expert_parallel. `data` has
    the ranks that remain. By default `expert` has as many ranks as can be: the greatest number that
    divides both the number of experts and the number of ranks left for `expert` and `data`.
    """
    devices, tensor, fsdp = jax.devices(), _TENSOR_PARALLEL.value, _FSDP.value
    split = {
        "the number of devices": len(devices),
        "num_key_value_heads": config.num_key_value_heads,
        "mlp_dim": config.mlp_dim,
        "vocab": config.vocab,
    }
    for name, size in split.items():
        if size % tensor:
            raise SystemExit(f"--tensor_parallel={tensor} must divide {name}, which is {size}")
    for name, size in {
        f"ranks that --tensor_parallel={tensor} leaves": len(devices) // tensor,
        "values of a token (hidden)": config.hidden,
    }.items():
        if size % fsdp:
            raise SystemExit(f"--fsdp={fsdp} must divide the {size} {name}")
    others = len(devices) // tensor // fsdp
    experts = _EXPERT_PARALLEL.value or math.gcd(others, config.num_experts)
    left = f"ranks that --tensor_parallel={tensor} and --fsdp={fsdp} leave"
    for name, size in {left: others, "experts": config.num_experts}.items():
        if size % experts:
            raise SystemExit(f"--expert_parallel={experts} must divide the {size} {name}")
    sizes = {"data": others // experts, FSDP_AXIS: fsdp, "expert": experts, TENSOR_AXIS: tensor}
    return decoder_mesh(devices, sizes)


def make_model(config: DecoderConfig, platform: str) -> Decoder:
    dtype = jnp.bfloat16 if platform == "gpu" else jnp.float32
    return Decoder(
        config,
        dtype=dtype,
        param_dtype=jnp.dtype(_PARAM_DTYPE.value),
        attention=attention_implementation(platform, dtype),
        remat=_REMAT.value,
        loss_chunk=_LOSS_CHUNK.value,
        moe={
            "matmul_dtype": _MATMUL_DTYPE.value,
            "wire_dtype": _WIRE_DTYPE.value,
            "capacity_factor": _CAPACITY_FACTOR.value,
            "selection_bias": _BIAS_RATE.value > 0,
        },
    )


def load_data(vocab: int, seq_len: int) -> np.ndarray:
    """Returns the token ids to train on, [N] integers; a --data file is memory-mapped."""
    if _DATA.value is None:
        data, name = load_text()[0], "the documentation's bytes"
    else:
        data, name = np.load(_DATA.value, mmap_mode="r"), f"--data={_DATA.value}"
    if data.ndim != 1 or not np.issubdtype(data.dtype, np.integer) or len(data) <= seq_len:
        raise SystemExit(
            f"{name} must be [N] integers with N above --seq_len={seq_len}, but have dtype "
            f"{data.dtype} and shape {data.shape}"
        )
    if data.min() < 0 or data.max() >= vocab:
        raise SystemExit(
            f"{name} must be token ids from 0 to {vocab - 1}, but range from {data.min()} to "
            f"{data.max()}"
        )
    return data


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    config = make_config()
    mesh = make_mesh(config)
    # The MoE layers and the loss run on this mesh.
    jax.set_mesh(mesh)
    device = mesh.devices.flat[0]
    small = _CHECKPOINT.value is None and _MODEL.value == "tiny"
    seq_len = _SEQ_LEN.value or (64 if small else 4096)
    if BATCH_SIZE.value % (parts := _MICROBATCHES.value * num_batch_ranks(mesh)):
        raise SystemExit(
            f"--batch_size={BATCH_SIZE.value} must be a multiple of {parts}: --microbatches times "
            f"the {num_batch_ranks(mesh)} ranks that sequences are split over"
        )
    data = load_data(config.vocab, seq_len)

    model, optimizer = make_model(config, device.platform), training.make_optimizer()
    layout = make_layout(model, optimizer, mesh, seq_len)
    checkpoints = training.open_checkpoints(RUN_FLAGS)
    state = init_state(model, optimizer, layout, seq_len, training.SEED.value, only_shapes=True)
    if checkpoints is not None:
        state = checkpoints.restore(state)
    # Nothing was restored, since there is no checkpoint: initialize the parameters.
    if isinstance(state.step, jax.ShapeDtypeStruct):
        params = None
        if _CHECKPOINT.value is not None:
            params = load_params(Path(_CHECKPOINT.value), state.params, mesh)
        state = init_state(model, optimizer, layout, seq_len, training.SEED.value, params)
    start = int(state.step)
    if start > training.STEPS.value:
        raise SystemExit(
            f"--steps={training.STEPS.value} must be at least {start}, the step of the newest "
            "checkpoint in --checkpoint_dir"
        )

    def batch_of(step: int) -> jax.Array:
        """Draws a step's batch from the seed and the step alone.

        The batch is [microbatches, sequences of a microbatch, seq_len + 1] int32.
        """
        rng = np.random.default_rng([training.SEED.value, step])
        starts = rng.integers(0, len(data) - seq_len, BATCH_SIZE.value)
        sequences = windows(data, starts, seq_len)
        return processes.distribute(
            sequences.reshape(_MICROBATCHES.value, -1, seq_len + 1), layout.batch
        )

    shape = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    processes.print_once(
        f"{num_params:,} parameters, {config.active_params():,} for each token, in "
        f"{config.num_layers} layers on {mesh.size} x {device.device_kind} ({shape}); step {start} "
        f"of {training.STEPS.value}"
    )
    objective = Objective(
        balance=_BALANCE.value, router_z=_ROUTER_Z.value, bias_rate=_BIAS_RATE.value
    )
    log = training.MetricsLog(training.metrics_path(), start)
    state, tokens_per_second = training.train(
        state,
        make_train_step(model, optimizer, layout, objective),
        batch_of,
        checkpoints,
        log,
        BATCH_SIZE.value * seq_len,
    )
    if checkpoints is not None:
        checkpoints.close()
    if log.records:
        processes.print_once(f"loss {log.records[-1]['loss']:.4f} nats/token")
    if tokens_per_second:
        flops = tokens_per_second * config.training_flops_per_token(seq_len) / mesh.size
        processes.print_once(
            f"{tokens_per_second:,.0f} tokens/s, model TFLOP/s of a device {flops / 1e12:.3g}"
        )
        if peak := peak_flops(device.device_kind):
            processes.print_once(f"model FLOP/s utilization {flops / peak:.2%}")
    training.plot(log.records, "token")


if __name__ == "__main__":
    processes.run(main)
