"""The JAX primitives of the exchange: shapes, varying-axes types, and which exchange runs where.

Six primitives without effects, one for each function of `jax_ep.exchange.interface.Exchange`, with
the same operands and results. A primitive lowers to the exchange of two levels where its ranks are
on several hosts, else to the Pallas kernels where they run, and to XLA's collectives everywhere
else; `jax_ep.exchange.pallas` is imported only where kernels run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import quantization, two_level
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import (
    IMPLEMENTATIONS,
    Config,
    Exchange,
    Received,
)
from jax_ep.exchange.routes import RankRoutes, Routes, RowGroups
from jax_ep.runtime import availability, hosts
from jax_ep.runtime.jax_compat import (
    Program,
    define_primitive,
    looks_for_nans,
    lowered_anew_for_other_devices,
    match_varying,
    replicated_over_explicit_axes,
    result_type,
)

_Shape: Any = jax.ShapeDtypeStruct


def check_implementation(config: Config, rows: jax.Array) -> None:
    """Raises ValueError, with the reason, if the exchange that config names cannot move rows.

    Both are checked, the exchange of `rows` and that of their cotangents. What is known only when
    the program is lowered is checked then.
    """
    name = config.implementation
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, but is {name!r}."
        )
    if name == "pallas":
        reason = (
            _tracing_unavailable_reason(config, rows)
            or _tracing_unavailable_reason(config.of_cotangents, rows)
            or availability.traced_devices_unavailable_reason()
        )
        if reason is not None:
            raise _refusal(name, reason)


def _tracing_unavailable_reason(config: Config, rows: Any) -> str | None:
    """Returns why the kernels cannot move such rows in the program being traced, or None."""
    return availability.tracing_unavailable_reason() or availability.exchange_unavailable_reason(
        rows.shape[-1],
        rows.dtype,
        num_ranks=lax.axis_size(config.axis_name),
        top_k=config.list_words,
        num_experts=config.num_experts,
        wire_dtype=config.wire_dtype,
    )


def _with_what_tracing_knows(config: Config, rows: Any) -> Config:
    """Sets `kernels` and `kernels_fit` of a config that may choose kernels, as tracing knows them.

    A config that names "pallas" or "xla" is returned as it is.
    """
    if config.implementation not in (None, "two_level"):
        return config
    return dataclasses.replace(
        config,
        kernels=availability.tracing_unavailable_reason() is None,
        kernels_fit=_tracing_unavailable_reason(config, rows) is None,
    )


def _select(config: Config, program: Program) -> Exchange:
    """Selects the exchange to lower to."""
    name, axis_name = config.implementation, config.axis_name
    if name in (None, "two_level"):
        num_hosts = hosts.num_hosts(program, axis_name)
        if isinstance(num_hosts, int) and num_hosts > 1:
            ranks_per_host = lax.axis_size(axis_name) // num_hosts
            kernels = config.kernels and not availability.program_unavailable_reason(
                program, axis_name, ranks_per_host
            )
            return two_level.TwoLevel(num_hosts, kernels)
        if name == "two_level":
            one = f"all ranks along {axis_name} are on one host (see JAX_EP_DEVICES_PER_HOST)"
            if not axis_name:
                one = "there is no mesh, and so one rank alone"
            raise _refusal(name, one if num_hosts == 1 else str(num_hosts))
    if name == "xla" or not (config.kernels and config.kernels_fit):
        return xla_exchange  # which needs no memory that GPUs share
    reason = availability.program_unavailable_reason(program, axis_name)
    if reason is None:
        from jax_ep.exchange import pallas as pallas_exchange

        return pallas_exchange
    if name == "pallas":
        raise _refusal(name, reason)
    return xla_exchange


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f'implementation="{name}" cannot run here: {reason}. '
        "implementation=None picks one that can."
    )


def _primitive(name: str, results: Callable[..., Any]) -> Callable[..., Any]:
    """Defines a primitive; returns the function (*operands, config) that binds it.

    Args:
      name: the name of the exchanges' function that the primitive computes.
      results: (*operands, config) -> what that function returns, with a shape and dtype for each
        array.
    """

    def abstract_eval(*types, tree, config):
        # The operands vary over the same axes, and so does every result.
        shapes = jax.tree.leaves(results(*jax.tree.unflatten(tree, types), config))
        return [result_type(types[0], shape.shape, shape.dtype) for shape in shapes]

    def compute(exchange, *leaves, tree, config):
        return jax.tree.leaves(getattr(exchange, name)(*jax.tree.unflatten(tree, leaves), config))

    def lower(program: Program, *leaves, tree, config):
        exchange = _select(config, program)

        def run(*leaves):
            return compute(exchange, *leaves, tree=tree, config=config)

        return program.lower(run, *leaves)

    def inline(*leaves, tree, config):
        if config.implementation in ("pallas", "two_level"):
            raise _refusal(config.implementation, f"{availability.jax_unavailable_reason()}")
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
        config = _with_what_tracing_knows(config, operands[0])
        # JAX lowers equal calls once, so calls that compute the same must have an equal config.
        zero_unused = config.zero_unused or looks_for_nans()
        config = dataclasses.replace(
            config, list_words=0, grad_wire_dtype=None, quantized=False, zero_unused=zero_unused
        )
        leaves, tree = jax.tree.flatten(operands)
        leaves = match_varying(leaves, config.axis_name)
        leaves[0] = lowered_anew_for_other_devices(leaves[0])
        returned = jax.tree.structure(results(*jax.tree.unflatten(tree, leaves), config))
        bind_leaves = functools.partial(primitive.bind, tree=tree, config=config)
        return jax.tree.unflatten(returned, replicated_over_explicit_axes(bind_leaves, *leaves))

    return bind


# What each primitive returns: a shape and dtype for every array.


def _received(lead: tuple[int, ...], x: jax.Array, config: Config) -> tuple[Any, ...]:
    hidden = x.shape[1]
    if config.wire_dtype is None:
        return (_Shape((*lead, hidden), x.dtype),)
    scales = (*lead, hidden // quantization.BLOCK)
    return _Shape((*lead, hidden), config.wire_dtype), _Shape(scales, jnp.float32)


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
