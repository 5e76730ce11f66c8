"""Finds the mesh of a call of the layer, and the axes over which its arrays are split."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep.checks import as_axes
from jax_ep.formats import QuantizedArray
from jax_ep.moe.config import MoEConfig
from jax_ep.runtime import jax_compat

Axes = tuple[str, ...]
AxisRules = Sequence[tuple[str, Any]]  # logical axes and their mesh axes, as in Flax


class LayerMesh(NamedTuple):
    """The mesh and the mesh axes of one call of the layer.

    Attributes:
        expert_axes: the axes that experts are spread over; (): every rank holds every expert.
        batch_axes: the axes that tokens are spread over.
        mesh: the mesh for which the call opens a `jax.shard_map`; None if it opens none.
        tensor_axes: the axes that F is split over; (): every rank holds whole experts.
        sequence_axes: those of `batch_axes` over which the sequences of x [..., sequence, H] are
            split; the others split the leading dimension.
        further_axes: names of parameters, and for each of their dimensions the further axes that it
            is split over, along which the layer gathers it; see `jax_ep.moe.fsdp`.
    """

    expert_axes: Axes
    batch_axes: Axes
    mesh: Mesh | AbstractMesh | None = None
    tensor_axes: Axes = ()
    sequence_axes: Axes = ()
    further_axes: tuple[tuple[str, tuple[Axes, ...]], ...] = ()

    def num_ranks(self) -> int:
        """Returns N, the number of ranks that the experts are spread over."""
        return self.size(self.expert_axes)

    def num_tensor_ranks(self) -> int:
        """Returns the number of ranks that F is split over."""
        return self.size(self.tensor_axes)

    def axes_of(self, logical_axes: Sequence[str | None]) -> tuple[Axes, ...]:
        """Returns the axes of experts or F that each logical axis of a parameter is split over."""
        axes = {"exp": self.expert_axes, "mlp": self.tensor_axes}
        return tuple(axes.get(axis or "", ()) for axis in logical_axes)

    def further(self, name: str) -> tuple[Axes, ...]:
        """Returns the further axes of each dimension of a parameter; (): it has none."""
        return dict(self.further_axes).get(name, ())

    def axes_of_tokens(self, ndim: int) -> tuple[Axes, ...]:
        """Returns the axes that each leading dimension of x [..., H], of `ndim` ones, is over."""
        if not self.sequence_axes:
            return (self.batch_axes,)
        others = tuple(axis for axis in self.batch_axes if axis not in self.sequence_axes)
        return others, *[()] * (ndim - 3), self.sequence_axes

    def splits_further(self, *names: str) -> bool:
        """Returns whether one of the parameters is split over further axes."""
        return any(name in names for name, _ in self.further_axes)

    def splits_tokens_over_tensor_axes(self) -> bool:
        """Returns whether the ranks along `tensor_axes` hold different tokens."""
        return bool(self.tensor_axes) and set(self.tensor_axes) <= set(self.batch_axes)

    def size(self, axes: Axes) -> int:
        """Returns the number of ranks along the axes."""
        if self.mesh is not None:
            return math.prod(self.mesh.shape[axis] for axis in axes)
        return lax.axis_size(axes)


def find_mesh(config: MoEConfig, x: jax.Array | None) -> LayerMesh:
    """Finds the mesh that a call on x runs on, and its axes; x is None for a call without tokens.

    Raises:
        ValueError: `config.expert_axis`, `tensor_axis`, `batch_axes` or `sequence_axes` names an
            axis that the mesh lacks or that cannot hold experts, columns or tokens; or
            `config.mesh` is another mesh than that of `jax.set_mesh`.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.manual_axes:
        expert_axes, tensor_axes = (
            _bound(name, axes, ambient) for name, axes in config.split_axes().items()
        )
        batch_axes: Axes = ()
        if x is not None:
            batch_axes = _callers_batch_axes(config, expert_axes, tensor_axes, ambient, x)
        return LayerMesh(expert_axes, batch_axes, None, tensor_axes)

    mesh: Mesh | AbstractMesh | None = config.mesh
    if not ambient.empty:
        if mesh is not None and mesh.shape != ambient.shape:
            raise ValueError(
                f"mesh must be None, or equal to the mesh of jax.set_mesh, {dict(ambient.shape)}, "
                f"but is {dict(mesh.shape)}."
            )
        mesh = ambient
    elif mesh is None:
        mesh = jax_compat.mesh_of_with_statement()
    if mesh is None:
        return LayerMesh((), ())
    expert_axes, tensor_axes = (
        _on_mesh(name, axes, mesh, config) for name, axes in config.split_axes().items()
    )
    batch_axes = _batch_axes(config, expert_axes, tensor_axes, mesh.axis_names)
    sequence_axes = () if x is None else _sequence_axes(config, batch_axes, x)
    return LayerMesh(expert_axes, batch_axes, mesh, tensor_axes, sequence_axes)


