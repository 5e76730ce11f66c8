"""`python -m jax_ep memory`: prints the bytes per rank of dispatch's and combine's buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from jax_ep.bench import report
from jax_ep.bench.report import Column, Row
from jax_ep.exchange import interface, memory
from jax_ep.flags import Args, Error, Flags, check_experts, choice, integer
from pallas_kernels.fabric import memory_map

_MIB = 2**20
# The fields of a row that say how the operation is run: arguments of `memory.workspace_bytes`.
_WAY = ("implementation", "layout", "operation", "wire_dtype", "output")


def add_flags(flags: Flags) -> None:
    flags.add("tokens", "128", "T, the number of tokens per rank.", integer)
    flags.add("ranks", "8", "N, the number of ranks that share the experts.", integer)
    flags.add("hosts", "1", "M, the hosts of the ranks; above 1, two levels.", integer)
    flags.add("host_capacity", None, "Most rows to each other host. Default: all.", integer)
    flags.add("hidden", "7168", "H, the number of values of a token.", integer)
    flags.add("num_experts", "256", "E, the number of experts of all ranks.", integer)
    flags.add("top_k", "8", "K, the number of experts that each token chooses.", integer)
    dtypes = choice(("bfloat16", "float16", "float32"))
    flags.add("dtype", "bfloat16", "The dtype of the tokens' rows.", dtypes)
    flags.add("capacity", None, "R, rows of a buffer. Default: for any routing.", integer)
    flags.json()


def run(args: Args) -> int:
    check_experts(args, args.num_experts, args.ranks, args.top_k)
    if args.ranks % args.hosts:
        raise Error(f"--hosts: {args.hosts} does not divide --ranks={args.ranks}")
    if args.host_capacity is not None and args.hosts == 1:
        raise Error("--host_capacity: needs several hosts, such as --hosts=2")
    # The arguments of `memory.workspace_bytes` that have the names of flags, and the others.
    same = ("host_capacity", "hidden", "num_experts", "top_k", "dtype", "capacity")
    sizes: dict[str, Any] = {key: getattr(args, key) for key in same}
    sizes |= {"num_tokens": args.tokens, "num_ranks": args.ranks, "num_hosts": args.hosts}
    rows = [_row(way, sizes) for way in _ways()]
    heap = memory_map.heap_bytes(args.ranks // args.hosts)
    report.save_json(args.json, {"sizes": sizes, "rows": rows, "heap_bytes": heap})
    columns = [report.text(name) for name in _WAY]
    columns += [Column(n, f"{n}_bytes", "{:.2f}", _MIB) for n in ("workspace", "results")]
    columns += [report.text("buffers", "words")]
    print("MiB per rank, without the caller's inputs\n")
    notes = report.notes(rows, lambda row: ", ".join(str(row[key]) for key in _WAY if row[key]))
    print("\n".join([*report.table(columns, rows), *notes]))
    print(f"\nheap of symmetric memory, once for all kernels: {heap / _MIB:.2f} MiB")
    return 0


def _row(way: Row, sizes: dict[str, Any]) -> Row:
    """Computes a row of the table; `way` and `sizes` together are `workspace_bytes`' arguments."""
    try:
        buffers = memory.workspace_bytes(**way, **sizes)
        results = memory.result_bytes(**way, **sizes)
    except ValueError as error:  # these sizes are not supported
        return way | {"error": str(error)}
    both = [f"{name} {size / _MIB:.2f}" for name, size in [*buffers.items(), *results.items()]]
    return way | {
        "buffers": buffers,
        "results": results,
        "workspace_bytes": sum(buffers.values()),
        "results_bytes": sum(results.values()),
        "words": ", ".join(both),
    }


def _ways() -> Iterator[Row]:
    """Yields the combinations of the fields `_WAY` that exist."""
    wires = [None, *(dtype.name for dtype in interface.WIRE_DTYPES)]
    outputs = ["dequantized", "quantized"]
    kinds = memory.IMPLEMENTATIONS, memory.LAYOUTS, memory.OPERATIONS, wires, outputs
    for way in itertools.product(*kinds):
        _, layout, operation, wire_dtype, output = way
        is_local = operation in memory.LOCAL
        # Operations on one rank need the layout "rank", and have no wire dtype.
        exists = not is_local or (layout == "rank" and wire_dtype is None)
        # Only a dispatch with a wire dtype can return quantized rows.
        if exists and (output == "dequantized" or (operation == "dispatch" and wire_dtype)):
            yield dict(zip(_WAY, way, strict=True))
