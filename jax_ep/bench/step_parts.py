"""Divides the device time of a training step among its parts, such as attention and experts.

A profile names, for each kernel, the HLO operation that it runs. The text of the compiled program
has an `op_name` for each operation: the named scopes in which JAX traced it. They tell the part; of
kernels of this library, their own names do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jax_ep.bench.layer import MATMUL

# Maps each part of a training step to a regular expression for the `op_name` of its operations, by
# the scopes of `jax_ep.models.decoder`. An operation belongs to the first part that matches.
_OPERATIONS = {
    "attention": r"\bself_attn\b",
    "routing": r"\bmlp\b.*\brouter\b",
    "exchange": r"\bmlp\b.*(\b(dispatch|combine)\b|all_gather|all_to_all|(psum|reduce)_scatter)",
    "shared experts": r"\bmlp\b.*\bshared_experts\b",
    "experts": r"\bmlp\b.*(\bexperts\b|_compute_gated|ragged_dot)",
    "norms and losses": r"layernorm\b|\bnorm\b|\bloss\b|\bembed_tokens\b",
    "optimizer": r"\boptimizer\b",
}
GRADIENT_SUMS, REST = "gradient sums", "rest"
PARTS = (*_OPERATIONS, GRADIENT_SUMS, REST)
_EXCHANGE = re.compile(r"^ep_")
_COLLECTIVE = re.compile(r"nccl|all-?reduce|reduce-?scatter|all-?gather", re.IGNORECASE)

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name=\"([^\"]*)\"", re.MULTILINE)


def operations_of(text: str) -> dict[str, str]:
    """Finds the `op_name` of each operation in the HLO text of a compiled program.

    The keys are the names of operations and of their kernels, which have "_" for "." and "-".
    """
    found = dict(_INSTRUCTION.findall(text))
    return {re.sub(r"[.\-]", "_", name): op_name for name, op_name in found.items()} | found


def part_of(kernel: str, op_name: str | None) -> str:
    """Returns the part that a kernel belongs to; `op_name` is None if unknown."""
    if _EXCHANGE.search(kernel):
        return "exchange"
    part = REST
    if op_name is not None:
        fitting = (part for part, form in _OPERATIONS.items() if re.search(form, op_name))
        part = next(fitting, REST)
    if MATMUL.search(kernel) and part != "shared experts":
        return "experts"
    # Collectives outside of the exchange and the optimizer sum gradients over devices.
    if is_collective(kernel) and part not in ("exchange", "optimizer"):
        return GRADIENT_SUMS
    return part


def is_collective(kernel: str) -> bool:
    return _COLLECTIVE.search(kernel) is not None


def labels(operations: Mapping[str, str]) -> Callable[[Any], str]:
    """Returns what labels an event "part: kernel name"; `operations` is from `operations_of`."""

    def label(event: Any) -> str:
        stats = {name: value for name, value in event.stats if name == "hlo_op"}
        op_name = operations.get(stats.get("hlo_op", ""), operations.get(event.name))
        return f"{part_of(event.name, op_name)}: {event.name}"

    return label


def sums(by_kernel: Mapping[str, float]) -> dict[str, float]:
    found = dict.fromkeys(PARTS, 0.0)
    for label, time in by_kernel.items():
        found[label.partition(": ")[0]] += time
    return found
