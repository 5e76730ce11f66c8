"""Tests the formulas for the buffer sizes of other libraries."""

from __future__ import annotations

from jax_ep.cli.other_libraries import other_libraries

MODEL = dict(num_tokens=128, hidden=7168, num_experts=256, top_k=8, num_ranks=8)


def test_other_libraries_hold_what_they_say():
    """The formulas must give the figures, in MiB, that were published for this model."""
    published = {
        "DeepEP V1": 1820,
        "NCCL EP, before": 1820,
        "NCCL EP, expert-major": 938,
        "NCCL EP, rank-major": 57,
        "NCCL EP, NVLink alone": 28,
    }
    counted = other_libraries(**MODEL)
    assert {name: round(size / 2**20) for name, size in counted.items()} == published
