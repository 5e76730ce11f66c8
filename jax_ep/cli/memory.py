"""`python -m jax_ep memory`: prints the bytes per rank that each buffer of communication takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jax_ep.cli.other_libraries import OTHER_LIBRARIES, message_bytes, other_libraries
from jax_ep.exchange import memory, quantization
from jax_ep.flags import Error, Flags
from pallas_kernels.fabric import layout as heap

FLAGS = Flags()
_TOKENS = FLAGS.integer("tokens", 128, "T, tokens per rank.")
_RANKS = FLAGS.integer("ranks", 8, "N.")
_HOSTS = FLAGS.integer("hosts", 1, "M; above 1, of the exchange of two levels.")
_HOST_CAPACITY = FLAGS.integer("host_capacity", None, "Rows that a rank sends to each host.")
_HIDDEN = FLAGS.integer("hidden", 7168, "H.")
_NUM_EXPERTS = FLAGS.integer("num_experts", 256, "E.")
_TOP_K = FLAGS.integer("top_k", 8, "K.")
_DTYPE = FLAGS.choice("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of the rows.")
_CAPACITY = FLAGS.integer("capacity", None, "R, rows of a receive buffer. Default: dropless.")
_ALIGNMENT = FLAGS.integer("expert_alignment", 1, "Each expert's block starts at a multiple.")
_JSON = FLAGS.boolean("json", "Print one JSON object instead of text.")

_MIB = 2**20


def run() -> int:
    if _NUM_EXPERTS.value % _RANKS.value:
        raise Error(f"--num_experts: {_NUM_EXPERTS.value} is no multiple of --ranks={_RANKS.value}")
    if _RANKS.value % _HOSTS.value:
        raise Error(f"--hosts: {_HOSTS.value} does not divide --ranks={_RANKS.value}")
    if _HOST_CAPACITY.value is not None and _HOSTS.value == 1:
        raise Error("--host_capacity: is of several hosts, --hosts")
    facts = collect()
    print(json.dumps(facts, indent=2) if _JSON.value else render(facts))
    return 0


def collect() -> dict[str, Any]:
    """Collects everything that `memory` prints, as JSON-serializable values in bytes per rank."""
    model: dict[str, Any] = {
        "num_tokens": _TOKENS.value,
        "hidden": _HIDDEN.value,
        "num_experts": _NUM_EXPERTS.value,
        "top_k": _TOP_K.value,
        "num_ranks": _RANKS.value,
    }
    rows: dict[str, Any] = {
        "dtype": _DTYPE.value,
        "capacity": _CAPACITY.value,
        "expert_alignment": _ALIGNMENT.value,
    }
    hosts = {"num_hosts": _HOSTS.value, "host_capacity": _HOST_CAPACITY.value}
    here, unavailable = [], []
    for way in _ways():
        try:
            buffers = memory.workspace_bytes(**way, **rows, **model, **hosts)
            here.append(way | {"buffers": buffers})
        except ValueError as error:  # the flags were checked: kernels do not support these sizes
            unavailable.append(way | {"reason": str(error)})
    sizes = other_libraries(**model)
    others = [
        {
            "name": other.name,
            "formula": other.formula,
            "source": other.source,
            "bytes": sizes[other.name],
        }
        for other in OTHER_LIBRARIES
    ]
    return {
        "model": model,
        "hosts": hosts,
        "rows": rows,
        "here": here,
        "unavailable": unavailable,
        "message_bytes": message_bytes(_HIDDEN.value),
        "others": others,
        "heap_bytes": heap.heap_bytes(_RANKS.value // _HOSTS.value),
    }


def _ways() -> Iterator[dict[str, Any]]:
    """Yields the arguments of every operation in every implementation, layout and wire dtype.

    Not every one of them supports the sizes that the flags give.
    """
    wire_dtypes: list[str | None] = [None]
    if _HIDDEN.value % quantization.BLOCK == 0:
        wire_dtypes += [jnp.dtype(dtype).name for dtype in quantization.DTYPES]
    for implementation in memory.IMPLEMENTATIONS:
        for layout in memory.LAYOUTS:
            for operation in memory.OPERATIONS:
                local = operation in memory.LOCAL
                if local and layout != "rank":
                    continue
                for wire_dtype in wire_dtypes[:1] if local else wire_dtypes:
                    kept = operation == "dispatch" and wire_dtype is not None
                    for output in ("dequantized", "quantized") if kept else ("dequantized",):
                        yield {
                            "operation": operation,
                            "implementation": implementation,
                            "layout": layout,
                            "wire_dtype": wire_dtype,
                            "output": output,
                        }


def render(facts: dict[str, Any]) -> str:
    model, rows, num_hosts = facts["model"], facts["rows"], facts["hosts"]["num_hosts"]
    lines = [
        "T={num_tokens} tokens a rank, N={num_ranks} ranks, M={num_hosts} hosts, H={hidden}, "
        "E={num_experts}, K={top_k}, ".format(**model, **facts["hosts"])
        + "R={}, {dtype}: MiB per rank, without inputs and outputs".format(
            rows["capacity"] or "any routing", **rows
        )
    ]
    for implementation in memory.IMPLEMENTATIONS:
        for layout in memory.LAYOUTS:
            chosen = (implementation, layout)
            name = f'implementation="{implementation}", layout="{layout}"'
            if num_hosts > 1:
                name = f'implementation="two_level", layout="{layout}", "{implementation}" inside'
            lines += ["", name]
            for use in facts["here"]:
                if (use["implementation"], use["layout"]) == chosen:
                    buffers = use["buffers"]
                    parts = ", ".join(f"{part} {_mib(size)}" for part, size in buffers.items())
                    total = _mib(sum(buffers.values()))
                    lines.append(f"  {_name(use):<38}{total:>10}   {parts}".rstrip())
            reasons: dict[str, list[str]] = {}
            for use in facts["unavailable"]:
                if (use["implementation"], use["layout"]) == chosen:
                    reasons.setdefault(use["reason"], []).append(_name(use))
            lines += [f"  {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += [
        "",
        "All kernels together, on every GPU, once and for as long as the process lives",
        f"  {'heap of symmetric memory':<38}{_mib(facts['heap_bytes']):>10}",
        "",
        "Low-latency buffers of other libraries, by their formulas; B = T, and a message of "
        f"P = {facts['message_bytes']} bytes",
    ]
    for other in facts["others"]:
        lines.append(f"  {other['name']:<38}{_mib(other['bytes']):>10}   {other['formula']}")
        lines.append(f"{'':<53}{other['source']}")
    return "\n".join(lines)


def _name(use: dict[str, Any]) -> str:
    parts = [use["operation"]]
    if use["wire_dtype"] is not None:
        parts.append(use["wire_dtype"])
        if use["output"] == "quantized":
            parts.append('output="quantized"')
    return ", ".join(parts)


def _mib(size: int) -> str:
    return f"{size / _MIB:.2f}"
