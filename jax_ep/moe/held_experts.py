"""Prepares the weights of the experts that a rank holds, and quantizes them once for all calls.

In a layer with slots, experts may have several copies. Gradients of an expert's copies are added,
and each copy gets the sum, so an elementwise optimizer keeps copies equal, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

from jax_ep.dtypes import wide_dtype
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.moe import expert_matmuls, fsdp
from jax_ep.moe.call_checks import check_experts, check_types
from jax_ep.moe.config import MoEConfig, check_config
from jax_ep.moe.expert_matmuls import EXPERT_MATRICES, Experts, QuantizedExperts
from jax_ep.moe.mesh import AxisRules, LayerMesh, find_mesh, reshard
from jax_ep.moe.params import MoEParams
from jax_ep.placement.table import Placement
from jax_ep.placement.weights import ROUTED_WEIGHTS
from jax_ep.runtime.jax_compat import match_varying


def experts_of_rank(
    params: MoEParams,
    quantized: QuantizedExperts | None,
    placement: Placement | None,
    config: MoEConfig,
    where: LayerMesh,
) -> Experts:
    """Returns the weights of this rank's experts, gathered over FSDP axes, in the compute dtype."""
    weights: dict[str, Any] = {
        name: _own_experts(name, array, placement, config, where)
        for name in ROUTED_WEIGHTS
        if (array := getattr(params, name)) is not None
    }
    weights, quantized = _gathered(weights, quantized, config, where)
    if quantized is not None:
        num_local = config.num_held // where.num_ranks()
        quantized = jax.tree.map(lambda part: _select(part, num_local, where), quantized)
    if config.matmul_dtype is not None:
        on_a_rank = " on a rank" if where.num_ranks() * where.num_tensor_ranks() > 1 else ""
        for name in EXPERT_MATRICES:
            if name in weights:
                what = f"with matmul_dtype, {name}{on_a_rank}"
                FLOAT8_MATRICES.check_shape(what, weights[name].shape)
    experts = Experts(**({"wi_1": None} | weights), quantized=quantized)
    # The partial outputs of the ranks along the tensor axes are summed, so only the first of these
    # ranks adds the output's bias.
    if where.tensor_axes and experts.wo_bias is not None:
        is_first = lax.axis_index(where.tensor_axes) == 0
        experts = experts._replace(wo_bias=jnp.where(is_first, experts.wo_bias, 0))
    return experts


def _own_experts(
    name: str, array: Any, placement: Placement | None, config: MoEConfig, where: LayerMesh
) -> Any:
    """Returns this rank's experts of the parameter `name`, before FSDP axes are gathered."""
    # The axes that split the experts, FSDP axes included.
    axes = where.expert_axes + where.fsdp_axes_of(name)[0]
    num_own = config.num_held // where.size(axes)
    own = jax.tree.map(functools.partial(_select, num=num_own, where=where), array)
    # Quantized matrices have no gradient, so there is none to sum over an expert's copies.
    if placement is None or isinstance(own, QuantizedArray):
        return own
    return equal_copies(own, placement, axes)


def _gathered(
    parts: dict[str, Any], quantized: QuantizedExperts | None, config: MoEConfig, where: LayerMesh
) -> tuple[dict[str, Any], QuantizedExperts | None]:
    """Gathers weights over FSDP axes: matrices in the compute dtype, or their float8 copies."""
    matrices = {name: parts[name] for name in EXPERT_MATRICES if name in parts}
    # Where FSDP axes split whole float8 blocks, float8 copies are gathered, and not the matrices:
    # `fsdp.gather` then makes zeros of these, which only take the gradients.
    if config.matmul_dtype is not None and matrices.keys() & dict(where.fsdp_axes):
        if fsdp.has_whole_blocks(*(w.shape for w in matrices.values())):
            if quantized is None:
                cast = {name: w.astype(config.dtype) for name, w in matrices.items()}
                quantized = expert_matmuls.quantize_of_rank(cast, config.matmul_implementation)
            quantized = fsdp.gather_quantized(quantized, where)
    whole = {}
    for name, part in parts.items():
        dtype = config.dtype if name in matrices else None
        has_copies = quantized is not None and name in matrices
        whole[name] = fsdp.gather(name, part, where, dtype, zeros=has_copies)
    return whole, quantized


def _select(weights: jax.Array, num: int, where: LayerMesh) -> jax.Array:
    """Selects this rank's `num` experts of `weights`, which may hold all experts or only these."""
    if weights.shape[0] == num:
        return weights
    return lax.dynamic_slice_in_dim(weights, lax.axis_index(where.expert_axes) * num, num)


