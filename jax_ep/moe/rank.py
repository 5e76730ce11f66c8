"""Runs the layer on each rank, in its own or the caller's `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from jax_ep import checks
from jax_ep.exchange.routes import expert_ids
from jax_ep.formats import QuantizedArray
from jax_ep.moe import (
    few_tokens,
    free_experts,
    fsdp,
    routing,
    shared_experts,
    tensor_axis,
    token_chunks,
)
from jax_ep.moe.call_checks import Call
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import EXPERT_MATRICES, QuantizedExperts, specs_of_quantized
from jax_ep.moe.held_experts import counts_by_expert, experts_of_rank
from jax_ep.moe.mesh import Axes, LayerMesh, explicit_axes, reshard
from jax_ep.moe.metrics import MoEMetrics, metrics_of
from jax_ep.moe.params import MoEParams
from jax_ep.moe.routed_experts import RoutedTokens
from jax_ep.moe.routing import Routing
from jax_ep.placement.choice import choose_slots
from jax_ep.placement.table import Placement


class Operands(NamedTuple):
    """All arrays of one call; a pytree."""

    params: MoEParams
    call: Call
    placement: Placement | None
    quantized: QuantizedExperts | None


def run_where_called(
    operands: Operands, config: MoEConfig, where: LayerMesh
) -> tuple[jax.Array, MoEMetrics]:
    """Runs one rank in the caller's `jax.shard_map`, or the only one without a mesh."""
    ambient = jax.sharding.get_abstract_mesh()
    if not explicit_axes(ambient):
        return _run_on_rank(operands, config, where)
    # The caller's shard_map does not map over these Explicit axes of the mesh. All arrays are
    # replicated over them, so that all ranks along them compute the same.
    spec = jax.typeof(operands.call.x).sharding.spec
    operands = jax.tree.map(lambda a: reshard(a, ambient, PartitionSpec()), operands)
    out, metrics = _run_on_rank(operands, config, where)
    if (choices := metrics.topk_idx) is not None:
        of_tokens = PartitionSpec(*[*spec][:-1])
        metrics = metrics._replace(topk_idx=reshard(choices, ambient, of_tokens))
    return reshard(out, ambient, spec), metrics


