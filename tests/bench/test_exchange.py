"""Tests of `python -m jax_ep bench`: its operations, the rows that it counts, and its floor."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import meshes

import jax_ep.cli
from jax_ep.bench import exchange as bench
from jax_ep.bench import operations, timing
from jax_ep.bench.operations import Work
from jax_ep.bench.timing import Bandwidths

ARGS = ("--tokens=4", "--num_experts=8", "--top_k=2", "--hidden=128", "--repeats=1")


@pytest.mark.needs_devices(4)
@pytest.mark.parametrize("op", operations.DIRECTIONS)
def test_a_baseline_sends_all_tokens_or_sums_all_ranks(op):
    work = Work(operations.uniform_routing(4, 6, 16, 3), 16, 128, None, jnp.float32)
    prepare, step = operations.make_operation(op, work, "all_gather_reduce_scatter")
    mesh = meshes.expert_mesh(4)
    operand = timing.on_ranks(prepare, mesh)(operations.rank_seeds(4), work.topk_idx)
    out = timing.on_ranks(step, mesh)(operand)
    if operations.DIRECTIONS[op] == "out":
        np.testing.assert_array_equal(out, np.broadcast_to(operand, out.shape))
    else:
        np.testing.assert_allclose(out, operand.sum(axis=0), atol=1e-5)


# Rank 0 has experts {0, 1}, rank 1 has {2, 3}; each has two tokens. One token of rank 0 chooses
# both experts of rank 1, the other token one expert of each rank. Tokens of rank 1 choose its own
# experts. So of 8 choices, each rank computes 4 on average, of 5/2 tokens, and one token crosses.
WORK = Work(np.array([[[2, 3], [0, 2]], [[2, 3], [3, 2]]], np.int32), 4, 128, 16)
ROW, FLOAT8_ROW = 256, 132


@pytest.mark.parametrize(
    ("op", "changes", "remote", "local"),
    [
        ("dispatch", {}, ROW, 6 * ROW),
        ("combine", {}, ROW, 6 * ROW),
        ("combine_grad", {}, ROW, 10 * ROW),
        ("dispatch", {"layout": "rank"}, ROW, 4.5 * ROW),
        ("round_trip", {"wire_dtype": jnp.dtype("float8_e4m3fn")}, FLOAT8_ROW + ROW, 12 * ROW),
        (
            "dispatch",
            {"wire_dtype": jnp.dtype("float8_e4m3fn"), "output": "quantized"},
            FLOAT8_ROW,
            2 * ROW + 4 * FLOAT8_ROW,
        ),
    ],
)
def test_bytes_of_an_operation(op, changes, remote, local):
    work = dataclasses.replace(WORK, **changes)
    assert operations.sent_bytes(op, work) == remote
    assert operations.local_bytes(op, work) == local


def test_collectives_of_xla_send_all_tokens_to_all_ranks():
    for name in ("xla", *operations.BASELINES):
        assert operations.sent_bytes("dispatch", WORK, name) == 2 * ROW
    assert operations.sent_bytes("dispatch", WORK, "two_level") is None


def test_the_slower_of_link_and_memory_sets_the_floor():
    assert bench.floor(4e6, 12e6, Bandwidths(1e12, 4e12)) == (4.0, "link")
    assert bench.floor(4e6, 12e6, Bandwidths(4e12, 4e12)) == (3.0, "memory")
    assert bench.floor(4e6, 12e6, Bandwidths(None, 4e12)) == (3.0, "memory")
    assert bench.floor(0.0, 12e6, Bandwidths(1e12, None)) is None


@pytest.mark.needs_devices(4)
def test_check_sees_a_wrong_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "2")
    make = operations.make_operation

    def wrong(op, work, implementation):
        operation = make(op, work, implementation)
        if implementation != "two_level":
            return operation
        return operation._replace(step=lambda state: operation.step(state).at[0, 0].add(1))

    monkeypatch.setattr(bench, "make_operation", wrong)
    flags = "--ops=combine", "--ranks=4", "--iterations=10", "--baselines="
    assert jax_ep.cli.main(["jax_ep", "bench", *ARGS, *flags, "--check"]) == 1
    assert "two_level: AssertionError: " in capsys.readouterr().out
