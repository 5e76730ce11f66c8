"""Defines the MoE layers that `bench layer` compares: this library's, and layers of plain JAX.

Every layer is a function of (params, x) on one rank, inside `jax.shard_map` over `AXIS`. All layers
use the same router, give the experts the same rows in a buffer of the same size, and are
differentiable in all operands. The baselines are written to be fast: JAX would derive a scatter-add
as the gradient of a gather, and custom VJPs replace it by a faster form where there is one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.bench.baselines import AXIS
from jax_ep.moe import layer as moe
from jax_ep.moe import routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_mlp import expert_mlp
from jax_ep.moe.params import MoEParams

# The type of an MoE layer: a function (parameters, tokens x [T, H]) -> outputs [T, H], which each
# rank calls. This library's layer also takes quantized experts as a third argument.
Layer = Callable[..., jax.Array]


class Exchange(NamedTuple):
    """A dispatch and a combine, as functions that already know which experts each token chose.

    Attributes:
      group_sizes: [L] int32, the number of rows that each of this rank's L experts receives.
      send: the dispatch: a function from x [T, H] to the receive buffer [R, H], R expert-major
        rows.
      bring_back: the combine: a function from the experts' outputs y [R, H] and the router's
        weights [T, K] float32 to each token's weighted sum of its K experts' outputs, [T, H].
    """

    group_sizes: jax.Array
    send: Callable[[jax.Array], jax.Array]
    bring_back: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class MeasuredLayer:
    """A way to compute the MoE layer, which `bench layer` measures.

    Attributes:
      exchange: makes the layer's dispatch and combine: a function (topk_idx [T, K], config, R) ->
        `Exchange`, where R is the number of rows of the receive buffer. None: the layer is this
        library's `moe.moe_layer`.
      implementation: the `implementation` of `moe.moe_layer`; unused if `exchange` is given.
      ragged_dot: whether experts use `lax.ragged_dot` instead of `jax_ep.grouped_matmul`.
      plain_exchange: whether the layer combines plain XLA collectives with this library's grouped
        matmul.
    """

    exchange: Callable[[jax.Array, MoEConfig, int], Exchange] | None = None
    implementation: Any = None
    ragged_dot: bool = False
    plain_exchange: bool = False


def make_layer(name: str, config: MoEConfig, capacity: int) -> Layer:
    """Makes an MoE layer of the kind that LAYERS calls `name`.

    `capacity` is the number of rows of the layer's receive buffer. It must equal the number that
    this library's layer computes from the capacity factor of `config`.
    """
    chosen = LAYERS[name]
    exchange = chosen.exchange
    if exchange is None:
        own = dataclasses.replace(config, implementation=chosen.implementation)
        return lambda params, x, quantized=None: moe.moe_layer(
            params, x, own, quantized_experts=quantized
        )[0]

    experts = _ragged_dot_mlp if chosen.ragged_dot else expert_mlp

    def layer(params, x):
        routed = route(params, x, config)
        way = exchange(routed.topk_idx, config, capacity)
        y = experts(way.send(x), params.wi_0, params.wi_1, params.wo, way.group_sizes)
        return way.bring_back(y, routed.topk_weights)

    return layer


def route(params: MoEParams, x: jax.Array, config: MoEConfig) -> routing.Routing:
    """Routes the tokens x [T, H] as `moe_layer` does: to the K experts with the highest logits."""
    assert params.gate is not None
    logits = routing.router_logits(x, params.gate)
    return routing.top_k_routing(logits, config.num_experts_per_token, score=config.score)


def unavailable_reason(name: str, platform: str) -> str | None:
    """Returns why the layer `name` cannot run on a platform, such as "cpu"; None if it can."""
    if name.startswith("ragged") and platform == "cpu":
        return "XLA has no ragged_all_to_all for CPU"
    return None


def _ragged_dot_mlp(tokens, wi_0, wi_1, wo, group_sizes):
    pre_0, pre_1 = (lax.ragged_dot(tokens, wi, group_sizes) for wi in (wi_0, wi_1))
    gated = jax.nn.silu(pre_0.astype(jnp.float32)) * pre_1.astype(jnp.float32)
    return lax.ragged_dot(gated.astype(tokens.dtype), wo, group_sizes)


def gather_and_scatter(topk_idx: jax.Array, config: MoEConfig, capacity: int) -> Exchange:
    """Makes an exchange from `lax.all_gather` and `lax.psum_scatter`.

    In the dispatch, every rank gathers all tokens and takes those that chose its experts. In the
    combine, every rank sums its experts' rows by token, and psum_scatter sums over ranks.
    """
    top_k = topk_idx.shape[1]
    num_local = config.num_experts // lax.axis_size(AXIS)
    choices = lax.all_gather(topk_idx, AXIS, tiled=True).reshape(-1)
    local = choices - lax.axis_index(AXIS) * num_local
    expert = jnp.where((local >= 0) & (local < num_local), local, num_local)
    by_expert, choice = lax.sort_key_val(expert, jnp.arange(choices.size, dtype=jnp.int32))
    ends = jnp.searchsorted(by_expert, jnp.arange(num_local), side="right").astype(jnp.int32)
    live = jnp.arange(capacity) < ends[-1]
    choice = jnp.where(live, choice[:capacity], choices.size)
    # For each row of the receive buffer, the index of its token among the N * T tokens of all
    # ranks. For an empty row, the index is N * T.
    token = choice // top_k

    def bring_back(y, weights):
        all_weights = lax.all_gather(weights, AXIS, tiled=True).reshape(-1)
        row_weights = jnp.take(all_weights, choice, mode="fill", fill_value=0)
        rows = y.astype(jnp.float32) * row_weights[:, None]
        return _collect(rows, token, len(topk_idx), y.dtype)

    return Exchange(jnp.diff(ends, prepend=0), lambda x: _spread(x, token), bring_back)


@jax.custom_vjp
def _spread(x: jax.Array, token: jax.Array) -> jax.Array:
    """Fills the receive buffer [R, H] of a rank from the tokens x [T, H] of all ranks.

    The N * T tokens of the N ranks are gathered. Row i of the buffer is the token with the index
    `token[i]`, or zero for an index of N * T or more.
    """
    return jnp.take(lax.all_gather(x, AXIS, tiled=True), token, 0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _collect(rows: jax.Array, token: jax.Array, num_tokens: int, dtype: Any) -> jax.Array:
    """Sums all ranks' rows [R, H] by token; returns the sums of this rank's tokens, [T, H].

    Args:
      rows: the rows of this rank.
      token: [R], which of the N * T tokens of all ranks each row belongs to; N * T or more: none.
      num_tokens: T, the number of tokens of a rank.
      dtype: the dtype of the sums over ranks and of the result. Each rank first sums its own rows
        in float32.
    """
    sums = jnp.zeros((lax.axis_size(AXIS) * num_tokens, rows.shape[1]), jnp.float32)
    sums = sums.at[token].add(rows.astype(jnp.float32), mode="drop")
    return lax.psum_scatter(sums.astype(dtype), AXIS, tiled=True)


_spread.defvjp(
    lambda x, token: (_spread(x, token), (token, x)),
    lambda saved, g: (_collect(g, saved[0], len(saved[1]), g.dtype), None),
)
_collect.defvjp(
    lambda rows, token, num_tokens, dtype: (
        _collect(rows, token, num_tokens, dtype),
        (token, jnp.zeros((), rows.dtype)),
    ),
    lambda num_tokens, dtype, saved, g: (_spread(g, saved[0]).astype(saved[1].dtype), None),
)


def ragged(topk_idx: jax.Array, config: MoEConfig, capacity: int) -> Exchange:
    """Makes an exchange from `lax.ragged_all_to_all`, with one row for each (token, choice).

    A rank sorts its rows by expert before it sends them, and sorts the rows that it has received
    from all ranks by expert again.
    """
    num_tokens, top_k = topk_idx.shape
    num_ranks, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
    num_local = config.num_experts // num_ranks
    by_expert, order = lax.sort_key_val(
        topk_idx.reshape(-1), jnp.arange(topk_idx.size, dtype=jnp.int32)
    )
    ends = jnp.searchsorted(by_expert, jnp.arange(config.num_experts), side="right")
    counts = lax.all_gather(jnp.diff(ends.astype(jnp.int32), prepend=0), AXIS)
    # pairs[source, destination] is the number of rows that rank `source` sends to `destination`.
    pairs = counts.reshape(num_ranks, num_ranks, num_local).sum(axis=2)
    # mine[source, e] is the number of rows that rank `source` sends to this rank for the e-th of
    # this rank's experts.
    mine = lax.dynamic_slice_in_dim(counts, rank * num_local, num_local, axis=1)
    # Received rows are ordered by source rank, then by expert. Unfilled rows at the end of the
    # buffer get the number `num_local`, which no expert has, so that they sort last.
    block_ends = jnp.cumsum(mine.reshape(-1), dtype=jnp.int32)
    block = jnp.searchsorted(block_ends, jnp.arange(capacity), side="right")
    expert = jnp.where(block < mine.size, block % num_local, num_local)
    arrival = lax.sort_key_val(expert, jnp.arange(capacity, dtype=jnp.int32))[1]
    inverse_order, inverse_arrival = _inverse(order), _inverse(arrival)

    def send(x):
        rows = _permute(x, order, inverse_order, top_k)
        return _permute(_ragged_out(rows, pairs, capacity), arrival, inverse_arrival, 1)

    def bring_back(y, weights):
        rows = _ragged_back(_permute(y, inverse_arrival, arrival, 1), pairs, topk_idx.size)
        rows = _permute(rows, inverse_order, order, 1).reshape(num_tokens, top_k, -1)
        sums = jnp.sum(rows.astype(jnp.float32) * weights[:, :, None], axis=1)
        return sums.astype(y.dtype)

    return Exchange(mine.sum(axis=0), send, bring_back)


def _inverse(permutation: jax.Array) -> jax.Array:
    places = jnp.arange(permutation.size, dtype=jnp.int32)
    return jnp.zeros_like(permutation).at[permutation].set(places, unique_indices=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _permute(x: jax.Array, index: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
    """Repeats each row of x `copies` times, and permutes the repeated rows.

    Row i of the result is the repeated row number index[i]. `inverse` is the inverse permutation of
    `index`. With it, the backward pass gathers rows of the cotangent instead of scattering them.
    """
    return x[index // copies]


def _permute_bwd(copies, inverse, g):
    dx = g[inverse]
    if copies > 1:
        dx = jnp.sum(dx.reshape(-1, copies, g.shape[1]).astype(jnp.float32), axis=1)
    return dx.astype(g.dtype), None, None


_permute.defvjp(
    lambda x, index, inverse, copies: (_permute(x, index, inverse, copies), inverse), _permute_bwd
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ragged_out(rows: jax.Array, pairs: jax.Array, num_rows: int) -> jax.Array:
    """Sends each row to its destination rank, as a dispatch does.

    `rows` are ordered by destination rank. pairs[s, d] is the number of rows that rank s sends to
    rank d. Returns the rows that this rank receives, ordered by source rank and padded with zeros
    to [num_rows, H].
    """
    return _ragged_all_to_all(rows, pairs, num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ragged_back(rows: jax.Array, pairs: jax.Array, num_rows: int) -> jax.Array:
    """Sends each row back to the rank that it came from, as a combine does.

    `rows` are in the order in which `_ragged_out` returned them. pairs[s, d] is the number of rows
    that rank d sends back to rank s. Returns the rows that come back to this rank, padded with
    zeros to [num_rows, H]. This function is the transpose of `_ragged_out`, so each of the two
    computes the other's gradient.
    """
    return _ragged_all_to_all(rows, pairs.T, num_rows)


_ragged_out.defvjp(
    lambda rows, pairs, num_rows: (_ragged_out(rows, pairs, num_rows), (pairs, rows)),
    lambda num_rows, saved, g: (_ragged_back(g, saved[0], len(saved[1])), None),
)
_ragged_back.defvjp(
    lambda rows, pairs, num_rows: (_ragged_back(rows, pairs, num_rows), (pairs, rows)),
    lambda num_rows, saved, g: (_ragged_out(g, saved[0], len(saved[1])), None),
)


def _ragged_all_to_all(rows: jax.Array, pairs: jax.Array, num_rows: int) -> jax.Array:
    rank = lax.axis_index(AXIS)
    sent, received = pairs[rank], pairs[:, rank]
    return lax.ragged_all_to_all(
        rows,
        jnp.zeros((num_rows, rows.shape[1]), rows.dtype),
        (jnp.cumsum(sent) - sent).astype(jnp.int32),
        sent,
        (jnp.cumsum(pairs, axis=0) - pairs)[rank].astype(jnp.int32),
        received,
        axis_name=AXIS,
    )


IMPLEMENTATIONS = {"jax_ep": MeasuredLayer()}
BASELINES = {
    "all_gather+psum_scatter": MeasuredLayer(gather_and_scatter, plain_exchange=True),
    "all_gather+all_to_all": MeasuredLayer(implementation="xla", plain_exchange=True),
    "ragged_all_to_all+ragged_dot": MeasuredLayer(ragged, ragged_dot=True),
}
LAYERS = IMPLEMENTATIONS | BASELINES
RAGGED_DOT = "ragged_all_to_all+ragged_dot"
