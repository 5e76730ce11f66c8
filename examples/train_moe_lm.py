"""Train a small Mixture-of-Experts language model, expert-parallel, on a `data` x `expert` mesh.

    python examples/train_moe_lm.py                            # two CPU cores are enough
    python examples/train_moe_lm.py --checkpoint_dir=/tmp/moe  # may be killed and started again

The mesh has all GPUs of the machine, or eight virtual CPU devices. Each device holds its share of
the tokens and of the experts, and a replica of everything else. `processes.py` says how to train on
several hosts: the mesh then has the devices of all processes, and the first process writes files
and prints.

`moe_lm.py` has the text and the model. This file has the rest, from top to bottom: training step,
checkpoints and metrics, report, main.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# XLA reads the flags once, when JAX starts; a user's own flags win. The first is for CPUs. The
# second makes sums on GPUs repeatable, so that a resumed run gives the same bits.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_gpu_deterministic_ops=true "
    + os.environ.get("XLA_FLAGS", "")
)

import jax
import jax.numpy as jnp
import moe_lm
import numpy as np
import optax
import orbax.checkpoint as ocp
import processes
from absl import app, flags
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from moe_lm import LanguageModel, cross_entropy, windows

_STEPS = flags.DEFINE_integer("steps", 800, "Steps to train.", lower_bound=0)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "Sequences in a step, over all devices.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights, the batches and the sample.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 4e-3, "Adam's highest learning rate.")
_CHECKPOINT_DIR = flags.DEFINE_string(
    "checkpoint_dir",
    None,
    "Folder to save to, and to start from where it has a checkpoint; all hosts must share it.",
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
_METRICS_FILE = flags.DEFINE_string(
    "metrics_file", None, "One JSON line per step. Default: metrics.jsonl in --checkpoint_dir."
)
_PLOT = flags.DEFINE_string(
    "plot", "train_moe_lm.png", "File for a plot of loss and expert load; '': no plot."
)
_TRACE = flags.DEFINE_string(
    "trace",
    None,
    "File .npz for the experts that each token chose, for `python -m jax_ep placement`.",
)
flags.register_validator(
    "trace", lambda path: path is None or path.endswith(".npz"), "--trace must end in .npz"
)
_EXPERT_PARALLEL = flags.DEFINE_integer(
    "expert_parallel",
    None,
    "Ranks to spread the experts over. Default: as many as can be.",
    lower_bound=1,
)
# A checkpoint and the run that continues it must agree on these.
RUN_FLAGS = (_BATCH_SIZE, _SEED, _LEARNING_RATE, *moe_lm.MODEL_FLAGS)

LOAD_BALANCE_WEIGHT = 1e-2
ROUTER_Z_WEIGHT = 1e-3
WARMUP_STEPS = 30
VALIDATION_BATCHES = 8
PROMPT, SAMPLE_BYTES = "The built-in function ", 200

# Dense bfloat16 FLOP/s of a device, by the beginning of its name. NVIDIA's data sheets have twice
# these figures, with sparsity.
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


def peak_flops(device_kind: str) -> float | None:
    """Returns the bfloat16 FLOP/s of a device, by the longest name that fits; None if unknown."""
    fitting = [name for name in PEAK_BFLOAT16 if device_kind.startswith(name)]
    return PEAK_BFLOAT16[max(fitting, key=len)] if fitting else None


# Training step --------------------------------------------------------------------------------


def training_batch(data: np.ndarray, step: int) -> np.ndarray:
    """Draws the sequences [B, S + 1] of a step.

    They depend on the seed and the step alone, so a resumed run sees the batches that it would have
    seen.
    """
    rng = np.random.default_rng([_SEED.value, step])
    return windows(data, rng.integers(0, len(data) - moe_lm.SEQ_LEN.value, _BATCH_SIZE.value))


class TrainState(NamedTuple):
    """What one step hands to the next, and a checkpoint holds."""

    step: jax.Array
    params: Any
    opt_state: Any


def learning_rate(step: jax.Array) -> jax.Array:
    """Returns the learning rate of a step: linear warm-up, then 1/sqrt(step).

    It does not depend on --steps, so a longer run continues a shorter one exactly.
    """
    progress = (step + 1) / WARMUP_STEPS
    return _LEARNING_RATE.value * jnp.minimum(progress, jax.lax.rsqrt(progress))


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.98, weight_decay=0.1)
    )


def init_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Makes the state of step 0 on its devices, with expert weights split over `expert`."""

    def init(key: jax.Array) -> TrainState:
        tokens = jnp.zeros((mesh.size, moe_lm.SEQ_LEN.value), jnp.int32)
        params = model.init(key, tokens)["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    key = jax.random.key(_SEED.value)
    specs = nn.get_partition_spec(jax.eval_shape(init, key))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules=[("exp", "expert")])
    return jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(key)


