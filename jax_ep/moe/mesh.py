"""Where one call of the layer runs: which mesh, and which of its axes hold experts and tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep.checks import as_axes
from jax_ep.moe.config import MoEConfig
from jax_ep.runtime import jax_compat


class LayerMesh(NamedTuple):
    """Where a call runs. Every axis named here is bound where the math runs.

    Attributes:
        expert_axes: the axes that experts are spread over; none: every rank holds every expert.
        batch_axes: the axes that tokens are spread over.
        mesh: the mesh of the `jax.shard_map` to open, or None to open none.
    """

    expert_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    mesh: Mesh | AbstractMesh | None = None

    def num_ranks(self) -> int:
        """Returns N, the ranks that the experts are spread over."""
        if self.mesh is not None:
            return math.prod(self.mesh.shape[axis] for axis in self.expert_axes)
        return lax.axis_size(self.expert_axes)


def find_mesh(config: MoEConfig, x: jax.Array) -> LayerMesh:
    """Finds the mesh that a call on x runs on.

    Raises:
        ValueError: `config.expert_axis` or `config.batch_axes` names no axis of it that could hold
            experts or tokens.
    """
    ambient = jax.sharding.get_abstract_mesh()
    expert_axes = as_axes(config.expert_axis, "expert_axis")
    if ambient.manual_axes:
        if not set(expert_axes) & set(ambient.axis_names):
            expert_axes = ()
        elif not set(expert_axes) <= set(ambient.manual_axes):
            raise ValueError(
                f"expert_axis {expert_axes} must be bound by the enclosing jax.shard_map, which is "
                f"over {ambient.manual_axes}; make it one over the whole mesh "
                f"{dict(ambient.shape)}."
            )
        return LayerMesh(expert_axes, _callers_batch_axes(config, expert_axes, ambient, x))

    mesh: Mesh | AbstractMesh | None = config.mesh
    if not ambient.empty and (mesh is None or mesh.shape == ambient.shape):
        mesh = ambient
    elif mesh is None:
        mesh = jax_compat.mesh_of_with_statement()
    if mesh is None:
        return LayerMesh((), ())

    missing = [a for a in expert_axes if a not in mesh.axis_names]
    if missing and (config.mesh is not None or len(missing) < len(expert_axes)):
        raise ValueError(
            f"expert_axis {expert_axes} must name axes of the mesh, but it has {mesh.shape}."
        )
    if missing:
        expert_axes = ()
    return LayerMesh(expert_axes, _batch_axes(config, expert_axes, mesh.axis_names), mesh)


def explicit_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Returns the axes whose shardings are part of an array's type."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def reshard(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Shards as `spec` says over the Explicit axes of the mesh; over others XLA decides."""
    explicit = explicit_axes(mesh)
    if not explicit:
        return array
    parts = [_only(part, explicit) for part in spec]
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*parts)))


def shard(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Shards as `spec` says over every axis of a mesh, of whatever axis types."""
    array = reshard(array, mesh, spec)
    auto = frozenset(mesh.axis_names) - explicit_axes(mesh)
    if not auto:
        return array
    # None would gather a dimension that an Explicit axis shards.
    spec = PartitionSpec(*(_only(part, auto) or PartitionSpec.UNCONSTRAINED for part in spec))
    return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _only(part: Any, axes: frozenset[str]) -> Any:
    """Drops the mesh axes that are not among `axes` from one dimension of a PartitionSpec."""
    if part is None or isinstance(part, str):
        return part if part in axes else None
    return tuple(axis for axis in part if axis in axes) or None


def _callers_batch_axes(
    config: MoEConfig, expert_axes: tuple[str, ...], ambient: AbstractMesh, x: jax.Array
) -> tuple[str, ...]:
    """Returns the axes of the caller's shard_map that its tokens are spread over."""
    bound = tuple(ambient.manual_axes)
    large = {axis for axis in bound if ambient.shape[axis] > 1}
    if not jax_compat.varying_axes(lax.axis_index(bound)):  # check_vma=False: nothing is known of x
        if config.batch_axes is None and large - set(expert_axes):
            raise ValueError(
                f"batch_axes must be given in a jax.shard_map over {bound} with check_vma=False: "
                "the layer cannot see there over which of these axes the tokens are spread, and "
                f"over which they are replicated. Set batch_axes={bound} if over all of them."
            )
        return _batch_axes(config, expert_axes, bound)

    spread = jax_compat.varying_axes(x)
    if config.batch_axes is None:
        batch_axes = tuple(a for a in bound if a in spread or a in expert_axes)
    else:
        batch_axes = _batch_axes(config, expert_axes, bound)
    replicated = tuple(a for a in batch_axes if a in large and a not in spread)
    if replicated:
        raise ValueError(
            f"x must be spread over batch_axes {batch_axes}, but every rank along {replicated} "
            "holds the same tokens. Split them in the in_specs of the jax.shard_map, leave those "
            f"axes out of batch_axes, or pass jax.lax.pcast(x, {replicated}, to='varying') for "
            "each copy to count as tokens of its own."
        )
    return batch_axes


def _batch_axes(
    config: MoEConfig, expert_axes: tuple[str, ...], axes: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the axes that tokens are spread over, of those that are or will be bound."""
    batch_axes = (
        tuple(axes) if config.batch_axes is None else as_axes(config.batch_axes, "batch_axes")
    )
    if not set(expert_axes) <= set(batch_axes) <= set(axes):
        raise ValueError(
            f"batch_axes must be among the mesh axes {axes} and hold expert_axis {expert_axes}, "
            f"but is {batch_axes}."
        )
    return batch_axes
