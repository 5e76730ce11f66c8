"""`python -m jax_ep estimate`: predicts bytes and the least time of a dispatch between hosts.

Prints a line for each number of hosts and each design (way to send rows) of
`jax_ep.bench.exchange_model`: the rows per token and the MB per rank that cross between hosts and
inside a host, and a lower bound of the time. A second table compares the model with published
figures of other systems. MB is 10^6 and GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_ep.bench import exchange_model, measuring, report
from jax_ep.bench.exchange_model import Cluster, Work
from jax_ep.bench.flags import WIRE_DTYPES, wire_format
from jax_ep.bench.report import Column, Row
from jax_ep.flags import Error, Flags, check_experts
from pallas_kernels.formats import RowFormat

# The model draws a score for each expert and each token of a sample.
_MOST_EXPERTS = 16384

FLAGS = Flags()
_HOSTS = FLAGS.integers(
    "hosts", [2, 4, 8, 16, 32, 64], "M, the numbers of hosts to estimate an exchange for."
)
_RANKS_PER_HOST = FLAGS.integer(
    "ranks_per_host", 8, "G, the number of ranks on each host; every rank has its own NIC."
)
_NIC = FLAGS.number(
    "nic_gb_per_s", 50.0, "Bandwidth of a rank's NIC, one way, in GB/s (10^9 bytes per second)."
)
_NVLINK = FLAGS.number(
    "nvlink_gb_per_s",
    450.0,
    "Bandwidth of a rank's NVLink, one way, in GB/s (10^9 bytes per second).",
)
_TOKENS = FLAGS.integer("tokens", 4096, "T, the number of tokens per rank.")
_HIDDEN = FLAGS.integer("hidden", 7168, "H, the hidden size: the number of values of a token.")
_NUM_EXPERTS = FLAGS.integer(
    "num_experts",
    None,
    "E, the number of experts of all ranks together. Default: 256, rounded up to a multiple of the "
    "number of ranks.",
)
_TOP_K = FLAGS.integer("top_k", 8, "K, the number of distinct experts that each token chooses.")
_HOSTS_PER_TOKEN = FLAGS.integer(
    "hosts_per_token",
    None,
    "The largest number of hosts whose experts one token may choose, 4 in DeepSeek-V3. "
    "Default: no limit.",
)
_WIRE_DTYPE = FLAGS.choice(
    "wire_dtype",
    "none",
    WIRE_DTYPES,
    "The dtype in which rows are sent to other ranks; float8 adds a float32 scale for every 128 "
    "values. none: as bfloat16.",
)
_JSON = FLAGS.json()
_PLOT = FLAGS.plot("the least times over the number of hosts")


def run() -> int:
    FLAGS.check_outputs()
    for flag in (_NIC, _NVLINK):
        if not flag.value:
            raise Error(f"--{flag.name} must be above 0, but is 0")
    rows = [row for hosts in _HOSTS.value for row in estimate(hosts)]
    published = [_comparison(exchange_model.compare(each)) for each in exchange_model.PUBLISHED]
    # Files are written first: printing fails if a pipe's reader, such as `head`, has ended.
    if _JSON.value:
        facts = {"rows": rows, "published": published}
        measuring.save_json(_JSON.value, measuring.run_record() | facts)
    if _PLOT.value:
        plot(rows, _PLOT.value)
    lines = [
        _sizes(),
        "",
        *report.table(_COLUMNS, rows),
        "",
        "compared with others, in GB/s: a row counts for each host of its token, its own too",
        *report.table(_COLUMNS_OF_PUBLISHED, published),
        "",
        *(each["why"] for each in published),
        "",
        *dict.fromkeys(each["source"] for each in published),
    ]
    print("\n".join(lines))
    return 0


def estimate(hosts: int) -> list[Row]:
    """Estimates an exchange on `hosts` hosts with each design (way to send rows).

    Returns a row of the printed table for each design of `jax_ep.bench.exchange_model`. Raises
    `Error` if the value of a flag is not possible with this number of hosts.
    """
    cluster = Cluster(hosts, _RANKS_PER_HOST.value, _NIC.value, _NVLINK.value)
    num_experts = _NUM_EXPERTS.value or -(-256 // cluster.ranks) * cluster.ranks
    check_experts(num_experts, cluster.ranks, _TOP_K.value)
    if num_experts > _MOST_EXPERTS:
        raise Error(
            f"--num_experts: at most {_MOST_EXPERTS} experts can be estimated, but {cluster.ranks} "
            f"ranks have {num_experts}"
        )
    limit = _HOSTS_PER_TOKEN.value
    if limit is not None and _TOP_K.value > min(limit, hosts) * (num_experts // hosts):
        allowed = min(limit, hosts)
        raise Error(
            f"--hosts_per_token: a token chooses --top_k={_TOP_K.value} distinct experts, but "
            f"{allowed} of the {hosts} hosts have only {allowed * (num_experts // hosts)}"
        )
    row_bytes = _wire().row_bytes(_HIDDEN.value, jnp.bfloat16)
    work = Work(_TOKENS.value, num_experts, _TOP_K.value, row_bytes, limit)
    reached = exchange_model.reach(cluster, work)
    found = []
    for design, rows in exchange_model.designs(cluster, reached).items():
        megabytes = work.tokens * row_bytes / 1e6
        found.append(
            {"hosts": hosts, "ranks": cluster.ranks, "num_experts": num_experts, "design": design}
            | {f"{level}_rows": value for level, value in rows._asdict().items()}
            | {f"{level}_mb": value * megabytes for level, value in rows._asdict().items()}
            | exchange_model.bound(rows, cluster, work)._asdict()
        )
    return found


def _sizes() -> str:
    """Returns a line of text with what all rows of the table share: sizes and bandwidths."""
    limit = _HOSTS_PER_TOKEN.value
    wire_dtype = "bfloat16" if _WIRE_DTYPE.value == "none" else _WIRE_DTYPE.value
    return (
        f"T={_TOKENS.value} tokens a rank, H={_HIDDEN.value} as {wire_dtype}, "
        f"K={_TOP_K.value}, experts of {'any number of' if limit is None else f'at most {limit}'} "
        f"hosts; {_RANKS_PER_HOST.value} ranks a host, NIC {_NIC.value:g} and NVLink "
        f"{_NVLINK.value:g} GB/s a rank"
    )


def _wire() -> RowFormat:
    wire = wire_format(_WIRE_DTYPE.value)
    if _HIDDEN.value % wire.row_block:
        raise Error(
            f"--hidden must be a multiple of {wire.row_block} for "
            f"--wire_dtype={_WIRE_DTYPE.value}, but is {_HIDDEN.value}"
        )
    return wire


_COLUMNS = (
    Column("hosts", "hosts"),
    Column("ranks", "ranks"),
    Column("E", "num_experts"),
    report.text("design"),
    Column("rows between", "between_rows", "{:.2f}"),
    Column("rows inside", "inside_rows", "{:.2f}"),
    Column("MB between", "between_mb", "{:.1f}"),
    Column("MB inside", "inside_mb", "{:.1f}"),
    Column("us between", "between_us", "{:.0f}"),
    Column("us inside", "inside_us", "{:.0f}"),
    Column("bound us", "us", "{:.0f}"),
    report.text("set by", "set_by"),
)
_COLUMNS_OF_PUBLISHED = (
    report.text("system"),
    Column("ranks", "ranks"),
    Column("published", "published_gb_per_s", "{:g}"),
    Column("of it on NIC", "nic_gb_per_s", "{:.1f}"),
    Column("model", "model_gb_per_s", "{:.1f}"),
    report.text("set by", "set_by"),
    Column("reached", "reached", "{:.0%}"),
)


def _comparison(found: exchange_model.Comparison) -> dict[str, Any]:
    return {
        "system": found.published.system,
        "ranks": found.published.cluster.ranks,
        "source": found.published.source,
        "published_gb_per_s": found.published.gb_per_s,
        "nic_gb_per_s": found.nic_gb_per_s,
        "model_gb_per_s": found.model_gb_per_s,
        "set_by": found.set_by,
        "reached": found.share,
        "why": exchange_model.why(found),
    }


def plot(rows: Sequence[Row], path: str) -> None:
    """Plots the least time of an exchange over the number of hosts, with a line for each design.

    `rows` are the results of `estimate` for all numbers of hosts. `path` is the image file.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row["design"], []).append((row["hosts"], row["us"]))
    report.lines(
        {"": points},
        path,
        title=f"Least time of an exchange between hosts\n{_sizes()}",
        x_label="hosts",
        y_label="least time of an exchange, us",
    )
