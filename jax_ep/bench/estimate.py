"""`python -m jax_ep estimate`: predicts bytes and the least time of a dispatch between hosts.

docs/api/command_line.md says how tokens are routed, and has the formulas.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jax_ep.bench import report
from jax_ep.bench.exchange import WIRE_DTYPES, check_wire_dtype
from jax_ep.bench.report import Column, Row
from jax_ep.exchange import interface
from jax_ep.flags import Args, Error, Flags, check_experts, choice, integer, number, some


def add_flags(flags: Flags) -> None:
    flags.add("hosts", "2,4,8,16,32,64", "M, the numbers of hosts.", some(integer))
    flags.add("ranks_per_host", "8", "G, the number of ranks on each host.", integer)
    flags.add("nic_gb_per_s", "50", "Bandwidth of a rank's NIC, one way, in GB/s.", number)
    flags.add("nvlink_gb_per_s", "450", "Bandwidth of a rank's NVLink, one way, in GB/s.", number)
    flags.add("tokens", "4096", "T, the number of tokens per rank.", integer)
    flags.add("hidden", "7168", "H, the width of a token.", integer)
    experts = "E, the number of experts. Default: 256, or the next multiple of the ranks."
    flags.add("num_experts", None, experts, integer)
    flags.add("top_k", "8", "K, the number of distinct experts that a token chooses.", integer)
    flags.add("wire_dtype", "none", "The dtype of sent rows; none: bfloat16.", choice(WIRE_DTYPES))
    flags.json()


def run(args: Args) -> int:
    for name in ("nic_gb_per_s", "nvlink_gb_per_s"):
        if not getattr(args, name):
            raise Error(f"--{name} must be above 0, but is 0")
    check_wire_dtype(args.wire_dtype, args.hidden)
    rows = [row for hosts in args.hosts for row in estimate(args, hosts)]
    report.save_json(args.json, {"rows": rows})
    columns = (
        Column("hosts", "hosts"),
        Column("ranks", "ranks"),
        Column("E", "num_experts"),
        report.text("design"),
        Column("rows between", "rows_between", "{:.2f}"),
        Column("inside", "rows_inside", "{:.2f}"),
        Column("MB between", "bytes_between", "{:.1f}", 1e6),
        Column("MB inside", "bytes_inside", "{:.1f}", 1e6),
        Column("least us", "us", "{:.0f}"),
        report.text("set by", "set_by"),
    )
    print("\n".join(report.table(columns, rows)))
    return 0


def estimate(args: Args, hosts: int) -> list[Row]:
    """Returns a row for each way to send a token's row between `hosts` hosts."""
    per_host = args.ranks_per_host
    ranks = hosts * per_host
    num_experts = args.num_experts or -(-256 // ranks) * ranks
    check_experts(args, num_experts, ranks, args.top_k)
    wire = interface.wire_format(None if args.wire_dtype == "none" else args.wire_dtype)
    row_bytes = args.tokens * wire.row_bytes(args.hidden, jnp.bfloat16)

    def reached(groups: int) -> float:
        """Returns in how many of `groups` equal groups of experts a token has one, on average."""
        # The experts of a group are not chosen if all K choices are among the `others`.
        others = num_experts - num_experts // groups
        return groups * (1 - math.comb(others, args.top_k) / math.comb(num_experts, args.top_k))

    # The shares of hosts, and of the ranks of a host, that are not a token's own.
    other_hosts, other_ranks = 1 - 1 / hosts, 1 - 1 / per_host
    forwarded = reached(ranks) * other_ranks
    # The rows of a token that are sent between and inside hosts. "flat" sends one to each rank with
    # an expert of the token, 1 / hosts of them on its host; "two-level" one to each host with an
    # expert, where a rank forwards it; "static" to all hosts, since static shapes allow no choice.
    designs = {
        "flat": (reached(ranks) * other_hosts, forwarded / hosts),
        "two-level": (reached(hosts) * other_hosts, forwarded),
        "two-level, static": (hosts - 1, forwarded),
    }
    found = []
    for design, (between, inside) in designs.items():
        nic = between * row_bytes / args.nic_gb_per_s / 1e3
        nvlink = inside * row_bytes / args.nvlink_gb_per_s / 1e3
        found.append({
            "hosts": hosts,
            "ranks": ranks,
            "num_experts": num_experts,
            "design": design,
            "rows_between": between,
            "rows_inside": inside,
            "bytes_between": between * row_bytes,
            "bytes_inside": inside * row_bytes,
            "us": max(nic, nvlink),
            "set_by": "NIC" if nic > nvlink else "NVLink",
        })  # fmt: skip
    return found