def _bound(name: str, axes: tuple[str, ...], ambient: AbstractMesh) -> tuple[str, ...]:
    """Returns `axes` if the caller's shard_map binds them, or () if its mesh has none of them.

    Raises ValueError if the shard_map binds only some of them.
    """
    if not set(axes) & set(ambient.axis_names):
        return ()
    if not set(axes) <= set(ambient.manual_axes):
        raise ValueError(
            f"{name} {axes} must be bound by the enclosing jax.shard_map, which is over "
            f"{ambient.manual_axes}; open it over all axes of the mesh {dict(ambient.shape)}."
        )
    return axes


def _on_mesh(
    name: str, axes: tuple[str, ...], mesh: Mesh | AbstractMesh, config: MoEConfig
) -> tuple[str, ...]:
    """Returns `axes` if the mesh has all of them, or () if an ambient mesh has none of them.

    Raises ValueError in all other cases.
    """
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing and (config.mesh is not None or len(missing) < len(axes)):
        raise ValueError(f"{name} {axes} must name axes of the mesh, but it has {mesh.shape}.")
    return () if missing else axes


def check_mesh_of_experts(
    experts: Any, config: MoEConfig, where: LayerMesh, axis_rules: AxisRules
) -> None:
    """Raises or warns if every rank would gather all experts [E, H, F] on each call.

    `experts` is an array or a `QuantizedArray`. Every rank gathers them if they are sharded over a
    mesh that is not set, or only over axes that `config` does not name. The results would still be
    right. The type of a traced array on Auto axes shows its mesh, but not whether it is sharded.
    The sharding is then guessed from the caller's axis rules, or from the names of the mesh's axes.

    Raises:
        ValueError: the experts are sharded over `config.expert_axis` of a mesh that is not set.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return
    is_quantized = isinstance(experts, QuantizedArray)
    array = experts.values if is_quantized else experts
    concrete = getattr(array, "sharding", None)
    sharding = concrete or jax.typeof(array).sharding
    is_named = isinstance(sharding, NamedSharding)
    spec = (*(sharding.spec if is_named else ()), None, None, None)[:3]
    spec = experts.format.stored_order(spec) if is_quantized else spec
    mesh = where.mesh or (sharding.mesh if is_named else jax.typeof(array).sharding.mesh)
    known = concrete is not None or explicit_axes(mesh) == set(mesh.axis_names)
    if where.mesh is None and _warns_that_no_mesh_is_set(experts, config, mesh, spec[0], known):
        return
    dims = {"expert_axis": ("exp", spec[0]), "tensor_axis": ("mlp", spec[2])}
    for name, axes in config.split_axes().items():
        if not axes or (where.mesh is None and name == "tensor_axis"):
            continue
        logical, part = dims[name]
        how, held = "is sharded over", large_axes(part, mesh)
        if not held and not known:
            how, held = (
                "is sharded by the axis rules over",
                large_axes(dict(axis_rules).get(logical), mesh),
            )
        if not held and not known and not set(axes) & set(mesh.axis_names):
            how, held = "may be sharded over", large_axes(_likely_meant(name, axes, mesh), mesh)
        if held and not set(held) & set(axes):
            warnings.warn(
                f"wi_0 of shape {experts.shape} {how} {held} of the mesh {dict(mesh.shape)}, but "
                f"{name} is {axes}: every rank gathers it all on each call. Set {name} to the axes "
                "that it is sharded over, or ignore this warning if you gather it on purpose.",
                stacklevel=4,
            )


def _warns_that_no_mesh_is_set(
    experts: Any, config: MoEConfig, mesh: Mesh | AbstractMesh, first: Any, known: bool
) -> bool:
    expert_axes = as_axes(config.expert_axis, "expert_axis")
    axes = {axis for axis in expert_axes if mesh.shape.get(axis, 1) > 1}
    if not axes:
        return False
    what = f"wi_0 of shape {experts.shape} is {{}} expert_axis {expert_axes}, but no mesh is set"
    cure = "Call the layer under jax.set_mesh(mesh), or set MoEConfig.mesh."
    if axes & set(large_axes(first, mesh)):
        raise ValueError(f"{what.format('sharded over')}: every rank would gather it all. {cure}")
    if known or not axes - explicit_axes(mesh):
        return False
    warnings.warn(
        f"{what.format('on a mesh with')}: if it is sharded over that axis, every rank gathers it "
        f"all on each call. {cure}",
        stacklevel=5,
    )
    return True


def large_axes(part: Any, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of one dimension of a PartitionSpec that have more than one rank."""
    axes = (part,) if isinstance(part, str) else part
    return tuple(axis for axis in axes or () if mesh.shape.get(axis, 1) > 1)


