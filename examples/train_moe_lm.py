"""Train a small Mixture-of-Experts language model, expert-parallel, on a `data` x `expert` mesh.

    python examples/train_moe_lm.py                            # two CPU cores are enough
    python examples/train_moe_lm.py --checkpoint_dir=/tmp/moe  # may be killed and started again

The mesh has all GPUs of the machine, or eight virtual CPU devices. Each device holds a part of the
tokens and of the experts, and a replica of every other weight. `processes.py` says how to train on
several hosts: the mesh then has the devices of all processes, and process 0 writes files and
prints.

`moe_lm.py` has the model, `text.py` the text, and `training.py` what the training programs share:
optimizer, checkpoints, metrics and the loop over steps. This file has the training step, the
validation and `main`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# XLA reads the flags once, when JAX starts; flags that the user sets win. The first flag acts on
# CPUs only. The second makes sums on GPUs deterministic, so that a resumed run gives the same bits.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_gpu_deterministic_ops=true "
    + os.environ.get("XLA_FLAGS", "")
)

import jax
import jax.numpy as jnp
import moe_lm
import numpy as np
import optax
import processes
import training
from absl import app, flags
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from moe_lm import LanguageModel, cross_entropy
from text import load_text, unigram_entropy, windows
from training import BATCH_SIZE

from jax_ep.bench.peak import peak_flops

flags.set_default(training.PLOT, "train_moe_lm.png")
_TRACE = flags.DEFINE_string(
    "trace",
    None,
    "The .npz file to write the experts that each token chose to, which `python -m jax_ep "
    "placement` reads. Default: no file.",
)
flags.register_validator(
    "trace", lambda path: path is None or path.endswith(".npz"), "--trace must end in .npz"
)
_EXPERT_PARALLEL = flags.DEFINE_integer(
    "expert_parallel",
    None,
    "Ranks to spread the experts over. Default: the most that divide both experts and devices.",
    lower_bound=1,
)
# A run can continue a checkpoint only if it has the same values of these flags.
RUN_FLAGS = (*training.RUN_FLAGS, *moe_lm.MODEL_FLAGS)

LOAD_BALANCE_WEIGHT = 1e-2
ROUTER_Z_WEIGHT = 1e-3
VALIDATION_BATCHES = 8
PROMPT, SAMPLE_BYTES = "The built-in function ", 200


# Training step --------------------------------------------------------------------------------


def training_batch(data: np.ndarray, step: int) -> np.ndarray:
    """Draws the training sequences of a step, [--batch_size, --seq_len + 1] int32.

    The sequences depend on the seed and the step alone, so a resumed run draws the same ones.
    """
    rng, seq_len = np.random.default_rng([training.SEED.value, step]), moe_lm.SEQ_LEN.value
    return windows(data, rng.integers(0, len(data) - seq_len, BATCH_SIZE.value), seq_len)


class TrainState(NamedTuple):
    """The state that a training step takes and returns, and that a checkpoint holds."""

    step: jax.Array
    params: Any
    opt_state: Any


def init_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Initializes the training state on the mesh; the axis `expert` splits expert weights."""

    def init(key: jax.Array) -> TrainState:
        tokens = jnp.zeros((mesh.size, moe_lm.SEQ_LEN.value), jnp.int32)
        params = model.init(key, tokens)["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    key = jax.random.key(training.SEED.value)
    specs = nn.get_partition_spec(jax.eval_shape(init, key))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules=[("exp", "expert")])
    return jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(key)


