"""Defines the JAX primitives of the collectives: result types, transposes and lowering.

There are five primitives without effects, with the shapes of the functions of `api`. All but
ep_all_reduce_rms_norm are linear and have transposes. Each lowers to the algorithm that
`jax_ep.collectives.table` selects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.collectives import table
from jax_ep.collectives.algorithms import Algorithm, Problem
from jax_ep.collectives.xla import XlaCollectives
from jax_ep.runtime import availability, jax_compat
from jax_ep.runtime.jax_compat import Program, result_type, to_varying, varying_axes


def _primitive(op: str, **rules: Any) -> Any:
    """Defines the primitive of `op`, the name of a method of `XlaCollectives` and the like."""

    # `params` are the options of `op`, such as eps. `compute` needs only the axes, not num_ranks.
    def compute(*operands, axis_name, algorithm, num_ranks, **params):
        collectives: Any = XlaCollectives(axis_name)
        if algorithm != "xla":
            from jax_ep.collectives.pallas import PallasCollectives

            collectives = PallasCollectives(algorithm, axis_name)
        return jax.tree.leaves(getattr(collectives, op)(*operands, **params))

    def lower(program: Program, *operands, axis_name, algorithm: Algorithm, num_ranks, **params):
        target = availability.Lowered(program)
        problem = Problem(op, program.operand_types, num_ranks, axis_name, target)
        chosen = table.select(algorithm, problem)
        if chosen == "unfused":
            # Only its all_reduce of x has an algorithm; XLA computes the rest.
            x = program.operand_types[:1]
            problem = dataclasses.replace(problem, op="all_reduce", operands=x)
            chosen = table.select(None, problem)
        params |= {"axis_name": axis_name, "algorithm": chosen, "num_ranks": num_ranks}
        return program.lower(compute, *operands, **params)

    # Where JAX cannot define primitives, no kernel runs.
    def inline(*operands: jax.Array, algorithm: Algorithm, **params: Any) -> list[jax.Array]:
        return compute(*operands, algorithm="xla", **params)

    return jax_compat.define_primitive(f"ep_{op}", lower=lower, inline=inline, **rules)


def _linear(op: str, result: Callable[[Any, int, tuple[str, ...]], Any], transposed: str) -> Any:
    """Defines the primitive of linear `op`; `transposed` names the collective of its transpose."""
    # `result` maps x's type, the number of ranks N and the mesh axes to the result's type.

    def abstract_eval(x, *, axis_name, algorithm, num_ranks):
        return [result(x, num_ranks, axis_name)]

    def transpose(cotangents, x, **params):
        (g,) = cotangents
        # An all_reduce has the transpose of lax.psum. If JAX tracks over which axes x varies (vma),
        # all ranks have equal cotangents g, and g is the cotangent of each rank's x. Otherwise the
        # ranks' cotangents are summed.
        if op == "all_reduce" and (varying := varying_axes(x)):
            return [to_varying(g, varying - varying_axes(g))]
        return LINEAR[transposed].bind(g, **params)

    def batch(operands, axes, **params):
        # The collective works along the leading axis of x, so the batch axis is moved to the end.
        (x,), (axis,) = operands, axes
        return LINEAR[op].bind(jnp.moveaxis(x, axis, -1), **params), [x.ndim - 1]

    return _primitive(op, abstract_eval=abstract_eval, transpose=transpose, batch=batch)


# Each function below returns the type of a collective's result for the type of x.


def _same(x: Any, num_ranks: int, axis_name: tuple[str, ...]) -> Any:
    return result_type(x, x.shape)


def _reduced(x: Any, num_ranks: int, axis_name: tuple[str, ...]) -> Any:
    return result_type(x, x.shape, varying=varying_axes(x) - frozenset(axis_name))


def _gathered(x: Any, num_ranks: int, axis_name: tuple[str, ...]) -> Any:
    return result_type(x, (num_ranks * x.shape[0], *x.shape[1:]))


def _scattered(x: Any, num_ranks: int, axis_name: tuple[str, ...]) -> Any:
    return result_type(x, (x.shape[0] // num_ranks, *x.shape[1:]))


LINEAR = {
    "all_reduce": _linear("all_reduce", _reduced, "all_reduce"),
    "all_gather": _linear("all_gather", _gathered, "reduce_scatter"),
    "reduce_scatter": _linear("reduce_scatter", _scattered, "all_gather"),
    "all_to_all": _linear("all_to_all", _same, "all_to_all"),
}


def _rms_norm_types(x: Any, residual: Any, scale: Any, **_: Any) -> list[Any]:
    # The types of normalized and new_residual.
    return [result_type(x, x.shape, varying=varying_axes(residual)), residual]


def _batch_rms_norm(operands: Any, axes: Any, **params: Any) -> Any:
    # `axes` are the operands' batch axes, None for one without; `jax.vmap` batches at least one.
    x, residual, scale = operands
    if axes[2] is not None:
        raise NotImplementedError(
            "all_reduce_rms_norm cannot be batched by jax.vmap over scale; take algorithm="
            '"xla", or multiply by scale afterwards.'
        )
    size = x.shape[axes[0]] if axes[0] is not None else residual.shape[axes[1]]
    x, residual = (
        jnp.broadcast_to(array, (size, *array.shape))
        if axis is None
        else jnp.moveaxis(array, axis, 0)
        for array, axis in ((x, axes[0]), (residual, axes[1]))
    )
    return ep_all_reduce_rms_norm_p.bind(x, residual, scale, **params), [0, 0]


ep_all_reduce_rms_norm_p = _primitive(
    "all_reduce_rms_norm", abstract_eval=_rms_norm_types, batch=_batch_rms_norm
)
