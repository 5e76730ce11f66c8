"""Finds the mesh that a call of the MoE layer runs on, and the axes that split its arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_ep.checks import as_axes, warn
from jax_ep.formats import QuantizedArray
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import LOGICAL_AXES
from jax_ep.runtime import jax_compat

Axes = tuple[str, ...]
# Pairs of a logical axis and the mesh axis or axes that it is sharded over, as in Flax.
AxisRules = Sequence[tuple[str, Any]]
# What each option must be where no axis of the mesh is meant.
_NO_AXIS = {
    "expert_axis": "() for data parallelism, where every rank has all experts",
    "tensor_axis": "None if no axis splits the experts' hidden size",
}


class LayerMesh(NamedTuple):
    """The mesh and the mesh axes of one call of the layer."""

    expert_axes: Axes  # over which experts are spread; (): every rank holds every expert
    batch_axes: Axes  # over which tokens are spread
    # for which the call opens a `jax.shard_map`; None: it opens none
    mesh: Mesh | AbstractMesh | None = None
    tensor_axes: Axes = ()  # over which F is split; (): every rank holds whole experts
    # The `batch_axes` that split the sequence dimension of x [..., sequence, H]; the others split
    # x's leading dimension.
    sequence_axes: Axes = ()
    # Pairs of a parameter's name and the FSDP axes that split each dimension.
    fsdp_axes: tuple[tuple[str, tuple[Axes, ...]], ...] = ()

    def num_ranks(self) -> int:
        return self.size(self.expert_axes)

    def num_tensor_ranks(self) -> int:
        return self.size(self.tensor_axes)

    def num_parts(self) -> int:
        """Returns into how many parts this call splits F: 1 in the caller's `jax.shard_map`."""
        return 1 if self.mesh is None else self.num_tensor_ranks()

    def axes_of(self, name: str) -> tuple[Axes, ...]:
        """Returns, for each dimension of the parameter `name`, its expert or tensor axes."""
        axes = {"exp": self.expert_axes, "mlp": self.tensor_axes}
        return tuple(axes.get(axis or "", ()) for axis in LOGICAL_AXES[name])

    def fsdp_axes_of(self, name: str) -> tuple[Axes, ...]:
        return dict(self.fsdp_axes).get(name, ((),) * len(LOGICAL_AXES[name]))

    def all_axes_of(self, name: str) -> tuple[Axes, ...]:
        dims = zip(self.axes_of(name), self.fsdp_axes_of(name), strict=True)
        return tuple(axes + fsdp_axes for axes, fsdp_axes in dims)

    def spec_of(self, name: str) -> PartitionSpec:
        """Returns how the parameter `name` is split as it enters the layer's `jax.shard_map`."""
        return PartitionSpec(*(axes or None for axes in self.all_axes_of(name)))

    def axes_of_tokens(self, ndim: int) -> tuple[Axes, ...]:
        """Returns the mesh axes that split the leading dimensions of x [..., H], one tuple each."""
        if not self.sequence_axes:
            return (self.batch_axes,)
        others = tuple(axis for axis in self.batch_axes if axis not in self.sequence_axes)
        return others, *[()] * (ndim - 3), self.sequence_axes

    def types_show_more_axes(self, params: Any) -> bool:
        """Returns whether types show that parameters are split over more axes than `axes_of`."""
        if self.mesh is None:
            return False
        for name, array in params._asdict().items():
            if array is None or isinstance(array, QuantizedArray):
                continue
            spec = jax.typeof(array).sharding.spec
            for part, axes in zip(spec, self.axes_of(name), strict=True):
                if not set(axes_in(part)) <= set(axes):
                    return True
        return False

    def splits_tokens_over_tensor_axes(self) -> bool:
        return bool(self.tensor_axes) and set(self.tensor_axes) <= set(self.batch_axes)

    def size(self, axes: Axes) -> int:
        if self.mesh is not None:
            return math.prod(self.mesh.shape[axis] for axis in axes)
        return lax.axis_size(axes)


