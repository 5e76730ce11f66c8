"""Defines a JAX primitive for each of the five functions of `jax_ep.exchange.xla`.

The modules of implementations are imported only where they run, because the kernels load Mosaic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config, Rows
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups
from jax_ep.implementations import Implementation, Implementations
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import (
    Program,
    define_primitive,
    looks_for_nans,
    lowered_anew_for_other_devices,
    match_varying,
    one_by_one,
    replicated_over_explicit_axes,
    result_type,
)
from pallas_kernels.formats import PLAIN

_Shape: Any = jax.ShapeDtypeStruct
# If there is a single rank with at most this many tokens, XLA moves the tokens instead of kernels,
# unless they are quantized. On an H100, eight layers of Qwen3-MoE took 554 us with XLA instead
# of 621 with kernels for one token, 2345 instead of 2361 for 16, and 3631 instead of 3617 for 128.
_MOST_TOKENS = 16
# The same for a combine, of which XLA makes one kernel. For 128 tokens of 2048 bfloat16 and K=8, it
# takes 3.1 us on an H200, and the kernel 6.4. More tokens were not measured.
_MOST_TOKENS_OF_COMBINE = 128


@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of an exchange by which its implementation is selected."""

    target: availability.Target  # the program, or the devices, that are to run it
    axis_name: tuple[str, ...] = ()
    rows: Rows | None = None  # None: rows that the kernels support are assumed
    few_of_one_rank: bool = False  # a single rank, with so few rows that XLA is faster


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange(Implementation):
    load: Callable[[Problem], Any]  # imports and returns the object whose functions move rows


def _two_level_reason(problem: Problem) -> str | None:
    number_or_reason = problem.target.num_hosts(problem.axis_name)
    return number_or_reason if isinstance(number_or_reason, str) else None


def _load_two_level(problem: Problem) -> Any:
    """Makes the two-level exchange, with kernels inside each host if they can run there."""
    from jax_ep.exchange.two_level import TwoLevel

    num_hosts = problem.target.num_hosts(problem.axis_name)
    assert isinstance(num_hosts, int)
    ranks_per_host = lax.axis_size(problem.axis_name) // num_hosts
    why_no_kernels = problem.target.unavailable_reason(problem.axis_name, ranks_per_host)
    return TwoLevel(num_hosts, kernels=why_no_kernels is None)


def _load_pallas(problem: Problem) -> Any:
    from jax_ep.exchange import pallas as pallas_exchange

    return pallas_exchange


def _pallas_reason(problem: Problem) -> str | None:
    if problem.rows is not None and (reason := problem.rows.unavailable_reason()):
        return reason
    return problem.target.unavailable_reason(problem.axis_name)


# implementation=None tries the implementations in this order.
IMPLEMENTATIONS = Implementations(
    (
        _Exchange(name="two_level", unavailable_reason=_two_level_reason, load=_load_two_level),
        _Exchange(
            name="pallas",
            unavailable_reason=_pallas_reason,
            is_default=lambda problem: not problem.few_of_one_rank,
            load=_load_pallas,
        ),
        _Exchange(name="xla", load=lambda problem: xla_exchange),
    )
)


def check_implementation(config: Config, rows: jax.Array, list_words: int) -> None:
    """Raises ValueError, with the reason, if `config.implementation` cannot move `rows`."""
    # The gradient is an exchange of rows of the same shape. What depends on the program's devices
    # is checked when the program is lowered.
    for each in (config, config.of_cotangents):
        moved = _rows(each, rows, list_words)
        problem = Problem(availability.TRACED, config.axis_name, moved)
        IMPLEMENTATIONS.check(config.implementation, problem)


def _rows(config: Config, rows: Any, list_words: int) -> Rows:
    return Rows(
        hidden=rows.shape[-1],
        dtype=rows.dtype,
        num_ranks=lax.axis_size(config.axis_name),
        list_words=list_words,
        num_experts=config.num_experts,
        wire=config.wire,
    )


