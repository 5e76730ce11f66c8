"""The JAX primitives of the collectives: shapes, varying axes, transposes and lowering.

Five primitives, all without effects, all called inside `shard_map` over `axis_name`, N ranks:

  ep_all_reduce           x [...]                               -> [...]
  ep_all_gather           x [n, ...]                            -> [N * n, ...]
  ep_reduce_scatter       x [N * n, ...]                        -> [n, ...]
  ep_all_to_all           x [N * n, ...]                        -> [N * n, ...]
  ep_all_reduce_rms_norm  x [..., H], residual [..., H], scale  -> normalized, new_residual

The first four are linear and have transposes. Each primitive lowers to the algorithm that
`jax_ep.collectives.selection.choose` names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_ep.collectives import selection
from jax_ep.collectives.algorithms import Algorithm
from jax_ep.collectives.selection import Refusals
from jax_ep.collectives.xla import AxisName, XlaCollectives
from jax_ep.runtime import availability, jax_compat
from jax_ep.runtime.jax_compat import Primitive, Program, result_type, to_varying, varying_axes


class Collectives(Protocol):
    """The collectives of one algorithm between the ranks of some mesh axes.

    Each method runs inside `shard_map`. Its operands and results have the shapes that the module's
    docstring gives for the primitive of its name.
    """

    def all_reduce(self, x: jax.Array) -> jax.Array: ...

    def all_gather(self, x: jax.Array) -> jax.Array: ...

    def reduce_scatter(self, x: jax.Array) -> jax.Array: ...

    def all_to_all(self, x: jax.Array) -> jax.Array: ...

    def all_reduce_rms_norm(
        self, x: jax.Array, residual: jax.Array, scale: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]: ...


class LinearCollective(NamedTuple):
    """One of the four linear collectives, with its primitive.

    Attributes:
      name: the collective's key in `jax_ep.collectives.algorithms.ALGORITHMS`.
      run: calls the method of that name of a `Collectives`.
      primitive: binds x, with the parameters axis_name, num_ranks and algorithm.
    """

    name: str
    run: Callable[[Collectives, jax.Array], jax.Array]
    primitive: Primitive


def _primitive(op: str, run: Callable[..., list[jax.Array]], **rules: Any) -> Primitive:
    """Returns the primitive that computes `run(collectives, *operands)` for the chosen algorithm.

    `rules` are passed on to `jax_compat.define_primitive`.
    """

    def lower(
        program: Program,
        *operands: Any,
        axis_name: AxisName,
        algorithm: Algorithm,
        num_ranks: int,
        **params: Any,
    ) -> Any:
        x, refusals = program.operand_types[0], Refusals.of_program(program, axis_name)
        chosen = selection.choose(op, algorithm, x, num_ranks, refusals)
        if chosen == "unfused":
            chosen = selection.choose("all_reduce", None, x, num_ranks, refusals)
        function = functools.partial(run, _collectives(chosen, axis_name))
        return program.lower(function, *operands, **params)

    def inline(
        x: jax.Array,
        *operands: jax.Array,
        axis_name: AxisName,
        algorithm: Algorithm,
        num_ranks: int,
        **params: Any,
    ) -> list[jax.Array]:
        refusals = Refusals(availability.jax_unavailable_reason())
        selection.choose(op, algorithm, x, num_ranks, refusals)  # raises if a kernel was named
        return run(XlaCollectives(axis_name), x, *operands, **params)

    return jax_compat.define_primitive(f"ep_{op}", lower=lower, inline=inline, **rules)


def _collectives(algorithm: str, axis_name: AxisName) -> Collectives:
    if algorithm == "xla":
        return XlaCollectives(axis_name)
    from jax_ep.collectives.pallas import PallasCollectives  # loads Mosaic

    return PallasCollectives(algorithm, axis_name)


def _linear(
    name: str,
    run: Callable[[Collectives, jax.Array], jax.Array],
    result: Callable[[Any, int, AxisName], Any],
    transpose: Callable[..., jax.Array],
) -> LinearCollective:
    """Returns a linear collective with its primitive.

    Args:
      name: the collective's name.
      run: calls the method of that name of a `Collectives`.
      result: maps x's type, N and the axes to the result's type.
      transpose: maps a cotangent, x's type and the primitive's parameters to x's cotangent.
    """

    def abstract_eval(x, *, axis_name, algorithm, num_ranks):
        return [result(x, num_ranks, axis_name)]

    def transpose_rule(cotangents, x, **params):
        return [transpose(cotangents[0], x, **params)]

    def batch(operands, axes, **params):
        # The collective works along the leading axis, so the batch axis goes last.
        (x,), (axis,) = operands, axes
        return primitive.bind(jnp.moveaxis(x, axis, -1), **params), [x.ndim - 1]

    primitive = _primitive(
        name,
        lambda collectives, x: [run(collectives, x)],
        abstract_eval=abstract_eval,
        transpose=transpose_rule,
        batch=batch,
    )
    return LinearCollective(name, run, primitive)


# Types of the results.


def _same(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, x.shape)


def _reduced(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, x.shape, varying=varying_axes(x) - frozenset(axis_name))


def _gathered(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, (num_ranks * x.shape[0], *x.shape[1:]))


def _scattered(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, (x.shape[0] // num_ranks, *x.shape[1:]))


# Transposes.


def _transpose_all_reduce(g, x, *, axis_name, **params):
    """Transposes all_reduce as JAX transposes lax.psum.

    Where varying axes are tracked, all ranks have the same cotangent, which becomes that of each
    rank's x. Otherwise each rank has its own cotangent, and they are summed.
    """
    if varying := varying_axes(x):
        return to_varying(g, varying - varying_axes(g))
    return ALL_REDUCE.primitive.bind(g, axis_name=axis_name, **params)[0]


def _transpose_all_gather(g, x, **params):
    return REDUCE_SCATTER.primitive.bind(g, **params)[0]


def _transpose_reduce_scatter(g, x, **params):
    return ALL_GATHER.primitive.bind(g, **params)[0]


def _transpose_all_to_all(g, x, **params):
    return ALL_TO_ALL.primitive.bind(g, **params)[0]


ALL_REDUCE = _linear(
    "all_reduce", lambda collectives, x: collectives.all_reduce(x), _reduced, _transpose_all_reduce
)
ALL_GATHER = _linear(
    "all_gather", lambda collectives, x: collectives.all_gather(x), _gathered, _transpose_all_gather
)
REDUCE_SCATTER = _linear(
    "reduce_scatter",
    lambda collectives, x: collectives.reduce_scatter(x),
    _scattered,
    _transpose_reduce_scatter,
)
ALL_TO_ALL = _linear(
    "all_to_all", lambda collectives, x: collectives.all_to_all(x), _same, _transpose_all_to_all
)


def _run_rms_norm(
    collectives: Collectives, x: jax.Array, residual: jax.Array, scale: jax.Array, *, eps: float
) -> list[jax.Array]:
    return list(collectives.all_reduce_rms_norm(x, residual, scale, eps=eps))


def _rms_norm_types(x: Any, residual: Any, scale: Any, **_: Any) -> list[Any]:
    return [result_type(x, x.shape, varying=varying_axes(residual)), residual]


def _batch_rms_norm(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "ep_all_reduce_rms_norm cannot be batched by jax.vmap: fold the batch axis into the rows "
        '(x [B, T, H] is as good as [T, H]), or take algorithm="xla".'
    )


ep_all_reduce_rms_norm_p = _primitive(
    "all_reduce_rms_norm", _run_rms_norm, abstract_eval=_rms_norm_types, batch=_batch_rms_norm
)