def find_mesh(config: MoEConfig, x: jax.Array | None) -> LayerMesh:
    """Finds the mesh and the axes of a call on x [..., H]; x is None for a call without tokens."""
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.manual_axes:
        # The call is in the caller's `jax.shard_map`.
        expert_axes, tensor_axes = axes_on_mesh(config, ambient)
        # The caller has split the sequence, so these axes are only checked.
        _check_has_axes(ambient, "sequence_axes", as_axes(config.sequence_axes or ()))
        batch_axes: Axes = ()
        if x is not None:
            batch_axes = _callers_batch_axes(config, expert_axes, tensor_axes, ambient, x)
        return LayerMesh(expert_axes, batch_axes, mesh=None, tensor_axes=tensor_axes)

    mesh = jax_compat.mesh_of_with_statement() if ambient.empty else ambient
    if mesh is None:
        return LayerMesh(expert_axes=(), batch_axes=())
    expert_axes, tensor_axes = axes_on_mesh(config, mesh)
    batch_axes = _batch_axes(config, expert_axes, tensor_axes, mesh.axis_names)
    sequence_axes = () if x is None else _sequence_axes(config, batch_axes, x)
    return LayerMesh(expert_axes, batch_axes, mesh, tensor_axes, sequence_axes)


def axes_on_mesh(config: MoEConfig, mesh: Mesh | AbstractMesh) -> list[Axes]:
    """Returns the axes of `expert_axis` and `tensor_axis`; () for a default that the mesh lacks."""
    for logical, axes in config.fsdp_axes_by_logical().items():
        _check_has_axes(mesh, "fsdp_axes", axes, f" for {logical!r}")
    found = []
    bound = set(getattr(mesh, "manual_axes", ()))
    for name, axes in config.split_axes().items():
        present = [axis for axis in axes if axis in mesh.axis_names]
        if bound and present and not set(axes) <= bound:
            raise ValueError(
                f"{name} {axes} must be bound by the enclosing jax.shard_map, which is over "
                f"{mesh.manual_axes}; open it over all axes of the mesh {dict(mesh.shape)}."
            )
        if len(present) < len(axes):
            # A mesh may lack the default axes. Others may be misspelled.
            is_default = axes == as_axes(getattr(MoEConfig, name) or ())
            if present or not is_default:
                raise ValueError(
                    f"{name} {axes} must name axes of the mesh, but it has {dict(mesh.shape)}. Set "
                    f"{name} to axes of the mesh, or to {_NO_AXIS[name]}."
                )
            axes = ()
        found.append(axes)
    return found


def _check_has_axes(mesh: Mesh | AbstractMesh, name: str, axes: Axes, where: str = "") -> None:
    if missing := [axis for axis in axes if axis not in mesh.axis_names]:
        raise ValueError(
            f"{name} must name axes of the mesh {dict(mesh.shape)}, but has {missing}{where}."
        )


def check_sharding_of_experts(
    wi_0: Any, config: MoEConfig, where: LayerMesh, axis_rules: AxisRules, in_init: bool | None
) -> None:
    """Warns if wi_0 [E, H, F] is not split as `config` says, or if options lack their mesh."""
    # `axis_rules` and `in_init` are as in `run_layer`.
    if jax.sharding.get_abstract_mesh().manual_axes:
        # In the caller's `jax.shard_map`, each rank is given its own experts.
        return
    seen = _seen_sharding(wi_0, where.mesh)
    mesh = seen.mesh
    if where.mesh is None:
        if _warns_that_no_mesh_is_set(wi_0, config, seen):
            return
        if not in_init:  # Linen's `init` may run without the mesh of the calls
            _warn_of_options_of_meshes(config)
    # The option of each dimension that every rank holds whole, by the dimension's logical axis.
    replicated: dict[str, str] = {}
    for name, axes in config.split_axes().items():
        # Without a mesh, a tensor axis has no effect; `_warn_of_options_of_meshes` warns of that.
        if not axes or (where.mesh is None and name == "tensor_axis"):
            continue
        logical, dim = ("exp", 0) if name == "expert_axis" else ("mlp", 2)
        how, split_over = "is sharded over", large_axes(seen.spec[dim], mesh)
        if not split_over and not seen.is_complete:
            how, split_over = _guessed_axes(logical, axes, axis_rules, mesh)
        if split_over:
            if not set(split_over) & set(axes):
                warn(
                    f"wi_0 of shape {wi_0.shape} {how} {split_over} of the mesh "
                    f"{dict(mesh.shape)}, but {name} is {axes}: every rank gathers it all on each "
                    f"call. Set {name} to the axes that it is sharded over, or ignore this warning "
                    "if you gather it on purpose.",
                )
        elif where.mesh is not None and large_axes(axes, mesh):
            if _is_replicated(logical, seen, axis_rules, in_init):
                replicated[logical] = f"{name} {axes}"
    if replicated:
        quoted = " and ".join(f'"{logical}"' for logical in replicated)
        warn(
            f"wi_0 of shape {wi_0.shape} is replicated on the mesh {dict(mesh.shape)}, and not "
            f"sharded over {' or '.join(replicated.values())}: every rank holds it all. Map "
            f"{quoted} to mesh axes in the axis rules, where a rule may be missing or misspelled, "
            "or ignore this warning if you replicate it on purpose.",
        )


