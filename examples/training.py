"""What the training programs share: optimizer, checkpoints, metrics, the training loop, a plot.

This file defines the flags that every training program has. `processes.py` defines the flags for
several processes.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import processes
from absl import flags

STEPS = flags.DEFINE_integer("steps", 800, "Steps to train.", lower_bound=0)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "Sequences in a step, over all devices.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights, the batches and samples.")
LEARNING_RATE = flags.DEFINE_float("learning_rate", 4e-3, "Adam's highest learning rate.")
CHECKPOINT_DIR = flags.DEFINE_string(
    "checkpoint_dir",
    None,
    "Folder to save checkpoints to; if it has one, training resumes from it. All hosts must share "
    "it.",
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
_METRICS_FILE = flags.DEFINE_string(
    "metrics_file",
    None,
    "File for one JSON line per step. Default: metrics.jsonl in --checkpoint_dir.",
)
PLOT = flags.DEFINE_string(
    "plot", "training.png", "File for a plot of loss and expert load; '': no plot."
)
RUN_FLAGS = (BATCH_SIZE, SEED, LEARNING_RATE)

WARMUP_STEPS = 30


def learning_rate(step: jax.Array) -> jax.Array:
    """Returns the learning rate of a step: linear warm-up, then decay by 1/sqrt(step).

    The rate does not depend on --steps, so a run with more steps can continue a finished one
    exactly.
    """
    progress = (step + 1) / WARMUP_STEPS
    return LEARNING_RATE.value * jnp.minimum(progress, jax.lax.rsqrt(progress))


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.98, weight_decay=0.1)
    )


# Checkpoints and metrics ----------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of a run, in a folder.

    Orbax writes a checkpoint under a temporary name and renames it when it is complete. A
    half-written checkpoint is therefore never restored.

    Args:
        directory: the folder; it is created if it does not exist.
        run_flags: flags whose values are saved; a run that continues the checkpoint must have the
            same values.
    """

    def __init__(self, directory: str, run_flags: Iterable[flags.FlagHolder]):
        self.run_flags = tuple(run_flags)
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            if processes.is_first():
                _lock(Path(directory))
        except OSError as error:
            raise SystemExit(f"--checkpoint_dir={directory}: {error.strerror}") from error
        options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    def save(self, state: Any, step: int) -> None:
        """Copies the state to the host; Orbax writes it to disk while training goes on."""
        config = {flag.name: flag.value for flag in self.run_flags}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(config)
        )
        self.manager.save(step, args=args)

    def restore(self, state: Any) -> Any:
        """Restores the newest complete checkpoint; returns `state` itself if there is none.

        The result has the shapes, dtypes and shardings of `state`, whose leaves are arrays or
        `jax.ShapeDtypeStruct` with shardings. The checkpoint may have been written on another mesh
        and by another number of processes.
        """
        step = self.manager.latest_step()
        if step is None:
            return state
        folder = self.manager.directory / str(step)
        if missing := [name for name in ("config", "state") if not (folder / name).exists()]:
            raise SystemExit(
                f"{folder} is an incomplete checkpoint, which lacks {' and '.join(missing)}: "
                "remove it to resume from the checkpoint before it"
            )
        args = ocp.args.Composite(config=ocp.args.JsonRestore())
        config = self.manager.restore(step, args=args)["config"]
        for flag in self.run_flags:
            if config[flag.name] != flag.value:
                raise SystemExit(
                    f"{self.manager.directory} holds a run with --{flag.name}="
                    f"{config[flag.name]}, but this one has --{flag.name}={flag.value}: choose "
                    "another --checkpoint_dir"
                )
        layout = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(layout))
        return self.manager.restore(step, args=args)["state"]

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self.manager.close()


def open_checkpoints(run_flags: Iterable[flags.FlagHolder]) -> Checkpoints | None:
    """Opens the checkpoints in --checkpoint_dir; returns None without the flag."""
    directory = CHECKPOINT_DIR.value
    return None if directory is None else Checkpoints(directory, run_flags)


