"""Tests of a command's flags: how they parse values, and what their errors say."""

from __future__ import annotations

import pytest

from jax_ep.flags import Error, Flags


@pytest.fixture
def flags():
    found = Flags()
    found.tokens = found.integers("tokens", [1, 2], "Tokens.")
    found.ops = found.choices("ops", None, ["send", "receive"], "Operations.")
    found.baselines = found.choices("baselines", None, ["a"], "Others.", may_be_empty=True)
    found.ratios = found.numbers("ratios", [0.5], "Ratios.")
    found.copies = found.integers("copies", [0], "Copies.", least=0)
    found.factor = found.number("factor", 1.125, "A factor.")
    found.safe = found.boolean("safe", "Safe.")
    found.json = found.output("json", "A file.")
    found.table = found.output("table", "Another.")
    return found


def test_values_are_parsed_and_start_from_the_defaults_each_time(flags):
    flags.parse("test", ["--tokens=3,4", "--ops=send,receive", "--factor=0"])
    assert (flags.tokens.value, flags.factor.value) == ([3, 4], 0.0)
    assert flags.ops.value == ["send", "receive"]
    flags.parse("test", ["--ratios=1,0.25", "--copies=0,2"])
    assert (flags.ratios.value, flags.copies.value) == ([1.0, 0.25], [0, 2])
    flags.parse("test", ["--baselines="])
    assert flags.baselines.value == [] and flags.given(flags.baselines)
    flags.parse("test", [])
    assert flags.baselines.value is None and not flags.given(flags.baselines)
    assert (flags.tokens.value, flags.ops.value, flags.factor.value) == ([1, 2], None, 1.125)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--tokens=3,x", "--tokens=3,x: 'x' is not a positive integer"),
        ("--tokens=-1", "--tokens=-1: '-1' is not a positive integer"),
        ("--tokens=2147483648", "'2147483648' is not a positive integer below 2^31"),
        ("--copies=x", "--copies=x: 'x' is not a non-negative integer below 2^31"),
        ("--ratios=1,-1", "--ratios=1,-1: '-1' is not a finite number, not negative"),
        ("--ops=sing", "--ops=sing: 'sing' is not one of send, receive"),
        ("--factor=inf", "--factor=inf: 'inf' is not a finite number, not negative"),
        ("--factor=nan", "--factor=nan: 'nan' is not a finite number, not negative"),
        ("--factor=-1", "--factor=-1: '-1' is not a finite number, not negative"),
        ("--factor=two", "--factor=two: 'two' is not a finite number, not negative"),
        ("--tokens=", "--tokens=: name one value or more, or leave the flag out"),
        ("--ops=", "--ops=: name one value or more, or leave the flag out"),
        ("--sing", "sing"),
        ("sing", "unexpected arguments: sing"),
        ("--nosafe=1", "--nosafe=1 does not take an argument"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_value(flags, arg, message):
    with pytest.raises(Error) as caught:
        flags.parse("test", [arg])
    assert message in str(caught.value)


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(flags, tmp_path):
    there, not_there = tmp_path / "there.json", tmp_path / "not_there.json"
    there.write_text("{}")
    flags.parse("test", [f"--json={there}", f"--table={not_there}"])
    flags.check_outputs()
    assert there.read_text() == "{}" and not not_there.exists()
    flags.parse("test", ["--table=/no/folder/out"])
    with pytest.raises(Error, match="--table: cannot write '/no/folder/out': No such file"):
        flags.check_outputs()