def run_over_mesh(
    operands: Operands, config: MoEConfig, where: LayerMesh
) -> tuple[jax.Array, MoEMetrics]:
    """Opens a `jax.shard_map` over the mesh, and runs each rank on its shards in it."""
    mesh, call = where.mesh, operands.call
    assert mesh is not None
    shape, x_spec = call.x.shape, jax.typeof(call.x).sharding.spec
    tokens_over = where.axes_of_tokens(len(shape))
    divides = _ranks_divide(shape, tokens_over, where)
    # In these cases, a sequence may be on several ranks. Otherwise each rank has whole sequences.
    num_sequences = None
    if len(shape) < 3 or not divides or where.sequence_axes:
        num_sequences = math.prod(shape[:-2])
        call = _with_sequence_ids(call, num_sequences)
    if not divides:
        tokens_over = (where.batch_axes,)
        with jax.named_scope("router"):
            call = _flattened(call, where)
    operands = operands._replace(call=call)

    tokens_spec = PartitionSpec(*(axes or None for axes in tokens_over))
    specs = _specs_of(operands, tokens_spec, where)
    args = jax.tree.map(lambda a, spec: reshard(a, mesh, spec), operands, specs)
    replicated: dict[str, Any] = dict.fromkeys(MoEMetrics._fields, PartitionSpec())
    metrics_specs = MoEMetrics(**(replicated | {"topk_idx": tokens_spec}))
    # An abstract mesh is the ambient one, which `jax.shard_map` uses by itself.
    out, metrics = jax.shard_map(
        lambda operands: _run_on_rank(operands, config, where, num_sequences),
        mesh=None if isinstance(mesh, AbstractMesh) else mesh,
        in_specs=(specs,),
        out_specs=(tokens_spec, metrics_specs),
    )(args)

    def like_x(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        # Undoes `_flattened`, and shards the array by `spec`.
        if not divides:
            array = reshard(array, mesh, PartitionSpec())[: math.prod(shape[:-1])]
            array = array.reshape(*shape[:-1], array.shape[-1])
        return reshard(array, mesh, spec)

    if (choices := metrics.topk_idx) is not None:
        with jax.named_scope("metrics"):
            metrics = metrics._replace(topk_idx=like_x(choices, PartitionSpec(*[*x_spec][:-1])))
    # On Explicit axes, the output must be sharded like x, so that callers can add it to x.
    with jax.named_scope("combine"):
        return like_x(out, x_spec), metrics


def _ranks_divide(shape: tuple[int, ...], tokens_over: Sequence[Axes], where: LayerMesh) -> bool:
    """Returns whether the ranks divide the dimensions of x that are split; else x is padded."""
    # An x without tokens is padded, too: XLA for CPUs crashes in jax 0.11 on gradients of empty
    # parts. `tokens_over` has the mesh axes of the leading dimensions.
    if len(shape) < 2 or 0 in shape:
        return False
    return not any(n % where.size(axes) for n, axes in zip(shape, tokens_over, strict=False))


def _with_sequence_ids(call: Call, num_sequences: int) -> Call:
    """Gives each token the index of its sequence among the `num_sequences` sequences of x."""
    shape = call.x.shape[:-1]
    # One id for all tokens along the sequence dimension, which an x [H] lacks.
    sequence = (1,) if shape else ()
    with jax.named_scope("metrics"):
        ids = jnp.arange(num_sequences, dtype=jnp.int32).reshape(*shape[:-1], *sequence)
        return call._replace(sequence_ids=jnp.broadcast_to(ids, shape))


def _flattened(call: Call, where: LayerMesh) -> Call:
    """Flattens the tokens' dimensions; pads with masked tokens, so that ranks get equally many."""
    mesh, shape = where.mesh, call.x.shape
    parts = where.size(where.batch_axes)  # each of which gets at least one token
    assert mesh is not None
    num_tokens = math.prod(shape[:-1])
    if checks.is_symbolic(num_tokens):
        raise ValueError(
            "x must have a dimension that the ranks are known to divide where its dimensions are "
            f"symbolic, since padding would be needed for {shape} on {parts} ranks. Export with a "
            f"dimension such as {parts} * n."
        )
    if call.mask is None:
        call = call._replace(mask=jnp.ones(shape[:-1], jnp.bool_))
    padding = -num_tokens % parts if num_tokens else parts

    def flattened(array: jax.Array) -> jax.Array:
        # The Explicit axes that shard the array may not divide the flattened number of tokens, so
        # the array is replicated over them first.
        array = reshard(array, mesh, PartitionSpec())
        array = array.reshape(num_tokens, *array.shape[len(shape) - 1 :])
        return jnp.pad(array, ((0, padding), *[(0, 0)] * (array.ndim - 1)))

    return jax.tree.map(flattened, call)


def _specs_of(operands: Operands, tokens_spec: PartitionSpec, where: LayerMesh) -> Operands:
    """Returns how each operand is split as it enters the layer's `jax.shard_map`."""
    params, call, placement, quantized = operands
    of_quantized = None
    if quantized is not None:
        # As `quantize_experts` has split them.
        split = fsdp.mesh_of_quantized(where, params)
        specs = {name: split.spec_of(name) for name in EXPERT_MATRICES}
        of_quantized = specs_of_quantized(quantized, specs)
    of_params: dict[str, Any] = {}
    for name, array in params._asdict().items():
        if array is not None:
            spec = where.spec_of(name)
            of_params[name] = array.specs(spec) if isinstance(array, QuantizedArray) else spec
    return Operands(
        MoEParams.of(**of_params),
        jax.tree.map(lambda _: tokens_spec, call),
        jax.tree.map(lambda _: PartitionSpec(), placement),
        of_quantized,
    )


def _run_on_rank(
    operands: Operands, config: MoEConfig, where: LayerMesh, num_sequences: int | None = None
) -> tuple[jax.Array, MoEMetrics]:
    """Runs the layer on the tokens of this rank; returns the output like x, and the metrics."""
    # `num_sequences` is the number of sequences in `call.sequence_ids`; None: all are whole here.
    params, call, placement, quantized = operands
    shape = call.x.shape
    with jax.named_scope("router"):
        call = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(shape) - 1 :]), call)
        # The shared experts run on `shared_x`, the router and the routed experts on `tokens`.
        call, shared_x = _mask_tokens(call, config)
        tokens = call.x
        params = fsdp.gather_params(params, ("gate",), where)
        router_x = tokens if call.router_x is None else call.router_x
        routed, logits = _route(params, router_x, call, config)
        topk_idx, topk_weights = routed.topk_idx, routed.topk_weights
        if config.num_free:
            # -1 in place of a free expert's id, so that dispatch skips it.
            topk_idx = jnp.where(topk_idx < config.num_experts, topk_idx, -1)
    # Free experts run on this rank's own tokens, before tokens are gathered over the tensor axes.
    own_tokens = tokens
    if where.tensor_axes:
        with jax.named_scope("dispatch"):
            tokens, shared_x, topk_idx, topk_weights = tensor_axis.for_all_ranks(
                (tokens, shared_x, topk_idx, topk_weights), where, config.implementation
            )
    # The library's router never chooses an expert twice for a token.
    distinct = call.topk_idx is None and config.router is None
    chosen = RoutedTokens(tokens, topk_idx, topk_weights, distinct)
    out, dropped = _run_routed_experts(operands, chosen, config, where)
    if params.shared_wo is not None:
        with jax.named_scope("shared_experts"):
            out += shared_experts.output(params, shared_x, config, where)
    if where.tensor_axes:
        with jax.named_scope("combine"):
            out = tensor_axis.sum_over_ranks(out, where, config.implementation)
    if config.num_free:
        with jax.named_scope("free_experts"):
            params = fsdp.gather_params(params, ("constant_value", "constant_gate"), where)
            free = free_experts.output(own_tokens, routed, params, config)
            out = (out.astype(jnp.float32) + free).astype(out.dtype)
    with jax.named_scope("metrics"):
        if num_sequences is None:
            num_sequences = math.prod(shape[:-2])
        metrics = metrics_of(routed, logits, call, num_sequences, dropped, config, where)
        if config.record_choices:
            choices = routed.topk_idx.reshape(*shape[:-1], config.num_experts_per_token)
            metrics = metrics._replace(topk_idx=choices)
    with jax.named_scope("combine"):
        return out.reshape(shape), metrics