class _SeenSharding(NamedTuple):
    """What an array or its type shows of the sharding of wi_0, [E, H, F]."""

    spec: tuple[Any, ...]  # an entry for each dimension
    mesh: Mesh | AbstractMesh  # of the call, or else of the array
    is_complete: bool  # whether `spec` has all axes; types of traced arrays show no Auto axes
    is_on_ranks: bool  # whether the array is on several devices


def _seen_sharding(wi_0: Any, mesh: Mesh | AbstractMesh | None) -> _SeenSharding:
    """Reads the sharding of wi_0; `mesh` is the mesh of the call, or None."""
    array = wi_0.values if isinstance(wi_0, QuantizedArray) else wi_0
    concrete = getattr(array, "sharding", None)  # A traced array has none.
    sharding = concrete or jax.typeof(array).sharding
    own_mesh = jax.typeof(array).sharding.mesh
    spec: tuple[Any, ...] = (None, None, None)
    is_on_ranks = False
    if isinstance(sharding, NamedSharding):
        own_mesh = sharding.mesh
        spec = (*sharding.spec, None, None, None)[:3]
        is_on_ranks = own_mesh.size > 1
    mesh = mesh or own_mesh
    if isinstance(wi_0, QuantizedArray):
        # The spec of the stored values, of which some formats swap the last two axes.
        spec = wi_0.format.stored_order(spec)
    is_complete = concrete is not None or explicit_axes(mesh) == set(mesh.axis_names)
    return _SeenSharding(spec, mesh, is_complete, is_on_ranks)


def _is_replicated(
    logical: str, seen: _SeenSharding, axis_rules: AxisRules, in_init: bool | None
) -> bool:
    """Returns whether every rank surely holds all of a dimension that is not seen to be split."""
    if seen.is_complete:
        # Linen's `init` makes arrays that are sharded after it returns, by rules or by the caller.
        return seen.is_on_ranks and not in_init
    # The caller has found no rule that splits the dimension over several ranks. Linen (`in_init` is
    # not None) replicates one without a rule; NNX may split it.
    return bool(axis_rules) and (in_init is not None or logical in dict(axis_rules))


def _guessed_axes(
    logical: str, axes: Axes, axis_rules: AxisRules, mesh: Mesh | AbstractMesh
) -> tuple[str, Axes]:
    """Returns a warning's words, and the mesh axes that may split a dimension instead of `axes`."""
    by_rules = [large_axes(part, mesh) for name, part in axis_rules if name == logical]
    if any(by_rules):
        distinct = tuple(dict.fromkeys(itertools.chain(*by_rules)))
        return "is sharded by the axis rules over", distinct
    if set(axes) & set(mesh.axis_names):
        return "", ()  # Nothing suggests other axes.
    # The mesh lacks the default of `expert_axis`, which it may have by another usual name.
    likely = tuple(axis for axis in mesh.axis_names if axis == "ep" or axis.startswith("exp"))
    return "may be sharded over", large_axes(likely, mesh)


def _warn_of_options_of_meshes(config: MoEConfig) -> None:
    names = "batch_axes", "sequence_axes", "fsdp_axes", "tensor_axis", "host_capacity_factor"
    given = {name: value for name in names if (value := getattr(config, name))}
    if given:
        warn(
            f"{', '.join(f'{name}={value!r}' for name, value in given.items())} has no effect "
            "without a mesh: call the layer under jax.set_mesh(mesh).",
        )


