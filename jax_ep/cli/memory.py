"""`python -m jax_ep memory`: prints the bytes per rank that dispatch and combine hold in buffers.

Prints, for each operation, the size of each buffer of its workspace and of its results. The largest
result is the array of received tokens. Also prints the sizes of other libraries' buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax_ep.bench import measuring
from jax_ep.cli.other_libraries import OTHER_LIBRARIES, message_bytes, other_libraries
from jax_ep.exchange import memory, quantization
from jax_ep.flags import DTYPES, Error, Flags, check_experts
from pallas_kernels.fabric import memory_map

FLAGS = Flags()
_TOKENS = FLAGS.integer("tokens", 128, "T, the number of tokens per rank.")
_RANKS = FLAGS.integer("ranks", 8, "N, the number of ranks that share the experts.")
_HOSTS = FLAGS.integer(
    "hosts",
    1,
    "M, the number of hosts that the ranks are on; above 1, the exchange has two levels.",
)
_HOST_CAPACITY = FLAGS.integer(
    "host_capacity", None, "The most rows that a rank sends to each other host. Default: all rows."
)
_HIDDEN = FLAGS.integer("hidden", 7168, "H, the hidden size: the number of values of a token.")
_NUM_EXPERTS = FLAGS.integer("num_experts", 256, "E, the number of experts of all ranks together.")
_TOP_K = FLAGS.integer("top_k", 8, "K, the number of distinct experts that each token chooses.")
_DTYPE = FLAGS.choice("dtype", "bfloat16", DTYPES, "The dtype of the tokens' rows.")
_CAPACITY = FLAGS.integer(
    "capacity",
    None,
    "R, rows of the expert-major receive buffer. Default: as many as any routing needs.",
)
_ALIGNMENT = FLAGS.integer(
    "expert_alignment",
    1,
    "Each expert's block in the receive buffer starts at a row that is a multiple of this number.",
)
_JSON = FLAGS.json()

_MIB = 2**20
# The width of the table's column with the names of operations, in characters.
_NAME = 44


def run() -> int:
    FLAGS.check_outputs()
    check_experts(_NUM_EXPERTS.value, _RANKS.value, _TOP_K.value)
    if _RANKS.value % _HOSTS.value:
        raise Error(f"--hosts: {_HOSTS.value} does not divide --ranks={_RANKS.value}")
    if _HOST_CAPACITY.value is not None and _HOSTS.value == 1:
        raise Error("--host_capacity: needs several hosts, such as --hosts=2")
    facts = collect()
    # The file is written first: printing fails if a pipe's reader, such as `head`, has ended.
    if _JSON.value:
        measuring.save_json(_JSON.value, facts)
    print(render(facts))
    return 0


def collect() -> dict[str, Any]:
    """Collects all sizes that `memory` prints, in bytes per rank, as JSON-serializable values."""
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
            results = memory.result_bytes(**way, **rows, **model, **hosts)
            here.append(way | {"buffers": buffers, "results": results})
        except ValueError as error:
            # The flags are valid, so this way to run the operation does not support these sizes.
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
        "heap_bytes": memory_map.heap_bytes(_RANKS.value // _HOSTS.value),
    }


def _ways() -> Iterator[dict[str, Any]]:
    """Yields keyword arguments of `memory.workspace_bytes` for every operation and way to run it.

    A way to run an operation is a combination of implementation, layout, wire dtype and output.
    """
    wire_dtypes = [None, *(dtype.name for dtype in quantization.WIRE_DTYPES)]
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
        + "R={}, {dtype}: MiB per rank, without the caller's inputs".format(
            rows["capacity"] or "any routing", **rows
        )
    ]
    for implementation in memory.IMPLEMENTATIONS:
        for layout in memory.LAYOUTS:
            chosen = (implementation, layout)
            name = f'implementation="{implementation}", layout="{layout}"'
            if num_hosts > 1:
                name = f'implementation="two_level", layout="{layout}", "{implementation}" inside'
            titles = f"{'workspace':>10}{'results':>10}   the workspace's buffers; the results"
            lines += ["", name, f"  {'operation':<{_NAME}}{titles}"]
            for use in facts["here"]:
                if (use["implementation"], use["layout"]) == chosen:
                    lines.append(_line(use))
            reasons: dict[str, list[str]] = {}
            for use in facts["unavailable"]:
                if (use["implementation"], use["layout"]) == chosen:
                    reasons.setdefault(use["reason"], []).append(_name(use))
            lines += [f"  {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += [
        "",
        "All kernels together, on every GPU, once and for as long as the process lives",
        f"  {'heap of symmetric memory':<{_NAME}}{_mib(facts['heap_bytes']):>10}",
        "",
        "Low-latency buffers of other libraries, by their formulas; B = T, and a message of "
        f"P = {facts['message_bytes']} bytes",
    ]
    for other in facts["others"]:
        lines.append(f"  {other['name']:<{_NAME}}{_mib(other['bytes']):>10}   {other['formula']}")
        lines.append(f"{'':<{_NAME + 15}}{other['source']}")
    return "\n".join(lines)


def _line(use: dict[str, Any]) -> str:
    """Renders the table's line for one operation.

    The line has the operation, the MiB of its workspace and of its results, and the MiB of each
    buffer. `use` is an entry of "here" in the result of `collect`.
    """
    kinds = [use["buffers"], use["results"]]
    totals = "".join(f"{_mib(sum(kind.values())):>10}" for kind in kinds)
    parts = [", ".join(f"{part} {_mib(size)}" for part, size in kind.items()) for kind in kinds]
    return f"  {_name(use):<{_NAME}}{totals}   {'; '.join(part for part in parts if part)}"


def _name(use: dict[str, Any]) -> str:
    parts = [use["operation"]]
    if use["wire_dtype"] is not None:
        parts.append(use["wire_dtype"])
        if use["output"] == "quantized":
            parts.append('output="quantized"')
    return ", ".join(parts)


def _mib(size: int) -> str:
    return f"{size / _MIB:.2f}"
