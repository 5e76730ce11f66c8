"""Tests of `python -m jax_ep placement`, on a trace with groups of tokens and one hot expert."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jax_ep.cli
from jax_ep.cli.placement import traffic
from jax_ep.placement import Placement


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Writes a file with the choices of tokens in several steps and layers; returns its path."""
    rng = np.random.default_rng(0)
    members = np.stack([rng.permutation(16).reshape(4, 4) for _ in range(3)])
    group = rng.integers(0, 4, (6, 200))
    choice = rng.permuted(np.tile(np.arange(4), (6, 3, 200, 1)), axis=3)[..., :2]
    topk_idx = np.stack([members[i][group[..., None], choice[:, i]] for i in range(3)], axis=1)
    hot = (rng.random((6, 3, 200)) < 0.3) & (topk_idx[..., 1] != 0)
    topk_idx[..., 0] = np.where(hot, 0, topk_idx[..., 0])
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    np.savez(path, topk_idx=topk_idx)
    return str(path)


def test_every_method_is_compared(trace, tmp_path):
    arguments = [f"--trace={trace}", "--ranks=4", f"--json={tmp_path}/out.json"]
    assert jax_ep.cli.main(["jax_ep", "placement", *arguments]) == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    in_order, balanced = rows["in order"], rows["balance, 20 slots"]
    assert balanced["balance"] < 0.9 * min(rows["balance"]["balance"], in_order["balance"])
    assert rows["affinity"]["rank_changes"] < 0.8 * in_order["rank_changes"]
    assert rows["affinity"]["wire_rows"] < in_order["wire_rows"]


CHOICES = np.arange(64).reshape(4, 2, 4, 2) % 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "it is not an .npz file"),
        ({"other": CHOICES}, "must hold topk_idx, but holds other"),
        ({"topk_idx": CHOICES * 1.5}, "dtype float64"),
        ({"topk_idx": CHOICES[:, :0]}, "shape (4, 0, 4, 2)"),
        ({"topk_idx": CHOICES[:1]}, "shape (1, 2, 4, 2)"),
        ({"topk_idx": CHOICES + 2**40}, "at most 65536 experts"),
        ({"topk_idx": CHOICES, "num_experts": 7}, "num_experts must be above 7, the largest id"),
        ({"topk_idx": CHOICES, "num_experts": np.array([8, 8])}, "t.npz"),
    ],
)
def test_what_is_no_trace_is_refused(fields, message, tmp_path, capsys):
    path = tmp_path / "t.npz"
    path.write_text("text") if fields is None else np.savez(path, **fields)
    assert jax_ep.cli.main(["jax_ep", "placement", f"--trace={path}", "--ranks=4"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("--trace: ") and message in first


def test_experts_are_counted_in_the_whole_trace(tmp_path, capsys):
    """Experts must be counted in the whole trace, although placements use its first half only."""
    choices = np.where(np.arange(4)[:, None, None, None] < 2, -1, CHOICES)
    np.savez(tmp_path / "trace.npz", topk_idx=choices)
    arguments = [f"--trace={tmp_path}/trace.npz", "--ranks=4"]
    assert jax_ep.cli.main(["jax_ep", "placement", *arguments]) == 0
    # 12 slots for 8 experts: the second half of the trace counts, too.
    assert "balance, 12 slots" in capsys.readouterr().out


def test_a_step_worked_out_by_hand():
    """Rows and rank changes must be those counted by hand, for two ranks with two tokens each."""
    placement = Placement.in_order(num_experts=4, num_slots=4, num_ranks=2, layers=2)
    step = np.array([
        [[0, 1], [2, 3], [0, 2], [3, -1], [0, 0]],
        [[0, 2], [2, 3], [1, 0], [0, 1], [0, 0]],
    ])  # fmt: skip
    rows, wire_rows, rank_changes = traffic(step, placement)
    np.testing.assert_array_equal(rows, [[3, 4], [5, 3]])
    # In layer 0, token 1 sends one row to rank 1 for both choices, and token 2 one to rank 0.
    np.testing.assert_array_equal(wire_rows, [[1, 1], [2, 2]])
    # The tokens have 4, 4, 4 and 2 pairs of choices in the two layers; 2, 0, 2 and 2 change rank.
    np.testing.assert_allclose(rank_changes, [6 / 14])
