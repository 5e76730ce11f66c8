"""Gathers parameters that fully sharded data parallelism (FSDP) splits over further mesh axes.

A parameter is gathered right before it is used, in the compute dtype, or in float8 if the experts
multiply float8. The transpose is a reduce-scatter in the parameter's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jax_ep.checks import warn
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.matmul.float8 import QuantizedMatrices
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import EXPERT_MATRICES, QuantizedExperts
from jax_ep.moe.mesh import Axes, AxisRules, LayerMesh, axes_in, explicit_axes, large_axes
from jax_ep.moe.params import LOGICAL_AXES, MoEParams
from jax_ep.runtime.jax_compat import is_traced, to_varying, varying_axes

# The name that `checkpoint_name` gives gathered parameters. With it, a policy of `jax.checkpoint`
# decides whether the backward pass keeps them or gathers them again.
GATHERED = "gathered_parameters"

_Dims = tuple[tuple[int, Axes], ...]  # pairs of a dimension and the mesh axes that split it


def with_fsdp_axes(
    where: LayerMesh, params: MoEParams, config: MoEConfig, axis_rules: AxisRules
) -> LayerMesh:
    """Returns `where` with the FSDP axes of each parameter.

    `config.fsdp_axes` gives them; if it is None, the parameters' types and the axis rules do.
    """
    given = config.fsdp_axes_by_logical()
    _check_axes(given, where)
    if where.mesh is None:
        return where
    found = {}
    for name, array in params._asdict().items():
        if array is None:
            continue
        if isinstance(array, QuantizedArray):
            if split := [axis for axis in LOGICAL_AXES[name] if given.get(axis or "")]:
                raise ValueError(
                    f"fsdp_axes must not split {split} where {name} is a QuantizedArray, which the "
                    f"layer does not gather, but is {given}."
                )
            continue
        if config.fsdp_axes is None:
            axes = _axes_by_type_and_rules(name, array, where, axis_rules)
        else:
            axes = _axes_by_option(name, array, where, config, axis_rules)
        if any(axes):
            found[name] = axes
    return where._replace(fsdp_axes=tuple(found.items()))


def _check_axes(given: dict[str, Axes], where: LayerMesh) -> None:
    """Raises ValueError for axes of `fsdp_axes`, `given`, over which the layer cannot gather."""
    bound = set(jax.sharding.get_abstract_mesh().manual_axes)
    if named := [axis for axes in given.values() for axis in axes if axis in bound]:
        raise ValueError(
            f"fsdp_axes must not name {named} in a jax.shard_map that binds them, since the layer "
            "gathers parameters only in its own: gather them before the call, and leave fsdp_axes "
            "at None."
        )
    if where.mesh is None:
        return
    for logical, axes in given.items():
        if wrong := [axis for axis in axes if axis not in where.batch_axes]:
            raise ValueError(
                f"fsdp_axes must name axes over which the tokens are spread, batch_axes "
                f"{where.batch_axes}, but has {wrong} for {logical!r}."
            )


def _axes_by_option(
    name: str, array: jax.Array, where: LayerMesh, config: MoEConfig, axis_rules: AxisRules
) -> tuple[Axes, ...]:
    """Checks and returns, for each dimension of the parameter `name`, its axes of `fsdp_axes`."""
    assert where.mesh is not None
    logical = LOGICAL_AXES[name]
    by_option = config.fsdp_axes_of(logical)
    by_rules = assign_axes(logical, axis_rules)
    ruled = {logical_axis for logical_axis, _ in axis_rules}
    for i, axis in enumerate(logical):
        if not by_option[i]:
            continue
        # FSDP axes follow the expert or tensor axes that split the dimension, if any.
        axes = where.axes_of(name)[i] + by_option[i]
        wanted, meant = large_axes(axes, where.mesh), large_axes(by_rules[i], where.mesh)
        if axis in ruled and meant != wanted:
            raise ValueError(
                f"fsdp_axes must agree with the axis rules, but splits {axis!r} of {name} over "
                f"{wanted}, and the rules over {meant}: the parameter would be moved in each call. "
                "Change the rules, or let the layer read them with fsdp_axes=None."
            )
        if array.shape[i] % where.size(axes):
            raise ValueError(
                f"fsdp_axes must divide each dimension that is split, but {axis!r} of {name} "
                f"{array.shape} has {array.shape[i]}, and {where.size(axes)} ranks are along "
                f"{axes}."
            )
    if name == "wi_0":  # for all parameters: one warning a layer
        _warn_of_copies(array, by_option, where.mesh)
    return tuple(large_axes(axes, where.mesh) for axes in by_option)


def _warn_of_copies(wi_0: Any, fsdp_axes: Sequence[Axes], mesh: Mesh | AbstractMesh) -> None:
    """Warns if wi_0 is on several devices, but is not split over all of its `fsdp_axes`."""
    sharding = getattr(wi_0, "sharding", None)
    if is_traced(wi_0) or not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return
    split_over = {axis for part in sharding.spec for axis in large_axes(part, mesh)}
    wanted = [axis for axes in fsdp_axes for axis in large_axes(axes, mesh)]
    if not split_over.issuperset(wanted):
        warn(
            f"wi_0 of shape {wi_0.shape} is sharded by {sharding.spec}, and not over {wanted} of "
            "fsdp_axes: each rank along them holds a copy. A rule may be missing or misspelled.",
        )


def _axes_by_type_and_rules(
    name: str, array: jax.Array, where: LayerMesh, axis_rules: AxisRules
) -> tuple[Axes, ...]:
    """Finds the FSDP axes to gather over, for each dimension of a parameter; () if none fit."""
    assert where.mesh is not None
    logical, all_base = LOGICAL_AXES[name], where.axes_of(name)
    all_axes = _seen_axes(logical, jax.typeof(array), where.mesh, axis_rules)
    used = {axis for axes in all_base for axis in axes}
    found = []
    # `base` are the expert or tensor axes of a dimension, which FSDP axes must follow.
    for i, (base, axes) in enumerate(zip(all_base, all_axes, strict=True)):
        fsdp_axes = axes[len(base) :] if axes[: len(base)] == base else ()
        if base and not fsdp_axes and name == "wi_0":
            _warn_of_rule(name, str(logical[i]), axes, base, axis_rules)
        # The layer gathers along E only if expert axes split it, too.
        may_be_split = logical[i] is not None and (base or logical[i] != "exp")
        # Tokens must be spread over FSDP axes, which must divide the dimension and split no other.
        fits = may_be_split and set(fsdp_axes) <= set(where.batch_axes) - used
        if not fits or array.shape[i] % where.size(base + fsdp_axes):
            fsdp_axes = ()
        found.append(fsdp_axes)
        used |= set(fsdp_axes)
    return tuple(large_axes(axes, where.mesh) for axes in found)


def _seen_axes(
    logical: Sequence[str | None], kind: Any, mesh: Mesh | AbstractMesh, axis_rules: AxisRules
) -> list[Axes]:
    """Returns the mesh axes that split each dimension of a parameter of the type `kind`."""
    # Types show Explicit axes only, so Auto axes come from the rules.
    explicit = explicit_axes(mesh)
    of_type = (*kind.sharding.spec, *[None] * len(logical))
    by_rules = assign_axes(logical, axis_rules)
    return [
        axes_in(of_type[i]) + tuple(axis for axis in by_rules[i] if axis not in explicit)
        for i in range(len(logical))
    ]


def _warn_of_rule(name: str, logical: str, axes: Axes, base: Axes, axis_rules: AxisRules) -> None:
    """Warns if rules name `base`, the expert or tensor axes, but `axes` do not begin with it."""
    meant = [axes_in(given) for ruled, given in axis_rules if ruled == logical]
    if set(base) < set(axes):
        right = *base, *(axis for axis in axes if axis not in base)
        warn(
            f"{name} is split along {logical!r} over {axes}, where {base} must come first: the "
            "layer does not gather its parts, so XLA moves and gathers whole parameters. Write "
            f"{right} in the axis rules.",
        )
    elif not axes and any(set(base) & set(each) for each in meant):
        warn(
            f"no axis rule splits {name} along {logical!r} over {base}, because a rule before it "
            f"gives its mesh axes to another dimension: every rank holds all of {logical!r}. Put "
            f"the rule of {logical!r} first.",
        )


def assign_axes(logical: Sequence[str | None], axis_rules: AxisRules) -> list[Axes]:
    """Returns each logical axis's mesh axes, by its first rule whose mesh axes are not in use."""
    assigned: dict[str, Axes] = {}
    for name, mesh_axes in axis_rules:
        axes = axes_in(mesh_axes)
        taken = {axis for other in assigned.values() for axis in other}
        if name in logical and name not in assigned and taken.isdisjoint(axes):
            assigned[name] = axes
    return [assigned.get(axis or "", ()) for axis in logical]


