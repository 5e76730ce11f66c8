"""Defines the training step of `jax_ep.models.decoder.Decoder`, and the shardings of its state.

Between steps, parameters and the optimizer's state are also split over the axes that replicate
them (ZeRO; Rajbhandari et al., 2020): each device updates a part of the parameters with its part of
the gradients. The parts are all-gathered at the start of the next step, not right after the update,
because there XLA lets the first layers run beside the gathers of later ones.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_ep import checks
from jax_ep.models.axes import TENSOR_AXIS
from jax_ep.models.decoder import Decoder, Params, specs
from jax_ep.moe.routing import update_expert_bias

# The options of XLA with which the training step is compiled for GPUs. By default, XLA runs one
# collective at a time beside other kernels. Two gain only because large matmuls run in waves; see
# `jax_ep.matmul.pallas.launch_size`.
GPU_COMPILER_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


class TrainState(NamedTuple):
    """The state that one training step passes to the next, and that a checkpoint saves."""

    step: Any  # [] int32: the number of steps made
    params: Any
    biases: Any  # the routers' selection biases (`Decoder.init_biases`), or None
    opt_state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What a training step minimizes besides the cross-entropy, and how it balances experts."""

    balance: float = 1e-3  # the factor of the load-balance loss, which is a mean over layers
    router_z: float = 1e-4  # the factor of the router's z-loss, which is a mean over layers
    bias_rate: float = 0.0  # of the selection biases; see `jax_ep.update_expert_bias`
    # The id of the token that ends a document, or None. The first token after it does not count in
    # the loss, since nothing before it foretells it. Tokens do not attend to other documents.
    document_end: int | None = None


class Layout(NamedTuple):
    """The shardings of the training step's arrays on the mesh."""

    state: TrainState  # each device holds, and updates, a part of the parameters
    params: Any  # while a step computes gradients
    # Of token ids [A, B, S + 1]: A microbatches of B sequences of S tokens, each with one more
    # token as the target of the last.
    batch: NamedSharding
    everywhere: NamedSharding  # of a fully replicated array


