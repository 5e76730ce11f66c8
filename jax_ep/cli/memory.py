"""`python -m jax_ep memory`: the bytes per rank that communication holds, and where they go."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax.numpy as jnp
from absl import flags

from jax_ep import memory, wire
from jax_ep.cli import command_flags

FLAGS = command_flags()
_here: dict[str, Any] = {"flag_values": FLAGS}
_TOKENS = flags.DEFINE_integer("tokens", 128, "T, tokens per rank.", lower_bound=1, **_here)
_RANKS = flags.DEFINE_integer("ranks", 8, "N.", lower_bound=1, **_here)
_HIDDEN = flags.DEFINE_integer("hidden", 7168, "H.", lower_bound=1, **_here)
_NUM_EXPERTS = flags.DEFINE_integer("num_experts", 256, "E.", lower_bound=1, **_here)
_TOP_K = flags.DEFINE_integer("top_k", 8, "K.", lower_bound=1, **_here)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of the rows.", **_here
)
_CAPACITY = flags.DEFINE_integer(
    "capacity", None, "R, rows of a receive buffer. Default: dropless.", lower_bound=1, **_here
)
_JSON = flags.DEFINE_boolean("json", False, "Print one JSON object instead of text.", **_here)

_MIB = 2**20


def run() -> int:
    if _NUM_EXPERTS.value % _RANKS.value:
        raise flags.Error(f"--num_experts: {_NUM_EXPERTS.value} over {_RANKS.value} ranks")
    facts = collect()
    print(json.dumps(facts, indent=2) if _JSON.value else render(facts))
    return 0


def collect() -> dict[str, Any]:
    """Everything that `memory` prints, as JSON-serializable values; sizes in bytes per rank."""
    model: dict[str, Any] = {
        "num_tokens": _TOKENS.value,
        "hidden": _HIDDEN.value,
        "num_experts": _NUM_EXPERTS.value,
        "top_k": _TOP_K.value,
        "num_ranks": _RANKS.value,
    }
    here = []
    ways = itertools.product(memory.IMPLEMENTATIONS, memory.LAYOUTS, memory.OPERATIONS, _wires())
    for implementation, layout, operation, wire_dtype in ways:
        outputs = ["dequantized"]
        if operation == "dispatch" and wire_dtype is not None:
            outputs.append("quantized")
        for output in outputs:
            way: dict[str, Any] = {
                "operation": operation,
                "implementation": implementation,
                "layout": layout,
                "wire_dtype": wire_dtype,
                "output": output,
            }
            buffers = memory.workspace_bytes(
                **way, dtype=_DTYPE.value, capacity=_CAPACITY.value, **model
            )
            here.append(way | {"buffers": buffers})
    return {"model": model, "here": here, "others": memory.other_libraries(**model)}


def _wires() -> list[str | None]:
    """The wire dtypes that rows of this length can take."""
    if _HIDDEN.value % wire.BLOCK:
        return [None]
    return [None, *(jnp.dtype(dtype).name for dtype in wire.DTYPES)]


def render(facts: dict[str, Any]) -> str:
    model = facts["model"]
    lines = [
        "T={num_tokens} tokens a rank, N={num_ranks} ranks, H={hidden}, E={num_experts}, "
        "K={top_k}: MiB per rank beside inputs and outputs".format(**model),
        "",
    ]
    for use in facts["here"]:
        buffers = use["buffers"]
        name = f"{use['operation']}, {use['implementation']}, by {use['layout']}"
        if use["wire_dtype"] is not None:
            name += f", {use['wire_dtype']}"
        if use["output"] == "quantized":
            name += " kept"
        parts = ", ".join(f"{part} {_mib(size)}" for part, size in buffers.items())
        lines.append(f"{name:<46}{_mib(sum(buffers.values())):>10}   {parts}")
    lines += ["", "Low-latency buffers of other libraries, by their formulas"]
    lines += [f"{name:<46}{_mib(size):>10}" for name, size in facts["others"].items()]
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / _MIB:.2f}"
