"""Tests of checks that functions share: arguments of another type, mesh axes and dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.meshes import cuda_mesh

import jax_ep
from jax_ep import checks

X, IDX, WEIGHTS = np.zeros((4, 8), np.float32), np.zeros((4, 2), np.int32), np.ones((4, 2))


def on_ranks(function: Callable[[], Any]) -> None:
    """Traces `function` in a shard_map over two ranks, so that it can use the axis "expert"."""
    mesh = cuda_mesh((2,), ("expert",))

    def run(x: jax.Array) -> jax.Array:
        function()
        return x

    jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P()), X)


def dispatch(x: Any = X, axis_name: Any = "expert") -> Any:
    return jax_ep.dispatch(x, IDX, num_experts=4, axis_name=axis_name)


def combine(handle: Callable[[Any], Any]) -> Any:
    sent = dispatch()
    return jax_ep.combine(sent.tokens, handle(sent), WEIGHTS)


def pattern(message: str) -> str:
    return ".*".join(re.escape(part) for part in message.split(".*"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dispatch([[1.0]]), "x must be a floating array [T, H], but is the list [[1.0]]"),
        (lambda: combine(lambda sent: sent), "handle .* Dispatched; pass received.handle"),
        (lambda: combine(lambda sent: None), "handle must be .*, but is None"),
        (lambda: jax_ep.dispatch_like(X, dispatch()), "pass received.handle"),
        (lambda: jax_ep.routed_experts(None, X, X, X, WEIGHTS), "received must be .*, but is None"),
    ],
)
def test_arguments_of_another_type_are_named(call, message):
    with pytest.raises(TypeError, match=pattern(message)):
        on_ranks(call)


@pytest.mark.parametrize(
    ("axis_name", "error", "message"),
    [
        (("expert", "expert"), ValueError, "each mesh axis once, but is ('expert', 'expert')"),
        (None, TypeError, "axis_name must be the name of a mesh axis .*, but is None"),
        (("expert", 1), TypeError, "axis_name must be .*, but is ('expert', 1)"),
    ],
)
def test_axes_that_are_none(axis_name, error, message):
    for call in (
        lambda: dispatch(axis_name=axis_name),
        lambda: jax_ep.all_reduce(X, axis_name),
        lambda: jax_ep.all_to_all(X, axis_name),
        lambda: jax_ep.all_reduce_rms_norm(X, X, X[0], axis_name),
    ):
        with pytest.raises(error, match=pattern(message)):
            on_ranks(call)


def test_a_dtype_that_arrays_do_not_have_is_named():
    """A dtype that JAX would silently replace by float32 must be refused, and named."""
    for dtype in (jnp.float64, "float64", np.longdouble):
        with pytest.raises(
            TypeError, match="param_dtype must be .* float64 needs .*jax_enable_x64"
        ):
            checks.as_dtype_of_arrays("param_dtype", dtype)
    with jax.enable_x64(True):
        assert checks.as_dtype_of_arrays("dtype", jnp.float64) == np.float64
    assert checks.as_dtype_of_arrays("dtype", jnp.bfloat16) == jnp.bfloat16
