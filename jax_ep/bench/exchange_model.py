"""What an exchange costs on hosts that are not here: bytes per token and level, and lower bounds.

M hosts of G ranks each; a rank has one NIC and one NVLink port. A token's experts are drawn by a
router whose scores are independent and random, which spreads tokens evenly over experts; the rows
that it then needs are counted on a sample. Levels are *between* hosts, over NICs, and *inside* a
host, over NVLink. Bandwidths are of one direction: ranks send as much as they receive.

Four designs, in rows per token (h hosts and r ranks have an expert of the token, on average):

  gather             every token to every rank, each host receiving it once.
                     between M - 1, inside N - M
  flat               one row for each (token, rank), straight to it.
                     between r (1 - 1/M), inside r/M (1 - 1/G)
  two-level          one row for each (token, host), to the rank there of the sender's own place,
                     which forwards it to the ranks of its host. between h (1 - 1/M),
                     inside r (1 - 1/G)
  two-level, static  the same with every token sent to every host, as static shapes ask for.
                     between M - 1, inside r (1 - 1/G)

The lower bound of a design is the longer of its two levels: both overlap perfectly, and nothing has
a fixed cost. A combine moves the same rows back.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

_SAMPLE = 8192  # tokens; the mean of h and r is then right to 1 %


@dataclasses.dataclass(frozen=True)
class Cluster:
    """M hosts of G ranks; GB/s (10^9 bytes) one way, for each rank."""

    hosts: int
    ranks_per_host: int
    nic_gb_per_s: float
    nvlink_gb_per_s: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclasses.dataclass(frozen=True)
class Work:
    """T tokens per rank, each with K of E experts.

    Attributes:
      row_bytes: of a row on the wire.
      hosts_per_token: a router's limit: a token chooses among the experts of so many hosts, those
        with the best expert for it; None: among all.
    """

    tokens: int
    num_experts: int
    top_k: int
    row_bytes: int
    hosts_per_token: int | None = None


class Reach(NamedTuple):
    """Hosts and ranks that have an expert of a token, mean over tokens."""

    hosts: float
    ranks: float


class Rows(NamedTuple):
    """Rows that a rank sends per token of its own, mean over ranks."""

    between: float
    inside: float


class Bound(NamedTuple):
    """Microseconds per level, the longer of them, and which that is: "NIC" or "NVLink"."""

    between_us: float
    inside_us: float
    us: float
    set_by: str


def reach(cluster: Cluster, work: Work, seed: int = 0) -> Reach:
    """Counts the hosts and ranks of each token on a sample of random scores."""
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
    """Counts distinct values of a row: the mean over rows."""
    ordered = np.sort(values, axis=1)
    return 1.0 + float(np.mean(np.sum(np.diff(ordered, axis=1) != 0, axis=1)))


def designs(cluster: Cluster, reached: Reach) -> dict[str, Rows]:
    """Counts the rows of each design; see the module's docstring."""
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
    """Computes the least time of an exchange that moves so many rows per token."""
    size = work.tokens * work.row_bytes * 1e-3  # GB/s are bytes per nanosecond
    between = rows.between * size / cluster.nic_gb_per_s
    inside = rows.inside * size / cluster.nvlink_gb_per_s
    return Bound(between, inside, *max((between, "NIC"), (inside, "NVLink")))


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure of another system: GB/s of a dispatch, counted its own way.

    Attributes:
      gb_per_s: rows for every host of a token, its own included, over the time.
      inside_gb_per_s: the same system's figure inside one host, whose count includes the rows that
        stay on their GPU; None: unknown.
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
        source=f"{_DEEPEP}, V1's README; counted as in tests/test_internode.py",
    )


def _deepep_v2(hosts: int, gb_per_s: float) -> Published:
    return Published(
        "DeepEP V2, SM90",
        # It does not say which GPU; what it reaches needs more NVLink than an H800's.
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
    """A published figure against the bound of "two-level", both counted the system's own way.

    Attributes:
      counted, crossing: rows per token: hosts, its own included, and rows between hosts.
      nic_gb_per_s: what the published figure is on the NIC.
      nvlink_gb_per_s: and on NVLink.
      model_gb_per_s: the most that the bound allows.
      set_by: which level sets the bound.
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
        """The published figure over the model's: 1 where they agree."""
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
    """Says what of a published figure the model explains, and what it does not."""
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
    stays = 1 / cluster.ranks_per_host  # rows that the forwarding GPU keeps
    reached = published.inside_gb_per_s * (1 - stays)
    slower = found.model_gb_per_s * reached / cluster.nvlink_gb_per_s
    return text + (
        f". Inside one host the same system reaches {published.inside_gb_per_s:g} GB/s, of which "
        f"{reached:.0f} on NVLink; with that the bound is {slower:.0f}, and "
        f"{published.gb_per_s / slower:.0%} of it are reached. The model does not explain the "
        "rest: it lets both levels overlap perfectly."
    )
