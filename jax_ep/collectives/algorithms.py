"""The names of the collectives and of their algorithms; `jax_ep.collectives.api` describes them.

Names that end in "ll" are of algorithms over the low-latency protocol.
"""

from __future__ import annotations

Algorithm = str | None  # None is the fastest algorithm that can run

# The algorithms of all_reduce_rms_norm that sum and normalize in one kernel.
FUSED = (
    "fused",
    "fused_one_shot_ll",
    "fused_two_shot_ll",
    "fused_one_shot",
    "fused_two_shot",
)
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("one_shot_ll", "two_shot_ll", "one_shot", "two_shot", "xla", "multimem"),
    "all_gather": ("ll", "direct", "xla"),
    "reduce_scatter": ("ll", "direct", "xla"),
    "all_to_all": ("ll", "direct", "xla"),
    "all_reduce_rms_norm": (*FUSED, "unfused", "xla"),
}


def is_low_latency(algorithm: str) -> bool:
    """Returns whether the algorithm uses the low-latency protocol."""
    return algorithm.endswith("ll")