def _select(config: Config, program: Program, operands: Sequence[Any], most_tokens: int) -> Any:
    """Returns the module or object that moves the rows of a call; `operands` are types."""
    # A dispatch computes its routes; the other operations have them as their last operand.
    rows, *_, last = operands
    if isinstance(last, (Routes, RankRoutes)):
        num_tokens, list_words = last.topk_idx.shape
    else:
        # A dispatch has the operands x, choices [T, K] and, if rank-major, weights [T, K] or None.
        # Each choice and each weight of a token is a word of 4 bytes.
        list_words = sum(each.shape[1] for each in operands[1:] if each is not None)
        num_tokens = rows.shape[0]
    moved = _rows(config, rows, list_words)
    # implementation=None lets XLA move up to `most_tokens` tokens of a single rank.
    few_of_one_rank = (
        moved.num_ranks == 1
        and config.layout == "expert"
        and config.wire == PLAIN
        and not checks.is_symbolic(num_tokens)
        and num_tokens <= most_tokens
        # A large receive buffer takes time, too. The limits were measured with K rows for each
        # token, and up to 2 K rows are accepted.
        and config.capacity <= 2 * num_tokens * list_words
    )
    problem = Problem(availability.Lowered(program), config.axis_name, moved, few_of_one_rank)
    return IMPLEMENTATIONS.select(config.implementation, problem).load(problem)


def _define(
    name: str,
    results: Callable[..., Any],  # (*operands, config) -> a pytree of shapes and dtypes
    function: Callable[[Any], Callable[..., Any]],  # what `load` returned -> its function
    most_tokens: int = _MOST_TOKENS,  # of a single rank, up to which XLA is faster
) -> Callable[..., Any]:
    """Defines the primitive of a function; returns the function (*operands, config) that binds it.

    The primitive's operands are the leaves of a pytree of structure `tree`. Its parameter `types`
    has the shapes and dtypes of its results.
    """

    def abstract_eval(first, *_, types, **__):
        # All operands and results vary over the same mesh axes as the first operand.
        return [result_type(first, each.shape, each.dtype) for each in types]

    def compute(exchange, *leaves, tree, config, **_):
        return jax.tree.leaves(function(exchange)(*jax.tree.unflatten(tree, leaves), config))

    def lower(program: Program, *leaves, tree, config, **_):
        operands = jax.tree.unflatten(tree, program.operand_types)
        exchange = _select(config, program, operands, most_tokens)
        run = functools.partial(compute, exchange, tree=tree, config=config)
        return program.lower(run, *leaves)

    def batch(operands, dims, **params):
        pairs = zip(operands, dims, strict=True)
        if any(_is_integer(operand) for operand, dim in pairs if dim is not None):
            raise NotImplementedError(
                f"{name} cannot be batched by jax.vmap over the choices of experts: each call "
                "is one exchange between ranks. Fold the batch axis into the tokens "
                "(x [B, T, H] -> [B * T, H]), or loop with jax.lax.map or jax.lax.scan."
            )
        stacked = one_by_one(functools.partial(primitive.bind, **params), operands, dims)
        # Routes and counts follow from the choices alone, so they are equal for the whole batch.
        is_shared = [_is_integer(array) for array in stacked]
        outputs = [x[0] if shared else x for x, shared in zip(stacked, is_shared, strict=True)]
        return outputs, [None if shared else 0 for shared in is_shared]

    primitive = define_primitive(
        name,
        abstract_eval=abstract_eval,
        lower=lower,
        # Where JAX cannot define primitives, no kernel runs.
        inline=functools.partial(compute, xla_exchange),
        batch=batch,
    )
    return functools.partial(_bind, primitive, results)


