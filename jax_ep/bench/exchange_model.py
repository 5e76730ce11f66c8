"""Models an exchange between hosts: the rows that cross each level, and lower bounds of time.

N = M G ranks on M hosts of G ranks each; a rank has one NIC and one NVLink port. A token's experts
are drawn by a router whose scores are independent and random, which spreads tokens evenly over
experts; the rows that a token then needs are counted on a sample. Rows cross two levels: *between*
hosts, over NICs, and *inside* a host, over NVLink. Bandwidths are those of one direction: ranks
send as much as they receive.

Four designs, in rows per token (h hosts and r ranks have an expert of the token, on average):

  gather             every token to every rank, each host receiving it once.
                     between M - 1, inside N - M
  flat               one row for each (token, rank), straight to it.
                     between r (1 - 1/M), inside r/M (1 - 1/G)
  two-level          one row for each (token, host), to the rank with the sender's number in that
                     host, which forwards it to the ranks of its host.
                     between h (1 - 1/M), inside r (1 - 1/G)
  two-level, static  the same with every token sent to every host, as static shapes require.
                     between M - 1, inside r (1 - 1/G)

The lower bound of a design is the longer of its two levels' times: the model lets both overlap
perfectly, and has no fixed costs. A combine moves the same rows in the other direction.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

_SAMPLE = 8192  # this many tokens give the means h and r to 1 %


@dataclasses.dataclass(frozen=True)
class Cluster:
    """M hosts of G ranks each, and the bandwidths of each rank in GB/s (10^9 bytes), one way."""

    hosts: int
    ranks_per_host: int
    nic_gb_per_s: float
    nvlink_gb_per_s: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclasses.dataclass(frozen=True)
class Work:
    """The tokens of an exchange: T per rank, each with K of E experts.

    Attributes:
      tokens: T.
      num_experts: E.
      top_k: K.
      row_bytes: bytes of a row on the wire.
      hosts_per_token: the router's limit, if any: a token chooses among the experts of this many
        hosts, those with its best experts.
    """

    tokens: int
    num_experts: int
    top_k: int
    row_bytes: int
    hosts_per_token: int | None = None


class Reach(NamedTuple):
    """The number of hosts, and of ranks, that have an expert of a token; means over tokens."""

    hosts: float
    ranks: float


class Rows(NamedTuple):
    """Rows sent per token, between hosts and inside a host; means over ranks."""

    between: float
    inside: float


class Bound(NamedTuple):
    """The least times of both levels, the longer one, and what sets it: "NIC" or "NVLink"."""

    between_us: float
    inside_us: float
    us: float
    set_by: str


def reach(cluster: Cluster, work: Work, seed: int = 0) -> Reach:
    """Counts the hosts and ranks that have an expert of a token, on a sample of random scores."""
    scores = np.random.default_rng(seed).random((_SAMPLE, work.num_experts), np.float32)
    if work.hosts_per_token is not None and work.hosts_per_token < cluster.hosts:
        best = scores.reshape(_SAMPLE, cluster.hosts, -1).max(axis=2)
        left_out = np.argsort(best, axis=1)[:, : cluster.hosts - work.hosts_per_token]
        by_host = scores.reshape(_SAMPLE, cluster.hosts, -1)
        np.put_along_axis(by_host, left_out[:, :, None], -1.0, axis=1)
    chosen = np.argpartition(-scores, work.top_k - 1, axis=1)[:, : work.top_k]
    return Reach(
        _mean_distinct(chosen // (work.num_experts // cluster.hosts)),
        _mean_distinct(chosen // (work.num_experts // cluster.ranks)),
    )


def _mean_distinct(values: np.ndarray) -> float:
    """Returns the number of distinct values in a row of `values`, as the mean over rows."""
    ordered = np.sort(values, axis=1)
    return 1.0 + float(np.mean(np.sum(np.diff(ordered, axis=1) != 0, axis=1)))


def designs(cluster: Cluster, reached: Reach) -> dict[str, Rows]:
    """Returns the rows per token of each design that the module's docstring lists, by its name."""
    other_hosts = 1 - 1 / cluster.hosts
    other_ranks = 1 - 1 / cluster.ranks_per_host
    forwarded = reached.ranks * other_ranks
    return {
        "gather": Rows(cluster.hosts - 1, cluster.ranks - cluster.hosts),
        "flat": Rows(reached.ranks * other_hosts, reached.ranks / cluster.hosts * other_ranks),
        "two-level": Rows(reached.hosts * other_hosts, forwarded),
        "two-level, static": Rows(cluster.hosts - 1, forwarded),
    }


def bound(rows: Rows, cluster: Cluster, work: Work) -> Bound:
    """Computes the least time of an exchange that sends `rows` per token at each level."""
    size = work.tokens * work.row_bytes * 1e-3  # GB/s are bytes per nanosecond
    between = rows.between * size / cluster.nic_gb_per_s
    inside = rows.inside * size / cluster.nvlink_gb_per_s
    return Bound(between, inside, *max((between, "NIC"), (inside, "NVLink")))