def mesh_of_quantized(where: LayerMesh, params: MoEParams) -> LayerMesh:
    """Returns `where`, without FSDP axes if they would cut a float8 block of wi_0, wi_1 or wo."""
    shards = []  # the shape of a rank's shard of each matrix
    for name in EXPERT_MATRICES:
        if (array := getattr(params, name)) is not None:
            dims = zip(array.shape, where.all_axes_of(name), strict=True)
            shards.append(tuple(size // where.size(axes) for size, axes in dims))
    return where if has_whole_blocks(*shards) else where._replace(fsdp_axes=())


def has_whole_blocks(*shapes: tuple[int, ...]) -> bool:
    block = FLOAT8_MATRICES.block
    return not any(n % b for shape in shapes for n, b in zip(shape[1:], block, strict=True))


def gather_params(params: MoEParams, names: tuple[str, ...], where: LayerMesh) -> MoEParams:
    given = {name: array for name in names if (array := getattr(params, name)) is not None}
    return params._replace(**{name: gather(name, a, where) for name, a in given.items()})


def gather(
    name: str, part: jax.Array, where: LayerMesh, dtype: Any = None, *, zeros: bool = False
) -> jax.Array:
    """Gathers the parameter `name` along its FSDP axes from shards, cast to `dtype` if given.

    With `zeros`, a parameter with FSDP axes becomes zeros: matmuls read its float8 copy, and the
    array only takes the gradient back to the shards.
    """
    dims = _dims(name, where)
    dtype = part.dtype if dtype is None else jnp.dtype(dtype)
    if not dims:
        return part.astype(dtype)
    # Ranks that hold the same shard must sum their gradients. If its type varies over all mesh axes
    # of the tokens (vma), JAX sums them after the reduce-scatter, when they are smaller.
    shard = to_varying(part, frozenset(where.batch_axes) - varying_axes(part))
    whole = _gather(dims, dtype, part.dtype, zeros, shard)
    return whole if zeros else checkpoint_name(whole, GATHERED)


def gather_quantized(quantized: QuantizedExperts, where: LayerMesh) -> QuantizedExperts:
    """Gathers the float8 matrices along their FSDP axes, and transposes the gathered ones."""

    def gather_one(name: str, matrices: QuantizedMatrices | None) -> QuantizedMatrices | None:
        if matrices is None or not (dims := _dims(name, where)):
            return matrices

        gathered: QuantizedArray = jax.tree.map(
            lambda a: checkpoint_name(_all_gather(a, dims), GATHERED), matrices.matrices
        )
        transposed = jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), gathered)
        return QuantizedMatrices(gathered, transposed)

    return QuantizedExperts(*(gather_one(*item) for item in quantized._asdict().items()))  # type: ignore