def counts_by_expert(counts: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Sums `counts`, one for each slot of this rank, over the slots of each expert; [E] int32."""
    expert_of_slot = _experts_in_slots(counts.shape[0], placement, axes)
    experts = jnp.arange(placement.num_copies.shape[0], dtype=jnp.int32)
    counts = jnp.where(expert_of_slot[None] == experts[:, None], counts[None], 0)
    return jnp.sum(counts, axis=1, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def equal_copies(weights: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the weights of this rank's slots unchanged; sums their gradients over copies."""
    return weights


def _equal_copies_bwd(axes, placement, grad):
    # `grad` has a row for each slot of this rank. The ranks along `axes` exchange only the sums of
    # experts with copies. P slots hold second copies of at most P - E experts, in any placement.
    num_experts = placement.num_copies.shape[0]
    most_copied = min(placement.expert_of_slot.shape[0] - num_experts, num_experts)
    if most_copied == 0:
        return grad, None
    row_of_slot = _row_of_slot(grad.shape[0], placement, axes, most_copied)
    dtype = wide_dtype(grad.dtype)
    # The last row, of all slots without copies, is cut off.
    sums = _sum_by_row(grad.astype(dtype), row_of_slot, most_copied + 1)[:most_copied]
    if axes:
        sums = lax.psum(sums, axes)
    of_slots = sums[jnp.minimum(row_of_slot, most_copied - 1)].astype(grad.dtype)
    has_copies = (row_of_slot < most_copied).reshape(-1, *(1,) * (grad.ndim - 1))
    return jnp.where(has_copies, of_slots, grad), None


def _row_of_slot(
    num_slots: int, placement: Placement, axes: tuple[str, ...], most_copied: int
) -> jax.Array:
    """Returns the number of each slot's expert among those with copies; else `most_copied`."""
    is_copied = jnp.asarray(placement.num_copies) > 1
    among_copied = jnp.cumsum(is_copied, dtype=jnp.int32) - 1
    row_of_expert = jnp.where(is_copied, among_copied, most_copied)
    experts = _experts_in_slots(num_slots, placement, axes)
    return jnp.where(experts >= 0, row_of_expert[jnp.maximum(experts, 0)], most_copied)


def _sum_by_row(values: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """Adds each values[i] to row rows[i] of the result, in the order of i."""
    # A scatter on a GPU would add in any order, which gives other bits in each call.
    zeros = jnp.zeros((num_rows, *values.shape[1:]), values.dtype)
    values, rows, zeros = match_varying((values, rows, zeros))

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(sums, rows[i], keepdims=False) + values[i]
        return lax.dynamic_update_index_in_dim(sums, row, rows[i], 0)

    return lax.fori_loop(0, values.shape[0], add, zeros)


equal_copies.defvjp(lambda weights, placement, axes: (weights, placement), _equal_copies_bwd)


def _experts_in_slots(num_slots: int, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the id of the expert in each of this rank's `num_slots` slots; -1 if it is empty."""
    expert_of_slot = jnp.asarray(placement.expert_of_slot)
    first_slot = lax.axis_index(axes) * num_slots if axes else 0
    return lax.dynamic_slice_in_dim(expert_of_slot, first_slot, num_slots)


def quantize_experts(params: MoEParams, config: MoEConfig) -> QuantizedExperts:
    """Quantizes the experts' matrices once, for all calls of a layer with the same parameters.

    A training step passes the result to the call of each microbatch as `quantized_experts`.
    Gradients go to `params` (straight-through). The result has each matrix twice, as it is and
    transposed, with 2 bytes per number in total. It is sharded as the parameters are, but over
    `fsdp_axes` only if each rank's shard has whole blocks of 128 x 128 numbers.

    Raises:
        ValueError: `config.matmul_dtype` is None, or H or F is not a multiple of 128.
    """
    return quantize_by_rules(params, config, axis_rules=())


def quantize_by_rules(
    params: MoEParams, config: MoEConfig, *, axis_rules: AxisRules
) -> QuantizedExperts:
    """Runs `quantize_experts` with Flax's axis rules; see `run_layer`."""
    check_types(params, config)
    if config.matmul_dtype is None:
        raise ValueError(
            "config.matmul_dtype must be a dtype, such as jnp.float8_e4m3fn, for quantize_experts, "
            "but is None."
        )
    check_config(config)
    expert_matmuls.check_are_arrays("experts cannot be quantized by quantize_experts", params)
    where = find_mesh(config, x=None)
    check_experts(params, config, where)
    where = fsdp.with_fsdp_axes(where, params, config, axis_rules)
    where = fsdp.mesh_of_quantized(where, params) if where.mesh is not None else where
    matrices = {n: w for n in EXPERT_MATRICES if (w := getattr(params, n)) is not None}
    # A layer that quantizes its matrices in each call also casts them first.
    if config.dtype is not None:
        matrices = jax.tree.map(lambda w: w.astype(config.dtype), matrices)

    implementation = config.matmul_implementation
    quantize = functools.partial(expert_matmuls.quantize_of_rank, implementation=implementation)
    if where.mesh is None:
        return quantize(matrices)
    # The matrices are resharded as the `jax.shard_map` splits them.
    specs = {name: where.spec_of(name) for name in matrices}
    split = {name: reshard(matrices[name], where.mesh, spec) for name, spec in specs.items()}
    # An abstract mesh is the ambient one, which `jax.shard_map` uses by itself.
    return jax.shard_map(
        quantize,
        mesh=None if isinstance(where.mesh, AbstractMesh) else where.mesh,
        in_specs=(specs,),
        out_specs=expert_matmuls.specs_of_quantized(jax.eval_shape(quantize, matrices), specs),
    )(split)
