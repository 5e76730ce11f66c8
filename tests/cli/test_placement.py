"""Tests of `python -m jax_ep placement`, on a trace with groups of tokens and one hot expert."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import jax_ep.cli


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Writes a file with the choices of tokens in several steps and layers; returns its path.

    The tokens and the 16 experts form four groups, and each token chooses experts of its group. In
    addition, three tenths of all first choices are replaced by expert 0, so that it is busy.
    """
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


def test_every_method_is_compared(trace, tmp_path, capsys):
    arguments = [f"--trace={trace}", "--ranks=4", f"--json={tmp_path}/out.json"]
    if pytest.importorskip("matplotlib"):
        arguments.append(f"--plot={tmp_path}/out.png")
    assert jax_ep.cli.main(["jax_ep", "placement", *arguments]) == 0
    text = capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    in_order, balanced = rows["in order"], rows["balance, 20 slots"]
    assert balanced["balance"] < 0.9 * min(rows["balance"]["balance"], in_order["balance"])
    assert rows["affinity"]["rank_changes"] < 0.8 * in_order["rank_changes"]
    assert rows["affinity"]["wire_rows"] < in_order["wire_rows"]
    assert balanced["us"] < in_order["us"]
    assert re.search(r"in order +[\d.]+ +[\d.]+ +[\d.]+% +\d+\n", text)
    assert "by layer" in text and "since the placement was found" in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_experts_that_nobody_chose_are_counted(trace, tmp_path, capsys):
    """The number of experts must come from the flag, the trace, or else the largest id."""
    topk_idx, path = np.load(trace)["topk_idx"], tmp_path / "trace.npz"
    num_experts = int(topk_idx.max()) + 1
    for said, flags, count in (
        ({}, [], num_experts),
        ({"num_experts": num_experts + 4}, [], num_experts + 4),
        ({"num_experts": num_experts + 4}, [f"--num_experts={num_experts + 8}"], num_experts + 8),
    ):
        np.savez(path, topk_idx=topk_idx, **said)
        assert jax_ep.cli.main(["jax_ep", "placement", f"--trace={path}", "--ranks=4", *flags]) == 0
        assert f"of E={count} experts; N=4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--trace is required: name an .npz file"),
        (["--trace=nowhere.npz"], "--trace: cannot read the array topk_idx of 'nowhere.npz'"),
        (
            ["--trace=TRACE", "--ranks=4", "--fit_steps=6"],
            "--fit_steps must be at least 1 and below 6, ",
        ),
        (["--trace=TRACE", "--ranks=4", "--slots=18"], "--slots: must be a multiple of 4 ranks"),
        (["--trace=TRACE", "--ranks=4", "--slots=1000000"], "--slots: a copy of each of"),
        (["--trace=TRACE", "--ranks=4", "--num_experts=9"], "--num_experts must be above "),
        (["--trace=TRACE", "--num_experts=2147483647"], "at most 65536 experts"),
        (["--trace=TRACE", "--ranks=4", "--hosts=3"], "--hosts: 3 does not divide --ranks=4"),
        (["--trace=TRACE", "--matmul_tflops=0"], "--matmul_tflops must be above 0, but is 0"),
    ],
)
def test_wrong_flags_are_refused(arguments, message, trace, capsys):
    arguments = [argument.replace("TRACE", trace) for argument in arguments]
    assert jax_ep.cli.main(["jax_ep", "placement", *arguments]) == 2
    assert message in capsys.readouterr().err


CHOICES = np.arange(64).reshape(4, 2, 4, 2) % 8
EMPTY = CHOICES.copy()
EMPTY[3, 1] = -1


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("t.npy", lambda path: np.save(path, CHOICES), "it is not an .npz file"),
        ("t.npz", lambda path: path.touch(), "it is not an .npz file"),
        ("t.npz", lambda path: path.write_text("text"), "it is not an .npz file"),
        (
            "t.npz",
            lambda path: np.savez(path, other=CHOICES),
            "must hold an array topk_idx, but holds other",
        ),
        ("t.npz", lambda path: np.savez(path, topk_idx=CHOICES * 1.5), "dtype float64"),
        ("t.npz", lambda path: np.savez(path, topk_idx=CHOICES[:, :0]), "shape (4, 0, 4, 2)"),
        ("t.npz", lambda path: np.savez(path, topk_idx=CHOICES[:1]), "shape (1, 2, 4, 2)"),
        ("t.npz", lambda path: np.savez(path, topk_idx=CHOICES + 2**40), "at most 65536 experts"),
        (
            "t.npz",
            lambda path: np.savez(path, topk_idx=EMPTY),
            "no token chose an expert in step 3, layer 1",
        ),
        *(
            (
                "t.npz",
                lambda path, number=number: np.savez(path, topk_idx=CHOICES, num_experts=number),
                f"num_experts must be a positive integer, but is {number}",
            )
            for number in (0, -8, 8.0, "8", np.array([8, 8]))
        ),
    ],
)
def test_what_is_no_trace_is_refused(name, write, message, tmp_path, capsys):
    write(tmp_path / name)
    assert jax_ep.cli.main(["jax_ep", "placement", f"--trace={tmp_path / name}", "--ranks=4"]) == 2
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
    assert jax_ep.cli.main(["jax_ep", "placement", *arguments, "--num_experts=7"]) == 2
    message = "--num_experts must be above 7, the largest expert id in the trace, but is 7"
    assert message in capsys.readouterr().err