def check_mesh_is_set(wi_0: Any, where: LayerMesh) -> None:
    """Raises ValueError if wi_0 is seen to be sharded, but there is no mesh to run on."""
    if where.mesh is not None or jax.sharding.get_abstract_mesh().manual_axes:
        return
    seen = _seen_sharding(wi_0, mesh=None)
    if axes := [axis for part in seen.spec for axis in large_axes(part, seen.mesh)]:
        raise ValueError(
            f"wi_0 of shape {wi_0.shape} is sharded over {axes} of the mesh "
            f"{dict(seen.mesh.shape)}, but no mesh is set: every rank would gather it all. Call "
            "the layer under jax.set_mesh(mesh)."
        )


def _warns_that_no_mesh_is_set(wi_0: Any, config: MoEConfig, seen: _SeenSharding) -> bool:
    """Warns if wi_0 may be sharded, which its type does not show; returns whether it warned."""
    expert_axes = as_axes(config.expert_axis)
    axes = set(large_axes(expert_axes, seen.mesh))
    if seen.is_complete or not axes - explicit_axes(seen.mesh):
        return False
    warn(
        f"wi_0 of shape {wi_0.shape} is on a mesh with expert_axis {expert_axes}, but no mesh is "
        "set: if it is sharded over that axis, every rank gathers it all on each call. Call the "
        "layer under jax.set_mesh(mesh).",
    )
    return True


def large_axes(part: Any, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the mesh axes in `part`, an entry of a `PartitionSpec`, that have several ranks."""
    return tuple(axis for axis in axes_in(part) if mesh.shape.get(axis, 1) > 1)


def axes_in(part: Any) -> Axes:
    """Returns the mesh axes in an entry of a `PartitionSpec`, or of a rule; None has none."""
    if isinstance(part, str):
        return (part,)
    return tuple(part) if isinstance(part, (tuple, list)) else ()


def explicit_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Returns the names of a mesh's Explicit axes, whose shardings are part of array types."""
    return frozenset(mesh.abstract_mesh.explicit_axes)


def reshard(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Reshards an array by `spec` over the mesh's Explicit axes; XLA chooses over the others."""
    explicit = explicit_axes(mesh)
    if not explicit:
        return array
    parts = [_only(part, explicit) for part in spec]
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*parts)))


def shard(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Shards an array by `spec` over a mesh's axes; where entries are None, as XLA chooses."""
    array = reshard(array, mesh, spec)
    auto = frozenset(mesh.axis_names) - explicit_axes(mesh)
    if not auto:
        return array
    # A dimension that only an Explicit axis shards must not get the entry None, which would gather
    # it. UNCONSTRAINED leaves it sharded.
    spec = PartitionSpec(*(_only(part, auto) or PartitionSpec.UNCONSTRAINED for part in spec))
    return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _only(part: Any, axes: frozenset[str]) -> Any:
    if part is None or isinstance(part, str):
        return part if part in axes else None
    return tuple(axis for axis in part if axis in axes) or None


def _callers_batch_axes(
    config: MoEConfig, expert_axes: Axes, tensor_axes: Axes, ambient: AbstractMesh, x: jax.Array
) -> Axes:
    """Returns the axes over which the tokens x are spread in the caller's `jax.shard_map`."""
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


def _batch_axes(config: MoEConfig, expert_axes: Axes, tensor_axes: Axes, axes: Axes) -> Axes:
    """Returns `config.batch_axes`, checked; by default all of `axes` that are no tensor axes."""
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
    """Returns the mesh axes that split the sequence dimension of x [..., sequence, H]."""
    if config.sequence_axes is not None:
        axes = as_axes(config.sequence_axes, "sequence_axes")
        if not set(axes) <= set(batch_axes):
            raise ValueError(f"sequence_axes must be among batch_axes {batch_axes}, but is {axes}.")
        return axes if x.ndim > 2 else ()
    if x.ndim < 3:
        return ()
    # Without the option, they are the Explicit axes of x's type, or none, and x is resharded.
    axes = axes_in(jax.typeof(x).sharding.spec[-2])
    return axes if set(axes) <= set(batch_axes) else ()