def _bind(primitive: Any, results: Callable[..., Any], *operands: Any, config: Config) -> Any:
    """Applies a primitive to operands; `results` is that of `_define`."""
    # Undefined rows may be NaN, for which JAX would raise an error if it looks for NaNs.
    zero_unused = config.zero_unused or looks_for_nans()
    # `grad_wire` and `quantized` do not change this exchange. They are reset, so that calls that
    # differ only in them have equal parameters and share a lowering.
    config = dataclasses.replace(config, grad_wire=PLAIN, quantized=False, zero_unused=zero_unused)
    leaves, tree = jax.tree.flatten(operands)
    leaves = match_varying(leaves, config.axis_name)
    # Kernels hold addresses of the memory of their GPUs, so other GPUs need another lowering.
    leaves[0] = lowered_anew_for_other_devices(leaves[0])
    types, returned = jax.tree.flatten(results(*jax.tree.unflatten(tree, leaves), config))
    if any(0 in leaf.shape for leaf in leaves):
        # Without tokens, no rank sends anything, and all rows and counts are 0.
        zeros = [jnp.zeros(each.shape, each.dtype) for each in types]
        # Next to leaves[0], the zeros are cast to vary over the same mesh axes as this operand.
        zeros, _ = match_varying((zeros, leaves[0]))
        return jax.tree.unflatten(returned, zeros)
    # A parameter must be hashable, and some of `types` are operands, such as the choices.
    static = tuple(_Shape(each.shape, each.dtype) for each in types)
    bind_leaves = functools.partial(primitive.bind, tree=tree, types=static, config=config)
    return jax.tree.unflatten(returned, replicated_over_explicit_axes(bind_leaves, *leaves))


def _is_integer(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.integer)


# Each function below returns the shapes and dtypes of a primitive's results for its operands.


def _received(lead: tuple[int, ...], x: jax.Array, config: Config) -> tuple[Any, ...]:
    parts = config.wire.row_parts(x.shape[1], x.dtype)
    return tuple(_Shape((*lead, columns), dtype) for columns, dtype in parts)


def _dispatch_results(x, topk_idx, config):
    num_ranks = lax.axis_size(config.axis_name)
    by_expert, total = _int32(config.num_experts // num_ranks), _int32()
    routes = Routes(
        topk_idx, _int32(num_ranks, *topk_idx.shape), _int32(num_ranks, config.num_experts)
    )
    groups = RowGroups(
        group_sizes=by_expert,
        expert_counts=by_expert,
        num_dropped=total,
        rows_needed=total,
        dropped_counts=by_expert,
    )
    return _received((config.capacity,), x, config), routes, groups


def _dispatch_like_results(x, routes, config):
    return _received((config.capacity,), x, config)


def _combine_results(y, topk_weights, routes, config):
    return _Shape((routes.topk_idx.shape[0], y.shape[1]), y.dtype)


def _rank_combine_results(y, routes, config):
    return _Shape(y.shape[1:], y.dtype)


def _rank_dispatch_results(x, topk_idx, topk_weights, config):
    num_ranks = lax.axis_size(config.axis_name)
    shape = (num_ranks, *topk_idx.shape)
    weights = None if topk_weights is None else _Shape(shape, topk_weights.dtype)
    return (
        _received((num_ranks, x.shape[0]), x, config),
        RankRoutes(topk_idx, _int32(*shape)),
        weights,
    )


def _int32(*shape: int) -> Any:
    return _Shape(shape, jnp.int32)


dispatch = _define("ep_dispatch", _dispatch_results, lambda e: e.dispatch_by_choices)
dispatch_like = _define("ep_dispatch_like", _dispatch_like_results, lambda e: e.dispatch_like)
combine = _define(
    "ep_combine", _combine_results, lambda e: e.combine, most_tokens=_MOST_TOKENS_OF_COMBINE
)
rank_dispatch = _define("ep_rank_dispatch", _rank_dispatch_results, lambda e: e.rank_dispatch)
rank_combine = _define("ep_rank_combine", _rank_combine_results, lambda e: e.rank_combine)
