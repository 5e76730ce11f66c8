"""Writes the metrics of a training run as JSON lines, and for TensorBoard."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np


class MetricsLog:
    """Writes metrics in process 0, a line for each step and one for each evaluation.

    The file `path` keeps its lines of steps before `start`, the first of this run, so that a
    resumed run has each step once. ValueError if a line has no metrics, unless it is the last and
    cut off. `tensorboard_dir` needs the package tensorboardX, and gets the greatest ratio of an
    expert's load to the mean in place of "expert_counts" [layers, E]. None: not written.
    """

    def __init__(self, path: str | None, tensorboard_dir: str | None, start: int):
        self.file = self.board = None
        if jax.process_index():
            return
        if path is not None:
            kept = _records_before(Path(path), start)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(f"{path}.tmp")
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
            os.replace(temporary, path)
            self.file = open(path, "a")
        if tensorboard_dir is not None:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(tensorboard_dir, purge_step=start)
            # Its thread may not have written the last numbers when the program ends.
            atexit.register(self.board.close)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes numbers and arrays by name."""
        values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        if self.file is not None:
            self.file.write(json.dumps({"step": step} | values) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if name == "expert_counts":
                    name, value = "busiest_expert", np.max(np.max(value, 1) / np.mean(value, 1))
                self.board.add_scalar(name, value, step)
            self.board.flush()


def _records_before(path: Path, start: int) -> list[dict[str, Any]]:
    """Reads a file's records of steps before `start`; [] if there is no file."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) and '{"step": '.startswith(line[:9]):
                break  # the run died while it wrote this line
            record = None
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError(f"{path} must be a file of metrics, but has the line {line!r}.")
        # An evaluation has the number of the step that follows it, so one of `start` is kept.
        if record["step"] < start + ("eval_loss" in record):
            records.append(record)
    return records