def make_train_step(
    model: LanguageModel, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable:
    """Returns a compiled function: state (donated), batch [B, S + 1] -> next state, metrics."""

    def loss_fn(params: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        mutable = ["trace"] if _TRACE.value else []
        outputs: Any = model.apply({"params": params}, batch[:, :-1], mutable=mutable)
        (logits, moe), variables = outputs
        metrics = {
            "loss": cross_entropy(logits, batch[:, 1:]),
            "load_balance_loss": moe.load_balance_loss.mean(),
            "router_z_loss": moe.router_z_loss.mean(),
            "num_dropped": moe.num_dropped.sum(),
            "expert_counts": moe.expert_counts,  # [blocks, experts]
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

    # Every process reads the metrics, so each gets all of them.
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(train_step, donate_argnums=0, out_shardings=(None, replicated))


# Checkpoints and metrics ----------------------------------------------------------------------


def open_checkpoints(directory: str | None) -> ocp.CheckpointManager | None:
    """Opens the folder of checkpoints; returns None for None.

    Orbax writes a checkpoint under a temporary name and renames it when it is whole, so a
    half-written one is never taken for a checkpoint.
    """
    if directory is None:
        return None
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if processes.is_first():
            _lock(Path(directory))
    except OSError as error:
        raise SystemExit(f"--checkpoint_dir={directory}: {error.strerror}") from error
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(Path(directory).absolute(), options=options)


def _lock(directory: Path) -> None:
    """Keeps other runs out of a folder for as long as this process lives, which holds a file open.

    Raises SystemExit if another run is there.
    """
    lock = os.open(directory / ".lock", os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SystemExit(f"--checkpoint_dir={directory}: another run uses this folder") from error
    except OSError:  # a file system without locks
        pass


def save(checkpoints: ocp.CheckpointManager, state: TrainState, step: int) -> None:
    """Copies the state to the host; Orbax writes it while training goes on."""
    config = {flag.name: flag.value for flag in RUN_FLAGS}
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(config))
    checkpoints.save(step, args=args)


def restore(checkpoints: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """Returns the newest whole checkpoint, or `state` where there is none.

    The result is laid out as `state` is. The checkpoint may come from another mesh, and from
    another number of processes.
    """
    step = checkpoints.latest_step()
    if step is None:
        return state
    folder = checkpoints.directory / str(step)
    if missing := [name for name in ("config", "state") if not (folder / name).exists()]:
        raise SystemExit(
            f"{folder} is no whole checkpoint, it lacks {' and '.join(missing)}: remove it to go "
            "on from the one before"
        )
    args = ocp.args.Composite(config=ocp.args.JsonRestore())
    config = checkpoints.restore(step, args=args)["config"]
    for flag in RUN_FLAGS:
        if config[flag.name] != flag.value:
            raise SystemExit(
                f"{checkpoints.directory} holds a run with --{flag.name}={config[flag.name]}, but "
                f"this one has --{flag.name}={flag.value}: choose another --checkpoint_dir"
            )
    layout = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(layout))
    return checkpoints.restore(step, args=args)["state"]


def metrics_path() -> Path | None:
    """Returns the file for metrics, or None where this process writes none."""
    if not processes.is_first():
        return None
    if _METRICS_FILE.value is not None:
        return Path(_METRICS_FILE.value)
    return Path(_CHECKPOINT_DIR.value, "metrics.jsonl") if _CHECKPOINT_DIR.value else None


class MetricsLog:
    """A file of one JSON line per step, each step once, also when the run is killed and resumed.

    Attributes:
      records: of all steps up to now.
      trace: with --trace, the choices [blocks, tokens, K] of each step of this process.
    """

    def __init__(self, path: Path | None, start_step: int):
        self.records: list[dict] = []
        self.trace: list[np.ndarray] = []
        self.file = None
        if path is None:
            return
        # The run repeats the steps after the checkpoint.
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # a line that was half written when the run died
                continue
            if not isinstance(record, dict) or "expert_counts" not in record:
                raise SystemExit(f"{path} is no metrics file of this program: it has {line!r}")
            if record["step"] < start_step:
                self.records.append(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        temporary.replace(path)
        self.file = path.open("a")

    def append(self, step: int, metrics: dict) -> dict:
        """Waits for the metrics of a step; returns them as plain numbers and lists."""
        if "topk_idx" in metrics:
            self.trace.append(np.asarray(metrics.pop("topk_idx"), np.int16))
        record = {"step": step} | jax.tree.map(lambda x: np.asarray(x).tolist(), metrics)
        self.records.append(record)
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        return record


# Report ---------------------------------------------------------------------------------------


def validation_loss(
    model: LanguageModel, params: Any, data: np.ndarray, sharding: NamedSharding
) -> float:
    """Returns the loss, in nats per byte, of sequences spread evenly over `data`."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch[:, :-1])[0], batch[:, 1:])

    count = VALIDATION_BATCHES * _BATCH_SIZE.value
    starts = np.linspace(0, len(data) - moe_lm.SEQ_LEN.value - 1, count).astype(int)
    batches = (windows(data, part) for part in np.split(starts, VALIDATION_BATCHES))
    losses = [loss(params, processes.distribute(batch, sharding)) for batch in batches]
    return float(np.mean(jax.device_get(losses)))


def plot(records: list[dict], valid_loss: float, entropy: float, path: str) -> None:
    """Draws the loss, and each expert's share of the choices in the last block, by step."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    steps = [record["step"] for record in records]
    counts = np.array([record["expert_counts"][-1] for record in records]).T
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(steps, [record["loss"] for record in records], label="training")
    left.plot(steps[-1], valid_loss, "o", label=f"validation, {valid_loss:.2f}")
    left.axhline(entropy, color="gray", linestyle="--", label=f"unigram entropy, {entropy:.2f}")
    left.set(xlabel="step", ylabel="nats per byte", title="Loss")
    left.legend()
    extent = (steps[0] - 0.5, steps[-1] + 0.5, len(counts) - 0.5, -0.5)
    image = right.imshow(
        counts / counts.sum(0), aspect="auto", interpolation="nearest", extent=extent, vmin=0
    )
    right.set(xlabel="step", ylabel="expert", title="Expert load, last block")
    figure.colorbar(image, label="share of the choices")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


# Main -----------------------------------------------------------------------------------------


def make_mesh() -> Mesh:
    """Makes a mesh of the devices of all processes.

    `expert` is as long as the number of experts allows, `data` is the rest.
    """
    devices = np.array(jax.devices())
    ranks = _EXPERT_PARALLEL.value or math.gcd(devices.size, moe_lm.NUM_EXPERTS.value)
    if devices.size % ranks:
        raise SystemExit(f"--expert_parallel={ranks} must divide the {devices.size} devices")
    if _BATCH_SIZE.value % devices.size:
        raise SystemExit(
            f"--batch_size={_BATCH_SIZE.value} must be a multiple of the {devices.size} devices"
        )
    return Mesh(devices.reshape(-1, ranks), ("data", "expert"), (AxisType.Auto,) * 2)


def train(
    state: TrainState,
    train_step: Callable,
    data: np.ndarray,
    sharding: NamedSharding,
    checkpoints: ocp.CheckpointManager | None,
    log: MetricsLog,
) -> tuple[TrainState, float]:
    """Trains up to --steps; returns the state and the tokens per second after the first step."""
    start, steps = int(state.step), _STEPS.value
    bar = None
    if processes.is_first() and importlib.util.find_spec("tqdm"):  # tqdm is optional
        from tqdm import tqdm

        bar = tqdm(initial=start, total=steps, unit="step", mininterval=0.5)
    tokens_per_second = first_done = 0.0

    def report(step: int, metrics: dict[str, jax.Array]) -> None:
        nonlocal tokens_per_second, first_done
        record = log.append(step, metrics)
        if step == start:  # the step that was compiled
            first_done = time.perf_counter()
        else:
            tokens = (step - start) * _BATCH_SIZE.value * moe_lm.SEQ_LEN.value
            tokens_per_second = tokens / (time.perf_counter() - first_done)
        if bar is not None:
            shown = {"tokens/s": f"{tokens_per_second:,.0f}", "drops": record["num_dropped"]}
            bar.set_postfix({"loss": f"{record['loss']:.3f}"} | shown, refresh=False)
            bar.update()

    running: list[tuple[int, dict]] = []  # steps whose metrics nobody has waited for
    for step in range(start, steps):
        batch = processes.distribute(training_batch(data, step), sharding)
        state, metrics = train_step(state, batch)
        running.append((step, metrics))
        done = step + 1
        save_now = done == steps or done % _CHECKPOINT_EVERY.value == 0
        # One step stays queued, so the devices never idle; before a checkpoint all are logged.
        while len(running) > (0 if save_now else 1):
            report(*running.pop(0))
        if save_now and checkpoints is not None:
            save(checkpoints, state, done)
    if bar is not None:
        bar.close()
    return state, tokens_per_second


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    train_text, valid_text = moe_lm.load_text()
    mesh = make_mesh()
    device = mesh.devices.flat[0]
    jax.set_mesh(mesh)  # the MoE layers run on this mesh
    batch_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    model = LanguageModel(jnp.bfloat16 if device.platform == "gpu" else jnp.float32)
    optimizer = make_optimizer()
    state = init_state(model, optimizer, mesh)
    checkpoints = open_checkpoints(_CHECKPOINT_DIR.value)
    if checkpoints is not None:
        state = restore(checkpoints, state)
    if int(state.step) > _STEPS.value:
        raise SystemExit(f"--steps={_STEPS.value}: the checkpoint is of step {int(state.step)}")
    log = MetricsLog(metrics_path(), int(state.step))

    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    shape = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    processes.print_once(
        f"{num_params:,} parameters on {mesh.size} x {device.device_kind} ({shape})"
    )
    processes.print_once(
        f"{len(train_text):,} bytes to train on; step {int(state.step)} of {_STEPS.value}"
    )
    state, tokens_per_second = train(
        state, make_train_step(model, optimizer, mesh), train_text, batch_sharding, checkpoints, log
    )
    if checkpoints is not None:
        checkpoints.close()  # waits until the last one is written
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
    text = moe_lm.sample(model, state.params, PROMPT, SAMPLE_BYTES, _SEED.value)
    processes.print_once(f"--- sample\n{PROMPT}{text}\n---")
    valid_loss = validation_loss(model, state.params, valid_text, batch_sharding)
    entropy = moe_lm.unigram_entropy(np.concatenate([train_text, valid_text]))
    processes.print_once(f"unigram entropy {entropy:.4f} nats/byte")
    processes.print_once(
        f"validation loss {valid_loss:.4f} nats/byte, "
        f"{1 - valid_loss / entropy:.1%} below the unigram entropy"
    )
    if _PLOT.value and not importlib.util.find_spec("matplotlib"):
        processes.print_once("no plot: matplotlib is not installed")
    elif _PLOT.value and log.records and processes.is_first():
        plot(log.records, valid_loss, entropy, _PLOT.value)
        print(f"loss and expert load: {_PLOT.value}")


if __name__ == "__main__":
    processes.run(main)