def _mask_tokens(call: Call, config: MoEConfig) -> tuple[Call, jax.Array]:
    """Sets masked tokens to 0 in a call; also returns x [T, H] for the shared experts."""
    x, mask = call.x, call.mask
    if mask is None:
        return call, x
    # A masked token may hold NaN or infinities. Times a zero cotangent, these would make the gate's
    # gradient NaN, so masked tokens are set to 0.
    tokens = jnp.where(mask[:, None], x, 0)
    # The shared experts run on masked tokens as they are, where these are finite. With float8, a
    # token's numbers also determine the scales of other tokens, so masked tokens are 0 there, too.
    is_float8 = config.matmul_dtype is not None
    shared_x = tokens if is_float8 else jnp.where(mask[:, None] | jnp.isfinite(x), x, 0)
    router_x = call.router_x
    if router_x is not None:
        router_x = jnp.where(mask[:, None], router_x, 0)
    return call._replace(x=tokens, router_x=router_x), shared_x


def _route(
    params: MoEParams, router_x: jax.Array, call: Call, config: MoEConfig
) -> tuple[Routing, jax.Array | None]:
    """Chooses and weighs K experts for each token, or weighs the caller's choices.

    `router_x` [T, rows of the gate] is what the router reads. Also returns the logits [T, E]
    float32; None without a gate, or with the caller's weights.
    """
    mask = call.mask
    logits = None
    if call.topk_weights is None and params.gate is not None:
        logits = routing.router_logits(router_x, params.gate, params.gate_bias, config.router_dtype)
        if (cap := config.logit_softcap) is not None:
            logits = cap * jnp.tanh(logits / cap)
    options = config.routing_options()
    if call.topk_weights is not None:
        assert call.topk_idx is not None
        weights = call.topk_weights.astype(jnp.float32)
        # The caller's weights of a masked token may be NaN; a router's cannot: its router_x is 0.
        if mask is not None:
            weights = jnp.where(mask[:, None], weights, 0.0)
        routed = Routing(expert_ids(call.topk_idx, config.num_choosable), weights)
    elif call.topk_idx is not None:
        assert logits is not None
        routed = routing.routing_of_choices(logits, call.topk_idx, options)
    elif config.router is not None:
        routed = _checked_routing(config.router(router_x, logits), router_x.shape[0], config)
    else:
        assert logits is not None
        k = int(config.num_experts_per_token)
        routed = routing.choose_experts(logits, k, params.bias, options)

    topk_idx, topk_weights = routed.topk_idx, routed.topk_weights
    if params.expert_scale is not None:
        # An id that names no expert, such as -1, gets the factor 0 and adds to no gradient. An
        # indexed read would have a scatter-add as its gradient, whose order varies on GPUs.
        scale = params.expert_scale.astype(jnp.float32)
        is_chosen = jax.nn.one_hot(topk_idx, scale.size, dtype=jnp.bool_)
        topk_weights *= jnp.sum(jnp.where(is_chosen, scale[None, None], 0.0), axis=-1)
    if mask is not None:
        topk_idx = jnp.where(mask[:, None], topk_idx, -1)
    return Routing(topk_idx, topk_weights, routed.probs), logits


