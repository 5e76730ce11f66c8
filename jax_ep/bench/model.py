"""`python -m jax_ep model`: predicts the bytes and the least time of an exchange between hosts.

Prints, for each number of hosts and each design of `jax_ep.bench.exchange_model`, the rows per
token and the MB per rank that cross between hosts and inside them, and the least time. Then
compares the model with published figures of other systems. MB is 10^6 and GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_ep.bench import exchange_model, measuring, report
from jax_ep.bench.exchange_model import Cluster, Work
from jax_ep.exchange import quantization
from jax_ep.flags import Error, Flags

_DTYPES = ("bfloat16", *(jnp.dtype(dtype).name for dtype in quantization.DTYPES))

FLAGS = Flags()
_HOSTS = FLAGS.integers("hosts", [2, 4, 8, 16, 32, 64], "M, numbers of hosts.")
_RANKS_PER_HOST = FLAGS.integer("ranks_per_host", 8, "G, ranks of a host, each with a NIC.")
_NIC = FLAGS.number("nic_gb_per_s", 50.0, "GB/s of a rank's NIC, one way.")
_NVLINK = FLAGS.number("nvlink_gb_per_s", 450.0, "GB/s of a rank's NVLink, one way.")
_TOKENS = FLAGS.integer("tokens", 4096, "T, tokens per rank.")
_HIDDEN = FLAGS.integer("hidden", 7168, "H.")
_NUM_EXPERTS = FLAGS.integer(
    "num_experts", None, "E. Default: 256, or the next multiple of the ranks."
)
_TOP_K = FLAGS.integer("top_k", 8, "K, distinct experts per token.")
_HOSTS_PER_TOKEN = FLAGS.integer(
    "hosts_per_token", None, "A router's limit, such as 4 for DeepSeek-V3. Default: none."
)
_WIRE_DTYPE = FLAGS.choice(
    "wire_dtype", "bfloat16", _DTYPES, "Of rows that cross; float8 has a scale for 128 values."
)
_JSON = FLAGS.output("json", "Write all numbers to this file.")
_PLOT = FLAGS.output("plot", "Write a plot of the bounds to this file, such as out.png.")


def run() -> int:
    FLAGS.check_outputs()
    for flag in (_NIC, _NVLINK):
        if not flag.value:
            raise Error(f"--{flag.name}: 0 GB/s move nothing")
    if not _HOSTS.value:
        raise Error("--hosts: name one number of hosts or more")
    rows = [row for hosts in _HOSTS.value for row in model(hosts)]
    comparisons = [exchange_model.compare(figure) for figure in exchange_model.PUBLISHED]
    if _JSON.value:  # files come first: the reader of what is printed may end early
        facts = {"rows": rows, "published": [_comparison_record(found) for found in comparisons]}
        measuring.save_json(_JSON.value, measuring.run_record() | facts)
    if _PLOT.value:
        plot(rows, _PLOT.value)
    limit = _HOSTS_PER_TOKEN.value
    print(
        f"T={_TOKENS.value} tokens a rank, H={_HIDDEN.value} as {_WIRE_DTYPE.value}, "
        f"K={_TOP_K.value}, experts of {'any number of' if limit is None else f'at most {limit}'} "
        f"hosts; {_RANKS_PER_HOST.value} ranks a host, NIC {_NIC.value:g} and NVLink "
        f"{_NVLINK.value:g} GB/s a rank\n"
    )
    print(table(rows))
    print("\nheld against others, in GB/s: a row counts for each host of its token, its own too")
    print(comparison_table(comparisons))
    print("", *(exchange_model.why(found) for found in comparisons), sep="\n")
    print("", *dict.fromkeys(found.published.source for found in comparisons), sep="\n")
    return 0


def model(hosts: int) -> list[report.Row]:
    """Computes a row of the table for each design; raises `Error` if flags do not fit the hosts."""
    cluster = Cluster(hosts, _RANKS_PER_HOST.value, _NIC.value, _NVLINK.value)
    num_experts = _NUM_EXPERTS.value or -(-256 // cluster.ranks) * cluster.ranks
    if num_experts % cluster.ranks:
        raise Error(f"--num_experts: {num_experts} is no multiple of {cluster.ranks} ranks")
    if _TOP_K.value > num_experts:
        raise Error(f"--top_k: {_TOP_K.value} distinct of {num_experts} experts")
    limit = _HOSTS_PER_TOKEN.value
    if limit is not None and _TOP_K.value > min(limit, hosts) * (num_experts // hosts):
        raise Error(f"--hosts_per_token: {limit} of {hosts} hosts have no {_TOP_K.value} experts")
    row_bytes = quantization.row_bytes(_HIDDEN.value, jnp.bfloat16, _wire_dtype())
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


def _wire_dtype() -> Any:
    if _WIRE_DTYPE.value == "bfloat16":
        return None
    if _HIDDEN.value % quantization.BLOCK:
        raise Error(f"--hidden: {_HIDDEN.value} values are no whole blocks of {quantization.BLOCK}")
    return jnp.dtype(_WIRE_DTYPE.value)


_COLUMNS = {
    "hosts": ("hosts", "{}"),
    "ranks": ("ranks", "{}"),
    "E": ("num_experts", "{}"),
    "design": ("design", "{}"),
    "rows between": ("between_rows", "{:.2f}"),
    "rows inside": ("inside_rows", "{:.2f}"),
    "MB between": ("between_mb", "{:.1f}"),
    "MB inside": ("inside_mb", "{:.1f}"),
    "us between": ("between_us", "{:.0f}"),
    "us inside": ("inside_us", "{:.0f}"),
    "bound us": ("us", "{:.0f}"),
    "set by": ("set_by", "{}"),
}


def table(rows: Sequence[report.Row]) -> str:
    """Renders the model's rows as fixed-width text: rows per token, MB per rank, microseconds."""
    cells = [[form.format(row[key]) for key, form in _COLUMNS.values()] for row in rows]
    return "\n".join(report.fixed_width(list(_COLUMNS), cells, ("design", "set by")))


def comparison_table(found: Sequence[exchange_model.Comparison]) -> str:
    header = ["system", "ranks", "published", "of it on NIC", "model", "set by", "reached"]
    cells = [
        [
            each.published.system,
            str(each.published.cluster.ranks),
            f"{each.published.gb_per_s:g}",
            f"{each.nic_gb_per_s:.1f}",
            f"{each.model_gb_per_s:.1f}",
            each.set_by,
            f"{each.share:.0%}",
        ]
        for each in found
    ]
    return "\n".join(report.fixed_width(header, cells, ("system", "set by")))


def _comparison_record(found: exchange_model.Comparison) -> dict[str, Any]:
    return {
        "system": found.published.system,
        "ranks": found.published.cluster.ranks,
        "source": found.published.source,
        "published_gb_per_s": found.published.gb_per_s,
        "nic_gb_per_s": found.nic_gb_per_s,
        "model_gb_per_s": found.model_gb_per_s,
        "set_by": found.set_by,
        "why": exchange_model.why(found),
    }


def plot(rows: Sequence[report.Row], path: str) -> None:
    """Draws the least time of each design over the number of hosts, to a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for design in dict.fromkeys(row["design"] for row in rows):
        points = sorted((row["hosts"], row["us"]) for row in rows if row["design"] == design)
        axis.plot(*zip(*points, strict=True), marker="o", label=design)
    axis.set(xlabel="hosts", ylabel="least time of an exchange, us", xscale="log", yscale="log")
    report.label_log_axis(axis.xaxis, sorted({row["hosts"] for row in rows}))
    report.label_log_axis(axis.yaxis)
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