def _dims(name: str, where: LayerMesh) -> _Dims:
    return tuple((i, axes) for i, axes in enumerate(where.fsdp_axes_of(name)) if axes)


def _all_gather(array: jax.Array, dims: _Dims) -> jax.Array:
    for dim, axes in dims:
        array = lax.all_gather(array, axes, axis=dim, tiled=True)
    return array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather(dims: _Dims, dtype: Any, grad_dtype: Any, zeros: bool, part: jax.Array) -> jax.Array:
    """Gathers the shard `part` along `dims`, in `dtype`; or, with `zeros`, makes zeros instead."""
    # The gradient is reduced and scattered in `grad_dtype`, the dtype of the parameter.
    if not zeros:
        return _all_gather(part.astype(dtype), dims)
    shape = list(part.shape)
    for dim, axes in dims:
        shape[dim] *= math.prod(lax.axis_size(axis) for axis in axes)
    return to_varying(jnp.zeros(shape, dtype), varying_axes(part))


def _scatter(dims: _Dims, dtype: Any, grad_dtype: Any, zeros: bool, _: None, grad: jax.Array):
    grad = grad.astype(grad_dtype)
    for dim, axes in reversed(dims):
        grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
    return (grad,)


_gather.defvjp(lambda *args: (_gather(*args), None), _scatter)
