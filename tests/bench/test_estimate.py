"""Tests of `python -m jax_ep estimate`: its row counts against a simulation, and its output."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import jax_ep.cli
from jax_ep.bench import exchange_model
from jax_ep.bench.exchange_model import Cluster, Work


def distinct(parts: int, experts: int, chosen: int) -> float:
    """Returns the mean number of hosts or ranks on which a token's choices are.

    A token chooses `chosen` of `experts` experts at random. The experts are divided equally among
    `parts` hosts or ranks.
    """
    others = experts - experts // parts
    return parts * (1 - math.comb(others, chosen) / math.comb(experts, chosen))


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 4), (2, 8), (4, 8), (8, 8), (32, 8)])
def test_a_sample_agrees_with_combinatorics(hosts, per_host):
    cluster = Cluster(hosts, per_host, 50, 450)
    reached = exchange_model.reach(cluster, Work(1, 256, 8, 1))
    assert reached.hosts == pytest.approx(distinct(hosts, 256, 8), rel=0.01)
    assert reached.ranks == pytest.approx(distinct(hosts * per_host, 256, 8), rel=0.01)


def test_a_limit_keeps_tokens_on_so_many_hosts():
    cluster = Cluster(8, 8, 50, 450)
    assert exchange_model.reach(cluster, Work(1, 256, 8, 1, hosts_per_token=1)).hosts == 1.0
    limited = exchange_model.reach(cluster, Work(1, 256, 8, 1, hosts_per_token=4))
    free = exchange_model.reach(cluster, Work(1, 256, 8, 1, hosts_per_token=8))
    assert 3.5 < limited.hosts <= 4 < free.hosts
    assert free == exchange_model.reach(cluster, Work(1, 256, 8, 1))


def count_rows(hosts: int, per_host: int, experts: int, chosen: int, tokens: int):
    """Counts the rows that a random routing sends, one by one.

    Returns:
        Design of the exchange -> (rows per token sent between hosts, rows per token sent inside
        hosts).
    """
    ranks, rng = hosts * per_host, np.random.default_rng(3)
    between = dict.fromkeys(("gather", "flat", "two-level", "two-level, static"), 0)
    inside = dict.fromkeys(between, 0)
    for source in range(ranks):
        home, place = divmod(source, per_host)
        for _ in range(tokens):
            picks = rng.choice(experts, chosen, replace=False)
            targets = {int(pick) // (experts // ranks) for pick in picks}
            between["gather"] += hosts - 1
            inside["gather"] += hosts * (per_host - 1)
            for rank in targets:
                between["flat"] += rank // per_host != home
                inside["flat"] += rank // per_host == home and rank != source
            crossing = len({rank // per_host for rank in targets} - {home})
            # With two levels, each host has one rank in the sender's place. It gets the token and
            # forwards it to other ranks of its host.
            forwarded = sum(rank % per_host != place for rank in targets)
            between["two-level"] += crossing
            between["two-level, static"] += hosts - 1
            inside["two-level"] += forwarded
            inside["two-level, static"] += forwarded
    per_token = ranks * tokens
    return {name: (between[name] / per_token, inside[name] / per_token) for name in between}


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (4, 2), (3, 4)])
def test_designs_move_the_rows_that_a_routing_needs(hosts, per_host):
    experts = 2 * hosts * per_host
    cluster = Cluster(hosts, per_host, 50, 450)
    reached = exchange_model.reach(cluster, Work(1, experts, 3, 1))
    counted = count_rows(hosts, per_host, experts, 3, tokens=1500)
    rows = exchange_model.designs(cluster, reached)
    assert rows.keys() == counted.keys()
    for name, expected in counted.items():
        assert rows[name] == pytest.approx(expected, rel=0.03), name


def test_the_slower_level_sets_the_bound():
    work = Work(tokens=1000, num_experts=8, top_k=1, row_bytes=1000)
    cluster = Cluster(2, 4, nic_gb_per_s=50, nvlink_gb_per_s=400)
    found = exchange_model.bound(exchange_model.Rows(1, 4), cluster, work)
    assert found == (20.0, 10.0, 20.0, "NIC")
    found = exchange_model.bound(exchange_model.Rows(1, 16), cluster, work)
    assert found == (20.0, 40.0, 40.0, "NVLink")


def test_published_figures_are_below_the_bound_and_near_what_sets_it():
    found = [exchange_model.compare(figure) for figure in exchange_model.PUBLISHED]
    v1 = {each.published.cluster.ranks: each for each in found if "V1" in each.published.system}
    assert [v1[ranks].published.gb_per_s for ranks in (16, 32, 64)] == [43, 58, 51]
    assert [v1[ranks].set_by for ranks in (16, 32, 64)] == ["NVLink", "NIC", "NIC"]
    for each in found:
        assert 0.75 < each.share < 1.0
        # Published rates count all rows, but only rows to other hosts pass the network. With 8
        # hosts an eighth of the rows stay on their host, with 2 hosts half of them.
        crossing = 1 - 1 / each.published.cluster.hosts
        assert each.nic_gb_per_s == pytest.approx(each.published.gb_per_s * crossing)
        if each.set_by == "NIC":
            assert 43 < each.nic_gb_per_s < 46
        assert f"EP{each.published.cluster.ranks}" in exchange_model.why(each)
    assert "NVLink is the limit" in exchange_model.why(v1[16])
    assert "NIC is the limit" in exchange_model.why(v1[64])


def test_the_command_prints_tables_and_writes_files(tmp_path, capsys):
    files = tmp_path / "out.json", tmp_path / "out.png"
    status = jax_ep.cli.main([
        "jax_ep", "estimate", "--hosts=2,3,64", "--tokens=4096", "--hidden=7168",
        f"--json={files[0]}", f"--plot={files[1]}",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0
    record = json.loads(files[0].read_text())
    ways = [(row["hosts"], row["num_experts"], row["design"]) for row in record["rows"]]
    names = ("gather", "flat", "two-level", "two-level, static")
    experts = {2: 256, 3: 264, 64: 512}
    assert ways == [(hosts, experts[hosts], name) for hosts in experts for name in names]
    two_level = record["rows"][2]
    # A token chooses 8 of 256 experts on 2 hosts, so nearly every token is sent to the other host,
    # once: about T * H values in all.
    assert two_level["between_mb"] == pytest.approx(4096 * 7168 * 2 / 1e6, rel=0.01)
    assert two_level["between_us"] == pytest.approx(two_level["between_mb"] * 1e3 / 50)
    assert [figure["ranks"] for figure in record["published"]] == [16, 32, 64, 16, 32]
    assert "two-level, static" in out and "DeepEP V1, H800, EP16: " in out
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--hosts=", "--hosts=: name one value or more"),
        ("--hosts=0", "--hosts=0: '0' is not a positive integer"),
        ("--nic_gb_per_s=0", "--nic_gb_per_s must be above 0, but is 0"),
        ("--nvlink_gb_per_s=inf", "--nvlink_gb_per_s=inf: 'inf' is not a finite number"),
        ("--top_k=300", "--top_k must be at most the 256 experts, but is 300"),
        ("--num_experts=16", "--num_experts must be a multiple of the 32 ranks, but is 16"),
        ("--ranks_per_host=2147483647", "--num_experts: at most 16384 experts can be estimated"),
        ("--wire_dtype=int8", "wire_dtype=int8"),
    ],
)
def test_it_refuses_wrong_flags(arg, message, capsys):
    hosts = [] if arg.startswith("--hosts") else ["--hosts=4"]
    assert jax_ep.cli.main(["jax_ep", "estimate", *hosts, arg]) == 2
    assert message in capsys.readouterr().err


def test_a_limit_must_leave_enough_experts(capsys):
    args = ["--hosts=8", "--num_experts=64", "--hosts_per_token=1", "--top_k=9"]
    assert jax_ep.cli.main(["jax_ep", "estimate", *args]) == 2
    error = capsys.readouterr().err
    assert "--hosts_per_token: a token chooses --top_k=9 distinct experts, but 1 of the 8" in error
    assert "hosts have only 8" in error


def test_rows_of_float8_must_be_whole_blocks(capsys):
    args = ["--hosts=2", "--hidden=100", "--wire_dtype=float8_e4m3fn"]
    assert jax_ep.cli.main(["jax_ep", "estimate", *args]) == 2
    message = "--hidden must be a multiple of 128 for --wire_dtype=float8_e4m3fn, but is 100"
    assert message in capsys.readouterr().err
