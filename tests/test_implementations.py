"""Tests how an operation selects one of its implementations."""

from __future__ import annotations

import dataclasses

import pytest

import jax_ep
from jax_ep.implementations import Implementation, Implementations
from jax_ep.matmul import primitives as matmul_primitives


def even_only(problem: int) -> str | None:
    return f"it takes even numbers, not {problem}" if problem % 2 else None


TABLE = Implementations(
    (
        Implementation(name="fast", unavailable_reason=even_only),
        Implementation(name="named", is_default=lambda problem: False),
        Implementation(name="slow"),
    ),
    argument="algorithm",
    operation="double",
)


def test_none_selects_the_first_default_that_can_run():
    assert [TABLE.select(None, problem).name for problem in (2, 3)] == ["fast", "slow"]


def test_a_name_selects_that_one():
    assert [TABLE.select(name, 2).name for name in TABLE.names] == ["fast", "named", "slow"]
    assert TABLE.available(3) == ["named", "slow"]


def test_a_name_that_cannot_run_says_why_and_what_would_do():
    message = (
        '^double: algorithm="fast" cannot run here: it takes even numbers, not 3. '
        "algorithm=None picks one that can.$"
    )
    with pytest.raises(ValueError, match=message):
        TABLE.select("fast", 3)
    with pytest.raises(ValueError, match='^double: sum_algorithm="fast" cannot run here'):
        TABLE.check("fast", 3, "sum_algorithm")
    TABLE.check(None, 3)


@pytest.mark.parametrize("name", ["other", "", 1, ["fast"], "Fast"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"algorithm must be one of \('fast', .*\) or None, but"):
        TABLE.check(name, 2)


def test_a_name_that_cannot_run_is_said_as_a_layer_has_it():
    """An error at lowering does not know the caller, so it must name the layer's argument too."""
    table = dataclasses.replace(TABLE, layer_argument="layer_algorithm")
    with pytest.raises(ValueError, match='algorithm="fast" .* it is layer_algorithm="fast".$'):
        table.select("fast", 3)
    named = matmul_primitives.IMPLEMENTATIONS.layer_argument
    assert named in {field.name for field in dataclasses.fields(jax_ep.MoEConfig)}