def _checked_routing(routed: Any, num_tokens: int, config: MoEConfig) -> Routing:
    """Checks what `config.router` returned; casts ids to int32, and weights to float32."""
    if not isinstance(routed, Routing):
        raise TypeError(
            f"router must return a jax_ep.Routing, but returned {checks.described(routed)}."
        )
    num_experts, k = config.num_choosable, config.num_experts_per_token
    # The kind of each result's dtype, and the size of its last dimension.
    results = {
        "topk_idx": (jnp.integer, k),
        "topk_weights": (jnp.floating, k),
        "probs": (jnp.floating, num_experts),
    }
    for name, (kind, size) in results.items():
        array = getattr(routed, name)
        if array is None and name == "probs":
            continue
        shape = (num_tokens, size)
        checks.check_array(f"{name} of router", array, 2, kind, str(list(shape)))
        checks.check_shape(f"{name} of router", array, shape, f"shape {shape}")
    return Routing(
        expert_ids(routed.topk_idx, num_experts),
        routed.topk_weights.astype(jnp.float32),
        None if routed.probs is None else routed.probs.astype(jnp.float32),
    )


def _run_routed_experts(
    operands: Operands, routed: RoutedTokens, config: MoEConfig, where: LayerMesh
) -> tuple[jax.Array, jax.Array]:
    """Returns the routed experts' output [T, H], and the rows dropped here by expert, [E] int32."""
    params, _, placement, quantized = operands
    with jax.named_scope("dispatch"):
        if placement is not None:
            arrays = placement.expert_of_slot, placement.slots_of_expert, placement.num_copies
            slots = choose_slots(routed.topk_idx, *arrays, axis_name=where.expert_axes)
            routed = dataclasses.replace(routed, topk_idx=slots)
        routed = dataclasses.replace(routed, tokens=routed.tokens.astype(config.dtype))
    with jax.named_scope("experts"):
        experts = experts_of_rank(params, quantized, placement, config, where)
    # `dropped` has one count for each expert or slot of this rank.
    if config.token_chunks > 1:
        dtypes = {w.dtype for w in (params.wi_0, params.wi_1, params.wo) if w is not None}
        out, dropped = token_chunks.run(experts, routed, config, where, dtypes)
    else:
        out, dropped = few_tokens.run(experts, routed, config, where)
    with jax.named_scope("metrics"):
        if placement is not None:
            return out, counts_by_expert(dropped, placement, where.expert_axes)
        # The counts are expanded to all E experts; those of other ranks get 0.
        num_ranks, num_held = where.num_ranks(), dropped.shape[0]
        ids = jnp.arange(num_held * num_ranks, dtype=jnp.int32)
        is_held = ids // num_held == lax.axis_index(where.expert_axes)
        return out, jnp.where(is_held, jnp.tile(dropped, num_ranks), 0)
