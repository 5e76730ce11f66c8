"""Divides the device time of a training step by what its kernels are part of.

A profile names kernels and the operations of the compiled program that they run. The text of that
program says, in the `op_name` of each operation, in which Flax module and named scope JAX traced
it. The kernels of this library are known by their own names, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jax_ep.bench.layer import MATMUL

# The parts, each with the `op_name` of its operations; an operation is of the first that fits.
# Names of modules are those of `jax_ep.bench.decoder`.
_OPERATIONS = {
    "attention": r"\bself_attn\b",
    "routing": r"\bmlp\b.*\brouter\b",
    "exchange": r"\bmlp\b.*(\b(dispatch|combine)\b|all_gather|all_to_all|(psum|reduce)_scatter)",
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
    """Maps the operations of a compiled program, and their kernels' names, to their `op_name`.

    `text` is what `as_text` of the compiled program returns. XLA's kernel of an operation has the
    operation's name with underscores.
    """
    found = dict(_INSTRUCTION.findall(text))
    return {re.sub(r"[.\-]", "_", name): op_name for name, op_name in found.items()} | found


def part_of(kernel: str, op_name: str | None) -> str:
    """Returns the part, one of `PARTS`, that a kernel belongs to; `op_name` is None if unknown."""
    if _EXCHANGE.search(kernel):
        return "exchange"
    if MATMUL.search(kernel):
        return "experts"
    part = REST
    if op_name is not None:
        fitting = (part for part, form in _OPERATIONS.items() if re.search(form, op_name))
        part = next(fitting, REST)
    # Collectives that are neither the exchange nor the optimizer's sum gradients over devices.
    if _COLLECTIVE.search(kernel) and part not in ("exchange", "optimizer"):
        return GRADIENT_SUMS
    return part


def labels(operations: Mapping[str, str]) -> Callable[[Any], str]:
    """Returns a function that names an event of a profile "part: kernel"."""

    def label(event: Any) -> str:
        stats = {name: value for name, value in event.stats if name == "hlo_op"}
        op_name = operations.get(stats.get("hlo_op", ""), operations.get(event.name))
        return f"{part_of(event.name, op_name)}: {event.name}"

    return label


def sums(by_kernel: Mapping[str, float]) -> dict[str, float]:
    """Sums times of kernels that `labels` has named, by part."""
    found = dict.fromkeys(PARTS, 0.0)
    for label, time in by_kernel.items():
        found[label.partition(": ")[0]] += time
    return found
