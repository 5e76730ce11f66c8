"""The mesh axes of a decoder, and the axes over which each of its parameters is split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jax_ep.models.config import DecoderConfig
from jax_ep.moe.params import LOGICAL_AXES

EXPERT_AXIS, TENSOR_AXIS, FSDP_AXIS = "expert", "tensor", "fsdp"
# The mesh axes, besides "fsdp", that split the logical axes of an MoE block's parameters.
_SPLIT = {"exp": (EXPERT_AXIS,), "mlp": (TENSOR_AXIS,)}


def decoder_mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Mesh:
    """Makes a mesh of Auto axes for a decoder; `sizes` maps names of axes to numbers of ranks."""
    # The axes "fsdp" and "tensor" are left out if they have one rank: with an axis "fsdp", the
    # layers would gather their parameters, even those that are whole.
    names = [n for n, size in sizes.items() if size > 1 or n not in (FSDP_AXIS, TENSOR_AXIS)]
    shape = [sizes[name] for name in names]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(names), devices=devices)


def mesh_of(
    config: DecoderConfig,
    devices: Sequence[jax.Device],
    *,
    expert_parallel: int | None = None,
    fsdp: int = 1,
    tensor_parallel: int = 1,
) -> Mesh:
    """Makes a `data` (x `fsdp`) x `expert` (x `tensor`) mesh of all devices for a model."""
    # `data` has the ranks that remain. Without `expert_parallel`, the largest number that divides
    # ranks and experts is taken. ValueError if a number of ranks does not divide what it splits.
    left = len(devices) // tensor_parallel
    expert_size = expert_parallel or math.gcd(left // fsdp, config.num_experts)
    # Each number of ranks, and what it must divide.
    for name, ranks, size, what in (
        ("tensor_parallel", tensor_parallel, len(devices), "devices"),
        ("tensor_parallel", tensor_parallel, config.num_key_value_heads, "key-value heads"),
        ("tensor_parallel", tensor_parallel, config.mlp_dim, "columns of an expert"),
        ("tensor_parallel", tensor_parallel, config.vocab, "tokens of the vocabulary"),
        ("fsdp", fsdp, left, "ranks that tensor_parallel leaves"),
        ("fsdp", fsdp, config.hidden, "columns of a matrix"),
        ("expert_parallel", expert_size, left // fsdp, "ranks that tensor_parallel and fsdp leave"),
        ("expert_parallel", expert_size, config.num_experts, "experts"),
    ):
        if size % ranks:
            raise ValueError(f"{name} must divide the {size} {what}, but is {ranks}.")
    sizes = {"data": left // fsdp // expert_size, FSDP_AXIS: fsdp}
    return decoder_mesh(devices, sizes | {EXPERT_AXIS: expert_size, TENSOR_AXIS: tensor_parallel})


def fsdp_axes(num_experts: int, mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """Returns the option `fsdp_axes`, mesh axes by logical axes; {} without an axis "fsdp"."""
    if FSDP_AXIS not in mesh.axis_names:
        return {}
    # If the ranks divide the experts, each holds whole ones, gathered without transposing them.
    # "embed" (H) then splits only other parameters: an axis splits one dimension of a parameter.
    ranks = mesh.shape.get(EXPERT_AXIS, 1) * mesh.shape[FSDP_AXIS]
    return ({} if num_experts % ranks else {"exp": FSDP_AXIS}) | {"embed": FSDP_AXIS}


def on_mesh(config: DecoderConfig, mesh: Mesh | AbstractMesh) -> DecoderConfig:
    """Returns the configuration with the mesh axes over which the MoE blocks are split."""
    tensor = TENSOR_AXIS if TENSOR_AXIS in mesh.axis_names else None
    return config.replace(tensor_axis=tensor, fsdp_axes=fsdp_axes(config.num_experts, mesh))


def spec_of_moe(name: str, config: DecoderConfig, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns how the field `name` of `MoEParams` is split; `config` is from `on_mesh`."""
    logical_axes = LOGICAL_AXES[name]  # such as ("exp", "embed", "mlp")
    spec = []
    for logical, fsdp in zip(logical_axes, config.moe.fsdp_axes_of(logical_axes), strict=True):
        axes = (*_SPLIT.get(logical or "", ()), *fsdp)
        spec.append(tuple(axis for axis in axes if axis in mesh.axis_names))
    return PartitionSpec(*spec)


def spec_of_weight(name: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns how a weight outside of MoE blocks, with its published name, is split."""
    # Heads and the vocabulary are split over "tensor". Every matrix is also split over "fsdp",
    # along its first dimension that allows it: parts of an early one need few transposed copies.
    axes: list[list[str]] = [[] for _ in shape]
    module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if TENSOR_AXIS in mesh.axis_names:
        if module in ("q_proj", "k_proj", "v_proj", "sinks", "embed_tokens", "lm_head"):
            axes[0].append(TENSOR_AXIS)
        elif module == "o_proj" and len(shape) > 1:
            axes[1].append(TENSOR_AXIS)  # of [hidden, heads * head size]
    if FSDP_AXIS in mesh.axis_names and len(shape) > 1:
        for dim, size in enumerate(shape):
            if size % math.prod(mesh.shape[name] for name in (*axes[dim], FSDP_AXIS)) == 0:
                axes[dim].append(FSDP_AXIS)
                break
    return PartitionSpec(*map(tuple, axes))
