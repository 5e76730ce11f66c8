"""Tests of the files of metrics, which a resumed run continues."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jax_ep.models.metrics_log import MetricsLog


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_has_each_step_once(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    log = MetricsLog(str(path), None, 0)
    for step in range(4):
        log.write(step, {"loss": np.float32(step)})
    log.write(2, {"eval_loss": 0.5})
    log.write(4, {"eval_loss": 0.25})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    again = MetricsLog(str(path), None, 2)
    again.write(2, {"loss": 7.0})
    want = [{"step": 0, "loss": 0.0}, {"step": 1, "loss": 1.0}]
    assert read(path) == [*want, {"step": 2, "eval_loss": 0.5}, {"step": 2, "loss": 7.0}]


def test_another_file_is_not_overwritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record, half = '{"step": 0, "loss": 1}\n', '{"step": 1, "lo'
    for text, line in (("5\n", "5"), ("notes", "notes"), (f"{half}\n{record}", half)):
        path.write_text(text)
        wanted = f"must be a file of metrics, but has the line {line!r}"
        with pytest.raises(ValueError, match=re.escape(wanted)):
            MetricsLog(str(path), None, 0)
        assert path.read_text() == text