def _likely_meant(name: str, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Guesses which axes of a mesh without any of `axes` the caller means by the option `name`.

    Returns axes with similar names, and an axis named like the option, such as "expert".
    """
    kind = name.removesuffix("_axis")
    alike = [difflib.get_close_matches(axis, mesh.axis_names, n=1) for axis in axes]
    found = [axis for each in alike for axis in each] + [a for a in mesh.axis_names if a == kind]
    return tuple(dict.fromkeys(found))


def explicit_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Returns the Explicit axes of a mesh; an array's type shows its sharding over them."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def reshard(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Reshards an array by `spec` over the mesh's Explicit axes; XLA decides about other axes."""
    explicit = explicit_axes(mesh)
    if not explicit:
        return array
    parts = [_only(part, explicit) for part in spec]
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*parts)))


def shard(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Shards an array by `spec` over all axes of the mesh, Explicit or Auto."""
    array = reshard(array, mesh, spec)
    auto = frozenset(mesh.axis_names) - explicit_axes(mesh)
    if not auto:
        return array
    # UNCONSTRAINED keeps a dimension that an Explicit axis shards; None would gather it.
    spec = PartitionSpec(*(_only(part, auto) or PartitionSpec.UNCONSTRAINED for part in spec))
    return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _only(part: Any, axes: frozenset[str]) -> Any:
    """Drops the mesh axes that are not among `axes` from one dimension of a PartitionSpec."""
    if part is None or isinstance(part, str):
        return part if part in axes else None
    return tuple(axis for axis in part if axis in axes) or None


def _callers_batch_axes(
    config: MoEConfig,
    expert_axes: tuple[str, ...],
    tensor_axes: tuple[str, ...],
    ambient: AbstractMesh,
    x: jax.Array,
) -> tuple[str, ...]:
    """Returns the axes of the caller's shard_map that its tokens are spread over."""
    bound = tuple(ambient.manual_axes)
    large = {axis for axis in bound if ambient.shape[axis] > 1}
    if not jax_compat.varying_axes(lax.axis_index(bound)):  # check_vma=False: types show no axes
        if config.batch_axes is None and large - set(expert_axes):
            raise ValueError(
                f"batch_axes must be given in a jax.shard_map over {bound} with check_vma=False, "
                "where the layer cannot see over which axes the tokens are spread. Set "
                f"batch_axes={bound} if they are spread over all of them."
            )
        return _batch_axes(config, expert_axes, tensor_axes, bound)

    spread = jax_compat.varying_axes(x)
    if config.batch_axes is None:
        batch_axes = tuple(a for a in bound if a in spread or a in expert_axes)
    else:
        batch_axes = _batch_axes(config, expert_axes, tensor_axes, bound)
    replicated = tuple(a for a in batch_axes if a in large and a not in spread)
    if replicated:
        raise ValueError(
            f"x must be spread over batch_axes {batch_axes}, but every rank along {replicated} "
            "holds the same tokens. Split them in the in_specs of the jax.shard_map, leave "
            f"{replicated} out of batch_axes, or pass jax.lax.pcast(x, {replicated}, to='varying') "
            "to treat each copy as different tokens."
        )
    return batch_axes


def _batch_axes(
    config: MoEConfig,
    expert_axes: tuple[str, ...],
    tensor_axes: tuple[str, ...],
    axes: tuple[str, ...],
) -> tuple[str, ...]:
    """Returns `config.batch_axes`, or by default all of `axes` but the tensor axes."""
    if config.batch_axes is None:
        return tuple(axis for axis in axes if axis not in tensor_axes)
    batch_axes = as_axes(config.batch_axes, "batch_axes")
    if not set(expert_axes) <= set(batch_axes) <= set(axes):
        raise ValueError(
            f"batch_axes must be among the mesh axes {axes} and include expert_axis {expert_axes}, "
            f"but is {batch_axes}."
        )
    if 0 < len(set(tensor_axes) & set(batch_axes)) < len(tensor_axes):
        raise ValueError(
            f"batch_axes must include all of tensor_axis {tensor_axes} (its ranks then hold "
            f"different tokens) or none of it, but is {batch_axes}."
        )
    return batch_axes


def _sequence_axes(config: MoEConfig, batch_axes: Axes, x: jax.Array) -> Axes:
    """Returns `config.sequence_axes`, or by default what x's type shows of them."""
    if config.sequence_axes is not None:
        axes = as_axes(config.sequence_axes, "sequence_axes")
        if not set(axes) <= set(batch_axes):
            raise ValueError(f"sequence_axes must be among batch_axes {batch_axes}, but is {axes}.")
        return axes if x.ndim > 2 else ()
    if x.ndim < 3:
        return ()
    part = jax.typeof(x).sharding.spec[-2]
    axes = (part,) if isinstance(part, str) else tuple(part or ())
    return axes if set(axes) <= set(batch_axes) else ()