def make_train_step(
    model: LanguageModel, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable:
    """Returns the jitted training step, (state, batch) -> (next state, metrics).

    The state is donated. The batch is [B, S + 1] int32: B sequences of S inputs and S targets.
    """

    def loss_fn(params: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        mutable = ["trace"] if _TRACE.value else []
        outputs: Any = model.apply({"params": params}, batch[:, :-1], mutable=mutable)
        (logits, moe), variables = outputs
        metrics = {
            "loss": cross_entropy(logits, batch[:, 1:]),
            "load_balance_loss": moe.load_balance_loss.mean(),
            "router_z_loss": moe.router_z_loss.mean(),
            "num_dropped": moe.num_dropped.sum(),
            # How many tokens chose each expert, [blocks, experts] int32.
            "expert_counts": moe.expert_counts,
        }
        if _TRACE.value:
            metrics["topk_idx"] = moe_lm.choices(params, variables["trace"])
        balance = LOAD_BALANCE_WEIGHT * metrics["load_balance_loss"]
        return metrics["loss"] + balance + ROUTER_Z_WEIGHT * metrics["router_z_loss"], metrics

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict]:
        grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics

    # Replicate the metrics, since every process reads all of them.
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(train_step, donate_argnums=0, out_shardings=(None, replicated))


# Report ---------------------------------------------------------------------------------------


def validation_loss(
    model: LanguageModel, params: Any, data: np.ndarray, sharding: NamedSharding
) -> float:
    """Returns the mean loss, in nats per byte, of sequences evenly spaced in `data`."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch[:, :-1])[0], batch[:, 1:])

    count = VALIDATION_BATCHES * BATCH_SIZE.value
    seq_len = moe_lm.SEQ_LEN.value
    starts = np.linspace(0, len(data) - seq_len - 1, count).astype(int)
    batches = (windows(data, part, seq_len) for part in np.split(starts, VALIDATION_BATCHES))
    losses = [loss(params, processes.distribute(batch, sharding)) for batch in batches]
    return float(np.mean(jax.device_get(losses)))


# Main -----------------------------------------------------------------------------------------


def make_mesh() -> Mesh:
    """Makes a `data` x `expert` mesh of the devices of all processes.

    `expert` has --expert_parallel ranks; by default the greatest number that divides both the
    devices and the experts.
    """
    devices = np.array(jax.devices())
    ranks = _EXPERT_PARALLEL.value or math.gcd(devices.size, moe_lm.NUM_EXPERTS.value)
    if devices.size % ranks:
        raise SystemExit(f"--expert_parallel={ranks} must divide the {devices.size} devices")
    if BATCH_SIZE.value % devices.size:
        raise SystemExit(
            f"--batch_size={BATCH_SIZE.value} must be a multiple of the {devices.size} devices"
        )
    return Mesh(devices.reshape(-1, ranks), ("data", "expert"), (AxisType.Auto,) * 2)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    train_text, valid_text = load_text()
    mesh = make_mesh()
    device = mesh.devices.flat[0]
    # The MoE layers run on this mesh.
    jax.set_mesh(mesh)
    batch_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    model = LanguageModel(jnp.bfloat16 if device.platform == "gpu" else jnp.float32)
    optimizer = training.make_optimizer()
    state = init_state(model, optimizer, mesh)
    checkpoints = training.open_checkpoints(RUN_FLAGS)
    if checkpoints is not None:
        state = checkpoints.restore(state)
    if int(state.step) > training.STEPS.value:
        raise SystemExit(
            f"--steps={training.STEPS.value} must be at least {int(state.step)}, the step of the "
            "newest checkpoint in --checkpoint_dir"
        )
    log = training.MetricsLog(training.metrics_path(), int(state.step))

    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    shape = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    processes.print_once(
        f"{num_params:,} parameters on {mesh.size} x {device.device_kind} ({shape})"
    )
    processes.print_once(
        f"{len(train_text):,} bytes to train on; step {int(state.step)} of {training.STEPS.value}"
    )
    state, tokens_per_second = training.train(
        state,
        make_train_step(model, optimizer, mesh),
        lambda step: processes.distribute(training_batch(train_text, step), batch_sharding),
        checkpoints,
        log,
        BATCH_SIZE.value * moe_lm.SEQ_LEN.value,
    )
    if checkpoints is not None:
        checkpoints.close()
    if _TRACE.value and log.trace and processes.is_first():
        num_experts = moe_lm.NUM_EXPERTS.value
        Path(_TRACE.value).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(_TRACE.value, topk_idx=np.stack(log.trace), num_experts=num_experts)
        print(f"choices of experts: {_TRACE.value}")

    if tokens_per_second:
        flops = tokens_per_second * moe_lm.training_flops_per_token(state.params) / mesh.size
        processes.print_once(f"model TFLOP/s of a device {flops / 1e12:.3g}")
        if peak := peak_flops(device.device_kind):
            processes.print_once(f"model FLOP/s utilization {flops / peak:.2%}")
    text = moe_lm.sample(model, state.params, PROMPT, SAMPLE_BYTES, training.SEED.value)
    processes.print_once(f"--- sample\n{PROMPT}{text}\n---")
    valid_loss = validation_loss(model, state.params, valid_text, batch_sharding)
    entropy = unigram_entropy(np.concatenate([train_text, valid_text]))
    processes.print_once(f"unigram entropy {entropy:.4f} nats/byte")
    processes.print_once(
        f"validation loss {valid_loss:.4f} nats/byte, "
        f"{1 - valid_loss / entropy:.1%} below the unigram entropy"
    )
    training.plot(log.records, "byte", valid_loss, entropy)


if __name__ == "__main__":
    processes.run(main)
