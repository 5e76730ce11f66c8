"""Tests of declared options: every function and class made from a declaration has all of them."""

from __future__ import annotations

import dataclasses
import inspect
import re

import jax
import pytest

import jax_ep
from jax_ep import checks
from jax_ep.moe import options
from jax_ep.moe.expert_mlp import HiddenUnit
from jax_ep.moe.routed_experts import ExpertOptions
from jax_ep.moe.routing import RoutingOptions

CLASSES = (HiddenUnit, ExpertOptions, RoutingOptions, jax_ep.MoEConfig)
FUNCTIONS = (jax_ep.expert_mlp, jax_ep.routed_experts, jax_ep.top_k_routing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Options.

    Attributes:
        size: a size,
            of two lines.
        factor: None, or a factor.
    """

    size: int = options.option(3, checks.check_integer)
    factor: float | None = options.option(None, options.number_or_none())
    function: object = options.function_option(None, "a function")


@options.documented(Sample, table="a\n  b")
@options.takes(Sample, before="last")
def function(first, *, last=None, **given):
    """Does nothing.

    Args:
      {Sample}
      last: the last
        {table}
    """
    return options.make_options(Sample, given, "function")


def test_a_signature_shows_the_options_in_their_place():
    parameters = inspect.signature(function).parameters
    assert list(parameters) == ["first", "size", "factor", "function", "last"]
    assert parameters["size"].default == 3 and parameters["size"].annotation == "int"
    assert function(0, factor=2.0) == Sample(factor=2.0)
    with pytest.raises(TypeError, match=r"^function\(\) got an unexpected keyword .* 'width'$"):
        function(0, width=2)

    @options.takes(Sample, before="last", others=True)
    def with_others(*, last=None, **fields):
        return options.pop_options(Sample, fields), fields

    assert list(inspect.signature(with_others).parameters)[-2:] == ["last", "fields"]
    assert with_others(size=1, width=2) == (Sample(size=1), {"width": 2})


def test_a_docstring_has_the_options_in_their_place():
    assert inspect.getdoc(function) == inspect.cleandoc(
        """Does nothing.

        Args:
          size: a size,
              of two lines.
          factor: None, or a factor.
          last: the last
            a
              b
        """
    )


def test_a_value_that_does_not_fit_is_named():
    options.check_options(Sample(size=1, factor=0.5, function=print))
    for given, error, message in (
        (dict(size=0), ValueError, "size must be at least 1, but is 0"),
        (dict(size=2.0), TypeError, "size must be a static integer, but is 2.0"),
        (dict(factor=0), ValueError, "factor must be above 0 and finite, or None, but is 0"),
        (dict(function="f"), TypeError, "function must be a function, but is 'f'"),
    ):
        with pytest.raises(error, match=message):
            options.check_options(Sample(**given))


def test_options_are_taken_from_a_layer():
    class Layer:
        size, factor, function = 5, 1.0, None

    assert options.options_of(Sample, Layer()) == Sample(size=5, factor=1.0)


def explained(thing) -> set[str]:
    """Returns the names that the sections of a docstring explain."""
    items = re.findall(r"^ +(\w+(?:, \w+)*):", inspect.getdoc(thing) or "", re.MULTILINE)
    return {name for item in items for name in item.split(", ")}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_option_is_explained(cls):
    names = {field.name for field in dataclasses.fields(cls)}
    lines = re.sub(r",\n +", ", ", inspect.getdoc(cls) or "")
    cls_items = re.findall(r"^    (\w+(?:, \w+)*):", lines, re.MULTILINE)
    assert {name for item in cls_items for name in item.split(", ")} == names


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_is_explained(function):
    assert set(inspect.signature(function).parameters) <= explained(function)


@pytest.mark.parametrize("thing", [*CLASSES, *FUNCTIONS])
def test_no_place_of_a_docstring_is_left(thing):
    assert not re.search(r"\{\w+\}", inspect.getdoc(thing) or "")


@pytest.mark.parametrize("cls", [ExpertOptions, RoutingOptions])
def test_options_of_a_part_are_those_of_a_layer(cls):
    """A part's options must have the defaults and checks of the layer's, and none of its own."""
    of_layer = {field.name: field for field in dataclasses.fields(jax_ep.MoEConfig)}
    for field in dataclasses.fields(cls):
        assert of_layer[field.name].default is field.default
        assert of_layer[field.name].metadata == field.metadata


def test_functions_have_the_signature_that_jit_needs():
    named = jax.jit(jax_ep.expert_mlp, static_argnames=("activation", "clamp"))
    assert "clamp" in inspect.signature(named).parameters
