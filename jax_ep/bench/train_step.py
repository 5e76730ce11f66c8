"""Defines the training step of `jax_ep.bench.decoder.Decoder`, and the shardings of its state.

In a step, parameters have the shardings that the model defines: experts are split over the mesh
axis "expert"; heads, experts' hidden width and the vocabulary over "tensor"; and every matrix over
"fsdp" (`decoder.fsdp_axes`), if the mesh has these axes. Over all other axes, parameters are
replicated.

Between steps, parameters and the optimizer's state are also split over these other axes (ZeRO;
Rajbhandari et al., 2020): each device updates a part of the parameters with its part of the
gradients. The parts are all-gathered at the start of the next step, not right after the update,
because there XLA lets the first layers run beside the gathers of later ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_ep.bench.decoder import TENSOR_AXIS, Decoder, axis_rules
from jax_ep.linen import ROUTER_STATE
from jax_ep.moe.routing import update_expert_bias

# The options of XLA with which the training step is compiled for GPUs. By default, XLA runs one
# collective at a time beside other kernels. Two gain only because large matmuls run in waves; see
# `jax_ep.matmul.pallas.launch_size`.
GPU_COMPILER_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


class TrainState(NamedTuple):
    """The state that one training step passes to the next, and that a checkpoint saves.

    Attributes:
        step: [] int32, the number of steps made.
        params: the model's parameters.
        router_state: the routers' selection biases, which are added to scores to choose experts, so
            that the experts' loads are balanced without a loss. Empty if the model has none.
        opt_state: the state of the optimizer.
    """

    step: Any
    params: Any
    router_state: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Says what a training step minimizes besides the cross-entropy, and how it balances experts.

    Attributes:
        balance: the factor of the load-balance loss, which is a mean over layers.
        router_z: the factor of the router's z-loss, which is a mean over layers.
        bias_rate: how much a selection bias of a router changes in each step; see
            `jax_ep.update_expert_bias`.
    """

    balance: float = 1e-3
    router_z: float = 1e-4
    bias_rate: float = 0.0


class Layout(NamedTuple):
    """The shardings of the training step's arrays on the mesh.

    Attributes:
        state: the shardings of a `TrainState`. Each device holds, and updates, a different part of
            the parameters.
        params: the shardings of the parameters while a step computes gradients.
        batch: the sharding of the token ids of a step, [A, B, S + 1]: A microbatches of B sequences
            of S tokens, each with one more token as the target of the last.
        everywhere: the sharding of a fully replicated array.
    """

    state: TrainState
    params: Any
    batch: NamedSharding
    everywhere: NamedSharding


def make_layout(
    model: Decoder, optimizer: optax.GradientTransformation, mesh: Mesh, seq_len: int
) -> Layout:
    """Computes the shardings of a training step's arrays, for sequences of `seq_len` tokens."""
    tokens = jax.ShapeDtypeStruct((num_batch_ranks(mesh), seq_len), jnp.int32)
    variables = jax.eval_shape(functools.partial(model.init, jax.random.key(0)), tokens)
    specs = nn.get_partition_spec(variables)
    rules = axis_rules(model.config.num_experts, mesh)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules=rules)
    shapes = nn.unbox(variables)
    parts = jax.tree.map(_split_further, shapes["params"], shardings["params"])
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, part: part,
        jax.eval_shape(optimizer.init, shapes["params"]),
        parts,
        transform_non_params=lambda _: everywhere,
    )
    router_state = shardings.get(ROUTER_STATE, {})
    return Layout(
        TrainState(everywhere, parts, router_state, opt_state),
        shardings["params"],
        NamedSharding(mesh, PartitionSpec(None, _batch_axes(mesh))),
        everywhere,
    )


def num_batch_ranks(mesh: Mesh | AbstractMesh) -> int:
    """Returns over how many ranks sequences are split: those along all axes but "tensor"."""
    return math.prod(mesh.shape[name] for name in _batch_axes(mesh))


def _batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.axis_names if name != TENSOR_AXIS)