def _lock(directory: Path) -> None:
    """Locks a folder against other runs for as long as this process lives.

    The process keeps the lock file open, so that the lock ends with the process.

    Raises:
        SystemExit: another run holds the lock.
    """
    lock = os.open(directory / ".lock", os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SystemExit(f"--checkpoint_dir={directory}: another run uses this folder") from error
    # Some file systems have no locks; run without one on these.
    except OSError:
        pass


def metrics_path() -> Path | None:
    """Returns the metrics file's path; None if none is asked for or this is not process 0."""
    if not processes.is_first():
        return None
    if _METRICS_FILE.value is not None:
        return Path(_METRICS_FILE.value)
    return Path(CHECKPOINT_DIR.value, "metrics.jsonl") if CHECKPOINT_DIR.value else None


class MetricsLog:
    """Records the metrics of each step, and writes them to a file of one JSON line per step.

    A resumed run repeats the steps after its checkpoint; the file then still has each step once.

    Attributes:
        records: the metrics of all steps so far, one dict per step.
        trace: the experts chosen, [blocks, tokens, K] int16, of each step that this process ran;
            empty unless the metrics have "topk_idx".
    """

    def __init__(self, path: Path | None, start_step: int):
        self.records: list[dict] = []
        self.trace: list[np.ndarray] = []
        self.file = None
        if path is None:
            return
        # Drop the records from `start_step` on: the resumed run repeats these steps.
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                # The line was half written when the run died.
                continue
            if not isinstance(record, dict) or "expert_counts" not in record:
                raise SystemExit(
                    f"{path} is not a metrics file of this program, since it has the line "
                    f"{line!r}: name another --metrics_file"
                )
            if record["step"] < start_step:
                self.records.append(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        temporary.replace(path)
        self.file = path.open("a")

    def append(self, step: int, metrics: dict) -> dict:
        """Waits for the metrics of a step, records them, and returns them as numbers and lists."""
        if "topk_idx" in metrics:
            self.trace.append(np.asarray(metrics.pop("topk_idx"), np.int16))
        record = {"step": step} | jax.tree.map(lambda x: np.asarray(x).tolist(), metrics)
        self.records.append(record)
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        return record


# The loop over steps --------------------------------------------------------------------------


def train(
    state: Any,
    train_step: Callable[[Any, jax.Array], tuple[Any, dict]],
    batch_of: Callable[[int], jax.Array],
    checkpoints: Checkpoints | None,
    log: MetricsLog,
    tokens_per_step: int,
) -> tuple[Any, float]:
    """Trains from `state.step` up to --steps.

    Args:
        state: the training state; its field `step` is the first step to run.
        train_step: compiled function (state, batch) -> (next state, metrics).
        batch_of: returns the batch of a step.
        checkpoints: where to save the state, or None.
        log: records the metrics of each step.
        tokens_per_step: tokens in a batch, for the throughput.

    Returns:
        The last state, and the tokens per second without the first step, which compiles.
    """
    start, steps = int(state.step), STEPS.value
    bar = None
    # tqdm is optional.
    if processes.is_first() and importlib.util.find_spec("tqdm"):
        from tqdm import tqdm

        bar = tqdm(initial=start, total=steps, unit="step", mininterval=0.5)
    tokens_per_second = first_done = 0.0

    def report(step: int, metrics: dict[str, jax.Array]) -> None:
        nonlocal tokens_per_second, first_done
        record = log.append(step, metrics)
        # The first step includes the compilation: measure from its end.
        if step == start:
            first_done = time.perf_counter()
        else:
            tokens = (step - start) * tokens_per_step
            tokens_per_second = tokens / (time.perf_counter() - first_done)
        if bar is not None:
            shown = {"tokens/s": f"{tokens_per_second:,.0f}", "drops": record["num_dropped"]}
            bar.set_postfix({"loss": f"{record['loss']:.3f}"} | shown, refresh=False)
            bar.update()

    # The steps that are launched but whose metrics are not logged yet.
    running: list[tuple[int, dict]] = []
    for step in range(start, steps):
        state, metrics = train_step(state, batch_of(step))
        running.append((step, metrics))
        done = step + 1
        save_now = done == steps or done % _CHECKPOINT_EVERY.value == 0
        # Leave one step queued, so that the devices never idle; log all steps before a checkpoint.
        while len(running) > (0 if save_now else 1):
            report(*running.pop(0))
        if save_now and checkpoints is not None:
            checkpoints.save(state, done)
    if bar is not None:
        bar.close()
    return state, tokens_per_second


# Report ---------------------------------------------------------------------------------------


def plot(
    records: list[dict], unit: str, valid_loss: float | None = None, entropy: float | None = None
) -> None:
    """Plots the training loss and the expert load of the last block, by step, to the file --plot.

    Args:
        records: the metrics of each step.
        unit: what the loss, in nats, is per: "byte" or "token".
        valid_loss: loss on validation data after the last step.
        entropy: loss of the best model that sees no context.
    """
    if not PLOT.value or not records:
        return
    if not importlib.util.find_spec("matplotlib"):
        processes.print_once("no plot: matplotlib is not installed")
        return
    if not processes.is_first():
        return
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    steps = [record["step"] for record in records]
    counts = np.array([record["expert_counts"][-1] for record in records]).T
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(steps, [record["loss"] for record in records], label="training")
    if valid_loss is not None:
        left.plot(steps[-1], valid_loss, "o", label=f"validation, {valid_loss:.2f}")
    if entropy is not None:
        label = f"unigram entropy, {entropy:.2f}"
        left.axhline(entropy, color="gray", linestyle="--", label=label)
    left.set(xlabel="step", ylabel=f"nats per {unit}", title="Loss")
    left.legend()
    extent = (steps[0] - 0.5, steps[-1] + 0.5, len(counts) - 0.5, -0.5)
    image = right.imshow(
        counts / counts.sum(0), aspect="auto", interpolation="nearest", extent=extent, vmin=0
    )
    right.set(xlabel="step", ylabel="expert", title="Expert load, last block")
    figure.colorbar(image, label="share of the choices")
    Path(PLOT.value).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT.value, dpi=120)
    print(f"loss and expert load: {PLOT.value}")
