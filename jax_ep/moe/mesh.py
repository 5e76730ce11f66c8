"""Finds the mesh that a call of the MoE layer runs on, and the axes that split its arrays."""

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
# Pairs of a logical axis and the mesh axis or axes that it is sharded over, as in Flax.
AxisRules = Sequence[tuple[str, Any]]


class LayerMesh(NamedTuple):
    """The mesh and the mesh axes of one call of the layer.

    Attributes:
        expert_axes: the axes that experts are spread over. () means that every rank holds every
            expert.
        batch_axes: the axes that tokens are spread over.
        mesh: the mesh for which the call opens a `jax.shard_map`; None if it opens none.
        tensor_axes: the axes that the experts' hidden size F is split over. () means that every
            rank holds whole experts.
        sequence_axes: the axes among `batch_axes` that split the sequence dimension of x
            [..., sequence, H]. The remaining `batch_axes` split x's leading dimension.
        further_axes: pairs of a parameter's name and a tuple. The tuple has, for each dimension of
            the parameter, the FSDP axes that split it and along which the layer gathers it; see
            `jax_ep.moe.fsdp`.
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
        """Returns the number of ranks that the experts' hidden size F is split over."""
        return self.size(self.tensor_axes)

    def num_parts(self) -> int:
        """Returns into how many parts this call of the layer splits the experts' hidden size F.

        It is 1 in the caller's `jax.shard_map`, where parameters are split already.
        """
        return 1 if self.mesh is None else self.num_tensor_ranks()

    def axes_of(self, logical_axes: Sequence[str | None]) -> tuple[Axes, ...]:
        """Returns, for each logical axis of a parameter, the expert or tensor axes that split it.

        "exp" is split over the expert axes, "mlp" over the tensor axes, and any other over none.
        """
        axes = {"exp": self.expert_axes, "mlp": self.tensor_axes}
        return tuple(axes.get(axis or "", ()) for axis in logical_axes)

    def further(self, name: str) -> tuple[Axes, ...]:
        """Returns, for each dimension of the parameter `name`, the FSDP axes that split it.

        Returns () if the parameter has no such axes.
        """
        return dict(self.further_axes).get(name, ())

    def axes_of_tokens(self, ndim: int) -> tuple[Axes, ...]:
        """Returns the mesh axes that split the leading dimensions of x [..., H], one tuple each.

        `ndim` is the number of x's dimensions. The result may have fewer tuples; the remaining
        dimensions of x are not split.
        """
        if not self.sequence_axes:
            return (self.batch_axes,)
        others = tuple(axis for axis in self.batch_axes if axis not in self.sequence_axes)
        return others, *[()] * (ndim - 3), self.sequence_axes

    def splits_further(self, *names: str) -> bool:
        """Returns whether FSDP axes split any of the parameters called `names`."""
        return any(name in names for name, _ in self.further_axes)

    def splits_tokens_over_tensor_axes(self) -> bool:
        """Returns whether the ranks along `tensor_axes` hold different tokens."""
        return bool(self.tensor_axes) and set(self.tensor_axes) <= set(self.batch_axes)

    def size(self, axes: Axes) -> int:
        """Returns the number of ranks along the mesh axes `axes`."""
        if self.mesh is not None:
            return math.prod(self.mesh.shape[axis] for axis in axes)
        return lax.axis_size(axes)


def find_mesh(config: MoEConfig, x: jax.Array | None) -> LayerMesh:
    """Finds the mesh that a call of the layer runs on, and the roles of its axes.

    x is [..., H], the tokens of the call; None for a call without tokens, such as to quantize
    experts.

    Raises:
        ValueError: `config.expert_axis`, `tensor_axis`, `batch_axes` or `sequence_axes` does not
            fit the mesh, the caller's `jax.shard_map` or the other options; or `config.mesh` is
            another mesh than that of `jax.set_mesh`.
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
    """Returns the mesh axes `axes` of the option `name`, if the caller's shard_map binds them all.

    Returns () if the mesh `ambient` has none of these axes. Raises ValueError if the mesh has one
    of them, but the shard_map does not bind all of them.
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
    """Returns the mesh axes `axes` of the option `name`, if the mesh has all of them.

    Returns () if the mesh has none of them. Raises ValueError if it has only some of them, or if
    the mesh is `config.mesh` and lacks one.
    """
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing and (config.mesh is not None or len(missing) < len(axes)):
        raise ValueError(f"{name} {axes} must name axes of the mesh, but it has {mesh.shape}.")
    return () if missing else axes


def check_mesh_of_experts(
    experts: Any, config: MoEConfig, where: LayerMesh, axis_rules: AxisRules
) -> None:
    """Warns or raises an error if every rank would gather all experts [E, H, F] on each call.

    The results would be right, but each call slow. This happens if the experts are sharded over a
    mesh that is not set, or only over axes that `config` does not name. `experts` is wi_0, an array
    or a `QuantizedArray`. The type of a traced array on Auto axes shows its mesh, but not its
    sharding, which is then guessed from the caller's axis rules, or the axes' names.

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
    """Returns the mesh axes in `part`, an entry of a `PartitionSpec`, that have several ranks."""
    axes = (part,) if isinstance(part, str) else part
    return tuple(axis for axis in axes or () if mesh.shape.get(axis, 1) > 1)


def _likely_meant(name: str, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Guesses which axes of the mesh the caller meant by `axes`, which the mesh does not have.

    `axes` is the value of the option `name`, such as "expert_axis". Returns the axes of the mesh
    whose names are similar to those in `axes`, and axes that have a usual name for the option.
    """
    usual = {"expert_axis": ("expert", "ep"), "tensor_axis": ("tensor", "tp")}[name]
    alike = [difflib.get_close_matches(axis, mesh.axis_names, n=1) for axis in axes]
    found = [axis for each in alike for axis in each] + [a for a in mesh.axis_names if a in usual]
    return tuple(dict.fromkeys(found))


def explicit_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Returns the names of a mesh's Explicit axes, whose shardings are part of array types."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def reshard(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Reshards an array by `spec` over the mesh's Explicit axes.

    Axes of other types are dropped from the spec, since XLA chooses the sharding over them.
    """
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
    # A dimension that only an Explicit axis shards must not get the entry None, which would gather
    # it. UNCONSTRAINED leaves it sharded.
    spec = PartitionSpec(*(_only(part, auto) or PartitionSpec.UNCONSTRAINED for part in spec))
    return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _only(part: Any, axes: frozenset[str]) -> Any:
    """Returns the mesh axes of `part`, an entry of a `PartitionSpec`, that are also in `axes`."""
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
    """Returns the axes of the caller's shard_map that the tokens x [..., H] are spread over.

    They are read from the type of x, or from `config.batch_axes` under check_vma=False, where the
    type does not show them.
    """
    bound = tuple(ambient.manual_axes)
    large = {axis for axis in bound if ambient.shape[axis] > 1}
    # Under check_vma=False, types show no varying axes, not even for an axis index, which varies.
    if not jax_compat.varying_axes(lax.axis_index(bound)):
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
    """Returns `config.batch_axes` as a tuple; if that is None, all `axes` except the tensor axes.

    `axes` are the axes of the mesh. Raises ValueError if `batch_axes` has an axis that the mesh
    lacks, does not include all expert axes, or includes only some of the tensor axes.
    """
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
    """Returns the mesh axes that split the sequence dimension of x [..., sequence, H].

    The axes are `config.sequence_axes` or, if that is None, the Explicit axes that split this
    dimension in x's type. They are () if one of the Explicit axes is not among `batch_axes`, or if
    x has fewer than 3 dimensions.
    """
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