@dataclasses.dataclass(frozen=True)
class Published:
    """A published figure of another system: the GB/s of its dispatch, as that system counts them.

    Attributes:
      system: the system's name.
      cluster: the hosts and links that it ran on.
      work: the tokens that it dispatched.
      gb_per_s: bytes over time, with one row for every host of a token, its own host included.
      inside_gb_per_s: the system's figure inside one host, which includes rows that stay on their
        GPU; None: unknown.
      source: where the figure is published.
    """

    system: str
    cluster: Cluster
    work: Work
    gb_per_s: float
    inside_gb_per_s: float | None
    source: str


_H = 7168
_FLOAT8_ROW = _H + 4 * _H // 128
_DEEPEP = "github.com/deepseek-ai/DeepEP"


def _deepep_v1(hosts: int, gb_per_s: float) -> Published:
    return Published(
        "DeepEP V1, H800",
        Cluster(hosts, 8, nic_gb_per_s=50, nvlink_gb_per_s=160),
        Work(4096, 256, 8, _FLOAT8_ROW, hosts_per_token=4),
        gb_per_s,
        inside_gb_per_s=153,
        source=f"{_DEEPEP}, V1's README; counted as its tests/test_internode.py counts",
    )


def _deepep_v2(hosts: int, gb_per_s: float) -> Published:
    return Published(
        "DeepEP V2, SM90",
        # The source does not name the GPU; the figure needs more NVLink bandwidth than an H800 has.
        Cluster(hosts, 8, nic_gb_per_s=50, nvlink_gb_per_s=450),
        Work(8192, 256, 8, _FLOAT8_ROW, hosts_per_token=4),
        gb_per_s,
        inside_gb_per_s=None,
        source=f"{_DEEPEP}, README: 'logical bandwidth', which contains local traffic",
    )


PUBLISHED = (
    _deepep_v1(2, 43),
    _deepep_v1(4, 58),
    _deepep_v1(8, 51),
    _deepep_v2(2, 90),
    _deepep_v2(4, 61),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A published figure, compared with the bound of the design "two-level".

    Attributes:
      published: the figure.
      counted: rows per token that the figure counts: one for each of its hosts.
      crossing: rows per token that cross between hosts.
      nic_gb_per_s: the bandwidth on the NIC that the figure amounts to.
      nvlink_gb_per_s: the bandwidth on NVLink that the figure amounts to.
      model_gb_per_s: the most that the bound allows, counted as the figure is.
      set_by: what sets the bound: "NIC" or "NVLink".
    """

    published: Published
    counted: float
    crossing: float
    nic_gb_per_s: float
    nvlink_gb_per_s: float
    model_gb_per_s: float
    set_by: str

    @property
    def share(self) -> float:
        """The published figure as a share of the most that the model allows."""
        return self.published.gb_per_s / self.model_gb_per_s


def compare(published: Published) -> Comparison:
    cluster, work = published.cluster, published.work
    reached = reach(cluster, work)
    rows = designs(cluster, reached)["two-level"]
    least = bound(rows, cluster, work)
    counted_bytes = reached.hosts * work.tokens * work.row_bytes
    return Comparison(
        published,
        counted=reached.hosts,
        crossing=rows.between,
        nic_gb_per_s=published.gb_per_s * rows.between / reached.hosts,
        nvlink_gb_per_s=published.gb_per_s * rows.inside / reached.hosts,
        model_gb_per_s=counted_bytes / least.us * 1e-3,
        set_by=least.set_by,
    )


def why(found: Comparison) -> str:
    """Describes in words how far the model explains a published figure."""
    published, cluster = found.published, found.published.cluster
    name = f"{published.system}, EP{cluster.ranks}"
    text = (
        f"{name}: of {found.counted:.2f} rows counted per token {found.crossing:.2f} cross, so "
        f"{published.gb_per_s:g} GB/s are {found.nic_gb_per_s:.1f} on a NIC of "
        f"{cluster.nic_gb_per_s:g}"
    )
    text += f" and {found.nvlink_gb_per_s:.0f} on NVLink of {cluster.nvlink_gb_per_s:g}. "
    if found.set_by == "NIC":
        return text + (
            f"The NIC is the limit; the remaining {1 - found.share:.0%} are its protocol and "
            "fixed costs, of which the model has none."
        )
    text += "NVLink is the limit, and the NIC waits"
    if published.inside_gb_per_s is None:
        return text + "."
    stays = 1 / cluster.ranks_per_host  # the share of rows that the forwarding GPU keeps
    reached = published.inside_gb_per_s * (1 - stays)
    slower = found.model_gb_per_s * reached / cluster.nvlink_gb_per_s
    return text + (
        f". Inside one host the same system reaches {published.inside_gb_per_s:g} GB/s, of which "
        f"{reached:.0f} on NVLink; with that the bound is {slower:.0f}, and "
        f"{published.gb_per_s / slower:.0%} of it are reached. The model does not explain the "
        "rest: it lets both levels overlap perfectly."
    )
