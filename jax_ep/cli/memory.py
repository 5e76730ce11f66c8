"""`python -m jax_ep memory`: prints the bytes per rank that dispatch and combine hold in buffers.

Prints, for each operation, the size of each buffer of its workspace and of its results. The largest
result is the array of received tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from jax_ep.bench import report
from jax_ep.bench.report import Column, Row
from jax_ep.exchange import interface, memory
from jax_ep.flags import DTYPES, Args, Error, Flags, check_experts, choice, integer
from pallas_kernels.fabric import memory_map

_MIB = 2**20
# The fields of a row that say how the operation is run.
_WAY = ("implementation", "layout", "operation", "wire_dtype", "output")
_OUTPUTS = ("dequantized", "quantized")


def add_flags(flags: Flags) -> None:
    flags.add("tokens", "128", "T, the number of tokens per rank.", integer)
    flags.add("ranks", "8", "N, the number of ranks that share the experts.", integer)
    flags.add("hosts", "1", "M, the hosts of the ranks; above 1, two levels.", integer)
    flags.add("host_capacity", None, "Most rows to each other host. Default: all.", integer)
    flags.add("hidden", "7168", "H, the number of values of a token.", integer)
    flags.add("num_experts", "256", "E, the number of experts of all ranks.", integer)
    flags.add("top_k", "8", "K, the number of experts that each token chooses.", integer)
    flags.add("dtype", "bfloat16", "The dtype of the tokens' rows.", choice(DTYPES))
    flags.add("capacity", None, "R, rows of a buffer. Default: for any routing.", integer)
    flags.json()


def run(args: Args) -> int:
    check_experts(args.num_experts, args.ranks, args.top_k)
    if args.ranks % args.hosts:
        raise Error(f"--hosts: {args.hosts} does not divide --ranks={args.ranks}")
    if args.host_capacity is not None and args.hosts == 1:
        raise Error("--host_capacity: needs several hosts, such as --hosts=2")
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

    def name(row: Row) -> str:
        return ", ".join(str(row[key]) for key in _WAY if row[key] is not None)

    print("\n".join([*report.table(columns, rows), *report.notes(rows, name)]))
    print(f"\nheap of symmetric memory, once for all kernels: {heap / _MIB:.2f} MiB")
    return 0


def _row(way: Row, sizes: dict[str, Any]) -> Row:
    try:
        buffers = memory.workspace_bytes(**way, **sizes)
        results = memory.result_bytes(**way, **sizes)
    except ValueError as error:  # this way to run the operation does not support these sizes
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
    """Yields the ways to run an operation that exist, as fields `_WAY` of a row."""
    wire_dtypes = [None, *(dtype.name for dtype in interface.WIRE_DTYPES)]
    choices = (memory.IMPLEMENTATIONS, memory.LAYOUTS, memory.OPERATIONS, wire_dtypes, _OUTPUTS)
    for way in itertools.product(*choices):
        _, layout, operation, wire_dtype, output = way
        # Operations on one rank need the layout "rank", and have no wire dtype.
        if operation in memory.LOCAL and (layout != "rank" or wire_dtype is not None):
            continue
        # Only a dispatch with a wire dtype can return quantized rows.
        if output == "quantized" and (operation != "dispatch" or wire_dtype is None):
            continue
        yield dict(zip(_WAY, way, strict=True))