def _split_further(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding that also splits an array over the mesh axes along which it is replicated.

    One dimension is split further, over all of these axes together: the first whose shards can be
    split evenly. Collectives of parts of an early dimension need few transposed copies. If no
    dimension can be split, the sharding stays unchanged.
    """
    mesh = sharding.mesh
    entries = list(sharding.spec) + [None] * (array.ndim - len(sharding.spec))
    names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    copies = tuple(name for name in mesh.axis_names if not any(name in used for used in names))
    number = math.prod(mesh.shape[name] for name in copies)

    def parts(dim: int) -> int:
        return math.prod(mesh.shape[name] for name in names[dim])

    dims = [d for d in range(array.ndim) if array.shape[d] % (parts(d) * number) == 0]
    if number == 1 or not dims:
        return sharding
    names[dims[0]] += copies
    return NamedSharding(mesh, PartitionSpec(*(used or None for used in names)))


def init_state(
    model: Decoder,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    seq_len: int,
    seed: int = 0,
    params: Any = None,
    *,
    only_shapes: bool = False,
) -> TrainState:
    """Makes the training state before the first step, sharded as `layout` says.

    Args:
        model: the model.
        optimizer: the optimizer, whose state is initialized.
        layout: the shardings, from `make_layout`.
        seq_len: S, the number of tokens of a sequence.
        seed: the seed of random parameters.
        params: the parameters to start from, which are donated; None: random ones.
        only_shapes: whether nothing is computed, and `jax.ShapeDtypeStruct` objects with shardings
            are returned in place of arrays, for example to restore a checkpoint.
    """

    def init(key: jax.Array, params: Any) -> TrainState:
        tokens = jnp.zeros((num_batch_ranks(layout.everywhere.mesh), seq_len), jnp.int32)
        variables: Any = nn.unbox(model.init(key, tokens))
        params = variables["params"] if params is None else params
        router_state = variables.get(ROUTER_STATE, {})
        return TrainState(jnp.int32(0), params, router_state, optimizer.init(params))

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

    The state is donated. A step has A microbatches of B sequences, which run one after the other;
    its gradients are means over the microbatches.

    The metrics are a dict:
        "loss": the cross-entropy in nats per token, mean over microbatches.
        "load_balance_loss", "router_z_loss": the auxiliary losses without their factors, means over
            microbatches and layers.
        "num_dropped": the number of (token, choice) pairs that were dropped, sum over microbatches
            and layers.
        "expert_counts": [layers, E], how often each expert was chosen, sum over microbatches.
        "grad_norm": the Euclidean norm of all gradients.
    """

    def loss_fn(params: Any, router_state: Any, tokens: jax.Array, quantized: Any) -> Any:
        variables = {"params": params, ROUTER_STATE: router_state}
        outputs: Any = model.apply(variables, tokens[:, :-1], tokens[:, 1:], quantized)
        loss, moe = outputs
        metrics = {
            "loss": loss,
            "load_balance_loss": moe.load_balance_loss.mean(),
            "router_z_loss": moe.router_z_loss.mean(),
        }
        total = loss + objective.balance * metrics["load_balance_loss"]
        total += objective.router_z * metrics["router_z_loss"]
        counts = {"num_dropped": moe.num_dropped.sum(), "expert_counts": moe.expert_counts}
        return total, (metrics, counts)

    def microbatch(state: TrainState, tokens: jax.Array, quantized: Any = None) -> Any:
        grad_fn = jax.grad(loss_fn, has_aux=True)
        grads, found = grad_fn(state.params, state.router_state, tokens, quantized)
        return lax.with_sharding_constraint(grads, layout.state.params), *found

    def accumulate(state: TrainState, batches: jax.Array) -> Any:
        """Computes the gradients of all microbatches, one microbatch after the other.

        Returns the means over microbatches of gradients and losses, and the sums of the counts
        "num_dropped" and "expert_counts". With several microbatches, gradients are float32.
        """
        if (number := batches.shape[0]) == 1:
            return microbatch(state, batches[0])
        quantized = model.quantize_experts(state.params)

        def wide(tokens: jax.Array) -> Any:
            grads, *found = microbatch(state, tokens, quantized)
            return jax.tree.map(lambda grad: grad.astype(jnp.float32), grads), *found

        def add(sums: Any, tokens: jax.Array) -> Any:
            grads, *found = jax.tree.map(jnp.add, sums, wide(tokens))
            return (lax.with_sharding_constraint(grads, layout.state.params), *found), None

        (grads, means, counts), _ = lax.scan(add, wide(batches[0]), batches[1:])
        return *jax.tree.map(lambda x: x / number, (grads, means)), counts

    def train_step(state: TrainState, batches: jax.Array) -> tuple[TrainState, dict]:
        whole = lax.with_sharding_constraint(state.params, layout.params)
        grads, means, counts = accumulate(state._replace(params=whole), batches)
        with jax.named_scope("optimizer"):
            grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
            grad_norm = jnp.sqrt(sum(squares))
        router_state = _step_biases(state.router_state, counts["expert_counts"], objective)
        metrics = means | counts | {"grad_norm": grad_norm}
        return TrainState(state.step + 1, params, router_state, opt_state), metrics

    # The metrics are replicated on all devices, so that every process can read them.
    shardings = layout.state, layout.everywhere
    on_gpus = layout.everywhere.mesh.devices.flat[0].platform == "gpu"
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(layout.state, layout.batch),
        out_shardings=shardings,
        compiler_options=GPU_COMPILER_OPTIONS if on_gpus else None,
    )


def _step_biases(router_state: Any, expert_counts: jax.Array, objective: Objective) -> Any:
    """Updates the selection biases of all routers, so that experts' loads become more even.

    `router_state` has the biases of each layer's router, [E], and `expert_counts` [layers, E] says
    how often each expert was chosen. A bias goes up or down by `objective.bias_rate`; see
    `jax_ep.update_expert_bias`.
    """

    def step(path: Any, bias: jax.Array) -> jax.Array:
        layer = int(path[0].key.removeprefix("layers_"))
        return update_expert_bias(bias, expert_counts[layer], objective.bias_rate)

    return jax.tree_util.tree_map_with_path(step, router_state)
