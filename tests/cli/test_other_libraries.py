"""Other libraries' buffers, by their formulas."""

from __future__ import annotations

from jax_ep.cli.other_libraries import other_libraries

MODEL = dict(num_tokens=128, hidden=7168, num_experts=256, top_k=8, num_ranks=8)


def test_other_libraries_hold_what_they_say():
    """Figures published for this model, in MiB."""
    published = {
        "DeepEP V1": 1820,
        "NCCL EP, before": 1820,
        "NCCL EP, expert-major": 938,
        "NCCL EP, rank-major": 57,
        "NCCL EP, NVLink alone": 28,
    }
    counted = other_libraries(**MODEL)
    assert {name: round(size / 2**20) for name, size in counted.items()} == published
