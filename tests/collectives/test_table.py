"""Tests of the table of measured times: its choices, the shipped file, refused files."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.meshes import expert_mesh

from jax_ep.collectives import api, table
from jax_ep.collectives.algorithms import ALGORITHMS


def test_choices_cross_between_sizes():
    times = [
        {"one_shot": 10.0, "two_shot": 20.0, "xla": 30.0},
        {"one_shot": 20.0, "two_shot": 20.1, "xla": 30.0},
        {"one_shot": 80.0, "two_shot": 40.0, "xla": 80.0},
        # Here two_shot is faster than "xla" by only 1 %, too little to be chosen.
        {"one_shot": 320.0, "two_shot": 100.0, "xla": 101.0},
    ]
    sizes = [2**10, 2**12, 2**14, 2**16]
    (first, one), (second, two), (last, xla) = table.choices(sizes, times)
    assert (one, two, xla) == ("one_shot", "two_shot", "xla") and last is None
    # The first two were almost equally fast at 2**12 bytes.
    assert 2**12 <= first < 2**12 * 1.1
    # two_shot stops being 3 % faster just before the two are equal.
    assert 2**15.9 < second < 2**16
    assert table.choices([1], [{"xla": 1.0}]) == [(None, "xla")]


def test_lookup():
    of_8 = {"8": {"choices": [[100, "one_shot"], [200, "two_shot"], [None, "xla"]]}}
    measured = {"9.0": {"all_reduce": {"2": {"choices": [[None, "one_shot"]]}, **of_8}}}

    def lookup(num_ranks, num_bytes, op="all_reduce", capability="9.0"):
        return table.lookup(op, num_ranks, num_bytes, capability, measured)

    assert [lookup(8, n) for n in (1, 100, 101, 200, 201)] == [
        "one_shot", "one_shot", "two_shot", "two_shot", "xla",
    ]  # fmt: skip
    assert lookup(2, 10**9) == "one_shot"
    # An unmeasured number of ranks uses the next larger measured one, else the largest.
    assert lookup(3, 150) == lookup(16, 150) == "two_shot"
    assert lookup(8, 1, capability="10.0") == lookup(8, 1, capability=None) == "xla"
    assert lookup(8, 1, op="all_gather") == "xla"


def test_a_table_without_times_or_without_a_last_choice():
    def lookup(entry, num_bytes, can_run=lambda name: True):
        measured = {"9.0": {"all_gather": {"2": entry}}}
        return table.lookup("all_gather", 2, num_bytes, "9.0", measured, can_run)

    assert lookup({"choices": [[100, "ll"]]}, 100) == "ll"
    assert lookup({"choices": [[100, "ll"]]}, 101) == "xla"
    assert lookup({"choices": [[None, "ll"]]}, 1, lambda name: name != "ll") == "xla"
    times = {"1": {"ll": 1.0, "direct": 2.0}, "2": {"ll": 1.0, "direct": 2.0, "xla": 3.0}}
    entry = {"choices": [[None, "ll"]], "us": times}
    assert lookup(entry, 1, lambda name: name != "ll") == "direct"
    assert lookup(entry, 1, lambda name: False) == "xla"


def test_the_shipped_table_is_well_formed():
    for capability, operations in table.current().items():
        assert re.fullmatch(r"\d+\.\d", capability)
        for op, by_ranks in operations.items():
            for ranks, entry in by_ranks.items():
                limits = [limit for limit, _ in entry["choices"]]
                assert int(ranks) > 1 and limits[-1] is None
                assert limits[:-1] == sorted(limits[:-1])
                names = {name for _, name in entry["choices"]}
                assert names <= set(ALGORITHMS[op].names)
                assert entry["machine"] and entry["date"] and entry["jax"]


# ---------------------------------------------------------------------- JAX_EP_COLLECTIVES_TABLE


def table_of(**entry) -> str:
    return json.dumps({"9.0": {"all_reduce": {"2": entry}}})


def test_the_variable_names_another_table(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    path.write_text(table_of(choices=[[100, "two_shot"], [None, "xla"]]))
    monkeypatch.setenv("JAX_EP_COLLECTIVES_TABLE", str(path))
    assert table.current() == json.loads(path.read_text())
    assert table.lookup("all_reduce", 2, 100, "9.0") == "two_shot"
    monkeypatch.delenv("JAX_EP_COLLECTIVES_TABLE")
    assert set(table.current()["9.0"]) == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "holds no table of collectives: .*Expecting property name"),
        ('{"9.0": {"all_sum": {}}}', r"KeyError\('all_sum'\)"),
        (table_of(choices=[[None, "xla"]]).replace('"2"', '"two"'), "int.*'two'"),
        (table_of(), r"KeyError\('choices'\)"),
        (table_of(choices=[["1", "xla"]]), r"2 ranks .*'1', 'xla'.* \[bytes or null"),
        (table_of(choices=[[None, "nccl"]]), "2 ranks has .*'nccl'.*'one_shot'"),
        (table_of(choices=[[None, "xla"]], us={"8": {"fast": 0.5}}), "2 ranks has .*'fast'"),
    ],
)
def test_a_variable_that_names_no_table_is_refused(tmp_path, monkeypatch, text, problem):
    """The variable must be refused by name and value when a program is traced, on any machine."""
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("JAX_EP_COLLECTIVES_TABLE", str(path))
    message = f"JAX_EP_COLLECTIVES_TABLE='{re.escape(str(path))}' .*{problem}.*unset the variable"
    with pytest.raises(ValueError, match=message):
        table.current()
    spec = P("expert")
    mapped = jax.shard_map(
        lambda x: api.all_gather(x, "expert"), mesh=expert_mesh(2), in_specs=spec, out_specs=spec
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((4,), jnp.float32))