def make_layout(model: Decoder, optimizer: optax.GradientTransformation, mesh: Mesh) -> Layout:
    """Computes the shardings of a training step's arrays."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(shapes, model.config, mesh))
    parts = jax.tree.map(_split_further, shapes, params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    # The optimizer's arrays that are shaped like parameters are split like them.
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, part: part,
        jax.eval_shape(optimizer.init, shapes),
        parts,
        transform_non_params=lambda _: everywhere,
    )
    biases = None if model.init_biases() is None else everywhere
    return Layout(
        TrainState(everywhere, parts, biases, opt_state),
        params,
        NamedSharding(mesh, PartitionSpec(None, _batch_axes(mesh))),
        everywhere,
    )


def num_batch_ranks(mesh: Mesh | AbstractMesh) -> int:
    """Returns over how many ranks sequences are split: those along all axes but "tensor"."""
    return math.prod(mesh.shape[name] for name in _batch_axes(mesh))


def _batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.axis_names if name != TENSOR_AXIS)


def _split_further(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """Also splits an array over the mesh axes along which it is replicated, if they divide it."""
    mesh = sharding.mesh
    entries = list(sharding.spec) + [None] * (array.ndim - len(sharding.spec))
    # The mesh axes over which each dimension is split, and those over which none is.
    used = [checks.as_axes(entry or ()) for entry in entries]
    unused = tuple(name for name in mesh.axis_names if not any(name in axes for axes in used))
    if math.prod(mesh.shape[name] for name in unused) == 1:
        return sharding
    # Splits the first dimension that allows it: parts of an early one need few transposed copies.
    for dim, size in enumerate(array.shape):
        if size % math.prod(mesh.shape[name] for name in (*used[dim], *unused)) == 0:
            used[dim] += unused
            return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in used)))
    return sharding


def init_state(
    model: Decoder,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    seed: int = 0,
    params: Params | None = None,
    *,
    only_shapes: bool = False,
) -> TrainState:
    """Makes the training state before the first step, sharded as `layout` says.

    `params` to start from are donated; None: random ones, of `seed`. With `only_shapes`, returns
    only types with shardings, for example to restore a checkpoint.
    """

    def init(key: jax.Array, params: Params | None) -> TrainState:
        params = model.init(key) if params is None else params
        return TrainState(jnp.int32(0), params, model.init_biases(), optimizer.init(params))

    key = jax.random.key(seed)
    if only_shapes:
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(init, key, params),
            layout.state,
        )
    return jax.jit(init, donate_argnums=1, out_shardings=layout.state)(key, params)


def make_train_step(
    model: Decoder, optimizer: optax.GradientTransformation, layout: Layout, objective: Objective
) -> jax.stages.Wrapped:
    """Returns the jitted training step: (state, token ids [A, B, S + 1]) -> (next state, metrics).

    The state is donated. A step has A microbatches of B sequences, which run one after the other.
    Gradients are means over microbatches. So are the metrics "loss" (nats per token) and, over
    layers too and without their factors, "load_balance_loss" and "router_z_loss". Sums are
    "num_dropped", the float32 number of all dropped (token, choice) pairs, and "expert_counts"
    [layers, E]. "grad_norm" is the Euclidean norm of all gradients.
    """

    def loss_fn(params: Params, biases: Any, tokens: jax.Array, quantized: Any) -> Any:
        inputs, targets, documents = _inputs_and_targets(tokens, objective)
        loss, moe = model.loss(params, inputs, targets, biases, quantized, documents)
        metrics = {
            "loss": loss,
            "load_balance_loss": moe.load_balance_loss.mean(),
            "router_z_loss": moe.router_z_loss.mean(),
        }
        total = loss + objective.balance * metrics["load_balance_loss"]
        total += objective.router_z * metrics["router_z_loss"]
        # Summed over layers and microbatches, drops may exceed the largest int32.
        dropped = moe.num_dropped.sum(dtype=jnp.float32)
        counts = {"num_dropped": dropped, "expert_counts": moe.expert_counts}
        return total, (metrics, counts)

    def microbatch(state: TrainState, tokens: jax.Array, quantized: Any = None) -> Any:
        # Returns the gradients, the dict of losses and the dict of counts.
        grad_fn = jax.grad(loss_fn, has_aux=True)
        grads, metrics = grad_fn(state.params, state.biases, tokens, quantized)
        # Each device needs only the gradients of the part of the parameters that it updates.
        return lax.with_sharding_constraint(grads, layout.state.params), *metrics

    def accumulate(state: TrainState, batches: jax.Array) -> Any:
        # Returns the means of gradients and losses over microbatches, and the sums of counts.
        if (number := batches.shape[0]) == 1:
            return microbatch(state, batches[0])
        # Once for all microbatches; None if experts do not multiply float8.
        quantized = model.quantize_experts(state.params)

        # As `microbatch`, with gradients that are wide enough to be summed.
        def in_float32(tokens: jax.Array) -> Any:
            grads, *metrics = microbatch(state, tokens, quantized)
            return jax.tree.map(lambda grad: grad.astype(jnp.float32), grads), *metrics

        def add(sums: Any, tokens: jax.Array) -> Any:
            grads, *metrics = jax.tree.map(jnp.add, sums, in_float32(tokens))
            # Each device keeps only its part of the sums of gradients.
            return (lax.with_sharding_constraint(grads, layout.state.params), *metrics), None

        # The scan starts from the results of the first microbatch.
        (grads, losses, counts), _ = lax.scan(add, in_float32(batches[0]), batches[1:])
        return *jax.tree.map(lambda x: x / number, (grads, losses)), counts

    def train_step(state: TrainState, batches: jax.Array) -> tuple[TrainState, dict]:
        whole = lax.with_sharding_constraint(state.params, layout.params)
        grads, means, counts = accumulate(state._replace(params=whole), batches)
        with jax.named_scope("optimizer"):
            grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
            grad_norm = jnp.sqrt(sum(squares))
        biases = state.biases
        if biases is not None:
            biases = update_expert_bias(biases, counts["expert_counts"], objective.bias_rate)
        metrics = means | counts | {"grad_norm": grad_norm}
        return TrainState(state.step + 1, params, biases, opt_state), metrics

    # The metrics are replicated on all devices, so that every process can read them.
    out_shardings = layout.state, layout.everywhere
    on_gpus = layout.everywhere.mesh.devices.flat[0].platform == "gpu"
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(layout.state, layout.batch),
        out_shardings=out_shardings,
        compiler_options=GPU_COMPILER_OPTIONS if on_gpus else None,
    )


def make_eval_step(model: Decoder, layout: Layout, objective: Objective) -> jax.stages.Wrapped:
    """Returns the jitted evaluation step: (state, token ids [B, S + 1]) -> metrics.

    The metrics are "loss", the sum of the cross-entropies in nats, and "tokens", the number of
    targets; "expert_counts" [layers, E]; and, if recorded, the choices, "topk_idx" [layers, B, S,
    K] int32.
    """

    def eval_step(state: TrainState, tokens: jax.Array) -> dict[str, Any]:
        params = lax.with_sharding_constraint(state.params, layout.params)
        inputs, targets, documents = _inputs_and_targets(tokens, objective)
        loss, moe = model.loss(params, inputs, targets, state.biases, documents=documents)
        number = jnp.sum(targets >= 0)
        found = {"loss": loss * number, "tokens": number, "expert_counts": moe.expert_counts}
        return found | ({} if moe.topk_idx is None else {"topk_idx": moe.topk_idx})

    batch = NamedSharding(layout.everywhere.mesh, PartitionSpec(*layout.batch.spec[1:]))
    return jax.jit(eval_step, in_shardings=(layout.state, batch), out_shardings=layout.everywhere)


def _inputs_and_targets(
    tokens: jax.Array, objective: Objective
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns inputs, targets and the documents' numbers or None, [B, S], of tokens [B, S + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if objective.document_end is None:
        return inputs, targets, None
    ends = inputs == objective.document_end
    # The token that ends a document belongs to it.
    documents = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends
    return inputs, jnp.where(ends, -1, targets), documents
