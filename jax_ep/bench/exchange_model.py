"""Models a dispatch between hosts: the rows that cross NICs and NVLink, and lower bounds of time.

N = M G ranks run on M hosts of G ranks each; a rank has one NIC and one NVLink port. The router's
scores are independent and random, so tokens spread evenly over experts; the rows that a token needs
are counted on a random sample. Rows move *between* hosts over NICs and *inside* a host over NVLink.
Bandwidths are those of one direction, since ranks send as much as they receive.

The model compares four designs: ways to send a token's row to the ranks of its K experts. On
average, h hosts and r ranks have at least one of these experts. Below each design is the mean
number of rows that are sent for one token between hosts and inside hosts:

  gather             Every token goes to every rank. Each other host receives the token once, and
                     the ranks of a host pass it on to each other.
                     between M - 1, inside N - M
  flat               Each token goes once to each rank with an expert of it, directly.
                     between r (1 - 1/M), inside r/M (1 - 1/G)
  two-level          Each token goes once to each host with an expert of it: to the rank that has
                     the sender's index within its host. That rank forwards the token inside the
                     host.
                     between h (1 - 1/M), inside r (1 - 1/G)
  two-level, static  As two-level, but every token goes to every host, as static shapes require.
                     between M - 1, inside r (1 - 1/G)

The lower bound of a design is the longer of the times on NICs and on NVLink: the model lets both
overlap perfectly, and has no fixed costs. A combine moves the same rows in the other direction.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

# The number of tokens in the random sample. It is large enough to give h and r, the mean numbers of
# hosts and of ranks with an expert that a token chose, with an error of at most 1 %.
_SAMPLE = 8192


@dataclasses.dataclass(frozen=True)
class Cluster:
    """M hosts of G ranks each, with the one-way bandwidths of a rank's NIC and NVLink.

    Bandwidths are in GB/s (10^9 bytes per second).
    """

    hosts: int
    ranks_per_host: int
    nic_gb_per_s: float
    nvlink_gb_per_s: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclasses.dataclass(frozen=True)
class Work:
    """The tokens that a dispatch moves: T per rank, each with K of E experts.

    Attributes:
      tokens: T, the number of tokens per rank.
      num_experts: E, the number of experts of all ranks together.
      top_k: K, the number of experts that each token chooses.
      row_bytes: the bytes of a token's row on the wire.
      hosts_per_token: the largest number of hosts whose experts a token may choose. The router
        takes the hosts whose best expert has the highest score. None: no limit.
    """

    tokens: int
    num_experts: int
    top_k: int
    row_bytes: int
    hosts_per_token: int | None = None


class Reach(NamedTuple):
    """On how many hosts and ranks a token's K experts are, mean over tokens.

    Attributes:
      hosts: the number of hosts with at least one of the experts that a token chose.
      ranks: the number of ranks with at least one of them.
    """

    hosts: float
    ranks: float


class Rows(NamedTuple):
    """The mean number of rows that are sent for one token.

    Attributes:
      between: the rows sent between hosts.
      inside: the rows sent between ranks of one host.
    """

    between: float
    inside: float


class Bound(NamedTuple):
    """Lower bounds of an exchange's time, in microseconds.

    Attributes:
      between_us: the time of the rows between hosts, over NICs.
      inside_us: the time of the rows inside a host, over NVLink.
      us: the longer of the two times.
      set_by: the link that takes the longer time: "NIC" or "NVLink".
    """

    between_us: float
    inside_us: float
    us: float
    set_by: str


def reach(cluster: Cluster, work: Work) -> Reach:
    """Estimates the numbers of hosts and of ranks that hold at least one of a token's K experts.

    Returns means over a sample of tokens, each routed at random to experts of at most
    `work.hosts_per_token` hosts.
    """
    scores = np.random.default_rng(0).random((_SAMPLE, work.num_experts), np.float32)
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
    """Counts the distinct values in each row of `values`; returns the mean over rows."""
    ordered = np.sort(values, axis=1)
    return 1.0 + float(np.mean(np.sum(np.diff(ordered, axis=1) != 0, axis=1)))


def designs(cluster: Cluster, reached: Reach) -> dict[str, Rows]:
    """Returns a dict from the name of each design to the numbers of rows that it sends per token.

    This module's docstring has the designs and the formulas. `reached` is the result of `reach`.
    """
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
    """Computes the least time of a dispatch or combine that sends `rows` rows for each token."""
    # Bytes divided by GB/s are nanoseconds. The factor 1e-3 makes the times below microseconds.
    size = work.tokens * work.row_bytes * 1e-3
    between = rows.between * size / cluster.nic_gb_per_s
    inside = rows.inside * size / cluster.nvlink_gb_per_s
    return Bound(between, inside, *max((between, "NIC"), (inside, "NVLink")))


@dataclasses.dataclass(frozen=True)
class Published:
    """A published bandwidth of another system's dispatch, as that system counts its bytes.

    Attributes:
      system: the system's name.
      cluster: the hosts and links of the published measurement.
      work: the tokens of the published measurement.
      gb_per_s: the published bandwidth of a dispatch between hosts, in GB/s. Its bytes are one row
        for each token and each host with an expert of the token, the token's own host included.
      inside_gb_per_s: the published bandwidth of the same system within one host, in GB/s. Its
        bytes include rows that stay on their GPU. None: not published.
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
        # DeepEP's README does not name the GPU. The published bandwidth needs more NVLink bandwidth
        # than an H800 has, so that of an H100 is assumed.
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
    """Compares a published bandwidth with the bound that the model gives for the same exchange.

    The published system is assumed to send rows by the design "two-level" of this module.

    Attributes:
      published: the published bandwidth.
      counted: the rows per token that the published bandwidth counts: one for each host with an
        expert of the token.
      crossing: the rows per token that are sent between hosts.
      nic_gb_per_s: the bandwidth on a rank's NIC that the published bandwidth implies.
      nvlink_gb_per_s: the bandwidth on a rank's NVLink that the published bandwidth implies.
      model_gb_per_s: the highest bandwidth that the model allows, counted as the published one is.
      set_by: the link that limits the bandwidth in the model: "NIC" or "NVLink".
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
        """The published bandwidth divided by the highest bandwidth that the model allows."""
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
    """Returns a text that says what limits a published bandwidth, by this module's model.

    It says how far the bandwidth stays below the upper bound that the model computes.
    """
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
    # On one host, a GPU keeps this share of its rows for its own experts. The published bandwidth
    # counts these rows, too, but NVLink does not carry them.
    stays = 1 / cluster.ranks_per_host
    reached = published.inside_gb_per_s * (1 - stays)
    slower = found.model_gb_per_s * reached / cluster.nvlink_gb_per_s
    return text + (
        f". Inside one host the same system reaches {published.inside_gb_per_s:g} GB/s, of which "
        f"{reached:.0f} on NVLink; with that the bound is {slower:.0f}, and "
        f"{published.gb_per_s / slower:.0%} of it are reached. The model does not explain the "
        "rest: it lets both levels overlap perfectly."
    )
