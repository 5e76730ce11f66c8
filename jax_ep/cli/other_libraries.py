"""Computes the sizes of other libraries' low-latency communication buffers.

The formulas are taken from the libraries' source code and papers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pallas_kernels.fabric.hardware import WORD_BYTES, align_up


class OtherLibrary(NamedTuple):
    """The size of another library's low-latency communication buffers.

    Attributes:
      name: the library and its version or layout.
      formula: the bytes per rank as a formula in text. Its letters are N, the number of ranks; E,
        the number of experts; K, the number of experts that a token chooses; B, the number of
        tokens of a rank; and P, the bytes of a message that carries one token.
      source: where the formula is published.
      size: the formula as a function (N, E, K, B·P) -> bytes per rank.
    """

    name: str
    formula: str
    source: str
    size: Callable[[int, int, int, int], int]


def message_bytes(hidden: int) -> int:
    """Returns P of the formulas in `OTHER_LIBRARIES`: the bytes of a token's message in a combine.

    A message holds `hidden` bfloat16 values and two more bfloat16 numbers per 128 values.
    """
    return 2 * hidden + hidden // 128 * 4


def _flags(num_experts: int) -> int:
    return align_up(num_experts * WORD_BYTES, 128)


_NCCL_EP = "arXiv:2603.13606, section IV.D; NVIDIA/nccl pull request 2040"
# The factor 2 in the formulas is for two sets of buffers: one for odd and one for even calls.
OTHER_LIBRARIES = (
    OtherLibrary(
        "DeepEP V1",
        "2 (E·B·P sent + E·B·P received + 4 E)",
        "LowLatencyLayout in csrc/config.hpp of deepseek-ai/DeepEP",
        lambda n, e, k, rows: 2 * (2 * e * rows + _flags(e)),
    ),
    OtherLibrary(
        "NCCL EP, before",
        "the same",
        f"{_NCCL_EP}: where it began",
        lambda n, e, k, rows: 2 * (2 * e * rows + _flags(e)),
    ),
    OtherLibrary(
        "NCCL EP, expert-major",
        "2 (E·B·P sent + max(N, K)·B·P received + 4 E)",
        f"{_NCCL_EP}: one message per (rank, token), the routes in its header; what combine sends "
        "lies by expert",
        lambda n, e, k, rows: 2 * (e * rows + max(n, k) * rows + _flags(e)),
    ),
    OtherLibrary(
        "NCCL EP, rank-major",
        "2 (N·B·P sent + max(N, K)·B·P received + 4 E)",
        "as before; what combine sends lies by rank",
        lambda n, e, k, rows: 2 * (n * rows + max(n, k) * rows + _flags(e)),
    ),
    OtherLibrary(
        "NCCL EP, NVLink alone",
        "2 max(N, K)·B·P",
        "the least of that design: peers are written directly, so nothing is sent from a buffer",
        lambda n, e, k, rows: 2 * max(n, k) * rows,
    ),
)


def other_libraries(
    *, num_tokens: int, hidden: int, num_experts: int, top_k: int, num_ranks: int
) -> dict[str, int]:
    """Returns a dict from each library in `OTHER_LIBRARIES` to its buffers' bytes per rank."""
    rows = num_tokens * message_bytes(hidden)
    return {
        other.name: other.size(num_ranks, num_experts, top_k, rows) for other in OTHER_LIBRARIES
    }
