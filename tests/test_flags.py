"""Tests of a command's flags: how they parse values, and what their errors say."""

from __future__ import annotations

import pytest

from jax_ep.flags import Error, Flags, choice, integer, number, output, some


@pytest.fixture
def flags():
    found = Flags("test", "A test.")
    found.add("tokens", "1,2", "Tokens.", some(integer))
    found.add("ops", None, "Operations.", some(choice(["send", "receive"])))
    found.add("baselines", None, "Others.", some(choice(["a"]), none=True))
    found.add("factor", "1.125", "A factor.", number)
    found.add("json", None, "A file.", output)
    found.switch("safe", "Safe.")
    return found


def test_values_are_parsed_and_defaults_too(flags):
    found = flags.parse_args(["--tokens=3,4", "--ops", "send,receive", "--factor=0", "--safe"])
    assert found.tokens == [3, 4] and found.ops == ["send", "receive"]
    assert found.factor == 0 and found.safe
    found = flags.parse_args(["--baselines="])
    assert (found.tokens, found.ops, found.factor) == ([1, 2], None, 1.125)
    assert found.baselines == [] and found.safe is False


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--tokens=3,x", "--tokens: 'x' is not an integer from 1 to 2^31 - 1"),
        ("--ops=sing", "--ops: 'sing' is not one of send, receive"),
        ("--factor=inf", "--factor: 'inf' is not a number from 0 to 2^31 - 1"),
        ("--tokens=", "--tokens: name one value or more, or leave the flag out"),
        ("--json=/no/folder/out", "--json: cannot write '/no/folder/out'"),
        ("--sing", "--sing"),
        ("sing", "sing"),
        ("--safe=1", "--safe"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_value(flags, arg, message):
    with pytest.raises(Error) as caught:
        flags.parse_args([arg])
    assert message in str(caught.value)


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(flags, tmp_path):
    there, not_there = tmp_path / "there.json", tmp_path / "not_there.json"
    there.write_text("{}")
    for path in there, not_there:
        flags.parse_args([f"--json={path}"])
    assert there.read_text() == "{}" and not not_there.exists()
