"""What training programs share: optimizer, checkpoints, metrics, the loop over steps, a plot.

The flags here are those of every training program. `processes.py` has those for several processes.
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
    "Folder to save to, and to start from where it has a checkpoint; all hosts must share it.",
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
_METRICS_FILE = flags.DEFINE_string(
    "metrics_file", None, "One JSON line per step. Default: metrics.jsonl in --checkpoint_dir."
)
PLOT = flags.DEFINE_string(
    "plot", "training.png", "File for a plot of loss and expert load; '': no plot."
)
RUN_FLAGS = (BATCH_SIZE, SEED, LEARNING_RATE)

WARMUP_STEPS = 30


def learning_rate(step: jax.Array) -> jax.Array:
    """Returns the learning rate of a step: linear warm-up, then 1/sqrt(step).

    It does not depend on --steps, so a longer run continues a shorter one exactly.
    """
    progress = (step + 1) / WARMUP_STEPS
    return LEARNING_RATE.value * jnp.minimum(progress, jax.lax.rsqrt(progress))


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.98, weight_decay=0.1)
    )


# Checkpoints and metrics ----------------------------------------------------------------------


class Checkpoints:
    """The folder of a run's checkpoints.

    Orbax writes a checkpoint under a temporary name and renames it when it is whole, so a
    half-written one is never taken for a checkpoint.

    Args:
      directory: the folder.
      run_flags: a checkpoint and the run that continues it must agree on these.
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
        """Copies the state to the host; Orbax writes it while training goes on."""
        config = {flag.name: flag.value for flag in self.run_flags}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(config)
        )
        self.manager.save(step, args=args)

    def restore(self, state: Any) -> Any:
        """Returns the newest whole checkpoint, or `state` where there is none.

        The result is laid out as `state` is, which may hold `jax.ShapeDtypeStruct` with shardings.
        The checkpoint may come from another mesh, and from another number of processes.
        """
        step = self.manager.latest_step()
        if step is None:
            return state
        folder = self.manager.directory / str(step)
        if missing := [name for name in ("config", "state") if not (folder / name).exists()]:
            raise SystemExit(
                f"{folder} is no whole checkpoint, it lacks {' and '.join(missing)}: remove it to "
                "go on from the one before"
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
    """Opens the folder --checkpoint_dir; returns None without the flag."""
    directory = CHECKPOINT_DIR.value
    return None if directory is None else Checkpoints(directory, run_flags)


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


def metrics_path() -> Path | None:
    """Returns the file for metrics, or None where this process writes none."""
    if not processes.is_first():
        return None
    if _METRICS_FILE.value is not None:
        return Path(_METRICS_FILE.value)
    return Path(CHECKPOINT_DIR.value, "metrics.jsonl") if CHECKPOINT_DIR.value else None


class MetricsLog:
    """A file of one JSON line per step, each step once, also when the run is killed and resumed.

    Attributes:
      records: of all steps up to now.
      trace: with "topk_idx" among the metrics, the choices [blocks, tokens, K] of each step of this
        process.
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


# The loop over steps --------------------------------------------------------------------------


def train(
    state: Any,
    train_step: Callable[[Any, jax.Array], tuple[Any, dict]],
    batch_of: Callable[[int], jax.Array],
    checkpoints: Checkpoints | None,
    log: MetricsLog,
    tokens_per_step: int,
) -> tuple[Any, float]:
    """Trains up to --steps; returns the state and the tokens per second after the first step.

    `state.step` is where to begin, and `batch_of(step)` is the batch of a step.
    """
    start, steps = int(state.step), STEPS.value
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
            tokens = (step - start) * tokens_per_step
            tokens_per_second = tokens / (time.perf_counter() - first_done)
        if bar is not None:
            shown = {"tokens/s": f"{tokens_per_second:,.0f}", "drops": record["num_dropped"]}
            bar.set_postfix({"loss": f"{record['loss']:.3f}"} | shown, refresh=False)
            bar.update()

    running: list[tuple[int, dict]] = []  # steps whose metrics nobody has waited for
    for step in range(start, steps):
        state, metrics = train_step(state, batch_of(step))
        running.append((step, metrics))
        done = step + 1
        save_now = done == steps or done % _CHECKPOINT_EVERY.value == 0
        # One step stays queued, so the devices never idle; before a checkpoint all are logged.
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
    """Draws to --plot the loss, in nats per `unit`, and each expert's share of the choices.

    The share is that in the last block, by step. `valid_loss` is the loss on other data after the
    last step, `entropy` the loss of the best model without context.
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
