"""Tests of the check that an activation or a gating is elementwise."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_ep.moe.elementwise import mixing_operation
from jax_ep.moe.traced import trace

SHAPE = (16, 24)
TABLE = jnp.linspace(-1, 1, 32)
PATTERN = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


def operation(function, arity=1, shape=SHAPE):
    jaxpr, _ = trace(function, [jax.ShapeDtypeStruct(shape, jnp.float32)] * arity)
    return mixing_operation(jaxpr, shape)


@jax.custom_jvp
def with_rule(x):
    return jnp.sin(x)


with_rule.defjvps(lambda t, out, x: t * jnp.cos(x))

ELEMENTWISE = {
    **{
        name: getattr(jax.nn, name)
        for name in (
            "celu elu gelu hard_sigmoid hard_swish hard_tanh leaky_relu log_sigmoid mish relu "
            "relu6 selu sigmoid silu soft_sign softplus squareplus"
        ).split()
    },
    "gelu, exact": functools.partial(jax.nn.gelu, approximate=False),
    "identity": lambda x: x,
    "jit": jax.jit(jax.nn.silu),
    "checkpoint": jax.checkpoint(jnp.tanh),
    "custom_jvp": with_rule,
    "where and clip": lambda x: jnp.where(x > 0, jnp.clip(x, -1, 1), x**3),
    "select": lambda x: jnp.select([x > 1, x < -1], [x, -x], 0.0),
    "piecewise": lambda x: jnp.piecewise(x, [x < 0, x >= 0], [jnp.sin, jnp.cos]),
    "interp": lambda x: jnp.interp(x, TABLE, TABLE**2),
    "table": lambda x: TABLE[jnp.clip(x, 0, 31).astype(int)],
    "pattern": lambda x: x * PATTERN + PATTERN.sum(),
    "einsum": lambda x: jnp.einsum("rf,rf->rf", x, x),
    "gradient": lambda x: jax.grad(lambda y: jax.nn.silu(y).sum())(x),
    "stack": lambda x: jnp.max(jnp.stack([x, 0.1 * x]), 0),
    "new axis": lambda x: (x[:, :, None] * jnp.arange(3.0)).sum(-1),
    "horner": lambda x: lax.fori_loop(0, 4, lambda i, y: y * x + i, x),
    "scan": lambda x: lax.scan(lambda y, c: (y * x + c, y), x, jnp.arange(3.0))[0],
    "cond": lambda x: lax.cond(TABLE[0] > 0, jnp.sin, jnp.cos, x),
    "vmap": jax.vmap(jax.vmap(jax.nn.silu)),
    "unused sum": lambda x: (jnp.mean(x), jnp.tanh(x))[1],
    "cast": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
}


@pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_functions_are_accepted(function):
    assert operation(function) is None


def test_branches_may_be_as_many_as_rows():
    for name in ("select", "piecewise", "stack", "new axis"):
        for num_rows in (1, 2, 3):
            assert operation(ELEMENTWISE[name], shape=(num_rows, 24)) is None
    assert operation(jax.nn.softmax, shape=(2, 24)) == "reduce_max"


def test_a_number_of_rows_that_is_not_known():
    (rows,) = jax.export.symbolic_shape("r")
    assert operation(jax.nn.silu, shape=(rows, 24)) is None
    assert operation(ELEMENTWISE["select"], shape=(rows, 24)) is None
    assert operation(functools.partial(jax.nn.softmax, axis=0), shape=(rows, 24)) == "reduce_max"


def test_a_gating_of_two_arrays_is_accepted():
    assert operation(lambda gate, up: jax.nn.silu(gate) * up, 2) is None
    assert operation(lambda gate, up: jnp.einsum("rf,rf->rf", gate, up), 2) is None


def softmax_of_carry(x):
    zeros = jnp.zeros_like(x)
    return lax.fori_loop(0, 2, lambda i, c: (x, jax.nn.softmax(c[0])), (zeros, zeros))[1]


MIXING = {
    "softmax": (jax.nn.softmax, "reduce_max"),
    "softmax of rows": (functools.partial(jax.nn.softmax, axis=0), "reduce_max"),
    "jit": (jax.jit(jax.nn.softmax), "reduce_max"),
    "standardize": (jax.nn.standardize, "reduce_sum"),
    "cumsum": (lambda x: jnp.cumsum(x, -1), "cumsum"),
    "sort": (lambda x: jnp.sort(x, -1), "sort"),
    "flip": (lambda x: x[:, ::-1], "rev"),
    "roll": (lambda x: jnp.roll(x, 1, -1), "slice"),
    "glu": (lambda x: jnp.tile(x[:, :12] * x[:, 12:], (1, 2)), "slice"),
    "one column": (lambda x: x * x[:, :1], "slice"),
    "one element": (lambda x: x * x[0, 0], "(dynamic_)?slice"),
    "permutation": (lambda x: x[:, jnp.arange(24)[::-1]], "gather"),
    "matmul": (lambda x: x @ PATTERN.T @ PATTERN, "dot_general"),
    "cond": (lambda x: lax.cond(TABLE[0] > 0, jax.nn.softmax, jnp.sin, x), "reduce_max"),
    "predicate": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), "reduce_sum"),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0, 0] < TABLE[0], jax.nn.softmax, x),
        "reduce_max|slice",
    ),
    "carry": (softmax_of_carry, "reduce_max"),
    "scan over rows": (lambda x: lax.scan(lambda y, r: (y + r, y), x[0], x)[1], "slice|scan"),
}


@pytest.mark.parametrize(("function", "name"), MIXING.values(), ids=MIXING)
def test_functions_that_combine_elements_are_found(function, name):
    assert re.fullmatch(f"({name}).*", str(operation(function)))
