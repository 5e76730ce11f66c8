"""Tests the lower bound of an exchange's time: its bytes, and the limiting bandwidth."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.bench import floor, operations

# Rank 0 has experts {0, 1}, rank 1 has {2, 3}; each has two tokens. One token of rank 0 chooses
# both experts of rank 1, the other token one expert of each rank. Tokens of rank 1 choose its own
# experts.
TOPK_IDX = np.array([[2, 3], [0, 2], [2, 3], [3, 2]], np.int32)
H = 128
# The bytes of a row in bfloat16.
ROW = 2 * H
WORK = operations.Work(TOPK_IDX, 2, 4, H, jnp.dtype(jnp.bfloat16), 16)
# The number of expert-major rows on a rank, averaged over the two: one row for each choice.
FILLED = 8 / 2
# The number of rank-major rows on a rank, averaged over the two: one row for each token that chose
# experts there.
RECEIVED = 5 / 2
CROSSING = 2 / 2


@pytest.mark.parametrize(
    ("op", "remote", "local"),
    [
        ("dispatch", CROSSING * ROW, (2 + FILLED) * ROW),
        ("combine", CROSSING * ROW, (FILLED + 2) * ROW),
        ("round_trip", 2 * CROSSING * ROW, 2 * (FILLED + 2) * ROW),
        ("dispatch_grad", CROSSING * ROW, (FILLED + 2) * ROW),
        ("combine_grad", CROSSING * ROW, (2 + 2 * FILLED) * ROW),
        ("group_by_expert", 0, (RECEIVED + FILLED) * ROW),
        ("sum_by_token", 0, (FILLED + RECEIVED) * ROW),
    ],
)
def test_bytes_of_an_operation(op, remote, local):
    assert floor.traffic(op, WORK) == (remote, local)


def test_bytes_in_the_rank_layout_and_in_float8():
    ranked = dataclasses.replace(WORK, layout="rank")
    assert floor.traffic("dispatch", ranked) == (CROSSING * ROW, (2 + RECEIVED) * ROW)
    assert floor.traffic("combine_grad", ranked) == (CROSSING * ROW, (2 + RECEIVED) * ROW)
    # A row has H float8 values and one float32 scale.
    quantized = H + 4
    wire = dataclasses.replace(WORK, wire_dtype=jnp.dtype("float8_e4m3fn"))
    assert floor.traffic("dispatch", wire) == (CROSSING * quantized, (2 + FILLED) * ROW)
    kept = dataclasses.replace(wire, output="quantized")
    assert floor.traffic("dispatch", kept) == (CROSSING * quantized, 2 * ROW + FILLED * quantized)
    assert floor.traffic("round_trip", wire).remote == CROSSING * (quantized + ROW)


def test_the_slower_of_link_and_memory_sets_the_floor():
    moved = floor.Traffic(remote=4e6, local=12e6)
    assert floor.floor(moved, floor.Bandwidths(1e12, 4e12)) == (4.0, "link")
    assert floor.floor(moved, floor.Bandwidths(4e12, 4e12)) == (3.0, "memory")
    assert floor.floor(moved, floor.Bandwidths(None, 4e12)) == (3.0, "memory")
    assert floor.floor(moved._replace(remote=0.0), floor.Bandwidths(1e12, None)) is None
    assert floor.floor(moved, floor.Bandwidths()) is None
    assert floor.record(moved, floor.Bandwidths()) == {"remote_bytes": 4e6, "local_bytes": 12e6}


def test_what_this_machine_can_measure():
    found = floor.measure(jax.devices())
    if jax.default_backend() != "gpu":
        assert found == (None, None)
    else:
        assert found.memory > 1e11
        assert (found.link is None) == (len(jax.devices()) == 1)
