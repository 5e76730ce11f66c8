"""Defines the JAX primitives of the exchange: result types and lowering.

There are six primitives without effects, one for each function of
`jax_ep.exchange.interface.Exchange`, with the operands and results of that function. Each lowers to
the implementation that `jax_ep.exchange.selection` selects.
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
from jax_ep.exchange import selection
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config, Exchange, Received
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups
from jax_ep.exchange.rows import Rows
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import (
    Program,
    define_primitive,
    looks_for_nans,
    lowered_anew_for_other_devices,
    match_varying,
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


def check_implementation(config: Config, rows: jax.Array, list_words: int) -> None:
    """Raises ValueError, with the reason, if `config.implementation` cannot move `rows`.

    The exchange that sends the rows' cotangents is checked, too. Conditions that depend on the
    program's devices are checked only when the program is lowered. `list_words` is the number of
    4-byte words that describe a token's choices: K, or 2 K if weights are sent with the choices.
    """
    for each in (config, config.of_cotangents):
        problem = _problem(each, rows, list_words, availability.TRACED)
        selection.IMPLEMENTATIONS.check(config.implementation, problem)


def _problem(
    config: Config,
    rows: Any,
    list_words: int,
    target: availability.Target,
    num_tokens: int | None = None,
    most_tokens: int = 0,
) -> selection.Problem:
    """Describes a call, by which an implementation is selected.

    On a single rank, XLA moves up to `most_tokens` tokens. If `num_tokens` is None, kernels do.
    """
    moved = Rows(
        hidden=rows.shape[-1],
        dtype=rows.dtype,
        num_ranks=lax.axis_size(config.axis_name),
        list_words=list_words,
        num_experts=config.num_experts,
        wire=config.wire,
    )
    few_of_one_rank = (
        moved.num_ranks == 1
        and config.layout == "expert"
        and config.wire == PLAIN
        and num_tokens is not None
        and not checks.is_symbolic(num_tokens)
        and num_tokens <= most_tokens
        # A large receive buffer takes time, too. The limits were measured with K rows for each
        # token, and up to 2 K rows are accepted.
        and config.capacity <= 2 * num_tokens * list_words
    )
    return selection.Problem(target, config.axis_name, moved, few_of_one_rank)


def _select(name: str, config: Config, program: Program, operands: Sequence[Any]) -> Exchange:
    """Selects the implementation to which the primitive `name` lowers for these operands."""
    rows, *_, last = operands
    if isinstance(last, (Routes, RankRoutes)):
        num_tokens, list_words = last.topk_idx.shape
    else:
        # A dispatch has the operands x, choices [T, K] and, if rank-major, weights [T, K] or None.
        # Each choice and each weight of a token is a word of 4 bytes.
        list_words = sum(each.shape[1] for each in operands[1:] if each is not None)
        num_tokens = rows.shape[0]
    most_tokens = _MOST_TOKENS_OF_COMBINE if name == "combine" else _MOST_TOKENS
    target = availability.Lowered(program)
    problem = _problem(config, rows, list_words, target, num_tokens, most_tokens)
    return selection.IMPLEMENTATIONS.select(config.implementation, problem).load(problem)


def _primitive(name: str, results: Callable[..., Any]) -> Callable[..., Any]:
    """Defines a primitive; returns the function (*operands, config) that binds it.

    Args:
      name: the name of the function of `Exchange` that the primitive computes.
      results: maps (*operands, config) to the results, as a pytree of shapes and dtypes.
    """

    def abstract_eval(*types, tree, config):
        # All operands and results vary over the same mesh axes as the first operand.
        shapes = jax.tree.leaves(results(*jax.tree.unflatten(tree, types), config))
        return [result_type(types[0], shape.shape, shape.dtype) for shape in shapes]

    def compute(exchange, *leaves, tree, config):
        return jax.tree.leaves(getattr(exchange, name)(*jax.tree.unflatten(tree, leaves), config))

    def lower(program: Program, *leaves, tree, config):
        exchange = _select(name, config, program, jax.tree.unflatten(tree, program.operand_types))

        def run(*leaves):
            return compute(exchange, *leaves, tree=tree, config=config)

        return program.lower(run, *leaves)

    def inline(*leaves, tree, config):
        return compute(xla_exchange, *leaves, tree=tree, config=config)

    def no_batching(*_, **__):
        raise NotImplementedError(
            f"ep_{name} cannot be batched by jax.vmap: each call is one exchange between ranks. "
            "Fold the batch axis into the tokens (x [B, T, H] -> [B * T, H]), or loop with "
            "jax.lax.map or jax.lax.scan."
        )

    primitive = define_primitive(
        f"ep_{name}", abstract_eval=abstract_eval, lower=lower, inline=inline, batch=no_batching
    )

    def bind(*operands: Any, config: Config) -> Any:
        # Fields of config that do not change this exchange are reset, so that calls that differ
        # only in them have equal parameters and share a lowering.
        zero_unused = config.zero_unused or looks_for_nans()
        config = dataclasses.replace(
            config, grad_wire=PLAIN, quantized=False, zero_unused=zero_unused
        )
        leaves, tree = jax.tree.flatten(operands)
        leaves = match_varying(leaves, config.axis_name)
        leaves[0] = lowered_anew_for_other_devices(leaves[0])
        returned = jax.tree.structure(results(*jax.tree.unflatten(tree, leaves), config))
        bind_leaves = functools.partial(primitive.bind, tree=tree, config=config)
        return jax.tree.unflatten(returned, replicated_over_explicit_axes(bind_leaves, *leaves))

    return bind


# Each function below returns the shapes and dtypes of a primitive's results for its operands.


def _received(lead: tuple[int, ...], x: jax.Array, config: Config) -> tuple[Any, ...]:
    parts = config.wire.row_parts(x.shape[1], x.dtype)
    return tuple(_Shape((*lead, columns), dtype) for columns, dtype in parts)


def _dispatch_results(x, topk_idx, config):
    num_ranks = lax.axis_size(config.axis_name)
    blocks, total = _int32(config.num_experts // num_ranks), _int32()
    routes = Routes(
        topk_idx, _int32(num_ranks, *topk_idx.shape), _int32(num_ranks, config.num_experts)
    )
    groups = RowGroups(blocks, blocks, total, total, blocks)
    return _received((config.capacity,), x, config), routes, groups


def _rank_dispatch_results(x, topk_idx, topk_weights, config):
    num_ranks = lax.axis_size(config.axis_name)
    shape = (num_ranks, *topk_idx.shape)
    weights = None if topk_weights is None else _Shape(shape, topk_weights.dtype)
    return (
        _received((num_ranks, x.shape[0]), x, config),
        RankRoutes(topk_idx, _int32(*shape)),
        weights,
    )


def _combine_grad_results(g, topk_weights, y, routes, config):
    return _Shape(y.shape, y.dtype), _Shape(topk_weights.shape, jnp.float32)


def _int32(*shape: int) -> Any:
    return _Shape(shape, jnp.int32)


dispatch: Callable[..., tuple[Received, Routes, RowGroups]] = _primitive(
    "dispatch", _dispatch_results
)
dispatch_like: Callable[..., Received] = _primitive(
    "dispatch_like",
    lambda x, routes, config: _received((config.capacity,), x, config),
)
combine: Callable[..., jax.Array] = _primitive(
    "combine",
    lambda y, weights, routes, config: _Shape((routes.topk_idx.shape[0], y.shape[1]), y.dtype),
)
combine_grad: Callable[..., tuple[jax.Array, jax.Array]] = _primitive(
    "combine_grad", _combine_grad_results
)
rank_dispatch: Callable[..., tuple[Received, RankRoutes, jax.Array | None]] = _primitive(
    "rank_dispatch", _rank_dispatch_results
)
rank_combine: Callable[..., jax.Array] = _primitive(
    "rank_combine",
    lambda y, routes, config: _Shape(y.shape[1:], y.dtype),
)
